"""down_combine_fp8_sm90.cuh on the host: every thread of every CTA of a launch is a fiber, wgmma and TMA are loops.

A fiber goes on until it waits; who is next is random. What the kernel takes from other headers of Hopper kernels is
replaced (Hopper's instructions) or cut out of them (the lanes' columns of the wide GEMM).
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from fake_cuda.harness import STRUCTS
from host_cta import without_asm
from host_kernels import ROOT, write_parameter_headers

PRELUDE = r"""
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <ucontext.h>
#include <vector>
#define __device__
#define __forceinline__ inline
#define __align__(n)
using std::max;
using std::min;
struct int2 { int x, y; };
struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(16) uint4 { uint32_t x, y, z, w; };
struct Index { uint32_t x; };
static Index threadIdx, blockIdx, gridDim;
struct CUtensorMap { const uint8_t* data; int64_t row_bytes; };
#define REQUIRE(what) \
    if (!(what)) { fprintf(stderr, "CTA %u, thread %u: %s\n", blockIdx.x, threadIdx.x, #what); exit(3); }

static float float_of(uint32_t bits) { float x; memcpy(&x, &bits, 4); return x; }
static uint32_t bits_of(float x) { uint32_t bits; memcpy(&bits, &x, 4); return bits; }
static uint32_t to_bf16(float x) { const uint32_t bits = bits_of(x); return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16; }
static float from_e4m3(uint32_t code) {
    const float sign = code & 0x80 ? -1 : 1, m = code & 7;
    const int e = code >> 3 & 15;
    return sign * (e == 15 && m == 7 ? NAN : e ? ldexpf(8 + m, e - 10) : ldexpf(m, -9));
}
static float __fmul_rn(float a, float b) { return a * b; }
static float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static int __shfl_sync(uint32_t, int value, int) { return value; }  // of what is the same in all lanes
static void __syncwarp() {}

struct Meeting { int there = 0, number = 0; };
struct Cta {
    std::unique_ptr<uint8_t[]> memory{new uint8_t[256 << 10]};
    uint8_t* shared = memory.get() + (1024 - reinterpret_cast<uintptr_t>(memory.get()) % 1024);
    Meeting meetings[16], warps[32];
};
struct Fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    uint32_t cta, thread;
    std::function<bool()> condition;
    bool over = false;
};
static std::vector<Cta> ctas;
static std::vector<Fiber> fibers;
static Fiber* self;
static ucontext_t scheduler;
static std::function<void()> body;

static void wait(std::function<bool()> condition) {
    self->condition = std::move(condition);
    swapcontext(&self->context, &scheduler);
}
static void start() {
    body();
    self->over = true;
    swapcontext(&self->context, &scheduler);
}
static uint8_t* shared_memory() { return ctas[blockIdx.x].shared; }
static void meet(Meeting& meeting, int threads) {
    const int number = meeting.number;
    if (++meeting.there == threads) meeting.there = 0, ++meeting.number;
    wait([&meeting, number] { return meeting.number != number; });
}
static void meet(int id, int threads) { meet(ctas[blockIdx.x].meetings[id], threads); }
// Lanes go together through a warp's instructions, and so through what one of them does for all.
static void converge() { meet(ctas[blockIdx.x].warps[threadIdx.x / 32], 32); }
static bool launch(uint32_t grid, uint32_t threads, uint32_t seed) {
    std::mt19937 random(seed);
    gridDim.x = grid;
    ctas = std::vector<Cta>(grid);
    fibers = std::vector<Fiber>(grid * threads);
    std::vector<Fiber*> order;
    for (uint32_t i = 0; i < fibers.size(); ++i) {
        Fiber& fiber = fibers[i];
        fiber.cta = i / threads, fiber.thread = i % threads;
        fiber.stack.reset(new char[32 << 10]);
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.get();
        fiber.context.uc_stack.ss_size = 32 << 10;
        makecontext(&fiber.context, start, 0);
        order.push_back(&fiber);
    }
    for (auto& cta : ctas) memset(cta.shared, 0x7F, 255 << 10);  // NaN
    for (;;) {
        bool moved = false, all_over = true;
        std::shuffle(order.begin(), order.end(), random);
        for (Fiber* fiber : order) {
            all_over &= fiber->over;
            if (fiber->over || (fiber->condition && !fiber->condition())) continue;
            moved = true;
            self = fiber, threadIdx.x = fiber->thread, blockIdx.x = fiber->cta;
            fiber->condition = nullptr;
            swapcontext(&scheduler, &fiber->context);
        }
        if (all_over) return true;
        if (!moved) return false;
    }
}
static void __syncthreads() { meet(0, 512); }

namespace oxmoe {
struct __nv_bfloat16 { uint16_t bits; };
template <typename> uint32_t pack(float low, float high) { return to_bf16(low) | to_bf16(high) << 16; }
template <typename> float2 unpack(uint32_t word) { return {float_of(word << 16), float_of(word & 0xFFFF0000u)}; }
namespace pdl { inline void wait() {} inline void launch_dependents() {} }
namespace counter { inline void add_only(int* counter) { ++*counter; } }

namespace sm90 {
struct Barrier { uint16_t count, pending; uint32_t phase; };
static Barrier& barrier_of(uint64_t* word) { return *reinterpret_cast<Barrier*>(word); }
inline uint32_t shared_address(const void* p) { return static_cast<const uint8_t*>(p) - shared_memory(); }
inline void barrier_init(uint64_t* word, uint32_t count) { barrier_of(word) = {uint16_t(count), uint16_t(count), 0}; }
inline void barrier_init_fence() {}
inline void barrier_arrive(uint64_t* word) {
    Barrier& barrier = barrier_of(word);
    REQUIRE(barrier.pending > 0);
    if (--barrier.pending == 0) barrier.pending = barrier.count, ++barrier.phase;
}
inline void barrier_arrive_if(uint64_t* word, bool now) {
    converge();
    if (now) barrier_arrive(word);
}
inline void barrier_arrive_expect(uint64_t*, uint32_t) {}  // the copy arrives
inline void barrier_wait(uint64_t* word, uint32_t parity) {
    Barrier& barrier = barrier_of(word);
    auto done = [&barrier, parity] { return (barrier.phase & 1) != parity; };
    if (!done()) ::wait(done);
}
inline void named_barrier(int id, int threads) { meet(id, threads); }
inline void prefetch_tensor_map(const CUtensorMap*) {}
inline void fence_async_proxy() {}
template <int> void registers_increase() {}
template <int> void registers_decrease() {}
inline void copy_16_async(uint32_t to, const void* from, bool) {
    REQUIRE(to % 16 == 0 && reinterpret_cast<uintptr_t>(from) % 16 == 0);
    memcpy(shared_memory() + to, from, 16);
}
inline void store_global_16_if(void* to, const uint4& value, bool now) { if (now) memcpy(to, &value, 16); }

inline void wgmma_fence() { converge(); }
inline void wgmma_commit() {}
template <int> void wgmma_wait() {}
inline uint64_t descriptor_128b(uint32_t address, uint32_t offset) { return address + offset; }
// Rows of 128 bytes whose 16-byte chunks are swizzled in atoms of 1024; the step's 32 bytes start at `at`.
inline float element(uint64_t at, int row, int k) {
    const uint32_t base = at / 1024 * 1024, column = at % 1024 + k;
    REQUIRE(column < 128);
    return from_e4m3(shared_memory()[base + row * 128 + ((column / 16 ^ row % 8) * 16) + column % 16]);
}
template <int N>
struct WgmmaE4m3 {
    static void multiply(float (&d)[64], uint64_t a, uint64_t b, bool keep) {
        const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
        for (int half = 0; half < 2; ++half) {
            float row[32];
            for (int k = 0; k < 32; ++k) row[k] = element(a, warp * 16 + lane / 4 + 8 * half, k);
            for (int i = 0; i < 32; ++i) {
                const int column = i / 2 * 8 + lane % 4 * 2 + i % 2;
                double sum = 0;
                for (int k = 0; k < 32; ++k) sum += double(row[k]) * element(b, column, k);
                float& total = d[i / 2 * 4 + half * 2 + i % 2];
                total = keep ? float(total + sum) : float(sum);
            }
        }
    }
};
inline void start_wgmma_e4m3_128(float (&d)[64], uint64_t a, uint64_t b) { WgmmaE4m3<128>::multiply(d, a, b, false); }
}  // namespace sm90

template <bool, int>
struct GroupedGemmFp8WideSm90 {
    struct Base { static constexpr int kBlockK = 64; };
    static constexpr int kBlockRows = 128, kBlocks = 2;
CUT
};
}  // namespace oxmoe

namespace ptx {
static void createpolicy_fractional_L2__evict_first_b64(uint64_t&) {}
// A box of the wide GEMM's map of weights: 64 pairs of 2 x 4 x 4 x 4 rows.
static void cp_async_bulk_tensor_5d_shared__cluster_global_mbarrier__complete_tx__bytes_L2__cache_hint(
    uint32_t to, const CUtensorMap* map, int k, int, int strip, uint32_t barrier, uint64_t) {
    for (int n = 0; n < 128; ++n) {
        const int row = n % 2 + n / 2 % 4 * 8 + n / 8 % 4 * 2 + (strip + n / 32) * 32;
        const uint8_t* from = map->data + row * map->row_bytes + k * 2;
        for (int i = 0; i < 8; ++i) memcpy(shared_memory() + to + n * 128 + (i ^ n % 8) * 16, from + i * 16, 16);
    }
    oxmoe::sm90::barrier_arrive(reinterpret_cast<uint64_t*>(shared_memory() + barrier));
}
static void cp_async_wait_all() {}
static void ld_relaxed_gpu_global_s32(int& now, const int* counter) {
    if (*counter < int(gridDim.x)) wait([counter] { return *counter >= int(gridDim.x); });
    now = *counter;
}
static void fence_acq_rel_gpu() {}
static void setp_ne_b32_and_mov_b32_and_mov_b32_and_mov_b32_and_mov_b32_and__now(
    uint32_t& x, uint32_t& y, uint32_t& z, uint32_t& w, const uint8_t* from, int there) {
    uint4 value{};
    if (there) memcpy(&value, from, 16);
    x = value.x, y = value.y, z = value.z, w = value.w;
}
static void setp_ne_b32_and__now(float& weight, const float* from, int there) { if (there) weight = *from; }
static void st_global_cs_v4_u32(uint8_t* to, uint32_t x, uint32_t y, uint32_t z, uint32_t w) {
    const uint32_t words[4] = {x, y, z, w};
    memcpy(to, words, 16);
}
}  // namespace ptx
"""

ENTRY = """
extern "C" bool down_combine(const oxmoe::DownCombineParams* p, int64_t row_bytes, uint32_t grid, uint32_t seed) {
    const CUtensorMap map{p->down.weights, row_bytes};
    body = [p, &map] { oxmoe::DownCombineFp8Sm90::run(map, *p); };
    return launch(grid, oxmoe::DownCombineFp8Sm90::kThreads, seed);
}
"""


def between(text: str, first: str, last: str) -> str:
    start = text.index(first)
    return text[start : text.index(last, start)]


class HostDownCombine:
    def __init__(self, folder: Path) -> None:
        compiler = shutil.which("c++") or shutil.which("g++")
        if compiler is None:
            pytest.skip("no C++ compiler")
        write_parameter_headers(folder)
        moe = ROOT / "csrc" / "moe"
        wide = (moe / "grouped_gemm_fp8_wide_sm90.cuh").read_text()
        cut = [
            "static constexpr int " + between(wide, "kLaneColumns = ", "\n"),
            between(wide, "    static constexpr int kBlockStrips", "\n"),
            between(wide, "    // Where in a block's sums", "    // Bias, router weights"),
            between(wide, "    // `at`: of a lane's first column.", "private:"),
        ]
        kernel = ""
        for name in ("panels", "fp8_block_pair_sm90", "down_combine_fp8_sm90"):
            text = (moe / f"{name}.cuh").read_text()
            kernel += "\n".join(line for line in text.splitlines() if not line.startswith(("#include", "#pragma once")))
        dynamic = "extern __shared__ __align__(1024) uint8_t dynamic_shared[];"
        assert dynamic in kernel
        kernel = without_asm(kernel.replace(dynamic, "uint8_t* const dynamic_shared = shared_memory();"))
        headers = '#include "oxmoe/src/params/down_combine.rs.h"\n'
        source, library = folder / "down_combine.cpp", folder / "down_combine.so"
        source.write_text(headers + PRELUDE.replace("CUT", "\n".join(cut)) + kernel + ENTRY)
        flags = ["-std=c++17", "-O2", "-ffp-contract=off", "-w", "-shared", "-fPIC"]
        subprocess.run([compiler, *flags, f"-I{folder}", "-o", library, source], check=True)
        self.library = ctypes.CDLL(str(library))
        self.library.down_combine.restype = ctypes.c_bool

    def run(self, row_bytes: int, grid: int, seed: int, **parameters: Any) -> bool:
        """False: the CTAs wait for each other for ever."""
        p = STRUCTS["DownCombineParams"](**parameters)
        numbers = ctypes.c_int64(row_bytes), ctypes.c_uint32(grid), ctypes.c_uint32(seed & 0xFFFFFFFF)
        return self.library.down_combine(ctypes.byref(p), *numbers)
