// Packs weights once at load. It reads a checkpoint's matrices (PackParams), and writes the packed form of a format.
//
// `Packer` stands beside the format's `Form`, such as int4::Packer. It has
//   factors(p, expert)  writes the factors of an expert's sums; all threads of a CTA call it
//   pack(p, at)         writes a thread's 16 bytes of a block's codes, and one thread of a quad the quad's scales
//
// NOTE: this kernel's successor does not start early: packed weights are older than any kernel that reads them.
#pragma once
#include <cstdint>

#include "../common/pdl.cuh"
#include "oxmoe/src/params/pack.rs.h"
#include "walk.cuh"
#include "weight_rows.cuh"

namespace oxmoe {

// One thread of the 128 that pack a block of 64 x 64 weights.
struct PackedFragment {
    uint32_t row_tiles, k_blocks;  // of a matrix
    uint32_t expert, tile, k_block, thread;

    __device__ __forceinline__ uint32_t pair() const { return thread % 4; }  // the pair of columns within 8

    // The index of the block among those of all experts.
    __device__ __forceinline__ size_t block() const { return (size_t(expert) * row_tiles + tile) * k_blocks + k_block; }

    // Returns the weight row of fragment row g (`half` 0) or g + 8 (`half` 1), or -1 for padding.
    __device__ __forceinline__ int row(const PackParams& p, int half) const {
        return weight_row_of_slice(p, 4 * tile + thread / 32, thread % 32 / 4, half);
    }
};

// Grid: experts x row tiles x groups of kBlocks blocks, which lie side by side along K.
template <typename Packer>
struct Pack : Cta<512> {
    static constexpr int kBlocks = kThreads / 128;

    static __device__ __forceinline__ void run(const PackParams& p) {
        pdl::wait();
        const uint32_t row_tiles = (p.rows + 63) / 64, k_blocks = (p.k + 63) / 64, parts = (k_blocks + kBlocks - 1) / kBlocks;
        const PackedFragment at{row_tiles,
                                k_blocks,
                                blockIdx.x / parts / row_tiles,
                                blockIdx.x / parts % row_tiles,
                                blockIdx.x % parts * kBlocks + threadIdx.x / 128,
                                threadIdx.x % 128};
        if (blockIdx.x % (parts * row_tiles) == 0) Packer::factors(p, at.expert);
        if (at.k_block < k_blocks) Packer::pack(p, at);
    }
};

}  // namespace oxmoe
