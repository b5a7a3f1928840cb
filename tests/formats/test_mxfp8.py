"""Experts of MXFP8, on both devices."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import oxmoe
from cases import ACTIVATIONS, GPT_OSS, PATTERNS, Shape, make_routing, tie_free_logits
from mxfp4_cases import call
from mxfp8_cases import Mxfp8, check, make_mxfp8
from oxmoe import reference
from oxmoe.testing import same_bits

# Shapes with one block of K, parts of a stage, whole ones and more; rows end within a block of 64.
SHAPES = (
    Shape("h32-i32", 4, 2, 32, 32),
    Shape("h96-i288", 6, 3, 96, 288, bias=True, options=tuple(GPT_OSS.items())),
    Shape("h352-i224", 8, 8, 352, 224, bias=True),
    Shape("h704-i1408", 4, 2, 704, 1408),
    Shape("h224-i96", 4, 2, 224, 96).with_options(activation="silu", gated=False),
)
SMALL = SHAPES[1]
MODELS = (Shape("qwen3-30b-a3b", 128, 8, 2048, 768), Shape("gpt-oss-20b", 32, 4, 2880, 2880, bias=True))


@pytest.mark.parametrize("tokens", [0, 1, 7, 64, 130])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.name)
def test_layer(shape: Shape, tokens: int, device: str, rng: torch.Generator) -> None:
    layer = make_mxfp8(shape, device, rng)
    check(layer, layer.x(tokens, rng), *make_routing("uniform", tokens, shape.experts, shape.top_k, rng))


@pytest.mark.parametrize("pattern", PATTERNS)
def test_routing_patterns(pattern: str, device: str, rng: torch.Generator) -> None:
    layer = make_mxfp8(SMALL, device, rng)
    for tokens in (5, 150):
        check(layer, layer.x(tokens, rng), *make_routing(pattern, tokens, SMALL.experts, SMALL.top_k, rng))


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("tokens", [6, 200])
def test_activations(name: str, tokens: int, device: str, rng: torch.Generator) -> None:
    shape = Shape("h96-i288", 6, 3, 96, 288, bias=True).with_options(**ACTIVATIONS[name])
    layer = make_mxfp8(shape, device, rng)
    check(layer, layer.x(tokens, rng), *make_routing("uniform", tokens, shape.experts, shape.top_k, rng))


@pytest.mark.parametrize("options", [{"no_combine": True}, {"apply_router_weight_on_input": True}], ids=str)
def test_options(options: dict[str, Any], device: str, rng: torch.Generator) -> None:
    layer = make_mxfp8(SMALL, device, rng, bias_dtype=torch.float32)
    check(layer, layer.x(33, rng), *make_routing("uniform", 33, SMALL.experts, SMALL.top_k, rng), **options)


def test_from_logits(device: str, rng: torch.Generator) -> None:
    layer = make_mxfp8(SMALL, device, rng)
    for tokens in (1, 2, 40):
        x, logits = layer.x(tokens, rng), tie_free_logits(tokens, SMALL.experts, rng).to(device)
        given = call(x, layer.weights(), *oxmoe.topk(logits, SMALL.top_k))
        assert same_bits(call(x, layer.weights(), router_logits=logits, top_k=SMALL.top_k), given)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", MODELS, ids=lambda s: s.name)
def test_models(shape: Shape, rng: torch.Generator) -> None:
    """Calls take every tile of the plan."""
    layer = make_mxfp8(shape, "cuda", rng)
    weights = layer.weights()
    for mean in (0.1, 5, 15, 30, 45, 60, 85, 200):
        tokens = max(1, int(mean * shape.experts / shape.top_k))
        routing = make_routing("uniform", tokens, shape.experts, shape.top_k, rng)
        check(layer, layer.x(tokens, rng), *routing, made=weights)


def test_scales_and_codes_of_other_dtypes(device: str, rng: torch.Generator) -> None:
    layer = make_mxfp8(SMALL, device, rng)
    x, routing = layer.x(20, rng), make_routing("uniform", 20, SMALL.experts, SMALL.top_k, rng)
    expected = check(layer, x, *routing)
    w13, w2, w13_scale, w2_scale = layer.operands
    scales = [w13_scale, w2_scale]
    forms = [
        [w13.view(torch.uint8), w2.view(torch.uint8), *scales],
        [w13, w2, *(torch.exp2(scale.float() - 127) for scale in scales)],
        [w13, w2, *(scale.view(torch.float8_e8m0fnu) for scale in scales)],
    ]
    for operands in forms:
        made = oxmoe.ExpertWeights.mxfp8(*operands, **layer.options)
        assert same_bits(call(x, made, *routing), expected)


@pytest.mark.parametrize("tokens", [1, 3, 40, 200])
def test_rounding_of_rows(tokens: int, device: str, rng: torch.Generator) -> None:
    """Weights that pick one number each show the two roundings bit by bit, of numbers of every size."""
    size = 64
    one = torch.eye(size).to(torch.float8_e4m3fn)[None].to(device)
    scale = torch.full((1, size, size // 32), 127, dtype=torch.uint8, device=device)
    weights = oxmoe.ExpertWeights.mxfp8(one, one, scale, scale, activation="relu2")
    powers = torch.randint(-40, 30, (tokens, size // 32), generator=rng).repeat_interleave(32, 1)
    x = torch.randn((tokens, size), generator=rng) * torch.exp2(torch.randint(-12, 1, (tokens, size), generator=rng))
    x = (x * torch.exp2(powers)).bfloat16().to(device)
    x[0, :32] = 0
    inner = reference.mxfp8_rows(x).float().relu().square().bfloat16()
    expected = reference.mxfp8_rows(inner)
    ids = torch.zeros((tokens, 1), dtype=torch.int32)
    assert torch.equal(call(x, weights, torch.ones((tokens, 1)), ids), expected)


def test_not_finite(device: str, rng: torch.Generator) -> None:
    """NaN and infinity in x touch their rows alone; NaN codes and scales make their output columns NaN."""
    layer = make_mxfp8(Shape("plain", 2, 1, 64, 64), device, rng)
    x, weights, ids = layer.x(8, rng), torch.ones((8, 1)), torch.zeros((8, 1), dtype=torch.int32)
    good = check(layer, x, weights, ids)
    x[1, 3], x[2, 40], x[3] = math.nan, math.inf, math.nan
    result = call(x, layer.weights(), weights, ids)
    assert bool(result[1:4].isnan().all()) and same_bits(result[[0, 4, 5, 6, 7]], good[[0, 4, 5, 6, 7]])
    x = layer.x(8, rng)
    layer.w2.view(torch.uint8)[0, 5, 63] = 0xFF
    layer.w2_scale[0, 9, 0] = 255
    result = call(x, layer.weights(), weights, ids)
    assert bool(result[:, [5, 9]].isnan().all()) and int(result.isnan().sum()) == 16


@pytest.mark.parametrize("byte", [3, 40, 134, 135, 160, 200])
def test_any_scale(byte: int, device: str, rng: torch.Generator) -> None:
    """A matrix has large and small scales: those within 2^260 of the largest are exact."""
    layer = make_mxfp8(Shape("plain", 2, 1, 96, 64), device, rng)
    layer.w2_scale.fill_(byte)
    layer.w2_scale[:, ::2, 0] = max(byte - 3, 1)
    x, routing = layer.x(20, rng), make_routing("uniform", 20, 2, 1, rng)
    x = x * 2.0 ** (110 - byte if byte > 160 else 0)
    check(layer, x, *routing)


def test_hidden_size(device: str, rng: torch.Generator) -> None:
    """x has fewer columns than the weights, whose padding is never read."""
    shape = Shape("padded", 4, 2, 192, 96, bias=True)
    layer = make_mxfp8(shape, device, rng)
    x, routing = layer.x(17, rng)[:, :160].contiguous(), make_routing("uniform", 17, 4, 2, rng)
    expected = call(x, layer.weights(hidden_size=160), *routing)
    layer.w13.view(torch.uint8)[..., 160:], layer.w13_scale[..., 5:] = 0x7F, 255
    layer.w2.view(torch.uint8)[:, 160:], layer.w2_scale[:, 160:] = 0x7F, 255
    assert expected.isfinite().all() and same_bits(call(x, layer.weights(hidden_size=160), *routing), expected)
    cut = Mxfp8(
        shape,
        layer.w13[..., :160].contiguous(),
        layer.w2[:, :160].contiguous(),
        layer.w13_scale[..., :5].contiguous(),
        layer.w2_scale[:, :160].contiguous(),
        layer.b13,
        None if layer.b2 is None else layer.b2[:, :160].contiguous(),
    )
    assert same_bits(check(cut, x, *routing), expected)


def test_refused(device: str, rng: torch.Generator) -> None:
    layer = make_mxfp8(Shape("plain", 2, 1, 64, 64), device, rng)
    w13, w2, s13, s2 = layer.operands
    make = oxmoe.ExpertWeights.mxfp8
    with pytest.raises(ValueError, match="w13: dimension 2 gives hidden 48, expected a multiple of 32"):
        make(w13[..., :48].contiguous(), w2, s13, s2)
    with pytest.raises(ValueError, match='w2_scale: dimension 2 "intermediate / 32": expected 2, got 1'):
        make(w13, w2, s13, s2[..., :1].contiguous())
    with pytest.raises(ValueError, match="w13: expected dtype float8_e4m3fn or uint8, got bfloat16"):
        make(w13.bfloat16(), w2, s13, s2)
    with pytest.raises(ValueError, match="hidden_size: expected a multiple of 32 up to 64 \\(from w13\\), got 40"):
        make(w13, w2, s13, s2, hidden_size=40)
    with pytest.raises(ValueError, match="w13_scale: expected powers of two from 2\\^-127 to 2\\^127, got 3"):
        make(w13, w2, torch.full(s13.shape, 3.0, device=device), s2)
    x, routing = layer.x(3, rng).half(), make_routing("uniform", 3, 2, 1, rng)
    with pytest.raises(ValueError, match="x: expected dtype bfloat16, got float16"):
        oxmoe.moe(x, layer.weights(), *(part.to(device) for part in routing))
    if device == "cpu":
        with pytest.raises(ValueError, match="in_place: only for weights on CUDA"):
            layer.weights(in_place=True)
    else:
        with pytest.raises(NotImplementedError, match="mxfp8 experts on cuda:0 as bare tensors; supported"):
            torch.ops.oxmoe.moe(x.bfloat16(), *layer.operands[:2], *(part.to(device) for part in routing),
                                w13_scale=s13, w2_scale=s2, format="mxfp8")  # fmt: skip


def test_traced(rng: torch.Generator) -> None:
    """Under torch.compile the operator gets the weights as they are."""
    layer = make_mxfp8(SMALL, "cpu", rng)
    weights, x = layer.weights(), layer.x(9, rng)
    routing = make_routing("uniform", 9, SMALL.experts, SMALL.top_k, rng)
    compiled = torch.compile(lambda *operands: oxmoe.moe(*operands), backend="eager", fullgraph=True)
    assert same_bits(compiled(x, weights, *routing), call(x, weights, *routing))


def test_plan() -> None:
    one, text = (oxmoe.explain(128, 8, 2048, 768, tokens, format="mxfp8", arch="sm_90") for tokens in (1, 2))
    assert "routed_layer_mxfp8_sm90_gated" in one and "round_rows_mxfp8" not in one
    assert "round_rows_mxfp8" in text and "grouped_gemm_mxfp8_sm90_gated_t16_c1" in text
    for arch in ("sm_80", "sm_100", "sm_120"):
        text = oxmoe.explain(128, 8, 2048, 768, 1, format="mxfp8", arch=arch)
        assert text.count("round_rows_mxfp8") == 2 and "grouped_gemm_mxfp8_portable_gated_t64" in text


# The packed form


def packed_codes(codes: Tensor, gated: bool, layout: str) -> Tensor:
    """Packs codes [E, R, K] by the layout of csrc/common/mxfp8.cuh: uint8 [E, R / 64, K / 64, 4096], padded with
    zeros."""
    experts, rows, columns = codes.shape
    if gated:
        gate, up = reference.split_rows(codes.transpose(1, 2), layout)
        codes = torch.stack([gate, up], -1).unflatten(2, (-1, 8)).transpose(3, 4).flatten(2).transpose(1, 2)
    padded = codes.new_zeros((experts, -(-rows // 64) * 64, -(-columns // 64) * 64)).int()
    padded[:, :rows, :columns] = codes.int()
    # [E, tile, warp, half of 16 rows, g, block, step, half of 16 columns, c, side]
    parts = padded.view(experts, -1, 4, 2, 8, padded.shape[2] // 64, 4, 2, 4, 2).permute(0, 1, 5, 6, 2, 4, 8, 7, 9, 3)
    low, high = parts[..., 0], parts[..., 1]  # [E, tile, block, step, warp, g, c, half, side]: rows g and g + 8
    in_place = [(code & 0x80) << 8 | (code & 0x7F) << 4 for code in (low, high)]
    word = in_place[0] | (in_place[1] & 0x80F0) >> 4 | (in_place[1] & 0x0700) << 4
    halves = torch.stack([word & 0xFF, word >> 8], -1).to(torch.uint8)
    # The bytes of a block are two steps of all threads, then the other two.
    steps = halves.unflatten(3, (2, 2)).permute(0, 1, 2, 3, 5, 6, 7, 4, 8, 9, 10)
    return steps.flatten(3)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["gate_up", "up_gate", "interleaved"])
@pytest.mark.parametrize("in_place", [False, True])
def test_packed_form(layout: str, in_place: bool, rng: torch.Generator) -> None:
    shape = Shape("packed", 3, 2, 192, 128) if in_place else Shape("packed", 3, 2, 224, 96)
    layer = make_mxfp8(shape.with_options(layout=layout), "cuda", rng)
    before = [tensor.view(torch.uint8).clone() for tensor in layer.operands]
    x, routing = layer.x(40, rng), make_routing("uniform", 40, 3, 2, rng)
    expected = check(layer, x, *routing)
    made = layer.weights(in_place=in_place)
    assert made.w13 is None and made.w13_packed is not None and made.w2_packed is not None
    for given, packed, gated in ((before[0], made.w13_packed, True), (before[1], made.w2_packed, False)):
        formula = packed_codes(given, gated, layout)
        assert torch.equal(packed[0].view(torch.uint8).flatten(), formula.flatten())
        assert packed[0].data_ptr() == (layer.w13 if gated else layer.w2).data_ptr() if in_place else True
        assert bool((packed[2] == 1).all())
    assert same_bits(call(x, made, *routing), expected)
    if in_place:
        with pytest.raises(ValueError, match="in_place needs rows and columns that are multiples of 64"):
            make_mxfp8(SHAPES[2], "cuda", rng).weights(in_place=True)
