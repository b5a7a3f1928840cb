"""Experts of e4m3 with block scales, and the quantisation of their activations."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import oxmoe
from cases import ACTIVATIONS, PATTERNS, Shape, make_routing, tie_free_logits
from fp8_cases import MODELS, SHAPES, call, check, check_graph, make_fp8
from oxmoe import quantize, reference
from oxmoe.testing import same_bits

SMALL = SHAPES[2]

# Rows to e4m3


def check_rows(x: Tensor, group: int, **options: Any) -> None:
    codes, scales = quantize.per_token_group_quant_fp8(x, group, **options)
    expected, expected_scales = reference.fp8_groups(x, group)
    assert codes.dtype == torch.float8_e4m3fn and same_bits(codes, expected)
    assert same_bits(scales, expected_scales)


@pytest.mark.parametrize("group", [16, 32, 64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(0, 256), (1, 128), (3, 384), (2, 5, 256), (7168,)], ids=str)
def test_rows(shape: tuple[int, ...], dtype: torch.dtype, group: int, device: str, rng: torch.Generator) -> None:
    x = torch.randn(shape, generator=rng) * torch.exp2(torch.randint(-8, 8, shape, generator=rng))
    check_rows(x.to(dtype).to(device), group)


def test_rows_of_every_number(device: str, rng: torch.Generator) -> None:
    """Rows hold every bf16 that is a number, beside the largest e4m3: the scale is 1, so that every rounding shows."""
    numbers = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    numbers = numbers[(numbers.abs() <= 448) & ~numbers.isnan()]
    numbers = torch.cat([numbers, numbers.new_zeros(-len(numbers) % 127)])[
        torch.randperm(-(-len(numbers) // 127) * 127)
    ]
    x = torch.cat([numbers.view(-1, 127), numbers.new_full((len(numbers) // 127, 1), 448.0)], 1).to(device)
    check_rows(x, 128)


def test_rows_not_finite_and_zero(device: str, rng: torch.Generator) -> None:
    x = torch.randn((6, 256), generator=rng).bfloat16()
    x[0] = 0
    x[1, :128] = -0.0
    x[2, 5] = math.nan
    x[3, 130] = math.inf
    x[4, 7] = -math.inf
    x[5] = math.nan
    x = x.to(device)
    codes, scales = quantize.per_token_group_quant_fp8(x, 128)
    expected, expected_scales = reference.fp8_groups(x, 128)
    # The sign of a NaN is not kept.
    same = codes.view(torch.uint8) == expected.view(torch.uint8)
    assert bool((same | (codes.float().isnan() & expected.float().isnan())).all())
    assert same_bits(scales, expected_scales)
    assert scales[0].tolist() == [pytest.approx(1e-10 / 448)] * 2
    assert bool(codes[2, 5].float().isnan()) and int(codes[2].float().isnan().sum()) == 1


@pytest.mark.parametrize("rows", [1, 3, 4, 130])
def test_rows_with_other_scales(rows: int, device: str, rng: torch.Generator) -> None:
    x = torch.randn((rows, 640), generator=rng).bfloat16().to(device)
    codes, scales = quantize.per_token_group_quant_fp8(x, 128)
    for aligned in (False, True):
        again, columns = quantize.per_token_group_quant_fp8(x, 128, column_major_scales=True, scale_tma_aligned=aligned)
        padded = -(-rows // 4) * 4 if aligned else rows
        assert same_bits(again, codes) and same_bits(columns.contiguous(), scales)
        assert columns.stride(1) == padded and (rows == 1 or columns.stride(0) == 1)
    codes, words = quantize.per_token_group_quant_fp8(
        x, 128, column_major_scales=True, scale_tma_aligned=True, scale_ue8m0=True
    )
    expected, powers = reference.fp8_groups(x, 128, powers=True)
    assert same_bits(codes, expected)
    assert words.dtype == torch.int32 and words.shape == (rows, 2) and words.stride(1) == -(-rows // 4) * 4
    found = torch.stack([words >> 8 * i & 255 for i in range(4)], -1).flatten(1)
    assert torch.equal(torch.exp2(found[:, :5].float() - 127), powers) and not bool(found[:, 5:].any())


def test_rows_take_eps(device: str) -> None:
    codes, scales = quantize.per_token_group_quant_fp8(torch.full((1, 128), 0.5, device=device), 128, eps=2.0)
    assert scales.item() == pytest.approx(2 / 448) and bool((codes.float() == 112).all())


def test_rows_refused() -> None:
    x = torch.zeros((2, 256), dtype=torch.bfloat16)
    quant = quantize.per_token_group_quant_fp8
    with pytest.raises(NotImplementedError, match="group_size 48; supported: 16, 32, 64, 128"):
        quant(x, 48)
    with pytest.raises(ValueError, match='x: dimension 1 "K": expected a multiple of 128, got 64'):
        quant(x[:, :64].contiguous(), 128)
    with pytest.raises(ValueError, match="x: is not contiguous"):
        quant(x.T, 16)
    with pytest.raises(ValueError, match="x: expected dtype bfloat16 or float16 or float32, got int32"):
        quant(x.int(), 128)
    with pytest.raises(ValueError, match="eps: expected 1e-30 to 1e30, got 0"):
        quant(x, 128, eps=0.0)
    with pytest.raises(NotImplementedError, match="no kernel for dtype int8; served is float8_e4m3fn"):
        quant(x, 128, dtype=torch.int8)
    with pytest.raises(
        ValueError, match="scale_ue8m0: needs column_major_scales, scale_tma_aligned and group_size 128"
    ):
        quant(x, 128, scale_ue8m0=True)
    with pytest.raises(NotImplementedError, match="column_major_scales: served for 2-D x, got 3 dimensions"):
        quant(x[None], 128, column_major_scales=True)


# The layer


@pytest.mark.parametrize("tokens", [0, 1, 7, 64, 130])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.name)
def test_layer(shape: Shape, tokens: int, device: str, rng: torch.Generator) -> None:
    layer = make_fp8(shape, device, rng)
    check(layer, layer.x(tokens, rng), *make_routing("uniform", tokens, shape.experts, shape.top_k, rng))


@pytest.mark.parametrize("pattern", PATTERNS)
def test_routing_patterns(pattern: str, device: str, rng: torch.Generator) -> None:
    layer = make_fp8(SMALL, device, rng)
    for tokens in (5, 150):
        check(layer, layer.x(tokens, rng), *make_routing(pattern, tokens, SMALL.experts, SMALL.top_k, rng))


@pytest.mark.parametrize(
    "name", [name for name, options in ACTIVATIONS.items() if options.get("layout") != "interleaved"]
)
@pytest.mark.parametrize("tokens", [6, 200])
def test_activations(name: str, tokens: int, device: str, rng: torch.Generator) -> None:
    shape = SMALL.with_options(**ACTIVATIONS[name])
    layer = make_fp8(shape, device, rng)
    check(layer, layer.x(tokens, rng), *make_routing("uniform", tokens, shape.experts, shape.top_k, rng))


@pytest.mark.parametrize("tokens", [6, 200])
def test_numbers_of_experts(tokens: int, device: str, rng: torch.Generator) -> None:
    def numbers(low: float) -> Tensor:
        return (torch.rand(SMALL.experts, generator=rng) + low).to(device)

    shape = SMALL.with_options(alpha=numbers(0.5), beta=numbers(0.0), limit=numbers(0.5))
    layer = make_fp8(shape, device, rng)
    check(layer, layer.x(tokens, rng), *make_routing("uniform", tokens, shape.experts, shape.top_k, rng))


@pytest.mark.parametrize("tokens", [9, 200])
@pytest.mark.parametrize(
    "options",
    [
        {"no_combine": True},
        {"no_combine": True, "keep_router_weight": True},
        {"apply_router_weight_on_input": True},
        {"routed_scaling_factor": 2.5},
    ],
    ids=lambda options: "-".join(options),
)
def test_call_options(options: dict[str, Any], tokens: int, device: str, rng: torch.Generator) -> None:
    layer = make_fp8(SMALL, device, rng)
    check(layer, layer.x(tokens, rng), *make_routing("holes", tokens, SMALL.experts, SMALL.top_k, rng), **options)


@pytest.mark.parametrize("bias_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("tokens", [9, 200])
def test_biases(tokens: int, bias_dtype: torch.dtype, device: str, rng: torch.Generator) -> None:
    layer = make_fp8(SMALL, device, rng, bias_dtype=bias_dtype)
    check(layer, layer.x(tokens, rng), *make_routing("uniform", tokens, SMALL.experts, SMALL.top_k, rng))


def test_router_logits(device: str, rng: torch.Generator) -> None:
    layer = make_fp8(SHAPES[0], device, rng)
    for tokens in (1, 40):
        logits = tie_free_logits(tokens, SHAPES[0].experts, rng).to(device)
        check(layer, layer.x(tokens, rng), router_logits=logits, top_k=8)


def test_expert_parallel(device: str, rng: torch.Generator) -> None:
    """Ids of other ranks' experts are left out."""
    layer, tokens = make_fp8(SMALL, device, rng), 40
    weights, ids = make_routing("uniform", tokens, 2 * SMALL.experts, SMALL.top_k, rng)
    for rank in range(2):
        check(layer, layer.x(tokens, rng), weights, ids, ep_size=2, ep_rank=rank)


def test_a_row_does_not_depend_on_the_others(device: str, rng: torch.Generator) -> None:
    """A row has the same bits alone, in a tile of few tokens, and in one of many."""
    layer = make_fp8(SMALL, device, rng)
    made, x = layer.weights(), layer.x(700, rng)
    weights, ids = (part.to(device) for part in make_routing("uniform", 700, SMALL.experts, SMALL.top_k, rng))
    whole = call(x, made, weights, ids)
    for count in (1, 8, 33, 100, 333):
        assert same_bits(call(x[:count], made, weights[:count], ids[:count]), whole[:count])


def test_zeros_and_not_finite(device: str, rng: torch.Generator) -> None:
    """A token of zeros gives zeros, and NaN and infinity stay in their row."""
    shape = SHAPES[0]
    layer = make_fp8(shape, device, rng)
    x, routing = layer.x(40, rng), make_routing("uniform", 40, shape.experts, shape.top_k, rng)
    clean = check(layer, x, *routing)
    x[3], x[5, 7], x[6, 130] = 0, math.nan, math.inf
    result = call(x, layer.weights(), *(part.to(device) for part in routing))
    assert not bool(result[3].any()) and bool(result[5:7].isnan().all())
    others = [i for i in range(40) if i not in (3, 5, 6)]
    assert same_bits(result[others], clean[others])


def test_zero_blocks(device: str, rng: torch.Generator) -> None:
    layer = make_fp8(SMALL, device, rng)
    layer.w13.view(torch.uint8)[:, :128] = 0
    layer.w2_scale[:, 1] = 0
    check(layer, layer.x(20, rng), *make_routing("uniform", 20, SMALL.experts, SMALL.top_k, rng))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 4, 40, 300, 3000])
@pytest.mark.parametrize("shape", MODELS, ids=lambda s: s.name)
def test_models(shape: Shape, tokens: int, rng: torch.Generator) -> None:
    layer = make_fp8(shape, "cuda", rng)
    check(layer, layer.x(tokens, rng), *make_routing("uniform", tokens, shape.experts, shape.top_k, rng))


@pytest.mark.gpu
def test_graph_takes_other_routing(rng: torch.Generator) -> None:
    check_graph(make_fp8(SMALL, "cuda", rng), 300, "uniform", rng)


# SGLang's call


@pytest.mark.parametrize("inplace", [False, True])
def test_fused_experts(inplace: bool, device: str, rng: torch.Generator) -> None:
    layer, tokens = make_fp8(SMALL, device, rng), 20
    x, routing = layer.x(tokens, rng), make_routing("holes", tokens, SMALL.experts, SMALL.top_k, rng)
    routing = tuple(part.to(device) for part in routing)
    expected = call(x, layer.weights(), *routing)
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
        block_shape=[128, 128],
    )
    assert same_bits(result, expected) and (result is x) == inplace


def test_fused_experts_refused(rng: torch.Generator) -> None:
    layer = make_fp8(SMALL, "cpu", rng)
    routing = make_routing("uniform", 3, SMALL.experts, SMALL.top_k, rng)
    good: dict[str, Any] = {"w1_scale": layer.w13_scale, "w2_scale": layer.w2_scale, "block_shape": [128, 128]}

    def attempt(w1: Tensor = layer.w13, **options: Any) -> None:
        x, config = layer.x(3, rng), SimpleNamespace(inplace=False)
        oxmoe.fused_experts(x, w1, layer.w2, routing, config, use_fp8_w8a8=True, **{**good, **options})

    with pytest.raises(NotImplementedError, match=r"block_shape: no kernel for \[64, 128\]; served is \[128, 128\]"):
        attempt(block_shape=[64, 128])
    with pytest.raises(ValueError, match="w1_scale and w2_scale: both are needed with use_fp8_w8a8"):
        attempt(w2_scale=None)
    with pytest.raises(ValueError, match="w1: expected dtype float8_e4m3fn with use_fp8_w8a8, got bfloat16"):
        attempt(layer.w13.bfloat16())
    with pytest.raises(NotImplementedError, match="no kernel for a1_scale"):
        attempt(a1_scale=torch.ones(1))
    with pytest.raises(ValueError, match="x: expected dtype bfloat16, got float32"):
        oxmoe.fused_experts(
            layer.x(3, rng).float(),
            layer.w13,
            layer.w2,
            routing,
            SimpleNamespace(inplace=False),
            use_fp8_w8a8=True,
            **good,
        )


# Descriptions and errors


def test_attributes(rng: torch.Generator) -> None:
    layer = make_fp8(SMALL, "cpu", rng)
    made = layer.weights()
    assert (made.format, made.dtype, made.hidden_size, made.intermediate_size) == ("fp8_block", "bf16", 384, 640)
    assert made.w13 is layer.w13 and made.w13_scale is layer.w13_scale and made.w2_scale is layer.w2_scale
    assert repr(made).startswith("ExpertWeights.fp8_block(experts=5, hidden=384, intermediate=640")
    assert "fp8_block" in oxmoe.explain(256, 8, 7168, 256, 64, format="fp8_block", arch="cpu")


def test_bare_tensors(rng: torch.Generator) -> None:
    layer, tokens = make_fp8(SMALL, "cpu", rng), 20
    x, routing = layer.x(tokens, rng), make_routing("uniform", tokens, SMALL.experts, SMALL.top_k, rng)
    scales = {"w13_scale": layer.w13_scale, "w2_scale": layer.w2_scale, "format": "fp8_block"}
    result = oxmoe._oxmoe.moe_tensors(x, layer.w13, layer.w2, *routing, **layer.options, **scales)
    assert same_bits(result, call(x, layer.weights(), *routing))


def test_contract(rng: torch.Generator) -> None:
    layer = make_fp8(SMALL, "cpu", rng)
    w13, w2, w13_scale, w2_scale = layer.operands
    build = oxmoe.ExpertWeights.fp8_block
    with pytest.raises(ValueError, match="w13: expected dtype float8_e4m3fn, got bfloat16"):
        build(w13.bfloat16(), w2, w13_scale, w2_scale)
    with pytest.raises(ValueError, match='w13_scale: dimension 1 "rows of w13 / 128": expected 10, got 9'):
        build(w13, w2, w13_scale[:, :9].contiguous(), w2_scale)
    with pytest.raises(ValueError, match='w2_scale: dimension 2 "intermediate / 128": expected 5, got 4'):
        build(w13, w2, w13_scale, w2_scale[..., :4].contiguous())
    with pytest.raises(ValueError, match="w13_scale: expected dtype float32, got bfloat16"):
        build(w13, w2, w13_scale.bfloat16(), w2_scale)
    with pytest.raises(NotImplementedError, match='layout "interleaved" for fp8_block experts'):
        build(w13, w2, w13_scale, w2_scale, layout="interleaved")
    with pytest.raises(NotImplementedError, match="w13: dimension 1 gives intermediate 704 for fp8_block experts"):
        build(torch.empty((2, 1408, 128), dtype=w13.dtype), w2, w13_scale, w2_scale)
    with pytest.raises(NotImplementedError, match="w13: dimension 2 gives hidden 2880 for fp8_block experts"):
        build(torch.empty((2, 256, 2880), dtype=w13.dtype), w2, w13_scale, w2_scale)
    with pytest.raises(ValueError, match="b13: expected dtype bfloat16 or float32, got float16"):
        build(w13, w2, w13_scale, w2_scale, b13=torch.zeros((5, 1280), dtype=torch.float16))
    with pytest.raises(ValueError, match="x: expected dtype bfloat16, got float32"):
        oxmoe.moe(torch.zeros((1, 384)), layer.weights(), torch.ones((1, 1)), torch.zeros((1, 1), dtype=torch.int32))
