//! flashinfer's fusion patterns: what each reads and writes.

/// The quantised output that is made of the norm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Narrow {
    None,
    /// e4m3 with the caller's scale.
    Fp8,
    /// e2m1 with block scales.
    Nvfp4,
    /// e4m3 with power-of-two group scales, packed.
    Groups,
    /// e4m3 with one scale for each token.
    PerToken,
}

/// The source of a rank's contribution.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    Input,
    /// Rows of experts: all experts of this rank for every token.
    MoeReduction,
    /// Rows of the second GEMM, found through a table of slots.
    MoeFinalize,
}

/// One row of the table of patterns.
#[derive(Clone, Copy, Debug)]
pub struct Pattern {
    /// flashinfer's value (flashinfer/comm/trtllm_ar.py, AllReduceFusionPattern).
    pub number: u8,
    pub name: &'static str,
    pub source: Source,
    /// Whether the pattern has a residual and a norm. Without them only `output` is written.
    pub norm: bool,
    pub norm_out: bool,
    pub narrow: Narrow,
}

const fn plain(number: u8, name: &'static str, norm_out: bool, narrow: Narrow) -> Pattern {
    Pattern { number, name, source: Source::Input, norm: true, norm_out, narrow }
}

/// The pattern with flashinfer's value `number`.
pub fn of(number: i64) -> Option<&'static Pattern> {
    PATTERNS.iter().find(|pattern| i64::from(pattern.number) == number)
}

/// The patterns that are served. In the MoE patterns every output is optional. MXFP8 is made of norm_out after the call, but ranks of one
/// call have one pattern, so it has its own rows.
pub const PATTERNS: [Pattern; 14] = [
    Pattern {
        number: 0,
        name: "kAllReduce",
        source: Source::Input,
        norm: false,
        norm_out: false,
        narrow: Narrow::None,
    },
    plain(1, "kARResidualRMSNorm", true, Narrow::None),
    plain(2, "kARResidualRMSNormFP8Quant", false, Narrow::Fp8),
    plain(3, "kARResidualRMSNormFP4Quant", false, Narrow::Nvfp4),
    plain(4, "kARResidualRMSNormOutFP8Quant", true, Narrow::Fp8),
    plain(5, "kARResidualRMSNormOutFP4Quant", true, Narrow::Nvfp4),
    Pattern { source: Source::MoeReduction, ..plain(6, "kMoEReductionARResidualRMSNorm", true, Narrow::Nvfp4) },
    Pattern { source: Source::MoeFinalize, ..plain(7, "kMoEFinalizeARResidualRMSNorm", true, Narrow::Nvfp4) },
    plain(8, "kARResidualRMSNormPerTokenGroupFP8PackedQuant", false, Narrow::Groups),
    plain(9, "kARResidualRMSNormOutPerTokenGroupFP8PackedQuant", true, Narrow::Groups),
    plain(10, "kARResidualRMSNormDynamicFP8Quant", false, Narrow::PerToken),
    plain(11, "kARResidualRMSNormOutDynamicFP8Quant", true, Narrow::PerToken),
    plain(13, "kARResidualRMSNormMXFP8Quant", true, Narrow::None),
    plain(14, "kARResidualRMSNormOutMXFP8Quant", true, Narrow::None),
];
