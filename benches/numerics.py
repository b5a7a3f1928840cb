"""Measures the error of a MoE layer in every format of weights against fp64: `python benches/numerics.py`.

Every layer has fresh random weights and activations. The formats of a run get the same numbers. A layer is computed
four times: by oxmoe, and in fp64 on the original numbers, on dequantised weights, and with rounded activations, too. So
the errors come apart:

- weights: fp64 on dequantised weights, against fp64 on the original ones. Activations are not rounded.
- activations: the same weights in fp64, with x and GEMM1's output rounded as the format rounds them, against fp64
  without these roundings.
- arithmetic: oxmoe, against fp64 on the same weights with the same roundings of activations.
- total: oxmoe, against fp64 on the original weights and activations.

`--json FILE --run NAME` appends a row for each format and kind of inputs. `--table FILE` and `--plots FILE` print and
draw what docs/numerics.md shows.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import oxmoe
from oxmoe import ExpertWeights, reference
from oxmoe.testing import relative_norm
from oxmoe.tools.bench import layers, machine

E4M3 = torch.float8_e4m3fn
PARTS = ("weights", "activations", "arithmetic", "total")
DOCS = Path(__file__).resolve().parents[1] / "docs"


@dataclass(frozen=True)
class Shape:
    """A layer with gated SiLU, and a number of tokens."""

    hidden: int = 1024
    intermediate: int = 512
    experts: int = 8
    top_k: int = 2
    tokens: int = 64


# Inputs


@dataclass(frozen=True)
class Inputs:
    """The original numbers of a layer in fp64, and its routing."""

    w13: Tensor  # [E, 2I, H]
    w2: Tensor  # [E, H, I]
    x: Tensor  # [T, H]
    topk_weights: Tensor  # fp32 [T, k]
    topk_ids: Tensor  # int32 [T, k]


def _normal(size: tuple[int, ...], rng: torch.Generator) -> Tensor:
    return torch.randn(size, generator=rng, dtype=torch.float64)


def _student(size: tuple[int, ...], rng: torch.Generator, freedom: int = 4) -> Tensor:
    """Draws numbers of Student's t with variance 1."""
    squares = sum(_normal(size, rng).square() for _ in range(freedom))
    return _normal(size, rng) * torch.sqrt((freedom - 2) / squares)


def _outliers(x: Tensor, w13: Tensor, rng: torch.Generator, *, balanced: bool) -> None:
    """Makes one of 128 channels of x 30 to 100 times as large. balanced: their weights are as much smaller."""
    hidden = x.shape[1]
    channels = torch.randperm(hidden, generator=rng)[: max(1, hidden // 128)]
    factors = 30 + 70 * torch.rand(len(channels), generator=rng, dtype=torch.float64)
    x[:, channels] *= factors
    if balanced:
        w13[..., channels] /= factors


# The names of the kinds of inputs on the page.
INPUTS = ("Gaussian", "heavy tails", "outliers", "balanced outliers", "tiny")


def draw(name: str, shape: Shape, seed: int, device: str = "cpu") -> Inputs:
    rng = torch.Generator().manual_seed(zlib.crc32(f"{name} {seed}".encode()))
    numbers = _student if name == "heavy tails" else _normal
    w13 = numbers((shape.experts, 2 * shape.intermediate, shape.hidden), rng) * shape.hidden**-0.5
    w2 = numbers((shape.experts, shape.hidden, shape.intermediate), rng) * shape.intermediate**-0.5
    x = numbers((shape.tokens, shape.hidden), rng)
    if name.endswith("outliers"):
        _outliers(x, w13, rng, balanced=name.startswith("balanced"))
    if name == "tiny":
        w13, w2, x = w13 / 4, w2 / 4, x / 256
    logits = torch.randn((shape.tokens, shape.experts), generator=rng)
    weights, ids = reference.topk(logits, shape.top_k)
    return Inputs(*(tensor.to(device) for tensor in (w13, w2, x, weights, ids)))


# Weights of the formats


@dataclass(frozen=True)
class Matrix:
    """One matrix of every expert in a format."""

    codes: Tensor
    scales: Tensor | None
    numbers: Tensor  # fp64 [E, R, K]: the values of codes and scales
    extra: Tensor | None = None  # zero points, or the global scales of experts


def _plain(dtype: torch.dtype) -> Callable[[Tensor], Matrix]:
    def rounded(weights: Tensor) -> Matrix:
        codes = weights.to(dtype)
        return Matrix(codes, None, codes.double())

    return rounded


def _fp8(rows: int | None, columns: int | None) -> Callable[[Tensor], Matrix]:
    """Quantises to e4m3 with a scale for each block of rows x columns. None: all of them. Scales have the form [E, R',
    K']."""

    def quantised(weights: Tensor) -> Matrix:
        experts, all_rows, all_columns = weights.shape
        of_rows, of_columns = rows or all_rows, columns or all_columns
        blocks = weights.unflatten(2, (-1, of_columns)).unflatten(1, (-1, of_rows))
        scales = (blocks.abs().amax((2, 4)) / 448).float()
        factors = scales.double()[:, :, None, :, None]
        codes = (blocks / factors).clamp(-448, 448).to(E4M3)
        numbers = (codes.double() * factors).view(experts, all_rows, all_columns)
        return Matrix(codes.view(experts, all_rows, all_columns), scales, numbers)

    return quantised


def _mxfp8(weights: Tensor) -> Matrix:
    codes, scales = reference.mxfp8_groups(weights)
    numbers = codes.double() * torch.exp2(scales.double() - 127).repeat_interleave(32, dim=-1)
    return Matrix(codes, scales, numbers)


def _mxfp4(*, window: bool) -> Callable[[Tensor], Matrix]:
    def quantised(weights: Tensor) -> Matrix:
        codes, scales = oxmoe.quantize.mxfp4(weights.float())
        multiplied = [(codes, scales)]
        if window:  # If activations are e4m3, small scales are raised, matrix by matrix.
            multiplied = [reference.mxfp4_window(*one) for one in zip(codes, scales, strict=True)]
        numbers = torch.cat([reference.mxfp4_weights(*one, torch.float32).double() for one in multiplied])
        return Matrix(codes, scales, numbers.view(weights.shape))

    return quantised


def _nvfp4(weights: Tensor) -> Matrix:
    wide = (448 * 6 / weights.abs().amax((1, 2))).float()
    codes, scales = oxmoe.functions.quantize_nvfp4(weights.float(), wide, scale_layout="linear")
    scales, narrow = scales.view(E4M3), 1 / wide
    numbers = reference.nvfp4_numbers(codes, scales).double() * narrow.double()[:, None, None]
    return Matrix(codes, scales, numbers, narrow)


def _int4(group: int, *, zeros: bool) -> Callable[[Tensor], Matrix]:
    def quantised(weights: Tensor) -> Matrix:
        groups = weights.unflatten(2, (-1, min(group, weights.shape[2])))
        points = None
        if zeros:
            low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
            scales = ((high - low) / 15).bfloat16()
            points = (-low / scales.double()).round().clamp(0, 15).to(torch.uint8)
        else:
            scales = (groups.abs().amax(-1) / 7.5).bfloat16()
        middle = 8 if points is None else points.double()[..., None]
        codes = (groups / scales.double()[..., None] + middle).round().clamp(0, 15).flatten(2).to(torch.uint8)
        pairs = codes[..., 0::2] | codes[..., 1::2] << 4
        numbers = torch.stack(
            [
                reference.int4_weights(pairs[expert], scales[expert], None if points is None else points[expert])
                for expert in range(len(pairs))
            ]
        )
        return Matrix(pairs, scales, numbers.double(), points)

    return quantised


# Rounds rows [M, K] of the compute type as a format rounds activations, and returns fp64 numbers. The second argument
# is a scale that was given.
Rounding = Callable[[Tensor, Tensor], Tensor]


def _unchanged(rows: Tensor, scale: Tensor) -> Tensor:
    return rows.double()


def _groups_e4m3(rows: Tensor, scale: Tensor) -> Tensor:
    codes, scales = reference.fp8_groups(rows)
    return codes.double() * scales.double().repeat_interleave(128, dim=-1)


def _rows_fp8(kind: str) -> Rounding:
    def rounded(rows: Tensor, scale: Tensor) -> Tensor:
        static = kind == "static"
        codes, scales = reference.fp8_rows(rows, scale if static else None, None if static else kind)
        return codes.double() * scales[:, :1].double()

    return rounded


def _rows_e4m3(rows: Tensor, scale: Tensor) -> Tensor:
    codes, scales = reference.rows_e4m3(rows)
    return codes.double() * scales.double()[:, None]


def _rows_mxfp8(rows: Tensor, scale: Tensor) -> Tensor:
    return reference.mxfp8_rows(rows).double()


def _rows_nvfp4(rows: Tensor, scale: Tensor) -> Tensor:
    codes, scales = reference.nvfp4(rows, scale)
    return reference.nvfp4_numbers(codes[..., 0::2] | codes[..., 1::2] << 4, scales).double() / scale.double()


# Formats


@dataclass(frozen=True)
class Scales:
    """Scales of activations that a checkpoint gives. Here they fit the activations exactly: the best case."""

    x: Tensor  # fp32, one number
    act: Tensor


Build = Callable[[Matrix, Matrix, Scales], ExpertWeights]


@dataclass(frozen=True)
class Format:
    quantise: Callable[[Tensor], Matrix]
    build: Build
    round_rows: Rounding = _unchanged
    largest: float = 448.0  # the number that a given scale maps the largest activation to
    inverse: bool = False  # a given scale multiplies activations


def _with_scales(constructor: str, **options: Any) -> Build:
    make = getattr(ExpertWeights, constructor)
    return lambda w13, w2, given: make(w13.codes, w2.codes, w13.scales, w2.scales, **options)


def _build_plain(constructor: str) -> Build:
    return lambda w13, w2, given: getattr(ExpertWeights, constructor)(w13.codes, w2.codes)


def _build_fp8_tensor(*, rows: bool = False, static: bool = False, **options: Any) -> Build:
    def build(w13: Matrix, w2: Matrix, given: Scales) -> ExpertWeights:
        assert w13.scales is not None and w2.scales is not None
        scales = [m.scales.flatten(1) if rows else m.scales.flatten() for m in (w13, w2)]
        activations = {"a13_scale": given.x, "a2_scale": given.act} if static else {}
        return ExpertWeights.fp8_tensor(w13.codes, w2.codes, *scales, **activations, **options)

    return build


def _build_nvfp4(*, a4: bool) -> Build:
    def build(w13: Matrix, w2: Matrix, given: Scales) -> ExpertWeights:
        assert w13.extra is not None and w2.extra is not None
        wide = [w13.extra, w2.extra]
        options = {}
        if a4:
            wide = [w13.extra / given.x, w2.extra / given.act]
            options = {"input_global_scale": given.x, "a2_global_scale": given.act}
        return ExpertWeights.nvfp4(w13.codes, w2.codes, w13.scales, w2.scales, *wide, **options)

    return build


def _build_int4(w13: Matrix, w2: Matrix, given: Scales) -> ExpertWeights:
    zeros = {"w13_zeros": w13.extra, "w2_zeros": w2.extra}
    return ExpertWeights.int4(w13.codes, w2.codes, w13.scales, w2.scales, **zeros)


MATRIX, CHANNEL = _fp8(None, None), _fp8(1, None)
_A4 = {"round_rows": _rows_nvfp4, "largest": 448.0 * 6, "inverse": True}
FORMATS = {
    "f32": Format(_plain(torch.float32), _build_plain("f32")),
    "f16": Format(_plain(torch.float16), _build_plain("f16")),
    "bf16": Format(_plain(torch.bfloat16), _build_plain("bf16")),
    "mxfp8": Format(_mxfp8, _with_scales("mxfp8"), _rows_mxfp8),
    "fp8_block": Format(_fp8(128, 128), _with_scales("fp8_block"), _groups_e4m3),
    "fp8_tensor-token, channels": Format(CHANNEL, _build_fp8_tensor(rows=True, per_token=True), _rows_fp8("token")),
    "fp8_tensor-token": Format(MATRIX, _build_fp8_tensor(per_token=True), _rows_fp8("token")),
    "fp8_tensor-static": Format(MATRIX, _build_fp8_tensor(static=True), _rows_fp8("static")),
    "fp8_tensor": Format(MATRIX, _build_fp8_tensor(per_token=False), _rows_fp8("tensor")),
    "int4": Format(_int4(32, zeros=False), _build_int4),
    "int4-zeros": Format(_int4(128, zeros=True), _build_int4),
    "nvfp4": Format(_nvfp4, _build_nvfp4(a4=False)),
    "nvfp4-a4": Format(_nvfp4, _build_nvfp4(a4=True), **_A4),  # type: ignore[arg-type]
    "mxfp4": Format(_mxfp4(window=False), _with_scales("mxfp4")),
    "mxfp4-a8": Format(_mxfp4(window=True), _with_scales("mxfp4", activation_dtype=E4M3), _rows_e4m3),
}
# The formats of the bench, and two that differ from one of them in their dtype or their scales.
EXTRA = {"f32": (torch.float32, 32.0), "fp8_tensor-token, channels": (torch.bfloat16, 8.0)}
DESCRIBED = {**layers.FORMATS, **EXTRA}


# Errors


def exact(w13: Tensor, w2: Tensor, inputs: Inputs, rounded: Callable[[Tensor, int], Tensor]) -> tuple[Tensor, Tensor]:
    """Returns (the layer's result, GEMM1's activated rows in the experts' order) in fp64.

    rounded(rows, stage) returns the rows that GEMM1 (stage 0) or GEMM2 (stage 1) multiplies in place of these.
    """
    x, places = rounded(inputs.x, 0), []
    acts = []
    for expert in range(len(w13)):
        token, slot = torch.nonzero(inputs.topk_ids == expert, as_tuple=True)
        places.append((token, slot))
        gate, up = (x[token] @ w13[expert].T).chunk(2, dim=1)
        acts.append(gate * torch.sigmoid(gate) * up)
    act = torch.cat(acts)
    out, rows = torch.zeros_like(inputs.x), rounded(act, 1).split([len(token) for token, _ in places])
    for expert, (token, slot) in enumerate(places):
        terms = rows[expert] @ w2[expert].T * inputs.topk_weights[token, slot, None].double()
        out.index_add_(0, token, terms)
    return out, act


def worst_row(actual: Tensor, expected: Tensor) -> float:
    """Returns the largest relative norm of the error of a token's row."""
    errors = (actual.double() - expected.double()).norm(dim=-1)
    return float((errors / expected.double().norm(dim=-1)).max())


def measure(name: str, inputs: Inputs) -> dict[str, tuple[float, float]]:
    """Returns (relative norm, worst row) of each of PARTS."""
    of, (dtype, _) = FORMATS[name], DESCRIBED[name]
    w13, w2 = of.quantise(inputs.w13), of.quantise(inputs.w2)
    original, _ = exact(inputs.w13, inputs.w2, inputs, lambda rows, stage: rows)
    unrounded, act = exact(w13.numbers, w2.numbers, inputs, lambda rows, stage: rows)

    peaks = [rows.abs().max().float() / of.largest for rows in (inputs.x, act)]
    given = Scales(*(1 / peak if of.inverse else peak for peak in peaks))
    scales = (given.x, given.act)
    rounded, _ = exact(
        w13.numbers, w2.numbers, inputs, lambda rows, stage: of.round_rows(rows.to(dtype), scales[stage])
    )
    result = oxmoe.moe(inputs.x.to(dtype), of.build(w13, w2, given), inputs.topk_weights, inputs.topk_ids)
    pairs = ((unrounded, original), (rounded, unrounded), (result, rounded), (result, original))
    errors = [(relative_norm(*pair), worst_row(*pair)) for pair in pairs]
    return dict(zip(PARTS, errors, strict=True))


def row_of(errors: list[dict[str, tuple[float, float]]]) -> dict[str, float]:
    """Returns the mean of the norms of all draws, and the worst of their rows."""
    fields = {}
    for part in PARTS:
        norms, worst = zip(*(one[part] for one in errors), strict=True)
        fields[part] = sum(norms) / len(norms)
        fields[f"{part}_worst_row"] = max(worst)
    return fields


# The page


Rows = list[dict[str, Any]]


def recorded(file: Path) -> Rows:
    """Returns the rows of the last run in a file."""
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return [row for row in rows if row["run"] == rows[-1]["run"]]


def percent(error: float) -> str:
    """Formats an error as a number of percent with two digits."""
    number = 100 * error
    if number < 1e-3:
        return f"{number:.0e}".replace("e-0", "e-")
    digits = max(0, 1 - math.floor(math.log10(number)))
    return f"{number:.{digits}f}"


TITLES = {
    "total": "Total error",
    "weights": "Error of the weights",
    "activations": "Error of rounded activations",
    "arithmetic": "Error of oxmoe's arithmetic",
}


def table(rows: Rows, part: str) -> str:
    """Returns a table of the error's norm in percent, with the worst row's norm in brackets."""
    cells = {(row["format"], row["inputs"]): row for row in rows}
    lines = [f"| format | bits | {' | '.join(INPUTS)} |", "|---" * (2 + len(INPUTS)) + "|"]
    for name in FORMATS:
        if not any(row["format"] == name for row in rows):  # fp32 runs on CPUs alone
            continue
        found = [cells[name, inputs] for inputs in INPUTS]
        shown = [f"{percent(row[part])} ({percent(row[f'{part}_worst_row'])})" for row in found]
        lines.append(f"| `{name}` | {DESCRIBED[name][1]:g} | {' | '.join(shown)} |")
    return "\n".join(lines)


def tables(rows: Rows) -> dict[str, str]:
    return {part: table(rows, part) for part in TITLES}


_COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e")
_LEFT, _TOP, _WIDTH, _STEP = 210, 62, 560, 24
_LEAST, _MOST = -4, 0  # powers of ten of the axis
CHARTED = tuple(name for name in FORMATS if name != "f32")  # f32 lies far to the left of all others


def _mark(kind: int, x: float, y: float) -> str:
    fill = f'fill="{_COLOURS[kind]}"'
    points = {
        1: [(0, -6), (6, 5), (-6, 5)],
        2: [(-5, -5), (5, -5), (5, 5), (-5, 5)],
        3: [(0, -7), (7, 0), (0, 7), (-7, 0)],
        4: [(0, 6), (6, -5), (-6, -5)],
    }
    if kind == 0:
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" {fill}/>'
    return f'<polygon points="{" ".join(f"{x + a:.1f},{y + b:.1f}" for a, b in points[kind])}" {fill}/>'


def chart(title: str, series: dict[str, dict[str, float]]) -> str:
    """Draws an SVG with a line for each format and a mark for each of the series, on a logarithmic axis."""

    def place(error: float) -> float:
        return _LEFT + _WIDTH * (math.log10(error) - _LEAST) / (_MOST - _LEAST)

    bottom = _TOP + _STEP * len(CHARTED)
    width, height = _LEFT + _WIDTH + 40, bottom + 44
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="13" role="img" aria-label="{title}">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="12" y="20" font-weight="bold">{title}</text>',
    ]
    for kind, name in enumerate(series):
        x = 20 + 150 * kind
        parts += [_mark(kind, x, 40), f'<text x="{x + 11}" y="44">{name}</text>']
    for power in range(_LEAST, _MOST + 1):
        x = place(10.0**power)
        parts.append(f'<line x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{bottom}" stroke="#cccccc"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{10.0 ** (power + 2):g} %</text>')
    parts.append(f'<text x="{_LEFT}" y="{bottom + 37}">relative norm of the error</text>')
    for line, name in enumerate(CHARTED):
        y = _TOP + _STEP * (line + 0.5)
        parts.append(f'<text x="{_LEFT - 12}" y="{y + 4:.1f}" text-anchor="end">{name}</text>')
        parts.append(f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{_LEFT + _WIDTH}" y2="{y:.1f}" stroke="#eeeeee"/>')
        for kind, of in enumerate(series.values()):
            # Marks of one line lie a little above each other, so that equal errors can all be seen.
            parts.append(_mark(kind, place(of[name]), y + 4 * (kind - (len(series) - 1) / 2)))
    return "\n".join([*parts, "</svg>", ""])


def charts(rows: Rows) -> dict[str, str]:
    """Returns the files of the page by their names."""

    def of(inputs: str, part: str) -> dict[str, float]:
        return {row["format"]: row[part] for row in rows if row["inputs"] == inputs}

    parts = {part: of("Gaussian", part) for part in PARTS[:3]}
    totals = {inputs: of(inputs, "total") for inputs in INPUTS}
    return {
        "numerics_parts.svg": chart("Parts of the error, Gaussian inputs", parts),
        "numerics_totals.svg": chart("Total error by inputs", totals),
    }


# The command


def run(arguments: argparse.Namespace) -> None:
    seed = arguments.seed if arguments.seed is not None else int.from_bytes(os.urandom(4), "little")
    shape, device = Shape(), arguments.device
    environment = machine.environment(device, "benches/numerics.py")
    print(f"seed {seed}, commit {environment['commit']}; percent: weights, activations, arithmetic, total", flush=True)
    names = [name for name in FORMATS if device == "cpu" or name != "f32"]
    for inputs_name in INPUTS:
        errors: dict[str, list[dict[str, tuple[float, float]]]] = {name: [] for name in names}
        for number in range(arguments.draws):
            inputs = draw(inputs_name, shape, seed + number, device)
            for name in names:
                errors[name].append(measure(name, inputs))
        for name in names:
            fields = row_of(errors[name])
            print(f"{inputs_name:18} {name:27} {'  '.join(percent(fields[part]) for part in PARTS)}", flush=True)
            if arguments.json:
                row = {"run": arguments.run, "op": "numerics", "format": name, "inputs": inputs_name, **fields}
                row |= {**vars(shape), "draws": arguments.draws, "seed": seed, **environment}
                with arguments.json.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seed", type=int, help="seed of all numbers (default: a new one, which is printed)")
    parser.add_argument("--draws", type=int, default=3, help="layers for each format and kind of inputs (default: 3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append a row for each format and kind of inputs")
    parser.add_argument("--run", help="the name of the run in these rows")
    parser.add_argument("--table", type=Path, metavar="FILE", help="print the tables of the last run in FILE")
    parser.add_argument("--plots", type=Path, metavar="FILE", help="draw the last run in FILE into docs/")
    arguments = parser.parse_args()
    if arguments.json and not arguments.run:
        parser.error("--json needs --run NAME")
    if arguments.table:
        for part, text in tables(recorded(arguments.table)).items():
            print(f"{TITLES[part]}\n\n{text}\n")
    if arguments.plots:
        for name, text in charts(recorded(arguments.plots)).items():
            (DOCS / name).write_text(text, encoding="utf-8")
    if not (arguments.table or arguments.plots):
        run(arguments)


if __name__ == "__main__":
    main()
