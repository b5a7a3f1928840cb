"""Numbers that the bench makes of times and results: medians, microseconds of one layer, the best peer, its own bars.

The clocks are stand-ins with times that are written down, so these tests need no GPU.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from oxmoe import testing
from oxmoe.tools.bench import allreduce, floors, layers, masked, overhead, report, timing

# The median, the mean, the smallest and the largest differ.
TIMES = [7.0, 1.0, 2.0, 30.0, 3.0]
MEDIAN = 3.0


class FakeClock:
    """A perf_counter that a call moves on."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now

    def call(self, microseconds: list[float]) -> Callable[[], None]:
        """Takes these times one after the other, and the last one from then on."""
        left = iter(microseconds)
        last = microseconds[-1]

        def call() -> None:
            self.now += next(left, last) * 1e-6

        return call


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Stubs CUDA graphs and events; the returned list says how many milliseconds events are apart."""
    apart: list[float] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None: ...

        def synchronize(self) -> None: ...

        def elapsed_time(self, end: Event) -> float:
            return apart.pop(0)

    empty, zeros = torch.empty, torch.zeros
    of_cuda = {
        "CUDAGraph": lambda: SimpleNamespace(replay=lambda: None),
        "Event": Event,
        "Stream": lambda: None,
        "get_device_properties": lambda: SimpleNamespace(L2_cache_size=8),
        "graph": lambda graph, stream=None: contextlib.nullcontext(),
        "synchronize": lambda: None,
        "_sleep": lambda cycles: None,
    }
    for name, stand_in in of_cuda.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(torch, "empty", lambda *size, device=None, **options: empty(*size, **options))
    monkeypatch.setattr(torch, "zeros", lambda *size, device=None, **options: zeros(*size, **options))
    return apart


def test_a_graph_of_layers_gives_the_time_of_one(graphs: list[float]) -> None:
    called: list[int] = []
    clock = testing.GraphClock([lambda: called.append(0), lambda: called.append(1)])
    assert clock.count == 2 and called == [0, 1, 0, 1], "every layer ran before the capture and in it"
    graphs += [0.008, 0.002]
    assert clock.times_us(2) == pytest.approx([4.0, 1.0])


def test_graph_time_is_the_median_after_the_warm_up(graphs: list[float]) -> None:
    graphs += [1000.0, 1000.0, *(us * 4e-3 for us in TIMES)]
    layers_of_graph = [lambda: None] * 4
    assert testing.graph_time_us(layers_of_graph, replays=5, warmups=2) == pytest.approx(MEDIAN)
    assert not graphs


def test_backends_take_turns_and_the_median_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rounds of three replays; the first replay of each round is not timed."""
    log: list[tuple[str, str]] = []
    samples = {"oxmoe": [99.0, 7.0, 1.0, 2.0, 0.0, 30.0, 3.0, 3.0], "peer": [0.0, 5.0, 5.0, 5.0, 99.0, 5.0, 5.0, 6.0]}

    class Clock:
        def __init__(self, layer: list[str]) -> None:
            (self.name,) = layer
            if self.name == "broken":
                raise RuntimeError("no capture")

        def replay_for(self, seconds: float) -> None:
            assert seconds == 0.5
            log.append((self.name, "sustained"))

        def times_us(self, replays: int) -> list[float]:
            log.append((self.name, f"{replays}"))
            return [samples[self.name].pop(0) for _ in range(replays)]

    monkeypatch.setattr(timing, "GraphClock", Clock)
    monkeypatch.setattr(timing, "clocks", lambda device: {"sm_mhz": 1.0})
    calls: Any = {name: [name] for name in ("oxmoe", "peer", "broken")}
    protocol = timing.Protocol(layers=3, rounds=2, replays=3, sustain_s=0.5)
    times, failed = timing.times_us(calls, "cuda", protocol, ours="oxmoe")
    assert {name: float(us) for name, us in times.items()} == {"oxmoe": MEDIAN, "peer": 5.0}
    assert failed == {"broken": "RuntimeError: no capture"}
    turn = [(name, what) for name in ("oxmoe", "peer") for what in ("sustained", "1", "3")]
    assert log == turn * 2
    with pytest.raises(RuntimeError, match="no capture"):
        timing.times_us(calls, "cuda", protocol, ours="broken")


def test_wall_time_is_the_median_after_two_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    monkeypatch.setattr(timing, "time", clock)
    assert timing.wall_time_us(clock.call([500.0, 500.0, *TIMES]), seconds=0.0) == pytest.approx(MEDIAN, rel=1e-6)
    # There are more than five calls if there is time.
    many = timing.wall_time_us(clock.call([500.0, 500.0, *TIMES, *[9.0] * 100]), seconds=600e-6)
    assert many == pytest.approx(9.0, rel=1e-6)


def test_overhead_is_the_median_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    monkeypatch.setattr(overhead, "time", clock)
    times = [500.0, *(us for us in TIMES for _ in range(4))]
    assert overhead._time_us(clock.call(times), "cpu", batches=5, calls=4) == pytest.approx(MEDIAN, rel=1e-6)


def test_all_reduce_counts_the_slowest_rank(graphs: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """The times of the rank whose median is the longest, whichever rank that is and whatever its other times are."""
    others: list[list[float]] = []

    def gather(everybody: list[torch.Tensor], mine: torch.Tensor, group: Any) -> None:
        for one, times in zip(everybody, [mine.tolist(), *others], strict=True):
            one.copy_(torch.tensor(times, dtype=torch.float64))

    stand_in = SimpleNamespace(
        barrier=lambda group: None, all_gather=gather, get_world_size=lambda group: 1 + len(others)
    )
    monkeypatch.setattr(allreduce, "dist", stand_in)
    monkeypatch.setattr(allreduce, "clocks", lambda device: None)
    monkeypatch.setattr(allreduce.oxmoe, "allreduce_fusion", lambda *operands, **options: None)
    monkeypatch.setattr(allreduce, "REPLAYS", len(TIMES))
    for of_others, expected in (
        ([], TIMES),
        ([[0.5, 1.0, 11.0, 11.5, 12.0], [1.0, 1.0, 1.0, 99.0, 99.0]], [0.5, 1.0, 11.0, 11.5, 12.0]),
        ([[1.0, 1.0, 1.0, 99.0, 99.0]], TIMES),
    ):
        others[:] = of_others
        graphs += [us * allreduce.CALLS * 1e-3 for us in TIMES]
        calls: list[int] = []
        us = allreduce.Clock(None, None).us(lambda calls=calls: calls.append(1))
        assert us.samples == pytest.approx(expected) and float(us) == pytest.approx(
            sorted(expected)[len(expected) // 2]
        )
        assert len(calls) == 1 + allreduce.CALLS


# Tables


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> report.Cell:
    monkeypatch.setitem(layers.SHAPES, "tiny", layers.Shape(4, 2, 64, 64))
    times = {"oxmoe": 10.0, "sglang-triton": 30.0, "torch-loop": 15.0}
    return report.Cell("moe", "tiny", "bf16", "uniform", 7, 5.0, times)


def test_the_best_peer_is_the_fastest(cell: report.Cell, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cell.best_peer == 15.0
    assert report.Cell("moe", "tiny", "bf16", "uniform", 7, None, {"oxmoe": 10.0}).best_peer is None
    path = tmp_path / "rows.jsonl"
    environment = {**dict.fromkeys(("gpu", "cpu", "driver", "torch", "commit"), "x"), "date": "today"}
    table = report.Report(["sglang-triton", "torch-loop"], environment, str(path))
    table.add(cell)
    line = capsys.readouterr().out.splitlines()[-1].split()
    assert line == ["moe", "tiny", "uniform", "bf16", "7", "10.0", "5.0", "2.00", "30.0", "15.0", "1.50"]
    rows = [json.loads(text) for text in path.read_text().splitlines()]
    assert {row["backend"]: row["us"] for row in rows} == cell.times
    lines = report.markdown(rows).splitlines()
    assert lines[2] == "| tiny | 7 | **10.0** | 5.0 | 2.00 | 30.0 | 15.0 | 1.50 |"
    for row in rows:
        row["us"] = {"oxmoe": 20.0}.get(row["backend"], row["us"])
    lines = report.markdown(rows).splitlines()
    assert lines[2] == "| tiny | 7 | 20.0 | 5.0 | 4.00 | 30.0 | **15.0** | 0.75 |"
    assert lines[-1].startswith("Slower than the best peer in 1 of 1 cells: tiny M=7 (33.3 %).")


def test_the_best_peer_of_rows_in_order(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(masked.LAYERS, "few", masked.Layer(4, 2, 2, 256, 128))
    for peer in (masked.DeepGemmMasked, masked.SglangDeepGemm):
        monkeypatch.setattr(peer, "missing", classmethod(lambda cls, device: None))
    path = tmp_path / "rows.jsonl"
    bench = masked._Bench("cpu", timing.Protocol(1, 1, 0, 0.0), list(masked.PEERS), {}, str(path))
    peers = dict.fromkeys(bench.peers, 30.0)
    slow, fast = list(peers)[:2]
    given: Any = [SimpleNamespace(x=torch.empty(4, 5, 8), counts=torch.tensor([1, 2, 3, 1]))]
    least = floors.Floors(5.0, 8.0)
    bench.report("few", "bf16", "a case", given, least, {"oxmoe": 10.0, slow: 30.0, fast: 15.0}, {})
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.endswith(" | **10.0** | 5.0 | 2.00 | 8.0 | 1.25 | 30.0 | 15.0 | 1.50 |"), line


# Bars


def close(truth: torch.Tensor, format_name: str, norm: float, rng: torch.Generator) -> torch.Tensor:
    """Returns truth with an error of this relative norm."""
    noise = torch.randn(truth.shape, generator=rng)
    return (truth.float() + noise * (norm * truth.float().norm() / noise.norm())).to(truth.dtype)


@pytest.fixture
def truth(rng: torch.Generator) -> torch.Tensor:
    return torch.randn((64, 256), generator=rng).bfloat16()


# Relative norms that a format's own result may have, and those that it may not have.
@pytest.mark.parametrize(
    ("format_name", "right", "wrong"),
    [
        ("bf16", 1e-4, 5e-3),
        ("f16", 1e-4, 5e-3),
        ("mxfp4", 1e-4, 5e-3),
        ("nvfp4", 1e-4, 5e-3),
        ("int4", 1e-4, 5e-3),
        ("int4-zeros", 1e-4, 5e-3),
        ("fp8_block", 1e-3, 3e-2),
        ("mxfp8", 1e-3, 3e-2),
        ("mxfp4-a8", 3e-2, 5e-2),
        ("fp8_tensor", 3e-2, 5e-2),
        ("fp8_tensor-token", 3e-2, 5e-2),
        ("fp8_tensor-static", 3e-2, 5e-2),
        ("nvfp4-a4", 2e-1, 3e-1),
    ],
)
def test_our_own_bars(format_name: str, right: float, wrong: float, truth: torch.Tensor, rng: torch.Generator) -> None:
    assert layers.error(close(truth, format_name, right, rng), truth, format_name) is None
    for result in (close(truth, format_name, wrong, rng), torch.zeros_like(truth), truth * torch.nan):
        assert layers.error(result, truth, format_name) is not None


def test_the_bar_of_peers(truth: torch.Tensor, rng: torch.Generator) -> None:
    assert layers.peer_error(close(truth, "bf16", 1.5e-2, rng), truth) is None
    said = layers.peer_error(close(truth, "bf16", 3e-2, rng), truth)
    assert said is not None and said.startswith("computes something else: relative norm 0.03")
    assert layers.peer_error(truth * torch.nan, truth) is not None


def test_every_format_of_the_bench_has_a_bar_here() -> None:
    from oxmoe.tools.bench import FORMATS

    marks = test_our_own_bars.pytestmark  # type: ignore[attr-defined]
    assert {case[0] for case in marks[0].args[1]} == set(FORMATS)
