// Two-shot all-reduce in one launch, alone or with residual and RMSNorm. The message, as one flat array, is cut into N ranges:
//   scatter  every rank pushes its values of range o to rank o;
//   reduce   rank o adds the N contributions to its range in rank order and pushes the sums to everybody;
//   finish   every rank adds the residual and normalises all rows.
// 2 (N - 1) / N x bytes on the wire: only sums are gathered. Residual and norm of all rows cost device memory traffic, which
// overlaps.
#pragma once
#include "common.cuh"

namespace oxmoe {

// Grid: scatter_ctas + reduce_ctas + finish_ctas, meant to be resident at once so that the stages overlap; in this order, so that
// those which wait come behind those they wait for. Threads: whole warps, kChunks of them one a chunk of a row.
template <class Element, int kWorld, int kChunks>
class AllReduceTwoShot {
    using Chunk = allreduce::Chunk;

    // Loads in flight of a scattering thread: kUnroll x peers.
    static constexpr int kUnroll = kWorld == 2 ? 4 : kWorld == 4 ? 2 : 1;
    static constexpr int kLanes = allreduce::kLanes;

    const AllReduceParams& p;
    allreduce::Watch<kWorld>& watch;
    const uint64_t turn;
    const int total;

    __device__ AllReduceTwoShot(const AllReduceParams& params, allreduce::Watch<kWorld>& w, uint32_t epoch)
        : p(params),
          watch(w),
          turn(params.slots + (epoch & 1) * kWorld * params.slot_bytes),
          total(params.tokens * params.row_chunks) {}

    __device__ const Chunk* input() const { return reinterpret_cast<const Chunk*>(p.input); }
    __device__ Chunk* slot(int owner, int sender) const {
        return reinterpret_cast<Chunk*>(allreduce::workspace(p, owner) + turn + sender * p.slot_bytes);
    }
    __device__ Chunk* gathered(int rank) const { return reinterpret_cast<Chunk*>(allreduce::workspace(p, rank) + p.gathered); }

    __device__ __forceinline__ void scatter(int cta) const {
        const int step = kUnroll * blockDim.x;
        for (int base = cta * step + threadIdx.x; base < p.range; base += p.scatter_ctas * step) {
            Chunk value[kUnroll][kWorld];
#pragma unroll
            for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
                for (int hop = 1; hop < kWorld; ++hop) {  // each rank starts at another peer
                    const int i = base + u * blockDim.x, at = (p.rank + hop) % kWorld * p.range + i;
                    if (i < p.range && at < total) value[u][hop] = input()[at];
                }
            }
#pragma unroll
            for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
                for (int hop = 1; hop < kWorld; ++hop) {
                    const int owner = (p.rank + hop) % kWorld;
                    const int i = base + u * blockDim.x, at = owner * p.range + i;
                    if (i < p.range && at < total) {
                        allreduce::store_relaxed(slot(owner, p.rank) + i, allreduce::sendable(value[u][hop]));
                    }
                }
            }
        }
    }

    __device__ __forceinline__ void reduce(int cta) const {
        const int first = p.rank * p.range, owned = min(p.range, total - first);
        for (int i = cta * blockDim.x + threadIdx.x; i < owned; i += p.reduce_ctas * blockDim.x) {
            Chunk part[kWorld];
            const auto from = [&](int peer) { return slot(p.rank, peer) + i; };
            allreduce::receive<kWorld>(part, p.rank, input()[first + i], from, watch);
            const Chunk sum = allreduce::sum_in_rank_order<Element>(part);  // never looks empty: additions give other NaNs
#pragma unroll
            for (int hop = 1; hop <= kWorld; ++hop) {  // the last hop is ourselves
                const int peer = (p.rank + hop) % kWorld;
                allreduce::store_relaxed(gathered(peer) + first + i, sum);
                if (hop < kWorld) slot(p.rank, peer)[i] = allreduce::empty_chunk();
            }
        }
    }

    // All owners deliver their ranges from the front at the same time, so rows are taken from the ranges in turn.
    __device__ __forceinline__ void finish(int cta, float (&group_sum)[2][allreduce::kMaxGroups]) const {
        const int lane = threadIdx.x % kLanes, groups = (p.row_chunks + kLanes - 1) / kLanes;
        const int rows_per_range = (p.tokens + kWorld - 1) / kWorld;
        const bool norm = p.gamma != nullptr;
        Chunk* const sums = gathered(p.rank);
        int half = 0;  // one barrier a row is enough with two halves
        for (int turn = cta; turn < rows_per_range * kWorld; turn += p.finish_ctas) {
            const int row = turn % kWorld * rows_per_range + turn / kWorld;
            if (row >= p.tokens) continue;
            const int at = row * p.row_chunks + threadIdx.x;
            Chunk value[kChunks], sum[kChunks];
            if (norm) {
#pragma unroll
                for (int k = 0; k < kChunks; ++k) {
                    if (threadIdx.x + k * blockDim.x < p.row_chunks) {
                        value[k] = reinterpret_cast<const Chunk*>(p.residual_in)[at + k * blockDim.x];
                    }
                }
            }
            int missing;
            do {
                missing = -1;
#pragma unroll
                for (int k = 0; k < kChunks; ++k) {
                    if (threadIdx.x + k * blockDim.x < p.row_chunks) {
                        sum[k] = allreduce::load_relaxed(sums + at + k * blockDim.x);
                        if (!allreduce::is_written(sum[k])) missing = at + k * blockDim.x;
                    }
                }
            } while (missing >= 0 && !watch.give_up(missing / p.range, 2));
            if (!norm) {
#pragma unroll
                for (int k = 0; k < kChunks; ++k) {
                    if (threadIdx.x + k * blockDim.x >= p.row_chunks) break;
                    reinterpret_cast<Chunk*>(p.output)[at + k * blockDim.x] = sum[k];
                    sums[at + k * blockDim.x] = allreduce::empty_chunk();
                }
                continue;
            }
#pragma unroll
            for (int k = 0; k < kChunks; ++k) {
                const int chunk = threadIdx.x + k * blockDim.x;
                float squares = 0;
                if (chunk < p.row_chunks) {
                    sums[at + k * blockDim.x] = allreduce::empty_chunk();
                    value[k] = allreduce::add<Element>(sum[k], value[k]);
                    squares = allreduce::sum_of_squares<Element>(value[k]);
                }
                const float group = allreduce::warp_sum(squares);
                if (lane == 0 && chunk / kLanes < groups) group_sum[half][chunk / kLanes] = group;
            }
            __syncthreads();
            const float scale = allreduce::norm_scale<Element>(p, group_sum[half], groups);
            half ^= 1;
#pragma unroll
            for (int k = 0; k < kChunks; ++k) {
                const int chunk = threadIdx.x + k * blockDim.x;
                if (chunk >= p.row_chunks) break;
                const Chunk gamma = __ldg(reinterpret_cast<const Chunk*>(p.gamma) + chunk);
                reinterpret_cast<Chunk*>(p.norm_out)[at + k * blockDim.x] =
                    allreduce::normalised<Element>(value[k], scale, p.weight_bias, gamma);
                reinterpret_cast<Chunk*>(p.residual_out)[at + k * blockDim.x] = value[k];
            }
        }
    }

public:
    static constexpr int kThreads = 512;
    static constexpr int kSharedBytes = 0;

    static __device__ __forceinline__ void run(const AllReduceParams& p) {
        using namespace allreduce;
        __shared__ float group_sum[2][kMaxGroups];
        pdl::wait();
        // After the wait: a successor that starts now finds at most this kernel before it.
        pdl::launch_dependents();
        const uint32_t epoch = begin_call(p);
        Watch<kWorld> watch(p, epoch);
        Greeting<kWorld> greeting(p, epoch);
        const AllReduceTwoShot shot(p, watch, epoch);

        greeting.send();
        int cta = blockIdx.x;
        if (cta < p.scatter_ctas) shot.scatter(cta);
        finish_reading_epoch(p, epoch);
        greeting.finish(watch);
        cta -= p.scatter_ctas;
        if (cta >= 0 && cta < p.reduce_ctas) shot.reduce(cta);
        cta -= p.reduce_ctas;
        if (cta >= 0) shot.finish(cta, group_sum);
    }
};

}  // namespace oxmoe
