// Quantisation of a row's norm in registers, one chunk for each thread. src/cpu/allreduce.rs (`quantise_row`) has the same bits.
#pragma once
#include "../common/nvfp4.cuh"
#include "arithmetic.cuh"
#include "oxmoe/src/params/allreduce.rs.h"

namespace oxmoe::allreduce {

// Blocks of 16 values in a row.
template <class Element>
__device__ __forceinline__ int scale_blocks(const AllReduceParams& p) {
    return p.row_chunks / (16 / kChunkValues<Element>);
}

template <class Element>
struct Narrower {
    const AllReduceParams& p;
    const float scale_factor;
    const float row_scale;  // scale of the row, for PerToken

    static constexpr int kValues = kChunkValues<Element>;
    static constexpr int kBlockLanes = 16 / kValues;

    // Stores a chunk's values as e4m3.
    __device__ __forceinline__ void store_e4m3(int at, const float (&x)[kValues]) const {
        uint32_t words[kValues / 4];
#pragma unroll
        for (int i = 0; i < kValues / 4; ++i)
            words[i] = e4m3_pair(x[4 * i], x[4 * i + 1]) | e4m3_pair(x[4 * i + 2], x[4 * i + 3]) << 16;
        uint32_t* const out = reinterpret_cast<uint32_t*>(p.narrowing.quant_out) + at * (kValues / 4);
        if constexpr (kValues == 8) {
            *reinterpret_cast<uint2*>(out) = uint2{words[0], words[1]};
        } else {
            *out = words[0];
        }
    }

    __device__ __forceinline__ void nvfp4(int row, int chunk, bool here, float (&x)[kValues]) const {
        const Narrowing& n = p.narrowing;
        const int blocks = scale_blocks<Element>(p);
        const uint32_t code = nvfp4_scale(scale_factor, across<Largest>(largest<kValues>(x), kBlockLanes));
        const uint32_t pairs = e2m1_pairs(x, block_factor(scale_factor, e4m3_value(code)));
        if (!here) return;
        const int64_t at = int64_t(row) * p.row_chunks + chunk;
        if constexpr (kValues == 8) {
            reinterpret_cast<uint32_t*>(n.quant_out)[at] = pairs;
        } else {
            reinterpret_cast<uint16_t*>(n.quant_out)[at] = uint16_t(pairs);
        }
        if (chunk % kBlockLanes) return;
        const int block = chunk / kBlockLanes;
        n.scale_out[block_scale_offset(n.tile_rows, row, block, blocks)] = uint8_t(code);
        if (!n.tile_rows || block != blocks - 1) return;
        for (int past = block + 1; past % 4; ++past) n.scale_out[block_scale_offset(n.tile_rows, row, past, blocks)] = 0;
    }

    // Stores a chunk as e4m3 with the scale of its group of chunks.
    __device__ __forceinline__ void grouped(int row, int chunk, bool here, float (&x)[kValues]) const {
        const Narrowing& n = p.narrowing;
        const float amax = across<Largest>(largest<kValues>(x), n.group_chunks);
        const float scale = power_of_two_above(fmaxf(__fdiv_rn(amax, 448.f), 1e-10f));
        const float inverse = __frcp_rn(scale);  // exact, because the scale is a power of two
#pragma unroll
        for (int i = 0; i < kValues; ++i) x[i] *= inverse;
        if (!here) return;
        store_e4m3(row * p.row_chunks + chunk, x);
        if (chunk % n.group_chunks) return;
        const int group = chunk / n.group_chunks, count = p.row_chunks / n.group_chunks;
        const auto byte = [&](int g) -> uint8_t& { return n.scale_out[(g / 4 * n.column_stride + row) * 4 + g % 4]; };
        byte(group) = uint8_t(__float_as_uint(scale) >> 23);
        if (group != count - 1) return;
        for (int past = count; past % 4; ++past) byte(past) = 0;
    }

    // All threads of a warp call this, also those past the row's end.
    __device__ __forceinline__ void narrow(int row, int chunk, const Chunk& norm) const {
        const Narrowing& n = p.narrowing;
        const bool here = chunk < p.row_chunks;
        float x[kValues];
        values_of<Element>(norm, x);
        if (n.kind == QuantKind::Nvfp4) {
            nvfp4(row, chunk, here, x);
        } else if (n.kind == QuantKind::Groups) {
            grouped(row, chunk, here, x);
        } else {
            const float inverse = __fdiv_rn(1.f, scale_factor);
#pragma unroll
            for (int i = 0; i < kValues; ++i) x[i] = n.kind == QuantKind::Fp8 ? x[i] * inverse : __fdiv_rn(x[i], row_scale);
            if (here) store_e4m3(row * p.row_chunks + chunk, x);
        }
    }
};

// A call, so that a kernel whose threads have several chunks has this code only once.
template <class Element>
__device__ __noinline__ void narrow_apart(const AllReduceParams& p, float scale_factor, float row_scale, int row, int chunk,
                                          Chunk norm) {
    Narrower<Element>{p, scale_factor, row_scale}.narrow(row, chunk, norm);
}

}  // namespace oxmoe::allreduce
