// The cut of an expert's rows into tiles; src/cpu/schedule.rs is the same on the host.
#pragma once

namespace oxmoe {

// Tiles are whole steps, cut evenly: the first tiles have a step more than the others.
struct TileCut {
    int step, each, longer;  // steps of every tile, and number of tiles that have one more

    __device__ __forceinline__ int first(int tile) const { return (tile * each + min(tile, longer)) * step; }
    // Returns the rows of a tile, if the expert has `rows` rows.
    __device__ __forceinline__ int count(int tile, int rows) const { return min(first(tile + 1), rows) - first(tile); }
};

}  // namespace oxmoe
