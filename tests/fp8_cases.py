"""Operands of fp8 layers with block scales, and how their results are checked."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

import oxmoe
from cases import Shape, draws, make_layer, make_x
from mxfp4_cases import call
from oxmoe import reference
from oxmoe.testing import FP8_BAR, assert_close_ulp, relative_norm

# A model's ratios, one block, an odd number of blocks in every place, and sizes that others pad: 704 is refused.
SHAPES = (
    Shape("qwen3-small", 16, 8, 256, 128),
    Shape("one-block", 3, 2, 128, 128, bias=True),
    Shape("odd-blocks", 5, 3, 384, 640, bias=True),
    Shape("i1408", 4, 2, 256, 1408),
)
MODELS = (Shape("qwen3-30b-a3b", 128, 8, 2048, 768), Shape("dsv3-tp8", 256, 8, 7168, 256))

# On CPUs sums differ in the last bits of fp32 alone.
CPU_BAR = dataclasses.replace(FP8_BAR, share=5e-2)
NORM = 1.2e-2


@dataclasses.dataclass
class Fp8:
    """Operands of one layer."""

    shape: Shape
    w13: Tensor
    w2: Tensor
    w13_scale: Tensor
    w2_scale: Tensor
    b13: Tensor | None
    b2: Tensor | None

    @property
    def operands(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.w13, self.w2, self.w13_scale, self.w2_scale

    @property
    def options(self) -> dict[str, Any]:
        return {"b13": self.b13, "b2": self.b2, **dict(self.shape.options)}

    def weights(self, **options: Any) -> oxmoe.ExpertWeights:
        return oxmoe.ExpertWeights.fp8_block(*self.operands, **{**self.options, **options})

    def x(self, tokens: int, rng: torch.Generator) -> Tensor:
        return make_x(tokens, self.shape, torch.bfloat16, self.w13.device.type, rng)


def quantize_blocks(weights: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 [E, N, K] and fp32 scales [E, N / 128, K / 128]."""
    experts, rows, columns = weights.shape
    codes = torch.empty(weights.shape, dtype=torch.float8_e4m3fn, device=weights.device)
    scales = torch.empty((experts, rows // 128, columns // 128), device=weights.device)
    for expert in range(experts):
        blocks = weights[expert].float().view(rows // 128, 128, columns // 128, 128)
        scale = blocks.abs().amax((1, 3)).clamp(min=1e-10) / 448
        codes[expert] = (blocks / scale[:, None, :, None]).clamp(-448, 448).view(rows, columns).to(codes.dtype)
        scales[expert] = scale
    return codes, scales


def make_fp8(shape: Shape, device: str, rng: torch.Generator, *, bias_dtype: torch.dtype | None = None) -> Fp8:
    plain = make_layer(shape, torch.bfloat16, device, rng, bias_dtype=bias_dtype)
    (w13, w13_scale), (w2, w2_scale) = quantize_blocks(plain.w13), quantize_blocks(plain.w2)
    return Fp8(shape, w13, w2, w13_scale, w2_scale, plain.b13, plain.b2)


def check(layer: Fp8, x: Tensor, *routing: Tensor, made: oxmoe.ExpertWeights | None = None, **options: Any) -> Tensor:
    """Close to the reference; the result."""
    weights = made or layer.weights()
    given = [part.to(x.device) for part in routing]
    results = [call(drawn, weights, *given, **options) for drawn in draws(x)]
    scales = {"w13_scale": layer.w13_scale, "w2_scale": layer.w2_scale}
    expected = [
        reference.moe(drawn, layer.w13, layer.w2, *given, **layer.options, **scales, **options) for drawn in draws(x)
    ]
    result, truth = torch.cat(results), torch.cat(expected)
    assert_close_ulp(result, truth, FP8_BAR if x.is_cuda else CPU_BAR)
    finite = truth.isfinite()
    assert relative_norm(result[finite], truth[finite]) < NORM
    return results[0]
