"""SwiGLU's alpha, beta and limit as tensors with a number for each expert."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import oxmoe
from cases import GPT_OSS, Layer, Shape, draws, make_layer, make_routing, make_workspace, make_x
from mxfp4_cases import check as check_mxfp4
from mxfp4_cases import make_blocks
from oxmoe import reference
from oxmoe.testing import assert_close_ulp, same_bits

SHAPE = Shape("numbers", 6, 2, 96, 80, bias=True)
NAMES = ("alpha", "beta", "limit")


def numbers(experts: int, device: str, rng: torch.Generator) -> dict[str, Tensor]:
    """Returns numbers far enough apart that another expert's number shows; a third of the limits bound nothing, or
    everything."""
    ranges = {"alpha": (0.5, 2.5), "beta": (-1.0, 1.5), "limit": (0.2, 1.5)}
    drawn = {name: torch.rand(experts, generator=rng) * (high - low) + low for name, (low, high) in ranges.items()}
    drawn["limit"][::3] = torch.inf
    return {name: value.to(device) for name, value in drawn.items()}


def check(
    layer: Layer, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, options: dict[str, Any], **call: Any
) -> None:
    results, expected = [], []
    weights = layer_weights(layer, options)
    for drawn in draws(x):
        workspace = make_workspace(oxmoe.workspace_bytes(weights, x.shape[0], topk_ids.shape[1]), x.device)
        out = torch.full_like(drawn, torch.nan)
        results.append(oxmoe.moe(drawn, weights, topk_weights, topk_ids, out=out, workspace=workspace, **call))
        operands = drawn, layer.w13, layer.w2, topk_weights, topk_ids
        expected.append(reference.moe(*operands, b13=layer.b13, b2=layer.b2, **options, **call))
    assert_close_ulp(torch.cat(results), torch.cat(expected))


def layer_weights(layer: Layer, options: dict[str, Any]) -> oxmoe.ExpertWeights:
    constructors = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}
    make = getattr(oxmoe.ExpertWeights, constructors[layer.w13.dtype])
    return make(layer.w13, layer.w2, b13=layer.b13, b2=layer.b2, **options)


def given(
    shape: Shape, place: tuple[str, torch.dtype], tokens: int, rng: torch.Generator, pattern: str = "uniform"
) -> tuple[Layer, Tensor, Tensor, Tensor]:
    device, dtype = place
    routing = (t.to(device) for t in make_routing(pattern, tokens, shape.experts, shape.top_k, rng))
    return make_layer(shape, dtype, device, rng), make_x(tokens, shape, dtype, device, rng), *routing


@pytest.mark.parametrize("tokens", [1, 9, 40])
@pytest.mark.parametrize("layout", ["gate_up", "up_gate", "interleaved"])
@pytest.mark.parametrize("clamp", ["before", "after"])
def test_numbers_of_experts(
    place: tuple[str, torch.dtype], clamp: str, layout: str, tokens: int, rng: torch.Generator
) -> None:
    options = {**numbers(SHAPE.experts, place[0], rng), "layout": layout, "clamp": clamp}
    check(*given(SHAPE, place, tokens, rng), options)
    check(*given(SHAPE, place, tokens, rng), options, apply_router_weight_on_input=True, routed_scaling_factor=0.5)


@pytest.mark.parametrize("chosen", [("alpha",), ("beta",), ("limit",), ("alpha", "limit")], ids=str)
def test_some_of_the_three(place: tuple[str, torch.dtype], chosen: tuple[str, ...], rng: torch.Generator) -> None:
    """Parameters that are not tensors are numbers of the layer."""
    drawn = numbers(SHAPE.experts, place[0], rng)
    options: dict[str, Any] = {**GPT_OSS, "limit": 0.75, **{name: drawn[name] for name in chosen}}
    check(*given(SHAPE, place, 12, rng), options)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape,tokens,pattern",
    [
        (Shape("wide tiles", 3, 2, 288, 224, bias=True), 700, "skewed"),
        (Shape("one launch", 3, 2, 4096, 4352, bias=True), 8, "duplicates"),
        (Shape("no tensor maps", 3, 2, 130, 70, bias=True), 90, "uniform"),
    ],
    ids=lambda value: value.name if isinstance(value, Shape) else str(value),
)
def test_every_kernel(shape: Shape, tokens: int, pattern: str, rng: torch.Generator) -> None:
    check(*given(shape, ("cuda", torch.bfloat16), tokens, rng, pattern), numbers(shape.experts, "cuda", rng))


def test_equal_numbers_have_the_bits_of_one(place: tuple[str, torch.dtype], rng: torch.Generator) -> None:
    layer, *operands = given(SHAPE, place, 21, rng)
    options: dict[str, Any] = {"alpha": 1.702, "beta": 1.0, "limit": 0.5}
    each = {name: torch.full((SHAPE.experts,), value, device=place[0]) for name, value in options.items()}
    results = [oxmoe.moe(operands[0], layer_weights(layer, given), *operands[1:]) for given in (options, each)]
    assert same_bits(*results)


def test_ranks_have_their_own(device: str, rng: torch.Generator) -> None:
    layer, x, topk_weights, topk_ids = given(SHAPE, (device, torch.bfloat16), 17, rng)
    drawn = numbers(SHAPE.experts, device, rng)
    assert layer.b13 is not None and layer.b2 is not None
    for rank in range(2):
        local = slice(3 * rank, 3 * rank + 3)
        part = Layer(SHAPE, layer.w13[local], layer.w2[local], layer.b13[local], layer.b2[local])
        options = {name: value[local] for name, value in drawn.items()}
        check(part, x, topk_weights, topk_ids, options, ep_size=2, ep_rank=rank)


@pytest.mark.parametrize("tokens", [1, 13, 150, 500])
@pytest.mark.parametrize("clamp", ["before", "after"])
def test_mxfp4_experts(clamp: str, tokens: int, device: str, rng: torch.Generator) -> None:
    shape = Shape("numbers", 4, 2, 96, 64, bias=True)
    options = {**numbers(4, device, rng), "clamp": clamp}
    topk_weights, topk_ids = (t.to(device) for t in make_routing("uniform", tokens, 4, 2, rng))
    blocks = make_blocks(shape, "bf16", device, rng)
    for layout in ("gate_up", "up_gate", "interleaved"):
        check_mxfp4(
            dataclasses.replace(blocks, shape=shape.with_options(**options, layout=layout)),
            blocks.x(tokens, rng),
            topk_weights,
            topk_ids,
        )


def test_operators_see_them(device: str, rng: torch.Generator) -> None:
    layer, x, topk_weights, topk_ids = given(SHAPE, (device, torch.bfloat16), 5, rng)
    options = {**numbers(SHAPE.experts, device, rng), "beta": 0.5}
    weights = layer_weights(layer, options)
    assert weights.alpha is options["alpha"] and weights.beta == 0.5 and weights.limit is options["limit"]
    expected = oxmoe.moe(x, weights, topk_weights, topk_ids)
    torch._dynamo.reset()
    compiled = torch.compile(oxmoe.moe, fullgraph=True, backend="aot_eager")
    assert same_bits(compiled(x, weights, topk_weights, topk_ids), expected)
    bare = oxmoe._oxmoe.moe_tensors(
        x, layer.w13, layer.w2, topk_weights, topk_ids, b13=layer.b13, b2=layer.b2, **options
    )
    assert same_bits(bare, expected)
    logits = torch.randn((5, SHAPE.experts), generator=rng).to(device)
    by_logits = oxmoe.moe(x, weights, router_logits=logits, top_k=2)
    torch._dynamo.reset()
    assert same_bits(
        torch.compile(lambda x: oxmoe.moe(x, weights, router_logits=logits, top_k=2), fullgraph=True)(x), by_logits
    )


def test_they_are_read_at_every_call(device: str, rng: torch.Generator) -> None:
    layer, x, topk_weights, topk_ids = given(SHAPE, (device, torch.bfloat16), 5, rng)
    options = numbers(SHAPE.experts, device, rng)
    weights = layer_weights(layer, options)
    for value in options.values():
        value.copy_(value.roll(1))
    results = [oxmoe.moe(x, made, topk_weights, topk_ids) for made in (weights, layer_weights(layer, options))]
    assert same_bits(*results)


def test_numpy() -> None:
    arrays = [np.ones((2, 64, 32), np.float32), np.ones((2, 32, 32), np.float32)]
    weights = oxmoe.ExpertWeights.f32(*arrays, alpha=np.array([1.0, 2.0], np.float32), beta=np.float64(0.5), limit=3)
    x, ids = np.ones((2, 32), np.float32), np.array([[0], [1]], np.int32)
    result = np.asarray(oxmoe._oxmoe.moe(x, weights, np.ones((2, 1), np.float32), ids))
    expected = [32 * 3 / (1 + np.exp(-3 * alpha)) * 3.5 for alpha in (1, 2)]
    np.testing.assert_allclose(result[:, 0], expected, rtol=1e-5)


@pytest.mark.parametrize(
    "options,message",
    [
        ({"alpha": torch.ones(5)}, r'alpha: dimension 0 "experts": expected 6 \(from w13\), got 5'),
        ({"beta": torch.ones(6, 1)}, r"beta: expected 1 dimensions \[experts\], got shape \[6, 1\]"),
        ({"limit": torch.ones(6).double()}, "limit: expected dtype float32, got float64"),
        ({"limit": torch.ones(12)[::2]}, "limit: .*contiguous"),
        ({"alpha": torch.tensor([1, 1, 1, torch.nan, 1, 1])}, "alpha: expected finite numbers, got NaN for expert 3"),
        ({"limit": torch.tensor([1, 1, 0.0, 1, 1, 1])}, "limit: expected positive numbers, got 0 for expert 2"),
        ({"alpha": torch.ones(6), "activation": "gelu"}, 'alpha, beta, limit: only for activation "silu" with gated'),
        ({"limit": torch.ones(6), "beta": torch.inf}, "beta: expected a finite number, got inf"),
        ({"limit": 0.0}, r"limit: expected a positive number or None \(no limit\), got 0$"),
        ({"alpha": "1"}, None),
    ],
    ids=str,
)
def test_contract(options: dict[str, Any], message: str | None, rng: torch.Generator) -> None:
    layer = make_layer(SHAPE, torch.bfloat16, "cpu", rng)
    with pytest.raises(TypeError if message is None else ValueError, match=message):
        layer_weights(layer, options)


@pytest.mark.gpu
def test_contract_of_devices(rng: torch.Generator) -> None:
    layer = make_layer(SHAPE, torch.bfloat16, "cuda", rng)
    with pytest.raises(ValueError, match="alpha: is on cpu, but w13 is on cuda:0"):
        layer_weights(layer, {"alpha": torch.ones(6)})
