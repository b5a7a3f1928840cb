"""Routing inside the layers in one launch (csrc/moe/few_slots.cuh) on the host, a thread a fiber."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fake_cuda.harness import STRUCTS
from host_cta import HostCtas
from host_topk import WRAPPER as SELECT

# Most slots of csrc/moe/few_slots.cuh.
SLOTS = 64

# (most experts, whether the router is plain, threads that route), as src/variants/forms.rs and layer.rs have them.
KERNELS = {"e128": (128, True, 256), "e128_packed": (128, True, 384), "e384_any": (384, False, 256)}

# Operators of bytes and halves, the barrier of a part of a CTA, and a kernel that writes its tables to `counters`:
# the number of tiles; expert, first place and places of each; place, then weight, of each slot; each place's slot.
WRAPPER = (
    SELECT
    + """
#define __noinline__
template <int kBits, typename Compare>
static uint32_t each_part(uint32_t a, uint32_t b, Compare compare) {
    const uint32_t mask = (1u << kBits) - 1;
    uint32_t result = 0;
    for (int i = 0; i < 32; i += kBits)
        if (compare(a >> i & mask, b >> i & mask)) result |= mask << i;
    return result;
}
static uint32_t __vcmpeq4(uint32_t a, uint32_t b) { return each_part<8>(a, b, std::equal_to<>()); }
static uint32_t __vcmpltu4(uint32_t a, uint32_t b) { return each_part<8>(a, b, std::less<>()); }
static uint32_t __vcmpeq2(uint32_t a, uint32_t b) { return each_part<16>(a, b, std::equal_to<>()); }
static uint32_t __vcmpltu2(uint32_t a, uint32_t b) { return each_part<16>(a, b, std::less<>()); }
static uint32_t __match_any_sync(uint32_t, int value) {
    const auto all = exchange(value);
    uint32_t same = 0;
    for (int i = 0; i < 32; ++i) same |= uint32_t(int(all[i][0]) == value) << i;
    return same;
}
namespace oxmoe::sm90 {
static Barrier routing;
static void named_barrier(int, int threads) { routing.meet(threads); }
}
#include "csrc/moe/few_slots.cuh"
namespace oxmoe {
template <int kMostExperts, bool kPlain, int kRoute>
struct HostFewSlots {
    using Slots = FewSlotsOf<kMostExperts>;
    static constexpr int kThreads = kRoute + 64, kSharedBytes = sizeof(Slots);
    static void run(const RoutedLayerParams& p) {
        Slots& slots = *reinterpret_cast<Slots*>(shared);
        slots.clear();
        __syncthreads();
        if (threadIdx.x < kRoute) slots.template route<kRoute, kPlain>(p);
        __syncthreads();
        if (threadIdx.x) return;
        int32_t* out = p.counters;
        *out++ = slots.tile_count();
        for (int i = 0; i < slots.tile_count(); ++i, out += 3) {
            const Tile tile = slots.tile(i);
            out[0] = tile.expert, out[1] = tile.first, out[2] = tile.count;
        }
        const int count = p.select.tokens * p.select.top_k;
        for (int i = 0; i < count; ++i) *out++ = slots.place(i);
        memcpy(out, slots.weight, 4 * count), out += count;
        for (int i = 0; i < count; ++i) *out++ = slots.slot_of_place[i];
    }
};
}
"""
)


@dataclass
class Tables:
    """The tables of one CTA. Slots without an expert have the place -1."""

    tiles: list[tuple[int, int, int]]
    places: list[int]
    weights: Tensor
    slots: list[int]


class HostFewSlots(HostCtas):
    def __init__(self, folder: Path) -> None:
        wrapper = folder / "host_few_slots.cuh"
        wrapper.write_text(WRAPPER)
        kernels = {
            name: (f"HostFewSlots<{most}, {str(plain).lower()}, {threads}>", "RoutedLayerParams")
            for name, (most, plain, threads) in KERNELS.items()
        }
        # The sum makes every NaN the positive one on GPUs. The wrapper has the barrier of sm90.cuh.
        replaced = (
            (" = __float_as_uint(value + 0.0f)", " = __float_as_uint(__fadd_rn(value, 0.0f))"),
            ('#include "../common/sm90.cuh"\n#include "select.cuh"', '#include "select.cuh"'),
        )
        super().__init__(folder, [str(wrapper)], kernels, 900, replaced)

    def route(self, name: str, select: dict[str, Any], seed: int, **options: Any) -> Tables:
        """Runs one CTA. `select` has fields of SelectParams, and `options` fields of RoutedLayerParams."""
        count = select["tokens"] * select["top_k"]
        out = torch.full((1 + 3 * SLOTS + 3 * count,), -77, dtype=torch.int32)
        self.run(name, 1, seed, select=STRUCTS["SelectParams"](**select), counters=out.data_ptr(), **options)
        found = out.tolist()
        tiles = [tuple(found[1 + 3 * i : 4 + 3 * i]) for i in range(found[0])]
        first = 1 + 3 * len(tiles)
        weights = out[first + count : first + 2 * count].view(torch.float32)
        slots = found[first + 2 * count : first + 3 * count]
        return Tables(tiles, found[first : first + count], weights, slots)  # type: ignore[arg-type]
