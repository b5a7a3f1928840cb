"""Contents of a row of a result file: the median of several runs with their spread, and where they were taken."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import re
import statistics
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import oxmoe
from oxmoe import __main__, testing
from oxmoe.tools.bench import allreduce, layers, machine, masked, overhead, report, timing
from oxmoe.tools.bench.timing import Protocol, Times, fields

UUID = "GPU-12345678-1234-1234-1234-123456789abc"
CLOCKS = {
    "sm_mhz": 1755,
    "sm_max_mhz": 1980,
    "memory_mhz": 3201,
    "power_w": 612.5,
    "power_limit_w": 700.0,
    "temperature_c": 61,
}
RESULTS = Path(__file__).parents[2] / "benches" / "results"


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(layers.SHAPES, "small", layers.Shape(4, 2, 128, 128))
    monkeypatch.setitem(masked.LAYERS, "few", masked.Layer(4, 2, 2, 128, 128))
    wall_time_us = timing.wall_time_us
    monkeypatch.setattr(timing, "wall_time_us", lambda call: wall_time_us(call, seconds=0.0))


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("arguments", "samples"),
    [
        (["--shapes", "small", "--tokens", "1,9", "--peers", "torch-loop"], 5),
        (["--layout", "masked", "--shapes", "few", "--tokens", "3", "--format", "bf16,fp8-block"], 5),
        (["--overhead"], 50),
    ],
)
def test_rows_of_a_run_on_cpu(
    tmp_path: Path, arguments: list[str], samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overhead, "TINY", layers.Shape(2, 2, 64, 64))
    path = tmp_path / "rows.jsonl"
    assert __main__.main(["bench", "--device", "cpu", *arguments, "--json", str(path)]) == 0
    rows = rows_of(path)
    assert rows
    for row in rows:
        assert 0 < row["us_min"] <= row["us"] <= row["us_max"], row
        assert row["samples"] == samples
        assert row["commit"] == oxmoe.device_info()["commit"] and row["oxmoe"] == oxmoe.__version__
        assert row["gpu"] is None and row["driver"] is None and row["clocks"] is None
        assert row["torch"] == torch.__version__ and row["threads"] > 0
        assert row["cpu"] and row["command"] and row["date"]
    assert any(row["us_min"] < row["us_max"] for row in rows)


def test_commit_is_a_commit() -> None:
    commit = oxmoe.device_info()["commit"]
    assert commit is None or re.fullmatch(r"[0-9a-f]{7,40}(-dirty)?", commit)


def test_a_time_is_its_median() -> None:
    times = Times([9.0, 1.0, 2.0, 8.0, 3.0], CLOCKS)
    assert times == 3.0 and f"{times:.1f}" == "3.0"
    assert fields(times) == {"us": 3.0, "us_min": 1.0, "us_max": 9.0, "samples": 5, "clocks": CLOCKS}
    assert fields(4.0) == {"us": 4.0, "us_min": 4.0, "us_max": 4.0, "samples": 1, "clocks": None}


def test_wall_clock_keeps_every_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs take 7, 1, 5, 2 and 3 us: the median is 3, which is neither the first, the least nor the mean."""
    readings = iter([0.0, *(t for start, us in enumerate((7, 1, 5, 2, 3)) for t in (start, start + us * 1e-6)), 9.0])
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: next(readings)))
    times = timing.wall_time_us(lambda: None, seconds=0.0)
    assert [round(us) for us in times.samples] == [7, 1, 5, 2, 3] and round(times) == 3


class Graph:
    """A GraphClock whose replays take given times, one list a round, after one that is not counted."""

    def __init__(self, given: list[list[float]]) -> None:
        self.given, self.warm, self.sustained = iter(given), False, 0.0

    def replay_for(self, seconds: float) -> None:
        self.sustained += seconds

    def times_us(self, replays: int) -> list[float]:
        self.warm = not self.warm
        if self.warm:
            assert replays == 1
            return [1000.0]
        times = next(self.given)
        assert len(times) == replays
        return times


def test_times_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("no compiler")

    graphs = {"ours": Graph([[5.0, 4.0, 90.0], [1.0, 6.0, 7.0]]), "peer": Graph([[8.0, 9.0, 2.0], [8.0, 9.0, 9.0]])}
    order: list[str] = []

    def clock(calls: list[Any]) -> Graph:
        calls[0]()
        order.append(calls[0].__name__)
        return graphs[calls[0].__name__]

    def ours() -> None: ...
    def peer() -> None: ...

    readings = iter([{**CLOCKS, "sm_mhz": mhz} for mhz in (1, 2, 3, 4)])
    monkeypatch.setattr(timing, "GraphClock", clock)
    monkeypatch.setattr(timing, "clocks", lambda device: next(readings))
    calls = {"ours": [ours], "peer": [peer], "broken": [broken]}
    times, failed = timing.times_us(calls, "cuda", Protocol(3, 2, 3, 0.5), ours="ours")
    assert failed == {"broken": "RuntimeError: no compiler"} and order == ["ours", "peer"]
    assert times == {"ours": 5.5, "peer": 8.5}
    assert fields(times["ours"]) == {
        **{"us": 5.5, "us_min": 1.0, "us_max": 90.0, "samples": 6},
        "clocks": {**CLOCKS, "sm_mhz": 3},
    }
    assert fields(times["peer"])["clocks"]["sm_mhz"] == 4
    assert graphs["ours"].sustained == graphs["peer"].sustained == 1.0


def test_time_of_a_graph_is_divided_by_its_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    class Event:
        def __init__(self, enable_timing: bool) -> None: ...

        def record(self) -> None: ...

        def synchronize(self) -> None: ...

        def elapsed_time(self, end: Event) -> float:
            return 0.6  # ms

    monkeypatch.setattr(torch.cuda, "Event", Event)
    clock = testing.GraphClock.__new__(testing.GraphClock)
    clock.count, clock.graph, clock._eviction = 4, SimpleNamespace(replay=lambda: None), torch.ones(2)
    assert clock.times_us(2) == pytest.approx([150.0, 150.0])
    assert clock._eviction.tolist() == [0.0, 0.0]


def test_the_slowest_rank_counts() -> None:
    """The row has the slowest rank's own median and spread, not those of other runs, and not the single slowest run."""
    times = allreduce.slowest([[1.0, 2.0, 50.0], [4.0, 3.0, 5.0], [2.0, 2.0, 2.0]], CLOCKS)
    assert times == 4.0 and times.samples == (4.0, 3.0, 5.0) and times.clocks == CLOCKS


def cell(**times: float) -> report.Cell:
    return report.Cell("moe", "small", "bf16", "uniform", 4, 10.0, times)


@pytest.mark.usefixtures("small")
def test_the_best_peer_is_the_fastest(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    made = cell(oxmoe=20.0, slow=90.0, fast=30.0, middle=60.0)
    assert made.best_peer == 30.0 and cell(oxmoe=20.0).best_peer is None
    output = report.Report(["slow", "fast", "middle"], {}, str(tmp_path / "rows.jsonl"))
    output.add(made)
    assert capsys.readouterr().out.splitlines()[-1].split()[-1] == "1.50"


def test_the_best_peer_of_rows_in_expert_order(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(masked.LAYERS, "few", masked.Layer(4, 2, 2, 128, 128))
    bench = masked._Bench("cpu", Protocol(1, 1, 0, 0.0), [], {}, None)
    rows = SimpleNamespace(x=torch.zeros(4, 3, 128), counts=torch.ones(4))
    times = {"oxmoe": 20.0, "slow": 90.0, "fast": 30.0}
    bench.report("few", "bf16", "case", [rows], None, times, {})  # type: ignore[list-item]
    assert capsys.readouterr().out.splitlines()[-1].split(" | ")[-1] == "1.50 |"


def row(backend: str, us: float, tokens: int = 1, **more: Any) -> dict[str, Any]:
    common = {"op": "moe", "shape": "a", "format": "bf16", "floor_us": 10.0, "date": "2026-11-25T00:00:00+00:00"}
    return {**common, "tokens": tokens, "backend": backend, "us": us, **more}


def test_table_of_rows_with_and_without_a_spread() -> None:
    where = {"gpu": "NVIDIA H200", "cpu": "avx2", "driver": "580.95", "torch": "2.11", "commit": "abc"}
    old = [row("oxmoe", 12.0), row("sglang-triton", 30.0), row("torch-loop", 15.0)]
    table = report.markdown(old)
    assert table.splitlines()[2].endswith("| 1.25 |") and table.endswith("Slower than the best peer in 0 of 1 cells.")
    new = [row("oxmoe", 20.0, 8, us_min=19.0, us_max=21.5, **where), row("sglang-triton", 10.0, 8)]
    table = report.markdown([*old, *new])
    assert "a M=8 (100.0 %)." in table
    assert table.endswith(
        "Times of one row lie within 12.5 % of its median (oxmoe, a bf16 M=8). "
        "Measured on NVIDIA H200, driver 580.95, torch 2.11, commit abc, 2026-11-25."
    )


def test_recorded_results_are_still_read() -> None:
    # Rows of dense MXFP8 and of NVFP4's quantiser have other fields, and no table is made of them.
    files = sorted(str(path) for path in RESULTS.glob("*.jsonl") if '"op": ' in path.read_text().split("\n")[0])
    assert len(files) >= 6
    rows = [row for row in report.read_json(files) if row.get("op") == "moe"]
    assert len(rows) > 100 and report.markdown(rows).count("\n") > 50


def test_recorded_results_name_their_run() -> None:
    """There is one file for each GPU and topic, or a topic on CPUs. A row's run, with its date, stands in one file
    only."""
    runs: dict[str, str] = {}
    for path in sorted(RESULTS.iterdir()):
        assert re.fullmatch(r"(h\d00_[a-z0-9_]+|[a-z0-9]+_cpu)\.jsonl", path.name), path.name
        for line in path.read_text(encoding="utf-8").splitlines():
            run = json.loads(line)["run"]
            assert re.fullmatch(r"[a-z0-9_]+_\d{4}-\d\d-\d\d(_[a-z0-9_]+)?", run), (path.name, run)
            assert runs.setdefault(run, path.name) == path.name, run
    assert len(runs) > 50


@pytest.mark.parametrize(
    ("format_name", "passes", "fails"),
    [
        ("mxfp4-a8", 3e-2, 6e-2),
        ("fp8_tensor", 3e-2, 6e-2),
        ("fp8_tensor-token", 3e-2, 6e-2),
        ("fp8_tensor-static", 3e-2, 6e-2),
        ("nvfp4-a4", 2e-1, 4e-1),
    ],
)
def test_bar_of_quantised_activations(format_name: str, passes: float, fails: float, rng: torch.Generator) -> None:
    truth = torch.randn(16, 256, generator=rng, device=rng.device)
    off = torch.randn(16, 256, generator=rng, device=rng.device)
    off *= truth.norm() / off.norm()
    assert layers.error(truth + passes * off, truth, format_name) is None
    assert "relative norm" in (layers.error(truth + fails * off, truth, format_name) or "")


@pytest.mark.parametrize("format_name", ["bf16", "mxfp4", "nvfp4", "fp8_block", "mxfp8"])
def test_bar_in_ulps(format_name: str, rng: torch.Generator) -> None:
    truth = torch.randn(16, 256, generator=rng, device=rng.device).bfloat16()
    assert layers.error(truth.clone(), truth, format_name) is None
    ulps = testing.ulp(truth, torch.bfloat16)
    # Every element four ulps off is more than the allowed share; one element far off is too far.
    assert "beyond" in (layers.error((truth.double() + 4 * ulps).bfloat16(), truth, format_name) or "")
    far = truth.clone()
    far[0, 0] += 100 * testing.ulp(truth.abs().amax(), torch.bfloat16).bfloat16()
    assert "ulp at (0, 0)" in (layers.error(far, truth, format_name) or "")


def test_bar_of_peers(rng: torch.Generator) -> None:
    truth = torch.randn(16, 256, generator=rng, device=rng.device)
    assert layers.peer_error(1.015 * truth, truth) is None
    assert layers.peer_error(1.03 * truth, truth) == "computes something else: relative norm 0.03"


class Library:
    """The calls of libnvidia-ml that the bench makes, with the answers of CLOCKS; the GPU does not support
    `without`."""

    def __init__(self, without: tuple[str, ...] = (), status: int = 0) -> None:
        self.without, self.status = without, status

    def nvmlInit_v2(self) -> int:
        return self.status

    def nvmlSystemGetDriverVersion(self, text: Any, size: int) -> int:
        text.value = b"580.95.05"
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, device: Any) -> int:
        device._obj.value = 77
        return 0 if uuid == UUID.encode() else 6

    def _answer(self, name: str, device: ctypes.c_void_p, answer: Any, value: float) -> int:
        assert device.value == 77
        answer._obj.value = int(value)
        return 3 if name in self.without else 0

    def nvmlDeviceGetClockInfo(self, device: Any, kind: int, answer: Any) -> int:
        return self._answer("clock", device, answer, {1: CLOCKS["sm_mhz"], 2: CLOCKS["memory_mhz"]}[kind])

    def nvmlDeviceGetMaxClockInfo(self, device: Any, kind: int, answer: Any) -> int:
        assert kind == 1
        return self._answer("most", device, answer, CLOCKS["sm_max_mhz"])

    def nvmlDeviceGetPowerUsage(self, device: Any, answer: Any) -> int:
        return self._answer("power", device, answer, 1000 * CLOCKS["power_w"])

    def nvmlDeviceGetEnforcedPowerLimit(self, device: Any, answer: Any) -> int:
        return self._answer("limit", device, answer, 1000 * CLOCKS["power_limit_w"])

    def nvmlDeviceGetTemperature(self, device: Any, kind: int, answer: Any) -> int:
        assert kind == 0
        return self._answer("heat", device, answer, CLOCKS["temperature_c"])


def test_what_the_driver_says(monkeypatch: pytest.MonkeyPatch) -> None:
    library = machine.Nvml(Library())
    assert library.driver() == "580.95.05" and library.clocks(UUID) == CLOCKS
    assert library.clocks("GPU-of-somebody-else") is None
    assert machine.Nvml(Library(without=("power", "limit"))).clocks(UUID) == {
        **CLOCKS,
        **{"power_w": None, "power_limit_w": None},
    }
    with pytest.raises(OSError, match="nvmlInit_v2 gave 9"):
        machine.Nvml(Library(status=9))
    monkeypatch.setattr(machine, "nvml", lambda: library)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda *device: SimpleNamespace(uuid=UUID.removeprefix("GPU-"))
    )
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *device: "NVIDIA H200")
    assert machine.clocks("cuda") == CLOCKS and machine.clocks("cpu") is None
    said = machine.environment("cuda")
    assert said["driver"] == "580.95.05" and said["gpu"] == "NVIDIA H200"


def test_no_library_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(machine.ctypes, "CDLL", missing)
    assert machine.nvml.__wrapped__() is None
    monkeypatch.setattr(machine, "nvml", lambda: None)
    assert machine.clocks("cuda") is None


def script(name: str) -> ModuleType:
    path = RESULTS.parent / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["dense_mxfp8", "nvfp4_quantize"])
def test_rows_of_the_scripts(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    module, times = script(name), Times([3.0, 9.0, 4.0], CLOCKS)
    measured = {"mm_mxfp8": times, "mxfp8_linear": times, "cublas_bf16": times} if name == "dense_mxfp8" else times
    monkeypatch.setattr(module, "measure", lambda *arguments: (2.0, measured))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *device: "NVIDIA H200")
    monkeypatch.setattr(machine, "nvml", lambda: machine.Nvml(Library()))
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--json"])
    module.main()
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()[1:]]
    assert rows
    for row in rows:
        assert (row["us_min"], row["us"], row["us_max"], row["samples"]) == (3.0, 4.0, 9.0, 3)
        assert row["clocks"] == CLOCKS and row["driver"] == "580.95.05" and "commit" in row and row["floor_us"] == 2.0
    assert statistics.mean(row["us"] for row in rows) == 4.0
