// The beginning of the loops that multiply with wgmma.
#pragma once

namespace oxmoe {

// Makes sums 0.
// NOTE: this clears all sums, also those that a narrow tile does not use: ptxas serializes wgmma on undefined sums (C7515). It is
// in asm, because otherwise every width gets its own copy of the zeroing.
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
