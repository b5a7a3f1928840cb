// Parts that the fp8 kernels of many tokens (grouped_gemm_fp8_wide_sm90.cuh and its siblings) share: they multiply a block of 128
// weight rows and finish its products. A lane has sums of 32 columns, in runs of eight, for two tokens: rows g and g + 8 of its
// warp's 16.
#pragma once
#include <cstdint>

#include "../common/activation.cuh"
#include "../common/fp8.cuh"
#include "../common/wgmma_fp8.cuh"
#include "../gemm/multiply.cuh"
#include "../gemm/pipeline.cuh"
#include "../gemm/promote.cuh"
#include "grouped_gemm_sm90.cuh"

namespace oxmoe {

struct Fp8Block {
    static constexpr int kBlockRows = 128, kBlockBytes = kBlockRows * 128, kSums = kBlockRows / 2;
    static constexpr int kLaneColumns = 32, kRun = 8, kRunStride = 32;  // a lane's columns, in runs of eight
    static constexpr int kBlockStrips = kBlockRows / kRunStride;
    static constexpr int kTokens = 2;  // tokens of a lane

    // Starts the multiplication of 64 tokens and a block of weights over 128 K; `product` is overwritten.
    static __device__ __forceinline__ void start(float (&product)[kSums], uint32_t tokens, uint32_t weights) {
        sm90::start_wgmma_e4m3_128(product, sm90::descriptor_128b(tokens, 0), sm90::descriptor_128b(weights, 0));
#pragma unroll
        for (int i = 1; i < 4; ++i) {
            sm90::WgmmaE4m3<kBlockRows>::multiply(product, sm90::descriptor_128b(tokens, i * 32),
                                                  sm90::descriptor_128b(weights, i * 32), true);
        }
        sm90::wgmma_commit();
    }

    // Returns the index in a block's sums of a lane's column, for its token `half`.
    static constexpr __device__ __forceinline__ int sum_index(int column, int half) {
        return column / 2 * 4 + half * 2 + column % 2;
    }

    // Applies the scales of weight rows, and the bias. `at` is the index of a lane's first column.
    static __device__ __forceinline__ void finish_rows(const GroupedGemmParams& p, size_t at, float (&sums)[kSums]) {
        if (p.expert_scales) multiply_rows(p, at, sums);
        if (p.bias) add_bias(p, at, sums);
    }

    static __device__ __forceinline__ void multiply_rows(const GroupedGemmParams& p, size_t at, float (&sums)[kSums]) {
        const float4* from = reinterpret_cast<const float4*>(p.expert_scales + at);
#pragma unroll
        for (int i = 0; i < kLaneColumns; i += 4) {
            const float4 four = from[(i / kRun * kRunStride + i % kRun) / 4];
            const float scales[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (int j = 0; j < 4; ++j) sums[sum_index(i + j, 0)] *= scales[j], sums[sum_index(i + j, 1)] *= scales[j];
        }
    }

    static __device__ __forceinline__ void add_bias(const GroupedGemmParams& p, size_t at, float (&sums)[kSums]) {
        auto add = [&](int column, float bias) {
            sums[sum_index(column, 0)] += bias;
            sums[sum_index(column, 1)] += bias;
        };
        if (p.bias_dtype == Dtype::F32) {
            const float4* from = reinterpret_cast<const float4*>(reinterpret_cast<const float*>(p.bias) + at);
#pragma unroll
            for (int i = 0; i < kLaneColumns; i += 4) {
                const float4 bias = from[(i / kRun * kRunStride + i % kRun) / 4];
                add(i, bias.x), add(i + 1, bias.y), add(i + 2, bias.z), add(i + 3, bias.w);
            }
        } else {
            const uint4* from = reinterpret_cast<const uint4*>(reinterpret_cast<const __nv_bfloat16*>(p.bias) + at);
#pragma unroll
            for (int i = 0; i < kLaneColumns; i += 8) {
                const uint4 words = from[i / kRun * kRunStride / 8];
                const uint32_t pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const float2 pair = unpack<__nv_bfloat16>(pairs[j]);
                    add(i + 2 * j, pair.x), add(i + 2 * j + 1, pair.y);
                }
            }
        }
    }

    // Finds the places of a lane's tokens, -1 without a token, and multiplies their sums in `Blocks` blocks by the router's
    // weights. `row` is the first token's row.
    template <int Blocks>
    static __device__ __forceinline__ void finish_tokens(const GroupedGemmParams& p, const WorkUnit& work, int row,
                                                         float (*sums)[kSums], int (&place)[kTokens]) {
#pragma unroll
        for (int half = 0; half < kTokens; ++half) {
            place[half] = row + 8 * half < work.count ? work.first + row + 8 * half : -1;
            if (!p.slot_weights || place[half] < 0) continue;
            const float weight = p.slot_weights[p.slot_of_place ? p.slot_of_place[place[half]] : place[half]];
#pragma unroll
            for (int i = 0; i < Blocks * kLaneColumns; ++i) sums[i / kLaneColumns][sum_index(i % kLaneColumns, half)] *= weight;
        }
    }

    // Multiplies the activations of gate sums, `gate(i)`, by the up sums; the outputs go to `out`.
    template <typename F>
    static __device__ __forceinline__ void activate_pairs(const Activation& own, float (&out)[kSums], F gate,
                                                          const float (&up)[kSums]) {
        if (own.kind == ActivationKind::Swiglu) {
            const SwigluFunction swiglu(own);
            if (swiglu.has_limits()) {
#pragma unroll
                for (int i = 0; i < kSums; ++i) out[i] = swiglu(gate(i), up[i]);
            } else {
#pragma unroll
                for (int i = 0; i < kSums; ++i) out[i] = swiglu.unlimited(gate(i), up[i]);
            }
            return;
        }
        if (own.kind == ActivationKind::Situ) {
            const SituFunction situ(own);
#pragma unroll
            for (int i = 0; i < kSums; ++i) out[i] = situ(gate(i), up[i]);
            return;
        }
        const ActivationFunction activation(own);
#pragma unroll
        for (int i = 0; i < kSums; ++i) out[i] = activation(gate(i)) * up[i];
    }

    // Applies the activation of a kind without gates to `Blocks` blocks.
    template <int Blocks>
    static __device__ __forceinline__ void activate(const GroupedGemmParams& p, float (*sums)[kSums]) {
        if (p.activation.kind == ActivationKind::Identity) return;
        const ActivationFunction activation(p.activation);
#pragma unroll
        for (int i = 0; i < Blocks * kSums; ++i) {
            float& sum = sums[i / kSums][i % kSums];
            sum = activation(sum);
        }
    }

    // Stores a token's group of 128 outputs as bf16, or as e4m3 with a scale. Each of the token's four lanes has 32 of them.
    // `place` is -1 if there is no token.
    static __device__ __forceinline__ void store_group(const GroupedGemmParams& p, int place, int block, int column, int half,
                                                       const float (&sums)[kSums], size_t scale_at) {
        const size_t at = size_t(place) * p.out_columns + block * kBlockRows + column;
        uint32_t packed[kLaneColumns / 2];
#pragma unroll
        for (int i = 0; i < kLaneColumns / 2; ++i) {
            packed[i] = pack<__nv_bfloat16>(sums[sum_index(2 * i, half)], sums[sum_index(2 * i + 1, half)]);
        }
        if (!p.out_scales) {
            if (place < 0) return;
            __nv_bfloat16* out = reinterpret_cast<__nv_bfloat16*>(p.out) + at;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                sm90::store_global_16(out + i * kRunStride,
                                      {packed[4 * i], packed[4 * i + 1], packed[4 * i + 2], packed[4 * i + 3]});
            }
            return;
        }
        float amax = 0.f;
#pragma unroll
        for (int i = 0; i < kLaneColumns / 2; ++i) fp8::grow(amax, packed[i]);
        amax = fp8::of_quad(amax);
        if (place < 0) return;
        const fp8::Scale scale(amax);
        uint32_t codes[kLaneColumns / 4];
#pragma unroll
        for (int i = 0; i < kLaneColumns / 4; ++i) {
            codes[i] = fp8::codes_of(packed[2 * i], packed[2 * i + 1], scale.inverse);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) sm90::store_global_8_if(p.out + at + i * kRunStride, codes[2 * i], codes[2 * i + 1], true);
        if (threadIdx.x % 4 == 0) p.out_scales[scale_at] = scale.scale;
    }
};

}  // namespace oxmoe
