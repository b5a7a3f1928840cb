"""The driver calls of fp8 experts: launches, parameters and tensor maps (see test_launch.py)."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

from fake_cuda.harness import asked, execute, launches, named, parameters_of, planned

STREAM, MULTIPROCESSORS = 0x1234, 132
# Rows that lie in order have a tensor map of their own in each call.
CALLS = {"cuLaunchKernelEx", "cuCtxSetCurrent", "cuTensorMapEncodeTiled"}
LAYERS = [
    {"experts": 128, "hidden": 2048, "intermediate": 768},
    {"experts": 256, "hidden": 7168, "intermediate": 256},
    {"experts": 5, "hidden": 384, "intermediate": 640},
]


pytestmark = pytest.mark.usefixtures("kernels_for_hopper")


def ranges_of(call: dict[str, Any]) -> dict[str, int]:
    found = re.findall(r"^ +(\d+) \+ \d+ +(\w+)$", call["explain"], re.MULTILINE)
    return {name: call["workspace"] + int(offset) for offset, name in found}


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: str(layer["hidden"]))
def test_calls(layer: dict[str, Any], driver: Path, tmp_path: Path) -> None:
    result = execute(driver, tmp_path, "fp8_calls", {**layer, "top_k": 4, "tokens": [1, 7, 64, 300, 2000, 20000]})
    experts, hidden, intermediate = layer["experts"], layer["hidden"], layer["intermediate"]
    maps = {record["map"]: record for record in named(result["load"], "cuTensorMapEncodeTiled")}
    kernels, quantising, together = set(), set(), []
    for call in result["calls"]:
        made, ranges, tokens = launches(call["records"]), ranges_of(call), call["tokens"]
        assert {record["call"] for record in call["records"]} <= CALLS
        assert [asked(launch) for launch in made] == planned(call["explain"])
        assert all(launch["stream"] == STREAM and launch["pdl"] for launch in made)
        if made[0]["kernel"].startswith("routed_layer_fp8_sm90"):
            (one,) = made
            assert one["cooperative"]
            up_map, down_map, p = parameters_of(one)
            up, down = p.layer.up, p.layer.down
            # Both rows are bf16: the launch quantises what it reads, and counts pairs of e4m3.
            assert (up.x, up.out, down.x, down.out) == (call["x"], ranges["hidden"], ranges["hidden"], ranges["rows"])
            assert (up.k, down.k) == (hidden // 2, intermediate // 2)
            for gemm, tensor_map, name in ((up, up_map, "w13"), (down, down_map, "w2")):
                assert gemm.weights == tensor_map[1] == result["addresses"][name]
                assert gemm.block_scales == result["addresses"][f"{name}_scale"]
                assert math.prod(maps[tensor_map[0]]["box"][1:]) == 64
            together.append(tokens)
            continue
        first = next(i for i, launch in enumerate(made) if launch["kernel"] == "quantize_fp8")
        *stages, combine = made[first:]
        own = made[first - 1]["kernel"] == "schedule"
        assert first - own in (1, 2) and combine["kernel"] == "combine_bf16"
        # GEMM2 has tiles of its own if its columns and an expert's slots are many.
        assert own == (intermediate >= 640 and 4 * tokens > 96 * experts)
        inside = len(stages) == 3
        quantize, up, *between, down = stages
        kernels |= {up["kernel"], down["kernel"]}
        # If tiles are wide and experts have several, they have full tiles and a rest.
        routes = [p for launch in made for p in parameters_of(launch) if hasattr(p, "block_histogram")]
        wide = "wide" in up["kernel"]
        assert {p.tile_step for p in routes} == {64 if wide and 4 * tokens > 192 * experts else 16}
        # In tiles of few tokens GEMM1 quantises if it has as many groups of columns as the GPU has multiprocessors.
        groups = min(4 * tokens, experts) * intermediate // 128
        assert inside == (wide or ("_c2_" in up["kernel"] and groups >= MULTIPROCESSORS))
        quantising.add((wide, inside))
        kinds = ("ordered",) if own else ("stationary", "wide" if wide else "plain_t")
        assert any(name in down["kernel"] for name in kinds)
        (of_x,), (up_map, p), (down_map, *order, q) = (parameters_of(launch) for launch in (quantize, up, down))
        if own:
            (s,), ((number, address),) = parameters_of(made[first - 1]), order
            q, strides = q.gemm, (q.x_scale_row, q.x_scale_group)
            assert (s.row_counts, s.experts, s.rows_each, s.alignment) == (routes[0].histogram, experts, 0, 1)
            assert (s.rows, s.tile_tokens, s.tile_step, s.counter_count) == (4 * tokens, 192, 64, 0)
            assert (
                (s.tiles, s.tile_count) == (ranges["down_tiles"], ranges["down_tile_count"]) == (q.tiles, q.tile_count)
            )
            assert strides == (intermediate // 128, 1) and address == q.x
            sizes = {record["map"]: record for record in named(call["records"], "cuTensorMapEncodeTiled")}[number]
            assert (sizes["sizes"], sizes["box"]) == ([intermediate, 4 * tokens], [128, 64])
        else:
            assert (q.tiles, q.tile_count) == (ranges["tiles"], ranges["tile_count"])
        assert (p.tiles, p.tile_count) == (ranges["tiles"], ranges["tile_count"])
        assert (of_x.x, of_x.codes, of_x.scales) == (call["x"], ranges["x_codes"], ranges["x_scales"])
        assert (of_x.rows, of_x.columns, of_x.group, of_x.row_count) == (tokens, hidden, 128, 0)
        assert (of_x.row_stride, of_x.group_stride, of_x.powers) == (hidden // 128, 1, False)
        assert of_x.x_is_older, "x is quantised while it is routed"
        if between:
            (of_hidden,) = parameters_of(between[0])
            assert (of_hidden.x, of_hidden.codes) == (ranges["hidden"], ranges["hidden_codes"])
            assert of_hidden.scales == ranges["hidden_scales"] and not of_hidden.x_is_older
            assert (of_hidden.rows, of_hidden.columns) == (4 * tokens, intermediate)
            # The row count is the number of placed slots: the end of the last expert's range.
            assert of_hidden.row_count == ranges["offsets"] + 4 * experts
            assert (p.out, p.out_scales) == (ranges["hidden"], 0)
        else:
            assert (p.out, p.out_scales) == (ranges["hidden_codes"], ranges["hidden_scales"])
        # GEMM2 then begins as GEMM1's CTAs end, and routing zeroes the counters that it waits for.
        done, ctas = (ranges["counters"] + 8, asked(up)[1]) if inside else (0, 0)
        assert (p.done, p.awaited, q.done, q.awaited, q.awaited_ctas) == (done, 0, 0, done, ctas)
        assert q.awaited_units == (intermediate // 128 if inside else 0)
        counts = {(route.counters, route.counter_count) for route in routes}
        assert (ranges["counters"], 3 + experts if inside else 2) in counts
        assert (p.x, p.x_scales) == (ranges["x_codes"], ranges["x_scales"])
        assert (q.x, q.x_scales) == (ranges["hidden_codes"], ranges["hidden_scales"])
        assert (q.out, q.out_scales, p.schedule_is_older, q.schedule_is_older) == (ranges["rows"], 0, True, True)
        for gemm, tensor_map, name in ((p, up_map, "w13"), (q, down_map, "w2")):
            assert gemm.weights == tensor_map[1] == result["addresses"][name]
            assert gemm.block_scales == result["addresses"][f"{name}_scale"]
            rows = math.prod(maps[tensor_map[0]]["box"][1:])
            assert rows == (64 if "c1" in (up if name == "w13" else down)["kernel"] else 128)
    assert together == {2048: [1, 7], 7168: [1], 384: []}[hidden]
    assert quantising >= {(True, True), (False, experts > 5)}
    assert any("wide" in name for name in kernels) and any("gated_t" in name for name in kernels)
    assert any("stationary" in name for name in kernels) == (intermediate % 256 == 0)


@pytest.mark.parametrize("tokens", [896, 897, 5000])
def test_rows_in_order(tokens: int, driver: Path, tmp_path: Path) -> None:
    """From more than 448 slots an expert on, each slot gets its row of x. GEMM2 writes there after GEMM1 has read
    it."""
    layer = {"experts": 4, "hidden": 512, "intermediate": 1024}
    result = execute(driver, tmp_path, "fp8_calls", {**layer, "top_k": 2, "tokens": [tokens]})
    (call,) = result["calls"]
    made, ranges, slots = launches(call["records"]), ranges_of(call), 2 * tokens
    maps = {record["map"]: record for record in named(call["records"], "cuTensorMapEncodeTiled")}
    assert [asked(launch) for launch in made] == planned(call["explain"])
    *_, quantize, up, down, _ = made
    names = [launch["kernel"].partition("_gated")[0].partition("_plain")[0] for launch in (quantize, up, down)]
    if tokens == 896:
        assert names == ["quantize_fp8", "grouped_gemm_fp8_wide_sm90", "grouped_gemm_fp8_ordered_sm90"]
        return
    assert names == ["quantize_fp8_slots"] + 2 * ["grouped_gemm_fp8_ordered_sm90"]
    (route,) = {p.place_of_slot for launch in made for p in parameters_of(launch) if hasattr(p, "block_histogram")}
    assert {p.tile_step for launch in made for p in parameters_of(launch) if hasattr(p, "tile_step")} == {64}
    (of_x,), (_, x, p), (_, hidden, q) = (parameters_of(launch) for launch in (quantize, up, down))
    codes, scales = ranges["rows"], ranges["rows"] + slots * 512
    assert (of_x.x, of_x.codes, of_x.scales, of_x.rows, of_x.columns) == (call["x"], codes, scales, tokens, 512)
    assert (of_x.place_of_slot, of_x.top_k, of_x.row_stride, of_x.group_stride) == (route, 2, 1, slots)
    assert not of_x.x_is_older
    assert scales + 4 * slots * 512 // 128 <= ranges["rows"] + 2 * slots * 512
    assert (p.gemm.x, p.gemm.x_scales, p.gemm.schedule_is_older) == (codes, scales, True)
    assert (p.gemm.out, p.gemm.out_scales) == (ranges["hidden_codes"], ranges["hidden_scales"])
    assert (q.gemm.x, q.gemm.x_scales, q.gemm.out) == (p.gemm.out, p.gemm.out_scales, ranges["rows"])
    strides = [(g.x_scale_row, g.x_scale_group) for g in (p, q)] + [(p.out_scale_row, p.out_scale_group)]
    assert strides == 3 * [(1, slots)]
    for (number, address), gemm, columns in ((x, p.gemm, 512), (hidden, q.gemm, 1024)):
        assert address == gemm.x and 2 * gemm.k == columns
        assert (maps[number]["sizes"], maps[number]["box"]) == ([columns, slots], [128, 64])
        assert maps[number]["strides"] == [columns]


SCALING = {"tensor": 2, "token": 1, "static": 3}  # Fp8Scaling


def test_operands_that_begin_too_late(driver: Path, tmp_path: Path) -> None:
    errors = execute(driver, tmp_path, "refused_fp8", {})
    assert [errors.pop(name) for name in ("right", "w13_scale", "rows")] == [None] * 3
    multiples = {"w13": 16, "w2": 16, "w2_scale": 8, "b13": 16, "b2": 16}
    multiples |= {f"{name}_scale of rows": 16 for name in ("w13", "w2")}
    assert errors.keys() == multiples.keys()
    for name, multiple in multiples.items():
        assert errors[name].startswith(f"ValueError: {name.split()[0]}: must start at a multiple of {multiple} bytes")


@pytest.mark.parametrize(("layer", "groups"), [(LAYERS[0], 1), (LAYERS[1], 8)], ids=["bias", "groups"])
def test_bias_and_groups_in_one_launch(layer: dict[str, Any], groups: int, driver: Path, tmp_path: Path) -> None:
    """The layer's one launch takes bias and groups; for more tokens routing is a launch of its own."""
    arguments = {**layer, "top_k": 8, "tokens": [1, 4, 5, 300], "groups": groups}
    most = 8 if layer["hidden"] <= 4096 else 4
    for call in execute(driver, tmp_path, "fp8_calls", arguments)["calls"]:
        assert [asked(launch) for launch in launches(call["records"])] == planned(call["explain"])
        first, *more = launches(call["records"])
        together = call["tokens"] <= most
        assert first["kernel"].startswith("routed_layer_fp8_sm90_gated" if together else ("route_", "select_"))
        assert "_any" in first["kernel"] and bool(more) != together
        if together:
            p = parameters_of(first)[2]
            assert first["cooperative"] and p.select.correction_bias and p.select.groups == groups
            assert p.select.tokens == call["tokens"] and p.layer.up.x == call["x"]


def test_scales_of_rows(driver: Path, tmp_path: Path) -> None:
    """Every GEMM gets the scales of its weights' rows, beside a table for all blocks."""
    arguments = {**LAYERS[0], "top_k": 4, "tokens": [1, 7, 64, 300, 2000], "mode": "token", "of_rows": True}
    result = execute(driver, tmp_path, "fp8_tensor_calls", arguments)
    kernels = set()
    for call in result["calls"]:
        assert [asked(launch) for launch in launches(call["records"])] == planned(call["explain"])
        gemms = [launch for launch in launches(call["records"]) if launch["kernel"].startswith("grouped_gemm")]
        scales = [parameters_of(launch)[-1].expert_scales for launch in gemms]
        assert scales == [result["addresses"][f"{name}_scale"] for name in ("w13", "w2")]
        assert all(parameters_of(launch)[-1].block_scales not in (0, *scales) for launch in gemms)
        kernels |= {launch["kernel"] for launch in gemms}
    assert len(kernels) > 4


@pytest.mark.parametrize("mode", SCALING)
@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: str(layer["hidden"]))
def test_one_scale_for_a_matrix(layer: dict[str, Any], mode: str, driver: Path, tmp_path: Path) -> None:
    """The kernels are those of block scales. In front of them are the launches that find the scales of activations."""
    arguments = {**layer, "top_k": 4, "tokens": [1, 7, 64, 300, 2000, 20000], "mode": mode}
    result = execute(driver, tmp_path, "fp8_tensor_calls", arguments)
    experts, hidden, intermediate = layer["experts"], layer["hidden"], layer["intermediate"]
    addresses = result["addresses"]
    assert result["shapes"]["w13_scale"] == [experts, 2 * intermediate // 128, hidden // 128]
    assert result["shapes"]["w2_scale"] == [experts, hidden // 128, intermediate // 128]
    quantisers = {"tensor": ["quantize_fp8_peak", "quantize_fp8"], "token": ["quantize_fp8_rows"]}

    def expected(rows: int, columns: int) -> list[str]:
        if mode == "tensor" and rows * columns <= 1 << 14:
            return ["quantize_fp8_rows"]  # one CTA
        return quantisers.get(mode, ["quantize_fp8"])

    for call in result["calls"]:
        made, ranges, tokens = launches(call["records"]), ranges_of(call), call["tokens"]
        assert {record["call"] for record in call["records"]} <= CALLS
        assert [asked(launch) for launch in made] == planned(call["explain"])
        names = [launch["kernel"] for launch in made]
        first = next(i for i, name in enumerate(names) if name.startswith("quantize_fp8"))
        of_x, of_hidden = expected(tokens, hidden), expected(4 * tokens, intermediate)
        up, down = first + len(of_x), first + len(of_x) + 1 + len(of_hidden)
        assert names[first:up] == of_x and names[up + 1 : down] == of_hidden and len(made) == down + 2
        # Routing's last kernel zeroes the peaks.
        own = names[first - 1] == "schedule"
        (*_, route) = parameters_of(made[first - 1 - own])
        assert (route.counters, route.counter_count) == (ranges["counters"], 4 if mode == "tensor" else 2)
        _, p = parameters_of(made[up])
        *maps, q = parameters_of(made[down])
        assert own == (len(maps) == 2) == (intermediate >= 640 and 4 * tokens > 96 * experts)
        q = q.gemm if own else q
        stages = ((first, up, "x", hidden, tokens), (up + 1, down, "hidden", intermediate, 4 * tokens))
        for stage, (start, end, name, columns, rows) in enumerate(stages):
            for launch in made[start:end]:
                (of,) = parameters_of(launch)
                assert of.x == (call["x"] if name == "x" else ranges["hidden"])
                assert (of.codes, of.scales) == (ranges[f"{name}_codes"], ranges[f"{name}_scales"])
                assert (of.rows, of.columns, of.group, of.scaling) == (rows, columns, 128, SCALING[mode])
                assert of.row_count == (0 if name == "x" else ranges["offsets"] + 4 * experts)
                assert of.x_is_older == (name == "x" and mode != "tensor")
                static = addresses.get("a13_scale" if name == "x" else "a2_scale")
                assert of.given == (static if mode == "static" else ranges["counters"] + 4 * (2 + stage))
                # A thread of a row has at most four vectors, if the CTA has enough threads.
                assert of.row_threads in (256, *(1 << i for i in range(2, 8)))
                assert of.row_threads == 256 or columns <= 8 * 4 * of.row_threads < 2 * columns
                if mode == "token":
                    assert asked(launch)[1] == -(-rows * of.row_threads // 256)
                elif launch["kernel"] == "quantize_fp8_rows":
                    assert asked(launch)[1] == 1
        assert (p.out, p.out_scales, p.x, p.x_scales) == (ranges["hidden"], 0, ranges["x_codes"], ranges["x_scales"])
        assert (q.x, q.x_scales) == (ranges["hidden_codes"], ranges["hidden_scales"])
        assert (p.block_scales, q.block_scales) == (addresses["w13_scale"], addresses["w2_scale"])
        assert (p.schedule_is_older, q.schedule_is_older) == (True, True)


# GLM-4.5-Air's layer between 2 ranks, a part that is less than a block, and one without gates (Nemotron-3).
CUT_LAYERS = [
    {"experts": 128, "hidden": 4096, "intermediate": 704, "gated": True},
    {"experts": 16, "hidden": 2048, "intermediate": 96, "gated": True},
    {"experts": 128, "hidden": 2688, "intermediate": 1856, "gated": False},
]


def end_of(record: dict[str, Any]) -> int:
    """Returns the distance of a tensor map's last byte from its first."""
    last = [(size - 1) * stride for size, stride in zip(record["sizes"][1:], record["strides"], strict=True)]
    return sum(last) + 2 * record["sizes"][0]


@pytest.mark.parametrize("mode", SCALING)
@pytest.mark.parametrize("layer", CUT_LAYERS, ids=lambda layer: str(layer["intermediate"]))
def test_rows_that_end_inside_a_block(layer: dict[str, Any], mode: str, driver: Path, tmp_path: Path) -> None:
    """Kernels count whole blocks. Tensor maps end where the weights do, of gate and of up; numbers of rows are copies
    with zeros."""
    asks = {"top_k": 4, "tokens": [1, 7, 64, 300, 2000, 20000], "mode": mode, "of_rows": True, "bias": True}
    result = execute(driver, tmp_path, "fp8_tensor_calls", {**layer, **asks})
    experts, hidden, own = layer["experts"], layer["hidden"], layer["intermediate"]
    parts, whole = 2 if layer["gated"] else 1, -(-own // 128) * 128
    addresses, kernels = result["addresses"], set()
    assert result["shapes"]["w13_scale"] == result["shapes"]["b13"] == [experts, parts * whole]
    assert result["shapes"]["w2_scale"] == result["shapes"]["b2"] == [experts, hidden]
    maps = {record["map"]: record for record in named(result["load"], "cuTensorMapEncodeTiled")}
    sizes = {addresses["w13"]: experts * parts * own * hidden, addresses["w2"]: experts * hidden * own}
    assert {record["address"] for record in maps.values()} == set(sizes)
    assert all(end_of(record) == sizes[record["address"]] for record in maps.values()), "every byte, and none behind"
    for call in result["calls"]:
        made, ranges, slots = launches(call["records"]), ranges_of(call), 4 * call["tokens"]
        assert [asked(launch) for launch in made] == planned(call["explain"])
        up, down = (launch for launch in made if launch["kernel"].startswith("grouped_gemm"))
        kernels |= {up["kernel"], down["kernel"]}
        (up_map, p), (down_map, *_, q) = parameters_of(up), parameters_of(down)
        q = getattr(q, "gemm", q)
        # These parameters count pairs of elements.
        assert (p.rows, p.out_columns, p.k) == (parts * whole, whole, hidden // 2)
        assert (q.rows, q.out_columns, q.k) == (hidden, hidden, whole // 2)
        assert (p.expert_scales, p.bias) == (addresses["w13_scale"], addresses["b13"])
        assert (q.expert_scales, q.bias) == (addresses["w2_scale"], addresses["b2"])
        wide, record = "wide" in up["kernel"], maps[up_map[0]]
        assert wide == ("wide_cut" in up["kernel"]) and record["address"] == addresses["w13"] == p.weights
        if wide:
            assert record["sizes"] == [hidden // 2, 2, own // 8, 4, parts * experts]
            assert record["box"] == [64, 2, 4, 4, 1]
            assert record["strides"] == [hidden, 8 * hidden, 2 * hidden, own * hidden]
        elif layer["gated"]:
            assert record["sizes"] == [hidden // 2, 8, 2, own // 8, experts]
            assert record["strides"] == [hidden, own * hidden, 8 * hidden, 2 * own * hidden]
        else:
            assert record["sizes"] == [hidden // 2, 8, 2, own // 16, experts]
            assert record["strides"] == [hidden, 8 * hidden, 16 * hidden, own * hidden]
        record = maps[down_map[0]]
        assert record["address"] == addresses["w2"] == q.weights and record["sizes"][0] == own // 2
        of_hidden = [p for launch in made for p in parameters_of(launch) if getattr(p, "codes", 0) == q.x]
        for of in of_hidden:
            assert (of.x, of.rows, of.columns, of.row_stride) == (ranges["hidden"], slots, whole, whole // 128)
            assert (of.scales, of.group) == (ranges["hidden_scales"], 128)
        assert of_hidden and ranges["rows"] - ranges["hidden"] >= 2 * slots * whole
        assert (q.x, q.x_scales) == (ranges["hidden_codes"], ranges["hidden_scales"])
    assert any("wide_cut" in name for name in kernels) and any("_t16_" in name for name in kernels)
    assert not any("ordered_sm90_gated" in name for name in kernels)


@pytest.mark.parametrize("tokens", [5, 2000])
@pytest.mark.parametrize("form", ["rows", "columns", "packed", "token", "one"])
def test_quantised_tokens(form: str, tokens: int, driver: Path, tmp_path: Path) -> None:
    """GEMM1 reads codes and rows of scales as they are; other scales are put in order before it."""
    call = execute(driver, tmp_path, "fp8_tokens", {"tokens": tokens, "form": form})
    made, ranges = launches(call["records"]), ranges_of(call)
    names = [launch["kernel"] for launch in made]
    place = next(i for i, name in enumerate(names) if name.startswith("grouped_gemm_fp8"))
    _, p = parameters_of(made[place])
    assert (p.x, p.schedule_is_older) == (call["x"], form != "rows")
    assert "quantize_fp8" not in names[:place]
    if form == "rows":
        assert p.x_scales == call["scale"] and "expand_scales" not in names
        return
    assert names[place - 1] == "expand_scales" and p.x_scales == ranges["x_scales"]
    (of,) = parameters_of(made[place - 1])
    assert (of.scales, of.table, of.rows, of.groups) == (call["scale"], ranges["x_scales"], tokens, 3)
    strides = {"columns": (1, tokens), "packed": (1, tokens), "token": (1, 0), "one": (0, 0)}
    assert (of.row_stride, of.group_stride, of.powers) == (*strides[form], form == "packed") and of.scales_are_older
    assert asked(made[place - 1])[1] == -(-3 * tokens // 256)


@pytest.mark.parametrize(
    ("dtype", "group", "numbers"),
    [("bfloat16", 128, 32), ("float16", 128, 32), ("float32", 128, 8), ("bfloat16", 32, 8)],
)
def test_quantised_rows(dtype: str, group: int, numbers: int, driver: Path, tmp_path: Path) -> None:
    """In per_token_group_quant_fp8 a thread takes 32 16-bit numbers in groups of 128, otherwise 8."""
    arguments = {"shape": [3, 43, 384], "dtype": dtype, "group": group}
    result = execute(driver, tmp_path, "fp8_quantized", arguments)
    (launch,) = launches(result["records"])
    (p,) = parameters_of(launch)
    assert result["shapes"] == [[3, 43, 384], [3, 43, 384 // group]]
    assert [p.x, p.codes, p.scales] == result["addresses"]
    assert (p.rows, p.columns, p.group, p.row_stride, p.group_stride) == (129, 384, group, 384 // group, 1)
    assert launch["kernel"] == "quantize_fp8" and launch["block"][0] == 256 and launch["stream"] == STREAM
    assert launch["grid"][0] == -(-129 * 384 // numbers // 256)
    by_group = execute(driver, tmp_path, "fp8_quantized", {"column_major": True, **arguments, "shape": [43, 384]})
    (p,) = parameters_of(launches(by_group["records"])[0])
    assert by_group["shapes"] == [[43, 384], [384 // group, 43]] and (p.row_stride, p.group_stride) == (1, 43)
    assert not launches(execute(driver, tmp_path, "fp8_quantized", {**arguments, "shape": [0, 384]})["records"])
