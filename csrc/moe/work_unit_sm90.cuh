// What a CTA of Hopper's grouped GEMMs takes at a time.
#pragma once
#include "oxmoe/src/params/moe.rs.h"

namespace oxmoe {

// Tokens [first, first + count) of one expert times kRows weight rows. `expert` -1: no more work.
struct alignas(16) WorkUnit {
    int expert, first, count, row_block;  // row block of all consumers, or ~ of one's row tile: GroupedGemmSm90::row_block
};

// That of a kernel with both GEMMs of a layer.
struct alignas(16) PairUnit : WorkUnit {
    int tile;     // where GEMM1's row tiles are counted: its number in the schedule; without one, the expert's
    int awaited;  // what that comes to before GEMM2's tokens are there
    int stored;   // of GEMM1: the barrier where consumers say so; -1: a unit of GEMM2

    __device__ __forceinline__ bool is_down() const { return stored < 0; }
};

// The GEMM that a unit is of.
__device__ __forceinline__ const GroupedGemmParams& gemm_of(const GroupedGemmParams& p, const WorkUnit&) { return p; }
__device__ __forceinline__ const GroupedGemmParams& gemm_of(const GemmPairParams& p, const PairUnit& unit) {
    return unit.is_down() ? p.down : p.up;
}

// Work unit `unit` of tile_count x row_blocks: its tile's number, the tile and the row block. Tiles fastest inside groups of
// kTileGroup: CTAs that run together share weight rows as well as tokens.
constexpr int kTileGroup = 4;
__device__ __forceinline__ int find_unit(const Tile* tiles, int tile_count, int row_blocks, int unit, WorkUnit& work) {
    const int group = unit / (kTileGroup * row_blocks), place = unit % (kTileGroup * row_blocks);
    const int group_tiles = min(kTileGroup, tile_count - group * kTileGroup);
    const int number = group * kTileGroup + place % group_tiles;
    const Tile tile = tiles[number];
    work = {tile.expert, tile.first, tile.count, place / group_tiles};
    return number;
}

}  // namespace oxmoe
