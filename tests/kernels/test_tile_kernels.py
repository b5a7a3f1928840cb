"""The quantisers of a schedule's rows, run on the host thread by thread: they have the references' bits, and write no
other row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from fake_cuda.harness import STRUCTS
from host_cta import HostCtas
from oxmoe import reference
from oxmoe.testing import same_bits

KERNELS = {
    "rounded": ("RoundTilesMxfp8", "TileRowsParams"),
    "rows": ("QuantizeTilesE4m3", "TileRowsParams"),
    "fp8_rows": ("QuantizeFp8TileRows", "QuantizeFp8Params"),
    "fp8_peak": ("QuantizeFp8TilePeak", "QuantizeFp8Params"),
    "fp8_tiles": ("QuantizeFp8Tiles", "QuantizeFp8Params"),
}
HEADERS = ["round_tiles_mxfp8", "quantize_rows_e4m3", "quantize_fp8_rows", "quantize_fp8"]
BF16 = 2  # Dtype
ROWS, PEAK, GIVEN = 1, 2, 3  # Fp8Scaling
POISON = 0xA5
grids = pytest.mark.parametrize("grid", [1, 3, 40])


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> HostCtas:
    return HostCtas(tmp_path_factory.mktemp("tiles"), [f"quant/{name}.cuh" for name in HEADERS], KERNELS, 800)


@dataclass
class Rows:
    """Rows in tiles of up to `tile`. The rows between the tiles are infinite."""

    x: Tensor
    tiles: Tensor
    count: Tensor
    tile: int
    inside: Tensor

    @property
    def schedule(self) -> dict[str, int]:
        return {"tiles": self.tiles.data_ptr(), "tile_count": self.count.data_ptr()}

    def room(self, columns: int, dtype: torch.dtype) -> Tensor:
        """Returns poisoned memory, with a row behind the rows of x."""
        size = (len(self.x) + 1, columns * dtype.itemsize)
        return torch.full(size, POISON, dtype=torch.uint8).view(dtype)

    def check(self, out: Tensor, expected: Tensor) -> None:
        assert same_bits(out[:-1][self.inside], expected)
        untouched = torch.cat([~self.inside, torch.tensor([True])])
        assert bool((out.view(torch.uint8)[untouched] == POISON).all())


def draw(columns: int, tile: int, rng: torch.Generator, spread: Callable[[Tensor], Tensor] = lambda x: x) -> Rows:
    counts = torch.randint(1, tile + 1, (5,), generator=rng)
    counts[:2] = torch.tensor([tile, 1])
    counts = counts[torch.randperm(5, generator=rng)].tolist()
    tiles, place, inside = [], 0, []
    for expert, count in enumerate(counts):
        gap = int(torch.randint(0, 4, (), generator=rng))
        tiles.append((expert, place + gap, count, 0))
        inside += [False] * gap + [True] * count
        place += gap + count
    inside = torch.tensor([*inside, False])
    x = spread(torch.randn((len(inside), columns), generator=rng))
    x[tiles[0][1]] = 0
    x[~inside] = torch.inf
    return Rows(
        x.bfloat16(), torch.tensor(tiles, dtype=torch.int32), torch.tensor([5], dtype=torch.int32), tile, inside
    )


def seed_of(rng: torch.Generator) -> int:
    return int(torch.randint(1 << 62, (), generator=rng))


def tile_rows(rows: Rows, out: Tensor, scales: Tensor | None, out_columns: int) -> dict[str, Any]:
    inner = STRUCTS["QuantizeRowsParams"](
        x=rows.x.data_ptr(),
        out=out.data_ptr(),
        scales=0 if scales is None else scales.data_ptr(),
        rows=len(rows.x),
        columns=rows.x.shape[1],
        out_columns=out_columns,
        **rows.schedule,
    )
    return {"rows": inner, "tile_rows": rows.tile}


def wide(x: Tensor) -> Tensor:
    """Returns rows of all sizes, also those at which MXFP8's scales end."""
    exponents = torch.linspace(-130, 120, len(x))[:, None]
    return (x * torch.exp2(exponents)).clamp(-3e38, 3e38)


@grids
@pytest.mark.parametrize(("columns", "tile"), [(32, 16), (96, 64), (352, 16), (2080, 32)])
@pytest.mark.parametrize("in_place", [False, True])
def test_round(kernels: HostCtas, grid: int, columns: int, tile: int, in_place: bool, rng: torch.Generator) -> None:
    rows = draw(columns, tile, rng, wide)
    # Zeros of GPUs have no sign, so the expected ones lose theirs.
    expected, before = reference.mxfp8_rows(rows.x[rows.inside]) + 0.0, rows.x.clone()
    out = rows.x if in_place else rows.room(columns, torch.bfloat16)
    kernels.run("rounded", grid, seed_of(rng), **tile_rows(rows, out, None, columns))
    if in_place:
        assert same_bits(rows.x[rows.inside], expected) and same_bits(rows.x[~rows.inside], before[~rows.inside])
    else:
        rows.check(out, expected)
        assert same_bits(rows.x, before)


@grids
@pytest.mark.parametrize(("columns", "tile"), [(8, 16), (72, 64), (352, 16), (4104, 16)])
def test_rows_with_a_scale(kernels: HostCtas, grid: int, columns: int, tile: int, rng: torch.Generator) -> None:
    """A thread holds the columns, or there are more; padding becomes zeros."""
    rows = draw(columns, tile, rng, lambda x: x * torch.exp2(torch.linspace(-20, 20, len(x)))[:, None])
    padded = -(-columns // 64) * 64
    out, scales = rows.room(padded, torch.uint8), rows.room(1, torch.float32)
    kernels.run("rows", grid, seed_of(rng), **tile_rows(rows, out, scales, padded))
    codes, expected = reference.rows_e4m3(rows.x[rows.inside])
    rows.check(out, torch.nn.functional.pad(codes.view(torch.uint8), (0, padded - columns)))
    rows.check(scales, expected[:, None])


def fp8(rows: Rows, codes: Tensor, scales: Tensor, given: Tensor, scaling: int) -> dict[str, Any]:
    columns = rows.x.shape[1]
    return {
        "x": rows.x.data_ptr(),
        "dtype": BF16,
        "codes": codes.data_ptr(),
        "scales": scales.data_ptr(),
        "rows": len(rows.x),
        "columns": columns,
        "group": 128,
        "row_stride": columns // 128,
        "group_stride": 1,
        "eps": 1e-10,
        "tile_rows": rows.tile,
        "scaling": scaling,
        "given": given.data_ptr(),
        "row_threads": min(1 << (max(1, columns // 32) - 1).bit_length(), 256),
        **rows.schedule,
    }


@grids
@pytest.mark.parametrize(("columns", "tile"), [(128, 16), (384, 64), (1152, 16), (8320, 16)])
@pytest.mark.parametrize("scaling", [ROWS, PEAK, GIVEN])
def test_fp8(kernels: HostCtas, grid: int, columns: int, tile: int, scaling: int, rng: torch.Generator) -> None:
    """A scale is that of a row, of all rows that tiles name, or a given one."""
    rows = draw(columns, tile, rng)
    codes, scales = rows.room(columns, torch.uint8), rows.room(columns // 128, torch.float32)
    given = torch.zeros(1) if scaling == PEAK else torch.tensor([0.0078125 * 1.25])
    parameters, before = fp8(rows, codes, scales, given, scaling), given.clone()
    x = rows.x[rows.inside]
    if scaling == PEAK:
        kernels.run("fp8_peak", grid, seed_of(rng), **parameters)
        before = x.float().abs().amax()[None]
    kernels.run("fp8_rows" if scaling == ROWS else "fp8_tiles", grid, seed_of(rng), **parameters)
    assert same_bits(given, before)
    mode = {ROWS: "token", PEAK: "tensor", GIVEN: None}[scaling]
    wanted, of_groups = reference.fp8_rows(x, given if scaling == GIVEN else None, mode)
    rows.check(codes, wanted.view(torch.uint8))
    rows.check(scales, of_groups.expand(len(x), columns // 128).contiguous())


def test_no_tiles(kernels: HostCtas, rng: torch.Generator) -> None:
    rows = draw(128, 16, rng)
    rows.count.zero_()
    rows.inside[:] = False
    nothing = rows.x[:0]
    out, scales, given = rows.room(128, torch.bfloat16), rows.room(1, torch.float32), torch.zeros(1)
    for name in ("rounded", "rows"):
        kernels.run(name, 2, seed_of(rng), **tile_rows(rows, out, scales, 128))
    for name, scaling in (("fp8_peak", PEAK), ("fp8_tiles", PEAK), ("fp8_rows", ROWS)):
        kernels.run(name, 2, seed_of(rng), **fp8(rows, out, scales, given, scaling))
    rows.check(out, nothing)
    rows.check(scales, scales[:0])
    assert float(given) == 0
