"""Converts weights from the forms of flashinfer's trtllm-gen kernels back to plain ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

MAJOR_K, BLOCK_MAJOR_K = 0, 2  # flashinfer's WeightLayout
BLOCK_BYTES = 128  # bytes of a row in a block of BlockMajorK
# Rows that a shuffle stays in, by shuffle_matrix_a's epilogue_tile_m: 64 for DeepSeek's fp8, 128 for the other formats.
DEEPSEEK_ROWS, SHUFFLED_ROWS = 16, 32
_LANES = 8


def major_k(weights: Tensor, weight_layout: int) -> Tensor:
    """Returns weights [E, R, K] of weights in this layout. MajorK returns them as they are. BlockMajorK [E, K / B, R,
    B] is copied; B numbers have 128 bytes."""
    if weight_layout != BLOCK_MAJOR_K:
        return weights
    block = BLOCK_BYTES // weights.element_size()
    if weights.dim() != 4 or weights.shape[3] != block:
        raise ValueError(
            f"gemm1_weights, gemm2_weights: expected shape [E, K / {block}, rows, {block}] with weight_layout "
            f"BlockMajorK, got {list(weights.shape)}"
        )
    experts, blocks, rows, _ = weights.shape
    return weights.transpose(1, 2).reshape(experts, rows, blocks * block)


def unshuffled(weights: Tensor, of_shuffle: int) -> Tensor:
    """Returns a copy w [E, R, ...] that undoes flashinfer's shuffle_matrix_a of each expert's rows.

    The rows of each block of of_shuffle lie in eights: place 8 j + i has row (of_shuffle / 8) i + j.
    """
    rows = weights.shape[1]
    if rows % of_shuffle:
        raise ValueError(f"weights: use_shuffled_weight needs a multiple of {of_shuffle} rows, got {rows}")
    return weights.unflatten(1, (-1, of_shuffle // _LANES, _LANES)).transpose(2, 3).flatten(1, 3).contiguous()


def halves(weights: Tensor) -> Tensor:
    """Returns a copy w [E, R, ...] that undoes flashinfer's reorder_rows_for_gated_act_gemm of each expert's rows.
    There rows of the two halves alternate."""
    return weights.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2).contiguous()


def plain_mxfp8(weights: Tensor, scales: Tensor, *, gated: bool, weight_layout: int) -> tuple[Tensor, Tensor]:
    """Returns plain copies: weights [E, R, K] and scales [E, R, K / 32] of operands of trtllm-gen's MXFP8 kernels."""
    weights = major_k(weights, weight_layout)
    if weights.dim() != 3:
        raise ValueError(f"weights: expected 3 dimensions [E, rows, K], got shape {list(weights.shape)}")
    return plain_blocks(weights, scales, weights.shape[2] // 32, gated=gated)


def plain_blocks(weights: Tensor, scales: Tensor, blocks: int, *, gated: bool) -> tuple[Tensor, Tensor]:
    """Returns plain copies: weights [E, R, ...] and scales [E, R, blocks] of operands of trtllm-gen's kernels of
    formats with block scales. There the rows of both are shuffled, and rows of w13 (gated) alternate before that.
    Scales of each expert lie in tiles of 128 rows by 4 (block_scale_interleave; shape [E, R, blocks], or any with as
    many scales an expert)."""
    from oxmoe.formats.nvfp4 import untiled

    experts, rows = weights.shape[:2]
    padded = -(-rows // 128) * 128, -(-blocks // 4) * 4
    if scales.numel() != experts * padded[0] * padded[1]:
        raise ValueError(
            f"weights_scale: use_shuffled_weight needs scales of {experts} experts in tiles of 128 x 4, "
            f"{padded[0]} x {padded[1]} each, got shape {list(scales.shape)}"
        )
    scales = untiled(scales.reshape(experts, *padded), rows, blocks)
    weights, scales = (unshuffled(part, SHUFFLED_ROWS) for part in (weights, scales))
    return (halves(weights), halves(scales)) if gated else (weights, scales)


def valid_sizes(
    valid_hidden_size: int | None, valid_intermediate_size: int | None, hidden_size: int, intermediate_size: int
) -> tuple[int, int] | None:
    """Returns hidden and intermediate size of weights without their padding; None if they have none."""
    padded = {"valid_hidden_size": hidden_size, "valid_intermediate_size": intermediate_size}
    valid = {"valid_hidden_size": valid_hidden_size, "valid_intermediate_size": valid_intermediate_size}
    sizes = {name: padded[name] if value is None else int(value) for name, value in valid.items()}
    for name, size in sizes.items():
        if not 1 <= size <= padded[name]:
            raise ValueError(f"{name}: expected 1 to {padded[name]} (the padded size), got {size}")
    return None if sizes == padded else (sizes["valid_hidden_size"], sizes["valid_intermediate_size"])


def without_padding(
    w13: Sequence[Tensor | None],
    w2: Sequence[Tensor | None],
    columns: Sequence[int],
    sizes: tuple[int, int] | None,
    *,
    gated: bool,
) -> tuple[list[Any], list[Any]]:
    """Returns copies of plain operands [E, rows, K] or [E, rows] without rows and columns of padding. columns: how many
    of the layer's columns an element has. Each half of a gated w13 has its own padding."""
    if sizes is None:
        return list(w13), list(w2)
    hidden, intermediate = sizes

    def cropped(operand: Tensor | None, rows: int, size: int, each: int, halves: int) -> Tensor | None:
        if operand is None:
            return None
        part = operand.unflatten(1, (halves, -1))[:, :, :rows]
        return (part if operand.dim() == 2 else part[..., : -(-size // each)]).flatten(1, 2).contiguous()

    return (
        [cropped(part, intermediate, hidden, each, 2 if gated else 1) for part, each in zip(w13, columns, strict=True)],
        [cropped(part, hidden, intermediate, each, 1) for part, each in zip(w2, columns, strict=True)],
    )


def plain_biases(bias: Tensor | None, of_shuffle: int | None, *, gated: bool = False) -> Tensor | None:
    """Returns a plain copy of a bias [E, R] whose rows lie as the rows of its weights do; None if the bias is None."""
    if bias is None:
        return None
    if of_shuffle is None:
        return bias.clone()
    bias = unshuffled(bias, of_shuffle)
    return halves(bias) if gated else bias
