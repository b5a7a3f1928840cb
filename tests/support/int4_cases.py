"""Operands of int4 layers, and the plain layers of the same numbers."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

import oxmoe
from cases import Shape
from oxmoe import reference


@dataclasses.dataclass
class Int4:
    """Operands of one layer: w13 is [gate; up] unless the shape's options say otherwise."""

    shape: Shape
    w13: Tensor  # uint8 [E, 2I, H / 2]
    w2: Tensor
    w13_scale: Tensor  # [E, 2I, groups]
    w2_scale: Tensor
    w13_zeros: Tensor | None
    w2_zeros: Tensor | None
    b13: Tensor | None
    b2: Tensor | None

    @property
    def options(self) -> dict[str, Any]:
        zeros = {"w13_zeros": self.w13_zeros, "w2_zeros": self.w2_zeros}
        return {**zeros, "b13": self.b13, "b2": self.b2, **dict(self.shape.options)}

    def weights(self, **options: Any) -> oxmoe.ExpertWeights:
        operands = (self.w13, self.w2, self.w13_scale, self.w2_scale)
        return oxmoe.ExpertWeights.int4(*operands, **{**self.options, **options})

    def plain(self, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
        """Returns w13 and w2 as numbers of dtype."""
        pairs = ((self.w13, self.w13_scale, self.w13_zeros), (self.w2, self.w2_scale, self.w2_zeros))
        up, down = (reference.int4_weights(*pair, dtype) for pair in pairs)
        return up, down

    def to(self, device: str) -> Int4:
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        moved = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in fields.items()}
        return Int4(**moved)


def make(
    shape: Shape,
    rng: torch.Generator,
    *,
    group: int | None = 32,
    zeros: bool = False,
    scale_dtype: torch.dtype = torch.bfloat16,
) -> Int4:
    """Draws random codes, and scales for results of size one: of `group` columns (None: of a row), some of them
    negative."""
    experts, rows, hidden, intermediate = shape.experts, shape.w13_rows, shape.hidden, shape.intermediate

    def codes(rows: int, columns: int) -> Tensor:
        return torch.randint(0, 256, (experts, rows, columns // 2), generator=rng, dtype=torch.uint8)

    def groups(columns: int) -> int:
        return 1 if group is None else columns // group

    def scales(rows: int, columns: int) -> Tensor:
        size = (experts, rows, groups(columns))
        signs = 1 - 2 * torch.randint(0, 2, size, generator=rng)
        return (signs * (torch.rand(size, generator=rng) + 0.5) / (4.6 * columns**0.5)).to(scale_dtype)

    def points(rows: int, columns: int) -> Tensor | None:
        size = (experts, rows, groups(columns))
        return torch.randint(0, 17, size, generator=rng, dtype=torch.uint8) if zeros else None

    def bias(rows: int) -> Tensor | None:
        return torch.randn((experts, rows), generator=rng).mul(0.5) if shape.bias else None

    return Int4(
        shape,
        codes(rows, hidden),
        codes(hidden, intermediate),
        scales(rows, hidden),
        scales(hidden, intermediate),
        points(rows, hidden),
        points(hidden, intermediate),
        bias(rows),
        bias(hidden),
    )
