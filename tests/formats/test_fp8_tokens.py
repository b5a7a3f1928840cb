"""Tokens that the caller quantised: e4m3 x with x_scale in every order and form."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import oxmoe
from cases import Shape, make_routing, make_workspace, tie_free_logits
from fp8_cases import MODES, SHAPES, call, make_fp8, make_fp8_tensor
from oxmoe import quantize, reference
from oxmoe.testing import same_bits

SMALL = SHAPES[2]


def given(x: Tensor, scale: Tensor, weights: oxmoe.ExpertWeights, *routing: Tensor, **options: Any) -> Tensor:
    """Runs moe into an output of NaN, with a workspace of NaN."""
    routing = tuple(part.to(x.device) for part in routing)
    slots = routing[1].shape[1] if routing else options["top_k"]
    out = torch.full(x.shape, math.nan, dtype=torch.bfloat16, device=x.device)
    workspace = make_workspace(oxmoe.workspace_bytes(weights, x.shape[0], slots), x.device)
    assert oxmoe.moe(x, weights, *routing, x_scale=scale, **options, out=out, workspace=workspace) is out
    return out


def packed(scales: Tensor, *, column_major: bool) -> Tensor:
    """Packs powers of two [T, G] to int32 [T, ceil(G / 4)], column-major with rows padded to 4."""
    tokens, groups = scales.shape
    bytes_ = torch.zeros((tokens, -(-groups // 4) * 4), dtype=torch.int32, device=scales.device)
    bytes_[:, :groups] = scales.log2().round().int() + 127
    words = sum(bytes_[:, i::4] << 8 * i for i in range(4))
    if not column_major:
        return words
    room = torch.full((words.shape[1], -(-tokens // 4) * 4), -1, dtype=torch.int32, device=scales.device)
    room[:, :tokens] = words.T
    return room.T[:tokens]


def column_major(scales: Tensor, padding: int) -> Tensor:
    room = torch.full((scales.shape[1], scales.shape[0] + padding), math.nan, device=scales.device)
    room[:, : scales.shape[0]] = scales.T
    return room.T[: scales.shape[0]]


@pytest.mark.parametrize("tokens", [0, 1, 7, 64, 130, 700])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.name)
def test_scales_of_groups(shape: Shape, tokens: int, device: str, rng: torch.Generator) -> None:
    """The bits are those of bf16 tokens, which are quantised in the same way, whatever the order of the scales is."""
    layer = make_fp8(shape, device, rng)
    made, x = layer.weights(), layer.x(tokens, rng)
    routing = make_routing("holes", tokens, shape.experts, shape.top_k, rng)
    expected = call(x, made, *routing)
    codes, scales = reference.fp8_groups(x)
    for scale in (scales, column_major(scales, 0), column_major(scales, 3)):
        assert same_bits(given(codes, scale, made, *routing), expected)


@pytest.mark.parametrize("tokens", [1, 6, 130])
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[2], SHAPES[3]], ids=lambda s: s.name)
def test_packed_powers_of_two(shape: Shape, tokens: int, device: str, rng: torch.Generator) -> None:
    layer = make_fp8(shape, device, rng)
    made, x = layer.weights(), layer.x(tokens, rng)
    routing = make_routing("uniform", tokens, shape.experts, shape.top_k, rng)
    codes, scales = reference.fp8_groups(x, powers=True)
    expected = given(codes, scales, made, *routing)
    for order in (False, True):
        assert same_bits(given(codes, packed(scales, column_major=order), made, *routing), expected)


def test_what_the_quantiser_gives(device: str, rng: torch.Generator) -> None:
    """Tokens come with each of SGLang's options of per_token_group_quant_fp8."""
    layer = make_fp8(SMALL, device, rng)
    made, x = layer.weights(), layer.x(33, rng)
    routing = make_routing("uniform", 33, SMALL.experts, SMALL.top_k, rng)
    expected = call(x, made, *routing)
    for options in ({}, {"column_major_scales": True}, {"column_major_scales": True, "scale_tma_aligned": True}):
        assert same_bits(given(*quantize.per_token_group_quant_fp8(x, 128, **options), made, *routing), expected)
    options = {"column_major_scales": True, "scale_tma_aligned": True, "scale_ue8m0": True}
    codes, words = quantize.per_token_group_quant_fp8(x, 128, **options)
    expected = given(*reference.fp8_groups(x, powers=True), made, *routing)
    assert same_bits(given(codes, words, made, *routing), expected)


def test_bytes_at_the_ends(device: str, rng: torch.Generator) -> None:
    """The byte 0 is 2^-127, and 255 is not a number."""
    layer = make_fp8(SHAPES[1], device, rng)
    layer.b13, layer.b2 = None, None
    codes = torch.ones((3, 128), device=device).to(torch.float8_e4m3fn)
    words = torch.tensor([[0], [255], [127]], dtype=torch.int32, device=device)
    routing = make_routing("uniform", 3, 3, 2, rng)
    result = given(codes, words, layer.weights(), *routing)
    assert bool(result[1].isnan().all()) and bool(result[[0, 2]].isfinite().all())
    powers = torch.tensor([[2.0**-127], [math.nan], [1.0]], device=device)
    assert same_bits(given(codes, powers, layer.weights(), *routing)[[0, 2]], result[[0, 2]])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("tokens", [1, 9, 300])
def test_fp8_tensor(tokens: int, mode: str, device: str, rng: torch.Generator) -> None:
    layer = make_fp8_tensor(SMALL, device, rng)
    made, x = layer.weights(mode), layer.x(tokens, rng)
    routing = make_routing("uniform", tokens, SMALL.experts, SMALL.top_k, rng)
    expected = call(x, made, *routing)
    dynamic = None if mode == "static" else mode
    codes, scales = reference.fp8_rows(x, layer.a13_scale if mode == "static" else None, dynamic)
    one = scales[0, 0].clone()
    forms = [scales.contiguous()]
    forms += [scales[:, :1], scales[:, 0].contiguous()] if mode == "token" else [one, one.view(1), one.view(1, 1)]
    for scale in forms:
        assert same_bits(given(codes, scale, made, *routing), expected)


def test_router_logits(device: str, rng: torch.Generator) -> None:
    layer = make_fp8(SHAPES[0], device, rng)
    made = layer.weights()
    for tokens in (1, 40):
        x, logits = layer.x(tokens, rng), tie_free_logits(tokens, 16, rng).to(device)
        expected = call(x, made, router_logits=logits, top_k=8)
        assert same_bits(given(*reference.fp8_groups(x), made, router_logits=logits, top_k=8), expected)


def test_output_is_bf16(device: str, rng: torch.Generator) -> None:
    layer = make_fp8(SMALL, device, rng)
    routing = tuple(part.to(device) for part in make_routing("uniform", 4, SMALL.experts, SMALL.top_k, rng))
    x = layer.x(4, rng)
    codes, scales = reference.fp8_groups(x)
    result = oxmoe.moe(codes, layer.weights(), *routing, x_scale=scales)
    assert result.dtype == torch.bfloat16 and same_bits(result, oxmoe.moe(x, layer.weights(), *routing))


def test_refused(rng: torch.Generator) -> None:
    layer = make_fp8(SMALL, "cpu", rng)
    made, routing = layer.weights(), make_routing("uniform", 4, SMALL.experts, SMALL.top_k, rng)
    codes, scales = reference.fp8_groups(layer.x(4, rng))

    def refused(error: type[Exception], match: str, x: Tensor, weights: Any = made, **options: Any) -> None:
        with pytest.raises(error, match=match):
            oxmoe.moe(x, weights, *routing, **options)

    refused(ValueError, "x_scale: needed where x is float8_e4m3fn", codes)
    refused(ValueError, "x: expected dtype float8_e4m3fn, got bfloat16", codes.bfloat16(), x_scale=scales)
    expected = r"x_scale: expected float32 \[4, 3\] \(a scale for each 128 columns\), \[4, 1\] or one number, or "
    expected += r"int32 \[4, 1\]"
    refused(ValueError, expected + r" of E8M0 bytes, got float32 \[3, 4\]", codes, x_scale=scales.T.contiguous())
    refused(ValueError, expected, codes, x_scale=scales.double())
    refused(ValueError, expected, codes, x_scale=torch.zeros((4, 3), dtype=torch.int32))
    refused(ValueError, "out: expected dtype bfloat16, got float8_e4m3fn", codes, x_scale=scales, out=codes)
    room = torch.zeros(4 * 384, dtype=torch.bfloat16)
    inside = room.view(torch.float32)[:12].view(4, 3)
    refused(ValueError, "out: overlaps x_scale", codes, x_scale=inside, out=room.view(4, 384))
    plain = oxmoe.ExpertWeights.bf16(layer.w13.bfloat16(), layer.w2.bfloat16())
    refused(NotImplementedError, r"x_scale \(quantised tokens\) with bf16 experts", codes, plain, x_scale=scales)
    refused(ValueError, "x: expected dtype bfloat16, got float8_e4m3fn", codes, plain)
