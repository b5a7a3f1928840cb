//! The GEMM of dense MXFP8 on Hopper.

use super::*;

/// Few tokens: mma.sync of f16 with scales on the sums. A pass has `row_tiles` x 16 rows of b, and eight warps share K. Launches add the
/// shared memory of the scales.
pub const MM_MXFP8_FEW: Kernels<MmMxfp8FewParams> = Kernels::new(Row {
    arguments: &[TOKENS, ROW_TILES, STAGES],
    hopper: true,
    threads: |_| 256,
    shared: Shared::AtLeast(few_bytes),
    // The bound holds for rows of up to 7168 K.
    ctas: |v| least(ctas_by_shared(few_bytes(v) + scale_bytes(v, 7168)), 2),
    ..Row::new(Family::MmMxfp8FewSm90, "mm_mxfp8_few_sm90", "MmMxfp8FewSm90", "gemm/mm_mxfp8_few_sm90.cuh")
});

/// Many tokens: wgmma with b in registers. Each of `consumers` warpgroups has 64 rows of b.
pub const MM_MXFP8_WIDE: Kernels<MmMxfp8Params> = Kernels::new(Row {
    arguments: &[TOKENS, CONSUMERS, STAGES],
    hopper: true,
    threads: |v| 128 * (1 + v.consumers),
    // Stages and barriers. The size is a multiple of 1024 bytes, because stages are aligned to 1024.
    shared: Shared::Fixed(|v| {
        let (rows, tokens) = tile(v);
        (v.stages * (2 * tokens * 128 + rows * 128) + 16 * v.stages).next_multiple_of(1024)
    }),
    ..Row::new(Family::MmMxfp8WideSm90, "mm_mxfp8_wide_sm90", "MmMxfp8WideSm90", "gemm/mm_mxfp8_wide_sm90.cuh")
});

/// Brings a into the order that `MmMxfp8Wide` reads.
pub const MM_MXFP8_TOKENS: Kernels<MmMxfp8Params> = Kernels::new(Row {
    hopper: true,
    threads: |_| 256,
    ctas: |_| 4,
    ..Row::new(Family::MmMxfp8Tokens, "mm_mxfp8_tokens", "MmMxfp8Tokens", "gemm/mm_mxfp8_wide_sm90.cuh")
});

const fn few(tokens: u32, row_tiles: u32, stages: u32) -> Kernel<MmMxfp8FewParams> {
    MM_MXFP8_FEW.with(Variant { tokens, row_tiles, stages, ..Variant::NONE })
}

const fn wide(tokens: u32, consumers: u32, stages: u32) -> Kernel<MmMxfp8Params> {
    MM_MXFP8_WIDE.with(Variant { tokens, consumers, stages, ..Variant::NONE })
}

/// The kernels for few tokens, sorted by tokens. Among those of one width many rows come first, and among those of equal rows the deep
/// ring.
pub const FEW: [Kernel<MmMxfp8FewParams>; 11] = [
    few(8, 2, 8),
    few(8, 2, 4),
    few(8, 1, 8),
    few(16, 4, 3),
    few(16, 2, 5),
    few(16, 2, 3),
    few(16, 1, 5),
    few(32, 4, 3),
    few(32, 4, 2),
    few(32, 2, 4),
    few(32, 1, 3),
];
pub const WIDE: [Kernel<MmMxfp8Params>; 7] = [
    wide(64, 2, 4),
    wide(64, 3, 4),
    wide(96, 3, 4),
    wide(128, 2, 4),
    wide(128, 3, 4),
    wide(192, 3, 3),
    wide(256, 2, 2),
];

/// Every kernel of this file.
pub fn all() -> Vec<Variant> {
    let (few, wide) = (FEW.map(Kernel::variant), WIDE.map(Kernel::variant));
    few.into_iter().chain(wide).chain([MM_MXFP8_TOKENS.kernel().variant()]).collect()
}

/// Rows of b and tokens of a CTA. In the kernels for few tokens: of a pass.
pub fn tile(v: &Variant) -> (u32, u32) {
    match v.family {
        Family::MmMxfp8FewSm90 => (16 * v.row_tiles, v.tokens),
        _ => (64 * v.consumers, v.tokens),
    }
}

/// Bytes of a CTA for few tokens: rings and the sums of up to 32 rows, without the scales that lie after them.
fn few_bytes(v: &Variant) -> u32 {
    let (rows, tokens) = tile(v);
    8 * v.stages * (rows + tokens) * 64 + 8 * tokens * (rows.min(32) + 4) * 4
}

/// Bytes of the scales of the rows and tokens of a CTA for few tokens: two for 64 K, with the part of each of eight warps rounded up.
pub fn scale_bytes(v: &Variant, k: u32) -> u32 {
    let (rows, tokens) = tile(v);
    2 * 8 * k.div_ceil(64).div_ceil(8) * (rows + tokens)
}
