// wgmma m64nNk32 of e4m3, both operands from shared memory, for N = 16, 32, 48, 64 and 128. Fences, descriptors and the layout of
// d are those of wgmma.cuh. A k32 step is 32 bytes, like a k16 step of 16-bit elements.
//
// NOTE: the sums keep 14 bits, within an instruction and from one to the next. The caller adds longer sums in fp32.
#pragma once
#include <cstdint>

#include "wgmma.cuh"

namespace oxmoe::sm90 {

// d[64 x N] += a[64 x 32] b[N x 32]^T by one warpgroup; `keep` false overwrites d.
template <int N>
struct WgmmaE4m3;

// clang-format off
#define REGISTERS8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define REGISTERS16 REGISTERS8 ", " "%8, %9, %10, %11, %12, %13, %14, %15"
#define REGISTERS24 REGISTERS16 ", " "%16, %17, %18, %19, %20, %21, %22, %23"
#define REGISTERS32 REGISTERS24 ", " "%24, %25, %26, %27, %28, %29, %30, %31"
#define REGISTERS40 REGISTERS32 ", " "%32, %33, %34, %35, %36, %37, %38, %39"
#define REGISTERS48 REGISTERS40 ", " "%40, %41, %42, %43, %44, %45, %46, %47"
#define REGISTERS56 REGISTERS48 ", " "%48, %49, %50, %51, %52, %53, %54, %55"
#define REGISTERS64 REGISTERS56 ", " "%56, %57, %58, %59, %60, %61, %62, %63"
#define SUM(i) MODE "f"(d[i])
#define MODE "+"
#define SUMS8_AT(i) SUM(i), SUM(i + 1), SUM(i + 2), SUM(i + 3), SUM(i + 4), SUM(i + 5), SUM(i + 6), SUM(i + 7)
#define SUMS8 SUMS8_AT(0)
#define SUMS16 SUMS8, SUMS8_AT(8)
#define SUMS24 SUMS16, SUMS8_AT(16)
#define SUMS32 SUMS24, SUMS8_AT(24)
#define SUMS40 SUMS32, SUMS8_AT(32)
#define SUMS48 SUMS40, SUMS8_AT(40)
#define SUMS56 SUMS48, SUMS8_AT(48)
#define SUMS64 SUMS56, SUMS8_AT(56)
// clang-format on

// There are COUNT = N / 2 sums. A, B and KEEP are the operand numbers after them.
#define DEFINE_WGMMA_E4M3(N, COUNT, A, B, KEEP)                                                                           \
    template <>                                                                                                           \
    struct WgmmaE4m3<N> {                                                                                                 \
        static __device__ __forceinline__ void multiply(float* d, uint64_t a, uint64_t b, bool keep) {                    \
            asm volatile("{\n.reg .pred keep;\nsetp.ne.b32 keep, %" #KEEP                                                 \
                         ", 0;\n"                                                                                         \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" REGISTERS##COUNT "}, %" #A ", %" #B \
                                                                                                       ", keep, 1, 1;\n}" \
                         : SUMS##COUNT                                                                                    \
                         : "l"(a), "l"(b), "r"(int(keep)));                                                               \
        }                                                                                                                 \
    };
DEFINE_WGMMA_E4M3(16, 8, 8, 9, 10)
DEFINE_WGMMA_E4M3(32, 16, 16, 17, 18)
DEFINE_WGMMA_E4M3(48, 24, 24, 25, 26)
DEFINE_WGMMA_E4M3(64, 32, 32, 33, 34)
DEFINE_WGMMA_E4M3(128, 64, 64, 65, 66)
#undef MODE
#define MODE "="

// d[64 x 128] = a[64 x 32] b[128 x 32]^T. The old value of d does not count, and needs no registers.
__device__ __forceinline__ void start_wgmma_e4m3_128(float (&d)[64], uint64_t a, uint64_t b) {
    asm volatile(
        "{\n.reg .pred keep;\nsetp.ne.b32 keep, 0, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {" REGISTERS64 "}, %64, %65, keep, 1, 1;\n}"
        : SUMS64
        : "l"(a), "l"(b));
}
#undef MODE
#undef DEFINE_WGMMA_E4M3
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

}  // namespace oxmoe::sm90
