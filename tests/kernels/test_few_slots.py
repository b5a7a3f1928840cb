"""The tables that a layer in one launch makes of given ids or of router logits, on the host (host_few_slots.py)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import oxmoe
from cases import PATTERNS, make_routing, tie_free_logits
from host_few_slots import KERNELS, SLOTS, HostFewSlots, Tables

# Tokens and slots of a token: one slot, the most slots, the most tokens, and rows that are no whole words of ids.
BATCHES = ((1, 1), (1, 32), (2, 32), (3, 5), (4, 8), (8, 8), (8, 1), (7, 9))


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> HostFewSlots:
    return HostFewSlots(tmp_path_factory.mktemp("few_slots"))


def check(tables: Tables, ids: Tensor, weights: Tensor, first_expert: int, experts: int) -> None:
    """Compares the tables with sorted slots. `ids` are global; those of other ranks and -1 have no place."""
    top_k = ids.shape[1]
    local = [int(i) - first_expert for i in ids.flatten()]
    here = sorted((expert, slot) for slot, expert in enumerate(local) if 0 <= expert < experts)
    places = [-1] * len(local)
    for place, (_, slot) in enumerate(here):
        places[slot] = place
    assert tables.places == places
    assert tables.slots[: len(here)] == [slot for _, slot in here]
    # A tile has slots of one expert and a token once at most. Without repeated ids an expert has one tile.
    next_place = 0
    for expert, first, count in tables.tiles:
        assert first == next_place and count > 0
        next_place += count
        members = here[first : first + count]
        assert {of for of, _ in members} == {expert}
        assert len({slot // top_k for _, slot in members}) == count
    assert next_place == len(here)
    repeats = any(len({i for i in row.tolist() if i >= 0}) < int((row >= 0).sum()) for row in ids)
    if not repeats:
        assert len(tables.tiles) == len({expert for expert, _ in here})
    for (_, slot), of in zip(here, (tables.weights[slot] for _, slot in here), strict=True):
        assert of == weights.flatten()[slot]


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("name", KERNELS)
def test_given_ids(host: HostFewSlots, name: str, pattern: str, rng: torch.Generator) -> None:
    most = KERNELS[name][0]
    for seed, (tokens, top_k) in enumerate(BATCHES):
        for experts, ranks in ((1, 1), (31, 1), (most, 1), (most, 3), (33, 5)):
            weights, ids = make_routing(pattern, tokens, experts * ranks, top_k, rng)
            for wide in (False, True):
                rank = int(torch.randint(ranks, (), generator=rng))
                given = ids.long() if wide else ids
                select = {"tokens": tokens, "top_k": top_k, "ids": given.data_ptr(), "weights": weights.data_ptr()}
                own = {"experts": experts, "first_expert": rank * experts}
                tables = host.route(name, select, seed, ids_are_i64=wide, **own)
                check(tables, ids, weights, rank * experts, experts)


@pytest.mark.parametrize("name", KERNELS)
def test_ids_that_name_no_expert(host: HostFewSlots, name: str) -> None:
    """On GPUs ids are not checked: a slot whose id is wrong has no place. Low words of wide ids name no expert."""
    experts, first_expert = 20, 1 << 20
    named = first_expert + 3
    wrong = (-1, -2, first_expert - 1, first_expert + experts, 2**31 - 1, -(2**31), 3)
    wide = ((1 << 32) + named, named - (1 << 32), 2**63 - 1, -(2**63))
    for given, dtype in ((wrong, torch.int32), ((*wrong, *wide), torch.int64)):
        ids = torch.tensor([[named, *given], [*given, named]], dtype=dtype)
        weights = torch.rand(ids.shape)
        select = {"tokens": 2, "top_k": ids.shape[1], "ids": ids.data_ptr(), "weights": weights.data_ptr()}
        own = {"ids_are_i64": dtype == torch.int64, "experts": experts, "first_expert": first_expert}
        tables = host.route(name, select, 1, **own)
        assert tables.tiles == [(3, 0, 2)] and sorted(tables.places)[-2:] == [0, 1]
        check(tables, ids, weights, first_expert, experts)


@pytest.mark.parametrize("name", KERNELS)
def test_logits(host: HostFewSlots, name: str, rng: torch.Generator) -> None:
    """Tokens beyond `num_token_non_padded` have no places, and their logits may be NaN."""
    most = KERNELS[name][0]
    for seed, (tokens, top_k) in enumerate(BATCHES):
        for experts, ranks in ((most, 1), (most // 4, 4), (37, 1), (37, 2)):
            if experts * ranks < top_k or tokens * top_k > SLOTS:
                continue
            logits = tie_free_logits(tokens, experts * ranks, rng)
            for valid in {0, 1, tokens}:
                logits[valid:] = torch.nan
                count = torch.tensor(valid, dtype=torch.int32)
                weights, ids = oxmoe.topk(logits, top_k, num_token_non_padded=count)
                select = {
                    "logits": logits.data_ptr(), "logits_dtype": 0, "tokens": tokens, "experts": experts * ranks,
                    "top_k": top_k, "scale": 1.0, "renormalize": True, "num_token_non_padded": count.data_ptr(),
                }  # fmt: skip
                for rank in range(ranks):
                    own = {"experts": experts, "first_expert": rank * experts}
                    tables = host.route(name, select, seed, **own)
                    chosen = ids >= 0
                    made = tables.weights.view(ids.shape)
                    torch.testing.assert_close(made[chosen], weights[chosen], rtol=2e-6, atol=0)
                    check(tables, ids, tables.weights, rank * experts, experts)
                logits = tie_free_logits(tokens, experts * ranks, rng)
