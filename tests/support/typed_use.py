"""Types that a user's code gets from the package. mypy reads this file (`make types`), and nothing runs it."""

from __future__ import annotations

from typing import Any

import numpy
import torch
from typing_extensions import assert_type

import oxmoe

Array = numpy.ndarray[Any, Any]


def with_torch(x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, logits: torch.Tensor) -> None:
    weights = oxmoe.ExpertWeights.bf16(w13, w2, b2=torch.zeros(8))
    assert_type(weights, oxmoe.ExpertWeights)
    assert_type(oxmoe.moe(x, weights, router_logits=logits, top_k=2), torch.Tensor)
    assert_type(oxmoe.moe(torch.nn.Parameter(x), weights, router_logits=logits, top_k=2), torch.Tensor)
    assert_type(oxmoe.topk(logits, 2), tuple[torch.Tensor, torch.Tensor])
    assert_type(oxmoe.workspace_bytes(weights, 8, 2), int)
    assert_type(oxmoe.moe_masked(x, weights, logits), torch.Tensor)
    assert_type(oxmoe.moe_contiguous(x, weights, logits), torch.Tensor)


def with_numpy(x: Array, w13: Array, w2: Array, logits: Array) -> None:
    weights = oxmoe.ExpertWeights.f32(w13, w2)
    assert_type(oxmoe.moe(x, weights, router_logits=logits, top_k=2), Array)
    assert_type(oxmoe.topk(logits, 2), tuple[Array, Array])


def wrong(x: torch.Tensor, weights: oxmoe.ExpertWeights, logits: torch.Tensor) -> None:
    oxmoe.moe([[1.0]], weights, router_logits=logits, top_k=2)  # type: ignore[type-var]
    oxmoe.moe(x, weights, router_logits="logits", top_k=2)  # type: ignore[type-var]
    oxmoe.moe(x, weights, router_logits=logits, scoring_func="soft")  # type: ignore[arg-type]
    oxmoe.moe(x, weights, router_logits=logits, topk=2)  # type: ignore[call-arg]
