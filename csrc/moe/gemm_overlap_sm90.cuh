// GEMM2 that begins where GEMM1 ends: its CTAs come onto the multiprocessors that have no unit of GEMM1 left and wait for their
// tokens expert by expert, not for the launch before theirs.
//
// GEMM1 counts in `GroupedGemmParams::done` what it has stored, in rows x units of an expert; in GEMM2 the warp that hands out
// units waits for the expert's before it does. In front of the experts GEMM1's CTAs count themselves as they end:
// once all have, nobody looks at the counters any more. (Each look empties the L1 cache, where the schedule is, and a short K
// leaves no time to read it anew.)
//
// Progress: programmatic dependent launch starts a CTA of GEMM2 once all of GEMM1's have started, and those wait for nobody.
#pragma once
#include "../common/counter.cuh"
#include "../common/pdl.cuh"
#include "../common/ring.cuh"
#include "../common/sm90.cuh"
#include "work_unit_sm90.cuh"

namespace oxmoe {

// `Base`: the GroupedGemmSm90 whose units a kernel has; all tiles of an expert, then the next row block. `Announces`: whether it
// may be a GEMM1, whose Shared has barriers `stored`, one for each slot of a unit.
template <typename Base, bool Announces = true>
struct GemmOverlapSm90 {
    static_assert(Base::kUnitSlots == 2, "a unit is announced when the next but one has not been handed out");

    template <typename Shared>
    static __device__ __forceinline__ void init_barriers(Shared& shared, int consumer_threads) {
        for (uint64_t& stored : shared.stored) sm90::barrier_init(&stored, consumer_threads);
    }

    // By warps that read x and do not look at `awaited`: the schedule's warp does, before it hands out a unit.
    static __device__ __forceinline__ void wait(const GroupedGemmParams& p) {
        if (!p.awaited) pdl::wait();
    }

    // By every thread of a consumer whose outputs of a unit are on their way. `slot`: the unit's.
    template <typename Shared>
    static __device__ __forceinline__ void stored(const GroupedGemmParams& p, Shared& shared, int slot) {
        if (p.done) sm90::barrier_arrive(&shared.stored[slot]);
    }

    // One warp. A unit is `passes` row blocks.
    template <typename Shared>
    static __device__ __forceinline__ void schedule(const GroupedGemmParams& p, Shared& shared, int passes = 1) {
        const int unit_rows = passes * Base::kRows;
        const int row_blocks = (p.rows + unit_rows - 1) / unit_rows, tile_count = *p.tile_count;
        bool waits = p.awaited != nullptr;
        const auto unit_at = [&](int unit) {
            WorkUnit work{-1, 0, 0, 0};
            if (unit >= tile_count * row_blocks) return work;
            int rows = 0;
            find_unit_by_expert(p.tiles, tile_count, row_blocks, unit, work, waits ? &rows : nullptr);
            if (waits) {
                waits = __shfl_sync(0xFFFFFFFF, !counter::has_reached(p.awaited, p.awaited_ctas), 0);
                if (waits) counter::wait_for(p.awaited + 1 + work.expert, rows * p.awaited_units);
            }
            return work;
        };
        const auto next = [&](int unit) {
            if (!p.next_unit) return unit + int(gridDim.x);
            if (threadIdx.x % 32 == 0) unit = gridDim.x + atomicAdd(p.next_unit, 1);
            return __shfl_sync(0xFFFFFFFF, unit, 0);
        };
        WorkUnit last{-1, 0, 0, 0};  // handed out
        RingPosition<Base::kUnitSlots> ring;
        const auto handed_out = [&](const WorkUnit& work) {
            if constexpr (Announces) {
                if (!p.done) return;
                if (last.expert >= 0) {
                    sm90::barrier_wait(&shared.stored[ring.slot], ring.parity);
                    ring.advance();
                    if (threadIdx.x % 32 == 0) counter::add_only(p.done + 1 + last.expert, last.count);
                }
                last = work;
            }
        };
        Base::template hand_out<false>(p, shared, p.next_unit != nullptr, blockIdx.x, next, unit_at, handed_out);
        if (Announces && p.done && threadIdx.x % 32 == 0) counter::add_only(p.done);
        // NOTE: so that GEMM1 has ended for who waits for this launch.
        if (p.awaited) pdl::wait();
    }
};

}  // namespace oxmoe
