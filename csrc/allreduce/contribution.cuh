// A rank's contribution to the sum: rows of `input`, or in the MoE patterns the weighted sum of its experts' rows. The rules are
// those of `contribute` in src/cpu/allreduce.rs. Slots are added in order in fp32, products are rounded before they are added,
// and the sum is rounded once.
#pragma once
#include "arithmetic.cuh"
#include "oxmoe/src/params/allreduce.rs.h"

namespace oxmoe::allreduce {

__device__ __forceinline__ float slot_weight(const ExpertRows& e, int64_t slot) {
    if (!e.weights) return 1.f;
    if (e.weight_dtype == Dtype::F32) return reinterpret_cast<const float*>(e.weights)[slot];
    const uint32_t bits = reinterpret_cast<const uint16_t*>(e.weights)[slot];
    return e.weight_dtype == Dtype::F16 ? unpack<__half>(bits).x : unpack<__nv_bfloat16>(bits).x;
}

template <class Element>
__device__ __forceinline__ Chunk expert_sum(const AllReduceParams& p, int token, int chunk) {
    constexpr int kValues = kChunkValues<Element>;
    constexpr int kTogether = 2;  // loads in flight
    const ExpertRows& e = p.experts;
    const Chunk* const rows = reinterpret_cast<const Chunk*>(e.rows);
    float sum[kValues] = {};
    const auto add = [&](const Chunk& row, float weight) {
        float x[kValues];
        values_of<Element>(row, x);
#pragma unroll
        for (int i = 0; i < kValues; ++i) sum[i] = __fadd_rn(sum[i], __fmul_rn(weight, x[i]));
    };
    for (int first = 0; first < e.top_k; first += kTogether) {
        Chunk row[kTogether];
        float weight[kTogether];
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
            // If there is no slot, this adds zero times zero, which leaves sums as they are, since they are never -0.
            row[i] = Chunk{0, 0, 0, 0};
            weight[i] = 0;
            if (first + i >= e.top_k) continue;
            const int64_t slot = e.row_of_slot ? int64_t(token) * e.top_k + first + i : int64_t(first + i) * p.tokens + token;
            const int64_t place = e.row_of_slot ? e.row_of_slot[slot] : slot;
            if (place == -1) continue;
            weight[i] = slot_weight(e, slot);
            // The host cannot check row numbers: a number that names no row makes the token NaN.
            row[i] = place >= 0 && place < e.row_count ? rows[place * p.row_chunks + chunk] : Chunk{~0u, ~0u, ~0u, ~0u};
        }
#pragma unroll
        for (int i = 0; i < kTogether; ++i) add(row[i], weight[i]);
    }
    if (e.shared) add(reinterpret_cast<const Chunk*>(e.shared)[int64_t(token) * p.row_chunks + chunk], 1.f);
    Chunk result;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        Word<Element> values(0);
#pragma unroll
        for (int k = 0; k < Word<Element>::kValues; ++k) values.value[k] = sum[Word<Element>::kValues * i + k];
        word(result, i) = values.rounded();
    }
    return result;
}

// A call, so that a kernel whose threads have several chunks has this code only once.
template <class Element>
__device__ __noinline__ Chunk expert_sum_apart(const AllReduceParams& p, int at) {
    return expert_sum<Element>(p, at / p.row_chunks, at % p.row_chunks);
}

// Chunk `at` of this rank's contribution as one flat array.
template <class Element, bool kExperts, bool kApart>
__device__ __forceinline__ Chunk contribution(const AllReduceParams& p, int at) {
    if (kExperts && p.experts.rows) {
        return kApart ? expert_sum_apart<Element>(p, at) : expert_sum<Element>(p, at / p.row_chunks, at % p.row_chunks);
    }
    return reinterpret_cast<const Chunk*>(p.input)[at];
}

}  // namespace oxmoe::allreduce
