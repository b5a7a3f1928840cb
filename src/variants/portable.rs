//! Tiles of the kernels for any GPU.

use super::{Element, Variant};

/// Tile of the portable kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortableTile {
    /// Weights are packed MXFP4, else 16-bit elements.
    pub packed: bool,
    pub tokens: u32,
    pub rows: u32,
    pub warps: u32,
    pub stages: u32,
    pub vector: u32,
}

impl PortableTile {
    /// `element` is bf16 where weights are packed.
    pub fn variant(self, element: Element, gated: bool) -> Variant {
        let PortableTile { packed, tokens, rows, warps, stages, vector } = self;
        if packed {
            Variant::GroupedGemmMxfp4Portable { gated, tokens, rows, warps, stages, vector }
        } else {
            Variant::GroupedGemmPortable { element, gated, tokens, rows, warps, stages, vector }
        }
    }

    /// Stages of 64 K: 128 bytes of each token and weight row; packed, a row has 34.
    pub const fn shared_bytes(self) -> u32 {
        self.stages * (self.rows * if self.packed { 34 } else { 128 } + self.tokens * 128)
    }

    /// Most registers a thread may have.
    pub const fn registers(self) -> u32 {
        match self.rows * self.tokens / (32 * self.warps) {
            ..=16 if self.packed => 128,
            ..=64 => 168,
            _ => 255,
        }
    }

    /// CTAs that registers allow on one multiprocessor.
    pub const fn ctas(self) -> u32 {
        65536 / (self.registers() * 32 * self.warps)
    }
}

/// By tokens. The one of vector 1 serves every k that is no multiple of 8.
pub const PORTABLE_TILES: [PortableTile; 4] = [
    PortableTile { packed: false, tokens: 16, rows: 128, warps: 4, stages: 5, vector: 8 },
    PortableTile { packed: false, tokens: 64, rows: 128, warps: 4, stages: 3, vector: 8 },
    PortableTile { packed: false, tokens: 128, rows: 128, warps: 4, stages: 3, vector: 8 },
    PortableTile { packed: false, tokens: 64, rows: 128, warps: 4, stages: 2, vector: 1 },
];

/// The same for packed MXFP4, where a stage is a third as large. Chosen from bytes in flight, not measured: with 16 tokens 20 KiB of
/// weights a CTA, 40 to 80 KiB a multiprocessor; with 128, two CTAs fit in 99 KiB.
pub const MXFP4_PORTABLE_TILES: [PortableTile; 4] = [
    PortableTile { packed: true, tokens: 16, rows: 128, warps: 4, stages: 6, vector: 8 },
    PortableTile { packed: true, tokens: 64, rows: 128, warps: 4, stages: 4, vector: 8 },
    PortableTile { packed: true, tokens: 128, rows: 128, warps: 4, stages: 2, vector: 8 },
    PortableTile { packed: true, tokens: 64, rows: 128, warps: 4, stages: 3, vector: 1 },
];
