"""Whole CTAs of dense MXFP8 for many tokens on the host (host_mm_mxfp8.py), and how they share tiles and K.

Operands are small multiples of powers of two. Sums are exact in fp32 in any order, so out has the bits of rounded fp64.
"""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
from torch import Tensor

from cta_operands import POISON, poisoned, seed_of
from fake_cuda.harness import STRUCTS
from host_kernels import ROOT
from host_mm_mxfp8 import HostMm
from oxmoe.testing import same_bits
from test_mm_mxfp8_few import View, values

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = {F32: 0, F16: 1, BF16: 2}
NAN = 0x7F
GUARD = 1 << 18  # bytes before and behind the memory that a kernel writes
TOKENS_GRID = 3
ORDERS = 2  # orders of threads
WIDE = re.findall(
    r"^    wide\((\d+), (\d+), (\d+)\),$", (ROOT / "src" / "variants" / "dense.rs").read_text(), re.MULTILINE
)
assert WIDE, "src/variants/dense.rs lists no kernels as this test reads them"
# Name -> (tokens, consumers, stages).
KERNELS = {
    f"t{tokens}_c{consumers}": tuple(map(int, (tokens, consumers, stages))) for tokens, consumers, stages in WIDE
}


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> HostMm:
    return HostMm(tmp_path_factory.mktemp("mm_mxfp8_cta"), KERNELS)


def up_div(a: int, b: int) -> int:
    return -(-a // b)


class Guarded:
    """Memory that a kernel writes, filled with poison, between bytes that it must leave."""

    def __init__(self, size: int) -> None:
        self.memory = poisoned((size + 2 * GUARD,), torch.uint8)
        self.inside = self.memory[GUARD : GUARD + size]

    @property
    def address(self) -> int:
        return self.inside.data_ptr()

    def check(self) -> None:
        others = torch.cat([self.memory[:GUARD], self.memory[len(self.memory) - GUARD :]])
        assert bool((others == POISON).all()), "beyond the end"


class Operand:
    """Codes and scales whose products are multiples of 1 / 16 below 50, with NaN in the memory behind them."""

    def __init__(self, rows: int, k: int, form: str, rng: torch.Generator) -> None:
        numbers = torch.randint(-7, 8, (rows, k), generator=rng).float() / 2
        self.memory = torch.full((rows + 1, k), NAN, dtype=torch.uint8)
        self.codes = self.memory[:rows]
        self.codes[:] = numbers.to(torch.float8_e4m3fn).view(torch.uint8)
        self.scales = torch.randint(126, 129, (rows, k // 32), generator=rng, dtype=torch.uint8)
        self.form = form

    def values(self) -> Tensor:
        return values(self.codes, self.scales)

    def view(self) -> View:
        return View(self.scales, self.form)


class Product:
    """A launch of each kernel for out = a b^T, and the workspace between them."""

    def __init__(
        self, kernel: str, a: Operand, b: Operand, grid: int, dtype: torch.dtype, *, shared: int = 0, splits: int = 1
    ) -> None:
        self.tokens, self.consumers, _ = KERNELS[kernel]
        self.kernel, self.a, self.b, self.grid, self.dtype = kernel, a, b, grid, dtype
        self.shared, self.splits = shared, splits
        (self.m, self.k), self.n = a.codes.shape, b.codes.shape[0]
        self.blocks = max(up_div(self.k, 128), 1)
        self.token_tiles, self.row_blocks = up_div(self.m, self.tokens), up_div(self.n, 64 * self.consumers)
        # The sizes are those of src/dense/plan.rs.
        ctas = grid if shared else 0
        self.arrivals = ctas * self.consumers
        self.prepared = Guarded(self.token_tiles * self.tokens * self.blocks * 128 * 2)
        self.partial_sums = Guarded(ctas * 64 * self.consumers * self.tokens * 4)
        self.arrived = Guarded(self.arrivals * 4)

    @property
    def tiles(self) -> int:
        return self.token_tiles * self.row_blocks

    def parameters(self, out: Guarded, views: tuple[View, View]) -> object:
        return STRUCTS["MmMxfp8Params"](
            a=self.a.codes.data_ptr(), b=self.b.codes.data_ptr(), a_scales=views[0].struct, b_scales=views[1].struct,
            out=out.address, out_dtype=DTYPES[self.dtype], m=self.m, n=self.n, k=self.k, splits=self.splits,
            shared_tiles=self.shared, tokens=self.prepared.address, tile_tokens=self.tokens,
            partial_sums=self.partial_sums.address, arrived=self.arrived.address, arrivals=self.arrivals,
        )  # fmt: skip

    def run(self, kernels: HostMm, rng: torch.Generator, arrived: int = POISON) -> Tensor:
        """Runs both kernels. `arrived`: each byte of the counters before."""
        out = Guarded(self.m * self.n * self.dtype.itemsize)
        self.prepared.inside[:] = POISON
        self.partial_sums.inside[:] = POISON
        self.arrived.inside[:] = arrived
        views = self.a.view(), self.b.view()
        kernels.run(self.kernel, self.parameters(out, views), seed_of(rng), TOKENS_GRID, self.grid)
        for memory in (out, self.prepared, self.partial_sums, self.arrived):
            memory.check()
        return out.inside.view(self.dtype).view(self.m, self.n)

    def segments(self, kernels: HostMm) -> Tensor:
        return kernels.segments(self.tiles, self.shared, self.blocks, self.grid, self.splits)

    def check_arrived(self, kernels: HostMm) -> None:
        """A counter of each warpgroup of a CTA that left a tile to another one is 1, all others are 0."""
        cta, _, _, last = self.segments(kernels).T
        wanted = torch.zeros((self.arrivals // self.consumers, self.consumers), dtype=torch.int32)
        if self.shared:
            wanted[cta[last < self.blocks]] = 1
        assert torch.equal(self.arrived.inside.view(torch.int32), wanted.flatten())


@dataclasses.dataclass
class Case:
    """Numbers of tiles of tokens and of rows, and how much the last ones lack; the first `shared` tiles are cut."""

    tokens: tuple[int, int]
    rows: tuple[int, int]
    k: int
    grid: int
    shared: int = 0
    dtype: torch.dtype = BF16
    forms: tuple[str, str] = ("128x4", "128x4")
    splits: int = 1

    def product(self, kernel: str, rng: torch.Generator) -> Product:
        tokens, consumers, _ = KERNELS[kernel]
        m, n = self.tokens[0] * tokens - self.tokens[1], self.rows[0] * 64 * consumers - self.rows[1]
        a, b = Operand(m, self.k, self.forms[0], rng), Operand(n, self.k, self.forms[1], rng)
        return Product(kernel, a, b, self.grid, self.dtype, shared=self.shared, splits=self.splits)


# n is a multiple of 8 if the last tile lacks a multiple of 8 rows. Otherwise it is no multiple of 4, or not even of 2.
# K ends inside a block.
CASES = {
    # All tiles are whole, several for each CTA.
    "whole": Case((2, 3), (2, 8), k=96, grid=3),
    "whole-odd": Case((1, 1), (3, 29), k=288, grid=2, dtype=F32, forms=("8x4", "rows")),
    "whole-one-row": Case((2, 37), (1, 61), k=32, grid=2, dtype=F16, forms=("columns", "apart")),
    "whole-no-k": Case((1, 5), (2, 22), k=0, grid=2, forms=("rows", "rows")),
    "whole-groups": Case((2, 10), (9, 45), k=32, grid=4),
    # All tiles are cut: by fewer CTAs than tiles, by more, by more than K blocks; several share a K; runs end at tiles'
    # ends.
    "fewer": Case((2, 9), (2, 35), k=1120, grid=3, shared=4, forms=("rows", "128x4")),
    "more": Case((1, 30), (2, 40), k=1376, grid=5, shared=2, dtype=F32),
    "one-tile": Case((1, 17), (1, 50), k=2336, grid=4, shared=1, dtype=F16, forms=("apart", "columns")),
    "at-ends": Case((1, 8), (2, 3), k=736, grid=2, shared=2),
    "too-short": Case((1, 0), (2, 0), k=480, grid=5, shared=2),
    "more-than-blocks": Case((1, 12), (1, 6), k=992, grid=10, shared=1),
    # Shared tiles come before whole ones.
    "then-whole": Case((1, 33), (7, 16), k=864, grid=2, shared=3, forms=("8x4", "8x4")),
    "then-whole-odd": Case((2, 1), (3, 27), k=864, grid=4, shared=2, dtype=F32),
    # The CTAs of a cluster share a tile.
    "cluster": Case((1, 11), (2, 56), k=608, grid=4, splits=2),
    "cluster-odd": Case((2, 50), (1, 21), k=480, grid=6, splits=3, dtype=F16),
}


# Every tile runs each second case; of two neighbours one runs.
RUNS = [
    pytest.param(kernel, name, id=f"{kernel}-{name}")
    for i, kernel in enumerate(KERNELS)
    for j, name in enumerate(CASES)
    if (i + j) % 2 == 0
]


def test_cases_are_cut_as_they_say(kernels: HostMm, rng: torch.Generator) -> None:
    """The cases have: the most CTAs that share a tile, CTAs that hand over, CTAs without work."""
    cut = {}
    for name, case in CASES.items():
        product = case.product("t64_c2", rng)
        cta, tile, _, last = product.segments(kernels).T
        over = int((last < product.blocks).sum()) if case.splits == 1 else 0
        cut[name] = int(tile.bincount().max()), over, case.grid - len(cta.unique())
        assert (case.shared > 0) == (name.split("-")[0] not in ("whole", "cluster"))
    assert {sizes for name, sizes in cut.items() if name.startswith("whole")} == {(1, 0, 0)}
    expected = {
        "fewer": (2, 2, 0),
        "more": (3, 3, 0),
        "one-tile": (4, 3, 0),
        "at-ends": (1, 0, 0),
        "too-short": (1, 0, 3),
        "more-than-blocks": (4, 3, 6),
        "then-whole": (2, 1, 0),
        "then-whole-odd": (2, 2, 0),
        "cluster": (2, 0, 0),
        "cluster-odd": (3, 0, 0),
    }
    assert {name: cut[name] for name in cut if not name.startswith("whole")} == expected


@pytest.mark.parametrize(("kernel", "name"), RUNS)
def test_sums(kernels: HostMm, kernel: str, name: str, rng: torch.Generator) -> None:
    case = CASES[name]
    product = case.product(kernel, rng)
    assert product.tiles == case.tokens[0] * case.rows[0]
    expected = (product.a.values() @ product.b.values().T + 0.0).to(case.dtype)
    # Counters of an earlier launch are as bad as poison.
    for order in range(ORDERS):
        out = product.run(kernels, rng, (POISON, 1)[order % 2])
        assert same_bits(out, expected)
        product.check_arrived(kernels)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_stays_in_its_row(kernels: HostMm, dtype: torch.dtype, rng: torch.Generator) -> None:
    """NaN is in codes and in scales, also if K ends inside a block: the memory behind a row is the next row's."""
    product = dataclasses.replace(CASES["one-tile"], k=1248, dtype=dtype).product("t64_c2", rng)
    a, b = product.a, product.b
    a.codes[20, 0], a.scales[41, -1], b.codes[30, 0], b.codes[61, -1], b.scales[3, 5] = NAN, 255, NAN | 0x80, NAN, 255
    out, expected = product.run(kernels, rng), (a.values() @ b.values().T + 0.0).to(dtype)
    assert int(expected.isnan().sum()) == 2 * product.n + 3 * (product.m - 2)
    assert torch.equal(out.isnan(), expected.isnan())
    assert same_bits(out.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize(("m", "k", "tokens"), [(101, 416, 64), (192, 256, 192), (1, 32, 256), (7, 0, 96)])
def test_preparation(kernels: HostMm, m: int, k: int, tokens: int, rng: torch.Generator) -> None:
    """All codes and scales are rounded to bf16, in the order that mxfp8_operand.cuh says; no arrivals are counted."""
    a = Operand(m, k, "128x4", rng)
    a.codes[:] = torch.randint(256, a.codes.shape, generator=rng)
    a.scales[:] = torch.randint(256, a.scales.shape, generator=rng)
    kernel = next(name for name, tile in KERNELS.items() if tile[0] == tokens)
    product = Product(kernel, a, Operand(1, k, "rows", rng), 5, BF16, shared=1)
    out, views = Guarded(2 * m), (a.view(), product.b.view())
    for grid in (1, 4):
        product.prepared.inside[:] = product.arrived.inside[:] = POISON
        kernels.run("prepare", product.parameters(out, views), seed_of(rng), grid)
        tiles, blocks = product.token_tiles, product.blocks
        padded = torch.zeros((tiles * tokens, blocks * 128), dtype=torch.float64)
        padded[:m, :k] = a.values()
        # Lane c in step s has bytes 4 s to 4 s + 3 of the block's group c. The first two are columns 2 c, 2 c + 1 of
        # 16.
        ordered = padded.view(tiles, tokens, blocks, 4, 2, 4, 2, 2).permute(0, 2, 4, 1, 5, 6, 3, 7)
        chunks = ordered.reshape(tiles, blocks, 2, tokens, 8, 8)
        rows = torch.arange(tokens)[:, None]
        expected = chunks[:, :, :, rows, torch.arange(8) ^ rows % 8].bfloat16()
        found = product.prepared.inside.view(BF16).view(expected.shape)
        assert torch.equal(found.isnan(), expected.isnan())
        assert same_bits(found.nan_to_num(), expected.nan_to_num())
        assert not bool(product.arrived.inside.any())
        for memory in (product.prepared, product.arrived):
            memory.check()
    assert bool((out.memory == POISON).all())


def check_share(kernels: HostMm, tiles: int, shared: int, blocks: int, grid: int) -> None:
    segments = kernels.segments(tiles, shared, blocks, grid)
    cta, tile, first, last = segments.T
    assert bool((first >= 0).all() and (first < last).all() and (last <= blocks).all() and (tile < tiles).all())
    # Each block comes once: segments by their beginning lie side by side.
    order = (tile * blocks + first).argsort()
    starts, ends = (tile * blocks + first)[order], (tile * blocks + last)[order]
    assert starts.tolist() == [0, *ends[:-1].tolist()] and int(ends[-1]) == tiles * blocks
    # The CTAs of a tile are in the order of its K, so that the one that ends it has the highest number.
    assert bool((cta[order].diff() >= 0)[tile[order].diff() == 0].all())
    # A CTA hands over the sums of one tile at most, before anything else.
    is_first = cta.diff(prepend=torch.tensor([-1])) != 0
    assert bool(is_first[last < blocks].all())
    # Whole tiles come after shared ones, a stride apart.
    is_whole = tile >= shared
    assert bool(((tile - shared) % grid == cta)[is_whole].all())
    assert bool(((first == 0) & (last == blocks))[is_whole].all())
    assert bool((is_whole.long().diff() >= 0)[cta.diff() == 0].all())
    # Runs are equal except for their rounding, which leaves no crumbs at a tile's ends.
    least = kernels.library.least()
    run = torch.zeros(grid, dtype=torch.long).index_add_(0, cta[~is_whole], (last - first)[~is_whole])
    assert bool(((run - shared * blocks / grid).abs() <= 2 * least + 1).all())
    assert bool((last - first > least)[((first == 0) | (last == blocks)) & (last - first < blocks)].all())


def test_shares_are_all_there(kernels: HostMm, rng: torch.Generator) -> None:
    def below(bound: int) -> int:
        return int(torch.randint(bound, (), generator=rng))

    for tiles, shared, blocks, grid in [(1, 1, 1, 1), (132, 132, 1, 132), (5, 5, 200, 132), (300, 168, 56, 132)]:
        check_share(kernels, tiles, shared, blocks, grid)
    for trial in range(2000):
        grid = 1 + below((8, 132)[trial % 2])
        shared, waves = below((6, 3 * grid)[trial // 2 % 2]), below(4)
        tiles = shared + (waves * grid if trial % 3 else below(3 * grid))
        if tiles:
            check_share(kernels, tiles, shared, 1 + below((12, 150)[trial // 4 % 2]), grid)


def test_shares_of_clusters(kernels: HostMm) -> None:
    for tiles, blocks, splits in [(1, 8, 2), (7, 33, 4), (16, 56, 8), (3, 13, 3), (2, 5, 5)]:
        segments = kernels.segments(tiles, 0, blocks, tiles * splits, splits)
        parts = [
            [cta, cta // splits, blocks * (cta % splits) // splits, blocks * (cta % splits + 1) // splits]
            for cta in range(tiles * splits)
        ]
        assert segments.tolist() == parts
