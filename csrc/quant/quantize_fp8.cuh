// Rows of bf16, f16 or fp32 to e4m3 with a scale for each group of columns. group / 8 neighbouring threads take a group, eight
// elements each.
#pragma once
#include <cstdint>

#include "../common/element.cuh"
#include "../common/fp8.cuh"
#include "../common/pdl.cuh"
#include "oxmoe/src/params.rs.h"

namespace oxmoe {

struct QuantizeFp8 {
    static constexpr int kThreads = 256;
    static constexpr int kSharedBytes = 0;

    static __device__ __forceinline__ void run(const QuantizeFp8Params& p) {
        const uint32_t vector = blockIdx.x * kThreads + threadIdx.x, row_vectors = p.columns / 8;
        const uint32_t row = vector / row_vectors, column = vector % row_vectors * 8;
        // NOTE: in this order. Once every CTA is here nothing older is running, which the kernel after this one may rely on.
        pdl::wait();
        pdl::launch_dependents();
        const bool inside = row < (p.row_count ? min(p.rows, int64_t(*p.row_count)) : p.rows);
        const size_t at = size_t(row) * p.columns + column;
        float x[8] = {};
        if (inside) load(p, at, x);
        float amax = 0.f;
#pragma unroll
        for (int i = 0; i < 8; ++i) amax = fmaxf(amax, fabsf(x[i]));
        // NOTE: groups are aligned parts of a warp, so that all of its lanes take part.
        for (int distance = p.group / 16; distance > 0; distance /= 2) {
            amax = fmaxf(amax, __shfl_xor_sync(0xFFFFFFFF, amax, distance));
        }
        if (!inside) return;
        const fp8::Scale scale(amax, p.eps, p.powers);
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] = __fmul_rn(x[i], scale.inverse);
        *reinterpret_cast<uint2*>(p.codes + at) = {fp8::pack(x[0], x[1], x[2], x[3]), fp8::pack(x[4], x[5], x[6], x[7])};
        if (column % p.group != 0) return;
        const int group = column / p.group;
        if (p.powers) {
            p.scales[4 * (row * p.row_stride + group / 4 * p.group_stride) + group % 4] = __float_as_uint(scale.scale) >> 23;
        } else {
            reinterpret_cast<float*>(p.scales)[row * p.row_stride + group * p.group_stride] = scale.scale;
        }
    }

private:
    static __device__ __forceinline__ void load(const QuantizeFp8Params& p, size_t at, float (&x)[8]) {
        if (p.dtype == Dtype::F32) {
            const float4* from = reinterpret_cast<const float4*>(reinterpret_cast<const float*>(p.x) + at);
            const float4 low = from[0], high = from[1];
            x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w, x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
            return;
        }
        const uint4 words = *reinterpret_cast<const uint4*>(reinterpret_cast<const uint16_t*>(p.x) + at);
        if (p.dtype == Dtype::Bf16)
            take<__nv_bfloat16>(words, x);
        else
            take<__half>(words, x);
    }

    template <typename Element>
    static __device__ __forceinline__ void take(const uint4& words, float (&x)[8]) {
        const uint32_t pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 pair = unpack<Element>(pairs[i]);
            x[2 * i] = pair.x, x[2 * i + 1] = pair.y;
        }
    }
};

}  // namespace oxmoe
