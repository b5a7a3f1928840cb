"""The routing kernels as whole CTAs on the host (host_routing.py): top-k with sort, given ids, schedules, combine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cases import tie_free_logits
from cta_operands import DTYPES, seed_of
from fake_cuda.harness import STRUCTS
from host_routing import HostRouting
from host_topk import per_lane
from oxmoe import reference
from oxmoe.testing import same_bits

EXPERTS_PER_LANE = (1, 4, 12)
DRAWS = 30
UNWRITTEN = -77
BF16, F32, I32, I64 = torch.bfloat16, torch.float32, torch.int32, torch.int64


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> HostRouting:
    return HostRouting(tmp_path_factory.mktemp("routing_cta"), EXPERTS_PER_LANE)


class Draw:
    """Draws numbers, and sizes that are often small or at an edge."""

    def __init__(self, rng: torch.Generator) -> None:
        self.rng = rng

    def number(self, low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=self.rng))

    def one_of(self, *values: Any) -> Any:
        return values[self.number(0, len(values) - 1)]


class Routing:
    """The slots of a batch and the tables that a kernel makes of them."""

    def __init__(self, ids: Tensor, experts: int, first: int, draw: Draw) -> None:
        self.ids, self.experts, self.first = ids, experts, first
        self.tokens, self.top_k = ids.shape
        self.slots = ids.numel()
        self.tile_tokens = draw.one_of(8, 16, 48, 64, 192)
        self.tile_step = 8 if self.tile_tokens == 8 else draw.one_of(16, min(64, self.tile_tokens))
        self.max_tiles = self.slots + draw.number(1, 3)  # more than any schedule has
        self.counter_count = draw.number(0, 70)
        sizes = {"histogram": experts, "offsets": experts + 1, "place_of_slot": self.slots, "slot_of_place": self.slots}
        sizes |= {"tile_count": 1, "counters": self.counter_count}
        self.tables = {name: torch.full((size + 1,), UNWRITTEN, dtype=I32) for name, size in sizes.items()}
        self.tables["tiles"] = torch.full((self.max_tiles + 1, 4), UNWRITTEN, dtype=I32)
        self.block_histogram: Tensor | None = None

    def params(self, ids: Tensor, blocks: int = 0) -> Any:
        """Returns the parameters of a kernel that reads `ids`. `blocks`: CTAs of the first of two launches."""
        if blocks and self.block_histogram is None:
            self.block_histogram = torch.full((blocks * (self.experts + 1) // 2 + 1,), UNWRITTEN, dtype=I32)
        at = {name: tensor.data_ptr() for name, tensor in self.tables.items()}
        return STRUCTS["RouteParams"](
            ids=ids.data_ptr(), ids_are_i64=ids.dtype == I64, tokens=self.tokens, top_k=self.top_k,
            experts=self.experts, first_expert=self.first, tile_tokens=self.tile_tokens, tile_step=self.tile_step,
            max_tiles=self.max_tiles, counter_count=self.counter_count,
            block_histogram=0 if self.block_histogram is None else self.block_histogram.data_ptr(), **at,
        )  # fmt: skip

    def check(self) -> None:
        local = self.ids.flatten().long() - self.first
        local = torch.where((local >= 0) & (local < self.experts), local, -1)
        counts = torch.bincount(local[local >= 0], minlength=self.experts)
        order = torch.argsort(torch.where(local < 0, self.experts, local), stable=True)[: int(counts.sum())]
        places = torch.full_like(local, -1)
        places[order] = torch.arange(len(order))
        tiles = tiles_of(counts.tolist(), None, self.tile_tokens, self.tile_step)
        tail = [-1] * (self.slots - len(order))
        expected = {
            "histogram": counts.tolist(), "offsets": [0, *counts.cumsum(0).tolist()], "place_of_slot": places.tolist(),
            "slot_of_place": [*order.tolist(), *tail], "tile_count": [len(tiles)],
            "counters": [0] * self.counter_count,
            "tiles": tiles + [[-1, 0, 0, 0]] * (self.max_tiles - len(tiles)),
        }  # fmt: skip
        for name, table in self.tables.items():
            *found, behind = table.tolist()
            assert found == expected[name], name
            assert behind == (UNWRITTEN if table.dim() == 1 else [UNWRITTEN] * 4), name


def tiles_of(counts: list[int], firsts: list[int] | None, tile_tokens: int, step: int) -> list[list[int]]:
    """Returns the tiles of each expert's rows: whole steps, and the first tiles have a step more than the others."""
    tiles, place = [], 0
    for expert, count in enumerate(counts):
        place = place if firsts is None else firsts[expert]
        parts, steps, first = -(-count // tile_tokens), -(-count // step), place
        for part in range(parts):
            end = min(first + (steps // parts + (part < steps % parts)) * step, place + count)
            tiles.append([expert, first, end - first, 0])
            first = end
        place += count
    return tiles


def tokens_of(draw: Draw) -> int:
    """Returns few tokens, or so many that a CTA sorts them in several chunks and counts in 16 bits."""
    return draw.one_of(draw.number(1, 40), draw.number(1, 40), draw.number(100, 700))


def given_ids(draw: Draw) -> tuple[Tensor, int, int]:
    """Returns ids that may repeat, some of no expert or of other ranks; local experts, and the first of them."""
    experts, ranks = draw.one_of(1, 2, 7, 8, 33, 130), draw.number(1, 3)
    tokens, top_k = tokens_of(draw), draw.number(1, 9)
    some = draw.number(1, experts * ranks)  # most tokens go to some of the experts
    ids = torch.randint(-1, some, (tokens, top_k), generator=draw.rng)
    return ids.to(draw.one_of(I32, I64)), experts, experts * draw.number(0, ranks - 1)


def cluster_of(draw: Draw, experts: int) -> dict[str, int]:
    """Returns a grid of one cluster with a thread for each expert, and in each CTA one for two of them."""
    threads = draw.one_of(*(threads for threads in (64, 128, 256) if 2 * threads >= experts))
    ctas = draw.number(max(1, -(-experts // threads)), 4)
    return {"grid": ctas, "threads": threads, "cluster": ctas}


def blocks_of(draw: Draw, experts: int) -> dict[str, int]:
    threads = max(64, -(-experts // 32) * 32) * draw.number(1, 2)
    return {"grid": draw.number(1, 5), "threads": threads}


def test_given_ids_in_one_launch(kernels: HostRouting, rng: torch.Generator) -> None:
    for _ in range(DRAWS):
        draw = Draw(rng)
        ids, experts, first = given_ids(draw)
        routing = Routing(ids, experts, first, draw)
        kernels.add("route_given", routing.params(ids), **cluster_of(draw, experts))
        kernels.run(seed_of(rng))
        routing.check()


def test_given_ids_in_two_launches(kernels: HostRouting, rng: torch.Generator) -> None:
    for _ in range(DRAWS):
        draw = Draw(rng)
        ids, experts, first = given_ids(draw)
        routing = Routing(ids, experts, first, draw)
        sizes = blocks_of(draw, experts)
        for name in ("histogram", "place_given"):
            kernels.add(name, routing.params(ids, sizes["grid"]), **sizes)
        kernels.run(seed_of(rng))
        routing.check()


class Chosen:
    """A top-k problem without ties, with the ids and weights that the reference chooses."""

    def __init__(self, draw: Draw) -> None:
        rng, plain = draw.rng, bool(draw.number(0, 1))
        groups = 1 if plain else draw.one_of(1, 2, 4)
        self.experts = groups * draw.number(2, 384 // groups // draw.one_of(1, 4, 20))
        while (lanes := per_lane(self.experts, groups)) is None or lanes > EXPERTS_PER_LANE[-1]:
            self.experts -= groups
        self.kernel = f"e{next(count for count in EXPERTS_PER_LANE if count >= lanes)}{'' if plain else '_any'}"
        self.tokens, topk_group = tokens_of(draw), draw.number(1, groups)
        self.top_k = draw.number(1, min(9, self.experts // groups * topk_group))
        self.logits = tie_free_logits(self.tokens, self.experts, rng).to(draw.one_of(F32, BF16))
        # Scores are below 1, so those with different biases are far apart, and those with equal ones stay apart.
        self.bias = None if plain or draw.number(0, 1) else torch.randint(3, (self.experts,), generator=rng).float()
        scoring = draw.one_of("softmax", "sigmoid")
        # Sums of two sigmoids tie up to rounding.
        kind = 0 if groups == 1 else 1
        options = {"num_expert_group": groups, "topk_group": topk_group} if groups > 1 else {}
        self.valid = torch.tensor([draw.number(0, self.tokens)], dtype=I32) if draw.number(0, 1) else None
        self.expected_weights, self.expected_ids = reference.topk(
            self.logits, self.top_k, scoring_func=scoring, renormalize=True, correction_bias=self.bias,
            num_token_non_padded=self.valid, **({**options, "group_score": "max"} if options else {}),
        )  # fmt: skip
        self.ids = torch.full((self.tokens + 1, self.top_k), UNWRITTEN, dtype=I32)
        self.weights = torch.full((self.tokens + 1, self.top_k), torch.nan)
        self.params = STRUCTS["SelectParams"](
            logits=self.logits.data_ptr(), logits_dtype=DTYPES[self.logits.dtype], tokens=self.tokens,
            experts=self.experts, top_k=self.top_k, correction_bias=0 if self.bias is None else self.bias.data_ptr(),
            scoring=["softmax", "sigmoid"].index(scoring), renormalize=True, scale=1.0, group_score=kind,
            groups=groups, topk_group=topk_group, ids=self.ids.data_ptr(), weights=self.weights.data_ptr(),
            num_token_non_padded=0 if self.valid is None else self.valid.data_ptr(),
        )  # fmt: skip

    def check(self) -> None:
        assert torch.equal(self.ids[:-1], self.expected_ids.int())
        torch.testing.assert_close(self.weights[:-1], self.expected_weights, rtol=1e-5, atol=1e-6)
        assert (self.ids[-1] == UNWRITTEN).all() and self.weights[-1].isnan().all()


@pytest.mark.parametrize("launches", [1, 2])
def test_choice_and_sort(kernels: HostRouting, launches: int, rng: torch.Generator) -> None:
    for _ in range(DRAWS):
        draw = Draw(rng)
        chosen = Chosen(draw)
        ranks = draw.one_of(*(ranks for ranks in (1, 2, 3) if chosen.experts % ranks == 0))
        experts = chosen.experts // ranks
        routing = Routing(chosen.expected_ids, experts, experts * draw.number(0, ranks - 1), draw)
        if launches == 1:
            sizes = cluster_of(draw, experts)
            kernels.add(f"route_{chosen.kernel}", chosen.params, routing.params(chosen.ids), **sizes)
        else:
            sizes = blocks_of(draw, experts)
            params = routing.params(chosen.ids, sizes["grid"])
            kernels.add(f"select_{chosen.kernel}", chosen.params, params, **sizes)
            kernels.add("place_chosen", params, **sizes)
        kernels.run(seed_of(rng))
        chosen.check()
        routing.check()


def test_choice_alone(kernels: HostRouting, rng: torch.Generator) -> None:
    for _ in range(DRAWS):
        draw = Draw(rng)
        chosen = Chosen(draw)
        kernels.add(f"select_{chosen.kernel}", chosen.params, STRUCTS["RouteParams"](), **blocks_of(draw, 1))
        kernels.run(seed_of(rng))
        chosen.check()


def test_schedule_of_rows(kernels: HostRouting, rng: torch.Generator) -> None:
    """Counts below 0 and beyond the room are limited, and more than 1024 experts take several passes."""
    for experts in (1, 3, 40, 1024, 1100):
        draw = Draw(rng)
        rows, tile_tokens = draw.number(0, 3000), draw.one_of(8, 64, 128)
        step, alignment = (8 if tile_tokens == 8 else 16), draw.one_of(1, 16, 128)
        each = draw.one_of(0, draw.number(1, 40))
        rows = experts * each if each else rows
        counts = torch.randint(-2, draw.one_of(4, 90), (experts,), generator=rng).int()
        expected, firsts, place = [], [], 0
        for count in counts.clamp(min=0).tolist():
            firsts.append(len(firsts) * each if each else place)
            expected.append(min(count, rows, each if each else rows - place))
            place = min(place + -(-min(count, rows) // alignment) * alignment, rows)
        tiles = tiles_of(expected, firsts, tile_tokens, step)
        table = torch.full((len(tiles) + 2, 4), UNWRITTEN, dtype=I32)
        tile_count, counters = torch.full((2,), UNWRITTEN, dtype=I32), torch.full((20,), UNWRITTEN, dtype=I32)
        params = STRUCTS["ScheduleParams"](
            row_counts=counts.data_ptr(), experts=experts, rows_each=each, alignment=alignment, rows=rows,
            tile_tokens=tile_tokens, tile_step=step, tiles=table.data_ptr(), tile_count=tile_count.data_ptr(),
            counters=counters.data_ptr(), counter_count=19,
        )  # fmt: skip
        kernels.add("schedule", params, grid=1, threads=1024)
        kernels.run(seed_of(rng))
        assert table.tolist() == [*tiles, *[[UNWRITTEN] * 4] * 2]
        assert tile_count.tolist() == [len(tiles), UNWRITTEN] and counters.tolist() == [0] * 19 + [UNWRITTEN]


def test_block_tables(kernels: HostRouting, rng: torch.Generator) -> None:
    for experts in (1, 5, 200):
        draw = Draw(rng)
        counts = torch.randint(0, draw.one_of(3, 300), (experts,), generator=rng).int()
        rows = int(counts.sum())
        slots = rows + draw.number(0, 5)
        slot_of_place = torch.full((slots,), -1, dtype=I32)
        slot_of_place[:rows] = torch.randperm(slots, generator=rng)[:rows].int()
        weights = torch.rand(max(slots, 1), generator=rng)
        gate_dtype = draw.one_of(F32, BF16)
        offsets, schedule = reference.block_tables(counts, slots)
        found = [torch.full((t.numel() + 1,), UNWRITTEN, dtype=I32) for t in (offsets, schedule)]
        gate = torch.full((slots + 1,), UNWRITTEN, dtype=gate_dtype)
        params = STRUCTS["RaggedParams"](
            histogram=counts.data_ptr(), slot_of_place=slot_of_place.data_ptr(), slot_weights=weights.data_ptr(),
            gate=gate.data_ptr(), gate_dtype=DTYPES[gate_dtype], experts=experts, slots=slots,
            block_offsets=found[0].data_ptr(), block_schedule=found[1].data_ptr(), max_blocks=schedule.shape[1],
        )  # fmt: skip
        kernels.add("ragged", params, grid=draw.number(1, 2), threads=1024)
        kernels.run(seed_of(rng))
        for table, expected in zip(found, (offsets, schedule), strict=True):
            assert table.tolist() == [*expected.flatten().tolist(), UNWRITTEN]
        of_place = torch.where(slot_of_place < 0, 0.0, weights[slot_of_place.clamp(min=0).long()])
        assert gate.tolist() == [*of_place.to(gate_dtype).tolist(), UNWRITTEN]


@pytest.mark.parametrize("columns", [8, 4, 2, 1])
def test_combine(kernels: HostRouting, columns: int, rng: torch.Generator) -> None:
    """Numbers are small multiples of powers of two, so that sums are exact."""
    for keep_slots in (False, True):
        draw = Draw(rng)
        tokens, top_k = draw.number(1, 9), draw.number(1, 19)
        hidden = 8 * draw.number(1, 140) if columns > 1 else draw.number(1, 300)
        places = torch.randperm(tokens * top_k, generator=rng).int()
        y = torch.randint(-8, 9, (tokens * top_k, hidden), generator=rng).bfloat16()
        places[torch.rand(tokens * top_k, generator=rng) < 0.2] = -1
        y[list(set(range(len(y))) - set(places.tolist()))] = torch.nan
        weights = torch.randint(1, 9, (tokens, top_k), generator=rng).float() / 8 if draw.number(0, 1) else None
        rows = torch.where(places[:, None] < 0, 0.0, y[places.clamp(min=0).long()].float()).view(tokens, top_k, hidden)
        terms = rows if weights is None else rows * weights[..., None]
        expected = (0.5 * (terms.flatten(0, 1) if keep_slots else terms.sum(1))).bfloat16()
        out = torch.full((len(expected) + 1, hidden), torch.nan, dtype=BF16)
        params = STRUCTS["CombineParams"](
            y=y.data_ptr(), place_of_slot=places.data_ptr(), weights=0 if weights is None else weights.data_ptr(),
            out=out.data_ptr(), tokens=tokens, top_k=top_k, hidden=hidden, scale=0.5, keep_slots=keep_slots,
            columns=columns,
        )  # fmt: skip
        kernels.add("combine", params, grid=draw.number(1, 5), threads=128)
        kernels.run(seed_of(rng))
        assert same_bits(out[:-1] + 0.0, expected + 0.0) and out[-1].isnan().all()
