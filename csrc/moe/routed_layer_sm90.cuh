// A whole layer of few tokens in one launch, for Hopper: routing, GEMM1, GEMM2 and combine. LayerSm90 with the routing inside:
// every CTA routes for itself (few_slots.cuh), so that no table goes through global memory and weights are asked for as soon as
// the experts are known.
//
// Counters: nobody zeroes them before the launch, so they are not the workspace's but this module's, all zero when it is loaded.
// Launches on one workspace follow each other and have a slot of them. Each launch adds kLaunch to `arrivals`, which numbers
// them; launches take the two sets in turn and clear the other's.
//
// Warps: 0 weight copies, 1 and 2 token copies, 3 clears counters, 4 to 7 the consumer warpgroup; all of them route. Sums, their
// K order, epilogues and rounding are GroupedGemmSm90's and Combine's, and so are the bits.
//
// Progress: CTAs wait for each other, so the grid fits on the GPU at once (the plan sees to it), and no launch that could keep
// CTAs out waits for this one: its successors start after all of them did.
#pragma once
#include <cstdint>
#include <cuda.h>

#include "../common/counter.cuh"
#include "combine.cuh"
#include "few_slots.cuh"
#include "grouped_gemm_sm90.cuh"

namespace oxmoe {

struct LayerCounters {
    static constexpr uint32_t kSlots = 256, kLaunch = 1024, kMostRowBlocks = 192;

    struct Set {
        int tiles_done[FewSlots::kMost];  // row blocks of GEMM1 that are done, by tile
        int rows_done[kMostRowBlocks];    // tiles of GEMM2 that are done, by row block
    };
    Set set[2];
    uint32_t arrivals;
};
static __device__ LayerCounters layer_counters[LayerCounters::kSlots];

template <typename Element, bool Gated, int Tokens, int Stages>
struct RoutedLayerSm90 {
    static constexpr int kWidth = 16;  // the narrowest N that the epilogue turns
    using Up = GroupedGemmSm90<Element, Gated, kWidth, 1, 1, Stages>;
    using Down = GroupedGemmSm90<Element, false, kWidth, 1, 1, Stages>;
    using CombineVector = uint32_t;

    static constexpr int kRows = 64;
    static constexpr int kBlockK = 64;
    static constexpr int kWeightBytes = kRows * 128;
    static constexpr int kCopyThreads = 64;
    static_assert(Tokens == kCopyThreads / 8 && Tokens == FewSlots::kMostTokens, "a row of the tile has 8 threads");

    struct alignas(128) Shared {
        // NOTE: wgmma reads 8 columns that nobody looks at from the weights behind the tokens.
        struct {
            uint8_t tokens[Tokens * 128], weights[kWeightBytes];
        } stage[Stages];
        uint8_t staging[1][2 * Down::kStagingBytes];
        FewSlots slots;
        uint64_t full[Stages], empty[Stages];
        int set;  // of the counters, 0 or 1
        int tiles_before;
    };
    static_assert(Up::kStagingBytes <= Down::kStagingBytes, "one buffer for both epilogues");

    static constexpr int kThreads = 256;
    static constexpr int kSharedBytes = sizeof(Shared);
    static constexpr int kCtas = 2;
    static_assert(kCtas * (kSharedBytes + 1024) <= 228 * 1024, "CTAs on an SM");

    static __device__ __forceinline__ void run(const CUtensorMap& up_weights, const CUtensorMap& down_weights,
                                               const RoutedLayerParams& p) {
        extern __shared__ __align__(1024) uint8_t dynamic_shared[];
        Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared);
        const int warp = warp_of_block();
        // Constants that would otherwise be fetched when they are needed.
        LayerCounters* counters_at = &layer_counters[p.counter_slot];
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
            sm90::barrier_init_fence();
            sm90::prefetch_tensor_map(&up_weights);
            sm90::prefetch_tensor_map(&down_weights);
        }
        __syncthreads();
        pdl::wait();
        pdl::launch_dependents();
        if (threadIdx.x == 96) {
            const uint32_t share = blockIdx.x == 0 ? LayerCounters::kLaunch + 1 - gridDim.x : 1;
            shared.set = atomicAdd(&counters.arrivals, share) / LayerCounters::kLaunch % 2;
        }
        shared.slots.route(p.select, p.experts, p.first_expert);
        if (warp >= 4)
            consume(p, shared, counters);
        else if (warp == 0)
            copy_weights(up_weights, down_weights, p, shared);
        else if (warp <= kCopyThreads / 32)
            copy_tokens(p, shared, counters);
        else if (blockIdx.x == 0)
            clear(counters.set[shared.set ^ 1]);
    }

private:
    static __device__ __forceinline__ int row_blocks(const GroupedGemmParams& p) { return (p.rows + kRows - 1) / kRows; }
    static __device__ __forceinline__ int k_blocks(const GroupedGemmParams& p) { return (p.k + kBlockK - 1) / kBlockK; }

    static __device__ __forceinline__ void clear(LayerCounters::Set& set) {
        int* words = reinterpret_cast<int*>(&set);
#pragma unroll 1
        for (int i = threadIdx.x % 32; i < int(sizeof(set) / sizeof(int)); i += 32) words[i] = 0;
    }

    // Exact below 2^21: the error is less than half of 1 / d.
    static __device__ __forceinline__ int divide(int n, int d) { return int((float(n) + 0.5f) * reciprocal_fast(float(d))); }

    // ---- units: GEMM1's in a fixed stride, then GEMM2's ----

    struct Unit {
        WorkUnit work;
        int tile;  // number in the schedule
        bool down;
    };

    // This CTA's units. Those of GEMM2 go first to the CTAs that have one of GEMM1 less, the first `extra_rounds` rounds of them
    // to these alone: GEMM2's units have the fewer bytes. With less than a round of GEMM1's there are no extra rounds: a unit
    // whose tokens are not there yet should have a ring to itself.
    class Units {
        const LayerParams& p_;
        const FewSlots& slots_;
        int tiles_, up_, down_, extra_, alone_;

    public:
        __device__ __forceinline__ Units(const LayerParams& p, int extra_rounds, const FewSlots& slots)
            : p_(p), slots_(slots), tiles_(slots.tile_count()), up_(blockIdx.x), extra_(0) {
            const int grid = gridDim.x, units = tiles_ * row_blocks(p.up), rest = units - divide(units, grid) * grid;
            const int rounds = units >= grid ? extra_rounds : 0;
            alone_ = grid - rest;
            if (int(blockIdx.x) >= rest)
                down_ = int(blockIdx.x) - rest, extra_ = rounds;
            else
                down_ = int(blockIdx.x) + (rounds + 1) * alone_;
        }

        __device__ __forceinline__ int tiles() const { return tiles_; }

        // Expert -1: no more.
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
            const int number = divide(unit, blocks);
            if (number >= tiles_) return {{-1, 0, 0, 0}, 0, true};
            const Tile tile = slots_.tile(number);
            return {{tile.expert, tile.first, tile.count, unit - number * blocks}, number, down};
        }
    };

    // ---- weights: one thread, one box a stage ----

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
                sm90::barrier_wait(&shared.empty[ring.slot], ring.parity ^ 1);
                sm90::barrier_arrive_expect(&shared.full[ring.slot], kWeightBytes);
                sm90::copy_tensor_5d(shared.stage[ring.slot].weights, weights,
                                     {block * kBlockK, 0, 0, unit.work.row_block * (kRows / 16), unit.work.expert},
                                     &shared.full[ring.slot]);
            }
        }
    }

    // ---- tokens: 8 neighbouring threads copy 128 bytes of a row; columns of the tile without a token keep old bytes ----

    static __device__ __forceinline__ void copy_tokens(const RoutedLayerParams& params, Shared& shared,
                                                       const LayerCounters& counters) {
        const LayerParams& p = params.layer;
        const int thread = threadIdx.x - 32, chunk = thread % 8, token = thread / 8;
        const uint32_t swizzled = token * 128 + ((chunk ^ token) * 16);
        RingPosition<Stages> ring;
        Units units(params.layer, params.extra_rounds, shared.slots);
#pragma unroll 1
        for (Unit unit = units.next(); unit.work.expert >= 0; unit = units.next()) {
            const GroupedGemmParams& gemm = unit.down ? p.down : p.up;
            const int place = unit.work.first + min(token, unit.work.count - 1);
            const int row = unit.down ? place : shared.slots.slot_of_place[place] / p.up.row_divisor;
            const int blocks = k_blocks(gemm), columns = gemm.k / 8;
            const uint4* source = reinterpret_cast<const uint4*>(gemm.x) + size_t(row) * columns;
            if (unit.down) {
                if (threadIdx.x % 32 == 0) counter::wait_for(&counters.set[shared.set].tiles_done[unit.tile], row_blocks(p.up));
                __syncwarp();
            }
#pragma unroll 1
            for (int block = 0; block < blocks; ++block, ring.advance()) {
                sm90::barrier_wait(&shared.empty[ring.slot], ring.parity ^ 1);
                // NOTE: beyond k the tokens must be zero as well as the weights: 0 * NaN is NaN.
                const int column = block * 8 + chunk;
                const bool inside = column < columns;
                const uint32_t tokens = sm90::shared_address(shared.stage[ring.slot].tokens) + swizzled;
                if (token < unit.work.count) sm90::copy_16_async(tokens, source + (inside ? column : 0), inside);
                sm90::copy_async_arrive(&shared.full[ring.slot]);
            }
        }
    }

    // ---- consumers ----

    static __device__ __forceinline__ void consume(const RoutedLayerParams& params, Shared& shared, LayerCounters& counters) {
        const LayerParams& p = params.layer;
        RingPosition<Stages> ring;
        uint32_t up_staging = 0, down_staging = 0;
        LayerCounters::Set& set = counters.set[shared.set];
        Units units(params.layer, params.extra_rounds, shared.slots);
        const int tiles = units.tiles();
        const bool counts = tiles > 0, counter = counts && threadIdx.x % 128 == 0;
#pragma unroll 1
        for (int step = 0;; ++step) {
            Unit unit{{0, 0, 0, int(blockIdx.x) + step * int(gridDim.x)}, 0, true};
            if (counts) {
                unit = units.next();
                if (unit.work.expert < 0) break;
            } else {
                // No slot has an expert here: no unit would ever be the last.
                if (unit.work.row_block >= row_blocks(p.down)) break;
            }
            float sums[1][kWidth / 2];
#pragma unroll
            for (int i = 0; i < kWidth / 2; ++i) sums[0][i] = 0.f;
            // The same in all lanes, but ptxas must know: then the loop and descriptors live in uniform registers.
            const int blocks = __shfl_sync(0xFFFFFFFF, k_blocks(unit.down ? p.down : p.up), 0);
            typename Down::Biases bias;
            if (unit.down)
                Down::load_biases(unit.work, p.down, bias);
            else
                Up::load_biases(unit.work, p.up, bias);
            if (counts) Down::template multiply<kWidth>(blocks, sums, shared, ring);
            if (!unit.down) {
                const bool activated = Up::template prepare_sums<false, false>(unit.work, sums, bias, p.up);
                if (Gated && !activated)
                    Up::template store<false>(unit.work, sums, p.up, shared, up_staging);
                else
                    Up::template store<true>(unit.work, sums, p.up, shared, up_staging);
                sm90::named_barrier(1, 128);
                if (counter) counter::add_only(&set.tiles_done[unit.tile]);
            } else {
                Down::add_biases(sums, bias, p.down);
                Down::template store<true>(unit.work, sums, p.down, shared, down_staging);
                sm90::named_barrier(1, 128);
                if (counter) shared.tiles_before = counter::add(&set.rows_done[unit.work.row_block]);
                sm90::named_barrier(1, 128);
                if (!counts || shared.tiles_before == tiles - 1) combine(p, shared, unit.work.row_block);
            }
        }
    }

    // The 64 columns of a row block.
    static __device__ __forceinline__ void combine(const LayerParams& p, const Shared& shared, int row_block) {
        constexpr int kColumns = sizeof(CombineVector) / 2, kVectors = kRows / kColumns;
        const int rows = Combine<Element>::row_count(p.combine), columns = p.combine.hidden / kColumns;
        const bool weighted = p.combine.weights != nullptr;
#pragma unroll 1
        for (int item = threadIdx.x % 128; item < rows * kVectors; item += 128) {
            const int column = row_block * kVectors + item % kVectors;
            if (column >= columns) continue;
            Combine<Element>::template sum_vector<CombineVector>(
                p.combine, item / kVectors, column, [&](size_t slot) { return shared.slots.place(int(slot)); },
                [&](size_t slot) { return weighted ? shared.slots.weight[slot] : 1.f; }, [] { return true; });
        }
    }
};

}  // namespace oxmoe
