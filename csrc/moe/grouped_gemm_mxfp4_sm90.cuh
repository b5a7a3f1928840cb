// The Hopper grouped GEMM with packed MXFP4 weights (mxfp4.cuh) and bf16 tokens.
#pragma once
#include "../common/mxfp4.cuh"
#include "grouped_gemm_packed_sm90.cuh"

namespace oxmoe {

template <bool Gated, int MaxTokens, int Consumers, int Stages, int Blocks>
using GroupedGemmMxfp4Sm90 = GroupedGemmPackedSm90<mxfp4::Form, Gated, MaxTokens, Consumers, Stages, Blocks>;

}  // namespace oxmoe
