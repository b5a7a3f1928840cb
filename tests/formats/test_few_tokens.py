"""Layers of few tokens: one launch from router logits, one from given ids, and separate launches give the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import oxmoe
from cases import PATTERNS, Shape, apart, make_layer, make_routing, make_workspace, make_x, tie_free_logits
from fp8_cases import make_fp8
from int4_cases import make as make_int4
from mxfp4_cases import make_blocks
from nvfp4_cases import Nvfp4, on_cuda
from nvfp4_cases import make as make_nvfp4
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


def nvfp4_on(device: str, layer: Nvfp4) -> Nvfp4:
    return layer if device == "cpu" else on_cuda(layer)


KINDS: dict[str, Callable[[Shape, str, torch.Generator], oxmoe.ExpertWeights]] = {
    "bf16": lambda shape, device, rng: make_layer(shape, torch.bfloat16, device, rng).weights(),
    "f16": lambda shape, device, rng: make_layer(shape, torch.float16, device, rng).weights(),
    "fp8_block": lambda shape, device, rng: make_fp8(shape, device, rng).weights(),
    "mxfp4": lambda shape, device, rng: make_blocks(shape, "bf16", device, rng).weights(),
    "nvfp4": lambda shape, device, rng: nvfp4_on(device, make_nvfp4(shape, rng)).weights(),
    "int4": lambda shape, device, rng: make_int4(shape, rng).to(device).weights(),
    "int4-zeros": lambda shape, device, rng: make_int4(shape, rng, zeros=True).to(device).weights(),
}


def takes(kind: str, shape: Shape) -> bool:
    sizes = shape.hidden, shape.intermediate
    if kind == "fp8_block":
        return all(size % 128 == 0 for size in sizes) and shape.gated
    return kind not in ("nvfp4", "int4", "int4-zeros") or all(size % 32 == 0 for size in sizes)


ROWS = [
    pytest.param(kind, shape, id=f"{kind}-{shape.name}") for shape in SHAPES for kind in KINDS if takes(kind, shape)
]
# CPUs have one form of a layer, which does not depend on the number of tokens.
TOKENS = {"cpu": (1, 3), "cuda": (1, 2, 4, 5, 8)}
SMALL = [pytest.param(kind, SHAPES[0], id=kind) for kind in KINDS]


def rows_of(kind: str, shape: Shape, tokens: int, device: str, rng: torch.Generator) -> Tensor:
    return make_x(tokens, shape, torch.float16 if kind == "f16" else torch.bfloat16, device, rng)


def poisoned(x: Tensor, weights: oxmoe.ExpertWeights, **routing: Any) -> Tensor:
    out = torch.full_like(x, torch.nan)
    assert oxmoe.moe(x, weights, out=out, **routing).data_ptr() == out.data_ptr()
    return out


def given(topk_weights: Tensor, topk_ids: Tensor, **options: Any) -> dict[str, Any]:
    return {"topk_weights": topk_weights, "topk_ids": topk_ids, **options}


@pytest.mark.parametrize("kind, shape", ROWS)
def test_logits_ids_and_separate_launches_agree(kind: str, shape: Shape, device: str, rng: torch.Generator) -> None:
    weights = KINDS[kind](shape, device, rng)
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
    weights, top_k = KINDS[kind](shape, device, rng), shape.top_k
    for tokens in TOKENS[device]:
        for names in (top_k, 1, 5):
            x = rows_of(kind, shape, tokens, device, rng)
            topk_weights, topk_ids = (t.to(device) for t in make_routing(pattern, tokens, shape.experts, names, rng))
            topk_weights[:, ::3] *= -1
            for options in ({}, {"no_combine": True}, {"routed_scaling_factor": 2.5}):
                one = oxmoe.moe(x, weights, topk_weights, topk_ids, **options)
                assert same_bits(one, apart(x, weights, topk_weights, topk_ids, **options))


@pytest.mark.parametrize("kind, shape", SMALL)
def test_ranks(kind: str, shape: Shape, device: str, rng: torch.Generator) -> None:
    """Ids of other ranks' experts belong to nobody here, whatever their weights are."""
    weights, ranks = KINDS[kind](shape, device, rng), 3
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


@pytest.mark.gpu
@pytest.mark.parametrize("kind, shape", SMALL)
def test_replays_of_other_ids(kind: str, shape: Shape, rng: torch.Generator) -> None:
    """Layers on one workspace follow each other in a graph; x, ids and weights change before each replay."""
    tokens = 2
    layers = [KINDS[kind](shape, "cuda", rng) for _ in range(3)]
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
def test_given_ids_take_one_launch(kind: str, shape: Shape, rng: torch.Generator) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("only Hopper has such kernels")
    weights, x = KINDS[kind](shape, "cuda", rng), rows_of(kind, shape, 1, "cuda", rng)
    topk_weights, topk_ids = (t.cuda() for t in make_routing("duplicates", 1, shape.experts, shape.top_k, rng))
    before = oxmoe.stats()["launches"]
    oxmoe.moe(x, weights, topk_weights, topk_ids)
    made = {name: n - before.get(name, 0) for name, n in oxmoe.stats()["launches"].items() if n != before.get(name, 0)}
    assert sum(made.values()) == 1 and next(iter(made)).startswith("routed_layer")
