// grouped_gemm_fp8_wide_sm90.cuh for GEMM1 where a part of an expert's rows, gate, up or all of them, ends inside a block of 128
// weight rows, which tensor parallelism makes of weights with one scale, or one a row: the intermediate size I of a rank is a
// multiple of 16.
//
// `p` counts whole blocks: `p.out_columns` is I rounded up to 128, `p.rows` as many or (gated) twice as many, and scales and bias
// have numbers for all of them. What a part does not have comes as zeros from the copy engine, so that its outputs are zeros and
// nothing else of the kernel differs. The blocks of up would begin inside one of gate if strips of 32 rows counted on through all
// weights: here the tensor map counts parts and strips apart, and a box is one strip, four for a block of rows:
//   dimension         k    column of pair   lane of four   pair    part
//   size              k    2                I / 8          4       experts (gated: 2 experts)
//   stride in rows         1                8              2       I
// A box has 64 x 2 x 4 x 4 x 1 elements. The narrow kernel's map (grouped_gemm_sm90.cuh) has a dimension for the halves and one
// for the slices of 16 rows, which ends where a part does: with these parameters it serves as it is. So do all kernels for GEMM2,
// whose maps end where the columns of w2 do.
#pragma once
#include "grouped_gemm_fp8_wide_sm90.cuh"

namespace oxmoe {

template <bool Gated, int Stages>
using GroupedGemmFp8WideCutSm90 = GroupedGemmFp8WideSm90<Gated, Stages, true>;

}  // namespace oxmoe
