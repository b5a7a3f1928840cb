// QuantizeFp8 of rows that go to several places each (Hopper): bf16, groups of 128 columns.
//
// A CTA quantises whole rows, or 64 groups of a longer one, into shared memory, and the copy engine writes what it has of a row
// to each of its places. Scales come in fours of groups, [ceil(groups / 4)][places][4]: 16 bytes a store, and neighbouring places
// beside each other for the GEMM (docs/kernels/grouped_gemm_fp8_sm90.md).
#pragma once
#include "quantize_fp8.cuh"

namespace oxmoe {

struct QuantizeFp8Slots {
    static constexpr int kThreads = QuantizeFp8::kThreads;
    static constexpr int kSharedBytes = 0;
    static constexpr int kLanes = QuantizeFp8::kLanes, kVectors = QuantizeFp8::kVectors, kGroups = kThreads / kLanes;

    static __device__ __forceinline__ void run(const QuantizeFp8Params& p) {
        __shared__ alignas(128) uint2 codes[kGroups][kLanes * kVectors];
        __shared__ float scales[kGroups + 3];  // fours are read whole
        // NOTE: in this order, as in QuantizeFp8.
        pdl::wait();
        pdl::launch_dependents();
        const Part part(p);
        const uint32_t own = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
        uint4 words[kVectors] = {};
        if (own < part.rows * part.groups) {
            const size_t group =
                size_t(part.first_row + own / part.groups) * part.row_groups + part.first_group + own % part.groups;
            const uint4* x = reinterpret_cast<const uint4*>(p.x) + group * kLanes * kVectors + lane;
#pragma unroll
            for (int i = 0; i < kVectors; ++i) words[i] = __ldcs(x + i * kLanes);
        }
        const fp8::Scale scale = QuantizeFp8::scale_of<__nv_bfloat16, __nv_bfloat162>(p, words);
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
            float numbers[8];
            QuantizeFp8::take<__nv_bfloat16>(words[i], numbers);
            codes[own][i * kLanes + lane] = QuantizeFp8::codes(numbers, scale.inverse);
        }
        if (lane == 0) scales[own] = scale.scale;
        // The copy engine reads what this thread wrote.
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncthreads();
        store_codes(p, part, codes);
        store_scales(p, part, scales);
        asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
    }

private:
    // What this CTA has: groups of each of its rows.
    struct Part {
        uint32_t row_groups, first_row, rows, first_group, groups;

        __device__ __forceinline__ explicit Part(const QuantizeFp8Params& p) {
            row_groups = p.columns / 128;
            const uint32_t each = max(kGroups / row_groups, 1u), parts = (row_groups + kGroups - 1) / kGroups;
            first_row = blockIdx.x / parts * each, rows = min(each, uint32_t(p.rows) - first_row);
            first_group = blockIdx.x % parts * kGroups, groups = min(row_groups - first_group, uint32_t(kGroups));
        }
    };

    // A thread for each of a row's places.
    static __device__ __forceinline__ void store_codes(const QuantizeFp8Params& p, const Part& part,
                                                       const uint2 (&codes)[kGroups][kLanes * kVectors]) {
        for (uint32_t i = threadIdx.x; i < part.rows * p.top_k; i += kThreads) {
            const int place = p.place_of_slot[part.first_row * p.top_k + i];
            if (place < 0) continue;
            uint8_t* out = p.codes + (size_t(place) * part.row_groups + part.first_group) * 128;
            asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(out),
                         "r"(uint32_t(__cvta_generic_to_shared(codes[i / p.top_k * part.groups]))), "r"(part.groups * 128)
                         : "memory");
        }
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    }

    // One for each four of them; of the last four what is beyond the row is anything.
    static __device__ __forceinline__ void store_scales(const QuantizeFp8Params& p, const Part& part, const float* scales) {
        const uint32_t fours = (part.groups + 3) / 4;
        for (uint32_t i = threadIdx.x; i < part.rows * p.top_k * fours; i += kThreads) {
            const uint32_t copy = i / fours, four = i % fours;
            const int place = p.place_of_slot[part.first_row * p.top_k + copy];
            if (place < 0) continue;
            const float* from = scales + copy / p.top_k * part.groups + four * 4;
            float4* out =
                reinterpret_cast<float4*>(p.scales) + place * p.row_stride + (part.first_group / 4 + four) * p.group_stride;
            *out = make_float4(from[0], from[1], from[2], from[3]);
        }
    }
};

}  // namespace oxmoe
