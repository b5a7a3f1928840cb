//! Kernels of packed weights on Hopper. Weights are decoded in registers, as operand A of wgmma, or of mma.sync with bf16 activations and
//! up to 32 tokens. A stage has `blocks` blocks of 64 K.

use super::*;

/// The GEMMs of a packed form and bf16 activations. `forms.rs` has their tiles.
pub const GEMM: Kernels<GemmPairParams> = Kernels::new(Row {
    arguments: &[Argument::Gated, Argument::Form, TOKENS, CONSUMERS, STAGES, BLOCKS],
    unit: "grouped_gemm_{form}_sm90",
    unit_by: &[Argument::Gated, Argument::Form],
    hopper: true,
    threads: |v| 128 * (1 + v.consumers),
    shared: Shared::Fixed(shared_bytes),
    ctas: |v| ctas_of(v, shared_bytes(v)),
    traits: |v| v.form.row().traits,
    ..Row::new(
        Family::GroupedGemmPackedSm90,
        "grouped_gemm_{form}_sm90",
        "GroupedGemmPackedSm90",
        "moe/grouped_gemm_packed_sm90.cuh",
    )
});

/// The GEMM of MXFP4 weights and e4m3 activations.
pub const MXFP4_E4M3: Kernels<GroupedGemmParams> = Kernels::new(Row {
    family: Family::GroupedGemmMxfp4E4m3Sm90,
    name: "grouped_gemm_mxfp4_e4m3_sm90",
    device_type: "GroupedGemmMxfp4E4m3Sm90",
    header: "moe/grouped_gemm_mxfp4_e4m3_sm90.cuh",
    arguments: &[Argument::Gated, TOKENS, CONSUMERS, STAGES, BLOCKS],
    unit: "",
    unit_by: &[Argument::Gated],
    shared: Shared::Fixed(e4m3_shared_bytes),
    ctas: |v| ctas_of(v, e4m3_shared_bytes(v)),
    traits: |_| &[],
    ..GEMM.row
});

/// A layer of few tokens with packed weights in one launch, with the routing inside. `warps` warps multiply. Four of them share a ring of
/// `stages` stages of `blocks` K blocks of 64 rows. Four more warps help. `experts`: most local experts, and most with a router logit.
pub const LAYER: Kernels<RoutedLayerParams> = Kernels::new(Row {
    arguments: &[
        Argument::Gated,
        Argument::Form,
        Argument::Number(|v| v.warps, ""),
        Argument::Number(|v| v.blocks, ""),
        Argument::Number(|v| v.stages, ""),
        EXPERTS,
        PLAIN,
    ],
    unit: "routed_layer_{form}_sm90",
    unit_by: &[Argument::Gated, Argument::Form],
    hopper: true,
    threads: |v| 32 * (v.warps + 4),
    shared: Shared::Fixed(|_| LAYER_SHARED_BYTES),
    ctas: |_| 2,
    traits: |_| &[Trait::OneLaunch, Trait::Counts],
    ..Row::new(
        Family::RoutedLayerPackedSm90,
        "routed_layer_{form}_sm90",
        "RoutedLayerPackedSm90",
        "moe/routed_layer_packed_sm90.cuh",
    )
});

const fn e4m3(tokens: u32, consumers: u32, stages: u32, blocks: u32) -> Kernel<GroupedGemmParams> {
    MXFP4_E4M3.with(Variant { form: Form::Mxfp4, tokens, consumers, stages, blocks, ..Variant::NONE })
}

/// The tiles for e4m3 activations. A stage has an even number of blocks.
pub const MXFP4_E4M3_TILES: [Kernel<GroupedGemmParams>; 5] =
    [e4m3(16, 1, 3, 6), e4m3(16, 2, 4, 4), e4m3(64, 3, 4, 4), e4m3(128, 3, 3, 4), e4m3(192, 3, 5, 2)];

/// The layer in one launch for up to `experts` experts. `plain`: top-k without bias and groups.
pub const fn layer(
    form: Form,
    (warps, stages, blocks): (u32, u32, u32),
    (experts, plain): (u32, bool),
) -> Kernel<RoutedLayerParams> {
    LAYER.with(Variant { form, tokens: 8, warps, blocks, stages, experts, flag: plain, ..Variant::NONE })
}

/// Shared memory of a CTA of a layer in one launch: half of an SM's, so that the next launch's CTAs start before this launch's CTAs end.
const LAYER_SHARED_BYTES: u32 = 113 * 1024;

/// Whether the tokens of a layer in one launch fit beside the rings, if they take `up` bytes for GEMM1 and `down` bytes for a tile of GEMM2.
#[allow(dead_code)] // the build script does not plan
pub fn fits_beside_rings(tile: &Variant, up: i64, down: i64) -> bool {
    let stages = tile.warps / 4 * tile.stages;
    // `Shared` has tables, two barriers for each stage, and five more. It is aligned to 128.
    let shared = (layer::few_slots_bytes(tile.experts) + 8 * (2 * stages + 5)).next_multiple_of(128);
    let rings = stages * tile.blocks * tile.form.block_bytes();
    i64::from(shared + rings) + up + 2 * down <= i64::from(LAYER_SHARED_BYTES)
}

/// Every kernel of this file.
pub fn all() -> Vec<Variant> {
    let mut all = Vec::new();
    for gated in [true, false] {
        all.extend(MXFP4_E4M3_TILES.map(|tile| tile.gated(gated).variant()));
    }
    all
}

/// Bytes of `PackedPipelineSm90::Shared`: stages, staged outputs (two chunks a consumer), row offsets and work units (two of each),
/// barriers.
fn shared_bytes(v: &Variant) -> u32 {
    let stage = (v.blocks * (v.tokens * 128 + v.consumers * v.form.block_bytes())).next_multiple_of(1024);
    // The kernels have GEMM2's epilogue too, so gated kernels stage as many bytes as others.
    (v.stages * stage + behind_stages(v, 128, v.tokens.min(32), 32)).next_multiple_of(1024)
}

/// Bytes of `PackedPipelineSm90::Shared` with e4m3 activations. The scales of three units' tokens lie before the stages.
fn e4m3_shared_bytes(v: &Variant) -> u32 {
    let stage = (v.blocks * (v.tokens * 64 + v.consumers * v.form.block_bytes())).next_multiple_of(1024);
    let (bytes, full) = if v.gated { (64, v.tokens.min(64)) } else { (128, v.tokens.min(32)) };
    let scales = (3 * v.tokens * 4).next_multiple_of(1024);
    (scales + v.stages * stage + behind_stages(v, bytes, full, 16)).next_multiple_of(1024)
}

/// Bytes after the stages: chunks of `bytes` for each of `full` tokens, row offsets, work units of `unit` bytes, barriers.
fn behind_stages(v: &Variant, bytes: u32, full: u32, unit: u32) -> u32 {
    let chunk = bytes * if v.tokens.is_multiple_of(full) && v.consumers < 4 { full } else { 16 };
    2 * v.consumers * chunk + 2 * v.tokens * 4 + 2 * unit + 8 * (2 * v.stages + 7)
}

/// CTAs that shared memory and 65536 registers allow on one SM.
fn ctas_of(v: &Variant, shared_bytes: u32) -> u32 {
    let by_registers = if v.tokens <= 32 { 768 / v.threads() } else { 1 };
    ctas_by_shared(shared_bytes).min(by_registers)
}
