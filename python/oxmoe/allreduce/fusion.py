"""Fused all-reduce + residual + RMSNorm (+ quantisation) with flashinfer's names, values and meanings.

Every rank adds all ranks' rows itself, in rank order in fp32. So all get the same bits in every run, on CPUs and on
GPUs. CPU tensors travel through their process group. Between GPUs kernels write into memory that all ranks map.
Nothing waits for ever: a peer that does not come, or is gone, is a TimeoutError that names it.
"""

from __future__ import annotations

import inspect
import operator
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NoReturn

from oxmoe.allreduce.workspace import AllReduceFusionWorkspace
from oxmoe.functions import quantize_mxfp8
from oxmoe.operands import WRONG_TYPES, check_tensor, name_argument

if TYPE_CHECKING:
    from torch import Tensor


_GROUP = 32  # columns that share a scale of MXFP8


class AllReduceFusionPattern(IntEnum):
    """flashinfer's patterns (flashinfer/comm/trtllm_ar.py).

    The sum over ranks is followed by residual add, RMSNorm and quantisation. "Out" patterns write norm_out as well
    as the quantised norm. 12 to 14 are of flashinfer 0.7.4; kMoEFinalizeARResidualRMSNormFP8Quant is refused, as
    flashinfer has it between NVLink multicast's GPUs alone.
    """

    kAllReduce = 0
    kARResidualRMSNorm = 1
    kARResidualRMSNormFP8Quant = 2
    kARResidualRMSNormFP4Quant = 3
    kARResidualRMSNormOutFP8Quant = 4
    kARResidualRMSNormOutFP4Quant = 5
    kMoEReductionARResidualRMSNorm = 6
    kMoEFinalizeARResidualRMSNorm = 7
    kARResidualRMSNormPerTokenGroupFP8PackedQuant = 8
    kARResidualRMSNormOutPerTokenGroupFP8PackedQuant = 9
    kARResidualRMSNormDynamicFP8Quant = 10
    kARResidualRMSNormOutDynamicFP8Quant = 11
    kMoEFinalizeARResidualRMSNormFP8Quant = 12
    kARResidualRMSNormMXFP8Quant = 13
    kARResidualRMSNormOutMXFP8Quant = 14


class QuantizationSFLayout(IntEnum):
    """The layout of NVFP4's block scales; r = row, b = block of 16 values, B = hidden / 16 rounded up to 4.

    SWIZZLED_128x4: [rows / 128][B / 4][r % 32][r % 128 / 32][b % 4]; SWIZZLED_8x4: [rows / 8][B / 4][r % 8][b % 4],
    rows rounded up; LINEAR: [rows, hidden / 16]. Padding is written as 0.
    """

    SWIZZLED_128x4 = 0
    SWIZZLED_8x4 = 1
    LINEAR = 2


@dataclass(frozen=True)
class _Operands:
    """The arguments of one call, as the extension reads them."""

    input: Any
    pattern: int
    output: Any
    residual_out: Any
    norm_out: Any
    quant_out: Any
    scale_out: Any
    residual_in: Any
    rms_gamma: Any
    rms_eps: float
    scale_factor: Any
    layout_code: int | None
    moe_reduction_device_num_experts: int | None
    moe_reduction_scale_input: Any
    moe_reduction_active_experts_token_input: Any
    moe_reduction_token_input: Any
    expanded_idx_to_permuted_idx: Any
    expert_scale_factor: Any
    shared_expert_output: Any
    block_quant_group_size: int | None
    weight_bias: float


def takes(function: Any, *names: str) -> bool:
    """Whether a callable takes these keyword arguments. It is used for calls of other packages whose versions
    differ. It never raises: a callable without a signature (builtins, operators of torch.ops) counts as no."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return True
    positional = inspect.Parameter.POSITIONAL_ONLY
    return all(name in parameters and parameters[name].kind is not positional for name in names)


def allreduce_fusion(
    input: Tensor,
    workspace: AllReduceFusionWorkspace,
    pattern: int,
    launch_with_pdl: bool = False,
    trigger_completion_at_end: bool = True,
    output: Tensor | None = None,
    residual_out: Tensor | None = None,
    norm_out: Tensor | None = None,
    quant_out: Tensor | None = None,
    scale_out: Tensor | None = None,
    residual_in: Tensor | None = None,
    rms_gamma: Tensor | None = None,
    rms_eps: float = 1e-6,
    scale_factor: Tensor | float | None = None,
    layout_code: int | None = None,
    use_oneshot: bool | None = None,
    fp32_acc: bool = False,
    moe_reduction_device_num_experts: int | None = None,
    moe_reduction_scale_input: Tensor | None = None,
    moe_reduction_active_experts_token_input: Tensor | None = None,
    moe_reduction_token_input: Tensor | None = None,
    expanded_idx_to_permuted_idx: Tensor | None = None,
    expert_scale_factor: Tensor | None = None,
    shared_expert_output: Tensor | None = None,
    block_quant_group_size: int | None = None,
    weight_bias: float = 0.0,
    *,
    moe_finalize_backend: str = "trtllm",
    deadline: float | None = None,
) -> Tensor:
    """Adds all ranks' rows, with residual add, RMSNorm and quantisation as `pattern` says. The call is collective.

    It writes the given outputs, and returns the first of norm_out, quant_out, residual_out and output that there is.

    s = T(sum of input over ranks, in rank order in fp32); output = s. r = T(s + residual_in) = residual_out;
    norm_out = T(r / sqrt(mean(r^2) + rms_eps) * (weight_bias + rms_gamma)), in fp32, T the dtype of input (bf16, f16,
    fp32). input, residual_in and [T, H] outputs are contiguous; H is a multiple of 16 bytes; rms_gamma [H].
    An output may be residual_in itself, and input itself except in the MoE patterns. Otherwise no two tensors may
    overlap. quant_out is made from norm_out:

    - FP8: e4m3 [T, H], saturating, norm x (1 / scale_factor).
    - FP4: NVFP4, e2m1 pairs uint8 [T, H / 2], low nibble first, and one e4m3 scale per 16 values,
      e4m3(scale_factor x amax / 6), laid out by layout_code (`QuantizationSFLayout`, default SWIZZLED_128x4).
    - PerTokenGroupFP8Packed: e4m3 with a scale 2^n per block_quant_group_size values, max(amax / 448, 1e-10) rounded
      up; exponent bytes (UE8M0) packed in scale_out int32 [T, ceil(groups / 4)], strides (1, T rounded up to 4).
    - DynamicFP8: e4m3 with scale_out fp32 [T, 1] = max(amax / 448, 2^-9 / 448).
    - MXFP8: what `mxfp8_quantize` makes of the norm, e4m3 [T, H] and scale_out uint8, flat, of as many E8M0 bytes or
      more, by layout_code SWIZZLED_128x4 (default) or LINEAR. H is a multiple of 32; tensors are torch's. The
      quantiser and two copies are launches after the all-reduce. Returns quant_out.

    kMoEFinalize: the contribution is sum_j expert_scale_factor[t, j] x input[expanded_idx_to_permuted_idx[t, j]]
    (int32, -1: none) + shared_expert_output[t]; kMoEReduction: sum_e moe_reduction_scale_input[e, t] (fp32 [E, T]) x
    moe_reduction_active_experts_token_input[e T + t] + moe_reduction_token_input[t]; both in fp32, rounded once, and
    with all outputs optional (quant_out: NVFP4). kAllReduce without output and kMoEFinalize without norm_out allocate
    it.

    moe_finalize_backend: "trtllm"; flashinfer's "cake" is refused.
    launch_with_pdl, trigger_completion_at_end and use_oneshot do not change the result. Sums are fp32 with any
    fp32_acc. use_oneshot must be the same on all ranks; it matters between 4 or 8 GPUs, if the workspace has room
    for it.
    deadline: seconds, in place of the workspace's deadline.

    CUDA tensors are contiguous, start at multiples of 16 bytes, and are on the workspace's GPU. The call is one
    launch on torch's current stream, also in a CUDA graph, and synchronises nothing. Use one stream at a time. Rows
    have up to 64 KB (16 KB before sm_90), and scale groups have 16 x 2^n bytes up to 512. rms_gamma is a weight: the
    kernel right before must not write it. scale_factor may be on the GPU, too. expanded_idx_to_permuted_idx is not
    checked: a number that is not a row makes the token NaN. A fault on the GPU is raised by the next call, or by
    `workspace.check()`. A rank that raises launches nothing, so the others find it missing, or its next call
    disagrees with theirs.

    A ValueError names a wrong, missing or unused operand, or ranks whose patterns or shapes differ. It comes on all
    ranks, and the workspace stays usable, except on GPUs if shapes differ. A RuntimeError says that another rank
    refused the call. A TimeoutError names rank, peer, epoch and shape of a wait that took too long or whose peer is
    gone; the workspace then stays failed. A NotImplementedError says that the workspace's device does not serve
    these tensors or this pattern.
    """
    if not isinstance(workspace, AllReduceFusionWorkspace):
        raise ValueError(f"workspace: expected an oxmoe AllReduceFusionWorkspace, got {type(workspace).__name__}")
    mxfp8: _Mxfp8 | None = None
    try:
        try:
            pattern = operator.index(pattern)
            seconds = workspace._seconds(deadline)
            if moe_finalize_backend != "trtllm":
                refuse_backend("moe_finalize_backend", moe_finalize_backend)
            elif pattern == AllReduceFusionPattern.kMoEFinalizeARResidualRMSNormFP8Quant:
                _refuse_finalize_to_fp8()
            elif pattern in _OF_MXFP8:
                mxfp8 = _Mxfp8(pattern, input, norm_out, quant_out, scale_out, layout_code)
                mxfp8.check()
                norm_out = mxfp8.norm
                quant_out, scale_out, layout_code = None, None, None
            if pattern == AllReduceFusionPattern.kAllReduce and output is None:
                output = _empty_like(input)
            if pattern == AllReduceFusionPattern.kMoEFinalizeARResidualRMSNorm and norm_out is None:
                norm_out = _empty_like(residual_in)
        except WRONG_TYPES as error:
            name_argument(error, allreduce_fusion, locals())
            raise
    except Exception as error:
        workspace._withdraw(error, input, residual_in)
        raise
    operands = _Operands(
        input=input,
        pattern=pattern,
        output=output,
        residual_out=residual_out,
        norm_out=norm_out,
        quant_out=quant_out,
        scale_out=scale_out,
        residual_in=residual_in,
        rms_gamma=rms_gamma,
        rms_eps=rms_eps,
        scale_factor=scale_factor,
        layout_code=layout_code,
        moe_reduction_device_num_experts=moe_reduction_device_num_experts,
        moe_reduction_scale_input=moe_reduction_scale_input,
        moe_reduction_active_experts_token_input=moe_reduction_active_experts_token_input,
        moe_reduction_token_input=moe_reduction_token_input,
        expanded_idx_to_permuted_idx=expanded_idx_to_permuted_idx,
        expert_scale_factor=expert_scale_factor,
        shared_expert_output=shared_expert_output,
        block_quant_group_size=block_quant_group_size,
        weight_bias=weight_bias,
    )
    result = workspace._run(operands, seconds, use_oneshot)
    return result if mxfp8 is None else mxfp8.quantise()


_OF_MXFP8 = (
    AllReduceFusionPattern.kARResidualRMSNormMXFP8Quant,
    AllReduceFusionPattern.kARResidualRMSNormOutMXFP8Quant,
)


def _refuse_finalize_to_fp8() -> NoReturn:
    raise NotImplementedError(
        "pattern: no kernel for kMoEFinalizeARResidualRMSNormFP8Quant, which flashinfer has for NVLink multicast "
        "alone; served is kMoEFinalizeARResidualRMSNorm"
    )


def refuse_backend(name: str, backend: str) -> NoReturn:
    if backend == "cake":
        raise NotImplementedError(
            f'{name}: no kernel for "cake", which flashinfer has for Blackwell; served is "trtllm"'
        )
    raise ValueError(f'{name}: expected "trtllm", got {backend!r}')


class _Mxfp8:
    """The quantisation to MXFP8 after an all-reduce with kARResidualRMSNorm."""

    def __init__(
        self, pattern: int, input: Any, norm_out: Any, quant_out: Any, scale_out: Any, layout_code: int | None
    ) -> None:
        self.name = AllReduceFusionPattern(pattern).name
        self.input, self.quant_out, self.scale_out = input, quant_out, scale_out
        self.layout = QuantizationSFLayout.SWIZZLED_128x4 if layout_code is None else layout_code
        self.needs_norm = pattern == AllReduceFusionPattern.kARResidualRMSNormOutMXFP8Quant
        self.norm_given = norm_out is not None
        self.norm = norm_out if self.needs_norm or self.norm_given else _empty_like(input)
        self.scales = 0

    def check(self) -> None:
        """Checks what `kARResidualRMSNorm` knows nothing of."""
        import torch

        if not isinstance(self.input, torch.Tensor):
            raise NotImplementedError(f"input: {self.name} takes torch's tensors, got {type(self.input).__name__}")
        if self.norm_given != self.needs_norm:
            fault = "neither reads nor writes it; pass None" if self.norm_given else "needs it, got None"
            raise ValueError(f"norm_out: pattern {self.name} {fault}")
        check_tensor("input", self.input, "T", "H")
        tokens, hidden = self.input.shape
        if hidden % _GROUP:
            raise ValueError(f'input: dimension 1 "H": expected a multiple of {_GROUP} for MXFP8, got {hidden}')
        for name, tensor in (("quant_out", self.quant_out), ("scale_out", self.scale_out)):
            if tensor is None:
                raise ValueError(f"{name}: pattern {self.name} needs it, got None")
            check_tensor(name, tensor)
            if tensor.device != self.input.device:
                raise ValueError(f"{name}: expected device {self.input.device} (of input), got {tensor.device}")
            if not tensor.is_contiguous():
                raise ValueError(f"{name}: expected a contiguous tensor, got strides {tensor.stride()}")
        codes = self.quant_out
        if codes.dtype != torch.float8_e4m3fn or codes.shape != self.input.shape:
            got = f"{str(codes.dtype).rpartition('.')[2]} {list(codes.shape)}"
            raise ValueError(f"quant_out: expected float8_e4m3fn [{tokens}, {hidden}], got {got}")
        groups = hidden // _GROUP
        if self.layout == QuantizationSFLayout.SWIZZLED_128x4:
            self.scales = -(-tokens // 128) * 128 * (-(-groups // 4) * 4)
        elif self.layout == QuantizationSFLayout.LINEAR:
            self.scales = tokens * groups
        else:
            raise ValueError(f"layout_code: expected SWIZZLED_128x4 (0) or LINEAR (2) for MXFP8, got {self.layout}")
        if self.scale_out.dtype != torch.uint8 or self.scale_out.numel() < self.scales:
            got = f"{self.scale_out.numel()} of {str(self.scale_out.dtype).rpartition('.')[2]}"
            raise ValueError(f"scale_out: expected {self.scales} or more of uint8, got {got}")

    def quantise(self) -> Any:
        linear = self.layout == QuantizationSFLayout.LINEAR
        codes, scales = quantize_mxfp8(self.norm, layout="linear" if linear else "128x4")
        self.quant_out.copy_(codes)
        self.scale_out.view(-1)[: self.scales].copy_(scales)
        return self.quant_out


def _empty_like(tensor: Any) -> Any:
    """Returns a new tensor of the same package. For what is not a tensor it returns None; the contract refuses it by
    its own name before it looks for the output."""
    if hasattr(tensor, "new_empty"):
        return tensor.new_empty(tensor.shape)
    if type(tensor).__module__ == "numpy":
        import numpy

        return numpy.empty_like(tensor)
    return None
