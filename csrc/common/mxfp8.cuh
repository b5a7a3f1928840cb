// MXFP8: e4m3 weights with E8M0 scales as the GPU kernels hold them, packed so that a thread reads its mma A fragments as vectors
// and needs 14 instructions for 8 weights; and the rounding of activations.
//
// Blocks, fragments and weight rows are those of mxfp4.cuh, with twice the bytes of codes:
//   codes   [experts][ceil(rows / 64)][ceil(k / 64)][4096 bytes]
//   scales  [experts][ceil(rows / 64)][ceil(k / 64)][128 bytes]
// Thread t of the 128 has 16 bytes at 16 t: words 2 s and 2 s + 1 of them are its A fragment of k16 step s (0 and 1). Its 16
// bytes at 2048 + 16 t are the fragments of steps 2 and 3. The first word of a step has registers 0 and 1, the second word
// registers 2 and 3.
#pragma once
#include <cstdint>

#include "mxfp4.cuh"
#ifdef __CUDACC__
#include "bf16_pairs.cuh"
#endif

namespace oxmoe::mxfp8 {

constexpr int kCodeBytes = 4096, kScaleBytes = mxfp4::kScaleBytes;
constexpr int kScaled = 32;  // columns that share a scale

// An e4m3 code is s eeee mmm. The bf16 bits  s0000eee emmm0000  are its value * 2^-120, subnormal numbers included. So decoding
// moves eight bits into place, then multiplies by 2^120 * scale. Both steps are exact. The packer handles NaN.
constexpr uint32_t kInPlace = 0x87F087F0;

// The place into which the packer puts a code, so that take() needs 5 instructions for four codes. Codes of the first register
// are in place. In those of the second, bits 4 to 7 and the sign are 4 bits too low. Their bits 8 to 10 are 4 bits too high,
// where the first register has none.
__host__ __device__ constexpr uint32_t place(uint32_t code, int reg, int half) {
    const uint32_t in_place = (code & 0x80) << 8 | (code & 0x7F) << 4;
    return (reg % 2 == 0 ? in_place : (in_place & 0x80F0) >> 4 | (in_place & 0x0700) << 4) << (16 * half);
}

// The multiplier of scale byte E, value 2^(E - 127), is the bf16 2^(E - 7 - shift): exponent field E + 120 - shift. An expert's
// shift is 0 if its largest E is at most 134 (a scale of 128). Otherwise the shift is that E - 134, and the sums are multiplied
// by 2^shift. Numbers below 2^(shift - 133) lose bits, because bf16 has none there; they have scales below 2^(shift - 124). A
// group with NaN (its scale is 255 or a code is 0x7F) is packed as mxfp4.cuh packs a NaN scale: with the field 255 and the codes
// 0.
__host__ __device__ constexpr int shift_of_peak(int peak) { return peak > 134 ? peak - 134 : 0; }
__host__ __device__ constexpr uint32_t scale_field(int e8m0, int shift) {
    const int field = e8m0 + 120 - shift;
    return e8m0 == 255 ? 255 : field < 0 ? 0 : field;
}

#ifdef __CUDACC__
// Moves a word's codes into place: each register gets two.
__device__ __forceinline__ void take(uint32_t word, uint32_t& first, uint32_t& second) {
    first = word & kInPlace;
    second = (word << 4 & 0x80F080F0) | (word >> 4 & 0x07000700);
}

// ---- activations: a quad rounds groups of 32 bf16 numbers to the bf16 numbers that MXFP8 has for them ----
//
// Scale and codes are those of quantize_group in src/quant/mxfp8.rs. The result is code times scale; it is rounded below 2^-133,
// where bf16 does not hold it.

// The E8M0 byte from the bits of a bf16 magnitude: 448 is 1.75 * 2^8.
__device__ __forceinline__ int scale_byte(uint32_t magnitude) {
    return magnitude < 0x7F80 ? max((magnitude + 0x1F) >> 7, 8u) - 8 : magnitude == 0x7F80 ? 254 : 255;
}

// Rounds 8 of a group's numbers. The other lanes of the quad have the others, and all lanes of the warp call this.
//
// A number is rounded to e4m3's steps by adding and subtracting 1.5 times the power of two whose bf16 steps they are. That power
// is 16 times the number's own, and at least 2^-2 scales. Groups of the largest and smallest scales are multiplied by 2^-64 or
// 2^64 before, and by the inverse after, so that the sum neither overflows nor is lost. Numbers with the scale 0 or 254 become 0,
// and an infinity becomes NaN. NOTE: this makes no call, and whole warps execute it: otherwise ptxas would give up uniform
// registers beside wgmma.
__device__ __forceinline__ uint4 round_group(const uint4& x) {
    uint32_t pair = larger_magnitudes(larger_magnitudes(x.x, x.y), larger_magnitudes(x.z, x.w));
    pair = larger_magnitudes(pair, __shfl_xor_sync(~0u, pair, 1));
    pair = larger_magnitudes(pair, __shfl_xor_sync(~0u, pair, 2));
    const int scale = scale_byte(larger_magnitudes(pair, pair >> 16) & 0xFFFF), shift = scale < 10 ? 64 : scale > 230 ? -64 : 0;
    const uint32_t factor = scale == 0 || scale == 254 ? 0 : (127 + shift) * 0x00800080, back = (127 - shift) * 0x00800080;
    const uint32_t least = (scale + shift - 6) * 0x00800080;
    const auto rounded = [&](uint32_t numbers) {
#if __CUDA_ARCH__ >= 900
        uint32_t sum;
        asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(numbers) : "r"(numbers), "r"(factor));
        const uint32_t steps = __vmaxu2(numbers & 0x7F807F80, least) + 0x02400240;
        asm("add.rn.bf16x2 %0, %1, %2;" : "=r"(sum) : "r"(numbers), "r"(steps));
        asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(sum) : "r"(sum), "r"(steps));
        asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(sum) : "r"(sum), "r"(back));
        return sum;
#else
        // sm_80 has only fma: this code adds -0 to products, and multiplies summands by 1 and -1.
        const auto fma = [](uint32_t a, uint32_t b, uint32_t c) {
            uint32_t sum;
            asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
            return sum;
        };
        numbers = fma(numbers, factor, 0x80008000);
        const uint32_t steps = __vmaxu2(numbers & 0x7F807F80, least) + 0x02400240;
        return fma(fma(steps, 0xBF80BF80, fma(numbers, 0x3F803F80, steps)), back, 0x80008000);
#endif
    };
    return make_uint4(rounded(x.x), rounded(x.y), rounded(x.z), rounded(x.w));
}

// The format's parameter of moe/grouped_gemm_packed_sm90.cuh.
struct Form {
    static constexpr int kCodeBytes = mxfp8::kCodeBytes, kScaleBytes = mxfp8::kScaleBytes;
    static constexpr int kThreadCodes = 16, kQuadScales = 4;
    static constexpr bool kFactorsOfHalves = false;

    struct Codes {
        uint4 halves[2];
    };
    using Scales = uint32_t;
    static __device__ __forceinline__ Codes load_codes(const uint8_t* mine) {
        const uint4* halves = reinterpret_cast<const uint4*>(mine);
        return {halves[0], halves[kCodeBytes / 32]};
    }
    static __device__ __forceinline__ Scales load_scales(const uint8_t* mine) { return *reinterpret_cast<const uint32_t*>(mine); }

    static constexpr int kGroupSteps = 2;
    static __device__ __forceinline__ uint32_t multipliers(Scales scales, int group) {
        return mxfp4::unpack_scales(scales, group);
    }
    static __device__ __forceinline__ void decode(const Codes& codes, int step, uint32_t multipliers, uint32_t (&a)[4]) {
        const uint4& half = codes.halves[step / 2];
        const uint32_t words[4] = {half.x, half.y, half.z, half.w};
        decode_words(words, step, multipliers, a);
    }
    static __device__ __forceinline__ void decode_words(const uint32_t (&words)[4], int step, uint32_t multipliers,
                                                        uint32_t (&a)[4]) {
        uint32_t bits[4];
        take(words[step % 2 * 2], bits[0], bits[1]);
        take(words[step % 2 * 2 + 1], bits[2], bits[3]);
        mxfp4::scale(bits, multipliers, a);
    }
    static constexpr bool kOneTile = true;

    static constexpr bool kExchanges = true;
    // GEMM1's outputs, which went through the activation, are GEMM2's tokens. Four neighbouring lanes hold 32 columns of a token.
    template <typename Params>
    static __device__ __forceinline__ int of_expert(const Params&, int expert) {
        return expert;
    }
    template <typename Params>
    static __device__ __forceinline__ uint4 finish(const uint4& outputs, const Params& p, int) {
        return p.activation.kind == decltype(p.activation.kind)::Identity ? outputs : round_group(outputs);
    }

    static constexpr bool kRoundsTokens = true;
    static __device__ __forceinline__ uint4 round_tokens(const uint4& numbers) { return round_group(numbers); }
};
#endif

}  // namespace oxmoe::mxfp8
