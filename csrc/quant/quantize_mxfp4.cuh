// Converts bf16, f16 and fp32 to MXFP4 and back, bit for bit as src/quant/mxfp4.rs does on the host; that file gives the reasons.
// Four threads take a block of 32 elements, eight each, so that a warp reads and writes long pieces.
//
// NOTE: products and sums are intrinsics, so that the compiler fuses none. Subnormal numbers are not flushed to zero.
#pragma once
#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../common/narrow.cuh"
#include "../common/pdl.cuh"
#include "oxmoe/src/params/quant.rs.h"
#include "walk.cuh"

namespace oxmoe {
namespace mxfp4 {

constexpr uint32_t kInfinity = 0x7F800000, kMagnitude = 0x7FFFFFFF;
constexpr int kLanes = 4;  // threads of a block

// Eight fp32 numbers: take() reads them from 16-byte vectors, round() writes them. `kLargest` has the bits of the largest number.
struct Fp32 {
    static constexpr int kVectors = 2;
    static constexpr uint32_t kLargest = 0x7F7FFFFF;

    static __device__ __forceinline__ void take(const uint4 (&v)[2], float (&x)[8]) {
        const uint32_t bits[8] = {v[0].x, v[0].y, v[0].z, v[0].w, v[1].x, v[1].y, v[1].z, v[1].w};
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] = __uint_as_float(bits[i]);
    }
    static __device__ __forceinline__ void round(const float (&x)[8], bool nan, uint4 (&v)[2]) {
        uint32_t bits[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) bits[i] = nan ? 0x7FC00000 : __float_as_uint(x[i]);
        v[0] = make_uint4(bits[0], bits[1], bits[2], bits[3]);
        v[1] = make_uint4(bits[4], bits[5], bits[6], bits[7]);
    }
};

// Eight numbers as words of two 16-bit numbers, the first in the lower half.
template <typename Pair>
struct Pairs : Pair {
    static constexpr int kVectors = 1;

    static __device__ __forceinline__ void take(const uint4 (&v)[1], float (&x)[8]) {
        const uint32_t words[4] = {v[0].x, v[0].y, v[0].z, v[0].w};
#pragma unroll
        for (int i = 0; i < 4; ++i) Pair::unpack(words[i], x[2 * i], x[2 * i + 1]);
    }
    static __device__ __forceinline__ void round(const float (&x)[8], bool nan, uint4 (&v)[1]) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) words[i] = nan ? Pair::kNan : Pair::pack(x[2 * i], x[2 * i + 1]);
        v[0] = make_uint4(words[0], words[1], words[2], words[3]);
    }
};

struct Bf16Pair {
    static constexpr uint32_t kLargest = 0x7F7F0000, kNan = 0x7FC07FC0;

    static __device__ __forceinline__ void unpack(uint32_t word, float& low, float& high) {
        low = __uint_as_float(word << 16);
        high = __uint_as_float(word & 0xFFFF0000);
    }
    static __device__ __forceinline__ uint32_t pack(float low, float high) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
        return reinterpret_cast<const uint32_t&>(pair);
    }
};

struct F16Pair {
    static constexpr uint32_t kLargest = 0x477FE000, kNan = 0x7E007E00;

    static __device__ __forceinline__ void unpack(uint32_t word, float& low, float& high) {
        low = signed_as(word << 16, magnitude(word & 0x7FFF));
        high = signed_as(word, magnitude(word >> 16 & 0x7FFF));
    }
    static __device__ __forceinline__ float magnitude(uint32_t half) { return __half2float(__ushort_as_half(uint16_t(half))); }
    // NOTE: the conversion drops the sign of NaN.
    static __device__ __forceinline__ float signed_as(uint32_t sign, float magnitude) {
        return __uint_as_float(__float_as_uint(magnitude) | (sign & ~kMagnitude));
    }
    static __device__ __forceinline__ uint32_t pack(float low, float high) {
        const __half2 pair = __floats2half2_rn(low, high);
        return reinterpret_cast<const uint32_t&>(pair);
    }
};

// The E8M0 byte for a block whose largest magnitude has the bits `amax`.
__device__ __forceinline__ uint32_t scale_byte(uint32_t amax, bool up) {
    if (amax > kInfinity) return up ? 0 : 255;
    const float value = __uint_as_float(amax);
    return up ? (__float_as_uint(__fdiv_rn(value, 6.0f)) + 0x007FFFFF) >> 23 : __float_as_uint(__fmul_rn(value, 0.25f)) >> 23;
}

// Encodes eight numbers to a word of codes, the first in the lowest bits; `scale` is below 254.
__device__ __forceinline__ uint32_t encode(const float (&x)[8], uint32_t scale) {
    // The factor is 2^(127 - scale). For the byte 0 it is 0, because amax / 6 has underflowed.
    const float inverse = __uint_as_float(scale == 0 ? 0 : (254 - scale) << 23);
    uint32_t word = 0;
#pragma unroll
    for (int i = 7; i >= 0; --i) {
        const uint32_t bits = __float_as_uint(x[i]);
        word = word << 4 | (bits >> 28 & 8) | e2m1_magnitude(__fmul_rn(__uint_as_float(bits & kMagnitude), inverse));
    }
    return word;
}

// Encodes eight numbers of a block with NaN or infinity.
__device__ __noinline__ uint32_t encode_non_finite(float a, float b, float c, float d, float e, float f, float g, float h) {
    const float x[8] = {a, b, c, d, e, f, g, h};
    uint32_t word = 0;
#pragma unroll
    for (int i = 7; i >= 0; --i) {
        const uint32_t bits = __float_as_uint(x[i]), magnitude = bits & kMagnitude, sign = bits >> 28 & 8;
        word = word << 4 | (magnitude > kInfinity ? 7 | sign : magnitude == kInfinity ? 15 : sign);
    }
    return word;
}

// Decodes a word of codes: times the scale, limited to `largest`. A code's bits in place are its value times 2^-126.
__device__ __forceinline__ void decode(uint32_t word, uint32_t scale, float largest, float (&x)[8]) {
    const float factor = __uint_as_float(scale == 0 ? 1 << 22 : scale == 255 ? 0 : scale << 23);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const uint32_t bits = (word << (28 - 4 * i) & ~kMagnitude) | (word >> 4 * i & 7) << 22;
        const float value = __fmul_rn(__fmul_rn(__uint_as_float(bits), __uint_as_float(253u << 23)), factor);
        x[i] = fmaxf(fminf(value, largest), -largest);
    }
}

}  // namespace mxfp4

// The part that both directions share. Grid: a CTA takes kUnits x kThreads times eight numbers.
template <typename Kernel>
struct Mxfp4Conversion : Cta<256> {
    static constexpr int kUnits = 2;

    static __device__ __forceinline__ void run(const QuantizeMxfp4Params& p) {
        pdl::wait();
        if (p.dtype == Dtype::F32)
            Kernel::template convert<mxfp4::Fp32>(p);
        else if (p.dtype == Dtype::Bf16)
            Kernel::template convert<mxfp4::Pairs<mxfp4::Bf16Pair>>(p);
        else
            Kernel::template convert<mxfp4::Pairs<mxfp4::F16Pair>>(p);
    }
};

struct Mxfp4Quantize : Mxfp4Conversion<Mxfp4Quantize> {
    template <typename Numbers>
    static __device__ __forceinline__ void convert(const QuantizeMxfp4Params& p) {
        constexpr int kVectors = Numbers::kVectors;
        const int64_t eights = p.blocks * mxfp4::kLanes, first = int64_t(blockIdx.x) * kUnits * kThreads + threadIdx.x;
        uint4 v[kUnits][kVectors] = {};
#pragma unroll
        for (int unit = 0; unit < kUnits; ++unit) {
            const int64_t at = first + unit * kThreads;
#pragma unroll
            for (int i = 0; i < kVectors; ++i)
                if (at < eights) v[unit][i] = reinterpret_cast<const uint4*>(p.numbers)[at * kVectors + i];
        }
#pragma unroll
        for (int unit = 0; unit < kUnits; ++unit) {
            const int64_t at = first + unit * kThreads;
            float x[8];
            Numbers::take(v[unit], x);
            // Magnitudes order as their bits do; NaN is above infinity.
            uint32_t amax = 0;
#pragma unroll
            for (int i = 0; i < 8; ++i) amax = max(amax, __float_as_uint(x[i]) & mxfp4::kMagnitude);
            amax = max(amax, __shfl_xor_sync(~0u, amax, 1));
            amax = max(amax, __shfl_xor_sync(~0u, amax, 2));
            const uint32_t scale = mxfp4::scale_byte(amax, p.up);
            const uint32_t word = amax < mxfp4::kInfinity
                                      ? mxfp4::encode(x, scale)
                                      : mxfp4::encode_non_finite(x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7]);
            if (at >= eights) continue;
            reinterpret_cast<uint32_t*>(p.codes)[at] = word;
            if (at % mxfp4::kLanes == 0) p.scales[at / mxfp4::kLanes] = uint8_t(scale);
        }
    }
};

struct Mxfp4Dequantize : Mxfp4Conversion<Mxfp4Dequantize> {
    template <typename Numbers>
    static __device__ __forceinline__ void convert(const QuantizeMxfp4Params& p) {
        constexpr int kVectors = Numbers::kVectors;
        const int64_t eights = p.blocks * mxfp4::kLanes, first = int64_t(blockIdx.x) * kUnits * kThreads + threadIdx.x;
        uint32_t words[kUnits] = {}, scales[kUnits] = {};
#pragma unroll
        for (int unit = 0; unit < kUnits; ++unit) {
            const int64_t at = first + unit * kThreads;
            if (at >= eights) continue;
            words[unit] = reinterpret_cast<const uint32_t*>(p.codes)[at];
            scales[unit] = p.scales[at / mxfp4::kLanes];
        }
#pragma unroll
        for (int unit = 0; unit < kUnits; ++unit) {
            const int64_t at = first + unit * kThreads;
            if (at >= eights) continue;
            float x[8];
            uint4 v[kVectors];
            mxfp4::decode(words[unit], scales[unit], __uint_as_float(Numbers::kLargest), x);
            Numbers::round(x, scales[unit] == 255, v);
#pragma unroll
            for (int i = 0; i < kVectors; ++i) reinterpret_cast<uint4*>(p.numbers)[at * kVectors + i] = v[i];
        }
    }
};

}  // namespace oxmoe
