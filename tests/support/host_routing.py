"""The routing kernels on the host (host_hopper.py): top-k, sort, schedules and combine, with clusters of CTAs.

All CTAs of all launches are there at once, but some begin when nobody else can go on. What CTAs of a cluster send each
other arrives at any time before the mailbox opens.
"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any

from host_hopper import body, build
from host_layers import ROUTING

PRELUDE = r"""
template <typename T, int Place>
static T& of_cta() { return *reinterpret_cast<T*>(shared_memory() + (Place << 16)); }

namespace oxmoe {
static __half __float2half(float) { REQUIRE(!"f16"); return {}; }
static __nv_bfloat16 __float2bfloat16(float value) { return {uint16_t(to_bf16(value))}; }

namespace cluster {
class Mailbox {
    uint64_t* barrier_;

public:
    explicit Mailbox(void* barrier) : barrier_(static_cast<uint64_t*>(barrier)) {}
    void open(uint32_t bytes) const {
        sm90::barrier_init(barrier_, 1);
        sm90::barrier_arrive_expect(barrier_, bytes);
    }
    void send(uint4* local, int rank, const uint4& value) const {
        REQUIRE(sm90::shared_address(local) % 16 == 0 && rank < size());
        uint8_t* there = ctas[first() + rank].shared;
        const uint32_t to = sm90::shared_address(local), box = sm90::shared_address(barrier_);
        arrivals.push_back([=] {
            memcpy(there + to, &value, 16);
            sm90::barrier_change(reinterpret_cast<uint64_t*>(there + box), 0, -16);
        });
    }
    void receive() const { sm90::barrier_wait(barrier_, 0); }
};
}  // namespace cluster
}  // namespace oxmoe
"""

# No kernel of these polls for results.
ABSENT = r"""
namespace ptx {
template <typename... T>
static void st_relaxed_gpu_global_v4_u32(const T&...) { REQUIRE(!"a mark"); }
template <typename... T>
static void setp_ne_b32_and_cvt_u16_u32_and__now(const T&...) { REQUIRE(!"a result that is polled for"); }
template <typename... T>
static void ld_relaxed_gpu_global_u32(const T&...) { REQUIRE(!"a poll"); }
template <typename... T>
static void ld_relaxed_gpu_global_v4_u32(const T&...) { REQUIRE(!"a poll"); }
}  // namespace ptx
"""

ENTRY = r"""
using namespace oxmoe;
static std::vector<Launch> launches;
template <typename Run>
static void add(uint32_t grid, uint32_t threads, uint32_t cluster, Run run) {
    launches.push_back({grid, threads, [=] { begin(), run(); }, cluster});
}
extern "C" const char* run_all(uint32_t seed) {
    uint32_t ctas = 0;
    for (const Launch& one : launches) ctas += one.grid;
    begin_any_order(ctas, seed);
    launch(std::exchange(launches, {}), seed);
    return failure.c_str();
}
#define KERNEL(name, parameters, ...) \
    extern "C" void name(const parameters* p, uint32_t grid, uint32_t threads, uint32_t cluster) { \
        add(grid, threads, cluster, [p = *p] { oxmoe::__VA_ARGS__::run(p); }); \
    }
#define SELECT(name, ...) \
    extern "C" void name(const SelectParams* select, const RouteParams* route, uint32_t grid, uint32_t threads, \
                         uint32_t cluster) { \
        add(grid, threads, cluster, [s = *select, r = *route] { oxmoe::__VA_ARGS__::run(s, r); }); \
    }
KERNEL(route_given, RouteParams, Route<0, true>)
KERNEL(histogram, RouteParams, Histogram)
KERNEL(place_given, RouteParams, Place<false>)
KERNEL(place_chosen, RouteParams, Place<true>)
KERNEL(schedule, ScheduleParams, RowSchedule)
KERNEL(ragged, RaggedParams, Ragged)
KERNEL(combine, CombineParams, Combine<__nv_bfloat16>)
"""


def static_memory(text: str) -> str:
    """Gives each static array in shared memory its place in the CTA's memory."""
    places = iter(range(1, 4))
    declared = r"__shared__ (\w+) (\w+)((?:\[[^\]]*\])+);"
    return re.sub(declared, lambda m: f"auto& {m[2]} = of_cta<{m[1]}{m[3]}, {next(places)}>();", text)


class HostRouting:
    """Compiles the routing kernels for the host. A top-k warp's lanes hold any of `experts_per_lane` experts."""

    def __init__(self, folder: Path, experts_per_lane: tuple[int, ...]) -> None:
        words = "extern __shared__ __align__(16) uint32_t routing_shared[];"
        sort = body("moe/slot_sort")
        assert words in sort
        sort = sort.replace(words, "auto* const routing_shared = reinterpret_cast<uint32_t*>(shared_memory());")
        schedule = re.sub(r"\bSchedule\b", "RowSchedule", static_memory(body("moe/schedule")))
        files = [
            body("common/absent"),
            body("moe/tile_cut"),
            sort,
            *map(body, ("moe/select", "moe/place", "moe/route")),
        ]
        files += [body("moe/combine"), static_memory(body("moe/ragged")), schedule]
        entries = "".join(
            f"SELECT({kind}_e{count}{'' if plain else '_any'}, {kind.title()}<{count}, {str(plain).lower()}>)\n"
            for kind in ("select", "route")
            for count in experts_per_lane
            for plain in (True, False)
        )
        self.library = build(folder, ROUTING + PRELUDE + ABSENT + "".join(files), ENTRY + entries)
        self.library.run_all.restype = ctypes.c_char_p

    def add(self, name: str, *parameters: Any, grid: int, threads: int, cluster: int = 1) -> None:
        """Adds a launch with the structs of its parameters."""
        sizes = map(ctypes.c_uint32, (grid, threads, cluster))
        getattr(self.library, name)(*map(ctypes.byref, parameters), *sizes)

    def run(self, seed: int) -> None:
        """Runs all launches that were added."""
        failure = self.library.run_all(ctypes.c_uint32(seed)).decode()
        assert not failure, failure
