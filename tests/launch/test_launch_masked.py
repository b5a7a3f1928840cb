"""The driver calls of rows in expert order: launches and parameters, masked and contiguous (see test_launch.py)."""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path
from typing import Any

import pytest

from fake_cuda.harness import execute, launches, named, parameters_of

STREAM, MULTIPROCESSORS = 0x1234, 132
LAYERS = [
    {"experts": 32, "hidden": 2048, "intermediate": 768},
    {"experts": 5, "hidden": 384, "intermediate": 640},
]
# (rows that an expert has room for, rows that it is expected to have).
ROOMS = [(1, 1), (128, 1), (128, 40), (128, 128), (2048, 16), (2048, 2048)]
FP8_TENSOR = ["fp8_tensor", "fp8_tensor-token", "fp8_tensor-static"]
FORMATS = ["bf16", "f16", "mxfp4", "mxfp4-a8", "mxfp8", "fp8_block", *FP8_TENSOR]
KERNELS = {
    "bf16": "grouped_gemm_sm90_bf16",
    "f16": "grouped_gemm_sm90_f16",
    "mxfp4": "grouped_gemm_mxfp4_sm90",
    "mxfp4-a8": "grouped_gemm_mxfp4_e4m3_sm90",
    "mxfp8": "grouped_gemm_mxfp8_sm90",
    **dict.fromkeys(["fp8_block", *FP8_TENSOR], "grouped_gemm_fp8_"),
}
# Format -> (launches that make e4m3 rows, Fp8Scaling).
FP8_QUANTISERS: dict[str, tuple[list[str], int]] = {
    "fp8_block": (["quantize_fp8_tiles"], 0),
    "fp8_tensor": (["quantize_fp8_tile_peak", "quantize_fp8_tiles"], 2),
    "fp8_tensor-token": (["quantize_fp8_tile_rows"], 1),
    "fp8_tensor-static": (["quantize_fp8_tiles"], 3),
}


pytestmark = pytest.mark.usefixtures("kernels_for_hopper")


@pytest.mark.parametrize("quantised", [False, True], ids=["numbers", "codes"])
@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: str(layer["hidden"]))
@pytest.mark.parametrize("format", FORMATS)
def test_calls(format: str, layer: dict[str, int], quantised: bool, driver: Path, tmp_path: Path) -> None:
    if quantised and format not in FP8_QUANTISERS:
        pytest.skip("codes come to fp8 experts")
    arguments = {**layer, "format": format, "rooms": ROOMS, "quantised": quantised}
    result = execute(driver, tmp_path, "expert_order_calls", arguments)
    experts, hidden, intermediate = layer["experts"], layer["hidden"], layer["intermediate"]
    tiles: dict[tuple[bool, int, int], int] = {}
    for call in result["calls"]:
        made, given, m = launches(call["records"]), call["addresses"], call["m"]
        maps = named(call["records"], "cuTensorMapEncodeTiled")
        others = {"cuLaunchKernelEx", "cuCtxSetCurrent"}
        assert call["returned"] and {r["call"] for r in call["records"] if r not in maps} <= others
        assert all(launch["stream"] == STREAM and launch["pdl"] for launch in made)
        base, size = call["workspace"]
        if format == "mxfp4" and call["masked"]:
            check_one_launch(call, made, layer, result["packed"])
            tiles[True, m, call["expected"]] = parameters_of(made[0])[0].tile_tokens
            continue
        schedule, *between, down = made
        (s,) = parameters_of(schedule)
        assert (schedule["kernel"], schedule["grid"][0], s.row_counts) == ("schedule", 1, given["counts"])
        assert (s.experts, s.rows, s.rows_each) == (experts, experts * m, m if call["masked"] else 0)
        assert s.alignment == (1 if call["masked"] else 128)
        if format in ("mxfp4", "mxfp8"):
            between.append(down)
        (up,) = [launch for launch in between if launch["kernel"].startswith("grouped_gemm")]
        last = parameters_of(up)[-1], parameters_of(down)[-1]
        ordered = "ordered" in up["kernel"]
        p, q = (params.gemm for params in last) if ordered else last
        if up is down:
            (pair, _), p, q = last, last[0].up, last[0].down
            assert (pair.tiles, pair.row_counts) == (s.tiles, 0)
        assert ordered == ("ordered" in down["kernel"]) == bool(maps) and (s.tile_tokens == 192 or not ordered)
        assert s.tile_step == (64 if ordered else 16)
        assert up["kernel"].startswith(KERNELS[format]) and down["kernel"].startswith(KERNELS[format])
        # Places are rows, nothing is gathered, and the schedule's tiles are the kernels'.
        for gemm in (p, q):
            assert (gemm.slot_of_place, gemm.row_divisor, gemm.slot_weights) == (0, 1, 0)
            assert (gemm.tiles, gemm.tile_count) == (s.tiles, s.tile_count)
        tile = s.tile_tokens
        assert all(
            any(name in launch["kernel"] for name in (f"t{tile}", "wide", "stationary", "ordered"))
            for launch in (up, down)
        ), (tile, up["kernel"], down["kernel"])
        # Two e4m3 numbers take the place of a bf16 number.
        pairs = 2 if format in FP8_QUANTISERS or format == "mxfp4-a8" else 1
        assert (p.rows, q.rows) == (2 * intermediate, hidden)
        assert (p.k, q.k) == (hidden // pairs, intermediate // pairs)
        assert q.schedule_is_older and q.out == given["out"] and q.out_scales == 0
        more: list[tuple[int, int]] = []
        if format in FP8_QUANTISERS:
            check_fp8(call, between, (p, q), format, quantised, (s, layer, result["addresses"]))
            if ordered:
                check_order(call, maps, (up, down), quantised, (layer, experts * m))
        elif format == "mxfp8":
            check_rounded(call, between, (p, q), (s, layer))
        elif format == "mxfp4-a8":
            more = check_rows(call, between, (p, q), (s, layer), experts * m)
        else:
            assert between == [up] and p.x == given["x"] and p.out == q.x and not p.schedule_is_older
            done = s.counters + 8 if format in ("bf16", "f16") else 0
            assert (p.done, p.awaited, q.done, q.awaited) == (done, 0, 0, done)
            if done:
                unit_rows = 64 * math.prod(map(int, re.findall(r"_[rc](\d+)", up["kernel"])))
                assert (q.awaited_ctas, q.awaited_units) == (up["grid"][0], -(-p.rows // unit_rows))
                assert s.counter_count == 3 + experts
        packed = format.startswith("mxfp")
        weights = result["packed"] if packed else [[result["addresses"][name]] for name in ("w13", "w2")]
        assert [p.weights, q.weights] == [codes for codes, *_ in weights]
        # Ranges that are written lie in the workspace, apart from one another.
        hidden_bytes = experts * m * intermediate * (1 if p.out_scales else 2)
        counters = (s.counters, 4 * s.counter_count)
        ranges = sorted([(s.tiles, 16), (s.tile_count, 4), counters, (p.out, hidden_bytes), *more])
        assert all(base <= start and start + length <= base + size for start, length in ranges)
        assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(ranges))
        tiles[call["masked"], m, call["expected"]] = tile
        assert all(1 <= launch["grid"][0] <= 4 * MULTIPROCESSORS for launch in (up, down))
    # The tile follows the expected number of rows; both layouts have the same one.
    for (m, expected), tile in {key[1:]: tile for key, tile in tiles.items()}.items():
        assert tiles[True, m, expected] == tiles[False, m, expected] == tile
    assert tiles[True, 128, 1] == tiles[True, 1, 1] < tiles[True, 128, 128]
    assert tiles[True, 2048, 16] < tiles[True, 2048, 2048]


@pytest.mark.parametrize("format", FP8_TENSOR)
def test_rows_that_end_inside_a_block(format: str, driver: Path, tmp_path: Path) -> None:
    """GEMM1 has no kernel for rows in order there; rows between the GEMMs are whole blocks."""
    experts, hidden, own, whole = 32, 2048, 704, 768
    arguments = {"format": format, "experts": experts, "hidden": hidden, "intermediate": own, "rooms": ROOMS}
    kernels = set()
    for call in execute(driver, tmp_path, "expert_order_calls", arguments)["calls"]:
        made, rows = launches(call["records"]), experts * call["m"]
        assert not named(call["records"], "cuTensorMapEncodeTiled")
        up, down = (launch for launch in made if launch["kernel"].startswith("grouped_gemm"))
        kernels |= {up["kernel"], down["kernel"]}
        p, q = parameters_of(up)[-1], parameters_of(down)[-1]
        assert (p.rows, p.out_columns, q.rows, 2 * q.k) == (2 * whole, whole, hidden, whole)
        of_hidden = [of for launch in made for of in parameters_of(launch) if getattr(of, "codes", 0) == q.x]
        assert of_hidden and all((of.x, of.columns, of.row_stride) == (p.out, whole, 6) for of in of_hidden)
        base, size = call["workspace"]
        ends = (p.out + 2 * rows * whole, q.x + rows * whole, q.x_scales + 4 * rows * 6)
        assert base <= p.out and ends[0] <= q.x and ends[1] <= q.x_scales and ends[2] <= base + size
    assert any("wide_cut" in name for name in kernels) and not any("ordered" in name for name in kernels)


def check_one_launch(
    call: dict[str, Any], made: list[dict[str, Any]], layer: dict[str, int], packed: list[list[int]]
) -> None:
    """Checks that both GEMMs find the tiles of masked rows themselves, and count in the workspace's counters."""
    (both,) = made
    (pair,), (base, size), m = parameters_of(both), call["workspace"], call["m"]
    assert f"_t{pair.tile_tokens}_" in both["kernel"] and both["kernel"].startswith("grouped_gemm_mxfp4_sm90_gated")
    assert (pair.row_counts, pair.experts, pair.rows_each) == (call["addresses"]["counts"], layer["experts"], m)
    assert (pair.tiles, pair.tile_step) == (0, 16) and pair.up.next_unit == pair.counters != 0
    assert pair.wave == 132
    up, down = pair.up, pair.down
    assert (up.x, up.out, down.out) == (call["addresses"]["x"], down.x, call["addresses"]["out"])
    assert (up.rows, down.rows) == (2 * layer["intermediate"], layer["hidden"]) == (2 * down.k, up.k)
    assert [up.weights, down.weights] == [codes for codes, *_ in packed] and not up.schedule_is_older
    assert base <= up.out and up.out + 2 * layer["experts"] * m * layer["intermediate"] <= base + size
    for gemm in (up, down):
        assert (gemm.slot_of_place, gemm.row_divisor, gemm.slot_weights) == (0, 1, 0)
    assert 1 <= both["grid"][0] <= 4 * MULTIPROCESSORS


def check_fp8(
    call: dict[str, Any],
    between: list[Any],
    gemms: tuple[Any, Any],
    format: str,
    quantised: bool,
    given: tuple[Any, dict[str, int], dict[str, int]],
) -> None:
    """Checks that rows of tiles are quantised: x unless it came as codes, GEMM1's output unless GEMM1 does it."""
    (p, q), (schedule, layer, weights) = gemms, given
    names, addresses = [launch["kernel"] for launch in between], call["addresses"]
    (up,) = [name for name in names if name.startswith("grouped_gemm")]
    (quantisers, scaling), wide = FP8_QUANTISERS[format], "wide" in up or "ordered" in up
    groups = layer["experts"] * layer["intermediate"] // 128
    inside = format == "fp8_block" and (wide or ("_c2_" in up and groups >= MULTIPROCESSORS))
    counters = 3 + layer["experts"] if format == "fp8_block" else 4
    assert names == quantisers * (not quantised) + [up] + quantisers * (not inside)
    place = names.index(up)

    def check(launches: list[Any], sides: tuple[int, int, int], columns: int, number: int) -> None:
        for launch in launches:
            (rows,) = parameters_of(launch)
            assert (rows.x, rows.codes, rows.scales) == sides and not rows.x_is_older
            assert (rows.tiles, rows.tile_count, rows.tile_rows) == (
                schedule.tiles,
                schedule.tile_count,
                schedule.tile_tokens,
            )
            assert (rows.columns, rows.group, rows.scaling) == (columns, 128, scaling)
            strides = (1, rows.rows) if "ordered" in up else (columns // 128, 1)
            assert (rows.row_stride, rows.group_stride) == strides
            if format == "fp8_tensor-static":
                assert rows.given == weights[("a13_scale", "a2_scale")[number]]
            else:
                # The schedule zeroes a word for each.
                assert rows.given == schedule.counters + 4 * (2 + number) and schedule.counter_count == max(4, counters)

    if quantised:
        assert (p.x, p.x_scales) == (addresses["x"], addresses["x_scale"]) and not p.schedule_is_older
    else:
        check(between[:place], (addresses["x"], p.x, p.x_scales), layer["hidden"], 0)
        assert p.schedule_is_older
    # GEMM2 begins as GEMM1's CTAs end, if no launch is between them.
    done, ctas = (schedule.counters + 8, between[place]["grid"][0]) if inside else (0, 0)
    assert (p.done, p.awaited, q.done, q.awaited, q.awaited_ctas) == (done, 0, 0, done, ctas)
    assert q.awaited_units == (layer["intermediate"] // 128 if inside else 0)
    if inside:
        assert (p.out, p.out_scales) == (q.x, q.x_scales)
    else:
        assert p.out_scales == 0
        check(between[place + 1 :], (p.out, q.x, q.x_scales), layer["intermediate"], 1)


def check_order(
    call: dict[str, Any],
    maps: list[dict[str, Any]],
    gemms: tuple[Any, Any],
    quantised: bool,
    given: tuple[dict[str, int], int],
) -> None:
    """Checks that rows come through tensor maps of the whole room, and scales in the order that their makers use."""
    (layer, rows), by_map = given, {record["map"]: record for record in maps}
    table = (layer["hidden"] // 128, 1)
    for gemm, columns, scales in zip(gemms, ("hidden", "intermediate"), (quantised and table, None), strict=True):
        _, (number, address), p = parameters_of(gemm)
        assert address == p.gemm.x
        tokens = by_map[number]
        assert (tokens["sizes"], tokens["strides"]) == ([layer[columns], rows], [layer[columns]])
        assert tokens["box"] == [128, 64]
        assert (p.x_scale_row, p.x_scale_group) == (scales or (1, rows))
    up, down = (parameters_of(gemm)[-1] for gemm in gemms)
    assert (up.out_scale_row, up.out_scale_group) == (down.x_scale_row, down.x_scale_group)


def check_tiles(rows: Any, schedule: Any, columns: int) -> Any:
    """Checks a launch's rows, which are those of the schedule's tiles, and returns them."""
    assert (rows.rows.tiles, rows.rows.tile_count) == (schedule.tiles, schedule.tile_count)
    assert (rows.rows.columns, rows.tile_rows) == (columns, schedule.tile_tokens)
    return rows.rows


def check_rounded(
    call: dict[str, Any], between: list[Any], gemms: tuple[Any, Any], given: tuple[Any, dict[str, int]]
) -> None:
    """Checks that rounded rows of x lie where GEMM2 writes, and that GEMM1 rounds its output itself."""
    (p, q), (schedule, layer) = gemms, given
    of_x, _ = between
    assert of_x["kernel"] == "round_tiles_mxfp8"
    rows = check_tiles(*parameters_of(of_x), schedule, layer["hidden"])
    assert (rows.x, rows.out) == (call["addresses"]["x"], p.x) and p.x == call["addresses"]["out"]
    assert p.schedule_is_older and p.out == q.x


def check_rows(
    call: dict[str, Any], between: list[Any], gemms: tuple[Any, Any], given: tuple[Any, dict[str, int]], room: int
) -> list[tuple[int, int]]:
    """Checks that codes of x, then of GEMM1's output, lie in one range, with a scale a row. Returns their ranges."""
    (p, q), (schedule, layer) = gemms, given
    of_x, _, of_hidden = between
    assert of_x["kernel"] == of_hidden["kernel"] == "quantize_tiles_e4m3"
    x = check_tiles(*parameters_of(of_x), schedule, layer["hidden"])
    hidden = check_tiles(*parameters_of(of_hidden), schedule, layer["intermediate"])
    assert (x.x, x.out, x.scales, x.out_columns) == (call["addresses"]["x"], p.x, p.row_scales, 2 * p.k)
    assert (hidden.x, hidden.out, hidden.scales, hidden.out_columns) == (p.out, q.x, q.row_scales, 2 * q.k)
    assert p.schedule_is_older and p.x == q.x and p.row_scales == q.row_scales
    return [(p.x, room * max(x.out_columns, hidden.out_columns)), (p.row_scales, 4 * room)]


def test_no_rows(driver: Path, tmp_path: Path) -> None:
    """With m = 0 the call asks nothing of the driver."""
    for format in FORMATS:
        arguments = {**LAYERS[1], "format": format, "rooms": [(0, None)]}
        result = execute(driver, tmp_path, "expert_order_calls", arguments)
        assert all(call["returned"] and not launches(call["records"]) for call in result["calls"])


def test_what_is_refused(driver: Path, tmp_path: Path) -> None:
    errors = execute(driver, tmp_path, "refused_expert_order", {"formats": FORMATS})
    assert {name: errors[name] for name in ("right", *FORMATS)} == dict.fromkeys(("right", *FORMATS))
    assert errors["alignment"].startswith("ValueError: x: must start at a multiple of 16 bytes")
    assert errors["device"].startswith("ValueError: masked_m: ")
    assert errors["weights"].startswith("ValueError: out: overlaps w13")
    assert "split the batch" in errors["rows"]
    assert errors["workspace"].startswith("ValueError: workspace: expected at least")
