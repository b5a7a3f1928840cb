"""A token's result has the same bits alone and among others, with every format and its default options."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import oxmoe
from cases import Shape, make_routing
from format_cases import EXPERTS, dtype_of
from fp8_cases import make_fp8_tensor
from oxmoe.testing import relative_norm, same_bits

SHAPE = Shape("alone", 8, 3, 256, 384, bias=True)
TOKENS, SEEN = 64, (0, 1, 17, 40, 63)
# In the other forms one scale or factor serves all rows of a call.
FORMATS = [name for name in EXPERTS if name not in ("fp8_tensor-call", "nvfp4-a4-one")]
PLACES = [pytest.param("cpu", name) for name in FORMATS]
PLACES += [pytest.param("cuda", name, marks=pytest.mark.gpu) for name in FORMATS if name != "f32"]


def tokens(format: str, device: str, rng: torch.Generator) -> Tensor:
    """Returns tokens of very different sizes, so that the largest one shows in a shared scale."""
    x = torch.randn((TOKENS, SHAPE.hidden), generator=rng)
    x *= torch.exp2(torch.randint(-3, 4, (TOKENS, 1), generator=rng).float())
    x[17] *= 64
    if format == "f16":
        x /= 64  # products of gate and up stay below 65504
    return x.to(dtype_of(format)).to(device)


@pytest.mark.parametrize("routing", ["ids", "logits", "masked"])
@pytest.mark.parametrize(("device", "format"), PLACES)
def test_a_row_alone(device: str, format: str, routing: str, rng: torch.Generator) -> None:
    weights, x = EXPERTS[format](SHAPE, device, rng), tokens(format, device, rng)
    gates, ids = (part.to(device) for part in make_routing("uniform", TOKENS, SHAPE.experts, SHAPE.top_k, rng))
    logits = torch.randn((TOKENS, SHAPE.experts), generator=rng).to(device)

    def call(rows: slice) -> Tensor:
        if routing == "ids":
            return oxmoe.moe(x[rows], weights, gates[rows], ids[rows])
        if routing == "logits":
            return oxmoe.moe(x[rows], weights, router_logits=logits[rows], top_k=SHAPE.top_k)
        here = x[rows].expand(SHAPE.experts, -1, -1).contiguous()
        counts = torch.full((SHAPE.experts,), here.shape[1], dtype=torch.int32, device=device)
        return oxmoe.moe_masked(here, weights, counts).transpose(0, 1)

    together = call(slice(None))
    assert bool(together.isfinite().all())
    for row in SEEN:
        assert same_bits(call(slice(row, row + 1)), together[row : row + 1]), row
    assert same_bits(call(slice(30, 50)), together[30:50])


def test_one_scale_for_a_call_is_asked_for(device: str, rng: torch.Generator) -> None:
    """With per_token=False rows depend on each other, as in SGLang's own kernels."""
    layer, x = make_fp8_tensor(SHAPE, device, rng), tokens("fp8_tensor", device, rng)
    x[17] *= 3.0  # This row has the largest number of the call, and so decides the scale.
    routing = tuple(part.to(device) for part in make_routing("uniform", TOKENS, SHAPE.experts, SHAPE.top_k, rng))
    scaled = oxmoe.ExpertWeights.fp8_tensor(*layer.operands, per_token=False, **layer.options)
    own = oxmoe.ExpertWeights.fp8_tensor(*layer.operands, **layer.options)
    assert (scaled.format, own.format) == ("fp8_tensor", "fp8_tensor-token")
    together = oxmoe.moe(x, scaled, *routing)
    rows = [i for i in range(TOKENS) if i != 17]
    without = oxmoe.moe(x[rows], scaled, *(part[rows] for part in routing))
    assert not same_bits(together[rows], without) and relative_norm(together[rows], without) > 1e-2


@pytest.mark.parametrize("per_channel", [False, True])
def test_fused_experts(device: str, per_channel: bool, rng: torch.Generator) -> None:
    """Without scales of activations, SGLang's call gives each token a scale of its own, with and without
    per_channel_quant."""
    layer: Any = make_fp8_tensor(SHAPE, device, rng, of_rows=per_channel)
    x = tokens("fp8_tensor", device, rng)
    routing = tuple(part.to(device) for part in make_routing("uniform", TOKENS, SHAPE.experts, SHAPE.top_k, rng))

    def call(rows: slice) -> Tensor:
        chosen, config = tuple(part[rows] for part in routing), SimpleNamespace(inplace=False)
        scales = {"w1_scale": layer.w13_scale, "w2_scale": layer.w2_scale, "per_channel_quant": per_channel}
        operands = x[rows], layer.w13, layer.w2, chosen, config, layer.b13, layer.b2
        return oxmoe.fused_experts(*operands, use_fp8_w8a8=True, **scales)

    together = call(slice(None))
    for row in SEEN:
        assert same_bits(call(slice(row, row + 1)), together[row : row + 1])
