// The Hopper instructions that the kernels need, one thin wrapper each (PTX ISA 8.0+, sm_90a). None hides a wait, fence or
// barrier.
#pragma once
#include <cstdint>
#include <cuda.h>

namespace oxmoe::sm90 {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// ---- mbarrier: a phase completes when pending arrivals and pending transaction bytes are both zero ----

__device__ __forceinline__ void barrier_init(uint64_t* barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

// Call this after barrier_init, before any other thread or the copy engine uses the barrier; then call __syncthreads().
__device__ __forceinline__ void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ __forceinline__ void barrier_arrive(uint64_t* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Makes `count` arrivals.
__device__ __forceinline__ void barrier_arrive(uint64_t* barrier, uint32_t count) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(count) : "memory");
}

// NOTE: this is predicated instead of branched around: a branch between wgmmas in flight makes ptxas serialize them (C7513).
__device__ __forceinline__ void barrier_arrive_if(uint64_t* barrier, bool condition) {
    asm volatile("{\n.reg .pred now;\nsetp.ne.b32 now, %1, 0;\n@now mbarrier.arrive.shared::cta.b64 _, [%0];\n}" ::"r"(
                     shared_address(barrier)),
                 "r"(int(condition))
                 : "memory");
}

// Makes one arrival that also announces the `bytes` that the copy engine will deliver in this phase.
__device__ __forceinline__ void barrier_arrive_expect(uint64_t* barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
}

// Returns once the phase with this parity has completed. A fresh barrier is in phase 0: waiting for parity 1 returns at once.
__device__ __forceinline__ void barrier_wait(uint64_t* barrier, uint32_t parity) {
    asm volatile(
        "{\n.reg .pred done;\n"
        "again:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n}" ::"r"(shared_address(barrier)),
        "r"(parity)
        : "memory");
}

// A barrier of some warps; id 0 is __syncthreads().
__device__ __forceinline__ void named_barrier(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- copies ----

// Copies 16 bytes from global to shared memory; with `valid` false it writes zeros and reads nothing.
__device__ __forceinline__ void copy_16_async(uint32_t destination, const void* source, bool valid) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(destination), "l"(source), "r"(valid ? 16 : 0)
                 : "memory");
}

// Copies 4 bytes from global to shared memory, through the L1 cache.
__device__ __forceinline__ void copy_4_async(void* destination, const void* source) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(destination)), "l"(source) : "memory");
}

// The barrier gets this thread's arrival when all its earlier cp.async have landed; the arrival is part of barrier_init's count.
__device__ __forceinline__ void copy_async_arrive(uint64_t* barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Copies one box of a 2-D tensor map; coordinates are in elements, innermost first.
__device__ __forceinline__ void copy_tensor_2d(void* destination, const CUtensorMap* map, int column, int row,
                                               uint64_t* barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
                     shared_address(destination)),
                 "l"(map), "r"(column), "r"(row), "r"(shared_address(barrier))
                 : "memory");
}

// Copies one box of a 5-D tensor map.
__device__ __forceinline__ void copy_tensor_5d(void* destination, const CUtensorMap* map, const int (&at)[5], uint64_t* barrier) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5, %6}], [%7];" ::
            "r"(shared_address(destination)),
        "l"(map), "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3]), "r"(at[4]), "r"(shared_address(barrier))
        : "memory");
}

// Copies `bytes` contiguous bytes; both addresses and `bytes` are multiples of 16.
__device__ __forceinline__ void copy_bulk(void* destination, const void* source, uint32_t bytes, uint64_t* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(destination)),
                 "l"(source), "r"(bytes), "r"(shared_address(barrier))
                 : "memory");
}

__device__ __forceinline__ void prefetch_tensor_map(const CUtensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Makes the st.shared and cp.async writes that this thread made or observed visible to wgmma and to the copy engine.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Returns when `cycles` cycles of this multiprocessor have passed.
__device__ __forceinline__ void wait_cycles(int cycles) {
    for (const long long start = clock64(); clock64() - start < cycles;) {
    }
}

// Moves registers between warpgroups. All threads of a warpgroup call this; the count is a multiple of 8. An increase waits for
// the decreases it needs.
template <int Registers>
__device__ __forceinline__ void registers_increase() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
}
template <int Registers>
__device__ __forceinline__ void registers_decrease() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
}

// Stores 8 x 8 tiles of 16-bit elements transposed. Lane l holds row l / 4, columns 2 (l % 4), + 1 of each tile. Lanes 8 i to
// 8 i + 7 give the addresses of tile i's columns, 16 bytes each.
__device__ __forceinline__ void store_tiles_turned(uint32_t address, const uint32_t (&tiles)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(tiles[0]),
                 "r"(tiles[1]), "r"(tiles[2]), "r"(tiles[3])
                 : "memory");
}
__device__ __forceinline__ void store_tiles_turned(uint32_t address, const uint32_t (&tiles)[2]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(tiles[0]), "r"(tiles[1])
                 : "memory");
}

// Transposes an 8 x 8 tile of 16-bit elements. Before and after, lane l has columns 2 (l % 4), + 1 of row l / 4.
__device__ __forceinline__ uint32_t turn_tile(uint32_t pair) {
    uint32_t turned;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(pair));
    return turned;
}

__device__ __forceinline__ float load_shared_4(const float* from) {
    float value;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(shared_address(from)) : "memory");
    return value;
}

__device__ __forceinline__ uint4 load_shared_16(uint32_t address) {
    uint4 value;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "r"(address)
                 : "memory");
    return value;
}

__device__ __forceinline__ void store_shared_16(uint32_t address, const uint4& value) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w)
                 : "memory");
}

// NOTE: this is in asm, because nvcc splits a uint4 assignment into 4-byte stores if it cannot prove the alignment.
__device__ __forceinline__ void store_global_16(void* address, const uint4& value) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w)
                 : "memory");
}

// Outputs that are stored as they are: finish() changes nothing.
struct Unchanged {
    static constexpr bool kExchanges = false;

    template <typename Params>
    static __device__ __forceinline__ int of_expert(const Params&, int expert) {
        return expert;
    }
    template <typename Params>
    static __device__ __forceinline__ const uint4& finish(const uint4& outputs, const Params&, int) {
        return outputs;
    }
};

// NOTE: this is predicated in asm, so that stores of neighbouring tokens stay free of branches.
__device__ __forceinline__ void store_global_16_if(void* address, const uint4& value, bool condition) {
    asm volatile("{\n.reg .pred now;\nsetp.ne.b32 now, %5, 0;\n@now st.global.v4.u32 [%0], {%1, %2, %3, %4};\n}" ::"l"(address),
                 "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w), "r"(int(condition))
                 : "memory");
}
__device__ __forceinline__ void store_global_8_if(void* address, uint32_t low, uint32_t high, bool condition) {
    asm volatile("{\n.reg .pred now;\nsetp.ne.b32 now, %3, 0;\n@now st.global.v2.u32 [%0], {%1, %2};\n}" ::"l"(address), "r"(low),
                 "r"(high), "r"(int(condition))
                 : "memory");
}
__device__ __forceinline__ void store_global_4_if(void* address, uint32_t value, bool condition) {
    asm volatile("{\n.reg .pred now;\nsetp.ne.b32 now, %2, 0;\n@now st.global.u32 [%0], %1;\n}" ::"l"(address), "r"(value),
                 "r"(int(condition))
                 : "memory");
}

}  // namespace oxmoe::sm90
