// Grouped GEMM for Hopper with e4m3 weights and tokens and block scales, bf16 out, for tiles of few tokens:
//   out[place] = activation(sum over blocks of 128 K: weight_scale token_scale (w . x of the block) + bias[expert(place)])
// with each sum multiplied by the scale of its weight row before the bias, where rows have one.
//
// GroupedGemmSm90's frame: weights are wgmma's A, tokens its N, and 128 e4m3 are a row of the swizzle as 64 bf16 are. `p.k`
// counts pairs of elements, so that its schedule, copies and tensor map serve as they are.
//
// A block's product is added to fp32 sums times the scales of its rows and tokens (wgmma keeps 14 bits, and scales change from
// block to block). The scales come with the stage.
//
// Needs k % 128 == 0, rows % 128 == 0 (gated: out_columns % 128 == 0), 16-byte aligned x, weights and out.
#pragma once
#include <cstdint>
#include <cuda.h>

#include "../common/wgmma_fp8.cuh"
#include "grouped_gemm_sm90.cuh"

namespace oxmoe {

template <bool Gated, int MaxTokens, int Consumers, int Stages>
struct GroupedGemmFp8Sm90 {
    using Base = GroupedGemmSm90<__nv_bfloat16, Gated, MaxTokens, 1, Consumers, Stages>;
    static_assert(MaxTokens <= 64, "a gathering thread copies one token's scale");

    static constexpr int kThreads = Base::kThreads;
    static constexpr int kUnitSlots = Base::kUnitSlots;
    static constexpr int kReaders = 128;  // arrivals of a warpgroup that free a stage
    static constexpr int kScaleRows = 128;

    struct alignas(128) Shared {
        struct {
            uint8_t tokens[Base::kTokenBytes], weights[Base::kWeightBytes];
        } stage[Stages];
        uint8_t staging[Consumers][2 * Base::kStagingBytes];
        float token_scales[Stages][MaxTokens];
        float weight_scales[Stages][Consumers][2];  // of the two halves of a consumer's slices
        uint32_t source[kUnitSlots][MaxTokens];     // where a token's row of x starts, in 16-byte units
        WorkUnit unit[kUnitSlots];
        uint64_t full[Stages], empty[Stages], unit_full[kUnitSlots], unit_empty[kUnitSlots], fetch_next;
    };
    static constexpr int kSharedBytes = sizeof(Shared);
    // 228 KB an SM, 1 KB of it the system's for each CTA; and registers.
    static constexpr int kCtasByShared = 228 * 1024 / (kSharedBytes + 1024);
    static constexpr int kCtasByRegisters = MaxTokens > 32 ? 512 / kThreads : 1152 / kThreads;
    static constexpr int kCtas = kCtasByShared < kCtasByRegisters ? kCtasByShared : kCtasByRegisters;

    static __device__ __forceinline__ void run(const CUtensorMap& weights, const GroupedGemmParams& p) {
        extern __shared__ __align__(1024) uint8_t dynamic_shared[];
        Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared);
        if (threadIdx.x == 0) {
            Base::init_barriers(shared, kReaders * Consumers);
            sm90::prefetch_tensor_map(&weights);
        }
        __syncthreads();
        // NOTE: with an older schedule only x is in flight, and only the gathering warps wait.
        if (!p.schedule_is_older) pdl::wait();
        const int warp = threadIdx.x / 32;
        if (warp == 0)
            copy_weights(weights, p, shared);
        else if (warp == 1)
            Base::schedule(p, shared);
        else if (warp < 4)
            gather(p, shared);
        else
            consume(p, shared);
    }

private:
    // ---- weights: one thread, one box a stage ----

    static __device__ __forceinline__ void copy_weights(const CUtensorMap& weights, const GroupedGemmParams& p, Shared& shared) {
        if (threadIdx.x != 0) return;
        // NOTE: as late as the latency allows: a CTA that takes a unit early holds work back from idle ones.
        const int k_blocks = Base::k_blocks(p), fetch_block = max(0, k_blocks - Base::kFetchLead);
        RingPosition<kUnitSlots> units;
        RingPosition<Stages> ring;
        for (;; units.advance()) {
            sm90::barrier_wait(&shared.unit_full[units.slot], units.parity);
            const WorkUnit work = shared.unit[units.slot];
            sm90::barrier_arrive(&shared.unit_empty[units.slot]);
            if (work.expert < 0) break;
#pragma unroll 1
            for (int block = 0; block < k_blocks; ++block, ring.advance()) {
                if (block == fetch_block) sm90::barrier_arrive(&shared.fetch_next);
                sm90::barrier_wait(&shared.empty[ring.slot], ring.parity ^ 1);
                sm90::barrier_arrive_expect(&shared.full[ring.slot], Base::kWeightBytes);
                sm90::copy_tensor_5d(shared.stage[ring.slot].weights, &weights,
                                     {block * Base::kBlockK, 0, 0, work.row_block * (Base::kRows / 16), work.expert},
                                     &shared.full[ring.slot]);
            }
        }
    }

    // ---- tokens and scales: 8 neighbouring threads copy 128 bytes of a row, each thread a scale; columns of the tile without
    // a token keep old bytes ----

    static __device__ __forceinline__ void gather(const GroupedGemmParams& p, Shared& shared) {
        constexpr int kPassRows = Base::kGatherThreads / 8, kPasses = MaxTokens / kPassRows;
        const int thread = threadIdx.x % Base::kGatherThreads, chunk = thread % 8, first = thread / 8;
        const uint32_t swizzled = first * 128 + ((chunk ^ first) * 16);
        const int k_blocks = Base::k_blocks(p), scale_blocks = p.rows / kScaleRows;
        const float* weight_scales = reinterpret_cast<const float*>(p.block_scales);
        RingPosition<kUnitSlots> units;
        RingPosition<Stages> ring;
        pdl::wait();
        pdl::launch_dependents();
        for (;; units.advance()) {
            sm90::barrier_wait(&shared.unit_full[units.slot], units.parity);
            const WorkUnit work = shared.unit[units.slot];
            if (work.expert < 0) break;
            const uint32_t* sources = shared.source[units.slot];
            uint32_t source[kPasses];
#pragma unroll
            for (int i = 0; i < kPasses; ++i) source[i] = sources[first + i * kPassRows];
            // A row of x has 8 vectors a block, and one scale.
            const float* token_scale = p.x_scales + (thread < work.count ? sources[thread] / 8 : 0);
            const int row_tile = work.row_block * Consumers + thread / 2 % Consumers;
            const int row = Gated ? thread % 2 * p.out_columns + row_tile * 32 : row_tile * 64;
            const int scale_block = work.expert * scale_blocks + min(row / kScaleRows, scale_blocks - 1);
            const float* weight_scale = weight_scales + size_t(scale_block) * k_blocks;
#pragma unroll 1
            for (int block = 0; block < k_blocks; ++block, ring.advance()) {
                sm90::barrier_wait(&shared.empty[ring.slot], ring.parity ^ 1);
                const uint4* x = reinterpret_cast<const uint4*>(p.x) + block * 8 + chunk;
                const uint32_t tokens = sm90::shared_address(shared.stage[ring.slot].tokens) + swizzled;
#pragma unroll
                for (int i = 0; i < kPasses; ++i) {
                    if (first + i * kPassRows < work.count)
                        sm90::copy_16_async(tokens + i * kPassRows * 128, x + source[i], true);
                }
                if (thread < work.count) sm90::copy_4_async(&shared.token_scales[ring.slot][thread], token_scale + block);
                if (thread < 2 * Consumers)
                    sm90::copy_4_async(&shared.weight_scales[ring.slot][0][0] + thread, weight_scale + block);
                sm90::copy_async_arrive(&shared.full[ring.slot]);
            }
            sm90::barrier_arrive(&shared.unit_empty[units.slot]);
        }
    }

    // ---- consumers ----

    static __device__ __forceinline__ void consume(const GroupedGemmParams& p, Shared& shared) {
        RingPosition<kUnitSlots> units;
        RingPosition<Stages> ring;
        uint32_t staging = 0;
        for (;; units.advance()) {
            sm90::barrier_wait(&shared.unit_full[units.slot], units.parity);
            WorkUnit work = shared.unit[units.slot];
            sm90::barrier_arrive(&shared.unit_empty[units.slot]);
            // The same in all lanes, but ptxas must know: then loops and descriptors live in uniform registers.
            work.expert = __shfl_sync(0xFFFFFFFF, work.expert, 0);
            work.count = __shfl_sync(0xFFFFFFFF, work.count, 0);
            work.row_block = __shfl_sync(0xFFFFFFFF, work.row_block, 0);
            if (work.expert < 0) break;
            typename Base::Biases bias;
            Base::load_biases(work, p, bias);
            float sums[1][MaxTokens / 2];
#pragma unroll
            for (int i = 0; i < MaxTokens / 2; ++i) asm volatile("mov.b32 %0, 0;" : "=f"(sums[0][i]));
            multiply_at_width<16, MaxTokens>(work.count, Base::k_blocks(p), sums[0], shared, ring);
            if (p.expert_scales) multiply_rows(work, p, sums[0]);
            const bool activated = Base::prepare_sums(work, sums, bias, p);
            if (!Gated || activated)
                Base::template store<true>(work, sums, p, shared, staging);
            else
                Base::template store<false>(work, sums, p, shared, staging);
        }
    }

    // By the scales of weight rows.
    static __device__ __forceinline__ void multiply_rows(const WorkUnit& work, const GroupedGemmParams& p,
                                                         float (&sums)[MaxTokens / 2]) {
        const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
        const int row_tile = work.row_block * Consumers + threadIdx.x / 128 - 1;
        if ((row_tile * 4 + warp) * 16 >= p.rows) return;
        float scales[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = Base::template weight_row<false>(p, row_tile, warp, half, lane / 4);
            scales[half] = p.expert_scales[size_t(work.expert) * p.rows + row];
        }
#pragma unroll
        for (int i = 0; i < MaxTokens / 2; ++i) sums[i] *= scales[i / 2 % 2];
    }

    // The smallest width that holds the tile, by bisection.
    template <int Low, int High>
    static __device__ __forceinline__ void multiply_at_width(int count, int k_blocks, float* sums, Shared& shared,
                                                             RingPosition<Stages>& ring) {
        if constexpr (Low == High) {
            multiply<Low>(k_blocks, sums, shared, ring);
        } else {
            constexpr int kMiddle = (Low + High) / 32 * 16;
            if (count <= kMiddle)
                multiply_at_width<Low, kMiddle>(count, k_blocks, sums, shared, ring);
            else
                multiply_at_width<kMiddle + 16, High>(count, k_blocks, sums, shared, ring);
        }
    }

    template <int Width>
    static __device__ __forceinline__ void multiply(int k_blocks, float* sums, Shared& shared, RingPosition<Stages>& ring) {
        const int consumer = Base::consumer_index(), lane = threadIdx.x % 32;
        float product[Width / 2];
#pragma unroll
        for (int i = 0; i < Width / 2; ++i) asm volatile("mov.b32 %0, 0;" : "=f"(product[i]));
#pragma unroll 1
        for (int block = 0; block < k_blocks; ++block, ring.advance()) {
            sm90::barrier_wait(&shared.full[ring.slot], ring.parity);
            sm90::fence_async_proxy();
            const uint32_t tokens = sm90::shared_address(shared.stage[ring.slot].tokens);
            const uint32_t weights = sm90::shared_address(shared.stage[ring.slot].weights) + consumer * Base::kWeightTileBytes;
            sm90::wgmma_fence();
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                sm90::WgmmaE4m3<Width>::multiply(product, sm90::descriptor_128b(weights, i * 32),
                                                 sm90::descriptor_128b(tokens, i * 32), i > 0);
            }
            sm90::wgmma_commit();
            const float2 weight = *reinterpret_cast<const float2*>(shared.weight_scales[ring.slot][consumer]);
            float2 token[Width / 8];
#pragma unroll
            for (int j = 0; j < Width / 8; ++j) {
                token[j] = *reinterpret_cast<const float2*>(&shared.token_scales[ring.slot][8 * j + lane % 4 * 2]);
            }
            sm90::wgmma_wait<0>();
            // NOTE: by every lane, which has read scales: ptxas takes the warp for converged and drops a __syncwarp.
            sm90::barrier_arrive(&shared.empty[ring.slot]);
#pragma unroll
            for (int j = 0; j < Width / 8; ++j) {
                sums[4 * j] = __fmaf_rn(product[4 * j], __fmul_rn(token[j].x, weight.x), sums[4 * j]);
                sums[4 * j + 1] = __fmaf_rn(product[4 * j + 1], __fmul_rn(token[j].y, weight.x), sums[4 * j + 1]);
                sums[4 * j + 2] = __fmaf_rn(product[4 * j + 2], __fmul_rn(token[j].x, weight.y), sums[4 * j + 2]);
                sums[4 * j + 3] = __fmaf_rn(product[4 * j + 3], __fmul_rn(token[j].y, weight.y), sums[4 * j + 3]);
            }
        }
    }
};

}  // namespace oxmoe
