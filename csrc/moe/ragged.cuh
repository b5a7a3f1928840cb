// The tables of a sorted batch that triton_kernels reads. They have gate weights in expert order and, for blocks of 16, 32, 64
// and 128 rows, the first block of each expert and the list of blocks. Every CTA scans the experts for itself; the grid shares
// the writing.
#pragma once
#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../common/pdl.cuh"
#include "oxmoe/src/params/moe.rs.h"

namespace oxmoe {

struct Ragged {
    static constexpr int kThreads = 1024, kSharedBytes = 0, kSizes = 4, kSmallestLog2 = 4;
    static constexpr int kMaxExperts = 544;  // MAX_EXPERTS + MAX_TOP_K of src/moe/plan/routing.rs

    static __device__ __forceinline__ void run(const RaggedParams& p) {
        __shared__ int first[kSizes][kMaxExperts + 1];
        __shared__ uint64_t warp_sums[2][32];
        const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, experts = p.experts;
        const int id = blockIdx.x * kThreads + thread, ids = gridDim.x * kThreads;
        pdl::launch_dependents();
        pdl::wait();

        // This is an exclusive scan of the blocks of each size, with two sizes in a word.
        const int rows = thread < experts ? p.histogram[thread] : 0;
        uint64_t blocks[2], sum[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int small = (rows + (16 << 2 * i) - 1) >> (kSmallestLog2 + 2 * i);
            const int large = (rows + (32 << 2 * i) - 1) >> (kSmallestLog2 + 2 * i + 1);
            blocks[i] = sum[i] = uint64_t(large) << 32 | uint32_t(small);
#pragma unroll
            for (int d = 1; d < 32; d *= 2) {
                const uint64_t lower = __shfl_up_sync(~0u, sum[i], d);
                if (lane >= d) sum[i] += lower;
            }
            if (lane == 31) warp_sums[i][warp] = sum[i];
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            for (int w = 0; w < warp; ++w) sum[i] += warp_sums[i][w];
            if (thread <= experts) {
                // Thread `experts` has no rows of its own: its sum is the total.
                const uint64_t before = sum[i] - blocks[i];
                first[2 * i][thread] = int(uint32_t(before)), first[2 * i + 1][thread] = int(before >> 32);
            }
        }
        __syncthreads();

        for (int i = 0; i < kSizes; ++i) {
            int* schedule = p.block_schedule + i * p.max_blocks;
            if (blockIdx.x == 0 && thread <= experts) p.block_offsets[i * (experts + 1) + thread] = first[i][thread];
            for (int e = id / 8; e < experts; e += ids / 8) {
                const int start = first[i][e], count = first[i][e + 1] - start;
                for (int b = id % 8; b < count; b += 8) schedule[start + b] = b << 16 | e;
            }
            for (int b = first[i][experts] + id; b < p.max_blocks; b += ids) schedule[b] = -1;
        }
        for (int place = id; place < p.slots; place += ids) {
            const int slot = p.slot_of_place[place];
            const float weight = slot < 0 ? 0.0f : p.slot_weights[slot];
            switch (p.gate_dtype) {
                case Dtype::F32:
                    reinterpret_cast<float*>(p.gate)[place] = weight;
                    break;
                case Dtype::F16:
                    reinterpret_cast<__half*>(p.gate)[place] = __float2half(weight);
                    break;
                case Dtype::Bf16:
                    reinterpret_cast<__nv_bfloat16*>(p.gate)[place] = __float2bfloat16(weight);
                    break;
            }
        }
    }
};

}  // namespace oxmoe
