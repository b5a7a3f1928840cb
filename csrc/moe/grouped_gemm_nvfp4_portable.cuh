// The GEMM of grouped_gemm_packed_portable.cuh for NVFP4 weights (common/nvfp4_packed.cuh); tokens are bf16, or NVFP4 numbers in
// bf16.
#pragma once
#include "../common/nvfp4_packed.cuh"
#include "grouped_gemm_packed_portable.cuh"

namespace oxmoe {

struct Nvfp4PortableForm : PortableForm<nvfp4::Form> {
    static constexpr int kFewestGroups = 1;  // one tile serves every batch

    static __device__ __forceinline__ void decode(const uint32_t (&codes)[4], int step, uint32_t multipliers, uint32_t (&a)[4]) {
        mxfp4::decode(codes[step], multipliers, a);
    }
};

template <bool Gated, int Tokens, int Rows, int Warps, int Stages>
struct GroupedGemmNvfp4Portable : GroupedGemmPackedPortable<Nvfp4PortableForm, Gated, Tokens, Rows, Warps, Stages, 8> {};

}  // namespace oxmoe
