// int4 weights as the GPU kernels hold them: codes of 4 bits and bf16 scales of 32 columns, packed so that a thread reads its mma
// A fragments as one vector and needs 15 instructions for 8 weights.
//
// Blocks, fragments and weight rows are those of mxfp4.cuh; the places of codes and the scales differ:
//   codes   [experts][ceil(rows / 64)][ceil(k / 64)][2048 bytes]
//   scales  [experts][ceil(rows / 64)][ceil(k / 64)][256 bytes, with zero points 384]
// A quad shares the 2 words of scales (with zero points 3) at word 2 (or 3) times t / 4. Word s has the bf16 scales of K group s
// (32 columns), row g's in the low half and row g + 8's in the high half. With zero points a third word has one byte for each
// scale: row g's and row g + 8's of group 0, then row g's and row g + 8's of group 1. A scale of a longer group is repeated for
// each 32 columns.
//
// A weight is (code - zero point) * scale. The difference is exact and the product is rounded to bf16 once, which is what a bf16
// checkpoint of the dequantised weights would hold. Without zero points the difference is code - 8.
#pragma once
#include <cstdint>

#include "mxfp4.cuh"
#ifdef __CUDACC__
#include "element.cuh"
#endif

namespace oxmoe::int4 {

constexpr int kCodeBytes = mxfp4::kCodeBytes;
constexpr int kScaled = 32;      // columns that share a scale
constexpr uint32_t kMiddle = 8;  // the zero point of weights without zero points

// Bytes of a block's scales. With zero points, each quad's zero points follow its scales.
__host__ __device__ constexpr int scale_bytes(bool zeros) { return zeros ? 384 : 256; }

// Register r has the codes of both its halves in bits 4 r to 4 r + 3 of the word's halves.
__host__ __device__ constexpr uint32_t place(uint32_t code, int reg, int half) { return code << (4 * reg + 16 * half); }

#ifdef __CUDACC__
// bf16 128 + code is 0x4300 + code, and -(128 + zero point) is 0xC300 + zero point.
constexpr uint32_t kInPlace = 0x000F000F, kCodes = 0x43004300, kLess = 0xC300C300;

// Adds both halves; the sums are exact here.
__device__ __forceinline__ uint32_t add(uint32_t a, uint32_t b) {
    uint32_t sum;
#if __CUDA_ARCH__ >= 900
    asm("add.rn.bf16x2 %0, %1, %2;" : "=r"(sum) : "r"(a), "r"(b));
#else
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(0x3F803F80), "r"(b));
#endif
    return sum;
}

// The multipliers of a K group: codes in place are multiplied by `scales`, row g's low and row g + 8's high. `less` is added
// before, one word for each row.
struct Multipliers {
    uint32_t scales, less[2];
};

// The format's parameter of moe/grouped_gemm_packed_sm90.cuh.
template <bool Zeros>
struct Form : mxfp4::Form {
    static constexpr int kScaleBytes = scale_bytes(Zeros);
    static constexpr int kQuadScales = kScaleBytes / 32;

    struct Scales {
        uint32_t words[kQuadScales / 4];
    };
    static __device__ __forceinline__ Scales load_scales(const uint8_t* mine) {
        if constexpr (Zeros) {
            const uint32_t* words = reinterpret_cast<const uint32_t*>(mine);
            return {words[0], words[1], words[2]};
        } else {
            const uint2 words = *reinterpret_cast<const uint2*>(mine);
            return {words.x, words.y};
        }
    }

    static __device__ __forceinline__ Multipliers multipliers(const Scales& scales, int group) {
        if constexpr (Zeros) {
            // The bytes come from a row's zero point b and from kLess: b, C3, b, C3.
            const uint32_t zeros = scales.words[2], first = 2 * group;
            return {scales.words[group],
                    {__byte_perm(zeros, kLess, 0x5050 + 0x0101 * first), __byte_perm(zeros, kLess, 0x5151 + 0x0101 * first)}};
        } else {
            return {scales.words[group], {kLess + kMiddle * 0x00010001, kLess + kMiddle * 0x00010001}};
        }
    }
    static __device__ __forceinline__ void decode_words(const uint32_t (&words)[4], int step, const Multipliers& multipliers,
                                                        uint32_t (&a)[4]) {
        uint32_t bits[4];
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            // NOTE: this is in asm, because with two constants ptxas makes two instructions of it.
            asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(bits[r]) : "r"(words[step] >> 4 * r), "r"(kInPlace), "r"(kCodes));
            bits[r] = add(bits[r], multipliers.less[r % 2]);
        }
        mxfp4::scale(bits, multipliers.scales, a);
    }
    static __device__ __forceinline__ void decode(const Codes& codes, int step, const Multipliers& multipliers,
                                                  uint32_t (&a)[4]) {
        const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
        decode_words(words, step, multipliers, a);
    }
    static constexpr bool kOneTile = true;
};

// The format's parameter of quant/pack.cuh, for both forms. Needs k % 32 == 0, group % 32 == 0, k % group == 0, codes aligned to
// 16 bytes.
struct Packer {
    template <typename Params>
    static __device__ __forceinline__ void factors(const Params& p, uint32_t expert) {
        if (threadIdx.x == 0) p.expert_scales[expert] = 1;
    }

    template <typename Params, typename Fragment>
    static __device__ __forceinline__ void pack(const Params& p, const Fragment& at) {
        // Padding has weights of 0: the middle code with the scale 0.
        uint32_t words[4] = {0x88888888, 0x88888888, 0x88888888, 0x88888888}, scales[2] = {}, zeros = kMiddle * 0x01010101;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = at.row(p, half);
#pragma unroll
            for (int group = 0; group < 2; ++group) {
                const int column = 64 * at.k_block + 32 * group;
                if (row < 0 || column >= p.k) continue;
                const size_t first = size_t(at.expert) * p.rows + row, scale = first * (p.k / p.group) + column / p.group;
                scales[group] |= scale_of(p, scale) << 16 * half;
                if (p.zeros) {
                    const int byte = 8 * (2 * group + half);
                    zeros = (zeros & ~(0xFFu << byte)) | uint32_t(p.zeros[scale]) << byte;
                }
                // These are 32 codes: the codes of two k16 steps.
                const uint4 codes = reinterpret_cast<const uint4*>(p.codes)[(first * p.k + column) / 32];
                put(words[2 * group], codes.x, codes.y, at.pair(), half);
                put(words[2 * group + 1], codes.z, codes.w, at.pair(), half);
            }
        }
        *reinterpret_cast<uint4*>(p.packed_codes + at.block() * kCodeBytes + 16 * at.thread) =
            make_uint4(words[0], words[1], words[2], words[3]);
        if (at.pair() != 0) return;
        const bool has_zeros = p.zeros != nullptr;
        const int quad_words = scale_bytes(has_zeros) / 128;
        uint32_t* to =
            reinterpret_cast<uint32_t*>(p.packed_scales + at.block() * scale_bytes(has_zeros)) + at.thread / 4 * quad_words;
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
            word = (word & ~place(15, reg, i % 2)) | place(code, reg, i % 2);
        }
    }

    // The bits of a scale, rounded to bf16.
    template <typename Params>
    static __device__ __forceinline__ uint32_t scale_of(const Params& p, size_t at) {
        using Dtype = decltype(p.scale_dtype);
        if (p.scale_dtype == Dtype::Bf16) return reinterpret_cast<const uint16_t*>(p.scales)[at];
        const float scale = p.scale_dtype == Dtype::F16 ? to_float(reinterpret_cast<const __half*>(p.scales)[at])
                                                        : reinterpret_cast<const float*>(p.scales)[at];
        return oxmoe::pack<__nv_bfloat16>(scale, 0) & 0xFFFF;
    }
};
#endif

}  // namespace oxmoe::int4
