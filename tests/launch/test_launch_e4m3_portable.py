"""The driver calls of e4m3, MXFP8 and NVFP4 experts on the kernels for any GPU (see test_launch.py)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from fake_cuda.harness import asked, execute, launches, named, parameters_of, planned
from test_launch import settings_of

LAYERS = [
    {"experts": 128, "hidden": 2048, "intermediate": 768},
    {"experts": 5, "hidden": 384, "intermediate": 640},
]
TOKENS = [1, 7, 64, 300, 2000]


@pytest.fixture(params=[80, 90, 100, 120], ids=lambda capability: f"sm_{capability}")
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Returns settings of the driver; Hopper's have OXMOE_PORTABLE=1."""
    monkeypatch.setenv("OXMOE_PORTABLE", "1")
    return settings_of(request.param)


layers = pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: str(layer["hidden"]))


def stages_of(call: dict[str, Any], gpu: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, int], int]:
    """Returns a call's launches, which are those that `explain` prints, its ranges, and the place of GEMM1."""
    made = launches(call["records"])
    found = re.findall(r"^ +(\d+) \+ \d+ +(\w+)$", call["explain"], re.MULTILINE)
    ranges = {name: call["workspace"] + int(offset) for offset, name in found}
    assert {record["call"] for record in call["records"]} <= {"cuLaunchKernelEx", "cuCtxSetCurrent"}
    assert [asked(launch) for launch in made] == planned(call["explain"])
    for launch in made:
        assert launch["pdl"] == (gpu["cc"] >= 90) and not launch["cooperative"]
        assert launch["shared"] <= min(gpu["shared"], launch["shared_limit"])
    return made, ranges, next(i for i, launch in enumerate(made) if launch["kernel"].startswith("grouped_gemm"))


@layers
def test_fp8_block(layer: dict[str, Any], gpu: dict[str, Any], driver: Path, tmp_path: Path) -> None:
    result = execute(driver, tmp_path, "fp8_calls", {**layer, "top_k": 4, "tokens": TOKENS}, **gpu)
    experts, hidden, intermediate = layer["experts"], layer["hidden"], layer["intermediate"]
    assert not named(result["load"], "cuTensorMapEncodeTiled")
    kernels = set()
    for call in result["calls"]:
        made, ranges, place = stages_of(call, gpu)
        quantize, up, requantize, down, combine = made[place - 1 :]
        assert (quantize["kernel"], requantize["kernel"]) == ("quantize_fp8", "quantize_fp8")
        assert combine["kernel"] == "combine_bf16"
        kernels |= {up["kernel"], down["kernel"]}
        (of_x,), (p,), (of_hidden,), (q,) = (parameters_of(launch) for launch in (quantize, up, requantize, down))
        assert (of_x.x, of_x.codes, of_x.scales) == (call["x"], ranges["x_codes"], ranges["x_scales"])
        assert (of_hidden.x, of_hidden.codes) == (ranges["hidden"], ranges["hidden_codes"])
        assert of_hidden.scales == ranges["hidden_scales"]
        assert (of_hidden.rows, of_hidden.row_count) == (4 * call["tokens"], ranges["offsets"] + 4 * experts)
        assert (p.x, p.x_scales, p.out, p.out_scales) == (
            ranges["x_codes"], ranges["x_scales"], ranges["hidden"], 0,
        )  # fmt: skip
        assert (q.x, q.x_scales, q.out, q.out_scales) == (
            ranges["hidden_codes"], ranges["hidden_scales"], ranges["rows"], 0,
        )  # fmt: skip
        # Kernels count pairs of elements.
        assert (p.k, q.k, p.rows, q.rows) == (hidden // 2, intermediate // 2, 2 * intermediate, hidden)
        assert (p.out_columns, q.out_columns, p.row_divisor, q.slot_of_place) == (intermediate, hidden, 4, 0)
        for gemm, name in ((p, "w13"), (q, "w2")):
            assert gemm.weights == result["addresses"][name]
            assert gemm.block_scales == result["addresses"][f"{name}_scale"]
        (*_, route) = parameters_of(made[place - 2])
        assert f"_t{64 if route.tile_tokens > 16 else 16}_" in up["kernel"]
    forms = {re.sub(r"_r128.*", "", name) for name in kernels}
    assert forms == {f"grouped_gemm_fp8_portable_{form}_t{t}" for form in ("gated", "plain") for t in (16, 64)}


@pytest.mark.parametrize("mode", ["tensor", "token", "static"])
@layers
def test_fp8_tensor(layer: dict[str, Any], mode: str, gpu: dict[str, Any], driver: Path, tmp_path: Path) -> None:
    """The GEMMs are those of block scales. In front of each are the launches that find the scales of activations."""
    arguments = {**layer, "top_k": 4, "tokens": TOKENS, "mode": mode}
    result = execute(driver, tmp_path, "fp8_tensor_calls", arguments, **gpu)
    quantisers = {"tensor": ["quantize_fp8_peak", "quantize_fp8"], "token": ["quantize_fp8_rows"]}

    def expected(rows: int, columns: int) -> list[str]:
        if mode == "tensor" and rows * columns <= 1 << 14:
            return ["quantize_fp8_rows"]  # one CTA
        return quantisers.get(mode, ["quantize_fp8"])

    for call in result["calls"]:
        made, ranges, place = stages_of(call, gpu)
        names, tokens = [launch["kernel"] for launch in made], call["tokens"]
        of_x, of_hidden = expected(tokens, layer["hidden"]), expected(4 * tokens, layer["intermediate"])
        down = place + 1 + len(of_hidden)
        assert names[place - len(of_x) : place] == of_x and names[place + 1 : down] == of_hidden
        assert names[down].startswith("grouped_gemm_fp8_portable_plain") and len(names) == down + 2
        (*_, route) = parameters_of(made[place - len(of_x) - 1])
        assert (route.counters, route.counter_count) == (ranges["counters"], 4 if mode == "tensor" else 2)
        (p,), (q,) = parameters_of(made[place]), parameters_of(made[down])
        assert (p.out, p.x, p.x_scales) == (ranges["hidden"], ranges["x_codes"], ranges["x_scales"])
        assert (q.x, q.x_scales) == (ranges["hidden_codes"], ranges["hidden_scales"])
        tables = (result["addresses"]["w13_scale"], result["addresses"]["w2_scale"])
        assert (p.block_scales, q.block_scales) == tables


def test_fp8_of_cut_blocks(gpu: dict[str, Any], driver: Path, tmp_path: Path) -> None:
    """Weights and the numbers of their rows stay as they are. Rows between the GEMMs and scales of blocks are whole
    blocks."""
    layer = {"experts": 128, "hidden": 4096, "intermediate": 704}
    asks = {"top_k": 4, "tokens": TOKENS, "mode": "token", "of_rows": True, "bias": True}
    result = execute(driver, tmp_path, "fp8_tensor_calls", {**layer, **asks}, **gpu)
    addresses = result["addresses"]
    assert result["shapes"] == {
        "w13_scale": [128, 1408],
        "w2_scale": [128, 4096],
        "b13": [128, 1408],
        "b2": [128, 4096],
    }
    assert not named(result["load"], "cuTensorMapEncodeTiled")
    for call in result["calls"]:
        made, ranges, place = stages_of(call, gpu)
        (p,), (of_hidden,), (q,) = map(parameters_of, made[place : place + 3])
        assert (p.rows, p.out_columns, p.k, p.out) == (1408, 704, 2048, ranges["hidden"])
        assert (q.rows, q.out_columns, q.k, q.x) == (4096, 4096, 352, ranges["hidden_codes"])
        assert (of_hidden.columns, of_hidden.row_stride, of_hidden.group_stride) == (768, 6, 1)
        assert (p.expert_scales, p.bias) == (addresses["w13_scale"], addresses["b13"])
        assert (p.weights, q.weights) == (addresses["w13"], addresses["w2"])


@pytest.mark.parametrize("form", ["rows", "columns", "packed"])
def test_quantised_tokens(form: str, gpu: dict[str, Any], driver: Path, tmp_path: Path) -> None:
    call = execute(driver, tmp_path, "fp8_tokens", {"tokens": 33, "form": form}, **gpu)
    made, ranges, place = stages_of_tokens(call)
    (p,) = parameters_of(made[place])
    assert p.x == call["x"] and p.k == 192
    assert p.x_scales == (call["scale"] if form == "rows" else ranges["x_scales"])
    assert (made[place - 1]["kernel"] == "expand_scales") == (form != "rows")


def stages_of_tokens(call: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, int], int]:
    """Returns what `stages_of` does, for a call whose plan is not that of bf16 tokens."""
    made = launches(call["records"])
    found = re.findall(r"^ +(\d+) \+ \d+ +(\w+)$", call["explain"], re.MULTILINE)
    ranges = {name: call["workspace"] + int(offset) for offset, name in found}
    return made, ranges, next(i for i, m in enumerate(made) if m["kernel"].startswith("grouped_gemm_fp8_portable"))


@pytest.mark.parametrize("quantised", [False, True], ids=["numbers", "codes"])
@layers
def test_rows_in_expert_order(
    layer: dict[str, Any], quantised: bool, gpu: dict[str, Any], driver: Path, tmp_path: Path
) -> None:
    rooms = [(1, 1), (128, 8), (128, 128), (1024, 1024)]
    arguments = {**layer, "format": "fp8_block", "rooms": rooms, "quantised": quantised}
    result = execute(driver, tmp_path, "expert_order_calls", arguments, **gpu)
    for call in result["calls"]:
        schedule, *of_x, up, of_hidden, down = launches(call["records"])
        assert [launch["kernel"] for launch in of_x] == ([] if quantised else ["quantize_fp8_tiles"])
        assert of_hidden["kernel"] == "quantize_fp8_tiles"
        (s,), (p,), (h,), (q,) = (parameters_of(launch) for launch in (schedule, up, of_hidden, down))
        assert up["kernel"].startswith(f"grouped_gemm_fp8_portable_gated_t{64 if s.tile_tokens > 16 else 16}_")
        assert (p.tiles, h.tiles, q.tiles, h.tile_rows) == (s.tiles, s.tiles, s.tiles, s.tile_tokens)
        assert (h.x, q.x, q.x_scales) == (p.out, h.codes, h.scales) and q.out == call["addresses"]["out"]
        if quantised:
            assert (p.x, p.x_scales) == (call["addresses"]["x"], call["addresses"]["x_scale"])


@pytest.mark.parametrize("mode", ["", "-token", "-static"])
def test_one_scale_rows_in_expert_order(mode: str, gpu: dict[str, Any], driver: Path, tmp_path: Path) -> None:
    """Launches that find scales of a whole call are in front of those that use them."""
    arguments = {**LAYERS[1], "format": f"fp8_tensor{mode}", "rooms": [(128, 8), (1024, 1024)], "quantised": False}
    result = execute(driver, tmp_path, "expert_order_calls", arguments, **gpu)
    tiles = "quantize_fp8_tiles"
    between = {"": ["quantize_fp8_tile_peak", tiles], "-token": ["quantize_fp8_tile_rows"], "-static": [tiles]}[mode]
    for call in result["calls"]:
        made = launches(call["records"])
        gemms = [launch for launch in made if launch["kernel"].startswith("grouped_gemm_fp8_portable")]
        names = [launch["kernel"] for launch in made if launch not in gemms]
        assert names == ["schedule", *between, *between] and made[-1] is gemms[1] and call["returned"]
        (s,), (p,), (q,) = (parameters_of(launch) for launch in (made[0], *gemms))
        (x,), (hidden,) = (parameters_of(made[made.index(gemm) - 1]) for gemm in gemms)
        assert (x.x, x.tiles, x.tile_rows) == (call["addresses"]["x"], s.tiles, s.tile_tokens)
        assert (p.x, p.x_scales, q.x, q.x_scales) == (x.codes, x.scales, hidden.codes, hidden.scales)
        assert hidden.x == p.out and q.out == call["addresses"]["out"]


@layers
def test_mxfp8_rows_in_expert_order(layer: dict[str, Any], gpu: dict[str, Any], driver: Path, tmp_path: Path) -> None:
    arguments = {**layer, "format": "mxfp8", "rooms": [(1, 1), (128, 8), (1024, 1024)], "quantised": False}
    result = execute(driver, tmp_path, "expert_order_calls", arguments, **gpu)
    for call in result["calls"]:
        schedule, of_x, up, of_hidden, down = launches(call["records"])
        assert (of_x["kernel"], of_hidden["kernel"]) == ("round_tiles_mxfp8_portable",) * 2
        assert up["kernel"].startswith("grouped_gemm_mxfp8_portable_gated")
        (s,), (x,), (p,), (h,), (q,) = (parameters_of(made) for made in (schedule, of_x, up, of_hidden, down))
        assert (x.rows.x, x.rows.out, x.rows.columns) == (call["addresses"]["x"], p.x, layer["hidden"])
        assert (h.rows.x, h.rows.out, h.rows.columns) == (p.out, q.x, layer["intermediate"]) and q.x == p.out
        assert p.x == q.out == call["addresses"]["out"]
        for rounded in (x, h):
            assert (rounded.rows.tiles, rounded.tile_rows) == (s.tiles, s.tile_tokens)


@layers
def test_mxfp8(layer: dict[str, Any], gpu: dict[str, Any], driver: Path, tmp_path: Path) -> None:
    """x is rounded before GEMM1, and GEMM1's output in place after it; one tile serves every schedule."""
    arguments = {**layer, "top_k": 4, "tokens": TOKENS, "in_place": True}
    result = execute(driver, tmp_path, "mxfp8_calls", arguments, **gpu)
    assert {launch["kernel"] for launch in launches(result["load"])} == {"mxfp8_peak", "mxfp8_pack"}
    for call in result["calls"]:
        made, ranges, place = stages_of(call, gpu)
        of_x, up, of_hidden, down, combine = made[place - 1 :]
        assert (of_x["kernel"], of_hidden["kernel"]) == ("round_rows_mxfp8", "round_rows_mxfp8")
        names = [f"grouped_gemm_mxfp8_portable_{form}_t64_r128_w4_s3" for form in ("gated", "plain")]
        assert [up["kernel"], down["kernel"], combine["kernel"]] == [*names, "combine_bf16"]
        (r,), (p,), (h,), (q,) = (parameters_of(launch) for launch in (of_x, up, of_hidden, down))
        assert (r.x, r.out, r.rows, r.columns) == (call["x"], ranges["x_rounded"], call["tokens"], layer["hidden"])
        assert (h.x, h.out, h.rows) == (ranges["hidden"], ranges["hidden"], 4 * call["tokens"])
        assert h.columns == layer["intermediate"]
        assert (p.x, p.out, q.x, q.out) == (ranges["x_rounded"], ranges["hidden"], ranges["hidden"], ranges["rows"])
        assert (p.k, q.k) == (layer["hidden"], layer["intermediate"])
        for gemm, (codes, scales, factors) in zip((p, q), result["packed"], strict=True):
            assert (gemm.weights, gemm.block_scales, gemm.expert_scales) == (codes[0], scales[0], factors[0])


@pytest.mark.parametrize("mode", ["a16", "one", "each", "codes"])
@pytest.mark.parametrize("size", [(2048, 768), (208, 80)], ids=str)
def test_nvfp4(mode: str, size: tuple[int, int], gpu: dict[str, Any], driver: Path, tmp_path: Path) -> None:
    """x is rounded before GEMM1, unless it comes as codes; GEMM1's output is rounded in place after it."""
    hidden, intermediate = size
    arguments = {"experts": 16, "hidden": hidden, "intermediate": intermediate, "top_k": 4, "mode": mode}
    result = execute(driver, tmp_path, "nvfp4_calls", {**arguments, "tokens": TOKENS}, **gpu)
    assert [launch["kernel"] for launch in launches(result["load"])] == ["nvfp4_pack"] * 2
    for call in result["calls"]:
        made, ranges, place = stages_of(call, gpu)
        up, down = (launch for launch in made if launch["kernel"].startswith("grouped_gemm"))
        names = [f"grouped_gemm_nvfp4_portable_{form}_t64_r128_w4_s3" for form in ("gated", "plain")]
        assert [up["kernel"], down["kernel"], made[-1]["kernel"]] == [*names, "combine_bf16"]
        (p,), (q,) = parameters_of(up), parameters_of(down)
        assert (p.out, q.x, q.out) == (ranges["hidden"], ranges["hidden"], ranges["rows"])
        assert (p.k, q.k, p.rows, q.rows) == (hidden, intermediate, 2 * intermediate, hidden)
        for gemm, (codes, scales, factors) in zip((p, q), result["packed"], strict=True):
            assert (gemm.weights, gemm.block_scales, gemm.expert_scales) == (codes[0], scales[0], factors[0])
        rounds = [launch for launch in made if launch["kernel"] == "round_rows_nvfp4_portable"]
        if mode == "a16":
            assert not rounds and p.x == call["x"]
            continue
        of_x, of_hidden = rounds
        assert made[place - 1 : place + 3] == [of_x, up, of_hidden, down]
        (r,), (h,) = parameters_of(of_x), parameters_of(of_hidden)
        room = ranges["rows" if mode == "each" else "x_rounded"]
        assert (r.x, r.out, p.x, r.by_place, p.row_divisor) == (
            call["x"],
            room,
            room,
            False,
            1 if mode == "each" else 4,
        )
        assert p.out_global_scales == 0
        assert (h.x, h.out, h.tile_rows) == (ranges["hidden"], ranges["hidden"], r.tile_rows)


@pytest.mark.parametrize("rounded", [False, True], ids=["w4a16", "w4a4"])
def test_nvfp4_rows_in_expert_order(rounded: bool, gpu: dict[str, Any], driver: Path, tmp_path: Path) -> None:
    arguments = {"experts": 16, "hidden": 1024, "intermediate": 304, "format": "nvfp4-a4" if rounded else "nvfp4"}
    rooms = [(1, 1), (128, 1), (128, 128), (512, 30)]
    result = execute(driver, tmp_path, "expert_order_calls", {**arguments, "rooms": rooms}, **gpu)
    for call in result["calls"]:
        made = launches(call["records"])
        names = [re.sub(r"_(gated|plain)_.*", "", launch["kernel"]) for launch in made]
        gemm, between = "grouped_gemm_nvfp4_portable", ["round_rows_nvfp4_portable"] * rounded
        assert names == ["schedule", *between, gemm, *between, gemm] and call["returned"]
        schedule, up, down = (parameters_of(made[i])[0] for i in (0, 1 + rounded, -1))
        assert schedule.tile_tokens <= 64 and down.out == call["addresses"]["out"] and up.out == down.x
        assert up.x == call["addresses"]["out" if rounded else "x"]
        for launch in made[1::2] if rounded else []:
            (r,) = parameters_of(launch)
            assert (r.tiles, r.tile_count, r.tile_rows) == (up.tiles, up.tile_count, schedule.tile_tokens)
