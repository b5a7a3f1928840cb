// Rows of bf16, f16 or fp32 to e4m3 with a scale for each group of columns, or (groups of 128 16-bit numbers) with one that
// `given` tells. Groups of 128 16-bit numbers go to four neighbouring threads, which have every fourth vector of eight; others
// to group / 8 threads, a vector each.
#pragma once
#include <cstdint>

#include "../common/element.cuh"
#include "../common/fp8.cuh"
#include "../common/pdl.cuh"
#include "oxmoe/src/params/quant.rs.h"

namespace oxmoe {

struct QuantizeFp8Tiles;
struct QuantizeFp8Slots;

struct QuantizeFp8 {
    static constexpr int kThreads = 256;
    static constexpr int kSharedBytes = 0;
    static constexpr int kLanes = 4, kVectors = 4;  // of a group of 128

    static __device__ __forceinline__ void run(const QuantizeFp8Params& p) {
        const uint32_t thread = blockIdx.x * kThreads + threadIdx.x;
        pdl::run(p.x_is_older, [&] {
            const uint32_t rows = p.row_count ? min(p.rows, int64_t(*p.row_count)) : p.rows;
            if (p.group != kLanes * kVectors * 8 || p.dtype == Dtype::F32)
                one_vector(p, thread, rows);
            else if (p.dtype == Dtype::Bf16)
                group_of_128<__nv_bfloat16, __nv_bfloat162>(p, thread, rows);
            else
                group_of_128<__half, __half2>(p, thread, rows);
        });
    }

private:
    friend struct QuantizeFp8Tiles;
    friend struct QuantizeFp8Slots;

    template <typename Element, typename Pair>
    static __device__ __forceinline__ void group_of_128(const QuantizeFp8Params& p, uint32_t thread, uint32_t rows) {
        const uint32_t group = thread / kLanes, lane = thread % kLanes, row_groups = p.columns / (kLanes * kVectors * 8);
        const bool inside = group < rows * row_groups;
        const size_t first = size_t(group) * kLanes * kVectors + lane;
        uint4 words[kVectors] = {};
        if (inside) {
#pragma unroll
            for (int i = 0; i < kVectors; ++i) words[i] = __ldcg(reinterpret_cast<const uint4*>(p.x) + first + i * kLanes);
        }
        if (p.scaling != Fp8Scaling::Groups) {
            const float given = *p.given;
            if (!inside) return;
            store_group<Element>(p, words, first, group,
                                 p.scaling == Fp8Scaling::Peak ? fp8::Scale(given, p.eps) : fp8::Scale::given(given));
            return;
        }
        const fp8::Scale scale = scale_of<Element, Pair>(p, words);
        if (inside) store_group<Element>(p, words, first, group, scale);
    }

    // Of a group of which this is a lane's part; all lanes of the warp are here.
    template <typename Element, typename Pair>
    static __device__ __forceinline__ fp8::Scale scale_of(const QuantizeFp8Params& p, const uint4 (&words)[kVectors]) {
        uint32_t peak = 0;
        auto grow = [&](uint32_t pair) {
            const uint32_t magnitudes = pair & 0x7FFF7FFF;
            const Pair larger = __hmax2(reinterpret_cast<const Pair&>(peak), reinterpret_cast<const Pair&>(magnitudes));
            peak = reinterpret_cast<const uint32_t&>(larger);
        };
#pragma unroll
        for (int i = 0; i < kVectors; ++i) grow(words[i].x), grow(words[i].y), grow(words[i].z), grow(words[i].w);
#pragma unroll
        for (int distance = 1; distance < kLanes; distance *= 2) grow(__shfl_xor_sync(0xFFFFFFFF, peak, distance));
        const float2 peaks = unpack<Element>(peak);
        return fp8::Scale(fmaxf(peaks.x, peaks.y), p.eps, p.powers);
    }

    // A lane's part of a group. `first`: its first vector.
    template <typename Element>
    static __device__ __forceinline__ void store_group(const QuantizeFp8Params& p, const uint4 (&words)[kVectors], size_t first,
                                                       uint32_t group, const fp8::Scale& scale) {
        const uint32_t row_groups = p.columns / (kLanes * kVectors * 8);
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
            float x[8];
            take<Element>(words[i], x);
            reinterpret_cast<uint2*>(p.codes)[first + i * kLanes] = codes(x, scale.inverse);
        }
        if (first % (kLanes * kVectors) == 0) store_scale(p, group / row_groups, group % row_groups, scale.scale);
    }

    static __device__ __forceinline__ void one_vector(const QuantizeFp8Params& p, uint32_t vector, uint32_t rows) {
        const uint32_t row_vectors = p.columns / 8, row = vector / row_vectors, column = vector % row_vectors * 8;
        const bool inside = row < rows;
        float x[8] = {};
        if (inside) load(p, vector, x);
        float amax = 0.f;
#pragma unroll
        for (int i = 0; i < 8; ++i) amax = fmaxf(amax, fabsf(x[i]));
        // NOTE: groups are aligned parts of a warp, so that all of its lanes take part.
        for (int distance = p.group / 16; distance > 0; distance /= 2) {
            amax = fmaxf(amax, __shfl_xor_sync(0xFFFFFFFF, amax, distance));
        }
        if (!inside) return;
        const fp8::Scale scale(amax, p.eps, p.powers);
        reinterpret_cast<uint2*>(p.codes)[vector] = codes(x, scale.inverse);
        if (column % p.group == 0) store_scale(p, row, column / p.group, scale.scale);
    }

    static __device__ __forceinline__ uint2 codes(const float (&x)[8], float inverse) {
        float scaled[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) scaled[i] = __fmul_rn(x[i], inverse);
        return {fp8::pack(scaled[0], scaled[1], scaled[2], scaled[3]), fp8::pack(scaled[4], scaled[5], scaled[6], scaled[7])};
    }

    static __device__ __forceinline__ void store_scale(const QuantizeFp8Params& p, uint32_t row, uint32_t group, float scale) {
        if (p.powers) {
            p.scales[4 * (row * p.row_stride + group / 4 * p.group_stride) + group % 4] = __float_as_uint(scale) >> 23;
        } else {
            reinterpret_cast<float*>(p.scales)[row * p.row_stride + group * p.group_stride] = scale;
        }
    }

    static __device__ __forceinline__ void load(const QuantizeFp8Params& p, size_t vector, float (&x)[8]) {
        if (p.dtype == Dtype::F32) {
            const float4* from = reinterpret_cast<const float4*>(p.x) + 2 * vector;
            const float4 low = __ldcg(from), high = __ldcg(from + 1);
            x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w, x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
            return;
        }
        const uint4 words = __ldcg(reinterpret_cast<const uint4*>(p.x) + vector);
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
