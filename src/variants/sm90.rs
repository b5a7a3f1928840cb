//! The grouped GEMM of 16-bit weights on Hopper, with wgmma and TMA. Weights are operand A, and tokens are N.

use super::*;

pub const GEMM: Kernels<MappedGemm> = Kernels::new(Row {
    arguments: &[Argument::Element, Argument::Gated, TOKENS, ROW_TILES, CONSUMERS, STAGES],
    unit_by: &[Argument::Element, Argument::Gated],
    hopper: true,
    threads: |v| 128 * (1 + v.consumers),
    shared: Shared::Fixed(shared_bytes),
    ctas,
    ..Row::new(Family::GroupedGemmSm90, "grouped_gemm_sm90", "GroupedGemmSm90", "moe/grouped_gemm_sm90.cuh")
});

const fn tile(tokens: u32, row_tiles: u32, stages: u32) -> Kernel<MappedGemm> {
    GEMM.with(Variant { tokens, row_tiles, consumers: 2, stages, ..Variant::NONE })
}

/// The tiles, sorted by tokens. Each serves every narrower tile at its own width too. The second tile of 64 tokens has a multiprocessor to
/// itself.
pub const TILES: [Kernel<MappedGemm>; 5] =
    [tile(16, 1, 5), tile(64, 1, 4), tile(64, 1, 8), tile(128, 1, 6), tile(192, 2, 4)];

/// Bytes of `GroupedGemmSm90::Shared`: stages, staged outputs (two chunks a consumer; pairs of row tiles stage none), row offsets and work
/// units (two of each), barriers.
fn shared_bytes(v: &Variant) -> u32 {
    let stage = v.tokens * 128 + v.row_tiles * v.consumers * 8192;
    let staging = match (v.row_tiles, v.gated) {
        (2, _) => 16,
        (_, true) => 2 * v.consumers * v.tokens.min(64) * 64,
        (_, false) => 2 * v.consumers * v.tokens.min(32) * 128,
    };
    let (offsets, units, barriers) = (2 * v.tokens * 4, 2 * 16, 8 * (2 * v.stages + 7));
    (v.stages * stage + staging + offsets + units + barriers).next_multiple_of(128)
}

/// CTAs that shared memory and 65536 registers allow on one SM.
fn ctas(v: &Variant) -> u32 {
    let by_registers = match v.tokens * v.row_tiles {
        128.. => 1,
        33.. => 768 / v.threads(),
        _ => 1152 / v.threads(),
    };
    ctas_by_shared(shared_bytes(v)).min(by_registers)
}
