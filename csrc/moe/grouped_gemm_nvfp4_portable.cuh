// grouped_gemm_packed_portable.cuh of NVFP4 weights (common/nvfp4_packed.cuh); tokens are bf16, or NVFP4 numbers in bf16.
#pragma once
#include "../common/nvfp4_packed.cuh"
#include "grouped_gemm_packed_portable.cuh"

namespace oxmoe {

struct Nvfp4PortableForm {
    static constexpr int kVectors = 1;
    static constexpr int kFewestGroups = 1;  // one tile serves every batch
    static constexpr int kScaleWords = 2;
    static constexpr bool kFactorsOfHalves = true;

    static __device__ __forceinline__ uint32_t multipliers(const uint32_t (&scales)[2], int step) {
        return nvfp4::Form::multipliers({scales[0], scales[1]}, step);
    }
    static __device__ __forceinline__ void decode(const uint32_t (&codes)[4], int step, uint32_t multipliers, uint32_t (&a)[4]) {
        mxfp4::decode(codes[step], multipliers, a);
    }
};

template <bool Gated, int Tokens, int Rows, int Warps, int Stages>
struct GroupedGemmNvfp4Portable : GroupedGemmPackedPortable<Nvfp4PortableForm, Gated, Tokens, Rows, Warps, Stages, 8> {};

}  // namespace oxmoe
