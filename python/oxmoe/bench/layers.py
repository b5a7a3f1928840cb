"""What is timed: layer shapes of real models, their operands, the roofline, the check and the clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from oxmoe import reference
from oxmoe.testing import assert_close_ulp, graph_time_us, roofline
from torch import Tensor


@dataclass(frozen=True)
class Shape:
    """One MoE layer with gated silu and no biases."""

    experts: int
    top_k: int
    hidden: int
    intermediate: int


SHAPES = {
    "qwen3-30b-a3b": Shape(128, 8, 2048, 768),
    "mixtral-8x7b-tp2": Shape(8, 2, 4096, 7168),
    "gpt-oss-20b": Shape(32, 4, 2880, 2880),
    "dsv3-tp8": Shape(256, 8, 7168, 256),
    "dsv3-ep8": Shape(32, 8, 7168, 2048),
    "granite-1b-a400m": Shape(32, 8, 1024, 512),
}


@dataclass(frozen=True)
class Weights:
    w13: Tensor  # [E, 2I, H], rows [gate; up]
    w2: Tensor  # [E, H, I]


@dataclass(frozen=True)
class Inputs:
    x: Tensor  # [T, H]
    router_logits: Tensor  # fp32 [T, E]


def make_weights(shape: Shape, dtype: torch.dtype, device: str, count: int) -> list[Weights]:
    """count layers, scaled so that activations and outputs are of size one."""

    def randn(*size: int, fan_in: int) -> Tensor:
        return torch.randn(size, dtype=dtype, device=device).mul_(fan_in**-0.5)

    return [
        Weights(
            randn(shape.experts, 2 * shape.intermediate, shape.hidden, fan_in=shape.hidden),
            randn(shape.experts, shape.hidden, shape.intermediate, fan_in=shape.intermediate),
        )
        for _ in range(count)
    ]


def make_inputs(shape: Shape, tokens: int, dtype: torch.dtype, device: str, count: int) -> list[Inputs]:
    return [
        Inputs(
            torch.randn(tokens, shape.hidden, dtype=dtype, device=device),
            torch.randn(tokens, shape.experts, device=device),
        )
        for _ in range(count)
    ]


def floor_us(shape: Shape, inputs: Sequence[Inputs], device: str) -> float | None:
    """The roofline of one layer on the one GPU whose ceilings were measured, else None."""
    if device != "cuda" or "H200" not in torch.cuda.get_device_name():
        return None
    active = [item.router_logits.topk(shape.top_k).indices.unique().numel() for item in inputs]
    return roofline(
        tokens=inputs[0].x.shape[0],
        top_k=shape.top_k,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        active_experts=sum(active) / len(active),
    ).us


def error(shape: Shape, weights: Weights, inputs: Inputs, result: Tensor) -> str | None:
    """What is wrong with a layer's result, None if nothing is."""
    expected = reference.moe(inputs.x, weights.w13, weights.w2, router_logits=inputs.router_logits, top_k=shape.top_k)
    try:
        assert_close_ulp(result, expected)
    except AssertionError as failure:
        return str(failure)
    return None


def time_us(calls: Sequence[Callable[[], object]], device: str) -> float:
    return graph_time_us(calls) if device == "cuda" else wall_time_us(calls[0])


def wall_time_us(call: Callable[[], object], *, seconds: float = 1.0) -> float:
    """Median microseconds of a call, repeated for about this long and at least five times after two warm-ups."""
    call()
    call()
    times, end = [], time.perf_counter() + seconds
    while len(times) < 5 or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times)
