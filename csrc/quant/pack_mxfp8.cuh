// Packs MXFP8 weights once at load, as pack_mxfp4.cuh does for MXFP4. It reads a checkpoint's form (codes [experts, rows, 32
// row_blocks], E8M0 scales [experts, rows, row_blocks]), and writes the packed form of common/mxfp8.cuh. src/cpu/pack_mxfp8.rs
// does this on the host.
#pragma once
#include <cstdint>

#include "../common/mxfp8.cuh"
#include "pack_mxfp4.cuh"

namespace oxmoe {

// Does what Mxfp4Peak does for MXFP8.
struct Mxfp8Peak : Cta<Mxfp4Peak::kThreads> {
    static __device__ __forceinline__ void run(const PackMxfp4Params& p) {
        Mxfp4Peak::run(p, [](uint32_t peak) { return 127u + mxfp8::shift_of_peak(peak); });
    }
};

// Does what Mxfp4Pack does for MXFP8: a thread packs its 32 bytes of a block.
struct Mxfp8Pack : Cta<Mxfp4Pack::kThreads> {
    static __device__ __forceinline__ void run(const PackMxfp4Params& p) {
        pdl::wait();
        const mxfp4::Fragment at(p, Mxfp4Pack::kBlocks);
        if (at.k_block >= at.k_blocks(p)) return;
        const int shift = at.shift(p);
        uint32_t words[2][4] = {}, fields[2][2] = {};
#pragma unroll
        for (int group = 0; group < 2; ++group) {
            const int first = mxfp4::kBlockK * at.k_block + mxfp8::kScaled * group;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = at.row(p, half);
                if (row < 0 || first >= p.k) continue;
                const size_t scaled = at.scaled(p, row, group);
                const int scale = p.scales[scaled];
                const uint4* from = reinterpret_cast<const uint4*>(p.codes) + 2 * scaled;
                const uint4 codes[2] = {from[0], from[1]};
                const bool nan = scale == 255 || has_nan(codes[0], p.k - first) || has_nan(codes[1], p.k - first - 16);
                fields[half][group] = mxfp8::scale_field(nan ? 255 : scale, shift);
                if (nan) continue;
#pragma unroll
                for (int step = 0; step < 2; ++step) {
                    const uint4& c = codes[step];
                    const uint32_t low = at.pair() < 2 ? c.x : c.y, high = at.pair() < 2 ? c.z : c.w;
                    const int column = first + 16 * step + 2 * at.pair();
                    words[group][2 * step] |= placed(low >> at.pair() % 2 * 16, half, p.k - column);
                    words[group][2 * step + 1] |= placed(high >> at.pair() % 2 * 16, half, p.k - column - 8);
                }
            }
        }
        uint8_t* block = p.packed_codes + at.block() * mxfp8::kCodeBytes + 16 * at.thread;
#pragma unroll
        for (int group = 0; group < 2; ++group) {
            const uint32_t* w = words[group];
            *reinterpret_cast<uint4*>(block + group * mxfp8::kCodeBytes / 2) = make_uint4(w[0], w[1], w[2], w[3]);
        }
        if (at.pair() == 0) *at.scales(p) = mxfp4::place_scales(fields[0][0], fields[1][0], fields[0][1], fields[1][1]);
    }

private:
    // Places two codes of register `reg`. The first `count` of them exist.
    static __device__ __forceinline__ uint32_t placed(uint32_t codes, int reg, int count) {
        return (count > 0 ? mxfp8::place(codes & 0xFF, reg, 0) : 0) | (count > 1 ? mxfp8::place(codes >> 8 & 0xFF, reg, 1) : 0);
    }

    // Whether the first `count` of 16 codes have a NaN.
    static __device__ __forceinline__ bool has_nan(const uint4& codes, int count) {
        const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
        bool any = false;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int left = count - 4 * i;
            const uint32_t nan = (words[i] & 0x7F7F7F7F) + 0x01010101, mask = left >= 4  ? 0x80808080
                                                                              : left > 0 ? 0x808080 >> 8 * (3 - left)
                                                                                         : 0;
            any |= (nan & mask) != 0;
        }
        return any;
    }
};

}  // namespace oxmoe
