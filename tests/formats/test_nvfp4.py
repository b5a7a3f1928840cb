"""NVFP4 quantisation and the layouts of its scales and of w13, against index formulas, torch and SGLang's own code."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from host_kernels import HostKernels
from oxmoe import _oxmoe, nvfp4, reference
from oxmoe.testing import same_bits

E4M3 = torch.float8_e4m3fn
DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
LAYOUTS = {"128x4": 128, "8x4": 8, "linear": 0}
layouts = pytest.mark.parametrize("layout", LAYOUTS)
SHAPES = [(1, 16), (7, 64), (128, 2880 // 16 * 16), (130, 704), (300, 48)]


def scale_offset(layout: str, row: int, block: int, blocks: int) -> int:
    tiles = -(-blocks // 4)
    if layout == "128x4":
        return (row // 128 * tiles + block // 4) * 512 + row % 32 * 16 + row % 128 // 32 * 4 + block % 4
    if layout == "8x4":
        return (row // 8 * tiles + block // 4) * 32 + row % 8 * 4 + block % 4
    return row * blocks + block


def placed(scales: Tensor, layout: str) -> Tensor:
    """Puts bytes [M, G] where the layout has them, and zeros elsewhere: [M', G']."""
    rows, blocks = scales.shape
    tile = LAYOUTS[layout]
    padded = (-(-rows // tile) * tile, -(-blocks // 4) * 4) if tile else (rows, blocks)
    out = torch.zeros(padded, dtype=torch.uint8)
    flat = out.view(-1)
    for row in range(rows):
        for block in range(blocks):
            flat[scale_offset(layout, row, block, blocks)] = scales[row, block]
    return out


def packed(codes: Tensor) -> Tensor:
    return codes[..., 0::2] | codes[..., 1::2] << 4


def awkward(rows: int, columns: int, dtype: torch.dtype, rng: torch.Generator) -> Tensor:
    """Returns numbers over many binades, with blocks of zeros, -0, one large number, NaN and infinity."""
    powers = torch.exp2(torch.randint(-8, 9, (rows, columns // 16, 1), generator=rng).float())
    x = (torch.randn((rows, columns // 16, 16), generator=rng) * powers).flatten(-2)
    blocks = x.view(-1, 16)
    special = torch.randperm(len(blocks), generator=rng)[: len(blocks) // 4]
    for kind, block in enumerate(special.tolist()):
        if kind % 5 == 0:
            blocks[block] = torch.tensor([0.0, -0.0]).repeat(8)
        elif kind % 5 == 1:
            blocks[block, 3] = 6e4
        elif kind % 5 == 2:
            blocks[block, 5] = math.nan
        elif kind % 5 == 3:
            blocks[block, 7] = -math.inf
        else:
            # The block has values and midpoints of e2m1 beside a largest of 6.
            grid = [6.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, -5.0, -0.25]
            blocks[block] = torch.tensor(grid)
    return x.to(dtype)


def expected(x: Tensor, scale: float, layout: str, block: int = 16, powers: bool = False) -> tuple[Tensor, Tensor]:
    codes, scales = reference.nvfp4(x, scale, powers, block)
    if powers:
        bits = scales.clamp(max=2.0**127).view(torch.int32) >> 23
        scales = bits.to(torch.uint8)
    else:
        scales = scales.to(E4M3).view(torch.uint8)
    return packed(codes), placed(scales, layout)


# Quantisation


@dtypes
@layouts
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_quantize(device: str, dtype: torch.dtype, layout: str, rows: int, columns: int, rng: torch.Generator) -> None:
    x = awkward(rows, columns, dtype, rng)
    codes, scales = nvfp4.fp4_quantize(
        x.to(device),
        torch.tensor([1.7], device=device),
        is_sf_swizzled_layout=layout != "linear",
        is_sf_8x4_layout=layout == "8x4",
    )
    wanted = expected(x, torch.tensor(1.7).item(), layout)
    assert same_bits(codes.cpu(), wanted[0]) and same_bits(scales.cpu(), wanted[1])


@dtypes
def test_mxfp4_scales(device: str, dtype: torch.dtype, rng: torch.Generator) -> None:
    x = awkward(33, 256, dtype, rng).nan_to_num(posinf=1.0, neginf=1.0)
    codes, scales = nvfp4.fp4_quantize(x.to(device), sf_vec_size=32, sf_use_ue8m0=True)
    wanted = expected(x, 1.0, "128x4", 32, powers=True)
    assert same_bits(codes.cpu(), wanted[0]) and same_bits(scales.cpu(), wanted[1])


def test_options(device: str, rng: torch.Generator) -> None:
    x = torch.randn((5, 6, 64), generator=rng).to(device)
    scale = torch.tensor([4.0])
    plain = nvfp4.fp4_quantize(x, scale)
    assert plain[0].shape == (5, 6, 32) and plain[1].shape == (128, 4)
    for other in (
        nvfp4.fp4_quantize(x, scale.double(), backend="cute-dsl", enable_pdl=True),
        nvfp4.fp4_quantize(x, 1 / scale, is_global_scale_inversed=True),
        nvfp4.fp4_quantize(x * 4),
    ):
        assert all(same_bits(a, b) for a, b in zip(plain, other, strict=True))
    # The rows are those of the transposed matrix; results are transposed back.
    rows = x.view(30, 64)
    codes, scales = nvfp4.fp4_quantize(rows.T, scale)
    assert codes.shape == (32, 30) and scales.shape == (4, 128)
    assert same_bits(codes.T, plain[0].view(30, 32)) and same_bits(scales.T, plain[1])
    e4m3 = rows.to(E4M3)
    for given, factor in (({}, 6.0), ({"global_scale": scale}, 1.5), ({"sf_vec_size": 32, "sf_use_ue8m0": True}, 6.0)):
        made, numbers = nvfp4.fp4_quantize(e4m3, **given), (e4m3.float() * factor).half()
        assert all(same_bits(*pair) for pair in zip(made, nvfp4.fp4_quantize(numbers, **given), strict=True))
    inverse = {"global_scale": 1 / scale, "is_global_scale_inversed": True}
    made = nvfp4.fp4_quantize(e4m3, **inverse)
    assert same_bits(made[0], nvfp4.fp4_quantize((e4m3.float() * 1.5).half(), **inverse)[0])
    empty = nvfp4.fp4_quantize(x[:0].reshape(0, 64))
    assert empty[0].shape == (0, 32) and empty[1].shape == (0, 4)


@pytest.mark.parametrize("per_batch", [True, False])
def test_grouped(device: str, per_batch: bool, rng: torch.Generator) -> None:
    counts, rows, columns = [0, 1, 37, 130, 5], 130, 96
    x = torch.stack([awkward(rows, columns, torch.bfloat16, rng) for _ in counts])
    factors = torch.rand(len(counts) if per_batch else 1, generator=rng) + 0.5
    mask = torch.tensor(counts, dtype=torch.int32)
    codes, scales = nvfp4.scaled_fp4_grouped_quantize(x.to(device), mask.to(device), factors.to(device))
    assert codes.shape == (rows, columns // 2, len(counts)) and codes.permute(2, 0, 1).is_contiguous()
    assert scales.shape == (32, 4, 2, 4, 2, len(counts)) and scales.dtype == E4M3
    assert scales.permute(5, 2, 4, 0, 1, 3).is_contiguous()
    swizzled = nvfp4.convert_sf_from_mma_layout(scales, rows, columns, len(counts)).view(len(counts), 256, 8)
    plain = nvfp4.unswizzle_blockscale(swizzled, rows, columns // 16)
    for batch, count in enumerate(counts):
        wanted = expected(x[batch, :count], factors[batch if per_batch else 0].item(), "linear")
        assert same_bits(codes[:count, :, batch].cpu(), wanted[0])
        assert same_bits(plain[batch, :count].cpu().view(torch.uint8), wanted[1])


def test_what_is_refused(device: str) -> None:
    x = torch.zeros((4, 64), device=device)
    cases: list[tuple[type[Exception], str, dict]] = [
        (NotImplementedError, "sf_vec_size", {"sf_vec_size": 8}),
        (ValueError, "backend", {"backend": "triton"}),
        (ValueError, "cute-dsl", {"backend": "cute-dsl", "sf_vec_size": 32}),
        (NotImplementedError, "nvfp4_4over6", {"nvfp4_4over6": object()}),
        (ValueError, "global_scale", {"global_scale": torch.ones(4)}),
    ]
    for error, words, options in cases:
        with pytest.raises(error, match=words):
            nvfp4.fp4_quantize(x, **options)
    with pytest.raises(ValueError, match="multiple of 16"):
        nvfp4.fp4_quantize(x[:, :40].contiguous())
    with pytest.raises(ValueError, match="dtype"):
        nvfp4.fp4_quantize(x.int())
    grouped = nvfp4.scaled_fp4_grouped_quantize
    batch, ones = x[None], torch.ones(1, device=device)
    with pytest.raises(ValueError, match="masked_m: expected dtype int32"):
        grouped(batch, ones.long(), ones)
    with pytest.raises(ValueError, match="masked_m: dimension 0"):
        grouped(batch, ones.int().repeat(2), ones)
    with pytest.raises(ValueError, match="global_scale"):
        grouped(batch, ones.int(), ones.repeat(3))
    with pytest.raises(ValueError, match=r"a: expected \[B, M, K\]"):
        grouped(x, ones.int(), ones)


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> HostKernels:
    kernels = {f"quantize{block}": (f"QuantizeNvfp4<{block}>", "QuantizeNvfp4Params") for block in (16, 32)}
    return HostKernels(tmp_path_factory.mktemp("nvfp4"), "quant/quantize_nvfp4.cuh", kernels)


@dtypes
@layouts
@pytest.mark.parametrize(("block", "powers"), [(16, False), (32, True), (16, True), (32, False)])
def test_kernel(
    kernel: HostKernels, dtype: torch.dtype, layout: str, block: int, powers: bool, rng: torch.Generator
) -> None:
    """The GPU kernel's code on the host has the CPU function's bits, and writes nothing beyond the mask."""
    counts, rows, columns = [3, 0, 9], 9, 96
    x = torch.stack([awkward(rows, columns, dtype, rng) for _ in counts])
    factors, mask = torch.rand(len(counts), generator=rng) + 0.5, torch.tensor(counts, dtype=torch.int32)
    kind = "e8m0" if powers else "e4m3"
    for masked in (None, mask):
        wanted_codes, wanted_scales = _oxmoe.quantize_nvfp4(
            x, factors, block=block, scale_dtype=kind, scale_layout=layout, inverse=powers
        )
        codes, scales = torch.full_like(wanted_codes, 0xA5), torch.full_like(wanted_scales, 0xA5)
        kernel.run(
            f"quantize{block}",
            -(-scales.numel() // 256),
            x=x.data_ptr(),
            dtype=DTYPES[dtype],
            codes=codes.data_ptr(),
            scales=scales.data_ptr(),
            tile_rows=LAYOUTS[layout],
            batches=len(counts),
            rows=rows,
            columns=columns,
            block=block,
            powers=powers,
            global_scale=factors.data_ptr(),
            of_batch=True,
            inverse=powers,
            row_counts=0 if masked is None else masked.data_ptr(),
        )
        if masked is None:
            assert same_bits(codes, wanted_codes) and same_bits(scales, wanted_scales)
            continue
        blocks = columns // block
        for batch, count in enumerate(counts):
            assert same_bits(codes[batch, :count], wanted_codes[batch, :count])
            assert (codes[batch, count:] == 0xA5).all()
            places = [scale_offset(layout, r, b, blocks) for r in range(count) for b in range(blocks)]
            flat, wanted = scales[batch].reshape(-1), wanted_scales[batch].reshape(-1)
            assert same_bits(flat[places], wanted[places])
            beyond = [scale_offset(layout, r, b, blocks) for r in range(count, rows) for b in range(blocks)]
            assert (flat[beyond] == 0xA5).all()


@dtypes
@pytest.mark.parametrize(
    ("scale", "powers"),
    [(s, p) for s in (1.0, 1.7, 1e30, 3e38, 2.0**-24, math.inf, math.nan, 0.0) for p in (False, True)]
    + [(-2.0, False)],
)
def test_kernel_at_the_edges(
    kernel: HostKernels, dtype: torch.dtype, scale: float, powers: bool, rng: torch.Generator
) -> None:
    """Inputs lie around every midpoint of e2m1, with both signs, NaN, infinity and scales of 0: bits are the CPU
    function's."""
    grid = torch.tensor([0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6]).to(dtype)
    bits = grid.view(torch.int32 if dtype == torch.float32 else torch.int16)
    near = torch.cat([bits + 1, bits, (bits - 1).clamp(0)]).view(dtype)
    tiny = torch.tensor([1e-45, 1e-39, 6e-8], dtype=dtype)
    odd = torch.tensor([math.nan, math.inf, 0.0, 3e4], dtype=dtype)
    all_numbers = torch.cat([near, tiny, odd])
    all_numbers = torch.cat([all_numbers, -all_numbers])
    rows, columns = 24, 64
    x = all_numbers[torch.randint(0, len(all_numbers), (1, rows, columns), generator=rng)]
    # Most blocks have a largest number of 6 and only finite numbers. Some have any bits, and some are zeros.
    plain = x.view(-1, 16)
    plain[:60][plain[:60].isnan() | plain[:60].isinf() | (plain[:60].abs() > 6)] = 0.5
    plain[:60, 3], plain[60:64] = 6, -0.0
    factor = torch.tensor([scale])
    for block in (16, 32):
        options = {"block": block, "scale_dtype": "e8m0" if powers else "e4m3", "scale_layout": "linear"}
        wanted = _oxmoe.quantize_nvfp4(x, factor, **options)
        codes, scales = (torch.full_like(t, 0xA5) for t in wanted)
        kernel.run(
            f"quantize{block}", -(-scales.numel() // 256), x=x.data_ptr(), dtype=DTYPES[dtype], codes=codes.data_ptr(),
            scales=scales.data_ptr(), tile_rows=0, batches=1, rows=rows, columns=columns, block=block, powers=powers,
            global_scale=factor.data_ptr(), of_batch=False, inverse=False, row_counts=0,
        )  # fmt: skip
        assert same_bits(codes, wanted[0]) and same_bits(scales, wanted[1])


@pytest.mark.gpu
@dtypes
@pytest.mark.parametrize(("rows", "columns", "block"), [(300, 7168, 16), (1, 32, 32), (130, 2880, 32), (257, 704, 16)])
def test_on_a_gpu(dtype: torch.dtype, rows: int, columns: int, block: int, rng: torch.Generator) -> None:
    """The GPU has the CPU function's bits in every layout, with a count of rows for each batch."""
    x = torch.stack([awkward(rows, columns, dtype, rng) for _ in range(2)])
    counts = torch.tensor([rows, rows // 2], dtype=torch.int32)
    scale = torch.rand(2, generator=rng) + 0.5
    for layout in LAYOUTS:
        options = {"block": block, "scale_dtype": "e4m3" if block == 16 else "e8m0", "scale_layout": layout}
        wanted = _oxmoe.quantize_nvfp4(x, scale, **options)
        made = _oxmoe.quantize_nvfp4(x.cuda(), scale.cuda(), **options)
        assert all(same_bits(a.cpu(), b) for a, b in zip(made, wanted, strict=True))
        codes, scales = _oxmoe.quantize_nvfp4(x.cuda(), scale.cuda(), masked_m=counts.cuda(), **options)
        for batch, count in enumerate(counts.tolist()):
            assert same_bits(codes[batch, :count].cpu(), wanted[0][batch, :count])
            # Padding lies beyond the count, too, and is not compared.
            blocks = columns // block
            places = [scale_offset(layout, row, b, blocks) for row in range(0, count, 7) for b in range(blocks)]
            assert same_bits(scales[batch].flatten().cpu()[places], wanted[1][batch].flatten()[places])


# Layouts


@pytest.mark.parametrize("shape", [(128, 4), (1, 1), (130, 9), (3, 256, 8), (2, 77, 45)])
def test_swizzle(device: str, shape: tuple[int, ...], rng: torch.Generator) -> None:
    scales = torch.randint(0, 256, shape, generator=rng, dtype=torch.uint8)
    swizzled = nvfp4.swizzle_blockscale(scales.to(device).view(E4M3))
    assert swizzled.dtype == E4M3 and swizzled.device.type == device and swizzled.is_contiguous()
    matrices = scales.view(-1, *shape[-2:])
    wanted = torch.stack([placed(matrix, "128x4") for matrix in matrices]).view(swizzled.shape)
    assert same_bits(swizzled.cpu().view(torch.uint8), wanted)
    back = nvfp4.unswizzle_blockscale(swizzled, *shape[-2:])
    assert same_bits(back.cpu().view(torch.uint8), scales)


@pytest.mark.parametrize(("groups", "m", "k"), [(1, 128, 64), (3, 130, 96), (2, 256, 2880)])
def test_mma_layout(device: str, groups: int, m: int, k: int, rng: torch.Generator) -> None:
    plain = torch.randint(0, 256, (groups, m, k // 16), generator=rng, dtype=torch.uint8).to(device)
    swizzled = nvfp4.swizzle_blockscale(plain.view(E4M3))
    mma = nvfp4.convert_sf_to_mma_layout(swizzled, m, k, groups)
    assert mma.data_ptr() == swizzled.data_ptr() and mma.shape == (32, 4, -(-m // 128), 4, -(-k // 64), groups)
    bytes_ = mma.cpu().view(torch.uint8) if mma.is_contiguous() else mma.cpu().contiguous().view(torch.uint8)
    for group, row, column in [(0, 0, 0), (groups - 1, m - 1, k // 16 - 1), (groups // 2, m // 2, k // 32)]:
        place = (row % 32, row % 128 // 32, row // 128, column % 4, column // 4, group)
        assert bytes_[place] == plain[group, row, column].cpu()
    for form in (mma, mma.contiguous()):
        back = nvfp4.convert_sf_from_mma_layout(form, m, k, groups)
        assert same_bits(back.view(swizzled.shape), swizzled)
    with pytest.raises(ValueError, match="sf: expected"):
        nvfp4.convert_sf_to_mma_layout(swizzled, m + 128, k, groups)
    with pytest.raises(ValueError, match="sf_6d: expected shape"):
        nvfp4.convert_sf_from_mma_layout(mma, m, k, groups + 1)


@pytest.mark.parametrize(("shape", "group", "dim"), [((2, 256, 8), 64, 1), ((3, 12), 2, -1), ((128, 3, 5), 64, 0)])
def test_halves(device: str, shape: tuple[int, ...], group: int, dim: int, rng: torch.Generator) -> None:
    given = torch.randint(0, 256, shape, generator=rng, dtype=torch.uint8).to(device)
    mixed = nvfp4.interleave_w13_halves(given, group, dim)
    first, second = given.chunk(2, dim)
    parts = [part for pair in zip(first.split(group, dim), second.split(group, dim), strict=True) for part in pair]
    assert same_bits(mixed, torch.cat(parts, dim)) and mixed.is_contiguous()
    assert same_bits(nvfp4.deinterleave_w13_halves(mixed, group, dim), given)
    scales = given.view(E4M3)
    assert same_bits(nvfp4.interleave_w13_halves(scales, group, dim).view(torch.uint8), mixed)


def test_layouts_that_are_refused() -> None:
    with pytest.raises(ValueError, match="must be even"):
        nvfp4.interleave_w13_halves(torch.zeros(2, 129, 4))
    with pytest.raises(ValueError, match="group_size 64"):
        nvfp4.interleave_w13_halves(torch.zeros(2, 192, 4))
    with pytest.raises(ValueError, match="float8_e4m3fn"):
        nvfp4.swizzle_blockscale(torch.zeros(128, 4))
    with pytest.raises(ValueError, match=r"\[M, G\]"):
        nvfp4.swizzle_blockscale(torch.zeros(128).to(E4M3))
    with pytest.raises(ValueError, match="for 130 rows"):
        nvfp4.unswizzle_blockscale(torch.zeros(128, 4), 130, 4)


def test_sglang_has_the_same_layouts(rng: torch.Generator) -> None:
    utils = pytest.importorskip("sglang.srt.layers.quantization.utils")
    cutedsl = pytest.importorskip("sglang.srt.layers.moe.moe_runner.flashinfer_cutedsl")
    scales = torch.randint(0, 256, (2, 130, 9), generator=rng, dtype=torch.uint8).view(E4M3)
    for given in (scales, scales[0]):
        theirs = utils.swizzle_blockscale(given)
        assert same_bits(nvfp4.swizzle_blockscale(given).view(torch.uint8), theirs.view(torch.uint8))
    halves = torch.randn((2, 256, 8), generator=rng)
    assert same_bits(nvfp4.interleave_w13_halves(halves), cutedsl.interleave_w13_halves(halves))
