// The row of a checkpoint's matrix for a row of the packed form.
#pragma once
#include <cstdint>

#include "oxmoe/src/params/common.rs.h"

namespace oxmoe {

// Returns the weight row of fragment row g (`half` 0) or g + 8 (`half` 1) of a slice of 16, or -1 for padding. `p` has rows,
// gated and layout.
template <typename Params>
__device__ __forceinline__ int weight_row_of_slice(const Params& p, int slice, int g, int half) {
    if (!p.gated) return 16 * slice + 8 * half + g < p.rows ? 16 * slice + 8 * half + g : -1;
    const int column = 8 * slice + g, columns = p.rows / 2;
    if (column >= columns) return -1;
    switch (p.layout) {
        case W13Layout::Interleaved:
            return 2 * column + half;
        case W13Layout::UpGate:
            return (1 - half) * columns + column;
        case W13Layout::GateUp64:
            return column / 64 * 128 + column % 64 + 64 * half;
        case W13Layout::UpGate64:
            return column / 64 * 128 + column % 64 + 64 * (1 - half);
        default:
            return half * columns + column;
    }
}

}  // namespace oxmoe
