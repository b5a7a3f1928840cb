//! Shapes of a layer, as plain data. Plans are made from them.

use crate::params::Dtype;
use crate::quant::fp8::GROUP;
use crate::quant::Format;

/// Everything a plan needs to know of a layer's weights.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LayerDesc {
    /// Experts of this rank.
    pub experts: i64,
    /// Columns of x and of the output.
    pub hidden: i64,
    pub intermediate: i64,
    pub gated: bool,
    /// Dtype of activations and products.
    pub dtype: Dtype,
    pub format: Format,
}

impl LayerDesc {
    /// Rows of an expert's w13.
    pub fn up_rows(&self) -> i64 {
        self.intermediate * if self.gated { 2 } else { 1 }
    }

    /// Columns, in memory, of a row between the GEMMs. fp8 has whole blocks there, and the columns behind `intermediate` are zeros.
    pub fn inner(&self) -> i64 {
        let block = if self.format.is_fp8() { GROUP as i64 } else { 1 };
        (self.intermediate + block - 1) / block * block
    }

    /// Whether a part of an expert's rows of w13, or a row of its w2, ends inside a block.
    pub fn is_cut(&self) -> bool {
        self.inner() != self.intermediate
    }
}
