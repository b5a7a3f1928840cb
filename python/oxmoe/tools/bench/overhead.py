"""Measures what one Python call of `oxmoe.moe` costs the caller, with `out` and `workspace` given."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

import oxmoe
from oxmoe.tools.bench.layers import Shape, make_inputs, make_weights
from oxmoe.tools.bench.machine import clocks
from oxmoe.tools.bench.timing import Times, fields

TINY = Shape(experts=4, top_k=2, hidden=64, intermediate=64)


def _call(tokens: int, device: str, *, logits: bool) -> Callable[[], object]:
    (weights,) = make_weights(TINY, torch.bfloat16, device, 1)
    (inputs,) = make_inputs(TINY, tokens, torch.bfloat16, device, 1)
    experts = oxmoe.ExpertWeights.bf16(weights.w13, weights.w2)
    size = oxmoe.workspace_bytes(experts, tokens, TINY.top_k)
    room = torch.empty(size + 256, dtype=torch.uint8, device=device)
    start = -room.data_ptr() % 256
    x, out, workspace = inputs.x, torch.empty_like(inputs.x), room[start : start + size]
    if logits:
        router_logits = inputs.router_logits
        return lambda: oxmoe.moe(x, experts, router_logits=router_logits, top_k=2, out=out, workspace=workspace)
    topk_weights = torch.full((tokens, 2), 0.5, device=device)
    topk_ids = torch.zeros((tokens, 2), dtype=torch.int32, device=device)
    return lambda: oxmoe.moe(x, experts, topk_weights, topk_ids, out=out, workspace=workspace)


def _time_us(call: Callable[[], object], device: str, *, batches: int = 50, calls: int = 200) -> Times:
    """Times how long a call takes to be enqueued, one number a batch; the device is idle when a batch starts."""
    call()
    times = []
    for _ in range(batches):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - start) * 1e6 / calls)
    return Times(times, clocks(device))


def measure(device: str) -> list[dict[str, Any]]:
    """Returns one row for each case. On CPU the one-token cases contain their arithmetic: about 50 thousand
    multiplications."""
    rows = []
    for case, tokens, logits in (
        ("no tokens, ids given", 0, False),
        ("no tokens, from logits", 0, True),
        ("one token, ids given", 1, False),
        ("one token, from logits", 1, True),
    ):
        us = _time_us(_call(tokens, device, logits=logits), device)
        rows.append({"op": "overhead", "case": case, "device": device, **fields(us)})
    return rows
