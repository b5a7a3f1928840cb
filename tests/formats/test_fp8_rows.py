"""Experts of e4m3 with a scale for each row of a matrix: compressed-tensors' "channel", SGLang's per_channel_quant."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import oxmoe
from cases import ACTIVATIONS, Shape, make_routing, make_workspace, tie_free_logits
from fp8_cases import CALL_OPTIONS, MODES, SHAPES, Fp8Tensor, call, check_tensor, make_fp8_tensor
from oxmoe import reference
from oxmoe.testing import relative_norm, same_bits
from test_fp8_stages import PAIRS, check_steps

SMALL = SHAPES[2]


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    return request.param


def make(shape: Shape, device: str, rng: torch.Generator) -> Fp8Tensor:
    return make_fp8_tensor(shape, device, rng, of_rows=True)


def routed(shape: Shape, tokens: int, device: str, rng: torch.Generator) -> list[torch.Tensor]:
    return [part.to(device) for part in make_routing("uniform", tokens, shape.experts, shape.top_k, rng)]


@pytest.mark.parametrize("tokens", [0, 1, 7, 130])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.name)
def test_layer(shape: Shape, tokens: int, mode: str, device: str, rng: torch.Generator) -> None:
    layer = make(shape, device, rng)
    routing = make_routing("uniform", tokens, shape.experts, shape.top_k, rng)
    check_tensor(layer, layer.x(tokens, rng), *routing, mode=mode)


@pytest.mark.parametrize("tokens", [1, 70, 300])
@pytest.mark.parametrize("shape", [SMALL, PAIRS], ids=lambda s: s.name)
def test_steps(shape: Shape, tokens: int, mode: str, device: str, rng: torch.Generator) -> None:
    layer = make(shape, device, rng)
    check_steps(layer, mode, layer.x(tokens, rng), *make_routing("uniform", tokens, shape.experts, shape.top_k, rng))


@pytest.mark.parametrize("name", ["swiglu-up-gate", "gpt-oss-halves", "situ", "relu2", "gelu-plain"])
@pytest.mark.parametrize("tokens", [6, 200])
def test_activations(name: str, tokens: int, device: str, rng: torch.Generator) -> None:
    layer = make(SMALL.with_options(**ACTIVATIONS[name]), device, rng)
    check_steps(layer, "token", layer.x(tokens, rng), *make_routing("uniform", tokens, 5, 3, rng))


@pytest.mark.parametrize("tokens", [9, 200])
@pytest.mark.parametrize("options", CALL_OPTIONS, ids="-".join)
def test_call_options(options: dict[str, Any], tokens: int, device: str, rng: torch.Generator) -> None:
    layer = make(SMALL, device, rng)
    routing = make_routing("holes", tokens, SMALL.experts * options.get("ep_size", 1), SMALL.top_k, rng)
    # NOTE: one scale a row has large steps for its small numbers. wgmma's rounding alone brings one layer in some
    # hundreds beyond the bar, while given scales stay at half of it.
    mode = "token" if device == "cpu" else "static"
    check_tensor(layer, layer.x(tokens, rng), *routing, mode=mode, **options)


def test_router_logits(device: str, rng: torch.Generator) -> None:
    layer = make(SHAPES[0], device, rng)
    for tokens in (1, 40):
        logits = tie_free_logits(tokens, SHAPES[0].experts, rng).to(device)
        check_tensor(layer, layer.x(tokens, rng), router_logits=logits, top_k=8, mode="token")


def test_a_row_does_not_depend_on_the_others(device: str, rng: torch.Generator) -> None:
    """A row has the same bits alone, in a tile of few tokens, in one of many, and if GEMM2 keeps its tokens."""
    for shape in (SMALL, PAIRS):
        layer = make(shape, device, rng)
        made, x = layer.weights("token"), layer.x(700, rng)
        weights, ids = routed(shape, 700, device, rng)
        whole = call(x, made, weights, ids)
        for count in (1, 8, 33, 100, 333):
            assert same_bits(call(x[:count], made, weights[:count], ids[:count]), whole[:count])


def test_equal_scales_of_powers_of_two_are_one_scale(mode: str, device: str, rng: torch.Generator) -> None:
    """Powers of two multiply without rounding, wherever kernels apply them."""
    layer = make_fp8_tensor(SMALL, device, rng, halves=True)
    layer.w13_scale, layer.w2_scale = (
        torch.full_like(layer.w13_scale, 2.0**-8),
        torch.full_like(layer.w2_scale, 0.03125),
    )
    layer.w13_scale[:, 1] = 2.0**-9
    x, routing = layer.x(20, rng), routed(SMALL, 20, device, rng)
    expected = call(x, layer.weights(mode), *routing)
    half = SMALL.intermediate
    layer.w13_scale = layer.w13_scale.repeat_interleave(half, 1)
    for shape in ((5, -1), (5, -1, 1)):
        layer.w13_scale = layer.w13_scale.view(shape)
        assert same_bits(call(x, layer.weights(mode), *routing), expected)
    layer.w2_scale = layer.w2_scale[:, None].repeat(1, SMALL.hidden)
    assert same_bits(call(x, layer.weights(mode), *routing), expected)


def test_quantised_tokens(device: str, rng: torch.Generator) -> None:
    layer = make(SMALL, device, rng)
    x, routing = layer.x(9, rng), routed(SMALL, 9, device, rng)
    made = layer.weights("token")
    codes, scales = reference.fp8_rows(x, None, "token")
    assert same_bits(oxmoe.moe(codes, made, *routing, x_scale=scales[:, :1].clone()), oxmoe.moe(x, made, *routing))


@pytest.mark.parametrize("counts", [[300, 0, 193, 64], [17, 3, 1, 0]], ids=str)
def test_masked(counts: list[int], device: str, rng: torch.Generator) -> None:
    """Rows in expert order have the bits of a routed layer, in tiles for few rows and for many."""
    shape = Shape("masked", 4, 1, 384, 640, bias=True)
    made, m = make(shape, device, rng).weights("token"), 300
    x = torch.randn((4, m, shape.hidden), generator=rng).bfloat16().to(device)
    mask = torch.tensor(counts, dtype=torch.int32, device=device)
    valid = torch.arange(m, device=device)[None, :] < mask[:, None]
    ids = valid.nonzero()[:, :1].int()
    expected = oxmoe.moe(x[valid], made, torch.ones_like(ids, dtype=torch.float32), ids)
    for rows in (2, 20, 60, 300):
        out = oxmoe.moe_masked(x, made, mask, expected_m=rows, out=torch.full_like(x, 7.0))
        assert same_bits(out[valid], expected) and bool((out[~valid] == 7.0).all())


def test_fused_experts(device: str, rng: torch.Generator) -> None:
    """SGLang's call of a compressed-tensors checkpoint quantises tokens one by one."""
    layer = make(SMALL, device, rng)
    x = layer.x(20, rng)
    routing = tuple(part.to(device) for part in make_routing("holes", 20, SMALL.experts, SMALL.top_k, rng))

    def fused(**options: Any) -> torch.Tensor:
        return oxmoe.fused_experts(
            x,
            layer.w13,
            layer.w2,
            routing,
            SimpleNamespace(inplace=False),
            b1=layer.b13,
            b2=layer.b2,
            use_fp8_w8a8=True,
            w1_scale=layer.w13_scale,
            w2_scale=layer.w2_scale,
            **options,
        )

    assert same_bits(fused(per_channel_quant=True), call(x, layer.weights("token"), *routing))
    assert same_bits(fused(), fused(per_channel_quant=True))
    static = {"a1_scale": layer.a13_scale, "a2_scale": layer.a2_scale}
    of_given = call(x, layer.weights("static"), *routing)
    assert same_bits(fused(per_channel_quant=True, **static), of_given) and same_bits(fused(**static), of_given)
    # One of the two scales is not enough: it is never dropped in favour of scales that the call would choose.
    for name, scale in static.items():
        for per_channel_quant in (False, True):
            with pytest.raises(ValueError, match="a13_scale and a2_scale: give both or none"):
                fused(per_channel_quant=per_channel_quant, **{name: scale})


def test_numbers_are_those_of_the_weights(device: str, rng: torch.Generator) -> None:
    """The layer is compared with the layer of the numbers that codes and scales stand for."""
    layer = make(SMALL, device, rng)
    x, routing = layer.x(64, rng), routed(SMALL, 64, device, rng)
    w13, w2 = (w.float() * s for w, s in ((layer.w13, layer.w13_scale), (layer.w2, layer.w2_scale)))
    plain = reference.moe(x.float(), w13, w2, *routing, **layer.options)
    assert relative_norm(call(x, layer.weights("token"), *routing), plain) < 5e-2


def test_attributes(device: str, rng: torch.Generator) -> None:
    layer = make(SMALL, device, rng)
    made = layer.weights("token")
    assert made.w13_scale is layer.w13_scale and made.w2_scale is layer.w2_scale
    assert made.format == "fp8_tensor-token" and made.a13_scale is None
    x, routing = layer.x(3, rng), routed(SMALL, 3, device, rng)
    expected = call(x, made, *routing)
    again = oxmoe.ExpertWeights.fp8_tensor(
        made.w13, made.w2, made.w13_scale, made.w2_scale, per_token=True, **layer.options
    )
    assert same_bits(call(x, again, *routing), expected)
    # Scales are read in the caller's memory.
    made.w2_scale.mul_(2)
    layer.b2.mul_(2)
    assert same_bits(call(x, made, *routing), expected * 2)
    workspace = make_workspace(oxmoe.workspace_bytes(made, 3, 3), device)
    with pytest.raises(ValueError, match="workspace: overlaps w13_scale"):
        small = layer.w13_scale.view(torch.uint8).flatten()
        scales = torch.cat([workspace, small]).clone()
        start = -scales.data_ptr() % 256
        moved = scales[start : start + small.numel()].view(torch.float32).view(layer.w13_scale.shape)
        over = oxmoe.ExpertWeights.fp8_tensor(layer.w13, layer.w2, moved, layer.w2_scale, **layer.options)
        oxmoe.moe(x, over, *routing, workspace=scales[start : start + workspace.numel()])
