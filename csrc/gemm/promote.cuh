// Promotion: wgmma multiplies a block of K in e4m3 with sums of 14 bits. These products are added to fp32 sums, times the scales
// of their tokens and weight rows.
#pragma once

namespace oxmoe {

// Promotes if tokens are wgmma's A. `low` and `high` are the scales of a lane's two tokens, times the weights' scale. `First`:
// there are no sums yet.
template <bool First = false, int N>
__device__ __forceinline__ void promote(float (&sums)[N], const float (&product)[N], float low, float high) {
#pragma unroll
    for (int i = 0; i < N; ++i) sums[i] = __fmaf_rn(product[i], i % 4 < 2 ? low : high, First ? 0.f : sums[i]);
}

// Promotes a lane's four products if weights are wgmma's A. They are products of two neighbouring tokens, whose scales are
// `token`, and two weight rows, eight apart, whose scales are `low` and `high`.
__device__ __forceinline__ void promote_four(float* sums, const float* product, const float2& token, float low, float high) {
    sums[0] = __fmaf_rn(product[0], __fmul_rn(token.x, low), sums[0]);
    sums[1] = __fmaf_rn(product[1], __fmul_rn(token.y, low), sums[1]);
    sums[2] = __fmaf_rn(product[2], __fmul_rn(token.x, high), sums[2]);
    sums[3] = __fmaf_rn(product[3], __fmul_rn(token.y, high), sums[3]);
}

}  // namespace oxmoe
