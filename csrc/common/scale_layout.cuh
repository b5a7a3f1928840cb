// Offsets and addresses of the scale of a row's block of columns.
#pragma once
#include <cstdint>

#include "oxmoe/src/params/quant.rs.h"

namespace oxmoe {

// Scales lie in tiles of 128 (or 8) rows by 4 blocks (src/quant/nvfp4.rs) or, with any other `tile_rows`, row by row.
__device__ __forceinline__ int64_t block_scale_offset(int tile_rows, int64_t row, int block, int blocks) {
    const int64_t tiles = (blocks + 3) / 4;
    if (tile_rows == 128) return (row / 128 * tiles + block / 4) * 512 + row % 32 * 16 + row % 128 / 32 * 4 + block % 4;
    if (tile_rows == 8) return (row / 8 * tiles + block / 4) * 32 + row % 8 * 4 + block % 4;
    return row * blocks + block;
}

// Address of one of a matrix' scales; each row has `blocks`.
__device__ __forceinline__ const uint8_t* scale_address(const ScaleView& scales, int64_t row, int block, int blocks) {
    const int64_t offset = scales.tile_rows ? block_scale_offset(scales.tile_rows, row, block, blocks)
                                            : row * scales.row_stride + block * scales.block_stride;
    return scales.data + offset;
}

// Distance in bytes from a block's scale to that of the fourth block after it.
__device__ __forceinline__ int64_t four_blocks(const ScaleView& scales) {
    return scales.tile_rows ? 4 * scales.tile_rows : 4 * scales.block_stride;
}

}  // namespace oxmoe
