// The pipeline of Hopper's GEMMs: the shared memory of a CTA, and how its stages change hands.
//
// A CTA has a warpgroup of producers and one or more warpgroups of consumers. Producers fill stages, which lie in a ring;
// consumers multiply them. `full` of a stage passes when all of its bytes have landed, `empty` when every consumer has read it.
// One warp of the producers hands out work units, which lie in a ring of their own.
//
// NOTE: each kernel's `run` finds its shared memory and calls the functions of its warps. If all kernels shared functions for
// this, ptxas would make other machine code of both.
#pragma once
#include <cstdint>

#include "../common/ring.cuh"
#include "../common/sm90.cuh"

namespace oxmoe::pipeline {

// The shared memory of a CTA: `Buffers`, which begin with the stages, then work units and barriers.
template <typename Buffers, typename Unit, int MaxTokens, int Stages, int UnitSlots = 2>
struct alignas(128) Shared : Buffers {
    uint32_t source[UnitSlots][MaxTokens];  // start of a token's row of x, in 16-byte units
    Unit unit[UnitSlots];
    uint64_t full[Stages], empty[Stages], unit_full[UnitSlots], unit_empty[UnitSlots], fetch_next;
    uint64_t stored[UnitSlots];  // consumers have stored a unit's outputs
};

// Waits until a stage is free, and announces that `bytes` will be copied into it. Returns the barrier that the copies signal.
template <typename Shared, int Stages>
__device__ __forceinline__ uint64_t* begin_stage(Shared& shared, const RingPosition<Stages>& ring, uint32_t bytes) {
    sm90::barrier_wait(&shared.empty[ring.slot], ring.parity ^ 1);
    sm90::barrier_arrive_expect(&shared.full[ring.slot], bytes);
    return &shared.full[ring.slot];
}

// Frees `count` stages that a consumer does not read, since it has no part of their unit. `EveryLane`: each thread arrives;
// otherwise one thread arrives for its warp.
template <bool EveryLane, typename Shared, int Stages>
__device__ __forceinline__ void skip_stages(Shared& shared, RingPosition<Stages>& ring, int count) {
    for (int i = 0; i < count; ++i, ring.advance()) {
        sm90::barrier_wait(&shared.full[ring.slot], ring.parity);
        if constexpr (EveryLane)
            sm90::barrier_arrive(&shared.empty[ring.slot]);
        else
            sm90::barrier_arrive_if(&shared.empty[ring.slot], threadIdx.x % 32 == 0);
    }
}

}  // namespace oxmoe::pipeline
