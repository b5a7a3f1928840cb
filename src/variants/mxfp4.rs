//! The Hopper kernels' tiles of packed MXFP4 weights.

use super::Variant;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mxfp4Sm90Tile {
    /// Activations are e4m3, else bf16.
    pub e4m3: bool,
    pub tokens: u32,
    pub consumers: u32,
    pub stages: u32,
    pub blocks: u32,
}

impl Mxfp4Sm90Tile {
    pub fn variant(self, gated: bool) -> Variant {
        let Mxfp4Sm90Tile { e4m3, tokens, consumers, stages, blocks } = self;
        Variant::GroupedGemmMxfp4Sm90 { e4m3, gated, tokens, consumers, stages, blocks }
    }

    /// Bytes of `PackedPipelineSm90::Shared`: scales of three units' tokens (e4m3), stages, staged outputs (two chunks a consumer), row
    /// offsets and work units (two of each), barriers.
    pub(super) fn shared_bytes(self, gated: bool) -> u32 {
        self.shared_bytes_with(2048, gated)
    }

    /// With so many bytes of codes a block.
    pub(super) fn shared_bytes_with(self, codes: u32, gated: bool) -> u32 {
        let (columns, scales) = if self.e4m3 { (64, 3 * self.tokens * 4) } else { (128, 0) };
        let stage = (self.blocks * (self.tokens * columns + self.consumers * (codes + 128))).next_multiple_of(1024);
        // Kernels of bf16 tokens have GEMM2's epilogue, too.
        let (bytes, full) = if gated && self.e4m3 { (64, self.tokens.min(64)) } else { (128, self.tokens.min(32)) };
        let chunk = bytes * if self.tokens.is_multiple_of(full) && self.consumers < 4 { full } else { 16 };
        let unit = if self.e4m3 { 16 } else { 32 };
        let (offsets, units, barriers) = (2 * self.tokens * 4, 2 * unit, 8 * (2 * self.stages + 7));
        let behind = 2 * self.consumers * chunk + offsets + units + barriers;
        (scales.next_multiple_of(1024) + self.stages * stage + behind).next_multiple_of(1024)
    }

    /// CTAs on one SM: 228 KB, 1 KB of it the system's for each CTA, and 65536 registers.
    pub(super) fn ctas(self, gated: bool) -> u32 {
        let by_registers = if self.tokens <= 32 { 768 / (128 * (1 + self.consumers)) } else { 1 };
        (228 * 1024 / (self.shared_bytes(gated) + 1024)).min(by_registers)
    }
}

const fn bf16(tokens: u32, consumers: u32, stages: u32, blocks: u32) -> Mxfp4Sm90Tile {
    Mxfp4Sm90Tile { e4m3: false, tokens, consumers, stages, blocks }
}

const fn e4m3(tokens: u32, consumers: u32, stages: u32, blocks: u32) -> Mxfp4Sm90Tile {
    Mxfp4Sm90Tile { e4m3: true, tokens, consumers, stages, blocks }
}

/// By tokens; each serves every narrower tile at its own width too. The first is for few work units.
pub const MXFP4_SM90_TILES: [Mxfp4Sm90Tile; 7] = [
    bf16(16, 1, 3, 5),
    bf16(16, 2, 3, 5),
    bf16(32, 3, 3, 5),
    bf16(64, 3, 4, 3),
    bf16(80, 3, 4, 3),
    bf16(128, 3, 4, 2),
    bf16(192, 3, 5, 1),
];

/// Where K is whole stages of four blocks and one of them is as narrow as what it takes the place of.
pub const MXFP4_SM90_FOURS: [Mxfp4Sm90Tile; 3] = [bf16(48, 4, 3, 4), bf16(64, 4, 3, 4), bf16(80, 3, 3, 4)];

/// The same for e4m3 activations, where a stage has an even number of blocks.
pub const MXFP4_E4M3_SM90_TILES: [Mxfp4Sm90Tile; 5] =
    [e4m3(16, 1, 3, 6), e4m3(16, 2, 4, 4), e4m3(64, 3, 4, 4), e4m3(128, 3, 3, 4), e4m3(192, 3, 5, 2)];

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
