"""Experts that lie on several ranks: an all-to-all of torch.distributed brings their rows and takes the results back.
The rows have moe's bits on one device, and the sums are near fp64."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import nvfp4_cases
import oxmoe
from cases import Shape, make_layer, make_routing
from fp8_cases import make_fp8
from mxfp4_cases import make_blocks
from oxmoe import quantize, reference
from oxmoe.sglang import deepep
from oxmoe.sglang.dispatch import MASKED, TOKENS
from oxmoe.testing import relative_norm, same_bits
from ranks import WORLDS, Crew, Rank, crews, seed_of

FORMATS = ("bf16", "fp8_block", "mxfp4", "nvfp4")
# Low latency: room for each expert's rows. Normal: rows of one expert behind each other, with counts or with each
# row's expert; or tokens with the ids of the receiver's experts.
LAYOUTS = ("masked", "counts", "m_indices", "tokens")
ALIGNMENT = 128  # rows, as DeepGEMM's contiguous layout has it
SHAPES = {"cpu": Shape("ep", 16, 3, 256, 128), "cuda": Shape("ep", 16, 4, 1024, 256)}
TOKENS_OF_A_RANK = {"cpu": (3,), "cuda": (1, 16, 130)}
# The ranks' tokens are routed differently. The last pattern makes a rank that has no tokens.
ROUTINGS = ("uniform", "skewed", "uneven", "holes", "duplicates", "one_expert", "all_holes")
# Bars of ||result - fp64|| / ||fp64||, where fp64 takes the tokens that were sent: two roundings to bf16; with fp8, one
# to e4m3 as well.
NORMS = {"bf16": 8e-3, "fp8_block": 6e-2, "mxfp4": 8e-3, "nvfp4": 8e-3}


four = crews(4)
alone = crews(1, gpus=True)
crew = crews(WORLDS, gpus=True)


# The layer


def make(format: str, shape: Shape, seed: int) -> Any:
    """Draws the operands of the whole layer on the CPU; every rank draws the same."""
    rng = torch.Generator().manual_seed(seed)
    if format == "fp8_block":
        return make_fp8(shape, "cpu", rng)
    if format == "mxfp4":
        return make_blocks(shape, "bf16", "cpu", rng)
    if format == "nvfp4":
        return nvfp4_cases.make(shape, rng)
    return make_layer(shape, torch.bfloat16, "cpu", rng)


def part(operands: Any, experts: slice, device: str) -> oxmoe.ExpertWeights:
    """Returns the weights of some experts on a device."""
    given = {field.name: getattr(operands, field.name) for field in dataclasses.fields(operands)}
    tensors = {name: value[experts].to(device) for name, value in given.items() if isinstance(value, Tensor)}
    shape = dataclasses.replace(operands.shape, experts=experts.stop - experts.start)
    return dataclasses.replace(operands, shape=shape, **tensors).weights()


def numbers(format: str, operands: Any) -> tuple[Tensor, Tensor]:
    """Returns w13 and w2 as fp64 numbers."""
    if format == "bf16":
        return operands.w13.double(), operands.w2.double()
    if format == "mxfp4":
        return operands.plain.w13.double(), operands.plain.w2.double()
    if format == "fp8_block":
        pairs = (operands.w13, operands.w13_scale), (operands.w2, operands.w2_scale)
        w13, w2 = (
            codes.double() * scale.double().repeat_interleave(128, 1).repeat_interleave(128, 2)
            for codes, scale in pairs
        )
        return w13, w2
    rows = operands.w13_global.double().repeat_interleave(operands.shape.intermediate, 1)[..., None]
    made = []
    for codes, scales, factor in (
        (operands.w13, operands.w13_scale, rows),
        (operands.w2, operands.w2_scale, operands.w2_global.double()[:, None, None]),
    ):
        plain = [
            reference.nvfp4_numbers(one, scale.view(torch.float8_e4m3fn))
            for one, scale in zip(codes, scales, strict=True)
        ]
        made.append(torch.stack(plain).double() * factor)
    return made[0], made[1]


def exact(x: Tensor, weights: Tensor, ids: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    """Computes the layer in fp64, without a rounding."""
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for expert in range(len(w13)):
        token, slot = torch.nonzero(ids == expert, as_tuple=True)
        gate, up = (x[token].double() @ w13[expert].T).chunk(2, 1)
        rows = (torch.nn.functional.silu(gate) * up) @ w2[expert].T
        out.index_add_(0, token, rows * weights[token, slot, None].double())
    return out


# The all-to-all


class AllToAll:
    """Sends equal parts between ranks. No size depends on the routing, so CUDA graphs can hold it."""

    def __init__(self, me: Rank, device: str) -> None:
        self.world = me.world
        self.group = me.all if device == "cpu" else me.nccl()

    def __call__(self, rows: Tensor) -> Tensor:
        """rows [ranks, ...] of any dtype. Returns what each rank has sent to this one."""
        sent = rows.contiguous().view(torch.uint8)
        got = torch.empty_like(sent)
        dist.all_to_all_single(got, sent, group=self.group)
        return got.view(rows.dtype)


def poisoned(rows: int, like: Tensor) -> Tensor:
    """Returns rows of 0xFF, which is NaN, with the columns and dtype of another tensor."""
    size = rows, like.shape[1] * like.element_size()
    return torch.full(size, 0xFF, dtype=torch.uint8, device=like.device).view(like.dtype)


def put(rows: int, places: Tensor, values: Tensor) -> Tensor:
    """Returns `rows` rows of NaN with values at their places. A value with the place `rows` is dropped."""
    room = poisoned(rows + 1, values)
    room.view(torch.uint8).index_copy_(0, places, values.view(torch.uint8))
    return room[:rows]


class Dispatch:
    """One rank's slots (a token and one of its experts) on their way to the ranks of their experts.

    Each expert has room for `room` slots of each rank, so no size depends on the routing.
    """

    def __init__(self, across: AllToAll, ids: Tensor, experts: int) -> None:
        self.across, self.slots, self.room = across, ids.shape[1], ids.numel()
        self.local = experts // across.world
        chosen = ids.flatten().long()
        hits = chosen[:, None] == torch.arange(experts, device=ids.device)
        order = (hits.cumsum(0) - 1).gather(1, chosen.clamp(min=0)[:, None])[:, 0]
        # Slots without an expert have the place behind all others, and are not sent.
        self.places = torch.where(chosen < 0, experts * self.room, chosen * self.room + order)
        self.counts = across(hits.sum(0).view(across.world, self.local))
        # The rows of an expert lie in the order of the ranks that sent them.
        self.before = self.counts.cumsum(0) - self.counts
        index = torch.arange(self.room, device=ids.device)
        self.there = index < self.counts[..., None]
        self.order = self.before[..., None] + index

    def rows(self, tokens: Tensor) -> Tensor:
        """Returns the rows that all ranks have sent for these tokens' slots: [ranks, local experts, room, columns]."""
        each = tokens.repeat_interleave(self.slots, 0)
        sent = put(self.across.world * self.local * self.room, self.places, each)
        return self.across(sent.view(self.across.world, self.local, self.room, -1))

    def gather(self, rows: Tensor, first: Tensor, count: int) -> Tensor:
        """Returns `count` rows, in which each expert's begin at `first`; the others are NaN."""
        return put(count, self.positions(first, count).flatten(), rows.flatten(0, 2))

    def positions(self, first: Tensor, count: int) -> Tensor:
        return torch.where(self.there, first[:, None] + self.order, count)

    def back(self, results: Tensor, first: Tensor) -> Tensor:
        """Takes results back to the ranks of their tokens. Returns this rank's [tokens, slots, columns], with zeros for
        slots without an expert."""
        count = len(results)
        found = torch.cat([results, results.new_zeros(1, results.shape[1])])[self.positions(first, count)]
        rows = self.across(found).flatten(0, 2)
        rows = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])[self.places]
        return rows.view(-1, self.slots, rows.shape[1])


def by_slots(me: Dispatch, layout: str, weights: oxmoe.ExpertWeights, sent: list[Tensor], expected_m: int) -> Tensor:
    """Returns each slot's result [tokens, slots, H], computed by the rank of its expert. sent: the tokens, and their
    scales."""
    counts, most = me.counts.sum(0).int(), me.across.world * me.room
    if layout == "masked":
        count, first = me.local * most, torch.arange(me.local, device=counts.device) * most
    else:
        padded = (counts + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
        first, count = padded.cumsum(0) - padded, me.local * (-(-most // ALIGNMENT) * ALIGNMENT)
    x, *scale = (me.gather(me.rows(each), first, count) for each in sent)
    scales = scale[0] if scale else None
    if layout == "masked":
        x = x.view(me.local, most, -1)
        if scales is not None:
            # DeepEP hands scales over column by column.
            scales = scales.view(me.local, most, -1).transpose(1, 2).contiguous().transpose(1, 2)
        come = SimpleNamespace(hidden_states=x, hidden_states_scale=scales, masked_m=counts, expected_m=expected_m)
        results = deepep.run(come, MASKED, weights, CONFIG).flatten(0, 1)
    elif layout == "counts":
        results = oxmoe.moe_contiguous(x, weights, counts, alignment=ALIGNMENT, x_scale=scales, expected_m=expected_m)
    else:
        owners = torch.arange(me.local, device=counts.device)[None, :, None].expand(me.there.shape)
        indices = torch.full((count + 1,), -1, device=counts.device, dtype=torch.int64)
        indices[me.positions(first, count).flatten()] = owners.flatten()
        # The place behind all others is a place of slots that no rank has sent.
        results = oxmoe.moe_contiguous(x, weights, m_indices=indices[:count], x_scale=scales)
    return me.back(results, first)


CONFIG = SimpleNamespace(no_combine=False, apply_router_weight_on_input=False)


def combine(rows: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """Weights and sums each token's results in fp32, slot by slot."""
    factors = torch.where(ids < 0, 0.0, weights)
    total = rows[:, 0].float() * factors[:, :1]
    for slot in range(1, rows.shape[1]):
        total = total + rows[:, slot].float() * factors[:, slot : slot + 1]
    return total.bfloat16()


def by_tokens(
    across: AllToAll, weights: oxmoe.ExpertWeights, sent: list[Tensor], factors: Tensor, ids: Tensor, local: int
) -> Tensor:
    """Sends every token to every rank, with the ids of the rank's experts and -1 for others. Returns the ranks'
    weighted sums [ranks, tokens, H]."""
    ranks = torch.arange(across.world, device=ids.device)[:, None, None]
    own = torch.where(ids // local == ranks, ids % local, -1)
    x, *scale = (across(each[None].expand(across.world, -1, -1)).flatten(0, 1) for each in sent)
    come = SimpleNamespace(
        hidden_states=x,
        hidden_states_scale=scale[0] if scale else None,
        topk_ids=across(own).flatten(0, 1),
        topk_weights=across(factors[None].expand(across.world, -1, -1)).flatten(0, 1),
    )
    results = deepep.run(come, TOKENS, weights, CONFIG)
    return across(results.view(across.world, -1, results.shape[1]))


# On every rank


class Layer:
    """A layer of which this rank has a part. The whole one is here, too, to be compared with."""

    def __init__(self, me: Rank, format: str, seed: int, device: str) -> None:
        self.format, self.device, self.shape = format, device, SHAPES[device]
        self.across, self.local = AllToAll(me, device), self.shape.experts // me.world
        operands = make(format, self.shape, seed)
        first = me.rank * self.local
        self.part = part(operands, slice(first, first + self.local), device)
        self.whole = part(operands, slice(0, self.shape.experts), device)
        self.numbers = [matrices.to(device) for matrices in numbers(format, operands)]

    def sent(self, x: Tensor) -> list[Tensor]:
        """Returns what an all-to-all sends for tokens: bf16, or e4m3 with scales."""
        return list(quantize.per_token_group_quant_fp8(x, 128)) if self.format == "fp8_block" else [x]

    def come(self, x: Tensor) -> Tensor:
        """Returns the numbers of the tokens that were sent."""
        codes, *scales = self.sent(x)
        return codes.double() * scales[0].double().repeat_interleave(128, 1) if scales else codes

    def run(self, layout: str, x: Tensor, weights: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Returns results whose bits are known, and the sums of the layer."""
        if layout == "tokens":
            partial = by_tokens(self.across, self.part, self.sent(x), weights, ids, self.local)
            return partial, partial.float().sum(0).bfloat16()
        dispatch = Dispatch(self.across, ids, self.shape.experts)
        expected_m = -(-ids.numel() * self.across.world // self.shape.experts)
        rows = by_slots(dispatch, layout, self.part, self.sent(x), expected_m)
        return rows, combine(rows, weights, ids)

    def alone(self, layout: str, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """Computes the results whose bits are known with the whole layer on this rank's device."""
        sent = self.sent(x)
        if layout == "tokens":
            options: dict[str, Any] = {"x_scale": sent[1]} if len(sent) > 1 else {}
            owners = [torch.where(ids // self.local == rank, ids, -1) for rank in range(self.across.world)]
            return torch.stack([oxmoe.moe(sent[0], self.whole, weights, own, **options) for own in owners])
        each, *scale = (part.repeat_interleave(ids.shape[1], 0) for part in sent)
        options = {"x_scale": scale[0]} if scale else {}
        ones = torch.ones(ids.numel(), 1, device=x.device)
        rows = oxmoe.moe(each, self.whole, ones, ids.view(-1, 1), **options)
        return rows.view(*ids.shape, -1)


def drawn(layer: Layer, me: Rank, tokens: int, seed: int, pattern: str) -> tuple[Tensor, Tensor, Tensor]:
    """Draws this rank's tokens and their routing, on the CPU."""
    rng = torch.Generator().manual_seed(seed * me.world + me.rank)
    x = torch.randn(tokens, layer.shape.hidden, generator=rng).bfloat16()
    return x, *make_routing(pattern, tokens, layer.shape.experts, layer.shape.top_k, rng)


def dispatched(me: Rank, format: str, layout: str, seed: int, device: str) -> list[str]:
    """Runs a layer with every rank routed differently. Returns what is wrong."""
    layer, wrong = Layer(me, format, seed, device), []
    for tokens in TOKENS_OF_A_RANK[device]:
        for turn in range(len(ROUTINGS)):
            pattern = ROUTINGS[(turn + me.rank) % len(ROUTINGS)]
            given = [tensor.to(device) for tensor in drawn(layer, me, tokens, seed + turn, pattern)]
            rows, sums = layer.run(layout, *given)
            what = f"{tokens} tokens, {pattern}"
            if not same_bits(rows, layer.alone(layout, *given)):
                wrong.append(f"{what}: bits")
            norm = relative_norm(sums, exact(layer.come(given[0]), *given[1:], *layer.numbers))
            if not norm <= NORMS[format]:
                wrong.append(f"{what}: {norm:.3g} from fp64")
    return wrong


def replayed(me: Rank, format: str, layout: str, seed: int, replays: int) -> list[str]:
    """Replays a graph of dispatch, experts and combine; each replay has other tokens and another routing."""
    layer, tokens, wrong = Layer(me, format, seed, "cuda"), 16, []
    held = [tensor.cuda() for tensor in drawn(layer, me, tokens, seed, "uniform")]
    # NCCL connects the ranks in its first call, and that cannot be captured.
    layer.run(layout, *held)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        rows, sums = layer.run(layout, *held)
    for turn in range(replays):
        pattern = ROUTINGS[(turn + me.rank) % len(ROUTINGS)]
        for place, tensor in zip(held, drawn(layer, me, tokens, seed + turn, pattern), strict=True):
            place.copy_(tensor)
        rows.fill_(torch.nan)
        sums.fill_(torch.nan)
        graph.replay()
        if not same_bits(rows, layer.alone(layout, *held)):
            wrong.append(f"replay {turn}: bits")
        norm = relative_norm(sums, exact(layer.come(held[0]), *held[1:], *layer.numbers)) if turn % 20 == 0 else 0.0
        if not norm <= NORMS[format]:
            wrong.append(f"replay {turn}: {norm:.3g} from fp64")
    del graph
    return wrong


# Tests


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("format", FORMATS)
def test_ranks_on_cpus(four: Crew, format: str, layout: str, rng: torch.Generator) -> None:
    assert four.run(dispatched, format, layout, seed_of(rng), "cpu") == [[]] * 4


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("format", FORMATS)
def test_one_rank_on_a_gpu(alone: Crew, format: str, layout: str, rng: torch.Generator) -> None:
    """A rank that sends to itself has the same layouts and graphs, with one GPU."""
    assert alone.run(dispatched, format, layout, seed_of(rng), "cuda", patience=120) == [[]]
    assert alone.run(replayed, format, layout, seed_of(rng), 20, patience=120) == [[]]


@pytest.mark.multi_gpu
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("format", FORMATS)
def test_ranks_on_gpus(crew: Crew, format: str, layout: str, rng: torch.Generator) -> None:
    results = crew.run(dispatched, format, layout, seed_of(rng), "cuda", patience=120)
    assert results == [[]] * len(crew.processes)


@pytest.mark.multi_gpu
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("format", FORMATS)
def test_graphs_on_gpus(crew: Crew, format: str, layout: str, rng: torch.Generator) -> None:
    results = crew.run(replayed, format, layout, seed_of(rng), 100, patience=120)
    assert results == [[]] * len(crew.processes)
