// Words of two bf16 numbers.
#pragma once
#include <cstdint>

namespace oxmoe {

__device__ __forceinline__ uint32_t larger_magnitudes(uint32_t a, uint32_t b) {
    // NOTE: the larger of a number and NaN is the number.
    uint32_t larger;
    asm("max.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(a & 0x7FFF7FFF), "r"(b & 0x7FFF7FFF));
    return larger;
}

}  // namespace oxmoe
