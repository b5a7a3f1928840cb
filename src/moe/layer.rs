//! A layer's weights: their addresses, shapes and scales.

use super::per_expert::{PerExpert, NAMES};
use super::weight_maps::WeightMaps;
use crate::desc::LayerDesc;
use crate::params::{Activation, ActivationKind, Dtype, W13Layout};
use crate::quant::blocks::Blocks;
use crate::quant::fp8::GROUP;
use crate::quant::packed::{Extent, Packed};
use crate::quant::Weights;
use crate::tensor::{Borrowed, Place, Span, View};
use std::sync::Arc;

/// The weights that a call uses. They come from `ExpertWeights`, or are described for one call of `fused_experts`.
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
    /// The numbers at which `Blocks::least` points.
    pub least_scales: Vec<Arc<[u8]>>,
    /// The numbers at which `Blocks::factors` and `Matrix::x_scale` point, if they lie on the host.
    pub numbers: Vec<Arc<[f32]>>,
}

impl Layer {
    /// Everything that a call reads of the layer, except the numbers that the layer itself holds (`least_scales`, `numbers`).
    pub fn spans(&self) -> Vec<Span> {
        // There is no `..`, so that a new field must be thought of here.
        let Layer { desc, place, up, down, layout: _, activation, per_expert, .. } = self;
        let Layer { up_maps: _, down_maps: _, least_scales: _, numbers, .. } = self;
        let on_host = |address: *const f32| numbers.iter().any(|held| held.as_ptr() == address);
        let PerExpert { alpha, beta, limit, limit_after: _ } = *per_expert;
        let names = if activation.kind == ActivationKind::Situ { &NAMES[3..] } else { &NAMES[..3] };
        let of_experts = names.iter().copied().zip([alpha, beta, limit]);
        let of_experts =
            of_experts.map(|(name, address)| (name, address.cast(), desc.experts as usize * size_of::<f32>()));
        let [up_names, down_names] = [
            ["w13", "w13_scale", "w13_scale of rows", "b13", "a13_scale"],
            ["w2", "w2_scale", "w2_scale of rows", "b2", "a2_scale"],
        ];
        let of_weights = up.spans(up_names, desc, on_host).into_iter().chain(down.spans(down_names, desc, on_host));
        let spans = of_weights.chain(of_experts).map(|(name, address, bytes)| Span::new(name, *place, address, bytes));
        spans.filter(|span| span.start != 0 && !span.is_empty()).collect()
    }

    /// Whether rows of w13 and columns of w2 end inside a block, and kernels count whole blocks of them.
    pub fn counts_whole_blocks(&self) -> bool {
        self.up.numbers != self.up.rows
    }

    /// A layer without tensor maps, and without numbers of single experts.
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

/// A weight matrix for each expert, with its scales and bias.
#[derive(Clone, Copy, Debug)]
pub struct Matrix {
    pub data: *const u8,
    /// Formats with block scales: the blocks of a checkpoint's form.
    pub blocks: Option<Blocks>,
    /// The packed form, which replaces `blocks`. `data` then has its codes.
    pub packed: Option<Packed>,
    /// fp8: one scale for each 128 x 128 block of weights. Null in every other format.
    pub block_scales: *const f32,
    /// fp8 with a scale for each row: these scales; `block_scales` are then ones. Null in every other format.
    pub row_scales: *const f32,
    /// The bias, or null.
    pub bias: *const u8,
    pub bias_dtype: Dtype,
    /// fp8 with given scales of activations: the scale of the rows that this matrix multiplies. NVFP4: fp32 `[experts]`, the numbers by
    /// which these rows are multiplied before they are rounded to NVFP4. Null if the layer has neither.
    pub x_scale: *const f32,
    /// NVFP4 on GPUs: whether `x_scale` has the same number for all experts.
    pub one_x_scale: bool,
    /// Rows of an expert, padding included.
    pub rows: i64,
    /// Numbers that an expert has in `bias` and `row_scales`, and rows that kernels count. If kernels take whole blocks alone, this may be
    /// more than `rows`: each part of the rows is followed by zeros, which tensor maps and copies of these numbers make.
    pub numbers: i64,
    /// Columns that are multiplied.
    pub k: i64,
}

// SAFETY: the addresses are of memory that `ExpertWeights` owns (it compares `Layer::spans` with its tensors) or that a call has borrowed.
// It is only read.
unsafe impl Send for Matrix {}
// SAFETY: the memory is owned or borrowed, and only read; see `Send`.
unsafe impl Sync for Matrix {}

impl Matrix {
    /// A matrix of `rows` x `k` for each expert, without scales. The rows that it multiplies have `dtype`.
    pub fn new(data: &View, bias: &Option<Borrowed<'_>>, dtype: Dtype, (rows, k): (i64, i64)) -> Matrix {
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
            numbers: rows,
            k,
        }
    }

    /// (address of the weights, rows of an expert, columns of a row).
    pub fn extent(&self) -> (*const u8, i64, i64) {
        (self.data, self.rows, self.k)
    }

    /// The value of `GroupedGemmParams::expert_scales`.
    pub fn expert_scales(&self) -> *const f32 {
        if !self.row_scales.is_null() {
            return self.row_scales;
        }
        let of_blocks = || self.blocks.map_or(std::ptr::null(), |blocks| blocks.factors);
        self.packed.map_or_else(of_blocks, |packed| packed.expert_scales)
    }

    /// The memory of the matrix that a call reads, as (operand, address, bytes): weights, scales, scales of rows, bias, scales of
    /// activations. An address is null if there is none. `on_host`: whether the layer itself holds these numbers.
    fn spans(
        &self,
        names: [&'static str; 5],
        desc: &LayerDesc,
        on_host: impl Fn(*const f32) -> bool,
    ) -> [(&'static str, *const u8, usize); 5] {
        // There is no `..`, so that a new field must be thought of here.
        let Matrix {
            data,
            blocks,
            packed,
            block_scales,
            row_scales,
            bias,
            bias_dtype,
            x_scale,
            one_x_scale: _,
            rows,
            numbers,
            k,
        } = *self;
        let (rows, k, experts, number) = (rows as usize, k as usize, desc.experts as usize, size_of::<f32>());
        let (all_rows, all_numbers) = (experts * rows, experts * numbers as usize);
        let bytes_of = |dtype| if dtype == Dtype::F32 { 4 } else { 2 };
        let mut names = names;
        if blocks.is_some_and(|blocks| !blocks.groups.zeros.is_null()) {
            names[2] = if names[0] == "w13" { "w13_zeros" } else { "w2_zeros" };
        }
        const NONE: (*const u8, usize) = (std::ptr::null(), 0);
        let (weights, scales, of_rows) = if let Some(Packed { form, codes, scales, expert_scales }) = packed {
            let extent = Extent { form, experts: desc.experts, rows: self.rows, k: self.k };
            let factors = if form.row().factors_of_halves && names[0] == "w13" && desc.gated { 2 } else { 1 };
            let factors = (expert_scales.cast(), experts * factors * number);
            ((codes, extent.code_bytes()), (scales, extent.scale_bytes()), factors)
        } else if let Some(blocks) = blocks {
            let Blocks { kind, scales, row_blocks, least: _, layout: _, factors, groups } = blocks;
            let factors = match factors {
                _ if !groups.zeros.is_null() => (groups.zeros, blocks.groups_of(all_rows)),
                none if none.is_null() || on_host(none) => NONE,
                factors => (factors.cast(), experts * number),
            };
            let codes = (data, all_rows * row_blocks * kind.code_bytes);
            (codes, (scales, experts * blocks.scale_bytes(rows)), factors)
        } else if !block_scales.is_null() {
            let parts = if names[0] == "w13" && desc.gated { 2 } else { 1 };
            let row_blocks = experts * parts * (rows / parts).div_ceil(GROUP);
            let blocks = (block_scales.cast(), row_blocks * k.div_ceil(GROUP) * number);
            ((data, all_rows * k), blocks, (row_scales.cast(), all_numbers * number))
        } else {
            ((data, all_rows * k * bytes_of(desc.dtype)), NONE, NONE)
        };
        let of_x = if x_scale.is_null() || on_host(x_scale) {
            NONE
        } else {
            (x_scale.cast(), number * if desc.format.weights() == Weights::Nvfp4 { experts } else { 1 })
        };
        let parts = [weights, scales, of_rows, (bias, all_numbers * bytes_of(bias_dtype)), of_x];
        let mut i = 0;
        names.map(|name| {
            i += 1;
            (name, parts[i - 1].0, parts[i - 1].1)
        })
    }
}
