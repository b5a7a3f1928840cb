"""flashinfer's older names of the all-reduce, served by the new ones.

Source: flashinfer/comm/trtllm_ar.py of 0.6.11 and 0.7.2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from oxmoe.allreduce.fusion import allreduce_fusion
from oxmoe.allreduce.workspace import AllReduceFusionWorkspace, create_allreduce_fusion_workspace

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup


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
    """([], workspace), with create_metadata ([], workspace, its sizes). Collective in `group`, or by comm_backend.

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
    if not create_metadata:
        return [], workspace
    sizes = {"tp_rank": tp_rank, "tp_size": tp_size, "max_token_num": max_token_num, "hidden_dim": hidden_dim}
    return [], workspace, sizes | {"use_fp32_lamport": use_fp32_lamport}


def trtllm_destroy_ipc_workspace_for_all_reduce_fusion(
    workspace: AllReduceFusionWorkspace, group: ProcessGroup | None = None
) -> None:
    """Gives the workspace's memory back. flashinfer's callers pass the first value that was returned, which is empty
    here: pass the second one, or let it go."""
    if isinstance(workspace, AllReduceFusionWorkspace):
        workspace.destroy()
    elif workspace != []:
        raise ValueError(f"workspace: expected an AllReduceFusionWorkspace, got {type(workspace).__name__}")


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
    trtllm_create_ipc_workspace_for_all_reduce_fusion returned as its second value. metadata has no meaning here."""
    if not isinstance(workspace_ptrs, AllReduceFusionWorkspace):
        raise ValueError(
            "workspace_ptrs: expected the AllReduceFusionWorkspace of oxmoe's "
            f"trtllm_create_ipc_workspace_for_all_reduce_fusion, got {type(workspace_ptrs).__name__}"
        )
    for name, given, own in (
        ("world_size", world_size, workspace_ptrs.world_size),
        ("world_rank", world_rank, workspace_ptrs.rank),
    ):
        if given != own:
            raise ValueError(f"{name}: expected {own} (of workspace_ptrs), got {given}")

    def rows(name: str, tensor: Tensor | None, columns: int) -> Tensor | None:
        if tensor is None:
            return None
        if tensor.numel() != token_num * columns or not tensor.is_contiguous():
            raise ValueError(
                f"{name}: expected {token_num} x {columns} contiguous numbers, got shape {list(tensor.shape)}"
            )
        return tensor.view(token_num, columns)

    quantised = quant_out
    if quantised is not None and token_num > 0:
        quantised = rows("quant_out", quantised, quantised.numel() // token_num)
    x = rows("allreduce_in", allreduce_in, hidden_dim)
    assert x is not None
    allreduce_fusion(
        x,
        workspace_ptrs,
        pattern_code,
        launch_with_pdl,
        trigger_completion_at_end,
        output=rows("allreduce_out", allreduce_out, hidden_dim),
        residual_in=rows("residual_in", residual_in, hidden_dim),
        residual_out=rows("residual_out", residual_out, hidden_dim),
        norm_out=rows("norm_out", norm_out, hidden_dim),
        quant_out=quantised,
        scale_out=scale_out,
        rms_gamma=rms_gamma,
        rms_eps=1e-6 if rms_eps is None else rms_eps,
        scale_factor=scale_factor,
        layout_code=layout_code,
        use_oneshot=use_oneshot,
        fp32_acc=fp32_acc,
        block_quant_group_size=block_quant_group_size,
        weight_bias=0.0 if weight_bias is None else weight_bias,
    )
