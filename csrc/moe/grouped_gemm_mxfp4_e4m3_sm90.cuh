// Grouped GEMM for Hopper with packed MXFP4 weights, and e4m3 tokens with one scale for each row: out[place] =
// activation(scale[row(place)] * (weights[expert(place)] x[row(place)]) + bias[expert(place)]), bf16 out. Weights are decoded to
// e4m3 in registers, and are wgmma's A. The sums are the tensor core's, which keeps 14 bits, and are not promoted.
//
// Stages, copies and schedule are those of grouped_gemm_packed_sm90.cuh. A warp decodes 64 x 64 weights in 40 instructions, three
// of ten on the multiplier's pipe. One wgmma takes twice the K in the same time, so this kernel serves few tokens too.
//
// Needs k % 32 == 0 (k counts pairs of columns), rows % 16 == 0 (gated: out_columns % 8 == 0), 16-byte aligned x, weights and
// out.
#pragma once
#include <cstdint>

#include "../common/mxfp4.cuh"
#include "../common/mxfp4_e4m3.cuh"
#include "packed_pipeline_sm90.cuh"

namespace oxmoe {

template <bool Gated, int MaxTokens, int Consumers, int Stages, int Blocks>
struct GroupedGemmMxfp4E4m3Sm90 {
    using Pipeline = PackedPipelineSm90<mxfp4::Form, Gated, MaxTokens, Consumers, Stages, Blocks, true>;
    using Base = typename Pipeline::Base;
    using Shared = typename Pipeline::Shared;
    using Stage = typename Pipeline::Stage;

    static constexpr int kThreads = Base::kThreads;
    static constexpr int kUnitSlots = Base::kUnitSlots;
    static constexpr int kSharedBytes = sizeof(Shared);
    static constexpr int kCtas = Pipeline::kCtas;
    static constexpr int kSteps = Pipeline::kSteps;  // steps of 32 K

    static __device__ __forceinline__ void run(const GroupedGemmParams& p) {
        extern __shared__ __align__(1024) uint8_t dynamic_shared[];
        Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared);
        if (threadIdx.x == 0) Base::init_barriers(shared, 128 * Consumers);
        __syncthreads();
        // NOTE: with an older schedule only x is in flight, and only the gathering warps wait.
        if (!p.schedule_is_older) pdl::wait();
        if (threadIdx.x < 128) {
            if constexpr (Pipeline::kMovesRegisters) sm90::registers_decrease<Pipeline::kProducerRegisters>();
            const int warp = threadIdx.x / 32;
            if (warp == 0) {
                Pipeline::copy_weights(p, shared);
            } else if (warp == 1) {
                Base::template schedule<Pipeline::kByExpert, Pipeline::kSplitsLast>(p, shared);
            } else {
                RingPosition<Pipeline::kScaleSlots> slots;
                Pipeline::gather(p, shared, [&](const WorkUnit& work, const uint32_t* sources, int thread) {
                    const uint32_t row_chunks = p.k / 8;
#pragma unroll 1
                    for (int n = thread; n < work.count; n += Base::kGatherThreads) {
                        sm90::copy_4_async(&shared.row_scale[slots.slot][n], p.row_scales + sources[n] / row_chunks);
                    }
                    slots.advance();
                });
            }
        } else {
            if constexpr (Pipeline::kMovesRegisters) sm90::registers_increase<Pipeline::kConsumerRegisters>();
            consume(p, shared);
        }
    }

private:
    static __device__ __forceinline__ void consume(const GroupedGemmParams& p, Shared& shared) {
        RingPosition<kUnitSlots> units;
        RingPosition<Pipeline::kScaleSlots> scales;
        RingPosition<Stages> ring;
        uint32_t staging = 0;
        const int k_blocks = Pipeline::k_blocks(p);
        for (WorkUnit work; take_uniform_unit(shared, units, work); units.advance(), scales.advance()) {
            if (!Base::has_rows(p, work, Base::consumer_index())) {
                for (int block = 0; block < k_blocks; block += Blocks, ring.advance()) {
                    sm90::barrier_wait(&shared.full[ring.slot], ring.parity);
                    sm90::barrier_arrive(&shared.empty[ring.slot]);
                }
                continue;
            }
            work.row_block = Base::row_block(work);
            typename Base::Biases bias;
            Base::template load_biases<true>(work, p, bias);
            const float expert_scale = p.expert_scales[work.expert];
            float sums[1][MaxTokens / 2];
#pragma unroll
            for (int i = 0; i < MaxTokens / 2; ++i) asm volatile("mov.b32 %0, 0;" : "=f"(sums[0][i]));
            Pipeline::at_width(work.count,
                               [&](auto width) { multiply<decltype(width)::value>(k_blocks, sums[0], shared, ring); });
            scale_sums(work.count, expert_scale, shared.row_scale[scales.slot], sums[0]);
            const bool activated = Base::template prepare_sums<true>(work, sums, bias, p);
            if (!Gated || activated)
                Base::template store<true>(work, sums, p, shared, staging);
            else
                Base::template store<false>(work, sums, p, shared, staging);
        }
    }

    static __device__ __forceinline__ void scale_sums(int count, float expert_scale, const float* row_scales, float* sums) {
        const float2* mine = reinterpret_cast<const float2*>(row_scales) + threadIdx.x % 4;
#pragma unroll
        for (int n = 0; n < MaxTokens / 8; ++n) {
            if (n * 8 >= count) break;
            const float2 scale = mine[n * 4];
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[4 * n + i] *= (i % 2 ? scale.y : scale.x) * expert_scale;
        }
    }

    // NOTE: every lane arrives to free a stage. Beside wgmma ptxas takes a warp for converged, and drops the instruction that
    // would hold one lane's arrival back until the others have read.
    template <int Width>
    static __device__ __forceinline__ void multiply(int k_blocks, float* sums, Shared& shared, RingPosition<Stages>& ring) {
        const int consumer = Base::consumer_index();
        int previous = 0, block = 0;
#pragma unroll 1
        for (; block + Blocks <= k_blocks; block += Blocks, ring.advance()) {
            sm90::barrier_wait(&shared.full[ring.slot], ring.parity);
            sm90::fence_async_proxy();
            multiply_blocks<Width, Blocks>(sums, shared.stage[ring.slot], consumer, 0,
                                           [&] { sm90::barrier_arrive_if(&shared.empty[previous], block > 0); });
            previous = ring.slot;
        }
        sm90::wgmma_wait<0>();
        sm90::barrier_arrive_if(&shared.empty[previous], block > 0);
        multiply_rest<Width>(k_blocks - block, sums, shared, ring);
    }

    // Multiplies the rest of K: fewer blocks than a stage has.
    // NOTE: nothing is in flight here: a second path beside one with A registers in flight makes ptxas serialize (C7513).
    template <int Width>
    static __device__ __forceinline__ void multiply_rest(int blocks, float* sums, Shared& shared, RingPosition<Stages>& ring) {
        if (blocks == 0) return;
        const int consumer = Base::consumer_index();
        sm90::barrier_wait(&shared.full[ring.slot], ring.parity);
        sm90::fence_async_proxy();
#pragma unroll 1
        for (int i = 0; i < blocks; ++i) {
            multiply_blocks<Width, 1>(sums, shared.stage[ring.slot], consumer, i, [] {});
            sm90::wgmma_wait<0>();
        }
        sm90::barrier_arrive(&shared.empty[ring.slot]);
        ring.advance();
    }

    // Multiplies `Run` blocks of a stage from `first` on. While the tensor cores work on a group, the next group is decoded, and
    // the next block is loaded from shared memory. On return one group is in flight. `earlier_done` is called once everything
    // older than this call has finished.
    template <int Width, int Run, typename F>
    static __device__ __forceinline__ void multiply_blocks(float* sums, const Stage& stage, int consumer, int first,
                                                           F earlier_done) {
        const uint8_t* my_codes = stage.codes[consumer] + first * mxfp4::kCodeBytes + threadIdx.x % 128 * 16;
        const uint8_t* my_scales = stage.scales[consumer] + first * mxfp4::kScaleBytes + threadIdx.x % 128 / 4 * 4;
        // A block of weights covers half a row of tokens in a stage.
        const uint32_t tokens = sm90::shared_address(stage.tokens) + first / 2 * Base::kTokenBytes + first % 2 * 64;
        uint4 codes = *reinterpret_cast<const uint4*>(my_codes);
        uint32_t scales = *reinterpret_cast<const uint32_t*>(my_scales);
#pragma unroll
        for (int block = 0; block < Run; ++block) {
            const uint4 my_words = codes;
            const uint32_t my_levels = scales;
            if (block + 1 < Run) {
                codes = *reinterpret_cast<const uint4*>(my_codes + (block + 1) * mxfp4::kCodeBytes);
                scales = *reinterpret_cast<const uint32_t*>(my_scales + (block + 1) * mxfp4::kScaleBytes);
            }
#pragma unroll
            for (int step = 0; step < 2; step += kSteps) {
                uint32_t a[kSteps][4];
#pragma unroll
                for (int i = 0; i < kSteps; ++i) mxfp4_e4m3::decode(my_words, my_levels, step + i, a[i]);
                sm90::wgmma_fence();
#pragma unroll
                for (int i = 0; i < kSteps; ++i) {
                    const uint32_t offset = block / 2 * Base::kTokenBytes + block % 2 * 64 + (step + i) * 32;
                    sm90::WgmmaE4m3FromRegisters<Width>::multiply(sums, a[i], sm90::descriptor_128b(tokens, offset));
                }
                sm90::wgmma_commit();
                sm90::wgmma_wait<1>();
                if (block + step == 0) earlier_done();
            }
        }
    }
};

}  // namespace oxmoe
