"""MXFP4 layers of few tokens from router logits, one launch on Hopper, have the bits of the separate launches."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import oxmoe
from cases import ACTIVATIONS, GPT_OSS, MODELS, Shape, apart, make_workspace, tie_free_logits
from mxfp4_cases import Blocks, call, check, make_blocks
from oxmoe.testing import same_bits

# Shapes with K of one block, of part of a stage, of a whole one and more; rows end within a block.
SHAPES = (
    Shape("h32-i32", 4, 2, 32, 32),
    Shape("h96-i288", 6, 3, 96, 288, bias=True, options=tuple(GPT_OSS.items())),
    Shape("h256-i320", 4, 2, 256, 320).with_options(limit=0.25, clamp="after"),
    Shape("h352-i224", 8, 8, 352, 224, bias=True).with_options(**ACTIVATIONS["swiglu-up-gate"]),
    Shape("h2880-i64", 128, 4, 2880, 64, bias=True, options=tuple(GPT_OSS.items())),
    Shape("h64-i2880", 4, 1, 64, 2880).with_options(layout="interleaved"),
    Shape("h224-i96", 4, 2, 224, 96).with_options(activation="silu", gated=False),
)
SMALL = SHAPES[1]


def chosen(x: Tensor, logits: Tensor, top_k: int, **options: Any) -> dict[str, Any]:
    return {"x": x, "router_logits": logits, "top_k": top_k, **options}


def planned(shape: Shape, tokens: int) -> list[str]:
    sizes = shape.experts, shape.top_k, shape.hidden, shape.intermediate, tokens
    text = oxmoe.explain(*sizes, format="mxfp4", gated=shape.gated, arch="sm_90", routing="logits")
    return re.findall(r"((?:routed_layer|grouped_gemm)_mxfp4_sm90_(?:gated|plain))", text)


def test_plan() -> None:
    for shape in SHAPES:
        form = "gated" if shape.gated else "plain"
        one, separate = f"routed_layer_mxfp4_sm90_{form}", f"grouped_gemm_mxfp4_sm90_{form}"
        fitting = 3 if shape.intermediate == 2880 else 4
        expected = [[one]] * fitting + [[separate]] * (5 - fitting)
        assert [planned(shape, tokens) for tokens in (1, 2, 3, 4, 5)] == expected
    # Three tokens of this model do not fit.
    kernels = [planned(MODELS["gpt-oss-20b"], tokens)[0].partition("_mxfp4")[0] for tokens in (1, 2, 3)]
    assert kernels == ["routed_layer", "routed_layer", "grouped_gemm"]


def check_rows(blocks: Blocks, weights: oxmoe.ExpertWeights, logits: Tensor, rng: torch.Generator) -> None:
    """Compares results from logits with results from given ids, and with the reference."""
    tokens, top_k = len(logits), blocks.shape.top_k
    x = blocks.x(tokens, rng)
    given = check(blocks, x, *oxmoe.topk(logits, top_k), made=weights)
    one = call(x, weights, router_logits=logits, top_k=top_k)
    assert same_bits(one, apart(x, weights, *oxmoe.topk(logits, top_k)))
    assert one.shape == given.shape


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_shapes(shape: Shape, device: str, rng: torch.Generator) -> None:
    blocks = make_blocks(shape, "bf16", device, rng)
    weights = blocks.weights()
    for tokens in (1, 2, 2, 3, 4):
        check_rows(blocks, weights, tie_free_logits(tokens, shape.experts, rng).to(device), rng)
    same = tie_free_logits(1, shape.experts, rng).expand(2, -1).contiguous().to(device)
    check_rows(blocks, weights, same, rng)


@pytest.mark.gpu
def test_model(rng: torch.Generator) -> None:
    blocks = make_blocks(MODELS["gpt-oss-20b"], "bf16", "cuda", rng)
    weights = blocks.weights()
    for tokens in (1, 1, 2, 2):
        check_rows(blocks, weights, tie_free_logits(tokens, blocks.shape.experts, rng).cuda(), rng)


@pytest.mark.gpu
@pytest.mark.parametrize("hidden", [328, 344])
def test_padded_hidden(hidden: int, rng: torch.Generator) -> None:
    """x has fewer columns than the weights: rows of w2 beyond hidden_size belong to no output."""
    shape = Shape("padded", 8, 4, 352, 96, bias=True, options=tuple(GPT_OSS.items()))
    weights = make_blocks(shape, "bf16", "cuda", rng).weights(hidden_size=hidden)
    for tokens in (1, 2, 4):
        x = torch.randn((tokens, hidden), generator=rng).bfloat16().cuda()
        logits = tie_free_logits(tokens, shape.experts, rng).cuda()
        one = call(x, weights, router_logits=logits, top_k=shape.top_k)
        assert same_bits(one, apart(x, weights, *oxmoe.topk(logits, shape.top_k)))


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_any_workspace_rank_and_padding(scoring: str, device: str, rng: torch.Generator) -> None:
    """The result does not depend on a workspace's contents, results of the call before included. Some experts are on
    other ranks, and some tokens are padding."""
    blocks = make_blocks(SMALL, "bf16", device, rng)
    weights, top_k = blocks.weights(), SMALL.top_k
    workspace = make_workspace(oxmoe.workspace_bytes(weights, 2, top_k), device)
    for step, (tokens, fill) in enumerate([(2, 0xFF), (1, None), (2, None), (2, 0x11), (1, 0xFF), (2, 0)]):
        x, logits = blocks.x(tokens, rng), tie_free_logits(tokens, 2 * SMALL.experts, rng).to(device)
        padded = torch.tensor([tokens - step % 2], dtype=torch.int32, device=device)
        routing: dict[str, Any] = {"scoring_func": scoring, "num_token_non_padded": padded if step > 2 else None}
        ids = oxmoe.topk(logits, top_k, **routing)
        for rank in (0, 1):
            if fill is not None:
                workspace.fill_(fill)
            rows = apart(x, weights, *ids, ep_size=2, ep_rank=rank)
            options = {"ep_size": 2, "ep_rank": rank, "workspace": workspace}
            assert same_bits(oxmoe.moe(**chosen(x, logits, top_k, **routing, **options), weights=weights), rows)


@pytest.mark.parametrize("no_combine", [False, True])
def test_no_numbers(no_combine: bool, device: str, rng: torch.Generator) -> None:
    """x has NaN and infinity of any bits, among them the bits that mark an absent value."""
    blocks = make_blocks(SMALL, "bf16", device, rng)
    weights, top_k, x = blocks.weights(), SMALL.top_k, blocks.x(4, rng)
    x[0].view(torch.int16).fill_(-1)
    x[1], x[2, ::2] = float("-inf"), float("nan")
    logits = tie_free_logits(4, SMALL.experts, rng).to(device)
    whole = apart(x, weights, *oxmoe.topk(logits, top_k), no_combine=no_combine)
    assert whole[0].isnan().all() and whole[3].isfinite().all()
    for first, last in ((0, 1), (0, 2), (1, 3), (2, 3), (2, 4), (3, 4)):
        given = chosen(x[first:last], logits[first:last], top_k, no_combine=no_combine)
        assert same_bits(oxmoe.moe(**given, weights=weights), whole[first:last])


def captured(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def repeat(call: Callable[[], object]) -> None:
    for _ in range(20):
        call()


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 2, 4])
def test_replays(tokens: int, rng: torch.Generator) -> None:
    """Three layers follow each other on one workspace; x and logits change before each replay."""
    shape = Shape("replays", 16, 4, 256, 192, bias=True)
    layers = [make_blocks(shape, "bf16", "cuda", rng).weights() for _ in range(3)]
    xs = [(torch.randn((tokens, 256), generator=rng)).bfloat16().cuda() for _ in range(4)]
    logits = [tie_free_logits(tokens, 16, rng).cuda() for _ in range(20)]
    x, routing, workspace = xs[0].clone(), logits[0].clone(), None
    workspace = make_workspace(oxmoe.workspace_bytes(layers[0], tokens, shape.top_k), "cuda")
    outs = [torch.empty_like(x) for _ in layers]

    def together() -> None:
        for weights, given, out in zip(layers, [x, *outs[:-1]], outs, strict=True):
            oxmoe.moe(given, weights, router_logits=routing, top_k=shape.top_k, out=out, workspace=workspace)

    graph = captured(together)
    expected = []
    for i, logit in enumerate(logits):
        row = xs[i % 4]
        for weights in layers:
            row = apart(row, weights, *oxmoe.topk(logit, shape.top_k))
        expected.append(row)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for replay in range(500):
        x.copy_(xs[replay % 20 % 4])
        routing.copy_(logits[replay % 20])
        for out in outs:
            out.fill_(torch.nan)
        graph.replay()
        wrong += (outs[-1].view(torch.int16) != expected[replay % 20].view(torch.int16)).sum()
    assert int(wrong) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [False, True])
def test_two_streams(graphs: bool, rng: torch.Generator) -> None:
    """CTAs of these launches wait for each other: neither stream's CTAs may keep the other's out."""
    shape = Shape("streams", 32, 4, 512, 512, bias=True, options=tuple(GPT_OSS.items()))
    calls, streams = [], [torch.cuda.Stream() for _ in range(2)]
    for _ in streams:
        blocks = make_blocks(shape, "bf16", "cuda", rng)
        weights, x, logits = blocks.weights(), blocks.x(2, rng), tie_free_logits(2, shape.experts, rng).cuda()
        workspace = make_workspace(oxmoe.workspace_bytes(weights, 2, shape.top_k), "cuda")
        calls.append((chosen(x, logits, shape.top_k, out=torch.empty_like(x), workspace=workspace), weights))
    expected = [apart(g["x"], w, *oxmoe.topk(g["router_logits"], shape.top_k)) for g, w in calls]
    torch.cuda.synchronize()
    runs: list[Callable[[], object]] = [partial(oxmoe.moe, **given, weights=weights) for given, weights in calls]
    if graphs:
        runs = [captured(partial(repeat, run)).replay for run in runs]
    for _ in range(50 if graphs else 500):
        for stream, run in zip(streams, runs, strict=True):
            with torch.cuda.stream(stream):
                run()
    torch.cuda.synchronize()
    for (given, _), rows in zip(calls, expected, strict=True):
        assert same_bits(given["out"], rows)
