//! The kernels of int4 weights: the GEMMs of Hopper and of other GPUs, and the packer.

use super::*;

/// The GEMM on Hopper. A block's scales have as many bytes as NVFP4's; zero points add half as many.
pub const SM90: Kernels<GemmPairParams> = Kernels::new(Row {
    family: Family::GroupedGemmInt4Sm90,
    name: "grouped_gemm_int4_sm90",
    device_type: "GroupedGemmInt4Sm90",
    header: "moe/grouped_gemm_int4_sm90.cuh",
    arguments: &[Argument::Gated, ZEROS, TOKENS, CONSUMERS, STAGES, BLOCKS],
    unit_by: &[Argument::Gated, ZEROS],
    shared: Shared::Fixed(|v| packed::shared_bytes(v, codes(v))),
    ctas: |v| packed::ctas(v, codes(v)),
    ..packed::MXFP4.row
});

pub const PORTABLE: Kernels<GroupedGemmParams> = Kernels::new(Row {
    family: Family::GroupedGemmInt4Portable,
    name: "grouped_gemm_int4_portable",
    device_type: "GroupedGemmInt4Portable",
    header: "moe/grouped_gemm_int4_portable.cuh",
    arguments: &[Argument::Gated, ZEROS, TOKENS, ROWS, WARPS, STAGES],
    ..portable::MXFP8.row
});

pub const PACK: Kernels<PackInt4Params> =
    Kernels::new(quant::pack(Family::Int4Pack, "int4_pack", "Int4Pack", "quant/pack_int4.cuh"));

/// Bytes of a block's codes, and of its scales beyond the 128 bytes of MXFP4.
fn codes(v: &Variant) -> u32 {
    2048 + if v.flag { 256 } else { 128 }
}

/// Bytes of a row of a portable stage.
pub const fn row_bytes(v: &Variant) -> u32 {
    if v.flag {
        38
    } else {
        36
    }
}

/// The Hopper tiles without zero points: NVFP4's tiles, and before them one for few work units, as MXFP4 has.
pub const TILES: [Kernel<GemmPairParams>; 7] =
    packed::behind(packed::tile(&SM90, 16, 1, 3, 5), packed::like(&SM90, false, packed::NVFP4_TILES));
pub const FOURS: [Kernel<GemmPairParams>; 3] = packed::like(&SM90, false, packed::NVFP4_FOURS);

/// The Hopper tiles with zero points, in the sizes of `TILES` and `FOURS`.
pub const ZEROS_TILES: [Kernel<GemmPairParams>; 7] = packed::like(&SM90, true, TILES);
pub const ZEROS_FOURS: [Kernel<GemmPairParams>; 3] = packed::like(&SM90, true, FOURS);

pub const PORTABLE_TILES: [Kernel<GroupedGemmParams>; 1] = [portable::tile(&PORTABLE, 64, 3)];
pub const PORTABLE_ZEROS_TILES: [Kernel<GroupedGemmParams>; 1] = [PORTABLE_TILES[0].flag(true)];

/// Every kernel of this file.
pub fn all() -> Vec<Variant> {
    let sm90 = [&TILES[..], &FOURS, &ZEROS_TILES, &ZEROS_FOURS].into_iter().flat_map(both_forms);
    let portable = [&PORTABLE_TILES, &PORTABLE_ZEROS_TILES].into_iter().flat_map(|tiles| both_forms(tiles));
    sm90.chain(portable).chain([PACK.kernel().variant()]).collect()
}
