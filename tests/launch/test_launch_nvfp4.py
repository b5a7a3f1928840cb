"""The driver calls of NVFP4 experts: packing, launches and parameters (see test_launch.py)."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

from fake_cuda.harness import asked, execute, launches, parameters_of, planned

STREAM = 0x1234
LAYERS = [
    {"experts": 128, "hidden": 2048, "intermediate": 768},
    {"experts": 5, "hidden": 208, "intermediate": 688, "swizzled": True},
    {"experts": 8, "hidden": 336, "intermediate": 80, "gated": False},
]

pytestmark = pytest.mark.usefixtures("kernels_for_hopper")


def check_packing(result: dict[str, Any], layer: dict[str, Any]) -> None:
    experts, hidden, intermediate = layer["experts"], layer["hidden"], layer["intermediate"]
    gated = layer.get("gated", True)
    made = launches(result["load"])
    assert [launch["kernel"] for launch in made] == ["nvfp4_pack"] * 2
    for launch, name, (codes, scales, factors), rows, columns, halves in (
        (made[0], "w13", result["packed"][0], intermediate * (2 if gated else 1), hidden, gated),
        (made[1], "w2", result["packed"][1], hidden, intermediate, False),
    ):
        (p,) = parameters_of(launch)
        tiles = [-(-rows // 64), -(-columns // 64)]
        assert (codes[1], scales[1]) == ([experts, *tiles, 2048], [experts, *tiles, 256])
        assert factors[1] == ([experts, 2] if halves else [experts])
        assert (p.packed_codes, p.packed_scales, p.expert_scales) == (codes[0], scales[0], factors[0])
        assert (p.codes, p.scales) == (result["addresses"][name], result["addresses"][f"{name}_scale"])
        assert (p.experts, p.rows, p.k, p.gated, p.layout) == (experts, rows, columns, halves, 0)
        assert p.tile_rows == (128 if layer.get("swizzled") else 0) and p.factors not in (0, p.expert_scales)
        assert launch["grid"][0] == experts * tiles[0] * -(-tiles[1] // 4)


@pytest.mark.parametrize("mode", ["a16", "one", "each", "codes"])
@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: str(layer["hidden"]))
def test_calls(layer: dict[str, Any], mode: str, driver: Path, tmp_path: Path) -> None:
    tokens = [1, 7, 300, 2000, 20000]
    given = {**layer, "top_k": 4, "tokens": tokens, "mode": mode}
    result = execute(driver, tmp_path, "nvfp4_calls", given)
    assert result["format"] == ("nvfp4" if mode == "a16" else "nvfp4-a4")
    check_packing(result, layer)
    kernels = set()
    for call in result["calls"]:
        made, count = launches(call["records"]), call["tokens"]
        found = re.findall(r"^ +(\d+) \+ \d+ +(\w+)$", call["explain"], re.MULTILINE)
        ranges = {name: call["workspace"] + int(offset) for offset, name in found}
        assert [asked(launch) for launch in made] == planned(call["explain"])
        assert all(launch["stream"] == STREAM and launch["pdl"] for launch in made)
        if mode == "a16" and count == 1:
            (one,) = made
            (whole,) = parameters_of(one)
            assert one["kernel"].startswith("routed_layer_nvfp4_sm90_") and one["kernel"].endswith("_e384_any")
            for gemm, (codes, scales, factors) in zip(
                (whole.layer.up, whole.layer.down), result["packed"], strict=True
            ):
                assert (gemm.weights, gemm.block_scales, gemm.expert_scales) == (codes[0], scales[0], factors[0])
            continue
        *_, of_x, both, combine = made
        assert combine["kernel"] == "combine_bf16"
        assert sum("round" in launch["kernel"] for launch in made) == (mode != "a16")
        kernels.add(both["kernel"])
        (pair,) = parameters_of(both)
        p, q = pair.up, pair.down
        rows = layer["intermediate"] * (2 if "_gated_" in both["kernel"] else 1), layer["hidden"]
        assert (pair.tiles, pair.row_counts) == (p.tiles, 0) and (p.rows, q.rows) == rows
        assert (p.out, q.x, q.out) == (ranges["hidden"], ranges["hidden"], ranges["rows"])
        assert q.schedule_is_older and p.schedule_is_older == (mode != "a16")
        for gemm, (codes, scales, factors) in zip((p, q), result["packed"], strict=True):
            assert (gemm.weights, gemm.block_scales, gemm.expert_scales) == (codes[0], scales[0], factors[0])
        if mode == "a16":
            assert p.x == call["x"] and p.row_divisor == 4 and p.out_global_scales == 0
            assert "x_rounded" not in ranges
            continue
        (r,) = parameters_of(of_x)
        # GEMM1 rounds its own output.
        assert of_x["kernel"] == "round_rows_nvfp4"
        assert 0 != p.out_global_scales != r.global_scales != 0 and q.out_global_scales == 0
        assert (r.x, r.scales, r.columns) == (call["x"], call["scale"], layer["hidden"])
        assert p.x == r.out and r.tile_rows >= 16 and p.slot_of_place == ranges["slot_of_place"]
        assert r.x_is_older == (r.tiles == 0)
        # A row is rounded for each of its slots only if experts have numbers of their own. It then lies where GEMM2
        # writes it later; otherwise it has room of its own.
        if mode == "each":
            assert (r.tiles, r.slot_of_place, r.row_divisor) == (p.tiles, p.slot_of_place, 4)
            assert (r.by_place, p.row_divisor, r.out) == (True, 0, ranges["rows"])
        else:
            assert (r.tiles, r.rows, r.by_place, p.row_divisor, r.out) == (0, count, False, 4, ranges["x_rounded"])
    assert all(name.startswith("grouped_gemm_nvfp4_sm90_") for name in kernels) and len(kernels) >= 2


@pytest.mark.parametrize("rounded", [False, True], ids=["w4a16", "w4a4"])
def test_rows_in_expert_order(rounded: bool, driver: Path, tmp_path: Path) -> None:
    layer = {"experts": 16, "hidden": 1024, "intermediate": 304}
    given = {**layer, "format": "nvfp4-a4" if rounded else "nvfp4", "rooms": [(1, 1), (128, 1), (128, 128), (512, 30)]}
    result = execute(driver, tmp_path, "expert_order_calls", given)
    tiles = {}
    for call in result["calls"]:
        made, addresses, (base, size) = launches(call["records"]), call["addresses"], call["workspace"]
        names = [re.sub(r"_(gated|plain)_.*", "", launch["kernel"]) for launch in made]
        gemm = "grouped_gemm_nvfp4_sm90"
        # The launch of both GEMMs finds the tiles of masked rows itself; the launch that rounds x needs a schedule.
        alone = call["masked"] and not rounded
        assert names == ["schedule", *["round_rows_nvfp4"] * rounded, gemm][alone:] and call["returned"]
        parameters = [parameters_of(launch)[0] for launch in made]
        pair = parameters[-1]
        schedule, up, down = parameters[0], pair.up, pair.down
        if alone:
            assert (schedule.row_counts, schedule.rows_each, schedule.tiles) == (addresses["counts"], call["m"], 0)
        else:
            assert (pair.row_counts, pair.tiles) == (0, schedule.tiles)
        found = [re.search(r"_t(\d+)_", launch["kernel"]) for launch in made if gemm in launch["kernel"]]
        tile = schedule.tile_tokens
        assert {int(match.group(1)) for match in found} == {tile}
        tiles[call["masked"], call["m"], call["expected"]] = tile
        assert (up.slot_of_place, up.row_divisor, down.slot_of_place, down.row_divisor) == (0, 1, 0, 1)
        assert down.out == addresses["out"] and up.out == down.x and down.schedule_is_older
        assert base <= up.out and up.out + 2 * math.prod((16, call["m"], 304)) <= base + size
        if not rounded:
            assert up.x == addresses["x"] and not up.schedule_is_older and up.out_global_scales == 0
            continue
        r = parameters[1]
        # GEMM2 writes where rounded x lies, each row after GEMM1 has read it.
        assert (r.x, r.out, up.x) == (addresses["x"], addresses["out"], addresses["out"]) and up.schedule_is_older
        assert (r.tiles, r.tile_count, r.tile_rows) == (up.tiles, up.tile_count, schedule.tile_tokens)
        assert (r.scales, r.slot_of_place, r.row_divisor, r.by_place) == (0, 0, 1, False)
        assert 0 != up.out_global_scales != r.global_scales != 0 and down.out_global_scales == 0
    assert tiles[True, 128, 1] < tiles[True, 512, 30] < tiles[True, 128, 128]


def test_what_is_refused(driver: Path, tmp_path: Path) -> None:
    said = execute(driver, tmp_path, "refused_nvfp4", {})
    assert said["right"] is said["explain"] is said["explain-a4"] is None
    assert said["f16"].startswith('NotImplementedError: dtype: "f16" for nvfp4 experts on cuda:0; supported there')
    assert "expected one number, [4] or [4, 2] (gate, up), got shape [4, 3]" in said["shape"]
    assert "w2_global_scale: is on cuda:1, but w13 is on cuda:0" in said["device"]
    assert "w2_global_scale: expected a float32" in said["dtype"]
