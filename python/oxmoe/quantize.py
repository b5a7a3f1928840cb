"""Quantisation on CPU and CUDA: e4m3 rows with one scale or a scale for each group of columns, MXFP8, MXFP4, the
layouts that other kernels hold MXFP4 weights in, and those that oxmoe's GPU kernels read. Takes torch and numpy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from oxmoe import deprecation
from oxmoe._oxmoe import deinterleave_sm90_mxfp4, interleave_sm90_mxfp4, swizzle_hopper_mxfp4, unswizzle_hopper_mxfp4
from oxmoe._oxmoe import dequantize_mxfp4 as dequantize
from oxmoe._oxmoe import pack_mxfp4 as mxfp4_pack
from oxmoe._oxmoe import quantize_mxfp4 as mxfp4
from oxmoe._oxmoe import quantize_rows_e4m3 as rows_e4m3
from oxmoe._oxmoe import unpack_mxfp4 as mxfp4_unpack
from oxmoe.functions import dequantize_mxfp8, quantize_fp8
from oxmoe.functions import quantize_mxfp8 as mxfp8
from oxmoe.operands import check_tensor

if not TYPE_CHECKING:
    __getattr__ = deprecation.lookup(__name__)

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "deinterleave_sm90_mxfp4",
    "dequantize",
    "dequantize_mxfp8",
    "interleave_sm90_mxfp4",
    "mxfp4",
    "mxfp4_pack",
    "mxfp4_unpack",
    "mxfp8",
    "per_token_group_quant_fp8",
    "rows_e4m3",
    "swizzle_hopper_mxfp4",
    "swizzle_scales",
    "unswizzle_hopper_mxfp4",
    "unswizzle_scales",
]


def _tiles(rows: int, blocks: int, layout: str) -> tuple[int, int, int]:
    """Returns (rows of a tile, tiles of rows, tiles of four blocks)."""
    if layout not in ("128x4", "8x4"):
        raise ValueError(f'layout: expected "128x4" or "8x4", got {layout!r}')
    of_tile = 128 if layout == "128x4" else 8
    return of_tile, -(-rows // of_tile), -(-blocks // 4)


def swizzle_scales(scales: Tensor, layout: str = "128x4") -> Tensor:
    """Block scales uint8 [rows, blocks] in the flat order of flashinfer's "128x4" or "8x4" layout, padded with zeros.

    "128x4": [rows / 128, blocks / 4, 32, 4, 4], row r of a tile at [r % 32, r / 32]; "8x4": [rows / 8, blocks / 4, 8,
    4].
    """
    check_tensor("scales", scales)
    if scales.ndim != 2:
        raise ValueError(f"scales: expected 2 dimensions [rows, blocks], got shape {tuple(scales.shape)}")
    rows, blocks = scales.shape
    of_tile, row_tiles, block_tiles = _tiles(rows, blocks, layout)
    padded = scales.new_zeros((row_tiles * of_tile, block_tiles * 4))
    padded[:rows, :blocks] = scales
    tiles = padded.view(row_tiles, of_tile // 32 or 1, min(of_tile, 32), block_tiles, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1)


def unswizzle_scales(scales: Tensor, rows: int, blocks: int, layout: str = "128x4") -> Tensor:
    """The inverse of swizzle_scales: [rows, blocks] of flat scales with padding."""
    check_tensor("scales", scales)
    of_tile, row_tiles, block_tiles = _tiles(rows, blocks, layout)
    size = row_tiles * of_tile * block_tiles * 4
    if tuple(scales.shape) != (size,):
        raise ValueError(
            f"scales: expected shape {(size,)} for {rows} x {blocks} in {layout}, got {tuple(scales.shape)}"
        )
    tiles = scales.view(row_tiles, block_tiles, min(of_tile, 32), of_tile // 32 or 1, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(row_tiles * of_tile, block_tiles * 4)[:rows, :blocks].contiguous()


def per_token_group_quant_fp8(
    x: Tensor,
    group_size: int,
    eps: float = 1e-10,
    dtype: Any = None,
    column_major_scales: bool = False,
    scale_tma_aligned: bool = False,
    scale_ue8m0: bool = False,
) -> tuple[Tensor, Tensor]:
    """SGLang's function of this name: float8_e4m3fn codes [..., K] of bf16, f16 or fp32 x [..., K] and a scale for each
    group_size columns of a row, amax / 448 with amax at least eps. group_size is 16, 32, 64 or 128 and divides K.

    Codes are x times the rounded reciprocal of the scale, to nearest, ties to even, at most 448. Scales are fp32
    [..., K / group_size]. column_major_scales: of 2-D x, strides (1, rows), with scale_tma_aligned rows rounded up to
    4. scale_ue8m0 (with both, and group_size 128): the next power of two from amax / 448 on, as int32
    [rows, ceil(K / 512)] of four E8M0 bytes, the first group lowest. NaN stays NaN and counts for no scale.
    numpy has no float8: there codes are uint8.
    """
    name = str(dtype).rpartition(".")[2]
    if dtype is not None and name != "float8_e4m3fn":
        raise NotImplementedError(f"per_token_group_quant_fp8: no kernel for dtype {name}; served is float8_e4m3fn")
    if scale_ue8m0 and not (column_major_scales and scale_tma_aligned and group_size == 128):
        raise ValueError(
            "scale_ue8m0: needs column_major_scales, scale_tma_aligned and group_size 128, "
            f"got {column_major_scales}, {scale_tma_aligned} and {group_size}"
        )
    if column_major_scales and getattr(x, "ndim", 2) != 2:
        raise NotImplementedError(f"column_major_scales: served for 2-D x, got {x.ndim} dimensions")
    codes, scales = quantize_fp8(
        x,
        group_size,
        eps,
        column_major=column_major_scales,
        row_multiple=4 if column_major_scales and scale_tma_aligned else 1,
        powers=scale_ue8m0,
    )
    return codes, scales.T[: codes.shape[0]] if column_major_scales else scales
