"""The dense MXFP8 GEMM against fp64 of the dequantised operands; SGLang's linear layer on it."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import oxmoe
from mxfp8_cases import SHARED_TILES
from op_checks import opcheck
from oxmoe import SfLayout, quantize
from oxmoe.testing import same_bits

# (m, n, k) of flashinfer's tests, and awkward ones.
SHAPES = [
    (1, 128, 128),
    (4, 384, 2048),
    (16, 256, 3200),
    (32, 2688, 1856),
    (128, 256, 1024),
    (320, 384, 224),
    (3, 33, 32),
    (65, 130, 96),
    (9, 4, 1568),
    (200, 515, 416),
]


def operand(rows: int, k: int, rng: torch.Generator, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (codes, scales [rows, k / 32], fp64 numbers): all codes but NaN, scales of several powers."""
    codes = torch.randint(0, 256, (rows, k), generator=rng, dtype=torch.uint8)
    codes[codes & 0x7F == 0x7F] = 0x11
    scales = torch.randint(117, 123, (rows, k // 32), generator=rng, dtype=torch.uint8)
    values = quantize.dequantize_mxfp8(codes, scales.flatten(), layout="linear").double()
    return codes.to(device).view(torch.float8_e4m3fn), scales.to(device), values


def check(out: Tensor, a: Tensor, b: Tensor) -> None:
    """Checks for half an ulp of the output's type, and for what fp32 sums and subnormal numbers can lose."""
    expected, size = a @ b.T, a.abs() @ b.abs().T
    step = torch.finfo(out.dtype).eps
    error = (out.cpu().double() - expected).abs()
    assert bool((error <= 0.51 * step * expected.abs() + 2.0**-17 * size + 2.0**-126).all()), error.max()


def forms(scales: Tensor, which: str) -> Tensor:
    if which == "strided":
        return torch.stack([scales, scales], -1)[..., 0]
    return scales if which == "2-D" else quantize.swizzle_scales(scales, which)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16], ids=str)
def test_by_definition(shape: tuple[int, int, int], out_dtype: torch.dtype, device: str, rng: torch.Generator) -> None:
    m, n, k = shape
    a, a_scales, a_values = operand(m, k, rng, device)
    b, b_scales, b_values = operand(n, k, rng, device)
    results = []
    for of_a, of_b in (("128x4", "128x4"), ("2-D", "2-D"), ("8x4", "128x4"), ("strided", "contiguous")):
        b_descale = b_scales.t().contiguous() if of_b == "contiguous" else forms(b_scales, of_b)
        b_descale = b_descale.t() if of_b == "2-D" else b_descale
        out = torch.full((m, n), math.nan, dtype=out_dtype, device=device)
        options = {"out": out, "out_dtype": out_dtype, "use_8x4_sf_layout": of_a == "8x4"}
        result = oxmoe.mm_mxfp8(a, b.t(), forms(a_scales, of_a), b_descale, **options)
        assert result is out
        results.append(out)
    check(results[0], a_values, b_values)
    assert all(same_bits(result, results[0]) for result in results)
    swizzled = quantize.swizzle_scales(a_scales), quantize.swizzle_scales(b_scales)
    again = oxmoe.mm_mxfp8(a, b.t(), *swizzled, out_dtype=out_dtype, backend="cutlass")
    assert again.dtype == out_dtype and same_bits(again, results[0])


@pytest.mark.parametrize("layout", [SfLayout.layout_128x4, SfLayout.layout_linear])
@pytest.mark.parametrize("value_scale", [1e-3, 0.1, 1.0, 50.0])
def test_as_flashinfer_tests(layout: SfLayout, value_scale: float, device: str, rng: torch.Generator) -> None:
    """Quantised numbers multiply to the product of the original numbers, at flashinfer's bar for swizzled scales."""
    m, n, k = 48, 256, 1024
    x = (torch.randn((m, k), generator=rng) * value_scale).to(device, torch.bfloat16)
    weight = (torch.randn((n, k), generator=rng) * value_scale).to(device, torch.bfloat16)
    (a, a_scales), (b, b_scales) = (oxmoe.mxfp8_quantize(t, sf_swizzle_layout=layout) for t in (x, weight))
    if layout == SfLayout.layout_linear:
        a_scales, b_scales = a_scales.view(m, k // 32), b_scales.view(n, k // 32).t()
    out = oxmoe.mm_mxfp8(a, b.t(), a_scales, b_scales)
    similar = F.cosine_similarity((x.float() @ weight.float().T).flatten(), out.float().flatten(), dim=0)
    assert out.dtype == torch.bfloat16 and float(similar) > 0.998


def test_numbers_at_the_edges(device: str, rng: torch.Generator) -> None:
    """NaN of either kind stays in its row and column. Scales are far from 1. Nothing beyond k is read."""
    m, n, k = 20, 96, 416
    a, a_scales, _ = operand(m, k, rng, device)
    b, b_scales, _ = operand(n, k, rng, device)
    a_scales[0], b_scales[0] = 3, 180
    a_scales[1], b_scales[1] = 160, 60
    a.view(torch.uint8)[2, 77], a_scales[3, 5] = 0x7F, 255
    b.view(torch.uint8)[4, 415], b_scales[5, 12] = 0xFF, 255
    out = oxmoe.mm_mxfp8(a, b.t(), a_scales, b_scales.t()).cpu()
    expected_nan = torch.zeros((m, n), dtype=torch.bool)
    expected_nan[2:4], expected_nan[:, 4:6] = True, True
    assert torch.equal(out.isnan(), expected_nan)
    values = [
        quantize.dequantize_mxfp8(codes.cpu(), scales.cpu().flatten(), layout="linear").nan_to_num(0).double()
        for codes, scales in ((a, a_scales), (b, b_scales))
    ]
    check(torch.where(expected_nan, 0, out), values[0] * ~expected_nan[:, :1], values[1] * ~expected_nan[:1].T)


def test_nothing_to_multiply(device: str, rng: torch.Generator) -> None:
    b, b_scales, _ = operand(40, 64, rng, device)
    a, a_scales, _ = operand(2, 64, rng, device)
    assert oxmoe.mm_mxfp8(a[:0], b.t(), a_scales[:0], b_scales.t()).shape == (0, 40)
    empty = oxmoe.mm_mxfp8(a[:, :0].contiguous(), b[:, :0].contiguous().t(), a_scales[:, :0], b_scales[:, :0].t())
    assert torch.equal(empty.cpu(), torch.zeros((2, 40), dtype=torch.bfloat16))
    a, a_scales, _ = operand(70, 0, rng, device)
    out = torch.full((70, 40), math.nan, device=device, dtype=torch.bfloat16)
    oxmoe.mm_mxfp8(a, b[:, :0].contiguous().t(), a_scales.to(device), b_scales[:, :0].t(), out=out)
    assert torch.equal(out.cpu(), torch.zeros((70, 40), dtype=torch.bfloat16))


def test_rows_stand_alone(device: str, rng: torch.Generator) -> None:
    """A row has the same bits alone as among up to 32."""
    n, k = 12000, 2080
    a, a_scales, _ = operand(32, k, rng, device)
    b, b_scales, _ = operand(n, k, rng, device)
    whole = oxmoe.mm_mxfp8(a, b.t(), a_scales, b_scales.t())
    for rows in (slice(0, 1), slice(5, 13), slice(20, 32), slice(1, 24), slice(0, 32)):
        part = oxmoe.mm_mxfp8(a[rows], b.t(), a_scales[rows], b_scales.t())
        assert same_bits(part, whole[rows])


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 8, 16, 33, 64, 65, 96, 128, 192, 256, 1000])
def test_models_sizes(m: int, rng: torch.Generator) -> None:
    for n, k in ((7168, 2304), (2112, 7168), (4096, 1536)):
        a, a_scales, a_values = operand(m, k, rng, "cuda")
        b, b_scales, b_values = operand(n, k, rng, "cuda")
        swizzled = quantize.swizzle_scales(a_scales), quantize.swizzle_scales(b_scales)
        out = torch.full((m, n), math.nan, device="cuda", dtype=torch.bfloat16)
        oxmoe.mm_mxfp8(a, b.t(), *swizzled, out=out)
        rows = torch.randperm(m, generator=rng)[:128]
        check(out[rows.cuda()], a_values[rows], b_values)
        assert same_bits(oxmoe.mm_mxfp8(a, b.t(), *swizzled), out)


@pytest.mark.gpu
@pytest.mark.parametrize("size", SHARED_TILES, ids=str)
def test_shared_tiles(size: tuple[int, int, int], rng: torch.Generator) -> None:
    """Several CTAs share the K of a tile, in some sizes before whole tiles: the bits are the same in any order of
    CTAs."""
    m, n, k = size
    a, a_scales, a_values = operand(m, k, rng, "cuda")
    b, b_scales, b_values = operand(n, k, rng, "cuda")
    swizzled = quantize.swizzle_scales(a_scales), quantize.swizzle_scales(b_scales)
    rows = torch.cat([torch.randperm(m, generator=rng)[:32], torch.tensor([m - 1])])
    for dtype in (torch.bfloat16, torch.float16):
        out, *others = (torch.full((m, n), math.nan, device="cuda", dtype=dtype) for _ in range(4))
        for result in (out, *others):
            oxmoe.mm_mxfp8(a, b.t(), *swizzled, out=result, out_dtype=dtype)
        check(out[rows.cuda()], a_values[rows], b_values)
        assert all(same_bits(other, out) for other in others)


@pytest.mark.gpu
def test_in_a_graph(rng: torch.Generator) -> None:
    """Quantiser and GEMM run in a captured graph, with other numbers at each replay."""
    for m in (5, 300):
        x = torch.zeros((m, 512), device="cuda", dtype=torch.bfloat16)
        b, b_scales, _ = operand(256, 512, rng, "cuda")
        graph = torch.cuda.CUDAGraph()
        oxmoe.mxfp8_linear(x, b, b_scales)
        with torch.cuda.graph(graph):
            out = oxmoe.mxfp8_linear(x, b, b_scales)
        for _ in range(3):
            x.copy_(torch.randn((m, 512), generator=rng))
            out.fill_(math.nan)
            graph.replay()
            assert same_bits(out, oxmoe.mxfp8_linear(x, b, b_scales))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_linear(dtype: torch.dtype, device: str, rng: torch.Generator) -> None:
    """SGLang's arguments are scales of both forms, three dimensions, a bias in the output's type, and codes as
    input."""
    n, k = 160, 320
    weight, weight_scale, values = operand(n, k, rng, device)
    x = torch.randn((3, 5, k), generator=rng).to(device, dtype)
    bias = torch.randn(n, generator=rng).to(device, dtype)
    codes, scales = oxmoe.mxfp8_quantize(x.view(-1, k))
    dequantised = quantize.dequantize_mxfp8(codes, scales).cpu().double()
    plain = oxmoe.mxfp8_linear(x, weight, weight_scale)
    assert plain.shape == (3, 5, n) and plain.dtype == dtype
    check(plain.view(-1, n), dequantised, values)
    swizzled = quantize.swizzle_scales(weight_scale)
    assert same_bits(oxmoe.mxfp8_linear(x, weight, swizzled), plain)
    assert same_bits(oxmoe.mxfp8_linear(x, weight, swizzled, bias=bias), plain + bias)
    given = oxmoe.mxfp8_linear(codes, weight, weight_scale, scales, output_dtype=dtype)
    assert same_bits(given, plain.view(-1, n))
    assert oxmoe.mxfp8_linear(codes, weight, weight_scale, scales).dtype == torch.bfloat16
    assert oxmoe.mxfp8_linear(x[:0], weight, weight_scale).shape == (0, 5, n)


def test_fake_shapes(rng: torch.Generator) -> None:
    a, a_scales, _ = operand(5, 96, rng, "cpu")
    b, b_scales, _ = operand(40, 96, rng, "cpu")
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(t) for t in (a, b, a_scales, b_scales)]
        out = oxmoe.mm_mxfp8(fakes[0], fakes[1].t(), fakes[2], fakes[3].t(), out_dtype=torch.float16)
        x = mode.from_tensor(torch.zeros(2, 3, 96, dtype=torch.bfloat16))
        linear = oxmoe.mxfp8_linear(x, fakes[1], fakes[3])
    assert out.shape == (5, 40) and out.dtype == torch.float16
    assert linear.shape == (2, 3, 40) and linear.dtype == torch.bfloat16
    operands = (a, b.t(), a_scales, b_scales.t())
    opcheck(torch.ops.oxmoe.mm_mxfp8.default, operands)
    opcheck(torch.ops.oxmoe.mm_mxfp8.out, operands, {"out": torch.empty(5, 40, dtype=torch.bfloat16)})


def test_compiled(rng: torch.Generator) -> None:
    weight, scale, _ = operand(64, 96, rng, "cpu")
    x = torch.randn((4, 96), generator=rng).bfloat16()
    compiled = torch.compile(lambda x: oxmoe.mxfp8_linear(x, weight, scale) + 1, backend="eager", fullgraph=True)
    assert same_bits(compiled(x), oxmoe.mxfp8_linear(x, weight, scale) + 1)


def test_refusals(device: str, rng: torch.Generator) -> None:
    a, a_scales, _ = operand(6, 64, rng, device)
    weight, b_scales, _ = operand(40, 64, rng, device)
    right = {"a": a, "b": weight.t(), "a_descale": a_scales, "b_descale": b_scales.t()}
    oxmoe.mm_mxfp8(**right)
    poisoned = torch.full((6, 40), 7.0, dtype=torch.bfloat16, device=device)
    for error, message, spoiled in (
        (ValueError, r"a: mm_mxfp8 accepts 2d tensors, got shape \[1, 6, 64\]", {"a": a[None]}),
        (ValueError, 'b: dimension 0 "k": expected 64 \\(from a\\), got 32', {"b": weight[:, :32].contiguous().t()}),
        (ValueError, "a: expected dtype float8_e4m3fn, got bfloat16", {"a": a.bfloat16()}),
        (ValueError, "b: expected dtype float8_e4m3fn, got uint8", {"b": weight.view(torch.uint8).t()}),
        (ValueError, r"b: expected column-major \[k, n\], strides \(1, 64\)", {"b": weight.t().contiguous()}),
        (ValueError, "a: is not contiguous", {"a": torch.stack([a, a], -1)[..., 0]}),
        (ValueError, "a_descale: expected dtype uint8, got float32", {"a_descale": a_scales.float()}),
        (ValueError, r"a_descale: expected shape \(6, 2\), got \(6, 1\)", {"a_descale": a_scales[:, :1]}),
        (ValueError, r"b_descale: expected shape \(2, 40\), got \(40, 2\)", {"b_descale": b_scales}),
        (ValueError, r"a_descale must be 1D \(swizzled\) or 2D", {"a_descale": a_scales[None]}),
        (ValueError, r"b_descale: .* expected \(512,\), 128 x 4, got \(80,\)", {"b_descale": b_scales.flatten()}),
        (ValueError, r"expected \(32,\), 8 x 4", {"a_descale": a_scales.flatten(), "use_8x4_sf_layout": True}),
        (ValueError, "out_dtype: expected bfloat16 or float16, got float32", {"out_dtype": torch.float32}),
        (ValueError, r'out: dimension 0 "m": expected 6 \(from a\), got 40', {"out": poisoned.view(40, 6)}),
        (ValueError, "out: expected dtype float16", {"out": poisoned, "out_dtype": torch.float16}),
        # With several faults at once, what the operands are is named first, and how they lie second.
        (
            ValueError,
            "a: expected dtype float8_e4m3fn, got bfloat16",
            {"a": a.bfloat16(), "b": weight.t().contiguous()},
        ),
        (
            ValueError,
            "b: expected dtype float8_e4m3fn, got bfloat16",
            {"b": weight.bfloat16(), "a_descale": a_scales[None]},
        ),
        (
            ValueError,
            r"a_descale must be 1D \(swizzled\) or 2D",
            {"a_descale": a_scales[None], "b": weight.t().contiguous()},
        ),
        (NotImplementedError, "backend 'trtllm'; supported: auto, cutlass", {"backend": "trtllm"}),
        (ValueError, "backend 'cublas'; supported: auto", {"backend": "cublas"}),
    ):
        with pytest.raises(error, match=message):
            oxmoe.mm_mxfp8(**{**right, "out": poisoned, **spoiled})
    with pytest.raises(ValueError, match="expected a multiple of 32, got 48"):
        codes = a[:, :48].contiguous()
        oxmoe.mm_mxfp8(codes, weight[:, :48].contiguous().t(), a_scales, b_scales.t())
    assert bool((poisoned == 7.0).all())
    x = torch.zeros(2, 64, dtype=torch.bfloat16, device=device)
    for error, message, arguments in (
        (ValueError, 'input: dimension 1 "k": expected 64 \\(from weight\\), got 32', (x[:, :32], weight, b_scales)),
        (ValueError, 'weight: dimension 1 "k": expected a multiple of 32', (x[:, :48], weight[:, :48], b_scales)),
        (TypeError, "weight: expected dtype float8_e4m3fn, got torch.bfloat16", (x, weight.bfloat16(), b_scales)),
        (ValueError, "weight: expected 2 dimensions", (x, weight[None], b_scales)),
    ):
        with pytest.raises(error, match=message):
            oxmoe.mxfp8_linear(*arguments)
