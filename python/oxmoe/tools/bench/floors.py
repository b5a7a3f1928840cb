"""Computes the least time that a layer can take on a GPU: with any algorithm ("ideal"), and with oxmoe's ("own").

The ideal floor moves the weights, x and the output once, or is as long as the multiplications. The own floor adds what
our algorithm writes and reads again: rounded activations, the rows between the GEMMs, the rows that are combined.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from oxmoe.formats.drawn import own_formats
from oxmoe.testing import FP8_MATRIX_FLOPS_PER_SECOND, MATRIX_FLOPS_PER_SECOND, MEMORY_BYTES_PER_SECOND

# Sizes of the measured calls: a copy far beyond L2, and a square product.
COPY_BYTES = 1 << 30
PRODUCT = 8192
SUSTAINED_S = 0.5  # seconds of the same call before it is timed
TIMED = 21


@dataclass(frozen=True)
class Ceilings:
    """The rates that a GPU reaches."""

    memory: float  # bytes a second of a copy, both read and written
    matrix: float  # flops a second of a product of bf16 numbers
    e4m3_matrix: float  # flops a second of a product of e4m3 numbers
    measured: bool  # whether this run measured the rates; False: they are those of a table


# GPUs whose ceilings are known, by a part of their name.
TABLE = {"H200": Ceilings(MEMORY_BYTES_PER_SECOND, MATRIX_FLOPS_PER_SECOND, FP8_MATRIX_FLOPS_PER_SECOND, False)}


@dataclass(frozen=True)
class Floors:
    """Floors of one layer in microseconds."""

    ideal: float
    own: float


@dataclass(frozen=True)
class Algorithm:
    """How oxmoe's kernels on Hopper run a format."""

    x_bits: float = 16.0  # bits of a number of x, as GEMM1 reads it
    hidden_bits: float = 16.0  # bits of a number between the GEMMs, as GEMM2 reads it
    rounded: bool = False  # a step before GEMM1 reads bf16 rows and writes them as GEMM1 reads them
    hidden_rounded: bool = False  # GEMM1 writes bf16 rows, and a step before GEMM2 rounds them
    e4m3: bool = False  # the products are of e4m3 numbers


_E4M3_ROWS = Algorithm(8.0, 8.0, rounded=True, hidden_rounded=True, e4m3=True)
# Formats that are not here multiply rows as they come.
ALGORITHMS = {
    "mxfp4-a8": _E4M3_ROWS,
    "mxfp8": Algorithm(rounded=True),
    "nvfp4-a4": Algorithm(rounded=True),
    "fp8_block": Algorithm(8.25, 8.25, rounded=True, e4m3=True),
    "fp8_tensor": _E4M3_ROWS,
    "fp8_tensor-token": _E4M3_ROWS,
    "fp8_tensor-static": _E4M3_ROWS,
}


@functools.cache
def ceilings(device: str) -> Ceilings | None:
    """Returns the ceilings of torch's current GPU, from the table or measured once (about two seconds); None on a
    CPU."""
    if device != "cuda":
        return None
    name = torch.cuda.get_device_name()
    return next((known for part, known in TABLE.items() if part in name), None) or measured()


def sustained_s(call: Callable[[], object]) -> float:
    """Returns the median seconds of a call after SUSTAINED_S of the same call back to back, at the clock that power
    allows."""
    end = time.perf_counter() + SUSTAINED_S
    while time.perf_counter() < end:
        for _ in range(8):
            call()
        torch.cuda.synchronize()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(TIMED + 1)]
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    torch.cuda.synchronize()
    return statistics.median(before.elapsed_time(after) for before, after in itertools.pairwise(marks)) * 1e-3


def measured() -> Ceilings:
    """Measures the ceilings of torch's current GPU: a copy, and products of random numbers in bf16 and, if the GPU has
    such instructions, in e4m3."""
    source, target = (torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2))
    memory = 2 * COPY_BYTES / sustained_s(lambda: target.copy_(source))
    a, b = (torch.randn((PRODUCT, PRODUCT), device="cuda").bfloat16() for _ in range(2))
    out = torch.empty_like(a)
    flops = 2.0 * PRODUCT**3
    matrix = flops / sustained_s(lambda: torch.mm(a, b, out=out))
    if torch.cuda.get_device_capability() < (8, 9):
        return Ceilings(memory, matrix, matrix, True)
    one = torch.ones((), device="cuda")
    codes, columns = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()

    def product() -> object:
        return torch._scaled_mm(codes, columns, one, one, out_dtype=torch.bfloat16, use_fast_accum=True)

    return Ceilings(memory, matrix, flops / sustained_s(product), True)


def described(known: Ceilings | None) -> dict[str, Any] | None:
    """Returns the ceilings as a row of a result file has them."""
    return None if known is None else asdict(known)


def say(known: Ceilings | None) -> None:
    if known is not None:
        origin = "measured in this run" if known.measured else "known of this GPU"
        print(
            f"floors are made of: copies {known.memory / 1e12:.2f} TB/s, products {known.matrix / 1e12:.0f} TFLOP/s in "
            f"bf16 and {known.e4m3_matrix / 1e12:.0f} in e4m3 ({origin})"
        )


@dataclass(frozen=True)
class Call:
    """The sizes of one call of a layer."""

    tokens: float  # rows of x and of the output
    slots: float  # pairs of a token and an expert
    hidden: int
    intermediate: int
    active: float  # experts that have slots
    combined: bool = True  # the rows of a token's experts are added; False: they are the output
    bf16_x: bool = True  # x comes in 16 bits; False: it comes as GEMM1 reads it


def floors(call: Call, format_name: str, weight_bits: float, known: Ceilings) -> Floors:
    """Returns the two floors of a call. The own floor is the sum of oxmoe's steps, each as long as its bytes or its
    flops are. If both GEMMs share a launch, one may multiply while the other reads, and a layer may be below that
    sum."""
    form = ALGORITHMS.get(format_name, Algorithm())
    rate = known.e4m3_matrix if form.e4m3 else known.matrix
    weights = call.hidden * call.intermediate  # numbers of w2; w13 has twice as many
    x, row, between = (call.tokens * call.hidden, call.slots * call.hidden, call.slots * call.intermediate)
    x_bits = 16.0 if call.bf16_x else form.x_bits

    def us(bits: float, multiplications: float = 0.0) -> float:
        return max(bits / 8 / known.memory, 2 * multiplications / rate) * 1e6

    ideal = us(call.active * 3 * weights * weight_bits + x * (x_bits + 16.0), 3 * call.slots * weights)
    own_format = own_formats().get(format_name)
    bits = (own_format and own_format.packed_bits) or weight_bits
    own = us(
        call.active * 2 * weights * bits
        + x * form.x_bits
        + between * (16.0 if form.hidden_rounded else form.hidden_bits),
        2 * call.slots * weights,
    )
    own += us(call.active * weights * bits + between * form.hidden_bits + row * 16.0, call.slots * weights)
    if form.rounded and call.bf16_x:
        own += us(x * (16.0 + form.x_bits))
    if form.hidden_rounded:
        own += us(between * (16.0 + form.hidden_bits))
    if call.combined:
        own += us(row * 16.0 + x * 16.0)
    return Floors(ideal, own)


def mean(each: Sequence[Floors]) -> Floors:
    """Returns the mean floors of several layers, timed one after the other."""
    return Floors(*(sum(values) / len(each) for values in zip(*((item.ideal, item.own) for item in each), strict=True)))
