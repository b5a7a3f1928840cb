//! The Python functions of MXFP8: quantisation of rows and its inverse, on CPU and CUDA tensors.

use super::mxfp8;
use super::nvfp4::ScaleLayout;
use super::ops::check_vectors;
use super::ops::{check_aligned, check_multiple, dims, float_dtype, leading, shape, Pair, E8M0};
use crate::contract;
use crate::cpu;
use crate::device::gpu;
use crate::error::{guard, Error, Result};
use crate::kernel::{Launch, Stream};
use crate::params::{Dtype, QuantizeMxfp8Params};
use crate::sizes::{int, product};
use crate::tensor::{Contract, Dim, Elem, Origin, Place, View};
use crate::variants::{quant, Kernel};
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

#[doc = crate::help!("quantize_mxfp8")]
#[pyfunction(crate = "crate::python")]
#[pyo3(signature = (x, *, layout="128x4", alignment=32))]
pub fn quantize_mxfp8<'py>(x: &Bound<'py, PyAny>, layout: &str, alignment: i64) -> PyResult<Pair<'py>> {
    let py = x.py();
    guard(|| {
        let layout = layout_of(layout)?;
        let mut contract = Contract::new();
        let from = contract.input("x", x)?;
        let lead = leading("x", &from, 1, "K")?;
        let columns = from.shape()[lead.len()];
        if from.elem.dtype().is_none() {
            return Err(Error::Unsupported(format!("x: dtype {}; supported: bfloat16, float16, float32", from.elem)));
        }
        contract.check("x", &from, &dims(lead, &[Dim::Named("K")]), &[from.elem])?;
        check_multiple("x", lead.len(), "K", columns, BLOCK)?;
        if alignment < BLOCK || alignment % BLOCK != 0 || alignment > 1 << 20 {
            contract!("alignment: expected a multiple of 32 up to 2^20, got {alignment}");
        }
        let padded = (columns + alignment - 1) / alignment * alignment;
        let rows = product("x", lead)?;
        check_extent("x", rows, padded)?;
        let codes = contract.new_output("codes", &from, &shape(lead, &[padded]), Elem::E4M3)?;
        let bytes = layout.bytes(rows as usize, (padded / BLOCK) as usize) as i64;
        let scales = contract.new_output("scales", &from, &[bytes], Elem::U8)?;
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
        let checked = contract.finish()?;
        if bytes == 0 {
            return Ok((codes.into_object(), scales.into_object()));
        }
        if let Place::Cuda(ordinal) = from.place {
            check_vectors("x", &from)?;
            let stream = Stream::new(gpu(ordinal)?, from.current_stream(py)?, &checked)?;
            launch(&stream, "mxfp8_quantize", quant::QUANTIZE_MXFP8.kernel(), &params)?;
        } else {
            check_numbers("x", &from)?;
            // SAFETY: the contract checked shapes and dtypes, and the outputs are new.
            checked.on_cpu(py, || unsafe { cpu::quantize_mxfp8(&params) })?;
        }
        Ok((codes.into_object(), scales.into_object()))
    })
}

#[doc = crate::help!("dequantize_mxfp8")]
#[pyfunction(crate = "crate::python")]
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
        let mut contract = Contract::new();
        let (from, from_scales) = (contract.input("codes", codes)?, contract.input("scales", scales)?);
        let elem = dtype.map_or(Ok(Elem::F32), |dtype| float_dtype("dtype", dtype))?;
        if elem == Elem::Bf16 && from.origin == Origin::Other {
            contract!("dtype: expected float32 or float16 for numpy arrays, got bfloat16, which numpy does not have");
        }
        let lead = leading("codes", &from, 1, "K")?;
        let columns = from.shape()[lead.len()];
        contract.check("codes", &from, &dims(lead, &[Dim::Named("K")]), &[Elem::E4M3, Elem::U8])?;
        check_multiple("codes", lead.len(), "K", columns, BLOCK)?;
        let rows = product("codes", lead)?;
        check_extent("codes", rows, columns)?;
        let bytes = layout.bytes(rows as usize, (columns / BLOCK) as usize) as i64;
        contract.check("scales", &from_scales, &[Dim::Is("scales", bytes)], &E8M0)?;
        let out = contract.new_output("out", &from, &shape(lead, &[columns]), elem)?;
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
        let checked = contract.finish()?;
        if from.numel() == 0 {
            return Ok(out.into_object());
        }
        if let Place::Cuda(ordinal) = from.place {
            check_vectors("codes", &from)?;
            let stream = Stream::new(gpu(ordinal)?, from.current_stream(py)?, &checked)?;
            launch(&stream, "mxfp8_dequantize", quant::DEQUANTIZE_MXFP8.kernel(), &params)?;
        } else {
            check_numbers("out", &out)?;
            // SAFETY: the contract checked shapes and dtypes, and the output is new.
            checked.on_cpu(py, || unsafe { cpu::dequantize_mxfp8(&params) })?;
        }
        Ok(out.into_object())
    })
}

/// Refuses sizes that kernels cannot count: they count eights of numbers in padded rows in 32 bits.
fn check_extent(operand: &str, rows: i64, columns: i64) -> Result<()> {
    let padded = rows.checked_add(127).and_then(|rows| rows.checked_mul(columns.saturating_add(127)));
    if columns > i64::from(i32::MAX) - 128 || padded.is_none_or(|numbers| numbers / 8 > i64::from(i32::MAX)) {
        return Err(Error::Unsupported(format!(
            "{operand}: {rows} rows of {columns} numbers; supported: up to 2^34 numbers"
        )));
    }
    Ok(())
}

fn check_numbers(operand: &str, numbers: &View) -> Result<()> {
    match numbers.elem {
        Elem::F32 => check_aligned::<f32>(operand, numbers),
        _ => check_aligned::<u16>(operand, numbers),
    }
}

/// Launches a thread for eight numbers, over all rows and groups that have scales.
fn launch(stream: &Stream<'_>, op: &str, kernel: Kernel<QuantizeMxfp8Params>, p: &QuantizeMxfp8Params) -> Result<()> {
    let layout = ScaleLayout::of_tile_rows(p.tile_rows);
    let threads = layout.bytes(p.rows as usize, p.padded_columns as usize / mxfp8::BLOCK) * 4;
    let block = kernel.threads();
    let grid = u32::try_from(threads.div_ceil(block as usize)).unwrap_or(u32::MAX);
    stream.launch(op, &Launch { kernel, grid, block, cluster: 1, shared_bytes: 0 }, p)
}
