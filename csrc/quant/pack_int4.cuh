// Packs int4 weights once at load. It reads a checkpoint's form (codes [experts, rows, k / 2], scales and zero points [experts,
// rows, k / group]), and writes the packed form of common/int4.cuh.
//
// NOTE: this kernel's successor does not start early: packed weights are older than any kernel that reads them.
#pragma once
#include <cstdint>

#include "../common/element.cuh"
#include "../common/int4.cuh"
#include "../common/pdl.cuh"
#include "oxmoe/src/params/int4.rs.h"
#include "walk.cuh"
#include "weight_rows.cuh"

namespace oxmoe {

// A thread packs its 16 bytes of a block. Grid: experts x row tiles x groups of kBlocks blocks, which lie side by side along K.
// Needs k % 32 == 0, group % 32 == 0, k % group == 0, codes aligned to 16 bytes.
struct Int4Pack : Cta<512> {
    static constexpr int kBlocks = kThreads / 128;

    static __device__ __forceinline__ void run(const PackInt4Params& p) {
        pdl::wait();
        const uint32_t row_tiles = (p.rows + 63) / 64, k_blocks = (p.k + 63) / 64, parts = (k_blocks + kBlocks - 1) / kBlocks;
        const uint32_t expert = blockIdx.x / parts / row_tiles, tile = blockIdx.x / parts % row_tiles;
        const uint32_t k_block = blockIdx.x % parts * kBlocks + threadIdx.x / 128, thread = threadIdx.x % 128, pair = thread % 4;
        if (blockIdx.x % (parts * row_tiles) == 0 && threadIdx.x == 0) p.expert_scales[expert] = 1;
        if (k_block >= k_blocks) return;
        // Padding has weights of 0: the middle code with the scale 0.
        uint32_t words[4] = {0x88888888, 0x88888888, 0x88888888, 0x88888888}, scales[2] = {}, zeros = int4::kMiddle * 0x01010101;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = weight_row_of_slice(p, 4 * tile + thread / 32, thread % 32 / 4, half);
#pragma unroll
            for (int group = 0; group < 2; ++group) {
                const int column = 64 * k_block + 32 * group;
                if (row < 0 || column >= p.k) continue;
                const size_t first = size_t(expert) * p.rows + row, at = first * (p.k / p.group) + column / p.group;
                scales[group] |= scale_of(p, at) << 16 * half;
                if (p.zeros) {
                    const int byte = 8 * (2 * group + half);
                    zeros = (zeros & ~(0xFFu << byte)) | uint32_t(p.zeros[at]) << byte;
                }
                // These are 32 codes: the codes of two k16 steps.
                const uint4 codes = reinterpret_cast<const uint4*>(p.codes)[(first * p.k + column) / 32];
                put(words[2 * group], codes.x, codes.y, pair, half);
                put(words[2 * group + 1], codes.z, codes.w, pair, half);
            }
        }
        const size_t at = (size_t(expert) * row_tiles + tile) * k_blocks + k_block;
        *reinterpret_cast<uint4*>(p.packed_codes + at * int4::kCodeBytes + 16 * thread) =
            make_uint4(words[0], words[1], words[2], words[3]);
        if (pair != 0) return;
        const bool has_zeros = p.zeros != nullptr;
        const int quad_words = int4::scale_bytes(has_zeros) / 128;
        uint32_t* to = reinterpret_cast<uint32_t*>(p.packed_scales + at * int4::scale_bytes(has_zeros)) + thread / 4 * quad_words;
        to[0] = scales[0], to[1] = scales[1];
        if (has_zeros) to[2] = zeros;
    }

private:
    // Puts four codes of a row and k16 step into a word. The step's first and second eight columns are `low` and `high`.
    static __device__ __forceinline__ void put(uint32_t& word, uint32_t low, uint32_t high, uint32_t pair, int half) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int reg = i / 2 * 2 + half;
            const uint32_t code = (i < 2 ? low : high) >> (8 * pair + i % 2 * 4) & 15;
            word = (word & ~int4::place(15, reg, i % 2)) | int4::place(code, reg, i % 2);
        }
    }

    // The bits of a scale, rounded to bf16.
    static __device__ __forceinline__ uint32_t scale_of(const PackInt4Params& p, size_t at) {
        if (p.scale_dtype == Dtype::Bf16) return reinterpret_cast<const uint16_t*>(p.scales)[at];
        const float scale = p.scale_dtype == Dtype::F16 ? to_float(reinterpret_cast<const __half*>(p.scales)[at])
                                                        : reinterpret_cast<const float*>(p.scales)[at];
        return pack<__nv_bfloat16>(scale, 0) & 0xFFFF;
    }
};

}  // namespace oxmoe
