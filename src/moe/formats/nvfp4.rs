//! NVFP4 experts: the constructor, the contract of its tensors, and the factors of activations that are rounded to NVFP4.

use super::nvfp4_gpu::{self, numbers_on_device};
use super::Source;
use crate::contract;
use crate::desc::LayerDesc;
use crate::error::{guard, Error, Result};
use crate::moe::layer::{Layer, Matrix};
use crate::moe::numbers_of::numbers_of;
use crate::moe::operands::{check_biases, check_sizes, check_w2, intermediate_size, Operands};
use crate::moe::options::{Common, Compute, Options};
use crate::moe::weights::ExpertWeights;
use crate::params::{Dtype, W13Layout};
use crate::quant::arguments::w13_layout;
use crate::quant::blocks::Blocks;
use crate::quant::nvfp4::{ScaleLayout, BLOCK, BLOCKS};
use crate::quant::{self, Format, Weights};
use crate::tensor::{self, Contract, Dim, Elem, Origin, Place, View};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::sync::Arc;

pub const CODES: [Elem; 3] = [Elem::U8, Elem::I8, Elem::E2M1_X2];
pub const SCALES: [Elem; 2] = [Elem::E4M3, Elem::U8];
const BIASES: [Elem; 3] = [Elem::Bf16, Elem::F16, Elem::F32];

/// The properties of NVFP4 experts that codes, block scales and biases do not show. Pairs are of w13, then of w2.
#[derive(Clone, Debug)]
pub struct Spec {
    pub dtype: Dtype,
    pub layouts: [ScaleLayout; 2],
    /// The numbers for `GroupedGemmParams::expert_scales`.
    pub factors: [Values; 2],
    /// The number of each expert by which its rows are multiplied before they are rounded to NVFP4. None if activations are not rounded.
    pub activations: Option<[Values; 2]>,
}

/// Numbers of experts, in the memory where a layer reads them.
#[derive(Clone, Debug)]
pub enum Values {
    Host(Arc<[f32]>),
    /// The address of a tensor that the weights keep alive, and whether it has one number for all experts.
    Device(*const f32, bool),
}

impl Values {
    fn as_ptr(&self) -> *const f32 {
        match self {
            Values::Host(values) => values.as_ptr(),
            Values::Device(address, _) => *address,
        }
    }

    fn is_one_on_device(&self) -> bool {
        matches!(self, Values::Device(_, true))
    }
}

fn layout(name: &str) -> Result<W13Layout> {
    Ok(match name {
        "gate_up_64" => W13Layout::GateUp64,
        "up_gate_64" => W13Layout::UpGate64,
        other => w13_layout(other)?,
    })
}

impl Source for Spec {
    /// Checks w13 [E, 2I, H / 2], w2 [E, H, I / 2], their scales and biases.
    fn layer(&self, operands: &Operands<'_>, options: &Options<'_, '_>) -> Result<Layer> {
        let Operands { w13, w2, b13, b2, scales } = operands;
        let (layout, activation, gated) = (layout(options.layout)?, options.activation()?, options.gated());
        let Some([w13_scale, w2_scale]) = scales else {
            contract!("w13_scale and w2_scale: both are needed for format \"nvfp4\"");
        };
        let (block, experts) = (BLOCK as i64, Dim::Named("experts"));
        let mut contract = Contract::new();
        contract.check("w13", w13, &[experts, Dim::Named("rows of w13"), Dim::Named("hidden / 2")], &CODES)?;
        let (rows, hidden, intermediate) = (w13.shape()[1], 2 * w13.shape()[2], intermediate_size(w13, gated)?);
        check_sizes(w13, hidden)?;
        for (name, size, dimension) in [("hidden", hidden, 2), ("intermediate", intermediate, 1)] {
            if size % block != 0 {
                contract!("w13: dimension {dimension} gives {name} {size}, expected a multiple of {block} (a block has one scale)");
            }
        }
        let in_64s = matches!(layout, W13Layout::GateUp64 | W13Layout::UpGate64);
        if gated && in_64s && intermediate % 64 != 0 {
            contract!(
                "w13: dimension 1 gives intermediate {intermediate}, expected a multiple of 64 for layout {:?}",
                options.layout
            );
        }
        let rows_of_w2 = Dim::Is("hidden", hidden);
        check_w2(
            &mut contract,
            w13,
            w2,
            &[experts, rows_of_w2, Dim::Is("intermediate / 2", intermediate / 2)],
            &CODES,
            gated,
        )?;
        let of = [("w13_scale", w13_scale, rows, hidden), ("w2_scale", w2_scale, hidden, intermediate)];
        for ((name, scale, rows, columns), layout) in of.into_iter().zip(self.layouts) {
            let (rows, blocks) = layout.padded(rows as usize, (columns / block) as usize);
            let (rows, blocks) = (rows as i64, blocks as i64);
            // Scales that were given as a view of tiles have six dimensions.
            let tiles = [("row tiles", rows / 128), ("column tiles", blocks / 4), ("32", 32), ("4", 4), ("4", 4)];
            let tiles = tiles.map(|(name, size)| Dim::Is(name, size));
            match scale.shape().len() {
                6 => contract.check(name, scale, &[&[experts], tiles.as_slice()].concat(), &SCALES)?,
                _ => contract.check(
                    name,
                    scale,
                    &[experts, Dim::Is("rows", rows), Dim::Is("blocks", blocks)],
                    &SCALES,
                )?,
            }
        }
        check_biases(&mut contract, operands, rows_of_w2, &BIASES)?;
        let [up, down] = [(0, w13, w13_scale, b13, (rows, hidden)), (1, w2, w2_scale, b2, (hidden, intermediate))].map(
            |(i, t, scales, bias, size)| {
                let (layout, factors) = (self.layouts[i], self.factors[i].as_ptr());
                let activations = self.activations.as_ref().map(|both| &both[i]);
                Matrix {
                    x_scale: activations.map_or(std::ptr::null(), Values::as_ptr),
                    one_x_scale: activations.is_some_and(Values::is_one_on_device),
                    blocks: Some(Blocks {
                        layout,
                        factors,
                        ..Blocks::new(&BLOCKS, scales.data, size.1 as usize / BLOCK)
                    }),
                    ..Matrix::new(t, bias, self.dtype, size)
                }
            },
        );
        let on_cuda = w13.place != Place::Cpu;
        let format = if on_cuda && self.activations.is_some() { Format::Nvfp4A4 } else { Format::Nvfp4 };
        let (experts, dtype) = (w13.shape()[0], self.dtype);
        let desc = LayerDesc { experts, hidden, intermediate, gated, dtype, format };
        let values = self.factors.iter().chain(self.activations.iter().flatten());
        let numbers = values.filter_map(|values| match values {
            Values::Host(values) => Some(values.clone()),
            Values::Device(..) => None,
        });
        let numbers = numbers.collect();
        Ok(Layer { numbers, ..Layer::described((desc, w13.place), [up, down], (layout, activation)) })
    }
}

/// Whether rows of x and of GEMM1's output are rounded to NVFP4.
pub fn rounds(layer: &Layer) -> bool {
    layer.desc.format.weights() == Weights::Nvfp4 && !layer.up.x_scale.is_null()
}

/// The scales of `rows` rows of `blocks` blocks in a `ScaleLayout`. A view [32, 4, row tiles, 4, column tiles, E] becomes a contiguous
/// tensor of tiles again.
fn scales<'py>(
    operand: &'static str,
    object: &Bound<'py, PyAny>,
    (rows, blocks): (i64, i64),
    given: Option<&str>,
) -> Result<(Bound<'py, PyAny>, ScaleLayout)> {
    let view = tensor::describe(operand, object)?;
    let shape = view.shape().to_vec();
    if let [32, 4, _, 4, _, _] = shape[..] {
        let (turn, copy) = if view.origin == Origin::Other { ("transpose", "copy") } else { ("permute", "contiguous") };
        let tiles = object.call_method1(turn, ((5, 2, 4, 0, 1, 3),))?.call_method0(copy)?;
        return Ok((tiles, ScaleLayout::Swizzled128x4));
    }
    let layout = match given {
        Some("plain") => ScaleLayout::Linear,
        Some("swizzled") => ScaleLayout::Swizzled128x4,
        Some(other) => contract!("scale_layout: expected \"plain\" or \"swizzled\", got {other:?}"),
        None if shape.get(1..) == Some(&[rows, blocks]) => ScaleLayout::Linear,
        None => ScaleLayout::Swizzled128x4,
    };
    Ok((object.clone(), layout))
}

#[doc = crate::help!("ExpertWeights.nvfp4")]
#[pyfunction(crate = "crate::python")]
#[allow(clippy::too_many_arguments)] // keyword arguments of Python, not positions
#[pyo3(signature = (w13, w2, w13_scale, w2_scale, w13_global_scale, w2_global_scale, *, input_global_scale=None, a2_global_scale=None,
    scale_layout=None, dtype=Compute(Dtype::Bf16), **options),
    text_signature = "(w13, w2, w13_scale, w2_scale, w13_global_scale, w2_global_scale, *, input_global_scale=None, a2_global_scale=None, \
scale_layout=None, b13=None, b2=None, layout=\"gate_up\", activation=\"silu\", gated=None, alpha=1.0, beta=0.0, limit=None, clamp=\"before\", situ_beta=None, situ_linear_beta=None, dtype=\"bf16\")")]
pub fn nvfp4<'py>(
    w13: &Bound<'py, PyAny>,
    w2: &Bound<'py, PyAny>,
    w13_scale: &Bound<'py, PyAny>,
    w2_scale: &Bound<'py, PyAny>,
    w13_global_scale: &Bound<'py, PyAny>,
    w2_global_scale: &Bound<'py, PyAny>,
    input_global_scale: Option<&Bound<'py, PyAny>>,
    a2_global_scale: Option<&Bound<'py, PyAny>>,
    scale_layout: Option<&str>,
    dtype: Compute,
    options: Option<&Bound<'py, PyDict>>,
) -> PyResult<ExpertWeights> {
    let common = Common::new("nvfp4", options)?;
    guard(|| {
        let mut contract = Contract::new();
        let (up, down) = (contract.input("w13", w13)?, tensor::describe("w2", w2)?);
        let cuda = up.place != Place::Cpu;
        let Compute(dtype) = dtype;
        if cuda && dtype != Dtype::Bf16 {
            return Err(Error::Unsupported(format!(
                "dtype: {:?} for nvfp4 experts on {}; supported there: \"bf16\" (others run on CPU tensors)",
                quant::name(dtype),
                up.place
            )));
        }
        let three = |name: &str, t: &View| match t.shape() {
            &[experts, rows, bytes] => Ok((experts, rows, 2 * bytes / BLOCK as i64)),
            shape => contract!("{name}: expected [experts, rows, columns / 2], got shape {shape:?}"),
        };
        let ((experts, rows, blocks), (_, w2_rows, w2_blocks)) = (three("w13", &up)?, three("w2", &down)?);
        let options = common.options(&mut contract)?;
        let parts = if options.gated() { 2 } else { 1 };
        let (w13_scale, up_layout) = scales("w13_scale", w13_scale, (rows, blocks), scale_layout)?;
        let (w2_scale, down_layout) = scales("w2_scale", w2_scale, (w2_rows, w2_blocks), scale_layout)?;
        let mut extra = Vec::new();
        let mut values = |operand, object: &Bound<'py, PyAny>, parts| -> Result<Values> {
            if !cuda {
                return Ok(Values::Host(numbers_of(operand, object, experts, parts)?));
            }
            let (made, one) = numbers_on_device(&mut contract, operand, object, &up, experts, parts)?;
            let address = made.data.cast_const().cast();
            extra.push((operand, made));
            Ok(Values::Device(address, one))
        };
        let activations = match (input_global_scale, a2_global_scale) {
            (None, None) => None,
            (Some(of_x), Some(of_hidden)) => {
                Some([values("input_global_scale", of_x, 1)?, values("a2_global_scale", of_hidden, 1)?])
            }
            (None, _) => contract!("input_global_scale: needed where a2_global_scale is given"),
            (_, None) => contract!("a2_global_scale: needed where input_global_scale is given"),
        };
        let spec = Spec {
            dtype,
            layouts: [up_layout, down_layout],
            factors: [
                values("w13_global_scale", w13_global_scale, parts)?,
                values("w2_global_scale", w2_global_scale, 1)?,
            ],
            activations,
        };
        let arranged = match &common.b13 {
            Some(bias) if cuda && parts == 2 && nvfp4_gpu::is_in_64s(layout(&common.layout)?) => {
                let whole = tensor::describe("b13", bias)?.shape() == [experts, rows] && rows % 128 == 0;
                whole.then(|| nvfp4_gpu::bias_in_halves(bias, experts, rows)).transpose()?
            }
            _ => None,
        };
        let mut arguments = common.arguments([w13, w2], [Some(&w13_scale), Some(&w2_scale)]);
        arguments.b13 = arranged.as_ref().or(arguments.b13);
        let mut made = ExpertWeights::new(contract, &arguments, &spec, options, &common.given, extra)?;
        // The attribute is the tensor that was given, not the rearranged one.
        made.b13 = common.b13.as_ref().map(|bias| bias.clone().unbind());
        Ok(made)
    })
}
