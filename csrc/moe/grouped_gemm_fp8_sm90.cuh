// Grouped GEMM for Hopper with e4m3 weights and tokens and block scales, bf16 out, for tiles of few tokens:
//   out[place] = activation(sum over blocks of 128 K: weight_scale token_scale (w . x of the block) + bias[expert(place)])
// If weight rows have scales, each sum is multiplied by the scale of its row before the bias.
//
// The frame is GroupedGemmSm90's: weights are wgmma's A, tokens its N, and 128 e4m3 are a row of the swizzle, like 64 bf16. `p.k`
// counts pairs of elements, so that the schedule, copies and tensor map serve unchanged.
//
// A block's product is added to fp32 sums times the scales of its rows and tokens (wgmma keeps 14 bits, and scales change from
// block to block). The scales come with the stage.
//
// With out_scales, which come with done, out is e4m3 with a scale for each 128 columns of a row. A unit then has all row blocks
// of 128 outputs, one after the other, and these outputs meet in shared memory.
//
// Needs k % 128 == 0, rows % 128 == 0 (gated: out_columns % 128 == 0), 16-byte aligned x, weights and out.
#pragma once
#include <cstdint>
#include <cuda.h>

#include "../common/fp8.cuh"
#include "../common/wgmma_fp8.cuh"
#include "../gemm/multiply.cuh"
#include "../gemm/pipeline.cuh"
#include "../gemm/promote.cuh"
#include "grouped_gemm_sm90.cuh"

namespace oxmoe {

template <bool Gated, int MaxTokens, int Consumers, int Stages>
struct GroupedGemmFp8Sm90 {
    using Base = GroupedGemmSm90<__nv_bfloat16, Gated, MaxTokens, 1, Consumers, Stages>;
    using Overlap = typename Base::Overlap;
    static_assert(MaxTokens <= 64, "a gathering thread copies one token's scale");

    static constexpr int kThreads = Base::kThreads;
    static constexpr int kUnitSlots = Base::kUnitSlots;
    static constexpr int kReaders = 128;  // arrivals of a warpgroup that free a stage
    static constexpr int kScaleRows = 128;
    static constexpr int kGroup = 128, kPasses = kGroup * (Gated ? 2 : 1) / Base::kRows;  // row blocks that make 128 outputs
    static constexpr int kStagingBytes = Consumers * 2 * Base::kStagingBytes, kGroupBytes = 2 * kGroup;  // bytes of bf16
    // NOTE: one consumer's staging has no room for a group, and more staging would cost a CTA.
    static constexpr bool kQuantises = MaxTokens * kGroupBytes <= kStagingBytes;

    struct Buffers {
        struct {
            uint8_t tokens[Base::kTokenBytes], weights[Base::kWeightBytes];
        } stage[Stages];
        uint8_t staging[Consumers][2 * Base::kStagingBytes];  // or the outputs of a group, one row for each token
        float token_scales[Stages][MaxTokens];
        float weight_scales[Stages][Consumers][2];  // scales of the two halves of a consumer's slices
    };
    using Shared = pipeline::Shared<Buffers, WorkUnit, MaxTokens, Stages>;
    static constexpr int kSharedBytes = sizeof(Shared);
    // The limits are 228 KB of shared memory an SM, 1 KB of which the system takes for each CTA, and registers.
    static constexpr int kCtasByShared = 228 * 1024 / (kSharedBytes + 1024);
    static constexpr int kCtasByRegisters = MaxTokens > 32 ? 512 / kThreads : 1152 / kThreads;
    static constexpr int kCtas = kCtasByShared < kCtasByRegisters ? kCtasByShared : kCtasByRegisters;

    static __device__ __forceinline__ void run(const CUtensorMap& weights, const GroupedGemmParams& p) {
        extern __shared__ __align__(1024) uint8_t dynamic_shared[];
        Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared);
        if (threadIdx.x == 0) {
            Overlap::init_barriers(shared, 128 * Consumers);
            Base::init_barriers(shared, kReaders * Consumers);
            sm90::prefetch_tensor_map(&weights);
        }
        __syncthreads();
        // NOTE: with an older schedule only x is in flight, and only the warps that read it wait.
        if (!p.schedule_is_older) pdl::wait();
        const int warp = threadIdx.x / 32;
        if (warp == 0)
            copy_weights(weights, p, shared);
        else if (warp == 1)
            schedule(p, shared);
        else if (warp < 4)
            gather(p, shared);
        else
            consume(p, shared);
    }

private:
    static __device__ __forceinline__ bool quantises(const GroupedGemmParams& p) { return kQuantises && p.out_scales; }

    // Row blocks of a unit.
    static __device__ __forceinline__ int passes(const GroupedGemmParams& p) { return quantises(p) ? kPasses : 1; }

    static __device__ __forceinline__ void schedule(const GroupedGemmParams& p, Shared& shared) {
        if (p.done || p.awaited)
            Overlap::schedule(p, shared, passes(p));
        else
            Base::schedule(p, shared);
    }

    // ---- weights: one thread copies one box for each stage ----

    static __device__ __forceinline__ void copy_weights(const CUtensorMap& weights, const GroupedGemmParams& p, Shared& shared) {
        if (threadIdx.x != 0) return;
        // NOTE: this is as late as the latency allows: a CTA that takes a unit early holds work back from idle ones.
        const int k_blocks = Base::k_blocks(p), fetch_block = max(0, k_blocks - Base::kFetchLead);
        RingPosition<kUnitSlots> units;
        RingPosition<Stages> ring;
        for (WorkUnit work; take_unit(shared, units, work); units.advance()) {
            const int first = work.row_block * passes(p), last = first + passes(p) - 1;
#pragma unroll 1
            for (int row_block = first; row_block <= last; ++row_block) {
#pragma unroll 1
                for (int block = 0; block < k_blocks; ++block, ring.advance()) {
                    if (row_block == last && block == fetch_block) sm90::barrier_arrive(&shared.fetch_next);
                    uint64_t* full = pipeline::begin_stage(shared, ring, Base::kWeightBytes);
                    sm90::copy_tensor_5d(shared.stage[ring.slot].weights, &weights,
                                         {block * Base::kBlockK, 0, 0, row_block * (Base::kRows / 16), work.expert}, full);
                }
            }
        }
    }

    // ---- tokens and scales: 8 neighbouring threads copy 128 bytes of a row, and each thread copies a scale; columns of the tile
    // without a token keep old bytes ----

    static __device__ __forceinline__ void gather(const GroupedGemmParams& p, Shared& shared) {
        constexpr int kPassRows = Base::kGatherThreads / 8, kCopies = MaxTokens / kPassRows;
        const int thread = threadIdx.x % Base::kGatherThreads, chunk = thread % 8, first = thread / 8;
        const uint32_t swizzled = first * 128 + ((chunk ^ first) * 16);
        const int k_blocks = Base::k_blocks(p), scale_blocks = p.rows / kScaleRows;
        const float* weight_scales = reinterpret_cast<const float*>(p.block_scales);
        RingPosition<kUnitSlots> units;
        RingPosition<Stages> ring;
        Overlap::wait(p);
        pdl::launch_dependents();
        for (WorkUnit work; await_unit(shared, units, work); units.advance()) {
            const uint32_t* sources = shared.source[units.slot];
            uint32_t source[kCopies];
#pragma unroll
            for (int i = 0; i < kCopies; ++i) source[i] = sources[first + i * kPassRows];
            // A row of x has 8 vectors and one scale for each block.
            const float* token_scale = p.x_scales + (thread < work.count ? sources[thread] / 8 : 0);
            const int first_block = work.row_block * passes(p), end = first_block + passes(p);
#pragma unroll 1
            for (int row_block = first_block; row_block < end; ++row_block) {
                const int row_tile = row_block * Consumers + thread / 2 % Consumers;
                const int row = Gated ? thread % 2 * p.out_columns + row_tile * 32 : row_tile * 64;
                const int scale_block = work.expert * scale_blocks + min(row / kScaleRows, scale_blocks - 1);
                const float* weight_scale = weight_scales + size_t(scale_block) * k_blocks;
#pragma unroll 1
                for (int block = 0; block < k_blocks; ++block, ring.advance()) {
                    sm90::barrier_wait(&shared.empty[ring.slot], ring.parity ^ 1);
                    const uint4* x = reinterpret_cast<const uint4*>(p.x) + block * 8 + chunk;
                    const uint32_t tokens = sm90::shared_address(shared.stage[ring.slot].tokens) + swizzled;
#pragma unroll
                    for (int i = 0; i < kCopies; ++i) {
                        if (first + i * kPassRows < work.count)
                            sm90::copy_16_async(tokens + i * kPassRows * 128, x + source[i], true);
                    }
                    if (thread < work.count) sm90::copy_4_async(&shared.token_scales[ring.slot][thread], token_scale + block);
                    if (thread < 2 * Consumers)
                        sm90::copy_4_async(&shared.weight_scales[ring.slot][0][0] + thread, weight_scale + block);
                    sm90::copy_async_arrive(&shared.full[ring.slot]);
                }
            }
            sm90::barrier_arrive(&shared.unit_empty[units.slot]);
        }
    }

    // ---- consumers ----

    static __device__ __forceinline__ void consume(const GroupedGemmParams& p, Shared& shared) {
        RingPosition<kUnitSlots> units;
        RingPosition<Stages> ring;
        uint32_t staging = 0;
        for (WorkUnit work; take_uniform_unit(shared, units, work); units.advance()) {
            const int unit = work.row_block;
            // NOTE: this waits until all consumers have read their outputs of the previous unit from the shared staging.
            if (quantises(p)) sm90::named_barrier(kMeeting, 128 * Consumers);
#pragma unroll 1
            for (int pass = 0; pass < passes(p); ++pass) {
                work.row_block = unit * passes(p) + pass;
                typename Base::Biases bias;
                Base::load_biases(work, p, bias);
                float sums[1][MaxTokens / 2];
                clear(sums);
                multiply_at_width<16, MaxTokens>(work.count, Base::k_blocks(p), sums[0], shared, ring);
                if (p.expert_scales) multiply_rows(work, p, sums[0]);
                const bool activated = Base::prepare_sums(work, sums, bias, p);
                if (quantises(p)) {
                    const int first = pass * Consumers + Base::consumer_index();
                    if (!Gated || activated)
                        stage_outputs<true>(work, sums[0], first, p, shared);
                    else
                        stage_outputs<false>(work, sums[0], first, p, shared);
                } else if (!Gated || activated) {
                    Base::template store<true>(work, sums, p, shared, staging);
                } else {
                    Base::template store<false>(work, sums, p, shared, staging);
                }
            }
            if (quantises(p)) {
                sm90::named_barrier(kMeeting, 128 * Consumers);
                store_group(work, unit, p, shared);
                Overlap::stored(p, shared, units.slot);
            }
        }
    }

    // ---- outputs of a group as e4m3 ----

    static constexpr int kMeeting = 1 + Consumers;  // a named barrier of all consumers

    // The offset of 16 bytes of a token's outputs, swizzled.
    static __device__ __forceinline__ uint32_t staged(int token, int chunk) {
        return token * kGroupBytes + ((chunk ^ token % 8) * 16);
    }

    // `first` is the row tile's number in the group.
    template <bool Activated>
    static __device__ __forceinline__ void stage_outputs(const WorkUnit& work, const float (&sums)[MaxTokens / 2], int first,
                                                         const GroupedGemmParams& p, Shared& shared) {
        const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
        const SwigluFunction swiglu(p.activation);
        // Addresses for stmatrix: if gated, lane l % 16 addresses a token; otherwise lanes 8 to 15 and 24 to 31 address the
        // second half of the slice.
        const int token = Gated ? lane % 16 : lane / 16 * 8 + lane % 8;
        const int chunk = Gated ? first * 4 + warp : (first * 4 + warp) * 2 + lane / 8 % 2;
        const uint32_t to = sm90::shared_address(shared.staging) + staged(token, chunk);
#pragma unroll
        for (int n = 0; n < MaxTokens; n += 16) {
            if (n >= work.count) break;
            uint32_t packed[Gated ? 2 : 4];
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const float* d = &sums[n / 2 + 4 * j];
                if constexpr (!Gated) {
                    packed[2 * j] = pack<__nv_bfloat16>(d[0], d[1]);
                    packed[2 * j + 1] = pack<__nv_bfloat16>(d[2], d[3]);
                } else if constexpr (Activated) {
                    packed[j] = pack<__nv_bfloat16>(d[0], d[1]);
                } else {
                    packed[j] = pack<__nv_bfloat16>(swiglu(d[0], d[2]), swiglu(d[1], d[3]));
                }
            }
            sm90::store_tiles_turned(to + n * kGroupBytes, packed);
        }
    }

    // Stores a group. Four lanes take a token, each every fourth vector of eight of its outputs.
    static __device__ __forceinline__ void store_group(const WorkUnit& work, int group, const GroupedGemmParams& p,
                                                       Shared& shared) {
        const int thread = threadIdx.x - 128, quarter = thread % 4;
        const uint32_t from = sm90::shared_address(shared.staging);
#pragma unroll 1
        for (int first = 0; first < work.count; first += 32 * Consumers) {
            const int n = first + thread / 4;
            uint4 outputs[4];
            float amax = 0.f;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                outputs[i] = sm90::load_shared_16(from + staged(min(n, MaxTokens - 1), quarter + 4 * i));
                const uint32_t pairs[4] = {outputs[i].x, outputs[i].y, outputs[i].z, outputs[i].w};
#pragma unroll
                for (uint32_t pair : pairs) fp8::grow(amax, pair);
            }
            amax = fp8::of_quad(amax);
            const fp8::Scale scale(amax);
            const size_t place = work.first + n;
            uint8_t* out = p.out + place * p.out_columns + group * kGroup + quarter * 8;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                sm90::store_global_8_if(out + i * 32, fp8::codes_of(outputs[i].x, outputs[i].y, scale.inverse),
                                        fp8::codes_of(outputs[i].z, outputs[i].w, scale.inverse), n < work.count);
            }
            if (quarter == 0 && n < work.count) p.out_scales[place * (p.out_columns / kGroup) + group] = scale.scale;
        }
    }

    // Multiplies sums by the scales of their weight rows.
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

    // Multiplies at the smallest width that holds the tile, found by bisection.
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
        clear(product);
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
            // NOTE: every lane arrives, because every lane has read scales: ptxas takes the warp for converged and drops a
            // __syncwarp.
            sm90::barrier_arrive(&shared.empty[ring.slot]);
#pragma unroll
            for (int j = 0; j < Width / 8; ++j) promote_four(sums + 4 * j, product + 4 * j, token[j], weight.x, weight.y);
        }
    }
};

}  // namespace oxmoe
