"""Layers of few tokens: one launch from router logits, one from given ids, and separate launches give the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import oxmoe
from cases import PATTERNS, Shape, apart, make_routing, make_workspace, make_x, tie_free_logits
from format_cases import EXPERTS, IN_ONE_LAUNCH, dtype_of
from oxmoe.testing import same_bits

# K of a block, of part of a stage, of a whole one and more; rows that end inside a block; 384 experts as Kimi K2 has.
SHAPES = (
    Shape("h512-i256", 16, 8, 512, 256),
    Shape("h256-i768", 12, 4, 256, 768, bias=True),
    Shape("h352-i224", 9, 3, 352, 224, bias=True),
    Shape("e129", 129, 6, 128, 96),
    Shape("e384", 384, 8, 256, 128),
    Shape("kimi-k2-width", 8, 4, 7168, 256),
    Shape("i704", 6, 2, 128, 704),
    Shape("i1408", 4, 2, 256, 1408, bias=True),
    Shape("plain", 8, 4, 256, 96).with_options(activation="relu2", gated=False),
    Shape("top-32", 40, 32, 256, 64),
    Shape("one-expert", 1, 1, 64, 32),
)


def takes(kind: str, shape: Shape) -> bool:
    sizes = shape.hidden, shape.intermediate
    if kind == "fp8_block":
        return all(size % 128 == 0 for size in sizes) and shape.gated
    return kind not in ("mxfp8", "nvfp4", "int4", "int4-zeros") or all(size % 32 == 0 for size in sizes)


ROWS = [
    pytest.param(kind, shape, id=f"{kind}-{shape.name}")
    for shape in SHAPES
    for kind in IN_ONE_LAUNCH
    if takes(kind, shape)
]
# CPUs have one form of a layer, which does not depend on the number of tokens.
TOKENS = {"cpu": (1, 3), "cuda": (1, 2, 4, 5, 8)}
# Options of a call with given ids. With apply_router_weight_on_input the layer has separate launches.
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"routed_scaling_factor": 2.5},
    {"apply_router_weight_on_input": True},
    {"no_combine": True},
    {"no_combine": True, "keep_router_weight": True},
    {"no_combine": True, "apply_router_weight_on_input": True},
)
SMALL = [pytest.param(kind, SHAPES[0], id=kind) for kind in IN_ONE_LAUNCH]


def rows_of(kind: str, shape: Shape, tokens: int, device: str, rng: torch.Generator) -> Tensor:
    return make_x(tokens, shape, dtype_of(kind), device, rng)


def poisoned(x: Tensor, weights: oxmoe.ExpertWeights, **routing: Any) -> Tensor:
    out = torch.full_like(x, torch.nan)
    assert oxmoe.moe(x, weights, out=out, **routing).data_ptr() == out.data_ptr()
    return out


def given(topk_weights: Tensor, topk_ids: Tensor, **options: Any) -> dict[str, Any]:
    return {"topk_weights": topk_weights, "topk_ids": topk_ids, **options}


@pytest.mark.parametrize("kind, shape", ROWS)
def test_logits_ids_and_separate_launches_agree(kind: str, shape: Shape, device: str, rng: torch.Generator) -> None:
    check_agreement(kind, shape, device, rng)


# fp8's layer in one launch has room for two stages of weights in the first two, and for too few in the others.
LONG = ((7168, 2048), (8192, 1536), (7680, 2048), (8192, 1792), (8192, 2048))


@pytest.mark.gpu
@pytest.mark.parametrize("hidden, intermediate", LONG)
def test_longest_fp8_layers(hidden: int, intermediate: int, rng: torch.Generator) -> None:
    check_agreement("fp8_block", Shape("long", 4, 3, hidden, intermediate), "cuda", rng)


def check_agreement(kind: str, shape: Shape, device: str, rng: torch.Generator) -> None:
    weights = EXPERTS[kind](shape, device, rng)
    bias = (torch.randperm(shape.experts, generator=rng) / shape.experts).to(device)
    for tokens in TOKENS[device]:
        x, logits = rows_of(kind, shape, tokens, device, rng), tie_free_logits(tokens, shape.experts, rng).to(device)
        for router in ({}, {"scoring_func": "sigmoid", "correction_bias": bias}):
            topk_weights, topk_ids = oxmoe.topk(logits, shape.top_k, **router)
            separate = apart(x, weights, topk_weights, topk_ids)
            assert bool(separate.isfinite().all()) and bool((separate != 0).any(1).all())
            assert same_bits(poisoned(x, weights, router_logits=logits, top_k=shape.top_k, **router), separate)
            for ids in (topk_ids, topk_ids.long()):
                assert same_bits(poisoned(x, weights, **given(topk_weights, ids)), separate)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("kind, shape", SMALL)
def test_any_ids(kind: str, shape: Shape, pattern: str, device: str, rng: torch.Generator) -> None:
    """An expert may be named several times for a token, and a slot may have no expert. Weights may have any sign."""
    weights, top_k = EXPERTS[kind](shape, device, rng), shape.top_k
    for tokens in TOKENS[device]:
        for names in (top_k, 1, 5):
            x = rows_of(kind, shape, tokens, device, rng)
            topk_weights, topk_ids = (t.to(device) for t in make_routing(pattern, tokens, shape.experts, names, rng))
            topk_weights[:, ::3] *= -1
            for options in OPTIONS:
                one = oxmoe.moe(x, weights, topk_weights, topk_ids, **options)
                assert same_bits(one, apart(x, weights, topk_weights, topk_ids, **options))


@pytest.mark.parametrize("kind, shape", SMALL)
def test_ranks(kind: str, shape: Shape, device: str, rng: torch.Generator) -> None:
    """Ids of other ranks' experts belong to nobody here, whatever their weights are."""
    weights, ranks = EXPERTS[kind](shape, device, rng), 3
    for tokens in (1, 2, 8):
        x = rows_of(kind, shape, tokens, device, rng)
        topk_weights, topk_ids = make_routing("duplicates", tokens, ranks * shape.experts, shape.top_k, rng)
        for rank in range(ranks):
            here = topk_ids // shape.experts == rank
            routing = given(topk_weights.masked_fill(~here, torch.nan).to(device), topk_ids.long().to(device))
            one = poisoned(x, weights, **routing, ep_size=ranks, ep_rank=rank)
            assert same_bits(one, apart(x, weights, **routing, ep_size=ranks, ep_rank=rank))
            local = torch.where(here, topk_ids - rank * shape.experts, -1).to(device)
            assert same_bits(one, apart(x, weights, topk_weights.to(device), local))


@pytest.mark.parametrize("kind, shape", SMALL)
def test_options_of_logits(kind: str, shape: Shape, device: str, rng: torch.Generator) -> None:
    """Some experts are on other ranks, and some tokens are padding, whose numbers nobody reads."""
    weights, ranks = EXPERTS[kind](shape, device, rng), 2
    for tokens in TOKENS[device]:
        whole = rows_of(kind, shape, tokens, device, rng)
        logits = tie_free_logits(tokens, ranks * shape.experts, rng).to(device)
        for valid in {None, 0, 1, tokens}:
            x, padding = whole.clone(), {}
            if valid is not None:
                x[valid:] = torch.nan
                padding = {"num_token_non_padded": torch.tensor(valid, dtype=torch.int32).to(device)}
            chosen = oxmoe.topk(logits, shape.top_k, **padding)
            for options in OPTIONS:
                used = False
                for rank in range(ranks):
                    own = {"ep_size": ranks, "ep_rank": rank, **options}
                    separate = apart(x, weights, *chosen, **own)
                    assert bool(separate.isfinite().all())
                    used |= bool((separate != 0).any())
                    one = oxmoe.moe(x, weights, router_logits=logits, top_k=shape.top_k, **padding, **own)
                    assert same_bits(one, separate)
                    assert same_bits(oxmoe.moe(x, weights, *chosen, **own), separate)
                assert used == (valid != 0)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("kind, shape", SMALL)
def test_in_place(kind: str, shape: Shape, pattern: str, device: str, rng: torch.Generator) -> None:
    """`out` may be x: a row of x is read before its row of the output is written, also if other CTAs write it."""
    weights = EXPERTS[kind](shape, device, rng)
    for tokens in TOKENS[device]:
        x = rows_of(kind, shape, tokens, device, rng)
        routing = given(*(t.to(device) for t in make_routing(pattern, tokens, shape.experts, shape.top_k, rng)))
        logits = tie_free_logits(tokens, shape.experts, rng).to(device)
        for options in (routing, {"router_logits": logits, "top_k": shape.top_k}):
            expected = oxmoe.moe(x, weights, **options)
            for _ in range(20 if device == "cuda" else 1):
                own = x.clone()
                assert oxmoe.moe(own, weights, **options, out=own) is own
                assert same_bits(own, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("kind, shape", SMALL)
def test_replays_of_other_ids(kind: str, shape: Shape, rng: torch.Generator) -> None:
    """Layers on one workspace follow each other in a graph; x, ids and weights change before each replay."""
    tokens = 2
    layers = [EXPERTS[kind](shape, "cuda", rng) for _ in range(3)]
    xs = [rows_of(kind, shape, tokens, "cuda", rng) for _ in range(7)]
    patterns = [PATTERNS[i % len(PATTERNS)] for i in range(3 * len(PATTERNS))]
    routings = [make_routing(pattern, tokens, shape.experts, shape.top_k, rng) for pattern in patterns]
    x, topk_weights, topk_ids = xs[0].clone(), routings[0][0].cuda(), routings[0][1].cuda()
    workspace = make_workspace(oxmoe.workspace_bytes(layers[0], tokens, shape.top_k), "cuda")
    outs = [torch.empty_like(x) for _ in layers]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weights, out in zip(layers, outs, strict=True):
            oxmoe.moe(x, weights, topk_weights, topk_ids, out=out, workspace=workspace)
    for replay in range(60):
        x.copy_(xs[replay % len(xs)])
        for to, new in zip((topk_weights, topk_ids), routings[replay % len(routings)], strict=True):
            to.copy_(new)
        for out in outs:
            out.fill_(torch.nan)
        graph.replay()
        for weights, out in zip(layers, outs, strict=True):
            assert same_bits(out, apart(x, weights, topk_weights, topk_ids))


@pytest.mark.gpu
@pytest.mark.parametrize("kind, shape", SMALL)
def test_one_launch_for_the_options_that_it_knows(kind: str, shape: Shape, rng: torch.Generator) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("only Hopper has such kernels")
    weights, x = EXPERTS[kind](shape, "cuda", rng), rows_of(kind, shape, 1, "cuda", rng)
    topk_weights, topk_ids = (t.cuda() for t in make_routing("duplicates", 1, shape.experts, shape.top_k, rng))
    logits = tie_free_logits(1, shape.experts, rng).cuda()
    padding = {"num_token_non_padded": torch.ones((), dtype=torch.int32, device="cuda")}
    for routing in (given(topk_weights, topk_ids), {"router_logits": logits, "top_k": shape.top_k, **padding}):
        for options in OPTIONS:
            before = oxmoe.stats()["launches"]
            oxmoe.moe(x, weights, **routing, **options)
            now = oxmoe.stats()["launches"]
            made = {name: n - before.get(name, 0) for name, n in now.items() if n != before.get(name, 0)}
            together = sum(made.values()) == 1 and next(iter(made)).startswith("routed_layer")
            assert together != bool(options.get("apply_router_weight_on_input"))
