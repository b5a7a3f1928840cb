// Two-shot all-reduce in one launch. The message, as one flat array, is cut into N ranges:
//   scatter  every rank pushes its values of range o to rank o;
//   reduce   rank o adds the N contributions to its range in rank order and pushes the sums to everybody;
//   finish   every rank makes the outputs of all rows.
// There are 2 (N - 1) / N x bytes on the wire, because only sums are gathered. Residual and norm of all rows cost device memory
// traffic, which overlaps.
#pragma once
#include "common.cuh"
#include "contribution.cuh"
#include "epilogue.cuh"

namespace oxmoe {

// Grid: scatter_ctas + reduce_ctas + finish_ctas, meant to be resident at once so that the stages overlap. They are in this
// order, so that CTAs that wait come after the CTAs they wait for. Threads: whole warps; each thread has kChunks chunks of a row.
template <class Element, int kWorld, allreduce::Work kWork, int kChunks>
class AllReduceTwoShot {
    using Chunk = allreduce::Chunk;
    using Epilogue = allreduce::Epilogue<Element, kWork, 16 * kChunks>;

    // Loads in flight of a scattering thread: kUnroll x peers.
    static constexpr int kUnroll = kWorld == 2 ? 4 : kWorld == 4 ? 2 : 1;

    const AllReduceParams& p;
    allreduce::Watch<kWorld>& watch;
    const uint64_t turn;
    const int total;

    __device__ AllReduceTwoShot(const AllReduceParams& params, allreduce::Watch<kWorld>& w, const allreduce::Begin& begin)
        : p(params),
          watch(w),
          turn(params.slots + (begin.epoch & 1) * kWorld * params.slot_bytes),
          total(params.tokens * params.row_chunks) {}

    __device__ __forceinline__ Chunk contribution(int at) const {
        return allreduce::contribution<Element, kWork == allreduce::Work::kAll, true>(p, at);
    }
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
                    if (i < p.range && at < total) value[u][hop] = contribution(at);
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
            // A sum without all of its parts would look right to everybody, so nobody gets it.
            if (!allreduce::receive<kWorld>(part, p.rank, contribution(first + i), from, watch)) return;
            const Chunk sum = allreduce::sum_in_rank_order<Element>(part);  // never looks empty: additions give other NaNs
#pragma unroll
            for (int hop = 1; hop <= kWorld; ++hop) {  // the last hop is this rank itself
                const int peer = (p.rank + hop) % kWorld;
                allreduce::store_relaxed(gathered(peer) + first + i, sum);
                if (hop < kWorld) slot(p.rank, peer)[i] = allreduce::empty_chunk();
            }
        }
    }

    // All owners deliver their ranges from the front at the same time, so rows are taken from the ranges in turn.
    __device__ __forceinline__ void finish(int cta, const Epilogue& epilogue) const {
        const int rows_per_range = (p.tokens + kWorld - 1) / kWorld;
        const int threads = blockDim.x;
        Chunk* const sums = gathered(p.rank);
        for (int turn = cta; turn < rows_per_range * kWorld; turn += p.finish_ctas) {
            const int row = turn % kWorld * rows_per_range + turn / kWorld;
            if (row >= p.tokens) continue;
            const int first = threadIdx.x, at = row * p.row_chunks + first;
            Chunk residual[kChunks], sum[kChunks];
#pragma unroll
            for (int k = 0; k < kChunks; ++k) {
                if (first + k * threads < p.row_chunks) residual[k] = epilogue.residual(at + k * threads);
            }
            int missing;
            do {
                missing = -1;
#pragma unroll
                for (int k = 0; k < kChunks; ++k) {
                    if (first + k * threads < p.row_chunks) {
                        sum[k] = allreduce::load_relaxed(sums + at + k * threads);
                        if (!allreduce::is_written(sum[k])) missing = at + k * threads;
                    }
                }
            } while (missing >= 0 && !watch.give_up(missing / p.range, 2));
            if constexpr (kWork == allreduce::Work::kSum) {
#pragma unroll
                for (int k = 0; k < kChunks; ++k) {
                    if (first + k * threads >= p.row_chunks) break;
                    epilogue.store_sum(at + k * threads, sum[k]);
                    sums[at + k * threads] = allreduce::empty_chunk();
                }
            } else {
#pragma unroll
                for (int k = 0; k < kChunks; ++k) {
                    float squares = 0;
                    if (first + k * threads < p.row_chunks) {
                        sums[at + k * threads] = allreduce::empty_chunk();
                        squares = epilogue.add_residual(at + k * threads, sum[k], residual[k]);
                    }
                    epilogue.put(first + k * threads, squares);
                }
                const float scale = epilogue.scale();
#pragma unroll
                for (int k = 0; k < kChunks; ++k) {
                    if (first + k * threads >= p.row_chunks) break;
                    const Chunk gamma = __ldg(reinterpret_cast<const Chunk*>(p.gamma) + first + k * threads);
                    sum[k] = epilogue.store_norm(at + k * threads, sum[k], scale, gamma);
                }
                epilogue.quantise(row, first, sum);
            }
        }
    }

public:
    static constexpr int kThreads = 512;
    static constexpr int kSharedBytes = 0;

    static __device__ __forceinline__ void run(const AllReduceParams& p) {
        using namespace allreduce;
        __shared__ ExchangeSpace space;
        Exchange exchange(space, 1, (p.row_chunks + kLanes - 1) / kLanes);
        pdl::wait();
        // This comes after the wait: a successor that starts now finds at most this kernel before it.
        pdl::launch_dependents();
        const Epilogue epilogue(p, exchange);
        const Begin begin = begin_call(p);
        Watch<kWorld> watch(p, begin.epoch);
        Greeting<kWorld> greeting(p, begin);
        const AllReduceTwoShot shot(p, watch, begin);

        greeting.send();
        int cta = blockIdx.x;
        if (cta < p.scatter_ctas && begin.sends) shot.scatter(cta);
        finish_reading_epoch(p, begin.epoch);
        epilogue.pad();
        greeting.finish(watch);
        cta -= p.scatter_ctas;
        if (cta >= 0 && cta < p.reduce_ctas && begin.sends) shot.reduce(cta);
        cta -= p.reduce_ctas;
        if (cta >= 0) shot.finish(cta, epilogue);
    }
};

}  // namespace oxmoe
