"""Calls on a stream that has a part of the GPU's multiprocessors have the whole GPU's bits, also if they are
captured."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import oxmoe
from cases import Shape, make_layer, make_x
from fp8_cases import make_fp8
from mxfp4_cases import make_blocks
from mxfp8_cases import make_mxfp8
from oxmoe.testing import same_bits

pytestmark = pytest.mark.gpu

MULTIPROCESSORS = 16
RESOURCE_BYTES, RESOURCE_SM, DEFAULT_STREAM, NON_BLOCKING = 256, 1, 1, 1


@pytest.fixture
def part() -> Iterator[torch.cuda.Stream]:
    """Yields a stream of a green context."""
    torch.empty(1, device="cuda")
    driver = ctypes.CDLL("libcuda.so.1")

    def call(function: str, *arguments: object) -> None:
        status = getattr(driver, function)(*arguments)
        if status:
            pytest.skip(f"{function} fails with {status}: no green contexts here")

    whole, group, rest = (ctypes.create_string_buffer(RESOURCE_BYTES) for _ in range(3))
    groups, device = ctypes.c_uint(1), torch.cuda.current_device()
    call("cuDeviceGetDevResource", device, whole, RESOURCE_SM)
    call("cuDevSmResourceSplitByCount", group, ctypes.byref(groups), whole, rest, 0, MULTIPROCESSORS)
    description, context, stream = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    call("cuDevResourceGenerateDesc", ctypes.byref(description), group, 1)
    call("cuGreenCtxCreate", ctypes.byref(context), description, device, DEFAULT_STREAM)
    call("cuGreenCtxStreamCreate", ctypes.byref(stream), context, NON_BLOCKING, 0)
    assert stream.value
    external = torch.cuda.ExternalStream(stream.value)
    yield external
    external.synchronize()
    driver.cuStreamDestroy_v2(stream)
    driver.cuGreenCtxDestroy(context)


SMALL = Shape("small", 64, 8, 1024, 512)
LARGE = Shape("large", 4, 2, 4096, 4096)  # runs the layer in one launch behind a launch of routing
KINDS: dict[str, Callable[[torch.Generator], oxmoe.ExpertWeights]] = {
    "bf16": lambda rng: make_layer(SMALL, torch.bfloat16, "cuda", rng).weights(),
    "bf16-large": lambda rng: make_layer(LARGE, torch.bfloat16, "cuda", rng).weights(),
    "fp8_block": lambda rng: make_fp8(SMALL, "cuda", rng).weights(),
    "mxfp4": lambda rng: make_blocks(SMALL, "bf16", "cuda", rng).weights(),
    "mxfp8": lambda rng: make_mxfp8(SMALL, "cuda", rng).weights(),
}


def check(call: Callable[[Tensor], Tensor], out: Tensor, part: torch.cuda.Stream) -> None:
    """Compares `call`, which writes to its argument. torch.cuda.synchronize() waits for the primary context, not for
    `part`."""
    expected = call(torch.full_like(out, torch.nan)).clone()
    torch.cuda.synchronize()
    with torch.cuda.stream(part):
        result = call(torch.full_like(out, torch.nan))
    part.synchronize()
    assert same_bits(result, expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=part):
        call(out)
    for _ in range(3):
        out.fill_(torch.nan)
        torch.cuda.synchronize()
        with torch.cuda.stream(part):
            graph.replay()
        part.synchronize()
        assert same_bits(out, expected)
    # The calls leave nothing behind that changes the whole GPU's bits.
    assert same_bits(call(torch.full_like(out, torch.nan)), expected)


@pytest.mark.parametrize("tokens", [1, 2, 8, 64])
@pytest.mark.parametrize("from_logits", [True, False], ids=["logits", "ids"])
@pytest.mark.parametrize("kind", KINDS)
def test_layers(kind: str, from_logits: bool, tokens: int, part: torch.cuda.Stream, rng: torch.Generator) -> None:
    shape = LARGE if kind == "bf16-large" else SMALL
    weights, x = KINDS[kind](rng), make_x(tokens, shape, torch.bfloat16, "cuda", rng)
    logits = torch.randn(tokens, shape.experts, generator=rng).cuda()
    topk_weights, topk_ids = oxmoe.topk(logits, shape.top_k)

    def call(out: Tensor) -> Tensor:
        if from_logits:
            return oxmoe.moe(x, weights, router_logits=logits, top_k=shape.top_k, out=out)
        return oxmoe.moe(x, weights, topk_weights, topk_ids, out=out)

    check(call, torch.empty_like(x), part)


@pytest.mark.parametrize("kind", ["bf16", "fp8_block", "mxfp4", "mxfp8"])
def test_rows_in_expert_order(kind: str, part: torch.cuda.Stream, rng: torch.Generator) -> None:
    weights, room = KINDS[kind](rng), 32
    x = torch.randn(SMALL.experts, room, SMALL.hidden, generator=rng).bfloat16().cuda()
    counts = torch.randint(0, room + 1, (SMALL.experts,), generator=rng, dtype=torch.int32).cuda()
    check(lambda out: oxmoe.moe_masked(x, weights, counts, out=out), torch.empty_like(x), part)
