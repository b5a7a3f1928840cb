// The epilogue of a row's sums, in one shot and in two: residual, RMSNorm, quantisation. src/cpu/allreduce.rs has the same bits.
#pragma once
#include "../common/cluster.cuh"
#include "quantise.cuh"
#include "oxmoe/src/params/allreduce.rs.h"

namespace oxmoe::allreduce {

constexpr int kMaxGroups = 128;  // groups of 32 chunks in a row: 64 KB a row

// The work that a kernel can do: the sum alone; also residual and norm; or everything, of which a call asks for a part.
enum class Work { kSum, kNorm, kAll };

// Shared memory of each CTA for an exchange.
struct alignas(8) ExchangeSpace {
    uint64_t boxes[2];
    float values[2][kMaxGroups];
};

// Exchanges one value of each group of a row, from the group's warp to all warps of the row. These are the warps of a CTA or of a
// cluster. Two halves are used in turn. A warp that puts into a half again has got all values of the other half, and each warp
// put those after it had read this half.
class Exchange {
    ExchangeSpace& space_;
    const int ctas_, groups_;
    int half_ = 0;
    uint32_t parity_ = 0;

public:
    // All threads call this, and ready() before the first put(). `ctas` CTAs share a row.
    __device__ __forceinline__ Exchange(ExchangeSpace& space, int ctas, int groups)
        : space_(space), ctas_(ctas), groups_(groups) {
        if (ctas == 1) return;
        if (threadIdx.x == 0) {
            for (uint64_t& box : space.boxes) cluster::Mailbox(&box).open(groups * sizeof(float));
        }
        cluster::arrive_relaxed();
    }

    __device__ __forceinline__ void ready() const {
        if (ctas_ > 1) cluster::wait();
    }

    // All lanes of the warp that has `group` call this with the same value.
    __device__ __forceinline__ void put(int group, float value) {
        const int lane = threadIdx.x % kLanes;
        float* const place = &space_.values[half_][group];
        if (group >= groups_) return;
        if (ctas_ == 1) {
            if (lane == 0) *place = value;
        } else if (lane < ctas_) {
            // This uses a mailbox, because a cluster's barrier would wait until peers have acknowledged this thread's stores to
            // them.
            cluster::Mailbox(&space_.boxes[half_]).send(place, lane, value);
        }
    }

    // All threads call this. The values are valid until the next but one call.
    __device__ __forceinline__ const float* get() {
        const float* const values = space_.values[half_];
        if (ctas_ == 1) {
            __syncthreads();
        } else {
            const cluster::Mailbox box(&space_.boxes[half_]);
            box.receive(parity_);
            if (threadIdx.x == 0) box.reopen(groups_ * sizeof(float));
        }
        half_ ^= 1;
        parity_ ^= half_ ^ 1;
        return values;
    }

    // Lane l folds groups l, l + 32, ..., then lanes fold their results with a butterfly. A row has at most kGroups groups.
    template <class Op, int kGroups>
    __device__ __forceinline__ float fold() {
        const float* const values = get();
        const int lane = threadIdx.x % kLanes;
        float result = 0;
        // The code is straight: with few tokens kernels are as slow as their code is long and jumps.
#pragma unroll
        for (int group = 0; group < kGroups; group += kLanes) {
            const float value = values[group + lane];
            if (group + lane < groups_) result = Op()(result, value);
        }
        return across<Op>(result);
    }
};

template <class Element, Work kWork, int kGroups>
class Epilogue {
    static constexpr int kValues = kChunkValues<Element>;

    const AllReduceParams& p;
    Exchange& exchange;
    float scale_factor_ = 0;

    __device__ __forceinline__ static void store(uint8_t* to, int at, const Chunk& value) {
        reinterpret_cast<Chunk*>(to)[at] = value;
    }

    template <int kChunks>
    __device__ __forceinline__ void narrow(int row, int first, const Chunk (&norm)[kChunks]) const {
        const Narrowing& n = p.narrowing;
        float row_scale = 0;
        if (n.kind == QuantKind::PerToken) {
#pragma unroll
            for (int k = 0; k < kChunks; ++k) {
                float x[kValues];
                values_of<Element>(norm[k], x);
                const int chunk = first + k * int(blockDim.x);
                exchange.put(chunk / kLanes, across<Largest>(chunk < p.row_chunks ? largest<kValues>(x) : 0.f));
            }
            row_scale = fmaxf(__fdiv_rn(exchange.template fold<Largest, kGroups>(), 448.f), 1.f / 512 / 448);
            if (first == 0) reinterpret_cast<float*>(n.scale_out)[row] = row_scale;
        }
#pragma unroll
        for (int k = 0; k < kChunks; ++k) {
            const int chunk = first + k * int(blockDim.x);
            if constexpr (kChunks == 1) {
                Narrower<Element>{p, scale_factor_, row_scale}.narrow(row, chunk, norm[k]);
            } else {
                narrow_apart<Element>(p, scale_factor_, row_scale, row, chunk, norm[k]);
            }
        }
    }

public:
    // Call this after the wait for the kernels before.
    __device__ __forceinline__ Epilogue(const AllReduceParams& params, Exchange& rows) : p(params), exchange(rows) {
        if constexpr (kWork == Work::kAll) {
            scale_factor_ = p.narrowing.scale_factor ? *p.narrowing.scale_factor : p.narrowing.scale;
        }
    }

    __device__ __forceinline__ Chunk residual(int at) const {
        return kWork == Work::kSum ? Chunk{0, 0, 0, 0} : reinterpret_cast<const Chunk*>(p.residual_in)[at];
    }

    __device__ __forceinline__ void store_sum(int at, const Chunk& value) const { store(p.output, at, value); }

    // Turns a sum into the next residual, and returns the sum of its squares.
    __device__ __forceinline__ float add_residual(int at, Chunk& value, const Chunk& residual) const {
        if (kWork == Work::kAll && p.output) store(p.output, at, value);
        value = add<Element>(value, residual);
        return sum_of_squares<Element>(value);
    }

    // All threads that share the row call this for each of their chunks; a chunk past the row's end has squares 0. scale() comes
    // after it.
    __device__ __forceinline__ void put(int chunk, float squares) const { exchange.put(chunk / kLanes, across<Sum>(squares)); }

    // Returns 1 / sqrt(mean of squares + epsilon); every step is rounded as on the CPU.
    __device__ __forceinline__ float scale() const {
        const float mean = __fmul_rn(exchange.template fold<Sum, kGroups>(), p.inverse_hidden);
        return __frcp_rn(__fsqrt_rn(__fadd_rn(mean, p.epsilon)));
    }

    // Writes and returns the norm.
    __device__ __forceinline__ Chunk store_norm(int at, const Chunk& value, float scale, const Chunk& gamma) const {
        const Chunk norm = normalised<Element>(value, scale, p.weight_bias, gamma);
        if (kWork == Work::kNorm || p.norm_out) store(p.norm_out, at, norm);
        if (kWork == Work::kNorm || p.residual_out) store(p.residual_out, at, value);
        return norm;
    }

    // Quantises the chunks first, first + blockDim.x, ... of a row's norm. All threads that share the row call this, also those
    // past its end.
    template <int kChunks>
    __device__ __forceinline__ void quantise(int row, int first, const Chunk (&norm)[kChunks]) const {
        if (kWork == Work::kAll && p.narrowing.kind != QuantKind::None) narrow(row, first, norm);
    }

    // Stores zero scales for rows that do not exist, since readers take whole tiles of scales. All threads of the grid call this.
    __device__ __forceinline__ void pad() const {
        if constexpr (kWork != Work::kAll) return;
        const Narrowing& n = p.narrowing;
        const int first = blockIdx.x * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x;
        if (n.kind == QuantKind::Nvfp4 && n.tile_rows) {
            const int blocks = scale_blocks<Element>(p), tiles = (blocks + 3) / 4;
            const int rows = (n.tile_rows - p.tokens % n.tile_rows) % n.tile_rows;
            for (int i = first; i < rows * tiles; i += step) {
                const int64_t at = block_scale_offset(n.tile_rows, int64_t(p.tokens) + i / tiles, i % tiles * 4, blocks);
                *reinterpret_cast<uint32_t*>(n.scale_out + at) = 0;
            }
        } else if (n.kind == QuantKind::Groups) {
            // The last column has no padding after its rows.
            const int columns = (p.row_chunks / n.group_chunks + 3) / 4 - 1, rows = int(n.column_stride - p.tokens);
            for (int i = first; i < rows * columns; i += step) {
                reinterpret_cast<uint32_t*>(n.scale_out)[i / rows * n.column_stride + p.tokens + i % rows] = 0;
            }
        }
    }
};

}  // namespace oxmoe::allreduce
