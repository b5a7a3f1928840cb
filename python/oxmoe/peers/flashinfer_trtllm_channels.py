"""flashinfer's `trtllm_fp8_per_channel_scale_moe` and its pre-routed form (0.7.4), served by `moe`: fp8 weights with a
scale for each row, tokens and GEMM1's output with a scale for each of theirs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from oxmoe._oxmoe import ExpertWeights
from oxmoe.operands import WRONG_TYPES, check_tensor, checked_arguments, name_argument
from oxmoe.peers.flashinfer_cutlass_formats import SWIGLU, activation_of
from oxmoe.peers.flashinfer_trtllm_formats import activation, by_method, layer, three_dimensions
from oxmoe.peers.flashinfer_trtllm_layouts import SHUFFLED_ROWS, halves, unshuffled
from oxmoe.peers.flashinfer_trtllm_routing import by_ids, check_dtype, finalized

if TYPE_CHECKING:
    from torch import Tensor


@checked_arguments
def prepare_trtllm_fp8_per_channel_scale_moe(
    gemm1_weights: Tensor,
    gemm1_per_channel_weight_scale: Tensor,
    output1_scale_scalar: Tensor,
    output1_scale_gate_scalar: Tensor,
    gemm2_weights: Tensor,
    gemm2_per_channel_weight_scale: Tensor,
    output2_scale_scalar: Tensor,
    *,
    activation_type: Any = SWIGLU,
) -> ExpertWeights:
    """ExpertWeights of what `trtllm_fp8_per_channel_scale_moe` takes: made once, at load.

    gemm1 float8_e4m3fn [El, 2I, H] ([El, I, H] without a gate) and gemm2 [El, H, I], with fp32 scales of their rows
    [El, 2I] and [El, H], all shuffled as flashinfer demands: rows of a gated w13, [up; gate], alternate, then
    shuffle_matrix_a with epilogue_tile_m 128. The scalars are fp32 [El]: output1_scale_gate_scalar multiplies the rows
    of the gate, output1_scale_scalar those of up, and output2_scale_scalar those of GEMM2. Without a gate
    output1_scale_gate_scalar multiplies GEMM1's sums before the activation, and output1_scale_scalar after it.
    """
    import torch

    three_dimensions(gemm1_weights=gemm1_weights, gemm2_weights=gemm2_weights)
    experts, w13_rows = gemm1_weights.shape[:2]
    shapes = {
        "gemm1_per_channel_weight_scale": (gemm1_per_channel_weight_scale, (experts, w13_rows)),
        "gemm2_per_channel_weight_scale": (gemm2_per_channel_weight_scale, (experts, gemm2_weights.shape[1])),
        "output1_scale_scalar": (output1_scale_scalar, (experts,)),
        "output1_scale_gate_scalar": (output1_scale_gate_scalar, (experts,)),
        "output2_scale_scalar": (output2_scale_scalar, (experts,)),
    }
    for name, (scale, shape) in shapes.items():
        check_tensor(name, scale)
        check_dtype(name, scale, "float32")
        if tuple(scale.shape) != shape:
            raise ValueError(f"{name}: expected shape {list(shape)}, got {list(scale.shape)}")
    if (function := activation_of(activation_type)) in ("Situ", "SwigluStep"):
        raise NotImplementedError(
            f"activation_type: no kernel for {function!r} with scales of rows, since this call has no bounds for it"
        )
    options = activation(activation_type, {"alpha": None, "beta": None, "limit": None})
    w13, w2 = (unshuffled(part, SHUFFLED_ROWS) for part in (gemm1_weights, gemm2_weights))
    w13_scale, w2_scale = (
        unshuffled(scale, SHUFFLED_ROWS) for scale in (gemm1_per_channel_weight_scale, gemm2_per_channel_weight_scale)
    )
    of_outputs = output2_scale_scalar
    if options["gated"]:
        w13, w13_scale = halves(w13), halves(w13_scale)
        of_halves = torch.stack((output1_scale_scalar, output1_scale_gate_scalar), 1)
        w13_scale = w13_scale * of_halves.repeat_interleave(w13_rows // 2, 1)
    else:
        w13_scale = w13_scale * output1_scale_gate_scalar[:, None]
        # GEMM1's output is rounded with the scale of its own row, which takes on any factor.
        of_outputs = of_outputs * output1_scale_scalar
    return ExpertWeights.fp8_tensor(w13, w2, w13_scale, w2_scale * of_outputs[:, None], **options)


def trtllm_fp8_per_channel_scale_moe(
    routing_logits: Tensor,
    routing_bias: Tensor | None,
    hidden_states: Tensor,
    hidden_states_scale: Tensor,
    gemm1_weights: Tensor,
    gemm1_per_channel_weight_scale: Tensor,
    output1_scale_scalar: Tensor,
    output1_scale_gate_scalar: Tensor,
    gemm2_weights: Tensor,
    gemm2_per_channel_weight_scale: Tensor,
    output2_scale_scalar: Tensor,
    num_experts: int,
    top_k: int,
    n_group: int | None,
    topk_group: int | None,
    intermediate_size: int,
    local_expert_offset: int,
    local_num_experts: int,
    routed_scaling_factor: float | None,
    use_routing_scales_on_input: bool,
    routing_method_type: Any = 0,
    do_finalize: bool = True,
    enable_pdl: bool | None = None,
    tune_max_num_tokens: int = 8192,
    activation_type: Any = SWIGLU,
    norm_topk_prob: bool = True,
    workspace_buffer: Tensor | None = None,
    *,
    weights: ExpertWeights | None = None,
) -> Tensor | list[Tensor]:
    """flashinfer's call: bf16 [T, H] of hidden_states float8_e4m3fn [T, H] with hidden_states_scale fp32 [T, 1].

    Weights and scales are those of `prepare_trtllm_fp8_per_channel_scale_moe`. GEMM1's output is rounded to bf16 and
    then to e4m3 with one scale for each row. use_routing_scales_on_input: weights of experts multiply GEMM1's sums
    instead of the outputs. The rest is as for `trtllm_bf16_moe`.
    """
    try:
        routing = by_method(
            routing_logits, routing_bias, None, top_k, n_group, topk_group, routed_scaling_factor, routing_method_type,
            norm_topk_prob,
        )  # fmt: skip
        return _per_channel(
            "trtllm_fp8_per_channel_scale_moe", finalized(routing, do_finalize), hidden_states, hidden_states_scale,
            (gemm1_weights, gemm1_per_channel_weight_scale, output1_scale_scalar, output1_scale_gate_scalar,
             gemm2_weights, gemm2_per_channel_weight_scale, output2_scale_scalar),
            (num_experts, local_expert_offset, local_num_experts), use_routing_scales_on_input, activation_type,
            workspace_buffer, weights, intermediate_size,
        )  # fmt: skip
    except WRONG_TYPES as error:
        name_argument(error, trtllm_fp8_per_channel_scale_moe, locals())
        raise


def trtllm_fp8_per_channel_scale_routed_moe(
    topk_ids: Tensor | tuple[Tensor, Tensor],
    routing_bias: Tensor | None,
    hidden_states: Tensor,
    hidden_states_scale: Tensor,
    gemm1_weights: Tensor,
    gemm1_per_channel_weight_scale: Tensor,
    output1_scale_scalar: Tensor,
    output1_scale_gate_scalar: Tensor,
    gemm2_weights: Tensor,
    gemm2_per_channel_weight_scale: Tensor,
    output2_scale_scalar: Tensor,
    num_experts: int,
    top_k: int,
    n_group: int | None,
    topk_group: int | None,
    intermediate_size: int,
    local_expert_offset: int,
    local_num_experts: int,
    routed_scaling_factor: float | None,
    use_routing_scales_on_input: bool = False,
    routing_method_type: Any = 0,
    do_finalize: bool = True,
    enable_pdl: bool | None = None,
    tune_max_num_tokens: int = 8192,
    activation_type: Any = SWIGLU,
    workspace_buffer: Tensor | None = None,
    *,
    weights: ExpertWeights | None = None,
) -> Tensor | list[Tensor]:
    """flashinfer's call with experts that were chosen before: bf16 [T, H].

    topk_ids is int32 [T, top_k] as `oxmoe.pack_topk` makes it, or a pair of ids and weights; the weights count as they
    are. The rest is as for `trtllm_fp8_per_channel_scale_moe`.
    """
    try:
        routing = finalized(by_ids(topk_ids, top_k), do_finalize, chosen=False)
        return _per_channel(
            "trtllm_fp8_per_channel_scale_routed_moe", routing, hidden_states, hidden_states_scale,
            (gemm1_weights, gemm1_per_channel_weight_scale, output1_scale_scalar, output1_scale_gate_scalar,
             gemm2_weights, gemm2_per_channel_weight_scale, output2_scale_scalar),
            (num_experts, local_expert_offset, local_num_experts), use_routing_scales_on_input, activation_type,
            workspace_buffer, weights, intermediate_size,
        )  # fmt: skip
    except WRONG_TYPES as error:
        name_argument(error, trtllm_fp8_per_channel_scale_routed_moe, locals())
        raise


def _per_channel(
    function: str,
    routing: dict[str, Any],
    hidden_states: Tensor,
    hidden_states_scale: Tensor,
    owners: tuple[Tensor, ...],
    experts: tuple[int, int, int],
    use_routing_scales_on_input: bool,
    activation_type: Any,
    workspace_buffer: Tensor | None,
    weights: ExpertWeights | None,
    intermediate_size: int,
) -> Any:
    check_tensor("hidden_states", hidden_states, "T", "H")
    check_dtype("hidden_states", hidden_states, "float8_e4m3fn")
    check_tensor("hidden_states_scale", hidden_states_scale)
    check_dtype("hidden_states_scale", hidden_states_scale, "float32")
    tokens = hidden_states.shape[0]
    if tuple(hidden_states_scale.shape) != (tokens, 1):
        raise ValueError(f"hidden_states_scale: expected shape [{tokens}, 1], got {list(hidden_states_scale.shape)}")
    routing = {**routing, "apply_router_weight_on_input": bool(use_routing_scales_on_input)}
    return layer(
        function, routing, hidden_states, hidden_states_scale, weights, prepare_trtllm_fp8_per_channel_scale_moe,
        owners, {"activation_type": activation_of(activation_type)}, experts=experts, refused={},
        output=None, workspace_buffer=workspace_buffer, dtype="float8_e4m3fn",
        intermediate_size=intermediate_size,
    )  # fmt: skip
