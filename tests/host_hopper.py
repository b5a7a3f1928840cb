"""fp8's GEMMs of many tokens on the host: every thread of every CTA of a launch is a fiber, wgmma and TMA are loops.

A fiber goes on until it waits; who is next is random. Hopper's instructions are replaced; the kernels' schedule and
their gathering are cut out of grouped_gemm_sm90.cuh.
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
#include <utility>
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
static float __fadd_rn(float a, float b) { return a + b; }
static float __fdiv_rn(float a, float b) { return a / b; }
static float __frcp_rn(float a) { return 1 / a; }
static float __uint_as_float(uint32_t bits) { return float_of(bits); }
static uint32_t __float_as_uint(float x) { return bits_of(x); }
static int __clz(uint32_t x) { return x ? __builtin_clz(x) : 32; }
static int __ffs(uint32_t x) { return __builtin_ffs(x); }
static int atomicAdd(int* to, int value) { return std::exchange(*to, *to + value); }
struct Meeting { int there = 0, number = 0; };
struct Cta {
    std::unique_ptr<uint8_t[]> memory{new uint8_t[256 << 10]};
    uint8_t* shared = memory.get() + (1024 - reinterpret_cast<uintptr_t>(memory.get()) % 1024);
    Meeting meetings[16], warps[32];
    uint64_t lanes[32][32];  // what a warp's lanes tell each other
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
template <typename T>
static T shuffle(T value, uint32_t from) {
    auto& lanes = ctas[blockIdx.x].lanes[threadIdx.x / 32];
    memcpy(&lanes[threadIdx.x % 32], &value, sizeof(T));
    converge();
    memcpy(&value, &lanes[from], sizeof(T));
    converge();
    return value;
}
template <typename T>
static T __shfl_sync(uint32_t, T value, int lane) { return shuffle(value, lane); }
template <typename T>
static T __shfl_xor_sync(uint32_t, T value, int mask) { return shuffle(value, threadIdx.x % 32 ^ mask); }
static uint32_t __ballot_sync(uint32_t, bool value) {
    uint32_t result = 0;
    for (int lane = 0; lane < 32; ++lane) result |= uint32_t(shuffle(value, lane)) << lane;
    return result;
}
static void __syncwarp() { converge(); }
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
static void __syncthreads() { meet(0, 384); }

namespace oxmoe {
struct __nv_bfloat16 { uint16_t bits; };
template <typename> uint32_t pack(float low, float high) { return to_bf16(low) | to_bf16(high) << 16; }
template <typename> float2 unpack(uint32_t word) { return {float_of(word << 16), float_of(word & 0xFFFF0000u)}; }
namespace pdl { inline void wait() {} inline void launch_dependents() {} }

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
inline void copy_async_arrive(uint64_t* barrier) { barrier_arrive(barrier); }
inline void copy_16_async(uint32_t to, const void* from, bool) {
    REQUIRE(to % 16 == 0 && reinterpret_cast<uintptr_t>(from) % 16 == 0);
    memcpy(shared_memory() + to, from, 16);
}
inline void store_global_16_if(void* to, const uint4& value, bool now) { if (now) memcpy(to, &value, 16); }
inline void store_global_16(void* to, const uint4& value) { memcpy(to, &value, 16); }
inline void store_global_8_if(void* to, uint32_t a, uint32_t b, bool now) {
    const uint32_t words[2] = {a, b};
    if (now) memcpy(to, words, 8);
}
// A box of the weights' map: 64 pairs of 2 x 4 x 4 x 4 rows.
inline void copy_tensor_5d(void* to, const CUtensorMap* map, const int (&at)[5], uint64_t* barrier) {
    for (int n = 0; n < 128; ++n) {
        const int row = n % 2 + n / 2 % 4 * 8 + n / 8 % 4 * 2 + (at[4] + n / 32) * 32;
        const uint8_t* from = map->data + row * map->row_bytes + at[0] * 2;
        for (int i = 0; i < 8; ++i) memcpy(static_cast<uint8_t*>(to) + n * 128 + (i ^ n % 8) * 16, from + i * 16, 16);
    }
    barrier_arrive(barrier);
}

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

CUT
}  // namespace oxmoe
"""

ENTRY = """
template <typename Kernel>
static bool run(const oxmoe::GroupedGemmParams* p, int64_t row_bytes, uint32_t grid, uint32_t seed) {
    const CUtensorMap map{p->weights, row_bytes};
    body = [p, &map] { Kernel::run(map, *p); };
    return launch(grid, Kernel::kThreads, seed);
}
#define KERNEL(name, ...) \\
    extern "C" bool name(const oxmoe::GroupedGemmParams* p, int64_t row_bytes, uint32_t grid, uint32_t seed) { \\
        return run<oxmoe::__VA_ARGS__>(p, row_bytes, grid, seed); \\
    }
KERNEL(gated, GroupedGemmFp8WideSm90<true, 4, false>)
KERNEL(gated_shares, GroupedGemmFp8WideSm90<true, 4, true>)
KERNEL(plain, GroupedGemmFp8WideSm90<false, 4, false>)
KERNEL(plain_shares, GroupedGemmFp8WideSm90<false, 4, true>)
KERNEL(stationary, GroupedGemmFp8StationarySm90<4, false>)
KERNEL(stationary_shares, GroupedGemmFp8StationarySm90<4, true>)
"""

# What the cut-out schedule and gathering take of their template.
BASE = """
struct alignas(16) WorkUnit { int expert, first, count, row_block; };
constexpr int kTileGroup = 4;
inline int find_unit(const Tile*, int, int, int, WorkUnit&) { return 0; }
template <typename Element, bool Gated, int MaxTokens, int RowTiles, int Consumers, int Stages>
struct GroupedGemmSm90 {
    static constexpr int kRows = 64 * RowTiles * Consumers, kBlockK = 64, kTokenBytes = MaxTokens * 128, kUnitSlots = 2;
    static constexpr int kGatherThreads = 64, kFetchLead = 8, kMostGroupTiles = 12, kThreads = 128 * (1 + Consumers);
    static constexpr bool kPaired = RowTiles == 2;
"""
INSTRUCTIONS = """
namespace ptx {
static void min_NaN_f32(float& d, float a, float b) { d = std::isnan(a) || std::isnan(b) ? NAN : min(a, b); }
static void max_NaN_f32(float& d, float a, float b) { d = std::isnan(a) || std::isnan(b) ? NAN : max(a, b); }
static void ex2_approx_ftz_f32(float& d, float a) { d = exp2f(a); }
static void rcp_approx_ftz_f32(float& d, float a) { d = 1 / a; }
static void cvt_rn_satfinite_e4m3x2_f32(uint16_t&, float, float) {}
static void mov_b32(float& d) { d = 0; }
}  // namespace ptx
"""


def between(text: str, first: str, last: str) -> str:
    start = text.index(first)
    return text[start : text.index(last, start)]


class HostFp8:
    """The kernels of ENTRY by name."""

    def __init__(self, folder: Path) -> None:
        compiler = shutil.which("c++") or shutil.which("g++")
        if compiler is None:
            pytest.skip("no C++ compiler")
        write_parameter_headers(folder)
        csrc = ROOT / "csrc"

        def body(name: str) -> str:
            lines = (csrc / name).read_text().splitlines()
            return "\n".join(line for line in lines if not line.startswith(("#include", "#pragma once")))

        base = (csrc / "moe" / "grouped_gemm_sm90.cuh").read_text()
        parts = [
            between(
                base,
                "    template <typename Buffers>\n    static __device__ __forceinline__ void init_barriers",
                "    // Whether any of",
            ),
            between(base, "    static __device__ __forceinline__ int k_blocks", "private:\n    // ---- weights"),
        ]
        kernels = body("moe/grouped_gemm_fp8_wide_sm90.cuh") + body("moe/grouped_gemm_fp8_stationary_sm90.cuh")
        dynamic = "extern __shared__ __align__(1024) uint8_t dynamic_shared[];"
        assert kernels.count(dynamic) == 2
        kernels = kernels.replace(dynamic, "uint8_t* const dynamic_shared = shared_memory();")
        text = "\n".join(body(f"common/{name}.cuh") for name in ("ring", "activation", "narrow", "fp8"))
        text += f"\nnamespace oxmoe {{\n{BASE}{''.join(parts)}}};\n}}\n" + kernels
        source, library = folder / "fp8.cpp", folder / "fp8.so"
        prelude = PRELUDE.replace("CUT", "")
        headers = '#include "oxmoe/src/params/moe.rs.h"\n'
        source.write_text(headers + prelude + INSTRUCTIONS + without_asm(text) + ENTRY)
        flags = ["-std=c++17", "-O2", "-ffp-contract=off", "-w", "-shared", "-fPIC"]
        subprocess.run([compiler, *flags, f"-I{folder}", "-o", library, source], check=True)
        self.library = ctypes.CDLL(str(library))

    def run(self, name: str, row_bytes: int, grid: int, seed: int, **parameters: Any) -> bool:
        """False: somebody waits for ever."""
        p = STRUCTS["GroupedGemmParams"](**parameters)
        function = getattr(self.library, name)
        function.restype = ctypes.c_bool
        numbers = ctypes.c_int64(row_bytes), ctypes.c_uint32(grid), ctypes.c_uint32(seed & 0xFFFFFFFF)
        return function(ctypes.byref(p), *numbers)
