// e4m3 as f16, which holds it exactly: the four codes of a word become two words of two halves, for operands of mma.
//
// From sm_89 on there is an instruction. Before sm_89, bit operations make numbers that are 2^-8 times the codes' values, and the
// product of two such numbers is multiplied by kFactor. The two ways put codes into different halves: both operands of an mma
// must come from expand().
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

// The half  s 0eeee mmm0000000  of a code s eeee mmm is its value * 2^-8, subnormal numbers included. The magnitude 127, NaN, is
// the only one that carries into the byte's upper bit if 1 is added. That bit becomes the exponent's free bit, which makes the
// half a NaN.
__device__ __forceinline__ void expand(uint32_t word, uint32_t& first, uint32_t& second) {
    const uint32_t magnitudes = word & 0x7F7F7F7F, marked = magnitudes | ((magnitudes + 0x01010101) & 0x80808080);
    first = ((marked << 7) & 0x7F807F80) | ((word << 8) & 0x80008000);  // codes 0 and 2
    second = ((marked >> 1) & 0x7F807F80) | (word & 0x80008000);        // codes 1 and 3
}
#endif

}  // namespace oxmoe::e4m3_f16
