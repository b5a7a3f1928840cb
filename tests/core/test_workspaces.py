"""Launches that count in counters of their workspace have the same kernel and the same bits on any number of
workspaces."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import oxmoe
import oxmoe._oxmoe as extension
from cases import Shape, apart, make_layer, make_workspace, make_x, tie_free_logits
from fake_cuda.harness import asked, execute, parameters_of
from fp8_cases import make_fp8
from mxfp4_cases import make_blocks
from oxmoe.testing import same_bits
from test_masked import draw
from test_masked import make as make_experts

MANY = 1000
IN_THE_ARRAY = 256  # workspaces that have counters, as in src/counters.rs
# (format, (experts, hidden, intermediate), tokens, top_k, kernel); tokens 0: rows in expert order.
LAUNCHES = [
    ("bf16", (128, 2048, 768), 4, 8, "routed_layer_sm90"),
    ("fp8_block", (128, 2048, 768), 2, 8, "routed_layer_fp8_sm90"),
    ("mxfp4", (32, 2880, 2880), 1, 4, "routed_layer_mxfp4_sm90"),
    ("mxfp4", (128, 2048, 768), 0, 1, "grouped_gemm_mxfp4_sm90"),
    ("nvfp4", (64, 2048, 768), 0, 1, "grouped_gemm_nvfp4_sm90"),
]


@pytest.mark.usefixtures("kernels_for_hopper")
@pytest.mark.parametrize(("format", "layer", "tokens", "top_k", "kernel"), LAUNCHES)
def test_one_plan(
    format: str, layer: tuple[int, int, int], tokens: int, top_k: int, kernel: str, driver: Path, tmp_path: Path
) -> None:
    """Each workspace has its own counters, zero or what its last launch left; no workspace changes what is launched."""
    arguments = {"format": format, "layer": layer, "tokens": tokens, "top_k": top_k, "count": MANY}
    result = execute(driver, tmp_path, "many_workspaces", arguments)
    array, calls, size = result["array"], result["calls"], result["size"]
    assert result["zeros"]
    span = 4 * (2 + (0 if tokens else layer[0]))
    found, first = [], None
    for call in calls:
        *before, launch = call["records"]
        assert launch["call"] == "cuLaunchKernelEx" and launch["kernel"].startswith(kernel)
        first = first or asked(launch)
        assert asked(launch) == first
        (params,) = [p for p in parameters_of(launch) if not isinstance(p, tuple)]
        counters = params.counters
        if not tokens:
            assert params.up.next_unit == counters
        if array["address"] <= counters < array["address"] + array["bytes"]:
            assert not before and counters + span <= array["address"] + array["bytes"]
        else:
            assert call["workspace"] <= counters and counters + span <= call["workspace"] + size
            (memset,) = before
            assert memset["call"] == "cuMemsetD8Async" and memset["stream"] == launch["stream"]
            assert (memset["address"], memset["value"], memset["bytes"]) == (counters, 0, span)
        found.append((counters, bool(before)))
    assert [zeroed for _, zeroed in found[:MANY]] == [i >= IN_THE_ARRAY for i in range(MANY)]
    assert found[MANY:] == [found[0], found[MANY - 1], found[0]]
    addresses = sorted(address for address, _ in found[:MANY])
    assert all(a + span <= b for a, b in itertools.pairwise(addresses))


def routed(kind: str, rng: torch.Generator) -> tuple[Callable[[Tensor | None], Tensor], Tensor, int]:
    """Returns a call from router logits, the result of the separate launches, and the bytes of its workspace."""
    tokens, shape = (1 if kind == "mxfp4" else 5), Shape(kind, 16, 4, 512, 256)
    weights: Any = {
        "bf16": lambda: make_layer(shape, torch.bfloat16, "cuda", rng).weights(),
        "fp8_block": lambda: make_fp8(shape, "cuda", rng).weights(),
        "mxfp4": lambda: make_blocks(shape, "bf16", "cuda", rng).weights(),
    }[kind]()
    x = make_x(tokens, shape, torch.bfloat16, "cuda", rng)
    logits = tie_free_logits(tokens, 16, rng).cuda()
    expected = apart(x, weights, *oxmoe.topk(logits, 4))
    return (
        lambda workspace: oxmoe.moe(x, weights, router_logits=logits, top_k=4, workspace=workspace),
        expected,
        oxmoe.workspace_bytes(weights, tokens, 4),
    )


def masked(kind: str, rng: torch.Generator) -> tuple[Callable[[Tensor | None], Tensor], Tensor, int]:
    """Returns the same three for rows in expert order, without padding rows."""
    shape, m = Shape(kind, 16, 1, 512, 256), 12
    weights, x = make_experts(kind, shape, "cuda", rng), draw(shape, kind, m, "cuda", rng)
    counts = torch.full((16,), m, dtype=torch.int32, device="cuda")
    expected = oxmoe.moe_contiguous(x.flatten(0, 1), weights, counts).view_as(x)
    return (
        lambda workspace: oxmoe.moe_masked(x, weights, counts, workspace=workspace),
        expected,
        oxmoe.masked_workspace_bytes(weights, 16 * m),
    )


CASES = [(routed, "bf16"), (routed, "fp8_block"), (routed, "mxfp4"), (masked, "mxfp4"), (masked, "nvfp4")]


def spaces_of(size: int, count: int = MANY) -> list[Tensor]:
    """Returns workspaces full of ones: no counter may lie in them."""
    step = -(-size // 256) * 256
    room = make_workspace(count * step, torch.device("cuda")).fill_(255)
    return [room[i * step : i * step + size] for i in range(count)]


@pytest.mark.gpu
@pytest.mark.parametrize(("make", "kind"), CASES, ids=lambda value: getattr(value, "__name__", value))
def test_bits_on_many_workspaces(make: Any, kind: str, rng: torch.Generator) -> None:
    call, expected, size = make(kind, rng)
    spaces = spaces_of(size)
    for _ in range(2):
        results = [call(space) for space in spaces]
        assert all(same_bits(result, expected) for result in results)
    # Calls on two streams overlap.
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    for number in range(0, MANY, 2):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                results[number + i] = call(spaces[number + i])
    torch.cuda.synchronize()
    assert all(same_bits(result, expected) for result in results)


@pytest.mark.gpu
@pytest.mark.parametrize(("make", "kind"), CASES, ids=lambda value: getattr(value, "__name__", value))
def test_bits_in_a_graph(make: Any, kind: str, rng: torch.Generator) -> None:
    call, expected, size = make(kind, rng)
    spaces = spaces_of(size)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [call(space) for space in spaces]
    for _ in range(3):
        for result in results:
            result.fill_(torch.nan)
        graph.replay()
        assert all(same_bits(result, expected) for result in results)
        # Eager calls between replays go on counting.
        assert same_bits(call(spaces[0]), expected) and same_bits(call(spaces[-1]), expected)


def test_what_kernels_cannot_count_is_refused() -> None:
    """GEMM2 gathers GEMM1's output in vectors of 8, whose number has 31 bits. The rows are slots, not tokens."""
    sizes, most = (8, 8, 1024, 14336), 8 * (2**31 - 1) // (8 * 14336)
    assert extension.shape_workspace_bytes(*sizes, most) > 2 * 8 * most * 14336
    message = (
        rf"num_tokens: {8 * (most + 1)} slots \(tokens x top-k\) of 14336 columns .* beyond 8 x 2\^31 elements; split"
    )
    with pytest.raises(NotImplementedError, match=message):
        extension.shape_workspace_bytes(*sizes, most + 1)
    weights = oxmoe.ExpertWeights.bf16(
        *(torch.zeros(shape, dtype=torch.bfloat16) for shape in ((1, 512, 8), (1, 8, 256)))
    )
    most = 8 * (2**31 - 1) // (32 * 256)
    assert oxmoe.workspace_bytes(weights, most, 32) > 0
    with pytest.raises(NotImplementedError, match=r"^num_tokens: .* of 256 columns between the GEMMs"):
        oxmoe.workspace_bytes(weights, most + 2, 32)
