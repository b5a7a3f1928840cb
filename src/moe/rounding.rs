//! What rounds activations on their way: x before GEMM1, and GEMM1's output before GEMM2. Device and CPU take the same parameters.

use crate::cpu;
use crate::error::Result;
use crate::kernel::{Launch, Stream};
use crate::params::{ExpandScalesParams, QuantizeFp8Params, QuantizeRowsParams, RoundNvfp4Params};
use crate::quant::fp8_ops;

/// One of them.
#[derive(Clone, Copy)]
pub enum Rounding {
    Fp8(QuantizeFp8Params),
    /// The scales alone, of codes that the caller made.
    Fp8Scales(ExpandScalesParams),
    E4m3(QuantizeRowsParams),
    Mxfp8(QuantizeRowsParams),
    Nvfp4(RoundNvfp4Params),
}

impl Rounding {
    /// Launches what is planned, one after the other; says whether anything is. Without a launch another kernel rounds.
    pub fn launch(&self, stream: &Stream<'_>, op: &str, planned: [Option<Launch>; 2]) -> Result<bool> {
        if let Rounding::Fp8Scales(p) = self {
            stream.launch(op, &fp8_ops::expansion(p.rows.into(), p.groups.into()), p)?;
            return Ok(true);
        }
        planned.iter().flatten().try_for_each(|launch| match self {
            Rounding::Fp8(p) => stream.launch(op, launch, p),
            Rounding::Fp8Scales(p) => stream.launch(op, launch, p),
            Rounding::E4m3(p) | Rounding::Mxfp8(p) => stream.launch(op, launch, p),
            Rounding::Nvfp4(p) => stream.launch(op, launch, p),
        })?;
        Ok(planned.iter().any(Option::is_some))
    }

    /// # Safety
    /// The pointers must be valid for the parameters' shapes.
    pub unsafe fn on_cpu(&self) {
        // SAFETY: the caller's contract.
        unsafe {
            match self {
                Rounding::Fp8(p) => cpu::quantize_fp8(p),
                Rounding::Fp8Scales(p) => cpu::expand_scales(p),
                Rounding::E4m3(p) => cpu::round_rows_to_e4m3(p),
                Rounding::Mxfp8(p) => cpu::round_rows_mxfp8(p),
                Rounding::Nvfp4(p) => cpu::round_to_nvfp4(p),
            }
        }
    }
}
