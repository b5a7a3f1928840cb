//! Kernels of e4m3 weights with block scales on Hopper, with wgmma and TMA.

use super::*;

/// The GEMM whose operand A is weights. A unit has 64 weight rows for each consumer.
pub const GEMM: Kernels<MappedGemm> = Kernels::new(Row {
    arguments: &[Argument::Gated, TOKENS, CONSUMERS, STAGES],
    hopper: true,
    threads: |v| 128 * (1 + v.consumers),
    shared: Shared::Fixed(shared_bytes),
    ctas: |v| {
        let by_registers = if v.tokens > 32 { 512 } else { 1152 } / v.threads();
        ctas_by_shared(shared_bytes(v)).min(by_registers)
    },
    ..Row::new(
        Family::GroupedGemmFp8Sm90,
        "grouped_gemm_fp8_sm90",
        "GroupedGemmFp8Sm90",
        "moe/grouped_gemm_fp8_sm90.cuh",
    )
});

/// The GEMM for many tokens, which are operand A. A unit has 128 tokens and 256 weight rows.
pub const WIDE: Kernels<MappedGemm> = Kernels::new(Row {
    family: Family::GroupedGemmFp8WideSm90,
    name: "grouped_gemm_fp8_wide_sm90",
    device_type: "GroupedGemmFp8WideSm90",
    header: "moe/grouped_gemm_fp8_wide_sm90.cuh",
    arguments: &[Argument::Gated, STAGES],
    // A stage has two scales of each token.
    shared: Shared::Fixed(|v| {
        aligned(v.stages * ((128 + 256) * 128 + WIDE_TOKENS * 2 * 4) + behind_stages(v) + ANNOUNCED)
    }),
    ctas: |_| 1,
    ..GEMM.row
});

/// The GEMM for many tokens, for gate and up rows, or rows of w13 without gates, that end inside a block.
pub const WIDE_CUT: Kernels<MappedGemm> = Kernels::new(Row {
    family: Family::GroupedGemmFp8WideCutSm90,
    name: "grouped_gemm_fp8_wide_cut_sm90",
    device_type: "GroupedGemmFp8WideCutSm90",
    header: "moe/grouped_gemm_fp8_wide_cut_sm90.cuh",
    ..WIDE.row
});

/// The GEMM for many tokens whose rows lie in the order of places. A unit has 192 tokens, and 128 weight rows (gated: 256).
pub const ORDERED: Kernels<OrderedGemm> = Kernels::new(Row {
    family: Family::GroupedGemmFp8OrderedSm90,
    name: "grouped_gemm_fp8_ordered_sm90",
    device_type: "GroupedGemmFp8OrderedSm90",
    header: "moe/grouped_gemm_fp8_ordered_sm90.cuh",
    threads: |_| 512,
    // A stage has a scale of each token. Gated kernels also have the sums of 128 gate rows.
    shared: Shared::Fixed(|v| {
        let stage = (ORDERED_TOKENS + 128) * 128 + ORDERED_TOKENS * 4;
        let sums = if v.gated { ORDERED_TOKENS * 128 * 4 } else { 512 };
        aligned(v.stages * stage + sums + behind_stages(v) + ANNOUNCED)
    }),
    ..WIDE.row
});

/// GEMM2 for many tokens with few columns between the GEMMs: a tile's tokens stay while `blocks` x 128 weight rows pass by.
pub const STATIONARY: Kernels<MappedGemm> = Kernels::new(Row {
    family: Family::GroupedGemmFp8StationarySm90,
    name: "grouped_gemm_fp8_stationary_sm90",
    device_type: "GroupedGemmFp8StationarySm90",
    header: "moe/grouped_gemm_fp8_stationary_sm90.cuh",
    arguments: &[BLOCKS],
    // There is a ring of 8 K blocks of tokens, and a ring of 6 K blocks of weights.
    shared: Shared::Fixed(|v| aligned(v.stages * 128 * 128 + behind_stages(v))),
    ..WIDE.row
});

/// A layer of few tokens in one launch, with routing and quantisation inside. `experts`: most experts with a router logit.
pub const LAYER: Kernels<RoutedLayer> = Kernels::new(Row {
    arguments: &[Argument::Gated, EXPERTS, CTAS, PLAIN],
    hopper: true,
    threads: |_| 256,
    // The CTAs take all shared memory of the SM.
    shared: Shared::Fixed(|v| aligned(228 * 1024 / v.ctas - 1024)),
    ctas: |v| v.ctas,
    traits: |_| &[Trait::OneLaunch, Trait::Counts],
    ..Row::new(
        Family::RoutedLayerFp8Sm90,
        "routed_layer_fp8_sm90",
        "RoutedLayerFp8Sm90",
        "moe/routed_layer_fp8_sm90.cuh",
    )
});

const fn tile(tokens: u32, consumers: u32, stages: u32) -> Kernel<MappedGemm> {
    GEMM.with(Variant { tokens, consumers, stages, ..Variant::NONE })
}

/// A kernel whose units have 256 weight rows, which it reads through the wide kernel's tensor map.
const fn wide<P: Signature>(kernels: &Kernels<P>, tokens: u32, stages: u32) -> Kernel<P> {
    kernels.with(Variant { tokens, row_tiles: 2, consumers: 2, stages, ..Variant::NONE })
}

pub const WIDE_TOKENS: u32 = 128;
pub const ORDERED_TOKENS: u32 = 192;

/// The tiles, sorted by tokens. The first is for few work units, the last is the wide kernel's.
pub const TILES: [Kernel<MappedGemm>; 4] =
    [tile(16, 1, 7), tile(16, 2, 4), tile(64, 2, 8), wide(&WIDE, WIDE_TOKENS, 4)];

/// The wide kernel for rows that end inside a block.
pub const WIDE_CUT_TILE: Kernel<MappedGemm> = WIDE_CUT.with(TILES[3].variant());

/// Weight rows of a block.
#[allow(dead_code)] // the build script does not plan
pub const BLOCK_ROWS: u64 = 128;

/// GEMM1's tile if gate and up rows end inside a block. Narrow tiles need no kernel of their own, since their tensor maps leave out what
/// lies behind the rows.
#[allow(dead_code)] // the build script does not plan
pub fn cut(tile: Kernel<MappedGemm>) -> Kernel<MappedGemm> {
    match tile.family {
        Family::GroupedGemmFp8WideSm90 => WIDE_CUT.with(tile.variant()),
        _ => tile,
    }
}

/// Blocks of 128 weight rows in a unit of `STATIONARY`.
pub const STATIONARY_BLOCKS: [u32; 2] = [4, 16];

/// (most experts, CTAs on an SM) of the layers in one launch. A CTA alone on its SM has the deeper ring.
pub const LAYERS: [(u32, u32); 3] = [(128, 2), (256, 2), (256, 1)];

/// Stages of the ring of a layer in one launch whose x has `hidden` columns, with `inner` columns between the GEMMs. The ring is what tables,
/// x, GEMM1's rows of two tiles and a block leave of a CTA's shared memory (`Layout` of csrc/moe/routed_layer_fp8_sm90.cuh).
#[allow(dead_code)] // the build script does not plan
pub fn layer_stages(layer: &Variant, (hidden, inner): (i64, i64)) -> i64 {
    let (tables, block, stage) = (5 * 1024, layer.tokens * 128, 64 * 128);
    let blocks = hidden / 128 + 2 * (inner / 128) + 1;
    let left = 228 * 1024 / i64::from(layer.ctas) - 1024 - tables - blocks * i64::from(block);
    left / stage
}

/// The fewest stages with which such a layer goes on: it waits for two at once.
#[allow(dead_code)] // the build script does not plan
pub const LAYER_LEAST_STAGES: i64 = 2;

/// Whether a tile's epilogue can quantise: only the staged outputs of two consumers have room for a group.
#[allow(dead_code)] // the build script does not plan
pub fn quantises(tile: &Kernel<MappedGemm>) -> bool {
    tile.consumers == 2
}

/// The kernel for rows in the order of places. In a gated kernel the sums of gate rows leave less room for stages.
pub fn ordered(gated: bool) -> Kernel<OrderedGemm> {
    wide(&ORDERED, ORDERED_TOKENS, if gated { 3 } else { 5 }).gated(gated)
}

/// The kernel of GEMM2 whose tokens stay for units of so many blocks.
pub fn stationary(blocks: u32) -> Kernel<MappedGemm> {
    STATIONARY.with(Variant { blocks, ..wide(&STATIONARY, WIDE_TOKENS, 8 + 6).variant() })
}

/// The layer in one launch. `plain`: top-k without bias, groups and order by id.
pub fn layer(gated: bool, (experts, ctas): (u32, u32), plain: bool) -> Kernel<RoutedLayer> {
    LAYER.with(Variant { tokens: 8, consumers: 1, experts, ctas, gated, flag: plain, ..Variant::NONE })
}

/// The layers in one launch. Only gated layers have kernels for routers with bias or groups.
pub fn layers(gated: bool) -> impl Iterator<Item = Kernel<RoutedLayer>> {
    let kernels = LAYERS.into_iter().flat_map(move |size| [true, false].map(|plain| layer(gated, size, plain)));
    kernels.filter(move |kernel| gated || kernel.flag)
}

/// Every kernel of this file.
pub fn all() -> Vec<Variant> {
    both_forms(&TILES)
        .chain([true, false].into_iter().flat_map(layers).map(Kernel::variant))
        .chain([true, false].map(|gated| ordered(gated).variant()))
        .chain(STATIONARY_BLOCKS.map(|blocks| stationary(blocks).variant()))
        .chain(both_forms(&[WIDE_CUT_TILE]))
        .collect()
}

fn aligned(bytes: u32) -> u32 {
    bytes.next_multiple_of(128)
}

/// Bytes after the stages: row offsets and work units (two of each), barriers.
fn behind_stages(v: &Variant) -> u32 {
    2 * v.tokens * 4 + 2 * 16 + 8 * (2 * v.stages + 5)
}

/// Bytes of two barriers, in kernels that announce finished units.
const ANNOUNCED: u32 = 2 * 8;

/// Bytes of `Shared`: stages with scales, staged outputs (two chunks a consumer), and the bytes after the stages.
fn shared_bytes(v: &Variant) -> u32 {
    let stage = v.tokens * 128 + v.consumers * 8192 + v.tokens * 4 + v.consumers * 8;
    let chunk = if v.gated { v.tokens.min(64) * 64 } else { v.tokens.min(32) * 128 };
    aligned(v.stages * stage + 2 * v.consumers * chunk + behind_stages(v) + ANNOUNCED)
}
