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
    // Vectors of eight that a thread may have, all on their way before the first is quantised: with one the loads of an SM's
    // threads do not cover the memory's latency.
    static constexpr int kVectors = 4;

    static __device__ __forceinline__ void run(const QuantizeFp8Params& p) {
        const uint32_t first = blockIdx.x * kThreads + threadIdx.x, stride = gridDim.x * kThreads, row_vectors = p.columns / 8;
        // NOTE: in this order. Once every CTA is here nothing older is running, which the kernel after this one may rely on.
        pdl::wait();
        pdl::launch_dependents();
        const uint32_t rows = p.row_count ? min(p.rows, int64_t(*p.row_count)) : p.rows, vectors = rows * row_vectors;
        if (p.dtype == Dtype::F32)
            each<2>(p, first, stride, row_vectors, vectors);
        else
            each<1>(p, first, stride, row_vectors, vectors);
    }

private:
    // `Words`: loads of 16 bytes that make a vector.
    template <int Words>
    static __device__ __forceinline__ void each(const QuantizeFp8Params& p, uint32_t first, uint32_t stride, uint32_t row_vectors,
                                                uint32_t vectors) {
        uint4 words[kVectors][Words];
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
            const uint32_t vector = first + i * stride;
#pragma unroll
            for (int j = 0; j < Words; ++j) {
                words[i][j] = {};
                if (vector < vectors) words[i][j] = __ldcs(reinterpret_cast<const uint4*>(p.x) + size_t(vector) * Words + j);
            }
        }
        // NOTE: the same for a whole warp.
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
            const uint32_t vector = first + i * stride;
            if (vector - threadIdx.x % 32 >= vectors) return;
            float x[8];
            take(p.dtype, words[i], x);
            quantize(p, vector, row_vectors, vector < vectors, x);
        }
    }

    static __device__ __forceinline__ void quantize(const QuantizeFp8Params& p, uint32_t vector, uint32_t row_vectors,
                                                    bool inside, float (&x)[8]) {
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
        const uint2 codes = {fp8::pack(x[0], x[1], x[2], x[3]), fp8::pack(x[4], x[5], x[6], x[7])};
        reinterpret_cast<uint2*>(p.codes)[vector] = codes;
        const uint32_t row = vector / row_vectors, column = (vector - row * row_vectors) * 8;
        if (column % p.group != 0) return;
        const int group = column / p.group;
        if (p.powers) {
            p.scales[4 * (row * p.row_stride + group / 4 * p.group_stride) + group % 4] = __float_as_uint(scale.scale) >> 23;
        } else {
            reinterpret_cast<float*>(p.scales)[row * p.row_stride + group * p.group_stride] = scale.scale;
        }
    }

    static __device__ __forceinline__ void take(Dtype, const uint4 (&words)[2], float (&x)[8]) {
        const uint32_t numbers[8] = {words[0].x, words[0].y, words[0].z, words[0].w,
                                     words[1].x, words[1].y, words[1].z, words[1].w};
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] = __uint_as_float(numbers[i]);
    }
    static __device__ __forceinline__ void take(Dtype dtype, const uint4 (&words)[1], float (&x)[8]) {
        if (dtype == Dtype::Bf16)
            take<__nv_bfloat16>(words[0], x);
        else
            take<__half>(words[0], x);
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
