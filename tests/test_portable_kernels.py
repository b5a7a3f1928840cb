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
from oxmoe.testing import same_bits

LAYOUTS = {"gate_up": 0, "up_gate": 1, "interleaved": 2}
IDENTITY, SWIGLU, RELU2 = 0, 1, 4
# As tiles of variants/portable.rs: tokens -> (warps, stages).
PLAIN_TILES = {16: (4, 5), 64: (4, 3), 128: (4, 3)}
MXFP4_TILES = {16: (4, 6), 64: (4, 4), 128: (4, 2)}


def gemms(
    kernel: str, tiles: dict[int, tuple[int, int]], vector: str = "", before: str = ""
) -> dict[str, tuple[str, str]]:
    """`vector`, `before`: template arguments behind and in front of those that all kernels have."""
    return {
        f"{kernel}_{form}_{tokens}{vector}": (
            f"GroupedGemm{kernel}Portable<{before}{str(form == 'gated').lower()}, {tokens}, 128, {warps}, {stages}"
            f"{', ' * bool(vector)}{vector}>",
            "GroupedGemmParams",
        )
        for tokens, (warps, stages) in tiles.items()
        for form in ("gated", "plain")
    }


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> HostCtas:
    kernels = gemms("", PLAIN_TILES, "8", "__nv_bfloat16, ") | gemms("", {64: (4, 2)}, "1", "__nv_bfloat16, ")
    return HostCtas(tmp_path_factory.mktemp("plain"), ["moe/grouped_gemm_portable.cuh"], kernels, 800)


@pytest.fixture(scope="module", params=[800, 900], ids=lambda arch: f"sm_{arch // 10}")
def mxfp4(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> HostCtas:
    kernels = gemms("Mxfp4", MXFP4_TILES, "8") | gemms("Mxfp4", {64: (4, 3)}, "1")
    kernels |= {"pack": ("Mxfp4Pack", "PackMxfp4Params")}
    headers = ["moe/grouped_gemm_mxfp4_portable.cuh", "quant/pack_mxfp4.cuh"]
    return HostCtas(tmp_path_factory.mktemp("mxfp4"), headers, kernels, request.param)


class Gemm:
    """One call, and what it gives: tiles of any size up to `tile`, an expert without any, rows of x in random order."""

    def __init__(self, tile: int, k: int, out: int, gated: bool, rng: torch.Generator, gather: bool = True) -> None:
        self.tile, self.k, self.out, self.gated, self.rng, self.experts = tile, k, out, gated, rng, 3
        counts = [tile, 0, int(torch.randint(1, tile, (), generator=rng))] if tile > 16 else [tile + 5, 0, 3]
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

    def call(self, kernels: HostCtas, name: str, x: Tensor, layout: str, vector: str = "", **operands: Any) -> Tensor:
        """bf16 [places, out]; rows behind the last place must stay as they were."""
        result = torch.full((self.places + 3, self.out), 7.0, dtype=torch.bfloat16)
        addresses = {key: value.data_ptr() if isinstance(value, Tensor) else value for key, value in operands.items()}
        kind = addresses.pop("activation")
        activation = STRUCTS["Activation"](kind, 1.0, 0.0, math.inf, math.inf, math.inf)
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
        """fp32 of the sums [places, rows]."""
        if bias is not None:
            sums = sums + bias[self.expert_of]
        if weights is not None:
            sums = sums * weights[self.slots.long()][:, None]
        if kind == SWIGLU:
            gate, up = reference.split_rows(sums, layout)
            return gate * torch.sigmoid(gate) * up
        return sums.relu().square() if kind == RELU2 else sums


def close(result: Tensor, expected: Tensor, exact: bool) -> None:
    nan = expected.isnan()
    assert torch.equal(result.isnan(), nan)
    if exact:
        assert same_bits(result[~nan], expected[~nan].bfloat16())
        return
    torch.testing.assert_close(result[~nan].float(), expected[~nan], rtol=2**-7, atol=1e-6)


CASES = [
    (16, True, "gate_up", SWIGLU), (16, False, "gate_up", IDENTITY), (64, True, "up_gate", SWIGLU),
    (64, False, "gate_up", RELU2), (128, True, "gate_up", SWIGLU), (128, False, "gate_up", IDENTITY),
]  # fmt: skip
cases = pytest.mark.parametrize(("tile", "gated", "layout", "kind"), CASES, ids=str)


def pack(
    kernels: HostCtas, gemm: Gemm, codes: Tensor, scales: Tensor, layout: str, block_bytes: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes and scales of an expert's matrices in their packed form, and factors of 1."""
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
    """Of bf16 tokens and weights that are the numbers [E, rows, K], all whole."""
    x = torch.randint(-8, 9, (gemm.places, gemm.k), generator=gemm.rng).bfloat16()
    bias = torch.randint(-8, 9, (gemm.experts, gemm.rows), generator=gemm.rng).float()
    result = gemm.call(
        kernels, name, x, layout, vector, k=gemm.k, bias=bias, slot_weights=0, activation=kind, **operands
    )
    sums = torch.einsum("pk,prk->pr", x.float()[gemm.row_of], dense[gemm.expert_of])
    close(result, gemm.finish(sums, bias, None, layout, kind), exact=kind != SWIGLU)


@pytest.mark.parametrize("size", [(96, 70), (120, 130), (77, 40)], ids=str)
@cases
def test_plain(
    tile: int, gated: bool, layout: str, kind: int, size: tuple[int, int], plain: HostCtas, rng: torch.Generator
) -> None:
    """bf16; any rows, and with loads of single elements any K."""
    k, out = size
    vector = "8" if k % 8 == 0 else "1"
    if vector == "1" and tile != 64:
        pytest.skip("there is one such tile")
    gemm = Gemm(tile, k, out, gated, rng, gather=gated)
    weights = torch.randint(-8, 9, (gemm.experts, gemm.rows, k), generator=rng).bfloat16()
    check_dense(gemm, plain, "", layout, kind, weights.float(), vector, weights=weights, block_scales=0)


@pytest.mark.parametrize("size", [(96, 32), (352, 70), (333, 40)], ids=str)
@cases
def test_mxfp4(
    tile: int, gated: bool, layout: str, kind: int, size: tuple[int, int], mxfp4: HostCtas, rng: torch.Generator
) -> None:
    """Weights through the packer; K and rows that end within a block."""
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
