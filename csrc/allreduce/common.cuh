// The part of the protocol that the one-shot and the two-shot all-reduce share: headers, epochs, and the deadline of every wait.
// The protocol is in src/allreduce/protocol.rs, where a model plays it.
#pragma once
#include <cstddef>
#include <cstdint>

#include "../common/pdl.cuh"
#include "memory.cuh"
#include "oxmoe/src/params/allreduce.rs.h"

namespace oxmoe::allreduce {

constexpr int kMaxRanks = 8;

// Bits that no conversion or addition produces; protocol.rs has the same four words.
constexpr uint32_t kEmpty = 0xFFFFFFFFu;
constexpr uint32_t kOtherNaN = 0x7FFFFFFFu;
constexpr uint64_t kNoHeader = ~0ull;
constexpr uint64_t kTimeout = 1, kMismatch = 2;

// The first bytes of a rank's workspace. Headers of both parities follow at the next line, 16 bytes for each sender.
struct alignas(128) Control {
    uint64_t error;    // 0, or the first fault
    uint32_t epoch;    // finished calls; the last CTA that reads the epoch writes the next one
    uint32_t arrived;  // CTAs of this launch that have read the epoch
    uint64_t _pad[14];
    struct alignas(16) Header {
        uint64_t shape;
    } headers[2][kMaxRanks];
};

static_assert(sizeof(Control) == 384 && offsetof(Control, headers) == 128, "protocol.rs");

__device__ __forceinline__ uint8_t* workspace(const AllReduceParams& p, int rank) { return (&p.workspaces.rank0)[rank]; }

__device__ __forceinline__ Control* control(const AllReduceParams& p, int rank) {
    return reinterpret_cast<Control*>(workspace(p, rank));
}

__device__ __forceinline__ bool is_written(const Chunk& v) { return v.x != kEmpty && v.z != kEmpty; }

__device__ __forceinline__ Chunk sendable(Chunk v) {
    if (v.x == kEmpty) v.x = kOtherNaN;
    if (v.z == kEmpty) v.z = kOtherNaN;
    return v;
}

__device__ __forceinline__ Chunk empty_chunk() { return {kEmpty, kEmpty, kEmpty, kEmpty}; }

// Shows a fault to the host, which does not synchronise. The fault is written last: it says that the other words are there.
__device__ __forceinline__ void tell_host(const AllReduceParams& p, uint64_t fault) {
    volatile uint64_t* report = p.report;
    if (report[0]) return;
    report[1] = p.shape;
    __threadfence_system();
    report[0] = fault;
    __threadfence_system();
}

// A thread's watch over its waits: when it began to wait, and in which call.
template <int kWorld>
class Watch {
    const AllReduceParams& p_;
    uint32_t epoch_;
    uint32_t spins_ = 0;
    uint64_t deadline_ = 0;

    // A thread looks at the clock once in this many polls: a look at every poll costs 0.1 us at one token (H200).
    static constexpr uint32_t kSpinsPerLook = 64;

    __device__ __forceinline__ bool look(int missing, uint64_t patience) {
        if (const uint64_t fault = load_relaxed(&control(p_, p_.rank)->error)) {
            tell_host(p_, fault);
            return true;
        }
        const uint64_t now = nanoseconds();
        if (deadline_ == 0) deadline_ = now + p_.deadline_ns * patience;
        if (now < deadline_) return false;
        report(kTimeout, missing, 0);
        return true;
    }

public:
    __device__ Watch(const AllReduceParams& p, uint32_t epoch) : p_(p), epoch_(epoch) {}

    // Returns true if waiting is pointless: the deadline is over, or some rank has reported a fault. `patience` counts deadlines.
    // A thread that waits for a sum has two, since the rank that makes the sum waits too and knows which rank is missing.
    __device__ __forceinline__ bool give_up(int missing, uint64_t patience = 1) {
        return ++spins_ % kSpinsPerLook == 0 && look(missing, patience);
    }

    // The first report wins, on every rank. The other ranks leave their loops at their next look, and at once in later calls.
    __device__ __forceinline__ void report(uint64_t kind, int peer, uint64_t peer_shape) const {
        if (peer_shape) {
            *static_cast<volatile uint64_t*>(p_.report + 2) = peer_shape;
            __threadfence_system();
        }
        const unsigned long long fault = kind << 56 | uint64_t(p_.rank) << 48 | uint64_t(peer) << 40 | epoch_;
        for (int rank = 0; rank < kWorld; ++rank) {
            atomicCAS_system(reinterpret_cast<unsigned long long*>(&control(p_, rank)->error), 0ull, fault);
        }
        tell_host(p_, load_relaxed(&control(p_, p_.rank)->error));
    }
};

// The words that a thread reads at the start of a call.
struct Begin {
    uint32_t epoch;
    // Whether no fault was known. After a fault a rank sends nothing: a peer may still wait in the call of the fault, or in one
    // before it, and would take what a later call sends for that call's data.
    bool sends;
};

// Every thread reads the epoch; one thread of the grid passes on a fault that a peer left here since the last call.
__device__ __forceinline__ Begin begin_call(const AllReduceParams& p) {
    const ulonglong2 read = load_pair(&control(p, p.rank)->error);
    if (read.x && blockIdx.x == 0 && threadIdx.x == 0) tell_host(p, read.x);
    return {uint32_t(read.y), read.x == 0};  // `arrived` is the upper half of y
}

// All threads of a CTA call this once they hold the epoch. This is late enough that no thread reads the new epoch, and early
// enough to hide the write.
__device__ __forceinline__ void finish_reading_epoch(const AllReduceParams& p, uint32_t epoch) {
    Control* const own = control(p, p.rank);
    __syncthreads();
    if (threadIdx.x == 0 && atomicInc(&own->arrived, gridDim.x - 1) == gridDim.x - 1) own->epoch = epoch + 1;
}

// The header of a call. In the first CTA one thread for each peer sends it before the data, and reads the peer's while data
// travel.
template <int kWorld>
class Greeting {
    const AllReduceParams& p_;
    const int parity_, peer_;
    const bool mine_;
    uint64_t heard_ = kNoHeader;

    __device__ uint64_t* header(int owner, int sender) const { return &control(p_, owner)->headers[parity_][sender].shape; }

public:
    __device__ Greeting(const AllReduceParams& p, const Begin& begin)
        : p_(p),
          parity_(begin.epoch & 1),
          peer_(threadIdx.x),
          mine_(begin.sends && blockIdx.x == 0 && peer_ < kWorld && peer_ != p.rank) {}

    __device__ __forceinline__ void send() const {
        if (mine_) store_relaxed(header(peer_, p_.rank), p_.shape);
    }

    // Starts to load the peer's header; its value is not used before it is needed.
    __device__ __forceinline__ void listen() {
        if (mine_) heard_ = load_relaxed(header(p_.rank, peer_));
    }

    // A shape unlike ours is a fault. Both ranks see it and report it, so that no rank waits for data that will not come.
    __device__ __forceinline__ void finish(Watch<kWorld>& watch) {
        if (!mine_) return;
        while (heard_ == kNoHeader && !watch.give_up(peer_)) heard_ = load_relaxed(header(p_.rank, peer_));
        if (heard_ == kNoHeader) return;
        if (heard_ != p_.shape) watch.report(kMismatch, peer_, heard_);
        store_relaxed(header(p_.rank, peer_), kNoHeader);
    }
};

// Receives one chunk of every rank. This rank's own chunk is `mine`, and a peer's comes from its slot, once it is there. All
// peers are polled in one round, so that their latencies overlap. Returns false if the wait was given up.
template <int kWorld, class Slot>
__device__ __forceinline__ bool receive(Chunk (&part)[kWorld], int rank, const Chunk& mine, Slot slot, Watch<kWorld>& watch) {
#pragma unroll
    for (int peer = 0; peer < kWorld; ++peer) part[peer] = mine;
    int missing;
    do {
        missing = -1;
#pragma unroll
        for (int peer = 0; peer < kWorld; ++peer) {
            if (peer == rank) continue;
            part[peer] = load_relaxed(slot(peer));
            if (!is_written(part[peer])) missing = peer;
        }
    } while (missing >= 0 && !watch.give_up(missing));
    return missing < 0;
}

}  // namespace oxmoe::allreduce
