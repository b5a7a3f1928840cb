"""int4 experts: such a layer is the layer of the numbers that codes and scales stand for."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import oxmoe
from cases import ACTIVATIONS, Shape, make_routing
from int4_cases import Int4, make
from oxmoe import reference
from oxmoe.formats import int4
from oxmoe.testing import assert_close_ulp, same_bits

# Kimi K2's sizes of a rank and Qwen3's, narrowed; odd row and column counts; sizes of 2880, 704 and 1408.
SHAPES = (
    Shape("kimi-k2-tp8-narrow", 12, 8, 896, 256),
    Shape("qwen3-small", 16, 8, 256, 96),
    Shape("gpt-oss-width", 3, 2, 2880, 2880 // 5, bias=True),
    Shape("i704", 6, 2, 128, 704, bias=True),
    Shape("i1408", 4, 2, 256, 1408),
    Shape("one-expert", 1, 1, 64, 32),
)
KINDS: dict[str, dict[str, Any]] = {
    "symmetric": {},
    "zeros": {"zeros": True},
    "groups-of-64": {"group": 64},
    "groups-of-128-zeros": {"group": 128, "zeros": True},
    "rows": {"group": None},
    "rows-zeros-f32": {"group": None, "zeros": True, "scale_dtype": torch.float32},
    "f16-scales": {"scale_dtype": torch.float16},
}


def fits(shape: Shape, kind: str) -> bool:
    group = KINDS[kind].get("group", 32) or 1
    return shape.hidden % group == 0 and shape.intermediate % group == 0


FITTING = [
    pytest.param(shape, kind, id=f"{shape.name}-{kind}") for shape in SHAPES for kind in KINDS if fits(shape, kind)
]


def layer_of(shape: Shape, kind: str, device: str, rng: torch.Generator) -> Int4:
    return make(shape, rng, **KINDS[kind]).to(device)


def rows_of(tokens: int, shape: Shape, device: str, rng: torch.Generator) -> torch.Tensor:
    return torch.randn((tokens, shape.hidden), generator=rng).bfloat16().to(device)


def check(layer: Int4, x: torch.Tensor, routing: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Compares a layer with the reference of plain weights, with outputs that were poisoned before."""
    weights = layer.weights()
    # The reference takes one expert after the other: a whole layer of Kimi K2 in fp64 is larger than a GPU's memory.
    w13 = int4.Experts(layer.w13, layer.w13_scale, layer.w13_zeros)
    w2 = int4.Experts(layer.w2, layer.w2_scale, layer.w2_zeros)
    out = torch.full_like(x, torch.nan)
    got = oxmoe.moe(x, weights, *routing, out=out)
    assert got.data_ptr() == out.data_ptr()
    options = {"b13": layer.b13, "b2": layer.b2, **dict(layer.shape.options)}
    wanted = reference.moe(x, w13, w2, topk_weights=routing[0], topk_ids=routing[1], **options)
    assert_close_ulp(got, wanted)
    if x.device.type == "cpu":
        plain = oxmoe.ExpertWeights.bf16(*layer.plain(), **options)
        assert same_bits(got, oxmoe.moe(x, plain, *routing))


@pytest.mark.parametrize(("shape", "kind"), FITTING)
@pytest.mark.parametrize("tokens", [0, 1, 7, 64])
def test_layers(shape: Shape, kind: str, tokens: int, device: str, rng: torch.Generator) -> None:
    layer = layer_of(shape, kind, device, rng)
    routing = make_routing("uniform", tokens, shape.experts, shape.top_k, rng)
    check(layer, rows_of(tokens, shape, device, rng), (routing[0].to(device), routing[1].to(device)))


@pytest.mark.parametrize("pattern", ["skewed", "one_expert", "holes", "all_holes"])
@pytest.mark.parametrize("kind", ["symmetric", "zeros"])
def test_routings(pattern: str, kind: str, device: str, rng: torch.Generator) -> None:
    shape = SHAPES[0]
    layer = layer_of(shape, kind, device, rng)
    routing = make_routing(pattern, 33, shape.experts, shape.top_k, rng)
    x = rows_of(33, shape, device, rng)
    if pattern == "all_holes":
        assert not oxmoe.moe(x, layer.weights(), *(t.to(device) for t in routing)).any()
        return
    check(layer, x, (routing[0].to(device), routing[1].to(device)))


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("kind", ["symmetric", "zeros"])
def test_activations(name: str, kind: str, device: str, rng: torch.Generator) -> None:
    shape = Shape("activations", 5, 2, 192, 160, bias=True).with_options(**ACTIVATIONS[name])
    layer = layer_of(shape, kind, device, rng)
    routing = make_routing("uniform", 21, shape.experts, shape.top_k, rng)
    check(layer, rows_of(21, shape, device, rng), (routing[0].to(device), routing[1].to(device)))


def test_int32_words_are_the_same_codes(device: str, rng: torch.Generator) -> None:
    """compressed-tensors packs eight codes into an int32."""
    shape = SHAPES[1]
    layer = make(shape, rng, zeros=True).to(device)
    words = dataclasses.replace(layer, w13=layer.w13.view(torch.int32), w2=layer.w2.view(torch.int32))
    routing = tuple(t.to(device) for t in make_routing("uniform", 9, shape.experts, shape.top_k, rng))
    x = rows_of(9, shape, device, rng)
    assert same_bits(oxmoe.moe(x, words.weights(), *routing), oxmoe.moe(x, layer.weights(), *routing))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_other_dtypes_on_cpus(dtype: torch.dtype, rng: torch.Generator) -> None:
    shape = SHAPES[1]
    layer = make(shape, rng, zeros=True)
    routing = make_routing("uniform", 9, shape.experts, shape.top_k, rng)
    x = torch.randn((9, shape.hidden), generator=rng).to(dtype)
    name = {torch.float16: "f16", torch.float32: "f32"}[dtype]
    w13, w2 = layer.plain(dtype)
    plain = getattr(oxmoe.ExpertWeights, name)(w13, w2)
    assert same_bits(oxmoe.moe(x, layer.weights(dtype=name), *routing), oxmoe.moe(x, plain, *routing))


def test_weights_at_the_ends_of_bf16(device: str, rng: torch.Generator) -> None:
    """Scales that are infinite, NaN, zero, or so small that products are subnormal, give bf16 arithmetic."""
    shape = Shape("ends", 2, 1, 64, 64)
    layer = make(shape, rng)
    layer.w2_scale[:] = 0.05
    layer.w13_scale[0, :8, 0] = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 1e-39, -3e-40, 1e38])
    layer = layer.to(device)
    x = rows_of(6, shape, device, rng)
    ids = torch.tensor([[0], [1]] * 3, dtype=torch.int32, device=device)
    weights = torch.ones((6, 1), device=device)
    got = oxmoe.moe(x, layer.weights(), weights, ids)
    w13, w2 = layer.plain()
    wanted = reference.moe(x, w13, w2, topk_weights=weights, topk_ids=ids)
    assert bool((got.isnan() == wanted.isnan()).all())
    assert bool(got[0::2].isnan().any()) and not bool(got[1::2].isnan().any())
    assert_close_ulp(got[1::2], wanted[1::2])


def test_a_token_is_the_same_in_every_batch(device: str, rng: torch.Generator) -> None:
    shape = SHAPES[0]
    layer = make(shape, rng, zeros=True).to(device)
    made = layer.weights()
    topk_weights, topk_ids = (t.to(device) for t in make_routing("uniform", 300, shape.experts, shape.top_k, rng))
    x = rows_of(300, shape, device, rng)
    whole = oxmoe.moe(x, made, topk_weights, topk_ids)
    for rows in (slice(0, 1), slice(17, 40), slice(100, 228)):
        part = oxmoe.moe(x[rows].contiguous(), made, topk_weights[rows].contiguous(), topk_ids[rows].contiguous())
        assert same_bits(part, whole[rows])


@pytest.mark.parametrize("zeros", [False, True])
def test_rows_in_expert_order(zeros: bool, device: str, rng: torch.Generator) -> None:
    shape = SHAPES[0]
    layer = make(shape, rng, zeros=zeros).to(device)
    counts = torch.tensor([0, 1, 5, 64, 33, 2, 0, 17, 64, 8, 40, 3], dtype=torch.int32)
    x = torch.randn((shape.experts, 64, shape.hidden), generator=rng).bfloat16().to(device)
    out = torch.full_like(x, 7.0)
    oxmoe.moe_masked(x, layer.weights(), counts.to(device), expected_m=20, out=out)
    w13, w2 = layer.plain()
    for expert, count in enumerate(counts.tolist()):
        assert bool((out[expert, count:] == 7).all())
        ids = torch.full((count, 1), expert, dtype=torch.int32, device=device)
        ones = torch.ones((count, 1), device=device)
        rows = x[expert, :count]
        assert_close_ulp(out[expert, :count], reference.moe(rows, w13, w2, topk_weights=ones, topk_ids=ids))


def test_experts_of_a_rank(device: str, rng: torch.Generator) -> None:
    """Two ranks' results add up to the whole layer's, each with its own experts."""
    shape = SHAPES[1]
    layer = make(shape, rng).to(device)
    half = shape.experts // 2
    topk_weights, topk_ids = (t.to(device) for t in make_routing("uniform", 16, shape.experts, shape.top_k, rng))
    x = rows_of(16, shape, device, rng)
    total = torch.zeros(x.shape, device=device)
    for rank in range(2):
        part = slice(rank * half, (rank + 1) * half)
        operands = (layer.w13[part], layer.w2[part], layer.w13_scale[part], layer.w2_scale[part])
        local = oxmoe.ExpertWeights.int4(*(t.contiguous() for t in operands))
        total += oxmoe.moe(x, local, topk_weights, topk_ids, ep_size=2, ep_rank=rank).float()
    wanted = reference.moe(x, *layer.plain(), topk_weights=topk_weights, topk_ids=topk_ids)
    assert (total - wanted.float()).norm() < 1e-2 * wanted.float().norm()


def test_what_is_refused(device: str, rng: torch.Generator) -> None:
    layer = make(Shape("tiny", 3, 2, 64, 32), rng, zeros=True).to(device)
    made = layer.weights()
    assert made.format == "int4-zeros" and layer.weights(w13_zeros=None, w2_zeros=None).format == "int4"
    assert "ExpertWeights.int4(experts=3, hidden=64, intermediate=32" in repr(made)
    wide = dataclasses.replace(layer, w13_scale=layer.w13_scale[:, :, :1].repeat(1, 1, 3))
    cases: list[tuple[type[Exception], str, Any]] = [
        (ValueError, "w2_zeros: needed where w13_zeros", lambda: layer.weights(w2_zeros=None)),
        (
            ValueError,
            "w13_zeros: expected zero points from 0 to 16, got",
            lambda: layer.weights(w13_zeros=layer.w13_zeros + 17),
        ),
        (
            ValueError,
            "w13_scale: dimension 2 has 3 groups of 64 columns",
            lambda: wide.weights(w13_zeros=None, w2_zeros=None),
        ),
        (
            ValueError,
            "w13: dimension 2 gives hidden 62",
            lambda: dataclasses.replace(layer, w13=layer.w13[..., :31].contiguous()).weights(),
        ),
        (
            ValueError,
            "w2_scale: ",
            lambda: dataclasses.replace(layer, w2_scale=layer.w2_scale[:, :5].contiguous()).weights(),
        ),
        (ValueError, "dtype: expected", lambda: layer.weights(dtype="int4")),
        (NotImplementedError, "int4 experts as bare tensors", lambda: _bare(layer)),
    ]
    if device == "cpu":
        # numpy's arrays have no method that looks at their numbers, unlike torch's tensors.
        numpy = {name: getattr(layer, name).numpy() for name in ("w13", "w2", "w13_zeros", "w2_zeros")}
        scales = (layer.w13_scale.float().numpy(), layer.w2_scale.float().numpy())
        zeros = {"w13_zeros": numpy["w13_zeros"] + 17, "w2_zeros": numpy["w2_zeros"]}
        wrong = lambda: oxmoe.ExpertWeights.int4(numpy["w13"], numpy["w2"], *scales, **zeros)  # noqa: E731
        cases.append((ValueError, "w13_zeros: expected zero points from 0 to 16, got", wrong))
    if device == "cuda":
        cases.append((NotImplementedError, 'dtype: "f16" for int4 experts on cuda', lambda: layer.weights(dtype="f16")))
    for kind, text, call in cases:
        with pytest.raises(kind, match=None) as raised:
            call()
        assert text in str(raised.value), raised.value


def _bare(layer: Int4) -> None:
    ids = torch.zeros((1, 1), dtype=torch.int32, device=layer.w13.device)
    x = torch.zeros((1, 64), dtype=torch.bfloat16, device=layer.w13.device)
    oxmoe._oxmoe.moe_tensors(x, layer.w13, layer.w2, ids.float(), ids, format="int4")


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 3, 64, 257, 1024])
@pytest.mark.parametrize("zeros", [False, True])
def test_kimi_k2(tokens: int, zeros: bool, rng: torch.Generator) -> None:
    """The layer is Kimi K2's on a rank of eight, whole: groups of 32, and groups of 128 with zero points."""
    shape = Shape("kimi-k2-tp8", 384, 8, 7168, 256)
    layer = make(shape, rng, group=128 if zeros else 32, zeros=zeros).to("cuda")
    routing = tuple(t.to("cuda") for t in make_routing("uniform", tokens, shape.experts, shape.top_k, rng))
    check(layer, rows_of(tokens, shape, "cuda", rng), (routing[0], routing[1]))


@pytest.mark.gpu
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("columns", [(512, 256), (320, 96)], ids=str)
def test_every_tile(columns: tuple[int, int], zeros: bool, rng: torch.Generator) -> None:
    """Means of an expert's slots are on either side of the tiles' borders. K is whole stages of four blocks, or is
    not."""
    shape = Shape("tiles", 4, 2, *columns, bias=True)
    layer = make(shape, rng, zeros=zeros).to("cuda")
    for mean in (1, 9, 12, 18, 22, 30, 48, 60, 70, 90, 110, 140, 200, 420):
        routing = tuple(t.to("cuda") for t in make_routing("uniform", 2 * mean, shape.experts, shape.top_k, rng))
        check(layer, rows_of(2 * mean, shape, "cuda", rng), (routing[0], routing[1]))


@pytest.mark.gpu
def test_portable_kernels_have_the_same_packed_form(rng: torch.Generator) -> None:
    """Bytes of the packed form lie in the places that csrc/common/int4.cuh gives them."""
    shape = Shape("packed", 2, 1, 96, 160)
    layer = make(shape, rng, zeros=True).to("cuda")
    packed = layer.weights().w13_packed
    assert packed is not None
    codes, scales, factors = (t.cpu() for t in packed)
    assert codes.shape == (2, 5, 2, 2048) and scales.shape == (2, 5, 2, 384) and bool((factors == 1).all())
    words = codes.view(torch.int32).reshape(2, 5, 2, 128, 4)
    of_scales = scales.view(2, 5, 2, 32, 12)
    plain, zeros, given = layer.w13.cpu(), layer.w13_zeros, layer.w13_scale.cpu()
    assert zeros is not None
    for _ in range(2000):
        expert, column, k = (int(torch.randint(0, most, (), generator=rng)) for most in (2, 160, 96))
        half = int(torch.randint(0, 2, (), generator=rng))
        row, piece = column + 160 * half, column // 8
        tile, warp, g = piece // 4, piece % 4, column % 8
        step, pair, register = k % 64 // 16, k % 8 // 2, k % 16 // 8 * 2 + half
        word = int(words[expert, tile, k // 64, 32 * warp + 4 * g + pair, step])
        code = int(plain[expert, row, k // 2]) >> 4 * (k % 2) & 15
        assert word >> (4 * register + 16 * (k % 2)) & 15 == code
        quad = of_scales[expert, tile, k // 64, 8 * warp + g]
        group = k % 64 // 32
        scale = quad[4 * group + 2 * half : 4 * group + 2 * half + 2].view(torch.bfloat16)
        assert same_bits(scale[0], given[expert, row, k // 32])
        assert int(quad[8 + 2 * group + half]) == int(zeros[expert, row, k // 32])
