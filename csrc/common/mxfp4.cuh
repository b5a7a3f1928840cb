// MXFP4 weights as the GPU kernels hold them: e2m1 codes and E8M0 scales, packed so that a thread reads its mma A fragments as
// one vector and needs 13 instructions for 8 weights.
//
// A matrix [rows, k] of an expert is cut into blocks of 64 rows x 64 K, rows and K padded with zeros:
//   codes   [experts][ceil(rows / 64)][ceil(k / 64)][2048 bytes]
//   scales  [experts][ceil(rows / 64)][ceil(k / 64)][128 bytes]
// The blocks of 64 rows are contiguous along K. Four warps share a block, 16 rows each. Thread t of the 128 has 16 bytes of codes
// at 16 t. Word j of them is its A fragment of k16 step j (m64k16 of wgmma, m16k16 of mma.sync: they are the same in a warp).
// Thread t shares the word of scales at 4 (t / 4) with its quad.
//
// Lane l of warp w, with g = l / 4 and c = l % 4, holds fragment rows g (registers 0 and 2) and g + 8 (registers 1 and 3). It
// holds columns 2 c, 2 c + 1 of the k16 step (registers 0 and 1) and columns 2 c + 8, 2 c + 9 (registers 2 and 3), the lower
// column in the lower half. With the slice s = 4 (row tile) + w, the weight rows of fragment rows g and g + 8 are:
//   plain   16 s + g and 16 s + 8 + g
//   gated   gate and up of output column 8 s + g, whatever the layout of the checkpoint
#pragma once
#include <cstdint>

namespace oxmoe::mxfp4 {

constexpr int kBlockRows = 64, kBlockK = 64, kCodeBytes = 2048, kScaleBytes = 128;

// An e2m1 code is s e e m. The bf16 bits  s000000e em000000  are its value * 2^-126, 0.5 included (a bf16 subnormal). So decoding
// moves four bits into place, then multiplies by 2^126 * scale. Both steps are exact.
constexpr uint32_t kInPlace = 0x81C081C0;  // bits 15 and 8, 7, 6 of both halves

// The place into which the packer puts a code, so that decode() needs 9 instructions to move codes. The codes of registers 1 and
// 2 lie 2 and 6 bits too low, and those of register 3 are rotated right by 12. In register 0, s e e are in place and m is 8 bits
// too high.
__host__ __device__ constexpr uint32_t place(uint32_t code, int reg, int half) {
    const uint32_t in_place = ((code & 8) << 12 | (code & 7) << 6) << (16 * half), m = 0x40u << (16 * half);
    return reg == 0   ? (in_place & ~m) | (in_place & m) << 8
           : reg == 1 ? in_place >> 2
           : reg == 2 ? in_place >> 6
                      : in_place >> 12 | in_place << 20;
}

// The multiplier of scale byte E, value 2^(E - 127), is the bf16 2^(E - 1 - shift): exponent field E + 126 - shift. An expert's
// shift is 0 if its largest E is at most 128 (a scale of 2). Otherwise the shift is that E - 128, and the sums are multiplied by
// 2^shift. Scales below 2^(shift - 132) lose bits. E = 255 is NaN: the packer makes it the field 255 and the codes 0, since
// 0 * inf is NaN.
__host__ __device__ constexpr uint32_t scale_field(int e8m0, int shift) {
    const int field = e8m0 + 126 - shift;
    return e8m0 == 255 ? 255 : field < 0 ? 0 : field;
}

// The scale word of a quad. The fields of the block's first 32 K are at bits 7 (row g) and 23 (row g + 8), in place for bf16. The
// fields of the second 32 K are there after a rotation left by 8.
__host__ __device__ constexpr uint32_t place_scales(uint32_t g_first, uint32_t g8_first, uint32_t g_second, uint32_t g8_second) {
    const uint32_t first = g_first << 7 | g8_first << 23, second = g_second << 7 | g8_second << 23;
    return first | second >> 8 | second << 24;
}

#ifdef __CUDACC__
// Multipliers of K group 0 or 1 of a block: the low half is row g's, the high half row g + 8's.
__device__ __forceinline__ uint32_t unpack_scales(uint32_t word, int group) {
    return (group ? __funnelshift_l(word, word, 8) : word) & 0x7F807F80;
}

// Multiplies both halves. Adding -0 keeps the sign of a zero.
__device__ __forceinline__ uint32_t multiply(uint32_t bits, uint32_t scale) {
    uint32_t product;
#if __CUDA_ARCH__ >= 900
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(bits), "r"(scale));
#else
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(product) : "r"(bits), "r"(scale), "r"(0x80008000));
#endif
    return product;
}

// Moves the codes of a word into place, one word of `bits` for each register.
__device__ __forceinline__ void take(uint32_t word, uint32_t (&bits)[4]) {
    bits[0] = (word & 0x81808180) | ((word >> 8) & 0x00400040);
    bits[1] = (word << 2) & kInPlace;
    bits[2] = (word << 6) & kInPlace;
    bits[3] = __funnelshift_l(word, word, 12) & kInPlace;
}

// Multiplies codes in place by `scales` from unpack_scales.
__device__ __forceinline__ void scale(const uint32_t (&bits)[4], uint32_t scales, uint32_t (&a)[4]) {
    // NOTE: the halves are not taken by a permutation of bytes: this way ptxas makes them modifiers of the products' operands.
    uint32_t row_g, row_g8;
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\nmov.b32 %0, {low, low};\nmov.b32 %1, {high, high};\n}"
        : "=r"(row_g), "=r"(row_g8)
        : "r"(scales));
#pragma unroll
    for (int r = 0; r < 4; ++r) a[r] = multiply(bits[r], r % 2 ? row_g8 : row_g);
}

// Decodes the A fragment of a k16 step: `word` has the codes, and `scales` comes from unpack_scales.
__device__ __forceinline__ void decode(uint32_t word, uint32_t scales, uint32_t (&a)[4]) {
    uint32_t bits[4];
    take(word, bits);
    scale(bits, scales, a);
}

// The format's parameter of moe/grouped_gemm_packed_sm90.cuh.
struct Form {
    static constexpr int kCodeBytes = mxfp4::kCodeBytes, kScaleBytes = mxfp4::kScaleBytes;  // bytes of a block
    // Bytes between neighbouring threads' codes, and bytes of a quad's scales.
    static constexpr int kThreadCodes = 16, kQuadScales = 4;
    static constexpr bool kFactorsOfHalves = false;  // whether a gated expert's gate rows and up rows have factors of their own

    // Codes and scales of a thread in a block.
    using Codes = uint4;
    using Scales = uint32_t;
    static __device__ __forceinline__ Codes load_codes(const uint8_t* mine) { return *reinterpret_cast<const uint4*>(mine); }
    static __device__ __forceinline__ Scales load_scales(const uint8_t* mine) { return *reinterpret_cast<const uint32_t*>(mine); }

    static constexpr int kGroupSteps = 2;  // k16 steps (of a block's four) that share scales
    static __device__ __forceinline__ uint32_t multipliers(Scales scales, int group) { return unpack_scales(scales, group); }
    static __device__ __forceinline__ void decode(const Codes& codes, int step, uint32_t multipliers, uint32_t (&a)[4]) {
        const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
        decode_words(words, step, multipliers, a);
    }

    // Portable kernels decode from `words`, those of a thread's vectors of 16 bytes that have the step.
    static __device__ __forceinline__ void decode_words(const uint32_t (&words)[4], int step, uint32_t multipliers,
                                                        uint32_t (&a)[4]) {
        mxfp4::decode(words[step], multipliers, a);
    }
    static constexpr bool kOneTile = false;  // whether one tile of the portable kernel serves every batch

    // finish() changes 8 outputs of a token before they are stored; of_expert() gives it what it needs to know about the expert.
    // If kExchanges is true, lanes exchange values in finish(), and all lanes of the warp must call it.
    static constexpr bool kExchanges = false;
    template <typename Params>
    static __device__ __forceinline__ int of_expert(const Params&, int expert) {
        return expert;
    }
    template <typename Params>
    static __device__ __forceinline__ const uint4& finish(const uint4& outputs, const Params&, int) {
        return outputs;
    }

    // Whether every layer of the form rounds its tokens and GEMM1's output. Then round_tokens() rounds 8 of their numbers. All
    // lanes of the warp call it.
    static constexpr bool kRoundsTokens = false;
};
#endif

}  // namespace oxmoe::mxfp4
