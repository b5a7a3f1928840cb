// e4m3 as f16, which holds it exactly: four codes of a word to two words of two, for operands of mma.
//
// From sm_89 on there is an instruction. Before, codes are put in place by bits as numbers 2^-8 times theirs, and a product of
// two is multiplied by kFactor. Which code goes to which half differs: both operands of an mma must come from here.
#pragma once
#include <cstdint>

namespace oxmoe::e4m3_f16 {

#if __CUDA_ARCH__ >= 890
constexpr float kFactor = 1.f;

__device__ __forceinline__ void expand(uint32_t word, uint32_t& first, uint32_t& second) {
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\ncvt.rn.f16x2.e4m3x2 %0, low;\ncvt.rn.f16x2.e4m3x2 %1, high;\n}"
        : "=r"(first), "=r"(second)
        : "r"(word));
}
#else
constexpr float kFactor = 65536.f;

// A code s eeee mmm as the half  s 0eeee mmm0000000  is its value * 2^-8, subnormal numbers included. The magnitude 127, NaN, is
// the only one that carries into the byte's upper bit when it counts on: in the exponent's free bit that makes a NaN of it.
__device__ __forceinline__ void expand(uint32_t word, uint32_t& first, uint32_t& second) {
    const uint32_t magnitudes = word & 0x7F7F7F7F, marked = magnitudes | ((magnitudes + 0x01010101) & 0x80808080);
    first = ((marked << 7) & 0x7F807F80) | ((word << 8) & 0x80008000);  // codes 0 and 2
    second = ((marked >> 1) & 0x7F807F80) | (word & 0x80008000);        // 1 and 3
}
#endif

}  // namespace oxmoe::e4m3_f16
