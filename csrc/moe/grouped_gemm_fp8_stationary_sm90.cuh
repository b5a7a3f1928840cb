// GEMM2 for Hopper with e4m3 weights and tokens and block scales, for tiles of many tokens with few columns between the GEMMs.
// The results are those of grouped_gemm_fp8_wide_sm90.cuh, bit for bit.
//
// With a K of two to eight blocks the wide kernel's units are over before its pipeline is full. Here the tokens of a tile stay in
// shared memory while the weights of `UnitBlocks` blocks of 128 rows pass by. Weights alone are copied, and a unit is long enough
// for its start not to count. Two K blocks are multiplied into registers of their own, so that the second's multiplication covers
// the first's scaling. The outputs of a block are stored while the next is multiplied.
//
// Tokens lie in a ring of K blocks, as weights do. Stages that a tile's last block of rows has read take the next tile's tokens.
//
// `p.k` counts pairs of elements. The weights' tensor map and a lane's outputs are the wide kernel's. The GEMM is plain, with
// bf16 out, no activation and no router weights. Needs k % 256 == 0, k <= 1024, rows % 128 == 0, 16-byte aligned x, weights and
// out.
#pragma once
#include <cstdint>
#include <cuda.h>

#include "fp8_block_sm90.cuh"

namespace oxmoe {

template <int UnitBlocks>
struct GroupedGemmFp8StationarySm90 : Fp8Block {
    static constexpr int kTokens = 128, kConsumers = 2;
    static constexpr int kTokenStages = 8, kWeightStages = 6;
    // The schedule: units of UnitBlocks blocks, and all tiles of an expert before the next.
    using Base = GroupedGemmSm90<__nv_bfloat16, false, kTokens, 2, UnitBlocks, 2>;
    using Overlap = GemmOverlapSm90<Base, false>;
    static_assert(Base::kRows == UnitBlocks * kBlockRows, "units of blocks");

    static constexpr int kThreads = 128 * (1 + kConsumers);
    static constexpr int kUnitSlots = Base::kUnitSlots;
    static constexpr int kReaders = 4 * kConsumers;  // arrivals that free a stage

    struct alignas(128) Shared {
        uint8_t tokens[kTokenStages][kBlockBytes], weights[kWeightStages][kBlockBytes];
        uint32_t source[kUnitSlots][kTokens];  // start of a token's row of x, in 16-byte units
        WorkUnit unit[kUnitSlots];
        uint64_t tokens_full[kTokenStages], tokens_empty[kTokenStages], full[kWeightStages], empty[kWeightStages];
        uint64_t unit_full[kUnitSlots], unit_empty[kUnitSlots], fetch_next;
    };
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
            sm90::registers_decrease<40>();
            const int warp = threadIdx.x / 32;
            if (warp == 0)
                copy_weights(weights, p, shared);
            else if (warp == 1)
                Overlap::schedule(p, shared);
            else
                gather(p, shared);
        } else {
            sm90::registers_increase<232>();
            consume(p, shared);
        }
    }

private:
    static __device__ __forceinline__ void init_barriers(Shared& shared) {
#pragma unroll 1
        for (int s = 0; s < kTokenStages; ++s) {
            sm90::barrier_init(&shared.tokens_full[s], Base::kGatherThreads);
            sm90::barrier_init(&shared.tokens_empty[s], kReaders);
        }
#pragma unroll 1
        for (int s = 0; s < kWeightStages; ++s) {
            sm90::barrier_init(&shared.full[s], 1);
            sm90::barrier_init(&shared.empty[s], kReaders);
        }
        Base::init_unit_barriers(shared, 1 + Base::kGatherThreads + 128 * kConsumers);
        sm90::barrier_init_fence();
    }

    // Returns the number of a unit's blocks of rows.
    static __device__ __forceinline__ int blocks_of(const GroupedGemmParams& p, const WorkUnit& work) {
        return min(UnitBlocks, p.rows / kBlockRows - work.row_block * UnitBlocks);
    }

    // ---- weights: one thread copies one box for each stage ----

    static __device__ __forceinline__ void copy_weights(const CUtensorMap& weights, const GroupedGemmParams& p, Shared& shared) {
        if (threadIdx.x != 0) return;
        const int k_blocks = Base::k_blocks(p);
        RingPosition<kUnitSlots> units;
        RingPosition<kWeightStages> ring;
        for (WorkUnit work; take_unit(shared, units, work); units.advance()) {
            const int first = work.expert * (p.rows / kBlockRows) + work.row_block * UnitBlocks, blocks = blocks_of(p, work);
            // NOTE: this is as late as the latency allows: a CTA that takes a unit early holds work back from idle ones.
            int steps = max(0, blocks * k_blocks - Base::kFetchLead);
#pragma unroll 1
            for (int block = 0; block < blocks; ++block) {
#pragma unroll 1
                for (int k = 0; k < k_blocks; ++k, ring.advance(), --steps) {
                    if (steps == 0) sm90::barrier_arrive(&shared.fetch_next);
                    uint64_t* full = pipeline::begin_stage(shared, ring, kBlockBytes);
                    sm90::copy_tensor_5d(shared.weights[ring.slot], &weights,
                                         {k * Base::kBlockK, 0, 0, 0, (first + block) * kBlockStrips}, full);
                }
            }
        }
    }

    // ---- tokens: 8 neighbouring threads copy 128 bytes of a row; rows of the tile without a token keep old bytes ----

    static __device__ __forceinline__ void gather(const GroupedGemmParams& p, Shared& shared) {
        constexpr int kPassRows = Base::kGatherThreads / 8;
        const int thread = threadIdx.x % Base::kGatherThreads, chunk = thread % 8, first = thread / 8;
        const uint32_t swizzled = first * 128 + ((chunk ^ first) * 16);
        RingPosition<kUnitSlots> units;
        RingPosition<kTokenStages> ring;
        Overlap::wait(p);
        pdl::launch_dependents();
        for (WorkUnit work; await_unit(shared, units, work); units.advance()) {
            const uint32_t* sources = shared.source[units.slot];
#pragma unroll 1
            for (int k = 0; k < Base::k_blocks(p); ++k, ring.advance()) {
                sm90::barrier_wait(&shared.tokens_empty[ring.slot], ring.parity ^ 1);
                const uint4* x = reinterpret_cast<const uint4*>(p.x) + k * 8 + chunk;
                const uint32_t tokens = sm90::shared_address(shared.tokens[ring.slot]) + swizzled;
#pragma unroll 4
                for (int n = first; n < work.count; n += kPassRows)
                    sm90::copy_16_async(tokens + (n - first) * 128, x + sources[n], true);
                sm90::copy_async_arrive(&shared.tokens_full[ring.slot]);
            }
            sm90::barrier_arrive(&shared.unit_empty[units.slot]);
        }
    }

    // ---- consumers ----

    template <bool Value>
    struct Bool {
        static constexpr bool value = Value;
    };

    // The scales of two K blocks: scales of a lane's tokens, and scales of the weights.
    struct Scales {
        float2 token[2], weight;
    };

    // A lane's outputs of a block on their way out: its tokens' rows of out, null without a token, and pairs of outputs.
    struct Outputs {
        __nv_bfloat16* row[2];
        uint32_t pairs[2][kLaneColumns / 2];

        __device__ __forceinline__ void store(int column) const {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    sm90::store_global_16_if(
                        row[half] + column + i * kRunStride,
                        {pairs[half][4 * i], pairs[half][4 * i + 1], pairs[half][4 * i + 2], pairs[half][4 * i + 3]},
                        row[half] != nullptr && column >= 0);
                }
            }
        }
    };

    using Sums = float[kSums];

    static __device__ __forceinline__ void consume(const GroupedGemmParams& p, Shared& shared) {
        const int consumer = Base::consumer_index(), warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
        const bool is_lane_0 = lane == 0;
        const int k_blocks = Base::k_blocks(p), row = consumer * 64 + warp * 16 + lane / 4, lane_column = lane % 4 * kRun;
        RingPosition<kUnitSlots> units;
        RingPosition<kTokenStages> tokens;
        RingPosition<kWeightStages> ring;
        Overlap::wait(p);
        for (;; units.advance()) {
            sm90::barrier_wait(&shared.unit_full[units.slot], units.parity);
            WorkUnit work = shared.unit[units.slot];
            make_uniform(work);
            if (work.expert < 0) break;
            const float2* token_scales[2];
            Outputs outputs;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                // A row of x has 8 vectors and one scale for each block.
                const bool inside = row + 8 * half < work.count;
                const uint32_t source = shared.source[units.slot][inside ? row + 8 * half : 0];
                token_scales[half] = reinterpret_cast<const float2*>(p.x_scales + source / 8);
                __nv_bfloat16* out = reinterpret_cast<__nv_bfloat16*>(p.out) + size_t(work.first + row + 8 * half) * p.rows;
                outputs.row[half] = inside ? out : nullptr;
            }
            sm90::barrier_arrive(&shared.unit_empty[units.slot]);
            const int blocks = blocks_of(p, work), first_block = work.row_block * UnitBlocks;
            if (consumer * 64 >= work.count) {
                pipeline::skip_stages<false>(shared, ring, blocks * k_blocks);
                for (int k = 0; k < k_blocks; ++k, tokens.advance()) {
                    sm90::barrier_wait(&shared.tokens_full[tokens.slot], tokens.parity);
                    sm90::barrier_arrive_if(&shared.tokens_empty[tokens.slot], is_lane_0);
                }
                continue;
            }
            const float2* weight_scales =
                reinterpret_cast<const float2*>(reinterpret_cast<const float*>(p.block_scales) +
                                                size_t(work.expert * (p.rows / kBlockRows) + first_block) * k_blocks);
            Scales next = {{token_scales[0][0], token_scales[1][0]}, weight_scales[0]};
            RingPosition<kTokenStages> position = tokens;
            int stored = -1;
#pragma unroll 1
            for (int block = 0; block < blocks; ++block) {
                Sums sums;
                position = tokens;
                const bool last = block + 1 == blocks;
                // Multiplies the K blocks at `position` and after it, and calls `meanwhile()` while they are multiplied.
                auto multiply_two = [&](auto first, int k, auto meanwhile) {
                    RingPosition<kTokenStages> position_behind = position;
                    position_behind.advance();
                    RingPosition<kWeightStages> ring_behind = ring;
                    ring_behind.advance();
                    const Scales scales = next;
                    const bool wraps = k + 2 == k_blocks;
                    ++weight_scales;
                    if (block == 0) {
                        sm90::barrier_wait(&shared.tokens_full[position.slot], position.parity);
                        sm90::barrier_wait(&shared.tokens_full[position_behind.slot], position_behind.parity);
                        sm90::fence_async_proxy();
                    }
                    sm90::barrier_wait(&shared.full[ring.slot], ring.parity);
                    sm90::barrier_wait(&shared.full[ring_behind.slot], ring_behind.parity);
                    float products[2][kSums];
                    start(products, shared, consumer, {position.slot, position_behind.slot}, {ring.slot, ring_behind.slot});
                    // NOTE: after a unit's last two K blocks there are no next scales, so this loads existing ones again.
                    const int pair = wraps ? 0 : k / 2 + 1;
                    next = {{token_scales[0][pair], token_scales[1][pair]}, *(weight_scales - int(wraps && last))};
                    meanwhile();
                    finish<decltype(first)::value>(sums, products, scales, shared, {ring.slot, ring_behind.slot}, is_lane_0);
                    sm90::barrier_arrive_if(&shared.tokens_empty[position.slot], last && is_lane_0);
                    sm90::barrier_arrive_if(&shared.tokens_empty[position_behind.slot], last && is_lane_0);
                    position = position_behind, position.advance();
                    ring = ring_behind, ring.advance();
                };
                multiply_two(Bool<true>{}, 0, [&] { outputs.store(stored); });
#pragma unroll 1
                for (int k = 2; k < k_blocks; k += 2) multiply_two(Bool<false>{}, k, [] {});
                stored = (first_block + block) * kBlockRows + lane_column;
                finish_rows(p, size_t(work.expert) * p.rows + stored, sums);
#pragma unroll
                for (int half = 0; half < 2; ++half) {
#pragma unroll
                    for (int i = 0; i < kLaneColumns / 2; ++i) {
                        outputs.pairs[half][i] =
                            pack<__nv_bfloat16>(sums[sum_index(2 * i, half)], sums[sum_index(2 * i + 1, half)]);
                    }
                }
            }
            tokens = position;
            outputs.store(stored);
        }
    }

    // Starts the multiplication of two K blocks, each into its own registers.
    static __device__ __forceinline__ void start(float (&products)[2][kSums], Shared& shared, int consumer,
                                                 const int (&token_slots)[2], const int (&weight_slots)[2]) {
        sm90::wgmma_fence();
#pragma unroll
        for (int b = 0; b < 2; ++b) {
            const uint32_t tokens = sm90::shared_address(shared.tokens[token_slots[b]]) + consumer * 8192;
            const uint32_t weights = sm90::shared_address(shared.weights[weight_slots[b]]);
            Fp8Block::start(products[b], tokens, weights);
        }
    }

    // Promotes the products of two K blocks. `First`: there are no sums yet.
    template <bool First>
    static __device__ __forceinline__ void finish(Sums& sums, float (&products)[2][kSums], const Scales& scales, Shared& shared,
                                                  const int (&weight_slots)[2], bool is_lane_0) {
        float low = __fmul_rn(scales.token[0].x, scales.weight.x), high = __fmul_rn(scales.token[1].x, scales.weight.x);
        sm90::wgmma_wait<1>();
        sm90::barrier_arrive_if(&shared.empty[weight_slots[0]], is_lane_0);
        promote<First>(sums, products[0], low, high);
        low = __fmul_rn(scales.token[0].y, scales.weight.y), high = __fmul_rn(scales.token[1].y, scales.weight.y);
        sm90::wgmma_wait<0>();
        sm90::barrier_arrive_if(&shared.empty[weight_slots[1]], is_lane_0);
        promote(sums, products[1], low, high);
    }
};

}  // namespace oxmoe
