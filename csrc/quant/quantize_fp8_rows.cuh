// Rows of bf16 to e4m3 with one scale each, which every group of the row gets, and the largest magnitude of all rows.
// src/cpu/quantize_fp8.rs is the same on the host.
#pragma once
#include <cstdint>

#include "../common/element.cuh"
#include "../common/fp8.cuh"
#include "../common/pdl.cuh"
#include "oxmoe/src/params/quant.rs.h"

namespace oxmoe {

// Vectors of 8 bf16.
struct Fp8Vectors {
    // The largest magnitudes of the two halves so far, NaN left out.
    static __device__ __forceinline__ void grow(uint32_t& peak, uint32_t pair) {
        const uint32_t magnitudes = pair & 0x7FFF7FFF;
        const __nv_bfloat162 larger =
            __hmax2(reinterpret_cast<const __nv_bfloat162&>(peak), reinterpret_cast<const __nv_bfloat162&>(magnitudes));
        peak = reinterpret_cast<const uint32_t&>(larger);
    }
    static __device__ __forceinline__ void grow(uint32_t& peak, const uint4& vector) {
        grow(peak, vector.x), grow(peak, vector.y), grow(peak, vector.z), grow(peak, vector.w);
    }

    static __device__ __forceinline__ float of(uint32_t peak) {
        const float2 peaks = unpack<__nv_bfloat16>(peak);
        return fmaxf(peaks.x, peaks.y);
    }

    static __device__ __forceinline__ uint2 codes(const uint4& vector, float inverse) {
        const float2 a = unpack<__nv_bfloat16>(vector.x), b = unpack<__nv_bfloat16>(vector.y);
        const float2 c = unpack<__nv_bfloat16>(vector.z), d = unpack<__nv_bfloat16>(vector.w);
        return {fp8::pack(__fmul_rn(a.x, inverse), __fmul_rn(a.y, inverse), __fmul_rn(b.x, inverse), __fmul_rn(b.y, inverse)),
                fp8::pack(__fmul_rn(c.x, inverse), __fmul_rn(c.y, inverse), __fmul_rn(d.x, inverse), __fmul_rn(d.y, inverse))};
    }
};

// `row_threads` threads a row: they hold their first kHeld vectors each, and read what comes after twice. With `Peak` one CTA
// takes all rows, whose scales lie one after the other; it leaves their largest magnitude in `given`.
struct QuantizeFp8Rows {
    static constexpr int kThreads = 256;
    static constexpr int kSharedBytes = 0;
    static constexpr int kHeld = 4;

    static __device__ __forceinline__ void run(const QuantizeFp8Params& p) {
        pdl::run(p.x_is_older, [&] { quantize(p); });
    }

    // Rows of a CTA.
    static __device__ __forceinline__ void quantize(const QuantizeFp8Params& p) {
        __shared__ float peaks[kThreads / 32];
        int64_t rows = p.row_count ? min(p.rows, int64_t(*p.row_count)) : p.rows;
        // Few rows with one scale for all are one row.
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

    // One row for each `threads` threads, of which this is one, or where not `inside` none; all threads of the CTA are here.
    // Threads inside end with `done` of the row's largest magnitude. `peaks`: of a number a warp, that no call just before has
    // used.
    template <typename F>
    static __device__ __forceinline__ void quantize(const QuantizeFp8Params& p, const uint4* x, int64_t row, bool inside,
                                                    int threads, int thread, int vectors, int groups, float* peaks, F done) {
        uint4 held[kHeld] = {};
#pragma unroll
        for (int i = 0; i < kHeld; ++i) {
            if (inside && thread + i * threads < vectors) held[i] = __ldcg(x + thread + i * threads);
        }
        uint32_t peak = 0;
#pragma unroll
        for (int i = 0; i < kHeld; ++i) Fp8Vectors::grow(peak, held[i]);
        if (inside) {
            for (int v = thread + kHeld * threads; v < vectors; v += threads) Fp8Vectors::grow(peak, __ldcg(x + v));
        }
        for (int distance = min(threads, 32) / 2; distance > 0; distance /= 2) {
            Fp8Vectors::grow(peak, __shfl_xor_sync(0xFFFFFFFF, peak, distance));
        }
        float amax = Fp8Vectors::of(peak);
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
            if (thread + i * threads < vectors) codes[thread + i * threads] = Fp8Vectors::codes(held[i], scale.inverse);
        }
        for (int v = thread + kHeld * threads; v < vectors; v += threads)
            codes[v] = Fp8Vectors::codes(__ldcg(x + v), scale.inverse);
        float* scales = reinterpret_cast<float*>(p.scales) + row * p.row_stride;
        for (int group = thread; group < groups; group += threads) scales[group * p.group_stride] = scale.scale;
        done(amax);
    }
};

// Raises `given`, which an earlier kernel made 0, to the largest magnitude of all rows. Grid: any.
struct QuantizeFp8Peak {
    static constexpr int kThreads = 256;
    static constexpr int kSharedBytes = 0;
    static constexpr int kAhead = 4;  // loads on their way at once

    static __device__ __forceinline__ void run(const QuantizeFp8Params& p) {
        __shared__ float peaks[kThreads / 32];
        pdl::wait();
        pdl::launch_dependents();
        const int64_t rows = p.row_count ? min(p.rows, int64_t(*p.row_count)) : p.rows;
        const int64_t vectors = rows * (p.columns / 8), stride = int64_t(gridDim.x) * kThreads;
        const uint4* x = reinterpret_cast<const uint4*>(p.x);
        uint32_t peak = 0;
        for (int64_t v = int64_t(blockIdx.x) * kThreads + threadIdx.x; v < vectors; v += kAhead * stride) {
            uint4 words[kAhead] = {};
#pragma unroll
            for (int i = 0; i < kAhead; ++i) {
                if (v + i * stride < vectors) words[i] = x[v + i * stride];
            }
#pragma unroll
            for (int i = 0; i < kAhead; ++i) Fp8Vectors::grow(peak, words[i]);
        }
        raise(p, peak, peaks);
    }

    // Raises `given` to what the threads of a CTA have found. `peaks`: of a number a warp.
    static __device__ __forceinline__ void raise(const QuantizeFp8Params& p, uint32_t peak, float* peaks) {
        float amax = Fp8Vectors::of(peak);
#pragma unroll
        for (int distance = 16; distance > 0; distance /= 2) amax = fmaxf(amax, __shfl_xor_sync(0xFFFFFFFF, amax, distance));
        if (threadIdx.x % 32 == 0) peaks[threadIdx.x / 32] = amax;
        __syncthreads();
        if (threadIdx.x > 0) return;
        for (int warp = 0; warp < kThreads / 32; ++warp) amax = fmaxf(amax, peaks[warp]);
        // Bits of numbers that are not negative are in the order of their values.
        if (amax > 0.f) atomicMax(reinterpret_cast<unsigned*>(p.given), __float_as_uint(amax));
    }
};

}  // namespace oxmoe
