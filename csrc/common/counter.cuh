// Counters in global memory that the CTAs of one launch wait for.
#pragma once
#include <cstdint>

namespace oxmoe::counter {

// Adds 1 and returns the value before. It releases earlier writes of this thread, and of threads that it met at a barrier. A
// thread that reads the sum with `wait_for`, or adds to it later, sees them.
__device__ __forceinline__ int add(int* counter) {
    int before;
    asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
    return before;
}

// Adds any value, with the ordering of add(), but returns nothing, so the thread does not wait.
__device__ __forceinline__ void add_only(int* counter, int value = 1) {
    asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(counter), "r"(value) : "memory");
}

__device__ __forceinline__ bool has_reached(const int* counter, int value) {
    int now;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(now) : "l"(counter) : "memory");
    return now >= value;
}

// Returns once the counter has reached `value`.
__device__ __forceinline__ void wait_for(const int* counter, int value) {
    while (!has_reached(counter, value)) {
    }
}

// All lanes of a warp wait and leave together; otherwise ptxas keeps what their loops share in vector registers.
__device__ __forceinline__ void wait_for_in_warp(const int* counter, int value) {
    while (!__all_sync(0xFFFFFFFF, has_reached(counter, value))) {
    }
}

// Adds `share` to a counter that wraps around, and does not wait for the answer.
__device__ __forceinline__ void add_share(uint32_t* counter, uint32_t share) {
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(counter), "r"(share) : "memory");
}

// Returns once a counter that wraps around has passed `value`.
__device__ __forceinline__ void wait_past(const uint32_t* counter, uint32_t value) {
    uint32_t now;
    do {
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(counter) : "memory");
    } while (int(now - value) < 0);
}

}  // namespace oxmoe::counter
