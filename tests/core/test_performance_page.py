"""The numbers of docs/performance.md and README are those of benches/results, recomputed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = next(folder for folder in Path(__file__).parents if (folder / "Cargo.toml").is_file())
PAGE = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
# Column head of the page -> the backends of the result files that it shows.
BACKENDS = {
    "oxmoe": ("oxmoe",),
    "SGLang Triton": ("sglang-triton",),
    "triton_kernels": ("triton_kernels",),
    "flashinfer, without routing": ("flashinfer-fp8",),
    "DeepGEMM: its GEMMs alone": ("deep-gemm",),
    "flashinfer": ("flashinfer",),
    "SGLang custom": ("SGLang custom + sgl_kernel norm",),
    "NCCL": ("NCCL + sgl_kernel norm",),
    "symmetric memory, best of two": ("torch symm one-shot + sgl_kernel norm", "torch symm two-shot + sgl_kernel norm"),
}
# Sections whose tables have a row for each cell, and the file and the runs that each was printed from.
LAYERS = {
    "fp8 with 128 x 128 block scales": (
        "h200_fp8.jsonl",
        "fp8_block_2026-11-28_peers",
        "fp8_block_few_2026-11-28_peers",
    ),
    "bf16": ("h200_bf16.jsonl", "bf16_2026-11-28_peers", "bf16_gptoss_2026-11-28_peers"),
    "MXFP4 weights, bf16 activations": ("h200_packed.jsonl", "mxfp4_2026-11-28_peers"),
}
ALLREDUCE = {"All-reduce + residual + RMSNorm": ("h200_allreduce.jsonl", "allreduce_2026-11-22")}
Times = dict[tuple[Any, ...], dict[str, dict[str, Any]]]


def times(file: str, run: str) -> Times:
    """Returns the rows of a run by cell and backend. A later row of a cell counts alone, as in the report."""
    cells: Times = {}
    for line in (ROOT / "benches" / "results" / file).read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if row["run"] != run:
            continue
        if row["op"] == "moe" and row["format"] in ("bf16", "fp8-block", "fp8_block", "mxfp4"):
            key: tuple[Any, ...] = (row["shape"], row["tokens"])
        elif row["op"] == "allreduce":
            key = (f"{row['tokens']} x {row['hidden']}",)
        else:
            continue
        cells.setdefault(key, {})[row["backend"]] = row
    return cells


def table(section: str) -> Iterator[dict[str, str]]:
    """Yields the rows of a section's first table, by the heads of its columns."""
    text = PAGE.split(f"\n## {section}\n")[1].split("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    heads, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return (dict(zip(heads, row, strict=True)) for row in rows)


def number(cell: str) -> float:
    return float(cell.strip("*"))


def rows() -> list[Any]:
    found = []
    for section, (file, *runs) in {**LAYERS, **ALLREDUCE}.items():
        assert all(f"`{name}`" in PAGE for name in (file, *runs))
        measured = [times(file, run) for run in runs]
        cells = {key: cell for run in measured for key, cell in run.items()}
        assert len(cells) == sum(map(len, measured)), "a cell is in two runs of a section"
        for row in table(section):
            key = (row["layer"].split(" (")[0], int(row["M"])) if "layer" in row else (row["tokens x hidden"],)
            found.append(pytest.param(row, cells[key], id=" ".join(map(str, key))))
    return found


@pytest.mark.parametrize(("row", "cell"), rows())
def test_rows_are_those_of_the_results(row: dict[str, str], cell: dict[str, dict[str, Any]]) -> None:
    shown = {}
    for head, names in BACKENDS.items():
        if row.get(head):
            best = min(cell[name]["us"] for name in names)
            shown[head] = best
            digits = len(row[head].strip("*").partition(".")[2])
            assert number(row[head]) == round(best, digits), head
    assert len(shown) == sum(1 for head in BACKENDS if row.get(head)) >= 2
    bold = [head for head in BACKENDS if row.get(head, "").startswith("**")]
    assert bold == [min(shown, key=lambda head: shown[head])]
    if "floor" in row:
        floor = cell["oxmoe"]["floor_us"]
        assert (row["floor"], row["x floor"]) == (f"{floor:.1f}", f"{shown['oxmoe'] / floor:.2f}")
    ratio = next(head for head in row if head.endswith("/ oxmoe"))
    against = {"SGLang": "SGLang Triton", "triton_kernels": "triton_kernels"}.get(ratio.removesuffix(" / oxmoe"))
    # The best peer of an all-reduce may be one of flashinfer's two kernels, which the page's column does not choose.
    peers = [row["us"] for name, row in cell.items() if not name.startswith("oxmoe")]
    best = shown[against] if against else min(peers)
    assert row[ratio] == f"{best / shown['oxmoe']:.2f}"


_TIME = r"\**([\d.]+)\**"
README_ROW = re.compile(rf"^\| ([^|]*?) *\| (\d*) *\| {_TIME} \| ([^|]+) \| {_TIME} \| ([\d.]+) \|$", re.M)


def lists(line: str) -> list[list[str]]:
    """Returns the cells of a table's row, each with its numbers."""
    return [[number.strip(" *") for number in cell.split(",")] for cell in line.strip("|").split("|")]


def of_readme(layer: str, tokens: str, ours: str, theirs: str) -> Iterator[str]:
    """Yields the page's rows in which these numbers stand at the same place of their cells."""
    for line in PAGE.splitlines():
        cells = lists(line) if line.startswith("|") else []
        for place in [cell.index(ours) for cell in cells if ours in cell]:
            there = [cell[place] for cell in cells if len(cell) > place]
            if theirs in there and (tokens in there if tokens else layer.split(", ")[-1] in line):
                yield line


def test_numbers_of_the_readme_are_of_the_page() -> None:
    """README has ten rows: oxmoe's time and the peer's stand in one row of the page, and the ratio is that of the
    two."""
    found = README_ROW.findall(README)
    assert len(found) == 10
    for layer, tokens, ours, peer, theirs, ratio in found:
        assert len(list(of_readme(layer, tokens, ours, theirs))) == 1, (layer, tokens, peer)
        assert f"{float(theirs) / float(ours):.2f}" == ratio
        fastest, slowest = sorted((ours, theirs), key=float)
        assert f"| **{fastest}** |" in README and f"| {slowest} |" in README


def test_readme_is_one_screen() -> None:
    assert README.count("\n") <= 65


def test_the_layers_of_models() -> None:
    """The section's table has a row for each M, and for each model oxmoe's time, a peer's, and their ratio."""
    results = ROOT / "benches" / "results" / "h200_models.jsonl"
    recorded = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    section = PAGE.split("\n## Layers of three models beside SGLang 0.5.23\n")[1].split("\n## ")[0]
    peers = {"qwen3_30b_a3b_fp8": "sglang-triton", "qwen3_30b_a3b": "sglang-triton", "kimi_k2_thinking": "marlin"}
    tokens = sorted({row["tokens"] for row in recorded})
    lines = [line for line in section.splitlines() if re.match(r"\| \d", line)]
    assert len(lines) == len(tokens)
    for line, count in zip(lines, tokens, strict=True):
        expected = [str(count)]
        for model, peer in peers.items():
            run = f"model_{model}_2026-11-28"
            assert f"`{run}`" in section
            ours, theirs = (
                next(row["us"] for row in recorded if (row["run"], row["backend"], row["tokens"]) == (run, name, count))
                for name in ("oxmoe", peer)
            )
            shown = [f"{ours:.1f}", f"{theirs:.1f}"]
            faster = int(theirs < ours)
            shown[faster] = f"**{shown[faster]}**"
            expected += [*shown, f"{theirs / ours:.2f}"]
        assert line == f"| {' | '.join(expected)} |"
