"""serve_table.py FILE...: the tables of docs/sglang.md's measured servers, from lines that serve.py wrote."""

from __future__ import annotations

import json
import sys
from typing import Any


def _pair(off: float | None, on: float | None, digits: int) -> str:
    return " / ".join("" if value is None else f"{value:.{digits}f}" for value in (off, on))


def _of(row: dict[str, Any], load: str, name: str) -> float | None:
    value = row.get("loads", {}).get(load, {}).get(name)
    return value["median"] if isinstance(value, dict) else value


def _servers(rows: list[dict[str, Any]]) -> dict[str, dict[str, dict[str, Any]]]:
    cells: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        cells.setdefault(row["cell"], {})[row["mode"]] = row
    return cells


def _speed(cells: dict[str, dict[str, dict[str, Any]]]) -> list[str]:
    lines = [
        "| model, ranks | at a time | tokens a second, off / on | on / off | first token, ms | between tokens, ms |",
        "|---|---|---|---|---|---|",
    ]
    for name, modes in cells.items():
        off, on = modes.get("off", {}), modes.get("on", {})
        for load in ("1", "16", "64"):
            speeds = [_of(row, load, "tokens_per_s") for row in (off, on)]
            if speeds == [None, None]:
                continue
            ratio = f"{speeds[1] / speeds[0]:.2f}x" if all(speeds) else ""
            times = (
                _pair(_of(off, load, what), _of(on, load, what), digits)
                for what, digits in (("first_token_ms", 1), ("between_tokens_ms", 2))
            )
            lines.append(
                f"| {name} | {load} | {_pair(*speeds, 0)} | {ratio} | {' | '.join(times)} |".replace("|  /  |", "| |")
            )
    return lines


def _starts(cells: dict[str, dict[str, dict[str, Any]]]) -> list[str]:
    lines = ["| model, ranks | start, s | loading, s | capture of graphs, s |", "|---|---|---|---|"]
    for name, modes in cells.items():
        pair = [modes.get(mode, {}) for mode in ("off", "on")]
        capture = [sum(row["capture_s"].values()) if row.get("capture_s") else None for row in pair]
        start, load = ([row.get(what) for row in pair] for what in ("start_s", "load_s"))
        lines.append(f"| {name} | {_pair(*start, 1)} | {_pair(*load, 1)} | {_pair(*capture, 1)} |")
    return lines


def _tokens(cells: dict[str, dict[str, dict[str, Any]]]) -> list[str]:
    lines = [
        "| model, ranks | requests | tokens equal | before a first difference | largest margin | after an update |",
        "|---|---|---|---|---|---|",
    ]
    for name, modes in cells.items():
        tokens = modes.get("compared", {}).get("tokens")
        if not tokens:
            continue
        loads = [tokens[load] for load in ("1", "16", "64", "beside aborted") if load in tokens]
        equal, before, total, requests = (
            sum(load[what] for load in loads) for what in ("equal", "before_first_difference", "tokens", "requests")
        )
        margins = [abs(at["margin"]) for load in loads for at in load["divergences"] if "margin" in at]
        updated = tokens.get("updated")
        after = f"{updated['equal']} of {updated['tokens']}" if updated else ""
        margin = f"{max(margins):.3f}" if margins else ""
        lines.append(f"| {name} | {requests} | {equal} of {total} | {before} | {margin} | {after} |")
    return lines


def render(rows: list[dict[str, Any]]) -> str:
    cells = _servers(rows)
    where = sorted({f"{row['gpus']} x {row['gpu']}, driver {row['driver']}, commit {row['commit']}" for row in rows})
    parts = ["\n".join(where), *("\n".join(make(cells)) for make in (_speed, _starts, _tokens))]
    return "\n\n".join(parts)


if __name__ == "__main__":
    print(render([json.loads(line) for path in sys.argv[1:] for line in open(path)]))
