"""flashinfer's older names of the all-reduce. They call the new ones.

Source: flashinfer/comm/trtllm_ar.py and allreduce.py of 0.6.11, 0.7.2 and 0.7.4.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from oxmoe.allreduce.fusion import AllReduceFusionPattern as Pattern
from oxmoe.allreduce.fusion import QuantizationSFLayout, allreduce_fusion, refuse_backend
from oxmoe.allreduce.workspace import AllReduceFusionWorkspace, create_allreduce_fusion_workspace

if TYPE_CHECKING:
    from torch import Tensor, dtype
    from torch.distributed import ProcessGroup

_FP8 = (Pattern.kARResidualRMSNormFP8Quant, Pattern.kARResidualRMSNormOutFP8Quant)
_FP4 = (
    *(Pattern.kARResidualRMSNormFP4Quant, Pattern.kARResidualRMSNormOutFP4Quant),
    *(Pattern.kMoEReductionARResidualRMSNorm, Pattern.kMoEFinalizeARResidualRMSNorm),
)
_MXFP8 = (Pattern.kARResidualRMSNormMXFP8Quant, Pattern.kARResidualRMSNormOutMXFP8Quant)
_WITHOUT_NORM = (
    *(Pattern.kARResidualRMSNormFP8Quant, Pattern.kARResidualRMSNormFP4Quant, Pattern.kARResidualRMSNormMXFP8Quant),
    *(Pattern.kARResidualRMSNormPerTokenGroupFP8PackedQuant, Pattern.kARResidualRMSNormDynamicFP8Quant),
)
_BLOCK = 16


class _Handles(list[Any]):
    """The list of IPC handles, which is empty. It keeps the workspace, so that flashinfer's callers can destroy it."""

    workspace: AllReduceFusionWorkspace | None = None


def TRTLLMAllReduceFusionWorkspace(
    tp_size: int,
    tp_rank: int,
    max_token_num: int,
    hidden_dim: int,
    dtype: dtype | str = "float16",
    comm_backend: Any = None,
    group: ProcessGroup | None = None,
) -> AllReduceFusionWorkspace:
    """flashinfer's constructor of this name: the AllReduceFusionWorkspace of `create_allreduce_fusion_workspace` with
    backend="trtllm"."""
    return create_allreduce_fusion_workspace(
        "trtllm", tp_size, tp_rank, max_token_num, hidden_dim, dtype, comm_backend=comm_backend, group=group
    )


def trtllm_create_ipc_workspace_for_all_reduce_fusion(
    tp_rank: int,
    tp_size: int,
    max_token_num: int,
    hidden_dim: int,
    use_fp32_lamport: bool = False,
    group: ProcessGroup | None = None,
    create_metadata: bool = False,
    comm_backend: Any = None,
    use_symm_dev_mem: bool = False,
) -> tuple[Any, ...]:
    """([], workspace), with create_metadata ([], workspace, its sizes). Collective in `group`, or by comm_backend;
    without both among all ranks, as `create_allreduce_fusion_workspace` says.

    workspace is an AllReduceFusionWorkspace with room for max_token_num x hidden_dim numbers of 2 bytes, or with
    use_fp32_lamport of 4; it stands where flashinfer has a tensor of pointers. Its memory is shared without IPC handles
    of CUDA, so there are none to return. NotImplementedError for use_symm_dev_mem, which returns such handles.
    """
    if use_symm_dev_mem:
        raise NotImplementedError("use_symm_dev_mem: oxmoe's memory has no SymmDeviceMemory; leave it out")
    dtype = "float32" if use_fp32_lamport else "bfloat16"
    workspace = create_allreduce_fusion_workspace(
        "trtllm", tp_size, tp_rank, max_token_num, hidden_dim, dtype, comm_backend=comm_backend, group=group
    )
    handles = _Handles()
    handles.workspace = workspace
    if not create_metadata:
        return handles, workspace
    sizes = {"tp_rank": tp_rank, "tp_size": tp_size, "max_token_num": max_token_num, "hidden_dim": hidden_dim}
    return handles, workspace, sizes | {"use_fp32_lamport": use_fp32_lamport}


def trtllm_destroy_ipc_workspace_for_all_reduce_fusion(
    workspace: AllReduceFusionWorkspace | list[Any], group: ProcessGroup | None = None
) -> None:
    """Frees the workspace's memory. workspace: the first or the second value that
    trtllm_create_ipc_workspace_for_all_reduce_fusion returned. flashinfer's callers pass the first one."""
    if isinstance(workspace, _Handles):
        handles = workspace
        workspace, handles.workspace = handles.workspace or [], None
    if isinstance(workspace, AllReduceFusionWorkspace):
        workspace.destroy()
    elif workspace != []:
        raise ValueError(f"workspace: expected an AllReduceFusionWorkspace, got {type(workspace).__name__}")


def _check_workspace(workspace: Any) -> None:
    if not isinstance(workspace, AllReduceFusionWorkspace):
        raise ValueError(
            "workspace_ptrs: expected the AllReduceFusionWorkspace of oxmoe's "
            f"trtllm_create_ipc_workspace_for_all_reduce_fusion, got {type(workspace).__name__}"
        )


def _check(workspace: AllReduceFusionWorkspace, world_size: int, world_rank: int) -> None:
    for name, given, own in (
        ("world_size", world_size, workspace.world_size),
        ("world_rank", world_rank, workspace.rank),
    ):
        if given != own:
            raise ValueError(f"{name}: expected {own} (of workspace_ptrs), got {given}")


def _rows(name: str, tensor: Tensor | None, rows: int, columns: int) -> Any:
    """Returns the tensor as a matrix, whatever its shape."""
    if tensor is None:
        return None
    if tensor.numel() != rows * columns or not tensor.is_contiguous():
        raise ValueError(f"{name}: expected {rows} x {columns} contiguous numbers, got shape {list(tensor.shape)}")
    return tensor.view(rows, columns)


def _start(name: str, tensor: Tensor, count: int) -> Any:
    """Returns the first `count` bytes of a tensor that flashinfer takes as plain memory, whatever its dtype."""
    import torch

    memory = tensor.numel() * tensor.element_size()
    if not tensor.is_contiguous() or memory < count:
        raise ValueError(f"{name}: expected {count} contiguous bytes, got {memory} of shape {list(tensor.shape)}")
    return tensor.view(-1).view(torch.uint8)[:count]


def read_or_written(pattern: int, operands: dict[str, Any]) -> dict[str, Any]:
    """Returns the operands that a pattern without experts reads or writes."""
    if pattern == Pattern.kAllReduce:
        used = {"output"}
    else:
        used = {"residual_in", "residual_out", "rms_gamma"}
        if pattern not in _WITHOUT_NORM:
            used.add("norm_out")
        if pattern != Pattern.kARResidualRMSNorm:
            used.add("quant_out")
        if pattern not in (*_FP8, Pattern.kARResidualRMSNorm):
            used.add("scale_out")
    return {name: value for name, value in operands.items() if name in used}


def quantised_outputs(
    pattern: int, tokens: int, hidden: int, quant_out: Tensor | None, scale_out: Tensor | None, layout_code: int | None
) -> tuple[Any, Any]:
    """Returns quant_out and scale_out in the form that `allreduce_fusion` takes. For FP8 with one scale and NVFP4,
    flashinfer's callers may give larger memory of any dtype. For MXFP8 quant_out may be flat."""
    if pattern in _MXFP8:
        return _rows("quant_out", quant_out, tokens, hidden), scale_out
    if quant_out is None or pattern not in (*_FP8, *_FP4):
        return quant_out, scale_out
    columns = hidden if pattern in _FP8 else hidden // 2
    codes = _start("quant_out", quant_out, tokens * columns).view(tokens, columns)
    if pattern in _FP8 or scale_out is None:
        return codes, None if pattern in _FP8 else scale_out
    tile = {QuantizationSFLayout.LINEAR: 1, QuantizationSFLayout.SWIZZLED_8x4: 8}.get(layout_code or 0, 128)  # type: ignore[call-overload]
    blocks = hidden // _BLOCK if tile == 1 else -(-hidden // _BLOCK // 4) * 4
    return codes, _start("scale_out", scale_out, -(-tokens // tile) * tile * blocks)


def trtllm_allreduce_fusion(
    allreduce_in: Tensor,
    world_size: int,
    world_rank: int,
    token_num: int,
    hidden_dim: int,
    workspace_ptrs: AllReduceFusionWorkspace,
    launch_with_pdl: bool,
    trigger_completion_at_end: bool,
    fp32_acc: bool,
    pattern_code: int,
    use_oneshot: bool | None,
    allreduce_out: Tensor | None,
    residual_in: Tensor | None,
    residual_out: Tensor | None,
    norm_out: Tensor | None,
    quant_out: Tensor | None,
    scale_out: Tensor | None,
    rms_gamma: Tensor | None,
    rms_eps: float | None,
    scale_factor: Tensor | float | None,
    layout_code: int | None,
    metadata: dict[str, Any] | None = None,
    block_quant_group_size: int | None = None,
    weight_bias: float | None = None,
) -> None:
    """`allreduce_fusion` of tensors that hold token_num x hidden_dim numbers in any shape; workspace_ptrs is what
    trtllm_create_ipc_workspace_for_all_reduce_fusion returned as its second value. metadata has no meaning here.

    As in flashinfer, a tensor that the pattern neither reads nor writes is left alone, and quant_out and scale_out of
    FP8 with one scale and of NVFP4 are memory of any dtype that is large enough.
    """
    _check_workspace(workspace_ptrs)
    try:
        _check(workspace_ptrs, world_size, world_rank)
        x = _rows("allreduce_in", allreduce_in, token_num, hidden_dim)
        codes, scales = quantised_outputs(pattern_code, token_num, hidden_dim, quant_out, scale_out, layout_code)
        operands = {
            "output": _rows("allreduce_out", allreduce_out, token_num, hidden_dim),
            "residual_in": _rows("residual_in", residual_in, token_num, hidden_dim),
            "residual_out": _rows("residual_out", residual_out, token_num, hidden_dim),
            "norm_out": _rows("norm_out", norm_out, token_num, hidden_dim),
            "quant_out": codes,
            "scale_out": scales,
            "rms_gamma": rms_gamma,
        }
        operands = read_or_written(pattern_code, operands)
    except Exception as error:
        workspace_ptrs._withdraw(error, allreduce_in, residual_in)
        raise
    allreduce_fusion(
        x,
        workspace_ptrs,
        pattern_code,
        launch_with_pdl,
        trigger_completion_at_end,
        **operands,
        rms_eps=1e-6 if rms_eps is None else rms_eps,
        scale_factor=None if pattern_code == Pattern.kAllReduce else scale_factor,
        layout_code=layout_code,
        use_oneshot=use_oneshot,
        fp32_acc=fp32_acc,
        block_quant_group_size=block_quant_group_size,
        weight_bias=0.0 if weight_bias is None else weight_bias,
    )


def trtllm_moe_allreduce_fusion(
    world_size: int,
    world_rank: int,
    token_num: int,
    hidden_dim: int,
    workspace_ptrs: AllReduceFusionWorkspace,
    launch_with_pdl: bool,
    residual_in: Tensor,
    rms_gamma: Tensor,
    rms_eps: float,
    scale_factor: Tensor | float | None,
    moe_reduction_device_num_experts: int,
    moe_reduction_scale_input: Tensor,
    moe_reduction_active_experts_token_input: Tensor,
    moe_reduction_token_input: Tensor,
    layout_code: int | None,
    moe_allreduce_out: Tensor | None,
    residual_out: Tensor | None,
    norm_out: Tensor | None,
    quant_out: Tensor | None,
    scale_out: Tensor | None,
    weight_bias: float | None = None,
    *,
    backend: str = "trtllm",
) -> None:
    """`allreduce_fusion` with kMoEReductionARResidualRMSNorm, of tensors in any shape: moe_reduction_scale_input fp32
    [experts, token_num], moe_reduction_active_experts_token_input [experts x token_num, hidden_dim], the others
    [token_num, hidden_dim]."""
    pattern, experts = Pattern.kMoEReductionARResidualRMSNorm, moe_reduction_device_num_experts
    _check_workspace(workspace_ptrs)
    try:
        _check(workspace_ptrs, world_size, world_rank)
        if backend != "trtllm":
            refuse_backend("backend", backend)
        codes, scales = quantised_outputs(pattern, token_num, hidden_dim, quant_out, scale_out, layout_code)
        tokens = _rows("moe_reduction_token_input", moe_reduction_token_input, token_num, hidden_dim)
        operands = {
            "output": _rows("moe_allreduce_out", moe_allreduce_out, token_num, hidden_dim),
            "residual_in": _rows("residual_in", residual_in, token_num, hidden_dim),
            "residual_out": _rows("residual_out", residual_out, token_num, hidden_dim),
            "norm_out": _rows("norm_out", norm_out, token_num, hidden_dim),
            "quant_out": codes,
            "scale_out": scales if codes is not None else None,
            "moe_reduction_scale_input": _rows(
                "moe_reduction_scale_input", moe_reduction_scale_input, experts, token_num
            ),
            "moe_reduction_active_experts_token_input": _rows(
                "moe_reduction_active_experts_token_input",
                moe_reduction_active_experts_token_input,
                experts * token_num,
                hidden_dim,
            ),
            "moe_reduction_token_input": tokens,
        }
    except Exception as error:
        workspace_ptrs._withdraw(error, moe_reduction_token_input, residual_in)
        raise
    allreduce_fusion(
        tokens,
        workspace_ptrs,
        pattern,
        launch_with_pdl,
        **operands,
        rms_gamma=rms_gamma,
        rms_eps=rms_eps,
        scale_factor=scale_factor,
        layout_code=layout_code,
        moe_reduction_device_num_experts=experts,
        weight_bias=0.0 if weight_bias is None else weight_bias,
    )


def trtllm_moe_finalize_allreduce_fusion(
    allreduce_in: Tensor,
    residual_in: Tensor,
    norm_weight: Tensor,
    expanded_idx_to_permuted_idx: Tensor,
    norm_out: Tensor | None,
    residual_out: Tensor | None,
    quant_out: Tensor | None,
    scale_out: Tensor | None,
    workspace_ptrs: AllReduceFusionWorkspace,
    launch_with_pdl: bool,
    world_rank: int,
    world_size: int,
    eps: float,
    shared_expert_output: Tensor | None,
    expert_scale_factor: Tensor | None,
    routed_scaling_factor: float | None,
    weight_bias: float | None = None,
    *,
    backend: str = "trtllm",
) -> None:
    """`allreduce_fusion` with kMoEFinalizeARResidualRMSNorm. A routed_scaling_factor multiplies expert_scale_factor in
    fp32, which is an operation of torch before the call. NotImplementedError for quant_out and scale_out: flashinfer's
    call has no argument for their scale."""
    _check_workspace(workspace_ptrs)
    try:
        _check(workspace_ptrs, world_size, world_rank)
        if backend != "trtllm":
            refuse_backend("backend", backend)
        if quant_out is not None or scale_out is not None:
            raise NotImplementedError(
                "trtllm_moe_finalize_allreduce_fusion: quant_out and scale_out have no scale_factor in this call; "
                "`allreduce_fusion` with kMoEFinalizeARResidualRMSNorm takes all three"
            )
        weights: Any = expert_scale_factor
        if routed_scaling_factor not in (None, 1.0):
            if weights is None:
                weights = allreduce_in.new_ones(expanded_idx_to_permuted_idx.shape)
            weights = weights.float() * routed_scaling_factor
    except Exception as error:
        workspace_ptrs._withdraw(error, allreduce_in, residual_in)
        raise
    allreduce_fusion(
        allreduce_in,
        workspace_ptrs,
        Pattern.kMoEFinalizeARResidualRMSNorm,
        launch_with_pdl,
        residual_in=residual_in,
        residual_out=residual_out,
        norm_out=norm_out,
        rms_gamma=norm_weight,
        rms_eps=eps,
        expanded_idx_to_permuted_idx=expanded_idx_to_permuted_idx,
        expert_scale_factor=weights,
        shared_expert_output=shared_expert_output,
        weight_bias=0.0 if weight_bias is None else weight_bias,
    )
