// The work units that the CTAs of Hopper's grouped GEMMs take.
#pragma once
#include "../common/ring.cuh"
#include "../common/sm90.cuh"
#include "oxmoe/src/params/moe.rs.h"

namespace oxmoe {

// Tokens [first, first + count) of one expert times kRows weight rows. `expert` is -1 if there is no more work.
struct alignas(16) WorkUnit {
    int expert, first, count, row_block;  // row block of all consumers, or ~ of one's row tile: GroupedGemmSm90::row_block
};

// Tells ptxas that all lanes of a warp have the same unit: then loops and descriptors live in uniform registers.
__device__ __forceinline__ void make_uniform(WorkUnit& work) {
    work.expert = __shfl_sync(0xFFFFFFFF, work.expert, 0);
    work.count = __shfl_sync(0xFFFFFFFF, work.count, 0);
    work.row_block = __shfl_sync(0xFFFFFFFF, work.row_block, 0);
}

// The work unit of a kernel with both GEMMs of a layer.
struct alignas(16) PairUnit : WorkUnit {
    int tile;     // number under which GEMM1's row tiles are counted: the tile's in the schedule or, without one, the expert's
    int awaited;  // the count that GEMM2 waits for before it reads tokens
    int stored;   // GEMM1: the barrier at which consumers report stored outputs; -1: a unit of GEMM2

    __device__ __forceinline__ bool is_down() const { return stored < 0; }
};

// Waits for the next unit that the schedule's warp hands out, and reads it. Returns false if there is none.
// NOTE: the packed kernels (packed_pipeline_sm90.cuh) have these lines written out: ptxas makes other code of the calls there.
template <typename Shared, int Slots>
__device__ __forceinline__ bool await_unit(Shared& shared, const RingPosition<Slots>& units, WorkUnit& work) {
    sm90::barrier_wait(&shared.unit_full[units.slot], units.parity);
    work = shared.unit[units.slot];
    return work.expert >= 0;
}
// Takes the next unit as await_unit() does, and frees its slot: this thread reads no more of what comes with the unit.
template <typename Shared, int Slots>
__device__ __forceinline__ bool take_unit(Shared& shared, const RingPosition<Slots>& units, WorkUnit& work) {
    const bool more = await_unit(shared, units, work);
    sm90::barrier_arrive(&shared.unit_empty[units.slot]);
    return more;
}
// Takes the next unit as take_unit() does, by all lanes of a warp together.
template <typename Shared, int Slots>
__device__ __forceinline__ bool take_uniform_unit(Shared& shared, const RingPosition<Slots>& units, WorkUnit& work) {
    take_unit(shared, units, work);
    make_uniform(work);
    return work.expert >= 0;
}

// The GEMM of a unit.
__device__ __forceinline__ const GroupedGemmParams& gemm_of(const GroupedGemmParams& p, const WorkUnit&) { return p; }
__device__ __forceinline__ const GroupedGemmParams& gemm_of(const GemmPairParams& p, const PairUnit& unit) {
    return unit.is_down() ? p.down : p.up;
}

// The row of x at a place, for the GEMM `p`.
__device__ __forceinline__ int x_row(const GroupedGemmParams&, const GroupedGemmParams& p, int place) {
    return p.slot_of_place ? p.slot_of_place[place] / p.row_divisor : place;
}
__device__ __forceinline__ int x_row(const GemmPairParams&, const GroupedGemmParams& p, int place) {
    return p.slot_of_place && p.row_divisor ? p.slot_of_place[place] / p.row_divisor : place;
}

// Finds work unit `unit` of tile_count x row_blocks: sets tile and row block, and returns the tile's number. Tiles are fastest
// inside groups of kTileGroup: CTAs that run together share weight rows as well as tokens.
constexpr int kTileGroup = 4;
__device__ __forceinline__ int find_unit(const Tile* tiles, int tile_count, int row_blocks, int unit, WorkUnit& work) {
    const int group = unit / (kTileGroup * row_blocks), place = unit % (kTileGroup * row_blocks);
    const int group_tiles = min(kTileGroup, tile_count - group * kTileGroup);
    const int number = group * kTileGroup + place % group_tiles;
    const Tile tile = tiles[number];
    work = {tile.expert, tile.first, tile.count, place / group_tiles};
    return number;
}

constexpr int kMostGroupTiles = 12;
// Finds a unit in another order: all tiles of an expert come first, then the next row block, so an expert's weights are read from
// memory once. An expert with many tiles has them in even groups, so that the tokens of a group stay in L2. `expert_rows` gets
// the number of all of the expert's rows.
__device__ __forceinline__ int find_unit_by_expert(const Tile* all, int tile_count, int row_blocks, int unit, WorkUnit& work,
                                                   int* expert_rows = nullptr) {
    // Every tile of an expert has row_blocks units: this one is a tile of the unit's expert.
    const int lane = threadIdx.x % 32, any = unit / row_blocks, expert = all[any].expert;
    int first = any, end = any + 1;
    for (uint32_t others = 0; others == 0; first -= others ? __clz(others) : 32) {
        const int before = first - 32 + lane;
        others = ~__ballot_sync(0xFFFFFFFF, before >= 0 && all[max(before, 0)].expert == expert);
    }
    for (uint32_t others = 0; others == 0; end += others ? __ffs(others) - 1 : 32) {
        const int after = end + lane;
        others = ~__ballot_sync(0xFFFFFFFF, after < tile_count && all[min(after, tile_count - 1)].expert == expert);
    }
    const int groups = (end - first + kMostGroupTiles - 1) / kMostGroupTiles, group_tiles = (end - first + groups - 1) / groups;
    const int group = (unit - first * row_blocks) / (group_tiles * row_blocks), start = first + group * group_tiles;
    const int tiles = min(group_tiles, end - start), place = unit - start * row_blocks;
    const int number = start + place % tiles;
    const Tile tile = all[number];
    work = {tile.expert, tile.first, tile.count, place / tiles};
    if (expert_rows) *expert_rows = all[end - 1].first + all[end - 1].count - all[first].first;
    return number;
}

}  // namespace oxmoe
