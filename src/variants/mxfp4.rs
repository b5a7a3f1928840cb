//! The tiles of Hopper's kernels of packed MXFP4 weights.

use super::Variant;

/// Tile of the Hopper kernel of MXFP4 weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mxfp4Sm90Tile {
    pub tokens: u32,
    pub consumers: u32,
    pub stages: u32,
    pub blocks: u32,
}

impl Mxfp4Sm90Tile {
    pub fn variant(self, gated: bool) -> Variant {
        let Mxfp4Sm90Tile { tokens, consumers, stages, blocks } = self;
        Variant::GroupedGemmMxfp4Sm90 { gated, tokens, consumers, stages, blocks }
    }

    /// Bytes of `GroupedGemmMxfp4Sm90::Shared`: stages, staged outputs (two chunks a consumer), row offsets and work units (two of each),
    /// barriers.
    pub(super) fn shared_bytes(self, gated: bool) -> u32 {
        let stage = (self.blocks * (self.tokens * 128 + self.consumers * (2048 + 128))).next_multiple_of(1024);
        let chunk = if gated { self.tokens.min(64) * 64 } else { self.tokens.min(32) * 128 };
        let (offsets, units, barriers) = (2 * self.tokens * 4, 2 * 16, 8 * (2 * self.stages + 5));
        (self.stages * stage + 2 * self.consumers * chunk + offsets + units + barriers).next_multiple_of(1024)
    }

    /// CTAs on one SM: 228 KB, 1 KB of it the system's for each CTA, and 65536 registers.
    pub(super) fn ctas(self, gated: bool) -> u32 {
        let by_registers = if self.tokens <= 32 { 768 / (128 * (1 + self.consumers)) } else { 1 };
        (228 * 1024 / (self.shared_bytes(gated) + 1024)).min(by_registers)
    }
}

/// By tokens; each serves every narrower tile at its own width too. The first is for few work units.
pub const MXFP4_SM90_TILES: [Mxfp4Sm90Tile; 6] = [
    Mxfp4Sm90Tile { tokens: 16, consumers: 1, stages: 3, blocks: 5 },
    Mxfp4Sm90Tile { tokens: 16, consumers: 2, stages: 3, blocks: 5 },
    Mxfp4Sm90Tile { tokens: 32, consumers: 3, stages: 3, blocks: 5 },
    Mxfp4Sm90Tile { tokens: 64, consumers: 3, stages: 4, blocks: 3 },
    Mxfp4Sm90Tile { tokens: 128, consumers: 3, stages: 3, blocks: 2 },
    Mxfp4Sm90Tile { tokens: 192, consumers: 3, stages: 5, blocks: 1 },
];

/// The layer in one launch, routing inside: `warps` of slices of 16 rows, each with a ring of up to `stages` of `blocks` K blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Mxfp4LayerTile {
    pub tokens: u32,
    pub warps: u32,
    pub blocks: u32,
    pub stages: u32,
}

pub const MXFP4_LAYER_TILE: Mxfp4LayerTile = Mxfp4LayerTile { tokens: 8, warps: 12, blocks: 4, stages: 4 };

impl Mxfp4LayerTile {
    /// All of it: half of what an SM has, so that the next launch's CTAs come before this one's go.
    pub const SHARED_BYTES: u32 = 113 * 1024;

    pub fn variant(self, gated: bool) -> Variant {
        Variant::RoutedLayerMxfp4Sm90 { gated, tile: self }
    }

    /// The warps and four helpers.
    pub fn threads(self) -> u32 {
        32 * (self.warps + 4)
    }

    /// Stages that tokens of so many bytes, for GEMM1 and for a tile of GEMM2, leave to each warp.
    #[allow(dead_code)] // the build script does not plan
    pub fn stages_beside(self, up: i64, down: i64) -> i64 {
        // `Shared`: tables, a barrier for each stage and five, aligned to 128.
        let shared = i64::from((720 + 8 * (self.warps * self.stages + 5)).next_multiple_of(128));
        let left = i64::from(Self::SHARED_BYTES) - shared - up - 2 * down;
        (left / i64::from(self.warps * self.blocks * (512 + 32))).min(self.stages.into())
    }
}
