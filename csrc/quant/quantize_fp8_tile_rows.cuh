// QuantizeFp8Rows and QuantizeFp8Peak of the rows of a schedule alone, wherever they lie.
#pragma once
#include "quantize_fp8_rows.cuh"

namespace oxmoe {

// `row_threads` threads a row of a tile. Grid: any.
struct QuantizeFp8TileRows {
    static constexpr int kThreads = QuantizeFp8Rows::kThreads;
    static constexpr int kSharedBytes = 0;

    static __device__ __forceinline__ void run(const QuantizeFp8Params& p) {
        __shared__ float peaks[2][kThreads / 32];
        // NOTE: in this order, as in QuantizeFp8Rows.
        pdl::wait();
        pdl::launch_dependents();
        const int threads = p.row_threads, thread = int(threadIdx.x) % threads, rows = kThreads / threads;
        const int vectors = p.columns / 8, groups = p.columns / p.group;
        const int slices = (p.tile_rows + rows - 1) / rows, units = *p.tile_count * slices;
        int turn = 0;
        for (int unit = blockIdx.x; unit < units; unit += gridDim.x) {
            const Tile tile = p.tiles[unit / slices];
            const int first = unit % slices * rows, row = first + int(threadIdx.x) / threads;
            // NOTE: all threads of a CTA go on together, as they exchange.
            if (first >= tile.count) continue;
            const int64_t place = tile.first + row;
            const uint4* x = reinterpret_cast<const uint4*>(p.x) + place * vectors;
            QuantizeFp8Rows::quantize(p, x, place, row < tile.count, threads, thread, vectors, groups, peaks[turn], [](float) {});
            turn ^= 1;
        }
    }
};

// Raises `given`, which an earlier kernel made 0, to the largest magnitude of these rows. Grid: any.
struct QuantizeFp8TilePeak {
    static constexpr int kThreads = QuantizeFp8Peak::kThreads;
    static constexpr int kSharedBytes = 0;
    static constexpr int kAhead = QuantizeFp8Peak::kAhead;

    static __device__ __forceinline__ void run(const QuantizeFp8Params& p) {
        __shared__ float peaks[kThreads / 32];
        pdl::wait();
        pdl::launch_dependents();
        constexpr int kUnit = kAhead * kThreads;
        const int row_vectors = p.columns / 8, slices = (p.tile_rows * row_vectors + kUnit - 1) / kUnit;
        const int units = *p.tile_count * slices;
        uint32_t peak = 0;
        for (int unit = blockIdx.x; unit < units; unit += gridDim.x) {
            const Tile tile = p.tiles[unit / slices];
            const int first = unit % slices * kUnit + int(threadIdx.x), vectors = tile.count * row_vectors;
            const uint4* x = reinterpret_cast<const uint4*>(p.x) + int64_t(tile.first) * row_vectors;
            uint4 words[kAhead] = {};
#pragma unroll
            for (int i = 0; i < kAhead; ++i) {
                if (first + i * kThreads < vectors) words[i] = x[first + i * kThreads];
            }
#pragma unroll
            for (int i = 0; i < kAhead; ++i) Fp8Vectors::grow(peak, words[i]);
        }
        QuantizeFp8Peak::raise(p, peak, peaks);
    }
};

}  // namespace oxmoe
