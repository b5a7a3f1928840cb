"""NVFP4 under the names of flashinfer and SGLang: quantisation, and the layouts of scales and of w13.

A byte has two e2m1 codes, with the even column in the low nibble. Each 16 columns have an e4m3 scale, and the whole
tensor has an fp32 number. Functions that only move bytes use torch and run on every device. Quantisation is oxmoe's,
on CPU and CUDA.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from oxmoe.functions import quantize_nvfp4
from oxmoe.operands import check_quantizer, check_tensor

__all__ = [
    "convert_sf_from_mma_layout",
    "convert_sf_to_mma_layout",
    "deinterleave_w13_halves",
    "fp4_quantize",
    "interleave_w13_halves",
    "scaled_fp4_grouped_quantize",
    "swizzle_blockscale",
    "unswizzle_blockscale",
]

_TILE_ROWS, _TILE_COLUMNS = 128, 4


def _tiles(size: int, tile: int) -> int:
    return -(-size // tile)


def _scale_tiles(rows: int, columns: int, sf_vec_size: int) -> tuple[int, int]:
    """Returns the number of tiles of a matrix's scales."""
    if sf_vec_size < 1:
        raise ValueError(f"sf_vec_size: expected 1 or more, got {sf_vec_size}")
    return _tiles(rows, _TILE_ROWS), _tiles(_tiles(columns, sf_vec_size), _TILE_COLUMNS)


# Gate and up rows


def _halves(tensor: Tensor, group_size: int, dim: int) -> int:
    """Returns the number of groups in a half."""
    check_tensor("tensor", tensor)
    if not -tensor.ndim <= dim < tensor.ndim:
        raise ValueError(f"dim: expected a dimension of the tensor's {tensor.ndim}, got {dim}")
    size = tensor.shape[dim]
    if size % 2 != 0:
        raise ValueError(f"tensor: dimension {dim} has two halves and must be even, got {size}")
    if group_size < 1 or size // 2 % group_size != 0:
        raise ValueError(
            f"tensor: dimension {dim}: expected halves of a multiple of group_size {group_size}, got {size // 2}"
        )
    return size // 2 // group_size


def interleave_w13_halves(tensor: Tensor, group_size: int = 64, dim: int = 1) -> Tensor:
    """SGLang's function of this name. Returns a new tensor with the two halves of `dim` in turn, group_size at a
    time."""
    groups, dim = _halves(tensor, group_size, dim), dim % tensor.ndim
    return tensor.unflatten(dim, (2, groups, group_size)).transpose(dim, dim + 1).flatten(dim, dim + 2).contiguous()


def deinterleave_w13_halves(tensor: Tensor, group_size: int = 64, dim: int = 1) -> Tensor:
    """Inverts interleave_w13_halves."""
    groups, dim = _halves(tensor, group_size, dim), dim % tensor.ndim
    return tensor.unflatten(dim, (groups, 2, group_size)).transpose(dim, dim + 1).flatten(dim, dim + 2).contiguous()


# Scales


def swizzle_blockscale(scale: Tensor) -> Tensor:
    """SGLang's function of this name: scales float8_e4m3fn [M, G] or [B, M, G] in tiles of 128 rows by 4 columns,
    [M / 128][G / 4][32][4][4] with row r of a tile at [r % 32][r / 32]; M and G are rounded up to whole tiles, with
    zeros. Returned as [M', G'] or [B, M', G'] on the scales' device."""
    check_tensor("scale", scale)
    if scale.dtype != torch.float8_e4m3fn:
        raise ValueError(f"scale: expected dtype float8_e4m3fn, got {str(scale.dtype).rpartition('.')[2]}")
    if scale.ndim not in (2, 3):
        raise ValueError(f"scale: expected [M, G] or [B, M, G], got shape {tuple(scale.shape)}")
    *batch, rows, columns = scale.shape
    row_tiles, column_tiles = _tiles(rows, _TILE_ROWS), _tiles(columns, _TILE_COLUMNS)
    shape = (*batch, row_tiles * _TILE_ROWS, column_tiles * _TILE_COLUMNS)
    padded = torch.zeros(shape, dtype=torch.uint8, device=scale.device)
    padded[..., :rows, :columns] = scale.view(torch.uint8)
    tiles = padded.view(math.prod(batch), row_tiles, 4, 32, column_tiles, 4).permute(0, 1, 4, 3, 2, 5)
    return tiles.reshape(shape).view(torch.float8_e4m3fn)


def unswizzle_blockscale(scale: Tensor, rows: int, columns: int) -> Tensor:
    """Inverts swizzle_blockscale. Returns scales [..., rows, columns] from [..., M', G'], for every dtype of one
    byte."""
    check_tensor("scale", scale)
    row_tiles, column_tiles = _tiles(rows, _TILE_ROWS), _tiles(columns, _TILE_COLUMNS)
    padded = (row_tiles * _TILE_ROWS, column_tiles * _TILE_COLUMNS)
    if tuple(scale.shape[-2:]) != padded:
        raise ValueError(
            f"scale: expected [..., {padded[0]}, {padded[1]}] for {rows} rows of {columns} scales, "
            f"got shape {tuple(scale.shape)}"
        )
    if scale.element_size() != 1:
        raise ValueError(f"scale: expected a dtype of one byte, got {str(scale.dtype).rpartition('.')[2]}")
    return untiled(scale.view(torch.uint8), rows, columns).view(scale.dtype)


def untiled(scale: Tensor, rows: int, columns: int) -> Tensor:
    """Returns scales [..., rows, columns] of any dtype from [..., M', G'], whose tiles of 128 x 4 lie one after the
    other."""
    *batch, padded_rows, padded_columns = scale.shape
    tiles = scale.reshape(
        math.prod(batch), padded_rows // _TILE_ROWS, padded_columns // _TILE_COLUMNS, 32, 4, _TILE_COLUMNS
    )
    plain = tiles.permute(0, 1, 4, 3, 2, 5).reshape(*batch, padded_rows, padded_columns)
    return plain[..., :rows, :columns].contiguous()


def convert_sf_to_mma_layout(sf: Tensor, m: int, k: int, num_groups: int = 1, sf_vec_size: int = 16) -> Tensor:
    """flashinfer's function of this name: swizzled scales of num_groups matrices [m, k] (swizzle_blockscale,
    fp4_quantize) as a view [32, 4, m tiles, 4, k tiles, num_groups] of the same memory."""
    check_tensor("sf", sf)
    row_tiles, column_tiles = _scale_tiles(m, k, sf_vec_size)
    expected = num_groups * row_tiles * column_tiles * _TILE_ROWS * _TILE_COLUMNS
    if sf.numel() != expected:
        raise ValueError(f"sf: expected {expected} scales for m={m}, k={k}, num_groups={num_groups}, got {sf.numel()}")
    return sf.view(num_groups, row_tiles, column_tiles, 32, 4, 4).permute(3, 4, 1, 5, 2, 0)


def convert_sf_from_mma_layout(sf_6d: Tensor, m: int, k: int, num_groups: int = 1, sf_vec_size: int = 16) -> Tensor:
    """The inverse of convert_sf_to_mma_layout: swizzled scales [num_groups x padded m, padded k / sf_vec_size], of a
    view or of a contiguous tensor."""
    check_tensor("sf_6d", sf_6d)
    row_tiles, column_tiles = _scale_tiles(m, k, sf_vec_size)
    expected = (32, 4, row_tiles, 4, column_tiles, num_groups)
    if tuple(sf_6d.shape) != expected:
        raise ValueError(f"sf_6d: expected shape {expected} for m={m}, k={k}, got {tuple(sf_6d.shape)}")
    rows = num_groups * row_tiles * _TILE_ROWS
    return sf_6d.permute(5, 2, 4, 0, 1, 3).reshape(rows, column_tiles * _TILE_COLUMNS)


# Quantisation


def fp4_quantize(
    input: Tensor,
    global_scale: Tensor | None = None,
    sf_vec_size: int = 16,
    sf_use_ue8m0: bool = False,
    is_sf_swizzled_layout: bool = True,
    is_sf_8x4_layout: bool = False,
    is_global_scale_inversed: bool = False,
    enable_pdl: bool | None = None,
    backend: str = "auto",
    nvfp4_4over6: Any = None,
    *,
    batch_invariant: bool = False,
) -> tuple[Tensor, Tensor]:
    """flashinfer's function of this name: (e2m1 pairs uint8 [..., K / 2], scales uint8 [M', G']) of input [..., K],
    float16, bfloat16, float32 or float8_e4m3fn, on CPU or CUDA; M is the product of the other dimensions.

    The scale of a block of sf_vec_size columns (16 or 32) is e4m3(global_scale amax / 6), or with sf_use_ue8m0 a power
    of two, rounded up; numbers are multiplied by global_scale over that scale and rounded to nearest even. Scales lie
    in tiles of 128 (is_sf_8x4_layout: 8) rows by 4, padded with zeros, or row by row. global_scale: fp32, one number;
    None: 1; is_global_scale_inversed: numbers are divided by it. Of float8_e4m3fn the numbers times 6 / global_scale,
    rounded to float16, are quantised, as flashinfer's kernels have it. A matrix with stride(-2) == 1 is quantised
    along its rows, and both results are transposed back.

    Every backend and enable_pdl gives the same: divisions are exact, where flashinfer's kernels take approximate
    reciprocals. nvfp4_4over6 (flashinfer 0.7) is refused by name. batch_invariant (flashinfer 0.7.4) changes nothing,
    since the bits of a row depend on that row and global_scale alone; like flashinfer's it needs backend "auto".
    """
    if sf_vec_size not in (16, 32):
        raise NotImplementedError(f"sf_vec_size can only be 16 or 32, got {sf_vec_size}")
    check_quantizer(backend, batch_invariant)
    if backend == "cute-dsl" and (sf_vec_size, bool(sf_use_ue8m0)) not in ((16, False), (32, True)):
        raise ValueError(
            f"backend 'cute-dsl': expected sf_vec_size 16 without sf_use_ue8m0 or 32 with it, "
            f"got {sf_vec_size} and {sf_use_ue8m0}"
        )
    if nvfp4_4over6 is not None:
        raise NotImplementedError("nvfp4_4over6: no search between two scales; supported: None")
    check_tensor("input", input)
    if input.ndim < 2:
        raise ValueError(f"input: expected [..., M, K], got shape {tuple(input.shape)}")
    column_major = input.stride(-2) == 1
    if column_major:
        input = input.transpose(-2, -1)
    columns = input.shape[-1]
    if columns % sf_vec_size != 0:
        raise ValueError(f"input: expected rows of a multiple of {sf_vec_size} (sf_vec_size), got {columns}")
    if global_scale is not None:
        check_tensor("global_scale", global_scale)
        if global_scale.is_complex():
            raise ValueError(f"global_scale: expected a real number, got {str(global_scale.dtype).rpartition('.')[2]}")
        global_scale = global_scale.to(device=input.device, dtype=torch.float32).reshape(-1)
        if global_scale.numel() != 1:
            raise ValueError(f"global_scale: expected one number, got {global_scale.numel()}")
    if input.dtype == torch.float8_e4m3fn:
        scale = torch.ones((), dtype=torch.float32, device=input.device) if global_scale is None else global_scale
        input = (input.float() * (6 * scale if is_global_scale_inversed else 6 / scale)).half()
    codes, scales = quantize_nvfp4(
        input.reshape(1, math.prod(input.shape[:-1]), columns),
        global_scale,
        block=sf_vec_size,
        scale_dtype="e8m0" if sf_use_ue8m0 else "e4m3",
        scale_layout=("8x4" if is_sf_8x4_layout else "128x4") if is_sf_swizzled_layout else "linear",
        inverse=is_global_scale_inversed,
    )
    codes, scales = codes.view(*input.shape[:-1], columns // 2), scales[0]
    return (codes.transpose(-2, -1), scales.transpose(-2, -1)) if column_major else (codes, scales)


def scaled_fp4_grouped_quantize(
    a: Tensor, mask: Tensor, a_global_sf: Tensor, nvfp4_4over6: Any = None
) -> tuple[Tensor, Tensor]:
    """flashinfer's function of this name: NVFP4 of a [B, M, K] (float16, bfloat16 or float32; K a multiple of 16), of
    whose batches the first mask (int32 [B]) rows count, with a_global_sf fp32 [B], or one number for all.

    (codes uint8 [M, K / 2, B], scales float8_e4m3fn [32, 4, ceil(M / 128), 4, ceil(K / 64), B]), views of memory in the
    order [B, M, K / 2] and of convert_sf_to_mma_layout. Codes and scales of rows beyond the mask are undefined.
    """
    if nvfp4_4over6 is not None:
        raise NotImplementedError("nvfp4_4over6: no search between two scales; supported: None")
    check_tensor("a", a, "B", "M", "K")
    batches, rows, columns = a.shape
    codes, scales = quantize_nvfp4(a, a_global_sf, scale_layout="128x4", masked_m=mask)
    mma = convert_sf_to_mma_layout(scales.view(torch.float8_e4m3fn), rows, columns, batches)
    return codes.permute(1, 2, 0), mma
