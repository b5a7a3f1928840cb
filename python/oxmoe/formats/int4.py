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

__all__ = ["Matrix", "from_awq", "from_gptq", "from_marlin", "from_pack_quantized", "from_sm90", "interleave_sm90"]

_WORD = 8  # codes of an int32
_TILE_K, _TILE_N = 16, 64  # columns and rows of a tile of Marlin's weights
_SM90_GROUP = 128  # columns that share a scale in flashinfer's weights for Hopper
_SIGNS = 0x88  # turns two codes with the zero point 8 into two's complement, and back


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


def from_sm90(weights: Tensor, scales: Tensor) -> Matrix:
    """flashinfer's CUTLASS weights for Hopper (W4A8): weights uint8 [..., N, K / 2] in two's complement, from its
    interleave_moe_weights_for_sm90_mixed_gemm ("int4"), and a bf16 scale for each 128 columns. N is a multiple of 64,
    K of 128.

    Scales of flashinfer 0.7 are [..., N / 64, K / 128, 8, 8] (interleave_moe_scales_for_sm90_mixed_gemm with
    group_size 128). Those of 0.6.11 are [..., K / 128 / f, N f], where f is the largest of 4, 2 and 1 that divides
    K / 128. They may have another dtype of two bytes, whose bits are then those of bf16, as flashinfer's callers have
    them with f16 activations.
    """
    rows, columns = _sm90_sizes("weights", weights)
    leading, groups = tuple(weights.shape[:-2]), columns // _SM90_GROUP
    check_tensor("scales", scales)
    if scales.element_size() != 2:
        raise ValueError(f"scales: expected bfloat16, got {_dtype(scales)}")
    if scales.device != weights.device:
        raise ValueError(f"scales: expected a tensor on {weights.device}, got one on {scales.device}")
    factor = _sm90_factor(groups)
    new, old = (rows // 64, groups, 8, 8), (groups // factor, rows * factor)
    shape = tuple(scales.shape)
    if shape not in ((*leading, *new), (*leading, *old)):
        raise ValueError(f"scales: expected shape {[*leading, *new]} or {[*leading, *old]}, got {list(shape)}")
    bits = scales.contiguous().view(torch.bfloat16)
    if scales.ndim == weights.ndim + 2:
        plain = bits.movedim((-1, -2), (-3, -2)).reshape(*leading, rows, groups)
    else:
        plain = bits.view(*leading, groups // factor, rows, factor).transpose(-3, -2).reshape(*leading, rows, groups)
    return Matrix(_sm90_moved(weights, inverse=True) ^ _SIGNS, plain.contiguous(), None)


def interleave_sm90(codes: Tensor, scales: Tensor, *, flashinfer: str = "0.7") -> tuple[Tensor, Tensor]:
    """Inverts from_sm90: (weights, scales) as flashinfer 0.7 or 0.6 has them, of codes uint8 [..., N, K / 2] with the
    zero point 8 and bf16 scales [..., N, K / 128]."""
    if flashinfer not in ("0.6", "0.7"):
        raise ValueError(f'flashinfer: expected "0.6" or "0.7", got "{flashinfer}"')
    rows, columns = _sm90_sizes("codes", codes)
    leading, groups = tuple(codes.shape[:-2]), columns // _SM90_GROUP
    _shaped("scales", scales, codes, (rows, groups))
    if scales.dtype != torch.bfloat16:
        raise ValueError(f"scales: expected bfloat16, got {_dtype(scales)}")
    if flashinfer == "0.7":
        # [tile of 64 rows, eight, row of eight, group]
        laid = scales.reshape(*leading, rows // 64, 8, 8, groups).movedim((-3, -2), (-1, -2))
    else:
        factor = _sm90_factor(groups)
        laid = scales.reshape(*leading, rows, groups // factor, factor).transpose(-3, -2).flatten(-2)
    return _sm90_moved(codes ^ _SIGNS, inverse=False), laid.contiguous()


# Checks


def _sm90_sizes(name: str, weights: Any) -> tuple[int, int]:
    """Checks packed weights [..., N, K / 2], and returns N and K."""
    check_tensor(name, weights)
    if weights.ndim < 2:
        raise ValueError(f"{name}: expected [..., N, K / 2], got shape {tuple(weights.shape)}")
    if weights.dtype != torch.uint8:
        raise ValueError(f"{name}: expected dtype uint8, got {_dtype(weights)}")
    rows, columns = int(weights.shape[-2]), 2 * int(weights.shape[-1])
    for dimension, size, multiple in ((-2, rows, 64), (-1, columns // 2, _SM90_GROUP // 2)):
        if size % multiple:
            raise ValueError(
                f"{name}: dimension {weights.ndim + dimension}: expected a multiple of {multiple}, got {size}"
            )
    return rows, columns


def _sm90_factor(groups: int) -> int:
    """Returns how many scales of a row lie side by side in flashinfer 0.6.11's form."""
    return 4 if groups % 4 == 0 else 2 if groups % 2 == 0 else 1


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


def _sm90_moved(weights: Tensor, inverse: bool) -> Tensor:
    """Moves pairs of bytes as flashinfer's interleave for Hopper does, or back. In it a pair of 16 rows and 32 columns
    goes from [half of rows, row, ..., half of columns, pair] to [half of columns, row, ..., pair, half of rows]."""
    *leading, rows, octets = weights.shape
    pairs, tiles = weights.contiguous().view(-1).view(torch.int16), math.prod(leading) * rows // 16
    if inverse:
        moved = pairs.view(tiles, 2, 8, octets // 16, 4, 2).permute(0, 5, 2, 3, 1, 4)
    else:
        moved = pairs.view(tiles, 2, 8, octets // 16, 2, 4).permute(0, 4, 2, 3, 5, 1)
    return moved.contiguous().view(-1).view(torch.uint8).view(*leading, rows, octets)


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
        options |= {"w13_zeros": self.zeros, "w2_zeros": w2.zeros}
        return ExpertWeights.int4(self.codes, w2.codes, self.scales, w2.scales, **options)


def _draw(experts: int, rows: int, columns: int, device: str, *, group: int, has_zeros: bool) -> Experts:
    codes = torch.randint(256, (experts, rows, columns // 2), dtype=torch.uint8, device=device)
    groups, zeros = columns // min(group, columns), None
    if has_zeros:
        zeros = torch.randint(6, 11, (experts, rows, groups), dtype=torch.uint8, device=device)
    scales = torch.rand((experts, rows, groups), dtype=torch.float32, device=device).add_(0.5).div_(4.6 * columns**0.5)
    return Experts(codes, scales.bfloat16(), zeros)


# Groups of 32 are Kimi K2's. Groups of 128 with zero points are AWQ's.
DRAWN = {
    "int4": drawn.Format(4.5, functools.partial(_draw, group=32, has_zeros=False)),
    "int4-zeros": drawn.Format(4.1875, functools.partial(_draw, group=128, has_zeros=True), packed_bits=4.75),
}
