"""int4 weights as other projects lay them out, as `ExpertWeights.int4` takes them, and random ones for benches.

Every public function takes the tensors of one matrix, or of [..., experts] of them, and returns a `Matrix`. It only
moves numbers, with torch, on every device. K is a row's number of columns, N the number of rows, G the number of groups
of columns that share a scale. A word is an int32 of eight codes, the first in its lowest four bits.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from oxmoe import reference
from oxmoe._oxmoe import ExpertWeights
from oxmoe.formats import drawn
from oxmoe.operands import check_tensor

__all__ = ["Matrix", "from_awq", "from_gptq", "from_marlin", "from_pack_quantized"]

_WORD = 8  # codes of an int32
_TILE_K, _TILE_N = 16, 64  # columns and rows of a tile of Marlin's weights


class Matrix(NamedTuple):
    """Codes, scales and zero points of weights [..., N, K]."""

    codes: Tensor  # uint8 [..., N, K / 2], the lower column in the lower four bits
    scales: Tensor  # [..., N, G], of the given dtype
    zeros: Tensor | None  # uint8 [..., N, G]; None: 8 everywhere


def from_pack_quantized(
    weight_packed: Tensor,
    weight_scale: Tensor,
    weight_zero_point: Tensor | None = None,
    weight_g_idx: Tensor | None = None,
) -> Matrix:
    """compressed-tensors' "pack-quantized" with four bits: weight_packed int32 [..., N, K / 8], weight_scale
    [..., N, G]. Asymmetric weights have weight_zero_point int32 [..., N / 8, G] (words of eight rows). An activation
    order of groups has weight_g_idx [..., K].

    Codes and scales are the given memory where that is contiguous. NotImplementedError for a
    weight_g_idx other than k // (K / G).
    """
    rows, words = _matrix("weight_packed", weight_packed, "N", "K / 8")
    columns = _WORD * words
    groups = _groups("weight_scale", weight_scale, weight_packed, (rows, None), columns)
    _check_order("weight_g_idx", weight_g_idx, columns, groups)
    zeros = None
    if weight_zero_point is not None:
        _words(
            "weight_zero_point", weight_zero_point, weight_packed, (_words_of_rows("weight_zero_point", rows), groups)
        )
        zeros = _each(lambda words: _nibbles(words.t()).t(), weight_zero_point, (rows, groups))
    return Matrix(_octets(weight_packed), weight_scale.contiguous(), zeros)


def from_awq(qweight: Tensor, scales: Tensor, qzeros: Tensor) -> Matrix:
    """AWQ's weights (version "gemm"): qweight int32 [..., K, N / 8], scales [..., G, N], qzeros int32
    [..., G, N / 8]. A word has the rows 0, 2, 4, 6, 1, 3, 5, 7 of its eight."""
    columns, words = _matrix("qweight", qweight, "K", "N / 8")
    rows = _WORD * words
    groups = _groups("scales", scales, qweight, (None, rows), columns)
    _words("qzeros", qzeros, qweight, (groups, words))
    codes = _each(lambda words: _pairs(_awq_order(_nibbles(words)).t()), qweight, (rows, columns // 2))
    zeros = _each(lambda words: _awq_order(_nibbles(words)).t(), qzeros, (rows, groups))
    return Matrix(codes, _turned(scales), zeros)


def from_gptq(
    qweight: Tensor,
    scales: Tensor,
    qzeros: Tensor | None = None,
    g_idx: Tensor | None = None,
    *,
    version: int = 1,
) -> Matrix:
    """GPTQ's weights: qweight int32 [..., K / 8, N], scales [..., G, N], qzeros int32 [..., G, N / 8] (None: symmetric
    weights, whose zero points are 8), g_idx [..., K].

    version: of the checkpoint_format, 1 ("gptq": qzeros are the zero points less 1, which are 1 to 16) or 2
    ("gptq_v2"). NotImplementedError for a g_idx other than k // (K / G), which desc_act makes.
    """
    if version not in (1, 2):
        raise ValueError(f"version: expected 1 or 2, got {version!r}")
    words, rows = _matrix("qweight", qweight, "K / 8", "N")
    columns = _WORD * words
    groups = _groups("scales", scales, qweight, (None, rows), columns)
    _check_order("g_idx", g_idx, columns, groups)
    zeros = None
    if qzeros is not None:
        _words("qzeros", qzeros, qweight, (groups, _words_of_rows("qzeros", rows)))
        zeros = _each(lambda words: _nibbles(words).t(), qzeros, (rows, groups))
        zeros += 2 - version
    return Matrix(_octets(_turned(qweight)), _turned(scales), zeros)


def from_marlin(
    qweight: Tensor,
    scales: Tensor,
    qzeros: Tensor | None = None,
    g_idx: Tensor | None = None,
) -> Matrix:
    """Marlin's weights, as SGLang's layers hold them after loading: qweight int32 [..., K / 16, 2N]
    (gptq_marlin_repack, awq_marlin_repack), scales [..., G, N] (marlin_permute_scales), qzeros int32 [..., G, N / 8]
    (marlin_zero_points; None: 8 everywhere). K is a multiple of 16, N of 64.

    NotImplementedError for a g_idx with elements: columns then are in another order than the tokens'.
    """
    tiles, doubled = _matrix("qweight", qweight, "K / 16", "2N")
    columns, rows = _TILE_K * tiles, doubled // 2
    if doubled % (2 * _TILE_N) != 0:
        raise ValueError(f"qweight: dimension {qweight.ndim - 1}: expected a multiple of {2 * _TILE_N}, got {doubled}")
    groups = _groups("scales", scales, qweight, (None, rows), columns)
    if g_idx is not None and g_idx.numel():
        raise NotImplementedError("g_idx: columns in activation order (desc_act) are not served; supported: None")
    codes = _each(_marlin_codes, qweight, (rows, columns // 2))
    single = groups == 1  # one scale serves a whole row
    plain = _each(lambda part: _marlin_rows(part, single).t(), scales, (rows, groups), scales.dtype)
    zeros = None
    if qzeros is not None:
        _words("qzeros", qzeros, qweight, (groups, _words_of_rows("qzeros", rows)))
        # Zero points lie as the scales of groups do, even if there is one group.
        zeros = _each(lambda words: _marlin_rows(_awq_order(_nibbles(words)), False).t(), qzeros, (rows, groups))
    return Matrix(codes, plain, zeros)


# Checks


def _matrix(name: str, words: Any, *dimensions: str) -> tuple[int, int]:
    """Checks a tensor of words, and returns its last two sizes."""
    check_tensor(name, words)
    if words.ndim < 2:
        raise ValueError(f"{name}: expected [..., {', '.join(dimensions)}], got shape {tuple(words.shape)}")
    if words.dtype != torch.int32:
        raise ValueError(f"{name}: expected dtype int32, got {_dtype(words)}")
    return int(words.shape[-2]), int(words.shape[-1])


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).rpartition(".")[2]


def _words_of_rows(name: str, rows: int) -> int:
    if rows % _WORD != 0:
        raise ValueError(f"{name}: expected zero points of a multiple of {_WORD} rows, got {rows} rows")
    return rows // _WORD


def _shaped(name: str, tensor: Any, beside: Tensor, expected: tuple[int | None, int | None]) -> None:
    check_tensor(name, tensor)
    leading = tuple(beside.shape[:-2])
    sizes = (*leading, *expected)
    if tensor.ndim != len(sizes) or any(want not in (None, got) for want, got in zip(sizes, tensor.shape, strict=True)):
        shown = ", ".join("G" if size is None else str(size) for size in sizes)
        raise ValueError(f"{name}: expected [{shown}], got shape {tuple(tensor.shape)}")
    if tensor.device != beside.device:
        raise ValueError(f"{name}: expected a tensor on {beside.device}, got one on {tensor.device}")


def _words(name: str, words: Any, beside: Tensor, expected: tuple[int, int]) -> None:
    _shaped(name, words, beside, expected)
    if words.dtype != torch.int32:
        raise ValueError(f"{name}: expected dtype int32, got {_dtype(words)}")


def _groups(name: str, scales: Any, beside: Tensor, expected: tuple[int | None, int | None], columns: int) -> int:
    """Checks that scales have the sizes `expected`, and returns the number of groups."""
    _shaped(name, scales, beside, expected)
    if not scales.is_floating_point():
        raise ValueError(f"{name}: expected a dtype of floating point, got {_dtype(scales)}")
    groups = int(scales.shape[-2 if expected[0] is None else -1])
    if groups == 0 or columns % groups != 0:
        raise ValueError(f"{name}: expected a number of groups that cuts {columns} columns evenly, got {groups}")
    return groups


def _check_order(name: str, g_idx: Any, columns: int, groups: int) -> None:
    """Raises NotImplementedError unless column k is of group k // (columns / groups). A missing or empty g_idx is
    right, too."""
    if g_idx is None:
        return
    check_tensor(name, g_idx)
    if g_idx.numel() == 0:
        return
    if g_idx.shape[-1] != columns:
        raise ValueError(f"{name}: expected [..., {columns}], got shape {tuple(g_idx.shape)}")
    plain = torch.arange(columns, device=g_idx.device) // (columns // groups)
    if not bool((g_idx == plain).all()):
        raise NotImplementedError(
            f'{name}: groups of columns in activation order (desc_act, actorder "group") are not served; supported: '
            f"column k in group k // {columns // groups}"
        )


# Moves, of one matrix


def _each(
    move: Callable[[Tensor], Tensor], tensor: Tensor, size: tuple[int, int], dtype: torch.dtype = torch.uint8
) -> Tensor:
    """Applies `move` to each matrix [..., r, c], one after the other, so that not all of them are unpacked at a
    time."""
    leading = tensor.shape[:-2]
    result = torch.empty((math.prod(leading), *size), dtype=dtype, device=tensor.device)
    for out, one in zip(result, tensor.reshape(-1, *tensor.shape[-2:]), strict=True):
        out.copy_(move(one))
    return result.view(*leading, *size)


def _turned(tensor: Tensor) -> Tensor:
    return tensor.transpose(-1, -2).contiguous()


def _octets(words: Tensor) -> Tensor:
    """Views int32 [..., c] as uint8 [..., 4c]. The result is the same memory if that is contiguous."""
    # The view goes through one dimension, because a dimension of size 1 may have any stride.
    return words.contiguous().view(-1).view(torch.uint8).view(*words.shape[:-1], 4 * words.shape[-1])


def _nibbles(words: Tensor) -> Tensor:
    """Unpacks int32 [r, c] to uint8 [r, 8c]: the codes of each word, the lowest first."""
    octets = _octets(words)
    return torch.stack([octets & 15, octets >> 4], dim=-1).flatten(-2)


def _pairs(codes: Tensor) -> Tensor:
    """Packs codes uint8 [r, c] to pairs uint8 [r, c / 2], the lower column in the low nibble."""
    return codes[:, 0::2] | codes[:, 1::2] << 4


def _awq_order(numbers: Tensor) -> Tensor:
    """Puts columns [r, c] in order, if they lie as 0, 2, 4, 6, 1, 3, 5, 7 of each eight."""
    return numbers.unflatten(1, (-1, 2, 4)).transpose(2, 3).flatten(1)


def _marlin_codes(words: Tensor) -> Tensor:
    """Returns pairs [N, K / 2] of words [K / 16, 2N]. A tile of 16 x 64 is 32 lanes of a warp with four words each,
    one word for 16 rows. A lane (column of eight, pair of columns) has rows c and c + 8, and columns 2p, 2p + 1, 2p +
    8 and 2p + 9."""
    tiles = words.shape[0]
    # [K tile, N tile, row, pair, sixteen rows, odd, eight rows, eight columns]
    numbers = _nibbles(words).view(tiles, -1, 8, 4, 4, 2, 2, 2)
    rows_first = numbers.permute(1, 4, 6, 2, 0, 7, 3, 5)
    return _pairs(rows_first.reshape(-1, tiles * _TILE_K))


def _marlin_rows(numbers: Tensor, single: bool) -> Tensor:
    """Puts scales [G, N] in the order of rows. They lie as Marlin's scales of groups, or (single) of whole rows, do."""
    if single:
        return numbers.unflatten(1, (-1, 4, 4, 2)).transpose(2, 3).flatten(1)
    return numbers.unflatten(1, (-1, 8, 8)).transpose(2, 3).flatten(1)


@dataclass(frozen=True)
class Experts(drawn.Experts):
    """The matrices of experts. An index gives the bf16 numbers of one expert."""

    codes: Tensor  # uint8 [E, R, K / 2]
    scales: Tensor  # bf16 [E, R, groups]
    zeros: Tensor | None  # uint8 [E, R, groups]

    @property
    def shape(self) -> tuple[int, int, int]:
        experts, rows, columns = self.codes.shape
        return experts, rows, 2 * columns

    def __getitem__(self, expert: int) -> Tensor:
        zeros = None if self.zeros is None else self.zeros[expert]
        return reference.int4_weights(self.codes[expert], self.scales[expert], zeros)

    def weights(self, w2: Experts, **options: Any) -> ExpertWeights:
        zeros = {"w13_zeros": self.zeros, "w2_zeros": w2.zeros}
        return ExpertWeights.int4(self.codes, w2.codes, self.scales, w2.scales, **zeros, **options)


def _draw(experts: int, rows: int, columns: int, device: str, *, group: int, has_zeros: bool) -> Experts:
    codes = torch.randint(256, (experts, rows, columns // 2), dtype=torch.uint8, device=device)
    groups, zeros = columns // min(group, columns), None
    if has_zeros:
        zeros = torch.randint(6, 11, (experts, rows, groups), dtype=torch.uint8, device=device)
    scales = torch.rand((experts, rows, groups), device=device).add_(0.5).div_(4.6 * columns**0.5)
    return Experts(codes, scales.bfloat16(), zeros)


# Groups of 32 are Kimi K2's. Groups of 128 with zero points are AWQ's.
DRAWN = {
    "int4": drawn.Format(4.5, functools.partial(_draw, group=32, has_zeros=False)),
    "int4-zeros": drawn.Format(4.1875, functools.partial(_draw, group=128, has_zeros=True)),
}
