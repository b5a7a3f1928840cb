//! int4 experts: their contract, and the packed form that GPUs read.

use super::layer::{Layer, Matrix};
use super::mxfp4::BIASES;
use super::operands::{check_biases, check_sizes, intermediate_size, Operands, PackedTensors};
use super::options::Options;
use crate::contract;
use crate::desc::LayerDesc;
use crate::device::gpu;
use crate::error::{Error, Result};
use crate::kernel::Stream;
use crate::params::{Dtype, PackInt4Params};
use crate::quant::blocks::{self, Blocks};
use crate::quant::int4::BLOCK;
use crate::quant::ops::check_vectors;
use crate::quant::packed::{self, Extent, Form, Packed};
use crate::quant::{self, Format};
use crate::tensor::{Contract, Dim, Elem, Place, View};

/// Two codes a byte, or eight a word of 32 bits.
const CODES: [Elem; 3] = [Elem::U8, Elem::I8, Elem::I32];
const SCALES: [Elem; 3] = [Elem::Bf16, Elem::F16, Elem::F32];
const ZEROS: [Elem; 2] = [Elem::U8, Elem::I8];

/// What codes, scales and biases do not say.
#[derive(Clone, Debug)]
pub struct Spec {
    pub dtype: Dtype,
    /// Zero points of w13 and w2.
    pub zeros: Option<[View; 2]>,
}

/// The largest zero point: GPTQ's are one more than what it stores.
const MOST: i64 = 16;

/// An error where a zero point is out of range.
pub fn check_zero(operand: &str, number: i64) -> Result<()> {
    if !(0..=MOST).contains(&number) {
        contract!("{operand}: expected zero points from 0 to {MOST}, got {number}");
    }
    Ok(())
}

/// Columns of a row of codes.
pub fn columns(codes: &View) -> i64 {
    codes.shape().last().copied().unwrap_or(0) * if codes.elem == Elem::I32 { 8 } else { 2 }
}

/// Checks w13 [E, 2I, H / 2 bytes], w2 [E, H, I / 2 bytes], scales [E, 2I, groups] and [E, H, groups], zero points of their shapes, and
/// biases.
pub fn layer(operands: &Operands<'_>, spec: &Spec, options: &Options<'_, '_>) -> Result<Layer> {
    let Operands { w13, w2, b13, b2, scales } = operands;
    let (layout, activation, gated) = (options.layout()?, options.activation()?, options.gated());
    if w13.place != Place::Cpu && spec.dtype != Dtype::Bf16 {
        return Err(Error::Unsupported(format!(
            "dtype: {:?} for int4 experts on {}; supported there: \"bf16\" (others run on CPU tensors)",
            quant::name(spec.dtype),
            w13.place
        )));
    }
    let Some([w13_scale, w2_scale]) = scales else {
        contract!("w13_scale and w2_scale: both are needed for format \"int4\"");
    };
    let (block, experts) = (BLOCK as i64, Dim::Named("experts"));
    let mut contract = Contract::new();
    contract.check("w13", w13, &[experts, Dim::Named("rows of w13"), Dim::Named("packed columns of w13")], &CODES)?;
    let (rows, hidden, intermediate) = (w13.shape()[1], columns(w13), intermediate_size(w13, gated)?);
    check_sizes(w13, hidden)?;
    for (name, size, dimension) in [("hidden", hidden, 2), ("intermediate", intermediate, 1)] {
        if size % block != 0 {
            contract!("w13: dimension {dimension} gives {name} {size}, expected a multiple of {block} (a scale is for as many columns at least)");
        }
    }
    let (rows_of_w2, per_element) = (Dim::Is("hidden", hidden), if w2.elem == Elem::I32 { 8 } else { 2 });
    let packed_columns = Dim::Is("packed columns of w2 (from w13)", intermediate / per_element);
    contract.check("w2", w2, &[experts, rows_of_w2, packed_columns], &CODES)?;
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
        let zeros = spec.zeros.as_ref().map(|both| &both[i]);
        if let Some(zeros) = zeros {
            contract.check(of_zeros, zeros, &[experts, Dim::Is("rows", rows), Dim::Is("groups", groups)], &ZEROS)?;
            if zeros.place == Place::Cpu {
                // SAFETY: `check` saw a contiguous tensor of bytes on the host, which is borrowed for this call.
                let all = unsafe { std::slice::from_raw_parts(zeros.data.cast_const(), zeros.numel() as usize) };
                check_zero(of_zeros, all.iter().copied().max().unwrap_or(0).into())?;
            }
        }
        let own = blocks::Int4 {
            dtype: scale.elem.dtype().unwrap_or(Dtype::F32),
            group_blocks: (columns / groups) as usize / BLOCK,
            zeros: zeros.map_or(std::ptr::null(), |zeros| zeros.data.cast_const()),
        };
        let blocks = Blocks { int4: Some(own), ..Blocks::of_32(scale.data, false, columns as usize / BLOCK) };
        matrices.push(Matrix { blocks: Some(blocks), ..Matrix::new(codes, bias, spec.dtype, (rows, columns)) });
    }
    check_biases(&mut contract, operands, rows_of_w2, &BIASES)?;
    let format = if spec.zeros.is_some() { Format::Int4Zeros } else { Format::Int4 };
    let desc = LayerDesc { experts: w13.shape()[0], hidden, intermediate, gated, dtype: spec.dtype, format };
    match <[Matrix; 2]>::try_from(matrices) {
        Ok(both) => Ok(Layer::described((desc, w13.place), both, (layout, activation))),
        Err(_) => contract!("w13 and w2: both are needed"),
    }
}

/// The packed form of a CUDA layer's weights in new tensors; `layer` then describes that form.
pub fn pack<'py>(
    layer: &mut Layer,
    contract: &mut Contract<'_>,
    operands: &Operands<'py>,
) -> Result<[PackedTensors<'py>; 2]> {
    let (experts, gated, layout) = (layer.desc.experts, layer.desc.gated, layer.layout);
    let borrowed = &operands.w13;
    let Place::Cuda(ordinal) = borrowed.place else { contract!("w13: is on {}", borrowed.place) };
    let stream = Stream::new(gpu(ordinal)?, borrowed.current_stream(borrowed.object().py())?, &contract.finish()?)?;
    let mut new = |shape: &[i64], elem| contract.new_output("packed weights", borrowed, shape, elem);
    let mut made = |(name, scales_name): (&'static str, &'static str), matrix: &mut Matrix, gated| {
        check_vectors(name, if name == "w13" { &operands.w13 } else { &operands.w2 })?;
        let Some(Blocks { scales: given, int4: Some(own), .. }) = matrix.blocks else {
            contract!("{name}: no block scales");
        };
        let form = Form::Int4 { zeros: !own.zeros.is_null() };
        let extent = Extent { form, experts, rows: matrix.rows, k: matrix.k };
        let codes = new(&extent.codes_shape(), Elem::U8)?;
        let scales = new(&extent.scales_shape(), Elem::U8)?;
        let factors = new(&[experts], Elem::F32)?;
        let params = PackInt4Params {
            codes: matrix.data,
            scales: given,
            scale_dtype: own.dtype,
            zeros: own.zeros,
            group: (own.group_blocks * BLOCK) as i32,
            experts: experts as i32,
            rows: matrix.rows as i32,
            k: matrix.k as i32,
            gated,
            layout,
            packed_codes: codes.data,
            packed_scales: scales.data,
            expert_scales: factors.data.cast(),
        };
        packed::launch_pack_int4(&stream, "ExpertWeights: packing", &params)?;
        matrix.data = codes.data;
        matrix.blocks = None;
        let expert_scales = factors.data.cast_const().cast();
        matrix.packed = Some(Packed { form, codes: codes.data, scales: scales.data, expert_scales });
        Ok([(name, codes), (scales_name, scales), ("expert_scales", factors)])
    };
    let up = made(("w13", "w13_scale"), &mut layer.up, gated)?;
    Ok([up, made(("w2", "w2_scale"), &mut layer.down, false)?])
}
