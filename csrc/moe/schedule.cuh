// The schedule of a grouped GEMM whose rows already lie expert by expert: tiles of rows from the number of rows of each expert.
// src/cpu/schedule.rs is the same on the host.
#pragma once
#include <cstdint>

#include "../common/pdl.cuh"
#include "oxmoe/src/params/moe.rs.h"
#include "tile_cut.cuh"

namespace oxmoe {

// Each thread scans an expert, and 8 threads write the tiles of an expert. Grid: 1.
struct Schedule {
    static constexpr int kThreads = 1024;
    static constexpr int kSharedBytes = 0;
    static constexpr int kWriters = 8;

    static __device__ __forceinline__ void run(const ScheduleParams& p) {
        __shared__ int4 spans[kThreads];  // first row, rows, first tile, tiles
        __shared__ int warp_sums[2][32];
        const int thread = threadIdx.x;
        pdl::launch_dependents();
        pdl::wait();
        for (int i = thread; i < p.counter_count; i += kThreads) p.counters[i] = 0;
        Sum rows_before, tiles_before;
        for (int base = 0; base < p.experts; base += kThreads) {
            const int experts = min(p.experts - base, kThreads);
            const int wanted = thread < experts ? limited(p.row_counts[base + thread], p.rows) : 0;
            int4 span = {};
            if (p.rows_each > 0) {
                span.x = (base + min(thread, experts)) * p.rows_each;
                span.y = limited(wanted, p.rows_each);
            } else {
                const int padded = (wanted + p.alignment - 1) / p.alignment * p.alignment;
                // NOTE: sums stop at the last row, so that nothing overflows.
                span.x = rows_before.add(experts, limited(padded, p.rows), p.rows, warp_sums[0]);
                span.y = limited(wanted, p.rows - span.x);
            }
            span.w = (span.y + p.tile_tokens - 1) / p.tile_tokens;
            span.z = tiles_before.add(experts, span.w, 0x3FFFFFFF, warp_sums[1]);
            if (thread < experts) spans[thread] = span;
            __syncthreads();
            for (int i = thread / kWriters; i < experts; i += kThreads / kWriters) {
                write(p, base + i, spans[i], thread % kWriters);
            }
        }
        if (thread == 0) *p.tile_count = tiles_before.sum;
    }

private:
    static __device__ __forceinline__ int limited(int x, int most) { return x < 0 ? 0 : x < most ? x : most; }

    // The sum of one number for each scanned expert. Warps without experts stay out: a multiprocessor shuffles for one warp a
    // clock.
    struct Sum {
        int sum = 0;  // known in warps that scanned

        // Adds a number of each of the first `count` threads; other threads bring 0. Returns the sum of the numbers before this
        // thread's. Neither numbers nor sums are negative or above `most`. All threads meet.
        __device__ __forceinline__ int add(int count, int x, int most, int (&warp_sums)[32]) {
            const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = (count + 31) / 32;
            if (warp < warps) {
                x = scan(x, most);
                if (lane == 31) warp_sums[warp] = x;
            }
            __syncthreads();
            if (warp >= warps) return 0;
            const int sums = scan(lane < warps ? warp_sums[lane] : 0, most);
            const int warps_before = of_lane(sums, warp - 1), lanes_before = of_lane(x, lane - 1);
            const int before = limited((warp > 0 ? warps_before : 0) + (lane > 0 ? lanes_before : 0), most);
            const int result = limited(sum + before, most);
            sum = limited(sum + of_lane(sums, 31), most);
            return result;
        }
    };

    static __device__ __forceinline__ int of_lane(int x, int lane) { return int(__shfl_sync(0xFFFFFFFFu, uint32_t(x), lane)); }

    // The sum of the numbers of this lane and of the lanes before it.
    static __device__ __forceinline__ int scan(int x, int most) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            const int other = int(__shfl_up_sync(0xFFFFFFFFu, uint32_t(x), distance));
            if (lane >= distance) x = limited(x + other, most);
        }
        return x;
    }

    static __device__ __forceinline__ void write(const ScheduleParams& p, int expert, int4 span, int writer) {
        const auto [first, count, first_tile, tiles] = span;
        const int steps = (count + p.tile_step - 1) / p.tile_step, each = steps / (tiles > 0 ? tiles : 1);
        const TileCut cut{p.tile_step, each, steps - each * tiles};
        for (int i = writer; i < tiles; i += kWriters) {
            p.tiles[first_tile + i] = Tile{expert, first + cut.first(i), cut.count(i, count), 0};
        }
    }
};

}  // namespace oxmoe
