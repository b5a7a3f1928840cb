"""Hopper's GEMMs on the host: every thread of every CTA of a launch is a fiber, wgmma and TMA are loops.

A fiber goes on until it waits. The next one is random, and some warps are slow for a while. Hopper's instructions are
replaced. wgmma and copies are done as late as the waits for them allow, and the target of a copy is poisoned at once:
reading or writing too early shows in the results. The source of a thread's copy must not change on its way, and
rows of stmatrix must not share banks.

Threads' own writes and the copies of cp.async go through another proxy than wgmma and the copy engine. So wgmma reads
NaN where a thread wrote after the last fence of the warp that multiplies, and so does a copy of tokens where a thread
of a running launch stored after the last fence of the thread that copies. (The fence may also stand where the writer
is; here it stands where the reader is.) No other fence orders anything.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from host_build import compiled, cxx
from host_cta import JUMPS, NUMBERS, without_asm
from host_kernels import ROOT, write_parameter_headers

PRELUDE = r"""
#define __align__(n)
struct int2 { int x, y; };
struct Dim { int64_t size, rows; int box; };  // rows: its stride
struct CUtensorMap {
    const uint8_t* data;
    int64_t width, rows;  // width in bytes
    std::vector<Dim> dims;  // of weights, all but the contiguous one
};
#define REQUIRE(what) \
    if (!(what)) fail(#what)
static void fail(const char* what);

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
static Index blockDim;
struct Fiber;
struct Meeting { std::vector<Fiber*> there; };
struct Cta {
    std::unique_ptr<uint8_t[]> memory{new uint8_t[256 << 10]};
    uint8_t* shared = memory.get() + (1024 - reinterpret_cast<uintptr_t>(memory.get()) % 1024);
    Meeting all, warps[32], named[16];
    // `writes` when a thread wrote to each 16 bytes; 0: the copy engine did, or nobody.
    std::vector<uint64_t> written = std::vector<uint64_t>((256 << 10) / 16);
    uint8_t lanes[32][32][32];  // what a warp's lanes tell each other
};
struct Product {
    float* sums;
    int columns;
    uint64_t a, b;
    bool keep, e4m3, has_rows = false;
    float rows[2][16];  // of a, where they came from registers
    uint64_t fenced = 0;
};
struct Copy { uint8_t* to; const void* from; size_t bytes; uint8_t seen[16]; };
constexpr size_t kStack = 32 << 10;
struct Launch { uint32_t grid, threads; std::function<void()> body; uint32_t cluster = 1; };
struct Fiber {
    const Launch* of;
    uint32_t launch, cta, block, thread;  // cta: of all launches
    std::function<bool()> condition;  // of going on; none: it goes on
    bool in_meeting = false;  // a Meeting has it, and lists it for the next round when all are there
    bool over = false;
    uint32_t cluster_waits = 0;
    std::deque<std::vector<Product>> groups;
    std::vector<Product> products;  // not committed
    std::vector<Copy> copies;
    uint64_t fenced_shared = 0, fenced_global = 0;  // `writes` when it fenced last
    Place place;
    std::unique_ptr<char[]> stack;
};
static std::vector<Cta> ctas;
static std::vector<Fiber> fibers;
static Fiber* self;
static Place scheduler;
static std::vector<Fiber*> later;  // those of the next round
static std::function<void()> body;
static std::vector<uint32_t> unfinished;  // threads of launches
static std::vector<uint32_t> cluster_arrivals;  // at the barrier of a cluster, in the place of its first CTA
static std::vector<std::function<void()>> arrivals;  // of copies on their way
static uint64_t writes;  // of threads, so far
static std::unordered_map<uintptr_t, uint64_t> stored;  // the same of global memory
// Called after each round, with whether nobody moved. Returns whether it has changed what fibers wait for.
static std::function<bool(bool, Chance&)> meanwhile;

static bool rows_may_end = false;  // inside a block of K
static std::string failure;  // the first one
static void fail(const char* what) {
    std::string who = "all";
    if (self) who = "CTA " + std::to_string(self->cta) + ", thread " + std::to_string(self->thread);
    if (failure.empty()) failure = who + ": " + what;
    if (self) change(self->place, scheduler);  // for good
}
static void wait(std::function<bool()> condition) {
    self->condition = std::move(condition);
    change(self->place, scheduler);
}
static void start() {
    self->of->body();
    REQUIRE(self->groups.empty() && self->products.empty() && self->copies.empty());
    self->over = true;
    --unfinished[self->launch];
    go(scheduler);
}
static uint8_t* shared_memory() { return ctas[self->cta].shared; }
// A thread or the copy engine has written to a CTA's shared memory.
static void note_write(uint32_t cta, const void* to, size_t bytes, bool by_thread = true) {
    const size_t first = static_cast<const uint8_t*>(to) - ctas[cta].shared;
    for (size_t at = first / 16; at * 16 < first + bytes; ++at) ctas[cta].written[at] = by_thread ? ++writes : 0;
}
// `who` is null if a thread comes without waiting for the others.
static void join(Meeting& meeting, int threads, Fiber* who) {
    meeting.there.push_back(who);
    if (meeting.there.size() < threads) return;
    std::copy_if(meeting.there.begin(), meeting.there.end(), std::back_inserter(later), [](Fiber* f) { return f; });
    meeting.there.clear();
}
static void meet(Meeting& meeting, int threads) {
    self->in_meeting = true;
    join(meeting, threads, self);
    change(self->place, scheduler);
}
// Lanes go together through a warp's instructions, and so through what one of them does for all.
static void converge() { meet(ctas[self->cta].warps[threadIdx.x / 32], 32); }
// The array holds what all lanes of the warp brought.
template <typename T>
static std::array<T, 32> exchange(const T& value) {
    auto& lanes = ctas[self->cta].lanes[threadIdx.x / 32];
    static_assert(sizeof(T) <= sizeof(lanes[0]));
    memcpy(lanes[threadIdx.x % 32], &value, sizeof(T));
    converge();
    std::array<T, 32> all;
    for (int lane = 0; lane < 32; ++lane) memcpy(&all[lane], lanes[lane], sizeof(T));
    converge();
    return all;
}
template <typename T>
static T shuffle(T value, uint32_t from) { return self ? exchange(value)[from] : value; }  // outside of launches: alone
template <typename T>
static T __shfl_sync(uint32_t, T value, int lane) { return shuffle(value, lane & 31); }
template <typename T>
static T __shfl_xor_sync(uint32_t, T value, int mask) { return shuffle(value, threadIdx.x % 32 ^ mask); }
template <typename T>
static T __shfl_up_sync(uint32_t, T value, int distance) {
    const int lane = threadIdx.x % 32;
    return shuffle(value, lane < distance ? lane : lane - distance);
}
static uint32_t __ballot_sync(uint32_t, bool value) {
    const auto all = exchange(value);
    uint32_t result = 0;
    for (int lane = 0; lane < 32; ++lane) result |= uint32_t(all[lane]) << lane;
    return result;
}
static void __syncwarp() { converge(); }
// All are on the GPU at once.
static void launch(const std::vector<Launch>& all, uint32_t seed) {
    Chance random{seed};
    arrivals.clear(), failure.clear(), unfinished.clear(), ctas.clear(), later.clear(), stored.clear(), writes = 0;
    size_t threads = 0, cta = 0;
    for (const Launch& one : all) threads += one.grid * one.threads, cta += one.grid;
    ctas = std::vector<Cta>(std::exchange(cta, 0));
    cluster_arrivals.assign(ctas.size(), 0);
    fibers = std::vector<Fiber>(threads);
    std::vector<Fiber*> order;
    for (const Launch& one : all) {
        for (uint32_t i = 0; i < one.grid * one.threads; ++i) {
            Fiber& fiber = fibers[order.size()];
            fiber.of = &one, fiber.launch = unfinished.size();
            fiber.block = i / one.threads, fiber.cta = cta + fiber.block, fiber.thread = i % one.threads;
            fiber.stack.reset(new char[kStack]);
            fiber.place.start_with(start, fiber.stack.get(), kStack);
            order.push_back(&fiber);
        }
        unfinished.push_back(one.grid * one.threads), cta += one.grid;
    }
    for (auto& cta : ctas) memset(cta.shared, 0xFF, 255 << 10);  // NaN
    std::vector<uint32_t> slowness(fibers.size() / 32);
    std::vector<bool> sleeps(slowness.size());
    for (int round = 0;; ++round) {
        for (uint32_t warp = 0; warp < slowness.size(); ++warp) {
            if (round % 64 == 0) slowness[warp] = 1 << random.below(5);
            sleeps[warp] = random.below(slowness[warp]) != 0;
        }
        bool moved = false;
        random.shuffle(order);
        for (Fiber* fiber : order) {
            const bool waits = fiber->condition && !fiber->condition();
            moved |= !waits;
            if (waits || sleeps[(fiber - fibers.data()) / 32]) {
                later.push_back(fiber);
                continue;
            }
            self = fiber, threadIdx.x = fiber->thread, blockIdx.x = fiber->block;
            gridDim.x = fiber->of->grid, blockDim.x = fiber->of->threads;
            fiber->condition = nullptr, fiber->in_meeting = false;
            change(scheduler, fiber->place);
            self = nullptr;
            if (!failure.empty()) return;
            if (!fiber->over && !fiber->in_meeting) later.push_back(fiber);
        }
        order.clear();
        std::swap(order, later);
        if (std::all_of(unfinished.begin(), unfinished.end(), [](uint32_t threads) { return threads == 0; })) {
            REQUIRE(arrivals.empty());
            return;
        }
        if (meanwhile && meanwhile(!moved, random)) moved = true;
        if (moved) continue;
        if (arrivals.empty()) return fail("nobody can go on");
        random.shuffle(arrivals);
        for (size_t left = arrivals.size() / 2; arrivals.size() > left; arrivals.pop_back()) arrivals.back()();
        if (!failure.empty()) return;
    }
}
static void launch(uint32_t grid, uint32_t threads, uint32_t seed) { launch({{grid, threads, body}}, seed); }
static void __syncthreads() { meet(ctas[self->cta].all, self->of->threads); }

namespace oxmoe {
struct __nv_bfloat16 { uint16_t bits; };
struct __half { uint16_t bits; };
static float to_float(__nv_bfloat16 x) { return float_of(uint32_t(x.bits) << 16); }
static float to_float(__half) { return NAN; }
template <typename> uint32_t pack(float low, float high) { return to_bf16(low) | to_bf16(high) << 16; }
template <typename> float2 unpack(uint32_t word) { return {float_of(word << 16), float_of(word & 0xFFFF0000u)}; }
namespace pdl {
inline void wait() {
    const uint32_t launch = self->launch;
    const auto first = unfinished.begin();
    ::wait([=] { return std::all_of(first, first + launch, [](uint32_t threads) { return threads == 0; }); });
    self->fenced_global = writes;  // the end of a launch orders all that it did
}
inline void launch_dependents() {}
}  // namespace pdl
namespace cluster {
inline int size() { return self->of->cluster; }
inline int rank() { return blockIdx.x % size(); }
inline uint32_t first() { return self->cta - rank(); }  // of the cluster's CTAs
inline void arrive() { ++cluster_arrivals[first()]; }
inline void arrive_relaxed() { arrive(); }
inline void wait() {
    const uint32_t &arrived = cluster_arrivals[first()], all = ++self->cluster_waits * size() * self->of->threads;
    ::wait([&arrived, all] { return arrived >= all; });
}
}  // namespace cluster
namespace counter {
inline int add(int* counter) { return (*counter)++; }
inline void add_only(int* counter, int value = 1) { *counter += value; }
inline bool has_reached(const int* counter, int value) { return *counter >= value; }
inline void wait_for(const int* counter, int value) {
    auto done = [=] { return *counter >= value; };
    if (!done()) ::wait(done);
}
}  // namespace counter

namespace sm90 {
struct Barrier { uint64_t count : 12, pending : 12, phase : 8; int64_t bytes : 32; };
static_assert(sizeof(Barrier) == 8);
static Barrier& barrier_of(uint64_t* word) { return *reinterpret_cast<Barrier*>(word); }
inline uint32_t shared_address(const void* p) { return static_cast<const uint8_t*>(p) - shared_memory(); }
inline void barrier_init(uint64_t* word, uint32_t count) { barrier_of(word) = {count, count, 0, 0}; }
inline void barrier_init_fence() {}
// `bytes`: that copies are to bring, less those that they have.
inline void barrier_change(uint64_t* word, int arrivals, int bytes) {
    Barrier& barrier = barrier_of(word);
    REQUIRE(barrier.pending >= arrivals);
    barrier.pending -= arrivals, barrier.bytes += bytes;
    if (barrier.pending == 0 && barrier.bytes == 0) barrier.pending = barrier.count, ++barrier.phase;
}
inline void barrier_arrive(uint64_t* word) { barrier_change(word, 1, 0); }
inline void barrier_arrive_expect(uint64_t* word, uint32_t bytes) { barrier_change(word, 1, bytes); }
inline void barrier_arrive_if(uint64_t* word, bool now) {
    converge();
    if (now) barrier_arrive(word);
}
inline void barrier_wait(uint64_t* word, uint32_t parity) {
    Barrier& barrier = barrier_of(word);
    auto done = [&barrier, parity] { return (barrier.phase & 1) != parity; };
    if (!done()) ::wait(done);
}
inline void prefetch_tensor_map(const CUtensorMap*) {}
inline void fence_async_proxy() { self->fenced_shared = writes; }
// Others run meanwhile.
inline void wait_cycles(int cycles) {
    for (; cycles > 0; cycles -= 1000) wait([] { return true; });
}
template <int> void registers_increase() {}
template <int> void registers_decrease() {}
inline void copy_async_arrive(uint64_t* barrier) {
    arrivals.push_back([copies = std::exchange(self->copies, {}), barrier, cta = self->cta] {
        for (const Copy& copy : copies) {
            REQUIRE(memcmp(copy.seen, copy.from, copy.bytes) == 0);
            memcpy(copy.to, copy.from, copy.bytes), note_write(cta, copy.to, copy.bytes);
        }
        barrier_arrive(barrier);
    });
}
// The copy may read its source until it is waited for, so the source must not change any more.
inline void copy_later(void* to, const void* from, int bytes) {
    memset(to, 0xFF, bytes);
    Copy& copy = self->copies.emplace_back(static_cast<uint8_t*>(to), from, bytes);
    memcpy(copy.seen, from, bytes);
}
inline void copy_16_async(uint32_t to, const void* from, bool valid) {
    alignas(16) static const uint8_t zeros[16] = {};
    REQUIRE((valid || rows_may_end) && to % 16 == 0 && reinterpret_cast<uintptr_t>(from) % 16 == 0);
    copy_later(shared_memory() + to, valid ? from : zeros, 16);
}
inline void copy_4_async(void* to, const void* from) {
    REQUIRE(shared_address(to) % 4 == 0 && reinterpret_cast<uintptr_t>(from) % 4 == 0);
    copy_later(to, from, 4);
}
inline void copy_bulk(void* to, const void* from, uint32_t bytes, uint64_t* barrier) {
    REQUIRE(bytes % 16 == 0 && shared_address(to) % 16 == 0 && reinterpret_cast<uintptr_t>(from) % 16 == 0);
    memset(to, 0xFF, bytes);
    const auto* source = static_cast<const uint8_t*>(from);
    arrivals.push_back([=, seen = std::vector<uint8_t>(source, source + bytes), cta = self->cta] {
        REQUIRE(memcmp(seen.data(), from, bytes) == 0);
        memcpy(to, from, bytes), note_write(cta, to, bytes, false);
        barrier_change(barrier, 0, -int(bytes));
    });
}
// Others may go on before a store has landed.
template <typename T>
void store_global(void* to, const T& value) {
    ::wait([] { return true; });
    memcpy(to, &value, sizeof(value));
    stored[reinterpret_cast<uintptr_t>(to) / 16] = ++writes;
}
inline void store_global_16_if(void* to, const uint4& value, bool now) { if (now) store_global(to, value); }
inline void store_global_16(void* to, const uint4& value) { store_global(to, value); }
inline void named_barrier(int id, int threads) { meet(ctas[self->cta].named[id], threads); }
inline void store_global_4_if(void* to, uint32_t word, bool now) { if (now) store_global(to, word); }
inline float load_shared_4(const float* from) { return *from; }
inline uint4 load_shared_16(uint32_t from) {
    uint4 value;
    REQUIRE(from % 16 == 0);
    memcpy(&value, shared_memory() + from, 16);
    return value;
}
// Lane 8 i + c has the address of column c of tile i, whose rows' pairs of columns the lanes have four by four.
template <int Tiles>
void store_tiles_turned(uint32_t address, const uint32_t (&tiles)[Tiles]) {
    struct Words { uint32_t of[Tiles]; } words;
    memcpy(&words, tiles, sizeof(words));
    const auto all = exchange(words);
    const auto addresses = exchange(address);
    const uint32_t tile = threadIdx.x % 32 / 8, column = threadIdx.x % 8;
    if (tile >= Tiles) return;
    REQUIRE(address % 16 == 0);
    for (uint32_t other = 0; other < column; ++other) REQUIRE((address ^ addresses[tile * 8 + other]) / 16 % 8 != 0);
    for (uint32_t row = 0; row < 8; ++row) {
        const uint32_t pair = all[row * 4 + column / 2].of[tile];
        const uint16_t number = column % 2 ? pair >> 16 : pair;
        memcpy(shared_memory() + address + 2 * row, &number, 2);
    }
    note_write(self->cta, shared_memory() + address, 16);
}
struct Unchanged {
    static constexpr bool kExchanges = false;
    static int of_expert(const GroupedGemmParams&, int expert) { return expert; }
    static uint4 finish(const uint4& outputs, const GroupedGemmParams&, int) { return outputs; }
};
inline void store_global_8_if(void* to, uint32_t a, uint32_t b, bool now) {
    if (now) store_global(to, std::array{a, b});
}
// A box of the weights' map: 128 bytes of each of its rows, zeros beyond any dimension's end.
inline void copy_tensor_5d(void* to, const CUtensorMap* map, const int (&at)[5], uint64_t* barrier) {
    int rows = 1;
    for (const Dim& dim : map->dims) rows *= dim.box;
    REQUIRE(shared_address(to) % 1024 == 0);
    memset(to, 0xFF, rows * 128);
    std::vector<int64_t> sources;
    for (int n = 0; n < rows; ++n) {
        int64_t row = 0;
        for (int d = 0, rest = n; d < 4; rest /= map->dims[d++].box) {
            const Dim& dim = map->dims[d];
            const int i = at[d + 1] + rest % dim.box;
            row = row < 0 || i >= dim.size ? -1 : row + i * dim.rows;
        }
        REQUIRE(row < map->rows);
        sources.push_back(row);
    }
    arrivals.push_back([to, map, column = at[0] * 2, sources, barrier, cta = self->cta] {
        for (int n = 0; n < sources.size(); ++n) {
            for (int i = 0; i < 8; ++i) {
                uint8_t* chunk = static_cast<uint8_t*>(to) + n * 128 + (i ^ n % 8) * 16;
                const int from = column + i * 16;
                if (sources[n] >= 0 && from < map->width) memcpy(chunk, map->data + sources[n] * map->width + from, 16);
                else memset(chunk, 0, 16);
            }
        }
        note_write(cta, to, sources.size() * 128, false);
        barrier_change(barrier, 0, -int(sources.size()) * 128);
    });
}

// A box of 64 rows of the tokens' map; zeros beyond the last.
inline void copy_tensor_2d(uint8_t* to, const CUtensorMap* map, int column, int row, uint64_t* barrier) {
    memset(to, 0xFF, 64 * 128);
    arrivals.push_back([to, map, column, row, barrier, cta = self->cta, fenced = self->fenced_global] {
        for (int n = 0; n < 64; ++n) {
            for (int i = 0; i < 8; ++i) {
                uint8_t* chunk = to + n * 128 + (i ^ n % 8) * 16;
                const uint8_t* from = map->data + (row + n) * map->width + column + i * 16;
                const auto store = stored.find(reinterpret_cast<uintptr_t>(from) / 16);
                if (row + n >= map->rows) memset(chunk, 0, 16);
                else if (store != stored.end() && store->second > fenced) memset(chunk, 0xFF, 16);
                else memcpy(chunk, from, 16);
            }
        }
        note_write(cta, to, 64 * 128, false);
        barrier_change(barrier, 0, -64 * 128);
    });
}

inline uint64_t descriptor_128b(uint32_t address, uint32_t offset) { return address + offset; }
// Rows of 128 bytes whose 16-byte chunks are swizzled in atoms of 1024; the step's 32 bytes start at `at`.
template <int Count>
void read_row(double (&numbers)[Count], uint64_t at, int row, uint64_t fenced) {
    static const std::array<double, 256> values = [] {
        std::array<double, 256> all;
        for (int code = 0; code < 256; ++code) all[code] = from_e4m3(code);
        return all;
    }();
    const uint32_t column = at % 1024;
    REQUIRE(column <= 96 && column % 32 == 0);
    const uint32_t from = at / 1024 * 1024 + row * 128;
    uint8_t codes[32];
    for (int i = 0; i < 2; ++i) {
        const uint32_t chunk = from + (column / 16 + i ^ row % 8) * 16;
        if (ctas[self->cta].written[chunk / 16] > fenced) memset(codes + 16 * i, 0xFF, 16);
        else memcpy(codes + 16 * i, shared_memory() + chunk, 16);
    }
    if constexpr (Count == 32) {
        for (int k = 0; k < 32; ++k) numbers[k] = values[codes[k]];
    } else {
        uint16_t words[16];
        memcpy(words, codes, 32);
        for (int k = 0; k < 16; ++k) numbers[k] = from_bf16(words[k]);
    }
}
typedef double Two __attribute__((vector_size(16)));
template <int Count>
double dot(const double (&a)[Count], const double (&b)[Count]) {
    Two even = {}, odd = {};
    for (int k = 0; k < Count; k += 4) {
        Two x[2], y[2];
        memcpy(x, &a[k], 32), memcpy(y, &b[k], 32);
        even += x[0] * y[0], odd += x[1] * y[1];
    }
    even += odd;
    return even[0] + even[1];
}
// A lane's sums of rows g and g + 8 of its warp's 16: two neighbours of each eight columns.
template <int Count>
void multiply_now(const Product& p) {
    const int row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
    double a[2][Count], b[Count];
    for (int half = 0; half < 2; ++half)
        if (p.has_rows) std::copy_n(p.rows[half], 16, a[half]);
        else read_row(a[half], p.a, row + 8 * half, p.fenced);
    for (int i = 0; i < p.columns / 4; ++i) {
        read_row(b, p.b, i / 2 * 8 + threadIdx.x % 4 * 2 + i % 2, p.fenced);
        for (int half = 0; half < 2; ++half) {
            const double sum = dot(a[half], b);
            float& total = p.sums[i / 2 * 4 + half * 2 + i % 2];
            total = p.keep ? float(total + sum) : float(sum);
        }
    }
}
inline void wgmma_fence() { converge(); }
inline void add_product(Product product) {
    product.fenced = self->fenced_shared;
    self->products.push_back(product);
}
inline void wgmma_commit() { self->groups.push_back(std::exchange(self->products, {})); }
template <int Unfinished>
void wgmma_wait() {
    for (; self->groups.size() > Unfinished; self->groups.pop_front())
        for (const Product& product : self->groups.front())
            product.e4m3 ? multiply_now<32>(product) : multiply_now<16>(product);
}
template <int N>
struct WgmmaE4m3 {
    static void multiply(float (&d)[N / 2], uint64_t a, uint64_t b, bool keep) {
        add_product({d, N, a, b, keep, true});
    }
};
template <typename Element, int N>
struct Wgmma {
    static_assert(std::is_same_v<Element, __nv_bfloat16>);
    static void multiply(float* d, uint64_t a, uint64_t b, bool keep) {
        add_product({d, N, a, b, keep, false});
    }
};
// A lane brings of rows g and g + 8 columns 2 c, 2 c + 1, then those 8 after them; what it multiplies is its quad's.
template <int N>
struct WgmmaFromRegisters {
    static void multiply(float* d, const uint32_t (&words)[4], uint64_t b) {
        const auto all = exchange(std::to_array(words));
        Product product{d, N, 0, b, true, false};
        for (int half = 0; half < 2; ++half)
            for (int k = 0; k < 16; ++k) {
                const uint32_t word = all[threadIdx.x % 32 / 4 * 4 + k % 8 / 2][half + k / 8 * 2];
                product.rows[half][k] = from_bf16(word >> k % 2 * 16 & 0xFFFF);
            }
        product.has_rows = true;
        add_product(product);
    }
};
inline void start_wgmma_e4m3_128(float (&d)[64], uint64_t a, uint64_t b) { WgmmaE4m3<128>::multiply(d, a, b, false); }
}  // namespace sm90
}  // namespace oxmoe
"""

INSTRUCTIONS = """
namespace ptx {
static void min_NaN_f32(float& d, float a, float b) { d = std::isnan(a) || std::isnan(b) ? NAN : min(a, b); }
static void max_NaN_f32(float& d, float a, float b) { d = std::isnan(a) || std::isnan(b) ? NAN : max(a, b); }
static void ex2_approx_ftz_f32(float& d, float a) { d = exp2f(a); }
static void rcp_approx_ftz_f32(float& d, float a) { d = 1 / a; }
static void mov_b32(float& d) { d = 0; }
static void fence_proxy_async_global() { self->fenced_global = writes; }
}  // namespace ptx
"""


def body(name: str) -> str:
    """Returns a file of csrc/ without its includes."""
    lines = (ROOT / "csrc" / f"{name}.cuh").read_text().splitlines()
    text = "\n".join(line for line in lines if not line.startswith(("#include", "#pragma once")))
    dynamic = "extern __shared__ __align__(1024) uint8_t dynamic_shared[];"
    return text.replace(dynamic, "uint8_t* const dynamic_shared = shared_memory();") + "\n"


def base() -> str:
    """Returns GroupedGemmSm90 and the code that it needs."""
    moe = ("work_unit_sm90", "gemm_overlap_sm90", "grouped_gemm_sm90")
    return "".join(map(body, ("common/ring", "common/activation", *(f"moe/{name}" for name in moe))))


def build(folder: Path, text: str, entry: str, *flags: str) -> ctypes.CDLL:
    compiler = cxx()
    if compiler is None:
        pytest.skip("no C++ compiler")
    write_parameter_headers(folder)
    source = folder / "kernels.cpp"
    headers = '#include "oxmoe/src/params/moe.rs.h"\n'
    source.write_text(headers + NUMBERS + PRELUDE + INSTRUCTIONS + without_asm(text) + entry)
    every = ["-std=c++20", "-O2", "-ffp-contract=off", "-w", *JUMPS, *flags, f"-I{folder}"]
    return ctypes.CDLL(str(compiled(compiler, every, source)))
