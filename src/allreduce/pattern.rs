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
    pub name: &'static str,
    pub source: Source,
    /// Whether the pattern has a residual and a norm. Without them only `output` is written.
    pub norm: bool,
    pub norm_out: bool,
    pub narrow: Narrow,
}

const fn plain(name: &'static str, norm_out: bool, narrow: Narrow) -> Pattern {
    Pattern { name, source: Source::Input, norm: true, norm_out, narrow }
}

/// The patterns, indexed by flashinfer's value (flashinfer/comm/trtllm_ar.py, AllReduceFusionPattern). In the MoE patterns every output is
/// optional.
pub const PATTERNS: [Pattern; 12] = [
    Pattern { name: "kAllReduce", source: Source::Input, norm: false, norm_out: false, narrow: Narrow::None },
    plain("kARResidualRMSNorm", true, Narrow::None),
    plain("kARResidualRMSNormFP8Quant", false, Narrow::Fp8),
    plain("kARResidualRMSNormFP4Quant", false, Narrow::Nvfp4),
    plain("kARResidualRMSNormOutFP8Quant", true, Narrow::Fp8),
    plain("kARResidualRMSNormOutFP4Quant", true, Narrow::Nvfp4),
    Pattern { source: Source::MoeReduction, ..plain("kMoEReductionARResidualRMSNorm", true, Narrow::Nvfp4) },
    Pattern { source: Source::MoeFinalize, ..plain("kMoEFinalizeARResidualRMSNorm", true, Narrow::Nvfp4) },
    plain("kARResidualRMSNormPerTokenGroupFP8PackedQuant", false, Narrow::Groups),
    plain("kARResidualRMSNormOutPerTokenGroupFP8PackedQuant", true, Narrow::Groups),
    plain("kARResidualRMSNormDynamicFP8Quant", false, Narrow::PerToken),
    plain("kARResidualRMSNormOutDynamicFP8Quant", true, Narrow::PerToken),
];
