//! int4 experts: the constructor, the contract of its tensors, and the packed form that GPUs read.

use super::mxfp4::BIASES;
use super::Source;
use crate::contract;
use crate::desc::LayerDesc;
use crate::error::{guard, Error, Result};
use crate::moe::layer::{Layer, Matrix};
use crate::moe::operands::{check_biases, check_sizes, check_w2, intermediate_size, Operands};
use crate::moe::options::{Common, Compute, Options};
use crate::moe::weights::ExpertWeights;
use crate::params::Dtype;
use crate::quant::blocks::{Blocks, Groups};
use crate::quant::int4::{BLOCK, BLOCKS};
use crate::quant::{self, Format};
use crate::tensor::{Borrowed, Contract, Dim, Elem, Origin, Place, View};
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// Element types of codes: a byte has two codes, a word of 32 bits has eight.
const CODES: [Elem; 3] = [Elem::U8, Elem::I8, Elem::I32];
const SCALES: [Elem; 3] = [Elem::Bf16, Elem::F16, Elem::F32];
const ZEROS: [Elem; 2] = [Elem::U8, Elem::I8];

/// The properties of int4 experts that codes, scales and biases do not show.
#[derive(Clone, Debug)]
pub struct Spec {
    pub dtype: Dtype,
    /// Zero points of w13 and w2.
    pub zeros: Option<[View; 2]>,
}

/// The largest zero point. GPTQ's zero points are one more than the numbers that it stores.
const MOST: i64 = 16;

/// An error if a zero point is out of range.
fn check_zero(operand: &str, number: i64) -> Result<()> {
    if !(0..=MOST).contains(&number) {
        contract!("{operand}: expected zero points from 0 to {MOST}, got {number}");
    }
    Ok(())
}

/// Columns of a row of codes.
fn columns(codes: &View) -> i64 {
    codes.shape().last().copied().unwrap_or(0) * if codes.elem == Elem::I32 { 8 } else { 2 }
}

impl Source for Spec {
    /// Checks w13 [E, 2I, H / 2 bytes], w2 [E, H, I / 2 bytes], scales [E, 2I, groups] and [E, H, groups], zero points of the scales'
    /// shapes, and biases.
    fn layer(&self, operands: &Operands<'_>, options: &Options<'_, '_>) -> Result<Layer> {
        let Operands { w13, w2, b13, b2, scales } = operands;
        let (layout, activation, gated) = (options.layout()?, options.activation()?, options.gated());
        if w13.place != Place::Cpu && self.dtype != Dtype::Bf16 {
            return Err(Error::Unsupported(format!(
                "dtype: {:?} for int4 experts on {}; supported there: \"bf16\" (others run on CPU tensors)",
                quant::name(self.dtype),
                w13.place
            )));
        }
        let Some([w13_scale, w2_scale]) = scales else {
            contract!("w13_scale and w2_scale: both are needed for format \"int4\"");
        };
        let (block, experts) = (BLOCK as i64, Dim::Named("experts"));
        let mut contract = Contract::new();
        contract.check(
            "w13",
            w13,
            &[experts, Dim::Named("rows of w13"), Dim::Named("packed columns of w13")],
            &CODES,
        )?;
        let (rows, hidden, intermediate) = (w13.shape()[1], columns(w13), intermediate_size(w13, gated)?);
        check_sizes(w13, hidden)?;
        for (name, size, dimension) in [("hidden", hidden, 2), ("intermediate", intermediate, 1)] {
            if size % block != 0 {
                contract!("w13: dimension {dimension} gives {name} {size}, expected a multiple of {block} (a scale is for as many columns at least)");
            }
        }
        let (rows_of_w2, per_element) = (Dim::Is("hidden", hidden), if w2.elem == Elem::I32 { 8 } else { 2 });
        let packed_columns = Dim::Is("packed columns of w2 (from w13)", intermediate / per_element);
        check_w2(&mut contract, w13, w2, &[experts, rows_of_w2, packed_columns], &CODES, gated)?;
        let of = [
            (["w13", "w13_scale", "w13_zeros"], "groups of w13", w13, w13_scale, b13, rows, hidden),
            (["w2", "w2_scale", "w2_zeros"], "groups of w2", w2, w2_scale, b2, hidden, intermediate),
        ];
        let mut matrices = Vec::new();
        for (i, ([_, of_scale, of_zeros], named, codes, scale, bias, rows, columns)) in of.into_iter().enumerate() {
            contract.check(of_scale, scale, &[experts, Dim::Is("rows", rows), Dim::Named(named)], &SCALES)?;
            let groups = scale.shape()[2];
            if groups == 0 || columns % (groups * block) != 0 {
                contract!(
                    "{of_scale}: dimension 2 has {groups} groups of {columns} columns, expected a number that cuts them into multiples of {block}"
                );
            }
            let zeros = self.zeros.as_ref().map(|both| &both[i]);
            if let Some(zeros) = zeros {
                contract.check(
                    of_zeros,
                    zeros,
                    &[experts, Dim::Is("rows", rows), Dim::Is("groups", groups)],
                    &ZEROS,
                )?;
                if zeros.place == Place::Cpu {
                    // SAFETY: `check` saw a contiguous tensor of bytes on the host, which is borrowed for this call.
                    let all = unsafe { std::slice::from_raw_parts(zeros.data.cast_const(), zeros.numel() as usize) };
                    check_zero(of_zeros, all.iter().copied().max().unwrap_or(0).into())?;
                }
            }
            let groups = Groups {
                blocks: (columns / groups) as usize / BLOCK,
                dtype: scale.elem.dtype().unwrap_or(Dtype::F32),
                zeros: zeros.map_or(std::ptr::null(), |zeros| zeros.data.cast_const()),
            };
            let blocks = Blocks { groups, ..Blocks::new(&BLOCKS, scale.data, columns as usize / BLOCK) };
            matrices.push(Matrix { blocks: Some(blocks), ..Matrix::new(codes, bias, self.dtype, (rows, columns)) });
        }
        check_biases(&mut contract, operands, rows_of_w2, &BIASES)?;
        let format = if self.zeros.is_some() { Format::Int4Zeros } else { Format::Int4 };
        let desc = LayerDesc { experts: w13.shape()[0], hidden, intermediate, gated, dtype: self.dtype, format };
        match <[Matrix; 2]>::try_from(matrices) {
            Ok(both) => Ok(Layer::described((desc, w13.place), both, (layout, activation))),
            Err(_) => contract!("w13 and w2: both are needed"),
        }
    }
}

/// An error if zero points on a GPU are out of range. It waits for the GPU. Zero points on CPUs are checked with the rest of the contract.
fn refuse_on_gpus(name: &str, zeros: &Borrowed<'_>) -> Result<()> {
    if zeros.place == Place::Cpu || zeros.numel() == 0 {
        return Ok(());
    }
    if zeros.origin == Origin::Other {
        contract!("{name}: expected a torch tensor on {}", zeros.place);
    }
    for of_all in ["min", "max"] {
        let number: i64 = zeros.object().call_method0(of_all)?.call_method0("item")?.extract()?;
        check_zero(name, number)?;
    }
    Ok(())
}

#[doc = crate::help!("ExpertWeights.int4")]
#[pyfunction(crate = "crate::python")]
#[allow(clippy::too_many_arguments)] // keyword arguments of Python, not positions
#[pyo3(signature = (w13, w2, w13_scale, w2_scale, *, w13_zeros=None, w2_zeros=None, dtype=Compute(Dtype::Bf16), **options),
    text_signature = "(w13, w2, w13_scale, w2_scale, *, w13_zeros=None, w2_zeros=None, b13=None, b2=None, layout=\"gate_up\", \
activation=\"silu\", gated=None, alpha=1.0, beta=0.0, limit=None, clamp=\"before\", situ_beta=None, situ_linear_beta=None, dtype=\"bf16\")")]
pub fn int4<'py>(
    w13: &Bound<'py, PyAny>,
    w2: &Bound<'py, PyAny>,
    w13_scale: &Bound<'py, PyAny>,
    w2_scale: &Bound<'py, PyAny>,
    w13_zeros: Option<&Bound<'py, PyAny>>,
    w2_zeros: Option<&Bound<'py, PyAny>>,
    dtype: Compute,
    options: Option<&Bound<'py, PyDict>>,
) -> PyResult<ExpertWeights> {
    let common = Common::new("int4", options)?;
    guard(|| {
        let mut contract = Contract::new();
        let options = common.options(&mut contract)?;
        let Compute(dtype) = dtype;
        let zeros = match (w13_zeros, w2_zeros) {
            (None, None) => None,
            (Some(up), Some(down)) => Some([contract.input("w13_zeros", up)?, contract.input("w2_zeros", down)?]),
            (None, _) => contract!("w13_zeros: needed where w2_zeros is given"),
            (_, None) => contract!("w2_zeros: needed where w13_zeros is given"),
        };
        if let Some(zeros) = &zeros {
            refuse_on_gpus("w13_zeros", &zeros[0])?;
            refuse_on_gpus("w2_zeros", &zeros[1])?;
        }
        let views = zeros.as_ref().map(|both| both.each_ref().map(|zeros| (**zeros).clone()));
        let arguments = common.arguments([w13, w2], [Some(w13_scale), Some(w2_scale)]);
        let spec = Spec { dtype, zeros: views };
        // On GPUs the packed form has the zero points, so the tensors are not kept. Packing, which reads them, is launched before this call
        // ends.
        let kept = zeros.clone().filter(|[up, _]| up.place == Place::Cpu);
        let extra = kept.into_iter().flat_map(|both| ["w13_zeros", "w2_zeros"].into_iter().zip(both)).collect();
        ExpertWeights::new(contract, &arguments, &spec, options, &common.given, extra)
    })
}
