"""The producers of the packed GEMMs' stages, on the host (host_hopper.py): schedule, weights, gathering.

In place of the consumers that multiply are some that compare every byte of their stages with the place it must
have come from, and count what they were given. An index beyond an array is an error. The epilogue that rounds sums is
here, too.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from host_hopper import base, body, build

ENTRY = r"""
using oxmoe::GroupedGemmParams;
using oxmoe::RingPosition;
using oxmoe::WorkUnit;
namespace sm90 = oxmoe::sm90;

extern "C" void __ubsan_handle_out_of_bounds(void*, void*) { fail("an index beyond its array"); }

template <int Codes, int Scales>
struct Form { static constexpr int kCodeBytes = Codes, kScaleBytes = Scales; };

static int32_t *given, *given_down;  // [places, row tiles] of each GEMM: how often

// Consumers compare, and of GEMM1 they store rows of p.up.out: the tile's codes, so that GEMM2's tokens are known.
template <typename Pipeline, int Consumers, int Stages, int Blocks, bool E4m3>
struct Probe {
    using Base = typename Pipeline::Base;
    using Shared = typename Pipeline::Shared;
    using Params = typename Pipeline::Params;
    using Unit = typename Pipeline::Unit;
    static constexpr int kColumns = 64;  // of GEMM1's output, from a row tile

    static void run(const Params& p) {
        Shared& shared = *reinterpret_cast<Shared*>(shared_memory());
        if (threadIdx.x == 0) {
            for (uint64_t& stored : shared.stored) sm90::barrier_init(&stored, 128 * Consumers);
            Base::init_barriers(shared, 128 * Consumers);
        }
        __syncthreads();
        const int warp = threadIdx.x / 32;
        if (warp == 0) Pipeline::copy_weights(p, shared);
        else if (warp >= 4) consume(p, shared, warp / 4 - 1, threadIdx.x % 128);
        else if constexpr (E4m3) {
            if (warp == 1) Base::template schedule<Pipeline::kByExpert, Pipeline::kSplitsLast>(p, shared);
            else Pipeline::gather(p, shared);
        } else {
            if (warp == 1) oxmoe::PairProducers<Pipeline>::schedule(p, shared);
            else oxmoe::PairProducers<Pipeline>::gather(p, shared);
        }
    }

    static void consume(const Params& params, Shared& shared, int consumer, int thread) {
        RingPosition<Pipeline::kUnitSlots> units;
        RingPosition<Stages> ring;
        for (;; units.advance()) {
            sm90::barrier_wait(&shared.unit_full[units.slot], units.parity);
            const Unit work = shared.unit[units.slot];
            sm90::barrier_arrive(&shared.unit_empty[units.slot]);
            if (work.expert < 0) break;
            const GroupedGemmParams& p = oxmoe::gemm_of(params, work);
            const int blocks_of_k = Pipeline::k_blocks(p), row_tiles = (p.rows + 63) / 64;
            const bool mine = Base::has_rows(p, work, consumer);
            const int tile = Base::row_block(work) * Consumers + consumer;
            for (int block = 0; block < blocks_of_k; block += Blocks, ring.advance()) {
                sm90::barrier_wait(&shared.full[ring.slot], ring.parity);
                if (mine) compare(p, shared.stage[ring.slot], work, consumer, tile, block, thread);
                sm90::barrier_arrive(&shared.empty[ring.slot]);
            }
            int32_t* counts = given;
            if constexpr (!E4m3) {
                if (work.is_down()) counts = given_down;
            }
            for (int n = thread; mine && n < work.count; n += 128) ++counts[(work.first + n) * row_tiles + tile];
            if constexpr (!E4m3) {
                if (work.is_down()) continue;
                for (int n = thread; mine && n < work.count; n += 128) {
                    const int column = tile * kColumns, columns = std::min(kColumns, p.out_columns - column);
                    uint8_t* out = p.out + (size_t(work.first + n) * p.out_columns + column) * 2;
                    memcpy(out, row_of(params, work, n, tile), 2 * columns);
                }
                sm90::barrier_arrive(&shared.stored[work.stored]);
            }
        }
    }

    // A row of GEMM1's output is made of bytes of the weights' codes, which differ from row to row and tile to tile.
    static const uint8_t* row_of(const oxmoe::GemmPairParams& p, const WorkUnit& work, int n, int tile) {
        return p.up.weights + (size_t(work.expert) * ((p.up.rows + 63) / 64) + tile) * 512 + (work.first + n) % 24 * 16;
    }
    template <typename Stage>
    static void compare(const GroupedGemmParams& p, const Stage& stage, const WorkUnit& work, int consumer, int tile,
                        int block, int thread) {
        const int blocks_of_k = Pipeline::k_blocks(p), row_tiles = (p.rows + 63) / 64;
        const int blocks = std::min(Blocks, blocks_of_k - block), row_blocks = E4m3 ? blocks / 2 : blocks;
        const size_t at = (size_t(work.expert) * row_tiles + tile) * blocks_of_k + block;
        const auto same = [&](const uint8_t* held, const uint8_t* from, int block_bytes) {
            const int bytes = blocks * block_bytes;
            for (int i = thread * 16; i < bytes; i += 128 * 16)
                if (memcmp(held + i, from + at * block_bytes + i, 16)) return false;
            return true;
        };
        REQUIRE(same(stage.codes[consumer], p.weights, Pipeline::kCodeBytes / Blocks));
        REQUIRE(same(stage.scales[consumer], p.block_scales, Pipeline::kScaleBytes / Blocks));
        static const uint8_t zeros[16] = {};
        for (int i = thread; i < work.count * row_blocks * 8; i += 128) {
            const int n = i / (row_blocks * 8), row_block = i / 8 % row_blocks, chunk = i % 8;
            const int place = work.first + n;
            const bool is_mapped = p.slot_of_place && p.row_divisor;
            const int row = is_mapped ? p.slot_of_place[place] / p.row_divisor : place;
            const int column = ((E4m3 ? block / 2 : block) + row_block) * 8 + chunk;
            const uint8_t* x = p.x + (int64_t(row) * (p.k / 8) + column) * 16;
            const uint8_t* held = stage.tokens + row_block * Base::kTokenBytes + n * 128 + (chunk ^ n % 8) * 16;
            REQUIRE(memcmp(held, column < p.k / 8 ? x : zeros, 16) == 0);
        }
    }
};

#define PROBE(name, form, tokens, consumers, stages, blocks, e4m3) \
    extern "C" int name##_width(int count) { \
        int chosen = 0; \
        oxmoe::PackedPipelineSm90<form, false, tokens, consumers, stages, blocks, e4m3>::at_width( \
            count, [&](auto width) { chosen = decltype(width)::value; }); \
        return chosen; \
    } \
    extern "C" const char* name(const void* params, int32_t* up, int32_t* down, uint32_t grid, uint32_t seed) { \
        using Pipeline = oxmoe::PackedPipelineSm90<form, false, tokens, consumers, stages, blocks, e4m3>; \
        static_assert(sizeof(typename Pipeline::Shared) <= 227 << 10); \
        given = up, given_down = down, rows_may_end = true; \
        const auto* p = static_cast<const typename Pipeline::Params*>(params); \
        body = [p] { Probe<Pipeline, consumers, stages, blocks, e4m3>::run(*p); }; \
        launch(grid, Pipeline::kThreads, seed); \
        return failure.c_str(); \
    }

// Sums of a unit, [consumers, 128, tokens / 2] at p.weights, through GEMM1's epilogue; p.rows is what a CTA has.
template <bool Gated, int Tokens, int Consumers, int Stages, int Blocks>
struct Epilogue {
    using Pipeline = oxmoe::PackedPipelineSm90<Form<2048, 256>, Gated, Tokens, Consumers, Stages, Blocks, false>;
    using Base = typename Pipeline::Base;

    static void run(const GroupedGemmParams& p, const WorkUnit& work) {
        auto& shared = *reinterpret_cast<typename Pipeline::Shared*>(shared_memory());
        const int consumer = int(threadIdx.x / 128) - 1;
        if (consumer < 0 || !Base::has_rows(p, work, consumer)) return;
        float sums[1][Tokens / 2];
        memcpy(sums, p.weights + (consumer * 128 + threadIdx.x % 128) * sizeof(sums), sizeof(sums));
        uint32_t staging = 0;
        Base::template store<true, oxmoe::nvfp4::RoundedOutputs>(work, sums, p, shared, staging);
    }
};
#define EPILOGUE(name, ...) \
    extern "C" const char* name(const GroupedGemmParams* p, const WorkUnit* work, uint32_t seed) { \
        using Kernel = Epilogue<__VA_ARGS__>; \
        body = [=] { Kernel::run(*p, *work); }; \
        launch(1, Kernel::Pipeline::kThreads, seed); \
        return failure.c_str(); \
    }
using Four = Form<2048, 128>;
using Eight = Form<4096, 128>;
"""


INSTRUCTIONS = r"""
static uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
    const uint64_t bytes = uint64_t(b) << 32 | a;
    uint32_t result = 0;
    for (int i = 0; i < 4; ++i) result |= uint32_t(bytes >> 8 * (selector >> 4 * i & 7) & 0xFF) << 8 * i;
    return result;
}
static uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
namespace ptx {
static void max_bf16x2(uint32_t& larger, uint32_t a, uint32_t b) {
    const auto larger_one = [](uint32_t x, uint32_t y) {
        return to_bf16(fmaxf(from_bf16(x & 0xFFFF), from_bf16(y & 0xFFFF)));
    };
    larger = larger_one(a, b) | larger_one(a >> 16, b >> 16) << 16;
}
}  // namespace ptx
"""


class HostPacked:
    """Probes of pipelines by name; a pipeline is (bits of a weight, tokens, consumers, stages, blocks, e4m3). Epilogues
    are also named; one is (gated, tokens, consumers, stages, blocks)."""

    def __init__(
        self,
        folder: Path,
        pipelines: dict[str, tuple[int, int, int, int, int, bool]],
        epilogues: dict[str, tuple[bool, int, int, int, int]],
    ) -> None:
        probes = [
            f"PROBE({name}, {'Four' if bits == 4 else 'Eight'}, {', '.join(map(str, sizes))}, {str(e4m3).lower()})"
            for name, (bits, *sizes, e4m3) in pipelines.items()
        ]
        probes += [
            f"EPILOGUE({name}, {str(gated).lower()}, {', '.join(map(str, sizes))})"
            for name, (gated, *sizes) in epilogues.items()
        ]
        common = map(body, ("common/narrow", "common/bf16_pairs", "common/nvfp4_round"))
        moe = map(body, ("moe/packed_pipeline_sm90", "moe/tile_cut", "moe/pair_schedule_sm90"))
        text = INSTRUCTIONS + base() + "".join([*common, *moe])
        entry = "\n".join([ENTRY, *probes])
        self.library = build(folder, text, entry, "-fsanitize=bounds")

    def width(self, name: str, count: int) -> int:
        """Returns the width that a tile with this many tokens is multiplied at."""
        return getattr(self.library, f"{name}_width")(ctypes.c_int(count))

    def run(self, name: str, given: list[torch.Tensor], grid: int, seed: int, p: ctypes.Structure) -> None:
        """Runs a pipeline. `p`: GroupedGemmParams of e4m3, GemmPairParams of others. `given` has a tensor for each
        GEMM."""
        function = getattr(self.library, name)
        function.restype = ctypes.c_char_p
        counts = [ctypes.c_void_p(tensor.data_ptr()) for tensor in given]
        failure = function(ctypes.byref(p), *counts, ctypes.c_uint32(grid), ctypes.c_uint32(seed)).decode()
        assert not failure, failure

    def finish(self, name: str, p: ctypes.Structure, unit: list[int], seed: int) -> None:
        """Runs a unit (expert, first, count, row block) through an epilogue."""
        function = getattr(self.library, name)
        function.restype = ctypes.c_char_p
        failure = function(ctypes.byref(p), (ctypes.c_int * 4)(*unit), ctypes.c_uint32(seed)).decode()
        assert not failure, failure
