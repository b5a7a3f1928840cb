"""MXFP4 experts: against plain experts of the same numbers bit for bit, against the reference, and their contract."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import oxmoe
from cases import (
    ACTIVATIONS,
    GPT_OSS,
    PATTERNS,
    Layer,
    Shape,
    draws,
    make_routing,
    make_workspace,
    make_x,
    tie_free_logits,
)
from oxmoe import quantize, reference
from oxmoe.testing import assert_close_ulp, same_bits

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
dtypes = pytest.mark.parametrize("dtype", DTYPES)

# GPT-OSS's ratio and its sizes one at a time; the sizes of other models' slices; the least there is.
SHAPES = (
    Shape("gpt-oss-small", 8, 4, 288, 288, bias=True, options=tuple(GPT_OSS.items())),
    Shape("h2880", 3, 2, 2880, 64, bias=True, options=tuple(GPT_OSS.items())),
    Shape("i2880", 3, 2, 64, 2880, bias=True, options=tuple(GPT_OSS.items())),
    Shape("i704", 4, 2, 128, 704),
    Shape("h192-i1408", 3, 2, 192, 1408),
    Shape("one-block", 1, 1, 32, 32),
)
OPTIONS: tuple[dict[str, Any], ...] = (
    {"routed_scaling_factor": 2.5},
    {"apply_router_weight_on_input": True},
    {"no_combine": True},
    {"no_combine": True, "keep_router_weight": True},
)


@dataclasses.dataclass
class Blocks:
    """Operands of one MXFP4 layer."""

    shape: Shape
    dtype: str
    w13: Tensor
    w2: Tensor
    w13_scale: Tensor
    w2_scale: Tensor
    b13: Tensor | None
    b2: Tensor | None

    @property
    def operands(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.w13, self.w2, self.w13_scale, self.w2_scale

    def weights(self, **options: Any) -> oxmoe.ExpertWeights:
        options = {"b13": self.b13, "b2": self.b2, "dtype": self.dtype, **dict(self.shape.options), **options}
        return oxmoe.ExpertWeights.mxfp4(*self.operands, **options)

    @functools.cached_property
    def plain(self) -> Layer:
        """The same numbers in the compute dtype."""
        dtype = DTYPES[self.dtype]
        w13, w2 = (
            reference.mxfp4_weights(c, s, dtype) for c, s in zip(self.operands[:2], self.operands[2:], strict=True)
        )
        return Layer(self.shape, w13, w2, self.b13, self.b2)


def make_blocks(shape: Shape, dtype: str, rng: torch.Generator, experts: int | None = None) -> Blocks:
    """Random codes, scales for results of size one; biases in the compute dtype."""
    experts = experts or shape.experts

    def codes(rows: int, columns: int) -> Tensor:
        return torch.randint(256, (experts, rows, columns // 2), dtype=torch.uint8, generator=rng)

    def scales(rows: int, columns: int, size: float) -> Tensor:
        middle = 127 + round(math.log2(size / (2.9 * columns**0.5)))
        shape = (experts, rows, columns // 32)
        return torch.randint(middle - 1, middle + 2, shape, dtype=torch.uint8, generator=rng)

    def bias(rows: int) -> Tensor | None:
        return torch.randn((experts, rows), generator=rng).mul_(0.5).to(DTYPES[dtype]) if shape.bias else None

    rows, hidden, intermediate = shape.w13_rows, shape.hidden, shape.intermediate
    return Blocks(
        shape,
        dtype,
        codes(rows, hidden),
        codes(hidden, intermediate),
        scales(rows, hidden, 1.0),
        scales(hidden, intermediate, 2.0),
        bias(rows),
        bias(hidden),
    )


def call(x: Tensor, weights: oxmoe.ExpertWeights, *routing: Tensor, **options: Any) -> Tensor:
    """moe into NaN, with a workspace of NaN."""
    slots, no_combine = routing[1].shape[1], options.get("no_combine", False)
    out = x.new_full((x.shape[0], slots, x.shape[1]) if no_combine else x.shape, torch.nan)
    workspace = make_workspace(oxmoe.workspace_bytes(weights, x.shape[0], slots), "cpu")
    before = x.clone()
    assert oxmoe.moe(x, weights, *routing, **options, out=out, workspace=workspace) is out and same_bits(x, before)
    return out


def check(blocks: Blocks, x: Tensor, *routing: Tensor, **options: Any) -> Tensor:
    """Bit-equal to plain experts of the same numbers, and close to the reference on them."""
    plain = blocks.plain
    results, expected = [], []
    for drawn in draws(x):
        results.append(call(drawn, blocks.weights(), *routing, **options))
        assert same_bits(results[-1], call(drawn, plain.weights(), *routing, **options))
        expected.append(reference.moe(drawn, plain.w13, plain.w2, *routing, **plain.reference_options, **options))
    assert_close_ulp(torch.cat(results), torch.cat(expected))
    return results[0]


# Numbers


def test_reference_weights_are_the_definition() -> None:
    """Every scale with every code, against numbers written out here; even columns are low nibbles."""
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
    """The first GEMM makes rows of the identity, so the second writes its weights out: each scale with each code.

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


@dtypes
@pytest.mark.parametrize("tokens", [1, 40])
def test_special_scales_and_codes(dtype: str, tokens: int, rng: torch.Generator) -> None:
    """Blocks of zeros and -0, the least and the largest scale, NaN blocks: what plain experts make of them."""
    shape = Shape("special", 4, 2, 96, 64)
    x = make_x(tokens, shape, DTYPES[dtype], "cpu", rng)
    routing = make_routing("uniform", tokens, shape.experts, shape.top_k, rng)

    blocks = make_blocks(shape, dtype, rng)
    blocks.w13[:, :8] = 0x00
    blocks.w2[:, ::3] = 0x88
    blocks.w13_scale[:, 8:16] = 0
    result = check(blocks, x, *routing)
    assert bool((result[:, ::3] == 0).all()) and bool((result != 0).any())

    for scale in (254, 255):
        blocks = make_blocks(shape, dtype, rng)
        blocks.w2_scale[:, 5] = scale
        result, expected = (call(x, weights, *routing) for weights in (blocks.weights(), blocks.plain.weights()))
        assert scale == 254 or bool(result[:, 5].isnan().all())
        assert bool(result[:, :5].isfinite().all())
        assert same_bits(result.nan_to_num(7.0), expected.nan_to_num(7.0)) and result.isnan().equal(expected.isnan())

    blocks = make_blocks(shape, dtype, rng)
    blocks.w2_scale.fill_(0)
    blocks.w13_scale.fill_(0)
    # NOTE: not the reference's numbers: CPUs with bf16 instructions count these weights as zero.
    result, expected = (call(x, weights, *routing) for weights in (blocks.weights(), blocks.plain.weights()))
    assert same_bits(result, expected) and float(result.abs().max()) < 1e-30


# Layers


@dtypes
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_shapes(dtype: str, shape: Shape, rng: torch.Generator) -> None:
    blocks = make_blocks(shape, dtype, rng)
    for tokens in (0, 1, 7, 64):
        routing = make_routing("uniform", tokens, shape.experts, shape.top_k, rng)
        result = check(blocks, make_x(tokens, shape, DTYPES[dtype], "cpu", rng), *routing)
        assert tokens == 0 or 0.01 < float(result.float().std()) < 100


@dtypes
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(dtype: str, name: str, biased: bool, rng: torch.Generator) -> None:
    shape = Shape(name, 4, 2, 96, 64, bias=biased).with_options(**ACTIVATIONS[name])
    for tokens in (1, 19):
        routing = make_routing("uniform", tokens, shape.experts, shape.top_k, rng)
        check(make_blocks(shape, dtype, rng), make_x(tokens, shape, DTYPES[dtype], "cpu", rng), *routing)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_routings(pattern: str, rng: torch.Generator) -> None:
    shape = Shape("r", 12, 4, 128, 96, bias=True)
    blocks = make_blocks(shape, "bf16", rng)
    for tokens in (1, 2, 9, 33):
        routing = make_routing(pattern, tokens, shape.experts, shape.top_k, rng)
        check(blocks, make_x(tokens, shape, torch.bfloat16, "cpu", rng), *routing)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("pattern", ["uniform", "holes"])
def test_options(options: dict[str, Any], pattern: str, rng: torch.Generator) -> None:
    for gated in (True, False):
        shape = Shape("o", 6, 3, 96, 64, bias=True).with_options(gated=gated)
        for tokens in (1, 13):
            routing = make_routing(pattern, tokens, shape.experts, shape.top_k, rng)
            x = make_x(tokens, shape, torch.bfloat16, "cpu", rng)
            check(make_blocks(shape, "bf16", rng), x, *routing, **options)


def test_expert_parallel_ranks(rng: torch.Generator) -> None:
    """A rank's slice with global ids is the slice's plain experts with them."""
    shape = Shape("ep", 12, 4, 96, 64, bias=True)
    x = make_x(17, shape, torch.bfloat16, "cpu", rng)
    routing = make_routing("holes", 17, shape.experts, shape.top_k, rng)
    for ep_size in (2, 3):
        for rank in range(ep_size):
            blocks = make_blocks(shape, "bf16", rng, experts=12 // ep_size)
            check(blocks, x, *routing, ep_size=ep_size, ep_rank=rank)


def test_bias_dtypes_and_int64_ids(rng: torch.Generator) -> None:
    shape = Shape("b", 5, 2, 96, 64, bias=True)
    blocks = make_blocks(shape, "bf16", rng)
    x = make_x(11, shape, torch.bfloat16, "cpu", rng)
    gates, ids = make_routing("holes", 11, shape.experts, shape.top_k, rng)
    assert blocks.b13 is not None and blocks.b2 is not None
    expected = call(x, blocks.weights(), gates, ids)
    assert same_bits(call(x, blocks.weights(), gates, ids.long()), expected)
    wide = dataclasses.replace(blocks, b13=blocks.b13.float(), b2=blocks.b2.float())
    assert same_bits(check(wide, x, gates, ids), expected)
    half = dataclasses.replace(blocks, b13=blocks.b13.half(), b2=blocks.b2.half())
    as_float = dataclasses.replace(blocks, b13=blocks.b13.half().float(), b2=blocks.b2.half().float())
    assert same_bits(call(x, half.weights(), gates, ids), call(x, as_float.weights(), gates, ids))


def test_router_logits(rng: torch.Generator) -> None:
    shape = Shape("logits", 16, 4, 96, 64)
    blocks, x = make_blocks(shape, "bf16", rng), make_x(21, shape, torch.bfloat16, "cpu", rng)
    logits = tie_free_logits(21, 16, rng)
    result = oxmoe.moe(x, blocks.weights(), router_logits=logits, top_k=4)
    assert same_bits(result, oxmoe.moe(x, blocks.plain.weights(), router_logits=logits, top_k=4))


def test_rows_do_not_depend_on_their_batch(rng: torch.Generator) -> None:
    """One token expands weights block by block, many expand a panel: the same bits. out may be x."""
    shape = Shape("batch", 2, 2, 2880, 64)
    blocks, x = make_blocks(shape, "bf16", rng), make_x(60, shape, torch.bfloat16, "cpu", rng)
    gates, ids = make_routing("uniform", 60, shape.experts, shape.top_k, rng)
    weights = blocks.weights()
    expected = call(x, weights, gates, ids)
    for token in (0, 31, 59):
        one = slice(token, token + 1)
        assert same_bits(call(x[one], weights, gates[one], ids[one]), expected[one])
    assert same_bits(oxmoe.moe(x, weights, gates, ids, out=x), expected)


@dtypes
def test_padded_weights(dtype: str, rng: torch.Generator) -> None:
    """What lies beyond hidden_size is not read: NaN there changes nothing."""
    for hidden, padded in ((96, 128), (80, 96), (7, 32)):
        shape = Shape("padded", 4, 2, padded, 64, bias=True)
        blocks = make_blocks(shape, dtype, rng)
        assert blocks.b2 is not None
        blocks.w13_scale[:, :, -(-hidden // 32) :] = 255
        blocks.w2_scale[:, hidden:] = 255
        blocks.b2[:, hidden:] = math.nan
        plain = blocks.plain
        x = make_x(13, dataclasses.replace(shape, hidden=hidden), DTYPES[dtype], "cpu", rng)
        routing = make_routing("holes", 13, shape.experts, shape.top_k, rng)
        narrow = oxmoe.ExpertWeights.bf16 if dtype == "bf16" else getattr(oxmoe.ExpertWeights, dtype)
        w13, w2 = plain.w13[:, :, :hidden].contiguous(), plain.w2[:, :hidden].contiguous()
        expected = call(x, narrow(w13, w2, b13=plain.b13, b2=blocks.b2[:, :hidden].contiguous()), *routing)
        weights = blocks.weights(hidden_size=hidden)
        assert weights.hidden_size == hidden and same_bits(call(x, weights, *routing), expected)


def test_types_that_codes_and_scales_may_have(rng: torch.Generator) -> None:
    shape = Shape("types", 3, 2, 64, 96)
    blocks = make_blocks(shape, "bf16", rng)
    x, routing = make_x(5, shape, torch.bfloat16, "cpu", rng), make_routing("uniform", 5, 3, 2, rng)
    blocks.w2_scale[0, 0, 0], blocks.w2_scale[2, 63, 2] = 0, 255
    expected = call(x, blocks.weights(), *routing)
    for codes in (torch.uint8, torch.int8, torch.float4_e2m1fn_x2):
        for scales in (torch.uint8, torch.float8_e8m0fnu, torch.float32):
            w13, w2 = (t.view(codes) for t in (blocks.w13, blocks.w2))
            given = [t.view(torch.float8_e8m0fnu) for t in (blocks.w13_scale, blocks.w2_scale)]
            given = [t.float() if scales == torch.float32 else t.view(scales) for t in given]
            weights = oxmoe.ExpertWeights.mxfp4(w13, w2, *given)
            assert same_bits(call(x, weights, *routing).nan_to_num(7.0), expected.nan_to_num(7.0))
            assert weights.w13 is w13
            if scales == torch.float32:
                assert weights.w2_scale.dtype == torch.uint8 and weights.w2_scale.equal(blocks.w2_scale)
            else:
                assert weights.w2_scale is given[1]


def test_quantised_weights(rng: torch.Generator) -> None:
    """What oxmoe.quantize gives: the layer of its own dequantised weights."""
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
    blocks = make_blocks(shape, "f32", rng)
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
    blocks = make_blocks(SHAPES[0], "f16", rng)
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
    return make_blocks(SMALL, "bf16", rng), x, make_routing("uniform", 5, SMALL.experts, SMALL.top_k, rng)


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
    blocks = make_blocks(shape, "bf16", rng)

    def refuse(message: str, error: type[Exception] = ValueError, options: Any = None, **spoiled: Tensor) -> None:
        with pytest.raises(error, match=message):
            dataclasses.replace(blocks, **spoiled).weights(**(options or {}))

    w13, w2, w13_scale, w2_scale = blocks.operands
    refuse(r"^w13: expected dtype uint8 or int8 or float4_e2m1fn_x2, got bfloat16", w13=w13.bfloat16())
    refuse(r"^w2: expected dtype uint8 .*got int16", w2=w2.short())
    refuse(r"^w13: expected 3 dimensions", w13=w13.view(4, 192, 4, 16))
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
    with pytest.raises(ValueError, match=r'hidden_size: only for format "mxfp4", got them with "bf16"'):
        torch.ops.oxmoe.moe(x, plain.w13, plain.w2, *routing, hidden_size=64)
    with pytest.raises(NotImplementedError, match=r'w13: dtype uint8.*"mxfp4"'):
        torch.ops.oxmoe.moe(x, blocks.w13, blocks.w2, *routing, **scales)
    with pytest.raises(NotImplementedError, match=r'format "nvfp5"; supported: bf16, f16, f32, mxfp4'):
        torch.ops.oxmoe.moe(x, blocks.w13, blocks.w2, *routing, **scales, format="nvfp5")


# Plans


def test_explain() -> None:
    """The same workspace everywhere; on Hopper its own kernel, elsewhere the portable one."""
    shape = (32, 4, 2880, 2880)
    text = oxmoe.explain(*shape, 16, format="mxfp4", arch="cpu")
    assert "2880 (gated), mxfp4, 16 tokens\non the CPU" in text
    assert text.partition("workspace")[2] == oxmoe.explain(*shape, 16, arch="cpu").partition("workspace")[2]
    for arch in ("sm_80", "sm_90", "sm_100", "sm_120"):
        on_gpu = oxmoe.explain(*shape, 16, format="mxfp4", arch=arch)
        assert on_gpu.partition("workspace")[2] == text.partition("workspace")[2]
        kernel = "grouped_gemm_mxfp4_" + ("sm90" if arch == "sm_90" else "portable")
        assert [f"{kernel}_{form}_" in on_gpu for form in ("gated", "plain")] == [True, True]
        assert on_gpu.count("grouped_gemm") == 2 and "combine_bf16" in on_gpu
        assert "launch" not in oxmoe.explain(*shape, 0, format="mxfp4", arch=arch)
    with pytest.raises(ValueError, match=r'hidden_size: expected a multiple of 32 for format "mxfp4", got 2872'):
        oxmoe.explain(32, 4, 2872, 2880, 16, format="mxfp4", arch="cpu")
    with pytest.raises(ValueError, match=r"intermediate_size: expected a multiple of 32"):
        oxmoe.explain(32, 4, 2880, 720, 16, format="mxfp4", arch="cpu")
