//! A layer's weights: what a plan needs to know of them, and where they lie.

use super::grouped_gemm::WeightMaps;
use super::per_expert::PerExpert;
use super::plan::{fp8_sm90, mxfp4_sm90};
use crate::device::Device;
use crate::error::Result;
use crate::params::{Activation, Dtype, W13Layout};
use crate::quant::blocks::{Blocks, Nvfp4};
use crate::quant::fp8::GROUP;
use crate::quant::packed::{Extent, Packed};
use crate::quant::Format;
use crate::tensor::{Place, TensorRef};
use std::sync::Arc;

/// Weights as a call uses them: from `ExpertWeights`, or made for one call of `fused_experts`.
#[derive(Clone, Debug)]
pub struct Layer {
    pub desc: LayerDesc,
    pub place: Place,
    pub up: Matrix,
    pub down: Matrix,
    pub layout: W13Layout,
    pub activation: Activation,
    pub per_expert: PerExpert,
    pub up_maps: WeightMaps,
    pub down_maps: WeightMaps,
    /// Keep what `Blocks::least` points at.
    pub least_scales: Vec<Arc<[u8]>>,
    /// Keep what `Blocks::nvfp4` points at.
    pub numbers: Vec<Arc<[f32]>>,
}

impl Layer {
    /// Without tensor maps, and without numbers of single experts.
    pub fn described(
        (desc, place): (LayerDesc, Place),
        [up, down]: [Matrix; 2],
        (layout, activation): (W13Layout, Activation),
    ) -> Layer {
        Layer {
            desc,
            place,
            up,
            down,
            layout,
            activation,
            per_expert: PerExpert::NONE,
            up_maps: WeightMaps::default(),
            down_maps: WeightMaps::default(),
            least_scales: Vec::new(),
            numbers: Vec::new(),
        }
    }
}

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
        if self.format.is_fp8() {
            fp8_sm90::require(self)?;
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
    /// Of fp8 with a scale for each row: these, beside ones in `block_scales`. Else null.
    pub row_scales: *const f32,
    /// Null: no bias.
    pub bias: *const u8,
    pub bias_dtype: Dtype,
    /// Of fp8 with scales of activations that were made before: the scale of what it multiplies. Of NVFP4 fp32 `[experts]`: what rows that it
    /// multiplies are multiplied by before they are rounded to NVFP4. Else null.
    pub x_scale: *const f32,
    /// Of NVFP4 on GPUs: `x_scale` is one number, that of all experts.
    pub one_x_scale: bool,
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
    /// `rows` x `k` of an expert, without scales; what it multiplies is of `dtype`.
    pub fn new(data: &TensorRef, bias: &Option<TensorRef>, dtype: Dtype, (rows, k): (i64, i64)) -> Matrix {
        Matrix {
            data: data.data,
            blocks: None,
            packed: None,
            block_scales: std::ptr::null(),
            bias: bias.as_ref().map_or(std::ptr::null(), |b| b.data.cast_const()),
            bias_dtype: bias.as_ref().and_then(|b| b.elem.dtype()).unwrap_or(dtype),
            x_scale: std::ptr::null(),
            one_x_scale: false,
            row_scales: std::ptr::null(),
            rows,
            k,
        }
    }

    /// As in `GroupedGemmParams`.
    pub fn expert_scales(&self) -> *const f32 {
        if !self.row_scales.is_null() {
            return self.row_scales;
        }
        let of_blocks = |own: Nvfp4| own.factors;
        let plain = || self.blocks.and_then(|blocks| blocks.nvfp4).map_or(std::ptr::null(), of_blocks);
        self.packed.map_or_else(plain, |packed| packed.expert_scales)
    }

    /// What of `experts` experts is read, as (address, bytes): weights and scales.
    pub fn ranges(&self, experts: i64, dtype: Dtype) -> [(*const u8, usize); 2] {
        let rows = (experts * self.rows) as usize;
        if let Some(Packed { form, codes, scales, .. }) = self.packed {
            let extent = Extent { form, experts, rows: self.rows, k: self.k };
            return [(codes, extent.code_bytes()), (scales, extent.scale_bytes())];
        }
        if !self.block_scales.is_null() {
            let bytes = rows * self.k as usize;
            if !self.row_scales.is_null() {
                return [(self.data, bytes), (self.row_scales.cast(), rows * size_of::<f32>())];
            }
            return [(self.data, bytes), (self.block_scales.cast(), bytes / (GROUP * GROUP) * size_of::<f32>())];
        }
        match self.blocks {
            Some(blocks) => {
                let codes = rows * blocks.row_blocks * blocks.code_bytes();
                [(self.data, codes), (blocks.scales, experts as usize * blocks.scale_bytes(self.rows as usize))]
            }
            None => [(self.data, rows * self.k as usize * if dtype == Dtype::F32 { 4 } else { 2 }), (self.data, 0)],
        }
    }
}
