// Routing in one launch of one CTA or one cluster: top-k (or given ids), histogram, stable sort, both permutations, tile
// schedule. The CTAs of the cluster share the units evenly and tell each other their slots per expert through distributed shared
// memory.
#pragma once
#include <cstdint>

#include "../common/cluster.cuh"
#include "../common/pdl.cuh"
#include "select.cuh"
#include "slot_sort.cuh"

namespace oxmoe {

// `mark(chosen, expert_of, first, count)`: for units [first, first + count) writes the local expert of every slot (-1: skipped)
// to `expert_of` and sets bit u % 32 of chosen[u / 32][expert]. A unit has `unit_slots` slots.
//
// Shared memory with U units a CTA, G = ceil(U / 32) groups and C CTAs:
//   Schedule's, then 4-byte words chosen [G, experts], start [G, experts], counts [C, experts] (C > 1), then 2 bytes a slot of U
//   units.
template <bool kUnitIsSlot, typename Mark>
__device__ __forceinline__ void route_cluster(const RouteParams& route, Mark mark) {
    const int thread = threadIdx.x, threads = blockDim.x, experts = route.experts;
    const int ctas = cluster::size(), rank = cluster::rank();
    const int units = kUnitIsSlot ? route.tokens * route.top_k : route.tokens, unit_slots = kUnitIsSlot ? 1 : route.top_k;
    const int share = (units + ctas - 1) / ctas, groups = (share + 31) / 32;
    const int first = min(rank * share, units), count = min(share, units - first);
    Schedule schedule(route);
    uint32_t* chosen = schedule.end();                               // bit u of group g: unit 32 g + u goes to the expert
    int* start = reinterpret_cast<int*>(chosen + groups * experts);  // place of the group's first slot of the expert
    int* counts = start + groups * experts;                          // written by all CTAs of the cluster
    int16_t* expert_of = reinterpret_cast<int16_t*>(counts + (ctas > 1 ? ctas * experts : 0));

    if (ctas > 1) cluster::arrive_relaxed();
    for (int i = thread; i < groups * experts; i += threads) chosen[i] = 0;
    __syncthreads();
    pdl::wait();
    // NOTE: not before: GEMM1's CTAs have nothing to do yet, and starting them while the kernels before this one finish makes a
    // layer of few tokens 1 to 4 us slower.
    pdl::launch_dependents();
    mark(chosen, expert_of, first, count);
    __syncthreads();

    // Thread e: slots of expert e here, in earlier CTAs, in all.
    int here = 0;
    if (thread < experts)
        for (int g = 0; g < groups; ++g) here += __popc(chosen[g * experts + thread]);
    int earlier = 0, total = here;
    if (ctas > 1) {
        // NOTE: remote shared memory may be written once its CTA runs. The second barrier also keeps every CTA alive until all
        // writes to it have landed.
        cluster::wait();
        if (thread < experts)
            for (int c = 0; c < ctas; ++c) cluster::store(&counts[rank * experts + thread], c, here);
        cluster::arrive();
        cluster::wait();
        if (thread < experts) {
            total = 0;
            for (int c = 0; c < ctas; ++c) {
                const int there = counts[c * experts + thread];
                earlier += c < rank ? there : 0;
                total += there;
            }
        }
    }

    int next = schedule.scan(total) + earlier;
    if (thread < experts) {
        for (int g = 0; g < groups; ++g) {
            start[g * experts + thread] = next;
            next += __popc(chosen[g * experts + thread]);
        }
    }
    __syncthreads();

    for (int i = thread; i < count * unit_slots; i += threads) {
        const int unit = kUnitIsSlot ? i : i / unit_slots, expert = expert_of[i], slot = first * unit_slots + i;
        int place = -1;
        if (expert >= 0) {
            const int cell = unit / 32 * experts + expert;
            place = start[cell] + __popc(chosen[cell] & ((1u << unit % 32) - 1));
            route.slot_of_place[place] = slot;
        }
        route.place_of_slot[slot] = place;
    }
    schedule.write();
}

// Grid = one cluster, or one CTA. blockDim.x >= route.experts.
template <int kExpertsPerLane>
struct Route {
    static constexpr int kMaxThreads = 1024;

    static __device__ __forceinline__ void run(const SelectParams& select, const RouteParams& route) {
        const Selector<kExpertsPerLane> selector(select);
        route_cluster<false>(route, [&](uint32_t* chosen, int16_t* expert_of, int first, int count) {
            select_tokens(selector, select, first, count, [&](int t, int column, int id) {
                const int expert = local_expert(route, id);
                expert_of[t * select.top_k + column] = int16_t(expert);
                if (expert >= 0) atomicOr(&chosen[t / 32 * route.experts + expert], 1u << t % 32);
            });
        });
    }
};

// Ids are given.
template <>
struct Route<0> {
    static constexpr int kMaxThreads = 1024;

    static __device__ __forceinline__ void run(const RouteParams& route) {
        route_cluster<true>(route, [&](uint32_t* chosen, int16_t* expert_of, int first, int count) {
            for (int i = threadIdx.x; i < count; i += blockDim.x) {
                const int expert = expert_of_slot(route, first + i);
                expert_of[i] = int16_t(expert);
                if (expert >= 0) atomicOr(&chosen[i / 32 * route.experts + expert], 1u << i % 32);
            }
        });
    }
};

}  // namespace oxmoe
