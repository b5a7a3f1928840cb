// QuantizeFp8 of the rows of a schedule alone, wherever they lie: bf16 or f16, groups of 128 columns.
#pragma once
#include "quantize_fp8.cuh"

namespace oxmoe {

// A CTA takes 64 groups of a tile at a time. Grid: any.
struct QuantizeFp8Tiles {
    static constexpr int kThreads = QuantizeFp8::kThreads;
    static constexpr int kSharedBytes = 0;

    static __device__ __forceinline__ void run(const QuantizeFp8Params& p) {
        constexpr int kLanes = QuantizeFp8::kLanes, kGroups = kThreads / kLanes;
        // NOTE: in this order, as in QuantizeFp8.
        pdl::wait();
        pdl::launch_dependents();
        const int row_groups = p.columns / 128, slices = (p.tile_rows * row_groups + kGroups - 1) / kGroups;
        const int units = *p.tile_count * slices;
        for (int unit = blockIdx.x; unit < units; unit += gridDim.x) {
            const Tile tile = p.tiles[unit / slices];
            const int first = unit % slices * kGroups;
            if (first >= tile.count * row_groups) continue;
            const uint32_t thread = (uint32_t(tile.first) * row_groups + first) * kLanes + threadIdx.x;
            const uint32_t rows = tile.first + tile.count;
            if (p.dtype == Dtype::Bf16)
                QuantizeFp8::group_of_128<__nv_bfloat16, __nv_bfloat162>(p, thread, rows);
            else
                QuantizeFp8::group_of_128<__half, __half2>(p, thread, rows);
        }
    }
};

}  // namespace oxmoe
