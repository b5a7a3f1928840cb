// Memory operations between GPUs, and the clock. PTX promises that each half of v2.b64 is one access, but not that both halves
// together are.
#pragma once
#include <cstdint>

namespace oxmoe::allreduce {

// The widest store of a thread: 16 bytes.
using Chunk = uint4;

__device__ __forceinline__ Chunk load_relaxed(const Chunk* from) {
    union {
        Chunk chunk;
        uint64_t half[2];
    } v;
    asm volatile("ld.relaxed.sys.global.v2.b64 {%0, %1}, [%2];" : "=l"(v.half[0]), "=l"(v.half[1]) : "l"(from) : "memory");
    return v.chunk;
}

__device__ __forceinline__ void store_relaxed(Chunk* to, Chunk value) {
    union {
        Chunk chunk;
        uint64_t half[2];
    } v{value};
    asm volatile("st.relaxed.sys.global.v2.b64 [%0], {%1, %2};" ::"l"(to), "l"(v.half[0]), "l"(v.half[1]) : "memory");
}

__device__ __forceinline__ uint64_t load_relaxed(const uint64_t* from) {
    uint64_t value;
    asm volatile("ld.relaxed.sys.global.b64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
    return value;
}

__device__ __forceinline__ void store_relaxed(uint64_t* to, uint64_t value) {
    asm volatile("st.relaxed.sys.global.b64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
}

// Loads two neighbouring words from the memory of this kernel's GPU.
__device__ __forceinline__ ulonglong2 load_pair(const uint64_t* from) {
    ulonglong2 value;
    asm volatile("ld.relaxed.sys.global.v2.b64 {%0, %1}, [%2];" : "=l"(value.x), "=l"(value.y) : "l"(from) : "memory");
    return value;
}

__device__ __forceinline__ uint64_t nanoseconds() {
    uint64_t now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

}  // namespace oxmoe::allreduce
