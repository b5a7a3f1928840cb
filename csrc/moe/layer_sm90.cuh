// GEMM1, GEMM2 and combine of a few tokens in one launch, for Hopper. Between separate launches the memory traffic falls to
// nothing and rises again. For few tokens this takes as long as reading the weights.
//
// A work unit is one tile of tokens times 64 weight rows, first of w13, then of w2. Units have a fixed stride over the CTAs, so
// every warp knows its CTA's units. Weights stream into shared memory without a break from one unit, and one matrix, to the next:
// while GEMM1 ends, w2 fills the ring. Only a GEMM2 unit's tokens wait, until all rows of GEMM1's output of their tile are there.
// The CTA that ends the last unit of 64 output columns sums these columns over the slots, in slot order.
//
// Warp 0 copies weights, warps 1 and 2 copy tokens, warp 3 does nothing, and warps 4 to 7 are the consumer warpgroup. Sums, their
// K order, epilogues and rounding are GroupedGemmSm90's and Combine's, and so are the bits.
//
// Progress: CTAs wait for each other, so the grid fits on the GPU at once (the plan sees to it). No launch that could keep CTAs
// out waits for this one, because its successors start after all of its CTAs.
#pragma once
#include <cstdint>
#include <cuda.h>

#include "../common/counter.cuh"
#include "../gemm/pipeline.cuh"
#include "combine.cuh"
#include "grouped_gemm_sm90.cuh"

namespace oxmoe {

// `Tokens` is the schedule's largest tile.
template <typename Element, bool Gated, int Tokens, int Stages>
struct LayerSm90 {
    static constexpr int kWidth = 16;  // the narrowest N that the epilogue transposes
    using Up = GroupedGemmSm90<Element, Gated, kWidth, 1, 1, Stages>;
    using Down = GroupedGemmSm90<Element, false, kWidth, 1, 1, Stages>;

    static constexpr int kRows = 64;
    static constexpr int kBlockK = 64;
    static constexpr int kWeightBytes = kRows * 128;
    static constexpr int kCopyThreads = 64;

    struct alignas(128) Shared {
        // NOTE: with 8 tokens, wgmma reads 8 columns, whose results are not used, from the weights after the tokens.
        struct {
            uint8_t tokens[Tokens * 128], weights[kWeightBytes];
        } stage[Stages];
        uint8_t staging[1][2 * Down::kStagingBytes];
        uint64_t full[Stages], empty[Stages];
        int tiles_before;
    };
    static_assert(Up::kStagingBytes <= Down::kStagingBytes, "one buffer for both epilogues");

    static constexpr int kThreads = 256;
    static constexpr int kSharedBytes = sizeof(Shared);
    static constexpr int kCtas = 2;
    static_assert(kCtas * (kSharedBytes + 1024) <= 228 * 1024, "CTAs on an SM");

    static __device__ __forceinline__ void run(const CUtensorMap& up_weights, const CUtensorMap& down_weights,
                                               const LayerParams& p) {
        extern __shared__ __align__(1024) uint8_t dynamic_shared[];
        Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared);
        if (threadIdx.x == 0) {
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
        const int warp = threadIdx.x / 32;
        if (warp == 0)
            copy_weights(up_weights, down_weights, p, shared);
        else if (warp <= kCopyThreads / 32)
            copy_tokens(p, shared);
        else if (warp >= 4)
            consume(p, shared);
    }

private:
    static __device__ __forceinline__ int row_blocks(const GroupedGemmParams& p) { return (p.rows + kRows - 1) / kRows; }
    static __device__ __forceinline__ int k_blocks(const GroupedGemmParams& p) { return Down::k_blocks(p); }

    struct Unit {
        WorkUnit work;
        int tile;  // number in the schedule
        bool down;
    };

    // Finds unit `unit`, tile by tile and matrix by matrix. Its expert is -1 beyond the last unit.
    static __device__ __forceinline__ Unit find(const LayerParams& p, int tiles, int unit) {
        const int up_units = tiles * row_blocks(p.up);
        const bool down = unit >= up_units;
        const int blocks = row_blocks(down ? p.down : p.up), number = (down ? unit - up_units : unit) / blocks;
        if (number >= tiles) return {{-1, 0, 0, 0}, 0, true};
        const Tile tile = p.up.tiles[number];
        return {{tile.expert, tile.first, tile.count, (down ? unit - up_units : unit) % blocks}, number, down};
    }

    // Finds this CTA's first unit. Its tile is loaded beside the number of tiles: entries after the last tile are there, too.
    static __device__ __forceinline__ Unit find_first(const LayerParams& p, int& tiles) {
        const int blocks = row_blocks(p.up), number = min(int(blockIdx.x) / blocks, p.max_tiles - 1);
        const Tile tile = p.up.tiles[number];
        tiles = *p.up.tile_count;
        if (int(blockIdx.x) >= tiles * blocks) return find(p, tiles, blockIdx.x);
        return {{tile.expert, tile.first, tile.count, int(blockIdx.x) % blocks}, number, false};
    }

    // ---- weights: one thread copies one box for each stage ----

    static __device__ __forceinline__ void copy_weights(const CUtensorMap& up_weights, const CUtensorMap& down_weights,
                                                        const LayerParams& p, Shared& shared) {
        if (threadIdx.x != 0) return;
        RingPosition<Stages> ring;
        int tiles, number = blockIdx.x;
        for (Unit unit = find_first(p, tiles), next; unit.work.expert >= 0; unit = next) {
            next = find(p, tiles, number += gridDim.x);
            const CUtensorMap* weights = unit.down ? &down_weights : &up_weights;
            const int blocks = k_blocks(unit.down ? p.down : p.up);
            for (int block = 0; block < blocks; ++block, ring.advance()) {
                uint64_t* full = pipeline::begin_stage(shared, ring, kWeightBytes);
                sm90::copy_tensor_5d(shared.stage[ring.slot].weights, weights,
                                     {block * kBlockK, 0, 0, unit.work.row_block * (kRows / 16), unit.work.expert}, full);
            }
        }
    }

    // ---- tokens: 8 neighbouring threads copy 128 bytes of a row; columns of the tile without a token keep old bytes ----

    static __device__ __forceinline__ void copy_tokens(const LayerParams& p, Shared& shared) {
        constexpr int kPassRows = kCopyThreads / 8, kPasses = Tokens / kPassRows;
        const int thread = threadIdx.x - 32, chunk = thread % 8, first = thread / 8;
        const uint32_t swizzled = first * 128 + ((chunk ^ first) * 16);
        RingPosition<Stages> ring;
        int tiles, number = blockIdx.x;
        for (Unit unit = find_first(p, tiles), next; unit.work.expert >= 0; unit = next) {
            next = find(p, tiles, number += gridDim.x);
            const GroupedGemmParams& gemm = unit.down ? p.down : p.up;
            const uint4* row[kPasses];
#pragma unroll
            for (int i = 0; i < kPasses; ++i) {
                const int place = unit.work.first + min(first + i * kPassRows, unit.work.count - 1);
                row[i] = reinterpret_cast<const uint4*>(gemm.x) +
                         size_t(unit.down ? place : p.up.slot_of_place[place] / p.up.row_divisor) * (gemm.k / 8);
            }
            if (unit.down) {
                if (threadIdx.x % 32 == 0) counter::wait_for(&p.tiles_done[unit.tile], row_blocks(p.up));
                __syncwarp();
            }
            const int blocks = k_blocks(gemm), columns = gemm.k / 8;
            for (int block = 0; block < blocks; ++block, ring.advance()) {
                sm90::barrier_wait(&shared.empty[ring.slot], ring.parity ^ 1);
                // NOTE: beyond k the tokens must be zero as well as the weights: 0 * NaN is NaN.
                const int column = block * 8 + chunk;
                const bool inside = column < columns;
                const uint32_t tokens = sm90::shared_address(shared.stage[ring.slot].tokens) + swizzled;
#pragma unroll
                for (int i = 0; i < kPasses; ++i) {
                    if (first + i * kPassRows < unit.work.count)
                        sm90::copy_16_async(tokens + i * kPassRows * 128, row[i] + (inside ? column : 0), inside);
                }
                sm90::copy_async_arrive(&shared.full[ring.slot]);
            }
        }
    }

    // ---- consumers ----

    static __device__ __forceinline__ void consume(const LayerParams& p, Shared& shared) {
        RingPosition<Stages> ring;
        uint32_t up_staging = 0, down_staging = 0;
        int tiles, number = blockIdx.x;
        for (Unit unit = find_first(p, tiles), next; unit.work.expert >= 0; unit = next) {
            next = find(p, tiles, number += gridDim.x);
            float sums[1][kWidth / 2];
#pragma unroll
            for (int i = 0; i < kWidth / 2; ++i) sums[0][i] = 0.f;
            // The number is the same in all lanes, but ptxas must know that: then the loop and descriptors live in uniform
            // registers.
            const int blocks = __shfl_sync(0xFFFFFFFF, k_blocks(unit.down ? p.down : p.up), 0);
            Down::template multiply<kWidth>(blocks, sums, shared, ring);
            if (unit.down) {
                finish<Down>(unit.work, sums, p.down, shared, down_staging);
                combine_if_last(p, shared, unit.work.row_block, tiles);
            } else {
                finish<Up>(unit.work, sums, p.up, shared, up_staging);
                sm90::named_barrier(1, 128);
                if (threadIdx.x % 128 == 0) counter::add_only(&p.tiles_done[unit.tile]);
            }
        }
        // If no slot has an expert of this rank, no unit will ever be the last.
        if (tiles == 0) {
            for (int block = blockIdx.x; block < row_blocks(p.down); block += gridDim.x) combine(p, block, threadIdx.x % 128);
        }
    }

    template <typename Gemm>
    static __device__ __forceinline__ void finish(const WorkUnit& work, float (&sums)[1][kWidth / 2], const GroupedGemmParams& p,
                                                  Shared& shared, uint32_t& staging) {
        typename Gemm::Biases bias;
        Gemm::load_biases(work, p, bias);
        const bool activated = Gemm::prepare_sums(work, sums, bias, p);
        if (Gemm::kGated && !activated)
            Gemm::template store<false>(work, sums, p, shared, staging);
        else
            Gemm::template store<true>(work, sums, p, shared, staging);
    }

    // ---- combine: 64 columns are 8 vectors of each token ----

    static constexpr int kVectors = kRows / 8;

    // Sums item `item` of a row block's `rows * kVectors`. A thread without an item of its own takes part with the last one, and
    // stores nothing.
    template <typename Ready>
    static __device__ __forceinline__ void sum(const LayerParams& p, int row_block, int item, Ready ready) {
        const int row = item / kVectors, column = row_block * kVectors + item % kVectors, columns = p.combine.hidden / 8;
        const int rows = Combine<Element>::row_count(p.combine);
        const bool mine = row < rows && column < columns;
        Combine<Element>::template sum_vector<uint4>(p.combine, min(row, rows - 1), min(column, columns - 1),
                                                     [&] { return ready() && mine; });
    }

    static __device__ __forceinline__ void combine(const LayerParams& p, int row_block, int first_item) {
        const int items = Combine<Element>::row_count(p.combine) * kVectors;
        for (int item = first_item; item < items; item += 128) sum(p, row_block, item, [] { return true; });
    }

    static __device__ __forceinline__ void combine_if_last(const LayerParams& p, Shared& shared, int row_block, int tiles) {
        const int thread = threadIdx.x % 128;
        bool arrived = false, last = false;
        // The maps of every thread's first item are loaded while the CTA learns whether it is the last.
        sum(p, row_block, thread, [&] {
            if (!arrived) {
                sm90::named_barrier(1, 128);
                if (thread == 0) shared.tiles_before = counter::add(&p.rows_done[row_block]);
                sm90::named_barrier(1, 128);
                last = shared.tiles_before == tiles - 1;
                arrived = true;
            }
            return last;
        });
        if (last) combine(p, row_block, thread + 128);
    }
};

}  // namespace oxmoe
