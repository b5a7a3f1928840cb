// Packs NVFP4 weights once at load. It reads a checkpoint's form (codes [experts, rows, k / 2], e4m3 scales [experts, rows,
// k / 16] row by row or in tiles), and writes the packed form of common/nvfp4_packed.cuh.
//
// NOTE: this kernel's successor does not start early: packed weights are older than any kernel that reads them.
#pragma once
#include <cstdint>

#include "../common/nvfp4_packed.cuh"
#include "../common/pdl.cuh"
#include "../common/scale_layout.cuh"
#include "oxmoe/src/params/nvfp4.rs.h"
#include "walk.cuh"
#include "weight_rows.cuh"

namespace oxmoe {

// A thread packs its 16 bytes of a block. Grid: experts x row tiles x groups of kBlocks blocks, which lie side by side along K.
// Needs k % 16 == 0, codes aligned to 8 bytes.
struct Nvfp4Pack : Cta<512> {
    static constexpr int kBlocks = kThreads / 128;

    static __device__ __forceinline__ void run(const PackNvfp4Params& p) {
        pdl::wait();
        const uint32_t row_tiles = (p.rows + 63) / 64, k_blocks = (p.k + 63) / 64, parts = (k_blocks + kBlocks - 1) / kBlocks;
        const uint32_t expert = blockIdx.x / parts / row_tiles, tile = blockIdx.x / parts % row_tiles;
        const uint32_t k_block = blockIdx.x % parts * kBlocks + threadIdx.x / 128, thread = threadIdx.x % 128, pair = thread % 4;
        const uint32_t factors = p.gated ? 2 : 1;
        if (blockIdx.x % (parts * row_tiles) == 0 && threadIdx.x < factors) {
            const size_t at = size_t(expert) * factors + threadIdx.x;
            p.expert_scales[at] = p.factors[at] * nvfp4::kFactor;
        }
        if (k_block >= k_blocks) return;
        uint32_t words[4] = {}, bytes[2][4] = {};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = weight_row_of_slice(p, 4 * tile + thread / 32, thread % 32 / 4, half);
#pragma unroll
            for (int step = 0; step < 4; ++step) {
                const int block = 4 * k_block + step;
                if (row < 0 || 16 * block >= p.k) continue;
                const uint32_t scale = scale_of(p, expert, row, block);
                bytes[half][step] = nvfp4::scale_byte(scale);
                if (!nvfp4::has_codes(scale)) continue;
                const size_t at = (size_t(expert) * p.rows + row) * (p.k / 16) + block;
                const uint2 codes = reinterpret_cast<const uint2*>(p.codes)[at];
                words[step] |= placed(codes.x >> 8 * pair, half, scale) | placed(codes.y >> 8 * pair, half + 2, scale);
            }
        }
        const size_t at = (size_t(expert) * row_tiles + tile) * k_blocks + k_block;
        *reinterpret_cast<uint4*>(p.packed_codes + at * nvfp4::kCodeBytes + 16 * thread) =
            make_uint4(words[0], words[1], words[2], words[3]);
        if (pair != 0) return;
        uint32_t* scales = reinterpret_cast<uint32_t*>(p.packed_scales + at * nvfp4::kScaleBytes + thread / 4 * 8);
#pragma unroll
        for (int word = 0; word < 2; ++word) {
            scales[word] =
                nvfp4::place_scales(bytes[0][2 * word], bytes[1][2 * word], bytes[0][2 * word + 1], bytes[1][2 * word + 1]);
        }
    }

private:
    // Places two codes of register `reg`, each with the sign of their scale.
    static __device__ __forceinline__ uint32_t placed(uint32_t codes, int reg, uint32_t scale) {
        const uint32_t sign = scale >> 4 & 8;
        return mxfp4::place((codes & 15) ^ sign, reg, 0) | mxfp4::place((codes >> 4 & 15) ^ sign, reg, 1);
    }

    static __device__ __forceinline__ uint32_t scale_of(const PackNvfp4Params& p, uint32_t expert, int row, int block) {
        const uint32_t blocks = p.k / 16, padded = p.tile_rows ? (blocks + 3) / 4 * 4 : blocks;
        const uint32_t rows = p.tile_rows ? (p.rows + p.tile_rows - 1) / p.tile_rows * p.tile_rows : p.rows;
        return p.scales[size_t(expert) * rows * padded + block_scale_offset(p.tile_rows, row, block, padded)];
    }
};

}  // namespace oxmoe
