"""Operands of MXFP4 layers, and how their results are checked."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import torch
from torch import Tensor

import oxmoe
from cases import Layer, Shape, draws, make_workspace, make_x
from oxmoe import reference
from oxmoe.testing import assert_close_ulp, same_bits

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}


@dataclasses.dataclass
class Blocks:
    """Operands of one MXFP4 layer."""

    shape: Shape
    dtype: str
    w13: Tensor
    w2: Tensor
    w13_scale: Tensor
    w2_scale: Tensor
    b13: Tensor | None
    b2: Tensor | None

    @property
    def operands(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.w13, self.w2, self.w13_scale, self.w2_scale

    def weights(self, **options: Any) -> oxmoe.ExpertWeights:
        options = {"b13": self.b13, "b2": self.b2, "dtype": self.dtype, **dict(self.shape.options), **options}
        return oxmoe.ExpertWeights.mxfp4(*self.operands, **options)

    @functools.cached_property
    def plain(self) -> Layer:
        """Returns the layer of the same numbers in the compute dtype, expanded expert by expert: the steps between are
        large."""
        w13, w2 = (
            torch.stack([reference.mxfp4_weights(*one, DTYPES[self.dtype]) for one in zip(*pair, strict=True)])
            for pair in zip(self.operands[:2], self.operands[2:], strict=True)
        )
        return Layer(self.shape, w13, w2, self.b13, self.b2)

    def x(self, tokens: int, rng: torch.Generator) -> Tensor:
        return make_x(tokens, self.shape, DTYPES[self.dtype], self.w13.device.type, rng)


def make_blocks(
    shape: Shape, dtype: str, device: str, rng: torch.Generator, *, experts: int | None = None, bias_dtype: Any = None
) -> Blocks:
    """Draws random codes, and scales for results of size one; biases are in the compute dtype unless another is
    named."""
    experts = experts or shape.experts
    # A GPU draws its own numbers, from a seed of rng: a model's layer has hundreds of millions.
    seed = int(torch.randint(1 << 62, (), generator=rng))
    generator = rng if device == "cpu" else torch.Generator(device).manual_seed(seed)

    def random(low: int, high: int, *size: int) -> Tensor:
        return torch.randint(low, high, size, dtype=torch.uint8, generator=generator, device=device)

    def codes(rows: int, columns: int) -> Tensor:
        return random(0, 256, experts, rows, columns // 2)

    def scales(rows: int, columns: int, size: float) -> Tensor:
        middle = 127 + round(math.log2(size / (2.9 * columns**0.5)))
        return random(middle - 1, middle + 2, experts, rows, columns // 32)

    def bias(rows: int) -> Tensor | None:
        if not shape.bias:
            return None
        drawn = torch.randn((experts, rows), generator=generator, device=device)
        return drawn.mul_(0.5).to(bias_dtype or DTYPES[dtype])

    rows, hidden, intermediate = shape.w13_rows, shape.hidden, shape.intermediate
    return Blocks(
        shape,
        dtype,
        codes(rows, hidden),
        codes(hidden, intermediate),
        scales(rows, hidden, 1.0),
        scales(hidden, intermediate, 2.0),
        bias(rows),
        bias(hidden),
    )


def call(x: Tensor, weights: oxmoe.ExpertWeights, *routing: Tensor, **options: Any) -> Tensor:
    """Runs moe into NaN, with a workspace of NaN. Routing may be on CPU."""
    given = [part.to(x.device) for part in routing]
    slots = given[1].shape[1] if given else options["top_k"]
    out = x.new_full((x.shape[0], slots, x.shape[1]) if options.get("no_combine") else x.shape, torch.nan)
    workspace = make_workspace(oxmoe.workspace_bytes(weights, x.shape[0], slots), x.device)
    before = x.clone()
    assert oxmoe.moe(x, weights, *given, **options, out=out, workspace=workspace) is out and same_bits(x, before)
    return out


def check(
    blocks: Blocks, x: Tensor, *routing: Tensor, made: oxmoe.ExpertWeights | None = None, **options: Any
) -> Tensor:
    """Checks that the result is close to the reference on the same numbers; on CPU also that it has plain experts'
    bits."""
    plain, weights = blocks.plain, made or blocks.weights()
    given = [part.to(x.device) for part in routing]
    results, expected = [], []
    for drawn in draws(x):
        results.append(call(drawn, weights, *given, **options))
        if not x.is_cuda:
            assert same_bits(results[-1], call(drawn, plain.weights(), *given, **options))
        expected.append(reference.moe(drawn, plain.w13, plain.w2, *given, **plain.reference_options, **options))
    assert_close_ulp(torch.cat(results), torch.cat(expected))
    return results[0]


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, rng: torch.Generator) -> Tensor:
    """Returns every bit pattern of the dtype: all exponents, subnormals, NaN, infinity."""
    integers = {4: torch.int32, 2: torch.int16}[dtype.itemsize]
    limits = torch.iinfo(integers)
    return torch.randint(limits.min, limits.max + 1, shape, generator=rng, dtype=integers).view(dtype)


def edges(dtype: torch.dtype) -> Tensor:
    """Returns blocks [N, 32] whose largest value sits at an edge: of a binade, of 6 scales, of the dtype, of its
    subnormals."""
    finfo = torch.finfo(dtype)
    largest = [2.0**e * m for e in range(-149, 128) for m in (1.0, 1.5, 1.75, 1.25)]
    x = torch.tensor(largest, dtype=torch.float64).clamp(max=finfo.max).to(dtype)
    x = torch.cat([x, torch.nextafter(x, torch.zeros_like(x)), torch.nextafter(x, torch.full_like(x, math.inf))])
    x = torch.cat([x[x.isfinite()], torch.tensor([0.0, finfo.max, finfo.tiny, finfo.smallest_normal], dtype=dtype)])
    # The ladder has all midpoints and values of e2m1, relative to the block's largest; -0 too.
    ladder = torch.linspace(-1, 1, 25, dtype=torch.float64)
    blocks = x.double()[:, None] * torch.cat(
        [torch.ones(1), ladder, torch.tensor([-0.0, 0.0, 1e-3, -1e-3, 1e-9, -1e-9])]
    )
    return blocks.to(dtype)


def awkward(dtype: torch.dtype, rng: torch.Generator, blocks: int = 4096) -> list[Tensor]:
    """Returns blocks [N, 32]: of any bits, of bits without NaN and infinity, ..."""
    bits = random_bits((3 * blocks, 32), dtype, rng)
    # These blocks have NaN and infinity of both signs, alone and together, among large, small and negative zero
    # neighbours.
    special = torch.randn((512, 32), generator=rng).to(dtype)
    special[:, 0] = -0.0
    choice = torch.randint(0, 32, (512, 3), generator=rng)
    values = torch.tensor([math.nan, -math.nan, math.inf, -math.inf, 0.0], dtype=dtype)
    special.scatter_(1, choice, values[torch.randint(0, 5, (512, 3), generator=rng)])
    return [bits, bits[bits.isfinite().all(-1)], special, edges(dtype)]


def every_code(rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Returns every byte of two codes with every scale byte."""
    codes = torch.arange(256, dtype=torch.uint8)[torch.randperm(256, generator=rng)].expand(256, 256).contiguous()
    return codes, torch.arange(256, dtype=torch.uint8)[:, None].expand(256, 16).contiguous()
