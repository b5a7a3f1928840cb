"""The kernels around NVFP4's grouped GEMM for Hopper, run on the host: packing with decoding, and rounding of rows."""

from __future__ import annotations

import ctypes
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from host_cta import HostCtas
from oxmoe import nvfp4, reference
from oxmoe.testing import same_bits

LAYOUTS = {"gate_up": 0, "up_gate": 1, "interleaved": 2, "gate_up_64": 3, "up_gate_64": 4}
E4M3 = torch.float8_e4m3fn
BF16 = 2

# A kernel that writes a thread's A fragments of a block's four k16 steps, as the GEMM decodes them. A CTA has one
# block.
DECODER = """
#pragma once
#include "csrc/common/nvfp4_packed.cuh"
#include "csrc/quant/pack.cuh"

namespace oxmoe {
struct DecodeNvfp4 {
    static constexpr int kThreads = 128, kSharedBytes = 0;
    static void run(const PackParams& p) {
        using Form = nvfp4::Form;
        const size_t block = blockIdx.x, thread = threadIdx.x;
        const auto codes = Form::load_codes(p.packed_codes + block * Form::kCodeBytes + thread * Form::kThreadCodes);
        const size_t quad = thread / 4;
        const auto scales = Form::load_scales(p.packed_scales + block * Form::kScaleBytes + quad * Form::kQuadScales);
        for (int step = 0; step < 4; ++step) {
            uint32_t a[4];
            Form::decode(codes, step, Form::multipliers(scales, step / Form::kGroupSteps), a);
            memcpy(p.expert_scales + ((block * 128 + thread) * 4 + step) * 4, a, 16);
        }
    }
};
}  // namespace oxmoe
"""

# A kernel that compares the code that rounds rows and GEMM1's output with the codes' functions (a number for each row)
# and with division.
EPILOGUE = """
#pragma once
#include "csrc/common/nvfp4.cuh"
#include "csrc/common/nvfp4_round.cuh"
#include "csrc/quant/round_rows_nvfp4.cuh"

namespace oxmoe {
struct CodesNvfp4 {
    static constexpr int kThreads = 1, kSharedBytes = 0;
    static void run(const RoundNvfp4Params& p) {
        for (int block = 0; block < p.rows * p.columns / 16; ++block) {
            const uint16_t* x = reinterpret_cast<const uint16_t*>(p.x) + block * 16;
            const float scale = p.global_scales[block * 16 / p.columns];
            float values[16];
            for (int i = 0; i < 16; ++i) values[i] = from_bf16(x[i]);
            const float narrow = e4m3_value(nvfp4_scale(scale, largest(values))), factor = block_factor(scale, narrow);
            for (int i = 0; i < 16; ++i) {
                const uint32_t code = e2m1(values[i] * factor);
                static const float magnitudes[] = {0, .5f, 1, 1.5f, 2, 3, 4, 6};
                const float value = code & 8 ? -magnitudes[code & 7] : magnitudes[code];
                reinterpret_cast<uint16_t*>(p.out)[block * 16 + i] = to_bf16(value * narrow);
            }
        }
    }
};

struct FinishNvfp4 {
    static constexpr int kThreads = 64, kSharedBytes = 0;
    static void run(const RoundNvfp4Params& p) {
        const uint4* x = reinterpret_cast<const uint4*>(p.x);
        const int row_vectors = p.columns / 8, vectors = p.rows * row_vectors;
        for (int first = 0; first < vectors; first += kThreads) {
            const int at = first + threadIdx.x;
            const bool inside = at < vectors;
            const float scale = inside ? p.global_scales[at / row_vectors] : NAN;
            const uint4 rounded = nvfp4::round_block(inside ? x[at] : uint4{~0u, ~0u, ~0u, ~0u}, scale);
            if (inside) reinterpret_cast<uint4*>(p.out)[at] = rounded;
        }
    }
};

struct CheckNvfp4 {
    static constexpr int kThreads = 1, kSharedBytes = 0;
    static void run(const RoundNvfp4Params& p) {
        int64_t* wrong = reinterpret_cast<int64_t*>(p.out);
        const auto compare = [&](float scale, float narrow) {
            const float expected = scale / narrow, got = nvfp4::quotient(scale, narrow);
            if (scale == 0) return;  // then `narrow` is 0 or NaN
            wrong[0] += expected == expected ? bits_of(got) != bits_of(expected) : got == got;
        };
        for (uint32_t code = 0x38; code < 0x40; ++code) {  // 1 to 1.875
            ::ptx::rcp_error = int(code % 3) - 1;
            for (uint32_t i = 0; i < 1 << 23; ++i) compare(float_of(0x3F800000 + i), e4m3_value(code));
        }
        for (uint32_t code = 1; code <= 0xFF; ++code) {
            if (code == 0x80) continue;
            const float narrow = e4m3_value(code);
            ::ptx::rcp_error = code & 0x7F && (code & 0x7F) < 0x7F ? int(code % 3) - 1 : 0;
            // All exponents with the mantissas around powers of two and others, the smallest numbers, infinity and NaN.
            for (uint32_t power = 0; power < 256; ++power)
                for (int i = -20; i < 20; ++i)
                    for (uint32_t sign : {0u, 0x80000000u})
                        compare(float_of(((power << 23) + i * (i & 1 ? 1 : 50021)) ^ sign), narrow);
            for (uint32_t i = 0; i < 20000; ++i) compare(float_of(i), narrow);
            // Quotients below the smallest normal number, some of them halfway between two.
            for (uint32_t i = 0; i < 9 << 23; i += 2011) compare(float_of(i & ~63u), narrow);
        }
        ::ptx::rcp_error = 0;
        static const float values[] = {0, .5f, 1, 1.5f, 2, 3, 4, 6};
        const auto nearest = [&](uint32_t bits) {
            const float expected = values[e2m1_magnitude(float_of(bits))];
            for (float y : {float_of(bits), -float_of(bits)})
                wrong[1] += bits_of(nvfp4::nearest_e2m1(y)) != bits_of(expected);
        };
        for (uint32_t bits = 0; bits <= 0x40C00000; bits += 1009) nearest(bits);
        for (float border : {.25f, .75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.f, .5f, 1.f, 2.f, 4.f})
            for (int i = -99; i < 99; ++i) nearest(bits_of(border) + i);
        nearest(bits_of(6.f));
    }
};
}  // namespace oxmoe
"""


@pytest.fixture(scope="module")
def packer(tmp_path_factory: pytest.TempPathFactory) -> HostCtas:
    folder: Path = tmp_path_factory.mktemp("pack")
    (folder / "decode.cuh").write_text(DECODER)
    kernels = {"pack": ("Pack<oxmoe::nvfp4::Packer>", "PackParams"), "decode": ("DecodeNvfp4", "PackParams")}
    return HostCtas(folder, ["../decode.cuh"], kernels, 900)


@pytest.fixture(scope="module", params=[800, 900])
def rounder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> HostCtas:
    arch, folder = request.param, tmp_path_factory.mktemp("round")
    (folder / "epilogue.cuh").write_text(EPILOGUE)
    names = {"rows": "RoundRowsNvfp4", "codes": "CodesNvfp4", "finish": "FinishNvfp4", "check": "CheckNvfp4"}
    kernels = {name: (kernel, "RoundNvfp4Params") for name, kernel in names.items()}
    return HostCtas(folder, ["../epilogue.cuh"], kernels, arch)


def in_order(rows: Tensor, layout: str) -> Tensor:
    """Returns gate and up rows [E, 2I, ...] of a layout as [gate; up]."""
    if layout == "interleaved":
        return torch.cat([rows[:, 0::2], rows[:, 1::2]], 1)
    if layout.endswith("_64"):
        rows = nvfp4.deinterleave_w13_halves(rows)
    first, second = rows.chunk(2, 1)
    return torch.cat([first, second] if layout.startswith("gate") else [second, first], 1)


def numbers_of_fragments(fragments: Tensor, gated: bool, experts: int, rows: int, columns: int) -> Tensor:
    """Returns fp32 [E, rows, columns] of fragments [blocks, 128, 4, 4] of pairs, gated ones as [gate; up]."""
    row_tiles, k_blocks = -(-rows // 64), -(-columns // 64)
    pairs = fragments.view(torch.bfloat16).float()
    # [E, tile, block, warp, g, c, step, half of 16 columns, half of 16 rows, side]
    parts = pairs.view(experts, row_tiles, k_blocks, 4, 8, 4, 4, 2, 2, 2)
    if gated:
        dense = parts.permute(0, 8, 1, 3, 4, 2, 6, 7, 5, 9).reshape(experts, 2, row_tiles * 32, k_blocks * 64)
        assert bool((dense[:, :, rows // 2 :] == 0).all())
        whole = dense[:, :, : rows // 2].flatten(1, 2)
    else:
        dense = parts.permute(0, 1, 3, 8, 4, 2, 6, 7, 5, 9).reshape(experts, row_tiles * 64, k_blocks * 64)
        assert bool((dense[:, rows:] == 0).all())
        whole = dense[:, :rows]
    assert bool((whole[..., columns:] == 0).all())
    return whole[..., :columns]


@pytest.mark.parametrize("swizzled", [False, True], ids=["plain-scales", "swizzled-scales"])
@pytest.mark.parametrize(
    ("layout", "rows", "columns"),
    [
        (None, 64, 64),
        (None, 80, 336),
        (None, 208, 16),
        ("gate_up", 96, 80),
        ("up_gate", 160, 304),
        ("interleaved", 1408 // 4, 64),
        ("gate_up_64", 384, 208),
        ("up_gate_64", 128, 48),
    ],
)
def test_packed_weights(
    layout: str | None, rows: int, columns: int, swizzled: bool, packer: HostCtas, rng: torch.Generator
) -> None:
    """The GEMM decodes exactly the checkpoint's numbers over 128, with every scale."""
    experts, gated = 3, layout is not None
    codes = torch.randint(0, 256, (experts, rows, columns // 2), generator=rng, dtype=torch.uint8)
    scales = torch.randint(0, 256, (experts, rows, columns // 16), generator=rng, dtype=torch.uint8)
    scales.view(-1)[:256] = torch.arange(256, dtype=torch.uint8)
    held = nvfp4.swizzle_blockscale(scales.view(E4M3)).view(torch.uint8) if swizzled else scales
    parts = 2 if gated else 1
    given = torch.rand(experts, parts, generator=rng) + 0.1
    row_tiles, k_blocks = -(-rows // 64), -(-columns // 64)
    packed = torch.full((experts, row_tiles, k_blocks, 2048), 0xA5, dtype=torch.uint8)
    packed_scales = torch.full((experts, row_tiles, k_blocks, 256), 0xA5, dtype=torch.uint8)
    factors = torch.full((experts, parts), torch.nan)
    operands = {
        "codes": codes.data_ptr(),
        "scales": held.data_ptr(),
        "tile_rows": 128 if swizzled else 0,
        "factors": given.data_ptr(),
        "experts": experts,
        "rows": rows,
        "k": columns,
        "gated": gated,
        "layout": LAYOUTS[layout or "gate_up"],
        "packed_codes": packed.data_ptr(),
        "packed_scales": packed_scales.data_ptr(),
    }
    grid = experts * row_tiles * -(-k_blocks // 4)
    packer.run("pack", grid, 1, expert_scales=factors.data_ptr(), **operands)
    assert same_bits(factors, given * 128)
    blocks = experts * row_tiles * k_blocks
    fragments = torch.zeros((blocks, 128, 4, 4), dtype=torch.int32)
    packer.run("decode", blocks, 1, expert_scales=fragments.data_ptr(), **operands)
    decoded = numbers_of_fragments(fragments, gated, experts, rows, columns)
    expected = reference.nvfp4_numbers(codes, scales.view(E4M3)) / 128
    if layout is not None:
        expected = in_order(expected, layout)
    nan = expected.isnan()
    assert torch.equal(decoded.isnan(), nan) and bool(nan.any())
    assert torch.equal(decoded[~nan], expected[~nan])


def rounded(x: Tensor, factor: Tensor) -> Tensor:
    codes, scales = reference.nvfp4(x, factor)
    return reference.nvfp4_numbers(codes[..., 0::2] | codes[..., 1::2] << 4, scales).bfloat16()


def some_numbers(rows: int, columns: int, rng: torch.Generator) -> Tensor:
    """Returns bf16 numbers of many sizes, with rows of zeros and numbers between codes."""
    x = torch.randn((rows, columns), generator=rng) * torch.exp2(
        torch.randint(-14, 8, (rows, columns // 16), generator=rng).repeat_interleave(16, 1)
    )
    x[0, : columns // 2] = 0
    x[-1] = torch.randint(-12, 13, (columns,), generator=rng) / 2
    return x.bfloat16()


@pytest.mark.parametrize("columns", [16, 80, 704])
def test_rounding_of_all_rows(columns: int, rounder: HostCtas, rng: torch.Generator) -> None:
    rows = 23
    x, factor = some_numbers(rows, columns, rng), torch.rand(1, generator=rng) * 100
    out = torch.full((rows + 1, columns), torch.nan, dtype=torch.bfloat16)
    rounder.run(
        "rows", 3, int(torch.randint(1 << 40, (), generator=rng)), x=x.data_ptr(), out=out.data_ptr(), dtype=BF16,
        columns=columns, rows=rows, row_divisor=1, global_scales=factor.data_ptr(),
    )  # fmt: skip
    assert same_bits(out[:rows], rounded(x, factor)) and bool(out[rows:].isnan().all())


def test_division_and_e2m1(rounder: HostCtas) -> None:
    """Division by every scale, with reciprocals an ulp off, has the bits of a division; e2m1's numbers are right."""
    wrong = torch.zeros(2, dtype=torch.int64)
    rounder.run("check", 1, 1, out=wrong.data_ptr())
    assert wrong.tolist() == [0, 0]


def test_blocks_are_their_codes(rounder: HostCtas, rng: torch.Generator) -> None:
    """Every bf16 number beside others, infinities and NaN, under numbers of all sizes, becomes the value of its
    code."""
    columns, rows = 80, 4000
    x = torch.randint(1 << 16, (rows, columns), dtype=torch.int32, generator=rng).to(torch.int16)
    x[: 65536 // columns + 1].view(-1)[:65536] = torch.arange(1 << 16).to(torch.int16)
    x[rows // 2 :] = some_numbers(rows - rows // 2, columns, rng).view(torch.int16)
    x[-9:, ::3] = torch.tensor([0x7F80, -0x80, 0x7FC0, 0x7F7F, -0x81, 1, 0, -0x8000, 0x7FFF]).short()[:, None]
    x = torch.where((x & 0x7FFF) > 0x7F80, x | 0x40, x)  # no signalling NaN, which GPUs do not know
    bits = torch.randint(1 << 31, (rows,), dtype=torch.int64, generator=rng).int()
    factors = torch.where(torch.arange(rows) % 2 == 0, bits.view(torch.float32), torch.rand(rows, generator=rng) * 99)
    factors[-5:] = torch.tensor([math.inf, -math.inf, math.nan, -3.0, 0.0])
    factors[-9:-5] = torch.tensor([1e-37, 1e-45, -1e-40, 3e38])
    expected, out = x.clone(), torch.full_like(x, 7)
    for kernel, to in (("codes", expected), ("finish", out)):
        rounder.run(
            kernel,
            1,
            1,
            x=x.data_ptr(),
            out=to.data_ptr(),
            columns=columns,
            rows=rows,
            global_scales=factors.data_ptr(),
        )
    assert torch.equal(out, expected)


@pytest.mark.parametrize("quantised", [False, True], ids=["bf16", "codes"])
@pytest.mark.parametrize("mapped", [False, True, "by-place"], ids=["masked", "routed", "by-place"])
@pytest.mark.parametrize("columns", [16, 176, 1040])
def test_rounding_of_tiles(
    columns: int, mapped: bool | str, quantised: bool, rounder: HostCtas, rng: torch.Generator
) -> None:
    """Only rows of the schedule are rounded, each with its expert's number. GEMM1's output is rounded in place."""
    by_place = mapped == "by-place"
    experts, top_k, tile = 3, 2 if mapped else 1, 16
    counts = [tile + 3, 0, 7]
    tiles, place = [], 0
    for expert, count in enumerate(counts):
        for first in range(0, count, tile):
            tiles.append((expert, place + first, min(tile, count - first), 0))
        place += count + (0 if mapped else 2)
    schedule, number = torch.tensor(tiles, dtype=torch.int32), torch.tensor([len(tiles)], dtype=torch.int32)
    # There are two slots more than places.
    slots = place + 2
    order = torch.randperm(slots, generator=rng).int() if mapped else torch.arange(slots, dtype=torch.int32)
    x, factors = some_numbers(slots // top_k + 1, columns, rng), torch.rand(experts, generator=rng) * 100
    out = torch.full((slots, columns), 7.0, dtype=torch.bfloat16)
    given, scales = x, None
    if quantised:
        given = torch.randint(0, 256, (len(x), columns // 2), generator=rng, dtype=torch.uint8)
        scales = torch.randint(0, 0x7F, (len(x), columns // 16), generator=rng, dtype=torch.uint8)
    in_place = not mapped and not quantised
    expected = x[:slots].clone() if in_place else out.clone()
    for expert, first, count, _ in tiles:
        for place, slot in enumerate(order[first : first + count].tolist(), first):
            row, to = slot // top_k, place if by_place else slot
            if scales is not None:
                expected[to] = reference.nvfp4_numbers(given[row], scales[row].view(E4M3)).bfloat16()
            else:
                expected[to] = rounded(x[row], factors[expert])
    rounder.run(
        "rows", 2, int(torch.randint(1 << 40, (), generator=rng)), x=given.data_ptr(),
        scales=0 if scales is None else scales.data_ptr(), out=given.data_ptr() if in_place else out.data_ptr(),
        dtype=BF16, columns=columns, tiles=ctypes.c_uint64(schedule.data_ptr()).value, tile_count=number.data_ptr(),
        tile_rows=tile, slot_of_place=order.data_ptr() if mapped else 0, row_divisor=top_k,
        by_place=by_place, global_scales=factors.data_ptr(),
    )  # fmt: skip
    assert same_bits(given[:slots] if in_place else out, expected)
