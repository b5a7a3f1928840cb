// NVFP4 weights as the GPU kernels hold them: e2m1 codes and block scales of 16 columns, packed so that a thread reads its mma A
// fragments as one vector and needs 13 instructions for 8 weights, and one or two more for their scales.
//
// Blocks, fragments, weight rows and the places of codes are those of mxfp4.cuh; there are twice as many scales:
//   codes   [experts][ceil(rows / 64)][ceil(k / 64)][2048 bytes]
//   scales  [experts][ceil(rows / 64)][ceil(k / 64)][256 bytes]
// A quad shares the two words of scales at 8 (t / 4): word s has the scales of k16 steps 2 s and 2 s + 1.
#pragma once
#include <cstdint>

#include "mxfp4.cuh"
#ifdef __CUDACC__
#include "nvfp4_round.cuh"
#include "scale_layout.cuh"
#endif

namespace oxmoe::nvfp4 {

constexpr int kCodeBytes = mxfp4::kCodeBytes, kScaleBytes = 256;
constexpr int kScaled = 16;  // columns that share a scale

// A scale is held as a byte of five exponent bits and three of mantissa. Every e4m3 magnitude is a normal number of this type.
// With three ones above its exponent the byte is the bf16 number 2^119 times the scale. A code in place (mxfp4.cuh) is 2^-126
// times its value, so products are exactly the weights times 2^-7: six significant bits, from 2^-17 on. Sums are multiplied by
// kFactor in the end.
//
// Signs of scales go into the codes. A NaN scale is the byte of infinity with codes of 0, since 0 * inf is NaN. A scale of 0 has
// codes of 0.
constexpr float kFactor = 128;
constexpr uint32_t kInPlace = 0x0FF00FF0, kExponent = 0x70007000;

__host__ __device__ constexpr bool has_codes(uint32_t e4m3) { return (e4m3 & 0x7F) != 0 && (e4m3 & 0x7F) != 0x7F; }
__host__ __device__ constexpr uint32_t scale_byte(uint32_t e4m3) {
    const uint32_t magnitude = e4m3 & 0x7F;
    return magnitude == 0x7F ? 31 << 3  // infinity
           : magnitude >= 8  ? magnitude + (15 << 3)
           : magnitude >= 4  ? (magnitude - 4) << 1 | 15 << 3
           : magnitude >= 2  ? (magnitude - 2) << 2 | 14 << 3
           : magnitude == 1  ? 13 << 3
                             : 0;
}

// A word of scales. The scales of its first k16 step are in place for bf16, row g's low and row g + 8's high. The scales of the
// second step are there after a rotation left by 8.
__host__ __device__ constexpr uint32_t place_scales(uint32_t g_first, uint32_t g8_first, uint32_t g_second, uint32_t g8_second) {
    const uint32_t first = g_first << 4 | g8_first << 20, second = g_second << 4 | g8_second << 20;
    return first | second >> 8 | second << 24;
}

#ifdef __CUDACC__
// The format's parameter of moe/grouped_gemm_packed_sm90.cuh. GEMM1's outputs are GEMM2's tokens.
struct Form : RoundedOutputs {
    static constexpr int kCodeBytes = nvfp4::kCodeBytes, kScaleBytes = nvfp4::kScaleBytes;
    static constexpr int kThreadCodes = 16, kQuadScales = 8;
    static constexpr bool kFactorsOfHalves = true;
    static constexpr bool kRoundsTokens = false;  // only layers with factors of activations round

    using Codes = uint4;
    using Scales = uint2;
    static __device__ __forceinline__ Codes load_codes(const uint8_t* mine) { return *reinterpret_cast<const uint4*>(mine); }
    static __device__ __forceinline__ Scales load_scales(const uint8_t* mine) { return *reinterpret_cast<const uint2*>(mine); }

    static constexpr int kGroupSteps = 1;
    static __device__ __forceinline__ uint32_t multipliers(const Scales& scales, int group) {
        const uint32_t word = group / 2 ? scales.y : scales.x;
        // NOTE: this is in asm, because with two constants ptxas makes two instructions of it.
        uint32_t pair;
        asm("lop3.b32 %0, %1, %2, %3, 0xEA;"
            : "=r"(pair)
            : "r"(group % 2 ? __funnelshift_l(word, word, 8) : word), "r"(kInPlace), "r"(kExponent));
        return pair;
    }
    static __device__ __forceinline__ void decode(const Codes& codes, int step, uint32_t multipliers, uint32_t (&a)[4]) {
        mxfp4::Form::decode(codes, step, multipliers, a);
    }
    static __device__ __forceinline__ void decode_words(const uint32_t (&words)[4], int step, uint32_t multipliers,
                                                        uint32_t (&a)[4]) {
        mxfp4::Form::decode_words(words, step, multipliers, a);
    }
    static constexpr bool kOneTile = true;
};

// The format's parameter of quant/pack.cuh. Scales lie row by row or in tiles. Needs k % 16 == 0, codes aligned to 8 bytes.
struct Packer {
    template <typename Params>
    static __device__ __forceinline__ void factors(const Params& p, uint32_t expert) {
        const uint32_t factors = p.gated ? 2 : 1;
        if (threadIdx.x >= factors) return;
        const size_t at = size_t(expert) * factors + threadIdx.x;
        p.expert_scales[at] = p.factors[at] * kFactor;
    }

    template <typename Params, typename Fragment>
    static __device__ __forceinline__ void pack(const Params& p, const Fragment& at) {
        uint32_t words[4] = {}, bytes[2][4] = {};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = at.row(p, half);
#pragma unroll
            for (int step = 0; step < 4; ++step) {
                const int block = 4 * at.k_block + step;
                if (row < 0 || 16 * block >= p.k) continue;
                const uint32_t scale = scale_of(p, at.expert, row, block);
                bytes[half][step] = scale_byte(scale);
                if (!has_codes(scale)) continue;
                const size_t place = (size_t(at.expert) * p.rows + row) * (p.k / 16) + block;
                const uint2 codes = reinterpret_cast<const uint2*>(p.codes)[place];
                words[step] |= placed(codes.x >> 8 * at.pair(), half, scale) | placed(codes.y >> 8 * at.pair(), half + 2, scale);
            }
        }
        *reinterpret_cast<uint4*>(p.packed_codes + at.block() * kCodeBytes + 16 * at.thread) =
            make_uint4(words[0], words[1], words[2], words[3]);
        if (at.pair() != 0) return;
        uint32_t* scales = reinterpret_cast<uint32_t*>(p.packed_scales + at.block() * kScaleBytes + at.thread / 4 * 8);
#pragma unroll
        for (int word = 0; word < 2; ++word) {
            scales[word] = place_scales(bytes[0][2 * word], bytes[1][2 * word], bytes[0][2 * word + 1], bytes[1][2 * word + 1]);
        }
    }

private:
    // Places two codes of register `reg`, each with the sign of their scale.
    static __device__ __forceinline__ uint32_t placed(uint32_t codes, int reg, uint32_t scale) {
        const uint32_t sign = scale >> 4 & 8;
        return mxfp4::place((codes & 15) ^ sign, reg, 0) | mxfp4::place((codes >> 4 & 15) ^ sign, reg, 1);
    }

    template <typename Params>
    static __device__ __forceinline__ uint32_t scale_of(const Params& p, uint32_t expert, int row, int block) {
        const uint32_t blocks = p.k / 16, padded = p.tile_rows ? (blocks + 3) / 4 * 4 : blocks;
        const uint32_t rows = p.tile_rows ? (p.rows + p.tile_rows - 1) / p.tile_rows * p.tile_rows : p.rows;
        return p.scales[size_t(expert) * rows * padded + block_scale_offset(p.tile_rows, row, block, padded)];
    }
};
#endif

}  // namespace oxmoe::nvfp4
