"""Reports results as a table while they come, as JSON lines, as Markdown, and as a plot."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import oxmoe
from oxmoe.tools.bench.backend import Oxmoe
from oxmoe.tools.bench.layers import SHAPES, Shape
from oxmoe.tools.bench.peers import PEERS
from oxmoe.tools.bench.timing import fields
from oxmoe.tools.command import UsageError

# Heads of the columns that `shown_floors` fills.
FLOORS = ("floor", "x floor", "own floor", "x own")


@dataclass
class Cell:
    """One layer at one token count: microseconds by backend (`Times`), and the least that there can be (`floors`)."""

    op: str
    shape: str
    format: str
    pattern: str
    tokens: int
    floor_us: float | None
    times: dict[str, float] = field(default_factory=dict)
    details: dict[str, str] = field(default_factory=dict)
    own_floor_us: float | None = None
    ceilings: dict[str, Any] | None = None  # rates of the GPU, which the floors are made of
    layer: Shape | None = None  # a model's own layer, if SHAPES does not have it

    @property
    def best_peer(self) -> float | None:
        return min((us for name, us in self.times.items() if name != "oxmoe"), default=None)


def read_json(paths: Sequence[str], run: str | None = None, flag: str = "--table") -> list[dict[str, Any]]:
    """Reads the rows of these files, or only those of one run. An error names the flag that named the files.

    Formats come out in today's spelling: older rows have "fp8-block" for "fp8_block".
    """
    spelled = {name.replace("-", "_"): name for name in oxmoe.device_info()["formats"]}
    rows = []
    for path in paths:
        try:
            with open(path, encoding="utf-8") as file:
                lines = file.readlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is no text"
            raise UsageError(f"{flag}: cannot read {path}: {reason}") from error
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            row = _row(line)
            if row is None:
                raise UsageError(
                    f"{flag}: {path}, line {number}: expected a JSON object with the fields of a measurement"
                )
            name = row.get("format", "")
            rows.append(row | {"format": spelled.get(name.replace("-", "_"), name)})
    if run is None:
        return rows
    runs = dict.fromkeys(row["run"] for row in rows if "run" in row)
    if run not in runs:
        raise UsageError(f"--run: no row of {', '.join(paths)} has run {run}; known: {', '.join(runs) or 'none'}")
    return [row for row in rows if row.get("run") == run]


# Fields of a row that `markdown` reads, with their types.
_FIELDS: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("shape", "format", "backend", "date"), str),
    "tokens": int,
    "us": (int, float),
}


def _row(line: str) -> dict[str, Any] | None:
    """Returns the row in a line of a results file; None if it has none."""
    try:
        row = json.loads(line)
    except json.JSONDecodeError:
        return None
    if not isinstance(row, dict) or not isinstance(row.get("op"), str):
        return None
    whole = all(isinstance(row.get(field), kind) for field, kind in _FIELDS.items()) and "floor_us" in row
    return row if whole or row["op"] != "moe" else None


def append_json(path: str | None, rows: Sequence[dict[str, Any]]) -> None:
    if path is None:
        return
    with open(path, "a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


class Report:
    """Prints each cell as it comes and appends it to the JSON file: a run that is cut short keeps what it measured."""

    def __init__(self, peers: Sequence[str], environment: dict[str, Any], json_path: str | None):
        self.peers, self.environment, self.json_path = peers, environment, json_path
        self.cells: list[Cell] = []
        self._skipped: set[tuple[str, str]] = set()
        self._headed = False
        print(", ".join(f"{name} {value}" for name, value in environment.items() if name != "command" and value))

    def skip(self, peer: str, reason: str) -> None:
        """Says once that a peer takes no part, and why."""
        if (peer, reason) not in self._skipped:
            self._skipped.add((peer, reason))
            print(f"skipped {peer}: {reason}", flush=True)

    def wrong(self, cell: Cell, what: str) -> None:
        print(f"WRONG {cell.shape} {cell.format} {cell.pattern} M={cell.tokens}, not timed: {what}", flush=True)

    def add(self, cell: Cell) -> None:
        self.cells.append(cell)
        if not self._headed:
            self._headed = True
            heads = [
                "op",
                "shape",
                "pattern",
                "format",
                "M",
                "oxmoe us",
                "floor us",
                "x floor",
                "own us",
                "x own",
                *self.peers,
                "best / oxmoe",
            ]
            print(self._line(heads))
        ours, best = cell.times["oxmoe"], cell.best_peer
        print(
            self._line(
                [
                    cell.op,
                    cell.shape,
                    cell.pattern,
                    cell.format,
                    str(cell.tokens),
                    f"{ours:.1f}",
                    *shown_floors(ours, cell.floor_us, cell.own_floor_us),
                    *(_number(cell.times.get(peer), ".1f") for peer in self.peers),
                    _number(best and best / ours, ".2f"),
                ]
            ),
            flush=True,
        )
        common = {
            "op": cell.op,
            "shape": cell.shape,
            **vars(cell.layer or SHAPES[cell.shape]),
            "format": cell.format,
            "pattern": cell.pattern,
            "tokens": cell.tokens,
            "floor_us": cell.floor_us,
            "own_floor_us": cell.own_floor_us,
            "ceilings": cell.ceilings,
        }
        rows = []
        for name, us in cell.times.items():
            row = {**common, "backend": name, **fields(us)}
            if name in cell.details:
                row["detail"] = cell.details[name]
            if name in PEERS and PEERS[name].excludes is not None:
                row["excludes"] = PEERS[name].excludes
            rows.append({**row, **self.environment})
        append_json(self.json_path, rows)

    def _line(self, fields: Sequence[str]) -> str:
        widths = [4, 17, 7, 6, 6, 9, 9, 7, 9, 7, *(max(9, len(peer)) for peer in self.peers), 12]
        left = "".join(f"{text:<{width}} " for text, width in zip(fields[:4], widths[:4], strict=True))
        return left + " ".join(f"{text:>{width}}" for text, width in zip(fields[4:], widths[4:], strict=True))


def _number(value: float | None, spec: str) -> str:
    return "" if value is None else format(value, spec)


def shown_floors(ours: float, ideal: float | None, own: float | None) -> list[str]:
    """Returns both floors as text, and how many times as long oxmoe takes."""
    return [text for us in (ideal, own) for text in (_number(us, ".1f"), _number(us and ours / us, ".2f"))]


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Returns the table of docs/performance.md: one line a cell, the fastest in bold. Rows may have a spread or not.

    If a cell was run twice, only the later run counts: only times of one process are compared.
    """
    cells: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for row in rows:
        if row["op"] == "moe":
            key = (row["shape"], row["format"], row.get("pattern", "uniform"), row["tokens"])
            cell = cells.setdefault(key, {})
            if any(other["date"] != row["date"] for other in cell.values()):
                cell.clear()
            cell[row["backend"]] = row
    cells = {key: cell for key, cell in cells.items() if Oxmoe.name in cell}
    present = {name: row for cell in cells.values() for name, row in cell.items() if name != Oxmoe.name}
    peers = [name for name in PEERS if name in present]
    several = [len({key[place] for key in cells}) > 1 for place in (1, 2)]
    heads = ["layer", *(head for head, shown in zip(("format", "routing"), several, strict=True) if shown), "M"]
    # Old rows have no floor of oxmoe's own algorithm.
    floors = 4 if any(cell[Oxmoe.name].get("own_floor_us") is not None for cell in cells.values()) else 2
    heads += ["oxmoe", *FLOORS[:floors]]
    heads += [f"{peer} (no {present[peer]['excludes']})" if present[peer].get("excludes") else peer for peer in peers]
    lines = [[*heads, "best peer / oxmoe"], ["---"] * (len(heads) + 1)]
    slower = []
    for (shape, format_name, pattern, tokens), cell in cells.items():
        times = {name: cell[name]["us"] for name in (Oxmoe.name, *peers) if name in cell}
        ours, fastest = times[Oxmoe.name], min(times.values())
        best = min((us for name, us in times.items() if name != Oxmoe.name), default=None)
        shown = {name: f"**{us:.1f}**" if us == fastest else f"{us:.1f}" for name, us in times.items()}
        keys = [shape, *(text for text, show in zip((format_name, pattern), several, strict=True) if show)]
        lines.append(
            [
                *keys,
                str(tokens),
                shown[Oxmoe.name],
                *shown_floors(ours, cell[Oxmoe.name]["floor_us"], cell[Oxmoe.name].get("own_floor_us"))[:floors],
                *(shown.get(peer, "") for peer in peers),
                _number(best and best / ours, ".2f"),
            ]
        )
        if best is not None and best < ours:
            slower.append(f"{' '.join(keys)} M={tokens} ({100 * (ours / best - 1):.1f} %)")
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    against = f"Slower than the best peer in {len(slower)} of {len(cells)} cells"
    rows_shown = [row for cell in cells.values() for row in cell.values()]
    return f"{table}\n\n{against}{': ' if slower else ''}{', '.join(slower)}.{_origin(rows_shown)}"


def _origin(rows: Sequence[dict[str, Any]]) -> str:
    """Says where rows were measured and how far their times lie apart, as far as the rows tell."""
    rows = [row for row in rows if "us_min" in row]
    if not rows:
        return ""
    builds = dict.fromkeys(
        f"{row['gpu'] or row['cpu']}, driver {row['driver']}, torch {row['torch']}, commit {row['commit']}, "
        f"{row['date'][:10]}"
        for row in rows
    )
    widest = max(rows, key=lambda row: (row["us_max"] - row["us_min"]) / row["us"])
    share = 100 * (widest["us_max"] - widest["us_min"]) / widest["us"]
    where = f"{widest['backend']}, {widest['shape']} {widest['format']} M={widest['tokens']}"
    return f" Times of one row lie within {share:.1f} % of its median ({where}). Measured on {'; '.join(builds)}."


def print_overhead(rows: Sequence[dict[str, Any]]) -> None:
    for row in rows:
        print(f"{row['device']:<5} {row['case']:<24} {row['us']:8.2f} us a call")


def plot(cells: Sequence[Cell], path: str) -> None:
    """Draws one panel for each shape and format: time over tokens, both logarithmic, with the floor dashed."""
    from matplotlib import pyplot

    panels: dict[str, list[Cell]] = {}
    for cell in cells:
        panels.setdefault(f"{cell.shape} {cell.format} {cell.pattern}", []).append(cell)
    if not panels:
        return
    figure, axes = pyplot.subplots(1, len(panels), figsize=(6 * len(panels), 4.5), squeeze=False)
    for axis, (title, group) in zip(axes[0], panels.items(), strict=True):
        for name in dict.fromkeys(name for cell in group for name in cell.times):
            points = [(cell.tokens, cell.times[name]) for cell in group if name in cell.times]
            axis.plot(*zip(*points, strict=True), marker="o", linewidth=2.5 if name == "oxmoe" else 1.2, label=name)
        floor = [(cell.tokens, cell.floor_us) for cell in group if cell.floor_us is not None]
        if floor:
            axis.plot(*zip(*floor, strict=True), color="gray", linestyle="--", label="floor")
        axis.set(title=title, xlabel="tokens", ylabel="us a layer", xscale="log", yscale="log")
        axis.grid(True, which="both", alpha=0.3)
        axis.legend()
    figure.tight_layout()
    figure.savefig(path)
