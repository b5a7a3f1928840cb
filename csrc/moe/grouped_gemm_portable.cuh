// Grouped GEMM for any GPU from sm_80: out[place] = activation(weights[expert(place)] x[row(place)] + bias[expert(place)]),
// 16-bit in and out, any rows, k and out_columns. portable.cuh has the loop. Here weights come through shared memory.
//
// Vector 8 needs k % 8 == 0 and 16-byte aligned x and weights; Vector 1 takes any k with loads of single elements.
#pragma once
#include "portable.cuh"

namespace oxmoe {

// `InColumns` and `OutColumns` are PortableShape's.
template <typename Element, bool Gated, int Tokens, int Rows, int Warps, int Stages, int Vector, int InColumns = 1,
          int OutColumns = 1>
struct GroupedGemmPortable {
    // In wide tiles a warp's part is square, which needs the fewest shared-memory reads.
    static constexpr int kTokenWarps = (Tokens == 128) ? Warps / 2 : (Warps * 32 > Rows) ? Warps * 32 / Rows : 1;
    using Order = DealtRows<Gated>;
    using Shape = PortableShape<Element, Gated, Tokens, Rows, Warps, kTokenWarps, Vector, Order, InColumns, OutColumns>;
    using Loop = PortableLoop<GroupedGemmPortable>;

    static constexpr int kThreads = Shape::kThreads, kStages = Stages, kFewestGroups = 2;
    static constexpr int kWeightBytes = Rows * Shape::kRowBytes;
    static constexpr bool kScaled = false, kRowsScaled = false;
    static constexpr int kSharedBytes = Stages * (kWeightBytes + Shape::kTokenBytes);

    static __device__ __forceinline__ void run(const GroupedGemmParams& p) { Loop::run(p); }

    struct Weights {
        const Element* weights;  // this thread's chunk of its first row
        int first_column;        // output column of that row

        __device__ __forceinline__ void open(const GroupedGemmParams& p, const Tile& tile, int row_block) {
            first_column = row_block * Shape::kUnitColumns + Order::column_of(Shape::copy_row());
            const size_t weight = size_t(tile.expert) * p.rows + Shape::weight_row(p, first_column, Shape::copy_row() / 8 % 2);
            weights = reinterpret_cast<const Element*>(p.weights) + weight * p.k + Shape::copy_k();
        }

        __device__ __forceinline__ void copy(const GroupedGemmParams& p, int first_k, uint32_t stage) const {
            const int left = p.k - first_k - Shape::copy_k();
            const int column_step = Gated && p.layout == W13Layout::Interleaved ? 2 * p.k : p.k;
#pragma unroll
            for (int i = 0; i < Rows / Shape::kPassRows; ++i) {
                const int column = Order::column_of(i * Shape::kPassRows);
                Shape::copy(stage + Shape::copy_offset() + i * Shape::kPassRows * Shape::kRowBytes,
                            weights + first_k + int64_t(column) * column_step, first_column + column < p.out_columns ? left : 0);
            }
        }
    };

    // Lane l addresses weight row l % 16, half l / 16 of 16 K.
    struct Addresses {
        uint32_t row, chunk;
        typename Shape::TokenAddress tokens;

        __device__ __forceinline__ Addresses()
            : row((Shape::first_warp_row() + Shape::lane() % 16) * Shape::kRowBytes),
              chunk((Shape::lane() / 16 ^ Shape::lane() % 8) * 16) {}
    };

    template <int Groups>
    static __device__ __forceinline__ void multiply(typename Shape::Sums& sums, const Addresses& at, uint32_t stage) {
#pragma unroll
        for (int k = 0; k < Shape::kBlockK / 16; ++k) {
            uint32_t a[Shape::kSlices][4], b[Groups][2];
#pragma unroll
            for (int n = 0; n < Groups; n += 2) at.tokens.load(&b[n], stage + kWeightBytes, n, k);
#pragma unroll
            for (int m = 0; m < Shape::kSlices; ++m)
                sm80::load_matrix_4(a[m], stage + at.row + m * 16 * Shape::kRowBytes + (at.chunk ^ k * 32));
#pragma unroll
            for (int m = 0; m < Shape::kSlices; ++m)
#pragma unroll
                for (int n = 0; n < Groups; ++n) sm80::multiply_add<Element>(sums[m][n], a[m], b[n][0], b[n][1]);
        }
    }
};

}  // namespace oxmoe
