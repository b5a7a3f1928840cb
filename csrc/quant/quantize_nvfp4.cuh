// Numbers to e2m1 with a scale for each block of 16 or 32 columns: NVFP4, or MXFP4. src/cpu/quantize_nvfp4.rs is the same on the
// host.
#pragma once
#include <cstdint>
#include <cuda_fp16.h>

#include "../common/nvfp4.cuh"
#include "../common/pdl.cuh"
#include "oxmoe/src/params/quant.rs.h"

namespace oxmoe {

// A thread takes eight numbers, two or four neighbours a block; those of padding write its scales. Needs x aligned to 16 bytes
// and codes to 4. There are fewer than 2^32 threads.
struct QuantizeNvfp4 {
    static constexpr int kThreads = 256;
    static constexpr int kSharedBytes = 0;

    static __device__ __forceinline__ void run(const QuantizeNvfp4Params& p) {
        pdl::wait();
        pdl::launch_dependents();
        const uint32_t blocks = p.columns / p.block, lanes = p.block / 8;
        const uint32_t padded_blocks = p.tile_rows ? (blocks + 3) / 4 * 4 : blocks, row_vectors = padded_blocks * lanes;
        const uint32_t padded_rows = p.tile_rows ? (p.rows + p.tile_rows - 1) / p.tile_rows * p.tile_rows : p.rows;
        const uint32_t thread = blockIdx.x * kThreads + threadIdx.x, number = thread / row_vectors;
        const int vector = thread - number * row_vectors, batch = number / padded_rows, row = number - batch * padded_rows;
        const bool there = batch < p.batches, inside = there && row < p.rows && vector < int(blocks * lanes);
        const bool wanted = there && (!p.row_counts || row < p.row_counts[batch]);
        const int64_t at = (int64_t(batch) * p.rows + row) * (p.columns / 8) + vector;
        float x[8] = {};
        if (inside && wanted) load(p, at, x);
        // NOTE: blocks are aligned parts of a warp, so that all of its lanes take part.
        uint32_t peak = __float_as_uint(largest<8>(x));
        for (uint32_t distance = 1; distance < lanes; distance *= 2) {
            const uint32_t other = __shfl_xor_sync(0xFFFFFFFF, peak, distance);
            peak = other > peak ? other : peak;
        }
        if (!wanted) return;
        uint32_t byte = 0;
        if (inside) {
            float scale = p.global_scale ? p.global_scale[p.of_batch ? batch : 0] : 1.f;
            if (p.inverse) scale = __fdiv_rn(1.f, scale);
            float narrow;
            if (p.powers) {
                const uint32_t most = 254u << 23;
                const uint32_t power =
                    __float_as_uint(power_of_two_above(__fmul_rn(scale, __fmul_rn(__uint_as_float(peak), 1.f / 6.f))));
                narrow = __uint_as_float(power < most ? power : most);
                byte = __float_as_uint(narrow) >> 23;
            } else {
                byte = nvfp4_scale(scale, __uint_as_float(peak));
                narrow = e4m3_value(byte);
            }
            reinterpret_cast<uint32_t*>(p.codes)[at] = e2m1_pairs(x, block_factor(scale, narrow));
        }
        if (vector % lanes) return;
        const int64_t first = int64_t(batch) * padded_rows * padded_blocks;
        p.scales[first + block_scale_offset(p.tile_rows, row, vector / lanes, padded_blocks)] = uint8_t(byte);
    }

private:
    static __device__ __forceinline__ void load(const QuantizeNvfp4Params& p, int64_t vector, float (&x)[8]) {
        const uint4* from = reinterpret_cast<const uint4*>(p.x) + (p.dtype == Dtype::F32 ? 2 * vector : vector);
        const uint4 first = from[0];
        const uint32_t words[4] = {first.x, first.y, first.z, first.w};
        if (p.dtype == Dtype::F32) {
            const uint4 second = from[1];
            const uint32_t more[4] = {second.x, second.y, second.z, second.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) x[i] = __uint_as_float(words[i]), x[4 + i] = __uint_as_float(more[i]);
            return;
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (p.dtype == Dtype::Bf16) {
                x[2 * i] = __uint_as_float(words[i] << 16), x[2 * i + 1] = __uint_as_float(words[i] & 0xFFFF0000u);
            } else {
                x[2 * i] = __half2float(__ushort_as_half(uint16_t(words[i])));
                x[2 * i + 1] = __half2float(__ushort_as_half(uint16_t(words[i] >> 16)));
            }
        }
    }
};

}  // namespace oxmoe
