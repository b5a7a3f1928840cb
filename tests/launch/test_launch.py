"""The whole CUDA launch path without a GPU: a stand-in driver (fake_cuda/) records what the extension asks of it.

Each case runs in a process of its own, on tensors with made-up addresses.
"""

from __future__ import annotations

import ctypes
import math
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import oxmoe._oxmoe as extension
from fake_cuda.harness import STRUCTS, asked, execute, launches, named, parameters_of, planned

STREAM = 0x1234
CONTEXT = 0xC000
DYNAMIC_SHARED, CARVEOUT, NON_PORTABLE_CLUSTER = 8, 9, 14  # CU_FUNC_ATTRIBUTE_*

# Compute capability: (image in the wheel, multiprocessors, KiB of shared memory) of Device::typical.
GPUS = {
    80: ("80", 108, 163),
    89: ("80", 142, 99),
    90: ("90a", 132, 227),
    100: ("100f", 148, 227),
    103: ("100f", 148, 227),
    120: ("120f", 188, 99),
}

QWEN3 = {"experts": 128, "top_k": 8, "hidden": 2048, "intermediate": 768}
SMALL = {"experts": 8, "top_k": 2, "hidden": 256, "intermediate": 128}
LARGE = {"experts": 4, "top_k": 2, "hidden": 4096, "intermediate": 4096}
LAYERS = [
    QWEN3 | {"tokens": [1, 3, 16, 64, 200, 700, 1500, 4096, 20000]},
    {"experts": 8, "top_k": 2, "hidden": 4096, "intermediate": 7168, "tokens": [1, 12, 100, 5000]},
    {
        "experts": 32,
        "top_k": 4,
        "hidden": 2880,
        "intermediate": 2880,
        "bias": True,
        "layout": "interleaved",
        "tokens": [1, 40, 3000],
    },
    {
        "experts": 256,
        "top_k": 8,
        "hidden": 7168,
        "intermediate": 256,
        "dtype": "float16",
        "layout": "up_gate",
        "tokens": [2, 600],
    },
    {"experts": 6, "top_k": 3, "hidden": 144, "intermediate": 96, "gated": False, "tokens": [1, 33]},
    {"experts": 3, "top_k": 2, "hidden": 130, "intermediate": 70, "tokens": [1, 9, 300]},
]

Run = Callable[..., Any]


def settings_of(capability: int) -> dict[str, int]:
    image, multiprocessors, shared = GPUS[capability]
    if image not in extension.device_info()["archs"]:
        pytest.skip(f"this wheel has no kernels for {image}")
    return {"cc": capability, "sms": multiprocessors, "shared": shared * 1024}


@pytest.fixture
def run(driver: Path, tmp_path: Path) -> Run:
    """Returns a function run(capability, call, {arguments}, driver settings) -> result."""

    def run(capability: int, call: str, arguments: dict[str, Any], **settings: Any) -> Any:
        return execute(driver, tmp_path, call, arguments, **settings_of(capability) | settings)

    return run


@pytest.fixture(scope="module", params=GPUS, ids=lambda capability: f"sm_{capability}")
def recorded(
    request: pytest.FixtureRequest, driver: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[int, list[dict[str, Any]]]:
    """Returns (capability, every layer at every token count with logits, int32 and int64 ids)."""
    settings, folder = settings_of(request.param), tmp_path_factory.mktemp("records")
    arguments = {"layers": LAYERS, "arch": f"sm_{request.param}"}
    return request.param, execute(driver, folder, "sequences", arguments, **settings)


@pytest.fixture(params=GPUS, ids=lambda capability: f"sm_{capability}")
def capability(request: pytest.FixtureRequest) -> int:
    settings_of(request.param)
    return request.param


def test_launches_are_what_explain_prints(recorded: tuple[int, list[dict[str, Any]]]) -> None:
    for result in recorded[1]:
        plan, made = planned(result["explain_by_arch"]), [asked(launch) for launch in launches(result["records"])]
        assert plan and result["returned_out"]
        assert planned(result["explain"]) == plan, "the plan for this GPU is not the plan for its architecture"
        assert made == plan


def test_routers_are_what_explain_prints(run: Run, capability: int) -> None:
    """The launches of a router with groups, a bias or both are those that `explain` prints for it."""
    layers = [
        {"experts": 64, "top_k": 8, "hidden": 2048, "intermediate": 512, "tokens": [1, 40, 600]},
        {"experts": 256, "top_k": 8, "hidden": 1024, "intermediate": 256, "dtype": "float16", "tokens": [4, 300]},
    ]
    routers = ["logits", "groups", "bias", "both"]
    results = run(capability, "sequences", {"layers": layers, "arch": f"sm_{capability}", "routings": routers})
    kernels: dict[str, set[str]] = {name: set() for name in routers}
    for result in results:
        plan, made = planned(result["explain_by_arch"]), [asked(launch) for launch in launches(result["records"])]
        assert plan and made == plan == planned(result["explain"]), (result["layer"], result["tokens"])
        kernels[result["routing"]] |= {launch["kernel"] for launch in launches(result["records"])}
    chosen = {name: {kernel for kernel in found if kernel.endswith("_any")} for name, found in kernels.items()}
    assert not chosen["logits"] and chosen["groups"] and chosen["bias"] and chosen["both"]


def test_stats_count_every_launch(recorded: tuple[int, list[dict[str, Any]]]) -> None:
    for result in recorded[1]:
        made = Counter(launch["kernel"] for launch in launches(result["records"]))
        assert result["stats"]["launches"] == made and made
        assert result["stats"]["calls"]["moe"] == {"calls": 1, "rows": result["tokens"]}


def test_every_launch_is_legal_and_on_torchs_stream(recorded: tuple[int, list[dict[str, Any]]]) -> None:
    capability, results = recorded
    limit = GPUS[capability][2] * 1024
    for result in results:
        for launch in launches(result["records"]):
            assert launch["stream"] == STREAM and launch["context"] == CONTEXT
            assert launch["grid"][1:] == launch["block"][1:] == launch["cluster"][1:] == [1, 1]
            assert launch["pdl"] == (capability >= 90)
            together = launch["kernel"].startswith(("layer_sm90", "routed_layer"))
            assert launch["cooperative"] == together
            assert launch["attributes"] == (capability >= 90) + (launch["cluster"][0] > 1) + together
            assert launch["shared"] <= min(limit, launch["shared_limit"])
            assert launch["cluster"][0] <= (1 if capability < 90 else 8 if capability >= 120 else 16)
        # A call asks the driver for launches alone: kernels, attributes and tensor maps come with the weights.
        assert {record["call"] for record in result["records"]} <= {"cuLaunchKernelEx", "cuCtxSetCurrent"}


def test_clusters_and_memory_are_asked_for(recorded: tuple[int, list[dict[str, Any]]]) -> None:
    capability, results = recorded
    attributes = {
        (r["kernel"], r["attribute"]): r["value"]
        for result in results
        for r in named(result["load"], "cuFuncSetAttribute")
    }
    every = [launch for result in results for launch in launches(result["records"])]
    for launch in every:
        if launch["shared"] > 48 * 1024:
            assert attributes[launch["kernel"], DYNAMIC_SHARED] >= launch["shared"]
        if launch["cluster"][0] > 8:
            assert attributes[launch["kernel"], NON_PORTABLE_CLUSTER] == 1
        # Kernels that stream rows get as much L1 as possible.
        kernel = launch["kernel"]
        streams = kernel == "quantize_fp8" or kernel.startswith(("combine", "round_rows_mxfp8"))
        assert attributes.get((kernel, CARVEOUT)) == (0 if streams else None)
    assert max(launch["cluster"][0] for launch in every) == (1 if capability < 90 else 8 if capability >= 120 else 16)


def workspace_of(text: str, base: int) -> dict[str, int]:
    """Returns the addresses of the ranges that `explain` prints."""
    return {name: base + int(offset) for offset, name in re.findall(r"^ +(\d+) \+ \d+ +(\w+)$", text, re.MULTILINE)}


def split(
    made: list[dict[str, Any]],
) -> tuple[list[dict[str, Any]], list[tuple[list[Any], Any, int | None]], Any, Any]:
    """Returns routing's launches; tensor maps, parameters and rows of a unit of both GEMMs; combine's and the fused
    layer's parameters, None if the layer is not fused. If the layer contains the routing, there are no routing
    launches."""
    for i, launch in enumerate(made):
        if launch["kernel"].startswith("grouped"):
            gemms = []
            for gemm in made[i : i + 2]:
                *maps, p = parameters_of(gemm)
                tile = re.search(r"_r(\d+)_c(\d+)_", gemm["kernel"])
                gemms.append((maps, p, 64 * int(tile[1]) * int(tile[2]) if tile else None))
            (combine,) = parameters_of(made[i + 2])
            return made[:i], gemms, combine, None
        if launch["kernel"].startswith("layer"):
            up_map, down_map, p = parameters_of(launch)
            assert launch is made[-1]
            return made[:i], [([up_map], p.up, 64), ([down_map], p.down, 64)], p.combine, p
        if launch["kernel"].startswith("routed_layer"):
            up_map, down_map, p = parameters_of(launch)
            assert len(made) == 1
            layer = p.layer
            return [], [([up_map], layer.up, 64), ([down_map], layer.down, 64)], layer.combine, p
    raise AssertionError(f"no GEMM in {made}")


def test_parameters_point_at_the_operands(recorded: tuple[int, list[dict[str, Any]]]) -> None:
    for result in recorded[1]:
        given, layer = result["addresses"], result["layer"]
        ranges = workspace_of(result["explain"], given["workspace"])
        from_logits = result["routing"] == "logits"
        ids, weights = (ranges["ids"], ranges["weights"]) if from_logits else (given["topk_ids"], given["topk_weights"])
        made = launches(result["records"])
        routing, (up, down), combine, fused = split(made)
        for launch in routing:
            for p in parameters_of(launch):
                assert (p.tokens, p.top_k, p.experts) == (result["tokens"], layer["top_k"], layer["experts"])
                if isinstance(p, STRUCTS["SelectParams"]):
                    assert (p.logits, p.ids, p.weights) == (given["router_logits"], ids, weights)
                    assert p.correction_bias == p.num_token_non_padded == 0
                else:
                    assert (p.ids, p.ids_are_i64, p.first_expert) == (ids, result["routing"] == "int64", 0)
                    for name in (
                        "histogram",
                        "offsets",
                        "place_of_slot",
                        "slot_of_place",
                        "tiles",
                        "tile_count",
                        "counters",
                        "block_histogram",
                    ):
                        assert getattr(p, name) == ranges[name], name
        rows = layer["intermediate"] * (2 if layer.get("gated", True) else 1)
        for gemm, name, inputs, outputs, k, columns, p_rows in (
            (up, "w13", given["x"], ranges["hidden"], layer["hidden"], layer["intermediate"], rows),
            (down, "w2", ranges["hidden"], ranges["rows"], layer["intermediate"], layer["hidden"], layer["hidden"]),
        ):
            maps, p, unit_rows = gemm
            assert (p.x, p.out, p.weights, p.bias) == (
                inputs,
                outputs,
                given[name],
                given.get(name.replace("w", "b"), 0),
            )
            assert (p.k, p.out_columns, p.rows) == (k, columns, p_rows)
            assert (p.tiles, p.tile_count, p.slot_weights) == (ranges["tiles"], ranges["tile_count"], 0)
            assert p.next_unit == ranges["counters"] + (0 if gemm is up else 4)
            assert (p.slot_of_place, p.row_divisor) == (
                (ranges["slot_of_place"], layer["top_k"]) if gemm is up else (0, 1)
            )
            for number, address in maps:
                record = next(r for r in named(result["load"], "cuTensorMapEncodeTiled") if r["map"] == number)
                assert address == given[name]
                box_rows = math.prod(record["box"][1:])
                assert box_rows == (64 if is_paired(record) else unit_rows)
        assert not up[1].awaited and not down[1].done and bool(up[1].done) == bool(down[1].awaited)
        counters = parameters_of(routing[-1])[-1].counter_count if routing else None
        (_, first, unit_rows), (_, second, _) = up, down
        if fused is None and unit_rows:
            # GEMM2 begins as GEMM1's CTAs end; routing zeroes the counters that it waits for.
            assert counters == 3 + layer["experts"]
            assert (first.done, second.awaited) == (ranges["counters"] + 8,) * 2
            assert second.awaited_ctas == made[len(routing)]["grid"][0]
            assert second.awaited_units == -(-rows // unit_rows)
        elif fused is None:
            assert counters == 2
        elif counters is None:
            select = fused.select
            assert select.logits == (given["router_logits"] if from_logits else 0)
            assert (select.ids, select.weights, fused.ids_are_i64) == (ids, weights, result["routing"] == "int64")
            assert (select.tokens, select.top_k) == (result["tokens"], layer["top_k"])
            assert (fused.experts, fused.first_expert) == (layer["experts"], 0)
            assert fused.extra_rounds == -(-layer["hidden"] // 64) // -(-layer["intermediate"] // 64)
        else:
            row_blocks = -(-layer["hidden"] // 64)
            assert fused.tiles_done == ranges["counters"] + 8
            assert fused.rows_done == ranges["counters"] + 4 * (counters - row_blocks)
            assert counters == 2 + fused.max_tiles + row_blocks
        p = combine
        assert (p.y, p.place_of_slot, p.weights, p.out) == (
            ranges["rows"],
            ranges["place_of_slot"],
            weights,
            given["out"],
        )
        assert (p.tokens, p.top_k, p.hidden, p.scale, p.keep_slots) == (
            result["tokens"],
            layer["top_k"],
            layer["hidden"],
            1.0,
            False,
        )
        outputs = result["tokens"] * layer["hidden"]
        wide = 2 if outputs <= 1 << 19 else 4 if outputs < 1 << 21 else 8
        assert p.columns == (1 if layer["hidden"] % 8 else wide)


def test_tensor_maps_only_where_the_hopper_kernel_runs(recorded: tuple[int, list[dict[str, Any]]]) -> None:
    capability, results = recorded
    for result in results:
        gemms = [
            a["kernel"] for a in launches(result["records"]) if a["kernel"].startswith(("grouped", "layer", "routed"))
        ]
        hopper = "sm90" in gemms[0]
        assert hopper == ("sm90" in gemms[-1])
        assert bool(named(result["load"], "cuTensorMapEncodeTiled")) == hopper
        assert hopper == (capability == 90 and result["layer"]["hidden"] != 130)


def joined(lists: list[list[int]]) -> list[int]:
    return [number for numbers in lists for number in numbers]


def is_paired(record: dict[str, Any]) -> bool:
    """Whether a map is for pairs of row tiles: strips of 32 rows, with one tile of the pair in a box."""
    return bool(record["box"][2] == 1)


def rows_of_boxes(record: dict[str, Any], rows: int, k: int, expert: int) -> list[list[int]]:
    """Returns the row numbers that each box along the slices of one expert brings, in their order in shared memory."""
    columns, inner, second, third, last = record["sizes"]
    assert columns == k and all(stride % (2 * k) == 0 for stride in record["strides"])
    row, *steps = (stride // (2 * k) for stride in record["strides"])
    box = record["box"]
    assert (box[0], box[1]) == (64, inner)
    if is_paired(record):
        tile, half, strip = steps
        assert (second, third, box[3], box[4]) == (2, 2, 2, 4)
        count, first = rows // 32, expert * rows // strip
        assert first + count <= last
        strips = [range(start, min(start + 4, count)) for start in range(0, count, 4)]
        return [
            [
                (first + s) * strip + m * tile + h * half + i * row - expert * rows
                for s in box_strips
                for h in range(2)
                for i in range(inner)
            ]
            for box_strips in strips
            for m in range(2)
        ]
    half, slice_, expert_rows = steps
    halves, slices = second, third
    assert expert_rows == rows and expert < last and (box[2], box[4]) == (halves, 1)
    numbers = [[s * slice_ + h * half + i * row for h in range(halves) for i in range(inner)] for s in range(slices)]
    return [joined(numbers[start : start + box[3]]) for start in range(0, slices, box[3])]


@pytest.mark.parametrize("layout", ["gate_up", "up_gate", "interleaved"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_tensor_maps_pair_gate_and_up_rows(run: Run, layout: str, dtype: str) -> None:
    experts, hidden, half = 5, 192, 352
    result = run(
        90,
        "load",
        {"experts": experts, "top_k": 2, "hidden": hidden, "intermediate": half, "layout": layout, "dtype": dtype},
    )
    maps = named(result["records"], "cuTensorMapEncodeTiled")
    up = [record for record in maps if record["address"] == result["addresses"]["w13"]]
    down = [record for record in maps if record["address"] == result["addresses"]["w2"]]
    assert up and down and len(up) + len(down) == len(maps)
    for record in maps:
        assert record["type"] == {"float16": 6, "bfloat16": 9}[dtype] and record["swizzle"] == 3
    # A 16-row slice has 8 rows of one half, then their partners in the other. [up; gate] is read like [gate; up].
    partner = (lambda row: row + 1) if layout == "interleaved" else (lambda row: row + half)
    for record in up:
        for expert in range(experts):
            boxes = rows_of_boxes(record, 2 * half, hidden, expert)
            assert sorted(joined(boxes)) == list(range(2 * half))
            for rows in boxes:
                for start in range(0, len(rows), 16):
                    assert rows[start + 8 : start + 16] == [partner(row) for row in rows[start : start + 8]]
            if is_paired(record):
                # The partners' outputs are neighbours.
                step = partner(0) if layout == "interleaved" else 0
                for first, second in zip(boxes[::2], boxes[1::2], strict=True):
                    assert second == [row + 1 + step for row in first]
    for record in (record for record in down if is_paired(record)):
        for expert in range(experts):
            boxes = rows_of_boxes(record, hidden, half, expert)
            assert sorted(joined(boxes)) == list(range(hidden))
            for first, second in zip(boxes[::2], boxes[1::2], strict=True):
                for i in (start + lane for start in range(0, len(first), 16) for lane in range(8)):
                    columns = [first[i], first[i + 8], second[i], second[i + 8]]
                    assert columns == list(range(columns[0], columns[0] + 4))
    for record in (record for record in down if not is_paired(record)):
        rows = joined(rows_of_boxes(record, hidden, half, experts - 1))
        assert [row // 16 for row in rows] == [i // 16 for i in range(hidden)] and sorted(rows) == list(range(hidden))


def test_no_token_launches_nothing(run: Run, capability: int) -> None:
    for routing in ("logits", "int32"):
        _, first, second = run(capability, "calls", {"layer": SMALL, "tokens": 0, "count": 2, "routing": routing})
        assert first == second == []


def test_kernels_are_loaded_once(run: Run, capability: int) -> None:
    load, *calls = run(capability, "calls", {"layer": QWEN3, "tokens": 40, "count": 3})
    images, kernels = (
        [r[key] for r in named(load, call)]
        for call, key in (("cuModuleLoadData", "image"), ("cuModuleGetFunction", "kernel"))
    )
    assert images and len(set(images)) == len(images) and len(set(kernels)) == len(kernels)
    assert len(named(load, "cuDevicePrimaryCtxRetain")) == 1 and not named(load, "cuModuleUnload")
    for records in calls:
        assert {record["call"] for record in records} == {"cuLaunchKernelEx", "cuCtxSetCurrent"}
        assert [asked(a) for a in launches(records)] == [asked(b) for b in launches(calls[0])]


def test_routing_operations(run: Run, capability: int) -> None:
    result = run(capability, "routing_operations", {"tokens": 50, "experts": 64, "top_k": 6})
    (given, given_outputs), (made, made_outputs), (sort, sort_outputs), (tables, tables_outputs) = result["results"]
    for records, outputs in ((given, given_outputs), (made, made_outputs)):
        (launch,) = launches(records)
        select, route = parameters_of(launch)
        assert launch["kernel"] == "select_e2" and launch["stream"] == STREAM
        assert [select.logits, select.weights, select.ids] == [result["logits"], *outputs]
        assert (select.tokens, select.experts, select.top_k) == (50, 64, 6)
        assert not any(getattr(route, name) for name, kind in route._fields_ if kind is ctypes.c_uint64)
    assert given_outputs[0] == result["weights"]
    p = parameters_of(launches(sort)[-1])[-1]
    assert [p.histogram, p.offsets, p.place_of_slot, p.slot_of_place] == sort_outputs and p.ids == result["ids"]
    *_, ragged = launches(tables)
    (p,) = parameters_of(ragged)
    gate, histogram, _, slot_of_place, _, block_offsets, block_schedule = tables_outputs
    assert (p.gate, p.histogram, p.slot_of_place) == (gate, histogram, slot_of_place)
    assert (p.block_offsets, p.block_schedule, p.slot_weights) == (block_offsets, block_schedule, result["weights"])
    assert (p.slots, p.experts) == (300, 64)


def test_context_is_set_and_restored(run: Run, capability: int) -> None:
    result = run(capability, "foreign_context", {"layer": SMALL, "context": 0xBEEF})
    foreign = result["foreign"]
    assert result["loaded"] == result["after"] == 0xBEEF
    assert [r["context"] for r in named(foreign, "cuCtxSetCurrent")] == [CONTEXT, 0xBEEF]
    assert foreign[0]["call"] == foreign[-1]["call"] == "cuCtxSetCurrent"
    assert {launch["context"] for launch in launches(foreign)} == {CONTEXT}
    assert not named(result["own"], "cuCtxSetCurrent") and result["after_own"] == CONTEXT


def test_second_gpu_has_kernels_of_its_own(run: Run, capability: int) -> None:
    load, call = run(capability, "calls", {"layer": SMALL | {"device": 1}, "tokens": 5, "count": 1}, devices=2)
    assert [r["device"] for r in named(load, "cuDevicePrimaryCtxRetain")] == [1]
    assert {launch["context"] for launch in launches(call)} == {CONTEXT + 1}


FAILED, ILLEGAL, MEMORY = 719, 700, 2  # launch failed, illegal address, out of memory


@pytest.mark.parametrize("nth", [1, 2, 3, 4])
def test_failed_launch_names_op_kernel_and_grid(run: Run, capability: int, nth: int) -> None:
    result = run(capability, "failing", {"layer": SMALL, "tokens": 9}, fail=f"cuLaunchKernelEx:{nth}:{FAILED}")
    check_failure(result, nth, ["routing", "GEMM1", "GEMM2", "combine"])


@pytest.mark.parametrize("nth", [1, 2])
def test_failed_launch_of_a_fused_layer(run: Run, nth: int) -> None:
    arguments = {"layer": LARGE, "tokens": 7, "routing": "int32"}
    result = run(90, "failing", arguments, fail=f"cuLaunchKernelEx:{nth}:{FAILED}")
    check_failure(result, nth, ["routing", "GEMM1, GEMM2 and combine"])


def test_failed_launch_of_a_whole_layer(run: Run) -> None:
    result = run(90, "failing", {"layer": SMALL, "tokens": 3}, fail=f"cuLaunchKernelEx:1:{FAILED}")
    check_failure(result, 1, ["layer"])


def check_failure(result: dict[str, Any], nth: int, stages: list[str]) -> None:
    error, second = result["errors"]
    launch = launches(result["records"])[nth - 1]
    assert error.startswith(f"RuntimeError: moe: {stages[nth - 1]}: ")
    assert launch["kernel"] in error and f"grid {launch['grid'][0]}" in error and "CUDA_ERROR_LAUNCH_FAILED" in error
    assert second is None and len(launches(result["records"])) == len(stages)


@pytest.mark.parametrize(
    ("function", "code", "name"),
    [
        ("cuInit", 100, "cuInit: CUDA error CUDA_ERROR_NO_DEVICE"),
        ("cuDeviceGetCount", 3, "cuDeviceGetCount"),
        ("cuDeviceGet", 101, "cuDeviceGet of cuda:0"),
        ("cuDeviceGetAttribute", 1, "cuDeviceGetAttribute of cuda:0"),
        ("cuDeviceGetName", 1, "cuDeviceGetName of cuda:0"),
        ("cuDevicePrimaryCtxRetain", MEMORY, "cuDevicePrimaryCtxRetain of cuda:0"),
        ("cuCtxGetCurrent", 201, "cuCtxGetCurrent"),
        ("cuCtxSetCurrent", 201, "cuCtxSetCurrent"),
        ("cuModuleLoadData", MEMORY, "CUDA_ERROR_OUT_OF_MEMORY"),
        ("cuModuleGetFunction", 500, "CUDA_ERROR_NOT_FOUND"),
        ("cuFuncSetAttribute", 1, "CUDA_ERROR_INVALID_VALUE"),
    ],
)
def test_failed_load_is_an_error_and_can_be_tried_again(
    run: Run, capability: int, function: str, code: int, name: str
) -> None:
    result = run(capability, "failing", {"layer": SMALL, "tokens": 9}, fail=f"{function}:1:{code}")
    error, second = result["errors"]
    assert error.startswith("RuntimeError: ") and name in error and "internal error" not in error
    assert second is None and len(launches(result["records"])) == 4


def test_failed_tensor_map_prints_its_numbers(run: Run) -> None:
    result = run(90, "failing", {"layer": SMALL, "tokens": 9}, fail="cuTensorMapEncodeTiled:2:1")
    error, second = result["errors"]
    assert error.startswith("RuntimeError: cuTensorMapEncodeTiled") and "box" in error and "strides" in error
    assert second is None


def test_without_a_driver(tmp_path: Path) -> None:
    """Empty files stand in the driver's place, so that a machine with a driver finds none, too."""
    folder = tmp_path / "none"
    folder.mkdir()
    for name in ("libcuda.so", "libcuda.so.1"):
        (folder / name).touch()
    result = execute(folder, tmp_path, "refused", {"layer": SMALL, "tokens": 7})
    for call in ("load", "topk"):
        assert result[call].startswith("RuntimeError: no CUDA driver") and "install NVIDIA's driver" in result[call]
    assert result["explain"] is None and result["device_info"] is None
    assert result["info"]["driver"] is False and result["info"]["gpus"] == []


def test_gpu_without_kernels_in_the_wheel(driver: Path, tmp_path: Path) -> None:
    # sm_110 is in no default build.
    result = execute(driver, tmp_path, "refused", {"layer": SMALL, "tokens": 7}, cc=110, sms=20)
    for call in ("load", "topk"):
        assert (
            result[call].startswith("RuntimeError: ")
            and "OXMOE_CUDA_ARCHS=110f" in result[call]
            and "sm_110" in result[call]
        )
    assert result["explain"] is None and [gpu["kernels"] for gpu in result["info"]["gpus"]] == [False]


@pytest.mark.parametrize("capability", GPUS)
def test_architecture_left_out_of_the_wheel(driver: Path, tmp_path: Path, capability: int) -> None:
    image, multiprocessors, shared = GPUS[capability]
    if image in extension.device_info()["archs"]:
        pytest.skip(f"this wheel has kernels for {image}")
    result = execute(
        driver,
        tmp_path,
        "refused",
        {"layer": SMALL, "tokens": 7},
        cc=capability,
        sms=multiprocessors,
        shared=shared * 1024,
    )
    for call in ("load", "topk"):
        assert result[call].startswith("RuntimeError: ") and f"OXMOE_CUDA_ARCHS={image}" in result[call]


def test_gpu_older_than_any_kernel(driver: Path, tmp_path: Path) -> None:
    result = execute(driver, tmp_path, "refused", {"layer": SMALL, "tokens": 7}, cc=75)
    for call in ("load", "topk"):
        assert result[call].startswith("RuntimeError: ") and "sm_75" in result[call] and "sm_80" in result[call]


def test_gpu_that_does_not_exist(driver: Path, tmp_path: Path) -> None:
    result = execute(driver, tmp_path, "refused", {"layer": SMALL | {"device": 3}, "tokens": 7})
    assert result["load"] == "RuntimeError: cuda:3 does not exist, the driver sees 1 GPUs"
