"""Layers of few tokens in one launch, and packed GEMMs, on the host (host_hopper.py): several launches at a time.

All CTAs of all launches are there at once, but some begin when nobody else can go on. A launch waits at `pdl::wait` for
those before it, whose rows and counters it finds. Stores of results and marks are on their way for a while after a
thread has made them. A release brings the stores that its CTA has made before.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from host_hopper import base, body, build

# Routing uses these functions beside host_hopper.py's. Some CTAs begin late, and copies arrive at any time.
ROUTING = r"""
#define __CUDACC__
#define __CUDA_ARCH__ 900
#define __shared__
#define __noinline__
struct uint2 { uint32_t x, y; };
struct alignas(16) int4 { int x, y, z, w; };
static int2 make_int2(int x, int y) { return {x, y}; }
static int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
static uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
static uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
template <typename T>
static T __ldcg(const T* from) { return *from; }
static int __popc(uint32_t x) { return __builtin_popcount(x); }
static float __fdividef(float a, float b) { return a / b; }
static uint32_t atomicAdd(uint32_t* to, uint32_t value) { return std::exchange(*to, *to + value); }
static uint32_t atomicOr(uint32_t* to, uint32_t value) { return std::exchange(*to, *to | value); }
static uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
    const uint64_t bytes = uint64_t(b) << 32 | a;
    uint32_t result = 0;
    for (int i = 0; i < 4; ++i) result |= uint32_t(bytes >> 8 * (selector >> 4 * i & 7) & 0xFF) << 8 * i;
    return result;
}
static uint32_t __funnelshift_l(uint32_t low, uint32_t high, int n) {
    return uint32_t((uint64_t(high) << 32 | low) << (n & 31) >> 32);
}
template <int Bits, typename Function>
static uint32_t parts(uint32_t a, uint32_t b, Function function) {
    constexpr uint32_t mask = (1u << Bits) - 1;
    uint32_t result = 0;
    for (int i = 0; i < 32; i += Bits) result |= (function(a >> i & mask, b >> i & mask) & mask) << i;
    return result;
}
static uint32_t __vminu2(uint32_t a, uint32_t b) { return parts<16>(a, b, [](auto x, auto y) { return min(x, y); }); }
static uint32_t __vmaxu2(uint32_t a, uint32_t b) { return parts<16>(a, b, [](auto x, auto y) { return max(x, y); }); }
#define COMPARES(name, bits, sign) \
    static uint32_t name(uint32_t a, uint32_t b) { \
        return parts<bits>(a, b, [](auto x, auto y) { return x sign y ? ~0u : 0u; }); \
    }
COMPARES(__vcmpeq4, 8, ==)
COMPARES(__vcmpeq2, 16, ==)
COMPARES(__vcmpltu4, 8, <)
COMPARES(__vcmpltu2, 16, <)
template <typename T>
static T __shfl_down_sync(uint32_t, T value, int distance) {
    const int lane = threadIdx.x % 32;
    return shuffle(value, lane + distance < 32 ? lane + distance : lane);
}
static uint8_t* __cvta_shared_to_generic(uint32_t address) { return shared_memory() + address; }
static bool __any_sync(uint32_t, bool value) { return __ballot_sync(0, value) != 0; }
static uint32_t __reduce_max_sync(uint32_t, uint32_t value) {
    const auto all = exchange(value);
    return *std::max_element(all.begin(), all.end());
}
static uint32_t __match_any_sync(uint32_t, int value) {
    const auto all = exchange(value);
    uint32_t same = 0;
    for (int lane = 0; lane < 32; ++lane) same |= uint32_t(all[lane] == value) << lane;
    return same;
}

// Stores that are on their way.
struct Store { uint32_t cta; uint8_t* to; uint32_t bytes; uint8_t value[16]; };
static std::vector<Store> stores;
template <typename Chosen>
static bool land(Chosen chosen) {
    const auto rest = std::stable_partition(stores.begin(), stores.end(), [&](auto& one) { return !chosen(one); });
    const bool any = rest != stores.end();
    for (auto store = rest; store != stores.end(); ++store) memcpy(store->to, store->value, store->bytes);
    stores.erase(rest, stores.end());
    return any;
}
// CTAs that begin when nobody else can go on.
static std::vector<uint32_t> late;
// Between rounds some stores and copies arrive; if nobody moved, more do, or a late CTA begins.
static bool between_rounds(bool nobody_moved, Chance& random) {
    const bool landed = land([&](const Store&) { return random.below(nobody_moved ? 2 : 64) == 0; });
    if (!arrivals.empty() && random.below(nobody_moved ? 2 : 16) == 0) {
        std::swap(arrivals[random.below(arrivals.size())], arrivals.back());
        std::exchange(arrivals.back(), nullptr)();
        arrivals.pop_back();
        return true;
    }
    if (landed || !nobody_moved || !stores.empty() || !arrivals.empty()) return landed || !stores.empty();
    if (late.empty()) return false;
    late.erase(late.begin() + random.below(late.size()));
    return true;
}
static void begin() {
    const auto waits = [cta = self->cta] { return std::find(late.begin(), late.end(), cta) != late.end(); };
    if (waits()) ::wait([=] { return !waits(); });
}
static void begin_any_order(uint32_t ctas, uint32_t seed) {
    Chance random{seed};
    stores.clear(), late.clear(), meanwhile = between_rounds;
    for (uint32_t cta = 0; cta < ctas; ++cta)
        if (random.below(3) == 0) late.push_back(cta);
}
namespace oxmoe {
static __half __ushort_as_half(uint16_t bits) { return {bits}; }
static float __half2float(__half) { REQUIRE(!"f16"); return 0; }
static float __bfloat162float(__nv_bfloat16 value) { return to_float(value); }
}  // namespace oxmoe
"""

# The layers' code uses this, too.
PRELUDE = r"""
static void land_own() { land([](const Store& store) { return store.cta == self->cta; }); }
template <typename T>
static void store_later(void* to, const T& value) {
    Store& store = stores.emplace_back(self->cta, static_cast<uint8_t*>(to), uint32_t(sizeof value));
    memcpy(store.value, &value, sizeof value);
}
// A word that is absent is read as it is, or when it has come: its reader would read it again and again.
static Chance chance{1};
template <typename T, typename Absent>
static T load_now_or_later(const T* from, Absent absent) {
    if (absent(*from) && chance.below(2)) ::wait([=] { return !absent(*from); });
    return *from;
}

namespace oxmoe {
struct __nv_bfloat162 { uint32_t bits; };
static __nv_bfloat162 __hmax2(__nv_bfloat162 a, __nv_bfloat162 b) {
    const auto larger = [](uint32_t x, uint32_t y) { return to_bf16(fmaxf(from_bf16(x), from_bf16(y))); };
    return {parts<16>(a.bits, b.bits, larger)};
}
namespace absent {
bool in(uint32_t pair);
bool in(const uint4& four);
}  // namespace absent
namespace counter {
inline void add_share(uint32_t* counter, uint32_t share) { land_own(), *counter += share; }
inline void wait_past(const uint32_t* counter, uint32_t value) {
    auto done = [=] { return int(*counter - value) >= 0; };
    if (!done()) ::wait(done);
}
}  // namespace counter
namespace sm90 {
inline void barrier_arrive(uint64_t* word, uint32_t count) { barrier_change(word, count, 0); }
inline void store_shared_16(uint32_t to, const uint4& value) {
    REQUIRE(to % 16 == 0);
    memcpy(shared_memory() + to, &value, 16), note_write(self->cta, shared_memory() + to, 16);
}
}  // namespace sm90
namespace sm80 {
template <int Words>
void load_shared(uint32_t (&words)[Words], uint32_t from) {
    REQUIRE(from % (4 * Words) == 0);
    memcpy(words, shared_memory() + from, 4 * Words);
}
inline void load_shared_16(uint32_t (&words)[4], uint32_t from) { load_shared(words, from); }
inline void load_shared_8(uint32_t (&words)[2], uint32_t from) { load_shared(words, from); }
inline uint32_t load_shared_4(uint32_t from) {
    uint32_t word[1];
    load_shared(word, from);
    return word[0];
}
inline void load_matrix_4(uint32_t (&tiles)[4], uint32_t row) {
    REQUIRE(row % 16 == 0);
    const auto rows = exchange(row);
    for (int tile = 0; tile < 4; ++tile)
        memcpy(&tiles[tile], shared_memory() + rows[8 * tile + threadIdx.x % 32 / 4] + threadIdx.x % 4 * 4, 4);
}
template <typename Element>
void multiply_add(float (&sums)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    struct Words { uint32_t of[6]; };
    const auto all = exchange(Words{{a[0], a[1], a[2], a[3], b0, b1}});
    const int g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
    for (int i = 0; i < 4; ++i) {
        double sum = sums[i];
        for (int k = 0; k < 16; ++k) {
            const int half = k / 8, lane = k / 2 % 4, shift = k % 2 * 16;
            const uint32_t row = all[g * 4 + lane].of[i / 2 + 2 * half];
            const uint32_t column = all[(2 * c + i % 2) * 4 + lane].of[4 + half];
            sum += double(from_bf16(row >> shift & 0xFFFF)) * from_bf16(column >> shift & 0xFFFF);
        }
        sums[i] = float(sum);
    }
}
}  // namespace sm80
}  // namespace oxmoe

namespace ptx {
static uint64_t* barrier_at(uint32_t address) { return reinterpret_cast<uint64_t*>(shared_memory() + address); }
static void again__and_mbarrier_try_wait_parity_shared__cta_b64_and___done(uint32_t barrier, uint32_t parity) {
    oxmoe::sm90::barrier_wait(barrier_at(barrier), parity);
}
static void mbarrier_arrive_shared__cta_b64(uint32_t barrier, uint32_t count) {
    oxmoe::sm90::barrier_change(barrier_at(barrier), count, 0);
}
// The only named barrier at which threads arrive without waiting is number 2.
static void bar_arrive(int threads) { join(ctas[self->cta].named[2], threads, nullptr); }
static void st_relaxed_gpu_global_v4_u32(void* to, uint32_t word) { store_later(to, uint4{word, word, word, word}); }
static void setp_ne_b32_and_cvt_u16_u32_and__now(void* to, uint32_t value, int now) {
    if (now) store_later(to, uint16_t(value));
}
static void ld_relaxed_gpu_global_u32(uint32_t& value, const uint32_t* from) {
    value = load_now_or_later(from, [](uint32_t pair) { return oxmoe::absent::in(pair); });
}
static void ld_relaxed_gpu_global_v4_u32(uint32_t& x, uint32_t& y, uint32_t& z, uint32_t& w, const uint4* from) {
    const uint4 value = load_now_or_later(from, [](const uint4& four) { return oxmoe::absent::in(four); });
    x = value.x, y = value.y, z = value.z, w = value.w;
}
static void st_shared_v2_u32(uint32_t to, uint32_t first, uint32_t second) {
    REQUIRE(to % 8 == 0);
    memcpy(shared_memory() + to, &first, 4), memcpy(shared_memory() + to + 4, &second, 4);
    note_write(self->cta, shared_memory() + to, 8);
}
static void mov_b32_and_mov_b32_and_mov_b32(uint32_t& low, uint32_t& high, uint32_t word) {
    low = (word & 0xFFFF) * 0x10001, high = (word >> 16) * 0x10001;
}
// Only the table 0xEA is used.
static void lop3_b32(uint32_t& r, uint32_t a, uint32_t b, uint32_t c) { r = (a & b) | c; }
template <typename Function>
static uint32_t pairs(uint32_t a, uint32_t b, uint32_t c, Function function) {
    uint32_t result = 0;
    for (int i = 0; i < 32; i += 16) {
        const float x = from_bf16(a >> i & 0xFFFF), y = from_bf16(b >> i & 0xFFFF), z = from_bf16(c >> i & 0xFFFF);
        result |= to_bf16(function(x, y, z)) << i;
    }
    return result;
}
static void fma_rn_bf16x2(uint32_t& r, uint32_t a, uint32_t b, uint32_t c) {
    r = pairs(a, b, c, [](float x, float y, float z) { return fmaf(x, y, z); });
}
#define PAIRS(name, result) \
    static void name(uint32_t& r, uint32_t a, uint32_t b) { \
        r = pairs(a, b, 0, [](float x, float y, float) { return result; }); \
    }
PAIRS(mul_rn_bf16x2, x * y)
PAIRS(add_rn_bf16x2, x + y)
PAIRS(sub_rn_bf16x2, x - y)
static void cvt_rn_satfinite_e4m3x2_f32(uint16_t& pair, float high, float low) {
    pair = to_e4m3(low) | to_e4m3(high) << 8;
}
static void max_bf16x2(uint32_t& r, uint32_t a, uint32_t b) {
    r = pairs(a, b, 0, [](float x, float y, float) { return fmaxf(x, y); });
}
}  // namespace ptx
"""

FILES = (
    "gemm/pipeline", "common/narrow", "common/fp8", "common/absent", "moe/tile_cut", "moe/slot_sort", "moe/select",
    "moe/combine", "moe/few_slots", "moe/layer_parts", "common/bf16_pairs", "common/mxfp4", "common/nvfp4_round",
    "common/nvfp4_packed", "common/int4", "common/mxfp8", "moe/layer_sm90", "moe/routed_layer_sm90",
    "moe/routed_layer_fp8_sm90", "moe/routed_layer_packed_sm90", "moe/packed_pipeline_sm90", "moe/pair_schedule_sm90",
    "moe/grouped_gemm_packed_sm90",
)  # fmt: skip

ENTRY = r"""
using namespace oxmoe;
static std::vector<Launch> launches;
static CUtensorMap map_of(const GroupedGemmParams& p, bool gated, int64_t experts, int64_t width, int slices = 4) {
    const int64_t rows = p.rows;
    CUtensorMap map{p.weights, width, experts * rows, {}};
    map.dims = {{8, 1, 8}, {2, 8, 2}, {rows / 16, 16, slices}, {experts, rows, 1}};
    if (gated) map.dims = {{8, 1, 8}, {2, rows / 2, 2}, {rows / 16, 8, slices}, {experts, rows, 1}};
    return map;
}
template <typename Kernel>
static void add(const RoutedLayerParams* params, uint32_t grid) {
    static_assert(Kernel::kSharedBytes <= 227 << 10);
    const RoutedLayerParams p = *params;
    const auto run = [=, up = map_of(p.layer.up, Kernel::Up::kGated, p.experts, p.layer.up.k * 2),
                      down = map_of(p.layer.down, false, p.experts, p.layer.down.k * 2)] {
        begin();
        if constexpr (requires { Kernel::run(p); }) Kernel::run(p);
        else if constexpr (requires { Kernel::run(up, down, p); }) Kernel::run(up, down, p);
        else Kernel::run(up, down, p.layer);
        land_own();
    };
    launches.push_back({grid, Kernel::kThreads, run});
}
extern "C" const char* run_all(uint32_t seed) {
    uint32_t ctas = 0;
    for (const Launch& one : launches) ctas += one.grid;
    rows_may_end = true, chance = {seed};
    begin_any_order(ctas, seed);
    launch(std::exchange(launches, {}), seed);
    return failure.c_str();
}

// Codes and scales of a block of 64 x 64, in the words of thread `thread`; padding has no code and no scale.
struct Mxfp4 {
    static constexpr int kScaled = 32, kScaleBytes = 128, kStepWords = 1;
    static uint32_t place(uint32_t code, uint32_t scale, int reg, int half) {
        return mxfp4::place(scale ? code : 0, reg, half);
    }
    static void scales(uint32_t* to, const uint16_t (&of)[2][4]) {
        const auto field = [&](int half, int step) {
            return of[half][step] ? mxfp4::scale_field(of[half][step], 0) : 0u;
        };
        *to = mxfp4::place_scales(field(0, 0), field(1, 0), field(0, 2), field(1, 2));
    }
};
// The first word of a step has the codes of registers 0 and 1, the second those of registers 2 and 3.
struct Mxfp8 {
    static constexpr int kScaled = 32, kScaleBytes = 128, kStepWords = 2;
    static uint32_t place(uint32_t code, uint32_t, int reg, int half) { return mxfp8::place(code, reg, half); }
    static void scales(uint32_t* to, const uint16_t (&of)[2][4]) {
        const auto field = [&](int half, int step) { return mxfp8::scale_field(of[half][step], 0); };
        *to = mxfp4::place_scales(field(0, 0), field(1, 0), field(0, 2), field(1, 2));
    }
};
struct Nvfp4 {
    static constexpr int kScaled = 16, kScaleBytes = 256, kStepWords = 1;
    static uint32_t place(uint32_t code, uint32_t scale, int reg, int half) {
        return mxfp4::place(scale ? code : 0, reg, half);
    }
    static void scales(uint32_t* to, const uint16_t (&of)[2][4]) {
        const auto byte = [&](int half, int step) { return nvfp4::scale_byte(of[half][step]); };
        for (int i = 0; i < 2; ++i)
            to[i] = nvfp4::place_scales(byte(0, 2 * i), byte(1, 2 * i), byte(0, 2 * i + 1), byte(1, 2 * i + 1));
    }
};
struct Int4 {
    static constexpr int kScaled = 32, kScaleBytes = 256, kStepWords = 1;
    static uint32_t place(uint32_t code, uint32_t, int reg, int half) { return int4::place(code, reg, half); }
    static void scales(uint32_t* to, const uint16_t (&of)[2][4]) {
        for (int i = 0; i < 2; ++i) to[i] = of[0][2 * i] | uint32_t(of[1][2 * i]) << 16;
    }
};
// Packs codes, one a byte, [experts, rows, k], and scales, one a word, [experts, rows, k / kScaled].
template <typename Form>
static void pack(const uint8_t* codes, const uint16_t* scales, int experts, int rows, int k, bool gated,
                 uint8_t* packed, uint8_t* packed_scales) {
    const int row_tiles = (rows + 63) / 64, k_blocks = (k + 63) / 64;
    for (int block = 0; block < experts * row_tiles * k_blocks; ++block) {
        const int expert = block / (row_tiles * k_blocks), row_tile = block / k_blocks % row_tiles;
        const int k_block = block % k_blocks;
        for (int thread = 0; thread < 128; ++thread) {
            const int slice = 4 * row_tile + thread / 32, g = thread % 32 / 4, c = thread % 4;
            uint32_t words[4 * Form::kStepWords] = {};
            uint16_t own[2][4] = {};
            for (int half = 0; half < 2; ++half) {
                const int row = gated ? half * rows / 2 + 8 * slice + g : 16 * slice + 8 * half + g;
                const bool inside = gated ? 8 * slice + g < rows / 2 : row < rows;
                for (int step = 0; step < 4; ++step) {
                    const int64_t at = int64_t(expert) * rows + row;
                    const int first = 64 * k_block + 16 * step;
                    const bool real = inside && first < k;
                    if (real) own[half][step] = scales[at * (k / Form::kScaled) + first / Form::kScaled];
                    for (int i = 0; i < 4; ++i) {
                        const int column = first + 2 * c + i % 2 + i / 2 * 8;
                        const uint32_t code = real ? codes[at * k + column] : std::is_same_v<Form, Int4> ? 8 : 0;
                        uint32_t& word = words[step * Form::kStepWords + i / 2 * (Form::kStepWords - 1)];
                        word |= Form::place(code, own[half][step], half + i / 2 * 2, i % 2);
                    }
                }
            }
            // A part of a block's codes has 16 bytes of each thread.
            for (int part = 0; part < Form::kStepWords; ++part)
                memcpy(packed + (int64_t(block) * Form::kStepWords + part) * 2048 + thread * 16, words + 4 * part, 16);
            if (c == 0)
                Form::scales(reinterpret_cast<uint32_t*>(packed_scales + int64_t(block) * Form::kScaleBytes +
                                                         thread / 4 * (Form::kScaleBytes / 32)), own);
        }
    }
}
#define PACK(name, form) \
    extern "C" void pack_##name(const uint8_t* codes, const uint16_t* scales, int experts, int rows, int k, \
                                bool gated, uint8_t* packed, uint8_t* packed_scales) { \
        pack<form>(codes, scales, experts, rows, k, gated, packed, packed_scales); \
    }
PACK(mxfp4, Mxfp4)
PACK(mxfp8, Mxfp8)
PACK(nvfp4, Nvfp4)
PACK(int4, Int4)
#define KERNEL(name, ...) \
    extern "C" void name(const RoutedLayerParams* p, uint32_t grid) { add<oxmoe::__VA_ARGS__>(p, grid); }
// Kernels that take no tensor maps.
template <typename Kernel, typename Params>
static void add_plain(const Params* params, uint32_t grid) {
    launches.push_back({grid, Kernel::kThreads, [p = *params] { begin(), Kernel::run(p), land_own(); }});
}
#define PAIR(name, ...) \
    extern "C" void name(const GemmPairParams* p, uint32_t grid) { \
        static_assert(oxmoe::__VA_ARGS__::kSharedBytes <= 227 << 10); \
        add_plain<oxmoe::__VA_ARGS__>(p, grid); \
    }
// Two launches of GEMMs that have tensor maps.
template <typename Up, typename Down>
static void add_gemms(const GemmPairParams* params, uint32_t grid) {
    const auto add_one = [=](auto kernel, const GroupedGemmParams& p) {
        using Kernel = typename decltype(kernel)::type;
        const auto run = [p, map = map_of(p, Kernel::kGated, params->experts, p.k * 2, Kernel::kRows / 16)] {
            begin(), Kernel::run(map, p), land_own();
        };
        launches.push_back({grid, Kernel::kThreads, run});
    };
    add_one(std::type_identity<Up>(), params->up), add_one(std::type_identity<Down>(), params->down);
}
#define GEMMS(name, element, gated, ...) \
    extern "C" void name(const GemmPairParams* p, uint32_t grid) { \
        using Up = GroupedGemmSm90<element, gated, __VA_ARGS__>; \
        add_gemms<Up, GroupedGemmSm90<element, false, __VA_ARGS__>>(p, grid); \
    }
extern "C" void combine(const CombineParams* p, uint32_t grid) { add_plain<Combine<__nv_bfloat16>>(p, grid); }
"""

CODE_BYTES = {"mxfp4": 2048, "mxfp8": 4096, "nvfp4": 2048, "int4": 2048}
SCALE_BYTES = {"mxfp4": 128, "mxfp8": 128, "nvfp4": 256, "int4": 256}


class HostLayers:
    """Compiles layers in one launch for the host. `kernels`: name -> struct of csrc/moe/, with its template's
    arguments. `pairs`: the same of GEMMs. One that is not packed runs
    twice. `changed`: (text of csrc/, another one) for a kernel with a fault."""

    def __init__(
        self, folder: Path, kernels: dict[str, str], *changed: tuple[str, str], pairs: dict[str, str] | None = None
    ) -> None:
        text = ROUTING + PRELUDE + base() + "".join(map(body, FILES))
        for old, new in changed:
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        entries = "".join(f"KERNEL({name}, {kernel})\n" for name, kernel in kernels.items())
        for name, kernel in (pairs or {}).items():
            both, arguments = kernel.startswith("GroupedGemmPackedSm90<"), kernel.partition("<")[2].rstrip(">")
            entries += f"PAIR({name}, {kernel})\n" if both else f"GEMMS({name}, {arguments})\n"
        self.library = build(folder, text, ENTRY + entries)
        self.library.run_all.restype = ctypes.c_char_p

    def pack(self, form: str, codes: Tensor, scales: Tensor, gated: bool) -> tuple[Tensor, Tensor]:
        """Packs codes uint8 [experts, rows, k] and the bits of their scales, int16 [experts, rows, groups]."""
        experts, rows, k = codes.shape
        blocks = experts * -(-rows // 64) * -(-k // 64)
        packed = torch.empty(blocks * CODE_BYTES[form], dtype=torch.uint8)
        packed_scales = torch.empty(blocks * SCALE_BYTES[form], dtype=torch.uint8)
        pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (codes, scales, packed, packed_scales)]
        function = getattr(self.library, f"pack_{form}")
        function(*pointers[:2], *map(ctypes.c_int, (experts, rows, k)), ctypes.c_bool(gated), *pointers[2:])
        return packed, packed_scales

    def add(self, name: str, grid: int, struct: ctypes.Structure) -> None:
        """Adds a launch. A layer gets RoutedLayerParams, of which LayerSm90 takes `layer`; a pair of GEMMs gets
        GemmPairParams, and "combine" CombineParams."""
        getattr(self.library, name)(ctypes.byref(struct), ctypes.c_uint32(grid))

    def run(self, seed: int) -> str:
        """Runs all launches that were added, and returns what went wrong, or nothing."""
        return self.library.run_all(ctypes.c_uint32(seed)).decode()
