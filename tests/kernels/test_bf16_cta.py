"""Whole CTAs of the 16-bit GEMMs on the host (host_gemms.py).

Operands are small multiples of powers of two, so fp32 sums are exact in any order. The steps after the sums have the
kernels' bits.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from cta_operands import (
    BOUNDS,
    DTYPES,
    EXPERT_SWIGLU,
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

# SM90_TILES of src/variants/sm90.rs: tokens, row tiles, consumers, stages.
SHAPES = {
    "16": (16, 1, 2, 5),
    "64": (64, 1, 2, 4),
    "64_alone": (64, 1, 2, 8),
    "128": (128, 1, 2, 6),
    "192": (192, 2, 2, 4),
}
KERNELS = {
    f"{kind}_{shape}": f"GroupedGemmSm90<__nv_bfloat16, {gated}, {', '.join(map(str, sizes))}>"
    for kind, gated in (("gated", "true"), ("plain", "false"))
    for shape, sizes in SHAPES.items()
}
LAYOUTS = {"gate_up": 0, "up_gate": 1, "interleaved": 2}
# Approximations of exp and of 1 / x move a result to its neighbour if it was near the border.
BAR = Bar(max_ulp=1.1, ulps=0.9, share=2e-3)
ORDERS = 2  # orders of threads
GRID = 3
EXPERTS = 4
BF16, F32 = torch.bfloat16, torch.float32


@dataclasses.dataclass
class Case:
    shape: str
    inner: int
    columns: int
    activation: int = IDENTITY
    gated: bool = False
    layout: str = "gate_up"
    bias: torch.dtype | None = None
    weighted: bool = False
    strided: bool = False  # units in a fixed stride
    together: bool = False  # an expert's tiles without a gap

    @property
    def kernel(self) -> str:
        return f"{'gated' if self.gated else 'plain'}_{self.shape}"

    @property
    def tiles(self) -> list[tuple[int, int]]:
        """Returns expert and tokens of each tile, an expert's tiles beside each other. No tile is expert 1's."""
        most = SHAPES[self.shape][0]
        few = [(2, most // 2), (2, most // 2 + 1)]
        # These are more than an expert's tiles that go out together.
        many = [(0, most)] * 12 if self.shape == "16" else []
        return [*many, (0, most), (0, 1), (2, most - 1), *few, (3, 9)]

    @property
    def row_blocks(self) -> int:
        _, row_tiles, consumers, _ = SHAPES[self.shape]
        return -(-self.columns * (2 if self.gated else 1) // (64 * row_tiles * consumers))


def gated(shape: str, inner: int, columns: int, kind: int = SWIGLU, **others: object) -> Case:
    return Case(shape, inner, columns, kind, gated=True, **others)


# Columns end inside a unit, and K inside a block. In "gap" a consumer of pairs has no rows of the last unit.
CASES = {
    "16-gated": gated("16", 200, 72, bias=BF16),
    "16-plain": Case("16", 392, 144, bias=F32),
    "64-gated": gated("64", 200, 96),
    "64-gated-up-gate": gated("64", 72, 72, GEGLU, layout="up_gate", bias=BF16, weighted=True),
    "64-gated-situ": gated("64", 72, 96, SITU, layout="up_gate", bias=F32, weighted=True),
    "64-plain": Case("64", 64, 160, RELU2, weighted=True, strided=True),
    "64-alone-gated": gated("64_alone", 648, 72, layout="interleaved", bias=F32),
    "64-alone-plain": Case("64_alone", 136, 144, bias=BF16),
    "128-gated": gated("128", 72, 72, EXPERT_SWIGLU, layout="interleaved"),
    "128-gated-up-gate": gated("128", 72, 96, layout="up_gate", bias=F32, strided=True),
    "128-plain": Case("128", 456, 160, bias=BF16),
    "192-gated": gated("192", 200, 112, bias=BF16),
    "192-gated-gap": gated("192", 72, 160, EXPERT_SWIGLU),
    "192-gated-up-gate": gated("192", 72, 80, GEGLU, layout="up_gate", bias=F32, weighted=True, strided=True),
    "192-gated-situ": gated("192", 72, 112, SITU, layout="interleaved", bias=BF16),
    "192-gated-interleaved": gated("192", 72, 176, layout="interleaved", bias=BF16),
    "192-plain": Case("192", 72, 224, RELU2, bias=F32, weighted=True),
    "192-plain-gap": Case("192", 328, 320, bias=BF16),
}


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> HostGemms:
    return HostGemms(tmp_path_factory.mktemp("bf16_cta"), KERNELS)


def numbers(shape: tuple[int, ...], rng: torch.Generator, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, generator=rng) * 32).round().bfloat16() * (scale / 32)


class Gemm:
    """Random operands of a case, NaN wherever no tile's token needs them, and the expected numbers."""

    def __init__(self, case: Case, rng: torch.Generator) -> None:
        self.case, rows = case, case.columns * (2 if case.gated else 1)
        self.placed = Placed(case.tiles, together=case.together)
        inside, places = self.placed.inside, self.placed.places
        self.divisor = 1 if case.activation == IDENTITY else 2
        self.slots = torch.randperm(3 * places, generator=rng)[:places].int() if self.divisor == 2 else None
        slot_of_place = torch.arange(places) if self.slots is None else self.slots.long()
        source = slot_of_place // self.divisor
        self.x = poisoned((int(source.max()) + 1, case.inner), BF16)
        self.x[source[inside]] = numbers((len(inside), case.inner), rng)
        self.weights = numbers((EXPERTS, rows, case.inner), rng, 1 / 16)
        self.bias = torch.randn((EXPERTS, rows), generator=rng).to(case.bias) if case.bias else None
        # With SiTU the bound of the gate stands in the place of alpha.
        of_experts = case.activation in (EXPERT_SWIGLU, SITU)
        self.alpha = torch.rand(EXPERTS, generator=rng) + 0.5 if of_experts else None
        self.factors = poisoned((int(slot_of_place.max()) + 1,), F32)
        self.factors[slot_of_place[inside]] = torch.rand(len(inside), generator=rng) + 0.5
        poison_idle({expert for expert, _ in case.tiles}, self.weights, self.bias, self.alpha)

        expected = []
        for (expert, _, _, _), rows_of in zip(self.placed.tiles, self.placed.of_tiles, strict=True):
            sums = self.x[source[rows_of]].float() @ self.weights[expert].float().T
            sums = sums if self.bias is None else sums + self.bias[expert].float()
            sums = sums * self.factors[slot_of_place[rows_of], None] if case.weighted else sums
            if case.activation != IDENTITY:
                options = dict(BOUNDS) if case.activation == SITU else {}
                if self.alpha is not None:
                    options["situ_beta" if case.activation == SITU else "alpha"] = float(self.alpha[expert])
                name = NAMES[case.activation]
                sums = reference.activate(sums, layout=case.layout, activation=name, **options)
            expected.append(sums.bfloat16())
        self.expected = torch.cat(expected)

    def add(self, kernels: HostGemms, *, tiles: int | None = None, **others: int) -> tuple[Tensor, Tensor]:
        """Adds a launch. Returns out and the counter of units."""
        case = self.case
        out = poisoned((self.placed.places, case.columns), BF16)
        tile_count = torch.tensor([len(self.placed.tiles) if tiles is None else tiles], dtype=torch.int32)
        next_unit = torch.zeros(1, dtype=torch.int32)
        self.buffers = [tile_count, next_unit]  # kept until the launches have run
        kernels.add(
            case.kernel, self.weights, self.placed.places, {}, GRID, x=self.x.data_ptr(),
            slot_of_place=0 if self.slots is None else self.slots.data_ptr(), row_divisor=self.divisor,
            tiles=self.placed.table.data_ptr(), tile_count=tile_count.data_ptr(),
            next_unit=0 if case.strided else next_unit.data_ptr(), k=case.inner, out_columns=case.columns,
            bias=0 if self.bias is None else self.bias.data_ptr(), bias_dtype=DTYPES[case.bias or F32],
            layout=LAYOUTS[case.layout], slot_weights=self.factors.data_ptr() if case.weighted else 0,
            activation=activation(case.activation), expert_alpha=0 if self.alpha is None else self.alpha.data_ptr(),
            out=out.data_ptr(), **others,
        )  # fmt: skip
        return out, next_unit

    def run(self, kernels: HostGemms, rng: torch.Generator, *, tiles: int | None = None) -> Tensor:
        """Runs a launch and returns out; rows of no tile are as they were."""
        out, next_unit = self.add(kernels, tiles=tiles)
        kernels.run(seed_of(rng))
        units = (len(self.placed.tiles) if tiles is None else tiles) * self.case.row_blocks
        assert tiles is not None or units > GRID, "several units a CTA"
        assert int(next_unit) == (0 if self.case.strided else units)
        written = self.placed.inside if tiles is None else self.placed.inside[:0]
        assert is_poison_but(written, out), "rows beyond the tiles"
        return out[written]


@pytest.mark.parametrize("name", CASES)
def test_sums(kernels: HostGemms, name: str, rng: torch.Generator) -> None:
    case = CASES[name]
    gemm = Gemm(case, rng)
    out, *others = (gemm.run(kernels, rng) for _ in range(ORDERS))
    assert all(same_bits(other, out) for other in others)
    if case.gated:
        assert_close_ulp(out, gemm.expected, BAR)
    else:
        assert same_bits(out, gemm.expected)


@pytest.mark.parametrize("name", ["16-gated", "128-plain", "192-gated"])
def test_no_tiles(kernels: HostGemms, name: str, rng: torch.Generator) -> None:
    Gemm(CASES[name], rng).run(kernels, rng, tiles=0)


# GEMM1, and the columns of GEMM2. In "192-gap" a consumer has no rows of the last row block, in both.
OVERLAPS = {
    "16": (gated("16", 72, 72), 144),
    "64": (gated("64", 72, 96, bias=BF16), 160),
    "64-alone": (gated("64_alone", 72, 72, layout="interleaved"), 144),
    "64-not-gated": (Case("64", 72, 160, RELU2), 72),
    "128": (gated("128", 72, 72), 160),
    "192": (gated("192", 72, 112), 224),
    "192-gap": (gated("192", 72, 160, layout="up_gate"), 320),
}


@pytest.mark.parametrize("name", OVERLAPS)
def test_second_gemm_begins_before_the_first_ends(kernels: HostGemms, name: str, rng: torch.Generator) -> None:
    """All CTAs of both run at once. GEMM2 must wait until GEMM1 says that rows exist, or ends; otherwise it reads
    poison."""
    first, columns = OVERLAPS[name]
    up = Gemm(dataclasses.replace(first, together=True), rng)
    down = Gemm(Case(first.shape, first.columns, columns, together=True), rng)
    down.x, _ = up.add(kernels)
    kernels.run(seed_of(rng))
    expected = down.run(kernels, rng)
    for counts in [True] * ORDERS + [False]:
        done = torch.zeros(1 + EXPERTS, dtype=torch.int32)
        down.x, _ = up.add(kernels, done=done.data_ptr() if counts else 0)
        awaited = (
            {"awaited": done.data_ptr(), "awaited_ctas": GRID, "awaited_units": first.row_blocks} if counts else {}
        )
        out, _ = down.add(kernels, schedule_is_older=True, **awaited)
        kernels.run(seed_of(rng))
        assert is_poison_but(down.placed.inside, out) and same_bits(out[down.placed.inside], expected)
        assert not counts or done.tolist() == [GRID, *(up.placed.rows(EXPERTS) * first.row_blocks).tolist()]
