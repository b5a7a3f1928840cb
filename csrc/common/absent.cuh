// 16-bit results that CTAs of one launch hand each other without counters. The memory is marked absent first, and a reader polls
// it until the result is there. A fence, a counter and the second read would be three trips to L2 instead of one.
//
// The mark is a NaN with all bits set. No result has these bits: the stores replace this NaN with the one whose bits are one
// less.
#pragma once
#include <cstdint>

namespace oxmoe::absent {

constexpr uint32_t kPair = 0xFFFFFFFFu;  // the mark of two results

// Whether one of a word's two results is absent: the test for a zero half of ~pair.
__device__ __forceinline__ bool in(uint32_t pair) { return ((~pair - 0x00010001u) & pair & 0x80008000u) != 0; }
__device__ __forceinline__ bool in(const uint4& four) { return in(four.x) | in(four.y) | in(four.z) | in(four.w); }

// The word that is stored for two results: an absent mark among them becomes another NaN.
__device__ __forceinline__ uint32_t avoided(uint32_t pair) { return __vminu2(pair, 0xFFFEFFFEu); }

__device__ __forceinline__ void mark_16(void* address) {
    asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1, %1, %1, %1};" ::"l"(address), "r"(kPair) : "memory");
}

__device__ __forceinline__ void store_2_if(void* address, uint32_t value, bool condition) {
    asm volatile(
        "{\n.reg .pred now;\n.reg .b16 half;\nsetp.ne.b32 now, %2, 0;\ncvt.u16.u32 half, %1;\n"
        "@now st.relaxed.gpu.global.u16 [%0], half;\n}" ::"l"(address),
        "r"(value), "r"(int(condition))
        : "memory");
}

__device__ __forceinline__ uint32_t load(const uint32_t* address) {
    uint32_t value;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
}
__device__ __forceinline__ uint4 load(const uint4* address) {
    uint4 value;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(address)
                 : "memory");
    return value;
}

}  // namespace oxmoe::absent
