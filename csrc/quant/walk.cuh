// The walk of a grid's CTAs over rows.
#pragma once
#include <cstdint>

#include "../common/pdl.cuh"
#include "oxmoe/src/params/quant.rs.h"

namespace oxmoe {

// The base of kernels whose CTAs have `Threads` threads and no dynamic shared memory.
template <int Threads>
struct Cta {
    static constexpr int kThreads = Threads, kSharedBytes = 0;
};

namespace walk {

// A kernel that reads what older kernels write begins with this call.
// NOTE: the order counts. Once every CTA is here nothing older is running, which the kernel after this one may rely on.
__device__ __forceinline__ void begin() {
    pdl::wait();
    pdl::launch_dependents();
}

// The pieces of a schedule's tiles that a CTA takes, wherever their rows lie: `for (const auto [tile, first] : Pieces(...))`.
// Tiles have up to `tile_units` units, and `first` is the first of up to `piece` of them. A tile of fewer rows has pieces without
// units, which the body skips. Grid: any. NOTE: all threads of a CTA go from piece to piece together, so that they may exchange
// values. The parameter `tiles` is read at each piece: machine code depends on it.
struct Pieces {
    struct Piece {
        Tile tile;
        int first;
    };
    struct End {};

    const Tile* const& tiles;
    const int piece, slices, units;
    int unit;

    __device__ __forceinline__ Pieces(const Tile* const& tiles, const int* tile_count, int tile_units, int piece)
        : tiles(tiles), piece(piece), slices((tile_units + piece - 1) / piece), units(*tile_count * slices), unit(blockIdx.x) {}
    __device__ __forceinline__ Pieces& begin() { return *this; }
    __device__ __forceinline__ End end() const { return {}; }
    __device__ __forceinline__ bool operator!=(End) const { return unit < units; }
    __device__ __forceinline__ void operator++() { unit += gridDim.x; }
    __device__ __forceinline__ Piece operator*() const { return {tiles[unit / slices], unit % slices * piece}; }
};

}  // namespace walk
}  // namespace oxmoe
