// The GEMM of grouped_gemm_fp8_wide_sm90.cuh, bit for bit, for rows of x in the order of places and experts with many rows.
// (`gemm.slot_of_place` serves the router's weights alone.) Tokens and weights come by the copy engine: 192 tokens, 64 for each
// of three consumers, times a block of 128 weight rows.
//
// A consumer waits for the products of a K block, then scales them, which takes nearly as long as their multiplication. So two
// consumers leave the tensor cores idle, and three do not. Each has sums of one block alone, so gated units go over the tokens
// twice. The sums of the gate rows wait in shared memory for those of the up rows.
//
// Scales are two numbers for each lane and K block: products of a token's scale and the weights'. Two warps beside the copying
// one compute them, and load their operands two K blocks ahead. A consumer that loaded its own scales would wait for them in each
// block (docs/kernels/grouped_gemm_fp8_sm90.md).
//
// The tokens' tensor map: e4m3 x [rows, k] in boxes of 64 rows x 128 bytes, swizzled by 128 bytes.
#pragma once
#include <cstdint>
#include <cuda.h>

#include "fp8_block_sm90.cuh"

namespace oxmoe {

template <bool Gated, int Stages>
struct GroupedGemmFp8OrderedSm90 : Fp8Block {
    static constexpr int kTokens = 192, kConsumers = 3, kPasses = Gated ? 2 : 1, kBoxRows = 64, kBoxBytes = kBoxRows * 128;
    using Params = OrderedGemmParams;
    // The schedule: units of kPasses blocks, and all tiles of an expert before the next.
    using Base = GroupedGemmSm90<__nv_bfloat16, Gated, 128, 2, kPasses, Stages>;
    using Overlap = typename Base::Overlap;
    static_assert(Base::kRows == kPasses * kBlockRows, "units of blocks");

    static constexpr int kThreads = 128 * (1 + kConsumers);
    static constexpr int kUnitSlots = Base::kUnitSlots;
    static constexpr int kScaleThreads = 64;

    struct Buffers {
        struct {
            uint8_t tokens[kTokens * 128], weights[kBlockBytes];
        } stage[Stages];
        float gates[Gated ? kConsumers : 1][Gated ? kSums : 1][128];
        float scale[Stages][kTokens];
    };
    // The schedule's warp writes where rows of x start, but no warp reads it.
    using Shared = pipeline::Shared<Buffers, WorkUnit, kTokens, Stages>;
    static constexpr int kSharedBytes = sizeof(Shared);
    static constexpr int kCtas = 1;

    static __device__ __forceinline__ void run(const CUtensorMap& weights, const CUtensorMap& tokens, const Params& p) {
        extern __shared__ __align__(1024) uint8_t dynamic_shared[];
        Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared);
        if (threadIdx.x == 0) {
            init_barriers(shared);
            sm90::prefetch_tensor_map(&weights);
            sm90::prefetch_tensor_map(&tokens);
        }
        __syncthreads();
        // NOTE: with an older schedule only x is in flight, and only the warps that read it wait.
        if (!p.gemm.schedule_is_older) pdl::wait();
        if (threadIdx.x < 128) {
            sm90::registers_decrease<56>();
            const int warp = threadIdx.x / 32;
            if (warp == 0)
                copy(weights, tokens, p.gemm, shared);
            else if (warp == 1)
                Overlap::schedule(p.gemm, shared);
            else
                multiply_scales(p, shared);
        } else {
            sm90::registers_increase<152>();
            consume(p, shared);
        }
    }

private:
    static __device__ __forceinline__ void init_barriers(Shared& shared) {
#pragma unroll 1
        for (int s = 0; s < Stages; ++s) {
            sm90::barrier_init(&shared.full[s], 1 + kScaleThreads);
            sm90::barrier_init(&shared.empty[s], 128 * kConsumers);
        }
        Base::init_unit_barriers(shared, 1 + kScaleThreads + 128 * kConsumers);
        Overlap::init_barriers(shared, 128 * kConsumers);
        sm90::barrier_init_fence();
    }

    // Returns the index, among the blocks of all experts' weights, of the block that a pass multiplies: gate rows come first.
    static __device__ __forceinline__ int block_of(const GroupedGemmParams& p, const WorkUnit& work, int pass) {
        const bool second = Gated && (pass == 1) != (p.layout == W13Layout::UpGate);
        return work.expert * (p.rows / kBlockRows) + work.row_block + (second ? p.out_columns / kBlockRows : 0);
    }

    // ---- copies by one thread; rows of a box without a token get the next places' tokens ----

    static __device__ __forceinline__ void copy(const CUtensorMap& weights, const CUtensorMap& tokens, const GroupedGemmParams& p,
                                                Shared& shared) {
        if (threadIdx.x != 0) return;
        const int k_blocks = Base::k_blocks(p);
        RingPosition<kUnitSlots> units;
        RingPosition<Stages> ring;
        Overlap::wait(p);
        pdl::launch_dependents();
        for (WorkUnit work; take_unit(shared, units, work); units.advance()) {
            // NOTE: threads of a GEMM1 that still runs have stored these tokens, and the copy engine reads them. Without this
            // fence nothing orders the two: a counter orders what threads themselves read, and the other fence shared memory
            // alone.
            if (p.awaited) asm volatile("fence.proxy.async.global;" ::: "memory");
            const int boxes = (work.count + kBoxRows - 1) / kBoxRows;
            // NOTE: this is as late as the latency allows: a CTA that takes a unit early holds work back from idle ones.
            int steps = max(0, kPasses * k_blocks - Base::kFetchLead);
#pragma unroll 1
            for (int pass = 0; pass < kPasses; ++pass) {
                const int strip = block_of(p, work, pass) * kBlockStrips;
#pragma unroll 1
                for (int block = 0; block < k_blocks; ++block, ring.advance(), --steps) {
                    if (steps == 0) sm90::barrier_arrive(&shared.fetch_next);
                    auto& stage = shared.stage[ring.slot];
                    uint64_t* full = pipeline::begin_stage(shared, ring, kBlockBytes + boxes * kBoxBytes);
                    sm90::copy_tensor_5d(stage.weights, &weights, {block * Base::kBlockK, 0, 0, 0, strip}, full);
                    for (int box = 0; box < boxes; ++box) {
                        sm90::copy_tensor_2d(stage.tokens + box * kBoxBytes, &tokens, block * 128, work.first + box * kBoxRows,
                                             full);
                    }
                }
            }
        }
    }

    // ---- scales by two warps, three tokens for each thread ----

    // The scales of one K block.
    struct Scales {
        float token[kConsumers], weight;
    };

    static __device__ __forceinline__ void multiply_scales(const Params& p, Shared& shared) {
        const int k_blocks = Base::k_blocks(p.gemm), thread = threadIdx.x % kScaleThreads;
        RingPosition<kUnitSlots> units;
        RingPosition<Stages> ring;
        Overlap::wait(p.gemm);
        for (WorkUnit work; take_unit(shared, units, work); units.advance()) {
            const float* tokens[kConsumers];
#pragma unroll
            for (int i = 0; i < kConsumers; ++i) {
                const int row = i * kScaleThreads + thread;
                tokens[i] = p.gemm.x_scales + size_t(work.first + (row < work.count ? row : 0)) * p.x_scale_row;
            }
#pragma unroll 1
            for (int pass = 0; pass < kPasses; ++pass) {
                const float* weights =
                    reinterpret_cast<const float*>(p.gemm.block_scales) + size_t(block_of(p.gemm, work, pass)) * k_blocks;
                Scales even = {}, odd = {};
                auto load = [&](Scales& scales, int block) {
                    if (block >= k_blocks) return;
#pragma unroll
                    for (int i = 0; i < kConsumers; ++i) scales.token[i] = tokens[i][size_t(block) * p.x_scale_group];
                    scales.weight = weights[block];
                };
                auto store = [&](const Scales& scales) {
                    sm90::barrier_wait(&shared.empty[ring.slot], ring.parity ^ 1);
#pragma unroll
                    for (int i = 0; i < kConsumers; ++i) {
                        shared.scale[ring.slot][i * kScaleThreads + thread] = __fmul_rn(scales.token[i], scales.weight);
                    }
                    sm90::barrier_arrive(&shared.full[ring.slot]);
                    ring.advance();
                };
                load(even, 0), load(odd, 1);
#pragma unroll 1
                for (int block = 0; block < k_blocks; block += 2) {
                    store(even);
                    load(even, block + 2);
                    if (block + 1 == k_blocks) break;
                    store(odd);
                    load(odd, block + 3);
                }
            }
        }
    }

    // ---- consumers ----

    using Sums = float[kSums];

    static __device__ __forceinline__ void consume(const Params& params, Shared& shared) {
        const GroupedGemmParams& p = params.gemm;
        const int consumer = Base::consumer_index(), warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
        const int k_blocks = Base::k_blocks(p), row = consumer * 64 + warp * 16 + lane / 4;
        RingPosition<kUnitSlots> units;
        RingPosition<Stages> ring;
        Overlap::wait(p);
        // NOTE: this wait stands before the loop and at its ends. At the loop's start, ptxas would no longer see that lanes agree
        // on the ring.
        sm90::barrier_wait(&shared.unit_full[units.slot], units.parity);
        for (;;) {
            WorkUnit work = shared.unit[units.slot];
            make_uniform(work);
            if (work.expert < 0) break;
            sm90::barrier_arrive(&shared.unit_empty[units.slot]);
            units.advance();
            if (consumer * 64 >= work.count) {
                pipeline::skip_stages<true>(shared, ring, kPasses * k_blocks);
                Overlap::stored(p, shared, units.slot ^ 1);
                sm90::barrier_wait(&shared.unit_full[units.slot], units.parity);
                continue;
            }
            int place[2];
            Sums sums;
#pragma unroll
            for (int pass = 0; pass < kPasses; ++pass) {
                multiply(k_blocks, row, sums, shared, ring);
                prepare(p, work, row, block_of(p, work, pass), sums, place);
                if (pass + 1 < kPasses) {
#pragma unroll
                    for (int i = 0; i < kSums; ++i) shared.gates[consumer][i][threadIdx.x % 128] = sums[i];
                }
            }
            sm90::barrier_wait(&shared.unit_full[units.slot], units.parity);
            activate(p, work, shared.gates[Gated ? consumer : 0], sums);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const size_t scale_at =
                    size_t(place[half]) * params.out_scale_row + size_t(work.row_block) * params.out_scale_group;
                store_group(p, place[half], work.row_block, threadIdx.x % 4 * kRun, half, sums, scale_at);
            }
            Overlap::stored(p, shared, units.slot ^ 1);
        }
    }

    static __device__ __forceinline__ void multiply(int k_blocks, int row, Sums& sums, Shared& shared,
                                                    RingPosition<Stages>& ring) {
        const int consumer = Base::consumer_index();
        float product[kSums];
        clear(sums);
#pragma unroll 1
        for (int block = 0; block < k_blocks; ++block, ring.advance()) {
            const uint32_t tokens = sm90::shared_address(shared.stage[ring.slot].tokens) + consumer * kBoxBytes;
            const uint32_t weights = sm90::shared_address(shared.stage[ring.slot].weights);
            sm90::barrier_wait(&shared.full[ring.slot], ring.parity);
            sm90::wgmma_fence();
            start(product, tokens, weights);
            const float low = sm90::load_shared_4(&shared.scale[ring.slot][row]),
                        high = sm90::load_shared_4(&shared.scale[ring.slot][row + 8]);
            sm90::wgmma_wait<0>();
            // NOTE: every lane arrives, as every lane that writes scales does, because each has read its own. A __syncwarp and
            // one arrival for the warp would do. But after a wait for wgmma __syncwarp is no instruction, and racecheck would
            // report the scales.
            sm90::barrier_arrive(&shared.empty[ring.slot]);
            promote(sums, product, low, high);
        }
    }

    // Applies the scales of weight rows, the bias and the router's weights to a block's sums. `block` counts the blocks of all
    // experts' weights. Finds the places of a lane's tokens, -1 without a token.
    static __device__ __forceinline__ void prepare(const GroupedGemmParams& p, const WorkUnit& work, int row, int block,
                                                   Sums& sums, int (&place)[2]) {
        finish_rows(p, size_t(block) * kBlockRows + threadIdx.x % 4 * kRun, sums);
        finish_tokens<1>(p, work, row, &sums, place);
    }

    // Applies the activation. If gated, `sums` has the sums of the up rows, and `gates` those of the gate rows.
    static __device__ __forceinline__ void activate(const GroupedGemmParams& p, const WorkUnit& work, const float (*gates)[128],
                                                    Sums& sums) {
        const int thread = threadIdx.x % 128;
        if constexpr (Gated)
            activate_pairs(activation_of(p, work.expert), sums, [&](int i) { return gates[i][thread]; }, sums);
        else
            Fp8Block::activate<1>(p, &sums);
    }
};

}  // namespace oxmoe
