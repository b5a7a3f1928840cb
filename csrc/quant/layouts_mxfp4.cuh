// Converts MXFP4 weights from a checkpoint's form (codes and scales of matrices, row by row) to other projects' layouts, and
// back. src/quant/layouts/ does this on the host, and describes the layouts. A thread takes what lies together in the layout.
#pragma once
#include <cstdint>

#include "../common/pdl.cuh"
#include "oxmoe/src/params/quant.rs.h"
#include "walk.cuh"

namespace oxmoe {
namespace mxfp4 {

// Transposes the 4 x 4 bytes of four words: byte i of word m becomes byte m of word i. The function is its own inverse.
__device__ __forceinline__ void transpose(uint32_t (&m)[4]) {
    const uint32_t a = __byte_perm(m[0], m[1], 0x5140), b = __byte_perm(m[0], m[1], 0x7362);
    const uint32_t c = __byte_perm(m[2], m[3], 0x5140), d = __byte_perm(m[2], m[3], 0x7362);
    m[0] = __byte_perm(a, c, 0x5410);
    m[1] = __byte_perm(a, c, 0x7632);
    m[2] = __byte_perm(b, d, 0x5410);
    m[3] = __byte_perm(b, d, 0x7632);
}

// Moves the codes of a quad's four bytes into a word. These are `spread` and `pairs` of words.rs, and `unspread`, the inverse of
// `spread`. `pairs` is its own inverse.
__device__ __forceinline__ uint32_t spread(uint32_t quad) {
    uint32_t x[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = (quad >> 8 * i & 0x0F) | (quad >> 8 * i & 0xF0) << 12;
    uint32_t word = (x[3] & 0x00080008) << 11 | (x[3] & 0x00060006) << 9 | (x[3] & 0x00010001) << 13;
#pragma unroll
    for (int i = 0; i < 3; ++i) word |= ((x[i] & 0x00080008) << 12 | (x[i] & 0x00070007) << 6) >> 3 * i;
    return word;
}

__device__ __forceinline__ uint32_t unspread(uint32_t word) {
    uint32_t x[4], quad = 0;
#pragma unroll
    for (int i = 0; i < 3; ++i) x[i] = (word << 3 * i >> 12 & 0x00080008) | (word << 3 * i >> 6 & 0x00070007);
    x[3] = (word >> 11 & 0x00080008) | (word >> 9 & 0x00060006) | (word >> 13 & 0x00010001);
#pragma unroll
    for (int i = 0; i < 4; ++i) quad |= ((x[i] | x[i] >> 12) & 0xFF) << 8 * i;
    return quad;
}

__device__ __forceinline__ uint32_t pairs(uint32_t quad) {
    return (quad & 0xF00FF00F) | (quad & 0x00F000F0) << 4 | (quad >> 4 & 0x00F000F0);
}

}  // namespace mxfp4

// A thread takes rows r and r + 8 of a tile of 16 rows x 32 bytes: 16 quads, whose words are 64 bytes of the layout.
// Grid: matrices x bands of 16 rows x parts of a band.
template <bool kBack>
struct Mxfp4LayoutCodes : Cta<128> {
    static __device__ __forceinline__ void run(const LayoutMxfp4Params& p) {
        pdl::wait();
        const uint32_t tiles = p.held_columns / 32, strips = 8 * tiles, parts = (strips + kThreads - 1) / kThreads;
        const uint32_t band = blockIdx.x / parts, bands = p.held_rows / 16;
        const uint32_t strip = blockIdx.x % parts * kThreads + threadIdx.x;
        if (strip >= strips) return;
        // Neighbouring threads take two rows of a tile, then the next tile, so both sides are read and written in long pieces.
        const uint32_t tile = strip / 2 % tiles, row = strip / 2 / tiles * 2 + strip % 2;
        uint32_t words[4][4] = {};  // the words of each step of 8 columns: its four rows and halves, or its quads
        if (kBack) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const uint4 v = *reinterpret_cast<const uint4*>(p.input + held(p, band, row, tile, i));
                words[i][0] = v.x, words[i][1] = v.y, words[i][2] = v.z, words[i][3] = v.w;
            }
            by_quad(p, words);
            convert(p, words);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const uint32_t plain_row = band % bands * 16 + row + 8 * half;
#pragma unroll
            for (uint32_t piece = 0; piece < 2; ++piece) {
                const uint32_t column = 32 * tile + 16 * piece;
                if (plain_row >= p.rows || column >= p.columns) continue;
                const size_t at = (size_t(band / bands) * p.rows + plain_row) * p.columns + column;
                uint32_t (&low)[4] = words[2 * piece], (&high)[4] = words[2 * piece + 1];
                if (kBack) {
                    const uint4 v = make_uint4(low[half], low[2 + half], high[half], high[2 + half]);
                    *reinterpret_cast<uint4*>(p.output + at) = v;
                } else {
                    const uint4 v = *reinterpret_cast<const uint4*>(p.input + at);
                    low[half] = v.x, low[2 + half] = v.y, high[half] = v.z, high[2 + half] = v.w;
                }
            }
        }
        if (kBack) return;
        convert(p, words);
        by_quad(p, words);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint4 v = make_uint4(words[i][0], words[i][1], words[i][2], words[i][3]);
            *reinterpret_cast<uint4*>(p.output + held(p, band, row, tile, i)) = v;
        }
    }

private:
    // The offset of 16 bytes in the layout: in Hopper's they are the words of quad i, in CUTLASS' the words of step i.
    static __device__ __forceinline__ size_t held(const LayoutMxfp4Params& p, uint32_t band, uint32_t row, uint32_t tile, int i) {
        const size_t start = size_t(band) * 16 * p.held_columns, columns = p.held_columns;
        if (p.layout == Mxfp4Layout::Hopper) return start + row / 2 * 4 * columns + 128 * tile + row % 2 * 64 + 16 * i;
        return start + (row + i % 2 * 8) * columns + 32 * tile + i / 2 * 16;
    }

    static __device__ __forceinline__ void by_quad(const LayoutMxfp4Params& p, uint32_t (&words)[4][4]) {
        if (p.layout != Mxfp4Layout::Hopper) return;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
            for (int j = 0; j < i; ++j) {
                const uint32_t word = words[i][j];
                words[i][j] = words[j][i];
                words[j][i] = word;
            }
        }
    }

    static __device__ __forceinline__ void convert(const LayoutMxfp4Params& p, uint32_t (&words)[4][4]) {
        const bool in_pairs = p.layout == Mxfp4Layout::CutlassPairs;
#pragma unroll
        for (int step = 0; step < 4; ++step) {
            if (!kBack) mxfp4::transpose(words[step]);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                uint32_t& word = words[step][i];
                word = in_pairs ? mxfp4::pairs(word) : kBack ? mxfp4::unspread(word) : mxfp4::spread(word);
            }
            if (kBack) mxfp4::transpose(words[step]);
        }
    }
};

// A thread takes four bytes of the layout. Grid: matrices x bands, rows that the layout keeps together, x parts of a band.
template <bool kBack>
struct Mxfp4LayoutScales : Cta<128> {
    static __device__ __forceinline__ void run(const LayoutMxfp4Params& p) {
        pdl::wait();
        const uint32_t words = p.band_rows * p.held_columns / 4, parts = (words + kThreads - 1) / kThreads;
        const uint32_t band = blockIdx.x / parts, bands = p.held_rows / p.band_rows;
        const uint32_t word = blockIdx.x % parts * kThreads + threadIdx.x;
        if (word >= words) return;
        const bool hopper = p.layout == Mxfp4Layout::Hopper;
        uint32_t row, column;
        if (hopper) {
            // Neighbouring threads take lanes, then the two tiles of a warp, pairs of columns, and warps.
            const uint32_t lane = word % 8, tile = word / 8 % 2, by_two = word / 16, pairs = p.held_columns / 2;
            row = (tile * (p.band_rows / 32) + by_two / pairs) * 16 + lane;
            column = by_two % pairs * 2;
        } else {
            const uint32_t place = word % p.band_rows;
            row = p.layout == Mxfp4Layout::CutlassSpread ? place % 4 * 16 + place / 4 : place;
            column = word / p.band_rows * 4;
        }
        row += band % bands * p.band_rows;
        uint32_t* at =
            reinterpret_cast<uint32_t*>(kBack ? const_cast<uint8_t*>(p.input) : p.output) + size_t(band) * words + word;
        uint32_t bytes = kBack ? *at : 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint32_t r = hopper ? row + i % 2 * 8 : row, c = hopper ? column + i / 2 : column + i;
            if (r >= p.rows || c >= p.columns) continue;
            const size_t plain = (size_t(band / bands) * p.rows + r) * p.columns + c;
            if (kBack)
                p.output[plain] = uint8_t(bytes >> 8 * i);
            else
                bytes |= uint32_t(p.input[plain]) << 8 * i;
        }
        if (!kBack) *at = bytes;
    }
};

}  // namespace oxmoe
