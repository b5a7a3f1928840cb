"""An input has the same bits in every run, and a row has the same bits in every batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import oxmoe
from cases import (
    GPT_OSS,
    MODELS,
    OTHER_MODELS,
    Layer,
    Shape,
    make_layer,
    make_routing,
    make_workspace,
    make_x,
    tie_free_logits,
)
from fp8_cases import Fp8, Fp8Tensor, make_fp8, make_fp8_tensor
from mxfp4_cases import Blocks, make_blocks
from mxfp8_cases import Mxfp8, make_mxfp8
from oxmoe.testing import same_bits

Place = tuple[str, torch.dtype]
SMALL = Shape("small", 8, 3, 160, 96, bias=True, options=tuple(GPT_OSS.items()))
BATCHES = {"cpu": (1, 7, 64), "cuda": (1, 2, 4, 7, 8, 9, 16, 17, 33, 64, 256, 1024, 4096)}


def starts(tokens: int, batch: int) -> set[int]:
    return {0, (tokens - batch) // 2, tokens - batch}


def check_batches(
    layer: Layer | Blocks | Mxfp8 | Fp8 | Fp8Tensor, x: Tensor, topk_weights: Tensor, topk_ids: Tensor
) -> None:
    """Compares rows of the largest batch with the same rows in smaller batches, at other places and among other
    rows."""
    weights = layer.weights()
    whole = oxmoe.moe(x, weights, topk_weights, topk_ids)
    tokens = x.shape[0]
    for batch in (b for b in BATCHES[x.device.type] if b <= tokens):
        for start in starts(tokens, batch):
            rows = slice(start, start + batch)
            part = oxmoe.moe(x[rows], weights, topk_weights[rows], topk_ids[rows])
            assert same_bits(part, whole[rows]), f"rows {start} to {start + batch} alone"
    order = torch.randperm(tokens).to(x.device)
    assert same_bits(oxmoe.moe(x[order], weights, topk_weights[order], topk_ids[order]), whole[order]), (
        "rows in another order"
    )


def operands(
    shape: Shape, place: Place, pattern: str, tokens: int, rng: torch.Generator
) -> tuple[Layer, Tensor, Tensor, Tensor]:
    device, dtype = place
    topk_weights, topk_ids = make_routing(pattern, tokens, shape.experts, shape.top_k, rng)
    return (
        make_layer(shape, dtype, device, rng),
        make_x(tokens, shape, dtype, device, rng),
        topk_weights.to(device),
        topk_ids.to(device),
    )


def check_runs(
    layer: Layer | Blocks | Mxfp8 | Fp8 | Fp8Tensor, x: Tensor, topk_weights: Tensor, topk_ids: Tensor
) -> None:
    """Compares runs on workspaces with different contents, and with weights made again."""
    weights = layer.weights()
    first = oxmoe.moe(x, weights, topk_weights, topk_ids)
    size = oxmoe.workspace_bytes(weights, *topk_ids.shape)
    for fill in (0x00, 0x55, 0xFF):
        workspace = make_workspace(size, x.device).fill_(fill)
        assert same_bits(oxmoe.moe(x, weights, topk_weights, topk_ids, workspace=workspace), first)
        # A second run uses what the first one left in the workspace.
        assert same_bits(oxmoe.moe(x, weights, topk_weights, topk_ids, workspace=workspace), first)
    assert same_bits(oxmoe.moe(x, layer.weights(), topk_weights, topk_ids), first)


@pytest.mark.parametrize("tokens", [1, 2, 8, 16, 61])
@pytest.mark.parametrize("pattern", ["uniform", "skewed", "one_expert", "holes", "all_holes"])
def test_same_input_same_bits(place: Place, pattern: str, tokens: int, rng: torch.Generator) -> None:
    check_runs(*operands(SMALL, place, pattern, tokens, rng))


def test_workspace_of_another_shape_leaves_no_trace(place: Place, rng: torch.Generator) -> None:
    layer, x, topk_weights, topk_ids = operands(SMALL, place, "uniform", 40, rng)
    weights = layer.weights()
    workspace = make_workspace(oxmoe.workspace_bytes(weights, 40, SMALL.top_k), x.device)
    for tokens in (40, 1, 17, 0, 40, 3, 8, 9, 1, 16, 2):
        fresh = oxmoe.moe(x[:tokens], weights, topk_weights[:tokens], topk_ids[:tokens])
        assert same_bits(
            oxmoe.moe(x[:tokens], weights, topk_weights[:tokens], topk_ids[:tokens], workspace=workspace), fresh
        )


@pytest.mark.parametrize("pattern", ["uniform", "one_expert"])
def test_a_row_alone_has_the_bits_of_the_batch(place: Place, pattern: str, rng: torch.Generator) -> None:
    tokens = 64 if place[0] == "cpu" else 1024
    check_batches(*operands(SMALL, place, pattern, tokens, rng))


def mxfp4_operands(
    shape: Shape, device: str, pattern: str, tokens: int, rng: torch.Generator
) -> tuple[Blocks, Tensor, Tensor, Tensor]:
    topk_weights, topk_ids = make_routing(pattern, tokens, shape.experts, shape.top_k, rng)
    hidden = dict(shape.options).get("hidden_size", shape.hidden)
    x = make_x(tokens, shape, torch.bfloat16, "cpu", rng)[:, :hidden].contiguous().to(device)
    return make_blocks(shape, "bf16", device, rng), x, topk_weights.to(device), topk_ids.to(device)


@pytest.mark.parametrize("hidden_size", [160, 150])
@pytest.mark.parametrize("pattern", ["uniform", "skewed", "one_expert", "holes"])
def test_mxfp4(pattern: str, hidden_size: int, device: str, rng: torch.Generator) -> None:
    """A hidden size of 150 takes the portable kernel on every GPU. Batches on a GPU fall into every tile."""
    shape = SMALL.with_options(**GPT_OSS, hidden_size=hidden_size)
    check_batches(*mxfp4_operands(shape, device, pattern, 64 if device == "cpu" else 4096, rng))
    for tokens in (1, 7, 61) if device == "cpu" else (1, 7, 61, 150, 700):
        check_runs(*mxfp4_operands(shape, device, pattern, tokens, rng))


@pytest.mark.parametrize("pattern", ["uniform", "skewed", "holes"])
def test_mxfp8(pattern: str, device: str, rng: torch.Generator) -> None:
    for tokens in (1, 7, 61) if device == "cpu" else (1, 7, 61, 150, 700):
        check_runs(make_mxfp8(SMALL, device, rng), *mxfp4_operands(SMALL, device, pattern, tokens, rng)[1:])
    tokens = 64 if device == "cpu" else 4096
    check_batches(make_mxfp8(SMALL, device, rng), *mxfp4_operands(SMALL, device, pattern, tokens, rng)[1:])


@pytest.mark.parametrize("pattern", ["uniform", "skewed", "one_expert", "holes"])
@pytest.mark.parametrize("scales", ["block", "token", "static", "tensor"])
def test_fp8(scales: str, pattern: str, device: str, rng: torch.Generator) -> None:
    """With one scale for a call ("tensor") a row's bits may depend on the others."""
    shape = Shape("fp8", 8, 3, 256, 384, bias=True)
    layer: Fp8 | Fp8Tensor = make_fp8(shape, device, rng)
    if scales != "block":
        layer = make_fp8_tensor(shape, device, rng, mode=scales)

    def operands(tokens: int) -> tuple[Fp8 | Fp8Tensor, Tensor, Tensor, Tensor]:
        topk_weights, topk_ids = make_routing(pattern, tokens, shape.experts, shape.top_k, rng)
        return layer, layer.x(tokens, rng), topk_weights.to(device), topk_ids.to(device)

    if scales != "tensor":
        check_batches(*operands(64 if device == "cpu" else 4096))
    for tokens in (1, 7, 61) if device == "cpu" else (1, 7, 61, 150, 700):
        check_runs(*operands(tokens))


@pytest.mark.gpu
@pytest.mark.parametrize("hidden,intermediate", [(96, 1696), (3264, 96)])
def test_mxfp4_with_many_experts(hidden: int, intermediate: int, rng: torch.Generator) -> None:
    """On Hopper few tokens have units of 64 rows and more tokens have units of 128."""
    check_batches(*mxfp4_operands(Shape("many", 64, 4, hidden, intermediate), "cuda", "uniform", 1024, rng))


@pytest.mark.gpu
def test_mxfp4_model(rng: torch.Generator) -> None:
    check_batches(*mxfp4_operands(MODELS["gpt-oss-20b"], "cuda", "skewed", 4096, rng))


@pytest.mark.gpu
@pytest.mark.parametrize("pattern", ["uniform", "skewed", "holes"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", MODELS.values(), ids=MODELS)
def test_models(shape: Shape, dtype: torch.dtype, pattern: str, rng: torch.Generator) -> None:
    check_batches(*operands(shape, ("cuda", dtype), pattern, 4096, rng))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [*MODELS.values(), *OTHER_MODELS.values()], ids=lambda shape: shape.name)
def test_models_from_router_logits(shape: Shape, rng: torch.Generator) -> None:
    """A row has one result in every batch, whether its experts are chosen in the layer or before it."""
    dtype = torch.bfloat16
    layer, x = make_layer(shape, dtype, "cuda", rng), make_x(4096, shape, dtype, "cuda", rng)
    logits = tie_free_logits(4096, shape.experts, rng).cuda()
    weights = layer.weights()
    whole = oxmoe.moe(x, weights, *oxmoe.topk(logits, shape.top_k))
    for batch in BATCHES["cuda"]:
        for start in starts(4096, batch):
            rows = slice(start, start + batch)
            part = oxmoe.moe(x[rows], weights, router_logits=logits[rows], top_k=shape.top_k)
            assert same_bits(part, whole[rows]), f"rows {start} to {start + batch} alone"


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "softmax_topk"])
def test_topk_rows(device: str, scoring: str, rng: torch.Generator) -> None:
    logits = tie_free_logits(1024, 128, rng).to(device)
    whole = oxmoe.topk(logits, 8, scoring_func=scoring)
    for batch in (b for b in BATCHES[device] if b <= 1024):
        part = oxmoe.topk(logits[-batch:], 8, scoring_func=scoring)
        assert same_bits(part[0], whole[0][-batch:]) and same_bits(part[1], whole[1][-batch:])


def test_router_logits_rows(place: Place, rng: torch.Generator) -> None:
    """Choosing inside moe is choosing before it, in every batch size."""
    device, dtype = place
    layer, x = make_layer(SMALL, dtype, device, rng), make_x(64, SMALL, dtype, device, rng)
    logits = tie_free_logits(64, SMALL.experts, rng).to(device)
    weights = layer.weights()
    whole = oxmoe.moe(x, weights, *oxmoe.topk(logits, 3))
    for batch in (1, 2, 7, 8, 9, 16, 17, 64):
        assert same_bits(oxmoe.moe(x[:batch], weights, router_logits=logits[:batch], top_k=3), whole[:batch])


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_few_rows_from_router_logits_on_any_workspace(place: Place, scoring: str, rng: torch.Generator) -> None:
    """The result does not depend on what a workspace holds, call after call; also with experts of other ranks, and with
    padded tokens."""
    device, dtype = place
    layer, x = make_layer(SMALL, dtype, device, rng), make_x(8, SMALL, dtype, device, rng)
    logits = tie_free_logits(8, 2 * SMALL.experts, rng).to(device)
    weights, top_k = layer.weights(), SMALL.top_k
    workspace = make_workspace(oxmoe.workspace_bytes(weights, 8, top_k), x.device)
    for step, tokens in enumerate((8, 1, 3, 8, 2, 5, 1)):
        padded = torch.tensor([tokens - step % 2], dtype=torch.int32, device=device)
        routing = {"scoring_func": scoring, "num_token_non_padded": padded if step > 2 else None}
        chosen = oxmoe.topk(logits[:tokens], top_k, **routing)
        for rank in (0, 1):
            workspace.fill_(0xFF)
            parallel = {"ep_size": 2, "ep_rank": rank, "workspace": workspace}
            one = oxmoe.moe(x[:tokens], weights, router_logits=logits[:tokens], top_k=top_k, **routing, **parallel)
            assert same_bits(one, oxmoe.moe(x[:tokens], weights, *chosen, ep_size=2, ep_rank=rank)), (tokens, rank)


def test_few_rows_that_are_no_numbers(place: Place, rng: torch.Generator) -> None:
    """The result does not depend on the bits of NaN and infinity in x, wherever they lead."""
    device, dtype = place
    layer, x = make_layer(SMALL, dtype, device, rng), make_x(4, SMALL, dtype, device, rng)
    logits = tie_free_logits(4, SMALL.experts, rng).to(device)
    weights, top_k = layer.weights(), SMALL.top_k
    x[0].view(torch.int32 if dtype == torch.float32 else torch.int16).fill_(-1)
    x[1], x[2, ::2] = float("-inf"), float("nan")
    whole = oxmoe.moe(x, weights, *oxmoe.topk(logits, top_k))
    assert whole[0].isnan().all() and whole[3].isfinite().all()
    for tokens in (1, 2, 3, 4):
        assert same_bits(oxmoe.moe(x[:tokens], weights, router_logits=logits[:tokens], top_k=top_k), whole[:tokens])
