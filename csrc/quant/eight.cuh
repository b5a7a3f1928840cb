// The eight numbers that a thread takes: in memory a vector of 16-bit numbers, or two vectors of fp32.
#pragma once
#include <cstdint>

#include "../common/element.cuh"
#include "../common/fp8.cuh"

namespace oxmoe::eight {

template <typename Element>
__device__ __forceinline__ void take(const uint4& words, float (&x)[8]) {
    const uint32_t pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 pair = unpack<Element>(pairs[i]);
        x[2 * i] = pair.x, x[2 * i + 1] = pair.y;
    }
}
__device__ __forceinline__ void take(const float4& low, const float4& high, float (&x)[8]) {
    x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w, x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
}

// Returns the e4m3 codes of eight numbers times `factor`, the first in the lowest byte.
__device__ __forceinline__ uint2 e4m3_codes(const float (&x)[8], float factor) {
    float scaled[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) scaled[i] = __fmul_rn(x[i], factor);
    return {fp8::pack(scaled[0], scaled[1], scaled[2], scaled[3]), fp8::pack(scaled[4], scaled[5], scaled[6], scaled[7])};
}

template <typename Element>
struct PairOf {
    using Type = __half2;
};
template <>
struct PairOf<__nv_bfloat16> {
    using Type = __nv_bfloat162;
};

// The largest magnitudes of 16-bit numbers, NaN left out. The word has one for the numbers at even places and one for those at
// odd places.
template <typename Element>
struct Peak {
    uint32_t halves = 0;

    __device__ __forceinline__ void grow(uint32_t pair) {
        using Pair = typename PairOf<Element>::Type;
        const uint32_t magnitudes = pair & 0x7FFF7FFF;
        const Pair larger = __hmax2(reinterpret_cast<const Pair&>(halves), reinterpret_cast<const Pair&>(magnitudes));
        halves = reinterpret_cast<const uint32_t&>(larger);
    }
    __device__ __forceinline__ void grow(const uint4& words) { grow(words.x), grow(words.y), grow(words.z), grow(words.w); }
    // Takes in the magnitudes of the lane whose number differs from this lane's in the bit `distance`.
    __device__ __forceinline__ void exchange(int distance) { grow(__shfl_xor_sync(0xFFFFFFFF, halves, distance)); }

    __device__ __forceinline__ float value() const {
        const float2 both = unpack<Element>(halves);
        return fmaxf(both.x, both.y);
    }
};

}  // namespace oxmoe::eight
