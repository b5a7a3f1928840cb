// Quantises rows of bf16, f16 or fp32 to e4m3 with a scale for each group of columns. Groups of 128 16-bit numbers can also have
// the scale that `given` tells. Four neighbouring threads take a group of 128 16-bit numbers; each takes every fourth vector of
// eight. Other groups have group / 8 threads, each with one vector.
#pragma once
#include <cstdint>

#include "../common/pdl.cuh"
#include "eight.cuh"
#include "oxmoe/src/params/quant.rs.h"
#include "walk.cuh"

namespace oxmoe {

struct QuantizeFp8Tiles;
struct QuantizeFp8Slots;

struct QuantizeFp8 : Cta<256> {
    static constexpr int kLanes = 4, kVectors = 4;  // threads and a thread's vectors of a group of 128

    static __device__ __forceinline__ void run(const QuantizeFp8Params& p) {
        const uint32_t thread = blockIdx.x * kThreads + threadIdx.x;
        pdl::run(p.x_is_older, [&] {
            const uint32_t rows = p.row_count ? min(p.rows, int64_t(*p.row_count)) : p.rows;
            if (p.group != kLanes * kVectors * 8 || p.dtype == Dtype::F32)
                one_vector(p, thread, rows);
            else if (p.dtype == Dtype::Bf16)
                group_of_128<__nv_bfloat16>(p, thread, rows);
            else
                group_of_128<__half>(p, thread, rows);
        });
    }

private:
    friend struct QuantizeFp8Tiles;
    friend struct QuantizeFp8Slots;

    template <typename Element>
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
        const fp8::Scale scale = scale_of<Element>(p, words);
        if (inside) store_group<Element>(p, words, first, group, scale);
    }

    // Returns the scale of a group, from a lane's part `words`. All lanes of the warp call this.
    template <typename Element>
    static __device__ __forceinline__ fp8::Scale scale_of(const QuantizeFp8Params& p, const uint4 (&words)[kVectors]) {
        eight::Peak<Element> peak;
#pragma unroll
        for (int i = 0; i < kVectors; ++i) peak.grow(words[i]);
#pragma unroll
        for (int distance = 1; distance < kLanes; distance *= 2) peak.exchange(distance);
        return fp8::Scale(peak.value(), p.eps, p.powers);
    }

    // Stores a lane's part of a group, whose first vector is `first`.
    template <typename Element>
    static __device__ __forceinline__ void store_group(const QuantizeFp8Params& p, const uint4 (&words)[kVectors], size_t first,
                                                       uint32_t group, const fp8::Scale& scale) {
        const uint32_t row_groups = p.columns / (kLanes * kVectors * 8);
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
            float x[8];
            eight::take<Element>(words[i], x);
            reinterpret_cast<uint2*>(p.codes)[first + i * kLanes] = eight::e4m3_codes(x, scale.inverse);
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
        reinterpret_cast<uint2*>(p.codes)[vector] = eight::e4m3_codes(x, scale.inverse);
        if (column % p.group == 0) store_scale(p, row, column / p.group, scale.scale);
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
            return eight::take(__ldcg(from), __ldcg(from + 1), x);
        }
        const uint4 words = __ldcg(reinterpret_cast<const uint4*>(p.x) + vector);
        if (p.dtype == Dtype::Bf16)
            eight::take<__nv_bfloat16>(words, x);
        else
            eight::take<__half>(words, x);
    }
};

// Quantises the rows of a schedule alone, wherever they lie: bf16 or f16, groups of 128 columns. A CTA takes 64 groups of a tile
// at a time. Grid: any.
struct QuantizeFp8Tiles : Cta<256> {
    static __device__ __forceinline__ void run(const QuantizeFp8Params& p) {
        constexpr int kLanes = QuantizeFp8::kLanes, kGroups = kThreads / kLanes;
        walk::begin();
        const int row_groups = p.columns / 128;
        for (const auto [tile, first] : walk::Pieces(p.tiles, p.tile_count, p.tile_rows * row_groups, kGroups)) {
            if (first >= tile.count * row_groups) continue;
            const uint32_t thread = (uint32_t(tile.first) * row_groups + first) * kLanes + threadIdx.x;
            const uint32_t rows = tile.first + tile.count;
            if (p.dtype == Dtype::Bf16)
                QuantizeFp8::group_of_128<__nv_bfloat16>(p, thread, rows);
            else
                QuantizeFp8::group_of_128<__half>(p, thread, rows);
        }
    }
};

}  // namespace oxmoe
