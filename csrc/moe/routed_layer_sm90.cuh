// A whole layer of few tokens in one launch, for Hopper: routing, GEMM1, GEMM2 and combine. This is LayerSm90 with the routing
// inside. Every CTA routes for itself (few_slots.cuh), so no table goes through global memory, and weights are loaded as soon as
// the experts are known.
//
// There are no counters between GEMM1 and GEMM2, nor between GEMM2 and the combine. Every launch marks the rows of both outputs
// absent when it starts, and readers poll them until they are there (absent.cuh).
//
// Nobody zeroes the counters of starts and marks before the launch. So they are not the workspace's but this module's, all zero
// when it is loaded. Launches on one workspace follow each other and have a slot of counters. Each launch adds kLaunch to either
// counter; `started` numbers the launches.
//
// Warp 0 copies weights, warps 1 and 2 copy tokens, warp 3 marks outputs absent, and warps 4 to 7 are the consumer warpgroup. All
// of them route. Sums, their K order and rounding are GroupedGemmSm90's and Combine's, and so are the bits.
//
// Progress: CTAs wait for each other, so the grid fits on the GPU at once (the plan sees to it). No launch that could keep CTAs
// out waits for this one, because its successors start after all of its CTAs.
#pragma once
#include <cstdint>
#include <cuda.h>

#include "../common/absent.cuh"
#include "../gemm/pipeline.cuh"
#include "few_slots.cuh"
#include "grouped_gemm_sm90.cuh"
#include "layer_parts.cuh"

namespace oxmoe {

template <typename Element, bool Gated, int Tokens, int Stages>
struct RoutedLayerSm90 {
    static constexpr int kInnerBlocks = 32;  // up to 2048 columns between the GEMMs
    static constexpr int kWidth = 16;        // the narrowest N that the epilogue transposes
    using Up = GroupedGemmSm90<Element, Gated, kWidth, 1, 1, Stages>;
    using Down = GroupedGemmSm90<Element, false, kWidth, 1, 1, Stages>;

    static constexpr int kRows = 64;
    static constexpr int kBlockK = 64;
    static constexpr int kWeightBytes = kRows * 128;
    static constexpr int kCopyThreads = 64;
    static_assert(Tokens == kCopyThreads / 8 && Tokens == FewSlots::kMostTokens, "a row of the tile has 8 threads");

    struct alignas(128) Shared {
        // NOTE: wgmma reads 8 columns, whose results are not used, from the memory after the tokens.
        uint8_t inner[kInnerBlocks][Tokens * 128];  // GEMM2's tokens, all K blocks of a unit
        struct {
            uint8_t tokens[Tokens * 128], weights[kWeightBytes];
        } stage[Stages];
        FewSlots slots;
        uint64_t full[Stages], empty[Stages], inner_full, inner_empty;
        uint64_t marked;  // passes once, when all CTAs have marked their parts
    };

    static constexpr int kThreads = 256;
    static constexpr int kSharedBytes = sizeof(Shared);
    static constexpr int kCtas = 2;
    static_assert(kCtas * (kSharedBytes + 1024) <= 228 * 1024, "CTAs on an SM");

    static __device__ __forceinline__ void run(const CUtensorMap& up_weights, const CUtensorMap& down_weights,
                                               const RoutedLayerParams& p) {
        extern __shared__ __align__(1024) uint8_t dynamic_shared[];
        Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared);
        const int warp = warp_of_block();
        // These constants would otherwise be fetched when they are needed.
        LayerCounters* counters_at = reinterpret_cast<LayerCounters*>(p.counters);
        asm volatile("" : "+l"(counters_at));
        asm volatile("" ::"l"(p.select.logits), "l"(p.layer.up.x), "r"(p.layer.down.rows), "l"(p.layer.combine.out));
        LayerCounters& counters = *counters_at;
        shared.slots.clear();
        if (threadIdx.x == 0) {
#pragma unroll 1
            for (int s = 0; s < Stages; ++s) {
                sm90::barrier_init(&shared.full[s], 1 + kCopyThreads);
                sm90::barrier_init(&shared.empty[s], 4);
            }
            sm90::barrier_init(&shared.inner_full, kCopyThreads);
            sm90::barrier_init(&shared.inner_empty, 4);
            sm90::barrier_init(&shared.marked, 1);
            sm90::barrier_init_fence();
            sm90::prefetch_tensor_map(&up_weights);
            sm90::prefetch_tensor_map(&down_weights);
        }
        __syncthreads();
        pdl::wait();
        pdl::launch_dependents();
        const uint32_t share = layer_parts::share_of_launch();
        uint32_t launch = 0;
        if (threadIdx.x == 96) launch = atomicAdd(&counters.started, share) / LayerCounters::kLaunch;
        shared.slots.template route<kThreads>(p);
        if (warp >= 4) {
            consume(p, shared);
        } else if (warp == 0) {
            copy_weights(up_weights, down_weights, p, shared);
        } else if (warp <= kCopyThreads / 32) {
            copy_tokens(p, shared);
        } else {
            layer_parts::mark_absent(p.layer.up, p.select, threadIdx.x % 32, 32);
            layer_parts::mark_absent(p.layer.down, p.select, threadIdx.x % 32, 32);
            __syncwarp();
            if (threadIdx.x == 96) layer_parts::await_marks(counters, share, launch, &shared.marked);
        }
    }

private:
    static __device__ __forceinline__ int row_blocks(const GroupedGemmParams& p) { return (p.rows + kRows - 1) / kRows; }
    static __device__ __forceinline__ int k_blocks(const GroupedGemmParams& p) { return Down::k_blocks(p); }

    // ---- units: GEMM1's in a fixed stride, then GEMM2's ----

    struct Unit {
        WorkUnit work;
        int tile;  // number in the schedule
        bool down;
    };

    // This CTA's units. Units of GEMM2 go first to the CTAs that have one unit of GEMM1 less. The first `extra_rounds` rounds go
    // to these CTAs alone, because GEMM2's units have fewer bytes. With less than a round of GEMM1's units there are no extra
    // rounds: a unit whose tokens are not there yet should have a ring to itself.
    class Units {
        const LayerParams& p_;
        const FewSlots& slots_;
        int tiles_, up_, down_, extra_, alone_;

    public:
        __device__ __forceinline__ Units(const LayerParams& p, int extra_rounds, const FewSlots& slots)
            : p_(p), slots_(slots), tiles_(slots.tile_count()), up_(blockIdx.x), extra_(0) {
            const int grid = gridDim.x, units = tiles_ * row_blocks(p.up), rest = units - layer_parts::divide(units, grid) * grid;
            const int rounds = units >= grid ? extra_rounds : 0;
            alone_ = grid - rest;
            if (int(blockIdx.x) >= rest)
                down_ = int(blockIdx.x) - rest, extra_ = rounds;
            else
                down_ = int(blockIdx.x) + (rounds + 1) * alone_;
        }

        __device__ __forceinline__ int tiles() const { return tiles_; }

        // Returns the next unit. Its expert is -1 if there is none left.
        __device__ __forceinline__ Unit next() {
            int unit = up_, blocks = row_blocks(p_.up);
            const bool down = unit >= tiles_ * blocks;
            if (down) {
                unit = down_, blocks = row_blocks(p_.down);
                down_ += extra_ > 0 ? alone_ : int(gridDim.x);
                --extra_;
            } else {
                up_ += gridDim.x;
            }
            const int number = layer_parts::divide(unit, blocks);
            if (number >= tiles_) return {{-1, 0, 0, 0}, 0, true};
            const Tile tile = slots_.tile(number);
            return {{tile.expert, tile.first, tile.count, unit - number * blocks}, number, down};
        }
    };

    // ---- weights: one thread copies one box for each stage ----

    static __device__ __forceinline__ void copy_weights(const CUtensorMap& up_weights, const CUtensorMap& down_weights,
                                                        const RoutedLayerParams& p, Shared& shared) {
        if (threadIdx.x != 0) return;
        RingPosition<Stages> ring;
        Units units(p.layer, p.extra_rounds, shared.slots);
#pragma unroll 1
        for (Unit unit = units.next(); unit.work.expert >= 0; unit = units.next()) {
            const CUtensorMap* weights = unit.down ? &down_weights : &up_weights;
            const int blocks = k_blocks(unit.down ? p.layer.down : p.layer.up);
#pragma unroll 1
            for (int block = 0; block < blocks; ++block, ring.advance()) {
                uint64_t* full = pipeline::begin_stage(shared, ring, kWeightBytes);
                sm90::copy_tensor_5d(shared.stage[ring.slot].weights, weights,
                                     {block * kBlockK, 0, 0, unit.work.row_block * (kRows / 16), unit.work.expert}, full);
                // GEMM2's tokens do not come with the stage: copy_inner() copies them.
                if (unit.down) sm90::barrier_arrive(full, kCopyThreads);
            }
        }
    }

    // ---- tokens; columns of the tile without a token keep old bytes ----

    static __device__ __forceinline__ void copy_tokens(const RoutedLayerParams& params, Shared& shared) {
        const LayerParams& p = params.layer;
        const int thread = threadIdx.x - 32;
        RingPosition<Stages> ring;
        RingPosition<1> inner;
        Units units(p, params.extra_rounds, shared.slots);
#pragma unroll 1
        for (Unit unit = units.next(); unit.work.expert >= 0; unit = units.next()) {
            if (!unit.down) {
                copy_input(p.up, unit.work, thread, shared, ring);
                continue;
            }
            sm90::barrier_wait(&shared.marked, 0);
            sm90::barrier_wait(&shared.inner_empty, inner.parity ^ 1);
            copy_inner(p.down, unit.work, thread, shared);
            sm90::barrier_arrive(&shared.inner_full);
            inner.advance();
        }
    }

    // Copies tokens stage by stage; 8 neighbouring threads copy 128 bytes of a row.
    static __device__ __forceinline__ void copy_input(const GroupedGemmParams& p, const WorkUnit& work, int thread,
                                                      Shared& shared, RingPosition<Stages>& ring) {
        const int chunk = thread % 8, token = thread / 8, blocks = k_blocks(p), columns = p.k / 8;
        const uint32_t swizzled = token * 128 + ((chunk ^ token) * 16);
        const int row = shared.slots.slot_of_place[work.first + min(token, work.count - 1)] / p.row_divisor;
        const uint4* source = reinterpret_cast<const uint4*>(p.x) + size_t(row) * columns;
#pragma unroll 1
        for (int block = 0; block < blocks; ++block, ring.advance()) {
            sm90::barrier_wait(&shared.empty[ring.slot], ring.parity ^ 1);
            // NOTE: beyond k the tokens must be zero as well as the weights: 0 * NaN is NaN.
            const int column = block * 8 + chunk;
            const bool inside = column < columns;
            const uint32_t tokens = sm90::shared_address(shared.stage[ring.slot].tokens) + swizzled;
            if (token < work.count) sm90::copy_16_async(tokens, source + (inside ? column : 0), inside);
            sm90::copy_async_arrive(&shared.full[ring.slot]);
        }
    }

    // Copies all of a unit's rows of GEMM1's output, as soon as they are there.
    static __device__ __forceinline__ void copy_inner(const GroupedGemmParams& p, const WorkUnit& work, int thread,
                                                      Shared& shared) {
        const uint32_t inner = sm90::shared_address(shared.inner);
        layer_parts::copy_inner<kCopyThreads>(p, work.first, work.count, thread, [&](int token, int column) {
            return inner + (column / 8 * Tokens + token) * 128 + ((column % 8 ^ token) * 16);
        });
    }

    // ---- consumers ----

    static __device__ __forceinline__ void consume(const RoutedLayerParams& params, Shared& shared) {
        const LayerParams& p = params.layer;
        RingPosition<Stages> ring;
        RingPosition<1> inner;
        Units units(p, params.extra_rounds, shared.slots);
#pragma unroll 1
        for (Unit unit = units.next(); unit.work.expert >= 0; unit = units.next()) {
            float sums[1][kWidth / 2];
#pragma unroll
            for (int i = 0; i < kWidth / 2; ++i) sums[0][i] = 0.f;
            // The number is the same in all lanes, but ptxas must know that: then the loop and descriptors live in uniform
            // registers.
            const int blocks = __shfl_sync(0xFFFFFFFF, k_blocks(unit.down ? p.down : p.up), 0);
            const int slice = unit.work.row_block * 4 + threadIdx.x / 32 % 4, first = unit.work.first, count = unit.work.count;
            typename Down::Biases bias;
            if (!unit.down) {
                Up::load_biases(unit.work, p.up, bias);
                Down::template multiply<kWidth>(blocks, sums, shared, ring);
                sm90::barrier_wait(&shared.marked, 0);
                const bool activated = Up::template prepare_sums<false, false>(unit.work, sums, bias, p.up);
                if (Gated && !activated)
                    layer_parts::store<Element, Gated, false>(first, count, slice, sums[0], p.up);
                else
                    layer_parts::store<Element, Gated, true>(first, count, slice, sums[0], p.up);
            } else {
                Down::load_biases(unit.work, p.down, bias);
                // The unit's tokens came after the marks, so there is no wait for marks here.
                sm90::barrier_wait(&shared.inner_full, inner.parity);
                multiply_inner(blocks, sums, shared, ring);
                sm90::barrier_arrive_if(&shared.inner_empty, threadIdx.x % 32 == 0);
                inner.advance();
                Down::add_biases(sums, bias, p.down);
                layer_parts::store<Element, false, true>(first, count, slice, sums[0], p.down);
            }
        }
        sm90::barrier_wait(&shared.marked, 0);
        layer_parts::combine<Element>(p.combine, shared.slots, threadIdx.x % 128);
    }

    // Multiplies as Down::multiply does, but all tokens are there: it waits only for a stage's weights, and releases a stage two
    // later.
    static __device__ __forceinline__ void multiply_inner(int blocks, float (&sums)[1][kWidth / 2], Shared& shared,
                                                          RingPosition<Stages>& ring) {
        const bool is_lane_0 = threadIdx.x % 32 == 0;
        uint32_t tokens = sm90::shared_address(shared.inner);
        int before = 0, previous = 0;
        sm90::fence_async_proxy();
#pragma unroll 1
        for (int block = 0; block < blocks; ++block, ring.advance(), tokens += Tokens * 128) {
            sm90::barrier_wait(&shared.full[ring.slot], ring.parity);
            const uint32_t weights = sm90::shared_address(shared.stage[ring.slot].weights);
            sm90::wgmma_fence();
#pragma unroll
            for (int i = 0; i < kBlockK / 16; ++i) {
                sm90::Wgmma<Element, kWidth>::multiply(sums[0], sm90::descriptor_128b(weights, i * 32),
                                                       sm90::descriptor_128b(tokens, i * 32), true);
            }
            sm90::wgmma_commit();
            sm90::wgmma_wait<2>();
            sm90::barrier_arrive_if(&shared.empty[before], block > 1 && is_lane_0);
            before = previous;
            previous = ring.slot;
        }
        sm90::wgmma_wait<0>();
        sm90::barrier_arrive_if(&shared.empty[before], blocks > 1 && is_lane_0);
        sm90::barrier_arrive_if(&shared.empty[previous], is_lane_0);
    }
};

}  // namespace oxmoe
