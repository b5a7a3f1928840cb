// Dense MXFP8 GEMM for few tokens on Hopper: out[m, n] = a[m, k] b[n, k]^T, both e4m3 with a scale for 32 columns.
//
// What counts is that b comes at memory's rate. A CTA takes 16 x RowTiles rows of b, each of its warps every Warps-th block of
// 128 K, in a ring of its own, so that there is no barrier before the end. Tokens are decoded once for all rows of a warp. The
// CTAs of a cluster share K; sums go through shared memory, in a fixed order.
//
// The order of a row's sums depends on n and k alone. Needs k % 32 == 0, a and b aligned to 16 bytes. Grid: token tiles x row
// tiles x splits.
#pragma once
#include <cstdint>

#include "../common/pdl.cuh"
#include "../common/sm80.cuh"
#include "../common/sm90.cuh"
#include "mxfp8_operand.cuh"

namespace oxmoe {

template <int Tokens, int RowTiles, int Warps, int Stages>
struct MmMxfp8Sm90 {
    static constexpr int kThreads = 32 * Warps, kRows = 16 * RowTiles, kTokenTiles = Tokens / 8;
    // Rows of b, then of a, 128 bytes each: chunk c of row r lies at c ^ r % 8.
    static constexpr int kStageBytes = (kRows + Tokens) * 128;
    static constexpr int kPitch = kRows + 4;
    static constexpr int kRingBytes = Warps * Stages * kStageBytes, kSumBytes = Warps * Tokens * kPitch * 4;
    static constexpr int kSharedBytes = kRingBytes > kSumBytes ? kRingBytes : kSumBytes;

    static __device__ __forceinline__ void run(const MmMxfp8Params& p) {
        using namespace mxfp8_dense;
        extern __shared__ __align__(128) uint8_t dynamic_shared[];
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, c = lane % 4;
        const Part part(p);
        const int tile = blockIdx.x / p.splits, row_blocks = (p.n + kRows - 1) / kRows;
        const int first_row = tile % row_blocks * kRows, first_token = tile / row_blocks * Tokens;
        const int groups = p.k / kGroup;
        const uint32_t slots = sm90::shared_address(dynamic_shared) + warp * Stages * kStageBytes;

        uint32_t b_scale_at[2 * RowTiles], a_scale_at[kTokenTiles];
#pragma unroll
        for (int i = 0; i < 2 * RowTiles; ++i)
            b_scale_at[i] = uint32_t(scale_address(p.b_scales, first_row + 8 * i + g, c, groups) - p.b_scales.data);
#pragma unroll
        for (int i = 0; i < kTokenTiles; ++i)
            a_scale_at[i] = uint32_t(scale_address(p.a_scales, first_token + 8 * i + g, c, groups) - p.a_scales.data);
        const int64_t b_scale_step = four_blocks(p.b_scales), a_scale_step = four_blocks(p.a_scales);
        // Eight neighbouring lanes copy 128 bytes of a row.
        const int chunk = lane % 8, of_four = lane / 8, chunks = p.k / 16;
        const uint8_t *b = p.b + int64_t(first_row + of_four) * p.k + chunk * 16,
                      *a = p.a + int64_t(first_token + of_four) * p.k + chunk * 16;
        const uint32_t even = of_four * 128 + (chunk ^ of_four) * 16;

        const auto copy = [&](int slot, int block) {
            const bool inside = block * 8 + chunk < chunks;
            const uint32_t to = slots + slot * kStageBytes + even;
            const uint8_t *of_b = b + block * kBlockK, *of_a = a + block * kBlockK;
#pragma unroll
            for (int i = 0; i < (kRows + Tokens) / 4; ++i) {
                const bool row = i < kRows / 4;
                const int four = row ? i : i - kRows / 4;
                const bool real = inside && (row ? first_row + 4 * four + of_four < p.n : first_token + 4 * four + of_four < p.m);
                const uint8_t* from = real ? (row ? of_b : of_a) + int64_t(4 * four) * p.k : p.b;
                sm90::copy_16_async((to + i * 512) ^ (i % 2 * 64), from, real);
            }
        };
        uint32_t b_bytes[2 * RowTiles], a_bytes[kTokenTiles];
        const auto load_scales = [&](int block) {
            const bool inside = block * kBlockGroups + c < groups;
#pragma unroll
            for (int i = 0; i < 2 * RowTiles; ++i)
                b_bytes[i] = inside && first_row + 8 * i + g < p.n ? p.b_scales.data[b_scale_at[i] + block * b_scale_step] : 127;
#pragma unroll
            for (int i = 0; i < kTokenTiles; ++i)
                a_bytes[i] =
                    inside && first_token + 8 * i + g < p.m ? p.a_scales.data[a_scale_at[i] + block * a_scale_step] : 127;
        };

        // What is copied first, to L2 meanwhile: it is where others' writes arrive, so nothing old can be met there.
        const int first = part.first + warp;
#pragma unroll
        for (int i = 0; i < Stages - 1; ++i) {
            for (int row = lane; row < kRows; row += 32) {
                if (first + i * Warps < part.last && first_row + row < p.n)
                    prefetch(p.b + int64_t(first_row + row) * p.k + (first + i * Warps) * kBlockK);
            }
        }
        pdl::wait();
        pdl::launch_dependents();
        float sums[RowTiles][kTokenTiles][4] = {};
#pragma unroll
        for (int i = 0; i < Stages - 1; ++i) {
            if (first + i * Warps < part.last) copy(i, first + i * Warps);
            sm80::copy_commit();
        }
        if (first < part.last) load_scales(first);
        int slot = 0;
#pragma unroll 1
        for (int block = first; block < part.last; block += Warps) {
            float b_scale[2 * RowTiles], a_scale[kTokenTiles];
#pragma unroll
            for (int i = 0; i < 2 * RowTiles; ++i) b_scale[i] = scale_value(b_bytes[i]);
#pragma unroll
            for (int i = 0; i < kTokenTiles; ++i) a_scale[i] = scale_value(a_bytes[i]);
            if (block + Warps < part.last) load_scales(block + Warps);
            const int ahead = block + (Stages - 1) * Warps;
            __syncwarp();  // all lanes have read what is written next
            if (ahead < part.last) copy(slot == 0 ? Stages - 1 : slot - 1, ahead);
            sm80::copy_commit();
            sm80::copy_wait<Stages - 1>();
            __syncwarp();
            const uint32_t from = slots + slot * kStageBytes + g * 128;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const uint32_t at = from + ((2 * c + half) ^ g) * 16;
                uint4 rows[2 * RowTiles], tokens[kTokenTiles];
#pragma unroll
                for (int i = 0; i < 2 * RowTiles; ++i) rows[i] = sm90::load_shared_16(at + i * 1024);
#pragma unroll
                for (int i = 0; i < kTokenTiles; ++i) tokens[i] = sm90::load_shared_16(at + kRows * 128 + i * 1024);
#pragma unroll
                for (int step = 0; step < 4; ++step) {
                    uint32_t of_tokens[kTokenTiles][2];
#pragma unroll
                    for (int i = 0; i < kTokenTiles; ++i)
                        decode(word_of(tokens[i], step), a_scale[i], of_tokens[i][0], of_tokens[i][1]);
#pragma unroll
                    for (int r = 0; r < RowTiles; ++r) {
                        uint32_t of_rows[4];
                        decode(word_of(rows[2 * r], step), b_scale[2 * r], of_rows[0], of_rows[2]);
                        decode(word_of(rows[2 * r + 1], step), b_scale[2 * r + 1], of_rows[1], of_rows[3]);
#pragma unroll
                        for (int i = 0; i < kTokenTiles; ++i)
                            sm80::multiply_add<__nv_bfloat16>(sums[r][i], of_rows, of_tokens[i][0], of_tokens[i][1]);
                    }
                }
            }
            slot = slot + 1 == Stages ? 0 : slot + 1;
        }
        sm80::copy_wait<0>();
        __syncthreads();
        float* const all = reinterpret_cast<float*>(dynamic_shared);
        float* const mine = all + warp * Tokens * kPitch + 2 * c * kPitch + g;
#pragma unroll
        for (int r = 0; r < RowTiles; ++r) {
#pragma unroll
            for (int i = 0; i < kTokenTiles; ++i) {
#pragma unroll
                for (int j = 0; j < 4; ++j) mine[(8 * i + j % 2) * kPitch + 16 * r + j / 2 * 8] = sums[r][i][j];
            }
        }
        __syncthreads();
        reduce_and_store<Tokens, kRows, kPitch, Warps>(p, all, first_token, first_row);
    }

private:
    static __device__ __forceinline__ void prefetch(const uint8_t* from) {
        asm volatile("prefetch.global.L2 [%0];" ::"l"(from) : "memory");
    }
};

}  // namespace oxmoe
