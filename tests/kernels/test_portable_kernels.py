"""The grouped GEMMs for any GPU, run on the host thread by thread, against plain formulas."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fake_cuda.harness import STRUCTS
from host_cta import HostCtas
from oxmoe import quantize, reference
from oxmoe.testing import assert_close, same_bits

LAYOUTS = {"gate_up": 0, "up_gate": 1, "interleaved": 2}
IDENTITY, SWIGLU, RELU2, SITU = 0, 1, 4, 9
BOUNDS = {"situ_beta": 4.0, "situ_linear_beta": 25.0}  # SITU's bounds, in the place of the kernels' alpha and beta
# Tiles of variants/portable.rs: tokens -> (warps, stages).
PLAIN_TILES = {16: (4, 5), 64: (4, 3), 128: (4, 3)}
MXFP4_TILES = {16: (4, 6), 64: (4, 4), 128: (4, 2)}
MXFP8_TILES = {64: (4, 3)}
NVFP4_TILES = {64: (4, 3)}
INT4_TILES = {64: (4, 3)}
FP8_TILES = {16: (4, 2), 64: (4, 2)}


def gemms(
    kernel: str, tiles: dict[int, tuple[int, int]], vector: str = "", before: str = ""
) -> dict[str, tuple[str, str]]:
    """Returns kernels by name. `vector`, `before`: template arguments behind and before those that all kernels have."""
    return {
        f"{kernel}_{form}_{tokens}{vector}": (
            f"GroupedGemm{kernel}Portable<{before}{str(form == 'gated').lower()}, {tokens}, 128, {warps}, {stages}"
            f"{', ' * bool(vector)}{vector}>",
            "GroupedGemmParams",
        )
        for tokens, (warps, stages) in tiles.items()
        for form in ("gated", "plain")
    }


def packed(
    kernel: str, form: str, tiles: dict[int, tuple[int, int]], vector: int = 8, suffix: str = ""
) -> dict[str, tuple[str, str]]:
    """Returns kernels of a packed form by name. The names end in `suffix`."""
    gemm = "GroupedGemmPackedPortable"
    return {
        f"{kernel}_{kind}_{tokens}{suffix}": (
            f"{gemm}<{is_gated}, oxmoe::{form}, {tokens}, 128, {warps}, {stages}, {vector}>",
            "GroupedGemmParams",
        )
        for tokens, (warps, stages) in tiles.items()
        for kind, is_gated in (("gated", "true"), ("plain", "false"))
    }


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> HostCtas:
    kernels = gemms("", PLAIN_TILES, "8", "__nv_bfloat16, ") | gemms("", {64: (4, 2)}, "1", "__nv_bfloat16, ")
    return HostCtas(tmp_path_factory.mktemp("plain"), ["moe/grouped_gemm_portable.cuh"], kernels, 800)


@pytest.fixture(scope="module", params=[800, 900], ids=lambda arch: f"sm_{arch // 10}")
def mxfp4(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> HostCtas:
    kernels = packed("Mxfp4", "mxfp4::Form", MXFP4_TILES, 8, "8")
    kernels |= packed("Mxfp4", "mxfp4::Form", {64: (4, 3)}, 1, "1")
    kernels |= {"pack": ("Mxfp4Pack", "PackMxfp4Params")}
    headers = ["moe/grouped_gemm_packed_portable.cuh", "quant/pack_mxfp4.cuh"]
    return HostCtas(tmp_path_factory.mktemp("mxfp4"), headers, kernels, request.param)


@pytest.fixture(scope="module", params=[800, 900], ids=lambda arch: f"sm_{arch // 10}")
def mxfp8(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> HostCtas:
    kernels = packed("Mxfp8", "mxfp8::Form", MXFP8_TILES) | {"pack": ("Mxfp8Pack", "PackMxfp4Params")}
    kernels |= {"round_rows": ("RoundRowsMxfp8", "QuantizeRowsParams")}
    headers = ["moe/grouped_gemm_packed_portable.cuh", "quant/pack_mxfp8.cuh", "quant/round_rows_mxfp8.cuh"]
    return HostCtas(tmp_path_factory.mktemp("mxfp8"), headers, kernels, request.param)


@pytest.fixture(scope="module", params=[800, 900], ids=lambda arch: f"sm_{arch // 10}")
def nvfp4(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> HostCtas:
    kernels = packed("Nvfp4", "nvfp4::Form", NVFP4_TILES)
    kernels |= {"pack": ("Pack<oxmoe::nvfp4::Packer>", "PackParams")}
    headers = ["moe/grouped_gemm_packed_portable.cuh", "common/nvfp4_packed.cuh", "quant/pack.cuh"]
    return HostCtas(tmp_path_factory.mktemp("nvfp4"), headers, kernels, request.param)


@pytest.fixture(scope="module", params=[800, 900], ids=lambda arch: f"sm_{arch // 10}")
def int4(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> HostCtas:
    kernels = packed("Int4", "int4::Form<false>", INT4_TILES)
    kernels |= packed("Int4", "int4::Form<true>", INT4_TILES, suffix="_zeros")
    kernels |= {"pack": ("Pack<oxmoe::int4::Packer>", "PackParams")}
    headers = ["moe/grouped_gemm_packed_portable.cuh", "common/int4.cuh", "quant/pack.cuh"]
    return HostCtas(tmp_path_factory.mktemp("int4"), headers, kernels, request.param)


@pytest.fixture(scope="module", params=[800, 890], ids=lambda arch: f"sm_{arch // 10}")
def fp8(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> HostCtas:
    headers = ["moe/grouped_gemm_fp8_portable.cuh"]
    return HostCtas(tmp_path_factory.mktemp("fp8"), headers, gemms("Fp8", FP8_TILES), request.param)


class Gemm:
    """One call and its expected result: tiles of any size up to `tile`, an expert without tiles, rows of x in random
    order."""

    def __init__(
        self,
        tile: int,
        k: int,
        out: int,
        gated: bool,
        rng: torch.Generator,
        gather: bool = True,
        counts: list[int] | None = None,
    ) -> None:
        self.tile, self.k, self.out, self.gated, self.rng = tile, k, out, gated, rng
        if counts is None:
            counts = [tile, 0, int(torch.randint(1, tile, (), generator=rng))] if tile > 16 else [tile + 5, 0, 3]
        self.experts = len(counts)
        tiles, places = [], 0
        for expert, count in enumerate(counts):
            for first in range(0, count, tile):
                tiles.append((expert, places + first, min(tile, count - first), 0))
            places += count
        self.places, self.tiles = places, torch.tensor(tiles, dtype=torch.int32)
        self.tile_count = torch.tensor([len(tiles)], dtype=torch.int32)
        self.expert_of = torch.cat([torch.full((c,), e) for e, c in enumerate(counts)])
        self.divisor = 2 if gather else 1
        order = torch.randperm(places, generator=rng).int()
        self.slots = order if gather else torch.arange(places, dtype=torch.int32)
        self.row_of = (self.slots // self.divisor).long()
        self.gather, self.rows = gather, out * (2 if gated else 1)
        self.stride = out  # columns of a row of the result
        self.bounds = BOUNDS

    def call(self, kernels: HostCtas, name: str, x: Tensor, layout: str, vector: str = "", **operands: Any) -> Tensor:
        """Runs the kernel. Returns bf16 [places, stride]; rows behind the last place must stay as they were."""
        result = torch.full((self.places + 3, self.stride), 7.0, dtype=torch.bfloat16)
        addresses = {key: value.data_ptr() if isinstance(value, Tensor) else value for key, value in operands.items()}
        kind = addresses.pop("activation")
        alpha, beta = self.bounds.values() if kind == SITU else (1.0, 0.0)
        activation = STRUCTS["Activation"](kind, alpha, beta, math.inf, math.inf, math.inf)
        kernels.run(
            f"{name}_{'gated' if self.gated else 'plain'}_{self.tile}{vector}",
            int(torch.randint(1, 4, (), generator=self.rng)),
            int(torch.randint(1 << 40, (), generator=self.rng)),
            x=x.data_ptr(),
            slot_of_place=self.slots.data_ptr() if self.gather else 0,
            row_divisor=self.divisor,
            tiles=ctypes.c_uint64(self.tiles.data_ptr()).value,
            tile_count=self.tile_count.data_ptr(),
            out=result.data_ptr(),
            rows=self.rows,
            out_columns=self.out,
            layout=LAYOUTS[layout],
            activation=activation,
            bias_dtype=0,
            **addresses,
        )
        assert bool((result[self.places :] == 7).all())
        return result[: self.places]

    def finish(self, sums: Tensor, bias: Tensor | None, weights: Tensor | None, layout: str, kind: int) -> Tensor:
        """Returns fp32 results of the sums [places, rows]."""
        if bias is not None:
            sums = sums + bias[self.expert_of]
        if weights is not None:
            sums = sums * weights[self.slots.long()][:, None]
        if kind == SWIGLU:
            gate, up = reference.split_rows(sums, layout)
            return gate * torch.sigmoid(gate) * up
        if kind == SITU:
            return reference.activate(sums, layout=layout, activation="situ", **BOUNDS)
        return sums.relu().square() if kind == RELU2 else sums


def close(result: Tensor, expected: Tensor, exact: bool) -> None:
    nan = expected.isnan()
    assert torch.equal(result.isnan(), nan)
    if exact:
        assert same_bits(result[~nan], expected[~nan].bfloat16())
        return
    assert_close(result[~nan].float(), expected[~nan], rtol=2**-7, atol=1e-6)


CASES = [
    (16, True, "gate_up", SWIGLU), (16, False, "gate_up", IDENTITY), (64, True, "up_gate", SWIGLU),
    (64, False, "gate_up", RELU2), (128, True, "gate_up", SWIGLU), (128, False, "gate_up", IDENTITY),
    (64, True, "interleaved", SITU),
]  # fmt: skip
cases = pytest.mark.parametrize(("tile", "gated", "layout", "kind"), CASES, ids=str)


def pack(
    kernels: HostCtas, gemm: Gemm, codes: Tensor, scales: Tensor, layout: str, block_bytes: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns codes and scales of an expert's matrices in their packed form, and factors of 1."""
    row_tiles, k_blocks = -(-gemm.rows // 64), -(-gemm.k // 64)
    packed = torch.full((gemm.experts, row_tiles, k_blocks, block_bytes), 0xA5, dtype=torch.uint8)
    packed_scales = torch.full((gemm.experts, row_tiles, k_blocks, 128), 0xA5, dtype=torch.uint8)
    factors = torch.ones(gemm.experts)
    kernels.run(
        "pack", gemm.experts * row_tiles * -(-k_blocks // 4), 1, codes=codes.data_ptr(), scales=scales.data_ptr(),
        row_blocks=scales.shape[2], experts=gemm.experts, rows=gemm.rows, used_rows=gemm.rows, k=gemm.k,
        gated=gemm.gated, layout=LAYOUTS[layout], packed_codes=packed.data_ptr(),
        packed_scales=packed_scales.data_ptr(), expert_scales=factors.data_ptr(),
    )  # fmt: skip
    return packed, packed_scales, factors


def check_dense(
    gemm: Gemm, kernels: HostCtas, name: str, layout: str, kind: int, dense: Tensor, vector: str, **operands: Any
) -> None:
    """Checks a call with bf16 tokens and weights that are the numbers [E, rows, K], all whole."""
    x = torch.randint(-8, 9, (gemm.places, gemm.k), generator=gemm.rng).bfloat16()
    bias = torch.randint(-8, 9, (gemm.experts, gemm.rows), generator=gemm.rng).float()
    result = gemm.call(
        kernels, name, x, layout, vector, k=gemm.k, bias=bias, slot_weights=0, activation=kind, **operands
    )
    sums = torch.einsum("pk,prk->pr", x.float()[gemm.row_of], dense[gemm.expert_of])
    close(result, gemm.finish(sums, bias, None, layout, kind), exact=kind not in (SWIGLU, SITU))


@pytest.mark.parametrize("size", [(96, 70), (120, 130), (77, 40)], ids=str)
@cases
def test_plain(
    tile: int, gated: bool, layout: str, kind: int, size: tuple[int, int], plain: HostCtas, rng: torch.Generator
) -> None:
    """Weights are bf16 with any rows; with loads of single elements K is any size."""
    k, out = size
    vector = "8" if k % 8 == 0 else "1"
    if vector == "1" and tile != 64:
        pytest.skip("there is one such tile")
    gemm = Gemm(tile, k, out, gated, rng, gather=gated)
    weights = torch.randint(-8, 9, (gemm.experts, gemm.rows, k), generator=rng).bfloat16()
    check_dense(gemm, plain, "", layout, kind, weights.float(), vector, weights=weights, block_scales=0)


@pytest.mark.parametrize("linear_beta", [25.0, math.inf])
def test_situ_of_every_size(linear_beta: float, plain: HostCtas, rng: torch.Generator) -> None:
    """Gates and ups are the smallest to the largest numbers, infinite and NaN, each with each other."""
    gemm = Gemm(16, 8, 64, True, rng, counts=[16] * 64)
    gemm.bounds = {"situ_beta": 4.0, "situ_linear_beta": linear_beta}
    powers = torch.exp2(torch.linspace(-100, 100, 24)) * (torch.rand(24, generator=rng) + 1)
    near = torch.rand(37, generator=rng) * 40  # where neither tanh is a line or a number
    numbers = torch.cat([powers, near, torch.tensor([0.0, torch.inf, torch.nan])])
    signs = torch.randint(2, (2, 64), generator=rng) * 2.0 - 1
    gate, up = (numbers * signs[0]).bfloat16(), (numbers * signs[1]).bfloat16()
    # Expert e has gate e in all columns, and column c has up c.
    weights = torch.zeros((64, 2, 64, 8), dtype=torch.bfloat16)
    weights[:, 0, :, 0], weights[:, 1, :, 0] = gate[:, None], up[None]
    x = torch.zeros((gemm.places, 8), dtype=torch.bfloat16)
    x[:, 0] = 1
    result = gemm.call(
        plain, "", x, "gate_up", "8", k=8, bias=0, slot_weights=0, activation=SITU, weights=weights, block_scales=0
    )
    sums = torch.cat([gate.double()[:, None].expand(64, 64), up.double()[None].expand(64, 64)], 1)
    numbers_of = {"situ_beta": 4.0, "situ_linear_beta": None if linear_beta == math.inf else linear_beta}
    expected = reference.activate(sums, activation="situ", **numbers_of)[gemm.expert_of]
    nan = expected.isnan()
    assert torch.equal(result.isnan(), nan) and nan.any()
    got, expected = result.double()[~nan], expected[~nan]
    assert torch.equal(got.isinf(), expected.abs() >= 2.0**128 * (1 - 2**-9))
    finite = ~got.isinf()
    # The bar is half a unit of bf16, and a sigmoid below the smallest normal number of fp32, which may be zero.
    error, ups = (got - expected)[finite].abs(), sums[:, 64:][gemm.expert_of][~nan][finite].abs()
    assert bool((error <= expected[finite].abs() * (2**-8 + 2**-16) + 2.0**-120 * ups.clamp(min=1)).all())


@pytest.mark.parametrize("size", [(96, 32), (352, 70), (333, 40)], ids=str)
@cases
def test_mxfp4(
    tile: int, gated: bool, layout: str, kind: int, size: tuple[int, int], mxfp4: HostCtas, rng: torch.Generator
) -> None:
    """Weights go through the packer; K and rows end within a block."""
    k, out = size
    vector = "8" if k % 8 == 0 else "1"
    if vector == "1" and tile != 64:
        pytest.skip("there is one such tile")
    gemm = Gemm(tile, k, out, gated, rng, gather=gated)
    blocks = -(-k // 32)
    codes = torch.randint(0, 256, (gemm.experts, gemm.rows, 16 * blocks), generator=rng, dtype=torch.uint8)
    scales = torch.randint(126, 129, (gemm.experts, gemm.rows, blocks), generator=rng, dtype=torch.uint8)
    packed, packed_scales, factors = pack(mxfp4, gemm, codes, scales, layout, 2048)
    factors[1:] = 2.0
    dense = quantize.dequantize(codes, scales, torch.float32)[..., :k] * factors[:, None, None]
    operands = {"weights": packed, "block_scales": packed_scales, "expert_scales": factors}
    check_dense(gemm, mxfp4, "Mxfp4", layout, kind, dense, vector, **operands)


def fp8_operands(gemm: Gemm, codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Returns weights [E, rows, K] in e4m3, and their scales, which are powers of two."""
    shape = (gemm.experts, gemm.rows // 128, gemm.k // 128)
    weights = codes[torch.randint(len(codes), (gemm.experts, gemm.rows, gemm.k), generator=gemm.rng)]
    return weights, scales[torch.randint(len(scales), shape, generator=gemm.rng)]


def fp8_sums(gemm: Gemm, x: Tensor, x_scales: Tensor, weights: Tensor, scales: Tensor) -> Tensor:
    """Returns products of blocks of 128 K, each times the scales of its rows and tokens."""
    tokens = (x.double().unflatten(1, (-1, 128)) * x_scales.double()[..., None])[gemm.row_of]
    rows = scales.double().repeat_interleave(128, 1)
    dense = weights.double().unflatten(2, (-1, 128)) * rows[..., None]
    return torch.einsum("pgk,prgk->pr", tokens, dense[gemm.expert_of])


SMALL_CODES = torch.arange(-8, 9).to(torch.float8_e4m3fn)
POWERS = torch.exp2(torch.arange(-3.0, 4.0))


@pytest.mark.parametrize("size", [(128, 128), (384, 256)], ids=str)
@pytest.mark.parametrize("layout", ["gate_up", "up_gate"])
@pytest.mark.parametrize("kind", [IDENTITY, SWIGLU, RELU2, SITU])
@pytest.mark.parametrize("tile", FP8_TILES)
def test_fp8(tile: int, kind: int, layout: str, size: tuple[int, int], fp8: HostCtas, rng: torch.Generator) -> None:
    """Numbers are whole and scales are powers of two, so the sums are exact."""
    (k, out), gated = size, kind in (SWIGLU, SITU)
    if layout == "up_gate" and not gated:
        pytest.skip("rows without a gate have no order")
    gemm = Gemm(tile, k, out, gated, rng, gather=kind != IDENTITY)
    weights, scales = fp8_operands(gemm, SMALL_CODES, POWERS * (2**-7 if gated else 1))
    x = SMALL_CODES[torch.randint(len(SMALL_CODES), (gemm.places, k), generator=rng)]
    x_scales = POWERS[torch.randint(len(POWERS), (gemm.places, k // 128), generator=rng)]
    bias = torch.randint(-8, 9, (gemm.experts, gemm.rows), generator=rng).float()
    slot_weights = None if gated else torch.full((2 * gemm.places,), 0.5)
    result = gemm.call(
        fp8, "Fp8", x, layout, k=k // 2, bias=bias, activation=kind, weights=weights, block_scales=scales,
        x_scales=x_scales, slot_weights=0 if slot_weights is None else slot_weights,
    )  # fmt: skip
    expected = gemm.finish(fp8_sums(gemm, x, x_scales, weights, scales).float(), bias, slot_weights, layout, kind)
    close(result, expected, exact=not gated)


@pytest.mark.parametrize("size", [(16, 16), (176, 96), (352, 176), (96, 352)], ids=str)
@pytest.mark.parametrize(("layout", "kind"), [("gate_up", SWIGLU), ("up_gate", SWIGLU), ("gate_up", RELU2)], ids=str)
@pytest.mark.parametrize("tile", FP8_TILES)
def test_fp8_of_cut_blocks(
    tile: int, kind: int, layout: str, size: tuple[int, int], fp8: HostCtas, rng: torch.Generator
) -> None:
    """Rows and K end inside a block. Behind K, rows of x hold NaN; behind its columns, a row of out holds zeros."""
    (k, out), gated = size, kind == SWIGLU
    gemm = Gemm(tile, k, out, gated, rng)
    parts, all_k = 2 if gated else 1, -(-k // 128) * 128
    gemm.stride = -(-out // 128) * 128
    weights = SMALL_CODES[torch.randint(len(SMALL_CODES), (gemm.experts, gemm.rows, k), generator=rng)]
    shape = (gemm.experts, parts, gemm.stride // 128, all_k // 128)
    scales = POWERS[torch.randint(len(POWERS), shape, generator=rng)] * (2**-7 if gated else 1)
    x = torch.full((gemm.places, all_k), 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)
    x[:, :k] = SMALL_CODES[torch.randint(len(SMALL_CODES), (gemm.places, k), generator=rng)]
    x_scales = POWERS[torch.randint(len(POWERS), (gemm.places, all_k // 128), generator=rng)]
    of_rows = POWERS[torch.randint(len(POWERS), (gemm.experts, gemm.rows), generator=rng)]
    bias = torch.randint(-8, 9, (gemm.experts, gemm.rows), generator=rng).float()
    result = gemm.call(
        fp8, "Fp8", x, layout, k=k // 2, bias=bias, activation=kind, weights=weights, block_scales=scales,
        x_scales=x_scales, expert_scales=of_rows, slot_weights=0,
    )  # fmt: skip
    assert not bool(result[:, out:].view(torch.int16).any())
    # Powers of two and small whole numbers are exact in fp64.
    dense = scales.double().repeat_interleave(128, 2)[:, :, :out].repeat_interleave(128, 3)[..., :k].flatten(1, 2)
    tokens = x[:, :k].double() * x_scales.double().repeat_interleave(128, 1)[:, :k]
    sums = torch.einsum("pk,prk->pr", tokens[gemm.row_of], (weights.double() * dense)[gemm.expert_of])
    sums = (sums * of_rows[gemm.expert_of]).float()
    close(result[:, :out].contiguous(), gemm.finish(sums, bias, None, layout, kind), exact=not gated)


@pytest.mark.parametrize("counts", [[1], [0, 7, 1], [16, 2]], ids=str)
@pytest.mark.parametrize("tile", FP8_TILES)
def test_fp8_of_every_code(tile: int, counts: list[int], fp8: HostCtas, rng: torch.Generator) -> None:
    """Each code is in weights and tokens, under scales of any size; NaN reaches its row and column."""
    gemm = Gemm(tile, 256, 128, False, rng, counts=counts)
    every = torch.arange(256, dtype=torch.uint8)
    numbers = every[every & 0x7F != 0x7F].view(torch.float8_e4m3fn)
    weights, _ = fp8_operands(gemm, numbers, POWERS)
    x = numbers[torch.randint(len(numbers), (gemm.places, 256), generator=rng)]
    x_scales = torch.rand((gemm.places, 2), generator=rng) + 0.01
    scales = (torch.rand((gemm.experts, 1, 2), generator=rng) + 0.01) * 2.0**-20
    weights[:, 3] = numbers[torch.arange(256) % len(numbers)]
    for bits in (0x7F, 0xFF):
        weights.view(torch.uint8)[-1, 5, int(torch.randint(256, (), generator=rng))] = bits
        weights.view(torch.uint8)[-1, 100 + bits % 2, int(torch.randint(256, (), generator=rng))] = bits
    bad = int(gemm.row_of[-1])
    x.view(torch.uint8)[bad, int(torch.randint(256, (), generator=rng))] = 0xFF
    result = gemm.call(
        fp8, "Fp8", x, "gate_up", k=128, bias=0, slot_weights=0, activation=IDENTITY, weights=weights,
        block_scales=scales, x_scales=x_scales,
    )  # fmt: skip
    sums = fp8_sums(gemm, x, x_scales, weights, scales).float()
    assert bool(sums[gemm.row_of == bad].isnan().all()) and not bool(sums[gemm.row_of != bad][:, :5].isnan().any())
    close(result, sums, exact=False)


@pytest.mark.parametrize("size", [(96, 32), (352, 96), (64, 160)], ids=str)
@pytest.mark.parametrize("counts", [None, [1], [0, 9, 33]], ids=str)
@pytest.mark.parametrize(("layout", "kind"), [("interleaved", SWIGLU), ("up_gate", SWIGLU), ("gate_up", IDENTITY)])
def test_mxfp8(
    layout: str, kind: int, counts: list[int] | None, size: tuple[int, int], mxfp8: HostCtas, rng: torch.Generator
) -> None:
    """Weights go through the packer; K and rows end within a block; a NaN code makes its row NaN."""
    (k, out), gated = size, kind == SWIGLU
    gemm = Gemm(64, k, out, gated, rng, gather=gated, counts=counts)
    codes = SMALL_CODES[torch.randint(len(SMALL_CODES), (gemm.experts, gemm.rows, k), generator=rng)]
    codes[..., 0] = 0.0019531250  # subnormal
    codes.view(torch.uint8)[-1, 7, k - 1] = 0x7F
    scales = torch.randint(126, 129, (gemm.experts, gemm.rows, k // 32), generator=rng, dtype=torch.uint8)
    scales[-1, 9, -1] = 255
    packed, packed_scales, factors = pack(mxfp8, gemm, codes, scales, layout, 4096)
    factors[1:] = 2.0
    powers = torch.exp2(scales.float() - 127).masked_fill(scales == 255, math.nan)
    dense = codes.float() * powers.repeat_interleave(32, 2) * factors[:, None, None]
    operands = {"weights": packed, "block_scales": packed_scales, "expert_scales": factors}
    check_dense(gemm, mxfp8, "Mxfp8", layout, kind, dense, "", **operands)


@pytest.mark.parametrize("size", [(96, 32), (352, 96), (16, 160), (208, 80)], ids=str)
@pytest.mark.parametrize("counts", [None, [1], [0, 9, 33]], ids=str)
@pytest.mark.parametrize(("layout", "kind"), [("interleaved", SWIGLU), ("up_gate", SWIGLU), ("gate_up", IDENTITY)])
def test_nvfp4(
    layout: str, kind: int, counts: list[int] | None, size: tuple[int, int], nvfp4: HostCtas, rng: torch.Generator
) -> None:
    """Weights go through the packer, with a number each for gate and up rows. K and rows end within a block. A NaN
    scale makes its row NaN."""
    (k, out), gated = size, kind == SWIGLU
    gemm = Gemm(64, k, out, gated, rng, gather=gated, counts=counts)
    codes = torch.randint(0, 256, (gemm.experts, gemm.rows, k // 2), generator=rng, dtype=torch.uint8)
    powers = torch.tensor([2.0**-9, -0.5, 0.5, 1, -2, 0]).to(torch.float8_e4m3fn)
    scales = powers[torch.randint(len(powers), (gemm.experts, gemm.rows, k // 16), generator=rng)]
    scales.view(torch.uint8)[-1, 9, -1] = 0x7F
    parts = 2 if gated else 1
    numbers = torch.tensor([0.25, 0.5, 2.0])[torch.randint(3, (gemm.experts, parts), generator=rng)]
    row_tiles, k_blocks = -(-gemm.rows // 64), -(-k // 64)
    packed = torch.full((gemm.experts, row_tiles, k_blocks, 2048), 0xA5, dtype=torch.uint8)
    packed_scales = torch.full((gemm.experts, row_tiles, k_blocks, 256), 0xA5, dtype=torch.uint8)
    factors = torch.full((gemm.experts, parts), torch.nan)
    nvfp4.run(
        "pack", gemm.experts * row_tiles * -(-k_blocks // 4), 1, codes=codes.data_ptr(), scales=scales.data_ptr(),
        tile_rows=0, factors=numbers.data_ptr(), experts=gemm.experts, rows=gemm.rows, k=k, gated=gated,
        layout=LAYOUTS[layout], packed_codes=packed.data_ptr(), packed_scales=packed_scales.data_ptr(),
        expert_scales=factors.data_ptr(),
    )  # fmt: skip
    of_rows = numbers.repeat_interleave(gemm.rows // parts, 1)
    if layout == "interleaved":
        of_rows = numbers.repeat(1, gemm.rows // parts)
    elif layout == "up_gate":
        of_rows = numbers.flip(1).repeat_interleave(gemm.rows // parts, 1)
    dense = reference.nvfp4_numbers(codes, scales) * of_rows[..., None]
    operands = {"weights": packed, "block_scales": packed_scales, "expert_scales": factors}
    check_dense(gemm, nvfp4, "Nvfp4", layout, kind, dense, "", **operands)


@pytest.mark.parametrize("size", [(96, 32), (352, 96), (64, 160)], ids=str)
@pytest.mark.parametrize("counts", [None, [0, 9, 33]], ids=str)
@pytest.mark.parametrize("zeros", ["", "_zeros"], ids=["symmetric", "zeros"])
@pytest.mark.parametrize(("layout", "kind"), [("interleaved", SWIGLU), ("up_gate", SWIGLU), ("gate_up", IDENTITY)])
def test_int4(
    layout: str,
    kind: int,
    zeros: str,
    counts: list[int] | None,
    size: tuple[int, int],
    int4: HostCtas,
    rng: torch.Generator,
) -> None:
    """Weights go through the packer. K and rows end within a block. Groups are 32 columns or a row. A NaN scale makes
    its row NaN."""
    (k, out), gated = size, kind == SWIGLU
    for group, scale_dtype, number in ((32, torch.bfloat16, 2), (k, torch.float32, 0), (32, torch.float16, 1)):
        gemm = Gemm(64, k, out, gated, rng, gather=gated, counts=counts)
        codes = torch.randint(0, 256, (gemm.experts, gemm.rows, k // 2), generator=rng, dtype=torch.uint8)
        powers = torch.tensor([2.0**-4, -0.5, 0.25, 1, -2, 0]).to(scale_dtype)
        scales = powers[torch.randint(len(powers), (gemm.experts, gemm.rows, k // group), generator=rng)]
        scales[-1, 9, -1] = torch.nan
        points = torch.randint(0, 17, scales.shape, generator=rng, dtype=torch.uint8) if zeros else None
        tiles = (gemm.experts, -(-gemm.rows // 64), -(-k // 64))
        packed = torch.full((*tiles, 2048), 0xA5, dtype=torch.uint8)
        packed_scales = torch.full((*tiles, 384 if zeros else 256), 0xA5, dtype=torch.uint8)
        factors = torch.full((gemm.experts,), torch.nan)
        int4.run(
            "pack", tiles[0] * tiles[1] * -(-tiles[2] // 4), 1, codes=codes.data_ptr(), scales=scales.data_ptr(),
            scale_dtype=number, zeros=0 if points is None else points.data_ptr(), group=group, experts=gemm.experts,
            rows=gemm.rows, k=k, gated=gated, layout=LAYOUTS[layout], packed_codes=packed.data_ptr(),
            packed_scales=packed_scales.data_ptr(), expert_scales=factors.data_ptr(),
        )  # fmt: skip
        dense = reference.int4_weights(codes, scales, points).float()
        operands = {"weights": packed, "block_scales": packed_scales, "expert_scales": factors}
        check_dense(gemm, int4, "Int4", layout, kind, dense, zeros, **operands)


@pytest.mark.parametrize("columns", [32, 96, 352])
def test_rounding_to_mxfp8(columns: int, mxfp8: HostCtas, rng: torch.Generator) -> None:
    """Rows are rounded in place, as GEMM1's output is; they have numbers of every size, zeros, NaN and infinity."""
    rows = 21
    sizes = torch.randint(-120, 110, (rows, columns // 32), generator=rng).repeat_interleave(32, 1)
    x = torch.randn((rows, columns), generator=rng) * torch.exp2(torch.randint(-12, 1, (rows, columns), generator=rng))
    x = (x * torch.exp2(sizes.float())).bfloat16()
    x[0], x[1, 3], x[2, 5], x[3, 7] = 0, math.nan, math.inf, -math.inf
    expected = reference.mxfp8_rows(x)
    mxfp8.run("round_rows", 2, 1, x=x.data_ptr(), out=x.data_ptr(), rows=rows, columns=columns, out_columns=columns)
    nan = expected.isnan()
    assert torch.equal(x.isnan(), nan) and torch.equal(x[~nan], expected[~nan])
