// The parts that the Hopper grouped GEMMs of packed weights share: stages of codes, scales and tokens, and the warps that fill
// them. `Form` is the packed form of the weights, such as mxfp4::Form. Only its bytes of a block of 64 rows x 64 K count here.
// Work units, schedule, wide gathering and epilogue are GroupedGemmSm90's.
//
// A stage has `Blocks` blocks of 64 K. Rows of tokens come 128 bytes at a time: one block of bf16, or two blocks of e4m3. With
// `E4m3` the base takes a row for k / 2 elements of 16 bits. Kernels with bf16 tokens run both GEMMs of a layer (GemmPairParams),
// kernels with e4m3 tokens run one.
#pragma once
#include <cstdint>
#include <type_traits>

#include "grouped_gemm_sm90.cuh"

namespace oxmoe {

template <typename Form, bool Gated, int MaxTokens, int Consumers, int Stages, int Blocks, bool E4m3>
struct PackedPipelineSm90 {
    using Base = GroupedGemmSm90<__nv_bfloat16, Gated, MaxTokens, 1, Consumers, Stages>;
    using Plain = GroupedGemmSm90<__nv_bfloat16, false, MaxTokens, 1, Consumers, Stages>;  // GEMM2 of a pair
    using Params = std::conditional_t<E4m3, GroupedGemmParams, GemmPairParams>;
    using Unit = std::conditional_t<E4m3, WorkUnit, PairUnit>;

    static constexpr int kBlockRows = 64;
    static constexpr int kThreads = Base::kThreads;
    static constexpr int kUnitSlots = Base::kUnitSlots;
    static constexpr int kCodeBytes = Blocks * Form::kCodeBytes, kScaleBytes = Blocks * Form::kScaleBytes;
    static constexpr int kTokenBlocks = E4m3 ? Blocks / 2 : Blocks;
    static_assert(!E4m3 || Blocks % 2 == 0, "whole rows of 128 bytes");
    // When a slot is used again, consumers have read its unit and finished the unit before: this needs three slots of scales.
    static constexpr int kScaleSlots = kUnitSlots + 1;

    struct alignas(1024) Stage {
        uint8_t tokens[kTokenBlocks * Base::kTokenBytes], codes[Consumers][kCodeBytes], scales[Consumers][kScaleBytes];
    };
    static constexpr int kStagingBytes = E4m3 ? Base::kStagingBytes : Plain::kStagingBytes;
    static_assert(Base::kStagingBytes <= kStagingBytes, "one buffer for both epilogues");
    struct RowScales {
        float row_scale[kScaleSlots][MaxTokens];
    };
    struct Nothing {};
    struct Shared : std::conditional_t<E4m3, RowScales, Nothing> {
        Stage stage[Stages];
        uint8_t staging[Consumers][2 * kStagingBytes];
        uint32_t source[kUnitSlots][MaxTokens];  // start of a token's row of x, in 16-byte units
        Unit unit[kUnitSlots];
        uint64_t full[Stages], empty[Stages], unit_full[kUnitSlots], unit_empty[kUnitSlots], fetch_next;
        uint64_t stored[2];  // units of GEMM1 in turn, in kernels with both GEMMs
    };
    static constexpr int kSharedBytes = sizeof(Shared);

    // The tiles of an expert that has several are taken in turn.
    static constexpr bool kByExpert = MaxTokens >= 128;
    // The last units go out by consumers if the launch has one GEMM. With both GEMMs this costs more than it saves.
    static constexpr bool kSplitsLast = E4m3 && MaxTokens > 32;
    // Widths that a tile can be multiplied at, from its own down: in steps of 8 as far as ptxas has registers (C7512), then in
    // steps of 16.
    static constexpr int kFineSteps = MaxTokens <= 32 ? MaxTokens / 8 - 1 : !E4m3 && MaxTokens >= 64 && MaxTokens <= 128 ? 4 : 0;
    static constexpr int kLeastWidth = MaxTokens > 128 ? MaxTokens - 64 : MaxTokens > 32 ? 16 : 8;
    static __host__ __device__ constexpr int width(int i) {
        const int fine = i < kFineSteps ? i : kFineSteps;
        return MaxTokens - 8 * fine - 16 * (i - fine);
    }
    static constexpr int kNarrowest = kFineSteps + (width(kFineSteps) - kLeastWidth) / 16;
    // K steps in a wgmma group: two if there are registers for their A operands.
    static constexpr int kSteps = MaxTokens >= 128 || (Consumers == 4 && MaxTokens > 48) ? 1 : 2;
    // Consumers take registers from the producers; otherwise ptxas has too few and serializes (C7512). 56 + 3 * 152 is as many as
    // 4 * 128, and 40 + 4 * 104 is less than 5 * 96.
    static constexpr bool kMovesRegisters = MaxTokens > 32;
    static_assert(!kMovesRegisters || Consumers == 3 || Consumers == 4, "the registers of all threads");
    static constexpr int kProducerRegisters = Consumers == 4 ? 40 : 56, kConsumerRegisters = Consumers == 4 ? 104 : 152;
    // The limits are 228 KB of shared memory an SM, 1 KB of which the system takes for each CTA, and registers.
    static constexpr int kCtasByShared = 228 * 1024 / (kSharedBytes + 1024),
                         kCtasByRegisters = MaxTokens <= 32 ? 768 / kThreads : 1;
    static constexpr int kCtas = kCtasByShared < kCtasByRegisters ? kCtasByShared : kCtasByRegisters;

    static __device__ __forceinline__ int k_blocks(const GroupedGemmParams& p) { return E4m3 ? p.k / 32 : Base::k_blocks(p); }

    // Calls `multiply` with the narrowest width that holds `count` tokens. The width is a constant, found by bisection.
    template <int Widest = 0, int Narrowest = kNarrowest, typename F>
    static __device__ __forceinline__ void at_width(int count, const F& multiply) {
        if constexpr (Widest == Narrowest) {
            multiply(std::integral_constant<int, width(Widest)>());
        } else {
            constexpr int kMiddle = (Widest + Narrowest + 1) / 2;
            if (count <= width(kMiddle))
                at_width<kMiddle, Narrowest>(count, multiply);
            else
                at_width<Widest, kMiddle - 1>(count, multiply);
        }
    }

    // ---- weights: one thread copies codes and scales of a stage for each consumer that has rows ----

    static __device__ __forceinline__ void copy_weights(const Params& params, Shared& shared) {
        if (threadIdx.x != 0) return;
        RingPosition<kUnitSlots> units;
        RingPosition<Stages> ring;
        for (;; units.advance()) {
            sm90::barrier_wait(&shared.unit_full[units.slot], units.parity);
            const Unit work = shared.unit[units.slot];
            sm90::barrier_arrive(&shared.unit_empty[units.slot]);
            if (work.expert < 0) break;
            const GroupedGemmParams& p = gemm_of(params, work);
            const int blocks_of_k = k_blocks(p), row_tiles = (p.rows + kBlockRows - 1) / kBlockRows;
            // NOTE: this is as late as the latency allows: a CTA that takes a unit early holds work back from idle ones.
            const int fetch_block = max(0, blocks_of_k - Base::kFetchLead) / Blocks * Blocks;
            const bool is_one = kSplitsLast && work.row_block < 0;
            const int first_tile = is_one ? ~work.row_block : work.row_block * Consumers,
                      tiles = is_one ? 1 : min(Consumers, row_tiles - first_tile),
                      first_consumer = is_one ? first_tile % Consumers : 0;
            const size_t first = (size_t(work.expert) * row_tiles + first_tile) * blocks_of_k;
            const uint8_t *codes = p.weights + first * Form::kCodeBytes, *scales = p.block_scales + first * Form::kScaleBytes;
#pragma unroll 1
            for (int block = 0; block < blocks_of_k; block += Blocks, ring.advance()) {
                if (block == fetch_block) sm90::barrier_arrive(&shared.fetch_next);
                const int blocks = min(Blocks, blocks_of_k - block);
                const int code_bytes = blocks * Form::kCodeBytes, scale_bytes = blocks * Form::kScaleBytes;
                Stage& stage = shared.stage[ring.slot];
                uint64_t* full = &shared.full[ring.slot];
                sm90::barrier_wait(&shared.empty[ring.slot], ring.parity ^ 1);
                sm90::barrier_arrive_expect(full, tiles * (code_bytes + scale_bytes));
#pragma unroll 1
                for (int tile = 0; tile < tiles; ++tile) {
                    const size_t at = size_t(tile) * blocks_of_k + block;
                    sm90::copy_bulk(stage.codes[first_consumer + tile], codes + at * Form::kCodeBytes, code_bytes, full);
                    sm90::copy_bulk(stage.scales[first_consumer + tile], scales + at * Form::kScaleBytes, scale_bytes, full);
                }
            }
        }
    }

    // ---- tokens, several blocks of 128 bytes in a stage: 8 neighbouring threads copy 128 bytes of a row, block after block ----

    // NOTE: a free stage must be full again before the other stages are multiplied. So rows come from registers, and there are
    // kGroup copies for each branch. A loop that looked up row after row kept consumers waiting for a fifth of the time (100
    // tokens). One branch for each row costs as much (ptxas has three dummy reads of shared memory after each).
    //
    // `first_of_unit` is that of GroupedGemmSm90::gather.
    template <typename... F>
    static __device__ __forceinline__ void gather(const Params& params, Shared& shared, F... first_of_unit) {
        if constexpr (kTokenBlocks == 1) {
            if constexpr (E4m3)
                return Base::gather(params, shared, first_of_unit...);
            else
                return gather_blocks(params, shared, first_of_unit...);
        }
        constexpr int kPassRows = Base::kGatherThreads / 8, kPasses = MaxTokens / kPassRows, kGroup = 4;
        const int thread = threadIdx.x % Base::kGatherThreads, chunk = thread % 8, first = thread / 8;
        const uint32_t swizzled = first * 128 + ((chunk ^ first) * 16);
        RingPosition<kUnitSlots> units;
        RingPosition<Stages> ring;
        pdl::wait();
        pdl::launch_dependents();
        for (;; units.advance()) {
            sm90::barrier_wait(&shared.unit_full[units.slot], units.parity);
            const Unit work = shared.unit[units.slot];
            if (work.expert < 0) break;
            const GroupedGemmParams& p = gemm_of(params, work);
            const int chunks = p.k / 8, row_blocks = Base::k_blocks(p);
            const uint32_t* sources = shared.source[units.slot];
            (first_of_unit(work, sources, thread), ...);
            uint32_t source[kPasses];
#pragma unroll
            for (int i = 0; i < kPasses; ++i) source[i] = sources[first + i * kPassRows];
            const uint4* x = reinterpret_cast<const uint4*>(p.x) + chunk;
#pragma unroll 1
            for (int block = 0; block < row_blocks; block += kTokenBlocks, x += kTokenBlocks * 8, ring.advance()) {
                uint32_t tokens = sm90::shared_address(shared.stage[ring.slot].tokens) + swizzled;
                sm90::barrier_wait(&shared.empty[ring.slot], ring.parity ^ 1);
                if ((block + kTokenBlocks) * 8 <= chunks) {
#pragma unroll
                    for (int group = 0; group < kPasses; group += kGroup) {
                        if (group * kPassRows >= work.count) break;
#pragma unroll
                        for (int pass = group; pass < group + kGroup && pass < kPasses; ++pass) {
                            if (first + pass * kPassRows >= work.count) continue;
#pragma unroll
                            for (int i = 0; i < kTokenBlocks; ++i)
                                sm90::copy_16_async(tokens + pass * kPassRows * 128 + i * Base::kTokenBytes,
                                                    x + source[pass] + i * 8, true);
                        }
                    }
                } else {
                    // NOTE: beyond k the tokens must be zero as well as the weights: 0 * NaN is NaN.
#pragma unroll 1
                    for (int n = first; n < work.count; n += kPassRows, tokens += kPassRows * 128) {
                        const uint4* row = x + sources[n];
#pragma unroll 1
                        for (int i = 0; block + i < row_blocks; ++i) {
                            const bool inside = (block + i) * 8 + chunk < chunks;
                            sm90::copy_16_async(tokens + i * Base::kTokenBytes, inside ? row + i * 8 : row, inside);
                        }
                    }
                }
                sm90::copy_async_arrive(&shared.full[ring.slot]);
            }
            sm90::barrier_arrive(&shared.unit_empty[units.slot]);
        }
    }

private:
    // Gathers one block for each stage, in a kernel with both GEMMs. NOTE: half of the sources lie in registers. If all of them
    // did, ptxas would have one pair left for addresses, and each copy would wait until the previous one has read its own.
    template <typename F>
    static __device__ __forceinline__ void gather_blocks(const Params& params, Shared& shared, F first_of_unit) {
        constexpr int kPassRows = Base::kGatherThreads / 8, kPasses = MaxTokens / kPassRows, kGroup = 4, kHeld = kPasses / 2;
        const int thread = threadIdx.x % Base::kGatherThreads, chunk = thread % 8, first = thread / 8;
        const uint32_t swizzled = first * 128 + ((chunk ^ first) * 16);
        RingPosition<kUnitSlots> units;
        RingPosition<Stages> ring;
        pdl::wait();
        pdl::launch_dependents();
        for (;; units.advance()) {
            sm90::barrier_wait(&shared.unit_full[units.slot], units.parity);
            const Unit work = shared.unit[units.slot];
            if (work.expert < 0) break;
            const GroupedGemmParams& p = gemm_of(params, work);
            const uint32_t* sources = shared.source[units.slot];
            first_of_unit(work, sources, thread);
            uint32_t held[kHeld];
#pragma unroll
            for (int i = 0; i < kHeld; ++i) held[i] = sources[first + i * kPassRows];
            const uint4* x = reinterpret_cast<const uint4*>(p.x) + chunk;
            int left = p.k / 8 - chunk;
#pragma unroll 1
            for (int blocks = Base::k_blocks(p); blocks > 0; --blocks, x += 8, left -= 8, ring.advance()) {
                sm90::barrier_wait(&shared.empty[ring.slot], ring.parity ^ 1);
                const uint32_t tokens = sm90::shared_address(shared.stage[ring.slot].tokens) + swizzled;
                // NOTE: the count is read again, because otherwise ptxas keeps the conditions of all rows in a register, bit by
                // bit.
                const int rows = *const_cast<volatile int*>(&shared.unit[units.slot].count) - first;
#pragma unroll
                for (int group = 0; group < kPasses; group += kGroup) {
                    if (group * kPassRows >= rows + first) break;
                    uint32_t source[kGroup];
#pragma unroll
                    for (int i = 0; i < kGroup; ++i) {
                        const volatile uint32_t* other = &sources[first + (group + i) * kPassRows];
                        source[i] = group + i < kHeld ? held[group + i] : *other;
                    }
#pragma unroll
                    for (int i = 0; i < kGroup; ++i) {
                        const int row = (group + i) * kPassRows;
                        // NOTE: beyond k the tokens must be zero as well as the weights: 0 * NaN is NaN.
                        if (row < rows) sm90::copy_16_async(tokens + row * 128, x + source[i], left > 0);
                    }
                }
                sm90::copy_async_arrive(&shared.full[ring.slot]);
            }
            sm90::barrier_arrive(&shared.unit_empty[units.slot]);
        }
    }
};

}  // namespace oxmoe
