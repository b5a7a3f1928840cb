// Routing in two launches, for token counts beyond one cluster. Histogram (or Select with `block_histogram`) counts the slots of
// each expert among every CTA's tokens. Place sorts the slots and writes the schedule. Both have the same grid and thus the same
// shares of the tokens.
#pragma once
#include <cstdint>

#include "../common/pdl.cuh"
#include "slot_sort.cuh"

namespace oxmoe {

// The tokens [first, first + count) of this CTA.
struct TokenShare {
    int share, first, count;

    __device__ explicit TokenShare(const RouteParams& route) {
        share = (route.tokens + gridDim.x - 1) / gridDim.x;
        first = min(int(blockIdx.x) * share, route.tokens);
        count = min(share, route.tokens - first);
    }
};

// Counts given ids into block_histogram. The shared memory is BlockHistogram's.
struct Histogram {
    static constexpr int kMaxThreads = 1024;

    static __device__ __forceinline__ void run(const RouteParams& route) {
        const TokenShare tokens(route);
        BlockHistogram histogram(route);
        histogram.clear();
        pdl::wait();
        pdl::launch_dependents();  // not before the wait: the kernel that prepares tokens for GEMM1 may run beside routing
#pragma unroll 4
        for (int i = threadIdx.x; i < tokens.count * route.top_k; i += blockDim.x)
            histogram.add_local(expert_of_slot(route, tokens.first * route.top_k + i));
        histogram.write(tokens.share * route.top_k);
    }
};

// A CTA sorts its slots in chunks. If top-k chose the experts, a chunk has up to 128 tokens. Otherwise it has up to 1024 slots,
// or, because of shared memory, 512 with more than 256 experts and 256 with more than 544. blockDim.x >= max(64, experts). Shared
// memory has Schedule's part, then UnitBits' part for one chunk, whose starts make room for sum_blocks.
template <bool kChosen>
struct Place {
    static constexpr int kMaxThreads = 1024;

    static __device__ __forceinline__ void run(const RouteParams& route) {
        const TokenShare tokens(route);
        const int thread = threadIdx.x, threads = blockDim.x, top_k = route.top_k, warp = warp_of_block();
        const int slots_of_unit = kChosen ? top_k : 1, units_of_token = kChosen ? 1 : top_k;
        const int units = tokens.count * units_of_token, first_slot = tokens.first * top_k;
        const float units_of_slot = 1.0f / float(slots_of_unit);
        Schedule<false> schedule(route);
        const int most = 32 * (kChosen ? 4 : route.experts <= 256 ? 32 : route.experts <= 544 ? 16 : 8);
        const UnitBits bits(route, schedule.end(), min(most, tokens.share * units_of_token), slots_of_unit);
        // NOTE: the quotient is exact, since a chunk has at most 4096 slots: the error is far below half a slot of a token.
        const auto unit_of = [&](int slot) { return kChosen ? int((float(slot) + 0.5f) * units_of_slot) : slot; };

        const bool scans = schedule.scans(warp);

        pdl::launch_dependents();
        bits.clear();
        __syncthreads();
        pdl::wait();
        int2 next = {};
#pragma unroll 1
        for (int base = 0; base == 0 || base < units; base += most) {
            const int slots = min(most, units - base) * slots_of_unit, first = first_slot + base * slots_of_unit;
            if (base > 0) {
                __syncthreads();
                bits.clear();
                __syncthreads();
            }
#pragma unroll 1
            for (int i = thread; i < slots; i += threads) bits.mark(unit_of(i), i, expert_of_slot(route, first + i));
            if (base == 0) {
                int2 earlier, total;
                sum_blocks(route, kChosen ? tokens.share : tokens.share * top_k, bits.lend(), bits.columns(), earlier, total);
                if (scans) schedule.begin(warp, total);
                __syncthreads();
                if (scans) next = schedule.end(warp);
                next.x += earlier.x, next.y += earlier.y;
            } else {
                __syncthreads();
            }
            if (scans) bits.start(next);
            __syncthreads();
#pragma unroll 1
            for (int i = thread; i < slots; i += threads) bits.place(unit_of(i), i, first);
        }
        schedule.write();
    }

private:
    // Thread p counts the slots of experts 2 p and 2 p + 1 in the blocks before this one, and in all blocks. `units` is the
    // argument of BlockHistogram::write. `partial` has [2 * segments, columns] words.
    static __device__ __forceinline__ void sum_blocks(const RouteParams& route, int units, int* partial, int columns,
                                                      int2& earlier, int2& total) {
        const int thread = threadIdx.x, blocks = gridDim.x, each = BlockHistogram::counts_of_word(units);
        const int words = (route.experts + each - 1) / each;
        const int segments = min(int(blockDim.x) / words, int(blockDim.x) / 64);
        const int segment = thread / words, word = thread % words;
        const int32_t* from = route.block_histogram + word;
        if (segment < segments) {
            int* const totals = partial + segment * columns + each * word;
            int* const earliers = totals + segments * columns;
            if (each == 4) {
                // A register holds two sums: there are at most 128 blocks of 255.
                uint32_t even = 0, odd = 0, earlier_even = 0, earlier_odd = 0;
#pragma unroll 8
                for (int b = segment; b < blocks; b += segments) {
                    const uint32_t counts = from[b * words];
                    const uint32_t these_even = counts & 0x00FF00FF, these_odd = counts >> 8 & 0x00FF00FF;
                    even += these_even, odd += these_odd;
                    if (b < int(blockIdx.x)) earlier_even += these_even, earlier_odd += these_odd;
                }
                *reinterpret_cast<int4*>(totals) = unpack(even, odd);
                *reinterpret_cast<int4*>(earliers) = unpack(earlier_even, earlier_odd);
            } else {
                int2 sum = {}, earlier_sum = {};
#pragma unroll 4
                for (int b = segment; b < blocks; b += segments) {
                    const uint32_t counts = from[b * words];
                    const int low = counts & 0xFFFF, high = counts >> 16;
                    sum.x += low, sum.y += high;
                    if (b < int(blockIdx.x)) earlier_sum.x += low, earlier_sum.y += high;
                }
                *reinterpret_cast<int2*>(totals) = sum;
                *reinterpret_cast<int2*>(earliers) = earlier_sum;
            }
        }
        __syncthreads();
        earlier = total = {};
        if (2 * thread < route.experts) {
#pragma unroll 4
            for (int s = 0; s < segments; ++s) {
                const int2 in_all = *reinterpret_cast<const int2*>(partial + s * columns + 2 * thread);
                const int2 before = *reinterpret_cast<const int2*>(partial + (segments + s) * columns + 2 * thread);
                total.x += in_all.x, total.y += in_all.y;
                earlier.x += before.x, earlier.y += before.y;
            }
        }
        // NOTE: the barrier between begin() and end() comes before this memory becomes the starts.
    }

    static __device__ __forceinline__ int4 unpack(uint32_t even, uint32_t odd) {
        return make_int4(even & 0xFFFF, odd & 0xFFFF, even >> 16, odd >> 16);
    }
};

}  // namespace oxmoe
