"""How results are judged and times are taken: error in ulps of the dtype, cold-L2 graph timing, the roofline floor."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from oxmoe import deprecation

if not TYPE_CHECKING:
    __getattr__ = deprecation.lookup(__name__)

# Each dtype's mantissa bits (without the hidden one) and the exponent of its smallest normal number.
_FORMATS = {torch.float32: (23, -126), torch.float16: (10, -14), torch.bfloat16: (7, -126)}

# Rates measured on an H200: device copy bandwidth and sustained matrix rates of bf16 and fp8.
MEMORY_BYTES_PER_SECOND = 4.3e12
MATRIX_FLOPS_PER_SECOND = 790e12
FP8_MATRIX_FLOPS_PER_SECOND = 1400e12


# Errors


def ulp(magnitude: Tensor, dtype: torch.dtype) -> Tensor:
    """fp64 distance between neighbouring numbers of dtype at this magnitude."""
    mantissa_bits, min_exponent = _FORMATS[dtype]
    smallest_normal = 2.0**min_exponent
    exponent = torch.frexp(magnitude.double().abs().clamp(min=smallest_normal)).exponent - 1
    return torch.exp2((exponent - mantissa_bits).double())


def ulp_error(actual: Tensor, expected: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """|actual - expected| in ulps of dtype at each expected value, but at least at the root mean square of its row.

    The floor is there for sums that cancel: their terms were rounded at the size of a typical value, so a result near
    zero carries an absolute error of that size, and its own tiny ulp would measure luck. NaN and infinity count 0 where
    both agree, else infinity.
    """
    dtype = dtype or expected.dtype
    actual, expected = actual.double(), expected.double()
    typical = expected.nan_to_num(0.0, 0.0, 0.0).square().mean(dim=-1, keepdim=True).sqrt()
    unit = ulp(torch.maximum(expected.abs().nan_to_num(0.0, 0.0, 0.0), typical), dtype)
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    error = ((actual - expected).abs() / unit).nan_to_num(torch.inf, torch.inf, torch.inf)
    return torch.where(same, 0.0, error)


def relative_norm(actual: Tensor, expected: Tensor) -> float:
    """||actual - expected|| / ||expected||, 0 when both are zero."""
    actual, expected = actual.double(), expected.double()
    norm = expected.norm().item()
    error = (actual - expected).norm().item()
    return error / norm if norm else (0.0 if error == 0.0 else torch.inf)


def cosine(actual: Tensor, expected: Tensor) -> float:
    """Cosine between the two tensors taken as vectors, 1 when both are zero."""
    actual, expected = actual.double().flatten(), expected.double().flatten()
    norms = (actual.norm() * expected.norm()).item()
    return (actual @ expected).item() / norms if norms else float(actual.equal(expected))


@dataclass(frozen=True)
class Bar:
    """The bar of equality: no element beyond max_ulp, at most `share` of the elements (and four more) beyond `ulps`.

    The elements of a row share its intermediates: one of them that rounds to its neighbour moves up to half of the row.
    A share of few rows counts such rows and not roundings, so half of one row may always be beyond `ulps`.
    """

    max_ulp: float
    ulps: float
    share: float

    def passes(self, error: Tensor) -> bool:
        """Whether a result with these errors in ulps counts as equal. The last dimension of `error` is a row."""
        half_a_row = error.shape[-1] // 2 if error.dim() else 0
        allowed = max(self.share * error.numel(), half_a_row) + 4
        return bool(error.max() <= self.max_ulp) and int((error > self.ulps).sum()) <= allowed


# If fp32 sums differ in their last bits, a bf16 or f16 intermediate seldom rounds to its neighbour. On CPU below 0.1
# % of results move by an ulp in bf16 and 0.7 % in f16. Tensor cores truncate as they add: on an H200 up to 2.9 % of
# bf16 results move by an ulp or two at K = 7168. One rounding point too many or too few moves 12 % and more, and
# misses these bars. f32 has no rounding points: only the order of its sums differs, and the error grows with their
# length.
BARS = {
    torch.bfloat16: Bar(max_ulp=8.0, ulps=0.9, share=5e-2),
    torch.float16: Bar(max_ulp=8.0, ulps=0.9, share=8e-2),
    torch.float32: Bar(max_ulp=512.0, ulps=64.0, share=1e-3),
}

# The bar of layers whose activations are quantised to e4m3 on their way. A sum that rounds to its neighbour in bf16 can
# move its code to the next, a sixteenth away, and a group's largest number moves all of its group. On an H200, whose
# fp8 sums keep 14 bits, 10 % of the results of a layer of 8 x 128 activations a row moved by two ulps and more, 0.7 %
# in norm.
FP8_BAR = Bar(max_ulp=32.0, ulps=1.9, share=2e-1)

_BLIND = "the bar is too wide for this reference"


def assert_close_ulp(actual: Tensor, expected: Tensor, bar: Bar | None = None, *, what: str = "result") -> None:
    """Raises AssertionError with the worst element when actual misses its dtype's bar; shapes and dtypes are equal.

    A reference that zeros would meet is refused as well, unless it is zero itself: such a comparison cannot fail.
    """
    assert actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    assert actual.dtype == expected.dtype, f"{what}: dtype {actual.dtype}, expected {expected.dtype}"
    if expected.numel() == 0:
        return
    bar = bar or BARS[expected.dtype]
    error = ulp_error(actual, expected)
    worst = int(error.argmax())
    beyond = int((error > bar.ulps).sum())
    if bar.passes(error):
        zeros = ulp_error(torch.zeros_like(expected), expected)
        assert not zeros.any() or not bar.passes(zeros), f"{what}: {_BLIND}: zeros would pass ({zeros.max():g} ulp)"
        return
    place = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst, device="cpu"), expected.shape))
    raise AssertionError(
        f"{what}: {error.flatten()[worst].item():.3g} ulp at {place} (got {actual.flatten()[worst].item():.6g}, "
        f"expected {expected.flatten()[worst].item():.6g}), {beyond} of {error.numel()} beyond {bar.ulps:g} ulp; "
        f"bar: {bar.max_ulp:g} ulp, {100 * bar.share:g} %; relative norm {relative_norm(actual, expected):.3g}"
    )


def assert_close(actual: Tensor, expected: Tensor, *, rtol: float, atol: float, what: str = "result") -> None:
    """torch.testing.assert_close, for other projects' bars of a relative and an absolute tolerance.

    A reference is refused if the bar does not tell it from zeros, from half of it (a factor that was dropped) or from
    its own rows in another order (another token's or expert's result). A reference of zeros stands for itself.
    """
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol, msg=lambda text: f"{what}: {text}")
    if not bool(expected.count_nonzero()):
        return
    others = expected.roll(1, 0)
    wrong = {"zeros": torch.zeros_like(expected), "half of it": expected / 2, "rows in another order": others}
    for name, result in wrong.items():
        passes = torch.allclose(result, expected, rtol=rtol, atol=atol, equal_nan=True)
        if passes and not result.equal(expected):
            largest = expected.abs().max().item()
            raise AssertionError(
                f"{what}: {_BLIND}: {name} would pass (rtol {rtol:g}, atol {atol:g}, largest value {largest:g})"
            )


def same_bits(actual: Tensor, expected: Tensor) -> bool:
    """Bit equality: tells -0 from 0 and one NaN from another."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return False
    return actual.contiguous().flatten().view(torch.uint8).equal(expected.contiguous().flatten().view(torch.uint8))


# Times


class GraphClock:
    """Every layer once in one CUDA graph, to be replayed.

    The layers should differ in weights and inputs, so that none finds its weights in L2; what the last layer left there
    is overwritten between replays, outside the timed range.
    """

    def __init__(self, layers: Sequence[Callable[[], object]]):
        self.count = len(layers)
        for layer in layers:
            layer()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=torch.cuda.Stream()):
            for layer in layers:
                layer()
        size = 2 * torch.cuda.get_device_properties().L2_cache_size
        self._eviction = torch.empty(size, dtype=torch.uint8, device="cuda")

    def replay_for(self, seconds: float) -> None:
        """Replays back to back, without eviction: brings clocks and power to where sustained work holds them."""
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            for _ in range(8):
                self.graph.replay()
            torch.cuda.synchronize()

    def times_us(self, replays: int) -> list[float]:
        """Microseconds of one layer, one number a replay."""
        times = []
        for _ in range(replays):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            self._eviction.zero_()
            start.record()
            self.graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3 / self.count)
        return times


def graph_time_us(layers: Sequence[Callable[[], object]], *, replays: int = 20, warmups: int = 3) -> float:
    """Median microseconds of one layer, cold L2 (see GraphClock)."""
    clock = GraphClock(layers)
    clock.times_us(warmups)
    return statistics.median(clock.times_us(replays))


@dataclass(frozen=True)
class Floor:
    """The least time a layer can take, in microseconds."""

    memory_us: float
    compute_us: float

    @property
    def us(self) -> float:
        return max(self.memory_us, self.compute_us)


def roofline(
    *,
    tokens: int,
    top_k: int,
    hidden_size: int,
    intermediate_size: int,
    active_experts: float,
    gated: bool = True,
    weight_bits: float = 16.0,
    activation_bits: float = 16.0,
    matrix_flops: float = MATRIX_FLOPS_PER_SECOND,
) -> Floor:
    """Active experts' weights, x and out once, against memory; two flops a weight and slot against the matrix units."""
    matrices = 3 if gated else 2
    weights = matrices * hidden_size * intermediate_size
    moved = active_experts * weights * weight_bits / 8 + 2 * tokens * hidden_size * activation_bits / 8
    flops = 2 * tokens * top_k * weights
    return Floor(moved / MEMORY_BYTES_PER_SECOND * 1e6, flops / matrix_flops * 1e6)
