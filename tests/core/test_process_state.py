"""Calls do not depend on state that other code of the process sets: the floating-point mode of a thread, torch's
default dtype and device, derivatives that torch computes, and calls on other threads."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import oxmoe
from cases import Shape, make_layer, make_routing, make_workspace, make_x
from oxmoe import nvfp4, quantize, reference
from oxmoe.peers import topk_forms
from oxmoe.testing import same_bits

SHAPE = Shape("state", 4, 2, 64, 32)
libm = ctypes.CDLL(None)
FE_TONEAREST, FE_DOWNWARD = 0, 0x400  # of <fenv.h> on x86-64


@pytest.fixture
def operands(rng: torch.Generator) -> dict[str, Any]:
    topk_weights, topk_ids = make_routing("uniform", 5, SHAPE.experts, SHAPE.top_k, rng)
    return {
        "x": make_x(5, SHAPE, torch.float32, "cpu", rng),
        "weights": make_layer(SHAPE, torch.float32, "cpu", rng).weights(),
        "topk_weights": topk_weights,
        "topk_ids": topk_ids,
    }


# The floating-point mode


@contextmanager
def flushing() -> Iterator[None]:
    """Denormal numbers are 0 on this thread."""
    assert torch.set_flush_denormal(True), "this processor does not flush"
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


@contextmanager
def rounding_down() -> Iterator[None]:
    assert libm.fesetround(FE_DOWNWARD) == 0
    try:
        yield
    finally:
        libm.fesetround(FE_TONEAREST)


def in_mode(mode: Any, call: Any) -> list[Tensor]:
    with mode():
        result = call()
    # The mode of the caller is the caller's: the call sets it back.
    return list(result) if isinstance(result, tuple) else [result]


def test_denormal_numbers_count_in_every_mode(rng: torch.Generator) -> None:
    """Small calls run on the caller's thread, and large ones on the threads of a pool, with the same bits."""
    codes = torch.randint(256, (8, 64), generator=rng, dtype=torch.int32).to(torch.uint8)
    least = torch.zeros((8, 4), dtype=torch.uint8)  # 2^-127, a denormal number
    for rows in (1, 8):
        right = quantize.dequantize(codes[:rows], least[:rows])
        assert bool((right != 0).any())
        (flushed,) = in_mode(flushing, lambda rows=rows: quantize.dequantize(codes[:rows], least[:rows]))
        assert same_bits(flushed, right)
    logits = torch.randn((3, 16), generator=rng) * 1e-40
    weights, ids = oxmoe.topk(logits, 4, scoring_func="identity", renormalize=False)
    flushed_weights, flushed_ids = in_mode(
        flushing, lambda: oxmoe.topk(logits, 4, scoring_func="identity", renormalize=False)
    )
    assert torch.equal(flushed_ids, ids) and same_bits(flushed_weights, weights)
    assert bool((weights != 0).all())


@pytest.mark.parametrize("mode", [flushing, rounding_down])
def test_a_layer_has_the_same_bits_in_every_mode(mode: Any, operands: dict[str, Any], rng: torch.Generator) -> None:
    w13 = torch.randn((4, 64, 64), generator=rng) * 1e-38
    tiny = oxmoe.ExpertWeights.f32(w13, torch.randn((4, 64, 32), generator=rng) * 1e30)
    for weights in (operands["weights"], tiny):
        for tokens in (1, 5):
            given = {name: operands[name][:tokens] for name in ("x", "topk_weights", "topk_ids")}
            right = oxmoe.moe(weights=weights, **given)
            (got,) = in_mode(mode, lambda weights=weights, given=given: oxmoe.moe(weights=weights, **given))
            assert same_bits(got, right)


def test_the_caller_keeps_its_mode() -> None:
    tiny = torch.full((1,), 1e-39)
    with flushing():
        quantize.mxfp4(torch.ones(1, 32))
        # Multiplying on this thread still flushes.
        assert float(tiny * 0.5) == 0


# torch's defaults


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_default_dtypes_change_nothing(dtype: torch.dtype, operands: dict[str, Any], rng: torch.Generator) -> None:
    x, weights = operands["x"], operands["weights"]
    of_rows = torch.tensor([3, 0, -1, 2, 3], dtype=torch.int32)
    numbers = torch.randn((4, 256), generator=rng)
    codes, scales = reference.fp8_groups(numbers)
    tables = oxmoe.sort_by_expert(operands["topk_ids"], SHAPE.experts)

    def results() -> list[Tensor]:
        of_weights = torch.ones((256, 256), dtype=torch.float32).to(torch.float8_e4m3fn)
        return [
            oxmoe.moe_contiguous(x, weights, m_indices=of_rows),
            *topk_forms.slots_of(tables[0], tables[3], numbers.flatten()[:10], 2),
            *nvfp4.fp4_quantize(numbers.to(torch.float8_e4m3fn)),
            *reference.nvfp4(numbers, 3.0),
            *reference.rows_e4m3(numbers),
            *reference.fp8_groups(numbers),
            reference.fp8_product((codes, scales), of_weights, torch.full((2, 2), 0.3, dtype=torch.float32)),
            reference.nvfp4_numbers(
                torch.arange(8, dtype=torch.uint8)[None], torch.full((1, 1), 0.3, dtype=torch.float32)
            ),
        ]

    right = results()
    with default_dtype(dtype):
        got = results()
    for one, other in zip(got, right, strict=True):
        assert one.dtype == other.dtype and same_bits(one, other)


def test_a_default_device_changes_nothing(operands: dict[str, Any]) -> None:
    def results() -> list[Tensor]:
        histogram = oxmoe.sort_by_expert(operands["topk_ids"], SHAPE.experts)[0]
        return [
            oxmoe.moe(**operands),
            *oxmoe.topk(operands["x"], 2),
            *quantize.mxfp4(operands["x"]),
            oxmoe.moe_contiguous(
                operands["x"], operands["weights"], m_indices=torch.zeros_like(operands["topk_ids"][:, 0])
            ),
            *reference.block_tables(histogram, 10),
        ]

    right = results()
    with torch.device("meta"):
        got = results()
    assert all(same_bits(one, other) for one, other in zip(got, right, strict=True))


# Derivatives


def test_tangents_are_refused(operands: dict[str, Any]) -> None:
    """The result of a call has no tangent, which must not go unseen."""
    right = oxmoe.moe(**operands)
    with forward_ad.dual_level():
        for name in ("x", "topk_weights"):
            dual = forward_ad.make_dual(operands[name], torch.ones_like(operands[name]))
            with pytest.raises(ValueError, match=rf"{name}: has a tangent .* pass {name}\.detach\(\)"):
                oxmoe.moe(**{**operands, name: dual})
        w13 = forward_ad.make_dual(operands["weights"].w13, torch.ones_like(operands["weights"].w13))
        with pytest.raises(ValueError, match="w13: has a tangent"):
            oxmoe.ExpertWeights.f32(w13, operands["weights"].w2)
        # A tensor without a tangent is right inside of a level, too.
        assert same_bits(oxmoe.moe(**operands), right)


def test_a_bias_that_requires_grad_is_refused(rng: torch.Generator) -> None:
    weight = torch.randn((32, 64), generator=rng).to(torch.float8_e4m3fn)
    operands = (torch.randn((3, 64), generator=rng), weight, torch.full((32, 2), 127, dtype=torch.uint8))
    bias = torch.nn.Parameter(torch.zeros(32))
    with pytest.raises(ValueError, match=r"bias: requires grad; .* pass bias\.detach\(\)"):
        oxmoe.mxfp8_linear(*operands, bias=bias)
    with torch.no_grad():
        assert not oxmoe.mxfp8_linear(*operands, bias=bias).requires_grad


# Threads


def test_threads_do_not_share_what_a_call_writes(rng: torch.Generator) -> None:
    """A call on memory that a call on another thread writes is refused. Without that, each reads the other's schedule,
    and the process ends."""
    shape, tokens = Shape("threads", 2, 2, 256, 256), 96
    weights = make_layer(shape, torch.float32, "cpu", rng).weights()
    topk_weights, topk_ids = make_routing("uniform", tokens, 2, 2, rng)
    operands = (make_x(tokens, shape, torch.float32, "cpu", rng), weights, topk_weights, topk_ids)
    few = (operands[0][1:2], weights, topk_weights[1:2], topk_ids[1:2])
    # Calls below write over x's first row, if no call of the other thread runs. Its numbers do not count.
    topk_ids[0] = -1
    right = oxmoe.moe(*operands)
    right_few = oxmoe.moe(*few)
    workspace = make_workspace(oxmoe.workspace_bytes(weights, tokens, 2), "cpu")
    stop = threading.Event()
    results: list[bool | Exception] = []

    def long_calls() -> None:
        while not stop.is_set():
            try:
                results.append(same_bits(oxmoe.moe(*operands, workspace=workspace), right))
            except Exception as error:
                results.append(error)

    thread = threading.Thread(target=long_calls)
    thread.start()
    errors, other_results, until = set(), [], time.monotonic() + 120
    try:
        # When a call of the other thread runs is luck, so this goes on until each of the three has met one.
        while len(errors) < 3 and time.monotonic() < until:
            for name, options in [
                ("workspace", {"workspace": workspace}),
                ("out", {"out": operands[0][:1]}),
                ("x", {}),
                ("", {}),
            ]:
                given = (torch.zeros_like(few[0]) if name == "out" else few[0], *few[1:])
                if name == "x":
                    # x lies where the other call writes.
                    given = (workspace[: 4 * 256].view(torch.float32).view(1, 256), *few[1:])
                try:
                    other_results.append((name, oxmoe.moe(*given, **options)))
                except ValueError as error:
                    errors.add(str(error).partition(":")[0])
                    assert "a call on another thread" in str(error), error
                    assert name, "a call that shares only inputs was refused"
    finally:
        stop.set()
        thread.join()
    assert errors == {"workspace", "out", "x"}
    # Calls of the other thread may also have met a short call here, but none of them is wrong.
    assert results
    for result in results:
        assert result is True or "a call on another thread" in str(result)
    assert all(same_bits(result, right_few) for name, result in other_results if not name)
    # Nothing is kept of calls that have ended.
    assert same_bits(oxmoe.moe(*operands, workspace=workspace), right)
