// One-shot all-reduce, alone or with residual and RMSNorm. Every rank pushes its rows into every peer's slots and adds all rows
// itself: (N - 1) x bytes on the wire, one trip. One cluster a row, one thread a chunk of 16 bytes.
#pragma once
#include "../common/cluster.cuh"
#include "common.cuh"

namespace oxmoe {

// Grid: rows x CTAs of a cluster, clusters take further rows in turn. Threads: whole warps, with those of the cluster one a chunk
// of a row.
template <class Element, int kWorld>
struct AllReduceOneShot {
    static constexpr int kThreads = 1024;
    static constexpr int kSharedBytes = 0;

    static __device__ __forceinline__ void run(const AllReduceParams& p) {
        using namespace allreduce;
        __shared__ float group_sum[2][kMaxGroups];  // two halves in turn: one barrier a row is enough
        const int ctas = cluster::size(), lane = threadIdx.x % kLanes;
        const int chunk = cluster::rank() * blockDim.x + threadIdx.x;
        const int group = chunk / kLanes, groups = (p.row_chunks + kLanes - 1) / kLanes;
        const int rows_apart = gridDim.x / ctas;
        const bool active = chunk < p.row_chunks, norm = p.gamma != nullptr;
        const Chunk* const input = reinterpret_cast<const Chunk*>(p.input);
        if (ctas > 1) cluster::arrive_relaxed();  // waited for before the first store into another CTA

        pdl::wait();
        // After the wait: a successor that starts now finds at most this kernel before it.
        pdl::launch_dependents();
        const uint32_t epoch = begin_call(p);
        Watch<kWorld> watch(p, epoch);
        Greeting<kWorld> greeting(p, epoch);
        const uint64_t turn = p.slots + (epoch & 1) * kWorld * p.slot_bytes;
        const auto slot = [&](int owner, int sender) {
            return reinterpret_cast<Chunk*>(workspace(p, owner) + turn + sender * p.slot_bytes);
        };
        const auto push = [&](int row) {
            const int at = row * p.row_chunks + chunk;
            const Chunk mine = sendable(input[at]);
#pragma unroll
            for (int hop = 1; hop < kWorld; ++hop) {  // each rank starts at another peer
                store_relaxed(slot((p.rank + hop) % kWorld, p.rank) + at, mine);
            }
            return mine;
        };

        greeting.send();
        int row = blockIdx.x / ctas;
        Chunk mine, next, gamma;
        if (active && row < p.tokens) mine = push(row);
        if (active && norm) gamma = __ldg(reinterpret_cast<const Chunk*>(p.gamma) + chunk);
        finish_reading_epoch(p, epoch);
        if (ctas > 1) cluster::wait();

        for (int half = 0; row < p.tokens; row += rows_apart, half ^= 1) {
            const int at = row * p.row_chunks + chunk;
            Chunk value;
            float squares = 0;
            if (active) {
                Chunk residual;
                if (norm) residual = reinterpret_cast<const Chunk*>(p.residual_in)[at];
                if (row + rows_apart < p.tokens) next = push(row + rows_apart);  // travels while we wait for this row
                Chunk part[kWorld];
                receive<kWorld>(part, p.rank, mine, [&](int peer) { return slot(p.rank, peer) + at; }, watch);
                value = sum_in_rank_order<Element>(part);
                if (norm) {
                    value = add<Element>(value, residual);
                    squares = sum_of_squares<Element>(value);
                }
            }
            greeting.listen();
            float scale = 0;
            if (norm) {
                squares = warp_sum(squares);
                if (ctas == 1) {
                    if (lane == 0 && group < groups) group_sum[half][group] = squares;
                    __syncthreads();
                } else {
                    if (lane < ctas && group < groups) cluster::store(&group_sum[half][group], lane, squares);
                    __syncwarp();
                    cluster::arrive();
                    cluster::wait();
                }
                scale = norm_scale<Element>(p, group_sum[half], groups);
            }
            if (active) {
                if (norm) {
                    reinterpret_cast<Chunk*>(p.norm_out)[at] = normalised<Element>(value, scale, p.weight_bias, gamma);
                    reinterpret_cast<Chunk*>(p.residual_out)[at] = value;
                } else {
                    reinterpret_cast<Chunk*>(p.output)[at] = value;
                }
#pragma unroll
                for (int hop = 1; hop < kWorld; ++hop) slot(p.rank, (p.rank + hop) % kWorld)[at] = empty_chunk();
                mine = next;
            }
        }
        greeting.finish(watch);
    }
};

}  // namespace oxmoe
