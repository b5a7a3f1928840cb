// GEMM1 with the kernel of grouped_gemm_fp8_wide_sm90.cuh, for experts of which a part of the rows (gate, up or all rows) ends
// inside a block of 128 weight rows. Tensor parallelism makes such parts of weights with one scale, or one scale for each row:
// the intermediate size I of a rank is a multiple of 16.
//
// `p` counts whole blocks: `p.out_columns` is I rounded up to 128, and `p.rows` is as large or (gated) twice as large. Scales and
// bias have numbers for all these rows. The copy engine writes zeros for rows that a part does not have, so that their outputs
// are zeros and nothing else of the kernel differs. If strips of 32 rows counted on through all weights, the blocks of up would
// begin inside a block of gate. So this tensor map counts parts and strips apart. A box is one strip, and a block of rows has
// four:
//   dimension         k    column of pair   lane of four   pair    part
//   size              k    2                I / 8          4       experts (gated: 2 experts)
//   stride in rows         1                8              2       I
// A box has 64 x 2 x 4 x 4 x 1 elements. The narrow kernel's map (grouped_gemm_sm90.cuh) has a dimension for the halves and one
// for the slices of 16 rows, which ends where a part does: with these parameters it serves unchanged. So do all kernels for
// GEMM2, whose maps end where the columns of w2 do.
#pragma once
#include "grouped_gemm_fp8_wide_sm90.cuh"

namespace oxmoe {

template <bool Gated, int Stages>
using GroupedGemmFp8WideCutSm90 = GroupedGemmFp8WideSm90<Gated, Stages, true>;

}  // namespace oxmoe
