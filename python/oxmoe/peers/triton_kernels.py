"""SGLang's `triton_kernel_fused_experts_with_bias` on triton_kernels' MXFP4 weights, which `moe` runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from oxmoe import quantize
from oxmoe._oxmoe import ExpertWeights
from oxmoe.functions import moe
from oxmoe.operands import WRONG_TYPES, as_bytes, check_tensor, checked_arguments, name_argument
from oxmoe.peers.kept import Cache
from oxmoe.peers.topk_forms import routing_arguments, slots_of

if TYPE_CHECKING:
    from torch import Tensor

cache = Cache()
_SERVED = "served are MXFP4 weights that triton_kernels holds in HopperMXValueLayout or StridedLayout"


def _storage(operand: str, wrapped: Any) -> tuple[Tensor, Any]:
    """Returns (memory, layout) of a triton_kernels.tensor.Tensor."""
    storage: Any = getattr(wrapped, "storage", None)
    if not hasattr(storage, "data") or not hasattr(storage, "layout"):
        raise NotImplementedError(f"{operand}: no kernel for {type(wrapped).__name__}; {_SERVED}")
    return storage.data, storage.layout


def _scale_of(operand: str, config: Any) -> Any:
    """Returns the weight's scale in a PrecisionConfig: `weight_scale` in triton_kernels 3.6, `b_mx_scale` in 3.8."""
    for name in ("weight_scale", "b_mx_scale"):
        scale = getattr(config, name, None)
        if scale is not None:
            return scale
    raise NotImplementedError(f"{operand}: has no weight_scale and no b_mx_scale; {_SERVED}")


def _matrix(operand: str, weight: Any, config: Any) -> tuple[Tensor, Tensor]:
    """Returns copies (codes [E, N, K / 2], scales [E, N, K / 32]) of a weight [E, K, N]."""
    import torch

    codes, layout = _storage(operand, weight)
    scales, scale_layout = _storage(f"{operand}_pcg", _scale_of(f"{operand}_pcg", config))
    codes, scales = as_bytes(operand, codes), as_bytes(f"{operand}_pcg", scales)
    _, columns, rows = weight.shape
    name, scale_name = type(layout).__name__, type(scale_layout).__name__
    if (name, scale_name) == ("HopperMXValueLayout", "HopperMXScaleLayout") and layout.mma_version == 3:
        sizes = {"rows": int(rows), "columns": int(columns), "num_warps": scale_layout.num_warps}
        return quantize.unswizzle_hopper_mxfp4(codes, scales, **sizes)
    if (name, scale_name) != ("StridedLayout", "StridedLayout"):
        raise NotImplementedError(f"{operand}: no kernel for layouts {name} and {scale_name}; {_SERVED}")
    groups = columns // 32  # SGLang pads scales, not codes
    return tuple(  # type: ignore[return-value]
        part.transpose(1, 2).clone(memory_format=torch.contiguous_format) for part in (codes, scales[:, :groups])
    )


@checked_arguments
def prepare_triton_kernel_experts(
    w1: Any,
    w1_pcg: Any,
    b1: Tensor | None,
    w2: Any,
    w2_pcg: Any,
    b2: Tensor | None,
    *,
    gemm1_alpha: float,
    gemm1_clamp_limit: float | None,
) -> ExpertWeights:
    """Makes ExpertWeights of a `triton_kernel` layer of SGLang on Hopper, once, at load.

    w1 [E, H, 2I] and w2 [E, I, H] are triton_kernels tensors (3.6 or 3.8) of FP4. w1_pcg and w2_pcg are their
    PrecisionConfig, which has the scales. b1 [E, 2I] and b2 [E, H] are fp32 or bf16. Gate and up columns alternate
    (GPT-OSS): g <= limit, |u| <= limit, g sigmoid(alpha g) (u + 1). The result holds copies of weights and scales,
    made on their device.
    """
    (w13, w13_scale), (down, w2_scale) = _matrix("w1", w1, w1_pcg), _matrix("w2", w2, w2_pcg)
    options: dict[str, Any] = {"alpha": gemm1_alpha, "beta": 1.0, "limit": gemm1_clamp_limit}
    return ExpertWeights.mxfp4(w13, down, w13_scale, w2_scale, b13=b1, b2=b2, layout="interleaved", **options)


def triton_kernel_fused_experts_with_bias(
    hidden_states: Tensor,
    w1: Any,
    w1_pcg: Any,
    b1: Tensor | None,
    w2: Any,
    w2_pcg: Any,
    b2: Tensor | None,
    *,
    routing_data: Any = None,
    a_ragged_metadata: Any = None,
    gather_indx: Any = None,
    scatter_indx: Any = None,
    gate_scal: Tensor | None = None,
    n_expts_act: int | None = None,
    topk_output: Any = None,
    inplace: bool = False,
    activation: str = "silu",
    apply_router_weight_on_input: bool = False,
    use_fp8_w8a8: bool = False,
    per_channel_quant: bool = False,
    global_num_experts: int = -1,
    expert_map: Tensor | None = None,
    w1_scale: Tensor | None = None,
    w2_scale: Tensor | None = None,
    a1_scale: Tensor | None = None,
    a2_scale: Tensor | None = None,
    block_shape: list[int] | None = None,
    gemm1_alpha: float | None = None,
    gemm1_clamp_limit: float | None = None,
    weights: ExpertWeights | None = None,
    output: Tensor | None = None,
) -> Tensor:
    """SGLang's call, by keyword; hidden_states bf16 [T, H], weights as in `prepare_triton_kernel_experts`. Routing is

    - routing_data, gather_indx and scatter_indx (SGLang 0.5.12): returns [T, H], the weighted sum;
    - a_ragged_metadata, gather_indx, scatter_indx, gate_scal and n_expts_act (0.5.23): returns [T k, H], the weighted
      rows, which SGLang adds up itself;
    - topk_output, of any form (bypassed: routed here): returns [T, H]. The fastest are the standard and the bypassed
      form: triton_kernels' tables are first turned back into ids.

    `output` [T, H] takes the sum where given. Without tokens nothing is looked at. weights: what
    prepare_triton_kernel_experts made, in place of w1 to b2 and gemm1_*; without it ExpertWeights are made at the first
    call and kept while the tensors live (`oxmoe.peers.triton_kernels.cache`). activation has no meaning, as in SGLang.
    """
    try:
        unserved = {
            "inplace": inplace,
            "apply_router_weight_on_input": apply_router_weight_on_input,
            "use_fp8_w8a8": use_fp8_w8a8,
            "per_channel_quant": per_channel_quant,
            "expert_map": expert_map is not None,
            "w1_scale": w1_scale is not None,
            "w2_scale": w2_scale is not None,
            "a1_scale": a1_scale is not None,
            "a2_scale": a2_scale is not None,
            "block_shape": block_shape is not None,
        }
        if any(unserved.values()):
            given = ", ".join(name for name, used in unserved.items() if used)
            raise NotImplementedError(f"triton_kernel_fused_experts_with_bias: no kernel for {given}; {_SERVED}")
        check_tensor("hidden_states", hidden_states, "T", "H")
        forms = [form is not None for form in (routing_data, a_ragged_metadata, topk_output)]
        if sum(forms) != 1:
            raise ValueError("routing: expected one of routing_data, a_ragged_metadata and topk_output")
        if topk_output is None and scatter_indx is None:
            raise NotImplementedError("scatter_indx: needed (rows are returned in the order of their tokens)")
        if a_ragged_metadata is not None and output is not None:
            raise ValueError("output: takes the sum, and with a_ragged_metadata rows are returned")
        if hidden_states.shape[0] == 0:
            return hidden_states.new_empty(hidden_states.shape) if output is None else output
        if weights is None:
            weights = _kept((w1, w1_pcg, b1, w2, w2_pcg, b2), gemm1_alpha, gemm1_clamp_limit)
        if topk_output is not None:
            return moe(hidden_states, weights, **routing_arguments(topk_output), out=output)
        if routing_data is not None:
            tables = routing_data.expt_hist, scatter_indx.dst_indx, routing_data.gate_scal, routing_data.n_expts_act
            return moe(hidden_states, weights, *slots_of(*tables), out=output)
        if gate_scal is None or n_expts_act is None:
            raise ValueError("gate_scal and n_expts_act: needed with a_ragged_metadata")
        routed = slots_of(a_ragged_metadata.slice_sizes, scatter_indx, gate_scal, n_expts_act)
        rows = moe(hidden_states, weights, *routed, no_combine=True, keep_router_weight=True)
        return rows.view(-1, rows.shape[-1])
    except WRONG_TYPES as error:
        name_argument(error, triton_kernel_fused_experts_with_bias, locals())
        raise


def _kept(operands: tuple[Any, ...], alpha: float | None, limit: float | None) -> ExpertWeights:
    w1, w1_pcg, b1, w2, w2_pcg, b2 = operands
    if alpha is None:
        raise ValueError("gemm1_alpha: needed (1.702 for GPT-OSS)")
    owners = [
        _storage(operand, wrapped)[0]
        for operand, wrapped in (
            ("w1", w1),
            ("w2", w2),
            ("w1_pcg", _scale_of("w1_pcg", w1_pcg)),
            ("w2_pcg", _scale_of("w2_pcg", w2_pcg)),
        )
    ]
    return cache.get(
        owners,
        (b1, b2),
        (alpha, limit),
        lambda: prepare_triton_kernel_experts(*operands, gemm1_alpha=alpha, gemm1_clamp_limit=limit),
    )
