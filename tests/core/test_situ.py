"""SiTU, the activation of Kimi-K3: b tanh(g / b) sigmoid(g) * lb tanh(u / lb)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import oxmoe
from cases import Layer, Shape, make_layer, make_routing, make_x
from int4_cases import make as make_int4
from mxfp4_cases import check as check_mxfp4
from mxfp4_cases import make_blocks
from mxfp8_cases import check as check_mxfp8
from mxfp8_cases import make_mxfp8
from oxmoe import reference
from oxmoe.testing import assert_close_ulp, same_bits

KIMI_K3 = {"situ_beta": 4.0, "situ_linear_beta": 25.0}
BOUNDS = {"situ_beta": 1.25, "situ_linear_beta": 0.75}
CONSTRUCTORS = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}
# The relative error of a rounded number, and half of the smallest number.
PRECISION = {torch.bfloat16: (2.0**-8, 0.0), torch.float16: (2.0**-11, 2.0**-25), torch.float32: (2.0**-24, 0.0)}
SHAPE = Shape("situ", 6, 2, 96, 80, bias=True)


def experts(layer: Layer, options: dict[str, Any]) -> oxmoe.ExpertWeights:
    make = getattr(oxmoe.ExpertWeights, CONSTRUCTORS[layer.w13.dtype])
    return make(layer.w13, layer.w2, b13=layer.b13, b2=layer.b2, activation="situ", **options)


def given(place: tuple[str, torch.dtype], tokens: int, rng: torch.Generator) -> tuple[Layer, Tensor, Tensor, Tensor]:
    device, dtype = place
    routing = (t.to(device) for t in make_routing("uniform", tokens, SHAPE.experts, SHAPE.top_k, rng))
    return make_layer(SHAPE, dtype, device, rng), make_x(tokens, SHAPE, dtype, device, rng), *routing


def pairs(dtype: torch.dtype, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Returns gates and ups: of every size, near the bounds, and all pairs of special numbers."""
    largest = {torch.bfloat16: 100.0, torch.float16: 15.0, torch.float32: 100.0}[dtype]
    exponents = (torch.rand((2, 150), generator=rng) * 2 - 1) * largest
    any_size = torch.exp2(exponents) * (torch.randint(2, (2, 150), generator=rng) * 2 - 1)
    near = torch.randn((2, 150), generator=rng) * torch.tensor([[4.0], [25.0]])
    special = torch.tensor([0.0, -0.0, 1.0, -1.0, torch.inf, -torch.inf, torch.nan])
    gate, up = torch.cat([any_size, near, torch.cartesian_prod(special, special).T], 1).to(dtype)
    return gate, up


@pytest.mark.parametrize("numbers", [{}, {"situ_beta": 1.5}, KIMI_K3, {"situ_linear_beta": 0.125}], ids=str)
def test_values(place: tuple[str, torch.dtype], numbers: dict[str, float], rng: torch.Generator) -> None:
    """Each expert has one pair, and its token has the pair as its sums: nothing but the activation rounds."""
    device, dtype = place
    gate, up = pairs(dtype, rng)
    count, size = len(gate), 64
    w13 = torch.zeros((count, 2, size, size), dtype=dtype)
    w13[..., 0] = torch.stack([gate, up], 1)[..., None]
    w2 = torch.zeros((count, size, size), dtype=dtype)
    w2[..., 0] = 1
    x = torch.zeros((count, size), dtype=dtype)
    x[:, 0] = 1
    make = getattr(oxmoe.ExpertWeights, CONSTRUCTORS[dtype])
    weights = make(w13.flatten(1, 2).to(device), w2.to(device), activation="situ", **numbers)
    ids = torch.arange(count, dtype=torch.int32)[:, None]
    got = oxmoe.moe(x.to(device), weights, torch.ones((count, 1), device=device), ids.to(device)).cpu()
    finite = gate.isfinite() & up.isfinite()
    expected = reference.activate(torch.stack([gate, up], 1).double(), activation="situ", **numbers)
    relative, least = PRECISION[dtype]
    error = (got.double() - expected).abs()
    # A sigmoid below the smallest normal number of fp32 may be zero.
    bar = expected.abs() * (relative + 2.0**-16) + least + 2.0**-120 * up.double().abs().clamp(min=1)[:, None]
    largest = torch.finfo(dtype).max
    fits, overflows = expected[:, 0].abs() < largest, expected[:, 0].abs() > largest * (1 + relative)
    assert bool((error <= bar)[finite & fits].all())
    assert bool((got.isinf() | got.isnan())[finite & overflows].all())
    # In GEMM2 infinite numbers meet zeros of w2, which makes NaN of them.
    unusual = expected[~finite].isnan() | expected[~finite].isinf()
    assert unusual.any() and not unusual.all()
    assert torch.equal(got[~finite].isnan(), unusual.expand(-1, size))


@pytest.mark.parametrize("tokens", [1, 9, 40, 300])
@pytest.mark.parametrize("layout", ["gate_up", "up_gate", "interleaved"])
def test_numbers_of_experts(place: tuple[str, torch.dtype], layout: str, tokens: int, rng: torch.Generator) -> None:
    layer, x, topk_weights, topk_ids = given(place, tokens, rng)
    drawn = {name: (torch.rand(SHAPE.experts, generator=rng) * 2 + 0.25).to(place[0]) for name in KIMI_K3}
    operands = x, layer.w13, layer.w2, topk_weights, topk_ids
    for numbers in (drawn, {**drawn, "situ_linear_beta": 0.75}, {"situ_linear_beta": drawn["situ_linear_beta"]}):
        options = {**numbers, "layout": layout}
        expected = reference.moe(*operands, b13=layer.b13, b2=layer.b2, activation="situ", **options)
        assert_close_ulp(oxmoe.moe(x, experts(layer, options), topk_weights, topk_ids), expected)


def test_equal_numbers_have_the_bits_of_one(place: tuple[str, torch.dtype], rng: torch.Generator) -> None:
    layer, *operands = given(place, 21, rng)
    each = {name: torch.full((SHAPE.experts,), value, device=place[0]) for name, value in KIMI_K3.items()}
    results = [oxmoe.moe(operands[0], experts(layer, numbers), *operands[1:]) for numbers in (KIMI_K3, each)]
    assert same_bits(*results)


@pytest.mark.parametrize(
    "tokens", [7, pytest.param(300, marks=pytest.mark.gpu), pytest.param(900, marks=pytest.mark.gpu)]
)
def test_other_packed_experts(tokens: int, device: str, rng: torch.Generator) -> None:
    """MXFP8 and int4, up to the widest tiles. Each format's own test has fewer tokens."""
    shape = Shape("wide tiles", 3, 2, 320, 224, bias=True).with_options(activation="situ", **BOUNDS)
    routing = make_routing("uniform", tokens, shape.experts, shape.top_k, rng)
    mxfp8 = make_mxfp8(shape, device, rng)
    check_mxfp8(mxfp8, mxfp8.x(tokens, rng), *routing)
    int4 = make_int4(shape, rng).to(device)
    x, given = make_x(tokens, shape, torch.bfloat16, device, rng), [part.to(device) for part in routing]
    options = {"b13": int4.b13, "b2": int4.b2, "activation": "situ", **BOUNDS}
    assert_close_ulp(oxmoe.moe(x, int4.weights(), *given), reference.moe(x, *int4.plain(), *given, **options))


@pytest.mark.parametrize("tokens", [1, 13, 150, 500, 1000])
def test_mxfp4_experts(tokens: int, device: str, rng: torch.Generator) -> None:
    shape = Shape("numbers", 4, 2, 96, 64, bias=True)
    drawn = {name: (torch.rand(4, generator=rng) * 2 + 0.25).to(device) for name in KIMI_K3}
    topk_weights, topk_ids = (t.to(device) for t in make_routing("uniform", tokens, 4, 2, rng))
    blocks = make_blocks(shape.with_options(activation="situ", **drawn), "bf16", device, rng)
    check_mxfp4(blocks, blocks.x(tokens, rng), topk_weights, topk_ids)


def test_operators_see_them(device: str, rng: torch.Generator) -> None:
    layer, x, topk_weights, topk_ids = given((device, torch.bfloat16), 5, rng)
    linear = (torch.rand(SHAPE.experts, generator=rng) + 0.5).to(device)
    for numbers in (KIMI_K3, {"situ_beta": 1.5}, {"situ_beta": 1.5, "situ_linear_beta": linear}):
        weights = experts(layer, numbers)
        assert weights.situ_beta == numbers["situ_beta"]
        assert weights.situ_linear_beta is numbers.get("situ_linear_beta") or weights.situ_linear_beta == 25.0
        expected = oxmoe.moe(x, weights, topk_weights, topk_ids)
        torch._dynamo.reset()
        compiled = torch.compile(oxmoe.moe, fullgraph=True, backend="aot_eager")
        assert same_bits(compiled(x, weights, topk_weights, topk_ids), expected)
        bare = oxmoe._oxmoe.moe_tensors(
            x, layer.w13, layer.w2, topk_weights, topk_ids, b13=layer.b13, b2=layer.b2, activation="situ", **numbers
        )
        assert same_bits(bare, expected)


def test_attributes(rng: torch.Generator) -> None:
    layer, *_ = given(("cpu", torch.bfloat16), 1, rng)
    assert (experts(layer, {}).situ_beta, experts(layer, {}).situ_linear_beta) == (4.0, None)
    plain = oxmoe.ExpertWeights.bf16(layer.w13, layer.w2)
    assert (plain.situ_beta, plain.situ_linear_beta) == (None, None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"activation": "silu", "situ_beta": 4.0}, '^situ_beta: only for activation "situ", got it with "silu"'),
        ({"activation": "gelu", "situ_linear_beta": 25.0}, '^situ_linear_beta: only for activation "situ"'),
        ({"alpha": 4.0}, '^alpha, beta, limit: only for activation "silu" with gated weights, got them with "situ"'),
        ({"limit": 7.0}, "^alpha, beta, limit: only for"),
        ({"situ_beta": 0.0}, r"^situ_beta: expected a number from 2\^-60 to 2\^60, got 0"),
        ({"situ_beta": torch.nan}, "^situ_beta: expected a number from .* got NaN"),
        ({"situ_linear_beta": torch.inf}, "^situ_linear_beta: expected a number from .* got inf"),
        ({"situ_linear_beta": -1.0}, "^situ_linear_beta: expected a number from .* got -1"),
        ({"situ_beta": torch.ones(5)}, '^situ_beta: dimension 0 "experts": expected 6 .*, got 5'),
        ({"situ_beta": torch.ones(6).double()}, "^situ_beta: "),
        (
            {"situ_linear_beta": torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0, 1.0])},
            r"^situ_linear_beta: expected numbers from 2\^-60 to 2\^60, got 0 for expert 2",
        ),
    ],
    ids=str,
)
def test_refused_numbers(options: dict[str, Any], message: str, rng: torch.Generator) -> None:
    layer, *_ = given(("cpu", torch.bfloat16), 1, rng)
    with pytest.raises(ValueError, match=message):
        oxmoe.ExpertWeights.bf16(layer.w13, layer.w2, **{"activation": "situ", **options})


def test_it_has_gates(rng: torch.Generator) -> None:
    layer, *_ = given(("cpu", torch.bfloat16), 1, rng)
    with pytest.raises(NotImplementedError, match=r'^activation "situ" without gates; supported: gated silu'):
        oxmoe.ExpertWeights.bf16(layer.w13[:, :80].contiguous(), layer.w2, activation="situ", gated=False)
    with pytest.raises(ValueError, match="situ has gate and up rows"):
        reference.activate(torch.ones(3, 4), activation="situ", gated=False)
