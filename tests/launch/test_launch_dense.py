"""The driver calls of dense MXFP8: quantisation, and the GEMM's launches and parameters (see test_launch.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fake_cuda.harness import execute, launches, parameters_of
from mxfp8_cases import SHARED_TILES

DTYPES = {"float32": 0, "float16": 1, "bfloat16": 2}
TILE_ROWS = {"128x4": 128, "8x4": 8, "linear": 0}


pytestmark = pytest.mark.usefixtures("kernels_for_hopper")


def up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


@pytest.mark.parametrize("layout", TILE_ROWS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_quantisation(layout: str, dtype: str, driver: Path, tmp_path: Path) -> None:
    """A thread has eight numbers, also if they are only padding."""
    arguments = {"shape": [3, 43, 160], "dtype": dtype, "layout": layout, "alignment": 64}
    result = execute(driver, tmp_path, "dense_quantize", arguments)
    there, back = launches(result["records"])
    assert (there["kernel"], back["kernel"]) == ("quantize_mxfp8", "dequantize_mxfp8")
    (p,), (q,) = parameters_of(there), parameters_of(back)
    tile = TILE_ROWS[layout]
    rows, groups = (up(129, tile), 8) if tile else (129, 6)
    assert result["shapes"] == [[3, 43, 192], [rows * groups]]
    assert [p.numbers, p.codes, p.scales, q.numbers] == result["addresses"]
    assert (p.rows, p.columns, p.padded_columns, p.tile_rows, p.dtype) == (129, 160, 192, tile, DTYPES[dtype])
    assert (q.rows, q.columns, q.padded_columns, q.tile_rows, q.dtype) == (129, 192, 192, tile, DTYPES[dtype])
    assert (q.codes, q.scales) == (p.codes, p.scales)
    for launch in (there, back):
        assert launch["block"][0] == 256 and launch["grid"][0] == -(-rows * groups * 4 // 256) and launch["pdl"]
    nothing = {"shape": [0, 64], "dtype": dtype, "layout": layout, "alignment": 32}
    assert not launches(execute(driver, tmp_path, "dense_quantize", nothing)["records"])


@pytest.mark.parametrize("block", [16, 32])
@pytest.mark.parametrize("layout", TILE_ROWS)
def test_nvfp4(block: int, layout: str, driver: Path, tmp_path: Path) -> None:
    """A thread has a block, also if it is only padding."""
    arguments = {"shape": [2, 43, 160], "dtype": "bfloat16", "block": block, "layout": layout}
    tile = TILE_ROWS[layout]
    rows, blocks = (up(43, tile), up(160 // block, 4)) if tile else (43, 160 // block)
    result = execute(driver, tmp_path, "nvfp4_quantized", arguments)
    (launch,) = launches(result["records"])
    assert launch["kernel"] == f"nvfp4_quantize_b{block}" and launch["pdl"]
    threads = 2 * rows * blocks
    assert (launch["grid"][0], launch["block"][0], launch["shared"]) == (-(-threads // 256), 256, 0)
    (p,) = parameters_of(launch)
    assert [p.x, p.codes, p.scales] == result["addresses"] and result["shapes"] == [[2, 43, 80], [2, rows, blocks]]
    assert (p.batches, p.rows, p.columns, p.block, p.powers) == (2, 43, 160, block, block == 32)
    assert (p.tile_rows, p.dtype, p.global_scale, p.row_counts) == (tile, 2, 0, 0)


def few(m: int, n: int, k: int) -> dict[str, Any]:
    return {"m": m, "n": n, "k": k, "a_scales": [m, k // 32], "b_scales": [k // 32, n]}


# Rows of a pass, its stages, passes, and a pass's share of a CTA's rows, for 132 multiprocessors.
PASSES = {
    (7168, 16384): {8: (32, 4, 1, 28), 16: (64, 3, 1, 56), 32: (64, 2, 1, 56)},
    (18432, 7168): {8: (32, 4, 3, 24), 16: (32, 3, 3, 24), 32: (64, 3, 3, 48)},
    (4096, 7168): {8: (32, 8, 1, 32), 16: (32, 5, 1, 32), 32: (32, 4, 1, 32)},
    (2112, 7168): {8: (16, 8, 1, 16), 16: (16, 5, 1, 16), 32: (16, 3, 1, 16)},
    (101, 64): {8: (16, 8, 1, 4), 16: (16, 5, 1, 4), 32: (16, 3, 1, 4)},
}


@pytest.mark.parametrize("m", [1, 8, 9, 17, 32])
def test_few_tokens(m: int, driver: Path, tmp_path: Path) -> None:
    """A call is one launch. Every row of b is in one pass of one CTA, whose warps share K. There is room for rings,
    sums and K's scales."""
    tokens = 8 if m <= 8 else 16 if m <= 16 else 32
    for (n, k), by_tokens in PASSES.items():
        rows, stages, passes, pass_rows = by_tokens[tokens]
        result = execute(driver, tmp_path, "dense_mm", few(m, n, k))
        (launch,) = launches(result["records"])
        assert launch["kernel"] == f"mm_mxfp8_few_sm90_t{tokens}_r{rows // 16}_s{stages}" and launch["pdl"]
        grid = -(-n // (passes * pass_rows))
        assert (launch["grid"][0], launch["block"][0], launch["cluster"]) == (grid, 256, [1, 1, 1])
        scales, sums = 2 * 8 * -(-k // 512) * (rows + tokens), 8 * tokens * (min(rows, 32) + 4) * 4
        assert launch["shared"] == 8 * stages * 64 * (rows + tokens) + sums + scales
        (few_params,) = parameters_of(launch)
        assert (few_params.passes, few_params.pass_rows) == (passes, pass_rows)
        p = few_params.product
        assert [p.a, p.b, p.a_scales.data, p.b_scales.data, p.out] == result["addresses"]
        assert (p.m, p.n, p.k, p.out_dtype, p.tokens) == (m, n, k, 2, 0) and result["shape"] == [m, n]
        assert (p.a_scales.tile_rows, p.a_scales.row_stride, p.a_scales.block_stride) == (0, k // 32, 1)
        assert (p.b_scales.tile_rows, p.b_scales.row_stride, p.b_scales.block_stride) == (0, 1, n)


@pytest.mark.parametrize("m", [1, 9, 32])
def test_scales_that_have_no_room(m: int, driver: Path, tmp_path: Path) -> None:
    """From this K on, few tokens take the kernels for many tokens, whatever their number is."""
    (last,) = launches(execute(driver, tmp_path, "dense_mm", few(m, 4096, 83968))["records"])
    assert last["kernel"].startswith("mm_mxfp8_few_sm90_t")
    _, launch = launches(execute(driver, tmp_path, "dense_mm", few(m, 4096, 84000))["records"])
    _, one = launches(execute(driver, tmp_path, "dense_mm", few(1, 4096, 84000))["records"])
    assert launch["kernel"].startswith("mm_mxfp8_wide_sm90_t64")
    assert all(launch[what] == one[what] for what in ("kernel", "grid", "cluster"))


@pytest.mark.parametrize("m", [33, 65, 256, 4096])
def test_many_tokens(m: int, driver: Path, tmp_path: Path) -> None:
    """Rows of a become bf16 in memory of their own, then the GEMM runs; scales lie in tiles."""
    for n, k in ((7168, 16384), (2112, 7200)):
        blocks = up(k // 32, 4)
        arguments = {"m": m, "n": n, "k": k, "a_scales": [up(m, 8) * blocks], "b_scales": [up(n, 128) * blocks]}
        result = execute(driver, tmp_path, "dense_mm", arguments | {"use_8x4": True, "out_dtype": "float16"})
        tokens, launch = launches(result["records"])
        assert tokens["kernel"] == "mm_mxfp8_tokens" and launch["kernel"].startswith("mm_mxfp8_wide_sm90_t")
        (q,), (p,) = parameters_of(tokens), parameters_of(launch)
        assert bytes(p) == bytes(q) and p.tokens not in [0, *result["addresses"]] and p.tokens % 256 == 0
        assert (p.a_scales.tile_rows, p.b_scales.tile_rows, p.out_dtype) == (8, 128, 1)
        consumers, grid = launch["block"][0] // 128 - 1, launch["grid"][0]
        tiles = -(-n // (64 * consumers)) * -(-m // p.tile_tokens)
        assert launch["cluster"] == [p.splits, 1, 1]
        if p.splits > 1:
            assert (grid, p.shared_tiles, p.arrivals) == (tiles * p.splits, 0, 0)
        else:
            # Tiles that are not shared are whole waves.
            assert grid <= 132 and (tiles - p.shared_tiles) % grid == 0 if p.shared_tiles else grid == min(tiles, 132)
            assert p.arrivals == (grid * consumers if p.shared_tiles else 0)
        token_bytes = up(m, p.tile_tokens) * up(k, 128) * 2
        partial_bytes = p.arrivals * 64 * p.tile_tokens * 4
        assert (p.partial_sums - p.tokens, p.arrived - p.partial_sums) == (token_bytes, partial_bytes)


@pytest.mark.parametrize("size", SHARED_TILES, ids=str)
def test_tiles_that_do_not_fill_the_gpu(size: tuple[int, int, int], driver: Path, tmp_path: Path) -> None:
    m, n, k = size
    _, launch = launches(execute(driver, tmp_path, "dense_mm", few(m, n, k))["records"])
    (p,) = parameters_of(launch)
    assert (p.splits, launch["grid"][0]) == (1, 132) and 0 < p.shared_tiles < 2 * 132


def test_nothing_and_refusals(driver: Path, tmp_path: Path) -> None:
    assert not launches(execute(driver, tmp_path, "dense_mm", few(0, 128, 128))["records"])
    assert not launches(execute(driver, tmp_path, "dense_mm", few(5, 0, 128))["records"])
    said = execute(driver, tmp_path, "refused_dense", {})
    assert said["right"] is None
    assert said["address"].startswith("ValueError: a: must start at a multiple of 16 bytes")
    assert said["device"] == "ValueError: b_descale: is on cuda:1, but a is on cuda:0"
    other = execute(driver, tmp_path, "refused_dense", {}, cc=100, sms=148, shared=227 * 1024)
    assert other["right"] == "NotImplementedError: mm_mxfp8 on sm_100; supported: sm_90 and CPU tensors"
