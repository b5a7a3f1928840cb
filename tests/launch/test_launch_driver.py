"""Calls with a driver that is too old, and on a part of a GPU (see test_launch.py for the stand-in driver)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fake_cuda.harness import execute, launches, named, parameters_of

QWEN3 = {"experts": 128, "top_k": 8, "hidden": 2048, "intermediate": 768}
LARGE = {"experts": 4, "top_k": 2, "hidden": 4096, "intermediate": 4096}
SMALL = {"experts": 8, "top_k": 2, "hidden": 256, "intermediate": 128}
FP8 = {"experts": 128, "top_k": 8, "hidden": 2048, "intermediate": 768}
MXFP4 = {"experts": 32, "top_k": 4, "hidden": 2880, "intermediate": 2880}
MXFP8 = {**QWEN3, "in_place": False}
TOO_OLD = (
    "RuntimeError: driver speaks CUDA 12.8; this build needs 13.0: driver 580 or newer, or the cuda-compat package"
)


# The driver's version


def test_a_driver_that_is_too_old_is_an_error_at_the_first_use(driver: Path, tmp_path: Path) -> None:
    """A build without kernels has this error, too; device_info goes on and reports it."""
    result = execute(driver, tmp_path, "refused", {"layer": SMALL, "tokens": 7}, version=12080)
    assert result["load"] == TOO_OLD and result["topk"] == TOO_OLD
    assert result["explain"] is None and result["device_info"] is None
    info = result["info"]
    assert (info["driver"], info["driver_cuda"], info["needed_cuda"]) == (True, "12.8", "13.0")
    (gpu,) = info["gpus"]
    assert TOO_OLD.endswith(gpu["name"]) and gpu["arch"] == "not supported" and not gpu["kernels"]


@pytest.mark.parametrize(("version", "text"), [(13000, "13.0"), (13020, "13.2"), (14000, "14.0")])
def test_a_driver_that_is_new_enough(version: int, text: str, driver: Path, tmp_path: Path) -> None:
    info = execute(driver, tmp_path, "refused", {"layer": SMALL, "tokens": 7}, version=version)["info"]
    assert (info["driver_cuda"], info["gpus"][0]["name"], info["gpus"][0]["arch"]) == (text, "Stand-in 0", "sm_90")


def test_the_driver_is_asked_once(driver: Path, tmp_path: Path, kernels_for_hopper: None) -> None:
    first, *after = execute(driver, tmp_path, "calls", {"layer": SMALL, "tokens": 3, "count": 2})
    assert len(named(first, "cuDriverGetVersion")) == 1
    assert not any(named(records, "cuDriverGetVersion") for records in after)


def test_no_gpu_that_may_be_used(driver: Path, tmp_path: Path) -> None:
    """cuInit returns CUDA_ERROR_NO_DEVICE, as with an empty CUDA_VISIBLE_DEVICES."""
    info = execute(driver, tmp_path, "oxmoe_device_info", {}, fail="cuInit:1:100")
    assert info["driver"] and info["driver_cuda"] == "13.0" and info["gpus"] == []


# A part of a GPU


def kernels(records: list[dict[str, Any]]) -> list[str]:
    return [launch["kernel"] for launch in launches(records)]


def one_launch(records: list[dict[str, Any]]) -> bool:
    return any(launch["cooperative"] for launch in launches(records))


def bf16(driver: Path, tmp_path: Path, layer: dict[str, int], **settings: Any) -> list[list[dict[str, Any]]]:
    """Returns records of three calls with a token, from logits or (LARGE) with ids."""
    routing = "int32" if layer is LARGE else "logits"
    arguments = {"layer": layer, "tokens": 1, "count": 3, "routing": routing}
    return execute(driver, tmp_path, "calls", arguments, **settings)[1:]


def packed(driver: Path, tmp_path: Path, layer: dict[str, int], **settings: Any) -> list[list[dict[str, Any]]]:
    arguments = {**layer, "tokens": [1, 1, 1]}
    return [call["records"] for call in execute(driver, tmp_path, "packed_calls", arguments, **settings)["calls"]]


def fp8(driver: Path, tmp_path: Path, layer: dict[str, int], **settings: Any) -> list[list[dict[str, Any]]]:
    arguments = {**layer, "tokens": [1, 1, 1]}
    return [call["records"] for call in execute(driver, tmp_path, "fp8_calls", arguments, **settings)["calls"]]


def mxfp8(driver: Path, tmp_path: Path, layer: dict[str, int], **settings: Any) -> list[list[dict[str, Any]]]:
    arguments = {**layer, "tokens": [1, 1, 1]}
    return [call["records"] for call in execute(driver, tmp_path, "mxfp8_calls", arguments, **settings)["calls"]]


LAYERS = pytest.mark.parametrize(
    ("call", "layer", "whole", "apart"),
    [
        pytest.param(bf16, QWEN3, "routed_layer_sm90", ["route", "grouped", "grouped", "combine"], id="bf16"),
        pytest.param(bf16, LARGE, "layer_sm90", ["route", "grouped", "grouped", "combine"], id="bf16-ids"),
        pytest.param(fp8, FP8, "routed_layer_fp8_sm90", ["route", *["quantize", "grouped"] * 2, "combine"], id="fp8"),
        pytest.param(packed, MXFP4, "routed_layer_mxfp4_sm90", ["route", "grouped", "combine"], id="mxfp4"),
        pytest.param(mxfp8, MXFP8, "routed_layer_mxfp8_sm90", ["route", "round", "grouped", "combine"], id="mxfp8"),
    ],
)


def are_apart(records: list[dict[str, Any]], families: list[str]) -> bool:
    made = kernels(records)
    return len(made) == len(families) and all(map(str.startswith, made, families)) and not one_launch(records)


@LAYERS
def test_where_a_launch_is_too_large_there_are_several(
    call: Any,
    layer: dict[str, int],
    whole: str,
    apart: list[str],
    driver: Path,
    tmp_path: Path,
    kernels_for_hopper: None,
) -> None:
    """The driver refuses the launch, as under an MPS limit. The first call learns it from the driver; later calls do
    not ask again."""
    before = call(driver, tmp_path, layer)
    assert all(kernels(records)[-1].startswith(whole) and one_launch(records) for records in before)
    first, *after = call(driver, tmp_path, layer, too_large=1)
    (refused,) = named(first, "too large")
    assert refused["kernel"].startswith(whole)
    # Before the refusal at most the routing was launched. It writes to the workspace alone, and runs again.
    place = first.index(refused)
    assert [name.split("_")[0] for name in kernels(first[:place])] == ["route"] * (whole == "layer_sm90")
    assert are_apart(first[place:], apart), kernels(first)
    for records in after:
        assert are_apart(records, apart) and not named(records, "too large")


@LAYERS
def test_a_stream_of_a_green_context_is_asked_for_its_part(
    call: Any,
    layer: dict[str, int],
    whole: str,
    apart: list[str],
    driver: Path,
    tmp_path: Path,
    kernels_for_hopper: None,
) -> None:
    """No launch that is too large is tried: in a capture the driver's refusal would end the capture."""
    for records in call(driver, tmp_path, layer, green=16):
        assert are_apart(records, apart)
    for records in call(driver, tmp_path, layer, green=132):
        assert kernels(records)[-1].startswith(whole) and one_launch(records)


def test_a_part_that_is_large_enough_keeps_the_one_launch(
    driver: Path, tmp_path: Path, kernels_for_hopper: None
) -> None:
    (grid,) = {launch["grid"][0] for launch in launches(bf16(driver, tmp_path, SMALL)[0])}
    enough = -(-grid // 2)
    assert all(one_launch(records) for records in bf16(driver, tmp_path, SMALL, green=enough))
    assert not any(one_launch(records) for records in bf16(driver, tmp_path, SMALL, green=enough - 1))


def test_the_routing_of_the_second_plan_is_its_own(driver: Path, tmp_path: Path, kernels_for_hopper: None) -> None:
    """The schedule of tiles for the layer in one launch differs from that of its GEMMs."""
    first, second, _ = bf16(driver, tmp_path, LARGE, too_large=1)
    routings = [parameters_of(launch)[0] for launch in launches(first) if launch["kernel"].startswith("route")]
    (alone,) = [parameters_of(launch)[0] for launch in launches(second) if launch["kernel"].startswith("route")]
    fields = ["tile_tokens", "tile_step", "max_tiles", "counter_count"]
    numbers = [[getattr(route, field) for field in fields] for route in (*routings, alone)]
    assert numbers[0] != numbers[1] == numbers[2]


def test_two_gemms_in_one_launch_need_no_whole_gpu(driver: Path, tmp_path: Path, kernels_for_hopper: None) -> None:
    """CTAs of the two GEMMs take units from a counter and wait for CTAs that run, so the launch is not cooperative."""
    arguments = {"experts": 32, "hidden": 2048, "intermediate": 768}
    rows = arguments | {"format": "mxfp4", "rooms": [[128, 1]]}
    plain, limited = (
        execute(driver, tmp_path, "expert_order_calls", rows, **settings)["calls"]
        for settings in ({}, {"too_large": 1})
    )
    assert [kernels(call["records"]) for call in plain] == [kernels(call["records"]) for call in limited]
    assert kernels(plain[0]["records"])[0].startswith("grouped_gemm_mxfp4_sm90") and plain[0]["masked"]
    layer = arguments | {"top_k": 4, "tokens": [64]}
    for settings in ({}, {"too_large": 1}, {"green": 16}):
        (call,) = execute(driver, tmp_path, "packed_calls", layer, **settings)["calls"]
        assert are_apart(call["records"], ["route", "grouped_gemm_mxfp4_sm90", "combine"])


def test_another_failure_is_an_error_as_before(driver: Path, tmp_path: Path, kernels_for_hopper: None) -> None:
    arguments = {"layer": QWEN3, "tokens": 1}
    errors = execute(driver, tmp_path, "failing", arguments, fail="cuLaunchKernelEx:1:719")["errors"]
    assert "moe: layer: launching routed_layer_sm90" in errors[0] and "CUDA_ERROR_LAUNCH_FAILED" in errors[0]
