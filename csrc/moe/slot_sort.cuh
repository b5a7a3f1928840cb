// Pieces of the stable sort of slots by expert that the routing kernels share.
//
// One bit per (expert, unit) and a popcount sort the slots, stable and without any order-dependent atomic. A unit is a token when
// it lists an expert at most once (top-k), else a slot (given ids may repeat).
#pragma once
#include <cstdint>

#include "oxmoe/src/params.rs.h"

namespace oxmoe {

__device__ __forceinline__ uint32_t* shared_words() {
    extern __shared__ __align__(16) uint32_t routing_shared[];
    return routing_shared;
}

// Expert id to local expert, or -1: skipped.
__device__ __forceinline__ int local_expert(const RouteParams& params, int id) {
    const uint32_t local = uint32_t(id) - uint32_t(params.first_expert);
    return local < uint32_t(params.experts) ? int(local) : -1;
}

__device__ __forceinline__ int expert_of_slot(const RouteParams& params, int slot) {
    if (!params.ids_are_i64) return local_expert(params, reinterpret_cast<const int32_t*>(params.ids)[slot]);
    const int64_t id = reinterpret_cast<const int64_t*>(params.ids)[slot];
    return int32_t(id) == id ? local_expert(params, int32_t(id)) : -1;
}

// Slots per expert of one CTA, a row of `block_histogram`: 16-bit counts, two a word, so a CTA may have at most 65535 slots.
// Shared memory: experts rounded up to even, 4 bytes each.
class BlockHistogram {
    const RouteParams& params_;
    int* counts_ = reinterpret_cast<int*>(shared_words());
    const int words_;

public:
    __device__ explicit BlockHistogram(const RouteParams& params) : params_(params), words_((params.experts + 1) / 2) {}

    __device__ __forceinline__ void clear() {
        for (int i = threadIdx.x; i < 2 * words_; i += blockDim.x) counts_[i] = 0;
        __syncthreads();
    }

    __device__ __forceinline__ void add(int id) { add_local(local_expert(params_, id)); }

    __device__ __forceinline__ void add_local(int expert) {
        if (expert >= 0) atomicAdd(&counts_[expert], 1);
    }

    __device__ __forceinline__ void write() {
        __syncthreads();
        for (int i = threadIdx.x; i < words_; i += blockDim.x)
            params_.block_histogram[blockIdx.x * words_ + i] = counts_[2 * i] | counts_[2 * i + 1] << 16;
    }
};

// Offsets and tile schedule from the slots per expert. Every CTA scans for itself; the grid shares the writing.
// Needs blockDim.x >= experts. Shared memory: kFixedBytes + 16 bytes an expert, at the front.
class Schedule {
    const RouteParams& params_;
    uint64_t* warp_sums_ = reinterpret_cast<uint64_t*>(shared_words());
    int4* spans_ = reinterpret_cast<int4*>(shared_words() + kFixedBytes / 4);  // first place, slots, first tile, tiles
    int placed_, tile_count_;

public:
    static constexpr int kFixedBytes = 32 * sizeof(uint64_t);

    __device__ explicit Schedule(const RouteParams& params) : params_(params) {}

    // The shared memory behind this object's.
    __device__ __forceinline__ uint32_t* end() const { return reinterpret_cast<uint32_t*>(spans_ + params_.experts); }

    // Called by all threads; thread e brings the slots of expert e and gets the expert's first place. Ends without a barrier.
    __device__ __forceinline__ int scan(int total) {
        const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, experts = params_.experts;
        const bool mine = thread < experts;
        const int tiles = mine ? (total + params_.tile_tokens - 1) / params_.tile_tokens : 0;
        uint64_t sum = mine ? uint64_t(tiles) << 32 | uint32_t(total) : 0;
#pragma unroll
        for (int d = 1; d < 32; d *= 2) {
            const uint64_t lower = __shfl_up_sync(~0u, sum, d);
            if (lane >= d) sum += lower;
        }
        if (lane == 31) warp_sums_[warp] = sum;
        __syncthreads();
        uint64_t everything = 0;
        for (int w = 0; w < (experts + 31) / 32; ++w) {
            if (w == warp) sum += everything;
            everything += warp_sums_[w];
        }
        tile_count_ = int(everything >> 32), placed_ = int(uint32_t(everything));
        const int offset = int(uint32_t(sum)) - total;
        if (mine) {
            spans_[thread] = make_int4(offset, total, int(sum >> 32) - tiles, tiles);
            if (blockIdx.x == 0) {
                params_.histogram[thread] = total;
                params_.offsets[thread] = offset;
                if (thread == 0) params_.offsets[experts] = placed_, *params_.tile_count = tile_count_;
            }
        }
        if (blockIdx.x == 0) {
            for (int i = thread; i < params_.counter_count; i += blockDim.x) params_.counters[i] = 0;
        }
        return offset;
    }

    // After a barrier that follows scan(): this thread's part of the schedule, 8 threads an expert, and of both tails.
    __device__ __forceinline__ void write() const {
        const int id = blockIdx.x * blockDim.x + threadIdx.x, ids = gridDim.x * blockDim.x, tile = params_.tile_tokens;
        int4* tiles = reinterpret_cast<int4*>(params_.tiles);
        for (int e = id / 8; e < params_.experts; e += ids / 8) {
            const int4 span = spans_[e];
            // Cut evenly, in steps of 16: a full tile and a small rest would take longer than two halves.
            const int step = min(tile, 16), size = span.w > 1 ? ((span.y + span.w - 1) / span.w + step - 1) / step * step : tile;
            for (int i = id % 8; i < span.w; i += 8)
                tiles[span.z + i] = make_int4(e, span.x + i * size, min(size, span.y - i * size), 0);
        }
        for (int i = tile_count_ + id; i < params_.max_tiles; i += ids) tiles[i] = make_int4(-1, 0, 0, 0);
        for (int i = placed_ + id; i < params_.tokens * params_.top_k; i += ids) params_.slot_of_place[i] = -1;
    }
};

}  // namespace oxmoe
