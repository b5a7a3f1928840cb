// wgmma m64nNk16, A and B from shared memory, fp32 sums, for N = 16, 24, ... 192.
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
#define REGISTERS12 REGISTERS8 ", " "%8, %9, %10, %11"
#define REGISTERS16 REGISTERS12 ", " "%12, %13, %14, %15"
#define REGISTERS20 REGISTERS16 ", " "%16, %17, %18, %19"
#define REGISTERS24 REGISTERS20 ", " "%20, %21, %22, %23"
#define REGISTERS28 REGISTERS24 ", " "%24, %25, %26, %27"
#define REGISTERS32 REGISTERS28 ", " "%28, %29, %30, %31"
#define REGISTERS36 REGISTERS32 ", " "%32, %33, %34, %35"
#define REGISTERS40 REGISTERS36 ", " "%36, %37, %38, %39"
#define REGISTERS44 REGISTERS40 ", " "%40, %41, %42, %43"
#define REGISTERS48 REGISTERS44 ", " "%44, %45, %46, %47"
#define REGISTERS52 REGISTERS48 ", " "%48, %49, %50, %51"
#define REGISTERS56 REGISTERS52 ", " "%52, %53, %54, %55"
#define REGISTERS60 REGISTERS56 ", " "%56, %57, %58, %59"
#define REGISTERS64 REGISTERS60 ", " "%60, %61, %62, %63"
#define REGISTERS68 REGISTERS64 ", " "%64, %65, %66, %67"
#define REGISTERS72 REGISTERS68 ", " "%68, %69, %70, %71"
#define REGISTERS76 REGISTERS72 ", " "%72, %73, %74, %75"
#define REGISTERS80 REGISTERS76 ", " "%76, %77, %78, %79"
#define REGISTERS84 REGISTERS80 ", " "%80, %81, %82, %83"
#define REGISTERS88 REGISTERS84 ", " "%84, %85, %86, %87"
#define REGISTERS92 REGISTERS88 ", " "%88, %89, %90, %91"
#define REGISTERS96 REGISTERS92 ", " "%92, %93, %94, %95"
#define SUM(i) "+f"(d[i])
#define SUMS4_AT(i) SUM(i), SUM(i + 1), SUM(i + 2), SUM(i + 3)
#define SUMS8 SUMS4_AT(0), SUMS4_AT(4)
#define SUMS12 SUMS8, SUMS4_AT(8)
#define SUMS16 SUMS12, SUMS4_AT(12)
#define SUMS20 SUMS16, SUMS4_AT(16)
#define SUMS24 SUMS20, SUMS4_AT(20)
#define SUMS28 SUMS24, SUMS4_AT(24)
#define SUMS32 SUMS28, SUMS4_AT(28)
#define SUMS36 SUMS32, SUMS4_AT(32)
#define SUMS40 SUMS36, SUMS4_AT(36)
#define SUMS44 SUMS40, SUMS4_AT(40)
#define SUMS48 SUMS44, SUMS4_AT(44)
#define SUMS52 SUMS48, SUMS4_AT(48)
#define SUMS56 SUMS52, SUMS4_AT(52)
#define SUMS60 SUMS56, SUMS4_AT(56)
#define SUMS64 SUMS60, SUMS4_AT(60)
#define SUMS68 SUMS64, SUMS4_AT(64)
#define SUMS72 SUMS68, SUMS4_AT(68)
#define SUMS76 SUMS72, SUMS4_AT(72)
#define SUMS80 SUMS76, SUMS4_AT(76)
#define SUMS84 SUMS80, SUMS4_AT(80)
#define SUMS88 SUMS84, SUMS4_AT(84)
#define SUMS92 SUMS88, SUMS4_AT(88)
#define SUMS96 SUMS92, SUMS4_AT(92)
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
DEFINE_WGMMA(24, 12, 12, 13, 14)
DEFINE_WGMMA(32, 16, 16, 17, 18)
DEFINE_WGMMA(40, 20, 20, 21, 22)
DEFINE_WGMMA(48, 24, 24, 25, 26)
DEFINE_WGMMA(56, 28, 28, 29, 30)
DEFINE_WGMMA(64, 32, 32, 33, 34)
DEFINE_WGMMA(72, 36, 36, 37, 38)
DEFINE_WGMMA(80, 40, 40, 41, 42)
DEFINE_WGMMA(88, 44, 44, 45, 46)
DEFINE_WGMMA(96, 48, 48, 49, 50)
DEFINE_WGMMA(104, 52, 52, 53, 54)
DEFINE_WGMMA(112, 56, 56, 57, 58)
DEFINE_WGMMA(120, 60, 60, 61, 62)
DEFINE_WGMMA(128, 64, 64, 65, 66)
DEFINE_WGMMA(136, 68, 68, 69, 70)
DEFINE_WGMMA(144, 72, 72, 73, 74)
DEFINE_WGMMA(152, 76, 76, 77, 78)
DEFINE_WGMMA(160, 80, 80, 81, 82)
DEFINE_WGMMA(168, 84, 84, 85, 86)
DEFINE_WGMMA(176, 88, 88, 89, 90)
DEFINE_WGMMA(184, 92, 92, 93, 94)
DEFINE_WGMMA(192, 96, 96, 97, 98)
#undef DEFINE_WGMMA
#undef DEFINE_WGMMA_OF
#undef SUM
#undef SUMS4_AT
#undef REGISTERS8
#undef SUMS8
#undef REGISTERS12
#undef SUMS12
#undef REGISTERS16
#undef SUMS16
#undef REGISTERS20
#undef SUMS20
#undef REGISTERS24
#undef SUMS24
#undef REGISTERS28
#undef SUMS28
#undef REGISTERS32
#undef SUMS32
#undef REGISTERS36
#undef SUMS36
#undef REGISTERS40
#undef SUMS40
#undef REGISTERS44
#undef SUMS44
#undef REGISTERS48
#undef SUMS48
#undef REGISTERS52
#undef SUMS52
#undef REGISTERS56
#undef SUMS56
#undef REGISTERS60
#undef SUMS60
#undef REGISTERS64
#undef SUMS64
#undef REGISTERS68
#undef SUMS68
#undef REGISTERS72
#undef SUMS72
#undef REGISTERS76
#undef SUMS76
#undef REGISTERS80
#undef SUMS80
#undef REGISTERS84
#undef SUMS84
#undef REGISTERS88
#undef SUMS88
#undef REGISTERS92
#undef SUMS92
#undef REGISTERS96
#undef SUMS96

}  // namespace oxmoe::sm90
