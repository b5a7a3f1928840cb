// e4m3 and its scales, bit for bit as src/quant/fp8.rs computes them on the host; that file gives the reasons.
#pragma once
#include <cstdint>

#include "element.cuh"
#include "narrow.cuh"

namespace oxmoe::fp8 {

constexpr int kGroup = 128;  // columns of activations, rows and columns of weights with one scale
constexpr float kLargest = 448.f, kEps = 1e-10f;

// The e4m3 codes of four numbers, the first in the lowest byte.
__device__ __forceinline__ uint32_t pack(float a, float b, float c, float d) { return e4m3_pair(a, b) | e4m3_pair(c, d) << 16; }

// Returns the e4m3 codes of four bf16 numbers times `factor`. Each word has two numbers.
__device__ __forceinline__ uint32_t codes_of(uint32_t low, uint32_t high, float factor) {
    const float2 a = unpack<__nv_bfloat16>(low), b = unpack<__nv_bfloat16>(high);
    return pack(__fmul_rn(a.x, factor), __fmul_rn(a.y, factor), __fmul_rn(b.x, factor), __fmul_rn(b.y, factor));
}

// Raises the largest magnitude of a group to that of two bf16 numbers.
__device__ __forceinline__ void grow(float& amax, uint32_t pair) {
    const float2 two = unpack<__nv_bfloat16>(pair);
    amax = fmaxf(amax, fmaxf(fabsf(two.x), fabsf(two.y)));
}

// Returns the largest magnitude of a group that a quad holds. NOTE: all lanes of the warp call this, also lanes without numbers.
__device__ __forceinline__ float of_quad(float amax) {
    amax = fmaxf(amax, __shfl_xor_sync(0xFFFFFFFF, amax, 1));
    return fmaxf(amax, __shfl_xor_sync(0xFFFFFFFF, amax, 2));
}

// The scale of a group, and the factor that its elements are multiplied by.
struct Scale {
    float scale, inverse;

    // `amax` is the largest magnitude, with NaN left out.
    __device__ __forceinline__ explicit Scale(float amax, float eps = kEps, bool powers = false) {
        scale = __fdiv_rn(fmaxf(amax, eps), kLargest);
        if (powers) scale = __uint_as_float((__float_as_uint(scale) + 0x007FFFFF) & 0xFF800000);
        inverse = __frcp_rn(scale);
    }

    // Takes a scale that another kernel or the caller made.
    static __device__ __forceinline__ Scale given(float scale) {
        Scale result;
        result.scale = scale, result.inverse = __frcp_rn(scale);
        return result;
    }

private:
    Scale() = default;
};

}  // namespace oxmoe::fp8
