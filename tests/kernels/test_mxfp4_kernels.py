"""The conversion kernels of csrc/quant, compiled for the host, against the CPU functions bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from host_kernels import HostKernels
from mxfp4_cases import awkward, every_code
from oxmoe import quantize
from oxmoe.testing import same_bits

SHAPES = [(2, 64, 128), (1, 5, 32), (3, 96, 96), (1, 720, 2880), (2, 130, 704), (1, 1408, 64)]
ALIGNED = [(2, 64, 128), (3, 192, 384), (1, 704, 2944), (1, 1408, 768)]
HOPPER, PAIRS, SPREAD = 0, 1, 2
DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def ceil(size: int, parts: int) -> int:
    return -(-size // parts)


def weights(experts: int, rows: int, k: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Returns (codes, scales) of random bytes."""

    def random(columns: int) -> Tensor:
        return torch.randint(0, 256, (experts, rows, columns), generator=rng, dtype=torch.uint8)

    return random(k // 2), random(k // 32)


@pytest.fixture(scope="module")
def quantizers(tmp_path_factory: pytest.TempPathFactory) -> HostKernels:
    names = {"quantize": "Mxfp4Quantize", "dequantize": "Mxfp4Dequantize"}
    kernels = {name: (struct, "QuantizeMxfp4Params") for name, struct in names.items()}
    return HostKernels(tmp_path_factory.mktemp("quantizers"), "quant/quantize_mxfp4.cuh", kernels)


@pytest.fixture(scope="module")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> HostKernels:
    kernels = {
        f"{what}{'_back' * back}": (f"Mxfp4Layout{what.title()}<{str(back).lower()}>", "LayoutMxfp4Params")
        for what in ("codes", "scales")
        for back in (False, True)
    }
    return HostKernels(tmp_path_factory.mktemp("layouts"), "quant/layouts_mxfp4.cuh", kernels)


def check_conversion(
    layouts: HostKernels, what: str, layout: int, plain: Tensor, held: Tensor, held_shape: tuple[int, int], band: int
) -> None:
    """Converts both ways, into poisoned memory. `held`: the stored bytes of matrices of held_shape; `band`: rows of
    one."""
    (count, rows, columns), (held_rows, held_columns) = plain.shape, held_shape
    assert held.numel() == count * held_rows * held_columns and held.is_contiguous()
    threads = held_columns // 32 * 8 if what == "codes" else band * held_columns // 4
    sizes = {"layout": layout, "band_rows": band, "rows": rows, "columns": columns}
    sizes |= {"held_rows": held_rows, "held_columns": held_columns}
    for name, source, expected in ((what, plain, held), (f"{what}_back", held, plain)):
        result = torch.full_like(expected, 0xAA)
        grid = count * (held_rows // band) * ceil(threads, 128)
        layouts.run(name, grid, input=source.data_ptr(), output=result.data_ptr(), **sizes)
        assert result.equal(expected), name


@pytest.mark.parametrize("num_warps", [1, 4, 8])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_hopper(shape: tuple[int, int, int], num_warps: int, layouts: HostKernels, rng: torch.Generator) -> None:
    codes, scales = weights(*shape, rng)
    for row_multiple in (64, 256):
        options = {"num_warps": num_warps, "row_multiple": row_multiple}
        values, swizzled = (t.mT for t in quantize.swizzle_hopper_mxfp4(codes, scales, **options))
        held = values.shape[1] * 4, values.shape[2] // 4
        check_conversion(layouts, "codes", HOPPER, codes, values, held, 16)
        held = swizzled.shape[1] * 32, swizzled.shape[2] // 32
        check_conversion(layouts, "scales", HOPPER, scales, swizzled, held, 32 * num_warps)


@pytest.mark.parametrize("flashinfer", ["0.6", "0.7"])
@pytest.mark.parametrize("shape", ALIGNED, ids=str)
def test_cutlass(shape: tuple[int, int, int], flashinfer: str, layouts: HostKernels, rng: torch.Generator) -> None:
    codes, scales = weights(*shape, rng)
    held, held_scales = quantize.interleave_sm90_mxfp4(codes, scales, flashinfer=flashinfer)
    layout, band = (PAIRS, shape[1]) if flashinfer == "0.6" else (SPREAD, 64)
    check_conversion(layouts, "codes", layout, codes, held, codes.shape[1:], 16)
    check_conversion(layouts, "scales", layout, scales, held_scales, scales.shape[1:], band)


def check_quantize(quantizers: HostKernels, x: Tensor, rounding: str) -> None:
    expected = quantize.mxfp4(x, rounding=rounding)
    codes, scales = (torch.full_like(t, 0xAA) for t in expected)
    addresses = {"numbers": x.data_ptr(), "codes": codes.data_ptr(), "scales": scales.data_ptr()}
    options = {"blocks": scales.numel(), "dtype": DTYPES[x.dtype], "up": rounding == "up"}
    quantizers.run("quantize", ceil(scales.numel(), 128), together=True, **addresses, **options)
    assert scales.equal(expected[1]) and codes.equal(expected[0])


@pytest.mark.parametrize("rounding", ["up", "down"])
@dtypes
def test_quantize(dtype: torch.dtype, rounding: str, quantizers: HostKernels, rng: torch.Generator) -> None:
    x = torch.randn((5, 2880), generator=rng).to(dtype)
    x[0, :64], x[1, 3::7], x[4, 100] = 0.0, -0.0, 30000.0
    check_quantize(quantizers, x, rounding)
    for blocks in awkward(dtype, rng, 1000):
        check_quantize(quantizers, blocks, rounding)


@dtypes
def test_dequantize(dtype: torch.dtype, quantizers: HostKernels, rng: torch.Generator) -> None:
    """Every scale is dequantised with every byte of codes, to the bits of NaN."""
    codes, scales = every_code(rng)
    expected = quantize.dequantize(codes, scales, dtype)
    result = torch.full_like(expected, 7.0)
    addresses = {"numbers": result.data_ptr(), "codes": codes.data_ptr(), "scales": scales.data_ptr()}
    quantizers.run("dequantize", ceil(scales.numel(), 128), **addresses, blocks=scales.numel(), dtype=DTYPES[dtype])
    assert same_bits(result, expected)
