// Programmatic dependent launch. These functions do nothing on GPUs before sm_90.
#pragma once

namespace oxmoe::pdl {

// The next kernel of the stream may be scheduled once every CTA has called this. The call promises nothing about data, so make it
// first.
__device__ __forceinline__ void launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Returns when the kernels before this one have ended and their writes are visible.
// NOTE: every kernel but one that runs beside its predecessor (below) executes this. It does so before its first read of their
// data and before its first global write, also if it needs no data. Otherwise it could end before its predecessor, and its
// successor's wait would no longer cover that predecessor.
__device__ __forceinline__ void wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Runs the whole body of a kernel. `beside`: it runs beside its predecessor, with which it shares no data, and which let it start
// after its own wait. Its first CTA ends after the predecessor. Once its successor has started, its predecessor has ended either
// way.
// NOTE: a kernel with `beside` loads its operands from L2 (`__ldcg`): it has waited for nothing, so a line in L1 could be older
// than they are.
template <typename F>
__device__ __forceinline__ void run(bool beside, F kernel) {
    const bool waits_first = !beside, waits_last = beside && blockIdx.x == 0;
    if (waits_first) wait();
    if (!waits_last) launch_dependents();
    kernel();
    if (waits_last) {
        wait();
        launch_dependents();
    }
}

}  // namespace oxmoe::pdl
