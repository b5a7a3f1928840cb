"""`oxmoe.stats` counts calls that returned, and OXMOE_LOG_PLANS prints each plan once a shape."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

import forked
import oxmoe
from cases import Shape, make_layer, make_routing, make_x

SHAPE = Shape("stats", 4, 2, 32, 24)


@pytest.fixture(autouse=True)
def from_zero() -> Iterator[None]:
    oxmoe.stats(reset=True)
    yield


def counted() -> dict[str, tuple[int, int]]:
    """Returns (calls, rows) of each function that was called."""
    calls = oxmoe.stats()["calls"]
    assert set(calls) == {"moe", "moe_masked", "moe_contiguous", "topk", "mm_mxfp8", "allreduce_fusion"}
    return {name: (of["calls"], of["rows"]) for name, of in calls.items() if of["calls"] or of["rows"]}


def test_calls(rng: torch.Generator) -> None:
    weights = make_layer(SHAPE, torch.bfloat16, "cpu", rng).weights()
    x, topk = make_x(5, SHAPE, torch.bfloat16, "cpu", rng), make_routing("uniform", 5, 4, 2, rng)
    assert counted() == {}
    oxmoe.moe(x, weights, *topk)
    oxmoe.moe(x[:3], weights, router_logits=torch.randn((3, 4), generator=rng), top_k=2)
    oxmoe.moe(x[:0], weights, topk[0][:0], topk[1][:0])
    oxmoe.topk(torch.randn((7, 4), generator=rng), 2)
    counts = torch.tensor([5, 0, 2, 1], dtype=torch.int32)
    oxmoe.moe_masked(torch.zeros((4, 6, 32), dtype=torch.bfloat16), weights, counts)
    oxmoe.moe_contiguous(torch.zeros((9, 32), dtype=torch.bfloat16), weights, counts)
    expected = {"moe": (2, 8), "topk": (1, 7), "moe_masked": (1, 24), "moe_contiguous": (1, 9)}
    assert counted() == expected and oxmoe.stats()["launches"] == {}
    assert {name: of["calls"] for name, of in oxmoe.stats(reset=True)["calls"].items() if of["calls"]} == {
        name: calls for name, (calls, _) in expected.items()
    }
    assert counted() == {}


def test_tensors_and_dense_calls(rng: torch.Generator) -> None:
    layer = make_layer(SHAPE, torch.bfloat16, "cpu", rng)
    x, topk = make_x(5, SHAPE, torch.bfloat16, "cpu", rng), make_routing("uniform", 5, 4, 2, rng)
    oxmoe._oxmoe.moe_tensors(x, layer.w13, layer.w2, *topk)
    a, b = (torch.randn((rows, 64), generator=rng) for rows in (6, 16))
    (a, a_scale), (b, b_scale) = (oxmoe.mxfp8_quantize(t) for t in (a, b))
    oxmoe.mm_mxfp8(a, b.t(), a_scale, b_scale)
    assert counted() == {"moe": (1, 5), "mm_mxfp8": (1, 6)}


def test_what_is_refused_is_not_counted(rng: torch.Generator) -> None:
    weights = make_layer(SHAPE, torch.bfloat16, "cpu", rng).weights()
    x, topk = make_x(5, SHAPE, torch.bfloat16, "cpu", rng), make_routing("uniform", 5, 4, 2, rng)
    with pytest.raises(ValueError, match="x"):
        oxmoe.moe(x[:4], weights, *topk)
    with pytest.raises(ValueError, match="top_k"):
        oxmoe.topk(torch.zeros((2, 4)), 9)
    assert counted() == {}


PROGRAM = """
import torch, oxmoe
weights = oxmoe.ExpertWeights.bf16(torch.zeros((4, 48, 32)).bfloat16(), torch.zeros((4, 32, 24)).bfloat16())
for tokens in (3, 3, 5):
    oxmoe.moe(torch.zeros((tokens, 32)).bfloat16(), weights, router_logits=torch.zeros((tokens, 4)), top_k=2)
"""


@pytest.mark.parametrize(("value", "plans"), [("1", 2), ("0", 0), (None, 0)])
def test_plans_are_printed_once_a_shape(value: str | None, plans: int) -> None:
    environment = {name: text for name, text in os.environ.items() if name != "OXMOE_LOG_PLANS"}
    environment |= {"OXMOE_LOG_PLANS": value} if value is not None else {}
    done = forked.run("-c", PROGRAM, env=environment)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("oxmoe: ")]
    heads = [line for line in lines if "MoE layer: 4 experts, top-2, hidden 32, intermediate 24" in line]
    assert len(heads) == plans and ("workspace" in done.stderr) == (plans > 0)
