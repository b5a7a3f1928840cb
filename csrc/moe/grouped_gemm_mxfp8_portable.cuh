// grouped_gemm_packed_portable.cuh of MXFP8 weights (common/mxfp8.cuh) and of tokens that are MXFP8 numbers in bf16.
#pragma once
#include "../common/mxfp8.cuh"
#include "grouped_gemm_packed_portable.cuh"

namespace oxmoe {

struct Mxfp8PortableForm {
    static constexpr int kVectors = 2;
    static constexpr int kFewestGroups = 1;  // one tile serves every batch
    static constexpr int kScaleWords = 1;
    static constexpr bool kFactorsOfHalves = false;

    static __device__ __forceinline__ uint32_t multipliers(const uint32_t (&scales)[1], int step) {
        return mxfp4::unpack_scales(scales[0], step / 2);
    }

    static __device__ __forceinline__ void decode(const uint32_t (&codes)[4], int step, uint32_t multipliers, uint32_t (&a)[4]) {
        uint32_t bits[4];
        mxfp8::take(codes[step % 2 * 2], bits[0], bits[1]);
        mxfp8::take(codes[step % 2 * 2 + 1], bits[2], bits[3]);
        mxfp4::scale(bits, multipliers, a);
    }
};

template <bool Gated, int Tokens, int Rows, int Warps, int Stages>
struct GroupedGemmMxfp8Portable : GroupedGemmPackedPortable<Mxfp8PortableForm, Gated, Tokens, Rows, Warps, Stages, 8> {};

}  // namespace oxmoe
