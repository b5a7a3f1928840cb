// Grouped GEMM for any GPU from sm_80, with bf16 tokens and packed weights of 4 or 8 bits, which have a scale for each 16 or 32
// of a row. portable.cuh has the loop. Here codes and scales of a block come through shared memory in their order in memory, and
// each warp decodes its own A fragments in registers. All warps lie along the weight rows, so a weight is decoded once for all
// tokens of the tile.
//
// p.weights are the codes and p.block_scales the scales, both of ceil(rows / 64) x ceil(k / 64) blocks for each expert. Sums are
// multiplied by p.expert_scales before the bias. Tokens and codes are zero beyond k, so a scale there may have any finite value.
// Codes do not depend on p.layout, but the bias does.
//
// `Packed` is the form of the weights, such as mxfp4::Form.
#pragma once
#include "../common/mxfp4.cuh"
#include "portable.cuh"

namespace oxmoe {

// The constants and multipliers of a form of packed weights. A thread has kVectors vectors of 16 bytes of a block's codes, one
// for every 2048 bytes; each has a part of the k16 steps. A quad shares kScaleWords words of scales.
template <typename Packed>
struct PortableForm {
    static constexpr int kVectors = Packed::kCodeBytes / 2048, kScaleWords = Packed::kQuadScales / 4;
    static constexpr bool kFactorsOfHalves = Packed::kFactorsOfHalves;

    // The multipliers of a k16 step of the block.
    static __device__ __forceinline__ auto multipliers(const uint32_t (&scales)[kScaleWords], int step) {
        if constexpr (kScaleWords == 1)
            return Packed::multipliers({scales[0]}, step / Packed::kGroupSteps);
        else if constexpr (kScaleWords == 2)
            return Packed::multipliers({scales[0], scales[1]}, step / Packed::kGroupSteps);
        else
            return Packed::multipliers({scales[0], scales[1], scales[2]}, step / Packed::kGroupSteps);
    }
};

template <bool Gated, typename Packed, int Tokens, int Rows, int Warps, int Stages, int Vector>
struct GroupedGemmPackedPortable {
    using Form = PortableForm<Packed>;
    using Element = __nv_bfloat16;
    using Shape = PortableShape<Element, Gated, Tokens, Rows, Warps, 1, Vector, StraightRows<Gated>>;
    using Loop = PortableLoop<GroupedGemmPackedPortable>;

    // A stage has the codes of its blocks, then their scales.
    static constexpr int kVectorBytes = 2048, kCodeBytes = Form::kVectors * kVectorBytes;
    static constexpr int kBlocks = Rows / mxfp4::kBlockRows;
    static constexpr int kScaleWords = Form::kScaleWords, kScaleBytes = kScaleWords * mxfp4::kScaleBytes;
    static constexpr int kWeightBytes = kBlocks * (kCodeBytes + kScaleBytes);
    static constexpr int kThreads = Shape::kThreads, kStages = Stages;
    // With one group a decoded weight serves half of the mma.
    static constexpr int kFewestGroups = Tokens == 16 || Packed::kOneTile ? 1 : 2;
    static constexpr bool kScaled = true, kRowsScaled = false;
    static constexpr int kSharedBytes = Stages * (kWeightBytes + Shape::kTokenBytes);
    static_assert(Shape::kBlockK == mxfp4::kBlockK && kCodeBytes % (16 * kThreads) == 0, "a pass copies of one block");

    static __device__ __forceinline__ void run(const GroupedGemmParams& p) { Loop::run(p); }

    static __device__ __forceinline__ float2 scales_of(const GroupedGemmParams& p, int expert) {
        if constexpr (Gated && Form::kFactorsOfHalves) return reinterpret_cast<const float2*>(p.expert_scales)[expert];
        const float scale = p.expert_scales[expert];
        return {scale, scale};
    }

    struct Weights {
        static constexpr int kPassBytes = 16 * kThreads;
        static constexpr int kScaleThreads = kScaleBytes / 16;  // threads for a block's scales

        // This thread's next 16 bytes: of codes in the unit's first block of rows, and of scales in the block of rows that it
        // copies.
        const uint8_t *codes, *scales;
        int blocks;  // blocks of rows that exist

        __device__ __forceinline__ void open(const GroupedGemmParams& p, const Tile& tile, int row_block) {
            const int row_blocks = (p.rows + mxfp4::kBlockRows - 1) / mxfp4::kBlockRows, first = row_block * kBlocks;
            const size_t block = (size_t(tile.expert) * row_blocks + first) * k_blocks(p);
            blocks = row_blocks - first;
            codes = p.weights + block * kCodeBytes + threadIdx.x * 16;
            scales = p.block_scales + (block + threadIdx.x / kScaleThreads * k_blocks(p)) * kScaleBytes +
                     threadIdx.x % kScaleThreads * 16;
        }

        __device__ __forceinline__ void copy(const GroupedGemmParams& p, int, uint32_t stage) {
            const uint32_t to = stage + threadIdx.x * 16;
#pragma unroll
            for (int i = 0; i < kBlocks * kCodeBytes / kPassBytes; ++i) {
                const int block = i * kPassBytes / kCodeBytes, within = i * kPassBytes % kCodeBytes;
                const size_t distance = block ? size_t(block * kCodeBytes) * k_blocks(p) : 0;
                sm80::copy_16_async(to + i * kPassBytes, codes + distance + within, block < blocks);
            }
            if (threadIdx.x < kBlocks * kScaleThreads)
                sm80::copy_16_async(to + kBlocks * kCodeBytes, scales, int(threadIdx.x) / kScaleThreads < blocks);
            codes += kCodeBytes;
            scales += kScaleBytes;
        }

        static __device__ __forceinline__ int k_blocks(const GroupedGemmParams& p) {
            return (p.k + mxfp4::kBlockK - 1) / mxfp4::kBlockK;
        }
    };

    // In a slice of 16 rows each lane has 16 bytes of codes for each vector, and each quad shares kScaleWords of scales.
    struct Addresses {
        uint32_t codes, scales;
        typename Shape::TokenAddress tokens;

        // NOTE: these stay in registers if issue slots are the bound: computed again for every stage, they were 14 of 220
        // instructions.
        __device__ __forceinline__ Addresses()
            : codes((first_row() * 2 + Shape::lane()) * 16),
              scales(kBlocks * kCodeBytes + (Shape::first_warp_row() / 2 + Shape::lane() / 4) * 4 * kScaleWords) {
            if (Tokens == 16) sm80::keep(codes), sm80::keep(scales), sm80::keep(tokens.row), sm80::keep(tokens.chunk);
        }

        // The warp's first row, counted in rows of 32 bytes: all rows of a vector come before those of the next vector.
        static __device__ __forceinline__ int first_row() {
            const int row = Shape::first_warp_row();
            return Form::kVectors == 1 ? row : row / mxfp4::kBlockRows * (kCodeBytes / 32) + row % mxfp4::kBlockRows;
        }
    };

    template <int Groups>
    static __device__ __forceinline__ void multiply(typename Shape::Sums& sums, const Addresses& at, uint32_t stage) {
        constexpr int kSteps = Shape::kBlockK / 16 / Form::kVectors;
        uint32_t scales[Shape::kSlices][kScaleWords];
#pragma unroll
        for (int vector = 0; vector < Form::kVectors; ++vector) {
            uint32_t codes[Shape::kSlices][4];
#pragma unroll
            for (int m = 0; m < Shape::kSlices; ++m) {
                sm80::load_shared_16(codes[m], stage + at.codes + vector * kVectorBytes + m * 512);
#pragma unroll
                for (int i = 0; i < (vector == 0 ? kScaleWords : 0); ++i)
                    scales[m][i] = sm80::load_shared_4(stage + at.scales + m * 32 * kScaleWords + i * 4);
            }
#pragma unroll
            for (int k = vector * kSteps; k < (vector + 1) * kSteps; ++k) {
                uint32_t b[Groups + Groups % 2][2];
#pragma unroll
                for (int n = 0; n < Groups; n += 2) at.tokens.load(&b[n], stage + kWeightBytes, n, k);
#pragma unroll
                for (int m = 0; m < Shape::kSlices; ++m) {
                    uint32_t a[4];
                    Packed::decode_words(codes[m], k, Form::multipliers(scales[m], k), a);
#pragma unroll
                    for (int n = 0; n < Groups; ++n) sm80::multiply_add<Element>(sums[m][n], a, b[n][0], b[n][1]);
                }
            }
        }
    }
};

}  // namespace oxmoe
