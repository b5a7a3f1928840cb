"""Dense MXFP8 for many tokens on the host (host_hopper.py): the preparation of tokens and the GEMM, launched together.

The GEMM's CTAs all run at once, also those of clusters. Another CTA may write the sums that a CTA waits for at any
time.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from host_hopper import body, build

PRELUDE = r"""
struct uint2 { uint32_t x, y; };
static float4 __ldcg(const float4* from) { return *from; }
static float from_f16(uint32_t bits) {
    const float sign = bits & 0x8000 ? -1 : 1, m = bits & 0x3FF;
    const int e = bits >> 10 & 31;
    return sign * (e == 31 ? (m ? NAN : INFINITY) : e ? ldexpf(1024 + m, e - 25) : ldexpf(m, -24));
}
static uint32_t to_f16(float x) {
    const uint32_t sign = bits_of(x) >> 16 & 0x8000, bits = bits_of(x) & 0x7FFFFFFF;
    if (x != x) return 0x7FFF;
    if (bits >= 0x477FF000) return sign | 0x7C00;
    if (bits < 0x38800000) return sign | uint32_t(nearbyintf(float_of(bits) * 0x1p24f));
    return sign | (bits - 0x38000000 + 0xFFF + (bits >> 13 & 1)) >> 13;
}
namespace ptx {
static void cvt_rn_f16x2_e4m3x2(uint32_t& pair, uint16_t codes) {
    pair = to_f16(from_e4m3(codes & 0xFF)) | to_f16(from_e4m3(codes >> 8)) << 16;
}
}  // namespace ptx

namespace oxmoe {
template <> uint32_t pack<__half>(float low, float high) { return to_f16(low) | to_f16(high) << 16; }
template <> float2 unpack<__half>(uint32_t word) { return {from_f16(word & 0xFFFF), from_f16(word >> 16)}; }
template <typename Element>
Element from_float(float value) { return {uint16_t(pack<Element>(value, 0))}; }
namespace counter {
inline void wait_for_in_warp(const int* counter, int value) {
    wait_for(counter, value);
    converge();
}
}  // namespace counter

namespace cluster {
inline float4 load(const float4* local, int other) {
    const uint32_t cta = first() + other;
    const Fiber* fiber = &fibers[self - fibers.data() - self->thread + int64_t(other - rank()) * self->of->threads];
    REQUIRE(std::any_of(fiber, fiber + self->of->threads, [](const Fiber& fiber) { return !fiber.over; }));
    return *reinterpret_cast<const float4*>(ctas[cta].shared + sm90::shared_address(local));
}
}  // namespace cluster

namespace sm90 {
// Lane l has row l / 4 of a tile, columns 2 (l % 4), + 1.
inline uint32_t turn_tile(uint32_t pair) {
    const auto all = exchange(pair);
    const uint32_t lane = threadIdx.x % 32, column = lane / 4;
    const auto element = [&](uint32_t row) { return all[row * 4 + column / 2] >> column % 2 * 16 & 0xFFFF; };
    return element(lane % 4 * 2) | element(lane % 4 * 2 + 1) << 16;
}
}  // namespace sm90
}  // namespace oxmoe
"""

ENTRY = """
using oxmoe::MmMxfp8Params;
using oxmoe::MmMxfp8Tokens;
template <typename Kernel>
static Launch launch_of(const MmMxfp8Params* p, uint32_t grid) {
    return {grid, Kernel::kThreads, [p] { Kernel::run(*p); }};
}
// The launch after it has begun.
static Launch late(Launch launch) {
    launch.body = [run = launch.body] {
        for (int i = 0; i < 32; ++i) wait([] { return true; });
        run();
    };
    return launch;
}
extern "C" const char* prepare(const MmMxfp8Params* p, uint32_t grid, uint32_t seed) {
    launch({launch_of<MmMxfp8Tokens>(p, grid)}, seed);
    return failure.c_str();
}
#define KERNEL(name, ...) \\
    extern "C" const char* name(const MmMxfp8Params* p, uint32_t tokens_grid, uint32_t grid, uint32_t seed) { \\
        using Kernel = oxmoe::MmMxfp8WideSm90<__VA_ARGS__>; \\
        static_assert(Kernel::kSharedBytes <= 227 << 10); \\
        rows_may_end = true; \\
        Launch gemm = launch_of<Kernel>(p, grid); \\
        gemm.cluster = p->splits; \\
        launch({late(launch_of<MmMxfp8Tokens>(p, tokens_grid)), gemm}, seed); \\
        return failure.c_str(); \\
    }
// (CTA, tile, first, last) of every segment, CTA after CTA; how many there are.
extern "C" int segments(int tiles, int shared_tiles, int blocks, int splits, uint32_t grid, int (*found)[4], int room) {
    int count = 0;
    gridDim.x = grid;
    for (uint32_t cta = 0; cta < grid; ++cta) {
        blockIdx.x = cta;
        oxmoe::MmShare share(tiles, shared_tiles, blocks, splits);
        for (auto next = share.next(); next.tile >= 0 && count < room; next = share.next(), ++count) {
            const int values[4] = {int(cta), next.tile, next.first, next.last};
            memcpy(found[count], values, sizeof(values));
        }
    }
    return count;
}
extern "C" int least() { return oxmoe::MmShare::kLeast; }
"""


class HostMm:
    """The kernels for the host. `tiles`: name -> (tokens, consumers, stages)."""

    def __init__(self, folder: Path, tiles: dict[str, tuple[int, int, int]]) -> None:
        files = ("common/ring", "common/scale_layout", "gemm/mxfp8_operand", "gemm/mm_mxfp8_wide_sm90")
        entries = (f"KERNEL({name}, {', '.join(map(str, tile))})\n" for name, tile in tiles.items())
        self.library = build(folder, PRELUDE + "".join(map(body, files)), ENTRY + "".join(entries))

    def run(self, name: str, p: ctypes.Structure, seed: int, *grids: int) -> None:
        """Runs a launch. `grids`: the grid of the preparation and, unless `name` is "prepare", of the GEMM."""
        function = getattr(self.library, name)
        function.restype = ctypes.c_char_p
        failure = function(ctypes.byref(p), *map(ctypes.c_uint32, (*grids, seed))).decode()
        assert not failure, failure

    def segments(self, tiles: int, shared: int, blocks: int, grid: int, splits: int = 1) -> Tensor:
        """Returns (CTA, tile, first block, last) of all segments, CTA after CTA, each in its order."""
        found = torch.full((2 * grid + 2 * tiles + 2, 4), -1, dtype=torch.int32)
        sizes = map(ctypes.c_int, (tiles, shared, blocks, splits, grid))
        count = self.library.segments(*sizes, ctypes.c_void_p(found.data_ptr()), ctypes.c_int(len(found)))
        assert count < len(found)
        return found[:count].long()
