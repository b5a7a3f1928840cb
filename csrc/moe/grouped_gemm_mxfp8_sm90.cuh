// The Hopper grouped GEMM with packed MXFP8 weights (mxfp8.cuh) and tokens that are MXFP8 numbers in bf16. Outputs of an
// activation are rounded to such numbers too.
#pragma once
#include "../common/mxfp8.cuh"
#include "grouped_gemm_packed_sm90.cuh"

namespace oxmoe {

template <bool Gated, int MaxTokens, int Consumers, int Stages, int Blocks>
using GroupedGemmMxfp8Sm90 = GroupedGemmPackedSm90<mxfp8::Form, Gated, MaxTokens, Consumers, Stages, Blocks>;

}  // namespace oxmoe
