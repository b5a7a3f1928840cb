// Grouped GEMM for Hopper, 16-bit in and out: out[place] = activation(weights[expert(place)] x[row(place)] +
// bias[expert(place)]).
//
// Weights are wgmma's A (64 rows each), tokens its N: a multiplication is only as wide as the tile's count needs.
//
// A layer's weights push its code out of every cache, and a cold line of code costs as much as any other access to memory. Hence
// no loop is unrolled that does not need it.
//
// The kernel is persistent and warp-specialised. Warps 0 to 3 do weight copies, schedule and, with two warps, token gathering.
// Then come `Consumers` warpgroups, each with RowTiles x 64 weight rows.
//
// Needs k % 8 == 0, rows % 16 == 0 (gated: out_columns % 8 == 0), 16-byte aligned x, weights and out. The portable kernel takes
// any other shape. A box of the weights' tensor map has 64 x 8 x 2 x (kRows / 16) x 1 elements, in the 128-byte swizzle. The map
// orders rows as slices of 16, each two halves of 8. Gated kinds need 8 gate rows and the 8 matching up rows in a slice, so that
// one lane holds a gate and its up; the strides see to it (I = out_columns):
//   dimension                k    row in half    half    slice        expert
//   size                     k    8              2       rows / 16    experts
//   stride in rows, plain         1              8       16           rows
//   [gate; up], [up; gate]        1              I       8            2 I
//   interleaved                   2              1       16           2 I
// If a consumer has two row tiles, they are a pair. A strip of 32 rows is a slice in each of them. It is ordered so that a lane's
// sums of a token are neighbouring columns of the output, which are stored from registers. Needs rows % 32 == 0 (gated:
// out_columns % 16 == 0). A box is 64 x 8 x 1 x 2 x 4. Strips count on from expert to expert (E experts; the last dimension ends
// where the last half does):
//   dimension                k    row in half    tile of pair    half    strip
//   size                     k    8              2               2       E rows / 32, halves: (2 E - 1) I / 16
//   stride in rows, plain         4              2               1       32
//   [gate; up], [up; gate]        2              1               I       16
//   interleaved                   4              2               1       32
#pragma once
#include <cstdint>
#include <cuda.h>

#include "../common/activation.cuh"
#include "../common/element.cuh"
#include "../common/pdl.cuh"
#include "../common/ring.cuh"
#include "../common/sm90.cuh"
#include "../common/wgmma.cuh"
#include "gemm_overlap_sm90.cuh"
#include "oxmoe/src/params/moe.rs.h"
#include "work_unit_sm90.cuh"

namespace oxmoe {

template <typename Element, bool Gated, int MaxTokens, int RowTiles, int Consumers, int Stages>
struct GroupedGemmSm90 {
    static_assert(MaxTokens % 16 == 0 && MaxTokens <= 256, "a token tile is a wgmma N that the epilogue turns 16 at a time");
    static_assert(MaxTokens * RowTiles <= 384, "the sums must fit in registers");
    static_assert(RowTiles <= 2, "row tiles stand alone or in pairs");
    static_assert(Stages >= 2, "a stage is released while the next is multiplied");

    using Overlap = GemmOverlapSm90<GroupedGemmSm90>;

    static constexpr bool kGated = Gated;
    static constexpr int kRows = 64 * RowTiles * Consumers;
    static constexpr int kBlockK = 64;  // 128 bytes: a row of the swizzle
    static constexpr int kWeightTileBytes = 64 * 128;
    static constexpr int kTokenBytes = MaxTokens * 128;
    static constexpr int kWeightBytes = RowTiles * Consumers * kWeightTileBytes;
    static constexpr int kUnitSlots = 2;
    static constexpr int kGatherThreads = 64;
    static constexpr int kFetchLead = 8;               // K blocks between fetching a unit and starting it
    static constexpr int kOutputBits = Gated ? 3 : 4;  // log2 of a warp's output columns in a row tile
    // A warpgroup's epilogue takes chunks of tokens that fill a 4 KB buffer. It takes chunks of 16 if MaxTokens is no multiple of
    // these, or if there are four consumers.
    static constexpr int kOutputBytes = Gated ? 64 : 128;
    static constexpr int kFullChunk = MaxTokens < 4096 / kOutputBytes ? MaxTokens : 4096 / kOutputBytes;
    static constexpr int kChunk = MaxTokens % kFullChunk == 0 && Consumers < 4 ? kFullChunk : 16;
    static constexpr int kStagingBytes = kChunk * kOutputBytes;
    static constexpr bool kPaired = RowTiles == 2;
    // Distance between the widths that a tile can be multiplied at.
    static constexpr int kWidthStep = kPaired ? 8 : 16;

    struct alignas(128) Shared {
        struct {
            uint8_t tokens[kTokenBytes], weights[kWeightBytes];
        } stage[Stages];
        uint8_t staging[Consumers][kPaired ? 8 : 2 * kStagingBytes];
        uint32_t source[kUnitSlots][MaxTokens];  // start of a token's row of x, in 16-byte units
        WorkUnit unit[kUnitSlots];
        uint64_t full[Stages], empty[Stages], unit_full[kUnitSlots], unit_empty[kUnitSlots], fetch_next;
        uint64_t stored[kUnitSlots];
    };
    static_assert(sizeof(Shared::stage[0]) % 1024 == 0, "stages start at a swizzle atom");

    static constexpr int kThreads = 128 * (1 + Consumers);
    static constexpr int kSharedBytes = sizeof(Shared);
    // The limit is 228 KB of shared memory an SM, 1 KB of which the system takes for each CTA.
    static constexpr int kCtasByShared = 228 * 1024 / (kSharedBytes + 1024);
    static constexpr int kCtasByRegisters = MaxTokens * RowTiles >= 128 ? 1
                                            : MaxTokens * RowTiles > 32 ? 768 / kThreads
                                                                        : 1152 / kThreads;
    static constexpr int kCtas = kCtasByShared < kCtasByRegisters ? kCtasByShared : kCtasByRegisters;
    // Beyond 128 sums a thread, consumers take registers from the producers: 56 + 2 * 224 is as many as 3 * 168.
    static constexpr bool kMovesRegisters = MaxTokens * RowTiles > 256;
    static_assert(!kMovesRegisters || Consumers == 2, "the registers of all threads");

    static __device__ __forceinline__ void run(const CUtensorMap& weights, const GroupedGemmParams& p) {
        extern __shared__ __align__(1024) uint8_t dynamic_shared[];
        Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared);
        if (threadIdx.x == 0) {
            Overlap::init_barriers(shared, 128 * Consumers);
            init_barriers(shared, 4 * Consumers);
            sm90::prefetch_tensor_map(&weights);
        }
        __syncthreads();
        // NOTE: with an older schedule only x is in flight, and only the gathering warps wait.
        if (!p.schedule_is_older) pdl::wait();
        if (threadIdx.x < 128) {
            if constexpr (kMovesRegisters) sm90::registers_decrease<56>();
            const int warp = threadIdx.x / 32;
            if (warp == 0)
                copy_weights(weights, p, shared);
            else if (warp == 1)
                p.done || p.awaited ? Overlap::schedule(p, shared) : schedule(p, shared);
            else
                gather(p, shared);
        } else {
            if constexpr (kMovesRegisters) sm90::registers_increase<224>();
            consume(p, shared);
        }
    }

    // The functions from here on also serve the fused layer and the MXFP4 kernel: `Buffers` is any struct with the members of
    // Shared they use.

    template <typename Buffers>
    static __device__ __forceinline__ void init_barriers(Buffers& shared, int readers) {
#pragma unroll 1
        for (int s = 0; s < Stages; ++s) {
            sm90::barrier_init(&shared.full[s], 1 + kGatherThreads);
            sm90::barrier_init(&shared.empty[s], readers);
        }
        init_unit_barriers(shared, 1 + kGatherThreads + 128 * Consumers);
        sm90::barrier_init_fence();
    }

    // `readers` is the number of threads that take units.
    template <typename Buffers>
    static __device__ __forceinline__ void init_unit_barriers(Buffers& shared, int readers) {
        for (int u = 0; u < kUnitSlots; ++u) {
            sm90::barrier_init(&shared.unit_full[u], 32);
            sm90::barrier_init(&shared.unit_empty[u], readers);
        }
        sm90::barrier_init(&shared.fetch_next, 1);
    }

    // NOTE: this is from a shuffle, so that ptxas knows it to be the same in all lanes and keeps descriptors in uniform
    // registers.
    static __device__ __forceinline__ int consumer_index() { return __shfl_sync(0xFFFFFFFF, threadIdx.x / 128 - 1, 0); }

    // Whether any of a consumer's rows lies inside the expert's weights, and inside the unit, which may be one consumer's.
    static __device__ __forceinline__ bool has_rows(const GroupedGemmParams& p, const WorkUnit& work, int consumer) {
        if (work.row_block < 0) return ~work.row_block % Consumers == consumer;
        return (work.row_block * Consumers + consumer) * RowTiles * 64 < p.rows;
    }

    // The row block of a unit, which may be one consumer's.
    static __device__ __forceinline__ int row_block(const WorkUnit& work) {
        return work.row_block < 0 ? ~work.row_block / Consumers : work.row_block;
    }

    static __device__ __forceinline__ int k_blocks(const GroupedGemmParams& p) { return (p.k + kBlockK - 1) / kBlockK; }

    // ---- schedule: one warp turns the schedule's tiles into work units ----

    // `SplitsLast`: when all CTAs have had equally many units, the units that are left go out consumer by consumer, if each CTA
    // then gets at most one.
    template <bool ByExpert = kPaired, bool SplitsLast = false, typename Buffers>
    static __device__ __forceinline__ void schedule(const GroupedGemmParams& p, Buffers& shared) {
        const int lane = threadIdx.x % 32, row_blocks = (p.rows + kRows - 1) / kRows, tile_count = *p.tile_count;
        const int units = tile_count * row_blocks, left = units % gridDim.x;
        const int whole = SplitsLast && left * Consumers <= gridDim.x ? units - left : units;
        const auto unit_at = [&](int unit) {
            WorkUnit work{-1, 0, 0, 0};
            const int parts = max(0, unit - whole), number = min(unit, whole + parts / Consumers);
            if (number >= units) return work;
            if constexpr (ByExpert)
                find_unit_by_expert(p.tiles, tile_count, row_blocks, number, work);
            else
                find_unit(p.tiles, tile_count, row_blocks, number, work);
            if (SplitsLast && number >= whole) work.row_block = ~(work.row_block * Consumers + parts % Consumers);
            return work;
        };
        const auto next = [&](int unit) {
            if (!p.next_unit) return unit + int(gridDim.x);
            if (lane == 0) unit = gridDim.x + atomicAdd(p.next_unit, 1);
            return __shfl_sync(0xFFFFFFFF, unit, 0);
        };
        hand_out<SplitsLast>(p, shared, p.next_unit != nullptr, blockIdx.x, next, unit_at, [](const WorkUnit&) {});
    }

    // Hands out the first unit, and `next(unit)` after each, as `unit_at(unit)` returns them, until a unit's expert is -1.
    // `on_demand`: a unit is fetched only when the previous one nears its end. `handed_out(unit)` is called after each.
    template <bool SplitsLast, typename Params, typename Buffers, typename Next, typename UnitAt, typename HandedOut>
    static __device__ __forceinline__ void hand_out(const Params& params, Buffers& shared, bool on_demand, int unit, Next next,
                                                    UnitAt unit_at, HandedOut handed_out) {
        const int lane = threadIdx.x % 32;
        RingPosition<kUnitSlots> ring;
        RingPosition<1> fetches;
        for (;; ring.advance(), fetches.advance()) {
            auto work = unit_at(unit);
            const GroupedGemmParams& p = gemm_of(params, work);
            // This skips row tiles of the last row block that an expert does not have.
            while (SplitsLast && work.row_block < 0 && ~work.row_block * 64 >= p.rows) {
                unit = next(unit);
                work = unit_at(unit);
            }
            sm90::barrier_wait(&shared.unit_empty[ring.slot], ring.parity ^ 1);
#pragma unroll 1
            for (int n = lane; n < work.count; n += 32) {
                shared.source[ring.slot][n] = x_row(params, p, work.first + n) * (p.k / 8);
            }
            if (lane == 0) shared.unit[ring.slot] = work;
            sm90::barrier_arrive(&shared.unit_full[ring.slot]);
            handed_out(work);
            if (work.expert < 0) break;
            if (on_demand) sm90::barrier_wait(&shared.fetch_next, fetches.parity);
            unit = next(unit);
        }
    }

    // ---- tokens: 8 neighbouring threads copy 128 bytes of a row; columns of the tile without a token keep old bytes ----

    // `Blocks` is the number of K blocks in a stage. The copies of `first_of_unit(work, sources, thread)` are done when those of
    // the unit's first stage are.
    template <int Blocks = 1, typename Buffers, typename... F>
    static __device__ __forceinline__ void gather(const GroupedGemmParams& p, Buffers& shared, F... first_of_unit) {
        // In a pass each thread copies from one row. Whole groups of passes run unrolled from registers, the rest of the tile in
        // a loop.
        constexpr int kPassRows = kGatherThreads / 8, kGroup = 4, kGroupRows = kGroup * kPassRows,
                      kGroups = MaxTokens / kGroupRows;
        const int thread = threadIdx.x % kGatherThreads, chunk = thread % 8, first = thread / 8, chunks = p.k / 8;
        const uint32_t swizzled = first * 128 + ((chunk ^ first) * 16);
        RingPosition<kUnitSlots> units;
        RingPosition<Stages> ring;
        Overlap::wait(p);
        pdl::launch_dependents();
        for (WorkUnit work; await_unit(shared, units, work); units.advance()) {
            const uint32_t* sources = shared.source[units.slot];
            (first_of_unit(work, sources, thread), ...);
            const int grouped = work.count / kGroupRows * kGroupRows;
            uint32_t source[kGroups > 0 ? kGroups : 1][kGroup];
#pragma unroll
            for (int i = 0; i < kGroups * kGroup; ++i) source[i / kGroup][i % kGroup] = sources[first + i * kPassRows];
#pragma unroll 1
            for (int block = 0, staged = 0; block < k_blocks(p); ++block) {
                if (staged == 0) sm90::barrier_wait(&shared.empty[ring.slot], ring.parity ^ 1);
                // NOTE: beyond k the tokens must be zero as well as the weights: 0 * NaN is NaN.
                const bool inside = block * 8 + chunk < chunks;
                const uint4* x = reinterpret_cast<const uint4*>(p.x) + (inside ? block * 8 + chunk : 0);
                asm("" : "+l"(x));  // one sum for each block instead of one for each row
                const uint32_t tokens = sm90::shared_address(shared.stage[ring.slot].tokens) + staged * kTokenBytes + swizzled;
#pragma unroll
                for (int group = 0; group < kGroups; ++group) {
                    if (group * kGroupRows >= grouped) break;
#pragma unroll
                    for (int i = 0; i < kGroup; ++i) {
                        sm90::copy_16_async(tokens + (group * kGroupRows + i * kPassRows) * 128, x + source[group][i], inside);
                    }
                }
#pragma unroll 1
                for (int n = grouped + first; n < work.count; n += kPassRows) {
                    sm90::copy_16_async(tokens + (n - first) * 128, x + sources[n], inside);
                }
                if (++staged < Blocks && block + 1 < k_blocks(p)) continue;
                staged = 0;
                sm90::copy_async_arrive(&shared.full[ring.slot]);
                ring.advance();
            }
            sm90::barrier_arrive(&shared.unit_empty[units.slot]);
        }
    }

private:
    // ---- weights: one thread copies one box for each stage, or two for each consumer that has rows ----

    static __device__ __forceinline__ void copy_weights(const CUtensorMap& weights, const GroupedGemmParams& p, Shared& shared) {
        if (threadIdx.x != 0) return;
        // NOTE: this is as late as the latency allows: a CTA that takes a unit early holds work back from idle ones.
        const int fetch_block = max(0, k_blocks(p) - kFetchLead);
        RingPosition<kUnitSlots> units;
        RingPosition<Stages> ring;
        const int expert_strips = !Gated || p.layout == W13Layout::Interleaved ? p.rows / 32 : p.rows / 16;
        for (WorkUnit work; take_unit(shared, units, work); units.advance()) {
            const int first_strip = work.expert * expert_strips + work.row_block * (kRows / 32);
#pragma unroll 1
            for (int block = 0; block < k_blocks(p); ++block, ring.advance()) {
                if (block == fetch_block) sm90::barrier_arrive(&shared.fetch_next);
                sm90::barrier_wait(&shared.empty[ring.slot], ring.parity ^ 1);
                if constexpr (kPaired) {
                    const int consumers = has_rows(p, work, Consumers - 1) ? Consumers : Consumers - 1;
                    sm90::barrier_arrive_expect(&shared.full[ring.slot], consumers * RowTiles * kWeightTileBytes);
                    for (int tile = 0; tile < consumers * RowTiles; ++tile) {
                        sm90::copy_tensor_5d(shared.stage[ring.slot].weights + tile * kWeightTileBytes, &weights,
                                             {block * kBlockK, 0, tile % 2, 0, first_strip + tile / 2 * 4},
                                             &shared.full[ring.slot]);
                    }
                    continue;
                }
                sm90::barrier_arrive_expect(&shared.full[ring.slot], kWeightBytes);
                sm90::copy_tensor_5d(shared.stage[ring.slot].weights, &weights,
                                     {block * kBlockK, 0, 0, work.row_block * (kRows / 16), work.expert},
                                     &shared.full[ring.slot]);
            }
        }
    }

    // ---- consumers ----

    static __device__ __forceinline__ void consume(const GroupedGemmParams& p, Shared& shared) {
        RingPosition<kUnitSlots> units;
        RingPosition<Stages> ring;
        uint32_t staging = 0;
        for (WorkUnit work; take_uniform_unit(shared, units, work); units.advance()) {
            if (kPaired && !has_rows(p, work, consumer_index())) {
                for (int block = 0; block < k_blocks(p); ++block, ring.advance()) {
                    sm90::barrier_wait(&shared.full[ring.slot], ring.parity);
                    sm90::barrier_arrive_if(&shared.empty[ring.slot], threadIdx.x % 32 == 0);
                }
                Overlap::stored(p, shared, units.slot);
                continue;
            }
            Biases bias;
            load_biases(work, p, bias);
            // NOTE: this clears all sums, also those that the width does not use: ptxas serializes wgmma on undefined sums
            // (C7515). It is in asm, because otherwise every width gets its own copy of the zeroing.
            float sums[RowTiles][MaxTokens / 2];
#pragma unroll
            for (int i = 0; i < RowTiles * MaxTokens / 2; ++i) {
                asm volatile("mov.b32 %0, 0;" : "=f"(sums[i / (MaxTokens / 2)][i % (MaxTokens / 2)]));
            }
            multiply_at_width<16, MaxTokens>(work.count, k_blocks(p), sums, shared, ring);
            const bool activated = prepare_sums(work, sums, bias, p);
            if (!Gated || activated)
                store<true>(work, sums, p, shared, staging);
            else
                store<false>(work, sums, p, shared, staging);
            Overlap::stored(p, shared, units.slot);
        }
    }

public:
    // Multiplies at the smallest width that holds the tile, found by bisection.
    template <int Low, int High, typename Buffers>
    static __device__ __forceinline__ void multiply_at_width(int count, int blocks, float (&sums)[RowTiles][MaxTokens / 2],
                                                             Buffers& shared, RingPosition<Stages>& ring) {
        if constexpr (Low == High) {
            multiply<Low>(blocks, sums, shared, ring);
        } else {
            constexpr int kMiddle = (Low + High) / (2 * kWidthStep) * kWidthStep;
            if (count <= kMiddle)
                multiply_at_width<Low, kMiddle>(count, blocks, sums, shared, ring);
            else
                multiply_at_width<kMiddle + kWidthStep, High>(count, blocks, sums, shared, ring);
        }
    }

    template <int Width, typename Buffers>
    static __device__ __forceinline__ void multiply(int blocks, float (&sums)[RowTiles][MaxTokens / 2], Buffers& shared,
                                                    RingPosition<Stages>& ring) {
        const int consumer = consumer_index();
        const bool is_lane_0 = threadIdx.x % 32 == 0;
        int previous = 0;
#pragma unroll 1
        for (int block = 0; block < blocks; ++block, ring.advance()) {
            sm90::barrier_wait(&shared.full[ring.slot], ring.parity);
            sm90::fence_async_proxy();
            const uint32_t tokens = sm90::shared_address(shared.stage[ring.slot].tokens);
            const uint32_t weights =
                sm90::shared_address(shared.stage[ring.slot].weights) + consumer * RowTiles * kWeightTileBytes;
            // NOTE: fence, commit and wait come once for each block: if they are around the loop instead, ptxas serializes
            // (C7519, C7520).
            sm90::wgmma_fence();
#pragma unroll
            for (int i = 0; i < kBlockK / 16; ++i) {
#pragma unroll
                for (int m = 0; m < RowTiles; ++m) {
                    sm90::Wgmma<Element, Width>::multiply(sums[m], sm90::descriptor_128b(weights, m * kWeightTileBytes + i * 32),
                                                          sm90::descriptor_128b(tokens, i * 32), true);
                }
            }
            sm90::wgmma_commit();
            sm90::wgmma_wait<1>();
            sm90::barrier_arrive_if(&shared.empty[previous], block > 0 && is_lane_0);
            previous = ring.slot;
        }
        sm90::wgmma_wait<0>();
        sm90::barrier_arrive_if(&shared.empty[previous], is_lane_0);
    }

    // ---- epilogue: sums are (weight row, token), outputs [token][weight row]; stmatrix transposes them in shared memory ----

    static __device__ __forceinline__ float load_bias(const GroupedGemmParams& p, size_t index) {
        if (p.bias_dtype == Dtype::F32) return reinterpret_cast<const float*>(p.bias)[index];
        if (p.bias_dtype == Dtype::Bf16) return to_float(reinterpret_cast<const __nv_bfloat16*>(p.bias)[index]);
        return to_float(reinterpret_cast<const __half*>(p.bias)[index]);
    }

    // Returns the row of the expert's weights at `row` (0 to 7) of half `half` of a warp's slice of a row tile. `GateFirst`: a
    // pair's halves are gate and up whatever the layout, as packed weights have them.
    template <bool GateFirst>
    static __device__ __forceinline__ int weight_row(const GroupedGemmParams& p, int row_tile, int warp, int half, int row) {
        if (Gated && GateFirst && p.layout == W13Layout::UpGate) half ^= 1;
        const int slice = row_tile * 4 + warp, strip = row_tile / 2 * 4 + warp, tile = row_tile % 2;
        if (!Gated) return kPaired ? strip * 32 + row * 4 + tile * 2 + half : slice * 16 + half * 8 + row;
        const int column = kPaired ? strip * 16 + row * 2 + tile : slice * 8 + row;
        return p.layout == W13Layout::Interleaved ? column * 2 + half : half * p.out_columns + column;
    }

    // The biases of a lane's two rows in each row tile.
    using Biases = float[RowTiles][2];

    // NOTE: call this before the multiplication, so that no warp waits for the biases after it.
    template <bool GateFirst = false>
    static __device__ __forceinline__ void load_biases(const WorkUnit& work, const GroupedGemmParams& p, Biases& bias) {
        const int consumer = threadIdx.x / 128 - 1, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
        if (!p.bias) return;
#pragma unroll
        for (int m = 0; m < RowTiles; ++m) {
            const int row_tile = (work.row_block * Consumers + consumer) * RowTiles + m;
            const int first = kPaired ? (row_tile / 2 * 4 + warp) * 32 : (row_tile * 4 + warp) * 16;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const size_t row = size_t(work.expert) * p.rows + weight_row<GateFirst>(p, row_tile, warp, half, lane / 4);
                bias[m][half] = first < p.rows ? load_bias(p, row) : 0.f;
            }
        }
    }

    static __device__ __forceinline__ void add_biases(float (&sums)[RowTiles][MaxTokens / 2], const Biases& bias,
                                                      const GroupedGemmParams& p) {
        if (!p.bias) return;
#pragma unroll
        for (int m = 0; m < RowTiles; ++m) {
#pragma unroll
            for (int i = 0; i < MaxTokens / 2; ++i) sums[m][i] += bias[m][i / 2 % 2];
        }
    }

    // Applies bias, router weights and the less common layouts and activations, out of the common path's way. Returns whether the
    // activation is done; a gated kind's outputs then replace its gates. kSlotWeights is false if there are no router weights.
    template <bool GateFirst = false, bool kSlotWeights = true>
    static __device__ __forceinline__ bool prepare_sums(const WorkUnit& work, float (&sums)[RowTiles][MaxTokens / 2],
                                                        const Biases& bias, const GroupedGemmParams& p) {
        constexpr int kSums = MaxTokens / 2;
        const int lane = threadIdx.x % 32;
        add_biases(sums, bias, p);
        if (kSlotWeights && p.slot_weights) {
#pragma unroll
            for (int i = 0; i < kSums; ++i) {
                const int n = i / 4 * 8 + lane % 4 * 2 + i % 2;
                if (i % 4 >= 2 || n >= work.count) continue;
                const int slot = p.slot_of_place ? p.slot_of_place[work.first + n] : work.first + n;
#pragma unroll
                for (int m = 0; m < RowTiles; ++m) {
                    sums[m][i] *= p.slot_weights[slot];
                    sums[m][i + 2] *= p.slot_weights[slot];
                }
            }
        }
        if (Gated && !GateFirst && p.layout == W13Layout::UpGate) {
#pragma unroll
            for (int i = 0; i < RowTiles * kSums; ++i) {
                if (i % 4 >= 2) continue;
                const float up = sums[i / kSums][i % kSums];
                sums[i / kSums][i % kSums] = sums[i / kSums][i % kSums + 2];
                sums[i / kSums][i % kSums + 2] = up;
            }
        }
        if (p.activation.kind == (Gated ? ActivationKind::Swiglu : ActivationKind::Identity)) return false;
        if (Gated && p.activation.kind == ActivationKind::ExpertSwiglu) {
            const SwigluFunction swiglu(activation_of(p, work.expert));
#pragma unroll
            for (int i = 0; i < RowTiles * kSums; ++i) {
                float& sum = sums[i / kSums][i % kSums];
                if (i % 4 < 2) sum = swiglu(sum, sums[i / kSums][i % kSums + 2]);
            }
            return true;
        }
        if (Gated && p.activation.kind == ActivationKind::Situ) {
            const SituFunction situ(p, work.expert);
            // NOTE: the branches keep outputs apart that would otherwise need registers all at once. Tiles of few tokens have no
            // registers for two outputs. The widest tiles with one row tile spill with branches, and not without. If kSlotWeights
            // is false, the first 8 columns need not be the tile's tokens.
            constexpr bool kOneByOne = kSlotWeights && MaxTokens <= 16, kAtOnce = RowTiles == 1 && MaxTokens >= 192;
#pragma unroll
            for (int n = 0; n < MaxTokens; n += 8) {
                if (!kAtOnce && n > 0 && n >= work.count) break;
#pragma unroll
                for (int i = 0; i < RowTiles * 2; ++i) {
                    if (kOneByOne && n + i % 2 >= work.count) continue;
                    float* d = &sums[i / 2][n / 2 + i % 2];
                    d[0] = situ(d[0], d[2]);
                }
            }
            return true;
        }
        const ActivationFunction activation(p.activation);
#pragma unroll
        for (int i = 0; i < RowTiles * kSums; ++i) {
            float& sum = sums[i / kSums][i % kSums];
            if (!Gated)
                sum = activation(sum);
            else if (i % 4 < 2)
                sum = activation(sum) * sums[i / kSums][i % kSums + 2];
        }
        return true;
    }

    // The offset of this lane's address for stmatrix in a chunk, relative to token 0 of 16; chunks of 16 bytes are swizzled.
    static __device__ __forceinline__ uint32_t staged_offset(int token, int chunk) {
        return Gated ? token * 64 + ((chunk ^ token / 2 % 4) * 16) : token * 128 + ((chunk ^ token % 8) * 16);
    }

    // Stores a pair of row tiles. A lane's 4 columns of a token (gated: 2) are neighbours, and 8 lanes store 64 (gated: 32)
    // bytes, whole sectors.
    template <bool Activated>
    static __device__ __forceinline__ void store_pairs(const WorkUnit& work, const float (&sums)[RowTiles][MaxTokens / 2],
                                                       const GroupedGemmParams& p) {
        const int consumer = threadIdx.x / 128 - 1, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
        const int strip = (work.row_block * Consumers + consumer) * 4 + warp, token = lane % 4 * 2;
        const int column = (strip * 8 + lane / 4) * (Gated ? 2 : 4), limit = strip * 32 < p.rows ? work.count - token : 0;
        const SwigluFunction swiglu(p.activation);
        Element* out = reinterpret_cast<Element*>(p.out) + size_t(work.first + token) * p.out_columns + column;
#pragma unroll
        for (int n = 0; n < MaxTokens; n += 8) {
            if (n >= work.count) break;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float *low = &sums[0][n / 2 + i], *high = &sums[RowTiles - 1][n / 2 + i];
                Element* row = out + size_t(n + i) * p.out_columns;
                if constexpr (!Gated) {
                    sm90::store_global_8_if(row, pack<Element>(low[0], low[2]), pack<Element>(high[0], high[2]), n + i < limit);
                } else if constexpr (Activated) {
                    sm90::store_global_4_if(row, pack<Element>(low[0], high[0]), n + i < limit);
                } else {
                    const uint32_t packed = pack<Element>(swiglu(low[0], low[2]), swiglu(high[0], high[2]));
                    sm90::store_global_4_if(row, packed, n + i < limit);
                }
            }
        }
    }

    // Stores outputs after `Form`, which they go through. If lanes exchange values in it, all lanes of a warp call it, also those
    // without a token.
    template <bool Activated, typename Form = sm90::Unchanged, typename Buffers>
    static __device__ __forceinline__ void store(const WorkUnit& work, const float (&sums)[RowTiles][MaxTokens / 2],
                                                 const GroupedGemmParams& p, Buffers& shared, uint32_t& staging) {
        if constexpr (kPaired) return store_pairs<Activated>(work, sums, p);
        constexpr int kTokenThreads = kOutputBytes / 16, kPassTokens = 128 / kTokenThreads;
        const int consumer = threadIdx.x / 128 - 1, thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
        const SwigluFunction swiglu(p.activation);
        const auto own = Form::of_expert(p, work.expert);
        const uint32_t buffers = sm90::shared_address(shared.staging[consumer]);
        // Addresses for stmatrix: if gated, lane l % 16 addresses a token; otherwise lanes 8 to 15 and 24 to 31 address the
        // second half of the slice.
        const uint32_t turned =
            Gated ? staged_offset(lane % 16, warp) : staged_offset(lane / 16 * 8 + lane % 8, warp * 2 + lane / 8 % 2);
        const int token = thread / kTokenThreads;
        const uint32_t read = staged_offset(Form::kExchanges ? token % kChunk : token, thread % kTokenThreads);
#pragma unroll
        for (int m = 0; m < RowTiles; ++m) {
            const int row_tile = (work.row_block * Consumers + consumer) * RowTiles + m;
            const int column = (row_tile * 4 << kOutputBits) + thread % kTokenThreads * 8;
            const int limit = column < p.out_columns && (kPassTokens <= kChunk || token < kChunk) ? work.count - token : 0;
            Element* out = reinterpret_cast<Element*>(p.out) + size_t(work.first + token) * p.out_columns + column;
#pragma unroll
            for (int chunk = 0; chunk < MaxTokens; chunk += kChunk) {
                if (chunk >= work.count) break;
#pragma unroll
                for (int step = 0; step < kChunk; step += 16) {
                    uint32_t packed[Gated ? 2 : 4];
#pragma unroll
                    for (int j = 0; j < 2; ++j) {
                        const float* d = &sums[m][(chunk + step) / 2 + 4 * j];
                        if constexpr (!Gated) {
                            packed[2 * j] = pack<Element>(d[0], d[1]);
                            packed[2 * j + 1] = pack<Element>(d[2], d[3]);
                        } else if constexpr (Activated) {
                            packed[j] = pack<Element>(d[0], d[1]);
                        } else {
                            packed[j] = pack<Element>(swiglu(d[0], d[2]), swiglu(d[1], d[3]));
                        }
                    }
                    sm90::store_tiles_turned(buffers + staging + step * kOutputBytes + turned, packed);
                }
                // One barrier for each chunk is enough: the buffer before last is free when all threads of the warpgroup are here
                // again.
                sm90::named_barrier(1 + consumer, 128);
#pragma unroll
                for (int n = 0; n < kChunk; n += kPassTokens) {
                    if (Form::kExchanges && chunk + n >= work.count) break;
                    const bool inside = chunk + n < limit;
                    if (!inside && !Form::kExchanges) continue;
                    const uint4 outputs = Form::finish(sm90::load_shared_16(buffers + staging + n * kOutputBytes + read), p, own);
                    if (inside) sm90::store_global_16(out + size_t(chunk + n) * p.out_columns, outputs);
                }
                staging ^= sizeof(shared.staging[0]) / 2;
            }
        }
    }
};

}  // namespace oxmoe
