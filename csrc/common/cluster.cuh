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

// An arrival that orders no memory: it is enough to learn that every CTA of the cluster runs.
__device__ __forceinline__ void arrive_relaxed() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}

// An arrival that releases this thread's earlier writes: they are visible to each thread that waits.
__device__ __forceinline__ void arrive() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}

// Stores `value` in the shared memory of CTA `rank`, at the address that `local` has in this CTA's.
__device__ __forceinline__ void store(float* local, int rank, float value) {
#if __CUDA_ARCH__ >= 900
    asm volatile("{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\nst.shared::cluster.f32 [there], %2;\n}" ::"r"(
                     uint32_t(__cvta_generic_to_shared(local))),
                 "r"(rank), "f"(value)
                 : "memory");
#endif
}

// Loads from the shared memory of CTA `rank`, at the address that `local` has in this CTA's.
__device__ __forceinline__ float4 load(const float4* local, int rank) {
    float4 value = {};
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %4, %5;\n"
        "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [there];\n}"
        : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
        : "r"(uint32_t(__cvta_generic_to_shared(local))), "r"(rank)
        : "memory");
#endif
    return value;
}

__device__ __forceinline__ void wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// Words from other CTAs of the cluster: an mbarrier that opens when all of them have landed.
class Mailbox {
    uint64_t* barrier_;

public:
    __device__ explicit Mailbox(void* barrier) : barrier_(static_cast<uint64_t*>(barrier)) {}

    // One thread calls this before the CTA's arrive_relaxed(). It announces that `bytes` will come, once.
    __device__ __forceinline__ void open(uint32_t bytes) const {
#if __CUDA_ARCH__ >= 900
        const uint32_t barrier = uint32_t(__cvta_generic_to_shared(barrier_));
        asm volatile(
            "mbarrier.init.shared::cta.b64 [%0], 1;\n"
            "fence.mbarrier_init.release.cluster;\n"
            "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
            "r"(bytes)
            : "memory");
#endif
    }

    // One thread calls this once the mailbox has opened. It announces the next `bytes`.
    __device__ __forceinline__ void reopen(uint32_t bytes) const {
#if __CUDA_ARCH__ >= 900
        asm volatile("mbarrier.arrive.expect_tx.relaxed.cta.shared::cta.b64 _, [%0], %1;" ::"r"(
                         uint32_t(__cvta_generic_to_shared(barrier_))),
                     "r"(bytes)
                     : "memory");
#endif
    }

    // Call this after wait(). It sends 16 bytes to the shared memory of CTA `rank`, at the address that `local` has in this
    // CTA's; the mailbox of that CTA counts them. It needs no fence, because it does not wait for this thread's other writes.
    __device__ __forceinline__ void send(uint4* local, int rank, const uint4& value) const {
#if __CUDA_ARCH__ >= 900
        const uint32_t here = uint32_t(__cvta_generic_to_shared(local)), barrier = uint32_t(__cvta_generic_to_shared(barrier_));
        asm volatile(
            "{\n.reg .b32 there, box;\n"
            "mapa.shared::cluster.u32 there, %0, %6;\n"
            "mapa.shared::cluster.u32 box, %1, %6;\n"
            "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [there], {%2, %3, %4, %5}, [box];\n}" ::"r"(here),
            "r"(barrier), "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w), "r"(rank)
            : "memory");
#endif
    }

    // Sends 4 bytes.
    __device__ __forceinline__ void send(float* local, int rank, float value) const {
#if __CUDA_ARCH__ >= 900
        const uint32_t here = uint32_t(__cvta_generic_to_shared(local)), barrier = uint32_t(__cvta_generic_to_shared(barrier_));
        asm volatile(
            "{\n.reg .b32 there, box;\n"
            "mapa.shared::cluster.u32 there, %0, %3;\n"
            "mapa.shared::cluster.u32 box, %1, %3;\n"
            "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [there], %2, [box];\n}" ::"r"(here),
            "r"(barrier), "r"(__float_as_uint(value)), "r"(rank)
            : "memory");
#endif
    }

    // Returns once all bytes have landed; `parity` is how often the mailbox has opened before, mod 2. A CTA must not end before
    // that.
    __device__ __forceinline__ void receive(uint32_t parity = 0) const {
#if __CUDA_ARCH__ >= 900
        asm volatile(
            "{\n.reg .pred done;\n"
            "again:\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
            "@!done bra again;\n}" ::"r"(uint32_t(__cvta_generic_to_shared(barrier_))),
            "r"(parity)
            : "memory");
#endif
    }
};

}  // namespace oxmoe::cluster
