"""Hopper's 16-bit and fp8 GEMMs on the host (host_hopper.py), one launch or several at once."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

from torch import Tensor

from fake_cuda.harness import STRUCTS
from host_hopper import base, body, build

ENTRY = """
using oxmoe::GroupedGemmParams;
using oxmoe::OrderedGemmParams;
using oxmoe::__nv_bfloat16;
static std::vector<Launch> launches;
template <typename>
constexpr bool kIsCut = false;
template <bool Gated, int Stages>
constexpr bool kIsCut<oxmoe::GroupedGemmFp8WideSm90<Gated, Stages, true>> = true;
// The dimensions of a weights' map, as src/moe/weight_maps.rs has them.
template <typename Kernel>
static std::vector<Dim> dims_of(const GroupedGemmParams& p, int64_t experts, int64_t rows) {
    if constexpr (requires { Kernel::kPaired; }) {
        const bool split = Kernel::kGated && p.layout != oxmoe::W13Layout::Interleaved;
        const int slices = Kernel::kRows / 16;
        if (Kernel::kPaired && split)
            return {{8, 2, 8}, {2, 1, 1}, {2, rows / 2, 2}, {(2 * experts - 1) * rows / 32, 16, 4}};
        if (Kernel::kPaired) return {{8, 4, 8}, {2, 2, 1}, {2, 1, 2}, {experts * rows / 32, 32, 4}};
        if (!Kernel::kGated) return {{8, 1, 8}, {2, 8, 2}, {rows / 16, 16, slices}, {experts, rows, 1}};
        if (split) return {{8, 1, 8}, {2, rows / 2, 2}, {rows / 16, 8, slices}, {experts, rows, 1}};
        return {{8, 2, 8}, {2, 1, 2}, {rows / 16, 16, slices}, {experts, rows, 1}};
    } else if constexpr (requires { Kernel::kQuantises; }) {
        return dims_of<typename Kernel::Base>(p, experts, rows);
    } else if constexpr (kIsCut<Kernel>) {
        const int64_t parts = Kernel::Base::kGated ? 2 : 1, own = rows / parts;
        return {{2, 1, 2}, {own / 8, 8, 4}, {4, 2, 4}, {parts * experts, own, 1}};
    } else {
        return {{2, 1, 2}, {4, 8, 4}, {4, 2, 4}, {experts * rows / 32, 32, 4}};
    }
}
template <typename Kernel>
static void add(const OrderedGemmParams* p, int64_t width, int64_t experts, int64_t rows, int64_t places,
                uint32_t grid) {
    static_assert(sizeof(typename Kernel::Shared) <= 227 << 10);
    const GroupedGemmParams& gemm = p->gemm;
    const CUtensorMap tokens{gemm.x, gemm.k * 2, places};
    const CUtensorMap map{gemm.weights, width, experts * rows, dims_of<Kernel>(gemm, experts, rows)};
    rows_may_end |= gemm.k % 64 != 0;
    const auto run = [p, map, tokens] {
        if constexpr (requires { Kernel::kBoxBytes; }) Kernel::run(map, tokens, *p);
        else Kernel::run(map, p->gemm);
    };
    launches.push_back({grid, Kernel::kThreads, run});
}
extern "C" const char* run_all(uint32_t seed) {
    launch(std::exchange(launches, {}), seed);
    return failure.c_str();
}
#define KERNEL(name, ...) \\
    extern "C" void name(const OrderedGemmParams* p, int64_t width, int64_t experts, int64_t rows, int64_t places, \\
                         uint32_t grid) { \\
        add<oxmoe::__VA_ARGS__>(p, width, experts, rows, places, grid); \\
    }
"""


class HostGemms:
    """Compiles GEMMs for the host. `kernels`: name -> struct of csrc/moe/, with its template's arguments. `changed`:
    (text of csrc/, another one) for kernels with a fault."""

    def __init__(self, folder: Path, kernels: dict[str, str], *changed: tuple[str, str]) -> None:
        kinds = ("", "wide_", "wide_cut_", "ordered_", "stationary_")
        fp8 = "".join(body(f"moe/grouped_gemm_fp8_{kind}sm90") for kind in kinds)
        shared = ("common/narrow", "common/fp8", "gemm/pipeline", "gemm/multiply", "gemm/promote", "moe/fp8_block_sm90")
        text = base() + "".join(map(body, shared)) + fp8
        for old, new in changed:
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        entries = (f"KERNEL({name}, {kernel})\n" for name, kernel in kernels.items())
        self.library = build(folder, text, ENTRY + "".join(entries))
        self.library.run_all.restype = ctypes.c_char_p
        self.parameters: list[Any] = []

    def add(
        self, name: str, weights: Tensor, places: int, strides: dict[str, int], grid: int, **parameters: Any
    ) -> None:
        """Adds a launch. weights: [experts, rows, k]. x has a row for each place if rows lie in the order of places.
        `rows` and `k` may be more than the tensor has."""
        parameters = {"rows": weights.shape[1], **parameters}
        gemm = STRUCTS["GroupedGemmParams"](weights=weights.data_ptr(), **parameters)
        self.parameters.append(STRUCTS["OrderedGemmParams"](gemm=gemm, **strides))
        experts, rows, columns = weights.shape
        sizes = map(ctypes.c_int64, (columns * weights.itemsize, experts, rows, places))
        getattr(self.library, name)(ctypes.byref(self.parameters[-1]), *sizes, ctypes.c_uint32(grid))

    def run(self, seed: int) -> None:
        """Runs all launches that were added, at once."""
        failure = self.library.run_all(ctypes.c_uint32(seed)).decode()
        self.parameters.clear()
        assert not failure, failure
