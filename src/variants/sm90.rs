//! The Hopper kernel's tiles of plain weights.

use super::{Element, Variant};

/// Tile of the Hopper kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sm90Tile {
    pub tokens: u32,
    pub row_tiles: u32,
    pub consumers: u32,
    pub stages: u32,
}

impl Sm90Tile {
    pub fn variant(self, element: Element, gated: bool) -> Variant {
        let Sm90Tile { tokens, row_tiles, consumers, stages } = self;
        Variant::GroupedGemmSm90 { element, gated, tokens, row_tiles, consumers, stages }
    }
}

/// By tokens; each serves every narrower tile at its own width too. The second of 64 tokens is alone on its multiprocessor.
pub const SM90_TILES: [Sm90Tile; 5] = [
    Sm90Tile { tokens: 16, row_tiles: 1, consumers: 2, stages: 5 },
    Sm90Tile { tokens: 64, row_tiles: 1, consumers: 2, stages: 4 },
    Sm90Tile { tokens: 64, row_tiles: 1, consumers: 2, stages: 8 },
    Sm90Tile { tokens: 128, row_tiles: 1, consumers: 2, stages: 6 },
    Sm90Tile { tokens: 192, row_tiles: 2, consumers: 2, stages: 4 },
];

/// Bytes of `GroupedGemmSm90::Shared`: stages, staged outputs (two chunks a consumer; pairs of row tiles stage none), row offsets and work
/// units (two of each), barriers.
pub(super) fn sm90_shared_bytes(gated: bool, t: Sm90Tile) -> u32 {
    let stage = t.tokens * 128 + t.row_tiles * t.consumers * 8192;
    let staging = match (t.row_tiles, gated) {
        (2, _) => 16,
        (_, true) => 2 * t.consumers * t.tokens.min(64) * 64,
        (_, false) => 2 * t.consumers * t.tokens.min(32) * 128,
    };
    let (offsets, units, barriers) = (2 * t.tokens * 4, 2 * 16, 8 * (2 * t.stages + 7));
    (t.stages * stage + staging + offsets + units + barriers).next_multiple_of(128)
}

/// CTAs of the Hopper kernel on one SM: 228 KB, 1 KB of it the system's for each CTA, and 65536 registers.
pub(super) fn sm90_ctas(gated: bool, t: Sm90Tile) -> u32 {
    let by_registers = match t.tokens * t.row_tiles {
        128.. => 1,
        33.. => 768 / (128 * (1 + t.consumers)),
        _ => 1152 / (128 * (1 + t.consumers)),
    };
    (228 * 1024 / (sm90_shared_bytes(gated, t) + 1024)).min(by_registers)
}
