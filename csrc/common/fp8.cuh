// e4m3 and its scales, bit for bit as src/quant/fp8.rs does it on the host and says why.
#pragma once
#include <cstdint>

#include "narrow.cuh"

namespace oxmoe::fp8 {

constexpr int kGroup = 128;  // columns of activations, rows and columns of weights with one scale
constexpr float kLargest = 448.f, kEps = 1e-10f;

// Four numbers, the first in the lowest byte.
__device__ __forceinline__ uint32_t pack(float a, float b, float c, float d) { return e4m3_pair(a, b) | e4m3_pair(c, d) << 16; }

// The scale of a group, and what its elements are multiplied by.
struct Scale {
    float scale, inverse;

    // `amax`: the largest magnitude, NaN left out.
    __device__ __forceinline__ explicit Scale(float amax, float eps = kEps, bool powers = false) {
        scale = __fdiv_rn(fmaxf(amax, eps), kLargest);
        if (powers) scale = __uint_as_float((__float_as_uint(scale) + 0x007FFFFF) & 0xFF800000);
        inverse = __frcp_rn(scale);
    }

    // Of a scale that was made elsewhere.
    static __device__ __forceinline__ Scale given(float scale) {
        Scale result;
        result.scale = scale, result.inverse = __frcp_rn(scale);
        return result;
    }

private:
    Scale() = default;
};

}  // namespace oxmoe::fp8
