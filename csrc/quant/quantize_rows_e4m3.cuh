// Quantises rows of bf16 to e4m3 with one scale each, which moe/grouped_gemm_mxfp4_e4m3_sm90.cuh reads. src/cpu/e4m3.rs does the
// same on the host.
//
// scale = amax / 448, or 1 if that is less than 2^-126; q = x * (1 / scale), rounded to nearest even, at most 448
//
// A NaN in a row makes its scale and all its numbers NaN. An infinity makes the scale infinite, and itself becomes NaN.
#pragma once
#include <cstdint>

#include "../common/element.cuh"
#include "../common/narrow.cuh"
#include "../common/pdl.cuh"
#include "oxmoe/src/params/tiles.rs.h"
#include "walk.cuh"

namespace oxmoe {

// A CTA takes row after row. Each thread holds its first kHeld vectors of 8 numbers, and reads the later ones twice. Needs
// columns and out_columns that are multiples of 8, x aligned to 16 bytes and out to 8. Grid: any.
struct QuantizeRowsE4m3 : Cta<128> {
    static constexpr int kHeld = 4;

    static __device__ __forceinline__ void run(const QuantizeRowsParams& p) {
        __shared__ uint32_t peaks[2][kThreads / 32];
        pdl::run(p.x_is_older, [&] {
            int rows = p.rows;
            if (p.tiles) {
                const int count = *p.tile_count;
                rows = count > 0 ? p.tiles[count - 1].first + p.tiles[count - 1].count : 0;
            }
            const int vectors = p.columns / 8, out_vectors = p.out_columns / 8;
            int turn = 0;
            for (int row = blockIdx.x; row < rows; row += gridDim.x, turn ^= 1)
                quantize(p, row, vectors, out_vectors, peaks[turn]);
        });
    }

    // Quantises one row with all threads. `peaks` has a number for each warp, and the previous call has not used it.
    static __device__ __forceinline__ void quantize(const QuantizeRowsParams& p, int row, int vectors, int out_vectors,
                                                    uint32_t* peaks) {
        const uint4* x = reinterpret_cast<const uint4*>(p.x) + size_t(row) * vectors;
        uint2* out = reinterpret_cast<uint2*>(p.out) + size_t(row) * out_vectors;
        uint4 held[kHeld] = {};
#pragma unroll
        for (int i = 0; i < kHeld; ++i) {
            const int v = threadIdx.x + i * kThreads;
            if (v < vectors) held[i] = __ldcg(x + v);
        }
        uint32_t peak = 0;
#pragma unroll
        for (int i = 0; i < kHeld; ++i) peak = __vmaxu2(peak, magnitudes(held[i]));
        for (int v = threadIdx.x + kHeld * kThreads; v < vectors; v += kThreads) peak = __vmaxu2(peak, magnitudes(__ldcg(x + v)));
        const float scale = scale_of(peak, peaks), inverse = __frcp_rn(scale);
        if (threadIdx.x == 0) p.scales[row] = scale;
#pragma unroll
        for (int i = 0; i < kHeld; ++i) {
            const int v = threadIdx.x + i * kThreads;
            if (v < out_vectors) out[v] = quantized(held[i], inverse);
        }
        for (int v = threadIdx.x + kHeld * kThreads; v < out_vectors; v += kThreads) {
            out[v] = quantized(v < vectors ? __ldcg(x + v) : uint4{}, inverse);
        }
    }

private:
    // Returns the larger magnitudes of both halves: bits of bf16 without a sign are in the order of their values, NaN last.
    static __device__ __forceinline__ uint32_t magnitudes(const uint4& numbers) {
        return __vmaxu2(__vmaxu2(magnitudes(numbers.x), magnitudes(numbers.y)),
                        __vmaxu2(magnitudes(numbers.z), magnitudes(numbers.w)));
    }
    static __device__ __forceinline__ uint32_t magnitudes(uint32_t pair) { return pair & 0x7FFF7FFF; }

    static __device__ __forceinline__ float scale_of(uint32_t pair, uint32_t* peaks) {
        const uint32_t peak = __reduce_max_sync(~0u, max(pair >> 16, pair & 0xFFFF));
        if (threadIdx.x % 32 == 0) peaks[threadIdx.x / 32] = peak << 16;
        __syncthreads();
        const float scale = __fdiv_rn(__uint_as_float(max(max(peaks[0], peaks[1]), max(peaks[2], peaks[3]))), 448.f);
        return scale < 0x1p-126f ? 1.f : scale;
    }

    static __device__ __forceinline__ uint2 quantized(const uint4& numbers, float inverse) {
        return {quantized(numbers.x, inverse) | quantized(numbers.y, inverse) << 16,
                quantized(numbers.z, inverse) | quantized(numbers.w, inverse) << 16};
    }
    static __device__ __forceinline__ uint32_t quantized(uint32_t pair, float inverse) {
        const float2 numbers = unpack<__nv_bfloat16>(pair);
        const float high = __fmul_rn(numbers.y, inverse), low = __fmul_rn(numbers.x, inverse);
        return e4m3_pair(low, high);
    }
};

// Quantises only the rows of a schedule, wherever they lie. Rows of x, codes and scales have the same numbers. Grid: any.
struct QuantizeTilesE4m3 : Cta<128> {
    static __device__ __forceinline__ void run(const TileRowsParams& p) {
        __shared__ uint32_t peaks[2][kThreads / 32];
        walk::begin();
        const int vectors = p.rows.columns / 8, out_vectors = p.rows.out_columns / 8;
        int turn = 0;
        for (const auto [tile, row] : walk::Pieces(p.rows.tiles, p.rows.tile_count, p.tile_rows, 1)) {
            if (row >= tile.count) continue;
            QuantizeRowsE4m3::quantize(p.rows, tile.first + row, vectors, out_vectors, peaks[turn]);
            turn ^= 1;
        }
    }
};

}  // namespace oxmoe
