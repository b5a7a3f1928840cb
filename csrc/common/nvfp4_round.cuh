// Rounds blocks of 16 bf16 numbers to the bf16 numbers that NVFP4 has for them: bit for bit the values of nvfp4.cuh's codes and
// scales.
//
// NOTE: this makes no call, and whole warps execute it: otherwise ptxas would give up uniform registers beside wgmma.
#pragma once
#include <cstdint>

#include "bf16_pairs.cuh"
#include "narrow.cuh"

namespace oxmoe::nvfp4 {

// scale / narrow rounded to nearest; `narrow` is the value of an e4m3 code other than 0.
//
// The division is in fp64, in which nothing overflows or is subnormal. The first quotient has 22 bits; two of Newton's steps make
// 52, or all bits if fp64 holds the quotient. `narrow` has four significant bits. So a quotient that fp64 does not hold is at
// least 2^-35 of itself away from where fp32 rounds, and rounding once more does no harm.
__device__ __forceinline__ float quotient(float scale, float narrow) {
    float near;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(near) : "f"(narrow));
    const double dividend = scale, divisor = narrow, inverse = near;
    double result = dividend * inverse;
    result = fma(fma(-result, divisor, dividend), inverse, result);
    result = fma(fma(-result, divisor, dividend), inverse, result);
    // Newton's steps would make NaN of an infinite scale: infinity less itself.
    return fabsf(scale) <= 0x1.fffffep127f ? float(result) : scale * near;
}

// The magnitude of the e2m1 number nearest to |y| <= 6, computed with the steps of e2m1_magnitude().
__device__ __forceinline__ float nearest_e2m1(float y) {
    const uint32_t power = max(__float_as_uint(y) & 0x7F800000u, 0x3F800000u);  // 1, 2 or 4
    const float many = __uint_as_float(power + (22u << 23));
    return __fadd_rn(__fadd_rn(fabsf(y), many), -many);
}

// Rounds 8 of a block's numbers, which `scale` multiplies before. The neighbouring lane has the others, and all lanes of the warp
// call this.
__device__ __forceinline__ uint4 round_block(const uint4& x, float scale) {
    uint32_t pair = larger_magnitudes(larger_magnitudes(x.x, x.y), larger_magnitudes(x.z, x.w));
    pair = larger_magnitudes(pair, __shfl_xor_sync(~0u, pair, 1));
    // The largest magnitude is NaN only if all numbers are; fmaxf makes it 0.
    const float peak = fmaxf(__uint_as_float(larger_magnitudes(pair, pair >> 16) << 16), 0.f);
    const float narrow = e4m3_value(e4m3_pair(__fmul_rn(scale, __fmul_rn(peak, 1.f / 6.f)), 0.f) & 0xFF);
    const float factor = narrow != 0 ? quotient(scale, narrow) : 0.f;
    const auto rounded = [&](uint32_t bits) {
        // NaN gives +6.
        const float y = fmaxf(fminf(__fmul_rn(__uint_as_float(bits), factor), 6.f), -6.f);
        return __float_as_uint(__fmul_rn(nearest_e2m1(y), narrow)) ^ (__float_as_uint(y) & 0x80000000u);
    };
    // The results are exact in bf16: the lower halves are 0, except those of NaN.
    const auto both = [&](uint32_t numbers) {
        return __byte_perm(rounded(numbers << 16), rounded(numbers & 0xFFFF0000u), 0x7632);
    };
    return make_uint4(both(x.x), both(x.y), both(x.z), both(x.w));
}

// The last step of a GEMM's outputs before they are stored: they may be rounded to NVFP4's numbers. Two neighbouring lanes hold
// 16 columns of a token.
struct RoundedOutputs {
    static constexpr bool kExchanges = true;

    template <typename Params>
    static __device__ __forceinline__ float of_expert(const Params& p, int expert) {
        return p.out_global_scales ? p.out_global_scales[expert] : 0.f;
    }
    template <typename Params>
    static __device__ __forceinline__ uint4 finish(const uint4& outputs, const Params& p, float scale) {
        return p.out_global_scales ? round_block(outputs, scale) : outputs;
    }
};

}  // namespace oxmoe::nvfp4
