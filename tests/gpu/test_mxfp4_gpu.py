"""MXFP4 experts on GPUs: every tile of both kernels, layers of models, numbers at both ends of the range."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import oxmoe
from cases import ACTIVATIONS, GPT_OSS, MODELS, PATTERNS, Layer, Shape, make_routing, make_x, tie_free_logits
from mxfp4_cases import Blocks, call, check, make_blocks
from oxmoe import reference
from oxmoe.testing import assert_close_ulp, relative_norm, same_bits

gpu = pytest.mark.gpu

# Shapes with K of one block and of many, of half a block at the end, of whole and of partial stages; rows fill no row
# block.
ROWS_AND_COLUMNS = (
    Shape("h32-i32", 4, 2, 32, 32),
    Shape("h96-i288", 4, 2, 96, 288, bias=True, options=tuple(GPT_OSS.items())),
    Shape("h160-i704", 4, 2, 160, 704).with_options(limit=0.25, clamp="after"),
    Shape("h704-i1408", 4, 2, 704, 1408),
    Shape("h1408-i96", 4, 2, 1408, 96, bias=True).with_options(layout="up_gate"),
    Shape("h2880-i64", 4, 2, 2880, 64, bias=True, options=tuple(GPT_OSS.items())),
    Shape("h64-i2880", 4, 2, 64, 2880).with_options(layout="interleaved"),
    Shape("h352-i320", 4, 2, 352, 320, bias=True).with_options(activation="relu2"),
    Shape("h512-i768", 4, 2, 512, 768, bias=True),  # K of whole stages of four blocks
    Shape("h224-i96", 4, 2, 224, 96).with_options(activation="silu", gated=False),
    Shape("h256-i320", 4, 2, 256, 320).with_options(activation="relu2"),
)
# Tokens of a layer of 4 experts with top-2 -> the tile (tokens, consumers) of both GEMMs. FOURS has the tiles that
# differ if K is whole stages.
TILES = {8: (16, 1), 24: (32, 3), 90: (64, 3), 130: (80, 3), 170: (128, 3), 300: (192, 3), 1000: (192, 3)}
FOURS = {24: (48, 4), 90: (64, 4)}
# GEMM1 of these shapes has so many work units that narrow tiles take 128 rows.
MANY_UNITS = (
    Shape("gated", 64, 4, 96, 1696, bias=True),
    Shape("plain", 64, 4, 352, 3296, bias=True).with_options(activation="relu2"),
)


def kernels(shape: Shape, tokens: int, arch: str | None = None) -> list[tuple[str, str, int, int]]:
    """Returns (kernel, form, tokens, consumers) of the GEMMs' launch on Hopper, from the plan's text."""
    sizes = shape.experts, shape.top_k, shape.hidden, shape.intermediate, tokens
    text = oxmoe.explain(*sizes, format="mxfp4", gated=shape.gated, arch=arch, routing="logits")
    found = re.findall(r"(grouped_gemm_mxfp4_\w+?)_(gated|plain)_t(\d+)_c(\d+)_", text)
    return [(name, form, int(tile), int(consumers)) for name, form, tile, consumers in found]


def planned(shape: Shape, tokens: int) -> list[tuple[str, str, int, int]]:
    """Returns the kernels that the cases here want, in the form of `kernels`."""
    fours = shape.hidden % 256 == 0
    tile = (16, 2) if shape in MANY_UNITS else (FOURS if fours and tokens in FOURS else TILES)[tokens]
    return [("grouped_gemm_mxfp4_sm90", "gated" if shape.gated else "plain", *tile)]


def on_hopper() -> bool:
    return torch.cuda.get_device_capability() == (9, 0)


def test_cases_reach_every_tile() -> None:
    reached = set()
    cases = [(shape, tokens) for shape in ROWS_AND_COLUMNS for tokens in TILES] + [(shape, 64) for shape in MANY_UNITS]
    for shape, tokens in cases:
        assert kernels(shape, tokens, "sm_90") == planned(shape, tokens), (shape.name, tokens)
        reached.update(kernels(shape, tokens, "sm_90"))
    tiles = {(16, 1), (16, 2), *TILES.values(), *FOURS.values()}
    assert reached == {("grouped_gemm_mxfp4_sm90", form, *tile) for form in ("gated", "plain") for tile in tiles}


@gpu
@pytest.mark.parametrize("tokens", TILES)
@pytest.mark.parametrize("shape", ROWS_AND_COLUMNS, ids=lambda shape: shape.name)
def test_tiles(shape: Shape, tokens: int, rng: torch.Generator) -> None:
    """The pattern "skewed" has tiles of every width."""
    if on_hopper():
        assert kernels(shape, tokens) == planned(shape, tokens)
    blocks = make_blocks(shape, "bf16", "cuda", rng)
    weights = blocks.weights()
    for pattern in ("uniform", "skewed", "duplicates"):
        routing = make_routing(pattern, tokens, shape.experts, shape.top_k, rng)
        check(blocks, blocks.x(tokens, rng), *routing, made=weights)


@gpu
@pytest.mark.parametrize("shape", MANY_UNITS, ids=lambda shape: shape.name)
def test_many_units_of_few_tokens(shape: Shape, rng: torch.Generator) -> None:
    if on_hopper():
        assert kernels(shape, 64) == planned(shape, 64)
    blocks = make_blocks(shape, "bf16", "cuda", rng)
    weights = blocks.weights()
    for tokens, pattern in ((64, "uniform"), (100, "holes"), (64, "uneven")):
        routing = make_routing(pattern, tokens, shape.experts, shape.top_k, rng)
        check(blocks, blocks.x(tokens, rng), *routing, made=weights)


@gpu
@pytest.mark.parametrize("columns", [(352, 96), (512, 256)], ids=str)
@pytest.mark.parametrize(
    "tile,mean,step",
    [(16, 5, 8), (32, 12, 8), (48, 22, 16), (64, 45, 8), (80, 60, 8), (128, 80, 8), (192, 150, 16)],
)
def test_every_width_of_a_tile(tile: int, mean: int, step: int, columns: tuple[int, int], rng: torch.Generator) -> None:
    """An expert has tokens on both sides of each width that a tile is multiplied at; two others have the rest."""
    if tile == (32 if columns[0] % 256 == 0 else 48):
        return  # this tile belongs to the other columns
    shape = Shape("width", 3, 1, *columns, bias=True)
    blocks = make_blocks(shape, "bf16", "cuda", rng)
    weights = blocks.weights()
    for width in range(step, tile + 1, step):
        for count in (width - 1, width, width + 1):
            tokens = count + max(1, 3 * mean - count)
            assert not on_hopper() or {chosen for *_, chosen, _ in kernels(shape, tokens)} == {tile}
            ids = torch.ones(tokens, dtype=torch.int32)
            ids[torch.randperm(tokens, generator=rng)[:count]] = 0
            ids[ids > 0] += torch.randint(2, (tokens - count,), generator=rng, dtype=torch.int32)
            ids = ids[:, None]
            gates = torch.rand((tokens, 1), generator=rng) + 0.05
            check(blocks, blocks.x(tokens, rng), gates, ids, made=weights)


def narrow_check(shape: Shape, hidden: int, tokens: int, pattern: str, rng: torch.Generator, **options: Any) -> None:
    """Compares weights padded to shape.hidden, with NaN behind `hidden`, with the reference on the used part."""
    blocks = make_blocks(shape, "bf16", "cuda", rng)
    blocks.w13_scale[:, :, -(-hidden // 32) :] = 255
    blocks.w2_scale[:, hidden:] = 255
    plain = blocks.plain
    b2 = blocks.b2
    if b2 is not None:
        b2[:, hidden:] = torch.nan
        b2 = b2[:, :hidden].contiguous()
    layer = Layer(shape, plain.w13[:, :, :hidden].contiguous(), plain.w2[:, :hidden].contiguous(), plain.b13, b2)
    x = torch.randn((tokens, hidden), generator=rng).bfloat16().cuda()
    routing = tuple(t.cuda() for t in make_routing(pattern, tokens, shape.experts, shape.top_k, rng))
    result = call(x, blocks.weights(hidden_size=hidden), *routing, **options)
    expected = reference.moe(x, layer.w13, layer.w2, *routing, **layer.reference_options, **options)
    assert_close_ulp(result, expected)


@gpu
@pytest.mark.parametrize("tokens", [10, 60, 150, 1000])
@pytest.mark.parametrize("hidden", [2880, 2888])
def test_padded_hidden(hidden: int, tokens: int, rng: torch.Generator) -> None:
    shape = Shape("padded", 4, 2, 2944, 96, bias=True, options=tuple(GPT_OSS.items()))
    narrow_check(shape, hidden, tokens, "uniform", rng)


@gpu
@pytest.mark.parametrize("tokens", [10, 60, 150, 1000])
@pytest.mark.parametrize("name", ["swiglu", "swiglu-up-gate", "gpt-oss", "limit-after", "relu2", "gelu-plain"])
@pytest.mark.parametrize("hidden", [700, 701])
def test_portable_kernel(hidden: int, name: str, tokens: int, rng: torch.Generator) -> None:
    """A hidden_size that is no multiple of 8 has no other kernel on any GPU (tests/launch/test_launch_packing.py)."""
    shape = Shape(name, 4, 2, 704, 352, bias=True).with_options(**ACTIVATIONS[name])
    narrow_check(shape, hidden, tokens, "skewed", rng)
    narrow_check(shape, hidden, tokens, "holes", rng, no_combine=True, apply_router_weight_on_input=True)


@gpu
@pytest.mark.parametrize("span", [0, 4], ids=["one scale an expert", "scales 2^124 apart"])
def test_every_number_is_multiplied_exactly(span: int, rng: torch.Generator) -> None:
    """GEMM1 gives rows of the identity, so GEMM2 writes its weights out: every scale byte but NaN's with every code.

    `span`: the difference of the scale bytes of a row and of the row before. Numbers beyond bf16 become infinite.
    """
    ones = torch.zeros((32, 32), dtype=torch.uint8)
    ones[torch.arange(32), torch.arange(32)] = 2
    identity = (ones[:, 0::2] | ones[:, 1::2] << 4).expand(255, 32, 16).contiguous()
    codes = torch.arange(512).remainder(256).to(torch.uint8).view(1, 32, 16).expand(255, -1, -1).contiguous()
    scales = (torch.arange(255)[:, None] - span * torch.arange(32)).clamp(min=0).to(torch.uint8).view(255, 32, 1)
    operands = identity, codes, torch.full((255, 32, 1), 127, dtype=torch.uint8), scales
    x, ids = torch.eye(32).bfloat16().repeat(255, 1).cuda(), torch.arange(255).repeat_interleave(32)[:, None].int()
    # Numbers too large for bf16 are infinite here; reference.mxfp4_weights makes them the largest finite one.
    units = reference.mxfp4_weights(codes, torch.full_like(scales, 127), torch.float64)
    expected = (units * torch.exp2(scales.double() - 127)).bfloat16().mT.reshape(255 * 32, 32)
    for hidden in (32, 28, 27):
        weights = oxmoe.ExpertWeights.mxfp4(*(t.cuda() for t in operands), activation="relu2", hidden_size=hidden)
        # With a narrower input, fewer columns of the identity reach the second GEMM.
        used = [row for row in range(255 * 32) if row % 32 < hidden]
        # All rows take wgmma, and a few of each expert take mma.sync.
        for rows in (torch.tensor(used), torch.tensor(used[1::5])):
            given = x[rows.cuda(), :hidden].contiguous()
            result = call(given, weights, torch.ones((len(rows), 1)), ids[rows])
            # NOTE: a sum that starts at 0 is never -0.
            assert same_bits(result.cpu() + 0.0, expected[rows, :hidden] + 0.0)


MODEL_LAYERS = (
    MODELS["gpt-oss-20b"],
    Shape("deepseek-v4-like", 16, 6, 4096, 2048).with_options(limit=10.0),
)


@pytest.fixture(params=MODEL_LAYERS, ids=lambda shape: shape.name)
def model(request: pytest.FixtureRequest, rng: torch.Generator) -> Blocks:
    return make_blocks(request.param, "bf16", "cuda", rng)


@gpu
def test_models(model: Blocks, rng: torch.Generator) -> None:
    weights, shape = model.weights(), model.shape
    for tokens in (1, 4, 16, 64, 300, 1024):
        routing = make_routing("uniform", tokens, shape.experts, shape.top_k, rng)
        check(model, model.x(tokens, rng), *routing, made=weights)


@gpu
def test_models_with_every_routing(model: Blocks, rng: torch.Generator) -> None:
    weights, shape = model.weights(), model.shape
    for tokens, pattern in zip((2, 8, 31, 90, 150, 250, 600), PATTERNS, strict=True):
        routing = make_routing(pattern, tokens, shape.experts, shape.top_k, rng)
        check(model, model.x(tokens, rng), *routing, made=weights)
        x, logits = model.x(tokens, rng), tie_free_logits(tokens, shape.experts, rng).cuda()
        given = call(x, weights, *oxmoe.topk(logits, shape.top_k))
        assert same_bits(call(x, weights, router_logits=logits, top_k=shape.top_k), given)


@gpu
def test_no_further_from_fp32_than_cublas(model: Blocks, rng: torch.Generator) -> None:
    """The other checks take the tensor cores' sums as given; this one compares oxmoe with sums rounded to nearest."""
    shape, plain = model.shape, model.plain
    # An expert has about 512 rows: with few rows cuBLAS splits K, and the parts of a sum are truncated less than the
    # whole.
    tokens = 512 * shape.experts // shape.top_k
    x = make_x(tokens, shape, torch.bfloat16, "cuda", rng)
    routing = [part.cuda() for part in make_routing("uniform", tokens, shape.experts, shape.top_k, rng)]
    ours = call(x, model.weights(), *routing)
    theirs, exact = (
        reference.moe(x, plain.w13, plain.w2, *routing, **plain.reference_options, fp32_sums=fp32)
        for fp32 in (False, True)
    )
    assert relative_norm(ours, exact) <= 1.1 * relative_norm(theirs, exact)


@gpu
@pytest.mark.parametrize("tokens", [150, 400, 1000])
def test_last_units_by_consumers(tokens: int, rng: torch.Generator) -> None:
    """There are more row blocks than an H200 has CTAs: the last go out consumer by consumer, and some have no rows."""
    shape = Shape("h4672-i2336", 6, 1, 4672, 2336, bias=True)
    blocks = make_blocks(shape, "bf16", "cuda", rng)
    weights = blocks.weights()
    for pattern in ("uniform", "uneven"):
        routing = make_routing(pattern, tokens, shape.experts, shape.top_k, rng)
        check(blocks, blocks.x(tokens, rng), *routing, made=weights)
