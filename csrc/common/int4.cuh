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
    static __device__ __forceinline__ void decode_word(uint32_t word, const Multipliers& multipliers, uint32_t (&a)[4]) {
        uint32_t bits[4];
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            // NOTE: this is in asm, because with two constants ptxas makes two instructions of it.
            asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(bits[r]) : "r"(word >> 4 * r), "r"(kInPlace), "r"(kCodes));
            bits[r] = add(bits[r], multipliers.less[r % 2]);
        }
        mxfp4::scale(bits, multipliers.scales, a);
    }
    static __device__ __forceinline__ void decode(const Codes& codes, int step, const Multipliers& multipliers,
                                                  uint32_t (&a)[4]) {
        const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
        decode_word(words[step], multipliers, a);
    }
};
#endif

}  // namespace oxmoe::int4
