"""Whole CTAs of csrc/ on the host: kernels that exchange values in warps, copy asynchronously and meet at barriers.

A thread is a fiber. Which of the runnable fibers goes on is random, and changes at every point where threads meet. PTX
is replaced one instruction at a time. Asynchronous copies arrive as late as a wait allows, and their target is poisoned
at once: reading or writing too early shows in the results. Rows of ldmatrix that share banks are an error.
"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any

import pytest

from fake_cuda.harness import STRUCTS
from host_build import compiled, cxx
from host_kernels import ROOT, write_parameter_headers

# The prelude of both kinds of hosts: numbers and their formats.
NUMBERS = r"""
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <setjmp.h>
#include <string>
#include <type_traits>
#include <ucontext.h>
#include <unordered_map>
#include <utility>
#include <vector>
#define __host__
#define __device__
#define __forceinline__ inline
using std::max;
using std::min;
struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(16) uint4 { uint32_t x, y, z, w; };
struct Index { uint32_t x; };
static Index threadIdx, blockIdx, gridDim;

static float float_of(uint32_t bits) { float x; memcpy(&x, &bits, 4); return x; }
static uint32_t bits_of(float x) { uint32_t bits; memcpy(&bits, &x, 4); return bits; }
static float from_bf16(uint32_t bits) { return float_of(bits << 16); }
static uint32_t to_bf16(float x) {
    const uint32_t bits = bits_of(x);
    if (x != x) return 0x7FFF;
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}
static float from_e4m3(uint32_t code) {
    const float sign = code & 0x80 ? -1 : 1, m = code & 7;
    const int e = code >> 3 & 15;
    return sign * (e == 15 && m == 7 ? NAN : e ? ldexpf(8 + m, e - 10) : ldexpf(m, -9));
}
[[maybe_unused]] static uint32_t to_e4m3(float x) {
    const float size = fabsf(x);
    const int e = std::max(size > 0 && size < 448 ? ilogbf(size) : -6, -6);
    const uint32_t code = size < 448 ? ((e + 7) << 3) + int(nearbyintf(ldexpf(size, 3 - e))) - 8 : 0x7E;
    return x != x ? 0x7F : code | (bits_of(x) >> 24 & 0x80);
}

// Where a fiber stopped. swapcontext asks the kernel for the signal mask at every switch, so only a fiber's start uses
// a context; all later switches are jumps.
struct Place {
    ucontext_t first;
    jmp_buf at;
    bool entered = false;
    void start_with(void (*run)(), char* stack, size_t bytes) {
        getcontext(&first);
        first.uc_stack.ss_sp = stack, first.uc_stack.ss_size = bytes;
        makecontext(&first, run, 0);
    }
};
[[noreturn, gnu::noinline]] static void go(Place& to) {
    if (to.entered) _longjmp(to.at, 1);
    to.entered = true;
    setcontext(&to.first);
    abort();
}
// Returns when another fiber goes to `from`.
[[gnu::noinline]] static void change(Place& from, Place& to) {
    from.entered = true;
    if (!_setjmp(from.at)) go(to);
}
// Random numbers for schedules: many and cheap.
struct Chance {
    uint64_t state;
    uint32_t below(uint32_t count) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        return (state >> 32) * count >> 32;
    }
    template <typename T>
    void shuffle(std::vector<T>& all) {
        for (size_t i = all.size(); i > 1; --i) std::swap(all[i - 1], all[below(i)]);
    }
};
"""

# Without this flag a fortified longjmp ends the process at a jump between stacks.
JUMPS = ["-U_FORTIFY_SOURCE"]

PRELUDE = r"""
static Index blockDim;
#define __CUDACC__
#define __CUDA_ARCH__ ARCH
#define __shared__
#define __align__(n) __attribute__((aligned(n)))
struct uint2 { uint32_t x, y; };
struct alignas(16) int4 { int x, y, z, w; };
static uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

#define REQUIRE(what) \
    if (!(what)) { fprintf(stderr, "thread %u: %s\n", threadIdx.x, #what); exit(3); }

static float from_f16(uint32_t bits) {
    const uint32_t sign = (bits & 0x8000) << 16, e = bits >> 10 & 31, m = bits & 0x3FF;
    if (e == 31) return m ? NAN : float_of(sign | 0x7F800000);
    return float_of(sign | bits_of(e ? float_of((e + 112) << 23 | m << 13) : m * 0x1p-24f));
}
static uint32_t to_f16(float x) {  // of what f16 holds
    const uint32_t sign = bits_of(x) >> 16 & 0x8000;
    if (x != x) return 0x7FFF;
    const float size = fabsf(x);
    if (size < ldexpf(1, -14)) return sign | uint32_t(ldexpf(size, 24));
    const int e = ilogbf(size);
    return sign | (e + 15) << 10 | (uint32_t(ldexpf(size, 10 - e)) & 0x3FF);
}
struct __nv_bfloat16 { uint16_t bits; };
struct __half { uint16_t bits; };
struct __half2 { uint32_t bits; };
struct __nv_bfloat162 { uint32_t bits; };
static float __bfloat162float(__nv_bfloat16 x) { return from_bf16(x.bits); }
static float __half2float(__half x) { return from_f16(x.bits); }
static __nv_bfloat16 __float2bfloat16_rn(float x) { return {uint16_t(to_bf16(x))}; }
static __half __float2half_rn(float x) { return {uint16_t(to_f16(x))}; }
static float2 __half22float2(__half2 x) { return {from_f16(x.bits & 0xFFFF), from_f16(x.bits >> 16)}; }
static float __uint_as_float(uint32_t bits) { return float_of(bits); }
static uint32_t __float_as_uint(float x) { return bits_of(x); }
static float __fmul_rn(float a, float b) { return a * b; }
static float __fadd_rn(float a, float b) {
    const float sum = a + b;
    return sum != sum ? float_of(0x7FFFFFFF) : sum;  // GPUs have one NaN
}
static float __fdiv_rn(float a, float b) { return a / b; }
static float __frcp_rn(float a) { return 1 / a; }
static float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static uint32_t __funnelshift_l(uint32_t low, uint32_t high, int n) {
    return uint32_t((uint64_t(high) << 32 | low) << (n & 31) >> 32);
}
static uint32_t __vmaxu2(uint32_t a, uint32_t b) {
    return max(a & 0xFFFF, b & 0xFFFF) | max(a >> 16, b >> 16) << 16;
}
static uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
    const uint64_t bytes = uint64_t(b) << 32 | a;
    uint32_t result = 0;
    for (int i = 0; i < 4; ++i) result |= uint32_t(bytes >> 8 * (selector >> 4 * i & 7) & 0xFF) << 8 * i;
    return result;
}
static uint32_t larger_bf16(uint32_t a, uint32_t b) { return to_bf16(fmaxf(from_bf16(a), from_bf16(b))); }
static uint32_t larger_f16(uint32_t a, uint32_t b) { return to_f16(fmaxf(from_f16(a), from_f16(b))); }
static __nv_bfloat162 __hmax2(__nv_bfloat162 a, __nv_bfloat162 b) {
    return {larger_bf16(a.bits & 0xFFFF, b.bits & 0xFFFF) | larger_bf16(a.bits >> 16, b.bits >> 16) << 16};
}
static __half2 __hmax2(__half2 a, __half2 b) {
    return {larger_f16(a.bits & 0xFFFF, b.bits & 0xFFFF) | larger_f16(a.bits >> 16, b.bits >> 16) << 16};
}
template <typename Number>
static Number __ldcs(const Number* from) { return *from; }
template <typename Number>
static Number __ldcg(const Number* from) { return *from; }
template <typename Number>
static Number atomicMax(Number* at, Number value) { return std::exchange(*at, max(*at, value)); }
template <typename Number>
static Number atomicMin(Number* at, Number value) { return std::exchange(*at, min(*at, value)); }
static void __trap() { REQUIRE(!"trap"); }

// ---- threads ----

namespace oxmoe { alignas(1024) uint8_t shared[256 << 10]; }

struct Copy { uint32_t to; const void* from; int bytes, real; };
constexpr size_t kStack = 64 << 10;
struct Fiber {
    Place place;
    std::unique_ptr<char[]> stack;
    std::deque<std::vector<Copy>> groups;
    std::vector<Copy> open;
    uint32_t exchanges = 0;
    bool done = false;
};
static std::vector<Fiber> fibers;
static std::vector<int> runnable;
static Place outside;
static Chance chance;
static void (*body)();

static void leave(bool done) {
    const int self = threadIdx.x;
    fibers[self].done = done;
    if (runnable.empty()) {
        for (auto& fiber : fibers) REQUIRE(fiber.done && "all threads wait");
        go(outside);
    }
    const size_t at = chance.below(runnable.size());
    const int next = runnable[at];
    runnable[at] = runnable.back(), runnable.pop_back();
    threadIdx.x = next;
    if (next == self) return;
    if (done) go(fibers[next].place);
    change(fibers[self].place, fibers[next].place);
    threadIdx.x = self;
}
struct Barrier {
    std::vector<int> waiting;
    void meet(size_t count) {
        waiting.push_back(threadIdx.x);
        if (waiting.size() == count) {
            runnable.insert(runnable.end(), waiting.begin(), waiting.end());
            waiting.clear();
        }
        leave(false);
    }
};
static Barrier cta, warps[32];
static void __syncthreads() { cta.meet(fibers.size()); }
static void start() {
    body();
    for (auto& group : fibers[threadIdx.x].groups) REQUIRE(group.empty() && "copies are waited for");
    leave(true);
}
static void launch(void (*run)(), uint32_t threads, uint32_t grid, uint64_t seed) {
    body = run, gridDim.x = grid, blockDim.x = threads, chance = {seed};
    for (blockIdx.x = 0; blockIdx.x < grid; ++blockIdx.x) {
        memset(oxmoe::shared, 0xA5, sizeof oxmoe::shared);
        fibers = std::vector<Fiber>(threads);
        runnable.clear();
        for (uint32_t i = 0; i < threads; ++i) {
            fibers[i].stack.reset(new char[kStack]);
            fibers[i].place.start_with(start, fibers[i].stack.get(), kStack);
            if (i) runnable.push_back(i);
        }
        threadIdx.x = 0;
        change(outside, fibers[0].place);
    }
}

// The array holds what all lanes of the warp brought.
static uint32_t exchanged[32][2][32][8];
template <typename Words>
static const uint32_t (*exchange(const Words& words))[8] {
    static_assert(sizeof words <= 32);
    const uint32_t warp = threadIdx.x / 32, parity = fibers[threadIdx.x].exchanges++ % 2;
    memcpy(exchanged[warp][parity][threadIdx.x % 32], &words, sizeof words);
    warps[warp].meet(32);
    return exchanged[warp][parity];
}
template <typename Number>
static Number __shfl_sync(uint32_t, Number value, int lane) {
    memcpy(&value, &exchange(value)[lane & 31][0], sizeof value);
    return value;
}
template <typename Number>
static Number __shfl_xor_sync(uint32_t, Number value, int lanes) {
    return __shfl_sync(0, value, threadIdx.x % 32 ^ lanes);
}
template <typename Number>
static Number __shfl_up_sync(uint32_t, Number value, int distance) {
    const int lane = threadIdx.x % 32;
    return __shfl_sync(0, value, lane >= distance ? lane - distance : lane);
}
static void __syncwarp() { warps[threadIdx.x / 32].meet(32); }
static bool __any_sync(uint32_t, bool value) {
    const auto all = exchange(uint32_t(value));
    for (int i = 0; i < 32; ++i) value |= all[i][0] != 0;
    return value;
}
static uint32_t __reduce_max_sync(uint32_t, uint32_t value) {
    const auto all = exchange(value);
    for (int i = 0; i < 32; ++i) value = max(value, all[i][0]);
    return value;
}

// ---- instructions ----

static size_t __cvta_generic_to_shared(const void* p) { return static_cast<const uint8_t*>(p) - oxmoe::shared; }

namespace ptx {
static uint8_t* at(uint32_t address, uint32_t bytes) {
    REQUIRE(address % bytes == 0 && address + bytes <= sizeof oxmoe::shared);
    return oxmoe::shared + address;
}
static void copy(uint32_t to, const void* from, int bytes, int real) {
    REQUIRE(!real || reinterpret_cast<uintptr_t>(from) % bytes == 0);
    memset(at(to, bytes), 0xA5, bytes);
    fibers[threadIdx.x].open.push_back({to, from, bytes, real});
}
static void cp_async_cg_shared_global_L2__256B(uint32_t to, const void* from, int real) { copy(to, from, 16, real); }
static void cp_async_ca_shared_global(uint32_t to, const void* from, int real) { copy(to, from, 4, real); }
static void cp_async_commit_group() {
    Fiber& me = fibers[threadIdx.x];
    me.groups.push_back(me.open), me.open.clear();
}
static void cp_async_wait_group(int unfinished) {
    Fiber& me = fibers[threadIdx.x];
    for (; int(me.groups.size()) > unfinished; me.groups.pop_front()) {
        for (const Copy& c : me.groups.front()) {
            memset(at(c.to, c.bytes), 0, c.bytes);
            memcpy(at(c.to, c.bytes), c.from, c.real);
        }
    }
}
static void prefetch_global_L2(const void*) {}
static void griddepcontrol_wait() {}
static void griddepcontrol_launch_dependents() {}
static void st_shared_v4_b32(uint32_t to, uint32_t x, uint32_t y, uint32_t z, uint32_t w) {
    const uint32_t words[4] = {x, y, z, w};
    memcpy(at(to, 16), words, 16);
}
static void ld_shared_v4_b32(uint32_t& x, uint32_t& y, uint32_t& z, uint32_t& w, uint32_t from) {
    const uint8_t* p = at(from, 16);
    memcpy(&x, p, 4), memcpy(&y, p + 4, 4), memcpy(&z, p + 8, 4), memcpy(&w, p + 12, 4);
}
static void ld_shared_v2_b32(uint32_t& x, uint32_t& y, uint32_t from) {
    memcpy(&x, at(from, 8), 4), memcpy(&y, at(from, 8) + 4, 4);
}
static void ld_shared_v2_f32(float& x, float& y, uint32_t from) {
    memcpy(&x, at(from, 8), 4), memcpy(&y, at(from, 8) + 4, 4);
}
static void ld_shared_b32(uint32_t& word, uint32_t from) { memcpy(&word, at(from, 4), 4); }
static uint32_t row_of_tile(const uint32_t (*rows)[8], int tile) {
    const int lane = threadIdx.x % 32;
    for (int i = 0; i < 8; ++i)
        for (int j = 0; j < i; ++j) REQUIRE(rows[8 * tile + i][0] / 16 % 8 != rows[8 * tile + j][0] / 16 % 8);
    uint32_t word;
    memcpy(&word, at(rows[8 * tile + lane / 4][0], 16) + lane % 4 * 4, 4);
    return word;
}
static void ldmatrix_sync_aligned_m8n8_x4_shared_b16(uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d, uint32_t row) {
    const auto rows = exchange(row);
    a = row_of_tile(rows, 0), b = row_of_tile(rows, 1), c = row_of_tile(rows, 2), d = row_of_tile(rows, 3);
}
static void ldmatrix_sync_aligned_m8n8_x2_shared_b16(uint32_t& a, uint32_t& b, uint32_t row) {
    const auto rows = exchange(row);
    a = row_of_tile(rows, 0), b = row_of_tile(rows, 1);
}
static void movmatrix_sync_aligned_m8n8_trans_b16(uint32_t& turned, uint32_t pair) {
    const auto pairs = exchange(pair);
    const int g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
    auto element = [&](int row) { return pairs[row * 4 + g / 2][0] >> g % 2 * 16 & 0xFFFF; };
    turned = element(2 * c) | element(2 * c + 1) << 16;
}
// A word is `Each` neighbouring K; of a: rows g and g + 8 of a half of K, then of the other half; of b: the halves.
template <int Each, typename Value>
static void mma(float& s0, float& s1, float& s2, float& s3, const uint32_t (&words)[6], Value value) {
    const auto all = exchange(words);
    const int g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
    constexpr int kCount = 8 * Each;
    // Two rows of a and two columns of b, which are what the lane's four sums need.
    double rows[2][kCount], columns[2][kCount];
    for (int k = 0; k < kCount; ++k) {
        const int half = k / (4 * Each), lane = k / Each % 4, i = k % Each;
        for (int which = 0; which < 2; ++which) {
            rows[which][k] = value(all[g * 4 + lane][which + 2 * half], i);
            columns[which][k] = value(all[(2 * c + which) * 4 + lane][4 + half], i);
        }
    }
    auto sum = [&](float& s, int row, int column) {
        double total = s;
        for (int k = 0; k < kCount; ++k) total += rows[row][k] * columns[column][k];
        s = float(total);
    };
    sum(s0, 0, 0), sum(s1, 0, 1), sum(s2, 1, 0), sum(s3, 1, 1);
}
#define MMA(name, each, value)                                                                                      \
    static void name(float& s0, float& s1, float& s2, float& s3, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, \
                     uint32_t b0, uint32_t b1) {                                                                    \
        mma<each>(s0, s1, s2, s3, {a0, a1, a2, a3, b0, b1}, [](uint32_t word, int i) { return value; });             \
    }
MMA(mma_sync_aligned_m16n8k16_row_col_f32_f16_f16_f32, 2, from_f16(word >> 16 * i & 0xFFFF))
MMA(mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32, 2, from_bf16(word >> 16 * i & 0xFFFF))
MMA(mma_sync_aligned_m16n8k32_row_col_f32_e4m3_e4m3_f32, 4, from_e4m3(word >> 8 * i & 0xFF))
static void mov_b32_and_cvt_rn_f16x2_e4m3x2_and_cvt_rn_f16x2_e4m3x2(uint32_t& first, uint32_t& second, uint32_t word) {
    auto half = [&](int i) { return to_f16(from_e4m3(word >> 8 * i & 0xFF)); };
    first = half(0) | half(1) << 16, second = half(2) | half(3) << 16;
}
static void cvt_rn_f16x2_e4m3x2(uint32_t& pair, uint16_t codes) {
    pair = to_f16(from_e4m3(codes & 0xFF)) | to_f16(from_e4m3(codes >> 8)) << 16;
}
static void cvt_rn_satfinite_e4m3x2_f32(uint16_t& pair, float high, float low) {
    pair = to_e4m3(low) | to_e4m3(high) << 8;
}
static void mov_b32_and_mov_b32_and_mov_b32(uint32_t& low, uint32_t& high, uint32_t word) {
    low = (word & 0xFFFF) * 0x10001, high = (word >> 16) * 0x10001;
}
// Only the table 0xEA is used.
static void lop3_b32(uint32_t& r, uint32_t a, uint32_t b, uint32_t c) { r = (a & b) | c; }
static void prmt_b32(uint32_t& r, uint32_t a, uint32_t b, uint32_t selector) { r = __byte_perm(a, b, selector); }
template <typename Function>
static uint32_t halves(Function function, uint32_t a, uint32_t b, uint32_t c = 0) {
    uint32_t result = 0;
    for (int i = 0; i < 32; i += 16) {
        const float x = from_bf16(a >> i & 0xFFFF), y = from_bf16(b >> i & 0xFFFF), z = from_bf16(c >> i & 0xFFFF);
        result |= to_bf16(function(x, y, z)) << i;
    }
    return result;
}
#define PAIRS(name, value)                                                           \
    static void name(uint32_t& r, uint32_t a, uint32_t b) {                          \
        r = halves([](float x, float y, float) { return value; }, a, b);             \
    }
PAIRS(mul_rn_bf16x2, x * y)
PAIRS(add_rn_bf16x2, x + y)
PAIRS(sub_rn_bf16x2, x - y)
PAIRS(max_bf16x2, fmaxf(x, y))
static void fma_rn_bf16x2(uint32_t& r, uint32_t a, uint32_t b, uint32_t c) {
    r = halves([](float x, float y, float z) { return fmaf(x, y, z); }, a, b, c);
}
static void cvt_rn_bf16x2_f32(uint32_t& r, float high, float low) { r = to_bf16(low) | to_bf16(high) << 16; }
static void cvt_rn_f16x2_f32(uint32_t& r, float high, float low) { r = to_f16(low) | to_f16(high) << 16; }
static void min_NaN_f32(float& r, float a, float b) { r = a != a || b != b ? NAN : fminf(a, b); }
static void max_NaN_f32(float& r, float a, float b) { r = a != a || b != b ? NAN : fmaxf(a, b); }
static void ex2_approx_ftz_f32(float& r, float x) { r = exp2f(x); }
static int rcp_error = 0;  // in units of the last place
static void rcp_approx_ftz_f32(float& r, float x) { r = float_of(bits_of(1 / x) + rcp_error); }
}  // namespace ptx
"""

KERNEL = """
static const oxmoe::{parameters}* {name}_p;
extern "C" void {name}(const oxmoe::{parameters}* p, uint32_t grid, uint64_t seed) {{
    using Kernel = oxmoe::{kernel};
    static_assert(Kernel::kSharedBytes <= sizeof oxmoe::shared);
    {name}_p = p;
    launch([] {{ Kernel::run(*{name}_p); }}, Kernel::kThreads, grid, seed);
}}
"""


def operands(text: str) -> list[str]:
    """Returns the expressions of `"constraint"(expression), ...`."""
    found, depth, start = [], 0, 0
    for i, character in enumerate(text):
        if character == "(":
            depth += 1
            start = i + 1 if depth == 1 else start
        elif character == ")":
            depth -= 1
            if depth == 0:
                found.append(text[start:i])
    return found


def without_asm(text: str) -> str:
    """Replaces `asm("op %0, %1;" : "=r"(a) : "r"(b))` by `::ptx::op(a, b)`; several instructions become one name."""
    out, end = [], 0
    for match in re.finditer(r"\basm(?: volatile)?\s*\(", text):
        # Sections end at colons outside of strings and parentheses.
        sections, depth, quoted, i = [""], 1, False, match.end()
        while depth:
            c = text[i]
            if c == '"' and text[i - 1] != "\\":
                quoted = not quoted
            depth += 0 if quoted else (c == "(") - (c == ")")
            if c == ":" and depth == 1 and not quoted:
                sections.append("")
            elif depth:
                sections[-1] += c
            i += 1
        template = "".join(re.findall(r'"((?:[^"\\]|\\.)*)"', sections[0])).replace("\\n", ";")
        lines = [line.strip(" {}") for line in template.split(";")]
        names = [re.sub(r"\W", "_", line.split()[0]) for line in lines if line.split() and not line.startswith(".reg")]
        values = [value for section in sections[1:3] for value in operands(section)]
        call = f"::ptx::{'_and_'.join(names)}({', '.join(values)})" if names else "(void)0"
        out.append(text[end : match.start()] + call)
        end = i
    return "".join([*out, text[end:]])


class HostCtas:
    """Compiles kernels for the host. `kernels`: name -> (struct with `run`, its parameters), as for `arch` (800:
    sm_80).

    `replaced`: (text, other text) for a GPU's operator that the host's does not equal."""

    def __init__(
        self,
        folder: Path,
        headers: list[str],
        kernels: dict[str, tuple[str, str]],
        arch: int,
        replaced: tuple[tuple[str, str], ...] = (),
    ) -> None:
        compiler = cxx()
        if compiler is None:
            pytest.skip("no C++ compiler")
        write_parameter_headers(folder)
        for name in ("cuda_bf16.h", "cuda_fp16.h"):
            (folder / name).write_text("")
        found: set[str] = set()
        for path in (ROOT / "csrc").glob("*/*.cuh"):
            copy = folder / path.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            # Threads take turns, and so do CTAs: the process holds what a CTA shares.
            text = re.sub(r"(?<!extern )__shared__", "static", without_asm(path.read_text()))
            for old, new in replaced:
                found.update([old] if old in text else [])
                text = text.replace(old, new)
            copy.write_text(text)
        assert found == {old for old, _ in replaced}, "csrc has other text"
        source = folder / "kernels.cpp"
        entries = [
            KERNEL.format(name=name, kernel=kernel, parameters=parameters)
            for name, (kernel, parameters) in kernels.items()
        ]
        includes = [f'#include "{folder / "csrc" / header}"' for header in headers]
        source.write_text("\n".join([NUMBERS, PRELUDE, *includes, *entries]))
        flags = ["-std=c++17", "-O1", "-ffp-contract=off", "-w", *JUMPS, f"-DARCH={arch}", f"-I{folder}"]
        library = compiled(compiler, flags, source)
        self.library, self.kernels = ctypes.CDLL(str(library)), kernels

    def run(self, name: str, grid: int, seed: int, **parameters: Any) -> None:
        struct = STRUCTS[self.kernels[name][1]](**parameters)
        getattr(self.library, name)(ctypes.byref(struct), ctypes.c_uint32(grid), ctypes.c_uint64(seed))
