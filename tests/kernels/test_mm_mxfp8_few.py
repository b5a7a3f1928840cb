"""Dense MXFP8 for few tokens with scales on the sums: the kernel on the host thread by thread, and on a GPU."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import oxmoe
from fake_cuda.harness import STRUCTS
from host_cta import HostCtas
from oxmoe import quantize
from oxmoe.testing import same_bits

BF16, F32 = 2, 0
# Name -> (tokens, rows of a pass, stages).
KERNELS = {
    "t8": (8, 32, 4),
    "t8_deep": (8, 32, 8),
    "t8_narrow": (8, 16, 8),
    "t16": (16, 32, 3),
    "t16_wide": (16, 64, 3),
    "t16_narrow": (16, 16, 5),
    "t32": (32, 32, 4),
    "t32_wide": (32, 64, 2),
    "t32_narrow": (32, 16, 3),
}
TILE_ROWS = {"128x4": 128, "8x4": 8}
# (passes of a CTA, rows of b in each pass).
Passes = tuple[int, int] | None


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> HostCtas:
    names = {
        name: (f"MmMxfp8FewSm90<{tokens}, {rows // 16}, {stages}>", "MmMxfp8FewParams")
        for name, (tokens, rows, stages) in KERNELS.items()
    }
    # For GPUs before sm_90 launches run one after the other, without clusters.
    return HostCtas(tmp_path_factory.mktemp("few"), ["gemm/mm_mxfp8_few_sm90.cuh"], names, 890)


def operand(rows: int, k: int, rng: torch.Generator, spread: int = 6) -> tuple[Tensor, Tensor]:
    """Returns all codes but NaN, and scales of several powers."""
    codes = torch.randint(0, 256, (rows, k), generator=rng, dtype=torch.uint8)
    codes[codes & 0x7F == 0x7F] = 0x11
    return codes, torch.randint(127 - spread, 127 + spread, (rows, k // 32), generator=rng, dtype=torch.uint8)


def values(codes: Tensor, scales: Tensor) -> Tensor:
    """Returns fp64 numbers, which can hold all scales."""
    numbers = codes.view(torch.float8_e4m3fn).double()
    powers = torch.exp2(scales.double() - 127).masked_fill(scales == 255, math.nan)
    return numbers * powers.repeat_interleave(32, 1)


class View:
    """Scales as a kernel gets them. `form`: a layout, "rows", "columns", or "apart", at odd addresses with gaps."""

    def __init__(self, scales: Tensor, form: str) -> None:
        blocks = scales.shape[1]
        if form in TILE_ROWS:
            # Padding may hold any bytes.
            rows = TILE_ROWS[form]
            room = torch.full((-(-scales.shape[0] // rows) * rows, -(-blocks // 4) * 4), 0xFF, dtype=torch.uint8)
            room[: scales.shape[0], :blocks] = scales
            self.memory = quantize.swizzle_scales(room, form)
            arguments = (TILE_ROWS[form], 0, 0)
        elif form == "rows":
            self.memory, arguments = scales.contiguous(), (0, blocks, 1)
        elif form == "columns":
            self.memory, arguments = scales.t().contiguous(), (0, 1, scales.shape[0])
        else:
            wide = torch.full((scales.shape[0], 2 * blocks + 3), 0xFF, dtype=torch.uint8)
            wide[:, 1 : 2 * blocks + 1 : 2] = scales
            self.memory, arguments = wide.flatten()[1:], (0, 2 * blocks + 3, 2)
        self.struct = STRUCTS["ScaleView"](self.memory.data_ptr(), *arguments)


def call(
    kernels: HostCtas, name: str, a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], rng: torch.Generator,
    forms: tuple[str, str] = ("rows", "rows"), dtype: torch.dtype = torch.float32, passes: Passes = None,
) -> Tensor:  # fmt: skip
    (m, k), n = a[0].shape, b[0].shape[0]
    out = torch.full((m + 1, n), 7.0, dtype=dtype)
    views = View(a[1], forms[0]), View(b[1], forms[1])
    passes = passes or (1, KERNELS[name][1])
    product = STRUCTS["MmMxfp8Params"](
        a=a[0].data_ptr(), b=b[0].data_ptr(), a_scales=views[0].struct, b_scales=views[1].struct, out=out.data_ptr(),
        out_dtype=F32 if dtype == torch.float32 else BF16, m=m, n=n, k=k, splits=1,
    )  # fmt: skip
    seed = int(torch.randint(1 << 40, (), generator=rng))
    kernels.run(name, -(-n // math.prod(passes)), seed, product=product, passes=passes[0], pass_rows=passes[1])
    assert bool((out[m] == 7).all())
    return out[:m]


def check(out: Tensor, a: Tensor, b: Tensor, lost: float = 2.0**-19) -> None:
    """Checks for half an ulp, and for what fp32 sums can lose, which tensor cores cut off."""
    expected, size = a @ b.T, a.abs() @ b.abs().T
    error = (out.double() - expected).abs()
    bar = 0.51 * torch.finfo(out.dtype).eps * expected.abs() + lost * size + 2.0**-148
    assert bool((error <= bar).all()), (error / bar).max()


@pytest.mark.parametrize(
    ("name", "m", "n", "k", "passes", "forms"),
    [
        ("t8", 1, 33, 32, None, ("rows", "columns")),
        ("t8", 5, 100, 1120, (3, 12), ("8x4", "128x4")),
        ("t8", 8, 70, 32, (2, 16), ("rows", "apart")),
        ("t8_deep", 7, 20, 5152, None, ("rows", "rows")),
        ("t8_deep", 1, 33, 5152, (1, 8), ("rows", "columns")),
        ("t8_narrow", 2, 20, 32, None, ("128x4", "8x4")),
        ("t8_narrow", 8, 48, 576, None, ("128x4", "128x4")),
        ("t8_narrow", 3, 16, 1600, None, ("apart", "apart")),
        ("t8_narrow", 5, 100, 1120, (3, 12), ("8x4", "128x4")),
        ("t8_narrow", 8, 34, 96, (2, 16), ("rows", "apart")),
        ("t8_narrow", 2, 70, 2592, (4, 8), ("128x4", "128x4")),
        ("t16", 9, 32, 96, None, ("8x4", "128x4")),
        ("t16", 13, 133, 704, (3, 28), ("columns", "apart")),
        ("t16_wide", 16, 190, 1408, (2, 60), ("128x4", "rows")),
        ("t16_wide", 11, 130, 576, (1, 52), ("128x4", "128x4")),
        ("t16_narrow", 12, 33, 2080, (2, 16), ("128x4", "rows")),
        ("t16_narrow", 16, 5, 96, (1, 4), ("8x4", "128x4")),
        ("t32", 32, 40, 1312, None, ("128x4", "128x4")),
        ("t32", 17, 32, 2048, None, ("8x4", "columns")),
        ("t32_wide", 32, 150, 1312, (2, 44), ("128x4", "128x4")),
        ("t32_wide", 20, 64, 96, None, ("rows", "columns")),
        ("t32_narrow", 31, 40, 1120, (2, 12), ("apart", "128x4")),
    ],
)
def test_by_definition(
    kernels: HostCtas, name: str, m: int, n: int, k: int, passes: Passes, forms: tuple[str, str], rng: torch.Generator
) -> None:
    """Results and bits are the same in any passes, also with a row of b that goes the long way in one of them."""
    a, b = operand(m, k, rng), operand(n, k, rng)
    b[1][n // 2] = 3
    out = call(kernels, name, a, b, rng, forms, passes=passes)
    check(out, values(*a), values(*b))
    half = call(kernels, name, a, b, rng, forms, torch.bfloat16, passes)
    assert same_bits(half, out.bfloat16())
    assert same_bits(call(kernels, "t32", a, b, rng, forms), out)


def test_nothing_to_add(kernels: HostCtas, rng: torch.Generator) -> None:
    for name in KERNELS:
        assert bool((call(kernels, name, operand(3, 0, rng), operand(20, 0, rng), rng) == 0).all())


def test_a_row_has_its_bits_in_every_kernel(kernels: HostCtas, rng: torch.Generator) -> None:
    """A row has its bits alone and among others, with a neighbour whose scales go the long way, in any ring."""
    n, k = 40, 1696
    a, b = operand(32, k, rng), operand(n, k, rng)
    a[1][20] = 3
    whole = call(kernels, "t32", a, b, rng)
    for name, rows, passes in (
        ("t8", slice(2, 3), (2, 20)),
        ("t8_deep", slice(0, 8), None),
        ("t8_narrow", slice(17, 24), (3, 4)),
        ("t16", slice(3, 19), (1, 24)),
        ("t16_wide", slice(16, 32), (1, 40)),
        ("t16_narrow", slice(1, 14), None),
        ("t32_wide", slice(0, 32), None),
        ("t32_narrow", slice(4, 30), (3, 8)),
    ):
        part = call(kernels, name, (a[0][rows], a[1][rows]), b, rng, passes=passes)
        assert same_bits(part, whole[rows])


def test_scales_of_any_size(kernels: HostCtas, rng: torch.Generator) -> None:
    """Scales are 2^-127 to 2^127. Their products leave fp32, or only meet in it. Both have NaN, and zeros meet the
    largest."""
    m, n, k = 8, 32, 672
    a, b = operand(m, k, rng), operand(n, k, rng)
    a[1][:] = torch.tensor([0, 1, 60, 63, 191, 192, 230, 254], dtype=torch.uint8)[:, None]
    b[1][:] = torch.randint(0, 255, (n, 1), generator=rng, dtype=torch.uint8)
    b[1][:4] = torch.tensor([0, 254, 64, 191], dtype=torch.uint8)[:, None]
    a[0][3, 64:96] = 0
    # The scales of a row may differ.
    b[1][4, ::2], b[1][4, 1::2] = 20, 100
    b[0][5], b[1][5] = 0, 254
    a[0][2, 70], a[1][6, 3], b[0][7, 671], b[1][8, 20] = 0x7F, 255, 0xFF, 255
    out = call(kernels, "t8", a, b, rng, ("128x4", "128x4"))
    expected_nan = torch.zeros((m, n), dtype=torch.bool)
    expected_nan[[2, 6]], expected_nan[:, [7, 8]] = True, True
    wanted = values(*a) @ values(*b).T
    sizes = values(*a).abs() @ values(*b).abs().T
    # A sum that ends beyond fp32 may do so on both sides.
    inside, beyond = sizes < 2.0**127, sizes >= 2.0**129
    assert torch.equal(expected_nan, wanted.isnan()) and bool(out.isnan()[expected_nan].all())
    error = (out.double() - wanted).abs()
    assert bool((error <= 2.0**-19 * sizes + 2.0**-142)[inside].all())
    assert not bool(out.isfinite()[beyond].all())
    assert bool((out[:, 5][~expected_nan[:, 5]] == 0).all())
    assert int(inside.sum()) > 100 and int(beyond.sum()) > 0


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 3, 8, 9, 16, 17, 31, 32])
def test_on_a_gpu(m: int, rng: torch.Generator) -> None:
    """Every kernel of the plan is compared with fp64 of 40 rows of b; bits are the same twice, and among 32 tokens."""
    sizes = [(7168, 2304), (2112, 7168), (4096, 1536), (7168, 16384), (18432, 512), (130, 96)]
    # The last sizes have a K that leaves room for narrow passes alone, the longest K, and one without room for scales.
    for n, k in [*sizes, (4300, 20480), (300, 83968), (300, 84000)]:
        a, b = operand(32, k, rng), operand(n, k, rng)
        codes = [t[0].cuda().view(torch.float8_e4m3fn) for t in (a, b)]
        swizzled = [quantize.swizzle_scales(t[1]).cuda() for t in (a, b)]
        linear = b[1].t().contiguous().cuda()
        whole = oxmoe.mm_mxfp8(codes[0], codes[1].t(), *swizzled)
        part = codes[0][:m], codes[1].t(), a[1][:m].cuda(), linear
        out = torch.full((m, n), math.nan, device="cuda", dtype=torch.bfloat16)
        oxmoe.mm_mxfp8(*part, out=out)
        assert same_bits(out, whole[:m]) and same_bits(oxmoe.mm_mxfp8(*part), out)
        rows = torch.randperm(n, generator=rng)[:40]
        check(out[:, rows.cuda()].cpu(), values(*a)[:m], values(b[0][rows], b[1][rows]), 2.0**-17)
