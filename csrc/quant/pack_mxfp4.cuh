// Packs MXFP4 weights once at load, and unpacks them. A checkpoint's form is codes [experts, rows, 16 row_blocks] and E8M0 scales
// [experts, rows, row_blocks]. The packed form is that of common/mxfp4.cuh or, with `e4m3`, that of common/mxfp4_e4m3.cuh, which
// is not unpacked. Mxfp4Peak comes before Mxfp4Pack: the fields of an expert's scales depend on its largest scale.
// src/cpu/pack_mxfp4.rs is the same on the host.
//
// NOTE: none of these kernels lets its successor start early: packed weights are older than any kernel that reads them.
#pragma once
#include <cstdint>

#include "../common/mxfp4.cuh"
#include "../common/mxfp4_e4m3.cuh"
#include "../common/pdl.cuh"
#include "oxmoe/src/params/quant.rs.h"
#include "walk.cuh"

namespace oxmoe {
namespace mxfp4 {

constexpr int kScaled = 32;  // columns that share a scale

// One thread of the 128 that take a block of 64 x 64, and the rows and columns that it holds.
struct Fragment {
    uint32_t expert, tile, k_block, thread;

    // `cta_blocks` is the number of 128-thread groups in a CTA.
    __device__ __forceinline__ Fragment(const PackMxfp4Params& p, int cta_blocks) {
        const uint32_t row_tiles = (p.rows + kBlockRows - 1) / kBlockRows, parts = (k_blocks(p) + cta_blocks - 1) / cta_blocks;
        expert = blockIdx.x / parts / row_tiles;
        tile = blockIdx.x / parts % row_tiles;
        k_block = blockIdx.x % parts * cta_blocks + threadIdx.x / 128;
        thread = threadIdx.x % 128;
        block_ = (size_t(expert) * row_tiles + tile) * k_blocks(p) + k_block;
    }

    static __device__ __forceinline__ uint32_t k_blocks(const PackMxfp4Params& p) { return (p.k + kBlockK - 1) / kBlockK; }

    __device__ __forceinline__ uint32_t pair() const { return thread % 4; }  // the pair of columns within 8

    // Returns the weight row of fragment row g (`half` 0) or g + 8 (`half` 1), or -1 for padding.
    __device__ __forceinline__ int row(const PackMxfp4Params& p, int half) const {
        const int slice = 4 * tile + thread / 32, g = thread % 32 / 4;
        if (!p.gated) return 16 * slice + 8 * half + g < p.used_rows ? 16 * slice + 8 * half + g : -1;
        const int column = 8 * slice + g, columns = p.rows / 2;
        if (column >= columns) return -1;
        if (p.layout == W13Layout::Interleaved) return 2 * column + half;
        return (p.layout == W13Layout::GateUp ? half : 1 - half) * columns + column;
    }

    // The index of the row's 32 columns from 64 k_block + 32 group on. It counts scales, and 16 bytes of codes.
    __device__ __forceinline__ size_t scaled(const PackMxfp4Params& p, int row, int group) const {
        return (size_t(expert) * p.rows + row) * p.row_blocks + 2 * k_block + group;
    }

    __device__ __forceinline__ size_t block() const { return block_; }
    __device__ __forceinline__ uint32_t* codes(const PackMxfp4Params& p) const {
        return reinterpret_cast<uint32_t*>(p.packed_codes + block_ * kCodeBytes + 16 * thread);
    }
    __device__ __forceinline__ uint32_t* scales(const PackMxfp4Params& p) const {
        return reinterpret_cast<uint32_t*>(p.packed_scales + block_ * kScaleBytes + thread / 4 * 4);
    }

    __device__ __forceinline__ int shift(const PackMxfp4Params& p) const {
        return int(__float_as_uint(p.expert_scales[expert]) >> 23) - 127;
    }
    __device__ __forceinline__ int peak_e4m3(const PackMxfp4Params& p) const {
        return mxfp4_e4m3::peak_of_field(__float_as_uint(p.expert_scales[expert]) >> 23);
    }

private:
    size_t block_;
};

}  // namespace mxfp4

// Computes expert_scales[e] from the largest scale of expert e that is a number. Grid: experts.
struct Mxfp4Peak : Cta<1024> {
    static __device__ __forceinline__ void run(const PackMxfp4Params& p) {
        run(p, [&](uint32_t peak) { return p.e4m3 ? mxfp4_e4m3::scale_field(peak) : 127 + (peak > 128 ? peak - 128 : 0); });
    }

    // `field` returns the exponent field of an expert's factor from the expert's largest scale byte.
    template <typename Field>
    static __device__ __forceinline__ void run(const PackMxfp4Params& p, Field field) {
        pdl::wait();
        __shared__ uint32_t peaks[kThreads / 32];
        const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        const uint8_t* scales = p.scales + size_t(blockIdx.x) * p.rows * p.row_blocks;
        const uint32_t groups = (p.k + mxfp4::kScaled - 1) / mxfp4::kScaled;
        uint32_t peak = 0;
#pragma unroll 4
        for (uint32_t row = warp; row < p.used_rows; row += kThreads / 32) {
            for (uint32_t group = lane; group < groups; group += 32) {
                const uint32_t scale = scales[size_t(row) * p.row_blocks + group];
                peak = max(peak, scale == 255 ? 0 : scale);
            }
        }
        peak = __reduce_max_sync(~0u, peak);
        if (lane == 0) peaks[warp] = peak;
        __syncthreads();
        if (warp > 0) return;
        peak = __reduce_max_sync(~0u, peaks[lane]);
        if (lane == 0) p.expert_scales[blockIdx.x] = __uint_as_float(field(peak) << 23);
    }
};

// A thread packs its 16 bytes of a block. Grid: experts x row tiles x groups of kBlocks blocks, which lie side by side along K,
// so that a CTA reads 128 bytes of each row.
struct Mxfp4Pack : Cta<512> {
    static constexpr int kBlocks = kThreads / 128;

    static __device__ __forceinline__ void run(const PackMxfp4Params& p) {
        pdl::wait();
        const mxfp4::Fragment at(p, kBlocks);
        if (at.k_block >= at.k_blocks(p)) return;
        // All loads start before a value is used. Padding is the code 0 with the field 0.
        uint4 codes[2][2] = {};
        int scales[2][2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = at.row(p, half);
#pragma unroll
            for (int group = 0; group < 2; ++group) {
                scales[half][group] = -1;
                if (row < 0 || column(at, group) >= p.k) continue;
                const size_t scaled = at.scaled(p, row, group);
                scales[half][group] = p.scales[scaled];
                codes[half][group] = reinterpret_cast<const uint4*>(p.codes)[scaled];
            }
        }
        if (p.e4m3) return store_e4m3(p, at, codes, scales);
        const int shift = at.shift(p);
        uint32_t words[4] = {}, fields[2][2] = {};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int group = 0; group < 2; ++group) {
                const int scale = scales[half][group], first = column(at, group);
                if (scale >= 0) fields[half][group] = mxfp4::scale_field(scale, shift);
                // The field 255 is infinity in bf16; the code 0 makes the product NaN.
                if (scale == 255) continue;
                const uint4 c = codes[half][group];
                words[2 * group] |= placed(p, c.x, c.y, first, at.pair(), half);
                words[2 * group + 1] |= placed(p, c.z, c.w, first + 16, at.pair(), half);
            }
        }
        *reinterpret_cast<uint4*>(at.codes(p)) = make_uint4(words[0], words[1], words[2], words[3]);
        if (at.pair() == 0) *at.scales(p) = mxfp4::place_scales(fields[0][0], fields[1][0], fields[0][1], fields[1][1]);
    }

private:
    static __device__ __forceinline__ int column(const mxfp4::Fragment& at, int group) {
        return mxfp4::kBlockK * at.k_block + mxfp4::kScaled * group;
    }

    static __device__ __forceinline__ void store_e4m3(const PackMxfp4Params& p, const mxfp4::Fragment& at,
                                                      const uint4 (&codes)[2][2], const int (&scales)[2][2]) {
        const int peak = at.peak_e4m3(p);
        uint32_t words[4] = {}, bytes = 0;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int group = 0; group < 2; ++group) {
                const int scale = scales[half][group];
                if (scale < 0) continue;
                bytes |= mxfp4_e4m3::scale_byte(scale, peak) << 8 * (2 * group + half);
                const uint4 c = codes[half][group];
                // The thread's columns start at 4 pair and 16 + 4 pair.
                const uint32_t low = at.pair() < 2 ? c.x : c.y, high = at.pair() < 2 ? c.z : c.w;
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    if (column(at, group) + i / 4 * 16 + int(4 * at.pair()) + i % 4 >= p.k) continue;
                    const uint32_t code = (i < 4 ? low : high) >> (at.pair() % 2 * 16 + i % 4 * 4) & 15;
                    words[2 * group + half] |= mxfp4_e4m3::place(mxfp4_e4m3::code_at(code, scale, peak), i);
                }
            }
        }
        *reinterpret_cast<uint4*>(at.codes(p)) = make_uint4(words[0], words[1], words[2], words[3]);
        if (at.pair() == 0) *at.scales(p) = bytes;
    }

    // Places the four codes that a thread has of a row in a k16 step. The step's first column is `column`, and its first and
    // second eight columns are `low` and `high`.
    static __device__ __forceinline__ uint32_t placed(const PackMxfp4Params& p, uint32_t low, uint32_t high, int column,
                                                      uint32_t pair, int half) {
        uint32_t word = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint32_t code = (i < 2 ? low : high) >> (8 * pair + i % 2 * 4) & 15;
            if (column + i / 2 * 8 + int(2 * pair) + i % 2 < p.k) word |= mxfp4::place(code, i / 2 * 2 + half, i % 2);
        }
        return word;
    }
};

// Does the inverse of Mxfp4Pack: writes codes and scales of rows below `rows` and all `row_blocks`. Its grid is that of
// Mxfp4Pack.
struct Mxfp4Unpack : Cta<Mxfp4Pack::kThreads> {
    static __device__ __forceinline__ void run(const PackMxfp4Params& p) {
        pdl::wait();
        const mxfp4::Fragment at(p, Mxfp4Pack::kBlocks);
        if (at.k_block >= at.k_blocks(p)) return;
        const uint4 words = *reinterpret_cast<const uint4*>(at.codes(p));
        const uint32_t scales = *at.scales(p);
        const int shift = at.shift(p);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = at.row(p, half);
#pragma unroll
            for (int group = 0; group < 2; ++group) {
                if (row < 0 || 2 * at.k_block + group >= p.row_blocks) continue;
                const size_t scaled = at.scaled(p, row, group);
                const int field = mxfp4::unpack_scales(scales, group) >> (half ? 23 : 7) & 255;
                if (at.pair() == 0) p.scales[scaled] = field == 0 || field == 255 ? field : field - 126 + shift;
                uint8_t* codes = p.codes + 16 * scaled + at.pair();
#pragma unroll
                for (int step = 0; step < 2; ++step) {
                    const uint32_t word = group ? (step ? words.w : words.z) : (step ? words.y : words.x);
                    uint32_t bits[4];
                    mxfp4::take(word, bits);
                    codes[8 * step] = code_pair(bits[half]);
                    codes[8 * step + 4] = code_pair(bits[2 + half]);
                }
            }
        }
    }

private:
    static __device__ __forceinline__ uint8_t code_pair(uint32_t bits) {
        const uint32_t codes = (bits >> 12 & 0x00080008) | (bits >> 6 & 0x00070007);
        return uint8_t(codes | codes >> 12);
    }
};

// Converts fp32 powers of two to E8M0 bytes. `first_wrong` becomes the index of the first number that is no power of two. Grid:
// any.
struct Mxfp4ScaleBytes : Cta<256> {
    static __device__ __forceinline__ void run(const ScaleBytesParams& p) {
        pdl::wait();
        const int64_t stride = int64_t(gridDim.x) * kThreads;
        for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < p.count; i += stride) {
            const uint32_t bits = __float_as_uint(p.scales[i]);
            uint32_t byte = bits >> 23;
            if ((bits & 0x7FFFFFFF) > 0x7F800000)
                byte = 255;
            else if (bits == 0x00400000)  // 2^-127
                byte = 0;
            else if (bits << 9 || byte == 0 || byte > 254)
                atomicMin(reinterpret_cast<unsigned long long*>(p.first_wrong), static_cast<unsigned long long>(i));
            p.bytes[i] = uint8_t(byte);
        }
    }
};

}  // namespace oxmoe
