"""NVFP4 experts on Hopper: values of every tile, layouts, roundings, rows in expert order and flashinfer's calls."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import oxmoe
from cases import ACTIVATIONS, GPT_OSS, PATTERNS, Shape, draws, make_routing, make_workspace, make_x, tie_free_logits
from cutedsl_cases import SHAPE, drawn, operands, quantised, wrapper
from mxfp4_cases import call
from nvfp4_cases import A4_BAR, E4M3, Nvfp4, arranged, make, on_cuda
from oxmoe import nvfp4, reference
from oxmoe.testing import assert_close_ulp, relative_norm, same_bits

pytestmark = pytest.mark.gpu

# Shapes with one block of K and less, parts of a stage, whole ones and more; rows end within a block of 64.
SHAPES = (
    Shape("h16-i16", 4, 2, 16, 16),
    Shape("h144-i80", 4, 2, 144, 80).with_options(activation="relu2"),
    Shape("h352-i208", 8, 8, 352, 208, bias=True),
    Shape("h720-i1408", 4, 2, 720, 1408),
    Shape("gpt-oss", 5, 2, 2880, 720, bias=True, options=tuple({**GPT_OSS, "layout": "gate_up"}.items())),
)
SMALL = SHAPES[2]
both = pytest.mark.parametrize("a4", [False, True], ids=["w4a16", "w4a4"])


def expected_of(layer: Nvfp4, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """Returns fp32 sums of the experts' bf16 rows."""
    total = torch.zeros_like(x, dtype=torch.float32)
    for j in range(ids.shape[1]):
        placed = ids[:, j] >= 0
        if bool(placed.any()):
            rows = layer.expected(x[placed], ids[placed, j].long())
            total[placed] += weights[placed, j, None] * rows.float()
    return total


def check(layer: Nvfp4, x: Tensor, *routing: Tensor, made: oxmoe.ExpertWeights | None = None, **options: Any) -> Tensor:
    """Checks that the result is close to the reference of the CPU's operands, and returns it."""
    weights = made or on_cuda(layer).weights()
    a4 = layer.roundings is not None
    assert weights.format == ("nvfp4-a4" if a4 else "nvfp4") and weights.device.startswith("cuda")
    given = [part.cuda() for part in routing]
    results = [call(drawn.cuda(), weights, *given, **options) for drawn in draws(x)]
    result = torch.cat(results).cpu()
    truth = torch.cat([expected_of(layer, drawn, *routing) for drawn in draws(x)])
    assert relative_norm(result, truth) < (2e-2 if a4 else 6e-3)
    assert_close_ulp(result, truth.to(result.dtype), A4_BAR if a4 else None)
    return results[0]


@both
@pytest.mark.parametrize("tokens", [0, 1, 7, 64, 130])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_layer(shape: Shape, tokens: int, a4: bool, rng: torch.Generator) -> None:
    layer = make(shape, rng, a4)
    x = make_x(tokens, shape, torch.bfloat16, "cpu", rng)
    check(layer, x, *make_routing("uniform", tokens, shape.experts, shape.top_k, rng))


@both
@pytest.mark.parametrize("pattern", PATTERNS)
def test_routing_patterns(pattern: str, a4: bool, rng: torch.Generator) -> None:
    layer = make(SMALL, rng, a4)
    for tokens in (5, 150, 700):
        x = make_x(tokens, SMALL, torch.bfloat16, "cpu", rng)
        check(layer, x, *make_routing(pattern, tokens, SMALL.experts, SMALL.top_k, rng))


@both
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name: str, a4: bool, rng: torch.Generator) -> None:
    options = {key: value for key, value in ACTIVATIONS[name].items() if key != "layout"}
    shape = Shape("h96-i272", 6, 3, 96, 272, bias=True).with_options(**options)
    layer = make(shape, rng, a4)
    for tokens in (6, 200):
        x = make_x(tokens, shape, torch.bfloat16, "cpu", rng)
        check(layer, x, *make_routing("uniform", tokens, shape.experts, shape.top_k, rng))


@both
@pytest.mark.parametrize("columns", [(1024, 512), (960, 464)], ids=str)
def test_every_tile(columns: tuple[int, int], a4: bool, rng: torch.Generator) -> None:
    shape = Shape("tiles", 16, 2, *columns)
    layer = make(shape, rng, a4)
    weights = on_cuda(layer).weights()
    for tokens in (1, 40, 80, 130, 250, 330, 500, 700, 1500, 3000):
        x = make_x(tokens, shape, torch.bfloat16, "cpu", rng)
        check(layer, x, *make_routing("uniform", tokens, 16, 2, rng), made=weights)


@both
@pytest.mark.parametrize("shape", [SMALL, Shape("h512-i256", 8, 8, 512, 256)], ids=lambda shape: shape.name)
def test_from_logits_and_same_bits(shape: Shape, a4: bool, rng: torch.Generator) -> None:
    """A row's bits are the same in every run and in every batch."""
    layer = on_cuda(make(shape, rng, a4))
    weights = layer.weights()
    x = make_x(300, shape, torch.bfloat16, "cpu", rng).cuda()
    logits = tie_free_logits(300, shape.experts, rng).cuda()
    whole = call(x, weights, router_logits=logits, top_k=shape.top_k)
    assert same_bits(call(x, weights, router_logits=logits, top_k=shape.top_k), whole)
    assert same_bits(call(x, layer.weights(), *oxmoe.topk(logits, shape.top_k)), whole)
    for tokens in (1, 3, 20, 40, 100):
        part = call(x[:tokens], weights, router_logits=logits[:tokens].contiguous(), top_k=shape.top_k)
        assert same_bits(part, whole[:tokens])


@both
@pytest.mark.parametrize("layout", ["gate_up", "up_gate", "interleaved", "gate_up_64", "up_gate_64"])
def test_layouts(layout: str, a4: bool, rng: torch.Generator) -> None:
    """All orders of rows, with scales row by row, in tiles and as MMA views, give the same bits."""
    shape = Shape("layouts", 3, 2, 208, 192, bias=True)
    layer = make(shape, rng, a4)
    x, routing = make_x(11, shape, torch.bfloat16, "cpu", rng), make_routing("uniform", 11, 3, 2, rng)
    expected, given = check(layer, x, *routing), [part.cuda() for part in routing]
    other = dataclasses.replace(
        layer,
        w13=arranged(layer.w13, layout),
        w13_scale=arranged(layer.w13_scale, layout),
        b13=None if layer.b13 is None else arranged(layer.b13, layout),
    )
    tiles = [nvfp4.swizzle_blockscale(scale.view(E4M3)) for scale in (other.w13_scale, other.w2_scale)]
    views = [
        nvfp4.convert_sf_to_mma_layout(tile.cuda(), rows, columns, 3)
        for tile, rows, columns in zip(tiles, (384, 208), (208, 192), strict=True)
    ]
    for scales in ((other.w13_scale, other.w2_scale), tiles, views):
        moved = on_cuda(dataclasses.replace(other, w13_scale=scales[0], w2_scale=scales[1]))
        made = moved.weights(layout=layout)
        assert made.b13 is moved.b13 and made.layout == layout and made.w13 is None
        assert same_bits(call(x.cuda(), made, *given), expected)


@pytest.mark.parametrize("weighs", [False, True], ids=["after", "router-weights-on-input"])
@pytest.mark.parametrize("parts", [1, 2])
def test_one_number_for_all(parts: int, weighs: bool, rng: torch.Generator) -> None:
    """One number for all experts rounds each row once, into room of its own. The bits are those of a tensor of that
    number, which rounds rows by place where GEMM2 writes."""
    layer = on_cuda(make(SMALL, rng, a4=True))
    x, routing = make_x(60, SMALL, torch.bfloat16, "cpu", rng).cuda(), make_routing("uniform", 60, 8, 8, rng)
    given = [part.cuda() for part in routing]
    w13_global = layer.w13_global if parts == 2 else layer.w13_global[:, 0].contiguous()
    each = dataclasses.replace(layer, w13_global=w13_global, roundings=(torch.full((8,), 70.0), torch.full((8,), 90.0)))
    options = {"apply_router_weight_on_input": weighs}
    expected = call(x, each.weights(), *given, **options)
    one = {"input_global_scale": 70.0, "a2_global_scale": torch.tensor([90.0])}
    assert expected.isfinite().all() and same_bits(call(x, each.weights(**one), *given, **options), expected)


def test_rows_are_read_before_they_are_written(rng: torch.Generator) -> None:
    """GEMM2 writes over rounded rows of x while GEMM1 still reads others. The bits are the same every time, and those
    of x that has room of its own."""
    shape = Shape("many", 16, 4, 2048, 512)
    layer = on_cuda(make(shape, rng, a4=True))
    layer = dataclasses.replace(layer, roundings=(torch.full((16,), 70.0), torch.full((16,), 90.0)))
    each, one = layer.weights(), layer.weights(input_global_scale=70.0, a2_global_scale=90.0)
    for tokens in (60, 700, 4000):
        x = make_x(tokens, shape, torch.bfloat16, "cpu", rng).cuda()
        for pattern in ("uniform", "one_expert"):
            given = [part.cuda() for part in make_routing(pattern, tokens, 16, 4, rng)]
            expected = call(x, one, *given)
            assert all(same_bits(call(x, each, *given), expected) for _ in range(8))


def test_rounding_bit_by_bit(rng: torch.Generator) -> None:
    """Weights pick one number each: x is rounded, squared, and rounded again."""
    size, tokens = 64, 200
    codes = torch.zeros((1, size, size // 2), dtype=torch.uint8)
    for i in range(size):
        codes[0, i, i // 2] = 2 << 4 * (i % 2)  # e2m1 of 1
    scale = torch.full((1, size, size // 16), 0x38, dtype=torch.uint8)  # e4m3 of 1
    roundings = 32.0, 0.5
    weights = oxmoe.ExpertWeights.nvfp4(
        codes.cuda(), codes.cuda(), scale.cuda(), scale.cuda(), 1 / 32, 2.0, input_global_scale=roundings[0],
        a2_global_scale=roundings[1], activation="relu2", scale_layout="plain",
    )  # fmt: skip
    x = (torch.randn((tokens, size), generator=rng) * 3).bfloat16()
    x[0, :16] = 0
    inner = x
    for number, function in zip(roundings, (lambda t: t.relu().square(), lambda t: t), strict=True):
        q, scales = reference.nvfp4(inner, number)
        numbers = reference.nvfp4_numbers(q[..., 0::2] | q[..., 1::2] << 4, scales)
        inner = function(numbers / number).bfloat16()
    ids = torch.zeros((tokens, 1), dtype=torch.int32)
    assert torch.equal(call(x.cuda(), weights, torch.ones((tokens, 1)).cuda(), ids.cuda()).cpu(), inner)


@both
def test_rows_in_expert_order(a4: bool, rng: torch.Generator) -> None:
    """Masked and contiguous rows have the layer's bits. Nothing is written beyond the counts, also with poisoned rows
    there."""
    shape, m = Shape("masked", 6, 1, 352, 208, bias=True), 150
    layer = make(shape, rng, a4)
    weights = on_cuda(layer).weights()
    counts = torch.tensor([0, m, 1, 33, 100, 7], dtype=torch.int32)
    x = torch.randn((6, m, 352), generator=rng).bfloat16()
    valid = torch.arange(m)[None] < counts[:, None]
    x[~valid] = math.nan
    owners = torch.arange(6)[:, None].expand(-1, m)[valid]
    ones = torch.ones((len(owners), 1))
    truth = check(layer, x[valid], ones, owners[:, None].int(), made=weights)
    for expected_m in (1, 30, 200):
        out = torch.full_like(x, 7.0).cuda()
        room = make_workspace(oxmoe.masked_workspace_bytes(weights, 6 * m), "cuda")
        oxmoe.moe_masked(x.cuda(), weights, counts.cuda(), expected_m=expected_m, out=out, workspace=room)
        assert same_bits(out[valid.cuda()], truth[: len(owners)])
        untouched = out[~valid.cuda()]
        assert bool((untouched == 7).all())
    starts = [0]
    for count in counts.tolist():
        starts.append(starts[-1] + -(-count // 128) * 128)
    rows = torch.full((starts[-1] + 5, 352), math.nan, dtype=torch.bfloat16)
    places = torch.cat([start + torch.arange(c) for start, c in zip(starts, counts.tolist(), strict=False)])
    rows[places] = x[valid]
    out = oxmoe.moe_contiguous(
        rows.cuda(), weights, counts.cuda(), alignment=128, out=torch.full_like(rows, 7.0).cuda()
    )
    assert same_bits(out[places.cuda()], truth[: len(owners)])


def rounded(x: Tensor, numbers: Tensor) -> Tensor:
    """Rounds rows [E, m, columns] to NVFP4's numbers under their experts' numbers."""
    parts = [reference.nvfp4(rows, number[None]) for rows, number in zip(x, numbers, strict=True)]
    return torch.stack(
        [reference.nvfp4_numbers(q[..., 0::2] | q[..., 1::2] << 4, scales).bfloat16() for q, scales in parts]
    )


@pytest.mark.parametrize("shared", [False, True], ids=["each", "shared"])
@pytest.mark.parametrize("activation", ["silu", "relu2"])
@pytest.mark.parametrize("size", [1024, 928])
def test_masked_is_its_parts(size: int, activation: str, shared: bool, rng: torch.Generator) -> None:
    """In every tile w2 picks one number each: bits are those of GEMM1 of rounded rows, rounded again on the CPU."""
    shape, m = Shape("parts", 5, 1, size, size).with_options(activation=activation), 230
    layer = make(shape, rng, a4=True)
    assert layer.roundings is not None
    w2 = torch.zeros((size, size // 2), dtype=torch.uint8)
    columns = torch.arange(size)
    w2[columns, columns // 2] = (2 << 4 * (columns % 2)).to(torch.uint8)  # e2m1 of 1
    layer.w2, layer.w2_global = w2.expand(5, -1, -1).contiguous(), torch.ones(5)
    layer.w2_scale = torch.full_like(layer.w2_scale, 0x38)  # e4m3 of 1
    if shared:
        layer.roundings = torch.full((5,), 80.0), torch.full((5,), 300.0)
    of_x, of_hidden = layer.roundings
    counts = torch.tensor([0, m, 1, 33, 130], dtype=torch.int32)
    valid = torch.arange(m)[None] < counts[:, None]
    x = torch.randn((5, m, size), generator=rng).bfloat16()
    x[1, 3, :32], x[1, 4] = 0, x[1, 4] * 1e4
    plain = on_cuda(dataclasses.replace(layer, roundings=None)).weights()
    hidden = oxmoe.moe_masked(rounded(x, of_x).cuda(), plain, counts.cuda()).cpu()
    expected = rounded(torch.where(valid[..., None], hidden, 0), of_hidden) + 0  # sums have no -0
    assert bool(expected[valid].isfinite().all()) and bool((expected[valid] != 0).any(0).all())
    x[~valid] = math.nan
    given = {"input_global_scale": 80.0, "a2_global_scale": 300.0} if shared else {}
    weights = on_cuda(layer).weights(**given)
    for expected_m in (1, 10, 14, 30, 40, 60, 90, 200):
        for _ in range(3):
            out = torch.full_like(x, math.nan).cuda()
            room = make_workspace(oxmoe.masked_workspace_bytes(weights, 5 * m), "cuda")
            oxmoe.moe_masked(x.cuda(), weights, counts.cuda(), expected_m=expected_m, out=out, workspace=room)
            assert same_bits(out.cpu()[valid], expected[valid]) and bool(out.cpu()[~valid].isnan().all())


def test_codes_as_tokens(rng: torch.Generator) -> None:
    """x in bf16 and the codes that fp4_quantize makes of it give the same bits, masked and routed."""
    shape, m = Shape("codes", 4, 1, 192, 96, bias=True), 19
    layer = make(shape, rng, a4=True)
    assert layer.roundings is not None
    x = torch.randn((4, m, 192), generator=rng).bfloat16()
    counts = torch.tensor([0, m, 3, 11], dtype=torch.int32)
    number = layer.roundings[0][:1]
    layer = dataclasses.replace(layer, roundings=(number.expand(4).contiguous(), layer.roundings[1]))
    codes, scales = nvfp4.fp4_quantize(x, number, is_sf_swizzled_layout=False)
    scales = scales.view(4, m, -1).view(E4M3)
    weights, valid = on_cuda(layer).weights(), (torch.arange(m)[None] < counts[:, None]).cuda()
    out = oxmoe.moe_masked(x.cuda(), weights, counts.cuda())
    by_codes = oxmoe.moe_masked(codes.cuda(), weights, counts.cuda(), x_scale=scales.cuda())
    assert same_bits(out[valid], by_codes[valid])
    ids, ones = (
        torch.randint(4, (m, 2), generator=rng, dtype=torch.int32).cuda(),
        torch.rand((m, 2), generator=rng).cuda(),
    )
    expected = call(x[1].cuda(), weights, ones, ids)
    assert same_bits(oxmoe.moe(codes[1].cuda(), weights, ones, ids, x_scale=scales[1].cuda()), expected)


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("activation", ["silu", "relu2"])
def test_cutedsl_masked(activation: str, quantised: bool, rng: torch.Generator) -> None:
    """SGLang's masked call; its weights are packed once."""
    shape = Shape("cutedsl", 5, 1, 256, 160).with_options(activation=activation)
    layer, m = make(shape, rng, a4=True), 33
    assert layer.roundings is not None
    layer.w13_global = layer.w13_global[:, :1].contiguous()
    x = torch.randn((5, m, 256), generator=rng).bfloat16()
    counts = torch.tensor([0, m, 1, 20, 7], dtype=torch.int32)
    given: tuple[Tensor, Tensor | None] = (x.cuda(), None)
    if quantised:
        given = nvfp4.scaled_fp4_grouped_quantize(x.cuda(), counts.cuda(), layer.roundings[0].cuda())
    tiles = [nvfp4.swizzle_blockscale(scale.view(E4M3)) for scale in (layer.w13_scale, layer.w2_scale)]
    operands = (
        layer.roundings[0], layer.w13, tiles[0], layer.w13_global[:, 0].contiguous(), layer.w2, layer.roundings[1],
        tiles[1], layer.w2_global, counts,
    )  # fmt: skip
    moved = [operand.cuda() for operand in operands]
    before = len(nvfp4.cache)
    out = nvfp4.flashinfer_cutedsl_moe_masked(given, *moved, activation=activation)
    again = nvfp4.flashinfer_cutedsl_moe_masked(given, *moved, activation=activation)
    assert len(nvfp4.cache) <= before + 1
    valid = torch.arange(m)[None] < counts[:, None]
    assert same_bits(out[valid.cuda()], again[valid.cuda()])
    owners = torch.arange(5)[:, None].expand(-1, m)[valid]
    expected = layer.expected(x[valid], owners)
    assert relative_norm(out[valid.cuda()].cpu(), expected) < 2e-2
    assert_close_ulp(out[valid.cuda()].cpu(), expected, A4_BAR)


@both
def test_cutedsl_wrapper(a4: bool, rng: torch.Generator) -> None:
    """flashinfer's class has the layer's bits, in a CUDA graph too."""
    layer = drawn(SHAPE, rng, a4)
    moe = wrapper(SHAPE, a4, device="cuda", use_cuda_graph=True, max_num_tokens=64)
    held = {name: None if tensor is None else tensor.cuda() for name, tensor in operands(layer).items()}
    for tokens in (1, 7, 40):
        x = make_x(tokens, SHAPE, torch.bfloat16, "cpu", rng)
        gates, ids = (part.cuda() for part in make_routing("uniform", tokens, SHAPE.experts, SHAPE.top_k, rng))
        codes, scales = (None if part is None else part.cuda() for part in quantised(layer, x))
        given = {"x": codes, "x_sf": scales, "token_selected_experts": ids, "token_final_scales": gates, **held}
        truth = call(x.cuda(), on_cuda(layer).weights(), gates, ids)
        assert same_bits(moe.run(**given), truth)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = moe.run(**given)
        out.fill_(math.nan)
        graph.replay()
        assert same_bits(out, truth)


@both
def test_graph(a4: bool, rng: torch.Generator) -> None:
    """A captured call is replayed with other tokens and routing."""
    layer = on_cuda(make(SMALL, rng, a4))
    weights, tokens = layer.weights(), 40
    x = make_x(tokens, SMALL, torch.bfloat16, "cpu", rng).cuda()
    gates, ids = (part.cuda() for part in make_routing("uniform", tokens, SMALL.experts, SMALL.top_k, rng))
    out = torch.full_like(x, math.nan)
    room = make_workspace(oxmoe.workspace_bytes(weights, tokens, SMALL.top_k), "cuda")
    oxmoe.moe(x, weights, gates, ids, out=out, workspace=room)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        oxmoe.moe(x, weights, gates, ids, out=out, workspace=room)
    for pattern in ("one", "uniform"):
        x.copy_(make_x(tokens, SMALL, torch.bfloat16, "cpu", rng))
        if pattern == "one":
            ids.fill_(3)
        else:
            ids.copy_(make_routing("uniform", tokens, SMALL.experts, SMALL.top_k, rng)[1])
        graph.replay()
        assert same_bits(out, call(x, weights, gates, ids))


@both
def test_special_numbers(a4: bool, rng: torch.Generator) -> None:
    """Scales are 0, NaN and negative; rows are zeros. NaN in x touches its row alone."""
    layer = make(SHAPES[0], rng, a4)
    layer.w13_scale[0] = 0
    layer.w2_scale[1, 5, 0] = 0x7F
    layer.w2_scale[2] |= 0x80
    x = make_x(12, SHAPES[0], torch.bfloat16, "cpu", rng)
    x[3] = 0
    experts = torch.arange(12) % 4
    ones, ids = torch.ones((12, 1)), experts[:, None].int()
    got = call(x.cuda(), on_cuda(layer).weights(), ones.cuda(), ids.cuda()).cpu()
    expected = layer.expected(x, experts)
    assert torch.equal(got.isnan(), expected.isnan()) and bool(got[experts == 1][:, 5].isnan().all())
    finite = ~expected.isnan()
    assert relative_norm(got[finite], expected[finite]) < (2e-2 if a4 else 6e-3)
    if not a4:
        x[6, 2] = math.nan
        poisoned = call(x.cuda(), on_cuda(layer).weights(), ones.cuda(), ids.cuda()).cpu()
        others = torch.arange(12) != 6
        assert bool(poisoned[6].isnan().all()) and same_bits(poisoned[others], got[others])


def test_what_is_refused(rng: torch.Generator) -> None:
    layer = on_cuda(make(SMALL, rng))
    with pytest.raises(NotImplementedError, match='dtype: "f16" for nvfp4 experts on cuda'):
        layer.weights(dtype="f16")
    with pytest.raises(ValueError, match="w2_global_scale: expected a float32"):
        dataclasses.replace(layer, w2_global=layer.w2_global.double()).weights()
    x = make_x(2, SMALL, torch.bfloat16, "cpu", rng).cuda()
    with pytest.raises(NotImplementedError, match="x_scale with nvfp4"):
        oxmoe.moe_masked(x.view(1, 2, -1).expand(8, 2, -1).contiguous(), layer.weights(),
                         torch.ones(8, dtype=torch.int32).cuda(), x_scale=torch.ones(8, 2, 22).cuda())  # fmt: skip
