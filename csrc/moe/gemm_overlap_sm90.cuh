// Overlap of the GEMMs: GEMM2 begins where GEMM1 ends. Its CTAs come onto the multiprocessors that have no unit of GEMM1 left.
// They wait for their tokens expert by expert, and not for the end of GEMM1's launch.
//
// GEMM1 counts in `GroupedGemmParams::done` what it has stored, in rows x units of an expert. In GEMM2 the warp that hands out
// units waits for a unit's expert first. The counter before the experts' counts GEMM1's CTAs as they end: once all have ended,
// GEMM2 no longer looks at the counters. (Each look empties the L1 cache, which has the schedule, and a short K leaves no time to
// read it again.)
//
// Progress: programmatic dependent launch starts a CTA of GEMM2 once all of GEMM1's CTAs have started, and those wait for no
// others.
#pragma once
#include "../common/counter.cuh"
#include "../common/pdl.cuh"
#include "../common/ring.cuh"
#include "../common/sm90.cuh"
#include "work_unit_sm90.cuh"

namespace oxmoe {

// `Base` is the GroupedGemmSm90 whose units a kernel has: all tiles of an expert, then the next row block. `Announces`: the
// kernel may be a GEMM1, whose Shared has the barriers `stored`, one for each slot of a unit.
template <typename Base, bool Announces = true>
struct GemmOverlapSm90 {
    static_assert(Base::kUnitSlots == 2, "a unit is announced when the next but one has not been handed out");

    template <typename Shared>
    static __device__ __forceinline__ void init_barriers(Shared& shared, int consumer_threads) {
        for (uint64_t& stored : shared.stored) sm90::barrier_init(&stored, consumer_threads);
    }

    // Warps that read x but do not look at `awaited` call this. The schedule's warp looks at it before it hands out a unit.
    static __device__ __forceinline__ void wait(const GroupedGemmParams& p) {
        if (!p.awaited) pdl::wait();
    }

    // Every thread of a consumer calls this once its stores of a unit's outputs are issued. `slot` is the unit's.
    template <typename Shared>
    static __device__ __forceinline__ void stored(const GroupedGemmParams& p, Shared& shared, int slot) {
        if (p.done) sm90::barrier_arrive(&shared.stored[slot]);
    }

    // One warp runs this. A unit is `passes` row blocks.
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
        WorkUnit last{-1, 0, 0, 0};  // the last unit handed out
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
        // NOTE: this wait makes sure that GEMM1 has ended for every kernel that waits for this launch.
        if (p.awaited) pdl::wait();
    }
};

}  // namespace oxmoe
