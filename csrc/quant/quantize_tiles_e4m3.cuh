// QuantizeRowsE4m3 of the rows of a schedule alone, wherever they lie: rows of x, codes and scales have the same numbers.
#pragma once
#include "oxmoe/src/params/tiles.rs.h"
#include "quantize_rows_e4m3.cuh"

namespace oxmoe {

// A CTA takes row after row. Grid: any.
struct QuantizeTilesE4m3 {
    static constexpr int kThreads = QuantizeRowsE4m3::kThreads;
    static constexpr int kSharedBytes = 0;

    static __device__ __forceinline__ void run(const TileRowsParams& p) {
        __shared__ uint32_t peaks[2][kThreads / 32];
        // NOTE: in this order, as in RoundRowsMxfp8.
        pdl::wait();
        pdl::launch_dependents();
        const int vectors = p.rows.columns / 8, out_vectors = p.rows.out_columns / 8;
        const int units = *p.rows.tile_count * p.tile_rows;
        int turn = 0;
        for (int unit = blockIdx.x; unit < units; unit += gridDim.x) {
            const Tile tile = p.rows.tiles[unit / p.tile_rows];
            const int row = unit % p.tile_rows;
            if (row >= tile.count) continue;
            QuantizeRowsE4m3::quantize(p.rows, tile.first + row, vectors, out_vectors, peaks[turn]);
            turn ^= 1;
        }
    }
};

}  // namespace oxmoe
