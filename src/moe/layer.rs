//! A layer's weights: what a plan needs to know of them, and where they lie.

use super::plan::{fp8_sm90, mxfp4_sm90};
use crate::device::Device;
use crate::error::Result;
use crate::params::Dtype;
use crate::quant::blocks::Blocks;
use crate::quant::fp8::GROUP;
use crate::quant::mxfp4::BLOCK;
use crate::quant::packed::{Extent, Packed};
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
    /// An error where no kernel of this GPU takes the layer.
    pub fn require_cuda(&self, device: &Device) -> Result<()> {
        self.format.require_cuda()?;
        if self.format == Format::Fp8Block {
            fp8_sm90::require(device, self)?;
        }
        if self.format == Format::Mxfp4A8 {
            mxfp4_sm90::require_e4m3(device, self)?;
        }
        Ok(())
    }

    /// Rows of w13 of an expert.
    pub fn up_rows(&self) -> i64 {
        self.intermediate * if self.gated { 2 } else { 1 }
    }
}

/// A weight matrix per expert, its bias and (on Hopper) its tensor maps.
#[derive(Clone, Copy, Debug)]
pub struct Matrix {
    pub data: *const u8,
    /// Of formats with block scales, as a checkpoint has them.
    pub blocks: Option<Blocks>,
    /// The packed form instead (`data`: its codes).
    pub packed: Option<Packed>,
    /// Of fp8: one for each 128 x 128 block, else null.
    pub block_scales: *const f32,
    /// Null: no bias.
    pub bias: *const u8,
    pub bias_dtype: Dtype,
    /// Of an expert, padding included.
    pub rows: i64,
    /// Columns that are multiplied.
    pub k: i64,
}

// SAFETY: addresses of tensors that ExpertWeights keeps alive and never writes.
unsafe impl Send for Matrix {}
// SAFETY: as above.
unsafe impl Sync for Matrix {}

impl Matrix {
    /// What of `experts` experts is read, as (address, bytes): weights and scales.
    pub fn ranges(&self, experts: i64, dtype: Dtype) -> [(*const u8, usize); 2] {
        let rows = (experts * self.rows) as usize;
        if let Some(Packed { codes, scales, .. }) = self.packed {
            let extent = Extent { experts, rows: self.rows, k: self.k };
            return [(codes, extent.code_bytes()), (scales, extent.scale_bytes())];
        }
        if !self.block_scales.is_null() {
            let bytes = rows * self.k as usize;
            return [(self.data, bytes), (self.block_scales.cast(), bytes / (GROUP * GROUP) * size_of::<f32>())];
        }
        match self.blocks {
            Some(Blocks { scales, row_blocks, .. }) => {
                [(self.data, rows * row_blocks * BLOCK / 2), (scales, rows * row_blocks)]
            }
            None => [(self.data, rows * self.k as usize * if dtype == Dtype::F32 { 4 } else { 2 }), (self.data, 0)],
        }
    }
}
