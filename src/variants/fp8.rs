//! Kernels of e4m3 with block scales.

use super::gated_name;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fp8 {
    /// wgmma + TMA, weights as A. `tokens`: largest token tile (wgmma N); 64 weight rows for each of `consumers` warpgroups.
    GroupedGemmFp8Sm90 { gated: bool, tokens: u32, consumers: u32, stages: u32 },
    /// The same for many tokens, which are A: 128 of them, and 256 weight rows.
    GroupedGemmFp8WideSm90 { gated: bool, stages: u32 },
    /// Rows to e4m3 with a scale for each group of columns.
    RowsToE4m3,
}
use Fp8::*;

/// By tokens. The first is for few work units, the last is the wide kernel's.
pub const FP8_TILES: [Fp8Tile; 4] = [
    Fp8Tile { tokens: 16, consumers: 1, stages: 7 },
    Fp8Tile { tokens: 16, consumers: 2, stages: 4 },
    Fp8Tile { tokens: 64, consumers: 2, stages: 8 },
    Fp8Tile { tokens: WIDE_TOKENS, consumers: 2, stages: 4 },
];
pub const WIDE_TOKENS: u32 = 128;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fp8Tile {
    pub tokens: u32,
    pub consumers: u32,
    pub stages: u32,
}

impl Fp8Tile {
    pub fn kernel(self, gated: bool) -> Fp8 {
        let Fp8Tile { tokens, consumers, stages } = self;
        if tokens == WIDE_TOKENS {
            GroupedGemmFp8WideSm90 { gated, stages }
        } else {
            GroupedGemmFp8Sm90 { gated, tokens, consumers, stages }
        }
    }

    /// Weight rows of a work unit.
    pub fn unit_rows(self) -> u32 {
        if self.tokens == WIDE_TOKENS {
            256
        } else {
            64 * self.consumers
        }
    }
}

pub fn all() -> Vec<Fp8> {
    let gemms = FP8_TILES.iter().flat_map(|tile| [true, false].map(|gated| tile.kernel(gated)));
    gemms.chain([RowsToE4m3]).collect()
}

impl Fp8 {
    pub fn symbol(&self) -> String {
        match *self {
            GroupedGemmFp8Sm90 { gated, tokens, consumers, stages } => {
                format!("grouped_gemm_fp8_sm90_{}_t{tokens}_c{consumers}_s{stages}", gated_name(gated))
            }
            GroupedGemmFp8WideSm90 { gated, stages } => {
                format!("grouped_gemm_fp8_wide_sm90_{}_s{stages}", gated_name(gated))
            }
            RowsToE4m3 => "quantize_fp8".into(),
        }
    }

    pub fn device_type(&self) -> String {
        match *self {
            GroupedGemmFp8Sm90 { gated, tokens, consumers, stages } => {
                format!("oxmoe::GroupedGemmFp8Sm90<{gated}, {tokens}, {consumers}, {stages}>")
            }
            GroupedGemmFp8WideSm90 { gated, stages } => format!("oxmoe::GroupedGemmFp8WideSm90<{gated}, {stages}>"),
            RowsToE4m3 => "oxmoe::QuantizeFp8".into(),
        }
    }

    pub fn header(&self) -> &'static str {
        match self {
            GroupedGemmFp8Sm90 { .. } => "moe/grouped_gemm_fp8_sm90.cuh",
            GroupedGemmFp8WideSm90 { .. } => "moe/grouped_gemm_fp8_wide_sm90.cuh",
            RowsToE4m3 => "quant/quantize_fp8.cuh",
        }
    }

    pub fn signature(&self) -> (&'static str, &'static str) {
        match self {
            RowsToE4m3 => ("const __grid_constant__ oxmoe::QuantizeFp8Params p", "p"),
            _ => (
                "const __grid_constant__ CUtensorMap weights, const __grid_constant__ oxmoe::GroupedGemmParams p",
                "weights, p",
            ),
        }
    }

    pub fn runs_on(&self, arch: &str) -> bool {
        matches!(self, RowsToE4m3) || arch == "90a"
    }

    pub fn threads(&self) -> u32 {
        match *self {
            GroupedGemmFp8Sm90 { consumers, .. } => 128 * (1 + consumers),
            GroupedGemmFp8WideSm90 { .. } => 384,
            RowsToE4m3 => 256,
        }
    }

    /// Bytes of `Shared`: stages with scales, staged outputs (two chunks a consumer), row offsets and work units (two of each), barriers.
    pub fn shared_bytes(&self) -> u32 {
        let rest = |tokens, stages| 2 * tokens * 4 + 2 * 16 + 8 * (2 * stages + 5);
        let bytes = match *self {
            GroupedGemmFp8Sm90 { gated, tokens, consumers, stages } => {
                let stage = tokens * 128 + consumers * 8192 + tokens * 4 + consumers * 8;
                let chunk = if gated { tokens.min(64) * 64 } else { tokens.min(32) * 128 };
                stages * stage + 2 * consumers * chunk + rest(tokens, stages)
            }
            GroupedGemmFp8WideSm90 { stages, .. } => stages * (128 + 256) * 128 + rest(WIDE_TOKENS, stages),
            RowsToE4m3 => 0,
        };
        bytes.next_multiple_of(128)
    }

    /// CTAs on one SM: 228 KB, 1 KB of it the system's for each CTA, and 65536 registers.
    pub fn ctas(&self) -> u32 {
        match *self {
            GroupedGemmFp8Sm90 { tokens, .. } => {
                let by_registers = if tokens > 32 { 512 } else { 1152 } / self.threads();
                (228 * 1024 / (self.shared_bytes() + 1024)).min(by_registers)
            }
            GroupedGemmFp8WideSm90 { .. } => 1,
            RowsToE4m3 => 6,
        }
    }
}
