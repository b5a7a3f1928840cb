//! Kernels of packed weights on Hopper. Weights are decoded in registers, as operand A of wgmma, or of mma.sync with bf16 activations and
//! up to 32 tokens. A stage has `blocks` blocks of 64 K.

use super::*;

pub const MXFP4: Kernels<GemmPairParams> = Kernels::new(Row {
    arguments: &[Argument::Gated, TOKENS, CONSUMERS, STAGES, BLOCKS],
    unit_by: &[Argument::Gated],
    hopper: true,
    threads: |v| 128 * (1 + v.consumers),
    shared: Shared::Fixed(|v| shared_bytes(v, 2048)),
    ctas: |v| ctas(v, 2048),
    traits: &[Trait::BothGemms, Trait::Counts],
    ..Row::new(
        Family::GroupedGemmMxfp4Sm90,
        "grouped_gemm_mxfp4_sm90",
        "GroupedGemmMxfp4Sm90",
        "moe/grouped_gemm_mxfp4_sm90.cuh",
    )
});

/// The GEMM of MXFP4 weights and e4m3 activations.
pub const MXFP4_E4M3: Kernels<GroupedGemmParams> = Kernels::new(Row {
    family: Family::GroupedGemmMxfp4E4m3Sm90,
    name: "grouped_gemm_mxfp4_e4m3_sm90",
    device_type: "GroupedGemmMxfp4E4m3Sm90",
    header: "moe/grouped_gemm_mxfp4_e4m3_sm90.cuh",
    shared: Shared::Fixed(e4m3_shared_bytes),
    ctas: |v| ctas_of(v, e4m3_shared_bytes(v)),
    traits: &[],
    ..MXFP4.row
});

/// The GEMM of MXFP8 weights. A block of codes has twice MXFP4's bytes.
pub const MXFP8: Kernels<GemmPairParams> = Kernels::new(Row {
    family: Family::GroupedGemmMxfp8Sm90,
    name: "grouped_gemm_mxfp8_sm90",
    device_type: "GroupedGemmMxfp8Sm90",
    header: "moe/grouped_gemm_mxfp8_sm90.cuh",
    shared: Shared::Fixed(|v| shared_bytes(v, 4096)),
    ctas: |v| ctas(v, 4096),
    traits: &[Trait::BothGemms],
    ..MXFP4.row
});

/// The GEMM of NVFP4 weights. A block has twice MXFP4's bytes of scales.
pub const NVFP4: Kernels<GemmPairParams> = Kernels::new(Row {
    family: Family::GroupedGemmNvfp4Sm90,
    name: "grouped_gemm_nvfp4_sm90",
    device_type: "GroupedGemmNvfp4Sm90",
    header: "moe/grouped_gemm_nvfp4_sm90.cuh",
    shared: Shared::Fixed(|v| shared_bytes(v, 2048 + 128)),
    ctas: |v| ctas(v, 2048 + 128),
    ..MXFP4.row
});

/// A layer of a token or two with packed MXFP4 weights in one launch, with the routing inside. `warps` warps multiply. Four of them share a
/// ring of `stages` stages of `blocks` K blocks of 64 rows. Four more warps help.
pub const MXFP4_LAYER: Kernels<RoutedLayerParams> = Kernels::new(Row {
    arguments: &[
        Argument::Gated,
        Argument::Number(|v| v.warps, ""),
        Argument::Number(|v| v.blocks, ""),
        Argument::Number(|v| v.stages, ""),
    ],
    unit_by: &[Argument::Gated],
    hopper: true,
    threads: |v| 32 * (v.warps + 4),
    shared: Shared::Fixed(|_| LAYER_SHARED_BYTES),
    ctas: |_| 2,
    traits: &[Trait::OneLaunch, Trait::Counts],
    ..Row::new(
        Family::RoutedLayerMxfp4Sm90,
        "routed_layer_mxfp4_sm90",
        "RoutedLayerMxfp4Sm90",
        "moe/routed_layer_mxfp4_sm90.cuh",
    )
});

pub const fn tile<P: Signature>(
    kernels: &Kernels<P>,
    tokens: u32,
    consumers: u32,
    stages: u32,
    blocks: u32,
) -> Kernel<P> {
    kernels.with(Variant { tokens, consumers, stages, blocks, ..Variant::NONE })
}

const fn mxfp4(tokens: u32, consumers: u32, stages: u32, blocks: u32) -> Kernel<GemmPairParams> {
    tile(&MXFP4, tokens, consumers, stages, blocks)
}

/// The tiles, sorted by tokens. Each serves every narrower tile at its own width too. The first is for few work units.
pub const MXFP4_TILES: [Kernel<GemmPairParams>; 7] = [
    mxfp4(16, 1, 3, 5),
    mxfp4(16, 2, 3, 5),
    mxfp4(32, 3, 3, 5),
    mxfp4(64, 3, 4, 3),
    mxfp4(80, 3, 4, 3),
    mxfp4(128, 3, 4, 2),
    mxfp4(192, 3, 5, 1),
];

/// The tiles for a K of whole stages of four blocks. One is taken if it is as narrow as the tile whose place it takes.
pub const MXFP4_FOURS: [Kernel<GemmPairParams>; 3] = [mxfp4(48, 4, 3, 4), mxfp4(64, 4, 3, 4), mxfp4(80, 3, 3, 4)];

const fn e4m3(tokens: u32, consumers: u32, stages: u32, blocks: u32) -> Kernel<GroupedGemmParams> {
    tile(&MXFP4_E4M3, tokens, consumers, stages, blocks)
}

/// The tiles for e4m3 activations. A stage has an even number of blocks.
pub const MXFP4_E4M3_TILES: [Kernel<GroupedGemmParams>; 5] =
    [e4m3(16, 1, 3, 6), e4m3(16, 2, 4, 4), e4m3(64, 3, 4, 4), e4m3(128, 3, 3, 4), e4m3(192, 3, 5, 2)];

const fn mxfp8(tokens: u32, consumers: u32, stages: u32, blocks: u32) -> Kernel<GemmPairParams> {
    tile(&MXFP8, tokens, consumers, stages, blocks)
}

/// The tiles, sorted by tokens. Each serves every narrower tile at its own width too. The first is for few work units.
pub const MXFP8_TILES: [Kernel<GemmPairParams>; 8] = [
    mxfp8(16, 1, 3, 3),
    mxfp8(16, 2, 2, 4),
    mxfp8(32, 3, 3, 4),
    mxfp8(48, 4, 4, 2),
    mxfp8(64, 3, 3, 3),
    mxfp8(80, 3, 4, 2),
    mxfp8(128, 3, 3, 2),
    mxfp8(192, 3, 5, 1),
];

const fn nvfp4(tokens: u32, consumers: u32, stages: u32, blocks: u32) -> Kernel<GemmPairParams> {
    tile(&NVFP4, tokens, consumers, stages, blocks)
}

/// The tiles, sorted by tokens. Each serves every narrower tile at its own width too.
pub const NVFP4_TILES: [Kernel<GemmPairParams>; 6] = [
    nvfp4(16, 2, 3, 5),
    nvfp4(32, 2, 2, 5),
    nvfp4(64, 3, 4, 3),
    nvfp4(80, 3, 4, 3),
    nvfp4(128, 3, 4, 2),
    nvfp4(192, 3, 5, 1),
];

/// The tiles for a K of whole stages of four blocks. One is taken if it is as narrow as the tile whose place it takes.
pub const NVFP4_FOURS: [Kernel<GemmPairParams>; 3] = [nvfp4(48, 4, 3, 4), nvfp4(64, 4, 3, 4), nvfp4(80, 3, 3, 4)];

/// The kernels of a row with these tiles' sizes, and with a flag.
pub const fn like<P: Signature, const N: usize>(
    kernels: &Kernels<P>,
    flag: bool,
    mut tiles: [Kernel<P>; N],
) -> [Kernel<P>; N] {
    let mut i = 0;
    while i < N {
        tiles[i] = kernels.with(tiles[i].variant()).flag(flag);
        i += 1;
    }
    tiles
}

/// A list of `first`, then `tiles`. `M` is one more than the number of `tiles`.
pub const fn behind<P, const N: usize, const M: usize>(first: Kernel<P>, tiles: [Kernel<P>; N]) -> [Kernel<P>; M] {
    assert!(M == N + 1);
    let mut all = [first; M];
    let mut i = 0;
    while i < N {
        all[i + 1] = tiles[i];
        i += 1;
    }
    all
}

pub const MXFP4_LAYER_TILE: Kernel<RoutedLayerParams> =
    MXFP4_LAYER.with(Variant { tokens: 8, warps: 12, blocks: 4, stages: 3, ..Variant::NONE });

/// Shared memory of a CTA of a layer in one launch: half of an SM's, so that the next launch's CTAs start before this launch's CTAs end.
const LAYER_SHARED_BYTES: u32 = 113 * 1024;

/// Whether the tokens of a layer in one launch fit beside the rings, if they take `up` bytes for GEMM1 and `down` bytes for a tile of GEMM2.
#[allow(dead_code)] // the build script does not plan
pub fn fits_beside_rings(tile: &Variant, up: i64, down: i64) -> bool {
    let stages = tile.warps / 4 * tile.stages;
    // `Shared` has tables, two barriers for each stage, and five more. It is aligned to 128.
    let shared = (720 + 8 * (2 * stages + 5)).next_multiple_of(128);
    let rings = stages * tile.blocks * (2048 + 128);
    i64::from(shared + rings) + up + 2 * down <= i64::from(LAYER_SHARED_BYTES)
}

/// Every kernel of this file.
pub fn all() -> Vec<Variant> {
    let mut all = Vec::new();
    for gated in [true, false] {
        all.extend(MXFP4_TILES.iter().chain(&MXFP4_FOURS).map(|tile| tile.gated(gated).variant()));
        all.extend(MXFP4_E4M3_TILES.map(|tile| tile.gated(gated).variant()));
        all.push(MXFP4_LAYER_TILE.gated(gated).variant());
    }
    all.extend(both_forms(&MXFP8_TILES));
    all.extend(both_forms(&NVFP4_TILES));
    all.extend(both_forms(&NVFP4_FOURS));
    all
}

/// Bytes of `PackedPipelineSm90::Shared`: stages, staged outputs (two chunks a consumer), row offsets and work units (two of each),
/// barriers. `codes`: bytes of a block's codes, and of its scales beyond MXFP4's 128.
pub fn shared_bytes(v: &Variant, codes: u32) -> u32 {
    let stage = (v.blocks * (v.tokens * 128 + v.consumers * (codes + 128))).next_multiple_of(1024);
    // The kernels have GEMM2's epilogue too, so gated kernels stage as many bytes as others.
    (v.stages * stage + behind_stages(v, 128, v.tokens.min(32), 32)).next_multiple_of(1024)
}

/// Bytes of `PackedPipelineSm90::Shared` with e4m3 activations. The scales of three units' tokens lie before the stages.
fn e4m3_shared_bytes(v: &Variant) -> u32 {
    let stage = (v.blocks * (v.tokens * 64 + v.consumers * (2048 + 128))).next_multiple_of(1024);
    let (bytes, full) = if v.gated { (64, v.tokens.min(64)) } else { (128, v.tokens.min(32)) };
    let scales = (3 * v.tokens * 4).next_multiple_of(1024);
    (scales + v.stages * stage + behind_stages(v, bytes, full, 16)).next_multiple_of(1024)
}

/// Bytes after the stages: chunks of `bytes` for each of `full` tokens, row offsets, work units of `unit` bytes, barriers.
fn behind_stages(v: &Variant, bytes: u32, full: u32, unit: u32) -> u32 {
    let chunk = bytes * if v.tokens.is_multiple_of(full) && v.consumers < 4 { full } else { 16 };
    2 * v.consumers * chunk + 2 * v.tokens * 4 + 2 * unit + 8 * (2 * v.stages + 7)
}

pub fn ctas(v: &Variant, codes: u32) -> u32 {
    ctas_of(v, shared_bytes(v, codes))
}

/// CTAs that shared memory and 65536 registers allow on one SM.
fn ctas_of(v: &Variant, shared_bytes: u32) -> u32 {
    let by_registers = if v.tokens <= 32 { 768 / v.threads() } else { 1 };
    ctas_by_shared(shared_bytes).min(by_registers)
}
