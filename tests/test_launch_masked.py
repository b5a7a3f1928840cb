"""What rows in expert order ask of the driver: launches and parameters, masked and contiguous (see test_launch.py)."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from fake_cuda.harness import execute, launches, parameters_of

STREAM, MULTIPROCESSORS = 0x1234, 132
LAYERS = [
    {"experts": 32, "hidden": 2048, "intermediate": 768},
    {"experts": 5, "hidden": 384, "intermediate": 640},
]
# (rows there is room for, rows that are expected) of an expert.
ROOMS = [(1, 1), (128, 1), (128, 40), (128, 128), (2048, 16), (2048, 2048)]
FORMATS = ["bf16", "f16", "mxfp4", "fp8_block"]
KERNELS = {
    "bf16": "grouped_gemm_sm90_bf16",
    "f16": "grouped_gemm_sm90_f16",
    "mxfp4": "grouped_gemm_mxfp4_sm90",
    "fp8_block": "grouped_gemm_fp8_",
}


pytestmark = pytest.mark.usefixtures("kernels_for_hopper")


@pytest.mark.parametrize("quantised", [False, True], ids=["numbers", "codes"])
@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: str(layer["hidden"]))
@pytest.mark.parametrize("format", FORMATS)
def test_calls(format: str, layer: dict[str, int], quantised: bool, driver: Path, tmp_path: Path) -> None:
    if quantised and format != "fp8_block":
        pytest.skip("codes come to fp8_block experts")
    arguments = {**layer, "format": format, "rooms": ROOMS, "quantised": quantised}
    result = execute(driver, tmp_path, "expert_order_calls", arguments)
    experts, hidden, intermediate = layer["experts"], layer["hidden"], layer["intermediate"]
    tiles: dict[tuple[bool, int, int], int] = {}
    for call in result["calls"]:
        made, given, m = launches(call["records"]), call["addresses"], call["m"]
        assert call["returned"] and {r["call"] for r in call["records"]} <= {"cuLaunchKernelEx", "cuCtxSetCurrent"}
        assert all(launch["stream"] == STREAM and launch["pdl"] for launch in made)
        base, size = call["workspace"]
        schedule, *between, down = made
        (s,) = parameters_of(schedule)
        assert (schedule["kernel"], schedule["grid"][0], s.row_counts) == ("schedule", 1, given["counts"])
        assert (s.experts, s.rows, s.rows_each) == (experts, experts * m, m if call["masked"] else 0)
        assert s.alignment == (1 if call["masked"] else 128)
        quantisers = [launch for launch in between if launch["kernel"] == "quantize_fp8_tiles"]
        (up,) = [launch for launch in between if launch not in quantisers]
        p, q = parameters_of(up)[-1], parameters_of(down)[-1]
        assert up["kernel"].startswith(KERNELS[format]) and down["kernel"].startswith(KERNELS[format])
        # Places are rows, nothing is gathered, and the schedule's tiles are the kernels'.
        for gemm in (p, q):
            assert (gemm.slot_of_place, gemm.row_divisor, gemm.slot_weights) == (0, 1, 0)
            assert (gemm.tiles, gemm.tile_count) == (s.tiles, s.tile_count)
        tile = s.tile_tokens
        assert all(
            f"t{tile}" in launch["kernel"] or "wide" in launch["kernel"] or "stationary" in launch["kernel"]
            for launch in (up, down)
        ), (tile, up["kernel"], down["kernel"])
        pairs = 2 if format == "fp8_block" else 1  # two e4m3 take the place of a bf16 number
        assert (p.rows, q.rows) == (2 * intermediate, hidden)
        assert (p.k, q.k) == (hidden // pairs, intermediate // pairs)
        assert q.schedule_is_older and q.out == given["out"] and q.out_scales == 0
        if format == "fp8_block":
            check_fp8(call, between, (p, q), quantised, layer, up["kernel"])
        else:
            assert not quantisers and p.x == given["x"] and p.out == q.x and not p.schedule_is_older
        weights = result["packed"] if format == "mxfp4" else [[result["addresses"][name]] for name in ("w13", "w2")]
        assert [p.weights, q.weights] == [codes for codes, *_ in weights]
        # What is written lies in the workspace, apart from one another.
        hidden_bytes = experts * m * intermediate * (1 if p.out_scales else 2)
        ranges = sorted([(s.tiles, 16), (s.tile_count, 4), (s.counters, 4 * s.counter_count), (p.out, hidden_bytes)])
        assert all(base <= start and start + length <= base + size for start, length in ranges)
        assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(ranges))
        tiles[call["masked"], m, call["expected"]] = tile
        assert all(1 <= launch["grid"][0] <= 4 * MULTIPROCESSORS for launch in (up, down))
    # The tile follows what is expected; both layouts have the same one.
    for (m, expected), tile in {key[1:]: tile for key, tile in tiles.items()}.items():
        assert tiles[True, m, expected] == tiles[False, m, expected] == tile
    assert tiles[True, 128, 1] == tiles[True, 1, 1] < tiles[True, 128, 128]
    assert tiles[True, 2048, 16] < tiles[True, 2048, 2048]


def check_fp8(
    call: dict[str, Any], between: list[Any], gemms: tuple[Any, Any], quantised: bool, layer: dict[str, int], up: str
) -> None:
    """Rows of tiles are quantised, x unless it came as codes, GEMM1's output unless GEMM1 does it."""
    (p, q), given = gemms, call["addresses"]
    names = [launch["kernel"] for launch in between]
    inside = "wide" in up
    assert names == ["quantize_fp8_tiles"] * (not quantised) + [up] + ["quantize_fp8_tiles"] * (not inside)
    if quantised:
        assert (p.x, p.x_scales) == (given["x"], given["x_scale"]) and not p.schedule_is_older
    else:
        (of_x,) = parameters_of(between[0])
        assert (of_x.x, of_x.codes, of_x.scales) == (given["x"], p.x, p.x_scales) and p.schedule_is_older
        assert (of_x.tiles, of_x.tile_count, of_x.columns) == (p.tiles, p.tile_count, layer["hidden"])
    if inside:
        assert (p.out, p.out_scales) == (q.x, q.x_scales)
    else:
        (of_hidden,) = parameters_of(between[-1])
        assert p.out_scales == 0 and (of_hidden.x, of_hidden.codes, of_hidden.scales) == (p.out, q.x, q.x_scales)
        assert (of_hidden.tiles, of_hidden.columns) == (p.tiles, layer["intermediate"])


def test_no_rows(driver: Path, tmp_path: Path) -> None:
    """m = 0 asks nothing of the driver."""
    for format in FORMATS:
        result = execute(driver, tmp_path, "expert_order_calls", {**LAYERS[1], "format": format, "rooms": [(0, None)]})
        assert all(call["returned"] and not launches(call["records"]) for call in result["calls"])


def test_what_is_refused(driver: Path, tmp_path: Path) -> None:
    errors = execute(driver, tmp_path, "refused_expert_order", {"formats": ["mxfp8", "mxfp4-a8", "fp8_tensor"]})
    for format in ("mxfp8", "mxfp4-a8", "fp8_tensor"):
        assert errors[format].startswith(f"NotImplementedError: moe_masked of {format} experts on CUDA")
    assert errors["right"] is None
    assert errors["alignment"].startswith("ValueError: x: must start at a multiple of 16 bytes")
    assert errors["device"].startswith("ValueError: masked_m: ")
    assert errors["weights"].startswith("ValueError: out: overlaps w13")
    assert "split the batch" in errors["rows"]
    assert errors["workspace"].startswith("ValueError: workspace: expected at least")
