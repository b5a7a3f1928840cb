"""Times a cell: every backend in turn, several layers with different weights in one CUDA graph."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from oxmoe.testing import GraphClock
from oxmoe.tools.bench.machine import clocks


class Times(float):
    """Microseconds of several runs of the same thing. As a number it is their median."""

    samples: tuple[float, ...]
    clocks: dict[str, float | None] | None  # the GPU's clocks right after the last run

    def __new__(cls, samples: Sequence[float], clocks: dict[str, float | None] | None = None) -> Times:
        self = super().__new__(cls, statistics.median(samples))
        self.samples, self.clocks = tuple(samples), clocks
        return self


def fields(us: float) -> dict[str, Any]:
    """Returns a time's fields in a row: "us" is the median. Rows of before 2026-11-25 have no spread and no clocks."""
    times = us if isinstance(us, Times) else Times([us])
    return {
        "us": float(times),
        "us_min": min(times.samples),
        "us_max": max(times.samples),
        "samples": len(times.samples),
        "clocks": times.clocks,
    }


@dataclass(frozen=True)
class Protocol:
    """How a cell is timed on a GPU. It goes into every row."""

    layers: int
    rounds: int
    replays: int  # replays timed in each round, after one that is not timed
    sustain_s: float  # seconds of replays back to back before each round


def wall_time_us(call: Callable[[], object], *, seconds: float = 1.0) -> Times:
    """Times a call in microseconds: repeats it for about this long and at least five times, after two warm-ups."""
    call()
    call()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 5 or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e6)
    return Times(times)


def times_us(
    calls: Mapping[str, Sequence[Callable[[], object]]], device: str, protocol: Protocol, *, ours: str
) -> tuple[dict[str, float], dict[str, str]]:
    """Returns microseconds a layer of each backend that runs (`Times`), and why the others do not run. `ours` must
    run."""
    if device == "cpu":
        return {name: wall_time_us(layer[0]) for name, layer in calls.items()}, {}
    graphs: dict[str, GraphClock] = {}
    failed: dict[str, str] = {}
    for name, layer in calls.items():
        try:
            graphs[name] = GraphClock(layer)
        except Exception as error:
            if name == ours:
                raise
            failed[name] = f"{type(error).__name__}: {error}"
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    seen: dict[str, dict[str, float | None] | None] = {}
    for _ in range(protocol.rounds):
        for name, graph in graphs.items():
            if protocol.sustain_s:
                graph.replay_for(protocol.sustain_s)
            graph.times_us(1)
            samples[name] += graph.times_us(protocol.replays)
            seen[name] = clocks(device)
    return {name: Times(times, seen[name]) for name, times in samples.items()}, failed
