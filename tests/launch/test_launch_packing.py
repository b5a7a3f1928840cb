"""The driver calls of MXFP4 weights and experts: launches that convert, pack and multiply, parameters, copies (see
test_launch.py)."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from fake_cuda.harness import asked, execute, launches, named, parameters_of, planned

STREAM = 0x1234
LAYOUTS = {"gate_up": 0, "up_gate": 1, "interleaved": 2}


pytestmark = pytest.mark.usefixtures("kernels_for_hopper")


def up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def grid(experts: int, rows: int, k: int) -> int:
    return experts * (up(rows, 64) // 64) * (up(k, 256) // 256)


def made(records: list[dict[str, Any]], kernel: str) -> list[tuple[dict[str, Any], Any]]:
    found = [launch for launch in launches(records) if launch["kernel"] == kernel]
    for launch in found:
        assert launch["stream"] == STREAM and launch["cluster"] == [1, 1, 1] and launch["shared"] == 0
    return [(launch, *parameters_of(launch)) for launch in found]


@pytest.mark.parametrize(
    "layer",
    [
        {"experts": 32, "hidden": 2880, "intermediate": 2880, "layout": "interleaved"},
        {"experts": 5, "hidden": 90, "columns": 192, "intermediate": 96, "layout": "up_gate"},
        {"experts": 3, "hidden": 96, "intermediate": 704, "gated": False, "activation": "relu2"},
    ],
    ids=lambda layer: str(layer["hidden"]),
)
def test_experts(layer: dict[str, Any], driver: Path, tmp_path: Path) -> None:
    result = execute(driver, tmp_path, "packed_experts", layer)
    given, experts, gated = result["addresses"], layer["experts"], layer.get("gated", True)
    hidden, intermediate = layer["hidden"], layer["intermediate"]
    columns, rows = layer.get("columns", hidden), intermediate * (2 if gated else 1)
    peaks, packs = made(result["records"], "mxfp4_peak"), made(result["records"], "mxfp4_pack")
    assert len(peaks) == len(packs) == 2 and not made(result["records"], "mxfp4_scale_bytes")
    order = [launch["kernel"] for launch in launches(result["records"])]
    assert order == ["mxfp4_peak", "mxfp4_pack"] * 2 and not named(result["records"], "cuMemcpyDtoDAsync")
    # Each matrix: name, rows, used rows, columns, k, gated.
    matrices = (("w13", rows, rows, columns, hidden, gated), ("w2", columns, hidden, intermediate, intermediate, False))
    for peak, pack, matrix, packed in zip(peaks, packs, matrices, result["packed"], strict=True):
        name, rows_held, used, held, k, pairs = matrix
        assert peak[0]["grid"][0] == experts and peak[0]["block"][0] == 1024
        assert pack[0]["grid"][0] == grid(experts, rows_held, k) and pack[0]["block"][0] == 512
        tiles, blocks = up(rows_held, 64) // 64, up(k, 64) // 64
        assert [shape for _, shape in packed] == [
            [experts, tiles, blocks, 2048],
            [experts, tiles, blocks, 128],
            [experts],
        ]
        for p in (peak[1], pack[1]):
            assert (p.codes, p.scales, p.row_blocks) == (given[name], given[f"{name}_scale"], held // 32)
            assert (p.experts, p.rows, p.used_rows, p.k) == (experts, rows_held, used, k)
            assert p.gated == pairs and p.layout == LAYOUTS[layer.get("layout", "gate_up")]
            assert p.expert_scales == packed[2][0]
        assert (pack[1].packed_codes, pack[1].packed_scales) == (packed[0][0], packed[1][0])


def test_experts_in_place(driver: Path, tmp_path: Path) -> None:
    """Parts have up to 32 MiB of codes: w13 of three experts at a time, the last part smaller; all of w2 at once."""
    layer = {"experts": 8, "hidden": 2880, "intermediate": 2880, "in_place": True}
    result = execute(driver, tmp_path, "packed_experts", layer)
    given = result["addresses"]
    packs, copies = made(result["records"], "mxfp4_pack"), named(result["records"], "cuMemcpyDtoDAsync")
    peaks = made(result["records"], "mxfp4_peak")
    codes, scales = 5760 * 1440, 5760 * 90
    parts = [("w13", 0, 4, codes, scales), ("w13", 4, 4, codes, scales), ("w2", 0, 8, codes // 2, scales // 2)]
    assert len(packs) == len(parts) and len(copies) == 2 * len(parts) and all(c["stream"] == STREAM for c in copies)
    for (name, first, count, code_bytes, scale_bytes), (launch, p), (of_codes, of_scales) in zip(
        parts, packs, zip(copies[::2], copies[1::2], strict=True), strict=True
    ):
        at, scale_at = given[name] + first * code_bytes, given[f"{name}_scale"] + first * scale_bytes
        assert (of_codes["from"], of_codes["bytes"]) == (at, count * code_bytes)
        assert (of_scales["from"], of_scales["bytes"]) == (scale_at, count * scale_bytes)
        assert (p.codes, p.scales) == (of_codes["to"], of_scales["to"])
        assert (p.packed_codes, p.packed_scales, p.experts) == (at, scale_at, count)
        peak = peaks[name == "w2"][1]
        assert p.expert_scales == peak.expert_scales + 4 * first and peak.experts == 8 and peak.codes == given[name]
        assert launch["grid"][0] == grid(count, p.rows, p.k)
    calls = [r for r in result["records"] if r["call"] in ("cuLaunchKernelEx", "cuMemcpyDtoDAsync")]
    order = [record.get("kernel", "copy") for record in calls]
    part = ["copy", "copy", "mxfp4_pack"]
    assert order == ["mxfp4_peak", *part, *part, "mxfp4_peak", *part]
    for packed, name in zip(result["packed"], ("w13", "w2"), strict=True):
        assert [address for address, _ in packed[:2]] == [given[name], given[f"{name}_scale"]]


def test_scales_as_fp32(driver: Path, tmp_path: Path) -> None:
    layer = {"experts": 3, "hidden": 96, "intermediate": 64, "scale_dtype": "float32"}
    result = execute(driver, tmp_path, "packed_experts", layer)
    converted, packs = made(result["records"], "mxfp4_scale_bytes"), made(result["records"], "mxfp4_pack")
    for (launch, p), (_, pack), name, count in zip(
        converted, packs, ("w13_scale", "w2_scale"), (3 * 128 * 3, 3 * 96 * 2), strict=True
    ):
        assert (p.scales, p.count, p.bytes) == (result["addresses"][name], count, pack.scales)
        assert p.first_wrong and launch["grid"][0] == up(count, 256) // 256 and launch["block"][0] == 256


def test_functions(driver: Path, tmp_path: Path) -> None:
    result = execute(driver, tmp_path, "packed_functions", {"rows": 96, "columns": 352})
    codes, scales, *packed, back_codes, back_scales = result["addresses"]
    assert result["shapes"] == [[3, 2, 2, 6, 2048], [3, 2, 2, 6, 128], [3, 2], [3, 2, 96, 176], [3, 2, 96, 11]]
    ((peak, p),), ((pack, q),) = made(result["records"], "mxfp4_peak"), made(result["records"], "mxfp4_pack")
    ((unpack, r),) = made(result["records"], "mxfp4_unpack")
    assert peak["grid"][0] == 6 and pack["grid"][0] == unpack["grid"][0] == grid(6, 96, 352)
    for params, checkpoint in ((p, (codes, scales)), (q, (codes, scales)), (r, (back_codes, back_scales))):
        assert (params.codes, params.scales) == checkpoint
        assert [params.packed_codes, params.packed_scales, params.expert_scales] == packed
        assert (params.experts, params.rows, params.used_rows, params.k, params.row_blocks) == (6, 96, 96, 352, 11)
        assert params.gated and params.layout == LAYOUTS["up_gate"]


def test_layouts(driver: Path, tmp_path: Path) -> None:
    rows, columns, matrices = 704, 2944, 6
    results = execute(driver, tmp_path, "layouts", {"rows": rows, "columns": columns, "num_warps": 4})
    # A form: (rows, bytes of a row) of codes and scales in the layout, rows of the scales' bands, the layout's number.
    hopper = ((768, 1472), (up(rows, 128), 92), 128, 0)
    forms = [hopper] * 2 + [((rows, 1472), (rows, 92), rows, 1)] * 2 + [((rows, 1472), (rows, 92), 64, 2)] * 2
    shapes = [
        [[4 * 1472, 768 // 4], [32 * 92, up(rows, 128) // 32]],
        [[rows, 1472], [rows, 92]],
        [[rows, 1472], [92 // 4, 4 * rows]],
        [[rows, 1472], [rows, 92]],
        [[rows, 1472], [rows // 64, 92 // 4, 16, 16]],
        [[rows, 1472], [rows, 92]],
    ]
    for i, ((addresses, got, records), (codes, scales, band, layout)) in enumerate(zip(results, forms, strict=True)):
        assert got == [[3, 2, *shape] for shape in shapes[i]]
        back = "_back" if i % 2 else ""
        made_of = made(records, f"mxfp4_layout_codes{back}"), made(records, f"mxfp4_layout_scales{back}")
        assert len(launches(records)) == 2
        for j, (((launch, p),), held, band_rows, threads) in enumerate(
            zip(made_of, (codes, scales), (16, band), (8 * 1472 // 32, band * 92 // 4), strict=True)
        ):
            assert launch["block"][0] == 128
            assert launch["grid"][0] == matrices * (held[0] // band_rows) * (up(threads, 128) // 128)
            assert (p.input, p.output) == (addresses[j], addresses[2 + j])
            assert (p.rows, p.columns) == (rows, (1472, 92)[j])
            assert ((p.held_rows, p.held_columns), p.band_rows, p.layout) == (held, band_rows, layout)


@pytest.mark.parametrize("rounding", ["up", "down"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_quantize(dtype: str, rounding: str, driver: Path, tmp_path: Path) -> None:
    arguments = {"shape": [3, 97, 2880], "dtype": dtype, "rounding": rounding}
    result = execute(driver, tmp_path, "quantized", arguments)
    x, codes, scales, back = result["addresses"]
    assert result["shapes"] == [[3, 97, 1440], [3, 97, 90], [3, 97, 2880]] and len(launches(result["records"])) == 2
    ((there, p),), ((again, q),) = (
        made(result["records"], "mxfp4_quantize"),
        made(result["records"], "mxfp4_dequantize"),
    )
    blocks = 3 * 97 * 90
    assert (p.numbers, q.numbers, p.up) == (x, back, rounding == "up")
    for launch, params in ((there, p), (again, q)):
        assert (params.codes, params.scales, params.blocks) == (codes, scales, blocks)
        assert params.dtype == ["float32", "float16", "bfloat16"].index(dtype)
        assert launch["grid"][0] == up(blocks, 128) // 128 and launch["block"][0] == 256


def test_nothing_is_launched_for_nothing(driver: Path, tmp_path: Path) -> None:
    arguments = {"shape": [3, 0, 64], "dtype": "bfloat16", "rounding": "up"}
    assert not launches(execute(driver, tmp_path, "quantized", arguments)["records"])
    for _, _, records in execute(driver, tmp_path, "layouts", {"rows": 0, "columns": 128}):
        assert not launches(records)


LAYERS = [
    {"experts": 32, "top_k": 4, "hidden": 2880, "intermediate": 2880, "layout": "interleaved", "bias": "bfloat16"},
    {"experts": 4, "top_k": 2, "hidden": 96, "intermediate": 288, "layout": "up_gate", "bias": "float16"},
    {"experts": 64, "top_k": 4, "hidden": 3264, "intermediate": 96},
    {"experts": 4, "top_k": 2, "hidden": 352, "intermediate": 320, "gated": False, "activation": "relu2"},
    {"experts": 4, "top_k": 2, "hidden": 2888, "columns": 2944, "intermediate": 704, "bias": "float32"},
    {"experts": 4, "top_k": 2, "hidden": 700, "columns": 704, "intermediate": 352, "bias": "float16"},
    {"experts": 4, "top_k": 2, "hidden": 7, "columns": 32, "intermediate": 32},
]
BIAS_DTYPES = {"float32": 0, "float16": 1, "bfloat16": 2}


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: str(layer["hidden"]))
def test_calls(layer: dict[str, Any], driver: Path, tmp_path: Path) -> None:
    """Hopper has its own kernels if hidden_size is a multiple of 8, among them one for a token or two. Otherwise the
    portable kernel runs. All kernels read the packed weights."""
    result = execute(driver, tmp_path, "packed_calls", {**layer, "tokens": [1, 2, 8, 64, 300, 2000]})
    hidden, intermediate = layer["hidden"], layer["intermediate"]
    up_rows, down_rows = intermediate * (2 if layer.get("gated", True) else 1), layer.get("columns", hidden)
    kernel = "grouped_gemm_mxfp4_" + ("portable" if hidden % 8 else "sm90")
    assert not named(result["load"], "cuTensorMapEncodeTiled")
    for call in result["calls"]:
        made = launches(call["records"])
        assert {record["call"] for record in call["records"]} <= {"cuLaunchKernelEx", "cuCtxSetCurrent"}
        if call["explain"] is not None:
            assert [asked(launch) for launch in made] == planned(call["explain"])
        assert all(launch["stream"] == STREAM for launch in made)
        form = "gated" if layer.get("gated", True) else "plain"
        if call["tokens"] <= 2 and hidden % 8 == 0:
            (one,) = made
            assert one["kernel"] == f"routed_layer_mxfp4_sm90_{form}_e128" and one["cooperative"] and one["pdl"]
            (together,) = parameters_of(one)
            p, q, c = together.layer.up, together.layer.down, together.layer.combine
            assert (together.experts, together.select.tokens) == (layer["experts"], call["tokens"])
        elif hidden % 8 == 0:
            *routing, both, combine = made
            assert routing and both["kernel"].startswith(f"{kernel}_{form}_") and not both["cooperative"]
            (pair,), (c,) = (parameters_of(launch) for launch in (both, combine))
            p, q = pair.up, pair.down
            assert (pair.tiles, pair.row_counts, p.schedule_is_older) == (p.tiles, 0, False) and p.next_unit
            assert pair.wave == 132
            assert combine["kernel"] == "combine_bf16"
        else:
            *routing, up, down, combine = made
            assert routing and combine["kernel"] == "combine_bf16"
            assert up["kernel"].startswith(f"{kernel}_{form}_") and down["kernel"].startswith(f"{kernel}_plain_")
            assert up["kernel"].endswith("_v1") and down["kernel"].endswith("_v8")
            (p,), (q,), (c,) = (parameters_of(launch) for launch in (up, down, combine))
        assert (p.x, p.out, q.out, c.out) == (call["x"], q.x, c.y, call["out"])
        assert (p.rows, p.k, p.out_columns) == (up_rows, hidden, intermediate)
        assert (q.rows, q.k, q.out_columns) == (down_rows, intermediate, hidden)
        for gemm, packed, bias in ((p, result["packed"][0], "b13"), (q, result["packed"][1], "b2")):
            assert [gemm.weights, gemm.block_scales, gemm.expert_scales] == packed
            assert gemm.bias == result["addresses"].get(bias, 0)
            assert gemm.bias_dtype == BIAS_DTYPES[layer.get("bias", "bfloat16")]
        assert p.layout == LAYOUTS[layer.get("layout", "gate_up")]


E4M3_LAYERS = [
    {"experts": 32, "top_k": 4, "hidden": 2880, "intermediate": 2880, "layout": "interleaved", "bias": "bfloat16"},
    {"experts": 4, "top_k": 2, "hidden": 96, "intermediate": 288, "layout": "up_gate"},
    {"experts": 4, "top_k": 1, "hidden": 8, "columns": 32, "intermediate": 32},
]


@pytest.mark.parametrize("layer", E4M3_LAYERS, ids=lambda layer: str(layer["hidden"]))
def test_calls_with_e4m3_activations(layer: dict[str, Any], driver: Path, tmp_path: Path) -> None:
    """Quantisation, GEMM1, quantisation, GEMM2 run in this order. Each reads what the one before wrote, inside the
    workspace."""
    arguments = {**layer, "activation_dtype": "float8_e4m3fn", "tokens": [1, 8, 64, 300, 2000]}
    result = execute(driver, tmp_path, "packed_calls", arguments)
    hidden, intermediate, top_k = layer["hidden"], layer["intermediate"], layer["top_k"]
    packs = [p for _, p in made(result["load"], "mxfp4_peak") + made(result["load"], "mxfp4_pack")]
    assert len(packs) == 4 and all(p.e4m3 for p in packs) and [p.k for p in packs[:2]] == [hidden, intermediate]
    for call in result["calls"]:
        launched, (start, room), tokens = launches(call["records"]), call["workspace"], call["tokens"]
        assert {record["call"] for record in call["records"]} <= {"cuLaunchKernelEx", "cuCtxSetCurrent"}
        if call["explain"] is not None:
            assert [asked(launch) for launch in launched] == planned(call["explain"])
        *routing, quantize_x, up_gemm, quantize_h, down_gemm, combine = launched
        assert routing and combine["kernel"] == "combine_bf16" and all(one["pdl"] for one in launched)
        assert quantize_x["kernel"] == quantize_h["kernel"] == "quantize_rows_e4m3"
        assert up_gemm["kernel"].startswith("grouped_gemm_mxfp4_e4m3_sm90_gated_")
        assert down_gemm["kernel"].startswith("grouped_gemm_mxfp4_e4m3_sm90_plain_")
        of_x, p, of_h, q, c = (parameters_of(one)[0] for one in launched[len(routing) :])
        assert (of_x.x, p.x, of_h.x, q.x, q.out, c.out) == (call["x"], of_x.out, p.out, of_h.out, c.y, call["out"])
        assert (of_x.rows, of_x.columns, of_x.tiles) == (tokens, hidden, 0)
        assert (of_x.x_is_older, of_h.x_is_older) == (True, False)
        assert (of_h.rows, of_h.columns, of_h.tiles) == (tokens * top_k, intermediate, p.tiles)
        assert of_h.tile_count == p.tile_count and p.schedule_is_older and q.schedule_is_older
        for quantize, gemm, columns in ((of_x, p, hidden), (of_h, q, intermediate)):
            assert quantize.out_columns == 2 * gemm.k == up(columns, 64) and quantize.scales == gemm.row_scales
            for address, size in (
                (quantize.out, quantize.rows * up(columns, 64)),
                (quantize.scales, 4 * quantize.rows),
            ):
                assert address % 256 == 0 and start <= address and address + size <= start + room
        # Ranges that are written while something is read lie elsewhere.
        ranges = [(of_h.out, of_h.rows * of_h.out_columns), (q.out, of_h.rows * hidden * 2)]
        ranges += [(of_h.scales, of_h.rows * 4), (p.out, of_h.rows * intermediate * 2), (of_x.out, tokens)]
        (h, h_size), (y, y_size), (s, s_size), (g, g_size), (x, _) = ranges
        in_order = sorted([(h, h_size), (y, y_size), (s, s_size), (g, g_size)])
        assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(in_order))
        assert x == y, "x in e4m3 is where GEMM2's output will be"
        for (
            gemm,
            packed,
        ) in ((p, result["packed"][0]), (q, result["packed"][1])):
            assert [gemm.weights, gemm.block_scales, gemm.expert_scales] == packed


def test_rows(driver: Path, tmp_path: Path) -> None:
    result = execute(driver, tmp_path, "quantized_rows", {"shape": [3, 70, 2880]})
    ((launch, p),) = made(result["records"], "quantize_rows_e4m3")
    assert [p.x, p.out, p.scales] == result["addresses"] and result["shapes"] == [[3, 70, 2880], [3, 70]]
    assert (p.rows, p.columns, p.out_columns, p.tiles) == (210, 2880, 2880, 0)
    assert launch["grid"][0] == 210 and launch["block"][0] == 128
    assert not launches(execute(driver, tmp_path, "quantized_rows", {"shape": [0, 64]})["records"])


def test_refusals(driver: Path, tmp_path: Path) -> None:
    said = execute(driver, tmp_path, "refused_mxfp4", {})
    assert said["e4m3"] is None and said["rows"] is None
    message = "NotImplementedError: activation_dtype float8_e4m3fn for mxfp4 experts with hidden 60, intermediate 64"
    assert said["e4m3 columns"].startswith(message + " on sm_90; supported: sm_90 with a hidden size")
    other = execute(driver, tmp_path, "refused_mxfp4", {}, cc=100, sms=148, shared=227 * 1024)
    assert "on sm_100; supported: sm_90" in other["e4m3"]
    assert other["rows"] == "NotImplementedError: rows_e4m3 on sm_100; supported: sm_90 and CPU tensors"
    assert said["dtype"].startswith('NotImplementedError: dtype: "f16" for mxfp4 experts on cuda:0; supported')
    assert said["bare"].startswith("NotImplementedError: mxfp4 experts on cuda:0 as bare tensors; supported")
    assert said["in_place"].startswith("ValueError: w13: in_place needs rows and columns that are multiples of 64")
    assert said["vectors"].startswith("ValueError: codes: must start at a multiple of 16 bytes")
    assert said["numbers"].startswith("ValueError: x: must start at a multiple of 16 bytes")
    message = "ValueError: expected matrices whose bands have up to 2^31 parts, got 4294967296 rows"
    assert said["bands"].startswith(message)
    assert said["overlap"] == "ValueError: w13: overlaps w13_scale"
