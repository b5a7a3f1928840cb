"""Faults that `fuzz_api.py` found, each as a call of its own."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import oxmoe
from fuzz_dlpack import Foreign
from oxmoe import nvfp4, quantize, reference
from oxmoe.testing import same_bits


def test_routing_of_no_tokens() -> None:
    """Empty tensors have no address, and no slice may be made of one: a build that checks this would end the
    process."""
    data, gather, _ = oxmoe.routing(torch.zeros((0, 4)), 2)
    assert data.expt_hist.tolist() == [0, 0, 0, 0] and gather.src_indx.shape == (0,)


@pytest.mark.parametrize("shape", [(3, 0), (0, 32), (0,)])
def test_quantisers_of_nothing(shape: tuple[int, ...]) -> None:
    codes, scales = quantize.rows_e4m3(torch.zeros(shape, dtype=torch.bfloat16))
    assert codes.shape == shape and scales.shape == shape[:-1]
    codes, scales = quantize.per_token_group_quant_fp8(torch.zeros(shape), 32)
    assert codes.shape == shape and scales.numel() == 0


def test_pack_topk_of_negated_weights() -> None:
    weights, ids = torch.tensor([[0.5, -0.25]], dtype=torch.bfloat16), torch.tensor([[3, -1]])
    negated = torch._neg_view(weights)
    assert negated.is_neg()
    assert oxmoe.pack_topk(negated, ids).equal(oxmoe.pack_topk(-weights, ids))


@pytest.mark.parametrize("one", [-(2**15) - 1, 2**15, 2**31, -(2**63)])
def test_pack_topk_of_ids_beyond_16_bits(one: int) -> None:
    with pytest.raises(ValueError, match=rf"^topk_ids: expected ids from -32768 to 32767, got .*{one}"):
        oxmoe.pack_topk(torch.ones((1, 2)), torch.tensor([[0, one]]))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int32, torch.float8_e5m2], ids=str)
def test_bias_of_another_dtype(dtype: torch.dtype) -> None:
    weight, scale = torch.zeros((8, 32), dtype=torch.float8_e4m3fn), torch.full((8, 1), 127, dtype=torch.uint8)
    got = str(dtype).removeprefix("torch.")
    with pytest.raises(ValueError, match=rf"^bias: expected dtype bfloat16, float16 or float32, got {got}"):
        oxmoe.mxfp8_linear(torch.zeros((3, 32)), weight, scale, bias=torch.zeros(8).to(dtype))
    with pytest.raises(ValueError, match=r"^bias: expected device cpu \(from input\), got meta"):
        oxmoe.mxfp8_linear(torch.zeros((3, 32)), weight, scale, bias=torch.zeros(8, device="meta"))


def test_complex_global_scale() -> None:
    with pytest.raises(ValueError, match=r"^global_scale: expected a real number, got complex64"):
        nvfp4.fp4_quantize(torch.zeros((2, 16)), torch.ones(1, dtype=torch.complex64))


def test_column_major_scales_of_another_package() -> None:
    """The input is an array that has `__dlpack__` and no shape."""
    x = np.arange(3 * 64, dtype=np.float32).reshape(3, 64)
    options = {"column_major_scales": True, "scale_tma_aligned": True}
    results = [quantize.per_token_group_quant_fp8(given, 32, **options) for given in (x, Foreign(x))]
    for of_numpy, of_foreign in zip(*results, strict=True):
        assert of_foreign.shape == of_numpy.shape and np.array_equal(of_foreign, of_numpy)


@pytest.mark.parametrize(
    "given",
    [
        *({"limit": 2**64}, {"alpha": 2**64}, {"beta": 2**64}, {"routed_scaling_factor": 2**64}),
        *({"activation": "situ", "situ_beta": 2**64}, {"activation": "situ", "situ_linear_beta": 2**64}),
    ],
    ids=lambda given: list(given)[-1],
)
def test_the_reference_takes_integers_of_more_than_64_bits(given: dict[str, object]) -> None:
    """They are floats of the layer, to which Python makes them."""
    w13, w2, x, weights = (torch.ones(shape) for shape in ((2, 8, 4), (2, 4, 4), (3, 4), (3, 1)))
    ids = torch.zeros((3, 1), dtype=torch.int32)
    floats = {name: float(value) if isinstance(value, int) else value for name, value in given.items()}
    expected = reference.moe(x, w13, w2, weights, ids, **floats)
    assert reference.moe(x, w13, w2, weights, ids, **given).equal(expected)


def test_the_reference_of_groups_takes_integers_of_more_than_64_bits() -> None:
    x = torch.ones((2, 128))
    (codes, scales), (expected, expected_scales) = (reference.fp8_groups(x, eps=eps) for eps in (2**64, 2.0**64))
    assert same_bits(codes, expected) and scales.equal(expected_scales)
    quantised, theirs = quantize.per_token_group_quant_fp8(x, 128, eps=2**64)
    assert same_bits(quantised, codes) and theirs.equal(scales)
