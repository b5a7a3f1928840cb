"""The kernels around NVFP4's grouped GEMM for Hopper, run on the host: packing with decoding, and rounding of rows."""

from __future__ import annotations

import ctypes
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

# A thread's A fragments of a block's four k16 steps, as the GEMM decodes them, one block a CTA.
DECODER = """
#pragma once
#include "csrc/quant/pack_nvfp4.cuh"

namespace oxmoe {
struct DecodeNvfp4 {
    static constexpr int kThreads = 128, kSharedBytes = 0;
    static void run(const PackNvfp4Params& p) {
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


@pytest.fixture(scope="module")
def packer(tmp_path_factory: pytest.TempPathFactory) -> HostCtas:
    folder: Path = tmp_path_factory.mktemp("pack")
    (folder / "decode.cuh").write_text(DECODER)
    kernels = {"pack": ("Nvfp4Pack", "PackNvfp4Params"), "decode": ("DecodeNvfp4", "PackNvfp4Params")}
    return HostCtas(folder, ["../decode.cuh"], kernels, 900)


@pytest.fixture(scope="module")
def rounder(tmp_path_factory: pytest.TempPathFactory) -> HostCtas:
    kernels = {"rows": ("RoundRowsNvfp4", "RoundNvfp4Params")}
    return HostCtas(tmp_path_factory.mktemp("round"), ["quant/round_rows_nvfp4.cuh"], kernels, 800)


def in_order(rows: Tensor, layout: str) -> Tensor:
    """Gate and up rows [E, 2I, ...] of a layout as [gate; up]."""
    if layout == "interleaved":
        return torch.cat([rows[:, 0::2], rows[:, 1::2]], 1)
    if layout.endswith("_64"):
        rows = nvfp4.deinterleave_w13_halves(rows)
    first, second = rows.chunk(2, 1)
    return torch.cat([first, second] if layout.startswith("gate") else [second, first], 1)


def numbers_of_fragments(fragments: Tensor, gated: bool, experts: int, rows: int, columns: int) -> Tensor:
    """fp32 [E, rows, columns] of fragments [blocks, 128, 4, 4] of pairs, gated as [gate; up]."""
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
    """What the GEMM decodes is the checkpoint's numbers over 128, exactly, with every scale there is."""
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
    """bf16 of many sizes, with rows of zeros and numbers between codes."""
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


@pytest.mark.parametrize("quantised", [False, True], ids=["bf16", "codes"])
@pytest.mark.parametrize("mapped", [False, True], ids=["masked", "routed"])
@pytest.mark.parametrize("columns", [16, 176, 1040])
def test_rounding_of_tiles(
    columns: int, mapped: bool, quantised: bool, rounder: HostCtas, rng: torch.Generator
) -> None:
    """Rows of the schedule alone, each with its expert's number; in place where they are GEMM1's output."""
    experts, top_k, tile = 3, 2 if mapped else 1, 16
    counts = [tile + 3, 0, 7]
    tiles, place = [], 0
    for expert, count in enumerate(counts):
        for first in range(0, count, tile):
            tiles.append((expert, place + first, min(tile, count - first), 0))
        place += count + (0 if mapped else 2)
    schedule, number = torch.tensor(tiles, dtype=torch.int32), torch.tensor([len(tiles)], dtype=torch.int32)
    # Two slots more than are placed.
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
        for slot in order[first : first + count].tolist():
            row = slot // top_k
            if scales is not None:
                expected[slot] = reference.nvfp4_numbers(given[row], scales[row].view(E4M3)).bfloat16()
            else:
                expected[slot] = rounded(x[row], factors[expert])
    rounder.run(
        "rows", 2, int(torch.randint(1 << 40, (), generator=rng)), x=given.data_ptr(),
        scales=0 if scales is None else scales.data_ptr(), out=given.data_ptr() if in_place else out.data_ptr(),
        dtype=BF16, columns=columns, tiles=ctypes.c_uint64(schedule.data_ptr()).value, tile_count=number.data_ptr(),
        tile_rows=tile, slot_of_place=order.data_ptr() if mapped else 0, row_divisor=top_k,
        global_scales=factors.data_ptr(),
    )  # fmt: skip
    assert same_bits(given[:slots] if in_place else out, expected)
