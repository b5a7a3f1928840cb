// Rounds rows of bf16 to the bf16 numbers that MXFP8 has for them, which moe/grouped_gemm_packed_sm90.cuh and
// grouped_gemm_packed_portable.cuh read. src/cpu/mxfp8.rs is the same on the host.
#pragma once
#include <cstdint>

#include "../common/mxfp8.cuh"
#include "../common/pdl.cuh"
#include "oxmoe/src/params/quant.rs.h"
#include "walk.cuh"

namespace oxmoe {

// A quad takes a group of 32 columns. Needs columns that are a multiple of 32, x and out aligned to 16 bytes, and no schedule.
// Grid: any.
struct RoundRowsMxfp8 : Cta<256> {
    static __device__ __forceinline__ void run(const QuantizeRowsParams& p) {
        pdl::run(p.x_is_older, [&] {
            const size_t vectors = size_t(p.rows) * p.columns / 8, stride = size_t(gridDim.x) * kThreads;
            const uint4* x = reinterpret_cast<const uint4*>(p.x);
            uint4* out = reinterpret_cast<uint4*>(p.out);
            // All lanes of a warp go on together.
            for (size_t i = size_t(blockIdx.x) * kThreads + threadIdx.x; i - threadIdx.x % 32 < vectors; i += stride) {
                const uint4 rounded = mxfp8::round_group(i < vectors ? __ldcg(x + i) : uint4{});
                if (i < vectors) out[i] = rounded;
            }
        });
    }
};

}  // namespace oxmoe
