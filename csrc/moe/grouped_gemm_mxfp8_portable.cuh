// The GEMM of grouped_gemm_packed_portable.cuh for MXFP8 weights (common/mxfp8.cuh) and tokens that are MXFP8 numbers in bf16.
#pragma once
#include "../common/mxfp8.cuh"
#include "grouped_gemm_packed_portable.cuh"

namespace oxmoe {

struct Mxfp8PortableForm : PortableForm<mxfp8::Form> {
    static constexpr int kFewestGroups = 1;  // one tile serves every batch

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
