// Rounds rows of bf16 to the bf16 numbers that NVFP4 has for them, or converts NVFP4 codes to these numbers.
// moe/grouped_gemm_packed_sm90.cuh reads them if activations are NVFP4. src/cpu/round_nvfp4.rs is the same on the host.
#pragma once
#include <cstdint>

#include "../common/nvfp4_round.cuh"
#include "../common/pdl.cuh"
#include "oxmoe/src/params/nvfp4.rs.h"
#include "walk.cuh"

namespace oxmoe {

// A thread takes 8 columns, and two neighbouring threads take a block. With a schedule the kernel takes its rows, and each slot
// has the global scale of its expert. Without one it takes all rows, with the first global scale. Needs columns that are a
// multiple of 16, x and out aligned to 16 bytes (codes to 4). Grid: any.
struct RoundRowsNvfp4 : Cta<256> {
    static __device__ __forceinline__ void run(const RoundNvfp4Params& p) {
        pdl::run(p.x_is_older, [&] { round(p); });
    }

private:
    // All threads of a CTA go on together, because lanes exchange their largest magnitudes.
    static __device__ __forceinline__ void round(const RoundNvfp4Params& p) {
        const uint32_t row_vectors = p.columns / 8;
        if (!p.tiles) {
            const size_t vectors = size_t(p.rows) * row_vectors, stride = size_t(gridDim.x) * kThreads;
            for (size_t first = size_t(blockIdx.x) * kThreads; first < vectors; first += stride) {
                const size_t at = first + threadIdx.x;
                convert(p, at, at, 0, at < vectors);
            }
            return;
        }
        const uint32_t slices = (p.tile_rows * row_vectors + kThreads - 1) / kThreads, units = *p.tile_count * slices;
        for (uint32_t unit = blockIdx.x; unit < units; unit += gridDim.x) {
            const Tile tile = p.tiles[unit / slices];
            const uint32_t first = unit % slices * kThreads, vectors = tile.count * row_vectors, at = first + threadIdx.x;
            if (first >= vectors) continue;
            const bool inside = at < vectors;
            const int place = tile.first + (inside ? at / row_vectors : 0);
            const int slot = p.slot_of_place ? p.slot_of_place[place] : place;
            const uint32_t vector = at % row_vectors;
            convert(p, size_t(slot / p.row_divisor) * row_vectors + vector,
                    size_t(p.by_place ? place : slot) * row_vectors + vector, tile.expert, inside);
        }
    }

    // Converts vector `from` of x to vector `to` of out.
    static __device__ __forceinline__ void convert(const RoundNvfp4Params& p, size_t from, size_t to, int expert, bool inside) {
        uint4* const written = reinterpret_cast<uint4*>(p.out) + to;
        if (!p.scales) {
            const uint4 x = inside ? __ldcg(reinterpret_cast<const uint4*>(p.x) + from) : uint4{};
            const uint4 rounded = nvfp4::round_block(x, p.global_scales[expert]);
            if (inside) *written = rounded;
            return;
        }
        if (!inside) return;
        const uint32_t codes = __ldcg(reinterpret_cast<const uint32_t*>(p.x) + from);
        const float scale = e4m3_value(__ldcg(p.scales + from / 2));
        uint32_t out[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            // The products are exact in bf16: the lower halves are 0.
            const uint32_t low = __float_as_uint(value(codes >> 8 * i) * scale),
                           high = __float_as_uint(value(codes >> (8 * i + 4)) * scale);
            out[i] = low >> 16 | (high & 0xFFFF0000u);
        }
        *written = make_uint4(out[0], out[1], out[2], out[3]);
    }

    // The value of the e2m1 code in the lowest bits. Its bits become exponent and mantissa of fp32, which has a subnormal number
    // for each of e2m1's.
    static __device__ __forceinline__ float value(uint32_t code) {
        return __uint_as_float((code & 7) << 22 | (code & 8) << 28) * 0x1p126f;
    }
};

}  // namespace oxmoe
