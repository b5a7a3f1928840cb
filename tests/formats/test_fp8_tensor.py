"""Experts of e4m3 with one scale for a matrix: scales of activations for a call, for a token, and made before."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import oxmoe
from cases import ACTIVATIONS, PATTERNS, Shape, make_routing, tie_free_logits
from fp8_cases import CALL_OPTIONS, MODELS, MODES, SHAPES, blocks_of, call, check_tensor, make_fp8_tensor
from oxmoe.testing import same_bits

SMALL = SHAPES[2]


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("tokens", [0, 1, 7, 64, 130])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.name)
def test_layer(shape: Shape, tokens: int, mode: str, device: str, rng: torch.Generator) -> None:
    layer = make_fp8_tensor(shape, device, rng)
    routing = make_routing("uniform", tokens, shape.experts, shape.top_k, rng)
    check_tensor(layer, layer.x(tokens, rng), *routing, mode=mode)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_routing_patterns(pattern: str, mode: str, device: str, rng: torch.Generator) -> None:
    layer = make_fp8_tensor(SMALL, device, rng, halves=True)
    for tokens in (5, 150):
        routing = make_routing(pattern, tokens, SMALL.experts, SMALL.top_k, rng)
        check_tensor(layer, layer.x(tokens, rng), *routing, mode=mode)


@pytest.mark.parametrize("name", ["swiglu-up-gate", "gpt-oss-halves", "situ", "relu2", "gelu-plain"])
@pytest.mark.parametrize("tokens", [6, 200])
def test_activations(name: str, tokens: int, mode: str, device: str, rng: torch.Generator) -> None:
    shape = SMALL.with_options(**ACTIVATIONS[name])
    layer = make_fp8_tensor(shape, device, rng, halves=shape.gated)
    routing = make_routing("uniform", tokens, shape.experts, shape.top_k, rng)
    check_tensor(layer, layer.x(tokens, rng), *routing, mode=mode)


@pytest.mark.parametrize("tokens", [9, 200])
@pytest.mark.parametrize("options", CALL_OPTIONS, ids="-".join)
def test_call_options(options: dict[str, Any], tokens: int, mode: str, device: str, rng: torch.Generator) -> None:
    layer = make_fp8_tensor(SMALL, device, rng)
    experts = SMALL.experts * options.get("ep_size", 1)
    routing = make_routing("holes", tokens, experts, SMALL.top_k, rng)
    check_tensor(layer, layer.x(tokens, rng), *routing, mode=mode, **options)


def test_router_logits(mode: str, device: str, rng: torch.Generator) -> None:
    layer = make_fp8_tensor(SHAPES[0], device, rng)
    for tokens in (1, 40):
        logits = tie_free_logits(tokens, SHAPES[0].experts, rng).to(device)
        check_tensor(layer, layer.x(tokens, rng), router_logits=logits, top_k=8, mode=mode)


def test_is_fp8_block_with_equal_scales(device: str, rng: torch.Generator) -> None:
    """A group of 128 columns is a whole row, so rows are quantised as fp8_block quantises them."""
    shape = SHAPES[1]
    layer = make_fp8_tensor(shape, device, rng)
    tables = blocks_of(layer.w13_scale, layer.w13), blocks_of(layer.w2_scale, layer.w2)
    blocks = oxmoe.ExpertWeights.fp8_block(layer.w13, layer.w2, *tables, **layer.options)
    for tokens in (1, 9, 70, 300):
        x, routing = layer.x(tokens, rng), make_routing("uniform", tokens, shape.experts, shape.top_k, rng)
        assert same_bits(call(x, layer.weights("token"), *routing), call(x, blocks, *routing))


@pytest.mark.parametrize("mode", ["token", "static"])
def test_a_row_does_not_depend_on_the_others(mode: str, device: str, rng: torch.Generator) -> None:
    """A row has the same bits alone, in a tile of few tokens, and in one of many."""
    layer = make_fp8_tensor(SMALL, device, rng)
    made, x = layer.weights(mode), layer.x(700, rng)
    weights, ids = (part.to(device) for part in make_routing("uniform", 700, SMALL.experts, SMALL.top_k, rng))
    whole = call(x, made, weights, ids)
    for count in (1, 8, 33, 100, 333):
        assert same_bits(call(x[:count], made, weights[:count], ids[:count]), whole[:count])


def test_one_scale_for_a_call_counts_every_row(device: str, rng: torch.Generator) -> None:
    """The last number of the last row decides the scale; a call after it starts anew."""
    layer = make_fp8_tensor(SMALL, device, rng)
    for tokens in (3, 150, 700):
        routing = make_routing("uniform", tokens, SMALL.experts, SMALL.top_k, rng)
        x = layer.x(tokens, rng)
        x[-1, -1] = 50
        check_tensor(layer, x, *routing, mode="tensor")
        check_tensor(layer, layer.x(tokens, rng), *routing, mode="tensor")


def test_zeros_and_not_finite(mode: str, device: str, rng: torch.Generator) -> None:
    layer = make_fp8_tensor(SMALL, device, rng)
    made, x = layer.weights(mode), layer.x(40, rng)
    layer.b13, layer.b2 = None, None
    made = layer.weights(mode)
    routing = make_routing("uniform", 40, SMALL.experts, SMALL.top_k, rng)
    clean = call(x, made, *routing)
    assert not bool(call(torch.zeros_like(x), made, *routing).any())
    x[5, 7] = math.nan
    result = call(x, made, *routing)
    assert bool(result[5].isnan().all())
    if mode != "tensor":
        others = [i for i in range(40) if i != 5]
        assert same_bits(result[others], clean[others])
    else:
        assert not bool(result[:5].isnan().any())


def test_scales_in_every_shape(device: str, rng: torch.Generator) -> None:
    layer = make_fp8_tensor(SMALL, device, rng)
    x, routing = layer.x(20, rng), make_routing("uniform", 20, SMALL.experts, SMALL.top_k, rng)
    expected = call(x, layer.weights("token"), *routing)
    build = oxmoe.ExpertWeights.fp8_tensor
    w13, w2, w13_scale, w2_scale = layer.operands
    for shape in ((-1, 1), (-1, 1, 1)):
        made = build(w13, w2, w13_scale.view(shape), w2_scale.view(shape), **layer.options)
        assert same_bits(call(x, made, *routing), expected)
    made = build(w13, w2, w13_scale[:, None].repeat(1, 2), w2_scale, **layer.options)
    assert same_bits(call(x, made, *routing), expected)
    one = torch.tensor(0.01, device=device)
    results = [
        call(x, build(w13, w2, scale, scale, **layer.options), *routing)
        for scale in (one, one.view(1), one.expand(SMALL.experts).contiguous())
    ]
    assert same_bits(results[0], results[1]) and same_bits(results[0], results[2])


def test_largest_scale_of_the_experts(device: str, rng: torch.Generator) -> None:
    """SGLang takes the largest scale of a checkpoint that has one for each expert."""
    layer = make_fp8_tensor(SMALL, device, rng)
    x, routing = layer.x(20, rng), make_routing("uniform", 20, SMALL.experts, SMALL.top_k, rng)
    expected = call(x, layer.weights("static"), *routing)
    for name in ("a13_scale", "a2_scale"):
        several = getattr(layer, name) * torch.linspace(0.2, 1, SMALL.experts, device=device)
        setattr(layer, name, several)
    assert same_bits(call(x, layer.weights("static"), *routing), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 4, 40, 300, 3000])
@pytest.mark.parametrize("shape", MODELS, ids=lambda s: s.name)
def test_models(shape: Shape, tokens: int, mode: str, rng: torch.Generator) -> None:
    layer = make_fp8_tensor(shape, "cuda", rng)
    routing = make_routing("uniform", tokens, shape.experts, shape.top_k, rng)
    check_tensor(layer, layer.x(tokens, rng), *routing, mode=mode)


# SGLang's call


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("inplace", [False, True])
def test_fused_experts(inplace: bool, static: bool, device: str, rng: torch.Generator) -> None:
    layer, tokens = make_fp8_tensor(SMALL, device, rng), 20
    x, routing = layer.x(tokens, rng), make_routing("holes", tokens, SMALL.experts, SMALL.top_k, rng)
    routing = tuple(part.to(device) for part in routing)
    expected = call(x, layer.weights("static" if static else "token"), *routing)
    scales = {"a1_scale": layer.a13_scale, "a2_scale": layer.a2_scale} if static else {}
    result = oxmoe.fused_experts(
        x,
        layer.w13,
        layer.w2,
        routing,
        SimpleNamespace(inplace=inplace),
        b1=layer.b13,
        b2=layer.b2,
        use_fp8_w8a8=True,
        w1_scale=layer.w13_scale,
        w2_scale=layer.w2_scale,
        **scales,
    )
    assert same_bits(result, expected) and (result is x) == inplace


def test_fused_experts_refused(rng: torch.Generator) -> None:
    layer = make_fp8_tensor(SMALL, "cpu", rng)
    routing = make_routing("uniform", 3, SMALL.experts, SMALL.top_k, rng)

    def attempt(**options: Any) -> None:
        scales: dict[str, Any] = {"w1_scale": layer.w13_scale, "w2_scale": layer.w2_scale}
        config = SimpleNamespace(inplace=False)
        operands = layer.x(3, rng), layer.w13, layer.w2, routing, config
        oxmoe.fused_experts(*operands, use_fp8_w8a8=True, **{**scales, **options})

    with pytest.raises(NotImplementedError, match="no kernel for per_channel_quant"):
        attempt(per_channel_quant=True, block_shape=[128, 128])
    with pytest.raises(ValueError, match="w1_scale and w2_scale: both are needed with use_fp8_w8a8"):
        attempt(w2_scale=None)
    with pytest.raises(ValueError, match="a13_scale and a2_scale: give both or none"):
        attempt(a1_scale=torch.ones(1))


# Descriptions and errors


def test_attributes(rng: torch.Generator) -> None:
    layer = make_fp8_tensor(SMALL, "cpu", rng)
    names = {"tensor": "fp8_tensor", "token": "fp8_tensor-token", "static": "fp8_tensor-static"}
    for mode, name in names.items():
        made = layer.weights(mode)
        assert (made.format, made.dtype, made.hidden_size, made.intermediate_size) == (name, "bf16", 384, 640)
        assert made.w13 is layer.w13 and same_bits(made.w2_scale, blocks_of(layer.w2_scale, layer.w2))
        assert repr(made).startswith("ExpertWeights.fp8_tensor(experts=5, hidden=384, intermediate=640")
        assert ("per_token=False" in repr(made)) == (mode == "tensor")
        assert name in oxmoe.explain(256, 8, 7168, 256, 64, format=name, arch="cpu")
    assert made.a13_scale is layer.a13_scale and made.a2_scale is layer.a2_scale
    assert layer.weights().a13_scale is None
    # By default each row has a scale, unless scales are given.
    assert oxmoe.ExpertWeights.fp8_tensor(*layer.operands).format == "fp8_tensor-token"
    static = oxmoe.ExpertWeights.fp8_tensor(*layer.operands, **layer.scaling("static"))
    assert static.format == "fp8_tensor-static"


def test_bare_tensors(mode: str, rng: torch.Generator) -> None:
    layer, tokens = make_fp8_tensor(SMALL, "cpu", rng), 20
    x, routing = layer.x(tokens, rng), make_routing("uniform", tokens, SMALL.experts, SMALL.top_k, rng)
    made = layer.weights(mode)
    scales = {"w13_scale": layer.w13_scale, "w2_scale": layer.w2_scale, "format": made.format}
    if mode == "static":
        scales.update(layer.scaling(mode))
    result = oxmoe._oxmoe.moe_tensors(x, layer.w13, layer.w2, *routing, **layer.options, **scales)
    assert same_bits(result, call(x, made, *routing))
    with pytest.raises(ValueError, match="a13_scale and a2_scale: only for format"):
        oxmoe._oxmoe.moe_tensors(x, x, x, *routing, a13_scale=layer.a13_scale)
    scales.pop("a2_scale", None)
    with pytest.raises(ValueError, match='a13_scale and a2_scale: both are needed for format "fp8_tensor-static"'):
        static = {**scales, "format": "fp8_tensor-static"}
        oxmoe._oxmoe.moe_tensors(x, layer.w13, layer.w2, *routing, **layer.options, **static)


def test_contract(rng: torch.Generator) -> None:
    layer = make_fp8_tensor(SMALL, "cpu", rng)
    w13, w2, w13_scale, w2_scale = layer.operands
    build = oxmoe.ExpertWeights.fp8_tensor

    def refused(error: type[Exception], match: str, *operands: Tensor, **options: Any) -> None:
        with pytest.raises(error, match=match):
            build(*operands, **options)

    refused(ValueError, "w13: expected dtype float8_e4m3fn, got bfloat16", w13.bfloat16(), w2, w13_scale, w2_scale)
    refused(
        ValueError,
        r"w13_scale: expected shape \[5\], \[5, 2\], \[5, 1280\] or one number, got \[4\]",
        w13,
        w2,
        w13_scale[:4],
        w2_scale,
    )
    refused(
        ValueError,
        r"w2_scale: expected shape \[5\], \[5, 384\] or one number, got \[5, 2\]",
        w13,
        w2,
        w13_scale,
        torch.ones(5, 2),
    )
    refused(ValueError, "w2_scale: expected dtype float32, got float64", w13, w2, w13_scale, w2_scale.double())
    wide = torch.ones(5, 768)[:, ::2]
    refused(ValueError, "w2_scale: is not contiguous", w13, w2, w13_scale, wide)
    refused(
        ValueError, "w2_scale: expected dtype float32, got bfloat16", w13, w2, w13_scale, torch.ones(5, 384).bfloat16()
    )
    refused(
        NotImplementedError, 'layout "interleaved" for fp8_tensor', w13, w2, w13_scale, w2_scale, layout="interleaved"
    )
    other = torch.empty((5, 1424, 128), dtype=w13.dtype)
    refused(
        NotImplementedError, "w13: dimension 1 gives intermediate 712 for fp8_tensor", other, w2, w13_scale, w2_scale
    )
    both = {"a13_scale": torch.ones(1), "a2_scale": torch.ones(1)}
    refused(ValueError, "a13_scale and a2_scale: give both or none", *layer.operands, a2_scale=torch.ones(1))
    refused(ValueError, "per_token: excludes a13_scale", *layer.operands, per_token=True, **both)
    match = r"a2_scale: expected one number or one for each expert, got shape \[3\]"
    refused(ValueError, match, *layer.operands, **{**both, "a2_scale": torch.ones(3)})
    refused(
        ValueError, "a13_scale: expected dtype float32", *layer.operands, **{**both, "a13_scale": torch.ones(1).half()}
    )
