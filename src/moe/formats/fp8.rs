//! The contract of experts in e4m3 with fp32 scales.
//!
//! A matrix with one scale has this scale in every 128 x 128 block, and a row of activations has its scale in every group. So all formats
//! of e4m3 have the same kernels.

use super::Source;
use crate::contract;
use crate::desc::LayerDesc;
use crate::device::gpu;
use crate::error::{Error, Result};
use crate::moe::layer::{Layer, Matrix};
use crate::moe::operands::{check_biases, check_sizes, check_w2, intermediate_size, Operands};
use crate::moe::options::Options;
use crate::moe::plan::{self, fp8_sm90};
use crate::moe::weight_maps;
use crate::params::{Dtype, W13Layout};
use crate::quant::fp8::GROUP;
use crate::quant::Format;
use crate::tensor::{Contract, Dim, Elem, Place};

/// The origin of the scales of an fp8 layer's activations.
#[derive(Clone, Copy, Debug)]
pub enum Activations {
    /// fp8_block: a scale is made from a group of a row's columns.
    Groups,
    /// fp8_tensor: one scale is made from all numbers of a call.
    Tensor,
    /// fp8_tensor: a scale is made from a row.
    Token,
    /// fp8_tensor: the scales of x and of GEMM1's output are given.
    Static([*const f32; 2]),
}

impl Activations {
    pub fn format(self) -> Format {
        match self {
            Activations::Groups => Format::Fp8Block,
            Activations::Tensor => Format::Fp8Tensor,
            Activations::Token => Format::Fp8TensorToken,
            Activations::Static(_) => Format::Fp8TensorStatic,
        }
    }
}

/// The scales of an fp8 layer beside the scales of blocks.
#[derive(Clone, Copy, Debug)]
pub struct Scaling {
    pub activations: Activations,
    /// Scales of each row of w13 and w2, fp32 [E, 2I] and [E, H], or null. The scales of w13 and `bias` have zeros up to whole blocks if
    /// `pads` says so.
    pub rows: [*const f32; 2],
    /// A copy of b13 with zeros up to whole blocks, or null.
    pub bias: *const u8,
}

impl From<Activations> for Scaling {
    fn from(activations: Activations) -> Scaling {
        Scaling { activations, rows: [std::ptr::null(); 2], bias: std::ptr::null() }
    }
}

/// Whether the layer's kernels read the scales of w13's rows and b13 in whole blocks, and gate and up rows do not fill them.
pub fn pads(place: Place, desc: &LayerDesc) -> Result<bool> {
    match place {
        Place::Cuda(ordinal) if desc.is_cut() => Ok(fp8_sm90::serves(&gpu(ordinal)?.device, desc)),
        _ => Ok(false),
    }
}

impl Source for Scaling {
    /// Checks w13 [E, 2I, H], w2 [E, H, I], their scales [E, 2I / 128, H / 128] and [E, H / 128, I / 128], and biases. For fp8_tensor I /
    /// 128 is rounded up, in each half of w13.
    fn layer(&self, operands: &Operands<'_>, options: &Options<'_, '_>) -> Result<Layer> {
        let activations = self.activations;
        let name = if activations.format().is_fp8_tensor() { "fp8_tensor" } else { "fp8_block" };
        let Operands { w13, w2, b13, b2, scales } = operands;
        let (layout, activation, gated) = (options.layout()?, options.activation()?, options.gated());
        let Some([w13_scale, w2_scale]) = scales else {
            contract!("w13_scale and w2_scale: both are needed for format {name:?}");
        };
        if gated && layout == W13Layout::Interleaved {
            return Err(Error::Unsupported(format!(
                "layout \"interleaved\" for {name} experts, whose blocks would mix gate and up rows; supported: \"gate_up\", \"up_gate\""
            )));
        }
        let (block, experts) = (GROUP as i64, Dim::Named("experts"));
        let mut contract = Contract::new();
        contract.check("w13", w13, &[experts, Dim::Named("rows of w13"), Dim::Named("hidden")], &[Elem::E4M3])?;
        let (rows, hidden, intermediate) = (w13.shape()[1], w13.shape()[2], intermediate_size(w13, gated)?);
        check_sizes(w13, hidden)?;
        let spec = activations.format().spec();
        for (size_name, size, dimension, multiple) in
            [("hidden", hidden, 2, spec.block), ("intermediate", intermediate, 1, spec.inner_block)]
        {
            if size % multiple != 0 {
                let why = if multiple == block { " (a block has one scale)" } else { "" };
                return Err(Error::Unsupported(format!(
                    "w13: dimension {dimension} gives {size_name} {size} for {name} experts; supported: multiples of {multiple}{why}"
                )));
            }
        }
        let desc = LayerDesc {
            experts: w13.shape()[0],
            hidden,
            intermediate,
            gated,
            dtype: Dtype::Bf16,
            format: activations.format(),
        };
        let inner = desc.inner();
        let of = |name, size: i64| Dim::Is(name, size / block);
        check_w2(
            &mut contract,
            w13,
            w2,
            &[experts, Dim::Named("hidden"), Dim::Is("intermediate", intermediate)],
            &[Elem::E4M3],
            gated,
        )?;
        let all_blocks = rows / intermediate * inner;
        let (of_rows, of_hidden) = (of("rows of w13 / 128", all_blocks), of("hidden / 128", hidden));
        contract.check("w13_scale", w13_scale, &[experts, of_rows, of_hidden], &[Elem::F32])?;
        let of_intermediate = of("intermediate / 128", inner);
        contract.check("w2_scale", w2_scale, &[experts, of_hidden, of_intermediate], &[Elem::F32])?;
        check_biases(&mut contract, operands, Dim::Named("hidden"), &[Elem::Bf16, Elem::F32])?;
        // Kernels read codes and biases 16 bytes at a time, and two scales of w2 at a time.
        let (vector, pair) = if w13.place == Place::Cpu { (1, 4) } else { (16, 8) };
        let scales = [("w13_scale", w13_scale, 4), ("w2_scale", w2_scale, pair)];
        let biases =
            [("b13", b13), ("b2", b2)].into_iter().filter_map(|(name, bias)| Some((name, bias.as_ref()?, vector)));
        for (name, t, alignment) in [("w13", w13, vector), ("w2", w2, vector)].into_iter().chain(scales).chain(biases) {
            if !(t.data as usize).is_multiple_of(alignment) {
                contract!(
                    "{name}: must start at a multiple of {alignment} bytes, got address {:p}; pass {name}.clone()",
                    t.data
                );
            }
        }
        let x_scales = match activations {
            Activations::Static(scales) => scales,
            _ => [std::ptr::null(); 2],
        };
        let [up, down] = [(0, w13, w13_scale, b13, (rows, hidden)), (1, w2, w2_scale, b2, (hidden, intermediate))].map(
            |(i, t, scales, bias, size)| Matrix {
                block_scales: scales.data.cast(),
                x_scale: x_scales[i],
                row_scales: self.rows[i],
                ..Matrix::new(t, bias, Dtype::Bf16, size)
            },
        );
        let mut layer = Layer::described((desc, w13.place), [up, down], (layout, activation));
        if pads(layer.place, &desc)? {
            layer.up.numbers = all_blocks;
            if !self.bias.is_null() {
                layer.up.bias = self.bias;
            }
        }
        if let Place::Cuda(ordinal) = layer.place {
            let gpu = gpu(ordinal)?;
            plan::require(&desc, &gpu.device)?;
            layer.up_maps = weight_maps::encode(&gpu.device, &desc, layer.up.extent(), gated, layout)?;
            layer.down_maps = weight_maps::encode(&gpu.device, &desc, layer.down.extent(), false, layout)?;
        }
        Ok(layer)
    }
}
