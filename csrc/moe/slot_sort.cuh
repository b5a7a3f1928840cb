// Pieces of the stable sort of slots by expert that the routing kernels share.
//
// One bit per (expert, unit) and a popcount sort the slots, stable and without any order-dependent atomic. A unit is a token if
// it lists an expert at most once (top-k), otherwise a slot (given ids may repeat).
#pragma once
#include <cstdint>
#include <type_traits>

#include "oxmoe/src/params/moe.rs.h"
#include "tile_cut.cuh"

namespace oxmoe {

__device__ __forceinline__ uint32_t* shared_words() {
    extern __shared__ __align__(16) uint32_t routing_shared[];
    return routing_shared;
}

// The warp's number in its CTA, in a form that the compiler knows to be the same in all lanes: branches on it need no code for
// diverged warps.
__device__ __forceinline__ int warp_of_block() { return __shfl_sync(~0u, int(threadIdx.x) / 32, 0); }

// Brings the last parameters into the constant cache; the first ones are read early anyway.
__device__ __forceinline__ void touch(const RouteParams& params) {
    asm volatile("" ::"l"(params.histogram), "l"(params.tiles), "l"(params.block_histogram));
}

// Returns the local expert of an expert id, or -1 for a skipped one.
__device__ __forceinline__ int local_expert(const RouteParams& params, int id) {
    const uint32_t local = uint32_t(id) - uint32_t(params.first_expert);
    return local < uint32_t(params.experts) ? int(local) : -1;
}

__device__ __forceinline__ int expert_of_slot(const RouteParams& params, int slot) {
    if (!params.ids_are_i64) return local_expert(params, reinterpret_cast<const int32_t*>(params.ids)[slot]);
    const int64_t id = reinterpret_cast<const int64_t*>(params.ids)[slot];
    return int32_t(id) == id ? local_expert(params, int32_t(id)) : -1;
}

// Slots per expert of one CTA, a row of `block_histogram`. If a CTA has at most 255 units, there are 8-bit counts, four in a
// word. Otherwise there are 16-bit counts, two in a word, so that a CTA may have at most 65535 slots. Shared memory: experts
// rounded up to a multiple of 4, 4 bytes each.
class BlockHistogram {
    const RouteParams& params_;
    int* counts_ = reinterpret_cast<int*>(shared_words());

public:
    __device__ explicit BlockHistogram(const RouteParams& params) : params_(params) {}

    // Returns the number of counts in a word. `units` is the most that an expert can be counted in one CTA.
    static __device__ __forceinline__ int counts_of_word(int units) { return units <= 255 ? 4 : 2; }

    __device__ __forceinline__ void clear() {
        for (int i = threadIdx.x; i < (params_.experts + 3) / 4 * 4; i += blockDim.x) counts_[i] = 0;
        __syncthreads();
    }

    __device__ __forceinline__ void add(int id) { add_local(local_expert(params_, id)); }

    __device__ __forceinline__ void add_local(int expert) {
        if (expert >= 0) atomicAdd(&counts_[expert], 1);
    }

    __device__ __forceinline__ void write(int units) {
        __syncthreads();
        const int each = counts_of_word(units), words = (params_.experts + each - 1) / each;
        for (int i = threadIdx.x; i < words; i += blockDim.x) {
            int word;
            if (each == 4) {
                const ::int4 c = reinterpret_cast<const ::int4*>(counts_)[i];
                word = c.x | c.y << 8 | c.z << 16 | c.w << 24;
            } else {
                word = counts_[2 * i] | counts_[2 * i + 1] << 16;
            }
            params_.block_histogram[blockIdx.x * words + i] = word;
        }
    }
};

// Offsets and tile schedule from the slots per expert. Every CTA scans for itself; the grid shares the writing. Thread p <
// experts / 2 (rounded up) has experts 2 p and 2 p + 1. kNarrow: there are at most 65535 slots. Shared memory: kFixedBytes + 16
// bytes for each expert, at the front.
template <bool kNarrow>
class Schedule {
    using Sum = std::conditional_t<kNarrow, uint32_t, uint64_t>;  // tiles, slots
    static constexpr int kHalf = 4 * sizeof(Sum);

    const RouteParams& params_;
    Sum* warp_sums_ = reinterpret_cast<Sum*>(shared_words());
    int2* totals_ = reinterpret_cast<int2*>(shared_words() + kFixedBytes / 4 - 2);  // slots, tiles
    ::int4* spans_ = reinterpret_cast<::int4*>(shared_words() + kFixedBytes / 4);   // first place, slots, first tile, tiles
    int2 total_, tiles_;                                                            // slots and tiles of this thread's experts
    Sum sum_;  // sum over all experts up to this thread's, in its warp

public:
    static constexpr int kFixedBytes = 256;

    __device__ explicit Schedule(const RouteParams& params) : params_(params) {}

    // The shared memory after this object's.
    __device__ __forceinline__ uint32_t* end() const { return reinterpret_cast<uint32_t*>(spans_ + params_.experts); }

    // Whether this warp has experts.
    __device__ __forceinline__ bool scans(int warp) const { return 64 * warp < params_.experts; }

    // The warps that scan call begin() and end(), with a barrier of all warps between them and another one after end(). Other
    // warps have that long for other work. In begin() a thread gives the slots of its experts.
    __device__ __forceinline__ void begin(int warp, int2 total) {
        const int lane = threadIdx.x % 32;
        total_ = total, tiles_ = make_int2(tiles_of(total.x), tiles_of(total.y));
        sum_ = Sum(tiles_.x + tiles_.y) << kHalf | Sum(total.x + total.y);
#pragma unroll
        for (int d = 1; d < 32; d *= 2) {
            const Sum lower = __shfl_up_sync(~0u, sum_, d);
            if (lane >= d) sum_ += lower;
        }
        if (lane == 31) warp_sums_[warp] = sum_;
    }

    // Returns the first places of the thread's experts.
    __device__ __forceinline__ int2 end(int warp) const {
        const int thread = threadIdx.x, experts = params_.experts;
        Sum sum = sum_, everything = 0;
#pragma unroll 1
        for (int w = 0; scans(w); ++w) {
            if (w == warp) sum += everything;
            everything += warp_sums_[w];
        }
        int2 offset;
        offset.x = int(sum & (Sum(-1) >> kHalf)) - total_.x - total_.y;
        offset.y = offset.x + total_.x;
        const int first_tile = int(sum >> kHalf) - tiles_.x - tiles_.y;
        put(2 * thread, offset.x, total_.x, first_tile, tiles_.x);
        put(2 * thread + 1, offset.y, total_.y, first_tile + tiles_.x, tiles_.y);
        if (thread == 0) {
            const int2 totals = make_int2(int(everything & (Sum(-1) >> kHalf)), int(everything >> kHalf));
            *totals_ = totals;
            if (blockIdx.x == 0) {
                params_.offsets[experts] = totals.x, *params_.tile_count = totals.y;
            }
        }
        return offset;
    }

    // Writes this thread's part of the schedule, of both tails and of the counters. Call this after the barrier that follows
    // end().
    __device__ __forceinline__ void write() const {
        const int id = blockIdx.x * blockDim.x + threadIdx.x, ids = gridDim.x * blockDim.x;
        // Each expert has 1 to 8 threads, as many as the grid has.
        const int each_log2 = min(31 - __clz(ids / params_.experts), 3), each = 1 << each_log2;
        ::int4* tiles = reinterpret_cast<::int4*>(params_.tiles);
#pragma unroll 1
        for (int e = id >> each_log2; e < params_.experts; e += ids >> each_log2) {
            const ::int4 span = spans_[e];
            // Tiles are cut evenly: a full tile and a small rest would take longer than two halves.
            TileCut cut{span.y, 1, 0};
            if (span.w > 1) {
                const int step = params_.tile_step, steps = divide(span.y + step - 1, step);
                cut = {step, divide(steps, span.w), 0};
                cut.longer = steps - cut.each * span.w;
            }
#pragma unroll 1
            for (int i = id & (each - 1); i < span.w; i += each)
                tiles[span.z + i] = make_int4(e, span.x + cut.first(i), cut.count(i, span.y), 0);
        }
        const int2 totals = *totals_;
#pragma unroll 1
        for (int i = id; i < params_.counter_count; i += ids) params_.counters[i] = 0;
#pragma unroll 1
        for (int i = totals.y + id; i < params_.max_tiles; i += ids) tiles[i] = make_int4(-1, 0, 0, 0);
#pragma unroll 1
        for (int i = totals.x + id; i < params_.tokens * params_.top_k; i += ids) params_.slot_of_place[i] = -1;
    }

private:
    // NOTE: the float form is exact below 2^21: its error is less than half of 1 / d.
    static __device__ __forceinline__ int divide(int n, int d) {
        return kNarrow ? int(__fdividef(float(n) + 0.5f, float(d))) : n / d;
    }

    __device__ __forceinline__ int tiles_of(int slots) const {
        return slots > params_.tile_tokens ? divide(slots + params_.tile_tokens - 1, params_.tile_tokens) : slots > 0;
    }

    __device__ __forceinline__ void put(int expert, int offset, int slots, int first_tile, int tiles) const {
        if (expert >= params_.experts) return;
        spans_[expert] = make_int4(offset, slots, first_tile, tiles);
        if (blockIdx.x == 0) params_.histogram[expert] = slots, params_.offsets[expert] = offset;
    }
};

// The places of a CTA's slots, unit by unit, once the first places of the CTA's experts are known. Experts are rounded up to a
// multiple of 8 columns. Shared memory: 2 bytes for each slot, rounded up to 16, then 4-byte words chosen [groups, columns] and
// start [groups, columns]. A group has 32 units.
class UnitBits {
    const RouteParams& route_;
    const int groups_, columns_;
    uint32_t* chosen_;  // bit u of group g: unit 32 g + u goes to the expert
    int* start_;        // place of the group's first slot of the expert
    int16_t* expert_;

public:
    __device__ UnitBits(const RouteParams& route, uint32_t* memory, int units, int slots_of_unit)
        : route_(route),
          groups_((units + 31) / 32),
          columns_((route.experts + 7) / 8 * 8),
          chosen_(memory + (units * slots_of_unit + 7) / 8 * 4),
          start_(reinterpret_cast<int*>(chosen_ + groups_ * columns_)),
          expert_(reinterpret_cast<int16_t*>(memory)) {}

    __device__ __forceinline__ int columns() const { return columns_; }

    // Lends the memory of the starts, which comes last, for other uses before start().
    __device__ __forceinline__ int* lend() const { return start_; }

    __device__ __forceinline__ void clear() const {
        uint4* const chosen = reinterpret_cast<uint4*>(chosen_);
        for (int i = threadIdx.x; i < groups_ * columns_ / 4; i += blockDim.x) chosen[i] = {};
    }

    // Slot `slot`, which belongs to unit `unit`, goes to a local expert, or nowhere (-1).
    __device__ __forceinline__ void mark(int unit, int slot, int expert) const {
        expert_[slot] = int16_t(expert);
        if (expert >= 0) atomicOr(&chosen_[unit / 32 * columns_ + expert], 1u << unit % 32);
    }

    // Call this after all marks. Thread p gives the first places of experts 2 p and 2 p + 1, and gets the first places after
    // these units.
    __device__ __forceinline__ void start(int2& next) const {
        const int thread = threadIdx.x, pairs = columns_ / 2;
        if (thread >= pairs) return;
// The loop takes four groups at a time: their bits are read before a start is written.
#pragma unroll 1
        for (int g = 0; g < groups_; g += 4) {
            const uint2* const bits = reinterpret_cast<const uint2*>(chosen_) + g * pairs + thread;
            int2* const starts = reinterpret_cast<int2*>(start_) + g * pairs + thread;
            uint2 four[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) four[i] = g + i < groups_ ? bits[i * pairs] : make_uint2(0, 0);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (g + i < groups_) starts[i * pairs] = next;
                next.x += __popc(four[i].x), next.y += __popc(four[i].y);
            }
        }
    }

    // Places a slot that mark() got.
    __device__ __forceinline__ void place(int unit, int slot, int first_slot) const {
        const int expert = expert_[slot];
        int place = -1;
        if (expert >= 0) {
            const int cell = unit / 32 * columns_ + expert;
            place = start_[cell] + __popc(chosen_[cell] & ((1u << unit % 32) - 1));
            route_.slot_of_place[place] = first_slot + slot;
        }
        route_.place_of_slot[first_slot + slot] = place;
    }
};

}  // namespace oxmoe
