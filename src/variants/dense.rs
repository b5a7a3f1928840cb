//! Kernels of dense MXFP8: quantisation and the GEMM; the quantisation to NVFP4.

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dense {
    /// mma.sync of f16 with scales on the sums, few tokens. Passes of `row_tiles` x 16 rows of b, K over eight warps.
    MmMxfp8Few {
        tokens: u32,
        row_tiles: u32,
        stages: u32,
    },
    /// wgmma with b in registers, many tokens. 64 rows of b for each of `consumers` warpgroups.
    MmMxfp8Wide {
        tokens: u32,
        consumers: u32,
        stages: u32,
    },
    /// a for the latter.
    MmMxfp8Tokens,
    QuantizeMxfp8,
    DequantizeMxfp8,
    /// Numbers to NVFP4 or MXFP4, in blocks of 16 or 32.
    QuantizeNvfp4 {
        block: u32,
    },
}
use Dense::*;

/// By tokens, many rows first, deep rings before others.
pub const FEW: [Dense; 11] = [
    MmMxfp8Few { tokens: 8, row_tiles: 2, stages: 8 },
    MmMxfp8Few { tokens: 8, row_tiles: 2, stages: 4 },
    MmMxfp8Few { tokens: 8, row_tiles: 1, stages: 8 },
    MmMxfp8Few { tokens: 16, row_tiles: 4, stages: 3 },
    MmMxfp8Few { tokens: 16, row_tiles: 2, stages: 5 },
    MmMxfp8Few { tokens: 16, row_tiles: 2, stages: 3 },
    MmMxfp8Few { tokens: 16, row_tiles: 1, stages: 5 },
    MmMxfp8Few { tokens: 32, row_tiles: 4, stages: 3 },
    MmMxfp8Few { tokens: 32, row_tiles: 4, stages: 2 },
    MmMxfp8Few { tokens: 32, row_tiles: 2, stages: 4 },
    MmMxfp8Few { tokens: 32, row_tiles: 1, stages: 3 },
];
pub const WIDE: [Dense; 7] = [
    MmMxfp8Wide { tokens: 64, consumers: 2, stages: 4 },
    MmMxfp8Wide { tokens: 64, consumers: 3, stages: 4 },
    MmMxfp8Wide { tokens: 96, consumers: 3, stages: 4 },
    MmMxfp8Wide { tokens: 128, consumers: 2, stages: 4 },
    MmMxfp8Wide { tokens: 128, consumers: 3, stages: 4 },
    MmMxfp8Wide { tokens: 192, consumers: 3, stages: 3 },
    MmMxfp8Wide { tokens: 256, consumers: 2, stages: 2 },
];

pub const NVFP4: [Dense; 2] = [QuantizeNvfp4 { block: 16 }, QuantizeNvfp4 { block: 32 }];

pub fn all() -> Vec<Dense> {
    [&FEW[..], &WIDE, &[MmMxfp8Tokens, QuantizeMxfp8, DequantizeMxfp8], &NVFP4].concat()
}

impl Dense {
    pub fn symbol(&self) -> String {
        match *self {
            MmMxfp8Few { tokens, row_tiles, stages } => format!("mm_mxfp8_few_sm90_t{tokens}_r{row_tiles}_s{stages}"),
            MmMxfp8Wide { tokens, consumers, stages } => format!("mm_mxfp8_wide_sm90_t{tokens}_c{consumers}_s{stages}"),
            MmMxfp8Tokens => "mm_mxfp8_tokens".into(),
            QuantizeMxfp8 => "quantize_mxfp8".into(),
            DequantizeMxfp8 => "dequantize_mxfp8".into(),
            QuantizeNvfp4 { block } => format!("nvfp4_quantize_b{block}"),
        }
    }

    pub fn device_type(&self) -> String {
        match *self {
            MmMxfp8Few { tokens, row_tiles, stages } => {
                format!("oxmoe::MmMxfp8FewSm90<{tokens}, {row_tiles}, {stages}>")
            }
            MmMxfp8Wide { tokens, consumers, stages } => {
                format!("oxmoe::MmMxfp8WideSm90<{tokens}, {consumers}, {stages}>")
            }
            MmMxfp8Tokens => "oxmoe::MmMxfp8Tokens".into(),
            QuantizeMxfp8 => "oxmoe::QuantizeMxfp8".into(),
            DequantizeMxfp8 => "oxmoe::DequantizeMxfp8".into(),
            QuantizeNvfp4 { block } => format!("oxmoe::QuantizeNvfp4<{block}>"),
        }
    }

    pub fn header(&self) -> &'static str {
        match self {
            MmMxfp8Few { .. } => "gemm/mm_mxfp8_few_sm90.cuh",
            MmMxfp8Wide { .. } | MmMxfp8Tokens => "gemm/mm_mxfp8_wide_sm90.cuh",
            QuantizeMxfp8 | DequantizeMxfp8 => "quant/quantize_mxfp8.cuh",
            QuantizeNvfp4 { .. } => "quant/quantize_nvfp4.cuh",
        }
    }

    pub fn signature(&self) -> (&'static str, &'static str) {
        match self {
            QuantizeMxfp8 | DequantizeMxfp8 => ("const __grid_constant__ oxmoe::QuantizeMxfp8Params p", "p"),
            QuantizeNvfp4 { .. } => ("const __grid_constant__ oxmoe::QuantizeNvfp4Params p", "p"),
            MmMxfp8Few { .. } => ("const __grid_constant__ oxmoe::MmMxfp8FewParams p", "p"),
            _ => ("const __grid_constant__ oxmoe::MmMxfp8Params p", "p"),
        }
    }

    pub fn runs_on(&self, arch: &str) -> bool {
        matches!(self, QuantizeMxfp8 | DequantizeMxfp8 | QuantizeNvfp4 { .. }) || arch == "90a"
    }

    pub fn threads(&self) -> u32 {
        match *self {
            MmMxfp8Wide { consumers, .. } => 128 * (1 + consumers),
            _ => 256,
        }
    }

    /// Rows of b and tokens of a CTA, few: of a pass.
    pub fn tile(&self) -> (u32, u32) {
        match *self {
            MmMxfp8Few { tokens, row_tiles, .. } => (16 * row_tiles, tokens),
            MmMxfp8Wide { tokens, consumers, .. } => (64 * consumers, tokens),
            _ => (1, 1),
        }
    }

    /// Few: rings and the sums of up to 32 rows, without the scales that come behind them; wide: stages and barriers.
    pub fn shared_bytes(&self) -> u32 {
        let (rows, tokens) = self.tile();
        match *self {
            MmMxfp8Few { stages, .. } => 8 * stages * (rows + tokens) * 64 + 8 * tokens * (rows.min(32) + 4) * 4,
            MmMxfp8Wide { stages, .. } => {
                // Aligned to 1024 bytes, as a stage is.
                (stages * (2 * tokens * 128 + rows * 128) + 16 * stages).next_multiple_of(1024)
            }
            _ => 0,
        }
    }

    /// None: as many scales as K has come behind.
    pub fn fixed_shared_bytes(&self) -> Option<u32> {
        (!matches!(self, MmMxfp8Few { .. })).then(|| self.shared_bytes())
    }

    /// Scales of the rows and tokens of a CTA of MmMxfp8Few: two bytes for 64 K, each of eight warps' part rounded up.
    pub fn scale_bytes(&self, k: u32) -> u32 {
        let (rows, tokens) = self.tile();
        2 * 8 * k.div_ceil(64).div_ceil(8) * (rows + tokens)
    }

    /// CTAs on one SM: 228 KB, 1 KB of it the system's for each CTA, and 65536 registers.
    pub fn ctas(&self) -> u32 {
        match *self {
            // Rows of up to 7168 K.
            MmMxfp8Few { .. } => (228 * 1024 / (self.shared_bytes() + self.scale_bytes(7168) + 1024)).min(2),
            MmMxfp8Wide { .. } => 1,
            // 32 numbers of fp32 are as many registers.
            QuantizeNvfp4 { block: 32 } => 2,
            _ => 4,
        }
    }
}
