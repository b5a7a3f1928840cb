// The parts that the grouped GEMMs with mma.sync share: the loop over work units and stages, tokens in shared memory, the
// epilogue. Weights are mma's A (16 rows each), tokens its N (8). The kernels are persistent: every thread copies (cp.async) and
// every warp multiplies. Copies run Stages - 1 blocks of 64 K ahead, across the borders of work units. A tile may have fewer
// tokens than `Tokens`.
//
// Every sum adds its k16 steps in ascending order: a row's bits do not depend on the shape, on the tile or on the other rows.
#pragma once
#include <cstdint>

#include "../common/activation.cuh"
#include "../common/element.cuh"
#include "../common/pdl.cuh"
#include "../common/sm80.cuh"
#include "oxmoe/src/params/moe.rs.h"

namespace oxmoe {

// Orders of a unit's weight rows. `column_of` is the output column of a row of the unit. `neighbours` returns what a lane stores:
// 4 neighbouring columns from `first_column` on, made of its two results (columns 2c, 2c + 1) of each of two 8 x 8 tiles.
//
// DealtRows deals rows out so that a lane's four results are neighbours.
//   plain: slices of 16 rows are 16 outputs; the two tiles are the slice's halves.
//   gated: the halves of a slice are 8 gate rows and the 8 matching up rows; the tiles are those of two slices, 16 outputs.
template <bool Gated>
struct DealtRows {
    static __host__ __device__ constexpr int column_of(int row) {
        const int within = row % 8 / 2 * 4 + row % 2;
        return Gated ? row / 32 * 16 + row / 16 % 2 * 2 + within : row / 16 * 16 + row / 8 % 2 * 2 + within;
    }
    static __device__ __forceinline__ int first_column() { return threadIdx.x % 4 * 4; }
    static __device__ __forceinline__ uint2 neighbours(uint32_t low, uint32_t high) { return {low, high}; }
};

// Rows in their order (gated: 8 gate rows, the 8 matching up rows, and so on). The tiles are 8 columns apart, so the lanes of a
// pair exchange results. The even lane stores outputs of the first tile, the odd lane those of the second.
template <bool Gated>
struct StraightRows {
    static __host__ __device__ constexpr int column_of(int row) { return Gated ? row / 16 * 8 + row % 8 : row; }
    static __device__ __forceinline__ int first_column() { return threadIdx.x % 2 * 8 + threadIdx.x % 4 / 2 * 4; }
    static __device__ __forceinline__ uint2 neighbours(uint32_t low, uint32_t high) {
        const bool odd = threadIdx.x % 2;
        const uint32_t other = __shfl_xor_sync(~0u, odd ? low : high, 1);
        return odd ? uint2{other, high} : uint2{low, other};
    }
};

// A CTA's shape, and the parts that do not depend on weights. `TokenWarps` of the warps lie along the tokens. Vector 8 needs
// k % 8 == 0 and 16-byte aligned x; Vector 1 takes any k with loads of single elements. Rows of x and out lie at multiples of
// `InColumns` and `OutColumns` elements. Elements between a row's end and the next row are not read, and are written as zeros.
template <typename Element, bool Gated, int Tokens, int Rows, int Warps, int TokenWarps, int Vector, typename Order,
          int InColumns = 1, int OutColumns = 1>
struct PortableShape {
    static_assert(Vector == 8 || Vector == 1, "a load is 16 bytes or one element");
    static_assert(Rows == 64 || Rows == 128, "a stage has 64 or 128 weight rows");

    static constexpr int kThreads = 32 * Warps;
    static constexpr int kBlockK = 64;  // 128 bytes: a row of the swizzle, all banks
    static constexpr int kRowBytes = kBlockK * 2;
    static constexpr int kTokenBytes = Tokens * kRowBytes;
    static constexpr int kUnitColumns = Gated ? Rows / 2 : Rows;

    static constexpr int kTokenWarps = TokenWarps, kRowWarps = Warps / TokenWarps;
    static constexpr int kWarpRows = Rows / kRowWarps, kWarpTokens = Tokens / kTokenWarps;
    static constexpr int kSlices = kWarpRows / 16, kGroups = kWarpTokens / 8;
    static_assert(kWarpRows % 32 == 0 && kWarpTokens % 8 == 0, "a warp stores pairs of slices, 8 tokens at a time");

    using Sums = float[kSlices][kGroups][4];

    // Columns of a row of x and of out, in memory.
    static __device__ __forceinline__ int x_columns(const GroupedGemmParams& p) {
        return InColumns == 1 ? p.k : (p.k + InColumns - 1) / InColumns * InColumns;
    }
    static __device__ __forceinline__ int all_columns(const GroupedGemmParams& p) {
        return OutColumns == 1 ? p.out_columns : (p.out_columns + OutColumns - 1) / OutColumns * OutColumns;
    }

    static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
    static __device__ __forceinline__ int first_warp_row() { return threadIdx.x / 32 % kRowWarps * kWarpRows; }
    static __device__ __forceinline__ int first_warp_column() { return Gated ? first_warp_row() / 2 : first_warp_row(); }
    static __device__ __forceinline__ int first_warp_token() { return threadIdx.x / 32 / kRowWarps * kWarpTokens; }

    // Returns the row of an expert's output column in tensors of the checkpoint's layout. With `up` it is the row of the column's
    // up half.
    static __device__ __forceinline__ int weight_row(const GroupedGemmParams& p, int column, bool up) {
        if (!Gated) return column;
        if (p.layout == W13Layout::Interleaved) return 2 * column + up;
        return column + (up == (p.layout == W13Layout::GateUp) ? p.out_columns : 0);
    }

    static __device__ __forceinline__ int slot_of(const GroupedGemmParams& p, int place) {
        return p.slot_of_place ? p.slot_of_place[place] : place;
    }

    // ---- copies ----
    // 8 neighbouring threads copy one row's 128 bytes; chunk c of row r lies at chunk c ^ (r % 8).
    static constexpr int kPassRows = kThreads / 8;

    static __device__ __forceinline__ int copy_row() { return threadIdx.x / 8; }
    static __device__ __forceinline__ int copy_k() { return threadIdx.x % 8 * 8; }
    static __device__ __forceinline__ int copy_offset() {
        return copy_row() * kRowBytes + (threadIdx.x % 8 ^ copy_row() % 8) * 16;
    }

    // Copies 8 elements. Only the first `real` (may be negative) exist; the others become zero.
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

    // The rows of x that a thread copies for one unit.
    struct TokenRows {
        static constexpr int kPasses = (Tokens + kPassRows - 1) / kPassRows;
        int rows[kPasses];  // -1: no token

        __device__ __forceinline__ void open(const GroupedGemmParams& p, const Tile& tile) {
#pragma unroll
            for (int i = 0; i < kPasses; ++i) {
                const int token = copy_row() + i * kPassRows;
                rows[i] = token < tile.count
                              ? p.slot_of_place ? p.slot_of_place[tile.first + token] / p.row_divisor : tile.first + token
                              : -1;
            }
        }

        __device__ __forceinline__ void copy(const GroupedGemmParams& p, int first_k, uint32_t to) const {
            const int left = p.k - first_k - copy_k();  // elements from this thread's chunk to the end of the row
            const Element* x = reinterpret_cast<const Element*>(p.x) + first_k + copy_k();
#pragma unroll
            for (int i = 0; i < kPasses; ++i)
                if (kPassRows <= Tokens || copy_row() < Tokens)
                    PortableShape::copy(to + copy_offset() + i * kPassRows * kRowBytes, x + int64_t(rows[i]) * x_columns(p),
                                        rows[i] >= 0 ? left : 0);
        }
    };

    // ---- tokens of a stage ----

    // The address this lane reads from: token l % 8 (+ 8 in the upper 16 lanes) of the warp's, half l / 8 % 2 of 16 K.
    struct TokenAddress {
        uint32_t row, chunk;

        __device__ __forceinline__ TokenAddress()
            : row((first_warp_token() + lane() % 8 + (kGroups > 1 ? lane() / 16 * 8 : 0)) * kRowBytes),
              chunk((lane() / 8 % 2 ^ lane() % 8) * 16) {}

        // Loads the fragments of groups n and n + 1 in k16 step k, or of group n alone if the warp has only one group.
        __device__ __forceinline__ void load(uint32_t (*b)[2], uint32_t tokens, int n, int k) const {
            const uint32_t address = tokens + row + n * 8 * kRowBytes + (chunk ^ k * 32);
            if constexpr (kGroups > 1) {
                uint32_t tiles[4];
                sm80::load_matrix_4(tiles, address);
                b[0][0] = tiles[0], b[0][1] = tiles[1], b[1][0] = tiles[2], b[1][1] = tiles[3];
            } else {
                sm80::load_matrix_2(*b, address);
            }
        }
    };

    // ---- epilogue ----

    static __device__ __forceinline__ void finish(const GroupedGemmParams& p, const Tile& tile, int first_column, Sums& sums) {
        if (p.bias) add_bias(p, tile.expert, first_column, sums);
        if (p.slot_weights) multiply_slot_weights(p, tile, sums);
        if (Gated || p.activation.kind != ActivationKind::Identity) activate(activation_of(p, tile.expert), sums);
        store(p, tile, first_column, sums);
    }

    static __device__ __forceinline__ float bias_at(const GroupedGemmParams& p, size_t index) {
        if (p.bias_dtype == Dtype::F32) return reinterpret_cast<const float*>(p.bias)[index];
        if (p.bias_dtype == Dtype::F16) return to_float(reinterpret_cast<const __half*>(p.bias)[index]);
        return to_float(reinterpret_cast<const __nv_bfloat16*>(p.bias)[index]);
    }

    static __device__ __forceinline__ void add_bias(const GroupedGemmParams& p, int expert, int first_column, Sums& sums) {
        with_rows(
            p, expert, first_column, sums, [&](size_t row) { return bias_at(p, row); },
            [](float& sum, float bias) { sum += bias; });
    }

    // Multiplies sums by the scales of their weight rows.
    static __device__ __forceinline__ void multiply_rows(const GroupedGemmParams& p, int expert, int first_column, Sums& sums) {
        with_rows(
            p, expert, first_column, sums, [&](size_t row) { return p.expert_scales[row]; },
            [](float& sum, float scale) { sum *= scale; });
    }

    // Applies a number of its weight row to every sum.
    template <typename Number, typename Apply>
    static __device__ __forceinline__ void with_rows(const GroupedGemmParams& p, int expert, int first_column, Sums& sums,
                                                     Number number_of, Apply apply) {
#pragma unroll
        for (int m = 0; m < kSlices; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int column = first_column + Order::column_of(m * 16 + half * 8) + Order::column_of(lane() / 4);
                const float number =
                    column < p.out_columns ? number_of(size_t(expert) * p.rows + weight_row(p, column, half)) : 0.f;
#pragma unroll
                for (int n = 0; n < kGroups; ++n)
#pragma unroll
                    for (int i = 0; i < 2; ++i) apply(sums[m][n][2 * half + i], number);
            }
    }

    static __device__ __forceinline__ void multiply_slot_weights(const GroupedGemmParams& p, const Tile& tile, Sums& sums) {
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

    // Applies the activation in place; gated results replace the gates.
    static __device__ __forceinline__ void activate(const Activation& activation, Sums& sums) {
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
        } else if (Gated && activation.kind == ActivationKind::Situ) {
            apply(SituFunction(activation));
        } else {
            const ActivationFunction function(activation);
            apply([&](float x, float up) { return Gated ? function(x) * up : function(x); });
        }
    }

    static __device__ __forceinline__ void store(const GroupedGemmParams& p, const Tile& tile, int first_column,
                                                 const Sums& sums) {
        const bool wide = all_columns(p) % 4 == 0;
        const int first_token = first_warp_token() + lane() / 4, column = first_column + Order::first_column();
        Element* out = reinterpret_cast<Element*>(p.out) + size_t(tile.first + first_token) * all_columns(p) + column;
#pragma unroll
        for (int n = 0; n < kGroups; ++n, out += 8 * size_t(all_columns(p))) {
#pragma unroll
            for (int q = 0; q < (Gated ? kSlices / 2 : kSlices); ++q) {
                const float* low = Gated ? sums[2 * q][n] : sums[q][n];
                const float* high = Gated ? sums[2 * q + 1][n] : sums[q][n] + 2;
                const uint2 results = Order::neighbours(sm80::transpose(pack<Element>(low[0], low[1])),
                                                        sm80::transpose(pack<Element>(high[0], high[1])));
                if (first_token + n * 8 >= tile.count) continue;
                if (wide) {
                    if (column + q * 16 < all_columns(p)) *reinterpret_cast<uint2*>(out + q * 16) = results;
                } else {
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        if (column + q * 16 + i < all_columns(p))
                            reinterpret_cast<uint16_t*>(out)[q * 16 + i] =
                                uint16_t((i < 2 ? results.x : results.y) >> i % 2 * 16);
                }
            }
        }
    }
};

// The loop of a `Kernel`. It needs its Shape, kStages, kWeightBytes of a stage (tokens lie after them) and
//   Weights                   open(p, tile, row block), then copy(p, first k, stage) block after block
//   Addresses                 the part of a thread's addresses in a stage that is the same in all stages
//   multiply<Groups>          a stage's product for that many groups of 8 tokens, at least kFewestGroups
//   scales_of(p, expert)      the multipliers of the sums of gate (or all) and up rows, if kScaled is true
// If kRowsScaled is true, sums are multiplied by p.expert_scales, if any.
template <typename Kernel>
struct PortableLoop {
    using Shape = typename Kernel::Shape;
    using Sums = typename Shape::Sums;
    static constexpr int kStages = Kernel::kStages, kBlockK = Shape::kBlockK, kGroups = Shape::kGroups;
    static constexpr int kStageBytes = Kernel::kWeightBytes + Shape::kTokenBytes;
    static constexpr int kSharedBytes = kStages * kStageBytes;
    static_assert(kStages >= 2, "a stage is multiplied while the next is copied");
    static_assert(kSharedBytes <= 99 * 1024, "sm_86, sm_89 and sm_120 give a CTA 99 KiB");

    static __device__ __forceinline__ void run(const GroupedGemmParams& p) {
        extern __shared__ __align__(128) uint8_t shared[];
        const uint32_t stages = sm80::shared_address(shared);
        // NOTE: this order lets the next kernel rely on everything from before this one (schedule_is_older).
        pdl::wait();
        pdl::launch_dependents();

        const int row_blocks = (Shape::all_columns(p) + Shape::kUnitColumns - 1) / Shape::kUnitColumns;
        const int units = *p.tile_count * row_blocks, k_blocks = (p.k + kBlockK - 1) / kBlockK;
        const typename Kernel::Addresses addresses;
        Loader loader(p, units, row_blocks);
#pragma unroll 1
        for (int s = 0; s < kStages - 1; ++s) {
            loader.copy_next(p, stages + s * kStageBytes);
            sm80::copy_commit();
        }
        int stage = 0, free_stage = kStages - 1;
        for (int unit = blockIdx.x; unit < units; unit += gridDim.x) {
            const Tile tile = p.tiles[unit / row_blocks];
            // Groups with tokens: at most 0 means none, above kGroups means all.
            const int groups = (tile.count - Shape::first_warp_token() + 7) / 8;
            [[maybe_unused]] float2 scales;  // scales of the sums; they are read now and needed in the end
            if constexpr (Kernel::kScaled) scales = Kernel::scales_of(p, tile.expert);
            Sums sums = {};
            for (int k_block = 0; k_block < k_blocks; ++k_block) {
                sm80::copy_wait<kStages - 2>();
                __syncthreads();  // the stage is there for all threads, and all have read the one that is overwritten now
                loader.copy_next(p, stages + free_stage * kStageBytes);
                sm80::copy_commit();
                multiply(sums, addresses, stages + stage * kStageBytes, groups);
                stage = stage + 1 == kStages ? 0 : stage + 1;
                free_stage = free_stage + 1 == kStages ? 0 : free_stage + 1;
            }
            if (groups > 0) {
                const int first_column = unit % row_blocks * Shape::kUnitColumns + Shape::first_warp_column();
                if constexpr (Kernel::kScaled) multiply_all(sums, scales);
                if constexpr (Kernel::kRowsScaled) {
                    if (p.expert_scales) Shape::multiply_rows(p, tile.expert, first_column, sums);
                }
                Shape::finish(p, tile, first_column, sums);
            }
        }
        sm80::copy_wait<0>();
    }

private:
    struct Loader {
        int unit, units, row_blocks, first_k;
        typename Kernel::Weights weights;
        typename Shape::TokenRows tokens;

        __device__ __forceinline__ Loader(const GroupedGemmParams& p, int units, int row_blocks)
            : unit(blockIdx.x), units(units), row_blocks(row_blocks), first_k(0) {
            if (unit < units) open(p);
        }

        __device__ __forceinline__ void open(const GroupedGemmParams& p) {
            const Tile tile = p.tiles[unit / row_blocks];
            weights.open(p, tile, unit % row_blocks);
            tokens.open(p, tile);
        }

        // Starts the copies of the next block of K, if any.
        __device__ __forceinline__ void copy_next(const GroupedGemmParams& p, uint32_t stage) {
            if (unit >= units) return;
            weights.copy(p, first_k, stage);
            tokens.copy(p, first_k, stage + Kernel::kWeightBytes);
            first_k += kBlockK;
            if (first_k >= p.k) {
                first_k = 0;
                unit += gridDim.x;
                if (unit < units) open(p);
            }
        }
    };

    // Multiplies the groups of 8 tokens that exist, rounded up to pairs (or one).
    // NOTE: this happens only if a warp's sums are few: with 128 a thread, full tiles lost more than the last tile of an expert
    // gained.
    template <int Groups = kGroups>
    static __device__ __forceinline__ void multiply(Sums& sums, const typename Kernel::Addresses& addresses, uint32_t stage,
                                                    int groups) {
        if constexpr (Groups > Kernel::kFewestGroups && Shape::kSlices * kGroups <= 16) {
            constexpr int kFewer = Groups > 2 ? Groups - 2 : 1;
            if (groups <= kFewer) return multiply<kFewer>(sums, addresses, stage, groups);
        }
        if (groups > 0) Kernel::template multiply<Groups>(sums, addresses, stage);
    }

    static __device__ __forceinline__ void multiply_all(Sums& sums, float2 scales) {
#pragma unroll
        for (int m = 0; m < Shape::kSlices; ++m)
#pragma unroll
            for (int n = 0; n < kGroups; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) sums[m][n][i] *= i < 2 ? scales.x : scales.y;
    }
};

}  // namespace oxmoe
