"""flashinfer's `trtllm_mxint4_block_scale_moe` and its pre-routed form, served by `moe` as int4 experts (W4A16).

Source: flashinfer/fused_moe/core.py and prepare.py of 0.7.4, and tests/moe/trtllm_gen_fused_moe_utils.py of 0.6.18.
Rows of w13 are [up; gate] before flashinfer's shuffles, and the activation is Swiglu.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from oxmoe._oxmoe import ExpertWeights
from oxmoe.operands import WRONG_TYPES, check_tensor, checked_arguments, name_argument
from oxmoe.peers.flashinfer_cutlass_formats import SWIGLU, name_of
from oxmoe.peers.flashinfer_trtllm_formats import activation, by_method, layer
from oxmoe.peers.flashinfer_trtllm_layouts import (
    BLOCK_BYTES,
    BLOCK_MAJOR_K,
    major_k,
    plain_blocks,
    valid_sizes,
    without_padding,
)
from oxmoe.peers.flashinfer_trtllm_routing import by_ids, finalized

if TYPE_CHECKING:
    from torch import Tensor

_GROUP = 32  # columns that share a scale
_ROWS = 128  # rows of a tile of flashinfer's shuffle
_SIGNS = 0x88  # turns two codes in two's complement into codes with the zero point 8


def _plain(name: str, weights: Tensor, scale: Tensor, *, gated: bool) -> tuple[Tensor, Tensor]:
    """Returns codes [El, R, K / 2] with the zero point 8 and scales [El, R, K / 32] of shuffled blocks."""
    import torch

    check_tensor(name, weights)
    # flashinfer's docstring has three dimensions, and its kernel reads the same bytes whatever the shape is.
    flat = weights.dim() == 3 and weights.shape[2] % BLOCK_BYTES == 0
    blocked = weights.dim() == 4 and weights.shape[3] == BLOCK_BYTES
    if not (flat or blocked) or weights.dtype != torch.uint8:
        raise ValueError(
            f"{name}: expected uint8 [experts, K / {2 * BLOCK_BYTES}, rows, {BLOCK_BYTES}] (BlockMajorK), or its bytes "
            f"as [experts, rows, K / 2], got {name_of(weights.dtype)} {list(weights.shape)}"
        )
    if flat:
        weights = weights.reshape(weights.shape[0], -1, weights.shape[1], BLOCK_BYTES)
    experts, blocks, rows, _ = weights.shape
    if rows % _ROWS:
        raise ValueError(f"{name}: dimension 2: expected a multiple of {_ROWS} rows, got {rows}")
    check_tensor(f"{name}_scale", scale)
    groups = blocks * 2 * BLOCK_BYTES // _GROUP
    if scale.dtype != torch.bfloat16 or scale.numel() != experts * rows * groups:
        raise ValueError(
            f"{name}_scale: expected bfloat16 [{experts}, {rows}, {groups}] (a scale for {_GROUP} columns), got "
            f"{name_of(scale.dtype)} {list(scale.shape)}"
        )
    codes, scales = plain_blocks(major_k(weights, BLOCK_MAJOR_K), scale, groups, gated=gated)
    return codes.bitwise_xor_(_SIGNS), scales


@checked_arguments
def prepare_trtllm_mxint4_block_scale_moe(
    gemm1_weights: Tensor,
    gemm1_weights_scale: Tensor,
    gemm2_weights: Tensor,
    gemm2_weights_scale: Tensor,
    *,
    gemm1_alpha: Tensor | None = None,
    gemm1_beta: Tensor | None = None,
    gemm1_clamp_limit: Tensor | None = None,
    valid_hidden_size: int | None = None,
    valid_intermediate_size: int | None = None,
) -> ExpertWeights:
    """ExpertWeights of what `trtllm_mxint4_block_scale_moe` takes: made once, at load.

    gemm1 uint8 [El, H / 256, 2I, 128] and gemm2 [El, I / 256, H, 128], two codes of two's complement a byte, in the
    form of flashinfer's prepare_trtllm_mxint4_weights: rows of w13, [up; gate], alternate; rows of both then went
    through shuffle_matrix_a with epilogue_tile_m 128, and the bytes of a row lie in blocks of 128 (BlockMajorK). The
    same bytes may have the shapes [El, 2I, H / 2] and [El, H, I / 2] of flashinfer's docstring. A bf16 scale for 32
    columns: [El, 2I, H / 32] and [El, H, I / 32], or any shapes with as many; their rows went through the same, and
    each expert's through block_scale_interleave. H and I are multiples of 256.

    gemm1_alpha, gemm1_beta and gemm1_clamp_limit are as for `prepare_trtllm_bf16_moe`. The result is
    `ExpertWeights.int4`: a code times its scale is rounded to bf16, which is not so in flashinfer's kernel for
    Blackwell. valid_hidden_size and valid_intermediate_size: of weights that were padded, whose padding is dropped.
    """
    w13, w13_scale = _plain("gemm1_weights", gemm1_weights, gemm1_weights_scale, gated=True)
    w2, w2_scale = _plain("gemm2_weights", gemm2_weights, gemm2_weights_scale, gated=False)
    sizes = valid_sizes(valid_hidden_size, valid_intermediate_size, 2 * w13.shape[2], 2 * w2.shape[2])
    (w13, w13_scale), (w2, w2_scale) = without_padding((w13, w13_scale), (w2, w2_scale), (2, _GROUP), sizes, gated=True)
    numbers = {"alpha": gemm1_alpha, "beta": gemm1_beta, "limit": gemm1_clamp_limit}
    return ExpertWeights.int4(w13, w2, w13_scale, w2_scale, **activation(SWIGLU, numbers))


def trtllm_mxint4_block_scale_moe(
    routing_logits: Tensor,
    routing_bias: Tensor | None,
    hidden_states: Tensor,
    gemm1_weights: Tensor,
    gemm1_weights_scale: Tensor,
    gemm1_alpha: Tensor | None,
    gemm1_beta: Tensor | None,
    gemm1_clamp_limit: Tensor | None,
    gemm2_weights: Tensor,
    gemm2_weights_scale: Tensor,
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
    output: Tensor | None = None,
    tune_max_num_tokens: int = 8192,
    norm_topk_prob: bool = True,
    routing_replay_out: Tensor | None = None,
    valid_hidden_size: int | None = None,
    valid_intermediate_size: int | None = None,
    workspace_buffer: Tensor | None = None,
    *,
    weights: ExpertWeights | None = None,
) -> list[Tensor]:
    """flashinfer's call: [bf16 [T, H]] of hidden_states bf16 [T, H].

    Weights are those of `prepare_trtllm_mxint4_block_scale_moe`: they are made plain at the first call, and the copy is
    kept while the tensors live (`oxmoe.peers.flashinfer_trtllm_formats.cache`). weights: what that function made, which
    torch.compile needs. routing and the rest are as for `trtllm_bf16_moe`.
    """
    try:
        routing = by_method(
            routing_logits, routing_bias, routing_replay_out, top_k, n_group, topk_group, routed_scaling_factor,
            routing_method_type, norm_topk_prob,
        )  # fmt: skip
        return _mxint4(
            "trtllm_mxint4_block_scale_moe", finalized(routing, do_finalize), hidden_states,
            (gemm1_weights, gemm1_weights_scale, gemm2_weights, gemm2_weights_scale),
            (gemm1_alpha, gemm1_beta, gemm1_clamp_limit), (num_experts, local_expert_offset, local_num_experts),
            {}, (valid_hidden_size, valid_intermediate_size), intermediate_size, output,
            workspace_buffer, weights,
        )  # fmt: skip
    except WRONG_TYPES as error:
        name_argument(error, trtllm_mxint4_block_scale_moe, locals())
        raise


def trtllm_mxint4_block_scale_routed_moe(
    topk_ids: Tensor | tuple[Tensor, Tensor],
    hidden_states: Tensor,
    gemm1_weights: Tensor,
    gemm1_weights_scale: Tensor,
    gemm1_alpha: Tensor | None,
    gemm1_beta: Tensor | None,
    gemm1_clamp_limit: Tensor | None,
    gemm2_weights: Tensor,
    gemm2_weights_scale: Tensor,
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
    gemm1_lora_delta: Tensor | None = None,
    output: Tensor | None = None,
    tune_max_num_tokens: int = 8192,
    valid_hidden_size: int | None = None,
    valid_intermediate_size: int | None = None,
    workspace_buffer: Tensor | None = None,
    *,
    weights: ExpertWeights | None = None,
) -> list[Tensor]:
    """flashinfer's call with experts that were chosen before: [bf16 [T, H]].

    topk_ids is int32 [T, top_k] as `oxmoe.pack_topk` makes it, or a pair of ids and weights; the weights count as they
    are. The rest is as for `trtllm_mxint4_block_scale_moe`.
    """
    try:
        refused = {"gemm1_lora_delta": gemm1_lora_delta is not None}
        routing = finalized(by_ids(topk_ids, top_k), do_finalize, chosen=False)
        return _mxint4(
            "trtllm_mxint4_block_scale_routed_moe", routing, hidden_states,
            (gemm1_weights, gemm1_weights_scale, gemm2_weights, gemm2_weights_scale),
            (gemm1_alpha, gemm1_beta, gemm1_clamp_limit), (num_experts, local_expert_offset, local_num_experts),
            refused, (valid_hidden_size, valid_intermediate_size), intermediate_size, output,
            workspace_buffer, weights,
        )  # fmt: skip
    except WRONG_TYPES as error:
        name_argument(error, trtllm_mxint4_block_scale_routed_moe, locals())
        raise


def _mxint4(
    function: str,
    routing: dict[str, Any],
    hidden_states: Tensor,
    gemms: tuple[Tensor, Tensor, Tensor, Tensor],
    numbers: tuple[Tensor | None, Tensor | None, Tensor | None],
    experts: tuple[int, int, int],
    refused: dict[str, bool],
    sizes: tuple[int | None, int | None],
    intermediate_size: int,
    output: Tensor | None,
    workspace_buffer: Tensor | None,
    weights: ExpertWeights | None,
) -> list[Tensor]:
    check_tensor("hidden_states", hidden_states, "T", "H")
    if name_of(hidden_states.dtype) != "bfloat16":
        raise NotImplementedError(
            f"{function}: no kernel for hidden_states of {name_of(hidden_states.dtype)}; served is bfloat16"
        )
    if isinstance(weights, ExpertWeights) and weights.format != "int4":
        raise ValueError(f"weights: expected int4 experts, got {weights.format}")
    options: dict[str, Any] = dict(zip(("gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit"), numbers, strict=True))
    options |= {"valid_hidden_size": sizes[0], "valid_intermediate_size": sizes[1]}
    if (valid := valid_sizes(*sizes, hidden_states.shape[1], intermediate_size)) is not None:
        hidden_states = hidden_states[:, : valid[0]].contiguous()
    result = layer(
        function, routing, hidden_states, None, weights, prepare_trtllm_mxint4_block_scale_moe, gemms, options,
        experts=experts, refused=refused, output=output, workspace_buffer=workspace_buffer,
    )  # fmt: skip
    return result if isinstance(result, list) else [result]
