// The schedule of a grouped GEMM whose rows lie expert by expert already: tiles of rows from the number of rows of each expert.
// src/cpu/schedule.rs is the same on the host.
#pragma once
#include <cstdint>

#include "../common/pdl.cuh"
#include "oxmoe/src/params/moe.rs.h"
#include "tile_cut.cuh"

namespace oxmoe {

// Every warp scans all experts, 32 at a time, and writes the tiles of one of them: warps exchange nothing. Grid: 1.
struct Schedule {
    static constexpr int kThreads = 1024;
    static constexpr int kSharedBytes = 0;

    static __device__ __forceinline__ void run(const ScheduleParams& p) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        pdl::launch_dependents();
        pdl::wait();
        if (int(threadIdx.x) < p.counter_count) p.counters[threadIdx.x] = 0;
        int tiles_before = 0, rows_before = 0;
        for (int base = 0; base < p.experts; base += 32) {
            const int expert = base + lane;
            const int wanted = expert < p.experts ? limited(p.row_counts[expert], p.rows) : 0;
            const int padded = (wanted + p.alignment - 1) / p.alignment * p.alignment;
            int first = 0, count = 0;
            if (p.rows_each > 0) {
                first = expert * p.rows_each;
                count = limited(wanted, p.rows_each);
            } else {
                // NOTE: sums stop at the last row, so that nothing overflows.
                const int own = limited(padded, p.rows), sum = scan(own, p.rows);
                const int others = int(__shfl_up_sync(0xFFFFFFFFu, uint32_t(sum), 1));
                first = limited(rows_before + (lane > 0 ? others : 0), p.rows);
                count = limited(wanted, p.rows - first);
                rows_before = limited(rows_before + int(__shfl_sync(0xFFFFFFFFu, uint32_t(sum), 31)), p.rows);
            }
            const int tiles = (count + p.tile_tokens - 1) / p.tile_tokens, sum = scan(tiles, 0x3FFFFFFF);
            write(p, base + warp, of_lane(warp, first), of_lane(warp, count), of_lane(warp, tiles),
                  tiles_before + of_lane(warp, sum - tiles), lane);
            tiles_before += int(__shfl_sync(0xFFFFFFFFu, uint32_t(sum), 31));
        }
        if (threadIdx.x == 0) *p.tile_count = tiles_before;
    }

private:
    static __device__ __forceinline__ int limited(int x, int most) { return x < 0 ? 0 : x < most ? x : most; }

    static __device__ __forceinline__ int of_lane(int lane, int x) { return int(__shfl_sync(0xFFFFFFFFu, uint32_t(x), lane)); }

    // The sum of this lane's number and those of the lanes before it, at most `most`; numbers are neither negative nor above it.
    static __device__ __forceinline__ int scan(int x, int most) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            const int other = int(__shfl_up_sync(0xFFFFFFFFu, uint32_t(x), distance));
            if (lane >= distance) x = limited(x + other, most);
        }
        return x;
    }

    static __device__ __forceinline__ void write(const ScheduleParams& p, int expert, int first, int count, int tiles,
                                                 int first_tile, int lane) {
        const int steps = (count + p.tile_step - 1) / p.tile_step, each = steps / (tiles > 0 ? tiles : 1);
        const TileCut cut{p.tile_step, each, steps - each * tiles};
        for (int i = lane; i < tiles; i += 32)
            p.tiles[first_tile + i] = Tile{expert, first + cut.first(i), cut.count(i, count), 0};
    }
};

}  // namespace oxmoe
