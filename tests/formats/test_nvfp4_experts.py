"""NVFP4 experts on CPU: W4A16 and W4A4, every layout of rows and scales, and SGLang's masked call."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import oxmoe
from cases import GPT_OSS, Shape, draws, make_routing, make_workspace, make_x
from mxfp4_cases import DTYPES, call
from nvfp4_cases import A4_BAR, E4M3, arranged, make
from oxmoe import nvfp4, reference
from oxmoe.testing import assert_close_ulp, relative_norm, same_bits

SHAPES = (
    Shape("small", 6, 3, 128, 64, bias=True),
    Shape("i704", 4, 2, 176, 704),
    Shape("gpt-oss", 5, 2, 2880 // 4, 720, bias=True, options=tuple({**GPT_OSS, "layout": "gate_up"}.items())),
    Shape("relu2", 4, 2, 144, 80).with_options(activation="relu2"),
)


def top_one(x: Tensor, weights: oxmoe.ExpertWeights, experts: Tensor) -> Tensor:
    return call(x, weights, torch.ones((len(x), 1)), experts[:, None].int())


@pytest.mark.parametrize("a4", [False, True], ids=["w4a16", "w4a4"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_experts(shape: Shape, dtype: str, a4: bool, rng: torch.Generator) -> None:
    layer = make(shape, rng, a4)
    weights = layer.weights(dtype=dtype)
    assert weights.format == "nvfp4" and weights.dtype == dtype
    assert (weights.hidden_size, weights.intermediate_size) == (shape.hidden, shape.intermediate)
    for tokens in (1, 9, 40):
        x = make_x(tokens, shape, DTYPES[dtype], "cpu", rng)
        experts = torch.randint(shape.experts, (tokens,), generator=rng)
        results = torch.cat([top_one(drawn, weights, experts) for drawn in draws(x)])
        expected = torch.cat([layer.expected(drawn, experts) for drawn in draws(x)])
        if a4:
            assert relative_norm(results, expected) < (2e-2 if dtype != "f32" else 1e-2)
            if dtype == "bf16":
                assert_close_ulp(results, expected, A4_BAR)
        else:
            assert_close_ulp(results, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_of_plain_experts(dtype: str, rng: torch.Generator) -> None:
    """e2m1 times e4m3 is exact in every dtype."""
    shape = SHAPES[1]
    layer = make(shape, rng)
    tables = ((layer.w13, layer.w13_scale), (layer.w2, layer.w2_scale))
    plain = [reference.nvfp4_numbers(codes, scales.view(E4M3)).to(DTYPES[dtype]) for codes, scales in tables]
    weights = dataclasses.replace(layer, w13_global=torch.ones(1), w2_global=torch.tensor(1.0)).weights(dtype=dtype)
    # x is so small that no sum leaves f16's range: weights without their global scale are up to 6 x 448.
    x = make_x(33, shape, DTYPES[dtype], "cpu", rng) / 512
    routing = make_routing("uniform", 33, shape.experts, shape.top_k, rng)
    expected = call(x, getattr(oxmoe.ExpertWeights, dtype)(*plain), *routing)
    assert expected.isfinite().all() and same_bits(call(x, weights, *routing), expected)


@pytest.mark.parametrize("a4", [False, True], ids=["w4a16", "w4a4"])
@pytest.mark.parametrize("layout", ["gate_up", "up_gate", "interleaved", "gate_up_64", "up_gate_64"])
def test_layouts(layout: str, a4: bool, rng: torch.Generator) -> None:
    """All orders of rows, with scales row by row, in tiles and as MMA views, give the same bits."""
    shape = Shape("layouts", 3, 2, 208, 192, bias=True)
    layer = make(shape, rng, a4)
    x, routing = make_x(11, shape, torch.bfloat16, "cpu", rng), make_routing("uniform", 11, 3, 2, rng)
    expected = call(x, layer.weights(), *routing)
    other = dataclasses.replace(
        layer,
        w13=arranged(layer.w13, layout),
        w13_scale=arranged(layer.w13_scale, layout),
        b13=None if layer.b13 is None else arranged(layer.b13, layout),
    )
    assert same_bits(call(x, other.weights(layout=layout), *routing), expected)
    tiles = [nvfp4.swizzle_blockscale(scale.view(E4M3)) for scale in (other.w13_scale, other.w2_scale)]
    swizzled = dataclasses.replace(other, w13_scale=tiles[0], w2_scale=tiles[1])
    for scale_layout in (None, "swizzled"):
        weights = swizzled.weights(layout=layout, scale_layout=scale_layout)
        assert same_bits(call(x, weights, *routing), expected)
    views = [
        nvfp4.convert_sf_to_mma_layout(tile, rows, columns, 3)
        for tile, rows, columns in zip(tiles, (384, 208), (208, 192), strict=True)
    ]
    for form in (views, [view.contiguous() for view in views]):
        mma = dataclasses.replace(other, w13_scale=form[0], w2_scale=form[1])
        assert same_bits(call(x, mma.weights(layout=layout), *routing), expected)


def test_scales_that_fit_both_layouts(rng: torch.Generator) -> None:
    """Scales of whole tiles are read as plain unless the caller says otherwise."""
    shape = Shape("whole-tiles", 2, 1, 128, 64)
    layer = make(shape, rng)
    x, experts = make_x(5, shape, torch.bfloat16, "cpu", rng), torch.tensor([0, 1, 1, 0, 1])
    expected = top_one(x, layer.weights(), experts)
    tiles = [nvfp4.swizzle_blockscale(scale.view(E4M3)) for scale in (layer.w13_scale, layer.w2_scale)]
    swizzled = dataclasses.replace(layer, w13_scale=tiles[0], w2_scale=tiles[1])
    assert tiles[0].shape == layer.w13_scale.shape
    assert same_bits(top_one(x, swizzled.weights(scale_layout="swizzled"), experts), expected)
    assert not same_bits(top_one(x, swizzled.weights(), experts), expected)


def test_numpy_has_views_of_tiles_too(rng: torch.Generator) -> None:
    shape = Shape("numpy", 3, 1, 64, 64)
    layer = make(shape, rng)
    swizzled = [nvfp4.swizzle_blockscale(scale.view(E4M3)) for scale in (layer.w13_scale, layer.w2_scale)]
    tiles = [
        nvfp4.convert_sf_to_mma_layout(s.view(torch.uint8), r, 64, 3) for s, r in zip(swizzled, (128, 64), strict=True)
    ]
    given = {"w13_global_scale": 0.01, "w2_global_scale": 0.02, "dtype": "f32"}
    experts, x = torch.tensor([2, 0, 1]), torch.randn((3, 64), generator=rng)
    of_torch = oxmoe.ExpertWeights.nvfp4(layer.w13, layer.w2, *tiles, **given)
    arrays = [t.view(torch.uint8).numpy() for t in (layer.w13, layer.w2, *tiles)]
    of_numpy = oxmoe.ExpertWeights.nvfp4(*arrays, **given)  # type: ignore[arg-type]
    result = oxmoe.moe(x.numpy(), of_numpy, np.ones((3, 1), np.float32), experts[:, None].numpy())  # type: ignore[arg-type]
    assert same_bits(torch.from_numpy(result), top_one(x, of_torch, experts))


def test_global_scales(rng: torch.Generator) -> None:
    """Global scales are one number, [E] or [E, 2], as numbers and as tensors."""
    shape = SHAPES[0]
    layer = make(shape, rng)
    x, experts = make_x(20, shape, torch.bfloat16, "cpu", rng), torch.randint(6, (20,), generator=rng)
    one, each = torch.tensor(0.004), torch.rand(6, generator=rng) / 100
    forms: list[tuple[Any, Any, Tensor, Tensor]] = [
        (0.004, 0.004, one.expand(6, 2), one.expand(6)),
        (one, one[None], one.expand(6, 2), one.expand(6)),
        (each, each, each[:, None].expand(6, 2), each),
    ]
    for w13_global, w2_global, full, full_w2 in forms:
        given = dataclasses.replace(layer, w13_global=w13_global, w2_global=w2_global)
        meant = dataclasses.replace(layer, w13_global=full.contiguous(), w2_global=full_w2.contiguous())
        assert same_bits(top_one(x, given.weights(), experts), top_one(x, meant.weights(), experts))


def test_a4_is_that_of_fp4_quantize(rng: torch.Generator) -> None:
    """x is given in bf16, and as the codes that fp4_quantize makes of it."""
    shape, m = Shape("codes", 4, 1, 192, 96, bias=True), 19
    layer = make(shape, rng, a4=True)
    x = torch.randn((4, m, 192), generator=rng).bfloat16()
    counts = torch.tensor([0, m, 3, 11], dtype=torch.int32)
    assert layer.roundings is not None
    codes, scales = zip(
        *(nvfp4.fp4_quantize(x[e], layer.roundings[0][e : e + 1], is_sf_swizzled_layout=False) for e in range(4)),
        strict=True,
    )
    weights, valid = layer.weights(), torch.arange(m)[None] < counts[:, None]
    room = make_workspace(oxmoe.masked_workspace_bytes(weights, 4 * m), "cpu")
    out = torch.full_like(x, torch.nan)
    oxmoe.moe_masked(x, weights, counts, out=out, workspace=room)
    by_codes = oxmoe.moe_masked(torch.stack(codes), weights, counts, x_scale=torch.stack(scales).view(E4M3))
    owners = torch.arange(4)[:, None].expand(-1, m)[valid]
    assert same_bits(out[valid], by_codes[valid])
    assert same_bits(out[valid], top_one(x[valid], weights, owners))
    assert bool(out[~valid].isnan().all())


@pytest.mark.parametrize("activation", ["silu", "relu2"])
@pytest.mark.parametrize("quantised", [False, True])
def test_cutedsl_masked(activation: str, quantised: bool, rng: torch.Generator) -> None:
    shape = Shape("cutedsl", 5, 1, 256, 160).with_options(activation=activation)
    layer, m = make(shape, rng, a4=True), 33
    assert layer.roundings is not None
    layer.w13_global = layer.w13_global[:, :1].contiguous()
    x = torch.randn((5, m, 256), generator=rng).bfloat16()
    counts = torch.tensor([0, m, 1, 20, 7], dtype=torch.int32)
    given: tuple[Tensor, Tensor | None] = (x, None)
    if quantised:
        given = nvfp4.scaled_fp4_grouped_quantize(x, counts, layer.roundings[0])
    tiles = [nvfp4.swizzle_blockscale(scale.view(E4M3)) for scale in (layer.w13_scale, layer.w2_scale)]
    arguments = (
        given,
        layer.roundings[0],
        layer.w13,
        tiles[0],
        layer.w13_global[:, 0].contiguous(),
        layer.w2,
        layer.roundings[1],
        tiles[1],
        layer.w2_global,
        counts,
    )
    out = nvfp4.flashinfer_cutedsl_moe_masked(*arguments, activation=activation)
    assert out.shape == x.shape and out.dtype == torch.bfloat16
    valid = torch.arange(m)[None] < counts[:, None]
    owners = torch.arange(5)[:, None].expand(-1, m)[valid]
    expected = layer.expected(x[valid], owners)
    assert relative_norm(out[valid], expected) < 2e-2
    assert_close_ulp(out[valid], expected, A4_BAR)
    for name in ("down_sm_count", "down_signals", "down_start_event"):
        with pytest.raises(NotImplementedError, match=name):
            nvfp4.flashinfer_cutedsl_moe_masked(*arguments, activation=activation, **{name: 1})
    with pytest.raises(ValueError, match="activation"):
        nvfp4.flashinfer_cutedsl_moe_masked(*arguments, activation="gelu")
    codes, scales = torch.zeros((m, 64, 5), dtype=torch.uint8), torch.zeros((32, 4, 1, 4, 2, 5), dtype=torch.uint8)
    for pair, words in (
        ((codes.float(), scales), r"hidden_states\[0\]: expected a dtype of one byte, got float32"),
        ((codes[0], scales), r"hidden_states\[0\]: expected \[m, K / 2, El\], got shape \(64, 5\)"),
        ((codes, scales.float()), r"hidden_states\[1\]: expected a dtype of one byte, got float32"),
    ):
        with pytest.raises(ValueError, match=words):
            nvfp4.flashinfer_cutedsl_moe_masked(pair, *arguments[1:], activation=activation)


def test_special_scales(rng: torch.Generator) -> None:
    """Scales are 0 and NaN, and rows are zeros."""
    shape = SHAPES[0]
    layer = make(shape, rng, a4=True)
    layer.w13_scale[0] = 0
    layer.w2_scale[1, 5, 2] = 0x7F
    x = make_x(12, shape, torch.bfloat16, "cpu", rng)
    x[3] = 0
    experts = torch.arange(12) % 6
    got, expected = top_one(x, layer.weights(), experts), layer.expected(x, experts)
    assert bool((got.isnan() == expected.isnan()).all()) and bool(got[experts == 1][:, 5].isnan().all())
    finite = ~expected.isnan()
    assert relative_norm(got[finite], expected[finite]) < 2e-2


def test_what_is_refused(rng: torch.Generator) -> None:
    layer = make(SHAPES[0], rng)
    cases: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (ValueError, "w13_scale: dimension", {"w13_scale": layer.w13_scale[:, :, :3].contiguous()}),
        (ValueError, "w2_scale: expected dtype", {"w2_scale": layer.w2_scale.float()}),
        (ValueError, "w13_global_scale", {"w13_global": torch.ones(6, 3)}),
        (ValueError, "w2_global_scale", {"w2_global": torch.ones(5)}),
        (ValueError, "w13: ", {"w13": layer.w13[:, :, :60].contiguous(), "w13_scale": layer.w13_scale}),
    ]
    for error, words, changed in cases:
        with pytest.raises(error, match=words):
            dataclasses.replace(layer, **changed).weights()
    for error, words, options in [
        (ValueError, "a2_global_scale: needed", {"input_global_scale": 1.0}),
        (ValueError, "input_global_scale: needed", {"a2_global_scale": 1.0}),
        (ValueError, "scale_layout", {"scale_layout": "mma"}),
        (ValueError, "layout", {"layout": "up"}),
        (ValueError, "dtype", {"dtype": "mxfp4"}),
    ]:
        with pytest.raises(error, match=words):
            layer.weights(**options)
    odd = make(Shape("odd", 2, 1, 64, 96), rng)
    with pytest.raises(ValueError, match="multiple of 64"):
        odd.weights(layout="up_gate_64")
    x, ones = make_x(2, SHAPES[0], torch.bfloat16, "cpu", rng), torch.ones(2, 1)
    bare = {"w13_scale": layer.w13_scale, "w2_scale": layer.w2_scale, "format": "nvfp4"}
    with pytest.raises(NotImplementedError, match="bare"):
        oxmoe._oxmoe.moe_tensors(x, layer.w13, layer.w2, ones, ones.int(), **bare)
    with pytest.raises(NotImplementedError, match="x_scale with nvfp4"):
        oxmoe.moe_masked(x.view(1, 2, -1), layer.weights(), ones[:1, 0].int(), x_scale=torch.ones(1, 2, 8))
