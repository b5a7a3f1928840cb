// Copies scales of e4m3 rows that a caller quantised into the table that the GEMMs read. Each thread writes one scale.
#pragma once
#include <cstdint>

#include "../common/pdl.cuh"
#include "oxmoe/src/params/quant.rs.h"
#include "walk.cuh"

namespace oxmoe {

struct ExpandScales : Cta<256> {
    static __device__ __forceinline__ void run(const ExpandScalesParams& p) {
        pdl::run(p.scales_are_older, [&] { expand(p); });
    }

private:
    static __device__ __forceinline__ void expand(const ExpandScalesParams& p) {
        const int64_t at = int64_t(blockIdx.x) * kThreads + threadIdx.x;
        if (at >= int64_t(p.rows) * p.groups) return;
        const int64_t row = at / p.groups, group = at % p.groups;
        if (!p.powers) {
            p.table[at] = __ldcg(reinterpret_cast<const float*>(p.scales) + row * p.row_stride + group * p.group_stride);
            return;
        }
        const uint32_t word =
            __ldcg(reinterpret_cast<const uint32_t*>(p.scales) + row * p.row_stride + group / 4 * p.group_stride);
        const uint32_t byte = word >> group % 4 * 8 & 255;
        p.table[at] = __uint_as_float(byte == 255 ? 0x7FC00000 : byte == 0 ? 0x00400000 : byte << 23);
    }
};

}  // namespace oxmoe
