"""Random sequences of all-reduces of two to four ranks, on CPUs (`fuzz_allreduce.py`, which runs longer by hand)."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch

import fuzz_allreduce
from ranks import Crew, seed_of

SECONDS, STEPS = 4, 40


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_random_sequences(ranks: int, rng: torch.Generator) -> None:
    """Each call is right on all ranks, or is one clear error on all of them and writes nothing."""
    crew = Crew(ranks)
    try:
        count, wrong = fuzz_allreduce.until(
            SECONDS, lambda seed: fuzz_allreduce.run(crew, seed, STEPS), seed_of(rng) % 10**6
        )
    finally:
        crew.close()
    assert not wrong, "\n".join(wrong)
    assert count >= 1


def test_what_is_drawn() -> None:
    """Calls of no token, of one token and of as many as fit, and every kind of pattern."""
    rng = random.Random(7)
    calls = [fuzz_allreduce.draw_call(rng) for _ in range(600)]
    assert set(fuzz_allreduce.KINDS) == {call.kind for call in calls}
    room = fuzz_allreduce.ROWS * fuzz_allreduce.ROW_BYTES
    bytes_of = Counter(call.tokens * call.hidden * torch.empty((), dtype=call.dtype).element_size() for call in calls)
    assert max(bytes_of) == room and bytes_of[room] > 5 and bytes_of[0] > 20
    assert sum(call.tokens == 1 for call in calls) > 20


def test_wrong_numbers_are_found() -> None:
    """A number that is off by one step, a NaN in another place, and a NaN that is missing."""
    exact = torch.tensor([1.0, 3.0, float("nan"), 1e-3], dtype=torch.float64)
    for dtype in fuzz_allreduce.HALF_ULP:
        right = exact.to(dtype)
        assert fuzz_allreduce.near(right, exact, 0.0)
        step = 2.0 * fuzz_allreduce.HALF_ULP[dtype]
        assert not fuzz_allreduce.near(right * (1 + 2 * step), exact, 0.0)
        assert not fuzz_allreduce.near(right.nan_to_num(), exact, 0.0)
        assert not fuzz_allreduce.near(torch.full((4,), float("nan")).to(dtype), exact, 0.0)
