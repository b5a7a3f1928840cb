// Quantises rows as QuantizeFp8 does, and writes each to several places (Hopper): bf16, groups of 128 columns.
//
// A CTA quantises 64 groups into shared memory. The copy engine writes the CTA's part of a row to each of the row's places. This
// takes 107 us for 235 MB (DeepSeek-V3, 32 experts, 4096 tokens); stores of 8 bytes by each lane take 117 us.
#pragma once
#include "quantize_fp8.cuh"

namespace oxmoe {

struct QuantizeFp8Slots : Cta<256> {
    static constexpr int kLanes = QuantizeFp8::kLanes, kVectors = QuantizeFp8::kVectors, kGroups = kThreads / kLanes;

    static __device__ __forceinline__ void run(const QuantizeFp8Params& p) {
        __shared__ alignas(128) uint2 codes[kGroups][kLanes * kVectors];
        __shared__ float scales[kGroups];
        walk::begin();
        const uint32_t row_groups = p.columns / 128, first = blockIdx.x * kGroups,
                       end = min(first + kGroups, uint32_t(p.rows) * row_groups);
        const uint32_t own = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
        const uint4* from = reinterpret_cast<const uint4*>(p.x) + size_t(first + own) * kLanes * kVectors + lane;
        uint4 words[kVectors] = {};
        if (first + own < end) {
#pragma unroll
            for (int i = 0; i < kVectors; ++i) words[i] = __ldcs(from + i * kLanes);
        }
        const fp8::Scale scale = QuantizeFp8::scale_of<__nv_bfloat16>(p, words);
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
            float x[8];
            eight::take<__nv_bfloat16>(words[i], x);
            codes[own][i * kLanes + lane] = eight::e4m3_codes(x, scale.inverse);
        }
        if (lane == 0) scales[own] = scale.scale;
        // The copy engine reads what this thread wrote.
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncthreads();
        store_scales(p, scales, first, end, row_groups);
        store_codes(p, codes, first, end, row_groups);
    }

private:
    static __device__ __forceinline__ void store_scales(const QuantizeFp8Params& p, const float* scales, uint32_t first,
                                                        uint32_t end, uint32_t row_groups) {
        for (uint32_t i = threadIdx.x; i < kGroups * p.top_k; i += kThreads) {
            const uint32_t group = first + i % kGroups, row = group / row_groups;
            const int place = group < end ? p.place_of_slot[row * p.top_k + i / kGroups] : -1;
            if (place >= 0) QuantizeFp8::store_scale(p, place, group % row_groups, scales[i % kGroups]);
        }
    }

    // Each thread stores the CTA's part of a row to one of the row's places.
    static __device__ __forceinline__ void store_codes(const QuantizeFp8Params& p,
                                                       const uint2 (&codes)[kGroups][kLanes * kVectors], uint32_t first,
                                                       uint32_t end, uint32_t row_groups) {
        const uint32_t first_row = first / row_groups, copies = ((end - 1) / row_groups + 1 - first_row) * p.top_k;
        for (uint32_t i = threadIdx.x; i < copies; i += kThreads) {
            const uint32_t row = first_row + i / p.top_k;
            const int place = p.place_of_slot[first_row * p.top_k + i];
            if (place < 0) continue;
            const uint32_t from = max(first, row * row_groups), to = min(end, (row + 1) * row_groups);
            uint8_t* out = p.codes + (size_t(place) * row_groups + (from - row * row_groups)) * 128;
            asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(out),
                         "r"(uint32_t(__cvta_generic_to_shared(codes[from - first]))), "r"((to - from) * 128)
                         : "memory");
        }
        asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group 0;" ::: "memory");
    }
};

}  // namespace oxmoe
