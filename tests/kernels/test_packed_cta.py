"""Work units, weights and tokens that the packed GEMMs' consumers get, in whole CTAs on the host (host_packed.py)."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch

from fake_cuda.harness import STRUCTS
from host_packed import HostPacked
from oxmoe import reference

# Name -> (bits, tokens, consumers, stages, blocks, e4m3), as in src/variants/.
PIPELINES = {
    "t16": (4, 16, 2, 3, 5, False),
    "t32": (4, 32, 3, 3, 5, False),
    "t48": (4, 48, 4, 3, 4, False),
    "t48_mxfp8": (8, 48, 4, 4, 2, False),
    "t64": (4, 64, 4, 3, 4, False),
    "t64_threes": (4, 64, 3, 4, 3, False),
    "t64_e4m3": (4, 64, 3, 4, 4, True),
    "t80": (4, 80, 3, 3, 4, False),
    "t80_threes": (4, 80, 3, 4, 3, False),
    "t128": (4, 128, 3, 4, 2, False),
    "t192": (4, 192, 3, 5, 1, False),
}
# Epilogues of NVFP4's GEMM1 with both roundings: gated, tokens, consumers, stages, blocks.
EPILOGUES = {
    f"{'gated' if gated else 'plain'}_t{sizes[0]}_c{sizes[1]}": (gated, *sizes)
    for gated in (True, False)
    for sizes in (
        (16, 2, 3, 5), (32, 2, 2, 5), (48, 4, 3, 4), (64, 4, 3, 4), (64, 3, 4, 3), (80, 3, 3, 4), (128, 3, 4, 2),
        (192, 3, 5, 1),
    )
}  # fmt: skip
EXPERTS, TILES = 3, 5


@dataclasses.dataclass
class Case:
    k: int
    row_tiles: int
    grid: int
    strided: bool = False
    in_order: bool = False


# Row tiles are not whole row blocks of three or four consumers. K ends inside a stage or a block, except in the first
# case.
CASES = {
    "whole": Case(k=640, row_tiles=12, grid=7, in_order=True),
    "short-block": Case(k=616, row_tiles=5, grid=9),
    "short-stage": Case(k=448, row_tiles=7, grid=7, strided=True),
    "one-block": Case(k=64, row_tiles=1, grid=2),
}


@pytest.fixture(scope="module")
def probes(tmp_path_factory: pytest.TempPathFactory) -> HostPacked:
    return HostPacked(tmp_path_factory.mktemp("packed_cta"), PIPELINES, EPILOGUES)


def test_cases_have_last_units_by_consumers() -> None:
    """The cases also have other last units, and row tiles that such a unit does not have."""
    splits, missing = set(), set()
    for case in CASES.values():
        blocks = -(-case.row_tiles // 3)
        left = TILES * blocks % case.grid
        splits.add(0 < left * 3 <= case.grid)
        missing.add(0 < left * 3 <= case.grid and case.row_tiles % 3 != 0)
    assert splits == missing == {False, True}


@pytest.mark.parametrize("name", PIPELINES)
def test_narrowest_width(probes: HostPacked, name: str) -> None:
    _, tokens, *_, e4m3 = PIPELINES[name]
    chosen = [probes.width(name, count) for count in range(1, tokens + 1)]
    widths = sorted(set(chosen))
    assert widths[-1] == tokens and all(width % 8 == 0 for width in widths)
    assert chosen == [min(w for w in widths if w >= count) for count in range(1, tokens + 1)]
    steps = [wide - narrow for narrow, wide in itertools.pairwise(widths)]
    fine = 8 if tokens <= 32 or (64 <= tokens <= 128 and not e4m3) else 16
    assert steps == sorted(steps, reverse=True) and steps[-1] == fine and steps[0] <= 16


@dataclasses.dataclass
class Rows:
    """Tiles of rows in the order of places, and the rows of x that they hold."""

    tiles: list[list[int]]
    slots: torch.Tensor
    divisor: int
    x: torch.Tensor
    counts: list[int] | None = None

    @property
    def places(self) -> int:
        return len(self.slots)

    @classmethod
    def gathered(cls, tokens: int, case: Case, rng: torch.Generator) -> Rows:
        # The tiles are full and nearly full, one row, the rows that two copies of a thread take, and an odd count.
        counts = [tokens, 1, tokens - 1, 16, tokens // 2 + 3]
        assert len(counts) == TILES
        tiles, place = [], 2
        for number, count in enumerate(counts):
            tiles.append([number * EXPERTS // len(counts), place, count, 0])
            place += count + 1
        slots = torch.randperm(2 * place, generator=rng)[:place].int()
        height = place if case.in_order else place + 1
        x = torch.randint(256, (height, 2 * case.k), dtype=torch.uint8, generator=rng)
        return cls(tiles, slots, 1 if case.in_order else 2, x)

    @classmethod
    def by_expert(cls, tokens: int, case: Case, rng: torch.Generator) -> Rows:
        """Makes an expert without rows, one with a tile and some, and one whose rows fill the room."""
        each, step = 2 * tokens + 3, min(tokens, 16)
        counts, tiles = [0, tokens + 1, each + 5], []
        for expert, rows in enumerate(min(count, each) for count in counts):
            parts, steps, first = -(-rows // tokens), -(-rows // step), expert * each
            for part in range(parts):
                end = min(first + (steps // parts + (part < steps % parts)) * step, expert * each + rows)
                tiles.append([expert, first, end - first, 0])
                first = end
        x = torch.randint(256, (EXPERTS * each, 2 * case.k), dtype=torch.uint8, generator=rng)
        return cls(tiles, torch.arange(EXPERTS * each, dtype=torch.int32), 1, x, counts)


class Gemm:
    """Weights of a GEMM of any bytes, and how often each of its outputs was given to a consumer."""

    def __init__(self, name: str, row_tiles: int, k: int, places: int, rng: torch.Generator) -> None:
        bits, *_, e4m3 = PIPELINES[name]
        blocks = -(-k // 32) if e4m3 else -(-k // 64)
        self.row_tiles, self.rows, self.k = row_tiles, 64 * row_tiles - 16, k
        sizes = (512 * bits, 128)
        self.parts = [
            torch.randint(256, (EXPERTS, row_tiles, blocks, size), dtype=torch.uint8, generator=rng) for size in sizes
        ]
        self.given = torch.zeros((places, row_tiles), dtype=torch.int32)

    def params(self, **others: int) -> Any:
        codes, scales = (part.data_ptr() for part in self.parts)
        own = {"rows": self.rows, "k": self.k, "out_columns": self.rows}
        return STRUCTS["GroupedGemmParams"](weights=codes, block_scales=scales, **own, **others)

    def check(self, tiles: list[list[int]]) -> None:
        expected = torch.zeros_like(self.given)
        for _, first, size, _ in tiles:
            expected[first : first + size] = 1
        assert torch.equal(self.given, expected)
        self.given.zero_()


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("name", [name for name, (*_, e4m3) in PIPELINES.items() if e4m3])
def test_stages_of_one_gemm(probes: HostPacked, name: str, case: Case, rng: torch.Generator) -> None:
    if case.k % 64:
        pytest.skip("e4m3 rows are whole blocks")
    rows = Rows.gathered(PIPELINES[name][1], case, rng)
    gemm = Gemm(name, case.row_tiles, case.k, rows.places, rng)
    table = torch.tensor(rows.tiles, dtype=torch.int32)
    for count in (TILES, 2, 0):
        next_unit, tile_count = torch.zeros(1, dtype=torch.int32), torch.tensor([count], dtype=torch.int32)
        p = gemm.params(
            x=rows.x.data_ptr(), slot_of_place=0 if case.in_order else rows.slots.data_ptr(), row_divisor=rows.divisor,
            tiles=table.data_ptr(), tile_count=tile_count.data_ptr(),
            next_unit=0 if case.strided else next_unit.data_ptr(),
        )  # fmt: skip
        seed = int(torch.randint(1 << 32, (), generator=rng))
        probes.run(name, [gemm.given, gemm.given], case.grid, seed, p)
        gemm.check(rows.tiles[:count])


@pytest.mark.parametrize("by_expert", [False, True], ids=["schedule", "by-expert"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("name", [name for name, (*_, e4m3) in PIPELINES.items() if not e4m3])
def test_stages_of_both_gemms(probes: HostPacked, name: str, case: Case, by_expert: bool, rng: torch.Generator) -> None:
    """The probe stores GEMM2's tokens as GEMM1's output: a consumer that gathers them too early gets other bytes."""
    tokens = PIPELINES[name][1]
    rows = Rows.by_expert(tokens, case, rng) if by_expert else Rows.gathered(tokens, case, rng)
    up = Gemm(name, case.row_tiles, case.k, rows.places, rng)
    down = Gemm(name, 5, up.rows, rows.places, rng)
    runs = [(len(rows.tiles), True, True)]
    if not by_expert:
        runs += [(2, True, True), (0, True, True), (TILES, True, False), (TILES, False, True)]
    for count, has_up, has_down in runs:
        hidden = torch.randint(256, (rows.places, 2 * up.rows), dtype=torch.uint8, generator=rng)
        table = torch.tensor(rows.tiles, dtype=torch.int32)
        next_unit, tile_count = torch.zeros(1, dtype=torch.int32), torch.tensor([count], dtype=torch.int32)
        # Rows are in order by the divisor, or without slots.
        divisor = 0 if case.in_order and not by_expert else rows.divisor
        shared = {} if by_expert else {"tile_count": tile_count.data_ptr(), "next_unit": next_unit.data_ptr()}
        pair = {
            "up": up.params(
                x=rows.x.data_ptr(), slot_of_place=0 if by_expert else rows.slots.data_ptr(),
                row_divisor=divisor, out=hidden.data_ptr(), **shared,
            ),
            "down": down.params(x=hidden.data_ptr(), row_divisor=1, **shared),
        }  # fmt: skip
        for gemm, there in (("up", has_up), ("down", has_down)):
            if not there:
                pair[gemm].rows = 0
        counters = torch.zeros(2 + EXPERTS, dtype=torch.int32)
        if rows.counts is not None:
            counts = torch.tensor(rows.counts, dtype=torch.int32)
            pair |= {"row_counts": counts.data_ptr(), "experts": EXPERTS, "rows_each": rows.places // EXPERTS}
            pair["counters"] = pair["up"].next_unit = counters.data_ptr()
        else:
            pair["tiles"] = table.data_ptr()
        wave = int(torch.randint(1, case.grid + 2, (), generator=rng))
        p = STRUCTS["GemmPairParams"](**pair, tile_tokens=tokens, tile_step=min(tokens, 16), wave=wave)
        seed = int(torch.randint(1 << 32, (), generator=rng))
        probes.run(name, [up.given, down.given], case.grid, seed, p)
        up.check(rows.tiles[:count] if has_up else [])
        down.check(rows.tiles[:count] if has_down else [])
        assert not counters.any()
        if rows.counts is None:
            done = torch.zeros(TILES, dtype=torch.int32)
            done[:count] = case.row_tiles * has_up
            assert torch.equal(table[:, 3], done)


def sums_of(values: torch.Tensor, gated: bool, consumers: int, tokens: int) -> torch.Tensor:
    """Returns fp32 [consumers, 128, tokens / 2]: the outputs [tokens, columns] as the threads hold them."""
    consumer, thread, i = torch.meshgrid(
        torch.arange(consumers), torch.arange(128), torch.arange(tokens // 2), indexing="ij"
    )
    warp, lane, half = thread // 32, thread % 32, i % 4 // 2
    slices = consumer * 4 + warp
    column = slices * 8 + lane // 4 if gated else slices * 16 + half * 8 + lane // 4
    found = values[i // 4 * 8 + lane % 4 * 2 + i % 2, column]
    return torch.where(half == 1, torch.nan, found).contiguous() if gated else found.contiguous()


@pytest.mark.parametrize("rounds", [True, False], ids=["w4a4", "w4a16"])
@pytest.mark.parametrize("name", EPILOGUES)
def test_epilogue_rounds_outputs(probes: HostPacked, name: str, rounds: bool, rng: torch.Generator) -> None:
    """GEMM1's bf16 outputs are rounded to NVFP4 under their expert's number; NaN lies beyond rows and columns."""
    gated, tokens, consumers, *_ = EPILOGUES[name]
    row_block, expert, first = 1, 2, 5
    whole = (32 if gated else 64) * consumers
    before = whole * row_block
    # The last row block has whole row tiles, or one of 16 columns, or none for the last consumer.
    for count, missing in ((tokens, 0), (1, 16), (tokens - 1, whole // consumers * (consumers > 1) + 16), (9, 16)):
        columns = before + whole - missing
        sizes = torch.exp2(torch.randint(-20, 9, (tokens, whole // 16), generator=rng).repeat_interleave(16, 1))
        values = torch.randn((tokens, whole), generator=rng) * sizes
        values[0, :16], values[count // 2, 3] = 0, 1e-30
        values[count:] = torch.nan
        sums = sums_of(values, gated, consumers, tokens)
        numbers = torch.rand(EXPERTS, generator=rng) * 400
        out = torch.full((first + tokens + 3, columns), torch.nan, dtype=torch.bfloat16)
        p = STRUCTS["GroupedGemmParams"](
            weights=sums.data_ptr(), out=out.data_ptr(), out_columns=columns, rows=columns * (2 if gated else 1),
            out_global_scales=numbers.data_ptr() if rounds else 0,
        )  # fmt: skip
        seed = int(torch.randint(1 << 32, (), generator=rng))
        probes.finish(name, p, [expert, first, count, row_block], seed)
        expected = values[:count, : whole - missing].bfloat16()
        if rounds:
            codes, scales = reference.nvfp4(expected, numbers[expert : expert + 1])
            expected = reference.nvfp4_numbers(codes[..., 0::2] | codes[..., 1::2] << 4, scales).bfloat16()
        poison = torch.full_like(out, torch.nan)
        poison[first : first + count, before:] = expected
        assert torch.equal(out.view(torch.int16), poison.view(torch.int16))
