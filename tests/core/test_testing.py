"""The yardsticks themselves: ulps, bars, norms and the roofline."""

from __future__ import annotations

import math

import pytest
import torch

from cases import MODELS
from oxmoe.testing import (
    BARS,
    FP8_BAR,
    Bar,
    assert_close,
    assert_close_ulp,
    cosine,
    relative_norm,
    roofline,
    same_bits,
    ulp,
    ulp_error,
)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_ulp_is_the_distance_to_the_next_number(dtype: torch.dtype) -> None:
    values = torch.tensor([1.0, 1.5, 2.0, 3.9, 1000.0, 0.1, 6e-5]).to(dtype)
    above = torch.nextafter(values.float(), torch.tensor(math.inf)) if dtype == torch.float32 else None
    if above is None:
        above = (values.view(torch.int16) + 1).view(dtype)
    assert torch.equal(ulp(values, dtype), above.double() - values.double())
    assert ulp(torch.zeros(1), dtype).item() == torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps


def test_error_near_zero_is_measured_at_the_size_of_the_row() -> None:
    expected = torch.tensor([[1.0, 1.0, 1.0, 1e-6]])
    actual = expected + torch.tensor([[0.0, 2**-7, 0.0, 2**-7]])
    # The row's root mean square is below 1: half of one's ulp.
    assert ulp_error(actual, expected, torch.bfloat16)[0].tolist() == pytest.approx([0.0, 1.0, 0.0, 2.0])


def test_special_values_must_agree() -> None:
    special = torch.tensor([[math.nan, math.inf, -math.inf, 1.0]])
    assert ulp_error(special, special).tolist() == [[0.0] * 4]
    assert ulp_error(torch.ones(1, 4), special).tolist() == [[math.inf, math.inf, math.inf, 0.0]]


def test_bars_refuse() -> None:
    expected = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert_close_ulp(expected.clone(), expected)
    one_off = expected.clone()
    one_off[3, 4] = math.nan
    with pytest.raises(AssertionError, match=r"inf ulp at \(3, 4\)"):
        assert_close_ulp(one_off, expected)
    # One ulp everywhere is one rounding point too many.
    with pytest.raises(AssertionError, match=r"beyond 0.9 ulp"):
        assert_close_ulp((expected.view(torch.int16) + 1).view(torch.bfloat16), expected)
    with pytest.raises(AssertionError, match=r"shape"):
        assert_close_ulp(expected[1:], expected)
    with pytest.raises(AssertionError, match=r"dtype"):
        assert_close_ulp(expected.float(), expected)


def test_a_bar_that_zeros_would_meet_is_refused() -> None:
    """An ulp is a large part of a subnormal number. Zeros themselves are as good a reference as any."""
    tiny = torch.zeros(4, 8)
    tiny[2, 5] = 3 * 2.0**-133
    with pytest.raises(AssertionError, match=r"too wide for this reference: zeros would pass \(3 ulp\)"):
        assert_close_ulp(tiny.bfloat16(), tiny.bfloat16())
    assert_close_ulp(torch.zeros(4, 8), torch.zeros(4, 8))
    assert_close_ulp(torch.full((4, 8), math.nan), torch.full((4, 8), math.nan))
    large = torch.ones(4, 8).bfloat16()
    with pytest.raises(AssertionError, match=r"too wide"):
        assert_close_ulp(large, large, Bar(max_ulp=1e4, ulps=1e4, share=0.0))


@pytest.mark.parametrize("dtype", BARS, ids=str)
@pytest.mark.parametrize("which", ["a dtype's", "fp8's"])
def test_every_bar_refuses_what_a_broken_kernel_gives(which: str, dtype: torch.dtype) -> None:
    """Zeros, half of the result and another token's result are refused, even with as few elements as the smallest test
    has."""
    expected = torch.randn((2, 24), generator=torch.Generator().manual_seed(1)).to(dtype)
    bar = None if which == "a dtype's" else FP8_BAR
    assert_close_ulp(expected.clone(), expected, bar)
    for wrong in (torch.zeros_like(expected), expected / 2, expected.roll(1, 0), expected * 1.25):
        with pytest.raises(AssertionError, match=r"ulp at"):
            assert_close_ulp(wrong, expected, bar)


def test_tolerances_are_refused_where_they_tell_nothing() -> None:
    """SGLang's inputs give such small results that only the absolute tolerance counts."""
    expected = torch.randn((5, 16), generator=torch.Generator().manual_seed(0))
    assert_close(expected + 1e-3, expected, rtol=1e-1, atol=1e-2)
    with pytest.raises(AssertionError, match=r"result: Tensor-likes are not close"):
        assert_close(expected + 1.0, expected, rtol=1e-1, atol=1e-2)
    with pytest.raises(AssertionError, match=r"a row: the bar is too wide for this reference: zeros would pass"):
        assert_close(expected * 1e-3, expected * 1e-3, rtol=1e-1, atol=1e-2, what="a row")
    with pytest.raises(AssertionError, match=r"half of it would pass \(rtol 0.6, atol 0, largest value"):
        assert_close(expected, expected, rtol=0.6, atol=0.0)
    alike = 1 + expected * 1e-3
    with pytest.raises(AssertionError, match=r"rows in another order would pass"):
        assert_close(alike, alike, rtol=1e-1, atol=0.0)
    # One row has no other order, and zeros are a reference like others.
    assert_close(alike[:1], alike[:1], rtol=1e-1, atol=0.0)
    assert_close(torch.zeros(3, 4), torch.zeros(3, 4), rtol=0.0, atol=1e-5)
    assert_close(expected[:0], expected[:0], rtol=0.0, atol=0.0)


def test_norms() -> None:
    a, b = torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5])
    assert relative_norm(b, a) == pytest.approx(0.1) and relative_norm(a * 0, a * 0) == 0.0
    assert relative_norm(a, a * 0) == math.inf
    assert cosine(a, 2 * a) == pytest.approx(1.0) and cosine(a, torch.tensor([-4.0, 3.0])) == pytest.approx(0.0)


def test_same_bits_tells_zeros_and_nans_apart() -> None:
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert same_bits(torch.tensor([math.nan]), torch.tensor([math.nan]))
    assert not same_bits(torch.zeros(2), torch.zeros(2, dtype=torch.int32))


def test_roofline_of_a_known_layer() -> None:
    """qwen3-30b-a3b with all 128 experts active reads 1.2 GB of weights."""
    shape = MODELS["qwen3-30b-a3b"]
    sizes = {"top_k": shape.top_k, "hidden_size": shape.hidden, "intermediate_size": shape.intermediate}
    floor = roofline(tokens=4096, active_experts=shape.experts, **sizes)
    assert floor.memory_us == pytest.approx(288.7, abs=0.1) and floor.compute_us == pytest.approx(391.4, abs=0.1)
    assert floor.us == floor.compute_us and roofline(tokens=64, active_experts=126, **sizes).us == pytest.approx(
        276.7, abs=0.1
    )
