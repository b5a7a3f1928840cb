//! Grouped GEMMs for any GPU from sm_80: mma.sync and cp.async, in 99 KB of shared memory.

use super::*;

/// 16-bit weights. `vector`: elements of a load, 8, or 1 where K is no multiple of 8.
pub const PLAIN: Row = Row {
    arguments: &[Argument::Element, Argument::Gated, TOKENS, ROWS, WARPS, STAGES, VECTOR],
    parameters: GEMM_PARAMS,
    unit_by: &[Argument::Element, Argument::Gated],
    threads: |v| 32 * v.warps,
    shared: Shared::Fixed(shared_bytes),
    ctas,
    ..Row::new(
        Family::GroupedGemmPortable,
        "grouped_gemm_portable",
        "GroupedGemmPortable",
        "moe/grouped_gemm_portable.cuh",
    )
};

/// Packed MXFP4 weights. `vector`: of activations.
pub const MXFP4: Row = Row {
    family: Family::GroupedGemmMxfp4Portable,
    name: "grouped_gemm_mxfp4_portable",
    device_type: "GroupedGemmMxfp4Portable",
    header: "moe/grouped_gemm_mxfp4_portable.cuh",
    arguments: &[Argument::Gated, TOKENS, ROWS, WARPS, STAGES, VECTOR],
    unit_by: &[Argument::Gated],
    ..PLAIN
};

pub const MXFP8: Row = Row {
    family: Family::GroupedGemmMxfp8Portable,
    name: "grouped_gemm_mxfp8_portable",
    device_type: "GroupedGemmMxfp8Portable",
    header: "moe/grouped_gemm_mxfp8_portable.cuh",
    arguments: &[Argument::Gated, TOKENS, ROWS, WARPS, STAGES],
    unit_by: &[],
    ..PLAIN
};

pub const NVFP4: Row = Row {
    family: Family::GroupedGemmNvfp4Portable,
    name: "grouped_gemm_nvfp4_portable",
    device_type: "GroupedGemmNvfp4Portable",
    header: "moe/grouped_gemm_nvfp4_portable.cuh",
    ..MXFP8
};

/// e4m3 weights with block scales.
pub const FP8: Row = Row {
    family: Family::GroupedGemmFp8Portable,
    name: "grouped_gemm_fp8_portable",
    device_type: "GroupedGemmFp8Portable",
    header: "moe/grouped_gemm_fp8_portable.cuh",
    ..MXFP8
};

pub const fn tile(family: Family, tokens: u32, stages: u32) -> Variant {
    Variant { tokens, rows: 128, warps: 4, stages, ..Variant::of(family) }
}

const fn plain(tokens: u32, stages: u32) -> Variant {
    tile(Family::GroupedGemmPortable, tokens, stages)
}

const fn mxfp4(tokens: u32, stages: u32) -> Variant {
    tile(Family::GroupedGemmMxfp4Portable, tokens, stages)
}

/// The tiles of 16-bit weights, sorted by tokens. The one of vector 1 serves every k that is no multiple of 8.
pub const PLAIN_TILES: [Variant; 4] =
    [plain(16, 5), plain(64, 3), plain(128, 3), Variant { vector: 1, ..plain(64, 2) }];

/// The tiles of packed MXFP4, where a stage is a third as large. Chosen from bytes in flight, not measured: with 16 tokens 20 KiB of weights a
/// CTA, 40 to 80 KiB a multiprocessor; with 128, two CTAs fit in 99 KiB.
pub const MXFP4_TILES: [Variant; 4] =
    [mxfp4(16, 6), mxfp4(64, 4), mxfp4(128, 2), Variant { vector: 1, ..mxfp4(64, 3) }];

/// Packed MXFP8, NVFP4 and int4 (its tiles are in `int4.rs`) have one tile, which multiplies the tokens that there are, for few instances; two CTAs fit in 99 KiB. Not measured.
pub const MXFP8_TILES: [Variant; 1] = [tile(Family::GroupedGemmMxfp8Portable, 64, 3)];
pub const NVFP4_TILES: [Variant; 1] = [tile(Family::GroupedGemmNvfp4Portable, 64, 3)];

/// The stages of e4m3 with block scales are 128 K: two, so that two CTAs fit in 99 KiB (with 16 tokens four in 163). Not measured.
pub const FP8_TILES: [Variant; 2] =
    [tile(Family::GroupedGemmFp8Portable, 16, 2), tile(Family::GroupedGemmFp8Portable, 64, 2)];

/// The kernels of all weights that are not of 16 bits.
pub fn packed() -> impl Iterator<Item = Variant> {
    // The units of MXFP4 hold one form each.
    let mxfp4 = [true, false].into_iter().flat_map(|gated| MXFP4_TILES.map(|tile| tile.gated(gated)));
    mxfp4.chain(both_forms(&MXFP8_TILES)).chain(both_forms(&NVFP4_TILES)).chain(both_forms(&FP8_TILES))
}

/// Bytes of the stages: 128 of each token, which are 64 K, of e4m3 tokens 128. A weight row has as many; packed, 34, 36, 38 or 66; with e4m3
/// there are the scales of tokens and of two blocks of rows.
pub const fn shared_bytes(v: &Variant) -> u32 {
    let weights = match v.family {
        Family::GroupedGemmMxfp4Portable => v.rows * 34,
        Family::GroupedGemmMxfp8Portable => v.rows * 66,
        Family::GroupedGemmNvfp4Portable => v.rows * 36,
        Family::GroupedGemmInt4Portable => v.rows * int4::row_bytes(v),
        Family::GroupedGemmFp8Portable => v.rows * 128 + (v.tokens * 4 + 8).next_multiple_of(128),
        _ => v.rows * 128,
    };
    v.stages * (weights + v.tokens * 128)
}

/// Most registers a thread may have. e4m3 has a block's product beside the sums.
pub const fn registers(v: &Variant) -> u32 {
    match v.rows * v.tokens / (32 * v.warps) {
        ..=16 if !matches!(v.family, Family::GroupedGemmPortable) => 128,
        ..=64 if !matches!(v.family, Family::GroupedGemmFp8Portable) => 168,
        _ => 255,
    }
}

/// CTAs that registers allow on one multiprocessor.
pub const fn ctas(v: &Variant) -> u32 {
    65536 / (registers(v) * 32 * v.warps)
}
