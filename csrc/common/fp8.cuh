// e4m3 and its scales, bit for bit as src/quant/fp8.rs does it on the host and says why.
#pragma once
#include <cstdint>
#include <cuda_fp8.h>

namespace oxmoe::fp8 {

constexpr int kGroup = 128;  // columns of activations, rows and columns of weights with one scale
constexpr float kLargest = 448.f, kEps = 1e-10f;

// Two numbers to nearest, ties to even, saturating; `low` in the lower byte. NaN is 0x7F.
__device__ __forceinline__ uint32_t pack(float low, float high) {
    return __nv_cvt_float2_to_fp8x2(make_float2(low, high), __NV_SATFINITE, __NV_E4M3);
}
__device__ __forceinline__ uint32_t pack(float a, float b, float c, float d) { return pack(a, b) | pack(c, d) << 16; }

// The scale of a group, and what its elements are multiplied by.
struct Scale {
    float scale, inverse;

    // `amax`: the largest magnitude, NaN left out.
    __device__ __forceinline__ explicit Scale(float amax, float eps = kEps, bool powers = false) {
        scale = __fdiv_rn(fmaxf(amax, eps), kLargest);
        if (powers) scale = __uint_as_float((__float_as_uint(scale) + 0x007FFFFF) & 0xFF800000);
        inverse = __frcp_rn(scale);
    }
};

}  // namespace oxmoe::fp8
