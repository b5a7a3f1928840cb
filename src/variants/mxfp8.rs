//! Kernels of packed MXFP8 weights.

use super::{gated_name, Mxfp4Sm90Tile, PortableForm, PortableTile, MXFP8_PORTABLE_TILES, PACK_BLOCKS};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mxfp8 {
    /// As `GroupedGemmMxfp4Sm90`.
    Gemm {
        gated: bool,
        tokens: u32,
        consumers: u32,
        stages: u32,
        blocks: u32,
    },
    /// mma.sync + cp.async, any GPU from sm_80.
    GemmPortable {
        gated: bool,
        tokens: u32,
        rows: u32,
        warps: u32,
        stages: u32,
    },
    /// Rows of bf16 to the numbers of MXFP8.
    RoundRows,
    /// The same of a schedule's rows. `portable`: of GPUs other than Hopper.
    RoundTiles {
        portable: bool,
    },
    /// MXFP8 weights to the packed form, at load.
    Peak,
    Pack,
}
use Mxfp8::*;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mxfp8Tile {
    pub tokens: u32,
    pub consumers: u32,
    pub stages: u32,
    pub blocks: u32,
}

/// By tokens; each serves every narrower tile at its own width too. The first is for few work units.
pub const MXFP8_TILES: [Mxfp8Tile; 8] = [
    Mxfp8Tile { tokens: 16, consumers: 1, stages: 3, blocks: 3 },
    Mxfp8Tile { tokens: 16, consumers: 2, stages: 2, blocks: 4 },
    Mxfp8Tile { tokens: 32, consumers: 3, stages: 3, blocks: 4 },
    Mxfp8Tile { tokens: 48, consumers: 4, stages: 4, blocks: 2 },
    Mxfp8Tile { tokens: 64, consumers: 3, stages: 3, blocks: 3 },
    Mxfp8Tile { tokens: 80, consumers: 3, stages: 4, blocks: 2 },
    Mxfp8Tile { tokens: 128, consumers: 3, stages: 3, blocks: 2 },
    Mxfp8Tile { tokens: 192, consumers: 3, stages: 5, blocks: 1 },
];

impl Mxfp8Tile {
    pub fn kernel(self, gated: bool) -> Mxfp8 {
        let Mxfp8Tile { tokens, consumers, stages, blocks } = self;
        Gemm { gated, tokens, consumers, stages, blocks }
    }
}

pub fn all() -> Vec<Mxfp8> {
    let gemms = MXFP8_TILES.iter().flat_map(|tile| [true, false].map(|gated| tile.kernel(gated)));
    let portable = |tile: &PortableTile, gated| {
        let PortableTile { tokens, rows, warps, stages, .. } = *tile;
        GemmPortable { gated, tokens, rows, warps, stages }
    };
    let others = [RoundRows, RoundTiles { portable: false }, RoundTiles { portable: true }, Peak, Pack];
    let portable = MXFP8_PORTABLE_TILES.iter().flat_map(|tile| [true, false].map(|gated| portable(tile, gated)));
    gemms.chain(portable).chain(others).collect()
}

impl Mxfp8 {
    pub fn symbol(&self) -> String {
        match *self {
            Gemm { gated, tokens, consumers, stages, blocks } => {
                let form = gated_name(gated);
                format!("grouped_gemm_mxfp8_sm90_{form}_t{tokens}_c{consumers}_s{stages}_b{blocks}")
            }
            GemmPortable { gated, tokens, rows, warps, stages } => {
                format!("grouped_gemm_mxfp8_portable_{}_t{tokens}_r{rows}_w{warps}_s{stages}", gated_name(gated))
            }
            RoundRows => "round_rows_mxfp8".into(),
            RoundTiles { portable } => format!("round_tiles_mxfp8{}", if portable { "_portable" } else { "" }),
            Peak => "mxfp8_peak".into(),
            Pack => "mxfp8_pack".into(),
        }
    }

    pub fn device_type(&self) -> String {
        match *self {
            Gemm { gated, tokens, consumers, stages, blocks } => {
                format!("oxmoe::GroupedGemmMxfp8Sm90<{gated}, {tokens}, {consumers}, {stages}, {blocks}>")
            }
            GemmPortable { gated, tokens, rows, warps, stages } => {
                format!("oxmoe::GroupedGemmMxfp8Portable<{gated}, {tokens}, {rows}, {warps}, {stages}>")
            }
            RoundRows => "oxmoe::RoundRowsMxfp8".into(),
            RoundTiles { .. } => "oxmoe::RoundTilesMxfp8".into(),
            Peak => "oxmoe::Mxfp8Peak".into(),
            Pack => "oxmoe::Mxfp8Pack".into(),
        }
    }

    pub fn header(&self) -> &'static str {
        match self {
            Gemm { .. } => "moe/grouped_gemm_mxfp8_sm90.cuh",
            GemmPortable { .. } => "moe/grouped_gemm_mxfp8_portable.cuh",
            RoundRows => "quant/round_rows_mxfp8.cuh",
            RoundTiles { .. } => "quant/round_tiles_mxfp8.cuh",
            Peak | Pack => "quant/pack_mxfp8.cuh",
        }
    }

    pub fn signature(&self) -> (&'static str, &'static str) {
        match self {
            Gemm { .. } => ("const __grid_constant__ oxmoe::GemmPairParams p", "p"),
            GemmPortable { .. } => ("const __grid_constant__ oxmoe::GroupedGemmParams p", "p"),
            RoundRows => ("const __grid_constant__ oxmoe::QuantizeRowsParams p", "p"),
            RoundTiles { .. } => ("const __grid_constant__ oxmoe::TileRowsParams p", "p"),
            Peak | Pack => ("const __grid_constant__ oxmoe::PackMxfp4Params p", "p"),
        }
    }

    /// The GEMMs of both forms are compiled apart, and what differs between GPUs.
    pub fn unit(&self) -> String {
        let header = self.header().rsplit('/').next().unwrap_or_default().trim_end_matches(".cuh");
        match *self {
            Gemm { gated, .. } => format!("{header}_{}", gated_name(gated)),
            RoundTiles { portable: true } => format!("{header}_portable"),
            _ => header.into(),
        }
    }

    pub fn runs_on(&self, arch: &str) -> bool {
        !matches!(self, Gemm { .. } | RoundTiles { portable: false }) || arch == "90a"
    }

    fn portable_tile(&self) -> Option<PortableTile> {
        match *self {
            GemmPortable { tokens, rows, warps, stages, .. } => {
                Some(PortableTile { form: PortableForm::Mxfp8, tokens, rows, warps, stages, vector: 8 })
            }
            _ => None,
        }
    }

    pub fn threads(&self) -> u32 {
        match *self {
            Gemm { consumers, .. } => 128 * (1 + consumers),
            GemmPortable { warps, .. } => 32 * warps,
            RoundRows | RoundTiles { .. } => 256,
            Peak => 1024,
            Pack => 128 * PACK_BLOCKS,
        }
    }

    /// As of MXFP4, with twice the bytes of codes.
    pub fn shared_bytes(&self) -> u32 {
        if let Some(tile) = self.portable_tile() {
            return tile.shared_bytes();
        }
        let Gemm { gated, tokens, consumers, stages, blocks } = *self else { return 0 };
        Mxfp4Sm90Tile { e4m3: false, tokens, consumers, stages, blocks }.shared_bytes_with(4096, gated)
    }

    pub fn ctas(&self) -> u32 {
        match *self {
            Gemm { tokens, .. } => {
                let by_registers = if tokens <= 32 { 768 / self.threads() } else { 1 };
                (228 * 1024 / (self.shared_bytes() + 1024)).min(by_registers)
            }
            GemmPortable { .. } => self.portable_tile().map_or(1, PortableTile::ctas),
            // Threads that sm_86, 89 and 120 have.
            RoundRows | RoundTiles { portable: true } => 6,
            RoundTiles { portable: false } => 8,
            Peak => 1,
            Pack => 2,
        }
    }
}
