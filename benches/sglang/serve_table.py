"""serve_table.py FILE... [--section]: prints tables of lines that serve.py wrote, or the section of
docs/sglang_servers.md."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def _pair(off: float | None, on: float | None, digits: int) -> str:
    return " / ".join("" if value is None else f"{value:.{digits}f}" for value in (off, on))


def _of(row: dict[str, Any], load: str, name: str) -> float | None:
    value = row.get("loads", {}).get(load, {}).get(name)
    return value["median"] if isinstance(value, dict) else value


def _servers(rows: list[dict[str, Any]]) -> dict[str, dict[str, dict[str, Any]]]:
    cells: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        cells.setdefault(row.get("label", row["cell"]), {})[row["mode"]] = row
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


def _where(rows: list[dict[str, Any]]) -> list[str]:
    """Returns cards, drivers, versions and commits of these rows."""
    names = ("sglang", "sglang-kernel", "torch", "triton")
    return sorted(
        {
            f"{row['gpus']} x {row['gpu']}, driver {row['driver']}; "
            + ", ".join(f"{name} {row[name]}" for name in names if row.get(name))
            + f"; {row.get('date', '')[:10]}, {row['commit']}"
            for row in rows
        }
    )


def _tables(rows: list[dict[str, Any]]) -> list[str]:
    cells = _servers(rows)
    return ["\n".join(make(cells)) for make in (_speed, _starts, _tokens)]


def render(rows: list[dict[str, Any]]) -> str:
    return "\n\n".join(["\n".join(_where(rows)), *_tables(rows)])


def section(rows: list[dict[str, Any]], files: list[str]) -> str:
    """Returns the section of docs/sglang_servers.md, with nothing in it that was not measured."""
    speed, starts, tokens = _tables(rows)
    servers = [row for row in rows if row["mode"] != "compared"]
    layers = "/".join(str(count) for count in sorted({row["layers"] for row in servers}))
    together = any(row["started"] in ("together", "ahead") for row in servers)
    beside = "\nBoth servers of a cell were started at a time, beside each other." if together else ""
    where = "\n".join(f"- {line}" for line in _where(rows))
    failed = [
        f"- {row['cell']}, {row['mode']}: {row[what]}"
        for row in rows
        for what in ("error", "update_error")
        if what in row
    ]
    missing = "\n\nWhat did not run:\n\n" + "\n".join(failed) if failed else ""
    return f"""## Whole servers, measured

`benches/sglang/serve.py` starts SGLang's HTTP server without and with oxmoe on a checkpoint of {layers} layers of a
model's sizes, with random weights and a vocabulary of 1024 (`checkpoint.py`; of DeepSeek-V3 a rank's part of eight). A
whole model has more layers and a larger vocabulary, so that its tokens a second are fewer, and the share of HTTP,
tokenizer and scheduler in its time is smaller. Results: {", ".join(f"`{file}`" for file in files)}.

{where}

Prompts have 16 to 1800 tokens, a third of them begin alike, and answers have 16 to 96 tokens. Prompts are prefilled in
chunks of 512, decoding runs in CUDA graphs. The answers of 64 at a time are not streamed. Times are medians. Off / on:

{speed}

A start ends with SGLang's own warm-up; caches of Triton's kernels are empty before it.{beside} Off / on:

{starts}

Both servers answer greedily. Two kernels round differently, so that answers part where two tokens are nearly as likely
as each other; from there on they have different inputs. The largest margin is the distance of the two tokens'
log-probabilities where answers part, as the server with oxmoe sees it. `serve.py` fails where it is more than twice the
largest distance of both servers' log-probabilities of the same tokens. Beside these requests others were aborted; after
an update of the weights from disk both answered again.

{tokens}{missing}
"""


def main(arguments: list[str]) -> None:
    files = [argument for argument in arguments if argument != "--section"]
    rows = [json.loads(line) for file in files for line in Path(file).read_text().splitlines()]
    print(section(rows, [Path(file).name for file in files]) if "--section" in arguments else render(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
