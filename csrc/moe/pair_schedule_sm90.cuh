// Work units of both GEMMs of a layer in one launch (GemmPairParams). They come from a schedule or, if rows lie expert by expert,
// from the experts' numbers of rows. Counters tell CTAs which outputs are there.
#pragma once
#include <cstdint>

#include "../common/counter.cuh"
#include "../common/sm90.cuh"
#include "tile_cut.cuh"
#include "work_unit_sm90.cuh"

namespace oxmoe {

// Counters that no earlier launch makes zero. They belong to the launches on one workspace, which follow each other
// (src/counters.rs). All are zero before a launch and when it has ended.
struct PairCounters {
    static constexpr int kExperts = 128;

    int next_unit, ended;  // ended counts warps
    int done[kExperts];  // row tiles that are done, as in Tile::done, but of all tiles of an expert; there are `experts` of them

    // `warps` warps that wait for `done` call this, each at its end. The last one makes all counters zero again.
    __device__ __forceinline__ void leave(int experts, int warps) {
        const int lane = threadIdx.x % 32;
        int before = 0;
        // NOTE: lanes wait for `done` one by one. A lane that still does must not find the zeros of the last warp.
        __syncwarp();
        if (lane == 0) before = counter::add(&ended);
        if (__shfl_sync(0xFFFFFFFF, before, 0) != warps - 1) return;
        if (lane == 0) next_unit = ended = 0;
        for (int expert = lane; expert < experts; expert += 32) done[expert] = 0;
    }
};

// The tiles that Schedule would write, in a warp's registers and without its launch.
class RowTiles {
    static constexpr int kEach = PairCounters::kExperts / 32;

    int rows[kEach], before[kEach];  // for a lane's experts: rows, and tiles of all experts before

public:
    int count;

    __device__ __forceinline__ explicit RowTiles(const GemmPairParams& p) {
        const int lane = threadIdx.x % 32;
        int own = 0;
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
            const int expert = lane * kEach + i, wanted = expert < p.experts ? p.row_counts[expert] : 0;
            rows[i] = min(max(wanted, 0), p.rows_each);
            before[i] = own;
            own += (rows[i] + p.tile_tokens - 1) / p.tile_tokens;
        }
        int all = own;
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            const int other = __shfl_up_sync(0xFFFFFFFF, all, distance);
            if (lane >= distance) all += other;
        }
#pragma unroll
        for (int i = 0; i < kEach; ++i) before[i] += all - own;
        count = __shfl_sync(0xFFFFFFFF, all, 31);
    }

    // Finds unit `unit` of `count` tiles of `row_blocks` units: the tiles of an expert come first, then the next row block, as in
    // find_unit_by_expert. Returns the number of the expert's tiles.
    __device__ __forceinline__ int find(const GemmPairParams& p, int row_blocks, int unit, WorkUnit& work) const {
        const int any = unit / row_blocks;
        // The owner is the last lane before whose experts there are at most `any` tiles.
        const int owner = 31 - __clz(__ballot_sync(0xFFFFFFFF, before[0] <= any));
        int which = 0, its_rows = rows[0], its_first = before[0];
#pragma unroll
        for (int i = 1; i < kEach; ++i) {
            if (before[i] <= any) which = i, its_rows = rows[i], its_first = before[i];
        }
        const int expert = owner * kEach + __shfl_sync(0xFFFFFFFF, which, owner);
        its_rows = __shfl_sync(0xFFFFFFFF, its_rows, owner);
        its_first = __shfl_sync(0xFFFFFFFF, its_first, owner);
        const int tiles = (its_rows + p.tile_tokens - 1) / p.tile_tokens;
        const int groups = (tiles + kMostGroupTiles - 1) / kMostGroupTiles, group_tiles = (tiles + groups - 1) / groups;
        const int place = unit - its_first * row_blocks, start = place / (group_tiles * row_blocks) * group_tiles;
        const int in_group = min(group_tiles, tiles - start), rest = place - start * row_blocks;
        const int tile = start + rest % in_group;
        const int steps = (its_rows + p.tile_step - 1) / p.tile_step, each = steps / tiles;
        const TileCut cut{p.tile_step, each, steps - each * tiles};
        work = {expert, expert * p.rows_each + cut.first(tile), cut.count(tile, its_rows), rest / in_group};
        return tiles;
    }
};

// The warps of a CTA that hand out units, announce what is stored, and copy tokens.
template <typename Pipeline>
struct PairProducers {
    using Base = typename Pipeline::Base;
    using Shared = typename Pipeline::Shared;
    static constexpr int kConsumers = Base::kRows / Pipeline::kBlockRows;
    // Cycles that the CTAs of one wave need to take their first units. Of 300, 700, 1500 and 3000 the first is too short for some
    // layers.
    static constexpr int kWaveCycles = 1000;

    static __device__ __forceinline__ int row_tiles(const GroupedGemmParams& p) {
        return (p.rows + Pipeline::kBlockRows - 1) / Pipeline::kBlockRows;
    }

    // One warp runs this. Consumers report at shared.stored what they have stored, and this warp tells other CTAs. NOTE:
    // consumers do not do it, because they would wait until the message has arrived: 2 to 4 us a layer.
    static __device__ __forceinline__ void schedule(const GemmPairParams& p, Shared& shared) {
        const auto next = [&](int) {
            int unit = 0;
            if (threadIdx.x % 32 == 0) unit = atomicAdd(p.up.next_unit, 1);
            return __shfl_sync(0xFFFFFFFF, unit, 0);
        };
        // NOTE: this wait spreads units of few tokens over different multiprocessors: CTAs on one multiprocessor share the
        // instructions that decode weights.
        sm90::wait_cycles(int(blockIdx.x) / p.wave * kWaveCycles);
        const int first = next(0);
        const RowTiles counted(p);
        const int tiles = p.row_counts ? counted.count : *p.up.tile_count;
        const int up_units = tiles * row_blocks(p.up), units = up_units + tiles * row_blocks(p.down);
        PairUnit last{{-1, 0, 0, 0}, 0, 0, -1};  // the last unit handed out
        int announced = 0;                       // units of GEMM1 that were announced
        const auto unit_at = [&](int unit) {
            PairUnit work{{-1, 0, 0, 0}, 0, row_tiles(p.up), -1};
            if (unit >= units) return work;
            const bool down = unit >= up_units;
            const int blocks = row_blocks(down ? p.down : p.up), number = down ? unit - up_units : unit;
            if (p.row_counts) {
                work.awaited *= counted.find(p, blocks, number, work);
                work.tile = work.expert;
            } else if constexpr (Pipeline::kByExpert) {
                work.tile = find_unit_by_expert(p.tiles, tiles, blocks, number, work);
            } else {
                work.tile = find_unit(p.tiles, tiles, blocks, number, work);
            }
            if (!down) work.stored = (announced + !last.is_down()) % 2;
            return work;
        };
        // Announces the previous unit of GEMM1. NOTE: so no unit is unannounced when a unit of GEMM2 has to wait for other CTAs.
        // Before that the consumers wait for no other CTA.
        const auto handed_out = [&](const PairUnit& work) {
            if (!last.is_down()) {
                sm90::barrier_wait(&shared.stored[last.stored], announced++ / 2 % 2);
                const int its_tiles = min(kConsumers, row_tiles(p.up) - last.row_block * kConsumers);
                if (threadIdx.x % 32 == 0) counter::add_only(done(p, last.tile), its_tiles);
            }
            last = work;
        };
        Base::template hand_out<false>(p, shared, true, first, next, unit_at, handed_out);
    }

    // Two warps run this.
    static __device__ __forceinline__ void gather(const GemmPairParams& p, Shared& shared) {
        Pipeline::gather(p, shared, [&](const PairUnit& work, const uint32_t*, int) {
            if (work.is_down()) counter::wait_for(done(p, work.tile), work.awaited);
        });
        if (p.row_counts) counters(p).leave(p.experts, gridDim.x * (Base::kGatherThreads / 32));
    }

private:
    static __device__ __forceinline__ int row_blocks(const GroupedGemmParams& p) {
        return (p.rows + Base::kRows - 1) / Base::kRows;
    }

    static __device__ __forceinline__ PairCounters& counters(const GemmPairParams& p) {
        return *reinterpret_cast<PairCounters*>(p.counters);
    }

    // The counter of the row tiles of GEMM1's output that are there.
    static __device__ __forceinline__ int* done(const GemmPairParams& p, int tile) {
        return p.row_counts ? &counters(p).done[tile] : &p.tiles[tile].done;
    }
};

}  // namespace oxmoe
