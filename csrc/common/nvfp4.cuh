// Quantises blocks of numbers to e2m1 with one scale each: bit for bit as src/quant/nvfp4.rs.
#pragma once
#include <cstdint>

#include "narrow.cuh"
#include "scale_layout.cuh"

namespace oxmoe {

// x rounded up to a power of two; infinity stays.
__device__ __forceinline__ float power_of_two_above(float x) {
    const uint32_t bits = __float_as_uint(x);
    return __uint_as_float(bits & 0x7FFFFFu ? (bits + 0x800000u) & 0x7F800000u : bits);
}

template <int kValues>
__device__ __forceinline__ float largest(const float (&x)[kValues]) {
    float result = 0;
#pragma unroll
    for (int i = 0; i < kValues; ++i) result = fmaxf(fabsf(x[i]), result);
    return result;
}

// The e4m3 scale of a block of NVFP4 whose largest magnitude is amax, in a tensor whose numbers are multiplied by `scale`.
__device__ __forceinline__ uint32_t nvfp4_scale(float scale, float amax) { return e4m3(scale * (amax * (1.f / 6.f))); }

// The factor that a block's numbers are multiplied by; `narrow` is the value of the block's scale.
__device__ __forceinline__ float block_factor(float scale, float narrow) { return narrow != 0 ? __fdiv_rn(scale, narrow) : 0.f; }

// The e2m1 codes of numbers times `factor`, the first in the lowest nibble.
template <int kValues>
__device__ __forceinline__ uint32_t e2m1_pairs(const float (&x)[kValues], float factor) {
    static_assert(kValues <= 8, "the pairs fill a word");
    uint32_t pairs = 0;
#pragma unroll
    for (int i = 0; i < kValues; ++i) pairs |= e2m1(x[i] * factor) << 4 * i;
    return pairs;
}

}  // namespace oxmoe
