//! Kernels of packed NVFP4 weights.

use super::{gated_name, Mxfp4Sm90Tile, PortableForm, PortableTile, NVFP4_PORTABLE_TILES, PACK_BLOCKS};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Nvfp4 {
    /// As `GroupedGemmMxfp4Sm90`.
    GroupedGemmNvfp4Sm90 { gated: bool, tokens: u32, consumers: u32, stages: u32, blocks: u32 },
    /// mma.sync + cp.async, any GPU from sm_80.
    GroupedGemmNvfp4Portable { gated: bool, tokens: u32, rows: u32, warps: u32, stages: u32 },
    /// Rows of bf16, or NVFP4's codes, to the numbers of NVFP4. `portable`: of GPUs other than Hopper.
    RoundNvfp4Rows { portable: bool },
    /// NVFP4 weights to the packed form, at load.
    PackNvfp4Weights,
}
use Nvfp4::*;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Nvfp4Tile {
    pub tokens: u32,
    pub consumers: u32,
    pub stages: u32,
    pub blocks: u32,
}

/// By tokens; each serves every narrower tile at its own width too.
pub const NVFP4_TILES: [Nvfp4Tile; 6] = [
    Nvfp4Tile { tokens: 16, consumers: 2, stages: 3, blocks: 5 },
    Nvfp4Tile { tokens: 32, consumers: 2, stages: 2, blocks: 5 },
    Nvfp4Tile { tokens: 64, consumers: 3, stages: 4, blocks: 3 },
    Nvfp4Tile { tokens: 80, consumers: 3, stages: 4, blocks: 3 },
    Nvfp4Tile { tokens: 128, consumers: 3, stages: 4, blocks: 2 },
    Nvfp4Tile { tokens: 192, consumers: 3, stages: 5, blocks: 1 },
];

/// Where K is whole stages of four blocks and one of them is as narrow as what it takes the place of.
pub const NVFP4_FOURS: [Nvfp4Tile; 3] = [
    Nvfp4Tile { tokens: 48, consumers: 4, stages: 3, blocks: 4 },
    Nvfp4Tile { tokens: 64, consumers: 4, stages: 3, blocks: 4 },
    Nvfp4Tile { tokens: 80, consumers: 3, stages: 3, blocks: 4 },
];

impl Nvfp4Tile {
    pub fn kernel(self, gated: bool) -> Nvfp4 {
        let Nvfp4Tile { tokens, consumers, stages, blocks } = self;
        GroupedGemmNvfp4Sm90 { gated, tokens, consumers, stages, blocks }
    }
}

pub fn all() -> Vec<Nvfp4> {
    let gemms = NVFP4_TILES.iter().chain(&NVFP4_FOURS).flat_map(|tile| [true, false].map(|gated| tile.kernel(gated)));
    let portable = |tile: &PortableTile, gated| {
        let PortableTile { tokens, rows, warps, stages, .. } = *tile;
        GroupedGemmNvfp4Portable { gated, tokens, rows, warps, stages }
    };
    let portable = NVFP4_PORTABLE_TILES.iter().flat_map(|tile| [true, false].map(|gated| portable(tile, gated)));
    gemms
        .chain(portable)
        .chain([false, true].map(|portable| RoundNvfp4Rows { portable }))
        .chain([PackNvfp4Weights])
        .collect()
}

impl Nvfp4 {
    pub fn symbol(&self) -> String {
        match *self {
            GroupedGemmNvfp4Sm90 { gated, tokens, consumers, stages, blocks } => {
                let form = gated_name(gated);
                format!("grouped_gemm_nvfp4_sm90_{form}_t{tokens}_c{consumers}_s{stages}_b{blocks}")
            }
            GroupedGemmNvfp4Portable { gated, tokens, rows, warps, stages } => {
                format!("grouped_gemm_nvfp4_portable_{}_t{tokens}_r{rows}_w{warps}_s{stages}", gated_name(gated))
            }
            RoundNvfp4Rows { portable } => format!("round_rows_nvfp4{}", if portable { "_portable" } else { "" }),
            PackNvfp4Weights => "nvfp4_pack".into(),
        }
    }

    pub fn device_type(&self) -> String {
        match *self {
            GroupedGemmNvfp4Sm90 { gated, tokens, consumers, stages, blocks } => {
                format!("oxmoe::GroupedGemmNvfp4Sm90<{gated}, {tokens}, {consumers}, {stages}, {blocks}>")
            }
            GroupedGemmNvfp4Portable { gated, tokens, rows, warps, stages } => {
                format!("oxmoe::GroupedGemmNvfp4Portable<{gated}, {tokens}, {rows}, {warps}, {stages}>")
            }
            RoundNvfp4Rows { .. } => "oxmoe::RoundRowsNvfp4".into(),
            PackNvfp4Weights => "oxmoe::Nvfp4Pack".into(),
        }
    }

    pub fn header(&self) -> &'static str {
        match self {
            GroupedGemmNvfp4Sm90 { .. } => "moe/grouped_gemm_nvfp4_sm90.cuh",
            GroupedGemmNvfp4Portable { .. } => "moe/grouped_gemm_nvfp4_portable.cuh",
            RoundNvfp4Rows { .. } => "quant/round_rows_nvfp4.cuh",
            PackNvfp4Weights => "quant/pack_nvfp4.cuh",
        }
    }

    pub fn signature(&self) -> (&'static str, &'static str) {
        match self {
            GroupedGemmNvfp4Sm90 { .. } => ("const __grid_constant__ oxmoe::GemmPairParams p", "p"),
            GroupedGemmNvfp4Portable { .. } => ("const __grid_constant__ oxmoe::GroupedGemmParams p", "p"),
            RoundNvfp4Rows { .. } => ("const __grid_constant__ oxmoe::RoundNvfp4Params p", "p"),
            PackNvfp4Weights => ("const __grid_constant__ oxmoe::PackNvfp4Params p", "p"),
        }
    }

    /// The GEMMs of both forms are compiled apart, and what differs between GPUs.
    pub fn unit(&self) -> String {
        let header = self.header().rsplit('/').next().unwrap_or_default().trim_end_matches(".cuh");
        match *self {
            GroupedGemmNvfp4Sm90 { gated, .. } => format!("{header}_{}", gated_name(gated)),
            RoundNvfp4Rows { portable: true } => format!("{header}_portable"),
            _ => header.into(),
        }
    }

    pub fn runs_on(&self, arch: &str) -> bool {
        !matches!(self, GroupedGemmNvfp4Sm90 { .. } | RoundNvfp4Rows { portable: false }) || arch == "90a"
    }

    fn portable_tile(&self) -> Option<PortableTile> {
        match *self {
            GroupedGemmNvfp4Portable { tokens, rows, warps, stages, .. } => {
                Some(PortableTile { form: PortableForm::Nvfp4, tokens, rows, warps, stages, vector: 8 })
            }
            _ => None,
        }
    }

    pub fn threads(&self) -> u32 {
        match *self {
            GroupedGemmNvfp4Sm90 { consumers, .. } => 128 * (1 + consumers),
            GroupedGemmNvfp4Portable { warps, .. } => 32 * warps,
            RoundNvfp4Rows { .. } => 256,
            PackNvfp4Weights => 128 * PACK_BLOCKS,
        }
    }

    /// As of MXFP4, with twice the bytes of scales.
    pub fn shared_bytes(&self) -> u32 {
        if let Some(tile) = self.portable_tile() {
            return tile.shared_bytes();
        }
        let GroupedGemmNvfp4Sm90 { gated, tokens, consumers, stages, blocks } = *self else { return 0 };
        Mxfp4Sm90Tile { e4m3: false, tokens, consumers, stages, blocks }.shared_bytes_with(2048 + 128, gated)
    }

    pub fn ctas(&self) -> u32 {
        match *self {
            GroupedGemmNvfp4Sm90 { tokens, .. } => {
                let by_registers = if tokens <= 32 { 768 / self.threads() } else { 1 };
                (228 * 1024 / (self.shared_bytes() + 1024)).min(by_registers)
            }
            GroupedGemmNvfp4Portable { .. } => self.portable_tile().map_or(1, PortableTile::ctas),
            // Threads that sm_86, 89 and 120 have.
            RoundNvfp4Rows { portable: true } => 6,
            RoundNvfp4Rows { portable: false } => 8,
            PackNvfp4Weights => 2,
        }
    }
}
