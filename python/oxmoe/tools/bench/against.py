"""Measures cells again that were measured before, and says which of them became slower on the same kind of card.

A cell is a layer in one format, at one number of tokens, with one routing, timed with so many layers in a graph. Any
file of `--json` has the rows. Of the rows of a cell the fastest counts, so that a loss in small steps is seen too.
Cards of one kind differ, and a busy one is slow: a cell that seems to have lost is measured once more, and the faster
time counts. A baseline from another day has another card. The surest comparison has both builds in one call on one
machine: the old one with --json FILE, then the new one with --against FILE.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from oxmoe.tools.bench.backend import Oxmoe
from oxmoe.tools.bench.layers import FORMATS, PATTERNS, SHAPES
from oxmoe.tools.bench.report import Cell
from oxmoe.tools.bench.timing import fields
from oxmoe.tools.command import UsageError

LOSS = 0.05  # share of the recorded time


class Key(NamedTuple):
    shape: str
    format: str
    pattern: str
    tokens: int
    layers: int  # layers in one graph
    sustain_s: float  # seconds of replays before each round

    def __str__(self) -> str:
        more = "" if self.pattern == "uniform" else f" {self.pattern}"
        return f"{self.shape} {self.format}{more} M={self.tokens}"


@dataclass(frozen=True)
class Wanted:
    """Which cells of a file are measured. None stands for all."""

    shapes: Sequence[str] | None
    formats: Sequence[str] | None
    tokens: Sequence[int] | None

    def takes(self, key: Key) -> bool:
        pairs = ((self.shapes, key.shape), (self.formats, key.format), (self.tokens, key.tokens))
        return all(names is None or name in names for names, name in pairs)


def card(row: dict[str, Any]) -> str:
    """Returns the kind of GPU of a row, or of CPU if there was no GPU."""
    return str(row.get("gpu") or row.get("cpu"))


def _key(row: dict[str, Any]) -> Key:
    pattern, layers = row.get("pattern", "uniform"), int(row.get("layers", 1))
    return Key(row["shape"], row["format"], pattern, row["tokens"], layers, float(row.get("sustain_s", 0.0)))


def _unknown(row: dict[str, Any]) -> str | None:
    """Returns why this build cannot measure the cell of a row, or None if it can."""
    name = row["shape"]
    if name not in SHAPES:
        return f"there is no layer {name}"
    if row["format"] not in FORMATS:
        return f"there is no format {row['format']}"
    if row.get("pattern", "uniform") not in PATTERNS:
        return f"there is no pattern {row['pattern']}"
    sizes = vars(SHAPES[name])
    other = [
        size for size in ("experts", "top_k", "hidden", "intermediate") if row.get(size, sizes[size]) != sizes[size]
    ]
    return f"{name} has another {', '.join(other)} today" if other else None


def recorded(rows: Sequence[dict[str, Any]], environment: dict[str, Any], wanted: Wanted) -> dict[Key, dict[str, Any]]:
    """Returns the fastest row of each of oxmoe's cells on this kind of card. Raises UsageError if there is none."""
    here, portable = card(environment), bool(environment.get("portable"))
    best: dict[Key, dict[str, Any]] = {}
    ours = [row for row in rows if row["op"] == "moe" and row["backend"] == Oxmoe.name]
    said: set[str] = set()
    for row in ours:
        key = _key(row)
        if card(row) != here or bool(row.get("portable")) != portable or not wanted.takes(key):
            continue
        reason = _unknown(row)
        if reason is not None:
            if reason not in said:
                said.add(reason)
                print(f"skipped cells: {reason}", flush=True)
        elif key not in best or row["us"] < best[key]["us"]:
            best[key] = row
    if not best:
        cards = ", ".join(sorted({card(row) for row in ours})) or "no card"
        raise UsageError(f"--against: no cell of {here} is among the rows asked for; the files have rows of {cards}")
    return best


def grouped(keys: Sequence[Key]) -> dict[tuple[str, str, str, int, float], list[int]]:
    """Groups cells that have their weights in common: (shape, format, pattern, layers, sustained seconds) -> numbers of
    tokens."""
    groups: dict[tuple[str, str, str, int, float], list[int]] = {}
    for key in keys:
        groups.setdefault((key.shape, key.format, key.pattern, key.layers, key.sustain_s), []).append(key.tokens)
    return groups


def _ours(keys: Sequence[Key], cells: Sequence[Cell]) -> dict[Key, float]:
    """Returns oxmoe's time of each cell; a cell whose result was wrong has none."""
    order = [
        Key(shape, format_name, pattern, count, layers, sustain)
        for (shape, format_name, pattern, layers, sustain), tokens in grouped(keys).items()
        for count in tokens
    ]
    left = list(cells)
    times: dict[Key, float] = {}
    for key in order:
        same = (key.shape, key.format, key.pattern, key.tokens)
        if left and (left[0].shape, left[0].format, left[0].pattern, left[0].tokens) == same:
            times[key] = left.pop(0).times[Oxmoe.name]
    return times


def _spread(row: dict[str, Any]) -> str:
    """Returns a time with the shortest and the longest run, as far as they are known."""
    if "us_min" not in row:
        return f"{row['us']:.1f} us"
    return f"{row['us']:.1f} us ({row['us_min']:.1f} to {row['us_max']:.1f})"


def compare(before: dict[Key, dict[str, Any]], measure: Callable[[Sequence[Key]], list[Cell]]) -> int:
    """Measures the cells, says which of them lost, and returns the exit status."""

    def lost(times: dict[Key, float]) -> list[Key]:
        return [key for key, us in times.items() if us > before[key]["us"] * (1 + LOSS)]

    keys = list(before)
    times = _ours(keys, measure(keys))
    again = lost(times)
    if again:
        print(f"measured once more: {', '.join(map(str, again))}", flush=True)
        for key, us in _ours(again, measure(again)).items():
            times[key] = min(times[key], us)
    wrong, slower = [key for key in keys if key not in times], lost(times)
    for key in slower:
        row, us = before[key], times[key]
        origin = f"commit {row.get('commit') or 'unknown'}, {row['date'][:10]}"
        share = 100 * (us / row["us"] - 1)
        print(f"LOST {share:.1f} %: {key}: {_spread(fields(us))}, recorded {_spread(row)} ({origin})")
    for key in wrong:
        print(f"WRONG {key}: not timed")
    where = card(next(iter(before.values())))
    print(f"{len(slower)} of {len(keys)} cells of {where} lost more than {LOSS:.0%}", flush=True)
    return 1 if slower or wrong else 0
