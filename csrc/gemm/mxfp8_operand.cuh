// Code that the dense MXFP8 kernels share: scales, e4m3 with its scale as bf16, the order of K, and the stores of sums.
//
// K of bf16 operands goes by blocks of 128. Lane c of four has the 32 columns of group c, which share a scale. Step s of eight
// multiplies bytes 4 s to 4 s + 3 of each lane. The first two bytes are the lane's elements 2 c, 2 c + 1 of the mma, the others
// its elements 2 c + 8, 2 c + 9. Both operands have this order.
#pragma once
#include <cstdint>

#include "../common/cluster.cuh"
#include "../common/element.cuh"
#include "../common/scale_layout.cuh"

namespace oxmoe::mxfp8_dense {

constexpr int kGroup = 32, kBlockK = 128, kBlockGroups = kBlockK / kGroup;

// Blocks of K, at least one: if k is 0, the sums are those of a block of zeros.
__device__ __forceinline__ int k_blocks(const MmMxfp8Params& p) { return max((p.k + kBlockK - 1) / kBlockK, 1); }

// The value of a scale byte: 2^(byte - 127); 255 is NaN.
__device__ __forceinline__ float scale_value(uint32_t byte) {
    const uint32_t bits = byte == 0 ? 0x00400000 : byte == 255 ? 0x7FC00000 : byte << 23;
    return __uint_as_float(bits);
}

// Two e4m3 numbers times their scale. The products are exact unless bf16 cannot hold them: below 2^-133 and from 2^128 on.
__device__ __forceinline__ uint32_t decode_pair(uint16_t codes, float scale) {
    uint32_t halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(codes));
    const float2 values = unpack<__half>(halves);
    return pack<__nv_bfloat16>(values.x * scale, values.y * scale);
}

__device__ __forceinline__ void decode(uint32_t word, float scale, uint32_t& low, uint32_t& high) {
    low = decode_pair(uint16_t(word), scale);
    high = decode_pair(uint16_t(word >> 16), scale);
}

__device__ __forceinline__ uint32_t word_of(const uint4& vector, int i) {
    return i == 0 ? vector.x : i == 1 ? vector.y : i == 2 ? vector.z : vector.w;
}

template <typename Element>
__device__ __forceinline__ void store_four(const MmMxfp8Params& p, int token, int row, const float4& sums) {
    Element* out = reinterpret_cast<Element*>(p.out) + int64_t(token) * p.n + row;
    if (p.n % 4 == 0) {
        if (row < p.n) *reinterpret_cast<uint2*>(out) = uint2{pack<Element>(sums.x, sums.y), pack<Element>(sums.z, sums.w)};
        return;
    }
    const float values[4] = {sums.x, sums.y, sums.z, sums.w};
#pragma unroll
    for (int i = 0; i < 4; ++i)
        if (row + i < p.n) out[i] = from_float<Element>(values[i]);
}

__device__ __forceinline__ void store_four_fp32(const MmMxfp8Params& p, int token, int row, const float4& sums) {
    float* out = reinterpret_cast<float*>(p.out) + int64_t(token) * p.n + row;
    const float values[4] = {sums.x, sums.y, sums.z, sums.w};
#pragma unroll
    for (int i = 0; i < 4; ++i)
        if (row + i < p.n) out[i] = values[i];
}

// Adds up the parts of a cluster, in their order, and rounds once. `sums` is [Tokens][Pitch] in shared memory; each token has
// sums of Rows weight rows. All threads of all CTAs call this, after a barrier.
template <int Tokens, int Rows, int Pitch>
__device__ __forceinline__ void reduce_and_store(const MmMxfp8Params& p, float* sums, int first_token, int first_row) {
    constexpr int kFours = Rows / 4;
    const auto own = [&](int token, int four) { return reinterpret_cast<float4*>(sums + token * Pitch)[four]; };
    const auto store = [&](int token, int four, const float4& total) {
        if (first_token + token >= p.m) return;
        if (p.out_dtype == Dtype::Bf16)
            store_four<__nv_bfloat16>(p, first_token + token, first_row + four * 4, total);
        else if (p.out_dtype == Dtype::F32)
            store_four_fp32(p, first_token + token, first_row + four * 4, total);
        else
            store_four<__half>(p, first_token + token, first_row + four * 4, total);
    };
    if (p.splits == 1) {
        for (int i = threadIdx.x; i < Tokens * kFours; i += blockDim.x)
            store(i / kFours, i % kFours, own(i / kFours, i % kFours));
        return;
    }
    cluster::arrive();
    cluster::wait();
    const int rank = cluster::rank(), tokens = (Tokens - rank + p.splits - 1) / p.splits;
    for (int i = threadIdx.x; i < tokens * kFours; i += blockDim.x) {
        const int token = i / kFours * p.splits + rank, four = i % kFours;
        float4 total = {};
        for (int other = 0; other < p.splits; ++other) {
            const float4 more = cluster::load(reinterpret_cast<const float4*>(sums + token * Pitch) + four, other);
            if (other == 0)
                total = more;
            else
                total.x += more.x, total.y += more.y, total.z += more.z, total.w += more.w;
        }
        store(token, four, total);
    }
    // NOTE: no CTA ends while others read from its shared memory.
    cluster::arrive();
    cluster::wait();
}

}  // namespace oxmoe::mxfp8_dense
