"""The driver calls of int4 experts: packing, launches and parameters (see test_launch.py)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from fake_cuda.harness import asked, execute, launches, parameters_of, planned

STREAM = 0x1234
LAYERS: list[dict[str, Any]] = [
    {"experts": 128, "hidden": 2048, "intermediate": 768},
    {"experts": 5, "hidden": 224, "intermediate": 672, "zeros": True},
    {"experts": 8, "hidden": 384, "intermediate": 128, "group": 128, "zeros": True, "gated": False},
    {"experts": 6, "hidden": 320, "intermediate": 96, "group": None, "scale_dtype": "float32"},
]
F32, F16, BF16 = 0, 1, 2
PORTABLE = {"gpu": "sm_80"}
layers = pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: str(layer["hidden"]))

pytestmark = pytest.mark.usefixtures("kernels_for_hopper")


def check_packing(result: dict[str, Any], layer: dict[str, Any]) -> None:
    experts, hidden, intermediate = layer["experts"], layer["hidden"], layer["intermediate"]
    gated, zeros = layer.get("gated", True), layer.get("zeros", False)
    made = launches(result["load"])
    assert [launch["kernel"] for launch in made] == ["int4_pack"] * 2
    for launch, name, (codes, scales, factors), rows, columns, halves in (
        (made[0], "w13", result["packed"][0], intermediate * (2 if gated else 1), hidden, gated),
        (made[1], "w2", result["packed"][1], hidden, intermediate, False),
    ):
        (p,) = parameters_of(launch)
        tiles = [-(-rows // 64), -(-columns // 64)]
        assert (codes[1], scales[1]) == ([experts, *tiles, 2048], [experts, *tiles, 384 if zeros else 256])
        assert factors[1] == [experts]
        assert (p.packed_codes, p.packed_scales, p.expert_scales) == (codes[0], scales[0], factors[0])
        assert (p.codes, p.scales) == (result["addresses"][name], result["addresses"][f"{name}_scale"])
        assert p.zeros == (result["addresses"][f"{name}_zeros"] if zeros else 0)
        assert p.group == (layer.get("group", 32) or columns)
        assert p.scale_dtype == (F32 if layer.get("scale_dtype") == "float32" else BF16)
        assert (p.experts, p.rows, p.k, p.gated, p.layout) == (experts, rows, columns, halves, 0)
        assert launch["grid"][0] == experts * tiles[0] * -(-tiles[1] // 4)


@layers
def test_calls(layer: dict[str, Any], driver: Path, tmp_path: Path) -> None:
    tokens = [1, 2, 7, 300, 2000, 20000]
    result = execute(driver, tmp_path, "int4_calls", {**layer, "top_k": 4, "tokens": tokens})
    assert result["format"] == ("int4-zeros" if layer.get("zeros") else "int4")
    check_packing(result, layer)
    kernels, form = set(), "gated" if layer.get("gated", True) else "plain"
    option = "_zeros" if layer.get("zeros") else ""
    for call in result["calls"]:
        made = launches(call["records"])
        found = re.findall(r"^ +(\d+) \+ \d+ +(\w+)$", call["explain"], re.MULTILINE)
        ranges = {name: call["workspace"] + int(offset) for offset, name in found}
        assert [asked(launch) for launch in made] == planned(call["explain"])
        assert all(launch["stream"] == STREAM and launch["pdl"] for launch in made)
        if call["tokens"] <= 2:
            (one,) = made
            assert one["kernel"] == f"routed_layer_int4_sm90_{form}{option}_e384_any" and one["cooperative"]
            (whole,) = parameters_of(one)
            p, q = whole.layer.up, whole.layer.down
            assert (whole.experts, whole.select.tokens) == (layer["experts"], call["tokens"])
        else:
            *_, both, combine = made
            assert combine["kernel"] == "combine_bf16"
            kernels.add(both["kernel"])
            (pair,) = parameters_of(both)
            p, q = pair.up, pair.down
            assert (pair.tiles, pair.row_counts) == (p.tiles, 0)
        assert (p.rows, q.rows) == (layer["intermediate"] * (2 if layer.get("gated", True) else 1), layer["hidden"])
        assert (p.x, p.row_divisor, p.out_global_scales) == (call["x"], 4, 0)
        assert (p.out, q.x, q.out) == (ranges["hidden"], ranges["hidden"], ranges["rows"])
        for gemm, (codes, scales, factors) in zip((p, q), result["packed"], strict=True):
            assert (gemm.weights, gemm.block_scales, gemm.expert_scales) == (codes[0], scales[0], factors[0])
    name = f"grouped_gemm_int4_sm90_{form}{option}_t"
    assert all(kernel.startswith(name) for kernel in kernels) and len(kernels) >= 2


@pytest.mark.parametrize("format", ["int4", "int4-zeros"])
def test_rows_in_expert_order(format: str, driver: Path, tmp_path: Path) -> None:
    """The launch of both GEMMs finds the tiles of masked rows itself."""
    layer = {"experts": 16, "hidden": 1024, "intermediate": 320}
    given = {**layer, "format": format, "rooms": [(1, 1), (128, 1), (128, 128), (512, 30)]}
    for call in execute(driver, tmp_path, "expert_order_calls", given)["calls"]:
        made = launches(call["records"])
        names = [re.sub(r"_(gated|plain)_.*", "", launch["kernel"]) for launch in made]
        assert names == ["schedule", "grouped_gemm_int4_sm90"][call["masked"] :] and call["returned"]
        (pair,) = parameters_of(made[-1])
        assert pair.row_counts == (call["addresses"]["counts"] if call["masked"] else 0)
        assert pair.up.x == call["addresses"]["x"] and pair.down.out == call["addresses"]["out"]


def test_what_is_refused(driver: Path, tmp_path: Path) -> None:
    said = execute(driver, tmp_path, "refused_int4", {})
    assert said["right"] is said["explain"] is said["explain-zeros"] is None
    assert said["f16"].startswith('NotImplementedError: dtype: "f16" for int4 experts on cuda:0; supported there')
    assert "w2_zeros: is on cuda:1, but w13 is on cuda:0" in said["device"]
    assert said["groups"].startswith("ValueError: w2_zeros: ") and "groups" in said["groups"]
    assert said["dtype"].startswith("ValueError: w13_scale: expected dtype bfloat16 or float16 or float32")
