// Instructions of every GPU from sm_80 on: asynchronous copies, matrix loads, mma.
#pragma once
#include <cstdint>
#include <type_traits>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace oxmoe::sm80 {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) { return uint32_t(__cvta_generic_to_shared(pointer)); }

// The value stays in its register: the compiler may not compute it again where it is used.
__device__ __forceinline__ void keep(uint32_t& value) { asm volatile("" : "+r"(value)); }

// ---- asynchronous copies ----

// Copies 16 bytes, or writes zeros and reads nothing when `real` is false.
__device__ __forceinline__ void copy_16_async(uint32_t to, const void* from, bool real) {
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(real ? 16 : 0) : "memory");
}

__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Returns when at most `Unfinished` of this thread's copy groups are unfinished.
template <int Unfinished>
__device__ __forceinline__ void copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(Unfinished) : "memory");
}

__device__ __forceinline__ void store_shared_16(uint32_t to, uint4 value) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w)
                 : "memory");
}

__device__ __forceinline__ void load_shared_16(uint32_t (&words)[4], uint32_t from) {
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(from)
                 : "memory");
}
__device__ __forceinline__ void load_shared_8(uint32_t (&words)[2], uint32_t from) {
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "r"(from) : "memory");
}
__device__ __forceinline__ uint32_t load_shared_4(uint32_t from) {
    uint32_t word;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(from) : "memory");
    return word;
}

// ---- matrices ----

// Loads four (or two) 8 x 8 tiles of 16-bit elements. Lane l gives the address of row l % 8 of tile l / 8, and gets elements 2c,
// 2c + 1 of row l / 4 of every tile (c = l % 4).
__device__ __forceinline__ void load_matrix_4(uint32_t (&tiles)[4], uint32_t row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(tiles[0]), "=r"(tiles[1]), "=r"(tiles[2]), "=r"(tiles[3])
                 : "r"(row)
                 : "memory");
}
__device__ __forceinline__ void load_matrix_2(uint32_t (&tiles)[2], uint32_t row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(tiles[0]), "=r"(tiles[1])
                 : "r"(row)
                 : "memory");
}

// Transposes an 8 x 8 tile: the lane that held elements 2c, 2c + 1 of row g gets elements 2c, 2c + 1 of column g.
__device__ __forceinline__ uint32_t transpose(uint32_t pair) {
    uint32_t turned;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(pair));
    return turned;
}

// sums (16 x 8) += a (16 x 16) b (16 x 8). A lane holds, with g = lane / 4 and c = lane % 4: a[0] row g, k 2c, 2c + 1; a[1] row
// g + 8; a[2], a[3] these rows with k + 8; b0 column g, k 2c, 2c + 1; b1 k + 8; sums[0], [1] row g, columns 2c, 2c + 1; sums[2],
// [3] row g + 8.
template <typename Element>
__device__ __forceinline__ void multiply_add(float (&sums)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    if constexpr (std::is_same_v<Element, __half>) {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    } else {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
}

}  // namespace oxmoe::sm80
