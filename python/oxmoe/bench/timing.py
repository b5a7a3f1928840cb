"""How a cell is timed: every backend in turn, several layers with different weights in one CUDA graph."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from oxmoe.bench.layers import wall_time_us
from oxmoe.testing import GraphClock


@dataclass(frozen=True)
class Protocol:
    """How a cell is timed on a GPU; goes into every row."""

    layers: int
    rounds: int
    replays: int  # timed in each round, after one that is not
    sustain_s: float  # seconds of replays back to back before each round


def times_us(
    calls: Mapping[str, Sequence[Callable[[], object]]], device: str, protocol: Protocol, *, ours: str
) -> tuple[dict[str, float], dict[str, str]]:
    """Median microseconds a layer of each backend that runs, and why the others do not. `ours` must run."""
    if device == "cpu":
        return {name: wall_time_us(layer[0]) for name, layer in calls.items()}, {}
    clocks: dict[str, GraphClock] = {}
    failed: dict[str, str] = {}
    for name, layer in calls.items():
        try:
            clocks[name] = GraphClock(layer)
        except Exception as error:
            if name == ours:
                raise
            failed[name] = f"{type(error).__name__}: {error}"
    times: dict[str, list[float]] = {name: [] for name in clocks}
    for _ in range(protocol.rounds):
        for name, clock in clocks.items():
            if protocol.sustain_s:
                clock.replay_for(protocol.sustain_s)
            clock.times_us(1)
            times[name] += clock.times_us(protocol.replays)
    return {name: statistics.median(samples) for name, samples in times.items()}, failed
