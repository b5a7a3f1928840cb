// Converts rows of bf16, f16 or fp32 to MXFP8 and back, bit for bit as src/quant/mxfp8.rs does on the host; that file gives the
// reasons. Four neighbouring threads take a group of 32 columns, eight each.
#pragma once
#include <cstdint>

#include "../common/scale_layout.cuh"
#include "eight.cuh"
#include "oxmoe/src/params/quant.rs.h"
#include "walk.cuh"

namespace oxmoe {
namespace mxfp8 {

constexpr int kGroup = 32, kLanes = 4;  // columns with one scale, and threads that share a group

// The E8M0 byte of a group whose largest magnitude is `amax`.
__device__ __forceinline__ uint32_t scale_of(float amax) {
    const uint32_t bits = __float_as_uint(amax) & 0x7FFFFFFFu;
    if (bits >= 0x7F800000u) return bits == 0x7F800000u ? 254 : 255;
    const int exponent = int((bits + 0x1FFFFF) >> 23) - 8;
    return exponent > 0 ? exponent : 0;
}

__device__ __forceinline__ float inverse_of(uint32_t scale) {
    if (scale == 255) return __uint_as_float(0x7FC00000);
    return scale == 0 || scale == 254 ? 0.f : __uint_as_float((254 - scale) << 23);
}

__device__ __forceinline__ float value_of(uint32_t scale) {
    return __uint_as_float(scale == 0 ? 1u << 22 : scale == 255 ? 0x7FC00000u : scale << 23);
}

// The position of eight numbers: their row, group and lane in the rows of scales, padding included.
struct Place {
    uint32_t row;
    int group, lane;
    bool real, stored;  // the input has the numbers; their codes are stored

    __device__ __forceinline__ Place(const QuantizeMxfp8Params& p, uint32_t unit) {
        const uint32_t units = scale_groups(p) * kLanes;
        row = unit / units;
        group = int(unit % units) / kLanes;
        lane = unit % kLanes;
        stored = row < p.rows && group < p.padded_columns / kGroup;
        real = stored && group < p.columns / kGroup;
    }

    static __device__ __forceinline__ int scale_groups(const QuantizeMxfp8Params& p) {
        const int groups = p.padded_columns / kGroup;
        return p.tile_rows ? (groups + 3) / 4 * 4 : groups;
    }
    static __device__ __forceinline__ uint64_t units(const QuantizeMxfp8Params& p) {
        const uint64_t rows = p.tile_rows ? (p.rows + p.tile_rows - 1) / p.tile_rows * p.tile_rows : p.rows;
        return rows * scale_groups(p) * kLanes;
    }
    __device__ __forceinline__ uint8_t& scale(const QuantizeMxfp8Params& p) const {
        return p.scales[block_scale_offset(p.tile_rows, row, group, p.padded_columns / kGroup)];
    }
    // Returns the index of eight numbers in rows of `columns`.
    __device__ __forceinline__ int64_t eight(int columns) const { return int64_t(row) * (columns / 8) + group * kLanes + lane; }
};

template <typename Element>
__device__ __forceinline__ void take(const uint8_t* numbers, int64_t eight, float (&x)[8]) {
    eight::take<Element>(__ldcs(reinterpret_cast<const uint4*>(numbers) + eight), x);
}
template <>
__device__ __forceinline__ void take<float>(const uint8_t* numbers, int64_t eight, float (&x)[8]) {
    const float4* from = reinterpret_cast<const float4*>(numbers) + 2 * eight;
    eight::take(__ldcs(from), __ldcs(from + 1), x);
}

template <typename Element>
constexpr uint32_t kNan = 0x7E007E00;
template <>
constexpr uint32_t kNan<__nv_bfloat16> = 0x7FC07FC0;

template <typename Element>
__device__ __forceinline__ void give(uint8_t* numbers, int64_t eight, const float (&x)[8]) {
    uint32_t pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        // NOTE: the conversion makes a NaN with other bits.
        const uint32_t low = isnan(x[2 * i]) ? 0xFFFF : 0, high = isnan(x[2 * i + 1]) ? 0xFFFF0000 : 0, nan = low | high;
        pairs[i] = (pack<Element>(x[2 * i], x[2 * i + 1]) & ~nan) | (kNan<Element> & nan);
    }
    reinterpret_cast<uint4*>(numbers)[eight] = uint4{pairs[0], pairs[1], pairs[2], pairs[3]};
}
template <>
__device__ __forceinline__ void give<float>(uint8_t* numbers, int64_t eight, const float (&x)[8]) {
    float4* to = reinterpret_cast<float4*>(numbers) + 2 * eight;
    to[0] = float4{x[0], x[1], x[2], x[3]}, to[1] = float4{x[4], x[5], x[6], x[7]};
}

}  // namespace mxfp8

// Grid: a thread for each eight numbers of the rows and groups that have scales, padding included.
struct QuantizeMxfp8 : Cta<256> {
    static __device__ __forceinline__ void run(const QuantizeMxfp8Params& p) {
        walk::begin();
        const uint32_t unit = blockIdx.x * kThreads + threadIdx.x;
        // NOTE: groups are aligned parts of a warp, and all lanes of the warp shuffle.
        const bool inside = unit < mxfp8::Place::units(p);
        const mxfp8::Place place(p, unit);
        float x[8] = {};
        if (inside && place.real) {
            const int64_t eight = place.eight(p.columns);
            if (p.dtype == Dtype::F32)
                mxfp8::take<float>(p.numbers, eight, x);
            else if (p.dtype == Dtype::Bf16)
                mxfp8::take<__nv_bfloat16>(p.numbers, eight, x);
            else
                mxfp8::take<__half>(p.numbers, eight, x);
        }
        // The result is NaN only if all numbers are.
        float amax = fabsf(x[0]);
#pragma unroll
        for (int i = 1; i < 8; ++i) amax = fmaxf(amax, fabsf(x[i]));
        amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, 1));
        amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, 2));
        if (!inside) return;
        const uint32_t scale = mxfp8::scale_of(amax);
        const float inverse = mxfp8::inverse_of(scale);
        if (place.stored) {
            uint32_t words[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float* four = x + 4 * i;
                words[i] = e4m3_pair(__fmul_rn(four[0], inverse), __fmul_rn(four[1], inverse)) |
                           e4m3_pair(__fmul_rn(four[2], inverse), __fmul_rn(four[3], inverse)) << 16;
            }
            reinterpret_cast<uint2*>(p.codes)[place.eight(p.padded_columns)] = uint2{words[0], words[1]};
        }
        if (place.lane == 0) place.scale(p) = uint8_t(scale);
    }
};

// Grid: a thread for each eight numbers.
struct DequantizeMxfp8 : Cta<256> {
    static __device__ __forceinline__ void run(const QuantizeMxfp8Params& p) {
        walk::begin();
        const uint32_t unit = blockIdx.x * kThreads + threadIdx.x;
        const mxfp8::Place place(p, unit);
        if (unit >= mxfp8::Place::units(p) || !place.real) return;
        const int64_t eight = place.eight(p.columns);
        const uint2 words = reinterpret_cast<const uint2*>(p.codes)[eight];
        const float scale = mxfp8::value_of(place.scale(p));
        float x[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float value = __fmul_rn(e4m3_value((i < 4 ? words.x : words.y) >> i % 4 * 8 & 0xFF), scale);
            x[i] = isnan(value) ? __uint_as_float(0x7FC00000) : value;
        }
        if (p.dtype == Dtype::F32)
            mxfp8::give<float>(p.numbers, eight, x);
        else if (p.dtype == Dtype::Bf16)
            mxfp8::give<__nv_bfloat16>(p.numbers, eight, x);
        else
            mxfp8::give<__half>(p.numbers, eight, x);
    }
};

}  // namespace oxmoe
