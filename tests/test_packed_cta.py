"""Work units, weights and tokens that the packed GEMMs' consumers get, in whole CTAs on the host (host_packed.py)."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from host_packed import HostPacked

# As in src/variants/: bits, tokens, consumers, stages, blocks, e4m3.
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
EXPERTS, TILES = 3, 5


@dataclasses.dataclass
class Case:
    k: int
    row_tiles: int
    grid: int
    strided: bool = False
    in_order: bool = False


# Row tiles are not whole row blocks of three or four consumers; K ends inside a stage or a block, but in the first.
CASES = {
    "whole": Case(k=640, row_tiles=12, grid=7, in_order=True),
    "short-block": Case(k=616, row_tiles=5, grid=9),
    "short-stage": Case(k=448, row_tiles=7, grid=7, strided=True),
    "one-block": Case(k=64, row_tiles=1, grid=2),
}


@pytest.fixture(scope="module")
def probes(tmp_path_factory: pytest.TempPathFactory) -> HostPacked:
    return HostPacked(tmp_path_factory.mktemp("packed_cta"), PIPELINES)


@pytest.mark.parametrize("consumers", [3, 4])
def test_cases_have_last_units_by_consumers(consumers: int) -> None:
    """And others, and row tiles that such a unit does not have."""
    splits, missing = set(), set()
    for case in CASES.values():
        blocks = -(-case.row_tiles // consumers)
        left = TILES * blocks % case.grid
        splits.add(0 < left * consumers <= case.grid)
        missing.add(0 < left * consumers <= case.grid and case.row_tiles % consumers != 0)
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


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("name", PIPELINES)
def test_stages(probes: HostPacked, name: str, case: Case, rng: torch.Generator) -> None:
    bits, tokens, *_, e4m3 = PIPELINES[name]
    if e4m3 and case.k % 64:
        pytest.skip("e4m3 rows are whole blocks")
    # Full and nearly full tiles, one row, what two copies of a thread take, an odd count.
    counts = [tokens, 1, tokens - 1, 16, tokens // 2 + 3]
    assert len(counts) == TILES
    tiles, place = [], 2
    for number, count in enumerate(counts):
        tiles.append([number * EXPERTS // len(counts), place, count, 0])
        place += count + 1
    blocks = -(-case.k // 32) if e4m3 else -(-case.k // 64)
    rows = 64 * case.row_tiles - 16
    codes, scales = (
        torch.randint(256, (EXPERTS, case.row_tiles, blocks, size), dtype=torch.uint8, generator=rng)
        for size in (512 * bits, 128)
    )
    divisor = 1 if case.in_order else 2
    slots = torch.randperm(2 * place, generator=rng)[:place].int()
    height = place if case.in_order else place + 1
    x = torch.randint(256, (height, 2 * case.k), dtype=torch.uint8, generator=rng)
    table, tile_count = torch.tensor(tiles, dtype=torch.int32), torch.tensor([len(tiles)], dtype=torch.int32)
    for count in (len(tiles), 2, 0):
        tile_count.fill_(count)
        next_unit = torch.zeros(1, dtype=torch.int32)
        given = torch.zeros((place, case.row_tiles), dtype=torch.int32)
        seed = int(torch.randint(1 << 32, (), generator=rng))
        probes.run(
            name, given, case.grid, seed,
            x=x.data_ptr(), slot_of_place=0 if case.in_order else slots.data_ptr(), row_divisor=divisor,
            tiles=table.data_ptr(), tile_count=tile_count.data_ptr(),
            next_unit=0 if case.strided else next_unit.data_ptr(),
            weights=codes.data_ptr(), block_scales=scales.data_ptr(), rows=rows, k=case.k, out_columns=rows,
        )  # fmt: skip
        expected = torch.zeros_like(given)
        for _, first, size, _ in tiles[:count]:
            expected[first : first + size] = 1
        assert torch.equal(given, expected)
