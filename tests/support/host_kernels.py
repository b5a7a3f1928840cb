"""Kernels of csrc/ compiled for the host, for tests of their arithmetic and addresses without a GPU.

A warp's 32 threads run side by side, and warps and CTAs one after the other. That suffices for kernels that exchange
values by shuffles alone.
"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any

import pytest

from fake_cuda.harness import STRUCTS
from host_build import compiled, cxx

ROOT = Path(__file__).parents[2]
PARAMETERS = ("common", "allreduce", "moe", "nvfp4", "pack", "quant", "dense", "tiles")
TYPES = {
    "bool": "bool",
    "i32": "int32_t",
    "u32": "uint32_t",
    "i64": "int64_t",
    "u64": "uint64_t",
    "f32": "float",
    "u8": "uint8_t",
}

PRELUDE = r"""
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <pthread.h>
#include <thread>
#include <vector>
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__
using std::max;
using std::min;
struct uint2 { uint32_t x, y; };
struct alignas(16) uint4 { uint32_t x, y, z, w; };
static uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
static uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
    const uint64_t bytes = uint64_t(b) << 32 | a;
    uint32_t result = 0;
    for (int i = 0; i < 4; ++i) result |= uint32_t(bytes >> 8 * (selector >> 4 * i & 7) & 0xFF) << 8 * i;
    return result;
}
[[maybe_unused]] static uint32_t __vmaxu2(uint32_t a, uint32_t b) {
    return max(a & 0xFFFF, b & 0xFFFF) | max(a >> 16, b >> 16) << 16;
}
static float __uint_as_float(uint32_t bits) { float x; memcpy(&x, &bits, 4); return x; }
static uint32_t __float_as_uint(float x) { uint32_t bits; memcpy(&bits, &x, 4); return bits; }
static float __fdiv_rn(float a, float b) { return a / b; }
static float __fmul_rn(float a, float b) { return a * b; }
static float __fadd_rn(float a, float b) { return a + b; }
struct Index { uint32_t x; };
static thread_local Index threadIdx;
static Index blockIdx;
[[maybe_unused]] static Index gridDim;
static pthread_barrier_t warp;
static uint32_t exchanged[32];
static uint32_t __shfl_xor_sync(uint32_t, uint32_t value, int lanes) {
    exchanged[threadIdx.x % 32] = value;
    pthread_barrier_wait(&warp);
    const uint32_t other = exchanged[(threadIdx.x ^ lanes) % 32];
    pthread_barrier_wait(&warp);
    return other;
}
"""

# Parts of these headers that kernels use; conversions round to nearest even.
HEADERS = {
    "cuda_bf16.h": r"""
#pragma once
struct __nv_bfloat162 { uint32_t bits; };
static uint32_t bf16_bits(float value) {
    const uint32_t bits = __float_as_uint(value);
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}
static __nv_bfloat162 __floats2bfloat162_rn(float low, float high) { return {bf16_bits(low) | bf16_bits(high) << 16}; }
""",
    "cuda_fp16.h": r"""
#pragma once
struct __half { uint16_t bits; };
struct __half2 { uint32_t bits; };
static __half __ushort_as_half(uint16_t bits) { return {bits}; }
static float __half2float(__half half) {
    const uint32_t sign = (half.bits & 0x8000u) << 16, rest = half.bits & 0x7FFF;
    if (rest > 0x7C00) return __uint_as_float(0x7FFFFFFF);  // as GPUs do
    if (rest == 0x7C00) return __uint_as_float(sign | 0x7F800000);
    return __uint_as_float(sign | __float_as_uint(__uint_as_float(rest << 13) * __uint_as_float(0x77800000)));
}
static uint32_t half_bits(float value) {
    const uint32_t sign = __float_as_uint(value) >> 16 & 0x8000, bits = __float_as_uint(value) & 0x7FFFFFFF;
    if (bits < 0x38800000) return sign | uint32_t(nearbyintf(__uint_as_float(bits) * 0x1p24f));
    return sign | (bits - 0x38000000 + 0xFFF + (bits >> 13 & 1)) >> 13;
}
static __half2 __floats2half2_rn(float low, float high) { return {half_bits(low) | half_bits(high) << 16}; }
""",
}

KERNEL = """
extern "C" void {name}(const oxmoe::{parameters}* p, uint32_t grid, bool together) {{
    constexpr uint32_t threads = oxmoe::{kernel}::kThreads;
    if (!together) {{
        for (blockIdx.x = 0; blockIdx.x < grid; ++blockIdx.x)
            for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) oxmoe::{kernel}::run(*p);
        return;
    }}
    // 32 threads run one warp after the other, since starting threads takes longer than a warp does.
    pthread_barrier_init(&warp, nullptr, 32);
    std::vector<std::thread> lanes;
    for (uint32_t lane = 0; lane < 32; ++lane)
        lanes.emplace_back([=] {{
            for (uint32_t unit = 0; unit < grid * (threads / 32); ++unit) {{
                pthread_barrier_wait(&warp);
                if (lane == 0) blockIdx.x = unit / (threads / 32);
                threadIdx.x = unit % (threads / 32) * 32 + lane;
                pthread_barrier_wait(&warp);
                oxmoe::{kernel}::run(*p);
            }}
        }});
    for (auto& lane : lanes) lane.join();
    pthread_barrier_destroy(&warp);
}}
"""


def parameter_header() -> str:
    """Returns the headers of src/params/ in one, as cxx writes them."""
    text = "".join((ROOT / "src" / "params" / f"{name}.rs").read_text() for name in PARAMETERS)
    out = ["#pragma once", "#include <cstdint>", "namespace oxmoe {"]
    kinds = dict(TYPES)
    for name, body in re.findall(r"enum (\w+) \{\n(.*?)\n    \}", text, re.DOTALL):
        kinds[name] = name
        members = re.findall(r"^        (\w+ = \d+),$", body, re.MULTILINE)
        out.append(f"enum class {name} : int32_t {{ {', '.join(members)} }};")
    for name, body in re.findall(r"struct (\w+) \{\n(.*?)\n    \}", text, re.DOTALL):
        kinds[name] = name
        fields = []
        for field, kind in re.findall(r"^        (\w+): (.+?),$", body, re.MULTILINE):
            mutable, constant = kind.removeprefix("*mut "), kind.removeprefix("*const ")
            if kind != mutable:
                fields.append(f"{kinds[mutable]}* {field};")
            else:
                fields.append(f"{'const ' * (kind != constant)}{kinds[constant]}{'*' * (kind != constant)} {field};")
        out.append(f"struct {name} {{ {' '.join(fields)} }};")
    return "\n".join([*out, "}"])


def write_parameter_headers(folder: Path) -> None:
    """Writes every header that kernels may include; all have the same text."""
    (folder / "oxmoe" / "src" / "params").mkdir(parents=True)
    for name in PARAMETERS:
        (folder / "oxmoe" / "src" / "params" / f"{name}.rs.h").write_text('#include "all.h"\n')
    (folder / "oxmoe" / "src" / "params" / "all.h").write_text(parameter_header())


class HostKernels:
    """Kernels compiled for the host. `kernels`: name -> (struct with `run`, its parameters)."""

    def __init__(self, folder: Path, header: str, kernels: dict[str, tuple[str, str]]) -> None:
        compiler = cxx()
        if compiler is None:
            pytest.skip("no C++ compiler")
        write_parameter_headers(folder)
        for name, text in HEADERS.items():
            (folder / name).write_text(text)
        source = folder / "kernels.cpp"
        entries = [
            KERNEL.format(name=name, kernel=kernel, parameters=parameters)
            for name, (kernel, parameters) in kernels.items()
        ]
        source.write_text("\n".join([PRELUDE, f'#include "{ROOT / "csrc" / header}"', *entries]))
        # NOTE: products and sums are rounded one by one here; a kernel must not leave the choice to its compiler.
        flags = ["-std=c++17", "-O1", "-ffp-contract=off", "-Wall", "-Wno-unknown-pragmas", "-pthread", f"-I{folder}"]
        library = compiled(compiler, flags, source)
        self.library, self.kernels = ctypes.CDLL(str(library)), kernels

    def run(self, name: str, grid: int, together: bool = False, **parameters: Any) -> None:
        """Runs a kernel. `together`: lanes of a warp exchange values."""
        struct = STRUCTS[self.kernels[name][1]](**parameters)
        getattr(self.library, name)(ctypes.byref(struct), ctypes.c_uint32(grid), ctypes.c_bool(together))
