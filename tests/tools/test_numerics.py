"""benches/numerics.py: errors of small layers against the cost of roundings, and docs/numerics.md against its rows."""

from __future__ import annotations

import importlib.util
import json
import math
import statistics
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import oxmoe
from oxmoe.tools.bench import layers

ROOT = next(folder for folder in Path(__file__).parents if (folder / "Cargo.toml").is_file())
RESULTS = ROOT / "benches" / "results" / "numerics_cpu.jsonl"
GPU_RESULTS = ROOT / "benches" / "results" / "h200_numerics.jsonl"
PAGE = (ROOT / "docs" / "numerics.md").read_text(encoding="utf-8")
# The norm of rounding normal numbers to bf16's 8 bits: errors are uniform in a step, which is 2^-7 of a power of two.
ROUNDING = math.sqrt(
    sum(
        (math.erf(2 ** (e + 1) / math.sqrt(2)) - math.erf(2**e / math.sqrt(2))) * 4.0 ** (e - 7) / 12
        for e in range(-40, 4)
    )
)
# Rows of GEMM2 and the layer's output are rounded.
TWO_ROUNDINGS = math.sqrt(2) * ROUNDING


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("numerics", ROOT / "benches" / "numerics.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # for its dataclasses
    spec.loader.exec_module(module)
    return module


numerics = load()
SMALL = numerics.Shape(hidden=256, intermediate=256, experts=4, top_k=2, tokens=32)
Errors = dict[str, tuple[float, float]]


def drawn(rng: torch.Generator) -> list[Any]:
    return [numerics.draw("Gaussian", SMALL, int(torch.randint(1 << 31, (), generator=rng))) for _ in range(5)]


def measured(name: str, inputs: list[Any]) -> Errors:
    """Returns the medians over the layers. In about one of 100 such layers with scales of activations for rows or
    groups, the largest activation of a row rounds to its neighbour in bf16. Codes of the row then move by a few percent
    of it."""
    errors = [numerics.measure(name, layer) for layer in inputs]
    return {
        part: (statistics.median(of[part][0] for of in errors), statistics.median(of[part][1] for of in errors))
        for part in numerics.PARTS
    }


def is_of_two_roundings(error: float) -> bool:
    """Whether an error is that of two roundings. One that is half or twice as large is refused with a wide margin."""
    return bool(TWO_ROUNDINGS / 1.2 < error < TWO_ROUNDINGS * 1.2)


# Errors of small layers

BF16 = [name for name, (dtype, _) in numerics.DESCRIBED.items() if dtype == torch.bfloat16]


@pytest.mark.parametrize("name", [name for name in BF16 if name != "fp8_tensor"])
def test_arithmetic_costs_two_roundings(name: str, rng: torch.Generator) -> None:
    """In every format whose output is bf16 the fp32 sums add next to nothing. With one scale for a call a single
    activation that rounds to its neighbour may move all codes, so that format has no such bound."""
    errors = measured(name, drawn(rng))
    assert is_of_two_roundings(errors["arithmetic"][0]), errors
    assert errors["arithmetic"][0] < errors["arithmetic"][1] < 2 * TWO_ROUNDINGS
    parts = sum(errors[part][0] ** 2 for part in ("weights", "activations", "arithmetic"))
    assert 0.85 * math.sqrt(parts) < errors["total"][0] < 1.15 * math.sqrt(parts)


def test_f32_has_no_roundings(rng: torch.Generator) -> None:
    errors = measured("f32", drawn(rng))
    assert all(0 < norm < 1e-6 for norm, _ in errors.values()), errors


@pytest.mark.parametrize("name", ["bf16", "fp8_block"])
@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_other_arithmetic_is_seen(
    name: str, factor: float, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel's error is half or twice as large: its noise is that of the roundings times the factor."""
    inputs, exact, moe = drawn(rng), numerics.exact, oxmoe.moe
    right = measured(name, inputs)["arithmetic"][0]
    results = []

    def kept(*arguments: Any) -> Any:
        results.append(exact(*arguments))
        return results[-1]

    def wrong(*arguments: Any) -> torch.Tensor:
        truth = results[-1][0]  # with the format's roundings of activations: the last before oxmoe's call
        return truth + factor * (moe(*arguments).double() - truth)

    monkeypatch.setattr(numerics, "exact", kept)
    monkeypatch.setattr(numerics.oxmoe, "moe", wrong)
    error = measured(name, inputs)["arithmetic"][0]
    assert is_of_two_roundings(right) and not is_of_two_roundings(error)
    assert error == pytest.approx(factor * right, rel=1e-6)


@pytest.mark.parametrize("name", ["bf16", "fp8_block"])
def test_a_wrong_weight_is_no_rounding(name: str, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that reads one expert's w2 too large by 2 % is beyond the arithmetic's error."""
    of = numerics.FORMATS[name]

    def build(w13: Any, w2: Any, given: Any) -> Any:
        if w2.scales is None:
            codes = w2.codes.clone()
            codes[1] *= 1.02
            return of.build(w13, numerics.Matrix(codes, None, w2.numbers), given)
        scales = w2.scales.clone()
        scales[1] *= 1.02
        return of.build(w13, numerics.Matrix(w2.codes, scales, w2.numbers), given)

    changed = numerics.Format(of.quantise, build, of.round_rows)
    monkeypatch.setitem(numerics.FORMATS, name, changed)
    assert not is_of_two_roundings(measured(name, drawn(rng))["arithmetic"][0])


@pytest.mark.parametrize(("name", "least", "most"), [("bf16", 0.8, 1.2), ("fp8_block", 0.8, 1.2)])
def test_weights_cost_what_their_step_says(name: str, least: float, most: float, rng: torch.Generator) -> None:
    """Three matrices have independent roundings: gate, up and w2. e4m3 has 4 bits, and bf16 has 8."""
    step = ROUNDING * (16 if name == "fp8_block" else 1)
    gate_up_down = math.sqrt(3)
    error = measured(name, drawn(rng))["weights"][0]
    assert least < error / (gate_up_down * step) < most, error / step


def test_inputs_are_what_they_are_called(rng: torch.Generator) -> None:
    seed = int(torch.randint(1 << 31, (), generator=rng))
    layer = {name: numerics.draw(name, SMALL, seed) for name in numerics.INPUTS}
    again = numerics.draw("outliers", SMALL, seed)
    assert all(torch.equal(a, b) for a, b in zip(vars(again).values(), vars(layer["outliers"]).values(), strict=True))
    peaks = {name: of.x.square().mean(0).sqrt() for name, of in layer.items()}
    channels = peaks["outliers"] > 15
    assert int(channels.sum()) == SMALL.hidden // 128 and not (peaks["Gaussian"] > 3).any()
    balanced = layer["balanced outliers"]
    large = balanced.x.square().mean(0).sqrt() > 15
    assert balanced.w13[..., large].abs().mean() < 0.05 * balanced.w13[..., ~large].abs().mean()
    tails = layer["heavy tails"].w13
    assert tails.abs().max() / tails.std() > 2 * layer["Gaussian"].w13.abs().max() / layer["Gaussian"].w13.std()
    assert layer["tiny"].x.std() < 0.01


# The page

ROWS = numerics.recorded(RESULTS)


def test_every_format_is_measured() -> None:
    assert set(numerics.FORMATS) == set(layers.FORMATS) | set(numerics.EXTRA)
    expected = {(name, inputs) for name in numerics.FORMATS for inputs in numerics.INPUTS}
    assert {(row["format"], row["inputs"]) for row in ROWS} == expected and len(ROWS) == len(expected)
    assert all(row["commit"] and isinstance(row["seed"], int) for row in ROWS)


@pytest.mark.parametrize("part", numerics.TITLES)
def test_the_tables_of_the_page(part: str) -> None:
    assert f"\n\n{numerics.table(ROWS, part)}\n\n" in PAGE
    assert f"`{ROWS[0]['run']}`" in PAGE and f"seed {ROWS[0]['seed']}" in PAGE


def test_the_table_of_a_gpu() -> None:
    """A GPU has no fp32 layer. Weights and activations are those of the CPU's run, so they have the same errors."""
    rows = numerics.recorded(GPU_RESULTS)
    text = numerics.table(rows, "arithmetic")
    assert f"\n\n{text}\n\n" in PAGE and "`f32`" not in text and f"`{rows[0]['run']}`" in PAGE
    assert len(rows) == len(ROWS) - len(numerics.INPUTS)
    on_cpu = {(row["format"], row["inputs"]): row for row in ROWS}
    for row in rows:
        other = on_cpu[row["format"], row["inputs"]]
        assert all(row[part] == pytest.approx(other[part], rel=1e-3) for part in ("weights", "activations"))


@pytest.mark.parametrize("name", numerics.charts(ROWS))
def test_the_charts_of_the_page(name: str) -> None:
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert text == numerics.charts(ROWS)[name] and len(text) < 60_000
    assert f"]({name})" in PAGE


RECORDED = [row for row in ROWS if row["format"] in BF16]


@pytest.mark.parametrize("row", RECORDED, ids=[f"{row['format']}-{row['inputs']}" for row in RECORDED])
def test_recorded_arithmetic_is_that_of_two_roundings(row: dict[str, Any]) -> None:
    assert is_of_two_roundings(row["arithmetic"])


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The command prints its seed, and appends rows that the tables are made of."""
    path = tmp_path / "rows.jsonl"
    monkeypatch.setattr(numerics, "Shape", lambda: SMALL)
    arguments = ["numerics.py", "--draws", "1", "--seed", "7", "--json", str(path), "--run", "small"]
    monkeypatch.setattr(sys, "argv", arguments)
    numerics.main()
    assert "seed 7" in capsys.readouterr().out
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert len(rows) == len(numerics.FORMATS) * len(numerics.INPUTS)
    assert all(row["run"] == "small" and row["seed"] == 7 and row["hidden"] == 256 for row in rows)
    assert all(str(tmp_path) not in str(row) for row in rows)
    monkeypatch.setattr(sys, "argv", ["numerics.py", "--table", str(path)])
    numerics.main()
    printed = capsys.readouterr().out
    assert all(text in printed for text in numerics.tables(numerics.recorded(path)).values())
