"""flashinfer's `trtllm_fp4_block_scale_moe` and its pre-routed form, served by `moe`: MXFP4 weights with bf16 tokens,
and NVFP4 weights with NVFP4 tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from oxmoe._oxmoe import ExpertWeights
from oxmoe.operands import WRONG_TYPES, as_bytes, check_tensor, checked_arguments, name_argument
from oxmoe.peers.flashinfer_cutlass_formats import SWIGLU, activation_of, name_of
from oxmoe.peers.flashinfer_trtllm_formats import activation, by_method, layer, three_dimensions
from oxmoe.peers.flashinfer_trtllm_layouts import (
    SHUFFLED_ROWS,
    plain_biases,
    plain_blocks,
    valid_sizes,
    without_padding,
)
from oxmoe.peers.flashinfer_trtllm_routing import by_ids, check_dtype, finalized, shared_experts
from oxmoe.peers.kept import number

if TYPE_CHECKING:
    from torch import Tensor

LINEAR = 2  # flashinfer's SfLayout.layout_linear
_BLOCKS = {32: "mxfp4", 16: "nvfp4"}
# Dtypes as which callers view the bytes.
_CODES = ("uint8", "int8", "float8_e4m3fn", "float4_e2m1fn_x2")
_SCALES = ("float8_e4m3fn", "uint8", "int8", "float8_e8m0fnu")


def _block(weights: Tensor, scale: Tensor) -> int:
    """Returns how many numbers share a scale: 32 of MXFP4, 16 of NVFP4."""
    three_dimensions(gemm1_weights=weights)
    check_tensor("gemm1_weights_scale", scale)
    numbers = weights.numel() * 2
    block = numbers // scale.numel() if scale.numel() else 0
    if block not in _BLOCKS or scale.numel() * block != numbers:
        raise ValueError(
            f"gemm1_weights_scale: expected a scale for 32 (MXFP4) or 16 (NVFP4) of gemm1_weights' {numbers} numbers, "
            f"got {scale.numel()} scales"
        )
    return block


def _ones(numbers: Tensor) -> bool:
    """Whether all of the numbers are 1."""
    shared = number(numbers.float().reshape(-1))
    return isinstance(shared, float) and shared == 1


def _check_bias(name: str, bias: Tensor | None, experts: int, rows: int) -> None:
    if bias is None:
        return
    check_tensor(name, bias)
    if tuple(bias.shape) != (experts, rows):
        raise ValueError(f"{name}: expected shape [{experts}, {rows}], got {list(bias.shape)}")


@checked_arguments
def prepare_trtllm_fp4_block_scale_moe(
    gemm1_weights: Tensor,
    gemm1_weights_scale: Tensor,
    gemm2_weights: Tensor,
    gemm2_weights_scale: Tensor,
    *,
    gemm1_bias: Tensor | None = None,
    gemm1_alpha: Tensor | None = None,
    gemm1_beta: Tensor | None = None,
    gemm1_clamp_limit: Tensor | None = None,
    gemm2_bias: Tensor | None = None,
    output1_scale_scalar: Tensor | None = None,
    output1_scale_gate_scalar: Tensor | None = None,
    output2_scale_scalar: Tensor | None = None,
    activation_type: Any = SWIGLU,
    valid_hidden_size: int | None = None,
    valid_intermediate_size: int | None = None,
) -> ExpertWeights:
    """ExpertWeights of what `trtllm_fp4_block_scale_moe` takes: made once, at load.

    gemm1 uint8 [El, 2I, H / 2] ([El, I, H / 2] without a gate) and gemm2 [El, H, I / 2], two e2m1 codes a byte, in
    flashinfer's form: rows of a gated w13, [up; gate], alternate; rows of both then went through shuffle_matrix_a with
    epilogue_tile_m 128, and their scales through the same and block_scale_interleave. Biases are fp32 [El, 2I] and
    [El, H] in the same order. One scale byte for 32 numbers is MXFP4, one for 16 NVFP4.

    NVFP4 (W4A4): output1_scale_gate_scalar and output2_scale_scalar, fp32 [El], dequantise the sums of the GEMMs;
    output1_scale_scalar is the first times the number that quantises GEMM1's output. Without a gate and with Situ it is
    that number alone. These are in units of the sums, as in flashinfer's kernels, so they are dequantised numbers over
    output1_scale_gate_scalar: gemm1_bias, gemm1_beta and gemm1_clamp_limit; gemm2_bias is one over
    output2_scale_scalar. gemm1_alpha multiplies the dequantised gate, and Situ's alpha and beta bound dequantised
    numbers. MXFP4 takes no such scalars but ones, and biases, beta and limit of dequantised numbers. gemm1_alpha,
    gemm1_beta and gemm1_clamp_limit are otherwise as for `prepare_trtllm_bf16_moe`. valid_hidden_size and
    valid_intermediate_size: of weights that `pad_trtllm_moe_weights` has padded, whose padding is dropped.
    """

    block = _block(gemm1_weights, gemm1_weights_scale)
    three_dimensions(gemm2_weights=gemm2_weights)
    check_tensor("gemm2_weights_scale", gemm2_weights_scale)
    for name, weights in (("gemm1_weights", gemm1_weights), ("gemm2_weights", gemm2_weights)):
        check_dtype(name, weights, *_CODES)
    for name, scale in (("gemm1_weights_scale", gemm1_weights_scale), ("gemm2_weights_scale", gemm2_weights_scale)):
        check_dtype(name, scale, *_SCALES)
    experts = gemm1_weights.shape[0]
    scalars = {
        "output1_scale_scalar": output1_scale_scalar,
        "output1_scale_gate_scalar": output1_scale_gate_scalar,
        "output2_scale_scalar": output2_scale_scalar,
    }
    of_experts = _of_experts(scalars, experts) if block == 16 else {}
    of_sums, of_outputs = of_experts.get("output1_scale_gate_scalar"), of_experts.get("output2_scale_scalar")
    numbers = {"alpha": gemm1_alpha, "beta": gemm1_beta, "limit": gemm1_clamp_limit}
    options = activation(activation_type, numbers, of_sums)
    gated = options["gated"]
    for name, bias, rows in (
        ("gemm1_bias", gemm1_bias, gemm1_weights.shape[1]),
        ("gemm2_bias", gemm2_bias, gemm2_weights.shape[1]),
    ):
        _check_bias(name, bias, experts, rows)
    (w13, w13_scale), (w2, w2_scale) = (
        plain_blocks(
            as_bytes(name, weights),
            as_bytes(f"{name}_scale", scale),
            weights.shape[2] * 2 // block,
            gated=shuffled_halves,
        )
        for name, weights, scale, shuffled_halves in (
            ("gemm1_weights", gemm1_weights, gemm1_weights_scale, gated),
            ("gemm2_weights", gemm2_weights, gemm2_weights_scale, False),
        )
    )
    sizes = valid_sizes(valid_hidden_size, valid_intermediate_size, 2 * w13.shape[2], 2 * w2.shape[2])
    b13, b2 = plain_biases(gemm1_bias, SHUFFLED_ROWS, gated=gated), plain_biases(gemm2_bias, SHUFFLED_ROWS)
    (w13, w13_scale, b13), (w2, w2_scale, b2) = without_padding(
        (w13, w13_scale, b13), (w2, w2_scale, b2), (2, block, 1), sizes, gated=gated
    )
    if of_sums is None or of_outputs is None:
        for name, scalar in scalars.items():
            if scalar is not None and not _ones(scalar):
                raise NotImplementedError(f"{name}: no kernel for MXFP4 weights with other numbers than 1")
        return ExpertWeights.mxfp4(w13, w2, w13_scale, w2_scale, b13=b13, b2=b2, **options)
    quantises = of_experts["output1_scale_scalar"]
    if gated and options["activation"] != "situ":
        quantises = quantises / of_sums
    return ExpertWeights.nvfp4(
        w13,
        w2,
        w13_scale,
        w2_scale,
        of_sums,
        of_outputs,
        input_global_scale=1.0,
        a2_global_scale=quantises,
        scale_layout="plain",
        b13=None if b13 is None else b13.float() * of_sums[:, None],
        b2=None if b2 is None else b2.float() * of_outputs[:, None],
        **options,
    )


def _of_experts(scalars: dict[str, Tensor | None], experts: int) -> dict[str, Tensor]:
    """Returns the scalars of NVFP4 weights, fp32 [experts]."""
    result = {}
    for name, scalar in scalars.items():
        if scalar is None:
            raise ValueError(f"{name}: needed with NVFP4 weights")
        check_tensor(name, scalar)
        if scalar.numel() != experts:
            raise ValueError(f"{name}: expected {experts} numbers (local experts), got {scalar.numel()}")
        result[name] = scalar.float().reshape(-1)
    return result


def trtllm_fp4_block_scale_moe(
    routing_logits: Tensor,
    routing_bias: Tensor | None,
    hidden_states: Tensor,
    hidden_states_scale: Tensor | None,
    gemm1_weights: Tensor,
    gemm1_weights_scale: Tensor,
    gemm1_bias: Tensor | None,
    gemm1_alpha: Tensor | None,
    gemm1_beta: Tensor | None,
    gemm1_clamp_limit: Tensor | None,
    gemm2_weights: Tensor,
    gemm2_weights_scale: Tensor,
    gemm2_bias: Tensor | None,
    output1_scale_scalar: Tensor | None,
    output1_scale_gate_scalar: Tensor | None,
    output2_scale_scalar: Tensor | None,
    num_experts: int,
    top_k: int,
    n_group: int | None,
    topk_group: int | None,
    intermediate_size: int,
    local_expert_offset: int,
    local_num_experts: int,
    routed_scaling_factor: float | None,
    routing_method_type: Any = 0,
    do_finalize: bool = True,
    enable_pdl: bool | None = None,
    activation_type: Any = SWIGLU,
    per_token_scale: Tensor | None = None,
    output: Tensor | None = None,
    tune_max_num_tokens: int = 8192,
    norm_topk_prob: bool = True,
    routing_replay_out: Tensor | None = None,
    num_fused_shared_experts: int | None = None,
    valid_hidden_size: int | None = None,
    valid_intermediate_size: int | None = None,
    hidden_states_scale_layout: int | None = None,
    workspace_buffer: Tensor | None = None,
    nvfp4_4over6: Any = None,
    *,
    weights: ExpertWeights | None = None,
) -> list[Tensor]:
    """flashinfer's call: [bf16 [T, H]].

    hidden_states: bf16 [T, H] of MXFP4 weights; of NVFP4 weights uint8 [T, H / 2] with hidden_states_scale e4m3
    [T, H / 16], row by row. MXFP8 tokens are refused. Weights are those of `prepare_trtllm_fp4_block_scale_moe`: they
    are made plain at the first call, and the copy is kept while the tensors live
    (`oxmoe.peers.flashinfer_trtllm_formats.cache`). weights: what that function made, which torch.compile needs.
    num_fused_shared_experts: weights, scales, biases and numbers have so many experts behind the num_experts routed
    ones, and every token has them with weight 1. It needs DeepSeekV3's routing, and all experts here.
    routing and the rest are as for `trtllm_bf16_moe`.
    """
    try:
        shared, experts = shared_experts(
            num_fused_shared_experts, (num_experts, local_expert_offset, local_num_experts), routing_method_type
        )
        routing = by_method(
            routing_logits, routing_bias, routing_replay_out, top_k, n_group, topk_group, routed_scaling_factor,
            routing_method_type, norm_topk_prob, shared,
        )  # fmt: skip
        gemms = (gemm1_weights, gemm1_weights_scale, gemm2_weights, gemm2_weights_scale)
        options = {
            "gemm1_bias": gemm1_bias,
            "gemm1_alpha": gemm1_alpha,
            "gemm1_beta": gemm1_beta,
            "gemm1_clamp_limit": gemm1_clamp_limit,
            "gemm2_bias": gemm2_bias,
            "output1_scale_scalar": output1_scale_scalar,
            "output1_scale_gate_scalar": output1_scale_gate_scalar,
            "output2_scale_scalar": output2_scale_scalar,
            "activation_type": activation_of(activation_type),
        }
        refused = {
            "per_token_scale": per_token_scale is not None,
            "nvfp4_4over6": nvfp4_4over6 is not None,
        }
        return _fp4(
            "trtllm_fp4_block_scale_moe", finalized(routing, do_finalize), hidden_states, hidden_states_scale, gemms,
            options, experts, refused,
            (valid_hidden_size, valid_intermediate_size), intermediate_size, hidden_states_scale_layout, output,
            workspace_buffer, weights,
        )  # fmt: skip
    except WRONG_TYPES as error:
        name_argument(error, trtllm_fp4_block_scale_moe, locals())
        raise


def trtllm_fp4_block_scale_routed_moe(
    topk_ids: Tensor | tuple[Tensor, Tensor],
    routing_bias: Tensor | None,
    hidden_states: Tensor,
    hidden_states_scale: Tensor | None,
    gemm1_weights: Tensor,
    gemm1_weights_scale: Tensor,
    gemm1_bias: Tensor | None,
    gemm1_alpha: Tensor | None,
    gemm1_beta: Tensor | None,
    gemm1_clamp_limit: Tensor | None,
    gemm2_weights: Tensor,
    gemm2_weights_scale: Tensor,
    gemm2_bias: Tensor | None,
    output1_scale_scalar: Tensor | None,
    output1_scale_gate_scalar: Tensor | None,
    output2_scale_scalar: Tensor | None,
    num_experts: int,
    top_k: int,
    n_group: int | None,
    topk_group: int | None,
    intermediate_size: int,
    local_expert_offset: int,
    local_num_experts: int,
    routed_scaling_factor: float | None,
    routing_method_type: Any = 0,
    do_finalize: bool = True,
    enable_pdl: bool | None = None,
    activation_type: Any = SWIGLU,
    per_token_scale: Tensor | None = None,
    output: Tensor | None = None,
    tune_max_num_tokens: int = 8192,
    gemm1_lora_delta: Tensor | None = None,
    valid_hidden_size: int | None = None,
    valid_intermediate_size: int | None = None,
    num_fused_shared_experts: int | None = None,
    hidden_states_scale_layout: int | None = None,
    workspace_buffer: Tensor | None = None,
    nvfp4_4over6: Any = None,
    routing_metadata: Any = None,
    *,
    weights: ExpertWeights | None = None,
) -> list[Tensor]:
    """flashinfer's call with experts that were chosen before: [bf16 [T, H]].

    topk_ids is int32 [T, top_k] as `oxmoe.pack_topk` makes it, or a pair of ids and weights; the weights count as they
    are. The rest is as for `trtllm_fp4_block_scale_moe`.
    """
    try:
        gemms = (gemm1_weights, gemm1_weights_scale, gemm2_weights, gemm2_weights_scale)
        options = {
            "gemm1_bias": gemm1_bias,
            "gemm1_alpha": gemm1_alpha,
            "gemm1_beta": gemm1_beta,
            "gemm1_clamp_limit": gemm1_clamp_limit,
            "gemm2_bias": gemm2_bias,
            "output1_scale_scalar": output1_scale_scalar,
            "output1_scale_gate_scalar": output1_scale_gate_scalar,
            "output2_scale_scalar": output2_scale_scalar,
            "activation_type": activation_of(activation_type),
        }
        refused = {
            "per_token_scale": per_token_scale is not None,
            "nvfp4_4over6": nvfp4_4over6 is not None,
            "routing_metadata": routing_metadata is not None,
            "gemm1_lora_delta": gemm1_lora_delta is not None,
            "num_fused_shared_experts": bool(num_fused_shared_experts),
        }
        routing = finalized(by_ids(topk_ids, top_k), do_finalize, chosen=False)
        return _fp4(
            "trtllm_fp4_block_scale_routed_moe", routing, hidden_states, hidden_states_scale, gemms,
            options, (num_experts, local_expert_offset, local_num_experts), refused,
            (valid_hidden_size, valid_intermediate_size), intermediate_size, hidden_states_scale_layout, output,
            workspace_buffer, weights,
        )  # fmt: skip
    except WRONG_TYPES as error:
        name_argument(error, trtllm_fp4_block_scale_routed_moe, locals())
        raise


def _fp4(
    function: str,
    routing: dict[str, Any],
    hidden_states: Tensor,
    hidden_states_scale: Tensor | None,
    gemms: tuple[Tensor, Tensor, Tensor, Tensor],
    options: dict[str, Any],
    experts: tuple[int, int, int],
    refused: dict[str, bool],
    sizes: tuple[int | None, int | None],
    intermediate_size: int,
    scale_layout: Any,
    output: Tensor | None,
    workspace_buffer: Tensor | None,
    weights: ExpertWeights | None,
) -> list[Tensor]:
    check_tensor("hidden_states", hidden_states, "T", "H")
    if weights is not None and not isinstance(weights, ExpertWeights):
        raise ValueError(f"weights: expected ExpertWeights, got {type(weights).__name__}")
    # Prepared NVFP4 experts round their tokens: their format is "nvfp4-a4" on CUDA.
    format = _BLOCKS[_block(gemms[0], gemms[1])] if weights is None else weights.format.removesuffix("-a4")
    tokens = name_of(hidden_states.dtype)
    served = {"mxfp4": "bfloat16", "nvfp4": "uint8"}
    if format not in served:
        raise ValueError(f"weights: expected mxfp4 or nvfp4 experts, got {format}")
    if tokens != served[format]:
        raise NotImplementedError(
            f"{function}: no kernel for hidden_states of {tokens} with {format} weights; served are bfloat16 with "
            "mxfp4 and uint8 (NVFP4) with nvfp4"
        )
    each = 2 if format == "nvfp4" else 1
    hidden = hidden_states.shape[1] * each
    valid = valid_sizes(*sizes, hidden, intermediate_size)
    options = {**options, "valid_hidden_size": sizes[0], "valid_intermediate_size": sizes[1]}
    refused = {
        **refused,
        f"hidden_states_scale_layout {scale_layout!r}": scale_layout is not None and int(scale_layout) != LINEAR,
    }
    scale = None
    if format == "nvfp4":
        import torch

        rows, groups = hidden_states.shape[0], hidden // 16
        if hidden_states_scale is None or hidden_states_scale.numel() != rows * groups:
            got = "None" if hidden_states_scale is None else str(list(hidden_states_scale.shape))
            raise ValueError(f"hidden_states_scale: expected e4m3 of shape [{rows}, {groups}], got {got}")
        check_tensor("hidden_states_scale", hidden_states_scale)
        check_dtype("hidden_states_scale", hidden_states_scale, *_SCALES)
        scale = hidden_states_scale.view(torch.uint8).view(torch.float8_e4m3fn).reshape(rows, groups)
    elif hidden_states_scale is not None:
        raise ValueError("hidden_states_scale: hidden_states of bfloat16 have none")
    if valid is not None:
        hidden_states = hidden_states[:, : valid[0] // each].contiguous()
        scale = None if scale is None else scale[:, : valid[0] // 16].contiguous()
    result = layer(
        function, routing, hidden_states, scale, weights, prepare_trtllm_fp4_block_scale_moe, gemms, options,
        experts=experts, refused=refused, output=output, workspace_buffer=workspace_buffer,
    )  # fmt: skip
    return result if isinstance(result, list) else [result]
