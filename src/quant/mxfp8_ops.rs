//! What Python sees of MXFP8: quantisation of rows and its inverse, on CPU and CUDA tensors.

use super::mxfp8;
use super::nvfp4::ScaleLayout;
use super::ops::{check_aligned, check_multiple, dims, float_dtype, leading, new_tensor, shape, Pair, E8M0};
use super::packed_ops::check_vectors;
use crate::contract;
use crate::cpu;
use crate::device::gpu;
use crate::error::{guard, Error, Result};
use crate::kernel::{Args, Launch, Stream};
use crate::params::{Dtype, QuantizeMxfp8Params};
use crate::sizes::{int, product};
use crate::tensor::{Contract, Dim, Elem, Origin, Place, TensorRef};
use crate::variants::{dense::Dense, Variant};
use pyo3::prelude::*;

const BLOCK: i64 = mxfp8::BLOCK as i64;

fn layout_of(name: &str) -> Result<ScaleLayout> {
    match name {
        "128x4" => Ok(ScaleLayout::Swizzled128x4),
        "8x4" => Ok(ScaleLayout::Swizzled8x4),
        "linear" => Ok(ScaleLayout::Linear),
        _ => contract!("layout: expected \"128x4\", \"8x4\" or \"linear\", got {name:?}"),
    }
}

/// MXFP8 of bf16, f16 or fp32 x [..., K], K a multiple of 32: (codes float8_e4m3fn [..., K rounded up to alignment], scales uint8 E8M0, flat, in `layout`).
///
/// A scale is the least power of two that clips nothing of its 32 elements; elements are rounded to nearest, ties to even.
#[pyfunction]
#[pyo3(signature = (x, *, layout="128x4", alignment=32))]
pub fn quantize_mxfp8<'py>(x: &Bound<'py, PyAny>, layout: &str, alignment: i64) -> PyResult<Pair<'py>> {
    let py = x.py();
    guard(|| {
        let layout = layout_of(layout)?;
        let from = TensorRef::borrow("x", x)?;
        let lead = leading("x", &from, 1, "K")?;
        let columns = from.shape()[lead.len()];
        if from.elem.dtype().is_none() {
            return Err(Error::Unsupported(format!("x: dtype {}; supported: bfloat16, float16, float32", from.elem)));
        }
        Contract::new().check("x", &from, &dims(lead, &[Dim::Named("K")]), &[from.elem])?;
        check_multiple("x", lead.len(), "K", columns, BLOCK)?;
        if alignment < BLOCK || alignment % BLOCK != 0 || alignment > 1 << 20 {
            contract!("alignment: expected a multiple of 32 up to 2^20, got {alignment}");
        }
        let padded = (columns + alignment - 1) / alignment * alignment;
        let rows = product("x", lead)?;
        check_extent("x", rows, padded)?;
        let (codes_object, codes) = new_tensor((x, &from), &shape(lead, &[padded]), Elem::E4M3)?;
        let bytes = layout.bytes(rows as usize, (padded / BLOCK) as usize) as i64;
        let (scales_object, scales) = new_tensor((x, &from), &[bytes], Elem::U8)?;
        let params = QuantizeMxfp8Params {
            numbers: from.data,
            dtype: from.elem.dtype().unwrap_or(Dtype::F32),
            codes: codes.data,
            scales: scales.data,
            tile_rows: layout.tile_rows(),
            rows,
            columns: int("x: K", columns)?,
            padded_columns: int("x: padded K", padded)?,
        };
        if bytes == 0 {
            return Ok((codes_object, scales_object));
        }
        if let Place::Cuda(ordinal) = from.place {
            check_vectors("x", &from)?;
            let stream = Stream::new(gpu(ordinal)?, from.current_stream(py)?)?;
            launch(&stream, "mxfp8_quantize", Dense::QuantizeMxfp8, &params)?;
        } else {
            check_numbers("x", &from)?;
            // SAFETY: as the contract has them; the outputs are new.
            py.detach(|| unsafe { cpu::quantize_mxfp8(&params) });
        }
        Ok((codes_object, scales_object))
    })
}

/// The dtype [..., K] of MXFP8 codes float8_e4m3fn or uint8 [..., K], K a multiple of 32, and their scales as `quantize_mxfp8` gives them.
///
/// Element times scale, rounded once. A scale byte b is 2^(b - 127), 0 included, and 255 makes its 32 elements NaN.
#[pyfunction]
#[pyo3(signature = (codes, scales, dtype=None, *, layout="128x4"))]
pub fn dequantize_mxfp8<'py>(
    codes: &Bound<'py, PyAny>,
    scales: &Bound<'py, PyAny>,
    dtype: Option<&Bound<'py, PyAny>>,
    layout: &str,
) -> PyResult<Bound<'py, PyAny>> {
    let py = codes.py();
    guard(|| {
        let layout = layout_of(layout)?;
        let (from, from_scales) = (TensorRef::borrow("codes", codes)?, TensorRef::borrow("scales", scales)?);
        let elem = dtype.map_or(Ok(Elem::F32), float_dtype)?;
        if elem == Elem::Bf16 && from.origin == Origin::Other {
            contract!("dtype: expected float32 or float16 for numpy arrays, got bfloat16, which numpy does not have");
        }
        let lead = leading("codes", &from, 1, "K")?;
        let columns = from.shape()[lead.len()];
        let mut contract = Contract::new();
        contract.check("codes", &from, &dims(lead, &[Dim::Named("K")]), &[Elem::E4M3, Elem::U8])?;
        check_multiple("codes", lead.len(), "K", columns, BLOCK)?;
        let rows = product("codes", lead)?;
        check_extent("codes", rows, columns)?;
        let bytes = layout.bytes(rows as usize, (columns / BLOCK) as usize) as i64;
        contract.check("scales", &from_scales, &[Dim::Is("scales", bytes)], &E8M0)?;
        let (object, out) = new_tensor((codes, &from), &shape(lead, &[columns]), elem)?;
        let params = QuantizeMxfp8Params {
            numbers: out.data,
            dtype: elem.dtype().unwrap_or(Dtype::F32),
            codes: from.data,
            scales: from_scales.data,
            tile_rows: layout.tile_rows(),
            rows,
            columns: int("codes: K", columns)?,
            padded_columns: int("codes: K", columns)?,
        };
        if from.numel() == 0 {
            return Ok(object);
        }
        if let Place::Cuda(ordinal) = from.place {
            check_vectors("codes", &from)?;
            let stream = Stream::new(gpu(ordinal)?, from.current_stream(py)?)?;
            launch(&stream, "mxfp8_dequantize", Dense::DequantizeMxfp8, &params)?;
        } else {
            check_numbers("out", &out)?;
            // SAFETY: as the contract has them; the output is new.
            py.detach(|| unsafe { cpu::dequantize_mxfp8(&params) });
        }
        Ok(object)
    })
}

/// Kernels count eights of padded rows in 32 bits.
fn check_extent(operand: &str, rows: i64, columns: i64) -> Result<()> {
    let padded = rows.checked_add(127).and_then(|rows| rows.checked_mul(columns.saturating_add(127)));
    if columns > i64::from(i32::MAX) - 128 || padded.is_none_or(|numbers| numbers / 8 > i64::from(i32::MAX)) {
        return Err(Error::Unsupported(format!(
            "{operand}: {rows} rows of {columns} numbers; supported: up to 2^34 numbers"
        )));
    }
    Ok(())
}

fn check_numbers(operand: &str, numbers: &TensorRef) -> Result<()> {
    match numbers.elem {
        Elem::F32 => check_aligned::<f32>(operand, numbers),
        _ => check_aligned::<u16>(operand, numbers),
    }
}

/// A thread for eight numbers, of rows and groups with scales.
pub fn launch(stream: &Stream<'_>, op: &str, kernel: Dense, p: &QuantizeMxfp8Params) -> Result<()> {
    let variant = Variant::Dense(kernel);
    let layout = ScaleLayout::of_tile_rows(p.tile_rows);
    let threads = layout.bytes(p.rows as usize, p.padded_columns as usize / mxfp8::BLOCK) * 4;
    let block = variant.threads();
    let grid = threads.div_ceil(block as usize) as u32;
    stream.launch(op, &Launch { variant, grid, block, cluster: 1, shared_bytes: 0 }, Args::QuantizeMxfp8(p))
}
