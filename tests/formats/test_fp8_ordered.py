"""fp8_block experts with many rows each: GEMMs of rows that lie in the order of places.

GEMM1 gathers rows instead if tokens came as e4m3, or if there are fewer columns between the GEMMs. GEMM2 then has a
schedule of its own. All forms have the same bits.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import oxmoe
from cases import PATTERNS, Shape, make_routing
from fp8_cases import CALL_OPTIONS, Fp8, Fp8Tensor, call, check, check_graph, check_tensor, make_fp8, make_fp8_tensor
from oxmoe import quantize
from oxmoe.testing import same_bits

pytestmark = pytest.mark.gpu

ORDERED, WIDE = "grouped_gemm_fp8_ordered", "grouped_gemm_fp8_wide"
# Shapes of one K block, odd numbers of blocks in every place, and all that the epilogues do.
SHAPES = (
    Shape("one-block", 4, 2, 128, 1024),
    Shape("odd-blocks", 5, 3, 384, 1152, bias=True),
    Shape("i1408", 3, 2, 256, 1408),
    Shape("up-gate", 4, 2, 256, 1024).with_options(layout="up_gate", activation="gelu"),
    Shape("relu2", 4, 2, 640, 1024, bias=True).with_options(activation="relu2", gated=False),
)
MODELS = (Shape("mixtral", 8, 2, 4096, 1792), Shape("dsv3", 4, 2, 7168, 2048))


# Shapes whose GEMM1 gathers while GEMM2's rows lie in order: six K blocks, five and seven.
GATHERED = (
    Shape("six-blocks", 5, 3, 256, 768, bias=True),
    Shape("five-blocks", 4, 2, 384, 640).with_options(layout="up_gate", activation="gelu"),
    Shape("seven-blocks", 3, 2, 640, 896, bias=True).with_options(activation="relu2", gated=False),
)


def plan_of(shape: Shape, tokens: int) -> str:
    sizes = (shape.experts, shape.hidden, shape.intermediate, shape.top_k, tokens)
    names = ("num_experts", "hidden_size", "intermediate_size", "top_k", "num_tokens")
    return oxmoe.explain(
        **dict(zip(names, sizes, strict=True)), format="fp8_block", gated=shape.gated, arch="sm_90", routing="logits"
    )


def check_both(layer: Fp8, x: Tensor, *routing: Tensor, **options: Any) -> None:
    """Checks that results are near the reference, and have the bits of tokens that the caller quantised."""
    assert f"{ORDERED}_sm90_{'gated' if layer.shape.gated else 'plain'}" in plan_of(layer.shape, len(x))
    result = check(layer, x, *routing, **options)
    codes, scales = quantize.per_token_group_quant_fp8(x, 128)
    given = [part.to(x.device) for part in routing]
    made = layer.weights()
    assert same_bits(call(x, made, *given, **options), result)
    assert same_bits(oxmoe.moe(codes, made, *given, x_scale=scales, **options), result)


def tokens_of(shape: Shape, mean: int) -> int:
    return mean * shape.experts // shape.top_k + 1


@pytest.mark.parametrize("mean", [449, 512, 577, 900])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_layer(shape: Shape, mean: int, rng: torch.Generator) -> None:
    tokens = tokens_of(shape, mean)
    layer = make_fp8(shape, "cuda", rng)
    check_both(layer, layer.x(tokens, rng), *make_routing("uniform", tokens, shape.experts, shape.top_k, rng))


@pytest.mark.parametrize("pattern", PATTERNS)
def test_routing_patterns(pattern: str, rng: torch.Generator) -> None:
    shape = SHAPES[1]
    tokens = tokens_of(shape, 500)
    layer = make_fp8(shape, "cuda", rng)
    check_both(layer, layer.x(tokens, rng), *make_routing(pattern, tokens, shape.experts, shape.top_k, rng))


@pytest.mark.parametrize("options", CALL_OPTIONS, ids=lambda options: next(iter(options)))
def test_call_options(options: dict[str, Any], rng: torch.Generator) -> None:
    """With expert parallelism, half of the ids are another rank's, whose slots have no row."""
    shape = SHAPES[3]
    tokens, experts = tokens_of(shape, 500), shape.experts * options.get("ep_size", 1)
    layer = make_fp8(shape, "cuda", rng)
    check_both(layer, layer.x(tokens, rng), *make_routing("holes", tokens, experts, shape.top_k, rng), **options)


@pytest.mark.parametrize("shape", MODELS, ids=lambda shape: shape.name)
def test_models(shape: Shape, rng: torch.Generator) -> None:
    layer = make_fp8(shape, "cuda", rng)
    for mean in (460, 1024):
        tokens = tokens_of(shape, mean)
        check_both(layer, layer.x(tokens, rng), *make_routing("uniform", tokens, shape.experts, shape.top_k, rng))


def check_gathered(layer: Fp8 | Fp8Tensor, x: Tensor, *routing: Tensor, **options: Any) -> None:
    text = plan_of(layer.shape, len(x))
    assert f"{WIDE}_sm90_{'gated' if layer.shape.gated else 'plain'}" in text and f"{ORDERED}_sm90_plain" in text
    assert "of GEMM2: up to 192" in text
    if isinstance(layer, Fp8Tensor):
        result = check_tensor(layer, x, *routing, mode=layer.mode, **options)
    else:
        result = check(layer, x, *routing, **options)
    # In tiles of few tokens GEMM2 takes GEMM1's schedule: here each call has a part of the tokens.
    made, given = layer.weights(), [part.to(x.device) for part in routing]
    few = 90 * layer.shape.experts // layer.shape.top_k
    parts = [
        call(rows, made, *some, **options) for rows, *some in zip(*(t.split(few) for t in (x, *given)), strict=True)
    ]
    assert same_bits(torch.cat(parts), result)


@pytest.mark.parametrize("mean", [97, 130, 192, 400, 1000])
@pytest.mark.parametrize("shape", GATHERED, ids=lambda shape: shape.name)
def test_gathered(shape: Shape, mean: int, rng: torch.Generator) -> None:
    tokens = tokens_of(shape, mean)
    layer = make_fp8(shape, "cuda", rng)
    check_gathered(layer, layer.x(tokens, rng), *make_routing("uniform", tokens, shape.experts, shape.top_k, rng))


@pytest.mark.parametrize("pattern", PATTERNS)
def test_gathered_patterns(pattern: str, rng: torch.Generator) -> None:
    shape = GATHERED[0]
    tokens = tokens_of(shape, 300)
    layer = make_fp8(shape, "cuda", rng)
    check_gathered(layer, layer.x(tokens, rng), *make_routing(pattern, tokens, shape.experts, shape.top_k, rng))


@pytest.mark.parametrize("options", CALL_OPTIONS, ids=lambda options: next(iter(options)))
def test_gathered_call_options(options: dict[str, Any], rng: torch.Generator) -> None:
    shape = GATHERED[1]
    tokens, experts = tokens_of(shape, 250), shape.experts * options.get("ep_size", 1)
    layer = make_fp8(shape, "cuda", rng)
    check_gathered(layer, layer.x(tokens, rng), *make_routing("holes", tokens, experts, shape.top_k, rng), **options)


@pytest.mark.parametrize("of_rows", [False, True], ids=["matrices", "rows"])
@pytest.mark.parametrize("mode", ["token", "static"])
def test_gathered_tensor(mode: str, of_rows: bool, rng: torch.Generator) -> None:
    """GEMM1's output is quantised in a launch of its own."""
    shape = GATHERED[0]
    tokens = tokens_of(shape, 300)
    layer = make_fp8_tensor(shape, "cuda", rng, of_rows=of_rows, mode=mode)
    check_gathered(layer, layer.x(tokens, rng), *make_routing("uniform", tokens, shape.experts, shape.top_k, rng))


def test_gathered_graph(rng: torch.Generator) -> None:
    check_graph(make_fp8(GATHERED[0], "cuda", rng), 700, "holes", rng)


def test_a_row_does_not_depend_on_the_others(rng: torch.Generator) -> None:
    """A row has the same bits in tiles of few tokens, of many, and in order."""
    shape = SHAPES[1]
    layer, tokens = make_fp8(shape, "cuda", rng), 1400
    made, x = layer.weights(), layer.x(tokens, rng)
    weights, ids = (part.cuda() for part in make_routing("uniform", tokens, shape.experts, shape.top_k, rng))
    whole = call(x, made, weights, ids)
    for count in (1, 33, 100, 250, 333, 700):
        assert same_bits(call(x[:count], made, weights[:count], ids[:count]), whole[:count])


def test_not_finite_stays_in_its_row(rng: torch.Generator) -> None:
    shape = SHAPES[0]
    tokens = tokens_of(shape, 500)
    layer = make_fp8(shape, "cuda", rng)
    x, routing = layer.x(tokens, rng), make_routing("uniform", tokens, shape.experts, shape.top_k, rng)
    made, given = layer.weights(), [part.cuda() for part in routing]
    clean = call(x, made, *given)
    x[5, 7], x[6, 100] = math.nan, math.inf
    result = call(x, made, *given)
    assert bool(result[5:7].isnan().all())
    others = [i for i in range(tokens) if i not in (5, 6)]
    assert same_bits(result[others], clean[others])


def test_graph_takes_other_routing(rng: torch.Generator) -> None:
    check_graph(make_fp8(SHAPES[1], "cuda", rng), 800, "holes", rng)


@pytest.mark.parametrize("counts", [[1000, 0, 193, 64], [192, 191, 65, 1], [0] * 4, [577, 384, 449, 1000]], ids=str)
def test_masked(counts: list[int], rng: torch.Generator) -> None:
    """Rows that lie expert by expert have the bits of tiles of few tokens, whether oxmoe or the caller quantised
    them."""
    experts, m = len(counts), 1000
    shape = Shape("masked", experts, 1, 384, 640, bias=True)
    layer = make_fp8(shape, "cuda", rng)
    made, mask = layer.weights(), torch.tensor(counts, dtype=torch.int32)
    x = torch.randn((experts, m, shape.hidden), generator=rng).bfloat16().cuda()
    valid = (torch.arange(m)[None, :] < mask[:, None]).cuda()
    x[~valid] = math.nan
    codes, scales = quantize.per_token_group_quant_fp8(x, 128)
    few, many, given = (
        oxmoe.moe_masked(rows, made, mask.cuda(), expected_m=expected, out=torch.full_like(x, 7.0), **more)
        for rows, expected, more in ((x, 20, {}), (x, 1000, {}), (codes, 1000, {"x_scale": scales}))
    )
    assert bool((many[~valid] == 7.0).all()) and bool((given[~valid] == 7.0).all())
    assert same_bits(many, few) and same_bits(given, few)
    assert bool(many[valid].isfinite().all())
