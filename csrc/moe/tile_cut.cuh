// How an expert's rows are cut into tiles; src/cpu/schedule.rs is the same on the host.
#pragma once

namespace oxmoe {

// In steps, evenly: the first tiles have a step more than the others.
struct TileCut {
    int step, each, longer;  // steps of every tile, and how many have one more

    __device__ __forceinline__ int first(int tile) const { return (tile * each + min(tile, longer)) * step; }
    // Of a tile, where there are `rows`.
    __device__ __forceinline__ int count(int tile, int rows) const { return min(first(tile + 1), rows) - first(tile); }
};

}  // namespace oxmoe
