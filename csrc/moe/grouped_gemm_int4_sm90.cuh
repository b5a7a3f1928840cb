// The Hopper grouped GEMM with packed int4 weights (common/int4.cuh) and bf16 tokens.
#pragma once
#include "../common/int4.cuh"
#include "grouped_gemm_packed_sm90.cuh"

namespace oxmoe {

template <bool Gated, bool Zeros, int MaxTokens, int Consumers, int Stages, int Blocks>
using GroupedGemmInt4Sm90 = GroupedGemmPackedSm90<int4::Form<Zeros>, Gated, MaxTokens, Consumers, Stages, Blocks>;

}  // namespace oxmoe
