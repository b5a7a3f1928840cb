// Rounds rows as RoundRowsMxfp8 does, but only the rows of a schedule, wherever they lie.
#pragma once
#include <cstdint>

#include "../common/mxfp8.cuh"
#include "oxmoe/src/params/tiles.rs.h"
#include "walk.cuh"

namespace oxmoe {

// A CTA takes a part of a tile at a time, kVectors vectors of 8 numbers for each thread. A quad has a group of 32 columns. Needs
// columns that are a multiple of 32, x and out aligned to 16 bytes; out may be x. Grid: any.
struct RoundTilesMxfp8 : Cta<256> {
    static constexpr int kVectors = 2;

    static __device__ __forceinline__ void run(const TileRowsParams& p) {
        walk::begin();
        constexpr int kUnit = kVectors * kThreads;
        const int row_vectors = p.rows.columns / 8;
        for (const auto [tile, first] : walk::Pieces(p.rows.tiles, p.rows.tile_count, p.tile_rows * row_vectors, kUnit)) {
            const int vectors = tile.count * row_vectors;
            if (first >= vectors) continue;
            const size_t start = size_t(tile.first) * row_vectors;
            const uint4* x = reinterpret_cast<const uint4*>(p.rows.x) + start;
            uint4* out = reinterpret_cast<uint4*>(p.rows.out) + start;
            uint4 held[kVectors] = {};
#pragma unroll
            for (int i = 0; i < kVectors; ++i) {
                const int v = first + i * kThreads + threadIdx.x;
                if (v < vectors) held[i] = x[v];
            }
#pragma unroll
            for (int i = 0; i < kVectors; ++i) {
                const int v = first + i * kThreads + threadIdx.x;
                const uint4 rounded = mxfp8::round_group(held[i]);
                if (v < vectors) out[v] = rounded;
            }
        }
    }
};

}  // namespace oxmoe
