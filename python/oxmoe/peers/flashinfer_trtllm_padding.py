"""flashinfer's `pad_trtllm_moe_weights` (0.7.4): weights with block scales, padded to the sizes of its kernels.

oxmoe's kernels take the sizes of the model, so the `trtllm_*_moe` calls drop the padding again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from oxmoe.operands import check_counts, check_tensor, checked_arguments

if TYPE_CHECKING:
    from torch import Tensor

_OUTPUT_ROWS = 128  # rows of gemm2_weights are padded to a multiple of this
# Columns that share a scale -> the scale 1: of E8M0 and of e4m3.
_NEUTRAL = {32: 127, 16: 0x38}


class TrtllmMoePaddedWeights(NamedTuple):
    """The padded tensors, their sizes, and the sizes of the model."""

    gemm1_weights: Tensor
    gemm1_weights_scale: Tensor
    gemm2_weights: Tensor
    gemm2_weights_scale: Tensor
    hidden_size: int
    intermediate_size: int
    valid_hidden_size: int
    valid_intermediate_size: int


@checked_arguments
def pad_trtllm_moe_weights(
    gemm1_weights: Tensor,
    gemm1_weights_scale: Tensor,
    gemm2_weights: Tensor,
    gemm2_weights_scale: Tensor,
    hidden_size: int,
    intermediate_size: int,
    *,
    is_gated_act: bool = True,
    hidden_alignment: int = 512,
    intermediate_alignment: int = 128,
) -> TrtllmMoePaddedWeights:
    """flashinfer's function: plain weights and scales of one byte an element, before flashinfer's shuffles, padded.

    gemm1 [E, 2I, H] (without is_gated_act [E, I, H]) and gemm2 [E, H, I]: e4m3 codes, or two e2m1 codes a byte; scales
    for 32 columns (E8M0) or 16 (e4m3). H becomes a multiple of hidden_alignment in gemm1, and of 128 in gemm2; I
    becomes a multiple of intermediate_alignment, in each half of a gated gemm1 by itself. Codes are padded with zeros,
    and scales with the scale 1. Pass hidden_size and intermediate_size of the result, and its valid_hidden_size and
    valid_intermediate_size, to `trtllm_fp8_block_scale_moe` with MxFp8 or to `trtllm_fp4_block_scale_moe`.
    """
    alignments = {"hidden_alignment": hidden_alignment, "intermediate_alignment": intermediate_alignment}
    check_counts({"hidden_size": hidden_size, "intermediate_size": intermediate_size, **alignments})
    for name, alignment in alignments.items():
        if alignment % _OUTPUT_ROWS:
            raise ValueError(f"{name}: expected a multiple of {_OUTPUT_ROWS}, got {alignment}")
    operands = {
        "gemm1_weights": gemm1_weights,
        "gemm1_weights_scale": gemm1_weights_scale,
        "gemm2_weights": gemm2_weights,
        "gemm2_weights_scale": gemm2_weights_scale,
    }
    for name, tensor in operands.items():
        check_tensor(name, tensor, "E", "rows", "K")
        if tensor.element_size() != 1:
            raise ValueError(f"{name}: expected a dtype of one byte, got {str(tensor.dtype).rpartition('.')[2]}")
    halves, (experts, _, columns) = 2 if is_gated_act else 1, gemm1_weights.shape
    if columns * 2 != hidden_size and columns != hidden_size:
        raise ValueError(
            f"gemm1_weights: dimension 2: expected {hidden_size} codes (hidden_size) of one byte or half a byte, got "
            f"{columns} bytes"
        )
    blocks = gemm1_weights_scale.shape[2]
    block = hidden_size // blocks if blocks else 0
    if block not in _NEUTRAL or blocks * block != hidden_size:
        raise ValueError(
            f"gemm1_weights_scale: dimension 2: expected a scale for 32 or 16 of {hidden_size} columns, got {blocks}"
        )
    if intermediate_size % block:
        raise ValueError(
            f"intermediate_size: expected a multiple of {block} (a scale's columns), got {intermediate_size}"
        )
    each, neutral = hidden_size // columns, _NEUTRAL[block]
    shapes = {
        "gemm1_weights": (experts, halves * intermediate_size, columns),
        "gemm1_weights_scale": (experts, halves * intermediate_size, blocks),
        "gemm2_weights": (experts, hidden_size, intermediate_size // each),
        "gemm2_weights_scale": (experts, hidden_size, intermediate_size // block),
    }
    for name, shape in shapes.items():
        if tuple(operands[name].shape) != shape:
            raise ValueError(f"{name}: expected shape {list(shape)}, got {list(operands[name].shape)}")
    hidden, rows = _up(hidden_size, hidden_alignment), _up(hidden_size, _OUTPUT_ROWS)
    intermediate = _up(intermediate_size, intermediate_alignment)
    return TrtllmMoePaddedWeights(
        _padded(gemm1_weights, halves, intermediate, hidden // each, 0),
        _padded(gemm1_weights_scale, halves, intermediate, hidden // block, neutral),
        _padded(gemm2_weights, 1, rows, intermediate // each, 0),
        _padded(gemm2_weights_scale, 1, rows, intermediate // block, neutral),
        hidden,
        intermediate,
        hidden_size,
        intermediate_size,
    )


def _up(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment


def _padded(tensor: Tensor, halves: int, rows: int, columns: int, fill: int) -> Tensor:
    """Returns [E, halves x rows, columns] with the tensor's bytes at the beginning of each half, and `fill` behind."""
    import torch

    parts = tensor.view(torch.uint8).unflatten(1, (halves, -1))
    result = parts.new_full((tensor.shape[0], halves, rows, columns), fill)
    result[:, :, : parts.shape[2], : parts.shape[3]] = parts
    return result.flatten(1, 2).view(tensor.dtype)
