//! Shapes of a layer, as plain data: what plans are made from.

use crate::params::Dtype;
use crate::quant::Format;

/// Everything a plan needs to know of a layer's weights.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LayerDesc {
    /// Experts held here.
    pub experts: i64,
    /// Columns of x and of the output.
    pub hidden: i64,
    pub intermediate: i64,
    pub gated: bool,
    /// Of activations and products.
    pub dtype: Dtype,
    pub format: Format,
}

impl LayerDesc {
    /// Rows of w13 of an expert.
    pub fn up_rows(&self) -> i64 {
        self.intermediate * if self.gated { 2 } else { 1 }
    }
}
