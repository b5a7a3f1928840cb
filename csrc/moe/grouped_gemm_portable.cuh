// Grouped GEMM for any GPU from sm_80: out[place] = activation(weights[expert(place)] x[row(place)] + bias[expert(place)]),
// 16-bit in and out, any rows, k and out_columns. Weights are mma's A (16 rows each), tokens its N (8). Persistent: every thread
// copies (cp.async) and every warp multiplies; copies run Stages - 1 blocks of 64 K ahead, across the borders of work units.
//
// Vector 8 needs k % 8 == 0 and 16-byte aligned x and weights; Vector 1 takes any k with loads of single elements. A tile may
// have fewer tokens than `Tokens`. Every sum adds its k16 steps in ascending order: a row's bits do not depend on the template
// arguments, on the tile or on the other rows.
#pragma once
#include <cstdint>

#include "../common/activation.cuh"
#include "../common/element.cuh"
#include "../common/pdl.cuh"
#include "../common/sm80.cuh"
#include "oxmoe/src/params.rs.h"

namespace oxmoe {

template <typename Element, bool Gated, int Tokens, int Rows, int Warps, int Stages, int Vector>
struct GroupedGemmPortable {
    static_assert(Vector == 8 || Vector == 1, "a load is 16 bytes or one element");
    static_assert(Rows == 64 || Rows == 128, "a stage has 64 or 128 weight rows");
    static_assert(Stages >= 2, "a stage is multiplied while the next is copied");

    static constexpr int kThreads = 32 * Warps;
    static constexpr int kBlockK = 64;  // 128 bytes: a row of the swizzle, all banks
    static constexpr int kRowBytes = kBlockK * 2;
    static constexpr int kStageBytes = (Rows + Tokens) * kRowBytes;  // weight rows, then tokens
    static constexpr int kSharedBytes = Stages * kStageBytes;
    static constexpr int kUnitColumns = Gated ? Rows / 2 : Rows;

    // Warps along the tokens x warps along the weight rows. Wide tiles are square a warp: the fewest shared-memory reads.
    static constexpr int kTokenWarps = Tokens == 128 ? Warps / 2 : Warps * 32 > Rows ? Warps * 32 / Rows : 1;
    static constexpr int kRowWarps = Warps / kTokenWarps;
    static constexpr int kWarpRows = Rows / kRowWarps, kWarpTokens = Tokens / kTokenWarps;
    static constexpr int kSlices = kWarpRows / 16, kGroups = kWarpTokens / 8;
    static_assert(kWarpRows % 32 == 0 && kWarpTokens % 8 == 0, "a warp stores pairs of slices, 8 tokens at a time");

    static_assert(kSharedBytes <= 99 * 1024, "sm_86, sm_89 and sm_120 give a CTA 99 KiB");

    static __device__ __forceinline__ void run(const GroupedGemmParams& p) {
        extern __shared__ __align__(128) uint8_t shared[];
        const uint32_t stages = sm80::shared_address(shared);
        // NOTE: in this order, so that the next kernel may rely on everything from before this one (schedule_is_older).
        pdl::wait();
        pdl::launch_dependents();

        const int row_blocks = (p.out_columns + kUnitColumns - 1) / kUnitColumns;
        const int units = *p.tile_count * row_blocks, k_blocks = (p.k + kBlockK - 1) / kBlockK;
        Loader loader(p, units, row_blocks);
#pragma unroll 1
        for (int s = 0; s < Stages - 1; ++s) {
            loader.copy_next(p, stages + s * kStageBytes);
            sm80::copy_commit();
        }
        int stage = 0, free_stage = Stages - 1;
        for (int unit = blockIdx.x; unit < units; unit += gridDim.x) {
            const Tile tile = p.tiles[unit / row_blocks];
            const int groups = (tile.count - first_warp_token() + 7) / 8;  // with tokens; at most 0: none, above kGroups: all
            float sums[kSlices][kGroups][4] = {};
            for (int k_block = 0; k_block < k_blocks; ++k_block) {
                sm80::copy_wait<Stages - 2>();
                __syncthreads();  // the stage is there for all, and all have read the one that is overwritten now
                loader.copy_next(p, stages + free_stage * kStageBytes);
                sm80::copy_commit();
                multiply(sums, stages + stage * kStageBytes, groups);
                stage = stage + 1 == Stages ? 0 : stage + 1;
                free_stage = free_stage + 1 == Stages ? 0 : free_stage + 1;
            }
            if (groups > 0) finish(p, tile, unit % row_blocks * kUnitColumns + first_warp_column(), sums);
        }
        sm80::copy_wait<0>();
    }

private:
    // ---- order of weight rows ----
    // An output lane has rows 2c, 2c + 1 of an 8 x 8 tile after its transposition. Fragment rows are dealt out so that its four
    // results of two such tiles are neighbours: an 8-byte store a lane, 32 bytes a token and warp.
    //   plain: slices of 16 rows are 16 outputs; the two tiles are the slice's halves.
    //   gated: the halves of a slice are 8 gate rows and the 8 matching up rows; the tiles are those of two slices, 16 outputs.

    // Output column of row `row` of the unit.
    static __host__ __device__ constexpr int column_of(int row) {
        const int within = row % 8 / 2 * 4 + row % 2;
        return Gated ? row / 32 * 16 + row / 16 % 2 * 2 + within : row / 16 * 16 + row / 8 % 2 * 2 + within;
    }
    // Weight row of an expert's output column; `up`: of its up half.
    static __device__ __forceinline__ int weight_row(const GroupedGemmParams& p, int column, bool up) {
        if (!Gated) return column;
        if (p.layout == W13Layout::Interleaved) return 2 * column + up;
        return column + (up == (p.layout == W13Layout::GateUp) ? p.out_columns : 0);
    }

    static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
    static __device__ __forceinline__ int first_warp_row() { return threadIdx.x / 32 % kRowWarps * kWarpRows; }
    static __device__ __forceinline__ int first_warp_column() { return Gated ? first_warp_row() / 2 : first_warp_row(); }
    static __device__ __forceinline__ int first_warp_token() { return threadIdx.x / 32 / kRowWarps * kWarpTokens; }

    static __device__ __forceinline__ int slot_of(const GroupedGemmParams& p, int place) {
        return p.slot_of_place ? p.slot_of_place[place] : place;
    }

    // ---- copies ----
    // 8 neighbouring threads copy one row's 128 bytes; chunk c of row r lies at chunk c ^ (r % 8).
    struct Loader {
        static constexpr int kPassRows = kThreads / 8;
        static constexpr int kTokenPasses = (Tokens + kPassRows - 1) / kPassRows;

        int unit, units, row_blocks, first_k;
        const Element* weights;        // this thread's chunk of its first row
        int first_column;              // of that row
        int token_rows[kTokenPasses];  // rows of x; -1: no token

        __device__ __forceinline__ Loader(const GroupedGemmParams& p, int units, int row_blocks)
            : unit(blockIdx.x), units(units), row_blocks(row_blocks), first_k(0) {
            if (unit < units) open(p);
        }

        static __device__ __forceinline__ int row() { return threadIdx.x / 8; }
        static __device__ __forceinline__ int chunk_k() { return threadIdx.x % 8 * 8; }

        __device__ __forceinline__ void open(const GroupedGemmParams& p) {
            const Tile tile = p.tiles[unit / row_blocks];
            first_column = unit % row_blocks * kUnitColumns + column_of(row());
            const size_t weight = size_t(tile.expert) * p.rows + weight_row(p, first_column, row() / 8 % 2);
            weights = reinterpret_cast<const Element*>(p.weights) + weight * p.k + chunk_k();
#pragma unroll
            for (int i = 0; i < kTokenPasses; ++i) {
                const int token = row() + i * kPassRows;
                token_rows[i] = token < tile.count
                                    ? p.slot_of_place ? p.slot_of_place[tile.first + token] / p.row_divisor : tile.first + token
                                    : -1;
            }
        }

        // Starts the copies of the next block of K, if any.
        __device__ __forceinline__ void copy_next(const GroupedGemmParams& p, uint32_t stage) {
            if (unit >= units) return;
            const int left = p.k - first_k - chunk_k();  // elements from this thread's chunk to the end of the row
            const int column_step = Gated && p.layout == W13Layout::Interleaved ? 2 * p.k : p.k;
            const uint32_t to = stage + row() * kRowBytes + (threadIdx.x % 8 ^ row() % 8) * 16;
#pragma unroll
            for (int i = 0; i < Rows / kPassRows; ++i) {
                const int column = column_of(i * kPassRows);
                copy(to + i * kPassRows * kRowBytes, weights + first_k + int64_t(column) * column_step,
                     first_column + column < p.out_columns ? left : 0);
            }
            const Element* x = reinterpret_cast<const Element*>(p.x) + first_k + chunk_k();
#pragma unroll
            for (int i = 0; i < kTokenPasses; ++i)
                if (kPassRows <= Tokens || row() < Tokens)
                    copy(to + (Rows + i * kPassRows) * kRowBytes, x + int64_t(token_rows[i]) * p.k,
                         token_rows[i] >= 0 ? left : 0);
            first_k += kBlockK;
            if (first_k >= p.k) {
                first_k = 0;
                unit += gridDim.x;
                if (unit < units) open(p);
            }
        }

        // 8 elements, of which the first `real` (may be negative) exist; the others become zero.
        static __device__ __forceinline__ void copy(uint32_t to, const Element* from, int real) {
            if constexpr (Vector == 8) {
                sm80::copy_16_async(to, from, real > 0);
            } else {
                uint32_t words[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const uint16_t* bits = reinterpret_cast<const uint16_t*>(from) + 2 * i;
                    words[i] = (2 * i < real ? bits[0] : 0u) | (2 * i + 1 < real ? bits[1] : 0u) << 16;
                }
                sm80::store_shared_16(to, {words[0], words[1], words[2], words[3]});
            }
        }
    };

    // ---- a stage's product ----

    // Multiplies the groups of 8 tokens that exist, rounded up to pairs.
    // NOTE: only where a warp's sums are few: with 128 a thread, full tiles lost more than the last tile of an expert gained.
    template <int Groups = kGroups>
    static __device__ __forceinline__ void multiply(float (&sums)[kSlices][kGroups][4], uint32_t stage, int groups) {
        if constexpr (Groups > 2 && kSlices * kGroups <= 16) {
            if (groups <= Groups - 2) return multiply<Groups - 2>(sums, stage, groups);
        }
        if (groups > 0) multiply_groups<Groups>(sums, stage);
    }

    template <int Groups>
    static __device__ __forceinline__ void multiply_groups(float (&sums)[kSlices][kGroups][4], uint32_t stage) {
        // Lane l addresses weight row l % 16, half l / 16 of 16 K; token l % 8 (+ 8 in the upper 16 lanes), half l / 8 % 2.
        const uint32_t weights = stage + (first_warp_row() + lane() % 16) * kRowBytes;
        const uint32_t weights_chunk = (lane() / 16 ^ lane() % 8) * 16;
        const uint32_t tokens =
            stage + (Rows + first_warp_token() + lane() % 8 + (kGroups > 1 ? lane() / 16 * 8 : 0)) * kRowBytes;
        const uint32_t tokens_chunk = (lane() / 8 % 2 ^ lane() % 8) * 16;
#pragma unroll
        for (int k = 0; k < kBlockK / 16; ++k) {
            uint32_t a[kSlices][4], b[Groups][2];
#pragma unroll
            for (int n = 0; n < Groups; n += 2) load_tokens(&b[n], tokens + n * 8 * kRowBytes + (tokens_chunk ^ k * 32));
#pragma unroll
            for (int m = 0; m < kSlices; ++m) sm80::load_matrix_4(a[m], weights + m * 16 * kRowBytes + (weights_chunk ^ k * 32));
#pragma unroll
            for (int m = 0; m < kSlices; ++m)
#pragma unroll
                for (int n = 0; n < Groups; ++n) sm80::multiply_add<Element>(sums[m][n], a[m], b[n][0], b[n][1]);
        }
    }

    static __device__ __forceinline__ void load_tokens(uint32_t (*b)[2], uint32_t row) {
        if constexpr (kGroups > 1) {
            uint32_t tiles[4];
            sm80::load_matrix_4(tiles, row);
            b[0][0] = tiles[0], b[0][1] = tiles[1], b[1][0] = tiles[2], b[1][1] = tiles[3];
        } else {
            sm80::load_matrix_2(*b, row);
        }
    }

    // ---- epilogue ----

    static __device__ __forceinline__ void finish(const GroupedGemmParams& p, const Tile& tile, int first_column,
                                                  float (&sums)[kSlices][kGroups][4]) {
        if (p.bias) add_bias(p, tile.expert, first_column, sums);
        if (p.slot_weights) multiply_slot_weights(p, tile, sums);
        if (Gated || p.activation.kind != ActivationKind::Identity) activate(activation_of(p, tile.expert), sums);
        store(p, tile, first_column, sums);
    }

    static __device__ __forceinline__ float bias_at(const GroupedGemmParams& p, size_t index) {
        if (p.bias_dtype == Dtype::F32) return reinterpret_cast<const float*>(p.bias)[index];
        return to_float(reinterpret_cast<const Element*>(p.bias)[index]);
    }

    static __device__ __forceinline__ void add_bias(const GroupedGemmParams& p, int expert, int first_column,
                                                    float (&sums)[kSlices][kGroups][4]) {
#pragma unroll
        for (int m = 0; m < kSlices; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int column = first_column + column_of(m * 16 + half * 8) + column_of(lane() / 4);
                const float bias =
                    column < p.out_columns ? bias_at(p, size_t(expert) * p.rows + weight_row(p, column, half)) : 0.f;
#pragma unroll
                for (int n = 0; n < kGroups; ++n)
#pragma unroll
                    for (int i = 0; i < 2; ++i) sums[m][n][2 * half + i] += bias;
            }
    }

    static __device__ __forceinline__ void multiply_slot_weights(const GroupedGemmParams& p, const Tile& tile,
                                                                 float (&sums)[kSlices][kGroups][4]) {
#pragma unroll
        for (int n = 0; n < kGroups; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int token = first_warp_token() + n * 8 + lane() % 4 * 2 + i;
                const float weight = token < tile.count ? p.slot_weights[slot_of(p, tile.first + token)] : 0.f;
#pragma unroll
                for (int m = 0; m < kSlices; ++m) sums[m][n][i] *= weight, sums[m][n][2 + i] *= weight;
            }
    }

    // In place; gated results replace the gates.
    static __device__ __forceinline__ void activate(const Activation& activation, float (&sums)[kSlices][kGroups][4]) {
        auto apply = [&](auto each) {
#pragma unroll
            for (int m = 0; m < kSlices; ++m)
#pragma unroll
                for (int n = 0; n < kGroups; ++n)
#pragma unroll
                    for (int i = 0; i < (Gated ? 2 : 4); ++i)
                        sums[m][n][i] = each(sums[m][n][i], Gated ? sums[m][n][2 + i % 2] : 0.f);
        };
        // The usual kind has its own code; the others share one.
        if (Gated && activation.kind == ActivationKind::Swiglu) {
            apply(SwigluFunction(activation));
        } else {
            const ActivationFunction function(activation);
            apply([&](float x, float up) { return Gated ? function(x) * up : function(x); });
        }
    }

    static __device__ __forceinline__ void store(const GroupedGemmParams& p, const Tile& tile, int first_column,
                                                 const float (&sums)[kSlices][kGroups][4]) {
        const bool wide = p.out_columns % 4 == 0;
        const int first_token = first_warp_token() + lane() / 4, column = first_column + lane() % 4 * 4;
        Element* out = reinterpret_cast<Element*>(p.out) + size_t(tile.first + first_token) * p.out_columns + column;
#pragma unroll
        for (int n = 0; n < kGroups; ++n, out += 8 * size_t(p.out_columns)) {
#pragma unroll
            for (int q = 0; q < (Gated ? kSlices / 2 : kSlices); ++q) {
                const float* low = Gated ? sums[2 * q][n] : sums[q][n];
                const float* high = Gated ? sums[2 * q + 1][n] : sums[q][n] + 2;
                const uint2 results = {sm80::transpose(pack<Element>(low[0], low[1])),
                                       sm80::transpose(pack<Element>(high[0], high[1]))};
                if (first_token + n * 8 >= tile.count) continue;
                if (wide) {
                    if (column + q * 16 < p.out_columns) *reinterpret_cast<uint2*>(out + q * 16) = results;
                } else {
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        if (column + q * 16 + i < p.out_columns)
                            reinterpret_cast<uint16_t*>(out)[q * 16 + i] =
                                uint16_t((i < 2 ? results.x : results.y) >> i % 2 * 16);
                }
            }
        }
    }
};

}  // namespace oxmoe
