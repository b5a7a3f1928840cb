"""MXFP8 quantisation against a fp64 definition and ml_dtypes, bit for bit, in flashinfer's layouts of scales."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import oxmoe
from op_checks import opcheck
from oxmoe import SfLayout, quantize
from oxmoe.testing import same_bits

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 32), (7, 96), (3, 5, 2880), (130, 160), (257, 1024), (1, 7168), (0, 64), (32,), (5, 0)]
LAYOUTS = ["128x4", "8x4", "linear"]


def blocks_of(x: Tensor) -> Tensor:
    return x.double().unflatten(-1, (-1, 32))


def defined(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (codes as uint8, scales [..., K / 32]) by the definition in fp64."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    blocks = blocks_of(x)
    numbers = torch.where(blocks.isnan(), -1.0, blocks.abs()).amax(-1, keepdim=True)  # -1: nothing but NaN
    mantissa, exponent = torch.frexp(numbers)  # mantissa 2^exponent, 1/2 <= mantissa < 1; 448 is 0.875 2^9
    scale = (exponent - 9 + (mantissa > 0.875) + 127).clamp(min=0)
    scale = torch.where(numbers == 0, 0, scale)
    scale = torch.where(numbers == math.inf, 254, torch.where(numbers < 0, 255, scale))
    inverse = torch.where((scale == 0) | (scale == 254), 0.0, torch.exp2(127.0 - scale.double()))
    scaled = torch.where(scale == 255, math.nan, blocks * inverse).clamp(-448, 448)
    codes = scaled.flatten(-2).float().numpy().astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    codes = torch.from_numpy(np.where(codes & 0x7F == 0x7F, np.uint8(0x7F), codes))
    return codes, scale.squeeze(-1).to(torch.uint8)


def swizzled(scales: Tensor, layout: str) -> Tensor:
    """Places scales one byte after the other."""
    rows, blocks = scales.shape
    if layout == "linear":
        return scales.reshape(-1)
    of_tile = 128 if layout == "128x4" else 8
    tiles = -(-blocks // 4)
    flat = torch.zeros(-(-rows // of_tile) * of_tile * tiles * 4, dtype=torch.uint8)
    for row in range(rows):
        for block in range(blocks):
            tile = (row // of_tile * tiles + block // 4) * of_tile * 4
            inside = row % 32 * 16 + row % 128 // 32 * 4 if of_tile == 128 else row % 8 * 4
            flat[tile + inside + block % 4] = scales[row, block]
    return flat


def awkward(dtype: torch.dtype, rng: torch.Generator, blocks: int = 2048) -> list[Tensor]:
    """Returns tensors [N, 32]: any bits; NaN and infinity among numbers; largest values at the edges of scales."""
    integers = {4: torch.int32, 2: torch.int16}[dtype.itemsize]
    limits = torch.iinfo(integers)
    bits = torch.randint(limits.min, limits.max + 1, (blocks, 32), generator=rng, dtype=integers).view(dtype)
    special = torch.randn((512, 32), generator=rng).to(dtype)
    special[:, 0] = -0.0
    values = torch.tensor([math.nan, -math.nan, math.inf, -math.inf, 0.0], dtype=dtype)
    choice = torch.randint(0, 32, (512, 3), generator=rng)
    special.scatter_(1, choice, values[torch.randint(0, 5, (512, 3), generator=rng)])
    special[0] = math.nan
    finfo = torch.finfo(dtype)
    largest = torch.tensor([2.0**e * m for e in range(-149, 128) for m in (1.0, 1.75, 1.5)], dtype=torch.float64)
    largest = largest.clamp(max=finfo.max).to(dtype)
    largest = torch.cat([largest, *(torch.nextafter(largest, torch.full_like(largest, to)) for to in (0, math.inf))])
    largest = largest[largest.isfinite()]
    ladder = torch.cat([torch.ones(1), torch.linspace(-1, 1, 25), torch.tensor([-0.0, 0.0, 1e-3, -1e-3, 1e-9, -1e-9])])
    return [bits, special, (largest.double()[:, None] * ladder).to(dtype)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_by_definition(dtype: torch.dtype, device: str, rng: torch.Generator) -> None:
    for shape in SHAPES:
        x = (torch.randn(shape, generator=rng) * torch.exp(2 * torch.randn((*shape[:-1], 1), generator=rng))).to(dtype)
        x[..., :32] *= torch.rand((), generator=rng) < 0.5  # all-zero blocks in half of the tensors
        codes, scales = oxmoe.mxfp8_quantize(x.to(device), False)
        assert codes.shape == x.shape and codes.dtype == torch.float8_e4m3fn and scales.dtype == torch.uint8
        assert scales.shape == (x.numel() // 32,) and codes.device.type == scales.device.type == device
        if x.numel():
            expected = defined(x)
            assert torch.equal(codes.view(torch.uint8).cpu(), expected[0])
            assert torch.equal(scales.cpu(), expected[1].flatten())
    for x in awkward(dtype, rng):
        codes, scales = quantize.mxfp8(x.to(device), layout="linear")
        expected = defined(x)
        assert torch.equal(scales.cpu(), expected[1].flatten())
        assert torch.equal(codes.view(torch.uint8).cpu(), expected[0])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("alignment", [32, 64, 256])
def test_layouts(layout: str, alignment: int, device: str, rng: torch.Generator) -> None:
    """Scales lie where flashinfer's index formula puts them; all padding is zeros, also of columns."""
    for rows, columns in ((1, 32), (5, 96), (8, 128), (129, 320), (300, 288)):
        x = torch.randn((rows, columns), generator=rng).bfloat16()
        wide = -(-columns // alignment) * alignment
        codes, scales = quantize.mxfp8(x.to(device), layout=layout, alignment=alignment)
        expected = defined(x)
        padded = torch.zeros((rows, wide // 32), dtype=torch.uint8)
        padded[:, : columns // 32] = expected[1]
        assert codes.shape == (rows, wide) and torch.equal(scales.cpu(), swizzled(padded, layout))
        assert torch.equal(codes[:, :columns].view(torch.uint8).cpu(), expected[0])
        assert not bool(codes[:, columns:].view(torch.uint8).any())
        if layout != "linear":
            assert torch.equal(quantize.swizzle_scales(padded.to(device), layout), scales)
            assert torch.equal(quantize.unswizzle_scales(scales, rows, wide // 32, layout).cpu(), padded)
        back = quantize.dequantize_mxfp8(codes, scales, torch.float32, layout=layout)
        plain = quantize.dequantize_mxfp8(*quantize.mxfp8(x, layout="linear"), layout="linear")
        assert same_bits(back[:, :columns].cpu(), plain) and not bool(back[:, columns:].any())


def test_flashinfers_arguments(device: str, rng: torch.Generator) -> None:
    x = torch.randn((70, 160), generator=rng).to(device, torch.bfloat16)
    for options, layout in (
        ({}, "128x4"),
        ({"is_sf_swizzled_layout": False}, "linear"),
        ({"sf_swizzle_layout": SfLayout.layout_8x4, "backend": "cute-dsl"}, "8x4"),
        ({"is_sf_swizzled_layout": True, "sf_swizzle_layout": 2, "enable_pdl": True}, "linear"),
        ({"sf_swizzle_layout": oxmoe.QuantizationSFLayout.SWIZZLED_8x4}, "8x4"),
    ):
        result, expected = oxmoe.mxfp8_quantize(x, **options), quantize.mxfp8(x, layout=layout)
        assert all(same_bits(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(result, expected, strict=True))
        options = {name: value for name, value in options.items() if name.endswith("layout")}
        codes = result[0].view(torch.uint8)
        expected = quantize.dequantize_mxfp8(*expected, layout=layout)
        assert same_bits(oxmoe.mxfp8_dequantize_host(codes, result[1], **options), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dequantize_by_definition(dtype: torch.dtype, device: str) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    codes = torch.arange(256, dtype=torch.uint8).expand(256, 256).contiguous()
    scales = torch.arange(256, dtype=torch.uint8)[:, None].expand(256, 8).contiguous()
    element = torch.from_numpy(codes.numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float64))
    scale = torch.from_numpy(scales.numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float64))
    expected = (element * scale.repeat_interleave(32, -1)).float().to(dtype)
    result = quantize.dequantize_mxfp8(
        codes.to(device).view(torch.float8_e4m3fn), scales.flatten().to(device), dtype, layout="linear"
    ).cpu()
    assert result.dtype == dtype and torch.equal(result.isnan(), expected.isnan())
    assert same_bits(result.nan_to_num(1.0, math.inf, -math.inf), expected.nan_to_num(1.0, math.inf, -math.inf))
    assert bool(result[255].isnan().all()) and bool(result[:, [0x7F, 0xFF]].isnan().all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_round_trip(dtype: torch.dtype, device: str, rng: torch.Generator) -> None:
    """Numbers are within half a step of the element, and none is clipped. Numbers that MXFP8 has do not change."""
    x = torch.randn((33, 2880), generator=rng).to(device, dtype)
    codes, scales = quantize.mxfp8(x)
    back = quantize.dequantize_mxfp8(codes, scales, dtype)
    step = torch.exp2(quantize.unswizzle_scales(scales, 33, 90).double() - 127).repeat_interleave(32, -1) / 512
    error = (back.double() - x.double()).abs()
    assert bool((error <= torch.maximum(x.double().abs() / 16, step / 2)).all())
    again = quantize.dequantize_mxfp8(*quantize.mxfp8(back), dtype)
    assert same_bits(again, back)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gpu_gives_the_same_bits(dtype: torch.dtype, rng: torch.Generator) -> None:
    """Both directions have the bits, NaN's included: a model's size, and a captured graph with other numbers."""
    tensors = [*awkward(dtype, rng, blocks=40000), torch.randn((517, 7168), generator=rng).to(dtype)]
    for x in tensors:
        for layout in LAYOUTS:
            given, expected = x.cuda(), quantize.mxfp8(x, layout=layout)
            result = quantize.mxfp8(given, layout=layout)
            assert all(
                same_bits(a.view(torch.uint8).cpu(), b.view(torch.uint8)) for a, b in zip(result, expected, strict=True)
            )
            for to in DTYPES:
                back = quantize.dequantize_mxfp8(*result, to, layout=layout)
                assert same_bits(back.cpu(), quantize.dequantize_mxfp8(*expected, to, layout=layout))
    x = tensors[0].cuda()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        codes, scales = quantize.mxfp8(x)
    for again in (tensors[0].flip(0), tensors[0].roll(1, 1)):
        x.copy_(again)
        codes.view(torch.uint8).fill_(7), scales.fill_(7)
        graph.replay()
        expected = quantize.mxfp8(again)
        assert same_bits(codes.view(torch.uint8).cpu(), expected[0].view(torch.uint8))
        assert same_bits(scales.cpu(), expected[1])


def test_without_torch(rng: torch.Generator) -> None:
    x = torch.randn((9, 64), generator=rng)
    codes, scales = quantize.mxfp8(x)
    arrays = quantize.mxfp8(x.numpy())
    assert np.array_equal(arrays[0], codes.view(torch.uint8).numpy()) and np.array_equal(arrays[1], scales.numpy())
    assert np.array_equal(quantize.dequantize_mxfp8(*arrays), quantize.dequantize_mxfp8(codes, scales).numpy())


def test_fake_shapes(rng: torch.Generator) -> None:
    """Under tracing, both operators have the shapes, strides and dtypes that they return."""
    x = torch.randn((130, 160), generator=rng).bfloat16()
    for layout in LAYOUTS:
        real = quantize.mxfp8(x, layout=layout, alignment=256)
        with FakeTensorMode() as mode:
            fake = quantize.mxfp8(mode.from_tensor(x), layout=layout, alignment=256)
            back = quantize.dequantize_mxfp8(*fake, torch.float16, layout=layout)
        for a, b in zip(fake, real, strict=True):
            assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())
        assert back.shape == real[0].shape and back.dtype == torch.float16
    opcheck(torch.ops.oxmoe.quantize_mxfp8.default, (x,))
    opcheck(torch.ops.oxmoe.dequantize_mxfp8.default, quantize.mxfp8(x))


def test_refusals() -> None:
    x = torch.zeros(4, 64, dtype=torch.bfloat16)
    codes, scales = quantize.mxfp8(x)

    def refused(error: type[Exception], message: str, call, *args, **options) -> None:
        with pytest.raises(error, match=message):
            call(*args, **options)

    call = oxmoe.mxfp8_quantize
    refused(ValueError, 'x: dimension 1 "K": expected a multiple of 32, got 48', call, x[:, :48].contiguous())
    refused(NotImplementedError, "x: dtype int32; supported: bfloat16, float16, float32", call, x.int())
    refused(ValueError, "x: is not contiguous", call, x.t())
    refused(ValueError, "alignment: expected a multiple of 32", call, x, alignment=48)
    refused(ValueError, "sf_swizzle_layout: expected 0", call, x, sf_swizzle_layout=3)
    refused(ValueError, "backend: expected 'auto', 'cuda' or 'cute-dsl', got 'tpu'", call, x, backend="tpu")
    refused(ValueError, 'layout: expected "128x4", "8x4" or "linear"', quantize.mxfp8, x, layout="4x4")
    message = 'scales: dimension 0 "scales": expected 512, got 8'
    refused(ValueError, message, quantize.dequantize_mxfp8, codes, scales[:8])
    refused(ValueError, "codes: expected dtype", quantize.dequantize_mxfp8, x, scales)
    refused(ValueError, "scales: expected shape", quantize.unswizzle_scales, scales, 400, 2)
    refused(ValueError, "layout: expected", quantize.swizzle_scales, torch.zeros(4, 2), "linear")
