// Thread-block clusters. Before sm_90 every cluster has one CTA and its barrier is empty.
#pragma once
#include <cstdint>

namespace oxmoe::cluster {

// CTAs in this cluster.
__device__ __forceinline__ int size() {
#if __CUDA_ARCH__ >= 900
    uint32_t value;
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(value));
    return int(value);
#else
    return 1;
#endif
}

// This CTA's number in its cluster.
__device__ __forceinline__ int rank() {
#if __CUDA_ARCH__ >= 900
    uint32_t value;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(value));
    return int(value);
#else
    return 0;
#endif
}

// Arrival that orders no memory: enough to learn that every CTA of the cluster runs.
__device__ __forceinline__ void arrive_relaxed() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ void arrive() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ void wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// Writes `value` to the place of `local` in the shared memory of CTA `rank`.
__device__ __forceinline__ void store(int* local, int rank, int value) {
#if __CUDA_ARCH__ >= 900
    const uint32_t here = uint32_t(__cvta_generic_to_shared(local));
    uint32_t there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(rank));
    asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(there), "r"(value) : "memory");
#else
    *local = value;
#endif
}

}  // namespace oxmoe::cluster
