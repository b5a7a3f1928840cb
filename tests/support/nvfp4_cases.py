"""Operands of NVFP4 layers, and the reference of their results."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

import oxmoe
from cases import Shape
from oxmoe import nvfp4, reference
from oxmoe.testing import Bar

E4M3 = torch.float8_e4m3fn
# A sum that rounds to its neighbour moves a code; a block's largest number moves its whole block.
A4_BAR = Bar(max_ulp=64.0, ulps=3.9, share=1e-1)


@dataclasses.dataclass
class Nvfp4:
    """Operands of one layer: w13 is [gate; up], scales lie row by row."""

    shape: Shape
    w13: Tensor
    w2: Tensor
    w13_scale: Tensor
    w2_scale: Tensor
    w13_global: Tensor
    w2_global: Tensor
    b13: Tensor | None
    b2: Tensor | None
    roundings: tuple[Tensor, Tensor] | None = None

    @property
    def options(self) -> dict[str, Any]:
        given = {"b13": self.b13, "b2": self.b2, **dict(self.shape.options)}
        if self.roundings is not None:
            given.update(input_global_scale=self.roundings[0], a2_global_scale=self.roundings[1])
        return given

    def weights(self, **options: Any) -> oxmoe.ExpertWeights:
        operands = (self.w13, self.w2, self.w13_scale, self.w2_scale, self.w13_global, self.w2_global)
        return oxmoe.ExpertWeights.nvfp4(*operands, **{**self.options, **options})

    def expected(self, x: Tensor, experts: Tensor) -> Tensor:
        """Computes every row by its expert."""
        out = torch.empty_like(x)
        options = dict(self.shape.options)
        for expert in experts.unique().tolist():
            factor = self.w13_global.expand(self.shape.experts, 2 if self.shape.gated else 1)[expert]
            rows = factor.repeat_interleave(self.shape.w13_rows // len(factor))
            out[experts == expert] = reference.nvfp4_expert(
                x[experts == expert],
                reference.nvfp4_numbers(self.w13[expert], self.w13_scale[expert].view(E4M3)),
                reference.nvfp4_numbers(self.w2[expert], self.w2_scale[expert].view(E4M3)),
                (rows, self.w2_global.expand(self.shape.experts)[expert]),
                None if self.roundings is None else tuple(r[expert].item() for r in self.roundings),
                b13=None if self.b13 is None else self.b13[expert],
                b2=None if self.b2 is None else self.b2[expert],
                **options,
            )
        return out


def make(shape: Shape, rng: torch.Generator, a4: bool = False) -> Nvfp4:
    """Draws random codes, and scales and global scales for results of size one."""
    experts, rows, hidden, intermediate = shape.experts, shape.w13_rows, shape.hidden, shape.intermediate

    def codes(rows: int, columns: int) -> Tensor:
        return torch.randint(0, 256, (experts, rows, columns // 2), generator=rng, dtype=torch.uint8)

    def scales(rows: int, columns: int) -> Tensor:
        drawn = 8 * (torch.rand((experts, rows, columns // 16), generator=rng) + 0.5)
        return drawn.to(E4M3).view(torch.uint8)

    def numbers(*size: int) -> Tensor:
        return torch.rand(size, generator=rng) + 0.5

    def bias(rows: int) -> Tensor | None:
        return torch.randn((experts, rows), generator=rng).mul(0.5) if shape.bias else None

    # Numbers are about 2.9 x 8.
    w13_global, w2_global = numbers(experts, 2 if shape.gated else 1), numbers(experts)
    w13_global, w2_global = w13_global / (23 * hidden**0.5), 2 * w2_global / (23 * intermediate**0.5)
    roundings = None
    if a4:
        # Block scales of activations of size one are in the middle of e4m3's range.
        roundings = (100 * numbers(experts), 100 * numbers(experts))
        w13_global, w2_global = w13_global / roundings[0][:, None], w2_global / roundings[1]
    return Nvfp4(
        shape,
        codes(rows, hidden),
        codes(hidden, intermediate),
        scales(rows, hidden),
        scales(hidden, intermediate),
        w13_global,
        w2_global,
        bias(rows),
        bias(hidden),
        roundings,
    )


def arranged(rows: Tensor, layout: str) -> Tensor:
    """Returns [E, 2I, ...] of [gate; up] rows in another layout."""
    gate, up = rows.chunk(2, 1)
    if layout == "interleaved":
        return torch.stack([gate, up], 2).flatten(1, 2)
    halves = torch.cat([gate, up] if layout.startswith("gate") else [up, gate], 1)
    return nvfp4.interleave_w13_halves(halves) if layout.endswith("_64") else halves


def on_cuda(layer: Nvfp4) -> Nvfp4:
    """Returns the layer on the GPU. w2's global scale and the second rounding stay on the CPU."""
    tensors = {name: getattr(layer, name) for name in ("w13", "w2", "w13_scale", "w2_scale", "w13_global", "b13", "b2")}
    moved = {name: tensor if tensor is None else tensor.cuda() for name, tensor in tensors.items()}
    roundings = None if layer.roundings is None else (layer.roundings[0].cuda(), layer.roundings[1])
    return dataclasses.replace(layer, **moved, roundings=roundings)
