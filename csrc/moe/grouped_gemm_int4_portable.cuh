// The GEMM of grouped_gemm_packed_portable.cuh for int4 weights (common/int4.cuh) and bf16 tokens.
#pragma once
#include "../common/int4.cuh"
#include "grouped_gemm_packed_portable.cuh"

namespace oxmoe {

template <bool Zeros>
struct Int4PortableForm {
    using Packed = int4::Form<Zeros>;
    static constexpr int kVectors = 1, kScaleWords = Packed::kQuadScales / 4;
    static constexpr bool kFactorsOfHalves = Packed::kFactorsOfHalves;
    static constexpr int kFewestGroups = 1;  // one tile serves every batch

    static __device__ __forceinline__ int4::Multipliers multipliers(const uint32_t (&scales)[kScaleWords], int step) {
        typename Packed::Scales words;
#pragma unroll
        for (int i = 0; i < kScaleWords; ++i) words.words[i] = scales[i];
        return Packed::multipliers(words, step / Packed::kGroupSteps);
    }
    static __device__ __forceinline__ void decode(const uint32_t (&codes)[4], int step, const int4::Multipliers& multipliers,
                                                  uint32_t (&a)[4]) {
        Packed::decode_word(codes[step], multipliers, a);
    }
};

template <bool Gated, bool Zeros, int Tokens, int Rows, int Warps, int Stages>
struct GroupedGemmInt4Portable : GroupedGemmPackedPortable<Int4PortableForm<Zeros>, Gated, Tokens, Rows, Warps, Stages, 8> {};

}  // namespace oxmoe
