"""`python -m oxmoe bench` and `python -m oxmoe doctor`: their output, files and exit status."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import oxmoe
import oxmoe.sglang
import oxmoe.sglang.platform
from oxmoe import __main__
from oxmoe.testing import assert_close_ulp
from oxmoe.tools import doctor
from oxmoe.tools.bench import layers, report
from oxmoe.tools.bench.backend import Oxmoe
from oxmoe.tools.bench.flashinfer import sort_tokens, tactics
from oxmoe.tools.bench.flashinfer_cutlass import aligned, padded, up_gate
from oxmoe.tools.bench.machine import without_paths
from oxmoe.tools.bench.peers import PEERS

SHAPE = layers.Shape(experts=6, top_k=2, hidden=128, intermediate=96)
GPT_OSS = layers.Shape(experts=6, top_k=2, hidden=128, intermediate=96, gpt_oss=True)
CLAMPED = layers.Shape(experts=6, top_k=2, hidden=128, intermediate=96, limit=0.5)
KINDS = pytest.mark.parametrize("shape", [SHAPE, GPT_OSS, CLAMPED], ids=["swiglu", "gpt-oss", "clamped"])
FORMATS = pytest.mark.parametrize("format_name", ["bf16", "mxfp4"])


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(layers.SHAPES, "tiny", SHAPE)
    return "tiny"


def package(path: Path, name: str, *modules: str, requires: str | None = None) -> None:
    (path / name).mkdir()
    for module in ("__init__", *modules):
        (path / name / f"{module}.py").touch()
    if requires is not None:
        (path / f"{name}-1.0.dist-info").mkdir()
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Dist: {requires}\n"
        (path / f"{name}-1.0.dist-info" / "METADATA").write_text(metadata)


# bench


def test_bench_writes_a_row_for_each_backend(
    tiny: str, device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.jsonl"
    arguments = ["bench", "--shapes", tiny, "--tokens", "1,5", "--device", device, "--json", str(path)]
    arguments += ["--peers", "torch-loop,torch-grouped-mm"]
    assert __main__.main(arguments) == 0
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    ours = [row for row in rows if row["backend"] == "oxmoe"]
    assert [(row["tokens"], row["experts"], row["format"]) for row in ours] == [(1, 6, "bf16"), (5, 6, "bf16")]
    assert {row["backend"] for row in rows} == {"oxmoe", "torch-loop" if device == "cpu" else "torch-grouped-mm"}
    assert all(row["us"] > 0 and row["torch"] == torch.__version__ and row["oxmoe"] for row in rows)
    assert all(row["pattern"] == "uniform" and row["rounds"] == (1 if device == "cpu" else 3) for row in rows)
    assert "skipped torch-" in capsys.readouterr().out


def test_bench_of_fp8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.jsonl"
    monkeypatch.setitem(layers.SHAPES, "blocks", layers.Shape(4, 2, 256, 128))
    formats = ["fp8_block", "fp8_tensor", "fp8_tensor-token", "fp8_tensor-static"]
    arguments = ["bench", "--shapes", "blocks", "--tokens", "1,9", "--format", ",".join(formats)]
    assert __main__.main([*arguments, "--peers", "torch-loop", "--device", "cpu", "--json", str(path)]) == 0
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    cells = [(row["backend"], row["format"], row["tokens"]) for row in rows]
    assert cells == [("oxmoe", name, tokens) for name in formats for tokens in (1, 9)]


def test_bench_of_mxfp4(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.jsonl"
    arguments = ["bench", "--shapes", tiny, "--tokens", "3", "--format", "mxfp4", "--peers", "torch-loop"]
    assert __main__.main([*arguments, "--device", "cpu", "--json", str(path)]) == 0
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["backend"], row["format"]) for row in rows] == [("oxmoe", "mxfp4"), ("torch-loop", "mxfp4")]
    monkeypatch.setattr(oxmoe, "device_info", lambda: {"formats": {"bf16": ["cuda", "cpu"], "mxfp4": ["cpu"]}})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(SystemExit, match="2"):
        __main__.main([*arguments, "--device", "cuda"])
    assert "bench: format mxfp4 runs on cpu, not on cuda" in capsys.readouterr().err


def test_bench_of_e4m3_activations(tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.jsonl"
    arguments = ["bench", "--shapes", tiny, "--tokens", "9", "--device", "cpu"]
    assert __main__.main([*arguments, "--format", "mxfp4-a8", "--json", str(path)]) == 0
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["backend"], row["format"]) for row in rows] == [("oxmoe", "mxfp4-a8")]
    assert "has no mxfp4-a8 weights" in capsys.readouterr().out
    assert __main__.main([*arguments, "--format", "bf16,mxfp4,mxfp4-a8", "--distance"]) == 0
    lines = [line.split("|") for line in capsys.readouterr().out.splitlines()[2:]]
    errors = {(line[3].strip(), line[4].strip()): float(line[5]) for line in lines}
    assert len(errors) == 6
    for (_, format_name), error in errors.items():
        assert 1e-2 < error < 0.1 if format_name == "mxfp4-a8" else 0 < error < 5e-3


def test_distance_of_every_format(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(layers.SHAPES, "blocks", dataclasses.replace(SHAPE, hidden=256, intermediate=128))
    arguments = ["bench", "--shapes", "blocks", "--tokens", "5", "--device", "cpu", "--distance"]
    assert __main__.main([*arguments, "--format", ",".join(layers.FORMATS)]) == 0
    lines = [line.split("|") for line in capsys.readouterr().out.splitlines()[2:]]
    errors = {(line[3].strip(), line[4].strip()): float(line[5]) for line in lines}
    assert {name for _, name in errors} == set(layers.FORMATS) and len(errors) == 2 * len(layers.FORMATS)
    # Given scales were made for other numbers, so they clip some.
    given = {"nvfp4-a4", "fp8_tensor-static"}
    assert all(0 < error < (2 if name in given else 0.15) for (_, name), error in errors.items()), errors


def test_bench_of_one_scale_with_columns_that_end_inside_a_block(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(layers.SHAPES, "cut", dataclasses.replace(SHAPE, hidden=256, intermediate=176))
    names = ["fp8_tensor", "fp8_tensor-token", "fp8_tensor-static"]
    arguments = ["bench", "--shapes", "cut", "--tokens", "5", "--device", "cpu", "--format", ",".join(names)]
    assert __main__.main([*arguments, "--peers", "none"]) == 0
    assert "WRONG" not in capsys.readouterr().out
    assert __main__.main([*arguments, "--distance"]) == 0
    errors = [float(line.split("|")[5]) for line in capsys.readouterr().out.splitlines()[2:]]
    assert len(errors) == 6 and all(0 < error < 2 for error in errors)


def test_bench_times_no_wrong_result(
    tiny: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Oxmoe, "calls", lambda self, inputs: [lambda: torch.zeros_like(inputs[0].x)])
    assert __main__.main(["bench", "--shapes", tiny, "--tokens", "3", "--device", "cpu", "--peers", "none"]) == 1
    assert "WRONG tiny bf16 uniform M=3, not timed: " in capsys.readouterr().out


def test_bench_times_no_peer_that_computes_something_else(
    tiny: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    loop = PEERS["torch-loop"]
    monkeypatch.setattr(loop, "calls", lambda self, inputs: [lambda: torch.zeros_like(inputs[0].x)])
    arguments = ["bench", "--shapes", tiny, "--tokens", "3", "--device", "cpu", "--peers", "torch-loop"]
    assert __main__.main([*arguments, "--pattern", "one,hot"]) == 0
    said = capsys.readouterr().out
    assert "skipped torch-loop at tiny bf16 one M=3: computes something else: relative norm 1" in said


def test_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = {"op": "moe", "shape": "a", "format": "bf16", "floor_us": 10.0, "date": "today"}
    rows = [
        {**common, "tokens": 1, "backend": "torch-loop", "us": 1.0, "date": "yesterday"},
        {**common, "tokens": 1, "backend": "oxmoe", "us": 99.0, "date": "yesterday"},
        {**common, "tokens": 1, "backend": "oxmoe", "us": 12.0},
        {**common, "tokens": 1, "backend": "sglang-triton", "us": 15.0},
        {**common, "tokens": 8, "backend": "oxmoe", "us": 20.0, "pattern": "uniform"},
        {**common, "tokens": 8, "backend": "flashinfer-cutedsl", "us": 16.0, "excludes": "routing"},
        {"op": "overhead", "us": 1.0},
    ]
    path = tmp_path / "rows.jsonl"
    report.append_json(str(path), rows)
    assert __main__.main(["bench", "--table", str(path)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "| layer | M | oxmoe | floor | x floor | sglang-triton | flashinfer-cutedsl (no routing) | best peer / oxmoe |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        "| a | 1 | **12.0** | 10.0 | 1.20 | 15.0 |  | 1.25 |",
        "| a | 8 | 20.0 | 10.0 | 2.00 |  | **16.0** | 0.80 |",
        "",
        "Slower than the best peer in 1 of 2 cells: a M=8 (25.0 %).",
    ]


def test_runs_of_one_file(tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--run names the rows that --json appends, and --table prints only those of the run that it names."""
    path = str(tmp_path / "rows.jsonl")
    for name, tokens in (("first", "3"), ("second", "5")):
        arguments = ["bench", "--shapes", tiny, "--tokens", tokens, "--device", "cpu", "--peers", "none"]
        assert __main__.main([*arguments, "--json", path, "--run", name]) == 0
    assert [(row["run"], row["tokens"]) for row in report.read_json([path])] == [("first", 3), ("second", 5)]
    capsys.readouterr()
    for name, tokens in (("first", 3), ("second", 5)):
        assert __main__.main(["bench", "--table", path, "--run", name]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[2].startswith(f"| {tiny} | {tokens} | ") and lines[3] == ""
    with pytest.raises(SystemExit, match="2"):
        __main__.main(["bench", "--table", path, "--run", "third"])
    assert f"--run: no row of {path} has run third; known: first, second" in capsys.readouterr().err


def test_bench_records_its_command_without_paths() -> None:
    arguments = ["bench", "--json", "/some/where", "--tokens", "1", "--plot=/else/where", "--layers", "2"]
    assert without_paths(arguments) == ["bench", "--tokens", "1", "--layers", "2"]


def test_flashinfer_tables_hold_every_slot_once() -> None:
    ids = torch.tensor([[3, 1], [3, 0], [3, 3], [1, 3]], dtype=torch.int32)
    for tile in (2, 4):
        tables = sort_tokens(ids, 5, tile)
        used = int(tables.tiles)
        assert int(tables.padded) == used * tile and tables.tile_experts.numel() * tile == tables.slots.numel()
        held = []
        for index, (expert, limit) in enumerate(
            zip(tables.tile_experts[:used], tables.tile_limits[:used], strict=True)
        ):
            slots = tables.slots[index * tile : int(limit)].long()
            assert 0 < slots.numel() <= tile and bool((ids.flatten()[slots] == expert).all())
            assert tables.places.flatten()[slots].tolist() == list(range(index * tile, int(limit)))
            held += slots.tolist()
        assert sorted(held) == list(range(8))
    assert all(tile == first[0][0] == second[0][0] for mean in (1, 50, 500) for tile, first, second in tactics(mean))


def test_weights_in_flashinfers_order() -> None:
    rows = torch.arange(2 * 6 * 3).view(2, 6, 3)
    for gate, up, interleaved in ((rows[:, 0::2], rows[:, 1::2], True), (rows[:, :3], rows[:, 3:], False)):
        halves = up_gate(rows, 4, 5, interleaved=interleaved)
        assert halves.shape == (2, 8, 5)
        assert torch.equal(halves[:, :4], padded(up, 4, 5)) and torch.equal(halves[:, 4:], padded(gate, 4, 5))
        assert torch.equal(halves[:, :3, :3], up) and not halves[:, 3].any() and not halves[..., 3:].any()
    assert [aligned(size) for size in (1, 128, 2880)] == [128, 128, 2944]


@pytest.mark.parametrize("shape", [GPT_OSS, CLAMPED, SHAPE], ids=["gpt-oss", "clamped", "swiglu"])
def test_operands_of_flashinfers_cutlass_moe(shape: layers.Shape, monkeypatch: pytest.MonkeyPatch) -> None:
    """oxmoe's own functions of the same meaning stand in flashinfer's place: the layer is the same, padded from 96 to
    128."""
    core = SimpleNamespace(
        interleave_moe_weights_for_sm90_mixed_gemm=lambda codes: oxmoe.quantize.interleave_sm90_mxfp4(
            codes, torch.zeros(*codes.shape[:2], codes.shape[2] // 16, dtype=torch.uint8), flashinfer="0.6"
        )[0],
        interleave_moe_scales_for_sm90_mixed_gemm=lambda scales: oxmoe.quantize.interleave_sm90_mxfp4(
            torch.zeros(*scales.shape[:2], scales.shape[2] * 16, dtype=torch.uint8), scales, flashinfer="0.6"
        )[1],
    )
    fused_moe = SimpleNamespace(core=core, cutlass_fused_moe=oxmoe.cutlass_fused_moe)
    for name, module in (
        ("flashinfer", SimpleNamespace()),
        ("flashinfer.autotuner", SimpleNamespace(autotune=contextlib.nullcontext)),
        ("flashinfer.fused_moe", fused_moe),
    ):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(ctypes, "CDLL", lambda *_: None)
    weights = layers.make_weights(shape, torch.bfloat16, "cpu", 2, mxfp4=True)
    inputs = layers.make_inputs(shape, 9, torch.bfloat16, "cpu", 2)
    calls = PEERS["flashinfer-cutlass"](shape, weights).calls(inputs)
    for call, weight, item in zip(calls, weights, inputs, strict=True):
        assert_close_ulp(call(), layers.expected(shape, weight, item))


def test_mxfp4_weights_are_expanded_on_demand() -> None:
    (weights,) = layers.make_weights(GPT_OSS, torch.bfloat16, "cpu", 1, mxfp4=True)
    dense = weights.dense()
    assert dense.w13.shape == weights.w13.shape == (6, 192, 128) and dense.w13.dtype == torch.bfloat16
    assert torch.equal(dense.w2[5], weights.w2[5]) and dense.dense() is dense and dense.b2 is weights.b2
    scale = (weights.w2.scales[3, 7, 2].double() - 127).exp2()
    first = dense.w2[3, 7, 64].double() / scale
    assert first.abs() == (0, 0.5, 1, 1.5, 2, 3, 4, 6)[int(weights.w2.codes[3, 7, 32]) & 7]


def test_bench_skips_peers_without_the_format(
    tiny: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(PEERS["torch-loop"], "formats", ("f16",))
    assert __main__.main(["bench", "--shapes", tiny, "--tokens", "1", "--device", "cpu", "--peers", "torch-loop"]) == 0
    assert "skipped torch-loop: has no bf16 weights" in capsys.readouterr().out


def test_bench_refuses_unknown_names(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        (["--peers", "vllm"], "unknown peer vllm; known: sglang-triton"),
        (["--shapes", "gpt"], r"unknown shape gpt; known: .*tiny"),
    ):
        with pytest.raises(SystemExit, match="2"):
            __main__.main(["bench", *arguments])
        assert re.search(message, capsys.readouterr().err)


def test_overhead(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.main(["bench", "--overhead", "--device", device]) == 0
    assert capsys.readouterr().out.count("us a call") == 4


# Peers that run on a CPU run there; the GPU's run says what is missing for a GPU.
PLACES = [(name, "cpu", ()) for name in PEERS if PEERS[name].missing("cpu") is None]
PLACES += [(name, "cuda", pytest.mark.gpu) for name in PEERS]


@pytest.mark.parametrize("pattern", layers.PATTERNS)
@KINDS
@pytest.mark.parametrize(
    ("name", "device", "format_name"),
    [
        pytest.param(name, device, format_name, id=f"{name}-{device}-{format_name}", marks=marks)
        for name, device, marks in PLACES
        for format_name in ("bf16", "mxfp4")
        if format_name in PEERS[name].formats
    ],
)
def test_peers_run_the_same_layer(name: str, device: str, format_name: str, shape: layers.Shape, pattern: str) -> None:
    reason = PEERS[name].missing(device)
    if reason is not None:
        pytest.skip(f"{name}: {reason}")
    if name == "triton_kernels" and pattern in ("given", "one", "grouped"):
        pytest.skip(f"{name} takes logits alone")
    weights = layers.make_weights(shape, torch.bfloat16, device, 2, mxfp4=format_name == "mxfp4")
    inputs = layers.make_inputs(shape, 9, torch.bfloat16, device, 2, pattern)
    backend = PEERS[name](shape, weights)
    for call, weight, item in zip(backend.calls(inputs), weights, inputs, strict=True):
        result, expected = call(), layers.expected(shape, weight, item)
        assert result.shape == expected.shape and result.dtype == expected.dtype
        assert not backend.same_layer() or layers.peer_error(result, expected) is None


@pytest.mark.parametrize("pattern", layers.PATTERNS)
@KINDS
@FORMATS
def test_ours_runs_the_same_layer(format_name: str, shape: layers.Shape, pattern: str, device: str) -> None:
    weights = layers.make_weights(shape, torch.bfloat16, device, 2, mxfp4=format_name == "mxfp4")
    inputs = layers.make_inputs(shape, 9, torch.bfloat16, device, 2, pattern)
    for call, weight, item in zip(Oxmoe(shape, weights).calls(inputs), weights, inputs, strict=True):
        assert_close_ulp(call(), layers.expected(shape, weight, item))


# doctor


def said(findings: Any) -> dict[str, str]:
    return {finding.name: finding.text for finding in findings}


def test_doctor(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv(oxmoe.sglang.SETTING, raising=False)
    assert __main__.main(["doctor"]) == 0
    lines = {line[:16].rstrip(): line[16:] for line in capsys.readouterr().out.splitlines()}
    assert lines["oxmoe"].startswith(oxmoe.__version__) and lines["driver"]
    assert lines["torch"].startswith(torch.__version__)
    assert lines["formats"].startswith("bf16, f16, mxfp4, fp8_block, mxfp4-a8, mxfp8, nvfp4, fp8_tensor, ")
    assert lines["formats"].endswith(", int4-zeros; on CPU also f32")
    assert lines["layer on cpu"].startswith("right, ")


INFO: dict[str, Any] = {
    **{"version": "1", "kernels": 3, "archs": ["90a"], "nvcc": "13.0", "formats": {}, "cpu": "avx2", "threads": 2},
    **{"driver": True, "driver_cuda": "13.0", "needed_cuda": "13.0"},
}


def gpus(*archs: str, **changes: Any) -> dict[str, Any]:
    named = [{"name": f"GPU {arch}", "arch": arch, "multiprocessors": 7, "kernels": True} for arch in archs]
    return INFO | {"gpus": named} | changes


def test_doctor_says_what_the_driver_speaks() -> None:
    too_old = "driver speaks CUDA 12.8; this build needs 13.0: driver 580 or newer, or the cuda-compat package"
    unusable = {"name": too_old, "arch": "not supported", "multiprocessors": 0, "kernels": False}
    for info, broken, text in (
        (gpus("sm_90"), False, "speaks CUDA 13.0; this build needs 13.0"),
        (gpus("sm_90", driver_cuda="13.10"), False, "speaks CUDA 13.10; this build needs 13.0"),
        (gpus(driver=False, driver_cuda=None), False, "none: CPU only"),
        (gpus(driver_cuda="12.8"), False, "speaks CUDA 12.8, no GPU"),
        (gpus(driver_cuda="12.8") | {"gpus": [unusable]}, True, too_old.removeprefix("driver ")),
    ):
        finding = doctor.driver(info)
        assert (finding.broken, finding.text) == (broken, text)
    findings = list(doctor.build_and_devices(gpus(driver_cuda="12.8") | {"gpus": [unusable]}))
    assert [(f.name, f.text) for f in findings if f.broken][1:] == [("gpu 0", too_old)]


def test_doctor_fails_where_the_driver_is_too_old(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    unusable = {"name": "driver speaks CUDA 12.8; ...", "arch": "not supported", "multiprocessors": 0, "kernels": False}
    monkeypatch.setattr(oxmoe, "device_info", lambda: gpus(driver_cuda="12.8") | {"gpus": [unusable]})
    for rest in ("torch_layers", "sglang", "peers"):
        monkeypatch.setattr(doctor, rest, lambda *_: [])
    assert __main__.main(["doctor"]) == 1
    assert "driver          BROKEN: speaks CUDA 12.8; ..." in capsys.readouterr().out


def test_doctor_fails_where_the_driver_does_not_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails() -> None:
        raise RuntimeError("cuInit: CUDA error CUDA_ERROR_SYSTEM_DRIVER_MISMATCH")

    monkeypatch.setattr(oxmoe, "device_info", fails)
    assert __main__.main(["doctor"]) == 1
    said = capsys.readouterr().out
    assert said.startswith("driver          BROKEN: cuInit: CUDA error CUDA_ERROR_SYSTEM_DRIVER_MISMATCH\n")
    assert "\nsgl_kernel" in said


def test_doctor_says_where_kernels_have_not_run() -> None:
    lines = said(doctor.build_and_devices(gpus("sm_90", "sm_100")))
    assert lines["gpu 0"] == "GPU sm_90, sm_90, 7 multiprocessors"
    expected = "oxmoe's kernels are compiled for sm_100 and have not run there: Hopper (sm_90) alone has run them"
    assert lines["gpu 1"] == f"GPU sm_100, sm_100, 7 multiprocessors; {expected}"


@pytest.mark.parametrize("broken", [[False, False], [False, True], [True, True]], ids=str)
def test_exit_status_of_doctor(
    broken: list[bool], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [doctor.Finding(f"thing {number}", "as it is", one) for number, one in enumerate(broken)]
    monkeypatch.setattr(doctor, "findings", lambda: iter(found))
    assert __main__.main(["doctor"]) == int(any(broken))
    lines = capsys.readouterr().out.splitlines()
    assert ["BROKEN: " in line for line in lines] == broken and all(line.endswith("as it is") for line in lines)


def test_doctor_says_that_a_layer_is_wrong(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv(oxmoe.sglang.SETTING, raising=False)
    right = oxmoe.moe
    monkeypatch.setattr(oxmoe, "moe", lambda *operands, **options: 1.1 * right(*operands, **options))
    assert __main__.main(["doctor"]) == 1
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("layer on cpu"))
    assert line[16:].startswith("BROKEN: AssertionError: result: ")


def test_doctor_fails_where_a_swap_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package(tmp_path, "sglang", requires="packaging")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv(oxmoe.sglang.SETTING, "moe")
    monkeypatch.setattr(oxmoe.sglang, "_active", {})
    monkeypatch.setattr(oxmoe.sglang, "sglang_version", lambda: "0.4.99")
    findings = list(doctor.sglang())
    assert said(findings)["sglang"].startswith("0.4.99, not served; served are 0.5.12.post1 to 0.5.23")
    (failed,) = (finding for finding in findings if finding.name == "taken over")
    assert failed.broken and "SGLang 0.4.99 is not served" in failed.text


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("SGLANG_PLUGINS", "SGLANG_PLUGINS=other leaves oxmoe out: add it, or unset it"),
        ("SGLANG_PLATFORM", "SGLANG_PLATFORM=other keeps SGLang from loading oxmoe, which is no platform: unset it"),
    ],
)
def test_doctor_sees_that_the_plugin_is_left_out(
    name: str, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package(tmp_path, "sglang")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(oxmoe.sglang, "sglang_version", lambda: "0.5.23")
    monkeypatch.setattr(oxmoe.sglang, "install", lambda: None)
    monkeypatch.setenv(oxmoe.sglang.SETTING, "moe")
    monkeypatch.setenv(name, "other")
    message += "; a server would start on SGLang's own kernels and say nothing"
    assert message in [finding.text for finding in doctor.sglang() if finding.broken]


def test_doctor_misses_what_an_all_reduce_needs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package(tmp_path, "sglang")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(oxmoe.sglang, "sglang_version", lambda: "0.5.23")
    monkeypatch.setattr(oxmoe.sglang, "install", lambda: None)
    monkeypatch.setattr(oxmoe.sglang.platform, "activate", lambda: None)
    monkeypatch.setattr(doctor, "find_spec", lambda name: None if name == "flashinfer" else object())
    monkeypatch.setenv(oxmoe.sglang.SETTING, "allreduce")
    assert "install flashinfer-python" in said(doctor.sglang())["allreduce"]


def test_doctor_tells_two_packages_of_one_name_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, modules in (("unrelated", ()), ("real", ("topk", "matmul_ogs"))):
        (tmp_path / name).mkdir()
        package(tmp_path / name, "triton_kernels", *modules)
        with monkeypatch.context() as patch:
            patch.syspath_prepend(tmp_path / name)
            patch.delitem(sys.modules, "triton_kernels", raising=False)
            text = said(doctor.peers())["triton_kernels"]
        assert ("another package" in text) == (name == "unrelated")


def test_doctor_names_what_a_half_installed_package_lacks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package(tmp_path, "halfway", requires="surely-absent>=1")
    monkeypatch.syspath_prepend(tmp_path)
    assert doctor._incomplete("halfway") == "; half installed, without surely-absent"
    assert doctor._incomplete("packaging") == ""
