//! The instruction sets that the CPU kernels of a layer exist for.

/// The instructions that a kernel is made of. All sets accumulate in fp32; they differ in the order of the sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InstructionSet {
    /// Multiplies bf16 in pairs (`vdpbf16ps`), and fp16 and fp32 like `Avx512`.
    /// NOTE: `vdpbf16ps` takes denormal inputs as zero and flushes denormal results, whatever the mode.
    Avx512Bf16,
    /// AVX-512 without BF16. fp16 and bf16 are converted to fp32 when they are loaded.
    Avx512,
    /// AVX2, FMA and F16C. fp16 and bf16 are converted to fp32 when they are loaded.
    Avx2,
    /// Code without intrinsics. Products are rounded before they are added.
    Scalar,
}

impl InstructionSet {
    /// The best set that this machine has.
    pub fn detect() -> Self {
        Self::ALL.into_iter().find(|set| set.is_available()).unwrap_or(Self::Scalar)
    }

    /// All sets, the best one first.
    pub const ALL: [Self; 4] = [Self::Avx512Bf16, Self::Avx512, Self::Avx2, Self::Scalar];

    pub fn name(self) -> &'static str {
        match self {
            Self::Avx512Bf16 => "avx512_bf16",
            Self::Avx512 => "avx512",
            Self::Avx2 => "avx2",
            Self::Scalar => "scalar",
        }
    }

    #[cfg(target_arch = "x86_64")]
    pub fn is_available(self) -> bool {
        let avx512 = || is_x86_feature_detected!("avx512bw") && is_x86_feature_detected!("avx512vl");
        match self {
            Self::Avx512Bf16 => avx512() && is_x86_feature_detected!("avx512bf16"),
            Self::Avx512 => avx512(),
            Self::Avx2 => {
                is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c")
            }
            Self::Scalar => true,
        }
    }

    #[cfg(not(target_arch = "x86_64"))]
    pub fn is_available(self) -> bool {
        self == Self::Scalar
    }
}

/// Name of the instruction set that a layer's GEMMs use on this machine.
pub fn instruction_set() -> &'static str {
    InstructionSet::detect().name()
}
