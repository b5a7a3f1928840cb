// The GEMM of grouped_gemm_packed_portable.cuh for MXFP4 weights (common/mxfp4.cuh).
#pragma once
#include "grouped_gemm_packed_portable.cuh"

namespace oxmoe {

template <int Tokens>
struct Mxfp4PortableForm : PortableForm<mxfp4::Form> {
    static constexpr int kFewestGroups = Tokens == 16 ? 1 : 2;  // with one group a decoded weight serves half of the mma

    static __device__ __forceinline__ void decode(const uint32_t (&codes)[4], int step, uint32_t multipliers, uint32_t (&a)[4]) {
        mxfp4::decode(codes[step], multipliers, a);
    }
};

template <bool Gated, int Tokens, int Rows, int Warps, int Stages, int Vector>
struct GroupedGemmMxfp4Portable
    : GroupedGemmPackedPortable<Mxfp4PortableForm<Tokens>, Gated, Tokens, Rows, Warps, Stages, Vector> {};

}  // namespace oxmoe
