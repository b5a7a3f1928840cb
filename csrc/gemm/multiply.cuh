// What the loops that multiply with wgmma begin with.
#pragma once

namespace oxmoe {

// Makes sums 0.
// NOTE: all of them, also where a narrow tile leaves some unused: ptxas serializes wgmma on undefined sums (C7515). In asm, else
// every width gets its own copy of the zeroing.
template <int N>
__device__ __forceinline__ void clear(float (&sums)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("mov.b32 %0, 0;" : "=f"(sums[i]));
}
template <int M, int N>
__device__ __forceinline__ void clear(float (&sums)[M][N]) {
#pragma unroll
    for (int i = 0; i < M * N; ++i) asm volatile("mov.b32 %0, 0;" : "=f"(sums[i / N][i % N]));
}

}  // namespace oxmoe
