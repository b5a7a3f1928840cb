// One-shot all-reduce. Every rank pushes its rows into every peer's slots and adds all rows itself: (N - 1) x bytes on the wire,
// one trip. Each row has one CTA or one cluster, and each chunk of 16 bytes one thread.
#pragma once
#include "common.cuh"
#include "contribution.cuh"
#include "epilogue.cuh"

namespace oxmoe {

// Grid: rows x CTAs of a cluster; clusters take further rows in turn. Threads: whole warps; the threads of a cluster have one
// chunk of a row each. kAlone: clusters of one CTA.
template <class Element, int kWorld, allreduce::Work kWork, bool kAlone>
struct AllReduceOneShot {
    static constexpr int kThreads = 1024;
    static constexpr int kSharedBytes = 0;

    static __device__ __forceinline__ void run(const AllReduceParams& p) {
        using namespace allreduce;
        constexpr bool kAll = kWork == Work::kAll;
        __shared__ ExchangeSpace space;
        const int ctas = kAlone ? 1 : cluster::size();
        const int chunk = (kAlone ? 0 : cluster::rank()) * blockDim.x + threadIdx.x;
        const int rows_apart = gridDim.x / ctas;
        const bool active = chunk < p.row_chunks;
        Exchange exchange(space, kWork == Work::kSum ? 1 : ctas, (p.row_chunks + kLanes - 1) / kLanes);
        Chunk gamma;
        if (kWork != Work::kSum && active) gamma = __ldg(reinterpret_cast<const Chunk*>(p.gamma) + chunk);

        pdl::wait();
        // This comes after the wait: a successor that starts now finds at most this kernel before it.
        pdl::launch_dependents();
        const Epilogue<Element, kWork, kAlone ? 32 : kMaxGroups> epilogue(p, exchange);
        int row = blockIdx.x / ctas;
        Chunk mine, next, residual;
        if (active && row < p.tokens) {
            // These loads start before the epoch is here; the stores wait for the epoch.
            mine = contribution<Element, kAll, false>(p, row * p.row_chunks + chunk);
            residual = epilogue.residual(row * p.row_chunks + chunk);
        }
        const Begin begin = begin_call(p);
        Watch<kWorld> watch(p, begin.epoch);
        Greeting<kWorld> greeting(p, begin);
        const uint64_t turn = p.slots + (begin.epoch & 1) * kWorld * p.slot_bytes;
        const auto slot = [&](int owner, int sender) {
            return reinterpret_cast<Chunk*>(workspace(p, owner) + turn + sender * p.slot_bytes);
        };
        const auto push = [&](int at, const Chunk& value) {
            const Chunk sent = sendable(value);
#pragma unroll
            for (int hop = 1; hop < kWorld; ++hop) {  // each rank starts at another peer
                if (begin.sends) store_relaxed(slot((p.rank + hop) % kWorld, p.rank) + at, sent);
            }
            return sent;
        };

        greeting.send();
        if (active && row < p.tokens) mine = push(row * p.row_chunks + chunk, mine);
        finish_reading_epoch(p, begin.epoch);
        exchange.ready();
        epilogue.pad();

        for (; row < p.tokens; row += rows_apart) {
            const int at = row * p.row_chunks + chunk, next_at = at + rows_apart * p.row_chunks;
            const bool more = row + rows_apart < p.tokens;
            Chunk value;
            float squares = 0;
            if (active) {
                if (more)
                    next = push(next_at, contribution<Element, kAll, false>(p, next_at));  // travels while this row is awaited
                Chunk part[kWorld];
                receive<kWorld>(part, p.rank, mine, [&](int peer) { return slot(p.rank, peer) + at; }, watch);
                value = sum_in_rank_order<Element>(part);
                if (kWork != Work::kSum) squares = epilogue.add_residual(at, value, residual);
            }
            if (kWork != Work::kSum && active && more) residual = epilogue.residual(next_at);
            greeting.listen();
            float scale = 0;
            if (kWork != Work::kSum) {
                epilogue.put(chunk, squares);
                scale = epilogue.scale();
            }
            Chunk norm[1] = {Chunk{0, 0, 0, 0}};
            if (active) {
                if (kWork == Work::kSum) {
                    epilogue.store_sum(at, value);
                } else {
                    norm[0] = epilogue.store_norm(at, value, scale, gamma);
                }
#pragma unroll
                for (int hop = 1; hop < kWorld; ++hop) slot(p.rank, (p.rank + hop) % kWorld)[at] = empty_chunk();
                mine = next;
            }
            epilogue.quantise(row, chunk, norm);
        }
        greeting.finish(watch);
    }
};

}  // namespace oxmoe
