"""int4 weights of other projects: each layout against a formula of its indices, and against their own code."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import flashinfer_source
import oxmoe
from cases import Shape, make_routing
from int4_cases import make
from oxmoe import int4, reference
from oxmoe.testing import assert_close_ulp, same_bits

AWQ = (0, 2, 4, 6, 1, 3, 5, 7)  # rows of a word, from its lowest bits up
Of = Callable[[int, int], int]


def words(rows: int, columns: int, places: Callable[[int, int, int], int]) -> Tensor:
    """Returns int32 [rows, columns] of words with the four bits places(row, column, number) each."""
    found = [
        [sum(places(row, column, i) << (4 * i) for i in range(8)) for column in range(columns)] for row in range(rows)
    ]
    unsigned = torch.tensor(found, dtype=torch.int64)
    return torch.where(unsigned >= 1 << 31, unsigned - (1 << 32), unsigned).to(torch.int32)


class Drawn:
    """A matrix [rows, columns] of codes, with scales and zero points of groups."""

    def __init__(self, rows: int, columns: int, groups: int, rng: torch.Generator, lowest: int = 0) -> None:
        self.rows, self.columns, self.groups = rows, columns, groups
        self.codes = torch.randint(16, (rows, columns), generator=rng, dtype=torch.uint8)
        self.scales = torch.randn((rows, groups), generator=rng).bfloat16()
        self.zeros = lowest + torch.randint(16, (rows, groups), generator=rng, dtype=torch.uint8)
        self._codes, self._zeros = self.codes.tolist(), self.zeros.tolist()

    def code(self, row: int, column: int) -> int:
        return int(self._codes[row][column])

    def zero(self, row: int, group: int) -> int:
        return int(self._zeros[row][group])

    def check(self, found: int4.Matrix, zeros: bool) -> None:
        codes, scales, points = found
        assert codes.dtype == torch.uint8 and codes.is_contiguous() and scales.is_contiguous()
        assert codes.shape == (self.rows, self.columns // 2)
        assert torch.equal(codes & 15, self.codes[:, 0::2]) and torch.equal(codes >> 4, self.codes[:, 1::2])
        assert same_bits(scales, self.scales)
        assert (points is not None) == zeros
        if points is not None:
            assert points.dtype == torch.uint8 and points.is_contiguous() and torch.equal(points, self.zeros)


def pack_quantized(one: Drawn) -> dict[str, Tensor]:
    return {
        "weight_packed": words(one.rows, one.columns // 8, lambda row, word, i: one.code(row, 8 * word + i)),
        "weight_scale": one.scales,
        "weight_zero_point": words(one.rows // 8, one.groups, lambda word, group, i: one.zero(8 * word + i, group)),
    }


def awq(one: Drawn) -> dict[str, Tensor]:
    return {
        "qweight": words(one.columns, one.rows // 8, lambda column, word, i: one.code(8 * word + AWQ[i], column)),
        "scales": one.scales.t(),
        "qzeros": words(one.groups, one.rows // 8, lambda group, word, i: one.zero(8 * word + AWQ[i], group)),
    }


def gptq(one: Drawn, less: int = 1) -> dict[str, Tensor]:
    return {
        "qweight": words(one.columns // 8, one.rows, lambda word, row, i: one.code(row, 8 * word + i)),
        "scales": one.scales.t(),
        "qzeros": words(one.groups, one.rows // 8, lambda group, word, i: one.zero(8 * word + i, group) - less),
    }


def marlin(one: Drawn) -> dict[str, Tensor]:
    """Packs by the loops of gptq_marlin_repack.cuh, and the orders of get_scale_perms and of marlin_zero_points."""

    def code(tile: int, word: int, i: int) -> int:
        tile_n, lane, warp = word // 128, word % 128 // 4, word % 4
        value = AWQ[i]  # pack_idx
        column = 16 * tile + 2 * (lane % 4) + (0, 1, 8, 9)[value % 4]
        return one.code(64 * tile_n + 16 * warp + lane // 4 + 8 * (value // 4), column)

    def of_scale(place: int) -> int:
        """Returns the row whose scale is at this place."""
        if one.groups > 1:
            return place // 64 * 64 + place % 64 // 8 + 8 * (place % 8)
        return place // 32 * 32 + 2 * (place % 32 // 8) + (0, 1, 8, 9, 16, 17, 24, 25)[place % 8]

    def zero(group: int, word: int, i: int) -> int:
        place = 8 * word + AWQ[i]
        return one.zero(place // 64 * 64 + place % 64 // 8 + 8 * (place % 8), group)

    return {
        "qweight": words(one.columns // 16, 2 * one.rows, code),
        "scales": one.scales[[of_scale(place) for place in range(one.rows)]].t().contiguous(),
        "qzeros": words(one.groups, one.rows // 8, zero),
    }


LAYOUTS: dict[str, tuple[Callable[[Drawn], dict[str, Tensor]], Callable[..., int4.Matrix], int]] = {
    "pack-quantized": (pack_quantized, int4.from_pack_quantized, 0),
    "awq": (awq, int4.from_awq, 0),
    "gptq": (gptq, int4.from_gptq, 1),
    "gptq_v2": (
        lambda one: gptq(one, 0),
        lambda *given, **named: int4.from_gptq(*given, version=2, **named),
        0,
    ),
    "marlin": (marlin, int4.from_marlin, 0),
}
SIZES = [(64, 128, 4), (128, 64, 1), (192, 96, 3)]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(name: str, sizes: tuple[int, int, int], rng: torch.Generator) -> None:
    pack, read, lowest = LAYOUTS[name]
    one = Drawn(*sizes, rng, lowest)
    one.check(read(*pack(one).values()), True)
    if name != "awq":
        one.check(read(*list(pack(one).values())[:2]), False)


@pytest.mark.parametrize("name", LAYOUTS)
def test_experts(name: str, device: str, rng: torch.Generator) -> None:
    """Leading dimensions stay, also if tensors are views with gaps, and on GPUs."""
    pack, read, lowest = LAYOUTS[name]
    drawn = [Drawn(64, 64, 2, rng, lowest) for _ in range(6)]
    packed = [pack(one) for one in drawn]
    operands = [torch.stack([one[field] for one in packed]).to(device) for field in packed[0]]
    gaps = [torch.stack([tensor, tensor], -1)[..., 0].unflatten(0, (2, 3)) for tensor in operands]
    for given in ([tensor.unflatten(0, (2, 3)) for tensor in operands], gaps):
        codes, scales, zeros = read(*given)
        assert zeros is not None and codes.shape[:2] == scales.shape[:2] == zeros.shape[:2] == (2, 3)
        for number, one in enumerate(drawn):
            at = divmod(number, 3)
            one.check(int4.Matrix(codes[at].cpu(), scales[at].cpu(), zeros[at].cpu()), True)


def test_codes_of_pack_quantized_are_not_copied(rng: torch.Generator) -> None:
    given = pack_quantized(Drawn(8, 64, 2, rng))
    codes, scales, _ = int4.from_pack_quantized(**given)
    assert codes.data_ptr() == given["weight_packed"].data_ptr() and scales is given["weight_scale"]


def test_order_of_columns(rng: torch.Generator) -> None:
    one = Drawn(8, 64, 2, rng, 1)
    plain = torch.arange(64, dtype=torch.int32) // 32
    for g_idx in (None, torch.empty(0, dtype=torch.int32), plain):
        one.check(int4.from_gptq(**gptq(one), g_idx=g_idx), True)
    for call in (
        lambda: int4.from_gptq(**gptq(one), g_idx=plain.flip(0)),
        lambda: int4.from_pack_quantized(**pack_quantized(one), weight_g_idx=plain.flip(0)),
        lambda: int4.from_marlin(**marlin(Drawn(64, 64, 2, rng)), g_idx=plain),
    ):
        with pytest.raises(NotImplementedError, match="activation order"):
            call()


def changed(fields: dict[str, Tensor], **others: Any) -> dict[str, Any]:
    return {**fields, **others}


def test_bad_operands(rng: torch.Generator) -> None:
    one = Drawn(64, 64, 2, rng, 1)
    of_awq, of_gptq, of_pack, of_marlin = awq(one), gptq(one), pack_quantized(one), marlin(Drawn(64, 64, 2, rng))
    bad: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
        (int4.from_awq, changed(of_awq, qweight=of_awq["qweight"].long()), "qweight: expected dtype int32, got int64"),
        (int4.from_awq, changed(of_awq, qweight=of_awq["qweight"][0]), r"qweight: expected \[..., K, N / 8\]"),
        (int4.from_awq, changed(of_awq, scales=one.scales), r"scales: expected \[G, 64\], got shape \(64, 2\)"),
        (int4.from_awq, changed(of_awq, qzeros=of_awq["qzeros"][:1]), r"qzeros: expected \[2, 8\], got shape \(1, 8\)"),
        (int4.from_awq, changed(of_awq, qzeros=[1]), "qzeros: expected a torch tensor, got list"),
        (int4.from_awq, changed(of_awq, scales=of_awq["scales"].int()), "scales: expected a dtype of floating point"),
        (int4.from_gptq, changed(of_gptq, scales=one.scales.t()[[0, 1, 0]]), "cuts 64 columns evenly, got 3"),
        (int4.from_gptq, changed(of_gptq, version=3), "version: expected 1 or 2, got 3"),
        (int4.from_gptq, changed(of_gptq, g_idx=torch.zeros(8)), r"g_idx: expected \[..., 64\], got shape \(8,\)"),
        (int4.from_pack_quantized, changed(of_pack, weight_zero_point=one.zeros), r"expected \[8, 2\], got shape"),
        (
            int4.from_pack_quantized,
            {"weight_packed": of_pack["weight_packed"][:9], "weight_scale": one.scales[:9], "weight_zero_point": 0},
            "weight_zero_point: expected zero points of a multiple of 8 rows, got 9 rows",
        ),
        (int4.from_marlin, changed(of_marlin, qweight=of_marlin["qweight"][:, :96]), "multiple of 128, got 96"),
    ]
    for call, operands, message in bad:
        with pytest.raises(ValueError, match=message):
            call(**operands)


@pytest.mark.parametrize("name", ["pack-quantized", "awq", "gptq"])
def test_a_layer(name: str, device: str, rng: torch.Generator) -> None:
    """A checkpoint's tensors make the layer of the numbers that they stand for."""
    pack, read, lowest = LAYOUTS[name]
    shape = Shape("layouts", 3, 2, 64, 32)
    halves = [[Drawn(*sizes, rng, lowest) for _ in range(3)] for sizes in ((64, 64, 2), (64, 32, 1))]
    matrices, plain = [], []
    for drawn in halves:
        for one in drawn:
            one.scales = one.scales / 60
        packed = [pack(one) for one in drawn]
        matrices.append(read(*(torch.stack([one[field] for one in packed]).to(device) for field in packed[0])))
        numbers = [
            (one.codes.double() - one.zeros.double().repeat_interleave(one.columns // one.groups, 1))
            * one.scales.double().repeat_interleave(one.columns // one.groups, 1)
            for one in drawn
        ]
        plain.append(torch.stack(numbers).bfloat16().to(device))
    (w13, s13, z13), (w2, s2, z2) = matrices
    routing = [part.to(device) for part in make_routing("uniform", 9, shape.experts, shape.top_k, rng)]
    x = torch.randn((9, shape.hidden), generator=rng).bfloat16().to(device)
    got = oxmoe.moe(x, oxmoe.ExpertWeights.int4(w13, w2, s13, s2, w13_zeros=z13, w2_zeros=z2), *routing)
    wanted = reference.moe(x, *plain, topk_weights=routing[0], topk_ids=routing[1])
    assert_close_ulp(got, wanted)


# Other projects' own code


@pytest.mark.parametrize("symmetric", [True, False])
def test_compressed_tensors(symmetric: bool, rng: torch.Generator) -> None:
    """compressed-tensors' own code reads back the numbers that its compressor wrote."""
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    one = Drawn(16, 64, 2, rng)
    packed = helpers.pack_to_int32(one.codes.to(torch.int8) - 8, 4)
    zeros = None if symmetric else helpers.pack_to_int32(one.zeros.to(torch.int8) - 8, 4, packed_dim=0)
    one.check(int4.from_pack_quantized(packed, one.scales, zeros), not symmetric)


@pytest.fixture
def marlin_utils(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Imports SGLang's code of its tests. A stub stands for a type of its kernels, which only annotations name."""
    pytest.importorskip("sglang.srt.layers.quantization.marlin_utils")
    kernel, types = ModuleType("sgl_kernel"), ModuleType("sgl_kernel.scalar_type")
    types.ScalarType = kernel.scalar_type = object  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sgl_kernel", kernel)
    monkeypatch.setitem(sys.modules, "sgl_kernel.scalar_type", types)
    return importlib.import_module("sglang.test.test_marlin_utils")


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_sglang(sizes: tuple[int, int, int], marlin_utils: ModuleType, rng: torch.Generator) -> None:
    """SGLang's functions permute weights, scales and zero points for Marlin, and pack those of AWQ and GPTQ."""
    from sglang.srt.layers.quantization import marlin_utils as utils

    one = Drawn(*sizes, rng)
    rows, columns, groups = sizes
    codes, zeros = one.codes.t().int().contiguous(), one.zeros.t().int().contiguous()
    packed = marlin_utils.marlin_weights(codes, columns, rows, 4, marlin_utils.get_weight_perm(4))
    group = columns // groups if groups > 1 else -1
    scales = utils.marlin_permute_scales(one.scales.t().contiguous(), columns, rows, group)
    of_awq = marlin_utils.awq_pack(zeros, 4, groups, rows)
    points = utils.awq_to_marlin_zero_points(of_awq, groups, rows, 4)
    assert torch.equal(points, utils.marlin_zero_points(zeros, groups, rows, 4))
    one.check(int4.from_marlin(packed, scales, points), True)
    one.check(int4.from_marlin(packed, scales), False)
    one.check(int4.from_awq(marlin_utils.awq_pack(codes, 4, columns, rows), one.scales.t(), of_awq), True)


def test_cases_of_layers_have_these_forms(rng: torch.Generator) -> None:
    """The operands of the int4 tests are what from_pack_quantized makes of their words."""
    layer = make(Shape("forms", 2, 1, 64, 32), rng)
    codes, scales, zeros = int4.from_pack_quantized(layer.w13.view(torch.int32), layer.w13_scale)
    assert torch.equal(codes, layer.w13) and scales is layer.w13_scale and zeros is None


# flashinfer's weights for Hopper

SM90 = [(1, 64, 128), (3, 192, 384), (1, 704, 640), (2, 64, 1024), (2, 128, 256), (0, 64, 128)]


def sm90_weights(codes: Tensor) -> Tensor:
    """Returns what the interleave makes of [E, R, K / 2], one pair of bytes at a time, in two's complement."""
    signed = (codes ^ 0x88).tolist()
    out = torch.full_like(codes, 0xAA)
    for expert, rows in enumerate(signed):
        for row, octets in enumerate(rows):
            for column in range(0, len(octets), 2):
                half, column_half, lane = row % 16 // 8, column % 16 // 8, column % 8 // 2
                to_row = row // 16 * 16 + column_half * 8 + row % 8
                to_column = column // 16 * 16 + lane * 4 + half * 2
                out[expert, to_row, to_column] = octets[column]
                out[expert, to_row, to_column + 1] = octets[column + 1]
    return out


def sm90_scales(scales: Tensor, release: str) -> Tensor:
    experts, rows, groups = scales.shape
    if release == "0.7":
        out = torch.full((experts, rows // 64, groups, 8, 8), 7, dtype=scales.dtype)
        for row in range(rows):
            out[:, row // 64, :, row % 8, row % 64 // 8] = scales[:, row]
        return out
    factor = next(factor for factor in (4, 2, 1) if groups % factor == 0)
    out = torch.full((experts, groups // factor, rows * factor), 7, dtype=scales.dtype)
    for row in range(rows):
        out[:, :, row * factor : (row + 1) * factor] = scales[:, row].reshape(experts, groups // factor, factor)
    return out


def sm90_drawn(size: tuple[int, int, int], rng: torch.Generator) -> tuple[Tensor, Tensor]:
    experts, rows, columns = size
    codes = torch.randint(256, (experts, rows, columns // 2), generator=rng, dtype=torch.uint8)
    return codes, torch.randn((experts, rows, columns // 128), generator=rng).bfloat16()


@pytest.mark.parametrize("release", ["0.6", "0.7"])
@pytest.mark.parametrize("size", SM90, ids=str)
def test_sm90(size: tuple[int, int, int], release: str, device: str, rng: torch.Generator) -> None:
    codes, scales = sm90_drawn(size, rng)
    held = sm90_weights(codes).to(device), sm90_scales(scales, release).to(device)
    made = int4.interleave_sm90(codes.to(device), scales.to(device), flashinfer=release)
    assert torch.equal(made[0], held[0]) and same_bits(made[1], held[1])
    for bits in (torch.bfloat16, torch.float16, torch.int16):
        found = int4.from_sm90(held[0], held[1].view(bits))
        assert torch.equal(found.codes.cpu(), codes) and same_bits(found.scales.cpu(), scales)
        assert found.zeros is None and found.codes.is_contiguous() and found.scales.is_contiguous()
    # One matrix, and more leading dimensions.
    if size[0]:
        found = int4.from_sm90(held[0][0], held[1][0])
        assert torch.equal(found.codes.cpu(), codes[0]) and same_bits(found.scales.cpu(), scales[0])
        found = int4.from_sm90(held[0][None], held[1][None])
        assert torch.equal(found.codes.cpu(), codes[None]) and same_bits(found.scales.cpu(), scales[None])


@pytest.mark.parametrize("size", SM90, ids=str)
def test_sm90_as_flashinfer(size: tuple[int, int, int], tmp_path: Path, rng: torch.Generator) -> None:
    codes, scales = sm90_drawn(size, rng)
    weights_of, (release, scales_of) = (
        flashinfer_source.weight_interleave("int4", tmp_path),
        flashinfer_source.scale_interleave(),
    )
    theirs = weights_of(codes ^ 0x88)
    assert torch.equal(int4.interleave_sm90(codes, scales, flashinfer=release)[0], theirs)
    if release == "0.7":
        laid = scales_of(scales, 128)
        assert same_bits(int4.interleave_sm90(codes, scales)[1], laid)
        found = int4.from_sm90(theirs, laid)
        assert torch.equal(found.codes, codes) and same_bits(found.scales, scales)


def test_sm90_refusals(rng: torch.Generator) -> None:
    codes, scales = sm90_drawn((2, 64, 256), rng)
    held = int4.interleave_sm90(codes, scales)
    from_sm90, interleave = int4.from_sm90, int4.interleave_sm90
    for words, call in (
        (r"weights: dimension 1: expected a multiple of 64, got 32", lambda: from_sm90(held[0][:, :32], held[1])),
        (r"weights: dimension 2: expected a multiple of 64, got 96", lambda: from_sm90(held[0][..., :96], held[1])),
        (r"weights: expected dtype uint8, got int8", lambda: from_sm90(held[0].view(torch.int8), held[1])),
        (r"weights: expected \[..., N, K / 2\], got shape \(64,\)", lambda: from_sm90(held[0][0, :, 0], held[1])),
        (r"scales: expected bfloat16, got float32", lambda: from_sm90(held[0], held[1].float())),
        (
            r"scales: expected shape \[2, 1, 2, 8, 8\] or \[2, 1, 128\], got \[2, 64, 2\]",
            lambda: from_sm90(held[0], scales),
        ),
        (r"scales: expected a tensor on cpu, got one on meta", lambda: from_sm90(held[0], held[1].to("meta"))),
        (r'flashinfer: expected "0.6" or "0.7", got "0.5"', lambda: interleave(codes, scales, flashinfer="0.5")),
        (r"scales: expected \[2, 64, 2\], got shape \(2, 64, 1\)", lambda: interleave(codes, scales[..., :1])),
        (r"scales: expected bfloat16, got float16", lambda: interleave(codes, scales.half())),
        (r"codes: dimension 2: expected a multiple of 64, got 32", lambda: interleave(codes[..., :32], scales)),
    ):
        with pytest.raises(ValueError, match=words):
            call()
