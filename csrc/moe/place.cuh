// Routing in two launches, for token counts beyond one cluster: Histogram (or Select with `block_histogram`) counts the slots per
// expert of every CTA's tokens, Place sorts and writes the schedule. Both have the same grid and thus the same shares of the
// tokens.
#pragma once
#include <cstdint>

#include "../common/pdl.cuh"
#include "slot_sort.cuh"

namespace oxmoe {

// Slots [first, first + count) of this CTA.
struct SlotShare {
    int first, count;

    __device__ explicit SlotShare(const RouteParams& route) {
        const int share = (route.tokens + gridDim.x - 1) / gridDim.x;
        const int token = min(int(blockIdx.x) * share, route.tokens);
        first = token * route.top_k;
        count = min(share, route.tokens - token) * route.top_k;
    }
};

// Given ids to block_histogram. Shared memory: BlockHistogram's.
struct Histogram {
    static constexpr int kMaxThreads = 1024;

    static __device__ __forceinline__ void run(const RouteParams& route) {
        const SlotShare share(route);
        BlockHistogram histogram(route);
        pdl::launch_dependents();
        histogram.clear();
        pdl::wait();
        for (int i = threadIdx.x; i < share.count; i += blockDim.x) histogram.add_local(expert_of_slot(route, share.first + i));
        histogram.write();
    }
};

// blockDim.x >= max(64, experts). A CTA sorts blockDim.x slots at a time, one a thread; a warp's slots are one group.
// Shared memory: Schedule's, then 4-byte words chosen [warps, experts] and start [warps, experts].
struct Place {
    static constexpr int kMaxThreads = 1024;

    static __device__ __forceinline__ void run(const RouteParams& route) {
        const int thread = threadIdx.x, threads = blockDim.x, experts = route.experts;
        const int lane = thread % 32, warp = thread / 32, warps = threads / 32;
        const SlotShare share(route);
        Schedule schedule(route);
        uint32_t* chosen = schedule.end();                              // bit u of warp w: slot of its lane u goes to the expert
        int* start = reinterpret_cast<int*>(chosen + warps * experts);  // place of the warp's first slot of the expert
        uint32_t* chosen_row = chosen + warp * experts;

        pdl::launch_dependents();
        for (int e = lane; e < experts; e += 32) chosen_row[e] = 0;
        pdl::wait();
        int expert = thread < share.count ? expert_of_slot(route, share.first + thread) : -1;

        int earlier, total;
        sum_blocks(route, start, earlier, total);
        int next = schedule.scan(total) + earlier;

        for (int base = 0; base < share.count; base += threads) {
            __syncwarp();
            if (expert >= 0) atomicOr(&chosen_row[expert], 1u << lane);
            __syncthreads();
            if (thread < experts) {
                for (int w = 0; w < warps; ++w) {
                    start[w * experts + thread] = next;
                    next += __popc(chosen[w * experts + thread]);
                }
            }
            __syncthreads();
            const int i = base + thread;
            if (i < share.count) {
                int place = -1;
                if (expert >= 0) {
                    place = start[warp * experts + expert] + __popc(chosen_row[expert] & ((1u << lane) - 1));
                    route.slot_of_place[place] = share.first + i;
                }
                route.place_of_slot[share.first + i] = place;
            }
            if (base + threads < share.count) {
                __syncwarp();
                for (int e = lane; e < experts; e += 32) chosen_row[e] = 0;
                expert = i + threads < share.count ? expert_of_slot(route, share.first + i + threads) : -1;
            }
        }
        __syncthreads();
        schedule.write();
    }

private:
    // Thread e: slots of expert e in the blocks before this one, and in all. `partial` has 2 * segments * experts words.
    static __device__ __forceinline__ void sum_blocks(const RouteParams& route, int* partial, int& earlier, int& total) {
        const int thread = threadIdx.x, experts = route.experts, words = (experts + 1) / 2, blocks = gridDim.x;
        const int segments = min(int(blockDim.x) / words, int(blockDim.x) / 64);
        const int segment = thread / words, word = thread % words;
        if (segment < segments) {
            int earlier_low = 0, earlier_high = 0, low = 0, high = 0;
#pragma unroll 8
            for (int b = segment; b < blocks; b += segments) {
                const uint32_t pair = route.block_histogram[b * words + word];
                const int pair_low = pair & 0xFFFF, pair_high = pair >> 16;
                low += pair_low, high += pair_high;
                if (b < int(blockIdx.x)) earlier_low += pair_low, earlier_high += pair_high;
            }
            int* totals = partial + segment * experts + 2 * word;
            int* earliers = totals + segments * experts;
            totals[0] = low, earliers[0] = earlier_low;
            if (2 * word + 1 < experts) totals[1] = high, earliers[1] = earlier_high;
        }
        __syncthreads();
        earlier = total = 0;
        if (thread < experts) {
            for (int s = 0; s < segments; ++s) {
                total += partial[s * experts + thread];
                earlier += partial[(segments + s) * experts + thread];
            }
        }
        // NOTE: scan() has a barrier before any thread writes `start`, which is this memory.
    }
};

}  // namespace oxmoe
