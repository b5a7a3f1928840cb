"""CUDA graphs: captured once, replayed a thousand times with changing routing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import oxmoe
from cases import MODELS, PATTERNS, Shape, make_layer, make_routing, make_workspace, make_x, tie_free_logits
from format_cases import EXPERTS, dtype_of
from fp8_cases import MODES, make_fp8, make_fp8_tensor
from mxfp4_cases import make_blocks
from mxfp8_cases import make_mxfp8
from oxmoe.testing import same_bits

pytestmark = pytest.mark.gpu
SHAPES = (Shape("small", 16, 4, 256, 192, bias=True), MODELS["qwen3-30b-a3b"])


def capture(call: object) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()  # type: ignore[operator]
    return graph


def check_replays(
    weights: oxmoe.ExpertWeights, shape: Shape, tokens: int, rng: torch.Generator, replays: int = 1000
) -> None:
    """Replays a graph whose routing and input change before each replay; all replays queue up behind each other."""
    inputs = [make_x(tokens, shape, torch.bfloat16, "cuda", rng)[:, : weights.hidden_size].contiguous() for _ in "ab"]
    x, out = inputs[0].clone(), torch.empty_like(inputs[0])
    routings = [make_routing(PATTERNS[i % len(PATTERNS)], tokens, shape.experts, shape.top_k, rng) for i in range(40)]
    routings = [(w.cuda(), ids.cuda()) for w, ids in routings]
    topk_weights, topk_ids = routings[0][0].clone(), routings[0][1].clone()
    workspace = make_workspace(oxmoe.workspace_bytes(weights, tokens, shape.top_k), "cuda")

    def call() -> Tensor:
        return oxmoe.moe(x, weights, topk_weights, topk_ids, out=out, workspace=workspace)

    graph = capture(call)
    expected = [oxmoe.moe(inputs[i % 2], weights, *routing) for i, routing in enumerate(routings)]
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for replay in range(replays):
        x.copy_(inputs[replay % 2])
        topk_weights.copy_(routings[replay % 40][0])
        topk_ids.copy_(routings[replay % 40][1])
        out.fill_(torch.nan)
        graph.replay()
        wrong += (out.view(torch.int16) != expected[replay % 40].view(torch.int16)).sum()
    assert int(wrong) == 0


@pytest.mark.parametrize("tokens", [1, 2, 8, 16, 64])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_replays_with_changing_routing(shape: Shape, tokens: int, rng: torch.Generator) -> None:
    check_replays(make_layer(shape, torch.bfloat16, "cuda", rng).weights(), shape, tokens, rng)


@pytest.mark.parametrize("tokens", [1, 16, 64, 120, 280, 700])
@pytest.mark.parametrize("hidden_size", [256, 250])
def test_replays_of_mxfp4(hidden_size: int, tokens: int, rng: torch.Generator) -> None:
    """Replays take every tile of the kernel for Hopper, and the portable one."""
    shape = SHAPES[0]
    weights = make_blocks(shape, "bf16", "cuda", rng).weights(hidden_size=hidden_size)
    check_replays(weights, shape, tokens, rng, replays=200)


@pytest.mark.parametrize("tokens", [1, 16, 64, 120, 280, 700])
def test_replays_of_mxfp8(tokens: int, rng: torch.Generator) -> None:
    check_replays(make_mxfp8(SHAPES[0], "cuda", rng).weights(), SHAPES[0], tokens, rng, replays=200)


@pytest.mark.parametrize("tokens", [1, 16, 64, 280, 700])
@pytest.mark.parametrize("scales", ["block", *MODES])
def test_replays_of_fp8(scales: str, tokens: int, rng: torch.Generator) -> None:
    shape = Shape("fp8", 16, 4, 256, 384, bias=True)
    if scales == "block":
        weights = make_fp8(shape, "cuda", rng).weights()
    else:
        weights = make_fp8_tensor(shape, "cuda", rng).weights(scales)
    check_replays(weights, shape, tokens, rng, replays=200)


# The limit keeps a chain of layers finite whose codes and scales are random.
CHAINED = Shape("chain", 16, 4, 256, 384, bias=True).with_options(limit=8.0)


@pytest.mark.parametrize("from_logits", [False, True], ids=["ids", "logits"])
@pytest.mark.parametrize("kind", ["qwen3-30b-a3b", *(name for name in EXPERTS if name != "f32")])
def test_a_chain_of_layers_shares_a_workspace(kind: str, from_logits: bool, rng: torch.Generator) -> None:
    """Each layer starts while the one before drains, reads its output and writes to its workspace. Tokens may be
    quantised while they are routed, and batch sizes mix. Then all runs in place, so that every layer's input lies in
    one buffer."""
    shape, make = (MODELS[kind], EXPERTS["bf16"]) if kind in MODELS else (CHAINED, EXPERTS[kind])
    weights = [make(shape, "cuda", rng) for _ in range(3)]
    batches = (1, 300, 8, 16, 1, 64, 2000, 64, 2)
    workspace = make_workspace(oxmoe.workspace_bytes(weights[0], max(batches), shape.top_k), "cuda")

    def routing(tokens: int) -> dict[str, object]:
        if from_logits:
            return {"router_logits": tie_free_logits(tokens, shape.experts, rng).cuda(), "top_k": shape.top_k}
        topk_weights, topk_ids = make_routing("uniform", tokens, shape.experts, shape.top_k, rng)
        return {"topk_weights": topk_weights.cuda(), "topk_ids": topk_ids.cuda()}

    chains = []
    for tokens in batches:
        xs = [make_x(tokens, shape, dtype_of(kind), "cuda", rng)]
        xs += [torch.full_like(xs[0], torch.nan) for _ in range(6)]
        chains.append((xs, [routing(tokens) for _ in range(6)]))
    in_place = [xs[0].clone() for xs, _ in chains]

    def call() -> None:
        for (xs, routings), own in zip(chains, in_place, strict=True):
            for layer, options in enumerate(routings):
                oxmoe.moe(xs[layer], weights[layer % 3], out=xs[layer + 1], workspace=workspace, **options)
            for layer, options in enumerate(routings):
                oxmoe.moe(own, weights[layer % 3], out=own, workspace=workspace, **options)

    expected = []
    for xs, routings in chains:
        x = xs[0]
        for layer, options in enumerate(routings):
            x = oxmoe.moe(x, weights[layer % 3], **options)
            torch.cuda.synchronize()
        assert bool(x.isfinite().all()) and bool((x != 0).any())
        expected.append(x)
    graph = capture(call)
    for _ in range(50):
        for (xs, _), own in zip(chains, in_place, strict=True):
            own.copy_(xs[0])
            for x in xs[1:]:
                x.fill_(torch.nan)
        graph.replay()
        for (xs, _), own, last in zip(chains, in_place, expected, strict=True):
            assert same_bits(xs[-1], last) and same_bits(own, last)


def test_first_call_may_be_captured(rng: torch.Generator) -> None:
    """No lazy load and no allocation is left for the first call: a fresh layer is captured without a warm-up."""
    shape = Shape("fresh", 6, 2, 96, 80)
    weights = make_layer(shape, torch.float16, "cuda", rng).weights()
    x = make_x(3, shape, torch.float16, "cuda", rng)
    topk_weights, topk_ids = (t.cuda() for t in make_routing("uniform", 3, 6, 2, rng))
    out = torch.full_like(x, torch.nan)
    workspace = make_workspace(oxmoe.workspace_bytes(weights, 3, 2), "cuda")
    graph = capture(lambda: oxmoe.moe(x, weights, topk_weights, topk_ids, out=out, workspace=workspace))
    graph.replay()
    assert same_bits(out, oxmoe.moe(x, weights, topk_weights, topk_ids))


def test_capture_without_buffers(rng: torch.Generator) -> None:
    """Without out and workspace the memory comes from torch's allocator, which a capture may use."""
    shape = SHAPES[0]
    weights = make_layer(shape, torch.bfloat16, "cuda", rng).weights()
    x, logits = make_x(9, shape, torch.bfloat16, "cuda", rng), tie_free_logits(9, shape.experts, rng).cuda()
    results = {}

    def call() -> None:
        topk_weights, topk_ids = oxmoe.topk(logits, 4)
        results["ids"] = oxmoe.moe(x, weights, topk_weights, topk_ids)
        results["logits"] = oxmoe.moe(x, weights, router_logits=logits, top_k=4)
        results["tables"] = oxmoe.sort_by_expert(topk_ids, shape.experts)[3]

    call()
    eager = dict(results)
    graph = capture(call)
    graph.replay()
    for name, expected in eager.items():
        assert same_bits(results[name], expected), name


def test_padded_tokens_change_between_replays(rng: torch.Generator) -> None:
    shape = SHAPES[0]
    weights = make_layer(shape, torch.bfloat16, "cuda", rng).weights()
    x, logits = make_x(16, shape, torch.bfloat16, "cuda", rng), tie_free_logits(16, shape.experts, rng).cuda()
    valid = torch.tensor(16, dtype=torch.int32, device="cuda")
    out = torch.empty_like(x)
    whole = oxmoe.moe(x, weights, router_logits=logits, top_k=4)
    graph = capture(lambda: oxmoe.moe(x, weights, router_logits=logits, top_k=4, num_token_non_padded=valid, out=out))
    for count in (0, 1, 5, 15, 16):
        valid.fill_(count)
        graph.replay()
        assert same_bits(out[:count], whole[:count]) and bool((out[count:] == 0).all())


def test_streams_are_torchs(rng: torch.Generator) -> None:
    """Work goes to torch's current stream, so it waits for earlier work there."""
    shape = SHAPES[0]
    weights = make_layer(shape, torch.bfloat16, "cuda", rng).weights()
    x = make_x(64, shape, torch.bfloat16, "cuda", rng)
    topk_weights, topk_ids = (t.cuda() for t in make_routing("uniform", 64, shape.experts, shape.top_k, rng))
    expected = oxmoe.moe(x, weights, topk_weights, topk_ids)
    late = torch.zeros_like(x)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(20_000_000)
        late.copy_(x)
        result = oxmoe.moe(late, weights, topk_weights, topk_ids)
        torch.cuda.current_stream().synchronize()
    assert same_bits(result, expected)
