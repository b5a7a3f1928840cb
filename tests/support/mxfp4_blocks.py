"""MXFP4 layers as checkpoints have them, and as flashinfer's and triton_kernels' calls take them."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from cases import make_routing
from oxmoe import quantize, reference

SWIGLU = {"alpha": 1.702, "beta": 1.0, "limit": 7.0}


class Blocks:
    """A layer's MXFP4 operands as a checkpoint has them; hidden, intermediate and row order are the caller's."""

    def __init__(
        self,
        experts: int,
        hidden: int,
        intermediate: int,
        device: str,
        rng: torch.Generator,
        *,
        bytes_: tuple[int, int] = (120, 124),
        bias: bool = True,
    ):
        self.experts, self.hidden, self.intermediate, self.device = experts, hidden, intermediate, device
        seed = int(torch.randint(1 << 62, (), generator=rng))
        generator = torch.Generator(device).manual_seed(seed)

        def random(low: int, high: int, rows: int, columns: int) -> Tensor:
            size = (experts, rows, columns)
            return torch.randint(low, high, size, generator=generator, dtype=torch.uint8, device=device)

        self.codes = random(0, 256, 2 * intermediate, hidden // 2), random(0, 256, hidden, intermediate // 2)
        self.scales = random(*bytes_, 2 * intermediate, hidden // 32), random(*bytes_, hidden, intermediate // 32)
        self.biases: tuple[Tensor | None, Tensor | None] = (None, None)
        if bias:
            self.biases = tuple(
                (torch.randn(experts, rows, generator=generator, device=device) * 0.3).bfloat16()
                for rows in (2 * intermediate, hidden)
            )  # type: ignore[assignment]

    @functools.cached_property
    def dense(self) -> tuple[Tensor, Tensor]:
        w13, w2 = (
            torch.stack([reference.mxfp4_weights(*one) for one in zip(*pair, strict=True)])
            for pair in zip(self.codes, self.scales, strict=True)
        )
        return w13, w2

    def expected(self, x: Tensor, weights: Tensor, ids: Tensor, **options: Any) -> Tensor:
        options = {"b13": self.biases[0], "b2": self.biases[1], "layout": "up_gate", **options}
        return reference.moe(x, *self.dense, weights, ids, **options)

    def interleaved(self, release: str) -> dict[str, Any]:
        """Returns arguments of cutlass_fused_moe."""
        values, scales = zip(
            *(
                [t.to(self.device) for t in quantize.interleave_sm90_mxfp4(c.cpu(), s.cpu(), flashinfer=release)]
                for c, s in zip(self.codes, self.scales, strict=True)
            ),
            strict=True,
        )
        return {
            "fc1_expert_weights": values[0],
            "fc2_expert_weights": values[1],
            "quant_scales": [scale.view(torch.int32) for scale in scales],
            "fc1_expert_biases": self.biases[0],
            "fc2_expert_biases": self.biases[1],
        }


def inputs(
    blocks: Blocks, tokens: int, top_k: int, rng: torch.Generator, *, experts: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn((tokens, blocks.hidden), generator=rng).bfloat16().to(blocks.device)
    weights, ids = make_routing("uniform", tokens, experts or blocks.experts, top_k, rng)
    return x, weights.to(blocks.device), ids.to(blocks.device)


class HopperMXValueLayout:
    mma_version = 3


class HopperMXScaleLayout:
    def __init__(self, num_warps: int):
        self.num_warps = num_warps


class StridedLayout:
    pass


def wrapped(codes: Tensor, scales: Tensor, kind: str) -> tuple[Any, Any]:
    """Returns (weight, precision configuration) as triton_kernels 3.6, 3.8 and, without a layout of its own, 3.6 hold
    them."""

    def tensor(data: Tensor, layout: Any, shape: tuple[int, ...]) -> SimpleNamespace:
        return SimpleNamespace(storage=SimpleNamespace(data=data, layout=layout), shape=list(shape))

    experts, rows, columns = codes.shape
    shape, scale_shape = (experts, 2 * columns, rows), (experts, columns // 16, rows)
    device = codes.device
    if kind == "strided":
        filled = pad(scales, (0, 2), value=127)
        weight = tensor(codes.transpose(1, 2), StridedLayout(), shape)
        return weight, SimpleNamespace(weight_scale=tensor(filled.transpose(1, 2), StridedLayout(), scale_shape))
    row_multiple, name = {"3.6": (64, "weight_scale"), "3.8": (256, "b_mx_scale")}[kind]
    values, swizzled = quantize.swizzle_hopper_mxfp4(codes.cpu(), scales.cpu(), num_warps=8, row_multiple=row_multiple)
    weight = tensor(values.to(device), HopperMXValueLayout(), shape)
    return weight, SimpleNamespace(**{name: tensor(swizzled.to(device), HopperMXScaleLayout(8), scale_shape)})


def experts_of(blocks: Blocks, kind: str) -> dict[str, Any]:
    (w1, w1_pcg), (w2, w2_pcg) = (wrapped(*pair, kind) for pair in zip(blocks.codes, blocks.scales, strict=True))
    b1, b2 = (None if bias is None else bias.float() for bias in blocks.biases)
    return {"w1": w1, "w1_pcg": w1_pcg, "b1": b1, "w2": w2, "w2_pcg": w2_pcg, "b2": b2}
