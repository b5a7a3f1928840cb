"""Whole CTAs of fp8's GEMMs on the host (host_gemms.py), against sums with the same rounding points.

The host's wgmma adds 32 exact products and rounds to fp32, while a GPU's keeps 14 bits of them. The steps after the
products have the kernels' bits.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor

from cta_operands import (
    BOUNDS,
    DTYPES,
    GEGLU,
    IDENTITY,
    NAMES,
    RELU2,
    SITU,
    SWIGLU,
    Placed,
    activation,
    is_poison_but,
    poison_idle,
    poisoned,
    seed_of,
)
from host_gemms import HostGemms
from oxmoe import reference
from oxmoe.testing import Bar, assert_close_ulp, same_bits

KERNELS = {
    "few_gated": "GroupedGemmFp8Sm90<true, 64, 2, 8>",
    "few_plain": "GroupedGemmFp8Sm90<false, 64, 2, 8>",
    "fewest_gated": "GroupedGemmFp8Sm90<true, 16, 2, 4>",
    "fewest_plain": "GroupedGemmFp8Sm90<false, 16, 1, 7>",
    "gated": "GroupedGemmFp8WideSm90<true, 4>",
    "plain": "GroupedGemmFp8WideSm90<false, 4>",
    "cut_gated": "GroupedGemmFp8WideCutSm90<true, 4>",
    "cut_plain": "GroupedGemmFp8WideCutSm90<false, 4>",
    "ordered_gated": "GroupedGemmFp8OrderedSm90<true, 3>",
    "ordered_plain": "GroupedGemmFp8OrderedSm90<false, 5>",
    "stationary_4": "GroupedGemmFp8StationarySm90<4>",
    "stationary_16": "GroupedGemmFp8StationarySm90<16>",
}
# Approximations of exp and of 1 / x move a result to its neighbour if it was near the border.
BAR = Bar(max_ulp=1.1, ulps=0.9, share=2e-3)
# Expert and tokens of each tile, an expert's tiles beside each other. No tile is expert 1's.
TILES = [(0, 128), (0, 1), (2, 63), (2, 64), (2, 65), (3, 127)]
ORDERED_TILES = [(0, 192), (0, 1), (2, 64), (2, 65), (2, 128), (3, 129), (3, 191)]
# Here an expert's tiles add up to its tiles in TILES.
FEW_TILES = [(0, 64), (0, 64), (0, 1), (2, 63), (2, 64), (2, 47), (2, 18), (3, 64), (3, 63)]
FEWEST_TILES = [(0, 16), (0, 1), (2, 15), (2, 9), (3, 16)]
ORDERS = 3  # orders of threads
GRID = 3
EXPERTS = 4


@dataclasses.dataclass
class Case:
    kernel: str
    inner: int
    columns: int
    activation: int = IDENTITY
    numbers: dict[str, float] = dataclasses.field(default_factory=dict)  # SwiGLU's alpha, beta, limit
    up_gate: bool = False
    bias: torch.dtype | None = None
    weighted: bool = False
    of_rows: bool = False  # scales of weight rows beside those of blocks
    quantised: bool = False
    strided: bool = False  # units in a fixed stride
    by_group: bool = False  # scales of neighbouring rows beside each other
    together: bool = False  # an expert's tiles without a gap
    own_columns: int | None = None  # columns that the weights have of each part, if kernels count more
    own_inner: int | None = None

    @property
    def gated(self) -> bool:
        return self.kernel.endswith("gated")

    @property
    def tiles(self) -> list[tuple[int, int]]:
        if self.together and self.kernel.startswith("ordered"):
            return [(expert, sum(count for e, count in TILES if e == expert)) for expert in (0, 2, 3)]
        of_kernel = {"ordered": ORDERED_TILES, "few": FEW_TILES, "fewest": FEWEST_TILES}
        return of_kernel.get(self.kernel.split("_")[0], TILES)

    def unit_columns(self, quantised: bool) -> int:
        columns = {"gated": 128, "ordered_gated": 128, "plain": 256, "ordered_plain": 128}
        columns |= {"cut_gated": 128, "cut_plain": 256}
        columns |= {"few_gated": 64, "few_plain": 128, "fewest_gated": 64, "fewest_plain": 64}
        few = self.kernel.startswith("few")
        return 128 if few and quantised else (columns | {"stationary_4": 512, "stationary_16": 2048})[self.kernel]


BF16, F32 = torch.bfloat16, torch.float32
LIMITED = {"alpha": 1.702, "beta": 1.0, "limit": 0.5}
CASES = {
    "few-gated": Case("few_gated", 384, 256, SWIGLU, quantised=True),
    "few-gated-up-gate": Case("few_gated", 256, 128, GEGLU, up_gate=True, bias=BF16, weighted=True, quantised=True),
    "few-gated-rows": Case("few_gated", 128, 256, SWIGLU, bias=F32, of_rows=True, quantised=True, strided=True),
    "few-plain": Case("few_plain", 384, 384, bias=F32, of_rows=True),
    "few-plain-activated": Case("few_plain", 256, 256, RELU2, weighted=True, quantised=True),
    "fewest-gated": Case("fewest_gated", 256, 384, SWIGLU, quantised=True),
    "fewest-plain": Case("fewest_plain", 256, 384, bias=BF16),
    "gated": Case("gated", 384, 384, SWIGLU),
    "gated-long": Case("gated", 1152, 128, SWIGLU),
    "gated-limits": Case("gated", 256, 256, SWIGLU, LIMITED, quantised=True),
    "gated-situ": Case("gated", 256, 256, SITU, bias=F32, up_gate=True, quantised=True),
    "few-gated-situ": Case("few_gated", 128, 256, SITU, quantised=True),
    "ordered-gated-situ": Case("ordered_gated", 256, 256, SITU, weighted=True, quantised=True),
    "gated-alpha": Case("gated", 128, 256, SWIGLU, {"alpha": 1.702, "beta": 1.0}),
    "gated-strided": Case("gated", 128, 256, SWIGLU, strided=True),
    "gated-quantised": Case("gated", 256, 256, SWIGLU, bias=F32, quantised=True),
    "gated-rows": Case("gated", 256, 256, SWIGLU, up_gate=True, bias=BF16, of_rows=True),
    "gated-up-gate": Case("gated", 384, 256, GEGLU, up_gate=True, bias=BF16, weighted=True),
    "gated-up-gate-quantised": Case("gated", 256, 256, SWIGLU, up_gate=True, weighted=True, quantised=True),
    "plain": Case("plain", 384, 384, bias=BF16),
    "plain-long": Case("plain", 1152, 512, weighted=True),
    "plain-rows": Case("plain", 256, 384, weighted=True, of_rows=True),
    "plain-activated": Case("plain", 256, 384, RELU2, bias=F32, weighted=True, quantised=True, strided=True),
    "ordered-gated": Case("ordered_gated", 384, 384, SWIGLU, by_group=True),
    "ordered-gated-up-gate": Case("ordered_gated", 384, 256, GEGLU, up_gate=True, bias=BF16, weighted=True),
    "ordered-gated-quantised": Case(
        "ordered_gated", 256, 256, SWIGLU, up_gate=True, weighted=True, quantised=True, strided=True, by_group=True
    ),
    "ordered-gated-limits": Case("ordered_gated", 256, 256, SWIGLU, LIMITED, quantised=True),
    "ordered-gated-one-block": Case("ordered_gated", 128, 384, SWIGLU, bias=F32, quantised=True),
    "ordered-gated-rows": Case("ordered_gated", 256, 256, SWIGLU, bias=F32, of_rows=True),
    "ordered-plain": Case("ordered_plain", 384, 384, bias=BF16, by_group=True, of_rows=True),
    "ordered-plain-long": Case("ordered_plain", 1152, 512, RELU2, weighted=True, quantised=True),
    "stationary": Case("stationary_4", 256, 640, bias=BF16),
    "stationary-long": Case("stationary_4", 1024, 768, strided=True),
    "stationary-16": Case("stationary_16", 256, 2304, bias=F32),
    "stationary-rows": Case("stationary_4", 256, 640, bias=BF16, of_rows=True),
    "stationary-16-k3": Case("stationary_16", 768, 384),
    "cut-gated": Case("cut_gated", 384, 256, SWIGLU, own_columns=176),
    "cut-gated-rows": Case("cut_gated", 256, 384, SWIGLU, bias=F32, of_rows=True, own_columns=352),
    "cut-gated-up-gate": Case("cut_gated", 128, 256, GEGLU, up_gate=True, bias=BF16, weighted=True, own_columns=192),
    "cut-gated-strip": Case("cut_gated", 128, 128, SWIGLU, strided=True, own_columns=16),
    "cut-plain": Case("cut_plain", 256, 384, RELU2, bias=BF16, own_columns=272),
    "cut-plain-rows": Case("cut_plain", 384, 256, RELU2, weighted=True, of_rows=True, own_columns=240),
    "cut-few-gated": Case("few_gated", 256, 256, SWIGLU, own_columns=176),
    "cut-few-gated-rows": Case("few_gated", 128, 384, SWIGLU, up_gate=True, bias=F32, of_rows=True, own_columns=304),
    "cut-few-plain": Case("few_plain", 256, 384, RELU2, of_rows=True, own_columns=272),
    "cut-fewest-gated": Case("fewest_gated", 256, 384, SWIGLU, bias=BF16, own_columns=352),
    "down-few": Case("few_plain", 256, 384, bias=F32, own_inner=176),
    "down-fewest": Case("fewest_plain", 384, 256, of_rows=True, own_inner=304),
    "down-wide": Case("plain", 384, 384, bias=BF16, own_inner=352),
    "down-ordered": Case("ordered_plain", 768, 256, by_group=True, own_inner=704),
    "down-stationary": Case("stationary_4", 256, 640, own_inner=192),
}


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> HostGemms:
    return HostGemms(tmp_path_factory.mktemp("fp8_cta"), KERNELS)


def products(x: tuple[Tensor, Tensor], weights: Tensor, scales: Tensor) -> Tensor:
    """Returns fp32 sums; a step of 32 products is exact in fp64."""
    sums = torch.zeros((len(x[0]), len(weights)))
    for block in range(scales.shape[1]):
        product = torch.zeros_like(sums)
        for first in range(128 * block, 128 * block + 128, 32):
            step = slice(first, first + 32)
            product = (product + x[0][:, step].double() @ weights[:, step].double().T).float()
        scale = x[1][:, block, None] * scales[:, block].repeat_interleave(128)
        sums = (product.double() * scale + sums).float()
    return sums


class Gemm:
    """Random operands of a case, NaN wherever no tile's token needs them, and the expected numbers."""

    def __init__(self, case: Case, rng: torch.Generator) -> None:
        self.case, rows = case, case.columns * (2 if case.gated else 1)
        groups = case.inner // 128
        self.placed = Placed(case.tiles, together=case.together)
        self.tiles, self.inside, place = self.placed.tiles, self.placed.inside, self.placed.places
        ordered = case.kernel.startswith("ordered")
        self.divisor = 2 if case.gated else 1
        self.slots = torch.randperm(3 * place, generator=rng)[:place].int() if case.gated else None
        in_order = ordered or self.slots is None
        source = torch.arange(place) if in_order else self.slots.long() // self.divisor
        used = source[self.inside]
        height = place if ordered else int(source.max()) + 1
        self.x, self.x_scales = poisoned((height, case.inner), torch.float8_e4m3fn), poisoned((height, groups), F32)
        self.x[used] = torch.randn((len(used), case.inner), generator=rng).to(torch.float8_e4m3fn)
        self.x_scales[used] = torch.rand((len(used), groups), generator=rng) + 0.5
        self.weights = torch.randn((EXPERTS, rows, case.inner), generator=rng).to(torch.float8_e4m3fn)
        self.scales = torch.rand((EXPERTS, rows // 128, groups), generator=rng) / 16 + 0.01
        self.bias = torch.randn((EXPERTS, rows), generator=rng).to(case.bias) if case.bias else None
        self.of_rows = torch.rand((EXPERTS, rows), generator=rng) + 0.5 if case.of_rows else None
        slot_of_place = torch.arange(place) if self.slots is None else self.slots.long()
        self.factors = poisoned((int(slot_of_place.max()) + 1,), F32)
        self.factors[slot_of_place[self.inside]] = torch.rand(len(self.inside), generator=rng) + 0.5

        poison_idle({expert for expert, _ in case.tiles}, self.weights, self.scales, self.bias, self.of_rows)
        self.own_weights = self.cut(used)
        self.expected = []
        for (expert, _, _, _), rows_of in zip(self.tiles, self.placed.of_tiles, strict=True):
            row = source[rows_of]
            sums = products(
                (self.x.index_select(0, row), self.x_scales[row]), self.weights[expert], self.scales[expert]
            )
            sums = sums if self.of_rows is None else sums * self.of_rows[expert]
            sums = sums if self.bias is None else sums + self.bias[expert].float()
            sums = sums * self.factors[slot_of_place[rows_of], None] if case.weighted else sums
            if case.activation != IDENTITY:
                layout = "up_gate" if case.up_gate else "gate_up"
                options = BOUNDS if case.activation == SITU else case.numbers
                sums = reference.activate(sums, layout=layout, activation=NAMES[case.activation], **options)
            self.expected.append(sums.bfloat16())

    def cut(self, used: Tensor) -> Tensor:
        """Zeroes what the weights do not have, and returns the used part."""
        case, parts = self.case, 2 if self.case.gated else 1
        columns, inner = case.own_columns or case.columns, case.own_inner or case.inner
        weights = self.weights.view(EXPERTS, parts, case.columns, case.inner).view(torch.uint8)
        weights[:, :, columns:] = weights[..., inner:] = 0
        for numbers in (self.bias, self.of_rows):
            if numbers is not None:
                numbers.view(EXPERTS, parts, -1)[:, :, columns:] = 0
        self.x.view(torch.uint8)[used, inner:] = 0
        own = weights[:, :, :columns, :inner].reshape(EXPERTS, parts * columns, inner)
        return own.contiguous().view(self.weights.dtype)

    def add(
        self, kernels: HostGemms, *, quantised: bool, tiles: int | None = None, **others: int
    ) -> tuple[list[Tensor], Tensor]:
        """Adds a launch. Returns out, with its scales if quantised, and the counter of units."""
        case, places = self.case, self.placed.places
        out = poisoned((places, case.columns), torch.float8_e4m3fn if quantised else BF16)
        groups = case.columns // 128, case.inner // 128
        out_scales = poisoned((groups[0], places) if case.by_group else (places, groups[0]), F32)
        x_scales = self.x_scales.T.contiguous() if case.by_group else self.x_scales
        names = ("x_scale_row", "x_scale_group", "out_scale_row", "out_scale_group")
        by_group = (1, places) * 2
        strides = dict(zip(names, by_group if case.by_group else (groups[1], 1, groups[0], 1), strict=True))
        tile_count = torch.tensor([len(self.tiles) if tiles is None else tiles], dtype=torch.int32)
        next_unit = torch.zeros(1, dtype=torch.int32)
        # The tensors are kept until the launches have run.
        self.buffers = [x_scales, tile_count, next_unit]
        kernels.add(
            case.kernel, self.own_weights, places, strides, GRID, rows=self.weights.shape[1],
            x=self.x.data_ptr(), x_scales=x_scales.data_ptr(),
            slot_of_place=0 if self.slots is None else self.slots.data_ptr(), row_divisor=self.divisor,
            tiles=self.placed.table.data_ptr(), tile_count=tile_count.data_ptr(),
            next_unit=0 if case.strided else next_unit.data_ptr(), block_scales=self.scales.data_ptr(),
            k=case.inner // 2, out_columns=case.columns,
            expert_scales=0 if self.of_rows is None else self.of_rows.data_ptr(),
            bias=0 if self.bias is None else self.bias.data_ptr(), bias_dtype=DTYPES[case.bias or F32],
            layout=int(case.up_gate), slot_weights=self.factors.data_ptr() if case.weighted else 0,
            activation=activation(case.activation, **case.numbers), out=out.data_ptr(),
            out_scales=out_scales.data_ptr() if quantised else 0, **others,
        )  # fmt: skip
        return [out, out_scales] if quantised else [out], next_unit

    def run(
        self, kernels: HostGemms, rng: torch.Generator, *, quantised: bool, tiles: int | None = None
    ) -> list[Tensor]:
        """Runs a launch. Returns out, and its scales if quantised; rows of no tile are as they were."""
        case = self.case
        done = torch.zeros(1 + EXPERTS, dtype=torch.int32)
        counts = {"done": done.data_ptr()} if quantised and case.kernel.startswith("few") else {}
        results, next_unit = self.add(kernels, quantised=quantised, tiles=tiles, **counts)
        kernels.run(seed_of(rng))
        units = (len(self.tiles) if tiles is None else tiles) * -(-case.columns // case.unit_columns(quantised))
        assert tiles is not None or units > GRID, "several units a CTA"
        assert int(next_unit) == (0 if case.strided else units)
        if case.by_group and quantised:
            results[1] = results[1].T.contiguous()
        written = self.inside if tiles is None else self.inside[:0]
        assert all(is_poison_but(written, tensor) for tensor in results), "rows beyond the tiles"
        return [tensor.index_select(0, written) for tensor in results]


@pytest.mark.parametrize("name", CASES)
def test_sums(kernels: HostGemms, name: str, rng: torch.Generator) -> None:
    check_sums(kernels, name, rng)


def check_sums(kernels: HostGemms, name: str, rng: torch.Generator) -> None:
    case = CASES[name]
    gemm = Gemm(case, rng)
    (out,), *others = (gemm.run(kernels, rng, quantised=False) for _ in range(ORDERS))
    assert all(same_bits(other, out) for (other,) in others)
    expected = torch.cat(gemm.expected)
    if case.gated:
        assert_close_ulp(out, expected, BAR)
    else:
        assert same_bits(out, expected)
    assert case.own_columns is None or not bool(out[:, case.own_columns :].any())
    if case.quantised:
        codes, scales = gemm.run(kernels, rng, quantised=True)
        expected_codes, expected_scales = reference.fp8_groups(out)
        assert same_bits(scales, expected_scales) and same_bits(codes, expected_codes)


@pytest.mark.parametrize("name", ["few-gated", "gated", "plain", "ordered-gated", "stationary"])
def test_no_tiles(kernels: HostGemms, name: str, rng: torch.Generator) -> None:
    Gemm(CASES[name], rng).run(kernels, rng, quantised=False, tiles=0)


# Name -> (GEMM1, GEMM2, columns between them). GEMM2 may have another schedule.
OVERLAPS = {
    "wide-plain": ("gated", "plain", 384),
    "wide-stationary": ("gated", "stationary_4", 256),
    "wide-ordered": ("gated", "ordered_plain", 384),
    "ordered": ("ordered_gated", "ordered_plain", 384),
    "few": ("few_gated", "few_plain", 256),
    "few-stationary": ("few_gated", "stationary_4", 256),
    "not-gated": ("plain", "plain", 384),
}


@pytest.mark.parametrize("name", OVERLAPS)
def test_second_gemm_begins_before_the_first_ends(kernels: HostGemms, name: str, rng: torch.Generator) -> None:
    check_overlap(kernels, name, rng)


def check_overlap(kernels: HostGemms, name: str, rng: torch.Generator) -> None:
    """All CTAs of both run at once: GEMM2 waits until GEMM1 says that rows exist, and reads poison if it does not
    wait."""
    first, second, between = OVERLAPS[name]
    kind = RELU2 if first == "plain" else SWIGLU
    up = Gemm(Case(first, 256, between, kind, quantised=True, together=True), rng)
    down = Gemm(Case(second, between, 640, together=True), rng)
    own = name in ("wide-ordered", "few-stationary")
    assert torch.equal(up.inside, down.inside) and (up.tiles == down.tiles) == (not own)
    unread = torch.zeros(1 + EXPERTS, dtype=torch.int32)
    (down.x, down.x_scales), _ = up.add(kernels, quantised=True, done=unread.data_ptr())
    kernels.run(seed_of(rng))
    (expected,) = down.run(kernels, rng, quantised=False)
    # Units of all kernels have 256 weight rows.
    units = -(-between * (1 if first == "plain" else 2) // 256)
    for _ in range(ORDERS):
        done = torch.zeros(1 + EXPERTS, dtype=torch.int32)
        (down.x, down.x_scales), _ = up.add(kernels, quantised=True, done=done.data_ptr())
        awaited = {"awaited": done.data_ptr(), "awaited_ctas": GRID, "awaited_units": units, "schedule_is_older": True}
        (out,), _ = down.add(kernels, quantised=False, **awaited)
        kernels.run(seed_of(rng))
        assert same_bits(out[down.inside], expected)
        assert done.tolist() == [GRID, *(up.placed.rows(EXPERTS) * units).tolist()]


# Fences that a kernel must not do without: (kernels, case or overlap, lines, lines without the fence).
FAULTS = {
    # The copy engine read tokens behind a fence of shared memory, until 2026-11-29.
    "ordered-tokens": (
        ("gated", "ordered_plain"), "wide-ordered",
        'asm volatile("fence.proxy.async.global;" ::: "memory");', "sm90::fence_async_proxy();",
    ),
    "few": (
        ("few_plain",), "few-plain",
        "        for (int block = 0; block < k_blocks; ++block, ring.advance()) {\n"
        "            sm90::barrier_wait(&shared.full[ring.slot], ring.parity);\n            sm90::fence_async_proxy();",
        "        for (int block = 0; block < k_blocks; ++block, ring.advance()) {\n"
        "            sm90::barrier_wait(&shared.full[ring.slot], ring.parity);",
    ),
    "wide": (
        ("plain",), "plain",
        "        sm90::barrier_wait(&shared.full[ring.slot], ring.parity);\n        sm90::fence_async_proxy();\n    }",
        "        sm90::barrier_wait(&shared.full[ring.slot], ring.parity);\n    }",
    ),
    "stationary": (
        ("stationary_4",), "stationary",
        "position_behind.parity);\n                        sm90::fence_async_proxy();", "position_behind.parity);",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_missing_fences_show(tmp_path: Path, fault: str, rng: torch.Generator) -> None:
    names, name, lines, without = FAULTS[fault]
    faulty = HostGemms(tmp_path, {kernel: KERNELS[kernel] for kernel in names}, (lines, without))
    with pytest.raises(AssertionError):
        check_overlap(faulty, name, rng) if name in OVERLAPS else check_sums(faulty, name, rng)
