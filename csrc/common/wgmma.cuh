// wgmma m64nNk16 with B from shared memory and fp32 sums. A comes from shared memory for N = 16, 24, ... 192. In bf16 it also
// comes from registers, for N = 8, 16, ... 128 and 144, 160, ... 256. For the latter N there is also m64nNk32 of e4m3 with A from
// registers.
#pragma once
#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace oxmoe::sm90 {

// Call this before the first wgmma, and whenever other instructions wrote registers that a wgmma accumulates into.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Returns when at most `Pending` committed groups are unfinished.
template <int Pending>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

// The descriptor of a K-major operand in the 128-byte swizzle. It has rows of 128 bytes; 8 rows are one atom of 1024 bytes
// (1024-byte aligned). The 16-byte chunk c of row r lies at chunk c ^ (r % 8). `offset` is in bytes; one k16 step is + 32.
//   bits 0-13 address / 16, bits 16-29 leading offset (unused, 1), bits 32-45 distance of atoms / 16 = 64, bits 62-63 1 =
//   128-byte swizzle
// NOTE: the sum is made in 32 bits, so that the upper half stays a constant: 64-bit additions cost instructions in the main loop.
__device__ __forceinline__ uint64_t descriptor_128b(uint32_t address, uint32_t offset) {
    constexpr uint32_t upper = 1u << 30 | 64, leading = 1u << 16;
    uint64_t descriptor;
    asm("mov.b64 %0, {%1, %2};" : "=l"(descriptor) : "r"((address >> 4) + leading + offset / 16), "n"(upper));
    return descriptor;
}

// d[64 x N] += a[64 x 16] b[N x 16]^T by one warpgroup; `keep` false overwrites d. Lane l of warp w, with g = l / 4 and c =
// l % 4, has:
//   d[4 j], d[4 j + 1]: row 16 w + g, columns 8 j + 2 c, + 1        d[4 j + 2], d[4 j + 3]: row 16 w + g + 8
template <typename Element, int N>
struct Wgmma;

// d[64 x N] += a[64 x 16] b[N x 16]^T with a from registers: a[0] row g, columns 2 c, + 1; a[1] row g + 8; a[2], a[3] these rows,
// columns + 8.
template <int N>
struct WgmmaFromRegisters;

// d[64 x N] += a[64 x 32] b[N x 32]^T in e4m3 with a from registers; sums are kept to 14 bits. a[0] has row g, columns 4 c to
// 4 c + 3, the first in the low byte; a[1] row g + 8; a[2], a[3] these rows, columns + 16. Descriptors are those of
// descriptor_128b; one k32 step is + 32.
template <int N>
struct WgmmaE4m3FromRegisters;

// clang-format off
#define REGISTERS4 "%0, %1, %2, %3"
#define REGISTERS8 REGISTERS4 ", " "%4, %5, %6, %7"
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
#define REGISTERS100 REGISTERS96 ", " "%96, %97, %98, %99"
#define REGISTERS104 REGISTERS100 ", " "%100, %101, %102, %103"
#define REGISTERS108 REGISTERS104 ", " "%104, %105, %106, %107"
#define REGISTERS112 REGISTERS108 ", " "%108, %109, %110, %111"
#define REGISTERS116 REGISTERS112 ", " "%112, %113, %114, %115"
#define REGISTERS120 REGISTERS116 ", " "%116, %117, %118, %119"
#define REGISTERS124 REGISTERS120 ", " "%120, %121, %122, %123"
#define REGISTERS128 REGISTERS124 ", " "%124, %125, %126, %127"
#define SUM(i) "+f"(d[i])
#define SUMS4_AT(i) SUM(i), SUM(i + 1), SUM(i + 2), SUM(i + 3)
#define SUMS4 SUMS4_AT(0)
#define SUMS8 SUMS4, SUMS4_AT(4)
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
#define SUMS100 SUMS96, SUMS4_AT(96)
#define SUMS104 SUMS100, SUMS4_AT(100)
#define SUMS108 SUMS104, SUMS4_AT(104)
#define SUMS112 SUMS108, SUMS4_AT(108)
#define SUMS116 SUMS112, SUMS4_AT(112)
#define SUMS120 SUMS116, SUMS4_AT(116)
#define SUMS124 SUMS120, SUMS4_AT(120)
#define SUMS128 SUMS124, SUMS4_AT(124)
// clang-format on

// There are COUNT = N / 2 sums. A, B and KEEP are the operand numbers after them.
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
// A0 to A3 and B are the operand numbers after the sums.
#define DEFINE_WGMMA_FROM_REGISTERS_OF(NAME, TYPE, TRANSPOSED, N, COUNT, A0, A1, A2, A3, B)             \
    template <>                                                                                         \
    struct NAME<N> {                                                                                    \
        static __device__ __forceinline__ void multiply(float* d, const uint32_t (&a)[4], uint64_t b) { \
            asm volatile("wgmma.mma_async.sync.aligned.m64n" #N TYPE " {" REGISTERS##COUNT              \
                         "}, {%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #B ", 1, 1, 1" TRANSPOSED ";" \
                         : SUMS##COUNT                                                                  \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                         \
        }                                                                                               \
    };
#define DEFINE_WGMMA_FROM_REGISTERS(N, COUNT, A0, A1, A2, A3, B)                                                \
    DEFINE_WGMMA_FROM_REGISTERS_OF(WgmmaFromRegisters, "k16.f32.bf16.bf16", ", 0", N, COUNT, A0, A1, A2, A3, B) \
    DEFINE_WGMMA_FROM_REGISTERS_OF(WgmmaE4m3FromRegisters, "k32.f32.e4m3.e4m3", "", N, COUNT, A0, A1, A2, A3, B)
DEFINE_WGMMA_FROM_REGISTERS(8, 4, 4, 5, 6, 7, 8)
DEFINE_WGMMA_FROM_REGISTERS(16, 8, 8, 9, 10, 11, 12)
DEFINE_WGMMA_FROM_REGISTERS(24, 12, 12, 13, 14, 15, 16)
DEFINE_WGMMA_FROM_REGISTERS(32, 16, 16, 17, 18, 19, 20)
DEFINE_WGMMA_FROM_REGISTERS(40, 20, 20, 21, 22, 23, 24)
DEFINE_WGMMA_FROM_REGISTERS(48, 24, 24, 25, 26, 27, 28)
DEFINE_WGMMA_FROM_REGISTERS(56, 28, 28, 29, 30, 31, 32)
DEFINE_WGMMA_FROM_REGISTERS(64, 32, 32, 33, 34, 35, 36)
DEFINE_WGMMA_FROM_REGISTERS(72, 36, 36, 37, 38, 39, 40)
DEFINE_WGMMA_FROM_REGISTERS(80, 40, 40, 41, 42, 43, 44)
DEFINE_WGMMA_FROM_REGISTERS(88, 44, 44, 45, 46, 47, 48)
DEFINE_WGMMA_FROM_REGISTERS(96, 48, 48, 49, 50, 51, 52)
DEFINE_WGMMA_FROM_REGISTERS(104, 52, 52, 53, 54, 55, 56)
DEFINE_WGMMA_FROM_REGISTERS(112, 56, 56, 57, 58, 59, 60)
DEFINE_WGMMA_FROM_REGISTERS(120, 60, 60, 61, 62, 63, 64)
DEFINE_WGMMA_FROM_REGISTERS(128, 64, 64, 65, 66, 67, 68)
DEFINE_WGMMA_FROM_REGISTERS(144, 72, 72, 73, 74, 75, 76)
DEFINE_WGMMA_FROM_REGISTERS(160, 80, 80, 81, 82, 83, 84)
DEFINE_WGMMA_FROM_REGISTERS(176, 88, 88, 89, 90, 91, 92)
DEFINE_WGMMA_FROM_REGISTERS(192, 96, 96, 97, 98, 99, 100)
DEFINE_WGMMA_FROM_REGISTERS(208, 104, 104, 105, 106, 107, 108)
DEFINE_WGMMA_FROM_REGISTERS(224, 112, 112, 113, 114, 115, 116)
DEFINE_WGMMA_FROM_REGISTERS(240, 120, 120, 121, 122, 123, 124)
DEFINE_WGMMA_FROM_REGISTERS(256, 128, 128, 129, 130, 131, 132)
#undef DEFINE_WGMMA_FROM_REGISTERS
#undef DEFINE_WGMMA_FROM_REGISTERS_OF
#undef DEFINE_WGMMA
#undef DEFINE_WGMMA_OF
#undef SUM
#undef SUMS4_AT
#undef REGISTERS4
#undef SUMS4
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
#undef REGISTERS100
#undef SUMS100
#undef REGISTERS104
#undef SUMS104
#undef REGISTERS108
#undef SUMS108
#undef REGISTERS112
#undef SUMS112
#undef REGISTERS116
#undef SUMS116
#undef REGISTERS120
#undef SUMS120
#undef REGISTERS124
#undef SUMS124
#undef REGISTERS128
#undef SUMS128

}  // namespace oxmoe::sm90
