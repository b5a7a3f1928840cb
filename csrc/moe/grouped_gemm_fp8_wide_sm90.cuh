// Grouped GEMM for Hopper with e4m3 weights and tokens and block scales, for tiles of many tokens. The results are those of
// grouped_gemm_fp8_sm90.cuh, bit for bit, and out may be e4m3 with a scale for each 128 columns of a row.
//
// Here tokens are wgmma's A and weights its N. So a lane has sums of two tokens, and multiplies the weights' scales only by the
// scales of these two. With weights as A it would need the scales of every fourth token of the tile. A unit is 128 tokens, 64 for
// each consumer, times two blocks of 128 weight rows. If gated, these are a block of gate rows and the block of the matching up
// rows, otherwise two neighbours. So the four lanes of a token hold whole groups of 128 outputs, which they activate, round to
// bf16 and quantise in registers.
//
// The gathering warps multiply a token's scales by the weights' scales and leave the products beside the stage. A consumer that
// loaded its own scales would wait for them.
//
// `p.k` counts pairs of elements. The weights' tensor map, in pairs, orders the rows of a block so that a lane has eight
// neighbouring outputs, 16 bytes, of each 32, and the four lanes of a token store whole sectors. A box has 64 x 2 x 4 x 4 x 4
// elements:
//   dimension         k    column of pair   lane of four   pair    strip
//   size              k    2                4              4       experts rows / 32
//   stride in rows         1                8              2       32
//
// Needs k % 128 == 0, rows % 128 == 0 (gated: out_columns % 128 == 0), 16-byte aligned x, weights and out.
#pragma once
#include <cstdint>
#include <cuda.h>

#include "fp8_block_sm90.cuh"

namespace oxmoe {

// Cut: the tensor map is that of grouped_gemm_fp8_wide_cut_sm90.cuh.
template <bool Gated, int Stages, bool Cut = false>
struct GroupedGemmFp8WideSm90 : Fp8Block {
    static constexpr int kTokens = 128, kConsumers = 2, kBlocks = 2;
    // The units are 256 weight rows, and all tiles of an expert come before the next expert.
    using Base = GroupedGemmSm90<__nv_bfloat16, Gated, kTokens, 2, kConsumers, Stages>;
    using Overlap = typename Base::Overlap;
    static_assert(Base::kRows == kBlocks * kBlockRows, "units of two blocks");

    static constexpr int kThreads = Base::kThreads;
    static constexpr int kUnitSlots = Base::kUnitSlots;
    static constexpr int kGatherThreads = Base::kGatherThreads;
    static constexpr int kScales = kTokens / kGatherThreads;  // tokens whose scales a gathering thread has

    struct Buffers {
        struct {
            uint8_t tokens[kTokens * 128], weights[kBlocks][kBlockBytes];
        } stage[Stages];
        float scales[Stages][kBlocks][kTokens];
    };
    using Shared = pipeline::Shared<Buffers, WorkUnit, kTokens, Stages>;
    static constexpr int kSharedBytes = sizeof(Shared);
    static constexpr int kCtas = 1;

    static __device__ __forceinline__ void run(const CUtensorMap& weights, const GroupedGemmParams& p) {
        extern __shared__ __align__(1024) uint8_t dynamic_shared[];
        Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared);
        if (threadIdx.x == 0) {
            init_barriers(shared);
            sm90::prefetch_tensor_map(&weights);
        }
        __syncthreads();
        // NOTE: with an older schedule only x is in flight, and only the warps that read it wait.
        if (!p.schedule_is_older) pdl::wait();
        if (threadIdx.x < 128) {
            sm90::registers_decrease<56>();
            const int warp = threadIdx.x / 32;
            if (warp == 0)
                copy_weights(weights, p, shared);
            else if (warp == 1)
                Overlap::schedule(p, shared);
            else
                gather(p, shared);
        } else {
            sm90::registers_increase<224>();
            consume(p, shared);
        }
    }

private:
    // Returns a block of an expert that a unit multiplies. If not gated, the second may lie beyond the expert's blocks: it is
    // read and left out.
    static __device__ __forceinline__ int block_of(const GroupedGemmParams& p, const WorkUnit& work, int i) {
        return Gated ? i * (p.out_columns / kBlockRows) + work.row_block : 2 * work.row_block + i;
    }

    static __device__ __forceinline__ void init_barriers(Shared& shared) {
#pragma unroll 1
        for (int s = 0; s < Stages; ++s) {
            // These are the arrivals of the copying thread, and of the gathering threads for tokens and for scales.
            sm90::barrier_init(&shared.full[s], 1 + 2 * kGatherThreads);
            sm90::barrier_init(&shared.empty[s], 128 * kConsumers);
        }
        Base::init_unit_barriers(shared, 1 + kGatherThreads + 128 * kConsumers);
        Overlap::init_barriers(shared, 128 * kConsumers);
        sm90::barrier_init_fence();
    }

    // ---- weights: one thread copies two boxes for each stage; cut, eight ----

    static constexpr int kStripBytes = kRunStride * 128;

    // Copies block i of a unit, strip by strip.
    static __device__ __forceinline__ void copy_strips(const CUtensorMap& weights, const GroupedGemmParams& p,
                                                       const WorkUnit& work, int block, int i, uint8_t (&to)[kBlockBytes],
                                                       uint64_t* full) {
        const int part = Gated ? kBlocks * work.expert + i : work.expert;
        const int row = (Gated ? work.row_block : block_of(p, work, i)) * kBlockRows;
#pragma unroll
        for (int strip = 0; strip < kBlockStrips; ++strip) {
            sm90::copy_tensor_5d(to + strip * kStripBytes, &weights,
                                 {block * Base::kBlockK, 0, (row + strip * kRunStride) / 8, 0, part}, full);
        }
    }

    static __device__ __forceinline__ void copy_weights(const CUtensorMap& weights, const GroupedGemmParams& p, Shared& shared) {
        if (threadIdx.x != 0) return;
        // NOTE: this is as late as the latency allows: a CTA that takes a unit early holds work back from idle ones.
        const int k_blocks = Base::k_blocks(p), fetch_block = max(0, k_blocks - Base::kFetchLead);
        RingPosition<kUnitSlots> units;
        RingPosition<Stages> ring;
        for (WorkUnit work; take_unit(shared, units, work); units.advance()) {
            const int first = work.expert * (p.rows / kBlockRows);
            const int strips[kBlocks] = {(first + block_of(p, work, 0)) * kBlockStrips,
                                         (first + block_of(p, work, 1)) * kBlockStrips};
#pragma unroll 1
            for (int block = 0; block < k_blocks; ++block, ring.advance()) {
                if (block == fetch_block) sm90::barrier_arrive(&shared.fetch_next);
                uint64_t* full = pipeline::begin_stage(shared, ring, kBlocks * kBlockBytes);
#pragma unroll
                for (int i = 0; i < kBlocks; ++i) {
                    if constexpr (Cut) {
                        copy_strips(weights, p, work, block, i, shared.stage[ring.slot].weights[i], full);
                    } else {
                        sm90::copy_tensor_5d(shared.stage[ring.slot].weights[i], &weights,
                                             {block * Base::kBlockK, 0, 0, 0, strips[i]}, full);
                    }
                }
            }
        }
    }

    // ---- tokens and scales ----

    // The scales of one K block: scales of a thread's tokens, and scales of the weights' blocks.
    struct Scales {
        float token[kScales], weight[kBlocks];
    };

    static __device__ __forceinline__ void gather(const GroupedGemmParams& p, Shared& shared) {
        // In a pass each thread copies from one row. Whole groups of passes run unrolled from registers, the rest of the tile in
        // a loop.
        constexpr int kPassRows = kGatherThreads / 8, kGroup = 4, kGroupRows = kGroup * kPassRows, kGroups = kTokens / kGroupRows;
        const int thread = threadIdx.x % kGatherThreads, chunk = thread % 8, first = thread / 8, k_blocks = Base::k_blocks(p);
        const uint32_t swizzled = first * 128 + ((chunk ^ first) * 16);
        RingPosition<kUnitSlots> units;
        RingPosition<Stages> ring;
        Overlap::wait(p);
        pdl::launch_dependents();
        for (WorkUnit work; await_unit(shared, units, work); units.advance()) {
            const uint32_t* sources = shared.source[units.slot];
            const int grouped = work.count / kGroupRows * kGroupRows;
            uint32_t source[kGroups][kGroup];
#pragma unroll
            for (int i = 0; i < kGroups * kGroup; ++i) source[i / kGroup][i % kGroup] = sources[first + i * kPassRows];
            const float* weight_scales[kBlocks];
#pragma unroll
            for (int b = 0; b < kBlocks; ++b) {
                const int blocks = p.rows / kBlockRows, block = min(block_of(p, work, b), blocks - 1);
                weight_scales[b] =
                    reinterpret_cast<const float*>(p.block_scales) + size_t(work.expert * blocks + block) * k_blocks;
            }
            Scales scales;
            const auto load_scales = [&](int block) {
#pragma unroll
                for (int i = 0; i < kScales; ++i) {
                    const int token = i * kGatherThreads + thread;
                    // A row of x has 8 vectors and one scale for each block.
                    if (token < work.count) scales.token[i] = p.x_scales[sources[token] / 8 + block];
                }
#pragma unroll
                for (int b = 0; b < kBlocks; ++b) scales.weight[b] = weight_scales[b][block];
            };
            load_scales(0);
#pragma unroll 1
            for (int block = 0; block < k_blocks; ++block, ring.advance()) {
                sm90::barrier_wait(&shared.empty[ring.slot], ring.parity ^ 1);
#pragma unroll
                for (int i = 0; i < kScales; ++i) {
                    const int token = i * kGatherThreads + thread;
                    if (token >= work.count) break;
#pragma unroll
                    for (int b = 0; b < kBlocks; ++b)
                        shared.scales[ring.slot][b][token] = __fmul_rn(scales.token[i], scales.weight[b]);
                }
                sm90::barrier_arrive(&shared.full[ring.slot]);
                if (block + 1 < k_blocks) load_scales(block + 1);
                const uint4* x = reinterpret_cast<const uint4*>(p.x) + block * 8 + chunk;
                asm("" : "+l"(x));  // one sum for each block instead of one for each row
                const uint32_t tokens = sm90::shared_address(shared.stage[ring.slot].tokens) + swizzled;
#pragma unroll
                for (int group = 0; group < kGroups; ++group) {
                    if (group * kGroupRows >= grouped) break;
#pragma unroll
                    for (int i = 0; i < kGroup; ++i) {
                        sm90::copy_16_async(tokens + (group * kGroupRows + i * kPassRows) * 128, x + source[group][i], true);
                    }
                }
#pragma unroll 1
                for (int n = grouped + first; n < work.count; n += kPassRows) {
                    sm90::copy_16_async(tokens + (n - first) * 128, x + sources[n], true);
                }
                sm90::copy_async_arrive(&shared.full[ring.slot]);
            }
            sm90::barrier_arrive(&shared.unit_empty[units.slot]);
        }
    }

    // ---- consumers ----

    using Sums = float[kBlocks][kSums];

    static __device__ __forceinline__ WorkUnit next_unit(Shared& shared, RingPosition<kUnitSlots>& units) {
        WorkUnit work = shared.unit[units.slot];
        make_uniform(work);
        sm90::barrier_arrive(&shared.unit_empty[units.slot]);
        units.advance();
        return work;
    }

    static __device__ __forceinline__ void consume(const GroupedGemmParams& p, Shared& shared) {
        const int consumer = Base::consumer_index(), warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
        const int k_blocks = Base::k_blocks(p), row = consumer * 64 + warp * 16 + lane / 4;
        RingPosition<kUnitSlots> units;
        RingPosition<Stages> ring;
        await_first_stage(shared, units, ring);
        for (;;) {
            const WorkUnit work = next_unit(shared, units);
            if (work.expert < 0) break;
            if (consumer * 64 >= work.count) {
                pipeline::skip_stages<true>(shared, ring, k_blocks);
                Overlap::stored(p, shared, units.slot ^ 1);
                await_first_stage(shared, units, ring);
                continue;
            }
            Sums sums;
            clear(sums);
            multiply(k_blocks, row, sums, shared, ring);
            await_first_stage(shared, units, ring);
            finish(p, work, row, sums);
            Overlap::stored(p, shared, units.slot ^ 1);
        }
    }

    // Waits until a stage has landed and wgmma may read it.
    // NOTE: ptxas makes a MEMBAR of the fence, which waits for all loads and stores that the lane has in flight. So it comes
    // while a multiplication runs, and before a unit's outputs are stored.
    static __device__ __forceinline__ void await_stage(Shared& shared, const RingPosition<Stages>& ring) {
        sm90::barrier_wait(&shared.full[ring.slot], ring.parity);
        sm90::fence_async_proxy();
    }

    // Waits until the next unit is known, and if there is one, for its first stage.
    static __device__ __forceinline__ void await_first_stage(Shared& shared, const RingPosition<kUnitSlots>& units,
                                                             const RingPosition<Stages>& ring) {
        sm90::barrier_wait(&shared.unit_full[units.slot], units.parity);
        if (__shfl_sync(0xFFFFFFFF, shared.unit[units.slot].expert, 0) >= 0) await_stage(shared, ring);
    }

    // Multiplies a unit. The wait for its first stage is already over.
    static __device__ __forceinline__ void multiply(int k_blocks, int row, Sums& sums, Shared& shared,
                                                    RingPosition<Stages>& ring) {
        const int consumer = Base::consumer_index();
        float product[kSums];
        clear(product);
#pragma unroll 1
        for (int block = 0; block < k_blocks; ++block) {
            const uint32_t tokens = sm90::shared_address(shared.stage[ring.slot].tokens) + consumer * 8192;
            const uint32_t weights = sm90::shared_address(shared.stage[ring.slot].weights[0]);
            const float* scales = &shared.scales[ring.slot][0][row];
            uint64_t* const empty = &shared.empty[ring.slot];
            ring.advance();
#pragma unroll
            for (int b = 0; b < kBlocks; ++b) {
                sm90::wgmma_fence();
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    sm90::WgmmaE4m3<kBlockRows>::multiply(product, sm90::descriptor_128b(tokens, i * 32),
                                                          sm90::descriptor_128b(weights, b * kBlockBytes + i * 32), i > 0);
                }
                sm90::wgmma_commit();
                const float low = sm90::load_shared_4(scales + b * kTokens), high = sm90::load_shared_4(scales + b * kTokens + 8);
                if (b == kBlocks - 1 && block + 1 < k_blocks) await_stage(shared, ring);
                sm90::wgmma_wait<0>();
                // NOTE: every lane arrives, because each has read its scales.
                if (b == kBlocks - 1) sm90::barrier_arrive(empty);
                promote(sums[b], product, low, high);
            }
        }
    }

    // ---- epilogue: a lane has 32 columns of two tokens in each block ----

public:
    // Applies bias, router weights and activation, and stores. `row` is the row of a lane's first token; it and the second may be
    // beyond the tile.
    static __device__ __forceinline__ void finish(const GroupedGemmParams& p, const WorkUnit& work, int row, Sums& sums) {
        const int column = threadIdx.x % 4 * kRun;
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
            const int first = block_of(p, work, b) * kBlockRows;
            if (first < p.rows) finish_rows(p, size_t(work.expert) * p.rows + first + column, sums[b]);
        }
        int place[Fp8Block::kTokens];
        finish_tokens<kBlocks>(p, work, row, sums, place);
        if constexpr (Gated)
            activate_pairs(p, work, sums);
        else
            activate<kBlocks>(p, sums);
#pragma unroll
        for (int b = 0; b < (Gated ? 1 : kBlocks); ++b) {
            const int block = block_of(p, work, b);
            if (block * kBlockRows >= p.rows) break;
#pragma unroll
            for (int half = 0; half < Fp8Block::kTokens; ++half) {
                const size_t scale_at = size_t(place[half]) * (p.out_columns / kBlockRows) + block;
                store_group(p, place[half], block, column, half, sums[b], scale_at);
            }
        }
    }

private:
    // Applies the activation of gated kinds; the outputs replace the sums of the first block.
    static __device__ __forceinline__ void activate_pairs(const GroupedGemmParams& p, const WorkUnit& work, Sums& sums) {
        if (p.layout == W13Layout::UpGate) {
#pragma unroll
            for (int i = 0; i < kSums; ++i) {
                const float up = sums[0][i];
                sums[0][i] = sums[1][i], sums[1][i] = up;
            }
        }
        const Activation own = activation_of(p, work.expert);
        Fp8Block::activate_pairs(own, sums[0], [&](int i) { return sums[0][i]; }, sums[1]);
    }
};

}  // namespace oxmoe
