// Routing in one launch of one CTA or one cluster: top-k (or given ids), histogram, stable sort, both permutations, tile
// schedule. The CTAs of the cluster share the units evenly. They send each other their slots per expert through distributed
// shared memory.
#pragma once
#include <cstdint>

#include "../common/cluster.cuh"
#include "../common/pdl.cuh"
#include "select.cuh"
#include "slot_sort.cuh"

namespace oxmoe {

// Sorts the slots of all CTAs of the cluster by expert.
//
// Shared memory with C CTAs and E experts rounded up to a multiple of 8 has Schedule's part, then 2-byte counts [C + 1, E] ([1,
// E] for one CTA), 16 bytes, and UnitBits' part.
class ClusterSort {
    const int ctas_, rank_, columns_;
    int share_;
    Schedule<true> schedule_;
    uint32_t* own_;     // slots per expert of this CTA, 16 bits each
    uint32_t* counts_;  // slots per expert of all CTAs, written by them
    cluster::Mailbox mailbox_;
    UnitBits bits_;
    uint32_t earlier_;  // slots in earlier CTAs of this thread's two experts, 16 bits each

public:
    const int first, count;  // this CTA's units

    __device__ ClusterSort(const RouteParams& route, int units, int slots_of_unit)
        : ctas_(cluster::size()),
          rank_(cluster::rank()),
          columns_((route.experts + 7) / 8 * 8),
          share_((units + ctas_ - 1) / ctas_),
          schedule_(route),
          own_(schedule_.end()),
          counts_(ctas_ > 1 ? own_ + columns_ / 2 : own_),
          mailbox_(counts_ + ctas_ * columns_ / 2),
          bits_(route, counts_ + ctas_ * columns_ / 2 + 4, share_, slots_of_unit),
          first(min(rank_ * share_, units)),
          count(min(share_, units - first)) {}

    // Call this before any memory of earlier kernels is read.
    __device__ __forceinline__ void prepare() const {
        if (ctas_ > 1) {
            if (threadIdx.x == 0) mailbox_.open(ctas_ * columns_ * 2);
            __syncwarp();
            cluster::arrive_relaxed();
        }
        bits_.clear();
        for (int i = threadIdx.x; i < columns_ / 2; i += blockDim.x) own_[i] = 0;
        if (ctas_ > 1) cluster::wait();
        __syncthreads();
    }

    // Slot `slot` of this CTA, which belongs to unit `unit`, goes to a local expert, or nowhere (-1).
    __device__ __forceinline__ void mark(int unit, int slot, int expert) const {
        bits_.mark(unit, slot, expert);
        if (expert >= 0) atomicAdd(&own_[expert / 2], 1u << 16 * (expert % 2));
    }

    // Sends this CTA's slots per expert to all CTAs. Call this after all marks.
    __device__ __forceinline__ void send(int warp) const {
        __syncthreads();
        if (ctas_ == 1) return;
        const int lane = threadIdx.x % 32, quads = columns_ / 8;
#pragma unroll 1
        for (int cta = warp; cta < ctas_; cta += blockDim.x / 32)
#pragma unroll 1
            for (int i = lane; i < quads; i += 32)
                mailbox_.send(reinterpret_cast<uint4*>(counts_) + rank_ * quads + i, cta,
                              reinterpret_cast<const uint4*>(own_)[i]);
    }

    __device__ __forceinline__ bool scans(int warp) const { return schedule_.scans(warp); }

    // Begins the scan of the experts' slots, as Schedule::begin does. The warps for which scans() is true call begin() and end().
    __device__ __forceinline__ void begin(int warp) {
        const int thread = threadIdx.x, words = columns_ / 2;
        uint32_t total = 0;
        earlier_ = 0;
        if (ctas_ > 1) mailbox_.receive();
#pragma unroll 1
        for (int base = 0; base < ctas_; base += 8) {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const uint32_t there = thread < words && base + i < ctas_ ? counts_[(base + i) * words + thread] : 0;
                total += there;
                if (base + i < rank_) earlier_ += there;
            }
        }
        schedule_.begin(warp, make_int2(total & 0xFFFF, total >> 16));
    }

    __device__ __forceinline__ void end(int warp) const {
        int2 next = schedule_.end(warp);
        next.x += earlier_ & 0xFFFF, next.y += earlier_ >> 16;
        bits_.start(next);
    }

    // Places a slot that mark() got. Call this after the barrier that follows end().
    __device__ __forceinline__ void place(int unit, int slot, int first_slot) const { bits_.place(unit, slot, first_slot); }

    __device__ __forceinline__ void write() const { schedule_.write(); }
};

// Grid: one cluster, or one CTA. The grid has at least one thread for each of route.experts, and a CTA one for two of them. There
// are at most 65535 slots.
template <int kExpertsPerLane, bool kPlain>
struct Route {
    static constexpr int kMaxThreads = kExpertsPerLane <= 16 ? 1024 : 512;

    static __device__ __forceinline__ void run(const SelectParams& select, const RouteParams& route) {
        const int top_k = select.top_k, warp = warp_of_block();
        ClusterSort sort(route, route.tokens, top_k);
        TokenLoop<kExpertsPerLane, kPlain> tokens(select, warp, sort.first, sort.count);
        if (kPlain && kExpertsPerLane <= 4) touch(route);
        sort.prepare();
        pdl::wait();
        // NOTE: this does not come earlier. GEMM1's CTAs have nothing to do yet, and starting them while the kernels before this
        // one finish makes a layer of few tokens 1 to 4 us slower.
        pdl::launch_dependents();
        tokens.pick([&](int t, int column, int id) { sort.mark(t, t * top_k + column, local_expert(route, id)); });
        sort.send(warp);
        const bool scans = sort.scans(warp);
        if (scans) sort.begin(warp);
        __syncthreads();
        if (scans) sort.end(warp);
        // The other warps compute weights meanwhile, and the warps that scan do so at the end. The loop keeps the code from being
        // there twice.
#pragma unroll 1
        for (bool late = false;; late = true) {
            if (scans == late) tokens.finish();
            if (late) break;
            __syncthreads();
            tokens.columns([&](int t, int column) { sort.place(t, t * top_k + column, sort.first * top_k); });
            sort.write();
        }
    }
};

// Routes given ids; a unit is a slot.
template <>
struct Route<0, true> {
    static constexpr int kMaxThreads = 1024;

    static __device__ __forceinline__ void run(const RouteParams& route) {
        const int warp = warp_of_block();
        ClusterSort sort(route, route.tokens * route.top_k, 1);
        touch(route);
        sort.prepare();
        pdl::wait();
        pdl::launch_dependents();  // not earlier: GEMM1's CTAs have nothing to do yet
#pragma unroll 1
        for (int i = threadIdx.x; i < sort.count; i += blockDim.x) sort.mark(i, i, expert_of_slot(route, sort.first + i));
        sort.send(warp);
        const bool scans = sort.scans(warp);
        if (scans) sort.begin(warp);
        __syncthreads();
        if (scans) sort.end(warp);
        __syncthreads();
#pragma unroll 1
        for (int i = threadIdx.x; i < sort.count; i += blockDim.x) sort.place(i, i, sort.first);
        sort.write();
    }
};

}  // namespace oxmoe
