"""Tables of docs/performance.md whose cells hold several numbers: each number is one of benches/results, recomputed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = next(folder for folder in Path(__file__).parents if (folder / "Cargo.toml").is_file())
PAGE = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
# Words of the page -> formats of the result files.
FORMATS = {
    "MXFP4": "mxfp4",
    "MXFP4, e4m3 activations": "mxfp4-a8",
    "MXFP8": "mxfp8",
    "NVFP4": "nvfp4",
    "NVFP4, activations too": "nvfp4-a4",
    "int4": "int4",
    "int4 in groups of 32": "int4",
    "int4, groups of 32": "int4",
    "fp8 blocks": "fp8_block",
    "fp8_block": "fp8_block",
    "bf16": "bf16",
}
HUMMING = "humming_2026-11-29"
Number = tuple[str, float]  # as it stands in a table, and as it was measured or computed


@cache
def measured(file: str) -> list[dict[str, Any]]:
    lines = (ROOT / "benches" / "results" / file).read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    for row in rows:
        row["format"] = row["format"].replace("-block", "_block")
        if row["op"] == "moe_masked":
            row["each"] = round(row["rows"] / row["experts"])
    return rows


def row_of(file: str, runs: tuple[str, ...], **wanted: Any) -> dict[str, float]:
    """Returns time and floor of the one row of this kind in these runs, or the means of two. The page names the
    runs."""
    assert all(f"`{name}`" in PAGE for name in (file, *runs)), (file, runs)
    found = [
        row
        for row in measured(file)
        if row["run"] in runs and all(row.get(name) == value for name, value in wanted.items())
    ]
    assert 1 <= len(found) <= 2, (runs, wanted, len(found))
    return {name: sum(row[name] for row in found) / len(found) for name in ("us", "floor_us")}


def table(section: str, number: int = 0) -> Iterator[dict[str, str]]:
    """Yields the rows of a section's table by the heads of its columns, of which a second "now" is "now 2". An empty
    first cell is that of the row above."""
    text = PAGE.split(f"\n## {section}\n")[1].split("\n## ")[0]
    lines = re.findall(r"(?:^\|.*\n)+", text, re.M)[number].splitlines()
    heads, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    heads = [f"{head} {heads[:at].count(head) + 1}" if head in heads[:at] else head for at, head in enumerate(heads)]
    for position, row in enumerate(rows):
        row[0] = row[0] or rows[position - 1][0]
        yield dict(zip(heads, row, strict=True))


def numbers(cell: str) -> list[str]:
    return [number.strip() for number in cell.strip("*").split(",")]


def side_by_side(row: dict[str, str], peer: str, times: list[tuple[float, float]]) -> Iterator[Number]:
    """Yields a row's times of oxmoe and a peer, and their ratios."""
    shown = [numbers(row[head]) for head in ("oxmoe", peer, f"{peer} / oxmoe")]
    for number, (ours, theirs) in enumerate(times):
        yield from zip((texts[number] for texts in shown), (ours, theirs, theirs / ours), strict=True)
    assert {len(texts) for texts in shown} == {len(times)}


def humming() -> Iterator[tuple[str, list[Number]]]:
    for row in table("Beside humming (MXFP4, MXFP8, int4, NVFP4)"):
        shape, _, name = row["layer, format"].partition(", ")
        masked = name.endswith(", `moe_masked`")
        wanted = {"shape": shape, "format": FORMATS[name.removesuffix(", `moe_masked`")]}
        cells = row["M or rows an expert"]
        times = []
        for cell in map(int, numbers(cells)):
            of = {"op": "moe_masked", "each": cell} if masked else {"op": "moe", "tokens": cell}
            found = [
                row_of("h200_packed.jsonl", (HUMMING,), backend=backend, **wanted, **of)["us"]
                for backend in ("oxmoe", "humming")
            ]
            times.append((found[0], found[1]))
        yield f"{row['layer, format']} {cells}", list(side_by_side(row, "humming", times))


def marlin() -> Iterator[tuple[str, list[Number]]]:
    for row in table("Beside humming (MXFP4, MXFP8, int4, NVFP4)", 1):
        format, times = FORMATS[row["format"]], []
        for tokens in map(int, numbers(row["M"])):
            run = f"packed_marlin_{'2026-11-26' if format == 'mxfp4' else '2026-11-28'}"
            runs = (f"{run}_few" if tokens in (2, 4) else run,)
            wanted = {"shape": "kimi-k2-tp8", "format": format, "tokens": tokens}
            found = [
                row_of("h200_packed.jsonl", runs, backend=backend, **wanted)["us"] for backend in ("oxmoe", "marlin")
            ]
            times.append((found[0], found[1]))
        yield f"{row['format']} {row['M']}", list(side_by_side(row, "Marlin", times))


def few_tokens() -> Iterator[tuple[str, list[Number]]]:
    for row in table("Few tokens in one launch"):
        shape, _, name = row["layer, format"].partition(", ")
        kind = {"fp8 blocks": "fp8", "bf16": "bf16"}.get(name, "packed")
        found: list[Number] = []
        heads = [head for head in row if head not in ("layer, format", "M")]
        for head, (given, now) in zip(heads, ((0, 0), (0, 1), (1, 0), (1, 1)), strict=True):
            grouped = (shape, name) == ("dsv3-tp8", "fp8 blocks")
            pattern = "given" if given else "grouped" if grouped else "uniform"
            assert len(numbers(row[head])) == len(numbers(row["M"]))
            for text, tokens in zip(numbers(row[head]), numbers(row["M"]), strict=True):
                run = "mxfp8_layer_2026-11-29" if name == "MXFP8" else f"few_tokens_{kind}_2026-11-28"
                run = run if now else f"{run}_before"
                wanted = {"shape": shape, "tokens": int(tokens), "pattern": pattern, "format": FORMATS[name]}
                found.append((text, row_of(f"h200_{kind}.jsonl", (run,), **wanted)["us"]))
        yield row["layer, format"], found


def three_models() -> Iterator[tuple[str, list[Number]]]:
    runs = ("model_qwen3_30b_a3b_fp8", "model_qwen3_30b_a3b", "model_kimi_k2_thinking")
    for row in table("Layers of three models beside SGLang 0.5.23"):
        tokens, *cells = (cell.strip("*") for cell in row.values())
        found: list[Number] = []
        for position, run in enumerate(runs):
            peer = "marlin" if "kimi" in run else "sglang-triton"
            ours, theirs = (
                row_of("h200_models.jsonl", (f"{run}_2026-11-28",), backend=backend, tokens=int(tokens))["us"]
                for backend in ("oxmoe", peer)
            )
            found += zip(cells[3 * position :][:3], (ours, theirs, theirs / ours), strict=True)
        yield f"M {tokens}", found


def with_floors(row: dict[str, str], heads: list[str], rows: list[dict[str, float]]) -> list[Number]:
    """A table's times, with how many times as long as the floor they are in brackets."""
    found: list[Number] = []
    for head, of in zip(heads, rows, strict=True):
        shown = re.fullmatch(r"([\d.]+) \(([\d.]+)\)", row[head])
        assert shown
        found += zip(shown.groups(), (of["us"], of["us"] / of["floor_us"]), strict=True)
    return found


def rows_in_order() -> Iterator[tuple[str, list[Number]]]:
    for row in table("Rows in expert order"):
        shape, format = row["layer"].partition(",")[0], FORMATS[row["format"]]
        heads = ["16", "64", "256"]
        rows = []
        for head in heads:
            file, run = "h200_rows.jsonl", "packed_rows_2026-11-24"
            if format == "fp8_block":
                run = "rows_2026-11-24"
                if (shape, head) != ("dsv3-ep8", "256"):
                    file, run = "h200_fp8.jsonl", "fp8_overlap_2026-11-23"
            case = {"op": "moe_masked", "case": f"{head} tokens a rank", "backend": "oxmoe"}
            rows.append(row_of(file, (run,), shape=shape, format=format, **case))
        yield f"{row['layer']} {row['format']}", with_floors(row, heads, rows)


def mxfp8() -> Iterator[tuple[str, list[Number]]]:
    for row in table("MXFP8"):
        heads = [head for head in row if head != "layer"]
        wanted = {"shape": row["layer"], "format": "mxfp8", "backend": "oxmoe"}
        tokens = [int(head.removeprefix("M = ")) for head in heads]
        rows = [row_of("h200_packed.jsonl", (HUMMING,), tokens=each, **wanted) for each in tokens]
        yield row["layer"], with_floors(row, heads, rows)


TABLES = (humming, marlin, few_tokens, three_models, rows_in_order, mxfp8)


@pytest.mark.parametrize(
    "found", [pytest.param(found, id=f"{read.__name__} {name}") for read in TABLES for name, found in read()]
)
def test_numbers_are_those_of_the_results(found: list[Number]) -> None:
    assert found
    for shown, exact in found:
        assert float(shown) == round(exact, len(shown.partition(".")[2]))
