"""The forms that flashinfer's trtllm-gen kernels hold weights in, made row by row and byte by byte."""

from __future__ import annotations

import torch
from torch import Tensor

# The place of row r of 32 in shuffle_matrix_a with epilogue_tile_m 128.
PLACES = [0, 8, 16, 24, 1, 9, 17, 25, 2, 10, 18, 26, 3, 11, 19, 27, 4, 12, 20, 28, 5, 13, 21, 29, 6, 14, 22, 30, 7, 15]
PLACES += [23, 31]


def shuffle(weights: Tensor, gated: bool) -> Tensor:
    """Shuffles [E, R, ...], row by row. gated: rows of the two halves alternate, and then go to PLACES."""
    rows, result = weights.shape[1], torch.empty_like(weights)
    for place in range(rows):
        row = place // 2 + (place % 2) * (rows // 2) if gated else place
        result[:, place // 32 * 32 + PLACES[place % 32]] = weights[:, row]
    return result


def interleave(scales: Tensor) -> Tensor:
    """Applies block_scale_interleave to each expert: scale by scale into tiles of 128 x 4, zeros beyond the last
    block."""
    experts, rows, blocks = scales.shape
    tiles = (blocks + 3) // 4
    result = torch.zeros((experts, rows // 128 * tiles * 512), dtype=scales.dtype)
    for row in range(rows):
        for block in range(blocks):
            tile = row // 128 * tiles + block // 4
            result[:, tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + block % 4] = scales[:, row, block]
    return result


def blocked(weights: Tensor) -> Tensor:
    """Returns [E, R, K] as [E, K / B, R, B], where B numbers have 128 bytes."""
    return torch.stack(weights.split(128 // weights.element_size(), dim=2), dim=1)
