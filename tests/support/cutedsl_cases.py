"""NVFP4 layers as flashinfer's CuteDslMoEWrapper takes them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import oxmoe
from cases import Shape
from nvfp4_cases import E4M3, Nvfp4, make
from oxmoe import nvfp4

SHAPE = Shape("cutedsl", 8, 3, 256, 192)


def drawn(shape: Shape, rng: torch.Generator, a4: bool = True) -> Nvfp4:
    """A layer with what flashinfer's has: one number for gate and up, and one input scale for all experts."""
    layer = make(shape, rng, a4)
    layer.w13_global = layer.w13_global[:, :1].expand(-1, layer.w13_global.shape[1]).contiguous()
    if layer.roundings is not None:
        layer.roundings = tuple(torch.full((shape.experts,), 90.0 + 30 * i) for i in range(2))  # type: ignore[assignment]
    return layer


def operands(layer: Nvfp4, local: slice = slice(None)) -> dict[str, Any]:
    """Returns the operands as SGLang prepares them: [up; gate] in chunks of 64 rows, scales as MMA views."""
    shape, w13, w13_scale = layer.shape, layer.w13[local], layer.w13_scale[local]
    if shape.gated:
        w13, w13_scale = (nvfp4.interleave_w13_halves(torch.cat(t.chunk(2, 1)[::-1], 1)) for t in (w13, w13_scale))

    def view(scale: Tensor, rows: int, columns: int) -> Tensor:
        tiles = nvfp4.swizzle_blockscale(scale.contiguous().view(E4M3))
        return nvfp4.convert_sf_to_mma_layout(tiles, rows, columns, len(scale))

    return {
        "w1_weight": w13.contiguous(),
        "w1_weight_sf": view(w13_scale, shape.w13_rows, shape.hidden),
        "w1_alpha": layer.w13_global[local, 0].contiguous(),
        "fc2_input_scale": None if layer.roundings is None else layer.roundings[1][:1],
        "w2_weight": layer.w2[local].contiguous(),
        "w2_weight_sf": view(layer.w2_scale[local], shape.hidden, shape.intermediate),
        "w2_alpha": layer.w2_global[local].contiguous(),
    }


def quantised(layer: Nvfp4, x: Tensor) -> tuple[Tensor, Tensor | None]:
    if layer.roundings is None:
        return x, None
    codes, scales = nvfp4.fp4_quantize(x, layer.roundings[0][:1], is_sf_swizzled_layout=False)
    # flashinfer's tests and SGLang hand tokens over in this form.
    return codes, scales.view(E4M3).reshape(len(x), x.shape[1] // 16)


def wrapper(shape: Shape, a4: bool = True, **options: Any) -> oxmoe.CuteDslMoEWrapper:
    options = {"quant_mode": "w4a4" if a4 else "w4a16", "device": "cpu", **options}
    return oxmoe.CuteDslMoEWrapper(shape.experts, shape.top_k, shape.hidden, shape.intermediate, **options)
