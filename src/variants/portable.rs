//! Grouped GEMMs for any GPU from sm_80, with mma.sync and cp.async in 99 KB of shared memory.

use super::*;

/// The GEMM of 16-bit weights. `vector`: elements of a load, 8, or 1 if K is no multiple of 8.
pub const PLAIN: Kernels<GroupedGemmParams> = Kernels::new(Row {
    arguments: &[Argument::Element, Argument::Gated, TOKENS, ROWS, WARPS, STAGES, VECTOR],
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
});

/// The GEMM of a packed form. `forms.rs` has the tiles.
pub const PACKED: Kernels<GroupedGemmParams> = Kernels::new(Row {
    family: Family::GroupedGemmPackedPortable,
    name: "grouped_gemm_{form}_portable",
    device_type: "GroupedGemmPackedPortable",
    header: "moe/grouped_gemm_packed_portable.cuh",
    arguments: &[Argument::Gated, Argument::Form, TOKENS, ROWS, WARPS, STAGES, Argument::Number(|v| v.vector, "")],
    unit: "grouped_gemm_{form}_portable",
    unit_by: &[],
    ..PLAIN.row
});

/// The GEMM of packed MXFP4 weights, which alone takes every K. `vector`: elements of a load of activations.
pub const MXFP4: Kernels<GroupedGemmParams> = Kernels::new(Row {
    family: Family::GroupedGemmMxfp4Portable,
    arguments: &[Argument::Gated, Argument::Form, TOKENS, ROWS, WARPS, STAGES, VECTOR],
    unit_by: &[Argument::Gated],
    ..PACKED.row
});

/// The GEMM of e4m3 weights with block scales.
pub const FP8: Kernels<GroupedGemmParams> = Kernels::new(Row {
    family: Family::GroupedGemmFp8Portable,
    name: "grouped_gemm_fp8_portable",
    device_type: "GroupedGemmFp8Portable",
    header: "moe/grouped_gemm_fp8_portable.cuh",
    arguments: &[Argument::Gated, TOKENS, ROWS, WARPS, STAGES],
    unit_by: &[],
    ..PLAIN.row
});

const fn tile(kernels: &Kernels<GroupedGemmParams>, tokens: u32, stages: u32) -> Kernel<GroupedGemmParams> {
    kernels.with(Variant { tokens, rows: 128, warps: 4, stages, ..Variant::NONE })
}

/// A tile of a packed form.
pub const fn packed_tile(form: Form, tokens: u32, stages: u32) -> Kernel<GroupedGemmParams> {
    PACKED.with(Variant { form, ..tile(&PLAIN, tokens, stages).variant() })
}

/// The tile with loads of one element.
const fn by_element(kernels: &Kernels<GroupedGemmParams>, tokens: u32, stages: u32) -> Kernel<GroupedGemmParams> {
    kernels.with(Variant { vector: 1, ..tile(kernels, tokens, stages).variant() })
}

/// The tiles of 16-bit weights, sorted by tokens. The tile with vector 1 serves every K that is no multiple of 8.
pub const PLAIN_TILES: [Kernel<GroupedGemmParams>; 4] =
    [tile(&PLAIN, 16, 5), tile(&PLAIN, 64, 3), tile(&PLAIN, 128, 3), by_element(&PLAIN, 64, 2)];

/// The tiles of packed MXFP4, whose stage is a third as large. They were chosen from bytes in flight, not measured. With 16 tokens a CTA
/// has 20 KiB of weights in flight, a multiprocessor 40 to 80 KiB. With 128 tokens two CTAs fit in 99 KiB.
pub const MXFP4_TILES: [Kernel<GroupedGemmParams>; 4] =
    [tile(&MXFP4, 16, 6), tile(&MXFP4, 64, 4), tile(&MXFP4, 128, 2), by_element(&MXFP4, 64, 3)];

/// A stage of e4m3 with block scales has 128 K. There are two stages, so that two CTAs fit in 99 KiB (with 16 tokens four in 163 KiB). The
/// choice was not measured.
pub const FP8_TILES: [Kernel<GroupedGemmParams>; 2] = [tile(&FP8, 16, 2), tile(&FP8, 64, 2)];

/// Bytes of the stages. A token has 128 bytes in a stage, which are 64 K (e4m3: 128 K). A weight row has 128 bytes too, or fewer if it is
/// packed. With e4m3 the stage also has the scales of tokens and of two blocks of rows.
pub fn shared_bytes(v: &Variant) -> u32 {
    let weights = match v.family {
        Family::GroupedGemmPackedPortable | Family::GroupedGemmMxfp4Portable => v.rows / 64 * v.form.block_bytes(),
        Family::GroupedGemmFp8Portable => v.rows * 128 + (v.tokens * 4 + 8).next_multiple_of(128),
        _ => v.rows * 128,
    };
    v.stages * (weights + v.tokens * 128)
}

/// Most registers of a thread. The e4m3 kernels hold a block's product beside the sums.
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
