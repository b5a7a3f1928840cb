"""The all-reduce kernels compiled for the host: every thread of every CTA of every rank is a thread of this process.

Memory operations between ranks are replaced by ones that arrive half by half, in either order, and late.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from fake_cuda.harness import STRUCTS
from host_build import DoesNotCompile, compiled
from host_kernels import ROOT, write_parameter_headers

ELEMENTS = {"bfloat16": "__nv_bfloat16", "float16": "__half", "float32": "float"}
RANKS = (1, 2, 4, 8)
# Name of a kernel's work -> chunks of a thread in two shots.
WORKS = {"Sum": (2,), "Norm": (2, 8), "All": (4, 8)}
# Clusters of several CTAs do not run here.
ALONE = {"Sum": "false", "Norm": "true", "All": "false"}

CUDA = r"""
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <ctime>
#include <memory>
#include <pthread.h>
#include <sched.h>
#include <thread>
#include <vector>
#define __device__
#define __forceinline__ inline
#define __noinline__
using std::min;
struct alignas(16) uint4 { uint32_t x, y, z, w; };
struct ulonglong2 { uint64_t x, y; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
struct uint2 { uint32_t x, y; };
struct Index { unsigned x; };
inline thread_local Index threadIdx, blockIdx, blockDim, gridDim;
// A thread that waits here sleeps at once, because there are many more threads than cores.
class Barrier {
    pthread_barrier_t barrier;

public:
    explicit Barrier(unsigned threads) { pthread_barrier_init(&barrier, nullptr, threads); }
    ~Barrier() { pthread_barrier_destroy(&barrier); }
    Barrier(const Barrier&) = delete;
    void arrive_and_wait() { pthread_barrier_wait(&barrier); }
};
struct Cta {
    Barrier all;
    std::vector<std::unique_ptr<Barrier>> warps;
    std::vector<float> exchanged;
    alignas(16) float shared[512];
    explicit Cta(int threads) : all(threads), exchanged(threads) {
        for (int i = 0; i < threads / 32; ++i) warps.push_back(std::make_unique<Barrier>(32));
        for (float& value : shared) value = NAN;
    }
};
inline thread_local Cta* cta;
inline thread_local uint32_t random_state;
inline uint32_t draw() { return (random_state = random_state * 1664525u + 1013904223u) >> 8; }
inline void delay() { if (draw() % 8 == 0) sched_yield(); }
inline void __syncthreads() { cta->all.arrive_and_wait(); }
inline void __syncwarp() {}
inline float __shfl_xor_sync(unsigned, float value, int lanes) {
    Barrier& warp = *cta->warps[threadIdx.x / 32];
    cta->exchanged[threadIdx.x] = value;
    warp.arrive_and_wait();
    const float other = cta->exchanged[threadIdx.x ^ lanes];
    warp.arrive_and_wait();
    return other;
}
inline void __threadfence_system() { __sync_synchronize(); }
inline unsigned long long atomicCAS_system(unsigned long long* at, unsigned long long was, unsigned long long value) {
    return __sync_val_compare_and_swap(at, was, value);
}
inline uint32_t atomicInc(uint32_t* at, uint32_t last) {
    uint32_t old = __atomic_load_n(at, __ATOMIC_RELAXED);
    while (!__atomic_compare_exchange_n(at, &old, old < last ? old + 1 : 0, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED))
        continue;
    return old;
}
template <class T> T __ldg(const T* from) { return *from; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __frcp_rn(float a) { return 1 / a; }
inline float __fsqrt_rn(float a) { return sqrtf(a); }
inline float __uint_as_float(uint32_t bits) { float x; memcpy(&x, &bits, 4); return x; }
inline uint32_t __float_as_uint(float x) { uint32_t bits; memcpy(&bits, &x, 4); return bits; }
"""

# Conversions as GPUs do them: to nearest even, with one NaN.
ELEMENT = r"""
#pragma once
#include "cuda.h"
struct __nv_bfloat16 {};
struct __half {};
namespace oxmoe {
inline uint32_t narrow(__nv_bfloat16, float x) {
    const uint32_t bits = __float_as_uint(x);
    return x != x ? 0x7FFF : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}
inline float widen(__nv_bfloat16, uint32_t bits) { return __uint_as_float(bits << 16); }
inline uint32_t narrow(__half, float x) {
    const _Float16 half = _Float16(x);
    uint16_t bits;
    memcpy(&bits, &half, 2);
    return x != x ? 0x7FFF : bits;
}
inline float widen(__half, uint32_t bits) {
    const uint16_t low = uint16_t(bits);
    _Float16 half;
    memcpy(&half, &low, 2);
    return float(half);
}
template <class E> uint32_t pack(float low, float high) { return narrow(E(), low) | narrow(E(), high) << 16; }
template <class E> float2 unpack(uint32_t word) { return {widen(E(), word & 0xFFFF), widen(E(), word >> 16)}; }
}
"""

MEMORY = r"""
#pragma once
#include "cuda.h"
namespace oxmoe::allreduce {
using Chunk = uint4;
inline uint64_t load_relaxed(const uint64_t* from) { delay(); return __atomic_load_n(from, __ATOMIC_RELAXED); }
inline void store_relaxed(uint64_t* to, uint64_t value) { delay(); __atomic_store_n(to, value, __ATOMIC_RELAXED); }
inline Chunk load_relaxed(const Chunk* from) {
    uint64_t half[2];
    const int first = draw() & 1;
    for (int i : {first, 1 - first}) half[i] = load_relaxed(reinterpret_cast<const uint64_t*>(from) + i);
    Chunk chunk;
    memcpy(&chunk, half, 16);
    return chunk;
}
inline void store_relaxed(Chunk* to, Chunk chunk) {
    uint64_t half[2];
    memcpy(half, &chunk, 16);
    const int first = draw() & 1;
    for (int i : {first, 1 - first}) store_relaxed(reinterpret_cast<uint64_t*>(to) + i, half[i]);
}
inline ulonglong2 load_pair(const uint64_t* from) { return {load_relaxed(from), load_relaxed(from + 1)}; }
inline uint64_t nanoseconds() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000ull + now.tv_nsec;
}
}
"""

MAIN = r"""
#include "cuda.h"
#include "allreduce/oneshot.cuh"
#include "allreduce/twoshot.cuh"
template <class Kernel>
void launch(const oxmoe::AllReduceParams& p, unsigned grid, unsigned block, uint32_t seed) {
    std::vector<std::unique_ptr<Cta>> ctas;
    std::vector<std::thread> threads;
    for (unsigned i = 0; i < grid; ++i) ctas.push_back(std::make_unique<Cta>(block));
    for (unsigned i = 0; i < grid * block; ++i) {
        threads.emplace_back([&, i] {
            blockIdx = {i / block}, threadIdx = {i % block}, gridDim = {grid}, blockDim = {block};
            cta = ctas[i / block].get();
            random_state = seed + i * 7919;
            Kernel::run(p);
        });
    }
    for (auto& thread : threads) thread.join();
}
"""

ENTRY = """
extern "C" void {name}(const oxmoe::AllReduceParams* p, unsigned grid, unsigned block, uint32_t seed) {{
    launch<oxmoe::{kernel}>(*p, grid, block, seed);
}}
"""


class HostAllReduce:
    def __init__(self, folder: Path) -> None:
        compiler = shutil.which("g++")
        if compiler is None:
            pytest.skip("no g++")
        for name in ("common", "allreduce"):
            (folder / name).mkdir(parents=True)
        write_parameter_headers(folder)
        (folder / "cuda.h").write_text(CUDA)
        (folder / "common/element.cuh").write_text(ELEMENT)
        (folder / "allreduce/memory.cuh").write_text(MEMORY)
        copied = ("arithmetic", "common", "contribution", "epilogue", "quantise")
        for name in (
            "common/cluster.cuh",
            "common/narrow.cuh",
            "common/nvfp4.cuh",
            "common/scale_layout.cuh",
            "common/pdl.cuh",
            *(f"allreduce/{n}.cuh" for n in copied),
        ):
            (folder / name).write_text((ROOT / "csrc" / name).read_text())
        for name in ("oneshot", "twoshot"):
            # The variable belongs to a CTA; `static` would share it between all.
            text, count = re.subn(
                r"__shared__ ExchangeSpace space;",
                "static_assert(sizeof(ExchangeSpace) <= sizeof(Cta::shared));\n"
                "auto& space = *reinterpret_cast<ExchangeSpace*>(cta->shared);",
                (ROOT / "csrc" / "allreduce" / f"{name}.cuh").read_text(),
            )
            assert count == 1
            (folder / f"allreduce/{name}.cuh").write_text(text)
        entries = [MAIN]
        for dtype, element in ELEMENTS.items():
            for ranks in RANKS:
                for work, chunks in WORKS.items():
                    kernel = f"AllReduceOneShot<{element}, {ranks}, oxmoe::allreduce::Work::k{work}, {ALONE[work]}>"
                    entries.append(ENTRY.format(name=f"oneshot_{dtype}_{ranks}_{work}", kernel=kernel))
                    for each in chunks if ranks > 2 else ():
                        kernel = f"AllReduceTwoShot<{element}, {ranks}, oxmoe::allreduce::Work::k{work}, {each}>"
                        entries.append(ENTRY.format(name=f"twoshot_{dtype}_{ranks}_{work}_{each}", kernel=kernel))
        source = folder / "kernels.cpp"
        source.write_text("\n".join(entries))
        flags = ["-std=c++20", "-O1", "-ffp-contract=off", "-w", "-pthread", f"-I{folder}"]
        try:
            self.library = ctypes.CDLL(str(compiled(compiler, flags, source)))
        except DoesNotCompile as error:
            if "_Float16" not in str(error):
                raise
            pytest.skip("a compiler without _Float16")

    def launch(self, name: str, grid: int, block: int, seed: int, **parameters: Any) -> None:
        params = STRUCTS["AllReduceParams"](**parameters)
        getattr(self.library, name)(
            ctypes.byref(params), ctypes.c_uint(grid), ctypes.c_uint(block), ctypes.c_uint32(seed & 0xFFFFFFFF)
        )


def on_every_rank(ranks: int, function: Any) -> None:
    """Runs `function(rank)` on a thread for each rank."""
    failures: list[Exception] = []

    def run(rank: int) -> None:
        try:
            function(rank)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
