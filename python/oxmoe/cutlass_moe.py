"""flashinfer's `cutlass_fused_moe` with MXFP4 weights as SGLang calls it on Hopper, served by `moe`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from oxmoe import quantize
from oxmoe._oxmoe import ExpertWeights
from oxmoe.dispatch import moe
from oxmoe.prepared import Cache, number
from oxmoe.topk_output import routing_arguments

if TYPE_CHECKING:
    from torch import Tensor

SWIGLU = 3  # flashinfer's ActivationType.Swiglu
# Where the limit bounds the gate, relative to its SiLU.
_CLAMPS: dict[str, Any] = {"Swiglu": "before", "SwigluStep": "after"}
cache = Cache()


def _activation(activation_type: Any) -> str:
    """NOTE: by name: flashinfer 0.6.11 and 0.7.2 number the other types differently."""
    name = getattr(activation_type, "name", "Swiglu" if activation_type == SWIGLU else activation_type)
    if name not in _CLAMPS:
        raise NotImplementedError(
            f"activation_type: no kernel for {name!r}; served are flashinfer's ActivationType.Swiglu (3) and SwigluStep"
        )
    return name


def _name(dtype: Any) -> Any:
    """torch.bfloat16 to "bf16", as ExpertWeights names it."""
    name = str(dtype).rpartition(".")[2]
    return {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}.get(name, name)


def prepare_cutlass_fused_moe(
    fc1_expert_weights: Tensor,
    fc2_expert_weights: Tensor,
    quant_scales: Sequence[Tensor],
    fc1_expert_biases: Tensor | None = None,
    fc2_expert_biases: Tensor | None = None,
    swiglu_alpha: Tensor | None = None,
    swiglu_beta: Tensor | None = None,
    swiglu_limit: Tensor | None = None,
    *,
    tp_rank: int = 0,
    activation_type: Any = SWIGLU,
    hidden_size: int | None = None,
    dtype: Literal["bf16", "f16", "f32"] = "bf16",
) -> ExpertWeights:
    """ExpertWeights of what `cutlass_fused_moe` takes: made once, at load.

    fc1 uint8 [El, 2I, H / 2], rows [up; gate], and fc2 uint8 [El, H, I / 2], interleaved by flashinfer's
    interleave_moe_weights_for_sm90_mixed_gemm; quant_scales their interleaved E8M0 scales, viewed as int32 or uint8.
    The scales' dimensions tell flashinfer 0.6.11 from 0.7.2. Biases [El, 2I] and [El, H]; fc2's counts on tp_rank 0
    alone, as in flashinfer. swiglu_*: fp32 [El]; a number that all experts share is taken as one, which is faster.
    hidden_size: columns of the input where the weights are padded beyond them.

    The result holds copies of weights and scales, made on their device.
    """
    import torch

    if len(quant_scales) != 2:
        raise ValueError(f"quant_scales: expected the scales of fc1 and fc2, got {len(quant_scales)} tensors")
    weights = fc1_expert_weights.view(torch.uint8), fc2_expert_weights.view(torch.uint8)
    scales = [scale.view(torch.uint8) for scale in quant_scales]
    (w13, w13_scale), (w2, w2_scale) = (
        quantize.deinterleave_sm90_mxfp4(*pair) for pair in zip(weights, scales, strict=True)
    )
    given = {"alpha": number(swiglu_alpha), "beta": number(swiglu_beta), "limit": number(swiglu_limit)}
    options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    return ExpertWeights.mxfp4(
        w13,
        w2,
        w13_scale,
        w2_scale,
        b13=fc1_expert_biases,
        b2=fc2_expert_biases if tp_rank == 0 else None,
        layout="up_gate",
        clamp=_CLAMPS[_activation(activation_type)],
        dtype=dtype,
        hidden_size=hidden_size,
        **options,
    )


def _kept(
    x: Tensor,
    blocks: tuple[Tensor, Tensor, Sequence[Tensor]],
    others: tuple[Tensor | None, ...],
    tp_rank: int,
    activation_type: Any,
) -> ExpertWeights:
    """The cache's ExpertWeights for an input like x; others: biases and swiglu_*."""
    fc1, fc2, scales = blocks
    columns = 2 * fc1.shape[-1] * fc1.element_size()
    options: dict[str, Any] = {
        "tp_rank": min(tp_rank, 1),
        "activation_type": _activation(activation_type),
        "hidden_size": x.shape[1] if x.shape[1] < columns else None,
        "dtype": _name(x.dtype),
    }
    return cache.get(
        (fc1, fc2, *scales),
        others,
        tuple(options.values()),
        lambda: prepare_cutlass_fused_moe(*blocks, *others, **options),
    )


def cutlass_fused_moe(
    input: Tensor,
    token_selected_experts: Tensor,
    token_final_scales: Tensor,
    fc1_expert_weights: Tensor | None,
    fc2_expert_weights: Tensor | None,
    output_dtype: Any,
    quant_scales: Sequence[Tensor] | None,
    fc1_expert_biases: Tensor | None = None,
    fc2_expert_biases: Tensor | None = None,
    input_sf: Tensor | None = None,
    swiglu_alpha: Tensor | None = None,
    swiglu_beta: Tensor | None = None,
    swiglu_limit: Tensor | None = None,
    tp_size: int = 1,
    tp_rank: int = 0,
    ep_size: int = 1,
    ep_rank: int = 0,
    cluster_size: int = 1,
    cluster_rank: int = 0,
    output: Tensor | None = None,
    enable_alltoall: bool = False,
    use_deepseek_fp8_block_scale: bool = False,
    use_w4_group_scaling: bool = False,
    use_mxfp8_act_scaling: bool = False,
    min_latency_mode: bool = False,
    use_packed_weights: bool = False,
    tune_max_num_tokens: int = 8192,
    enable_pdl: bool | None = None,
    activation_type: Any = SWIGLU,
    swizzled_input_sf: bool = True,
    *,
    use_wfp4afp8_humming: bool = False,
    use_fused_finalize: bool = True,
    weights: ExpertWeights | None = None,
) -> list[Tensor]:
    """flashinfer's call (0.6.11 and 0.7.2, by keyword) with use_w4_group_scaling=True: [output].

    input [T, H] of output_dtype; token_selected_experts int32 or int64 [T, k], global ids of which those of ep_rank
    count; token_final_scales fp32 [T, k]; the rest as in `prepare_cutlass_fused_moe`. The output is this rank's part of
    the sum, written to `output` [T, H] where given. Without tokens nothing is looked at. An input narrower than the
    weights is that of weights padded with zeros, and so is the output.

    weights: what prepare_cutlass_fused_moe made, in place of fc1 and fc2, scales, biases and swiglu_*. Without it
    ExpertWeights are made at the first call with these tensors and kept while they live (`oxmoe.cutlass_moe.cache`):
    a second copy of the weights, and at each call the time to find it.

    Deterministic whatever use_fused_finalize says; tune_max_num_tokens and enable_pdl have no meaning here.
    """
    unserved = {
        "input_sf": input_sf is not None,
        "cluster_size": cluster_size != 1,
        "enable_alltoall": enable_alltoall,
        "use_deepseek_fp8_block_scale": use_deepseek_fp8_block_scale,
        "use_mxfp8_act_scaling": use_mxfp8_act_scaling,
        "min_latency_mode": min_latency_mode,
        "use_packed_weights": use_packed_weights,
        "use_wfp4afp8_humming": use_wfp4afp8_humming,
        "use_w4_group_scaling=False": not use_w4_group_scaling,
        f"output_dtype {output_dtype} of {input.dtype} input": output_dtype != input.dtype,
    }
    if any(unserved.values()):
        given = ", ".join(name for name, used in unserved.items() if used)
        raise NotImplementedError(
            f"cutlass_fused_moe: no kernel for {given}; served: use_w4_group_scaling=True (MXFP4 weights, 16-bit input)"
        )
    if not 0 <= tp_rank < tp_size:
        raise ValueError(f"tp_rank: expected 0 <= tp_rank < tp_size, got tp_rank {tp_rank}, tp_size {tp_size}")
    if input.shape[0] == 0:
        return [input.new_empty(input.shape) if output is None else output]
    if weights is None:
        if fc1_expert_weights is None or fc2_expert_weights is None or quant_scales is None:
            raise ValueError("fc1_expert_weights, fc2_expert_weights and quant_scales: needed where weights is None")
        weights = _kept(
            input,
            (fc1_expert_weights, fc2_expert_weights, quant_scales),
            (fc1_expert_biases, fc2_expert_biases, swiglu_alpha, swiglu_beta, swiglu_limit),
            tp_rank,
            activation_type,
        )
    result = moe(
        input, weights, token_final_scales, token_selected_experts, ep_size=ep_size, ep_rank=ep_rank, out=output
    )
    return [result]


def fused_experts_flashinfer_mxfp4(
    hidden_states: Tensor,
    topk_output: Any,
    quant_info: Any,
    runner_config: Any,
    *,
    weights: ExpertWeights | None = None,
    output: Tensor | None = None,
) -> Tensor:
    """What SGLang 0.5.23 computes with a FlashInferCutlassMxfp4MoeQuantInfo on Hopper (W4A16): [T, H].

    hidden_states [T, H]; topk_output standard (global ids) or bypassed (then routed here); H may be below
    quant_info.padded_hidden, without copies of input and output. runner_config gives moe_tp_* and moe_ep_*. Returns
    hidden_states itself where T is 0, and else this rank's part of the sum. weights: as in `cutlass_fused_moe`, which
    see; then quant_info gives nothing.
    """
    if hidden_states.shape[0] == 0:
        return hidden_states
    names = ("moe_tp_size", "moe_tp_rank", "moe_ep_size", "moe_ep_rank")
    tp_size, tp_rank, ep_size, ep_rank = (
        getattr(runner_config, name, 1 if name.endswith("size") else 0) for name in names
    )
    if not 0 <= tp_rank < tp_size:
        raise ValueError(f"runner_config: expected 0 <= moe_tp_rank < moe_tp_size, got {tp_rank} and {tp_size}")
    if weights is None:
        others = ("mxfp4_weight_global_scale", "w13_humming_residual_scale", "w2_humming_residual_scale")
        unserved = [name for name in others if getattr(quant_info, name, None) is not None]
        if unserved:
            raise NotImplementedError(
                f"quant_info: no kernel for {', '.join(unserved)}; served are MXFP4 weights with 16-bit input"
            )
        info, step = quant_info, getattr(quant_info, "use_swiglu_step", False)
        weights = _kept(
            hidden_states,
            (info.w13_weight, info.w2_weight, (info.w13_weight_scale, info.w2_weight_scale)),
            (info.w13_bias, info.w2_bias, info.swiglu_alpha, info.swiglu_beta, info.swiglu_limit),
            tp_rank,
            "SwigluStep" if step else SWIGLU,
        )
    arguments = routing_arguments(topk_output)
    return moe(hidden_states, weights, **arguments, ep_size=ep_size, ep_rank=ep_rank, out=output)
