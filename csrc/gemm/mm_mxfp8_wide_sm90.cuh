// Dense MXFP8 GEMM for many tokens on Hopper: b is wgmma's A, decoded to bf16 in registers, 64 rows a warpgroup; tokens are its
// N. MmMxfp8Tokens makes bf16 rows of a first, in the order that they have in shared memory.
//
// A stage is 128 K: rows of b in the 128-byte swizzle, by cp.async, and tokens in one bulk copy. One warpgroup decodes while
// another multiplies. Grid: row blocks of b in groups, token tiles, splits.
//
// Needs k % 32 == 0, a and b aligned to 16 bytes.
#pragma once
#include <cstdint>

#include "../common/pdl.cuh"
#include "../common/ring.cuh"
#include "../common/sm90.cuh"
#include "../common/wgmma.cuh"
#include "mxfp8_operand.cuh"

namespace oxmoe {

template <int Tokens, int Consumers, int Stages>
struct MmMxfp8WideSm90 {
    static constexpr int kThreads = 128 * (1 + Consumers), kRows = 64 * Consumers;
    static constexpr int kTokenBytes = Tokens * 128;  // of 64 K
    static constexpr int kPitch = kRows + 4;
    static constexpr int kGroupBlocks = 8;  // row blocks that neighbouring CTAs share tokens in
    static constexpr int kPassRows = 16;

    struct alignas(1024) Stage {
        uint8_t tokens[2 * kTokenBytes], rows[kRows * 128];
    };
    struct Shared {
        union {
            Stage stage[Stages];
            float sums[Tokens * kPitch];
        };
        uint64_t full[Stages], empty[Stages];
    };
    static constexpr int kSharedBytes = (sizeof(Shared) + 127) / 128 * 128;
    static_assert(Tokens % 16 == 0 && Tokens * kPitch * 4 <= Stages * int(sizeof(Stage)), "sums lie where stages were");

    static __device__ __forceinline__ void run(const MmMxfp8Params& p) {
        using namespace mxfp8_dense;
        extern __shared__ __align__(1024) uint8_t dynamic_shared[];
        Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared);
        if (threadIdx.x == 0) {
            for (int i = 0; i < Stages; ++i) {
                sm90::barrier_init(&shared.full[i], 128 + 1);
                sm90::barrier_init(&shared.empty[i], 128 * Consumers);
            }
            sm90::barrier_init_fence();
        }
        __syncthreads();
        const Part part(p);
        const int row_blocks = (p.n + kRows - 1) / kRows, token_tiles = (p.m + Tokens - 1) / Tokens;
        const int tile = blockIdx.x / p.splits, group = tile / (kGroupBlocks * token_tiles);
        const int of_group = tile - group * kGroupBlocks * token_tiles;
        const int group_blocks = min(kGroupBlocks, row_blocks - group * kGroupBlocks);
        const int token_tile = of_group / group_blocks, row_block = group * kGroupBlocks + of_group % group_blocks;
        const int first_row = row_block * kRows;
        pdl::wait();
        pdl::launch_dependents();
        if (threadIdx.x < 128) {
            if constexpr (Consumers > 1) sm90::registers_decrease<kProducerRegisters>();
            produce(p, shared, part, first_row, token_tile);
            __syncthreads();  // consume()'s
        } else {
            if constexpr (Consumers > 1) sm90::registers_increase<kConsumerRegisters>();
            consume(p, shared, part, first_row);
        }
        __syncthreads();
        reduce_and_store<Tokens, kRows, kPitch>(p, shared.sums, token_tile * Tokens, first_row);
    }

private:
    static constexpr int kProducerRegisters = Consumers == 3 ? 56 : 40, kConsumerRegisters = Consumers == 3 ? 152 : 232;

    static __device__ __forceinline__ void produce(const MmMxfp8Params& p, Shared& shared, const mxfp8_dense::Part& part,
                                                   int first_row, int token_tile) {
        using namespace mxfp8_dense;
        const int chunk = threadIdx.x % 8, row = threadIdx.x / 8, blocks = (p.k + kBlockK - 1) / kBlockK, chunks = p.k / 16;
        const uint8_t* b = p.b + int64_t(first_row + row) * p.k + chunk * 16;
        const uint8_t* tokens = p.tokens + int64_t(token_tile) * blocks * (2 * kTokenBytes);
        const uint32_t swizzled = row * 128 + (chunk ^ row % 8) * 16;
        RingPosition<Stages> ring;
#pragma unroll 1
        for (int block = part.first; block < part.last; ++block, ring.advance()) {
            Stage& stage = shared.stage[ring.slot];
            uint64_t* full = &shared.full[ring.slot];
            sm90::barrier_wait(&shared.empty[ring.slot], ring.parity ^ 1);
            if (threadIdx.x == 0) {
                sm90::barrier_arrive_expect(full, 2 * kTokenBytes);
                sm90::copy_bulk(stage.tokens, tokens + int64_t(block) * (2 * kTokenBytes), 2 * kTokenBytes, full);
            }
            const bool inside = block * 8 + chunk < chunks;
            const uint32_t to = sm90::shared_address(stage.rows) + swizzled;
            const uint8_t* from = b + block * kBlockK;
#pragma unroll
            for (int i = 0; i < kRows / kPassRows; ++i) {
                const bool real = inside && first_row + row + i * kPassRows < p.n;
                sm90::copy_16_async(to + i * kPassRows * 128, real ? from + i * kPassRows * p.k : p.b, real);
            }
            sm90::copy_async_arrive(full);
        }
    }

    static __device__ __forceinline__ void consume(const MmMxfp8Params& p, Shared& shared, const mxfp8_dense::Part& part,
                                                   int first_row) {
        using namespace mxfp8_dense;
        const int consumer = threadIdx.x / 128 - 1, thread = threadIdx.x % 128, warp = thread / 32, g = thread % 32 / 4,
                  c = thread % 4;
        const int row = consumer * 64 + warp * 16 + g, groups = p.k / kGroup;
        const bool real[2] = {first_row + row < p.n, first_row + row + 8 < p.n};
        const uint8_t* scales[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) scales[i] = scale_address(p.b_scales, first_row + row + 8 * i, c, groups);
        const int64_t scale_step = four_blocks(p.b_scales);
        uint32_t bytes[2];
        const auto load_scales = [&](int block) {
#pragma unroll
            for (int i = 0; i < 2; ++i)
                bytes[i] = real[i] && block * kBlockGroups + c < groups ? scales[i][block * scale_step] : 127;
        };
        float sums[Tokens / 2];
#pragma unroll
        for (int i = 0; i < Tokens / 2; ++i) asm volatile("mov.b32 %0, 0;" : "=f"(sums[i]));
        if (part.first < part.last) load_scales(part.first);
        RingPosition<Stages> ring;
        int previous = 0;
        // Rows differ by multiples of 8: their chunks are in the same order.
        const uint32_t mine = row * 128;
#pragma unroll 1
        for (int block = part.first; block < part.last; ++block, ring.advance()) {
            const float scale[2] = {scale_value(bytes[0]), scale_value(bytes[1])};
            if (block + 1 < part.last) load_scales(block + 1);
            sm90::barrier_wait(&shared.full[ring.slot], ring.parity);
            const Stage& stage = shared.stage[ring.slot];
            const uint32_t rows = sm90::shared_address(stage.rows) + mine, tokens = sm90::shared_address(stage.tokens);
            uint4 words[2][2];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const uint32_t at = rows + ((2 * c + half) ^ g) * 16;
                words[half][0] = sm90::load_shared_16(at);
                words[half][1] = sm90::load_shared_16(at + 8 * 128);
            }
#pragma unroll
            for (int step = 0; step < 8; ++step) {
                const int half = step / 4, word = step % 4;
                uint32_t a[4];
                decode(word_of(words[half][0], word), scale[0], a[0], a[2]);
                decode(word_of(words[half][1], word), scale[1], a[1], a[3]);
                sm90::wgmma_fence();
                sm90::WgmmaFromRegisters<Tokens>::multiply(sums, a,
                                                           sm90::descriptor_128b(tokens, half * kTokenBytes + word * 32));
                sm90::wgmma_commit();
                sm90::wgmma_wait<1>();
                if (step == 0) sm90::barrier_arrive_if(&shared.empty[previous], block > part.first);
            }
            previous = ring.slot;
        }
        sm90::wgmma_wait<0>();
        // All stages have been read; nothing is on its way into one. NOTE: of all threads: after one of the consumers alone
        // racecheck does not see the barrier between these sums and their readers.
        __syncthreads();
        float* const at = shared.sums + 2 * c * kPitch + row;
#pragma unroll
        for (int i = 0; i < Tokens / 8; ++i) {
#pragma unroll
            for (int j = 0; j < 4; ++j) at[(8 * i + j % 2) * kPitch + j / 2 * 8] = sums[4 * i + j];
        }
    }
};

// a as MmMxfp8WideSm90 reads it: [token tiles][blocks of 128 K][2][tile_tokens][64] bf16 in the 128-byte swizzle, zeros beyond m
// and k. A thread makes 8 numbers. Grid: any.
struct MmMxfp8Tokens {
    static constexpr int kThreads = 256;
    static constexpr int kSharedBytes = 0;

    static __device__ __forceinline__ void run(const MmMxfp8Params& p) {
        using namespace mxfp8_dense;
        pdl::wait();
        pdl::launch_dependents();
        const int groups = p.k / kGroup, blocks = (p.k + kBlockK - 1) / kBlockK,
                  tiles = (p.m + p.tile_tokens - 1) / p.tile_tokens;
        const int64_t units = int64_t(tiles) * p.tile_tokens * blocks * 16;
        for (int64_t unit = int64_t(blockIdx.x) * kThreads + threadIdx.x; unit < units; unit += int64_t(gridDim.x) * kThreads) {
            // Neighbouring threads: chunks of a row, rows, halves of a block, blocks.
            const int place = unit % 8, chunk = place ^ (unit / 8 % 8);
            const int64_t rows = unit / 8;
            const int in_tile = rows % p.tile_tokens, half = rows / p.tile_tokens % 2;
            const int64_t at_block = rows / (2 * p.tile_tokens);
            const int block = at_block % blocks, token = int(at_block / blocks) * p.tile_tokens + in_tile;
            uint32_t pairs[4];
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                const int group = block * kBlockGroups + c;
                pairs[c] = 0;
                if (token >= p.m || group >= groups) continue;
                const int column = group * kGroup + half * 16 + chunk / 2 * 4 + chunk % 2 * 2;
                const uint16_t codes = *reinterpret_cast<const uint16_t*>(p.a + int64_t(token) * p.k + column);
                pairs[c] = decode_pair(codes, scale_value(*scale_address(p.a_scales, token, group, groups)));
            }
            reinterpret_cast<uint4*>(p.tokens)[unit] = uint4{pairs[0], pairs[1], pairs[2], pairs[3]};
        }
    }
};

}  // namespace oxmoe
