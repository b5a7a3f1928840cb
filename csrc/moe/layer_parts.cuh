// Parts that the layers of few tokens in one launch share beside their GEMMs: counters, marks, stores and the combine.
#pragma once
#include <cstdint>
#include <type_traits>

#include "../common/absent.cuh"
#include "../common/activation.cuh"
#include "../common/counter.cuh"
#include "../common/element.cuh"
#include "../common/sm90.cuh"
#include "combine.cuh"
#include "few_slots.cuh"

namespace oxmoe {

// Counters of the launches on one workspace, which follow each other (src/counters.rs). They are zero before the first launch,
// and no launch zeroes them. Each launch adds kLaunch to either; `started` numbers the launches.
struct LayerCounters {
    static constexpr uint32_t kLaunch = 1024;

    uint32_t started, marked;  // shares of CTAs, summed over all launches
};

namespace layer_parts {

// Returns n / d. The result is exact below 2^21: the error is less than half of 1 / d.
__device__ __forceinline__ int divide(int n, int d) { return int((float(n) + 0.5f) * reciprocal_fast(float(d))); }

// Returns the share that a CTA adds to either counter: the shares of all CTAs add up to kLaunch.
__device__ __forceinline__ uint32_t share_of_launch() { return blockIdx.x == 0 ? LayerCounters::kLaunch + 1 - gridDim.x : 1; }

// Says that this CTA has marked its parts, waits until all CTAs have, and passes `marked`. `launch`: this launch's number.
__device__ __forceinline__ void await_marks(LayerCounters& counters, uint32_t share, uint32_t launch, uint64_t* marked) {
    counter::add_share(&counters.marked, share);
    counter::wait_past(&counters.marked, (launch + 1) * LayerCounters::kLaunch);
    sm90::barrier_arrive(marked);
}

// Marks this CTA's part of a GEMM's output absent; this is thread `thread` of `threads`.
__device__ __forceinline__ void mark_absent(const GroupedGemmParams& p, const SelectParams& select, int thread, int threads) {
    const int vectors = select.tokens * select.top_k * (p.out_columns / 8);
#pragma unroll 1
    for (int i = blockIdx.x * threads + thread; i < vectors; i += gridDim.x * threads) absent::mark_16(p.out + size_t(i) * 16);
}

// Stores a warp's sums of 16 weight rows and up to 8 tokens from their order in registers: 8 lanes store 16 bytes of a token.
// There is no barrier, and for few tokens there are no more stores than with transposed tiles.
template <typename Element, bool Gated, bool Activated>
__device__ __forceinline__ void store(int first, int count, int slice, const float* sums, const GroupedGemmParams& p) {
    constexpr int kHalves = Gated ? 1 : 2;
    const int lane = threadIdx.x % 32, token = lane % 4 * 2;
    const SwigluFunction swiglu(p.activation);
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
        const int column = (slice * kHalves + half) * 8 + lane / 4;
        const float* d = &sums[2 * half];
        uint32_t packed;
        if constexpr (Gated && !Activated)
            packed = pack<Element>(swiglu(d[0], d[2]), swiglu(d[1], d[3]));
        else
            packed = pack<Element>(d[0], d[1]);
        packed = absent::avoided(packed);
        const int limit = column < p.out_columns ? count - token : 0;
        Element* out = reinterpret_cast<Element*>(p.out) + size_t(first + token) * p.out_columns + column;
        absent::store_2_if(out, packed, 0 < limit);
        absent::store_2_if(out + p.out_columns, packed >> 16, 1 < limit);
    }
}

// Says that rows of GEMM1's output are copied as they are.
struct Unchanged {};

// Copies rows [first_row, first_row + count) of GEMM1's output to shared memory, as soon as they are there; this is thread
// `thread` of `kThreads`. The 16 bytes from column 8 c of row t go to address_of(t, c). Columns beyond k in the last 64 become
// zeros. finish(), if there is one, changes 16 bytes before they are stored. All lanes of a warp call it, and neighbouring lanes
// have neighbouring columns.
template <int kThreads, typename Address, typename Finish = Unchanged>
__device__ __forceinline__ void copy_inner(const GroupedGemmParams& p, int first_row, int count, int thread, Address address_of,
                                           Finish finish = {}) {
    constexpr int kBatch = 4;
    constexpr bool kFinishes = !std::is_same_v<Finish, Unchanged>;
    const int columns = p.k / 8, padded = (p.k + 63) / 64 * 8, items = count * padded;
    const uint4* source = reinterpret_cast<const uint4*>(p.x) + size_t(first_row) * columns;
    const int lane = kFinishes ? thread % 32 : 0;  // all lanes of a warp go on together
#pragma unroll 1
    for (int first = thread; first - lane < items; first += kBatch * kThreads) {
        const uint4* from[kBatch];
        uint32_t to[kBatch];
        uint4 value[kBatch];
        uint32_t waiting = 0;
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            const int item = first + i * kThreads, token = divide(item, padded), column = item - token * padded;
            to[i] = address_of(token, column);
            from[i] = source + token * columns + column;
            value[i] = {};
            if (item < items && column < columns) waiting |= 1u << i;
        }
        do {
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                if (waiting >> i & 1) value[i] = absent::load(from[i]);
            }
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                if (!absent::in(value[i])) waiting &= ~(1u << i);
            }
        } while (waiting);
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            if constexpr (kFinishes) value[i] = finish(value[i]);
            if (first + i * kThreads < items) sm90::store_shared_16(to[i], value[i]);
        }
    }
}

// Combines this CTA's part of the layer's output; this is thread `thread` of 128. Groups of 8 threads have 32 bytes of a row.
template <typename Element, typename Slots>
__device__ __forceinline__ void combine(const CombineParams& p, const Slots& slots, int thread) {
    using Vector = uint32_t;
    constexpr int kColumns = sizeof(Vector) / 2, kGroup = 8, kGroups = 128 / kGroup;
    const int rows = Combine<Element>::row_count(p), columns = p.hidden / kColumns;
    const int row_groups = (columns + kGroup - 1) / kGroup, groups = rows * row_groups;
    const bool weighted = p.weights != nullptr;
#pragma unroll 1
    for (int group = blockIdx.x + thread / kGroup * gridDim.x; group < groups; group += kGroups * gridDim.x) {
        const int row = divide(group, row_groups), column = (group - row * row_groups) * kGroup + thread % kGroup;
        if (column >= columns) continue;
        Combine<Element>::template sum_vector<Vector, true>(
            p, row, column, [&](size_t slot) { return slots.place(int(slot)); },
            [&](size_t slot) { return weighted ? slots.weight[slot] : 1.f; }, [] { return true; });
    }
}

}  // namespace layer_parts
}  // namespace oxmoe
