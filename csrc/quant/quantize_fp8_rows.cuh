// Quantises rows of bf16 to e4m3. Each row has one scale, which is stored for every group of the row. It also finds the largest
// magnitude of all rows. src/cpu/quantize_fp8.rs is the same on the host.
#pragma once
#include <cstdint>

#include "../common/pdl.cuh"
#include "eight.cuh"
#include "oxmoe/src/params/quant.rs.h"
#include "walk.cuh"

namespace oxmoe {

// `row_threads` threads take a row. Each holds its first kHeld vectors, and reads the later ones twice. With `Peak` one CTA takes
// all rows, whose scales lie one after the other, and leaves their largest magnitude in `given`.
struct QuantizeFp8Rows : Cta<256> {
    static constexpr int kHeld = 4;
    using Peak = eight::Peak<__nv_bfloat16>;

    static __device__ __forceinline__ void run(const QuantizeFp8Params& p) {
        pdl::run(p.x_is_older, [&] { quantize(p); });
    }

    // NOTE: eight::e4m3_codes() gives the same codes, but other machine code.
    static __device__ __forceinline__ uint2 codes_of(const uint4& vector, float inverse) {
        const float2 a = unpack<__nv_bfloat16>(vector.x), b = unpack<__nv_bfloat16>(vector.y);
        const float2 c = unpack<__nv_bfloat16>(vector.z), d = unpack<__nv_bfloat16>(vector.w);
        return {fp8::pack(__fmul_rn(a.x, inverse), __fmul_rn(a.y, inverse), __fmul_rn(b.x, inverse), __fmul_rn(b.y, inverse)),
                fp8::pack(__fmul_rn(c.x, inverse), __fmul_rn(c.y, inverse), __fmul_rn(d.x, inverse), __fmul_rn(d.y, inverse))};
    }

    // Quantises the rows of a CTA.
    static __device__ __forceinline__ void quantize(const QuantizeFp8Params& p) {
        __shared__ float peaks[kThreads / 32];
        int64_t rows = p.row_count ? min(p.rows, int64_t(*p.row_count)) : p.rows;
        // If there is one scale for all rows, the (few) rows count as one row.
        const bool one = p.scaling == Fp8Scaling::Peak;
        const int of_one = one ? int(rows) : 1;
        if (one) rows = 1;
        const int threads = one ? kThreads : p.row_threads, thread = threadIdx.x % threads;
        const int vectors = p.columns / 8 * of_one, groups = p.columns / p.group * of_one;
        const int64_t row = int64_t(blockIdx.x) * (kThreads / threads) + threadIdx.x / threads;
        // NOTE: all threads stay until the last exchange.
        const bool inside = row < rows;
        const uint4* x = reinterpret_cast<const uint4*>(p.x) + row * vectors;
        quantize(p, x, row, inside, threads, thread, vectors, groups, peaks, [&](float amax) {
            if (one && thread == 0) *p.given = amax;
        });
    }

    // Quantises one row for each `threads` threads, of which this is one. If `inside` is false, there is no row. All threads of
    // the CTA call this. Threads inside call `done` with the row's largest magnitude at the end. `peaks` has a number for each
    // warp, and the previous call has not used it.
    template <typename F>
    static __device__ __forceinline__ void quantize(const QuantizeFp8Params& p, const uint4* x, int64_t row, bool inside,
                                                    int threads, int thread, int vectors, int groups, float* peaks, F done) {
        uint4 held[kHeld] = {};
#pragma unroll
        for (int i = 0; i < kHeld; ++i) {
            if (inside && thread + i * threads < vectors) held[i] = __ldcg(x + thread + i * threads);
        }
        Peak peak;
#pragma unroll
        for (int i = 0; i < kHeld; ++i) peak.grow(held[i]);
        if (inside) {
            for (int v = thread + kHeld * threads; v < vectors; v += threads) peak.grow(__ldcg(x + v));
        }
        for (int distance = min(threads, 32) / 2; distance > 0; distance /= 2) peak.exchange(distance);
        float amax = peak.value();
        if (threads > 32) {
            if (threadIdx.x % 32 == 0) peaks[threadIdx.x / 32] = amax;
            __syncthreads();
            const int first = threadIdx.x / threads * (threads / 32);
            for (int warp = 0; warp < threads / 32; ++warp) amax = fmaxf(amax, peaks[first + warp]);
        }
        if (!inside) return;
        const fp8::Scale scale(amax, p.eps);
        uint2* codes = reinterpret_cast<uint2*>(p.codes) + row * vectors;
#pragma unroll
        for (int i = 0; i < kHeld; ++i) {
            if (thread + i * threads < vectors) codes[thread + i * threads] = codes_of(held[i], scale.inverse);
        }
        for (int v = thread + kHeld * threads; v < vectors; v += threads) codes[v] = codes_of(__ldcg(x + v), scale.inverse);
        float* scales = reinterpret_cast<float*>(p.scales) + row * p.row_stride;
        for (int group = thread; group < groups; group += threads) scales[group * p.group_stride] = scale.scale;
        done(amax);
    }
};

// Raises `given`, which an earlier kernel made 0, to the largest magnitude of all rows. Grid: any.
struct QuantizeFp8Peak : Cta<256> {
    static constexpr int kAhead = 4;  // loads in flight at once
    using Peak = eight::Peak<__nv_bfloat16>;

    static __device__ __forceinline__ void run(const QuantizeFp8Params& p) {
        __shared__ float peaks[kThreads / 32];
        walk::begin();
        const int64_t rows = p.row_count ? min(p.rows, int64_t(*p.row_count)) : p.rows;
        const int64_t vectors = rows * (p.columns / 8), stride = int64_t(gridDim.x) * kThreads;
        const uint4* x = reinterpret_cast<const uint4*>(p.x);
        Peak peak;
        for (int64_t v = int64_t(blockIdx.x) * kThreads + threadIdx.x; v < vectors; v += kAhead * stride) {
            grow(peak, x, v, stride, vectors);
        }
        raise(p, peak, peaks);
    }

    // Raises `peak` to the magnitudes of a thread's vectors, which lie `stride` apart.
    template <typename Index>
    static __device__ __forceinline__ void grow(Peak& peak, const uint4* x, Index first, Index stride, Index vectors) {
        uint4 words[kAhead] = {};
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            if (first + i * stride < vectors) words[i] = x[first + i * stride];
        }
#pragma unroll
        for (int i = 0; i < kAhead; ++i) peak.grow(words[i]);
    }

    // Raises `given` to the largest magnitude that the threads of a CTA have found. `peaks` has a number for each warp.
    static __device__ __forceinline__ void raise(const QuantizeFp8Params& p, const Peak& peak, float* peaks) {
        float amax = peak.value();
#pragma unroll
        for (int distance = 16; distance > 0; distance /= 2) amax = fmaxf(amax, __shfl_xor_sync(0xFFFFFFFF, amax, distance));
        if (threadIdx.x % 32 == 0) peaks[threadIdx.x / 32] = amax;
        __syncthreads();
        if (threadIdx.x > 0) return;
        for (int warp = 0; warp < kThreads / 32; ++warp) amax = fmaxf(amax, peaks[warp]);
        // The bits of non-negative numbers are in the order of their values.
        if (amax > 0.f) atomicMax(reinterpret_cast<unsigned*>(p.given), __float_as_uint(amax));
    }
};

// Does what QuantizeFp8Rows does, but only for the rows of a schedule, wherever they lie. Grid: any.
struct QuantizeFp8TileRows : Cta<256> {
    static __device__ __forceinline__ void run(const QuantizeFp8Params& p) {
        __shared__ float peaks[2][kThreads / 32];
        walk::begin();
        const int threads = p.row_threads, thread = int(threadIdx.x) % threads, rows = kThreads / threads;
        const int vectors = p.columns / 8, groups = p.columns / p.group;
        int turn = 0;
        for (const auto [tile, first] : walk::Pieces(p.tiles, p.tile_count, p.tile_rows, rows)) {
            const int row = first + int(threadIdx.x) / threads;
            if (first >= tile.count) continue;
            const int64_t place = tile.first + row;
            const uint4* x = reinterpret_cast<const uint4*>(p.x) + place * vectors;
            QuantizeFp8Rows::quantize(p, x, place, row < tile.count, threads, thread, vectors, groups, peaks[turn], [](float) {});
            turn ^= 1;
        }
    }
};

// Raises `given`, which an earlier kernel made 0, to the largest magnitude of a schedule's rows. Grid: any.
struct QuantizeFp8TilePeak : Cta<256> {
    static constexpr int kAhead = QuantizeFp8Peak::kAhead;

    static __device__ __forceinline__ void run(const QuantizeFp8Params& p) {
        __shared__ float peaks[kThreads / 32];
        walk::begin();
        constexpr int kUnit = kAhead * kThreads;
        const int row_vectors = p.columns / 8;
        QuantizeFp8Peak::Peak peak;
        for (const auto [tile, start] : walk::Pieces(p.tiles, p.tile_count, p.tile_rows * row_vectors, kUnit)) {
            const int first = start + int(threadIdx.x), vectors = tile.count * row_vectors;
            const uint4* x = reinterpret_cast<const uint4*>(p.x) + int64_t(tile.first) * row_vectors;
            QuantizeFp8Peak::grow(peak, x, first, kThreads, vectors);
        }
        QuantizeFp8Peak::raise(p, peak, peaks);
    }
};

}  // namespace oxmoe
