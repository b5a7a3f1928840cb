// fp32 to 8-bit and 4-bit floats, rounded to nearest with ties to even, saturating: bit for bit as src/cpu/narrow.rs.
#pragma once
#include <cstdint>

namespace oxmoe {

// The code of the e2m1 magnitude nearest to y >= 0. From 1 on, codes count steps of half the power of two below y; below 1,
// steps of 0.5. Adding 2^23 steps leaves their rounded number in the low bits.
__device__ __forceinline__ uint32_t e2m1_magnitude(float y) {
    const uint32_t given = __float_as_uint(y), six = 0x40C00000u, one = 0x3F800000u;
    const uint32_t bits = given < six ? given : six;
    const uint32_t power = (bits > one ? bits : one) & 0x7F800000u;  // 1, 2 or 4
    const uint32_t many = power + (22u << 23);
    const uint32_t steps = __float_as_uint(__fadd_rn(__uint_as_float(bits), __uint_as_float(many))) - many;
    return steps + (power >> 22) - 254;
}

// NaN gives +6, because the type has no NaN.
__device__ __forceinline__ uint32_t e2m1(float x) {
    const uint32_t bits = __float_as_uint(x), magnitude = bits & 0x7FFFFFFFu;
    return magnitude > 0x7F800000u ? 7 : e2m1_magnitude(__uint_as_float(magnitude)) | (bits >> 28 & 8);
}

// e4m3 (fn: no infinities, largest 448). NaN gives 0x7F.
__device__ __forceinline__ uint32_t e4m3(float x) {
    const uint32_t bits = __float_as_uint(x), magnitude = bits & 0x7FFFFFFFu, sign = bits >> 24 & 0x80;
    if (magnitude > 0x7F800000u) return 0x7F;
    if (magnitude >= 0x43E00000u) return sign | 0x7E;
    // Below 2^-6 codes count steps of 2^-9: adding 2^14 leaves their rounded number in the low bits.
    if (magnitude < 0x3C800000u) {
        return sign | (__float_as_uint(__fadd_rn(__uint_as_float(magnitude), 16384.f)) & 0xF);
    }
    return sign | (((magnitude + 0x7FFFF + (magnitude >> 20 & 1)) >> 20) - (120 << 3));
}

// Two e4m3 codes, `low` in the lower byte.
__device__ __forceinline__ uint32_t e4m3_pair(float low, float high) {
#if __CUDA_ARCH__ >= 890
    uint16_t pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
#else
    return e4m3(low) | e4m3(high) << 8;
#endif
}

__device__ __forceinline__ float e4m3_value(uint32_t code) {
    const uint32_t sign = (code & 0x80) << 24, magnitude = code & 0x7F;
    if (magnitude == 0x7F) return __uint_as_float(0x7FFFFFFFu);
    // A subnormal number's mantissa, as an integer, is exact in fp32.
    const float value =
        magnitude < 8 ? __fmul_rn(float(magnitude), 1.f / 512) : __uint_as_float((magnitude << 20) + (120u << 23));
    return __uint_as_float(__float_as_uint(value) | sign);
}

}  // namespace oxmoe
