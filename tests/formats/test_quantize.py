"""MXFP4 against a fp64 definition, ml_dtypes and triton_kernels' torch code, bit for bit."""

from __future__ import annotations

import importlib
import math
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor

import oxmoe
from mxfp4_cases import awkward, edges, every_code
from oxmoe import quantize
from oxmoe.testing import same_bits

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(32,), (1, 64), (7, 96), (3, 5, 2880), (2, 3, 2, 704), (4099, 32), (0, 64), (5, 0)]
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)


def unpacked(codes: Tensor) -> Tensor:
    return torch.stack([codes & 15, codes >> 4], -1).flatten(-2)


def packed(elements: Tensor) -> Tensor:
    pairs = elements.unflatten(-1, (-1, 2))
    return pairs[..., 0] | pairs[..., 1] << 4


def defined(x: Tensor, rounding: str) -> tuple[Tensor, Tensor]:
    """Computes codes and scales by the definition in fp64, for finite x."""
    blocks = x.double().unflatten(-1, (-1, 32))
    amax = blocks.abs().amax(-1, keepdim=True)
    mantissa, exponent = torch.frexp(amax)  # amax = mantissa 2^exponent, 1/2 <= mantissa < 1
    if rounding == "up":  # 2^e >= amax / 6
        exponent = exponent - torch.where(mantissa <= 0.75, 3, 2)
        zero = (amax / 6).float() == 0
    else:
        exponent = exponent - 3
        zero = (amax / 4).float() < 2.0**-126
    exponent = exponent.clamp(min=-126)
    inverse = (1023 - exponent.long() << 52).view(torch.float64)  # 2^-exponent, exactly
    scaled = torch.where(zero, 0.0, blocks.abs() * inverse)
    distance = (scaled.unsqueeze(-1) - E2M1).abs()
    even, odd = distance[..., 0::2].min(-1), distance[..., 1::2].min(-1)
    element = torch.where(even.values <= odd.values, 2 * even.indices, 2 * odd.indices + 1)
    element = (element | torch.signbit(blocks) * 8).flatten(-2).to(torch.uint8)
    return packed(element), torch.where(zero, 0, exponent + 127).squeeze(-1).to(torch.uint8)


def triton_kernels_mxfp() -> ModuleType:
    """Returns triton_kernels' module. NOTE: an unrelated package of the same name exists: only the real one has this
    module."""
    return pytest.importorskip("triton_kernels.numerics_details.mxfp", exc_type=ImportError)


@pytest.mark.parametrize("rounding", ["up", "down"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_quantize_by_definition(dtype: torch.dtype, rounding: str, device: str, rng: torch.Generator) -> None:
    for shape in SHAPES:
        x = torch.randn(shape, generator=rng) * torch.exp(2 * torch.randn((*shape[:-1], 1), generator=rng))
        most = torch.finfo(dtype).max  # one row in some thousands is beyond f16
        x = x.clamp(-most, most).to(dtype)
        x[..., :32] *= torch.rand((), generator=rng) < 0.5  # all-zero blocks in half of the tensors
        codes, scales = quantize.mxfp4(x.to(device), rounding=rounding)
        assert codes.shape == (*shape[:-1], shape[-1] // 2) and scales.shape == (*shape[:-1], shape[-1] // 32)
        assert codes.dtype == scales.dtype == torch.uint8 and codes.device.type == scales.device.type == device
        if x.numel():
            expected = defined(x, rounding)
            assert torch.equal(codes.cpu(), expected[0]) and torch.equal(scales.cpu(), expected[1])
    x = edges(dtype)
    for result, expected in zip(quantize.mxfp4(x.to(device), rounding=rounding), defined(x, rounding), strict=True):
        assert torch.equal(result.cpu(), expected)


@pytest.mark.parametrize("rounding", ["up", "down"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_quantize_as_triton_kernels(dtype: torch.dtype, rounding: str, rng: torch.Generator) -> None:
    mxfp = triton_kernels_mxfp()
    mode = mxfp.DequantScaleRoundingMode["ROUND_UP" if rounding == "up" else "ROUND_DOWN"]
    for x in awkward(dtype, rng):
        codes, scales = quantize.mxfp4(x, rounding=rounding)
        expected = mxfp.downcast_to_mxfp_torch(x, torch.uint8, axis=-1, DEQUANT_SCALE_ROUNDING_MODE=mode)
        assert torch.equal(scales, expected[1])
        assert torch.equal(codes, expected[0])


def test_quantize_non_finite(device: str) -> None:
    x = torch.ones(4, 32, device=device)
    x[0, 3], x[1, 4], x[2, 5], x[3, 6:8] = math.inf, -math.inf, math.nan, x.new_tensor([-math.nan, math.inf])
    assert quantize.mxfp4(x, rounding="down")[1].flatten().tolist() == [255] * 4
    assert quantize.mxfp4(x, rounding="up")[1].flatten().tolist() == [255, 255, 0, 0]
    assert bool(quantize.dequantize(*quantize.mxfp4(x, rounding="down")).isnan().all())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gpu_gives_the_same_bits(dtype: torch.dtype, rng: torch.Generator) -> None:
    """Both directions have the bits, NaN's included: tensors of a model's size, and a captured graph with other
    numbers."""
    tensors = [*awkward(dtype, rng, blocks=40000), torch.randn((5, 2880, 2944), generator=rng).to(dtype)]
    for x in tensors:
        for rounding in ("up", "down"):
            given, expected = x.cuda(), quantize.mxfp4(x, rounding=rounding)
            result = quantize.mxfp4(given, rounding=rounding)
            assert all(same_bits(a.cpu(), b) for a, b in zip(result, expected, strict=True))
            assert same_bits(given.cpu(), x)
            for to in DTYPES:
                assert same_bits(quantize.dequantize(*result, to).cpu(), quantize.dequantize(*expected, to))
    x = tensors[0].cuda()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        codes, scales = quantize.mxfp4(x)
        back = quantize.dequantize(codes, scales, dtype)
    for again in (tensors[0].flip(0), tensors[0].roll(1, 1)):
        x.copy_(again)
        for output in (codes, scales, back):
            output.fill_(7)
        graph.replay()
        expected = quantize.mxfp4(again)
        assert same_bits(codes.cpu(), expected[0]) and same_bits(scales.cpu(), expected[1])
        assert same_bits(back.cpu(), quantize.dequantize(*expected, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dequantize_by_definition(dtype: torch.dtype, device: str, rng: torch.Generator) -> None:
    codes, scales = every_code(rng)
    finfo = torch.finfo(dtype)
    element = torch.cat([E2M1, -E2M1])[unpacked(codes).long()]
    scale = torch.tensor([2.0 ** (byte - 127) for byte in range(255)] + [math.nan], dtype=torch.float64)[scales.long()]
    expected = (element * scale.repeat_interleave(32, -1)).clamp(finfo.min, finfo.max).to(dtype)
    result = quantize.dequantize(codes.to(device), scales.to(device), dtype)
    assert result.dtype == dtype and result.device.type == device
    result = result.cpu()
    assert torch.equal(result.isnan(), expected.isnan())
    assert bool(result[255].isnan().all()) and not bool(result[:255].isnan().any())
    assert same_bits(result[255], torch.full_like(result[255], math.nan))
    integers = {4: torch.int32, 2: torch.int16}[dtype.itemsize]
    assert torch.equal(result[:255].view(integers), expected[:255].view(integers))  # -0 too


def test_dequantize_as_ml_dtypes(rng: torch.Generator) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    codes, scales = every_code(rng)
    element = unpacked(codes).numpy().view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    scale = scales.numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    limit = np.finfo(np.float32).max
    expected = np.clip(element * scale.repeat(32, -1), -limit, limit).astype(np.float32)
    assert np.array_equal(quantize.dequantize(codes, scales).numpy(), expected, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dequantize_as_triton_kernels(dtype: torch.dtype, rng: torch.Generator) -> None:
    mxfp = triton_kernels_mxfp()
    codes, scales = every_code(rng)
    expected = mxfp.upcast_from_mxfp_torch(codes, scales, dtype, axis=-1)
    result = quantize.dequantize(codes, scales, dtype)
    integers = {4: torch.int32, 2: torch.int16}[dtype.itemsize]
    assert torch.equal(result[1:255].view(integers), expected[1:255].view(integers))
    # Here it departs from the specification: 2^-127 is read as 0, and NaN as infinity (its kernels give NaN, as here).
    assert bool((expected[0] == 0).all()) and not bool(expected[255].isnan().all())


@pytest.mark.parametrize("rounding", ["up", "down"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_round_trip(dtype: torch.dtype, rounding: str, device: str, rng: torch.Generator) -> None:
    """Numbers that MXFP4 has come back bit for bit. Others are within half a step, and with "up" none is clipped."""
    codes = torch.randint(0, 256, (40, 7, 128), generator=rng, dtype=torch.uint8)
    codes[..., ::16] |= 0x07  # every block has a 6, so that its scale is the one that is chosen
    scales = torch.randint(127 - 8, 127 + 8, (40, 7, 8), generator=rng, dtype=torch.uint8)
    codes, scales = codes.to(device), scales.to(device)
    again = quantize.mxfp4(quantize.dequantize(codes, scales, dtype), rounding=rounding)
    assert torch.equal(again[0], codes) and torch.equal(again[1], scales)

    x = torch.randn((33, 2880), generator=rng).to(device, dtype)
    codes, scales = quantize.mxfp4(x, rounding=rounding)
    step = torch.exp2(scales.double() - 127).repeat_interleave(32, -1)
    error = (quantize.dequantize(codes, scales).double() - x.double()).abs() / step
    assert bool((error <= (1.0 if rounding == "up" else 2.0)).all())
    assert torch.equal(quantize.mxfp4(x, rounding=rounding)[0], codes)


def test_options_and_views(rng: torch.Generator) -> None:
    x = torch.randn((6, 64), generator=rng)
    codes, scales = quantize.mxfp4(x)
    assert torch.equal(quantize.mxfp4(x, rounding="up")[0], codes)
    full = quantize.dequantize(codes, scales)
    assert full.dtype == torch.float32
    for dtype in (torch.float32, "float32", np.float32, np.dtype("float32")):
        assert torch.equal(quantize.dequantize(codes, scales, dtype=dtype), full)
    e8m0 = scales.view(torch.float8_e8m0fnu)
    assert torch.equal(quantize.dequantize(codes, e8m0, "bfloat16"), full.bfloat16())
    # Without torch, numpy arrays go in and come out.
    arrays = quantize.mxfp4(x.numpy())
    assert all(isinstance(array, np.ndarray) for array in arrays)
    assert np.array_equal(arrays[0], codes.numpy()) and np.array_equal(arrays[1], scales.numpy())
    assert np.array_equal(quantize.dequantize(*arrays, np.float16), full.half().numpy())


def test_refusals() -> None:
    x = torch.zeros(4, 64, dtype=torch.bfloat16)
    codes, scales = quantize.mxfp4(x)

    def refused(error: type[Exception], message: str, call, *args, **options) -> None:
        with pytest.raises(error, match=message):
            call(*args, **options)

    refused(
        ValueError, r'x: dimension 1 "K": expected a multiple of 32, got 48', quantize.mxfp4, x[:, :48].contiguous()
    )
    refused(ValueError, "x: expected dtype bfloat16 or float16 or float32, got float64", quantize.mxfp4, x.double())
    refused(ValueError, "x: is not contiguous", quantize.mxfp4, torch.zeros(64, 4).mT)
    refused(ValueError, r"x: expected \[..., K\], got shape \[\]", quantize.mxfp4, torch.zeros(()))
    refused(ValueError, 'rounding: expected "up" or "down", got "nearest"', quantize.mxfp4, x, rounding="nearest")
    refused(ValueError, "x: expected a torch tensor or a numpy array", quantize.mxfp4, [1.0] * 32)
    misaligned = np.frombuffer(bytearray(4 * 32 + 1), np.uint8)[1:].view(np.float32)
    refused(ValueError, "x: must be aligned to 4 bytes", quantize.mxfp4, misaligned)

    refused(
        ValueError, "dtype: expected float32, float16 or bfloat16, got", quantize.dequantize, codes, scales, torch.int8
    )
    refused(
        ValueError, "scales: dimension 1 .*: expected 2, got 1", quantize.dequantize, codes, scales[:, :1].contiguous()
    )
    refused(ValueError, "scales: dimension 0 .*: expected 4, got 3", quantize.dequantize, codes, scales[:3])
    refused(ValueError, "scales: expected 2 dimensions", quantize.dequantize, codes, scales.flatten())
    refused(ValueError, "codes: expected dtype uint8, got float32", quantize.dequantize, codes.float(), scales)
    refused(
        ValueError, "codes: dimension 0 .*: expected a multiple of 16, got 8", quantize.dequantize, codes[0, :8], scales
    )
    refused(ValueError, "scales: is a numpy array", quantize.dequantize, codes, scales.numpy())
    refused(ValueError, "which numpy does not have", quantize.dequantize, codes.numpy(), scales.numpy(), "bfloat16")


def test_names() -> None:
    assert oxmoe.quantize is importlib.import_module("oxmoe.quantize")
    assert all(callable(getattr(quantize, name)) for name in quantize.__all__)
