"""Operands of MXFP8 layers, and how their results are checked."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

import oxmoe
from cases import Shape, draws
from fp8_cases import Quantised
from mxfp4_cases import call
from oxmoe import reference
from oxmoe.testing import FP8_BAR, assert_close_ulp, relative_norm

# On CPUs sums differ in the last bits of fp32 alone.
CPU_BAR = dataclasses.replace(FP8_BAR, share=5e-2)
NORM = 1.2e-2
# Dense (m, n, k) whose tiles do not fill a Hopper GPU of 132 multiprocessors.
SHARED_TILES = [
    (40, 9001, 5152),
    (90, 9001, 5152),
    (100, 17002, 3104),
    (150, 12810, 2080),
    (500, 12810, 2080),
    (1000, 5003, 4128),
    (1500, 5003, 4128),
]


class Mxfp8(Quantised):
    """The operands of a layer with a scale for each 32 columns of a row."""

    def weights(self, **options: Any) -> oxmoe.ExpertWeights:
        return oxmoe.ExpertWeights.mxfp8(*self.operands, **{**self.options, **options})

    def reference(self, x: Tensor, *routing: Tensor, **options: Any) -> Tensor:
        scales: dict[str, Any] = {"w13_scale": self.w13_scale, "w2_scale": self.w2_scale}
        return reference.moe(x, self.w13, self.w2, *routing, **self.options, **scales, **options)


def make_mxfp8(shape: Shape, device: str, rng: torch.Generator, *, bias_dtype: torch.dtype = torch.bfloat16) -> Mxfp8:
    """Draws every code but NaN, mostly those of a normal distribution, and scales for results of size one."""
    # A GPU draws its own numbers, from a seed of rng: a model's layer has hundreds of millions.
    seed = int(torch.randint(1 << 62, (), generator=rng))
    generator = rng if device == "cpu" else torch.Generator(device).manual_seed(seed)
    experts = shape.experts

    def codes(rows: int, columns: int) -> Tensor:
        numbers = torch.empty((experts, rows, columns), dtype=torch.float8_e4m3fn, device=device)
        for expert in numbers:
            expert.copy_(torch.randn((rows, columns), generator=generator, device=device).mul_(100).clamp_(-448, 448))
        every = torch.arange(256, dtype=torch.uint8, device=device)
        every = every[every & 0x7F != 0x7F][: rows * columns]
        numbers[0].view(torch.uint8).view(-1)[: len(every)] = every
        return numbers

    def scales(rows: int, columns: int, size: float) -> Tensor:
        middle = 127 + round(math.log2(size / (100 * columns**0.5)))
        shape_ = (experts, rows, columns // 32)
        return torch.randint(middle - 1, middle + 2, shape_, dtype=torch.uint8, generator=generator, device=device)

    def bias(rows: int) -> Tensor | None:
        if not shape.bias:
            return None
        return torch.randn((experts, rows), generator=generator, device=device).mul_(0.5).to(bias_dtype)

    rows, hidden, intermediate = shape.w13_rows, shape.hidden, shape.intermediate
    return Mxfp8(
        shape,
        codes(rows, hidden),
        codes(hidden, intermediate),
        scales(rows, hidden, 1.0),
        scales(hidden, intermediate, 2.0),
        bias(rows),
        bias(hidden),
    )


def check(layer: Mxfp8, x: Tensor, *routing: Tensor, made: oxmoe.ExpertWeights | None = None, **options: Any) -> Tensor:
    """Checks that the result is close to the reference, and returns it."""
    weights = made or layer.weights()
    given = [part.to(x.device) for part in routing]
    results = [call(drawn, weights, *given, **options) for drawn in draws(x)]
    expected = [layer.reference(drawn, *given, **options) for drawn in draws(x)]
    result, truth = torch.cat(results), torch.cat(expected)
    assert_close_ulp(result, truth, FP8_BAR if x.is_cuda else CPU_BAR)
    finite = truth.isfinite()
    assert relative_norm(result[finite], truth[finite]) < NORM
    return results[0]
