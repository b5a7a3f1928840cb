"""MXFP4 experts: on CPU against plain experts of the same numbers bit for bit, everywhere against the reference."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import oxmoe
from cases import ACTIVATIONS, GPT_OSS, PATTERNS, Layer, Shape, make_routing, make_x, tie_free_logits
from mxfp4_cases import DTYPES, Blocks, call, check, make_blocks
from oxmoe import quantize, reference
from oxmoe.testing import assert_close_ulp, same_bits

dtypes = pytest.mark.parametrize("dtype", DTYPES)
places = pytest.mark.parametrize(
    "device,dtype",
    [*(("cpu", dtype) for dtype in DTYPES), pytest.param("cuda", "bf16", marks=pytest.mark.gpu)],
)

# GPT-OSS's ratio, and its sizes one at a time; the sizes of other models' slices; the least sizes.
SHAPES = (
    Shape("gpt-oss-small", 8, 4, 288, 288, bias=True, options=tuple(GPT_OSS.items())),
    Shape("h2880", 3, 2, 2880, 64, bias=True, options=tuple(GPT_OSS.items())),
    Shape("i2880", 3, 2, 64, 2880, bias=True, options=tuple(GPT_OSS.items())),
    Shape("i704", 4, 2, 128, 704),
    Shape("h192-i1408", 3, 2, 192, 1408),
    Shape("h1408-i352", 2, 2, 1408, 352),
    Shape("one-block", 1, 1, 32, 32),
)
OPTIONS: tuple[dict[str, Any], ...] = (
    {"routed_scaling_factor": 2.5},
    {"apply_router_weight_on_input": True},
    {"no_combine": True},
    {"no_combine": True, "keep_router_weight": True},
)


# Numbers


def test_reference_weights_are_the_definition() -> None:
    """Every scale with every code is compared with numbers written out here; even columns are low nibbles."""
    codes = torch.arange(256, dtype=torch.uint8).view(16, 16).repeat(16, 1)
    scales = torch.arange(256, dtype=torch.uint8).view(256, 1)
    values = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    values += [-value for value in values]
    for dtype in DTYPES.values():
        weights = reference.mxfp4_weights(codes, scales, dtype)
        for scale in range(256):
            row = [
                values[code >> shift & 15]
                for code in range(16 * (scale % 16), 16 * (scale % 16) + 16)
                for shift in (0, 4)
            ]
            power = math.nan if scale == 255 else 2.0 ** (scale - 127)
            most = torch.finfo(dtype).max
            expected = (torch.tensor(row, dtype=torch.float64) * power).clamp(-most, most)
            assert weights[scale].equal(expected.to(dtype)) or (scale == 255 and bool(weights[scale].isnan().all()))
    assert (
        reference.mxfp4_weights(codes, scales.view(torch.float8_e8m0fnu))
        .view(torch.int16)
        .equal(reference.mxfp4_weights(codes, scales).view(torch.int16))
    )


@dtypes
def test_every_number_is_multiplied_exactly(dtype: str) -> None:
    """GEMM1 makes rows of the identity, so GEMM2 writes its weights out: each scale with each code.

    bf16 numbers below 2^-126 are zero on CPUs with bf16 instructions.
    """
    first, last = (2 if dtype == "bf16" else 0), 254
    ones = torch.zeros((32, 256), dtype=torch.uint8)
    ones[torch.arange(32), torch.arange(32)] = 2
    packed = ones[:, 0::2] | ones[:, 1::2] << 4
    codes = torch.arange(256, dtype=torch.uint8).view(16, 16).repeat(16, 1)
    scales = torch.arange(256, dtype=torch.uint8).clamp(first, last).view(1, 256, 1)
    weights = oxmoe.ExpertWeights.mxfp4(
        packed[None],
        codes[None],
        torch.full((1, 32, 8), 127, dtype=torch.uint8),
        scales,
        activation="relu2",
        dtype=dtype,
    )
    x = torch.eye(32, 256, dtype=DTYPES[dtype])
    ids, gates = torch.zeros((32, 1), dtype=torch.int32), torch.ones((32, 1))
    result = call(x, weights, gates, ids)
    # NOTE: a sum that starts at 0 is never -0.
    assert same_bits(result.T + 0.0, reference.mxfp4_weights(codes, scales[0], DTYPES[dtype]) + 0.0)


@places
@pytest.mark.parametrize("tokens", [1, 40])
def test_special_scales_and_codes(device: str, dtype: str, tokens: int, rng: torch.Generator) -> None:
    """Blocks of zeros and -0, the least and the largest scale, and NaN blocks: on CPU they give what plain experts
    give."""
    shape = Shape("special", 4, 2, 96, 64)
    routing = tuple(t.to(device) for t in make_routing("uniform", tokens, shape.experts, shape.top_k, rng))
    blocks = make_blocks(shape, dtype, device, rng)
    x = blocks.x(tokens, rng)
    blocks.w13[:, :8] = 0x00
    blocks.w2[:, ::3] = 0x88
    blocks.w13_scale[:, 8:16] = 0
    result = check(blocks, x, *routing)
    assert bool((result[:, ::3] == 0).all()) and bool((result != 0).any())

    # NOTE: with the scale 254 most codes are beyond bf16: there the CPU saturates, and GPUs do not.
    for scale in (254, 255) if device == "cpu" else (255,):
        blocks = make_blocks(shape, dtype, device, rng)
        blocks.w2_scale[:, 5] = scale
        result, plain = call(x, blocks.weights(), *routing), blocks.plain
        assert scale == 254 or bool(result[:, 5].isnan().all())
        assert bool(result[:, :5].isfinite().all())
        if device == "cpu":
            expected = call(x, plain.weights(), *routing)
            assert same_bits(result.nan_to_num(7.0), expected.nan_to_num(7.0))
            assert result.isnan().equal(expected.isnan())
        else:
            assert_close_ulp(result, reference.moe(x, plain.w13, plain.w2, *routing))

    blocks = make_blocks(shape, dtype, device, rng)
    blocks.w2_scale.fill_(0)
    blocks.w13_scale.fill_(0)
    # NOTE: the reference is no bar here: CPUs with bf16 instructions count these weights as zero.
    result = call(x, blocks.weights(), *routing)
    assert float(result.abs().max()) < 1e-30
    assert device != "cpu" or same_bits(result, call(x, blocks.plain.weights(), *routing))


@pytest.mark.parametrize("tokens", [3, 40, 400])
def test_large_scales(device: str, tokens: int, rng: torch.Generator) -> None:
    """Scales go up to 2^125, in another range for each expert. Packed weights have sums that are multiplied by a power
    of two."""
    shape = Shape("large", 4, 2, 160, 96)
    blocks, routing = make_blocks(shape, "bf16", device, rng), make_routing("uniform", tokens, 4, 2, rng)
    for expert, (of_w13, of_w2) in enumerate(((0, 0), (15, 4), (20, 80), (-20, 128))):
        blocks.w13_scale[expert] += of_w13 % 256
        blocks.w2_scale[expert] += of_w2 % 256
    blocks.w2_scale[2, :, 0] -= 50
    assert [int(blocks.w2_scale[expert].max()) for expert in range(4)] == [124, 128, 204, 252]
    x = blocks.x(tokens, rng) * 2.0**-20
    # Each slot is compared by itself: in a sum the largest would hide the others.
    result = check(blocks, x, *routing, no_combine=True)
    assert bool(result.isfinite().all()) and bool((result != 0).any(-1).all())


# Layers


@places
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_shapes(device: str, dtype: str, shape: Shape, rng: torch.Generator) -> None:
    blocks = make_blocks(shape, dtype, device, rng)
    for tokens in (0, 1, 7, 64):
        routing = make_routing("uniform", tokens, shape.experts, shape.top_k, rng)
        result = check(blocks, blocks.x(tokens, rng), *routing)
        assert tokens == 0 or 0.01 < float(result.float().std()) < 100


@places
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(device: str, dtype: str, name: str, biased: bool, rng: torch.Generator) -> None:
    shape = Shape(name, 4, 2, 96, 64, bias=biased).with_options(**ACTIVATIONS[name])
    for tokens in (1, 19) if device == "cpu" else (1, 19, 100, 400):
        routing = make_routing("uniform", tokens, shape.experts, shape.top_k, rng)
        blocks = make_blocks(shape, dtype, device, rng)
        check(blocks, blocks.x(tokens, rng), *routing)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_routings(pattern: str, device: str, rng: torch.Generator) -> None:
    shape = Shape("r", 12, 4, 128, 96, bias=True)
    blocks = make_blocks(shape, "bf16", device, rng)
    for tokens in (1, 2, 9, 33) if device == "cpu" else (1, 2, 3, 8, 9, 16, 17, 33, 65, 300, 1000):
        routing = make_routing(pattern, tokens, shape.experts, shape.top_k, rng)
        check(blocks, blocks.x(tokens, rng), *routing)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("pattern", ["uniform", "holes"])
def test_options(options: dict[str, Any], pattern: str, device: str, rng: torch.Generator) -> None:
    for gated in (True, False):
        shape = Shape("o", 6, 3, 96, 64, bias=True).with_options(gated=gated)
        for tokens in (1, 13) if device == "cpu" else (1, 13, 60, 150, 600):
            routing = make_routing(pattern, tokens, shape.experts, shape.top_k, rng)
            blocks = make_blocks(shape, "bf16", device, rng)
            check(blocks, blocks.x(tokens, rng), *routing, **options)


def test_expert_parallel_ranks(device: str, rng: torch.Generator) -> None:
    """A rank's slice with global ids is the slice's plain experts with them."""
    shape = Shape("ep", 12, 4, 96, 64, bias=True)
    for tokens in (1, 17) if device == "cpu" else (1, 17, 500):
        x = make_x(tokens, shape, torch.bfloat16, device, rng)
        routing = make_routing("holes", tokens, shape.experts, shape.top_k, rng)
        for ep_size in (2, 3):
            for rank in range(ep_size):
                blocks = make_blocks(shape, "bf16", device, rng, experts=12 // ep_size)
                check(blocks, x, *routing, ep_size=ep_size, ep_rank=rank)


@pytest.mark.parametrize("layout", ["gate_up", "up_gate", "interleaved"])
def test_layouts_are_the_same_layer(layout: str, device: str, rng: torch.Generator) -> None:
    """Another layout moves rows and keeps the bits."""
    shape = Shape("rows", 4, 2, 96, 160, bias=True)
    blocks = make_blocks(shape, "bf16", device, rng)
    assert blocks.b13 is not None
    rows = torch.arange(320).view(2, 160)
    order = {"gate_up": rows, "up_gate": rows.flip(0), "interleaved": rows.T}[layout].reshape(-1).to(device)
    moved = dataclasses.replace(
        blocks,
        w13=blocks.w13[:, order].contiguous(),
        w13_scale=blocks.w13_scale[:, order].contiguous(),
        b13=blocks.b13[:, order].contiguous(),
    )
    for tokens in (1, 9, 300):
        x, routing = blocks.x(tokens, rng), make_routing("uniform", tokens, 4, 2, rng)
        assert same_bits(call(x, moved.weights(layout=layout), *routing), call(x, blocks.weights(), *routing))


@pytest.mark.parametrize("tokens", [1, 11, 400])
@pytest.mark.parametrize("hidden", [96, 90])
def test_bias_dtypes_and_int64_ids(hidden: int, tokens: int, device: str, rng: torch.Generator) -> None:
    shape = Shape("b", 5, 2, 96, 64, bias=True)
    blocks = make_blocks(shape, "bf16", device, rng)
    x = blocks.x(tokens, rng)[:, :hidden].contiguous()
    gates, ids = make_routing("holes", tokens, shape.experts, shape.top_k, rng)

    def run(of: Blocks, ids: Tensor = ids) -> Tensor:
        return call(x, of.weights(hidden_size=hidden), gates, ids)

    assert blocks.b13 is not None and blocks.b2 is not None
    expected = run(blocks)
    assert same_bits(run(blocks, ids.long()), expected)
    wide = dataclasses.replace(blocks, b13=blocks.b13.float(), b2=blocks.b2.float())
    assert same_bits(run(wide), expected)
    drawn = [torch.randn(bias.shape, generator=rng).half().to(device) for bias in (blocks.b13, blocks.b2)]
    half = dataclasses.replace(blocks, b13=drawn[0], b2=drawn[1])
    as_float = dataclasses.replace(blocks, b13=drawn[0].float(), b2=drawn[1].float())
    assert same_bits(run(half), run(as_float))
    if hidden == 96:
        check(as_float, x, gates, ids)


@pytest.mark.parametrize("tokens", [1, 21, 300])
def test_router_logits(tokens: int, device: str, rng: torch.Generator) -> None:
    shape = Shape("logits", 16, 4, 96, 64)
    blocks = make_blocks(shape, "bf16", device, rng)
    x, logits = blocks.x(tokens, rng), tie_free_logits(tokens, 16, rng).to(device)
    result = check(blocks, x, router_logits=logits, top_k=4)
    assert same_bits(call(x, blocks.weights(), *oxmoe.topk(logits, 4)), result)


def test_rows_do_not_depend_on_their_batch(device: str, rng: torch.Generator) -> None:
    """On CPU one token expands weights block by block, and many expand a panel: the bits are the same. out may be x."""
    shape = Shape("batch", 2, 2, 2880, 64)
    blocks = make_blocks(shape, "bf16", device, rng)
    x, routing = blocks.x(60, rng), make_routing("uniform", 60, shape.experts, shape.top_k, rng)
    gates, ids = (part.to(device) for part in routing)
    weights = blocks.weights()
    expected = call(x, weights, gates, ids)
    for token in (0, 31, 59):
        one = slice(token, token + 1)
        assert same_bits(call(x[one], weights, gates[one], ids[one]), expected[one])
    assert same_bits(oxmoe.moe(x, weights, gates, ids, out=x), expected)


@places
def test_padded_weights(device: str, dtype: str, rng: torch.Generator) -> None:
    """Columns beyond hidden_size are not read: NaN there changes nothing."""
    for hidden, padded in ((96, 128), (80, 96), (7, 32), (136, 224)):
        shape = Shape("padded", 4, 2, padded, 64, bias=True)
        blocks = make_blocks(shape, dtype, device, rng)
        assert blocks.b2 is not None
        blocks.w13_scale[:, :, -(-hidden // 32) :] = 255
        blocks.w2_scale[:, hidden:] = 255
        blocks.b2[:, hidden:] = math.nan
        plain, b2 = blocks.plain, blocks.b2[:, :hidden].contiguous()
        narrow = dataclasses.replace(shape, hidden=hidden)
        w13, w2 = plain.w13[:, :, :hidden].contiguous(), plain.w2[:, :hidden].contiguous()
        weights = blocks.weights(hidden_size=hidden)
        assert weights.hidden_size == hidden
        for tokens in (1, 13) if device == "cpu" else (24, 100, 700):
            x = make_x(tokens, narrow, DTYPES[dtype], device, rng)
            routing = tuple(t.to(device) for t in make_routing("holes", tokens, shape.experts, shape.top_k, rng))
            result = call(x, weights, *routing)
            if device == "cpu":
                assert same_bits(result, call(x, Layer(narrow, w13, w2, plain.b13, b2).weights(), *routing))
            else:
                assert_close_ulp(result, reference.moe(x, w13, w2, *routing, b13=plain.b13, b2=b2))


def test_types_that_codes_and_scales_may_have(device: str, rng: torch.Generator) -> None:
    shape = Shape("types", 3, 2, 64, 96)
    blocks = make_blocks(shape, "bf16", device, rng)
    x, routing = blocks.x(5, rng), make_routing("uniform", 5, 3, 2, rng)
    blocks.w2_scale[0, 0, 0], blocks.w2_scale[2, 63, 2] = 0, 255
    expected = call(x, blocks.weights(), *routing)
    for codes in (torch.uint8, torch.int8, torch.float4_e2m1fn_x2):
        for scales in (torch.uint8, torch.float8_e8m0fnu, torch.float32):
            w13, w2 = (t.view(codes) for t in (blocks.w13, blocks.w2))
            given = [t.view(torch.float8_e8m0fnu) for t in (blocks.w13_scale, blocks.w2_scale)]
            given = [t.float() if scales == torch.float32 else t.view(scales) for t in given]
            weights = oxmoe.ExpertWeights.mxfp4(w13, w2, *given)
            assert same_bits(call(x, weights, *routing).nan_to_num(7.0), expected.nan_to_num(7.0))
            if device == "cuda":
                continue
            assert weights.w13 is w13
            if scales == torch.float32:
                assert weights.w2_scale.dtype == torch.uint8 and weights.w2_scale.equal(blocks.w2_scale)
            else:
                assert weights.w2_scale is given[1]


def test_quantised_weights(rng: torch.Generator) -> None:
    """Weights of oxmoe.quantize give the layer of their own dequantised weights."""
    w13, w2 = torch.randn(3, 128, 96, generator=rng) * 0.1, torch.randn(3, 96, 64, generator=rng) * 0.1
    (c13, s13), (c2, s2) = quantize.mxfp4(w13), quantize.mxfp4(w2)
    x = torch.randn(7, 96, generator=rng).bfloat16()
    routing = make_routing("uniform", 7, 3, 2, rng)
    s13[1, 3], s2[0, 7] = 254, 253
    plain = oxmoe.ExpertWeights.bf16(*(quantize.dequantize(*pair, "bfloat16") for pair in ((c13, s13), (c2, s2))))
    assert same_bits(plain.w13, reference.mxfp4_weights(c13, s13))
    result, expected = call(x, oxmoe.ExpertWeights.mxfp4(c13, c2, s13, s2), *routing), call(x, plain, *routing)
    assert same_bits(result.nan_to_num(7.0), expected.nan_to_num(7.0)) and result.isnan().equal(expected.isnan())


def test_numpy(rng: torch.Generator) -> None:
    shape = Shape("numpy", 3, 2, 64, 96, bias=True)
    blocks = make_blocks(shape, "f32", "cpu", rng)
    x, routing = make_x(5, shape, torch.float32, "cpu", rng), make_routing("uniform", 5, 3, 2, rng)
    expected = call(x, blocks.weights(), *routing)
    assert blocks.b13 is not None and blocks.b2 is not None
    powers = [np.ldexp(np.float32(1), scale.numpy().astype(int) - 127) for scale in blocks.operands[2:]]
    for scales in ([scale.numpy() for scale in blocks.operands[2:]], powers):
        weights = oxmoe.ExpertWeights.mxfp4(
            blocks.w13.numpy(), blocks.w2.numpy(), *scales, b13=blocks.b13.numpy(), b2=blocks.b2.numpy(), dtype="f32"
        )
        result = oxmoe.moe(x.numpy(), weights, *(t.numpy() for t in routing))
        assert result.tobytes() == expected.numpy().tobytes() and weights.w13_scale.dtype == np.uint8


def test_weights_describe_themselves(rng: torch.Generator) -> None:
    blocks = make_blocks(SHAPES[0], "f16", "cpu", rng)
    weights = blocks.weights()
    assert (weights.format, weights.dtype, weights.device) == ("mxfp4", "f16", "cpu")
    assert (weights.num_experts, weights.hidden_size, weights.intermediate_size) == (8, 288, 288)
    assert weights.w13 is blocks.w13 and weights.w2_scale is blocks.w2_scale and weights.b2 is blocks.b2
    assert (weights.layout, weights.gated, weights.limit) == ("interleaved", True, 7.0)
    assert repr(weights) == (
        'ExpertWeights.mxfp4(experts=8, hidden=288, intermediate=288, activation="silu", layout="interleaved", '
        'dtype="f16", device=cpu)'
    )
    plain = blocks.plain.weights()
    assert plain.w13_scale is None and plain.w2_scale is None and plain.dtype == plain.format == "f16"


# Operators

SMALL = Shape("ops", 6, 2, 64, 32, bias=True, options=tuple(GPT_OSS.items()))


class Config:
    """The fields of SGLang's MoeRunnerConfig that differ from their defaults."""

    inplace = False
    gemm1_alpha = 1.702
    gemm1_clamp_limit = 7.0


@pytest.fixture
def small(rng: torch.Generator) -> tuple[Blocks, Tensor, tuple[Tensor, Tensor]]:
    x = make_x(5, SMALL, torch.bfloat16, "cpu", rng)
    return make_blocks(SMALL, "bf16", "cpu", rng), x, make_routing("uniform", 5, SMALL.experts, SMALL.top_k, rng)


def test_operators(small: tuple[Blocks, Tensor, tuple[Tensor, Tensor]]) -> None:
    blocks, x, routing = small
    expected = call(x, blocks.weights(), *routing)
    scales = {"w13_scale": blocks.w13_scale, "w2_scale": blocks.w2_scale, "format": "mxfp4", **GPT_OSS}
    operands = (x, blocks.w13, blocks.w2, *routing, blocks.b13, blocks.b2)
    assert same_bits(torch.ops.oxmoe.moe(*operands, **scales), expected)
    torch.library.opcheck(torch.ops.oxmoe.moe.default, operands, scales)
    torch.library.opcheck(torch.ops.oxmoe.moe.out, operands, {**scales, "out": torch.empty_like(x)})
    logits = torch.randn(5, 6)
    by_logits = torch.ops.oxmoe.moe(*operands[:3], None, None, *operands[5:], **scales, router_logits=logits, top_k=2)
    assert same_bits(by_logits, oxmoe.moe(x, blocks.weights(), router_logits=logits, top_k=2))
    scales = {"w1_scale": blocks.w13_scale, "w2_scale": blocks.w2_scale, "gemm1_alpha": 1.702, "gemm1_limit": 7.0}
    assert same_bits(torch.ops.oxmoe.fused_experts(*operands, **scales), expected)
    torch.library.opcheck(torch.ops.oxmoe.fused_experts.default, operands, scales)


def test_fused_experts(small: tuple[Blocks, Tensor, tuple[Tensor, Tensor]], rng: torch.Generator) -> None:
    blocks, x, routing = small
    scales = {"w1_scale": blocks.w13_scale, "w2_scale": blocks.w2_scale}
    operands = (blocks.w13, blocks.w2, (*routing, None), Config(), blocks.b13, blocks.b2)
    assert same_bits(oxmoe.fused_experts(x, *operands, **scales), call(x, blocks.weights(), *routing))
    half = dataclasses.replace(blocks, dtype="f16")
    assert same_bits(oxmoe.fused_experts(x.half(), *operands, **scales), call(x.half(), half.weights(), *routing))
    with pytest.raises(ValueError, match="w2_scale: needed where w13_scale is given"):
        oxmoe.fused_experts(x, *operands, w1_scale=blocks.w13_scale)
    with pytest.raises(NotImplementedError, match=r"w13: dtype uint8"):
        oxmoe.fused_experts(x, *operands)
    with pytest.raises(NotImplementedError, match=r"use_int4_w4a16.*serves.*MXFP4"):
        oxmoe.fused_experts(x, *operands, use_int4_w4a16=True, **scales)
    with pytest.raises(ValueError, match=r'dtype: expected "bf16", "f16" or "f32", got "float64"'):
        oxmoe.fused_experts(x.double(), *operands, **scales)


@pytest.mark.parametrize("name", ["moe", "padded", "logits", "fused_experts"])
def test_traced(name: str, small: tuple[Blocks, Tensor, tuple[Tensor, Tensor]]) -> None:
    """Under torch.compile and make_fx the call goes through the operator, and the bits stay."""
    blocks, x, routing = small
    weights, narrow = blocks.weights(), blocks.weights(hidden_size=60)
    logits = torch.randn(5, 6)
    scales = {"w1_scale": blocks.w13_scale, "w2_scale": blocks.w2_scale}
    programs = {
        "moe": lambda x: oxmoe.moe(x + 1, weights, *routing) * 2,
        "padded": lambda x: oxmoe.moe(x[:, :60].contiguous(), narrow, *routing) + 1,
        "logits": lambda x: oxmoe.moe(x, weights, router_logits=logits, top_k=2).relu(),
        "fused_experts": lambda x: (
            oxmoe.fused_experts(
                x * 2, blocks.w13, blocks.w2, (*routing, None), Config(), blocks.b13, blocks.b2, **scales
            )
            + 1
        ),
    }
    program = programs[name]
    expected = program(x)
    torch._dynamo.reset()
    assert same_bits(torch.compile(program, fullgraph=True, backend="aot_eager")(x), expected)
    graph = make_fx(program, tracing_mode="fake", _allow_non_fake_inputs=True)(x)
    assert any(str(node.target).startswith("oxmoe.") for node in graph.graph.nodes)
    assert same_bits(graph(x), expected)


# Contract


def test_shapes_are_checked(rng: torch.Generator) -> None:
    shape = Shape("contract", 4, 2, 128, 96, bias=True)
    blocks = make_blocks(shape, "bf16", "cpu", rng)

    def refuse(message: str, error: type[Exception] = ValueError, options: Any = None, **spoiled: Tensor) -> None:
        with pytest.raises(error, match=message):
            dataclasses.replace(blocks, **spoiled).weights(**(options or {}))

    w13, w2, w13_scale, w2_scale = blocks.operands
    refuse(r"^w13: expected dtype uint8 or int8 or float4_e2m1fn_x2, got bfloat16", w13=w13.bfloat16())
    refuse(r"^w2: expected dtype uint8 .*got int16", w2=w2.short())
    # These are the blocks of GPT-OSS's checkpoint. The error says how to pass them, and what it says is taken.
    refuse(
        r"^w13: expected 3 dimensions .* got shape \[4, 192, 4, 16\], .* in blocks; pass w13\.reshape\(4, 192, 64\)",
        w13=w13.view(4, 192, 4, 16),
    )
    refuse(r"^w2: expected 3 dimensions .* pass w2\.reshape\(4, 128, 48\)", w2=w2.view(4, 128, 3, 16))
    given = w13.view(4, 192, 4, 16).reshape(4, 192, 64)
    assert dataclasses.replace(blocks, w13=given).weights().hidden_size == 128
    refuse(r"^w13: expected dtype uint8 .*got bfloat16", w13=w13.bfloat16().view(4, 192, 4, 16))
    refuse(r"^w13: expected 3 dimensions \[.*, got shape \[4, 192, 8, 8\]$", w13=w13.view(4, 192, 8, 8))
    refuse(r"^w13: .*contiguous", w13=w13.mT.contiguous().mT)
    refuse(r"^w13: dimension 2 gives hidden 120, expected a multiple of 32", w13=w13[:, :, :60].contiguous())
    refuse(r"^w13: dimension 1 gives intermediate 80, expected a multiple of 32", w13=w13[:, :160].contiguous())
    refuse(r"^w13: dimension 1 .*even, got 191", w13=w13[:, 1:].contiguous())
    refuse(r"^w13: no dimension may be 0", w13=w13[:0])
    refuse(r'^w2: dimension 0 "experts": expected 4 \(from w13\), got 3', w2=w2[1:])
    refuse(r'^w2: dimension 1 "hidden": expected 128, got 127', w2=w2[:, 1:].contiguous())
    refuse(r'^w2: dimension 2 "intermediate / 2": expected 48, got 64', w2=w2.new_zeros((4, 128, 64)))
    refuse(r'^w2: dimension 2 "intermediate / 2": expected 96, got 48', options={"gated": False})
    refuse(
        r"^w13_scale: expected dtype uint8 or float8_e8m0fnu or float32, got int8", w13_scale=w13_scale.view(torch.int8)
    )
    refuse(r'^w13_scale: dimension 1 "rows of w13": expected 192 .*got 96', w13_scale=w13_scale[:, :96].contiguous())
    refuse(r'^w13_scale: dimension 2 "hidden / 32": expected 4, got 3', w13_scale=w13_scale[:, :, 1:].contiguous())
    refuse(r'^w2_scale: dimension 2 "intermediate / 32": expected 3, got 4', w2_scale=w13_scale[:, :128].contiguous())
    refuse(r"^w2_scale: .*contiguous", w2_scale=w2_scale.mT.contiguous().mT)
    refuse(r"^w2_scale: .*contiguous", w2_scale=w2_scale.float().mT.contiguous().mT)
    refuse(r'^b13: dimension 1 "rows of w13": expected 192', b13=blocks.w13_scale[:, 1:, 0].float())
    refuse(r'^b2: dimension 1 "hidden": expected 128 ?.*got 127', b2=torch.zeros(4, 127))
    refuse(r"^b2: expected dtype .*got float64", b2=torch.zeros(4, 128).double())
    refuse(r'^dtype: expected "bf16", "f16" or "f32", got "mxfp4"', options={"dtype": "mxfp4"})
    refuse(r"^hidden_size: expected 1 to 128 \(from w13\), got 129", options={"hidden_size": 129})
    refuse(r"^hidden_size: expected 1 to 128", options={"hidden_size": 0})
    refuse(r'layout.*"sideways"', options={"layout": "sideways"})

    for wrong in (0.0, -1.0, 3.0, math.inf, 2.0**-128):
        powers = w13_scale.view(torch.float8_e8m0fnu).float()
        powers[2, 191, 1] = wrong
        refuse(r"^w13_scale: expected powers of two from 2\^-127 to 2\^127, got .* at \[2, 191, 1\]", w13_scale=powers)


def test_calls_are_checked(small: tuple[Blocks, Tensor, tuple[Tensor, Tensor]]) -> None:
    blocks, x, routing = small
    weights = blocks.weights()
    with pytest.raises(ValueError, match=r"^x: expected dtype bfloat16, got float16"):
        oxmoe.moe(x.half(), weights, *routing)
    with pytest.raises(ValueError, match=r'^x: dimension 1 "hidden": expected 64 \(from weights\), got 60'):
        oxmoe.moe(x[:, :60].contiguous(), weights, *routing)
    with pytest.raises(ValueError, match=r'^out: dimension 1 "hidden": expected 60'):
        oxmoe.moe(x[:, :60].contiguous(), blocks.weights(hidden_size=60), *routing, out=x)
    for name in ("w13", "w2", "w13_scale", "w2_scale"):
        room = torch.zeros(64 * 1024, dtype=torch.uint8)
        tensor = getattr(blocks, name)
        inside = room[x.nbytes - 1 :][: tensor.numel()].view(tensor.shape)
        with pytest.raises(ValueError, match=rf"^out: overlaps {name}$"):
            out = room[: x.nbytes].view(torch.bfloat16).view(x.shape)
            oxmoe.moe(x, dataclasses.replace(blocks, **{name: inside}).weights(), *routing, out=out)


def test_operators_are_checked(small: tuple[Blocks, Tensor, tuple[Tensor, Tensor]]) -> None:
    blocks, x, routing = small
    plain = blocks.plain
    scales = {"w13_scale": blocks.w13_scale, "w2_scale": blocks.w2_scale}
    with pytest.raises(ValueError, match=r'"mxfp4"'):
        torch.ops.oxmoe.moe(x, blocks.w13, blocks.w2, *routing, format="mxfp4")
    with pytest.raises(ValueError, match=r'format "bf16" has no scales'):
        torch.ops.oxmoe.moe(x, plain.w13, plain.w2, *routing, **scales)
    with pytest.raises(
        ValueError, match=r'hidden_size: only for formats "mxfp4" and \(bf16\) "mxfp8", got them with "bf16"'
    ):
        torch.ops.oxmoe.moe(x, plain.w13, plain.w2, *routing, hidden_size=64)
    with pytest.raises(NotImplementedError, match=r'w13: dtype uint8.*"mxfp4"'):
        torch.ops.oxmoe.moe(x, blocks.w13, blocks.w2, *routing, **scales)
    with pytest.raises(NotImplementedError, match=r'format "nvfp5"; supported: bf16, f16, f32, mxfp4'):
        torch.ops.oxmoe.moe(x, blocks.w13, blocks.w2, *routing, **scales, format="nvfp5")


# Plans


def test_explain() -> None:
    """The workspace is the same everywhere. Hopper has its own kernel, other GPUs have the portable one."""
    shape = (32, 4, 2880, 2880)
    text = oxmoe.explain(*shape, 16, format="mxfp4", arch="cpu")
    assert "2880 (gated), mxfp4, 16 tokens\non the CPU" in text
    assert text.partition("workspace")[2] == oxmoe.explain(*shape, 16, arch="cpu").partition("workspace")[2]
    for arch in ("sm_80", "sm_90", "sm_100", "sm_120"):
        on_gpu = oxmoe.explain(*shape, 16, format="mxfp4", arch=arch)
        assert on_gpu.partition("workspace")[2] == text.partition("workspace")[2]
        kernel = "grouped_gemm_mxfp4_" + ("sm90" if arch == "sm_90" else "portable")
        both = arch == "sm_90"  # both GEMMs in one launch
        assert [f"{kernel}_{form}_" in on_gpu for form in ("gated", "plain")] == [True, not both]
        assert on_gpu.count("grouped_gemm") == (1 if both else 2) and "combine_bf16" in on_gpu
        assert "launch" not in oxmoe.explain(*shape, 0, format="mxfp4", arch=arch)
    with pytest.raises(ValueError, match=r'hidden_size: expected a multiple of 32 for format "mxfp4", got 2872'):
        oxmoe.explain(32, 4, 2872, 2880, 16, format="mxfp4", arch="cpu")
    with pytest.raises(ValueError, match=r"intermediate_size: expected a multiple of 32"):
        oxmoe.explain(32, 4, 2880, 720, 16, format="mxfp4", arch="cpu")
