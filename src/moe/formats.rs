//! The one place that knows which file describes the layers of a format.

use super::layer::Layer;
use super::numbers::Numbers;
use super::operands::Operands;
use super::options::Options;
use super::{fp8, mxfp4, mxfp8, nvfp4, plain};
use crate::error::Result;

/// Checks the tensors of a layer whose format is `numbers`, and describes them.
pub fn layer(operands: &Operands<'_>, numbers: Numbers, options: &Options<'_, '_>) -> Result<Layer> {
    let mut layer = match numbers {
        Numbers::Plain(elem) => plain::layer(operands, elem, options),
        Numbers::Mxfp4 { dtype, e4m3, hidden } => mxfp4::layer(operands, (dtype, e4m3), hidden, options),
        Numbers::Fp8(scaling) => fp8::layer(operands, scaling, options),
        Numbers::Mxfp8 { hidden } => mxfp8::layer(operands, hidden, options),
        Numbers::Nvfp4(spec) => nvfp4::layer(operands, &spec, options),
    }?;
    if options.swiglu.of_experts() {
        layer.per_expert = options.swiglu.pointers(layer.place, layer.desc.experts, options.clamp == "after")?;
    }
    Ok(layer)
}
