// wgmma m64nNk16, A and B from shared memory, fp32 sums, for N = 16, 32, ... 256.
#pragma once
#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace oxmoe::sm90 {

// Before the first wgmma, and whenever registers that a wgmma accumulates into were written by other instructions.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Returns when at most `Pending` committed groups are unfinished.
template <int Pending>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

// Descriptor of a K-major operand in the 128-byte swizzle: rows of 128 bytes, 8 rows = one atom of 1024 bytes (1024-byte
// aligned), the 16-byte chunk c of row r lies at chunk c ^ (r % 8). `offset` in bytes; one k16 step is + 32.
//   bits 0-13 address / 16, bits 16-29 leading offset (unused, 1), bits 32-45 distance of atoms / 16 = 64, bits 62-63 1 =
//   128-byte swizzle
// NOTE: added in 32 bits, so that the upper half stays a constant: 64-bit additions cost instructions in the main loop.
__device__ __forceinline__ uint64_t descriptor_128b(uint32_t address, uint32_t offset) {
    constexpr uint32_t upper = 1u << 30 | 64, leading = 1u << 16;
    uint64_t descriptor;
    asm("mov.b64 %0, {%1, %2};" : "=l"(descriptor) : "r"((address >> 4) + leading + offset / 16), "n"(upper));
    return descriptor;
}

// d[64 x N] (+)= a[64 x 16] b[N x 16]^T by one warpgroup; `keep` false overwrites d. Lane l of warp w, g = l / 4, c = l % 4:
//   d[4 j], d[4 j + 1]: row 16 w + g, columns 8 j + 2 c, + 1        d[4 j + 2], d[4 j + 3]: row 16 w + g + 8
template <typename Element, int N>
struct Wgmma;

// clang-format off
#define REGISTERS8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define REGISTERS16 REGISTERS8 ", " "%8, %9, %10, %11, %12, %13, %14, %15"
#define REGISTERS24 REGISTERS16 ", " "%16, %17, %18, %19, %20, %21, %22, %23"
#define REGISTERS32 REGISTERS24 ", " "%24, %25, %26, %27, %28, %29, %30, %31"
#define REGISTERS40 REGISTERS32 ", " "%32, %33, %34, %35, %36, %37, %38, %39"
#define REGISTERS48 REGISTERS40 ", " "%40, %41, %42, %43, %44, %45, %46, %47"
#define REGISTERS56 REGISTERS48 ", " "%48, %49, %50, %51, %52, %53, %54, %55"
#define REGISTERS64 REGISTERS56 ", " "%56, %57, %58, %59, %60, %61, %62, %63"
#define REGISTERS72 REGISTERS64 ", " "%64, %65, %66, %67, %68, %69, %70, %71"
#define REGISTERS80 REGISTERS72 ", " "%72, %73, %74, %75, %76, %77, %78, %79"
#define REGISTERS88 REGISTERS80 ", " "%80, %81, %82, %83, %84, %85, %86, %87"
#define REGISTERS96 REGISTERS88 ", " "%88, %89, %90, %91, %92, %93, %94, %95"
#define REGISTERS104 REGISTERS96 ", " "%96, %97, %98, %99, %100, %101, %102, %103"
#define REGISTERS112 REGISTERS104 ", " "%104, %105, %106, %107, %108, %109, %110, %111"
#define REGISTERS120 REGISTERS112 ", " "%112, %113, %114, %115, %116, %117, %118, %119"
#define REGISTERS128 REGISTERS120 ", " "%120, %121, %122, %123, %124, %125, %126, %127"
#define SUM(i) "+f"(d[i])
#define SUMS8_AT(i) SUM(i), SUM(i + 1), SUM(i + 2), SUM(i + 3), SUM(i + 4), SUM(i + 5), SUM(i + 6), SUM(i + 7)
#define SUMS8 SUMS8_AT(0)
#define SUMS16 SUMS8, SUMS8_AT(8)
#define SUMS24 SUMS16, SUMS8_AT(16)
#define SUMS32 SUMS24, SUMS8_AT(24)
#define SUMS40 SUMS32, SUMS8_AT(32)
#define SUMS48 SUMS40, SUMS8_AT(40)
#define SUMS56 SUMS48, SUMS8_AT(48)
#define SUMS64 SUMS56, SUMS8_AT(56)
#define SUMS72 SUMS64, SUMS8_AT(64)
#define SUMS80 SUMS72, SUMS8_AT(72)
#define SUMS88 SUMS80, SUMS8_AT(80)
#define SUMS96 SUMS88, SUMS8_AT(88)
#define SUMS104 SUMS96, SUMS8_AT(96)
#define SUMS112 SUMS104, SUMS8_AT(104)
#define SUMS120 SUMS112, SUMS8_AT(112)
#define SUMS128 SUMS120, SUMS8_AT(120)
// clang-format on

// COUNT = N / 2 sums; A, B, KEEP: the operand numbers after them.
#define DEFINE_WGMMA_OF(ELEMENT, NAME, N, COUNT, A, B, KEEP)                                                   \
    template <>                                                                                                \
    struct Wgmma<ELEMENT, N> {                                                                                 \
        static __device__ __forceinline__ void multiply(float* d, uint64_t a, uint64_t b, bool keep) {         \
            asm volatile("{\n.reg .pred keep;\nsetp.ne.b32 keep, %" #KEEP                                      \
                         ", 0;\n"                                                                              \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME "." NAME " {" REGISTERS##COUNT \
                         "}, %" #A ", %" #B ", keep, 1, 1, 0, 0;\n}"                                           \
                         : SUMS##COUNT                                                                         \
                         : "l"(a), "l"(b), "r"(int(keep)));                                                    \
        }                                                                                                      \
    };
#define DEFINE_WGMMA(N, COUNT, A, B, KEEP)                       \
    DEFINE_WGMMA_OF(__nv_bfloat16, "bf16", N, COUNT, A, B, KEEP) \
    DEFINE_WGMMA_OF(__half, "f16", N, COUNT, A, B, KEEP)
DEFINE_WGMMA(16, 8, 8, 9, 10)
DEFINE_WGMMA(32, 16, 16, 17, 18)
DEFINE_WGMMA(48, 24, 24, 25, 26)
DEFINE_WGMMA(64, 32, 32, 33, 34)
DEFINE_WGMMA(80, 40, 40, 41, 42)
DEFINE_WGMMA(96, 48, 48, 49, 50)
DEFINE_WGMMA(112, 56, 56, 57, 58)
DEFINE_WGMMA(128, 64, 64, 65, 66)
DEFINE_WGMMA(144, 72, 72, 73, 74)
DEFINE_WGMMA(160, 80, 80, 81, 82)
DEFINE_WGMMA(176, 88, 88, 89, 90)
DEFINE_WGMMA(192, 96, 96, 97, 98)
DEFINE_WGMMA(208, 104, 104, 105, 106)
DEFINE_WGMMA(224, 112, 112, 113, 114)
DEFINE_WGMMA(240, 120, 120, 121, 122)
DEFINE_WGMMA(256, 128, 128, 129, 130)
#undef DEFINE_WGMMA
#undef DEFINE_WGMMA_OF
#undef SUM
#undef SUMS8_AT
#undef REGISTERS8
#undef SUMS8
#undef REGISTERS16
#undef SUMS16
#undef REGISTERS24
#undef SUMS24
#undef REGISTERS32
#undef SUMS32
#undef REGISTERS40
#undef SUMS40
#undef REGISTERS48
#undef SUMS48
#undef REGISTERS56
#undef SUMS56
#undef REGISTERS64
#undef SUMS64
#undef REGISTERS72
#undef SUMS72
#undef REGISTERS80
#undef SUMS80
#undef REGISTERS88
#undef SUMS88
#undef REGISTERS96
#undef SUMS96
#undef REGISTERS104
#undef SUMS104
#undef REGISTERS112
#undef SUMS112
#undef REGISTERS120
#undef SUMS120
#undef REGISTERS128
#undef SUMS128

}  // namespace oxmoe::sm90
