// MXFP4 weights as the e4m3 kernel holds them: e2m1 codes that look up e4m3 bytes. Blocks and their sizes are those of mxfp4.cuh.
// Word 2 s + h of a thread's 16 bytes has its codes of row g + 8 h (h 0 or 1) in k32 step s. The low half has columns 4 c to
// 4 c + 3 of the step, the high half columns 4 c + 16 to 4 c + 19 (m64k32 A fragments: registers h and 2 + h). Byte 2 s + h of a
// quad's word of scales is the scale of these codes.
//
// A nibble holds the magnitude of its code in its lower three bits, so a masked word is two selectors of `prmt`. One `prmt` looks
// up four codes in a table of eight bytes: the magnitudes times 2^level. Bit 3 of a nibble is the sign of the code whose byte of
// the fragment it reaches with no shift (odd nibbles: codes of the low half) or with a shift by 4 (even nibbles: codes of the
// high half).
//
// e4m3 holds 0.5 2^-5 to 6 2^6 as normal numbers: twelve levels. A scale byte is 8 times the level. It is added to every byte of
// the table but the first (0). An expert's scale is 2^(peak - 133), with `peak` its largest E8M0 scale, which makes the largest
// level 11. Codes whose scale would have a level below 0 are rounded to nearest even at level 0, with an error of at most 2^-13
// of the largest scale.
#pragma once
#include <cstdint>

namespace oxmoe::mxfp4_e4m3 {

constexpr int kLevels = 12;

// The e4m3 bytes of the magnitudes 0, 0.5, 1, 1.5 and 2, 3, 4, 6 times 2^-5.
constexpr uint32_t kLow = 0x14100800, kHigh = 0x24201C18;

// A scale that is NaN: with all codes 7 every byte is 0x7F.
constexpr uint32_t kNanScale = 0x7F - 0x24, kNanCode = 7;

// The bits of a code in its word: `column` is 0 to 7, and columns 4 to 7 are in the high half.
__host__ __device__ constexpr uint32_t place(uint32_t code, int column) {
    return (code & 7) << (4 * column) | code >> 3 << (column < 4 ? 8 * column + 7 : 8 * (column - 4) + 3);
}
__host__ __device__ constexpr uint32_t take(uint32_t word, int column) {
    return (word >> (4 * column) & 7) | (word >> (column < 4 ? 8 * column + 7 : 8 * (column - 4) + 3) & 1) << 3;
}

// The exponent field of an expert's scale, 2^(peak - 133), and `peak` from it. `peak` counts as at least 7, so that the scale is
// no subnormal: smaller scales are far above level 0 then.
__host__ __device__ constexpr uint32_t scale_field(int peak) { return (peak < 7 ? 7 : peak) - 6; }
__host__ __device__ constexpr int peak_of_field(uint32_t field) { return int(field) + 6; }

__host__ __device__ constexpr int level_of(int e8m0, int peak) { return e8m0 - peak + kLevels - 1; }

__host__ __device__ constexpr uint32_t scale_byte(int e8m0, int peak) {
    const int level = level_of(e8m0, peak);
    return e8m0 == 255 ? kNanScale : level < 0 ? 0 : 8 * level;
}

// The magnitude rounded to the grid that is 2^steps times as coarse.
__host__ __device__ constexpr uint32_t coarser(uint32_t magnitude, int steps) {
    const uint32_t rounded = steps <= 0   ? 0x76543210
                             : steps == 1 ? 0x54322100
                             : steps == 2 ? 0x32211000
                             : steps == 3 ? 0x21100000
                             : steps == 4 ? 0x10000000
                                          : 0;
    return rounded >> (4 * magnitude) & 7;
}

// The code that is packed for `code` under the scale `e8m0`.
__host__ __device__ constexpr uint32_t code_at(uint32_t code, int e8m0, int peak) {
    return e8m0 == 255 ? kNanCode : (code & 8) | coarser(code & 7, -level_of(e8m0, peak));
}

#ifdef __CUDACC__
// Byte i of the result is the byte of `low` and `high` that nibble i of `selectors` names (0 to 7). NOTE: __byte_perm would mask
// the nibbles.
__device__ __forceinline__ uint32_t look_up(uint32_t low, uint32_t high, uint32_t selectors) {
    uint32_t bytes;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(low), "r"(high), "r"(selectors));
    return bytes;
}

// Decodes a word to e4m3: `low` gets columns 4 c on, `high` gets columns 16 + 4 c on. `scale` is their scale byte.
__device__ __forceinline__ void decode(uint32_t word, uint32_t scale, uint32_t& low, uint32_t& high) {
    // NOTE: products go to another pipe than logic instructions.
    const uint32_t table_low = scale * 0x01010100 + kLow, table_high = scale * 0x01010101 + kHigh;
    const uint32_t magnitudes = word & 0x77777777;
    low = look_up(table_low, table_high, magnitudes) | (word & 0x80808080);
    high = look_up(table_low, table_high, magnitudes >> 16) | (word * 16 & 0x80808080);
}

// Decodes the A fragment of k32 step `step` of a block.
__device__ __forceinline__ void decode(const uint4& codes, uint32_t scales, int step, uint32_t (&a)[4]) {
    decode(step ? codes.z : codes.x, look_up(scales, 0, step ? 0x4442 : 0x4440), a[0], a[2]);
    decode(step ? codes.w : codes.y, look_up(scales, 0, step ? 0x4443 : 0x4441), a[1], a[3]);
}
#endif

}  // namespace oxmoe::mxfp4_e4m3
