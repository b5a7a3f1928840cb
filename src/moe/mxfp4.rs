//! The contract of MXFP4 experts.

use super::grouped_gemm::WeightMaps;
use super::per_expert::PerExpert;
use super::weights::{check_sizes, intermediate_size, Layer, LayerDesc, Matrix, Operands, Options};
use crate::contract;
use crate::error::Result;
use crate::params::Dtype;
use crate::quant::blocks::{e8m0, Blocks};
use crate::quant::mxfp4::BLOCK;
use crate::quant::Format;
use crate::tensor::{self, Contract, Dim, Elem, Place, TensorRef};
use pyo3::prelude::*;
use rayon::prelude::*;

const CODES: [Elem; 3] = [Elem::U8, Elem::I8, Elem::E2M1_X2];
const SCALES: [Elem; 3] = [Elem::U8, Elem::E8M0, Elem::F32];
const BIASES: [Elem; 3] = [Elem::Bf16, Elem::F16, Elem::F32];

/// Checks w13 [E, 2I, H / 2], w2 [E, H, I / 2], their scales [E, 2I, H / 32] and [E, H, I / 32], and biases. `hidden`: columns of x and of
/// the output, up to H; what lies beyond them is padding that is never read.
pub fn layer(operands: &Operands<'_>, dtype: Dtype, hidden: Option<i64>, options: &Options<'_>) -> Result<Layer> {
    let Operands { w13, w2, b13, b2, scales } = operands;
    let (layout, activation, gated) = (options.layout()?, options.activation()?, options.gated());
    if w13.place != Place::Cpu {
        Format::Mxfp4.require_cuda()?;
    }
    let Some([(_, w13_scale), (_, w2_scale)]) = scales else {
        contract!("w13_scale and w2_scale: both are needed for format \"mxfp4\"");
    };
    let (block, experts) = (BLOCK as i64, Dim::Named("experts"));
    let mut contract = Contract::new();
    contract.check("w13", w13, &[experts, Dim::Named("rows of w13"), Dim::Named("hidden / 2")], &CODES)?;
    let (rows, columns, intermediate) = (w13.shape()[1], 2 * w13.shape()[2], intermediate_size(w13, gated)?);
    check_sizes(w13, columns)?;
    for (name, size, dimension) in [("hidden", columns, 2), ("intermediate", intermediate, 1)] {
        if size % block != 0 {
            contract!("w13: dimension {dimension} gives {name} {size}, expected a multiple of {block} (a block has one scale)");
        }
    }
    let (of_hidden, of_intermediate) =
        (Dim::Is("hidden / 32", columns / block), Dim::Is("intermediate / 32", intermediate / block));
    let (columns_of_x, rows_of_w2) = (hidden.unwrap_or(columns), Dim::Is("hidden", columns));
    contract.check("w2", w2, &[experts, rows_of_w2, Dim::Is("intermediate / 2", intermediate / 2)], &CODES)?;
    contract.check("w13_scale", w13_scale, &[experts, Dim::Named("rows of w13"), of_hidden], &SCALES)?;
    contract.check("w2_scale", w2_scale, &[experts, rows_of_w2, of_intermediate], &SCALES)?;
    for (name, bias, dim) in [("b13", b13, Dim::Named("rows of w13")), ("b2", b2, rows_of_w2)] {
        if let Some(bias) = bias {
            contract.check(name, bias, &[experts, dim], &BIASES)?;
        }
    }
    if !(1..=columns).contains(&columns_of_x) {
        contract!("hidden_size: expected 1 to {columns} (from w13), got {columns_of_x}");
    }
    let matrix = |t: &TensorRef, scales: &TensorRef, bias: &Option<TensorRef>, rows, row_blocks: i64, k| Matrix {
        data: t.data,
        blocks: Some(Blocks { scales: scales.data, row_blocks: row_blocks as usize }),
        bias: bias.as_ref().map_or(std::ptr::null(), |b| b.data.cast_const()),
        bias_dtype: bias.as_ref().and_then(|b| b.elem.dtype()).unwrap_or(dtype),
        rows,
        k,
    };
    let experts = w13.shape()[0];
    Ok(Layer {
        desc: LayerDesc { experts, hidden: columns_of_x, intermediate, gated, dtype, format: Format::Mxfp4 },
        place: w13.place,
        up: matrix(w13, w13_scale, b13, rows, columns / block, columns_of_x),
        down: matrix(w2, w2_scale, b2, columns, intermediate / block, intermediate),
        layout,
        activation,
        per_expert: PerExpert::NONE,
        up_maps: WeightMaps::default(),
        down_maps: WeightMaps::default(),
    })
}

/// Borrows block scales and what owns them: fp32 powers of two on CPU become a new tensor of E8M0 bytes.
pub fn borrow_scale<'py>(operand: &'static str, object: &Bound<'py, PyAny>) -> Result<(Bound<'py, PyAny>, TensorRef)> {
    let given = TensorRef::borrow(operand, object)?;
    if given.elem != Elem::F32 || given.place != Place::Cpu {
        return Ok((object.clone(), given));
    }
    let dims = ["experts", "rows", "blocks"].map(Dim::Named);
    Contract::new().check(operand, &given, &dims, &[Elem::F32])?;
    if !(given.data as usize).is_multiple_of(align_of::<f32>()) {
        contract!("{operand}: must be aligned to 4 bytes, got address {:p}; pass {operand}.clone()", given.data);
    }
    let bytes = tensor::empty(object, &given, given.shape(), Elem::U8)?;
    let made = TensorRef::borrow(operand, &bytes)?;
    if given.numel() == 0 {
        return Ok((bytes, made));
    }
    // SAFETY: both are contiguous tensors of as many elements; nobody else has the new one.
    let (scales, out) = unsafe {
        let count = given.numel() as usize;
        (std::slice::from_raw_parts(given.data.cast::<f32>(), count), std::slice::from_raw_parts_mut(made.data, count))
    };
    const CHUNK: usize = 1 << 16;
    let wrong = object.py().detach(|| {
        out.par_chunks_mut(CHUNK).zip(scales.par_chunks(CHUNK)).enumerate().find_map_first(|(chunk, (out, scales))| {
            let mut wrong = None;
            for (i, (out, &scale)) in out.iter_mut().zip(scales).enumerate() {
                match e8m0(scale) {
                    Some(byte) => *out = byte,
                    None => wrong = wrong.or(Some(chunk * CHUNK + i)),
                }
            }
            wrong
        })
    });
    if let Some(wrong) = wrong {
        let [_, rows, blocks] = [0, 1, 2].map(|i| given.shape()[i] as usize);
        let place = [wrong / (rows * blocks), wrong / blocks % rows, wrong % blocks];
        contract!("{operand}: expected powers of two from 2^-127 to 2^127, got {:e} at {place:?}", scales[wrong]);
    }
    Ok((bytes, made))
}
