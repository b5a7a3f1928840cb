"""sort_by_expert: exact integers against the reference and against a loop."""

from __future__ import annotations

import pytest
import torch

import oxmoe
from cases import PATTERNS, make_routing
from oxmoe import reference

NAMES = ("histogram", "offsets", "place_of_slot", "slot_of_place")


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize(
    "tokens,experts,top_k", [(0, 8, 2), (1, 8, 2), (7, 128, 8), (64, 60, 4), (333, 256, 8), (1500, 8, 2)]
)
def test_against_reference(
    device: str, pattern: str, tokens: int, experts: int, top_k: int, rng: torch.Generator
) -> None:
    _, ids = make_routing(pattern, tokens, experts, top_k, rng)
    for dtype in (torch.int32, torch.int64):
        tables = oxmoe.sort_by_expert(ids.to(dtype).to(device), experts)
        for name, table, expected in zip(NAMES, tables, reference.sort_by_expert(ids, experts), strict=True):
            assert table.dtype == torch.int32 and torch.equal(table.cpu(), expected), name


@pytest.mark.parametrize("ep_size", [2, 4])
def test_expert_parallel_ranges(device: str, ep_size: int, rng: torch.Generator) -> None:
    """Each rank places its own experts' slots; together they place every slot once."""
    experts = 32 // ep_size
    _, ids = make_routing("holes", 100, 32, 4, rng)
    placed = torch.zeros(400, dtype=torch.int32)
    for rank in range(ep_size):
        tables = oxmoe.sort_by_expert(ids.to(device), experts, first_expert=rank * experts)
        for name, table, expected in zip(
            NAMES, tables, reference.sort_by_expert(ids, experts, first_expert=rank * experts), strict=True
        ):
            assert torch.equal(table.cpu(), expected), name
        placed += (tables[2].cpu() >= 0).int()
    assert torch.equal(placed, (ids.view(-1) >= 0).int())


def test_ids_of_others_are_skipped(device: str) -> None:
    """Ids below and above the window are skipped; tests/core/test_ids.py has ids that name no expert of any rank."""
    ids = torch.tensor([[0, 9], [5, -1], [1 << 30, 0]], dtype=torch.int32, device=device)
    histogram, offsets, place_of_slot, slot_of_place = oxmoe.sort_by_expert(ids, 5, first_expert=0)
    assert histogram.tolist() == [2, 0, 0, 0, 0] and offsets.tolist() == [0, 2, 2, 2, 2, 2]
    assert place_of_slot.tolist() == [0, -1, -1, -1, -1, 1] and slot_of_place.tolist() == [0, 5, -1, -1, -1, -1]


def test_reference_against_a_loop(rng: torch.Generator) -> None:
    _, ids = make_routing("holes", 23, 6, 3, rng)
    flat = ids.view(-1).tolist()
    by_expert = [[slot for slot, expert in enumerate(flat) if expert == e] for e in range(6)]
    order = [slot for slots in by_expert for slot in slots]
    histogram, offsets, place_of_slot, slot_of_place = (table.tolist() for table in reference.sort_by_expert(ids, 6))
    assert histogram == [len(slots) for slots in by_expert]
    assert offsets == [sum(histogram[:e]) for e in range(7)]
    assert slot_of_place == order + [-1] * (len(flat) - len(order))
    assert place_of_slot == [order.index(slot) if slot in order else -1 for slot in range(len(flat))]
