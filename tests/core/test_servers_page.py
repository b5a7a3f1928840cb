"""The tables of docs/sglang_servers.md that compare servers on GPUs are those of benches/results, recomputed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = next(folder for folder in Path(__file__).parents if (folder / "Cargo.toml").is_file())
PAGE = (ROOT / "docs" / "sglang_servers.md").read_text(encoding="utf-8")
LOADS = ("1", "16", "64")
UPDATED = "updated"
H100 = "servers_qwen_{}_2026-11-25"
# The first words of a table's row -> its run, for the tables that follow a text of the page.
RUNS = {
    "**Whole models**": {"GPT-OSS-20B": "servers_gpt_whole_2026-11-29", "Qwen3": "servers_qwen_int4_whole_2026-11-29"},
    "**Four layers in each": {
        "int4": "servers_qwen_int4_2026-11-29",
        "NVFP4": "servers_qwen_nvfp4_2026-11-29",
        "AWQ": "servers_qwen_awq_2026-11-29",
        "GPTQ": "servers_qwen_gptq_2026-11-29",
    },
    "**Earlier runs.**": {"fp8": H100.format("fp8"), "bf16": H100.format("bf16")},
    "Two rounds were timed in turn:": {"": "servers_qwen_bf16_tp4_2026-11-26"},
    "**More formats, on H200s**": {
        "GPT-OSS-20B": "servers_gpt_2026-11-28",
        "DeepSeek-V3": "servers_deepseek_fp8_2026-11-28",
        "Qwen3-30B-A3B, int4": "servers_qwen_int4_2026-11-28",
        "Qwen3-30B-A3B, AWQ": "servers_qwen_awq_2026-11-28",
        "Qwen3-30B-A3B, NVFP4": "servers_qwen_nvfp4_2026-11-28",
    },
    "**W4AFP8, GPTQ and two ranks**": {
        "DeepSeek-V3, W4AFP8": "servers_deepseek_w4afp8_2026-11-28",
        "Qwen3-30B-A3B, GPTQ": "servers_qwen_gptq_2026-11-28",
        "GPT-OSS-20B": "servers_gpt_tp2_2026-11-28",
        "DeepSeek-V3, fp8": "servers_deepseek_fp8_tp2_2026-11-28",
    },
    "### DeepSeek-V4, MiniMax-M3": {
        "DeepSeek-V4": "servers_deepseek_v4_2026-11-29",
        "MiniMax-M3, bf16": "servers_minimax_m3_2026-11-29",
        "MiniMax-M3, MXFP8": "servers_minimax_m3_mxfp8_2026-11-29",
        "Kimi-K3, MXFP4": "servers_kimi_k3_mxfp4_2026-11-29",
        "Kimi-K3 again": "servers_kimi_k3_mxfp4_2026-11-29_b",
    },
}
Run = dict[str, dict[str, Any]]


@cache
def results() -> dict[str, Run]:
    """Returns the rows "off", "on" and "compared" of each run."""
    found: dict[str, Run] = {}
    for file in ("h100_servers.jsonl", "h200_servers.jsonl"):
        for line in (ROOT / "benches" / "results" / file).read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            assert found.setdefault(row["run"], {}).setdefault(row["mode"], row) is row
    return found


def tables(text: str) -> Iterator[dict[str, str]]:
    """Yields the rows of the table that follows a text, by the heads of its columns. An empty first cell is that of
    the row above."""
    found = re.search(r"(?:^\|.*\n)+", PAGE[PAGE.index(text) :], re.M)
    assert found
    heads, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in found[0].splitlines())
    for position, row in enumerate(rows):
        row[:2] = [cell or above for cell, above in zip(row[:2], rows[position - 1], strict=False)]
        yield dict(zip(heads, row, strict=True))


def speed(run: Run, mode: str, load: str) -> float:
    return float(run[mode]["loads"][load]["tokens_per_s"])


def rounds(run: Run, mode: str, load: str) -> str:
    return ", ".join(f"{each:.0f}" for each in run[mode]["loads"][load]["tokens_per_s_of_rounds"])


def pair(run: Run, load: str) -> str:
    return f"{speed(run, 'off', load):.0f} / {speed(run, 'on', load):.0f}"


def ratio(run: Run, load: str) -> str:
    return f"{speed(run, 'on', load) / speed(run, 'off', load):.2f}"


def total(run: Run, name: str) -> int:
    """Sums over all loads but the one after the update, which stands in a column of its own."""
    return sum(load[name] for of, load in run["compared"]["tokens"].items() if of != UPDATED)


def margin(run: Run) -> str:
    parted = [place for load in run["compared"]["tokens"].values() for place in load["divergences"]]
    return f"{max((abs(place['margin']) for place in parted if 'margin' in place), default=0):.3f}"


def twice(run: Run) -> str:
    found = [run[mode]["same_server_twice"] for mode in ("off", "on")]
    return f"{found[0]['equal']}, {found[1]['equal']} of {found[0]['tokens']}"


def of_loads(of: Callable[[Run, str], str]) -> Callable[[Run], str]:
    return lambda run: ", ".join(of(run, load) for load in LOADS)


# Heads of columns -> what they show of a run. Tables with a row for each load have those of LOAD.
RUN: dict[str, Callable[[Run], str]] = {
    "tokens equal": lambda run: f"{total(run, 'equal')} of {total(run, 'tokens')}",
    "equal before a first difference": lambda run: str(total(run, "before_first_difference")),
    "after the update": lambda run: "{equal} of {tokens}".format(**run["compared"]["tokens"][UPDATED]),
    "largest margin": margin,
    "largest margin there": margin,
    "without / with oxmoe": of_loads(pair),
    "tokens a second with 1, 16, 64 requests: without / with oxmoe": of_loads(pair),
    "with / without": of_loads(ratio),
    "log-probabilities differ by (median, most)": lambda run: ", ".join(
        f"{run['compared']['logprobs'][name]:.3f}" for name in ("median", "most")
    ),
    "same server twice, of its tokens equal: without, with oxmoe": twice,
}
LOAD: dict[str, Callable[[Run, str], str]] = {
    "without": lambda run, load: f"{speed(run, 'off', load):.0f} ({rounds(run, 'off', load)})",
    "with oxmoe": lambda run, load: f"{speed(run, 'on', load):.0f} ({rounds(run, 'on', load)})",
    "with / without": ratio,
    "without / with oxmoe": pair,
    "each round without": lambda run, load: rounds(run, "off", load),
    "each round with": lambda run, load: rounds(run, "on", load),
}
TEXT = {"weights", "model, layers", "SGLang's own kernels", "at a time", "requests at a time"}


def cells() -> Iterator[Any]:
    for text, runs in RUNS.items():
        for row in tables(text):
            first = next(iter(row.values()))
            names = [name for start, name in runs.items() if first.startswith(start)]
            assert len(names) == 1, (text, first)
            load = row.get("at a time") or row.get("requests at a time")
            for head, shown in row.items():
                if head in TEXT or head.endswith("weights") or shown == "not comparable":
                    continue
                yield pytest.param(names[0], load, head, shown.strip("*"), id=f"{names[0]} {load or ''} {head}")


@pytest.mark.parametrize(("name", "load", "head", "shown"), list(cells()))
def test_cells_are_those_of_the_results(name: str, load: str | None, head: str, shown: str) -> None:
    run = results()[name]
    assert shown == (LOAD[head](run, load) if load else RUN[head](run))


def test_every_run_of_a_table_is_named() -> None:
    """A reader finds the rows of a table by the name of its run, in which a star stands for any letters."""
    named = re.findall(r"`(servers_[\w*-]+)`", PAGE)
    runs = [name for of_table in RUNS.values() for name in of_table.values()]
    assert [name for name in runs if not any(fnmatch(name, pattern) for pattern in named)] == []
