// The Hopper grouped GEMM with packed NVFP4 weights (nvfp4_packed.cuh) and bf16 tokens, which may be NVFP4's numbers.
#pragma once
#include "../common/nvfp4_packed.cuh"
#include "grouped_gemm_packed_sm90.cuh"

namespace oxmoe {

template <bool Gated, int MaxTokens, int Consumers, int Stages, int Blocks>
using GroupedGemmNvfp4Sm90 = GroupedGemmPackedSm90<nvfp4::Form, Gated, MaxTokens, Consumers, Stages, Blocks>;

}  // namespace oxmoe
