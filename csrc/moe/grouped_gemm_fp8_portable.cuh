// Grouped GEMM of e4m3 weights and tokens with block scales, bf16 out, for any GPU from sm_80:
//   out[place] = activation(sum over blocks of 128 K: weight_scale token_scale (w . x of the block) + bias[expert(place)])
// If weight rows have scales, each sum is multiplied by the scale of its row before the bias.
//
// The frame is GroupedGemmPortable's: 128 e4m3 are a row of the swizzle, like 64 bf16. `p.k` counts pairs of elements, so that
// copies, addresses and the loop serve unchanged. Codes go through shared memory in their order in memory. A matrix load gives a
// lane four neighbouring K of a row, which become its four elements of an mma of f16. So K has another order in the mma, and both
// operands have it. A stage is a block of 128 K with its scales. Its product is added to the sums times the scales of its rows
// and tokens.
//
// Needs k % 16 == 0, out_columns % 16 == 0, no interleaved rows, 16-byte aligned x and weights. Rows of x and out lie at
// multiples of 128 columns. Columns of out from `out_columns` on are zeros, columns of x from `k` on are not read. Scales of
// weights count blocks of 128 from the first row of gate and from that of up.
#pragma once
#include "../common/e4m3_f16.cuh"
#include "grouped_gemm_portable.cuh"

namespace oxmoe {

template <bool Gated, int Tokens, int Rows, int Warps, int Stages>
struct GroupedGemmFp8Portable {
    static constexpr int kColumns = 128;  // columns of a scale
    using Base = GroupedGemmPortable<__nv_bfloat16, Gated, Tokens, Rows, Warps, Stages, 8, kColumns / 2, kColumns>;
    using Shape = typename Base::Shape;
    using Loop = PortableLoop<GroupedGemmFp8Portable>;
    using Addresses = typename Base::Addresses;
    static_assert(Shape::kTokenWarps == 1, "a weight is decoded once for all tokens of the tile");

    // A stage has the codes of weights, the scales of tokens, and the scales of gate and up rows (without a gate, one scale
    // twice).
    static constexpr int kTokenScales = Base::kWeightBytes, kRowScales = kTokenScales + Tokens * 4;
    static constexpr int kWeightBytes = (kRowScales + 8 + 127) / 128 * 128;
    static constexpr int kThreads = Shape::kThreads, kStages = Stages, kFewestGroups = 1;
    static constexpr bool kScaled = false, kRowsScaled = true;
    static constexpr int kSharedBytes = Stages * (kWeightBytes + Shape::kTokenBytes);
    static_assert(Tokens + 2 <= kThreads && Tokens % 2 == 0, "a thread copies one scale, a lane loads two");
    static_assert(Shape::kBlockK == kColumns / 2, "a stage is a block");
    static_assert(Shape::kUnitColumns <= kColumns, "the rows of a unit share a scale, or two");

    static __device__ __forceinline__ void run(const GroupedGemmParams& p) { Loop::run(p); }

    struct Weights {
        typename Base::Weights codes;
        const float* scale;  // the next scale that this thread copies: a token's, or a row block's
        bool real;

        __device__ __forceinline__ void open(const GroupedGemmParams& p, const Tile& tile, int row_block) {
            codes.open(p, tile, row_block);
            const int token = threadIdx.x, blocks = k_blocks(p);
            if (token < Tokens) {
                real = token < tile.count;
                const int place = tile.first + token;
                const int row = !real ? 0 : p.slot_of_place ? p.slot_of_place[place] / p.row_divisor : place;
                scale = p.x_scales + int64_t(row) * blocks;
            } else {
                real = token < Tokens + 2;
                const int part_blocks = Shape::all_columns(p) / kColumns;
                const bool second = Gated && (token > Tokens) == (p.layout == W13Layout::GateUp);
                const int row = row_block * Shape::kUnitColumns / kColumns + (second ? part_blocks : 0);
                scale = reinterpret_cast<const float*>(p.block_scales) +
                        (int64_t(tile.expert) * part_blocks * (Gated ? 2 : 1) + (real ? row : 0)) * blocks;
            }
        }

        __device__ __forceinline__ void copy(const GroupedGemmParams& p, int first_k, uint32_t stage) {
            codes.copy(p, first_k, stage);
            if (threadIdx.x < Tokens + 2) copy_4_async(stage + kTokenScales + threadIdx.x * 4, scale, real);
            ++scale;
        }

        static __device__ __forceinline__ int k_blocks(const GroupedGemmParams& p) {
            return Shape::x_columns(p) / Shape::kBlockK;
        }
    };

    template <int Groups>
    static __device__ __forceinline__ void multiply(typename Shape::Sums& sums, const Addresses& at, uint32_t stage) {
        float product[Shape::kSlices][Groups][4] = {};
#pragma unroll
        for (int k = 0; k < Shape::kBlockK / 16; ++k) {  // 32 bytes of a row are two mma
            uint32_t a[Shape::kSlices][4], b[Groups + Groups % 2][2];
#pragma unroll
            for (int n = 0; n < Groups; n += 2) at.tokens.load(&b[n], stage + kWeightBytes, n, k);
#pragma unroll
            for (int m = 0; m < Shape::kSlices; ++m)
                sm80::load_matrix_4(a[m], stage + at.row + m * 16 * Shape::kRowBytes + (at.chunk ^ k * 32));
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                uint32_t tokens[Groups][2];
#pragma unroll
                for (int n = 0; n < Groups; ++n) e4m3_f16::expand(b[n][half], tokens[n][0], tokens[n][1]);
#pragma unroll
                for (int m = 0; m < Shape::kSlices; ++m) {
                    uint32_t rows[4];
                    e4m3_f16::expand(a[m][2 * half], rows[0], rows[2]);
                    e4m3_f16::expand(a[m][2 * half + 1], rows[1], rows[3]);
#pragma unroll
                    for (int n = 0; n < Groups; ++n) sm80::multiply_add<__half>(product[m][n], rows, tokens[n][0], tokens[n][1]);
                }
            }
        }
        float2 row = load_2(stage + kRowScales);  // scales of fragment rows g and g + 8
        row.x *= e4m3_f16::kFactor, row.y *= e4m3_f16::kFactor;
#pragma unroll
        for (int n = 0; n < Groups; ++n) {
            const float2 token = load_2(stage + kTokenScales + (n * 8 + Shape::lane() % 4 * 2) * 4);
            const float scales[4] = {__fmul_rn(token.x, row.x), __fmul_rn(token.y, row.x), __fmul_rn(token.x, row.y),
                                     __fmul_rn(token.y, row.y)};
#pragma unroll
            for (int m = 0; m < Shape::kSlices; ++m)
#pragma unroll
                for (int i = 0; i < 4; ++i) sums[m][n][i] = __fmaf_rn(product[m][n][i], scales[i], sums[m][n][i]);
        }
    }

private:
    // Copies 4 bytes, or writes zeros if `real` is false.
    static __device__ __forceinline__ void copy_4_async(uint32_t to, const void* from, bool real) {
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(real ? 4 : 0) : "memory");
    }

    static __device__ __forceinline__ float2 load_2(uint32_t from) {
        float2 pair;
        asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(pair.x), "=f"(pair.y) : "r"(from) : "memory");
        return pair;
    }
};

}  // namespace oxmoe
