"""fp8 layers of few tokens: with router logits they run in one launch on Hopper, with the bits of every other form."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import oxmoe
from cases import ACTIVATIONS, Shape, apart, tie_free_groups, tie_free_logits
from fp8_cases import MODELS, call, check, make_fp8
from oxmoe.testing import same_bits

# The first shape has blocks of 256 in both places, as one launch needs them. Others have tables of 128 and of 256
# experts, or take separate launches.
FEW = (
    Shape("blocks-of-256", 16, 8, 512, 256),
    Shape("biases", 12, 4, 256, 768, bias=True),
    Shape("many-experts", 256, 8, 256, 256, bias=True),
    Shape("widest", 3, 2, 768, 2048),
    Shape("odd-blocks", 8, 4, 384, 640, bias=True),
)


def logits_of(tokens: int, shape: Shape, device: str, rng: torch.Generator) -> Tensor:
    return tie_free_logits(tokens, shape.experts, rng, step=1 / 64).to(device)


@pytest.mark.parametrize("shape", FEW, ids=lambda s: s.name)
@pytest.mark.parametrize("tokens", [1, 5, 8])
def test_logits_and_ids_are_the_same_call(shape: Shape, tokens: int, device: str, rng: torch.Generator) -> None:
    layer = make_fp8(shape, device, rng)
    made, x, logits = layer.weights(), layer.x(tokens, rng), logits_of(tokens, shape, device, rng)
    if tokens == 5:
        check(layer, x, made=made, router_logits=logits, top_k=shape.top_k)
    inside = call(x, made, router_logits=logits, top_k=shape.top_k)
    assert same_bits(inside, apart(x, made, *oxmoe.topk(logits, shape.top_k)))


@pytest.mark.parametrize("groups", [0, 4])
@pytest.mark.parametrize("tokens", [1, 6])
def test_bias_and_groups(tokens: int, groups: int, device: str, rng: torch.Generator) -> None:
    """With DeepSeek-V3's router, the choice and the weights are those of topk."""
    for shape in (FEW[0], FEW[2], *(MODELS if device == "cuda" else ())):
        router = {
            "scoring_func": "sigmoid",
            "correction_bias": (torch.randperm(shape.experts, generator=rng) / shape.experts).to(device),
        }
        if groups:
            router |= {"num_expert_group": groups, "topk_group": groups // 2}
        layer, logits = make_fp8(shape, device, rng), tie_free_groups(tokens, shape.experts, rng).to(device)
        made, x = layer.weights(), layer.x(tokens, rng)
        topk_weights, topk_ids = oxmoe.topk(logits, shape.top_k, **router)
        if shape == FEW[0]:
            check(layer, x, topk_weights, topk_ids, made=made)
        inside = call(x, made, router_logits=logits, top_k=shape.top_k, **router)
        assert same_bits(inside, apart(x, made, topk_weights, topk_ids))


@pytest.mark.parametrize("group_score_of", ["bias", "score"])
def test_bias_and_logits_that_are_not_finite(group_score_of: str, device: str, rng: torch.Generator) -> None:
    """A NaN or an infinity of the bias changes the choice alone, and logits of -inf have the weight 0."""
    special = torch.tensor([math.nan, -math.nan, math.inf, -math.inf])
    for shape in (FEW[0], FEW[2], *(MODELS if device == "cuda" else ())):
        layer = make_fp8(shape, device, rng)
        made = layer.weights()
        for _ in range(10):
            logits = tie_free_groups(6, shape.experts, rng)
            logits[torch.rand(logits.shape, generator=rng) < 0.5] = -math.inf
            router = {"scoring_func": "sigmoid", "num_expert_group": 4, "topk_group": 2}
            if group_score_of == "bias":
                bias = torch.randperm(shape.experts, generator=rng) / shape.experts
                places = torch.randint(0, shape.experts, (4,), generator=rng)
                router["correction_bias"] = bias.index_copy(0, places, special).to(device)
            logits, x = logits.to(device), layer.x(6, rng)
            chosen = oxmoe.topk(logits, shape.top_k, **router)
            inside = call(x, made, router_logits=logits, top_k=shape.top_k, **router)
            assert bool(inside.isfinite().all())
            assert same_bits(inside, apart(x, made, *chosen))


@pytest.mark.parametrize(
    "name", [name for name, options in ACTIVATIONS.items() if options.get("layout") != "interleaved"]
)
def test_activations(name: str, device: str, rng: torch.Generator) -> None:
    shape = FEW[1].with_options(**ACTIVATIONS[name])
    layer = make_fp8(shape, device, rng)
    x, logits = layer.x(3, rng), logits_of(3, shape, device, rng)
    check(layer, x, router_logits=logits, top_k=shape.top_k)
    made = layer.weights()
    assert same_bits(call(x, made, router_logits=logits, top_k=4), apart(x, made, *oxmoe.topk(logits, 4)))


@pytest.mark.parametrize(
    "options",
    [
        {"no_combine": True},
        {"no_combine": True, "keep_router_weight": True},
        {"routed_scaling_factor": 2.5, "scoring_func": "sigmoid"},
        {"renormalize": False},
        {"num_token_non_padded": 3},
    ],
    ids=lambda options: "-".join(options),
)
def test_options(options: dict[str, Any], device: str, rng: torch.Generator) -> None:
    shape, tokens = FEW[2], 5
    layer = make_fp8(shape, device, rng)
    if "num_token_non_padded" in options:
        options = {"num_token_non_padded": torch.tensor(3, dtype=torch.int32, device=device)}
    check(layer, layer.x(tokens, rng), router_logits=logits_of(tokens, shape, device, rng), top_k=8, **options)


def test_a_row_does_not_depend_on_the_others(device: str, rng: torch.Generator) -> None:
    shape = FEW[0]
    layer = make_fp8(shape, device, rng)
    made, x, logits = layer.weights(), layer.x(200, rng), logits_of(200, shape, device, rng)
    whole = call(x, made, router_logits=logits, top_k=8)
    for count in (1, 3, 8, 9, 40):
        assert same_bits(call(x[:count], made, router_logits=logits[:count], top_k=8), whole[:count])


def test_not_finite_stays_in_its_token(device: str, rng: torch.Generator) -> None:
    shape = FEW[1]
    layer = make_fp8(shape, device, rng)
    made, x, logits = layer.weights(), layer.x(6, rng), logits_of(6, shape, device, rng)
    clean = call(x, made, router_logits=logits, top_k=4)
    x[2, 7], x[4, 130] = math.nan, math.inf
    dirty = call(x, made, router_logits=logits, top_k=4)
    assert bool(dirty[[2, 4]].isnan().all()) and same_bits(dirty[[0, 1, 3, 5]], clean[[0, 1, 3, 5]])


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 4, 8])
@pytest.mark.parametrize("shape", MODELS, ids=lambda s: s.name)
def test_models(shape: Shape, tokens: int, rng: torch.Generator) -> None:
    layer = make_fp8(shape, "cuda", rng)
    made, x, logits = layer.weights(), layer.x(tokens, rng), logits_of(tokens, shape, "cuda", rng)
    inside = call(x, made, router_logits=logits, top_k=8)
    assert same_bits(inside, apart(x, made, *oxmoe.topk(logits, 8)))


@pytest.mark.gpu
def test_graph_takes_other_tokens(rng: torch.Generator) -> None:
    """Launches follow each other on one workspace, with other tokens and routing."""
    shape = FEW[2]
    layer = make_fp8(shape, "cuda", rng)
    made, x, logits = layer.weights(), layer.x(4, rng), logits_of(4, shape, "cuda", rng)
    out = torch.empty_like(x)
    call(x, made, router_logits=logits, top_k=8)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            oxmoe.moe(x, made, router_logits=logits, top_k=8, out=out)
    for _ in range(5):
        x.copy_(layer.x(4, rng))
        logits.copy_(logits_of(4, shape, "cuda", rng))
        out.fill_(math.nan)
        graph.replay()
        assert same_bits(out, apart(x, made, *oxmoe.topk(logits, 8)))
