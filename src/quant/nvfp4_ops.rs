//! The Python functions of NVFP4: quantisation, on CPU and CUDA tensors.

use super::nvfp4::ScaleLayout;
use super::ops::check_vectors;
use super::ops::{check_aligned, check_multiple, Pair};
use super::packed;
use crate::contract;
use crate::cpu;
use crate::device::gpu;
use crate::error::{guard, Error, Result};
use crate::kernel::Stream;
use crate::params::{Dtype, QuantizeNvfp4Params};
use crate::sizes::int;
use crate::tensor::{Contract, Dim, Elem, Place};
use crate::variants::quant;
use pyo3::prelude::*;

#[doc = crate::help!("quantize_nvfp4")]
#[pyfunction(crate = "crate::python")]
#[allow(clippy::too_many_arguments)] // keyword arguments of Python
#[pyo3(signature = (x, global_scale=None, *, block=16, scale_dtype="e4m3", scale_layout="128x4", inverse=false, masked_m=None))]
pub fn quantize_nvfp4<'py>(
    x: &Bound<'py, PyAny>,
    global_scale: Option<&Bound<'py, PyAny>>,
    block: i64,
    scale_dtype: &str,
    scale_layout: &str,
    inverse: bool,
    masked_m: Option<&Bound<'py, PyAny>>,
) -> PyResult<Pair<'py>> {
    let py = x.py();
    guard(|| {
        if ![16, 32].contains(&block) {
            return Err(Error::Unsupported(format!("block {block}; supported: 16, 32")));
        }
        let powers = match scale_dtype {
            "e4m3" => false,
            "e8m0" => true,
            other => contract!("scale_dtype: expected \"e4m3\" or \"e8m0\", got {other:?}"),
        };
        let layout = match scale_layout {
            "linear" => ScaleLayout::Linear,
            "128x4" => ScaleLayout::Swizzled128x4,
            "8x4" => ScaleLayout::Swizzled8x4,
            other => contract!("scale_layout: expected \"128x4\", \"8x4\" or \"linear\", got {other:?}"),
        };
        let mut contract = Contract::new();
        let from = contract.input("x", x)?;
        let batch_dim = Dim::Named("batches");
        let floats = [Elem::Bf16, Elem::F16, Elem::F32];
        contract.check("x", &from, &[batch_dim, Dim::Named("M"), Dim::Named("K")], &floats)?;
        let [batches, rows, columns] = [0, 1, 2].map(|i| from.shape()[i]);
        check_multiple("x", 2, "K", columns, block)?;
        if batches.max(rows).max(columns) > i64::from(i32::MAX) / 2 || batches * (rows + 127) > i64::from(i32::MAX) {
            return Err(Error::Unsupported(format!("x: shape {:?}; supported: fewer than 2^31 rows", from.shape())));
        }
        let given = global_scale.map(|s| contract.input("global_scale", s)).transpose()?;
        let counts = masked_m.map(|m| contract.input("masked_m", m)).transpose()?;
        if let Some(scale) = &given {
            let numbers = if scale.numel() == 1 { 1 } else { batches };
            let dims: &[Dim] = if scale.shape().is_empty() { &[] } else { &[Dim::Is("batches", numbers)] };
            contract.check("global_scale", scale, dims, &[Elem::F32])?;
        }
        if let Some(counts) = &counts {
            contract.check("masked_m", counts, &[batch_dim], &[Elem::I32])?;
        }
        let (padded_rows, padded_blocks) = layout.padded(rows as usize, (columns / block) as usize);
        let scales_shape = [batches, padded_rows as i64, padded_blocks as i64];
        if batches * (padded_rows * padded_blocks) as i64 * (block / 8) >= 1 << 32 {
            return Err(Error::Unsupported(format!("x: shape {:?}; supported: fewer than 2^35 numbers", from.shape())));
        }
        let codes = contract.new_output("codes", &from, &[batches, rows, columns / 2], Elem::U8)?;
        let scales = contract.new_output("scales", &from, &scales_shape, Elem::U8)?;
        let params = QuantizeNvfp4Params {
            x: from.data,
            dtype: from.elem.dtype().unwrap_or(Dtype::F32),
            codes: codes.data,
            scales: scales.data,
            tile_rows: layout.tile_rows(),
            batches: int("x: batches", batches)?,
            rows: int("x: M", rows)?,
            columns: int("x: K", columns)?,
            block: int("block", block)?,
            powers,
            global_scale: given.as_ref().map_or(std::ptr::null(), |s| s.data.cast::<f32>().cast_const()),
            of_batch: given.as_ref().is_some_and(|s| s.numel() > 1),
            inverse,
            row_counts: counts.as_ref().map_or(std::ptr::null(), |c| c.data.cast::<i32>().cast_const()),
        };
        let checked = contract.finish()?;
        if scales.numel() == 0 {
            return Ok((codes.into_object(), scales.into_object()));
        }
        if let Place::Cuda(ordinal) = from.place {
            check_vectors("x", &from)?;
            let stream = Stream::new(gpu(ordinal)?, from.current_stream(py)?, &checked)?;
            launch(&stream, "nvfp4", &params)?;
        } else {
            match from.elem {
                Elem::F32 => check_aligned::<f32>("x", &from)?,
                _ => check_aligned::<u16>("x", &from)?,
            }
            // SAFETY: the contract checked shapes and dtypes, and the outputs are new.
            checked.on_cpu(py, || unsafe { cpu::quantize_nvfp4(&params) })?;
        }
        Ok((codes.into_object(), scales.into_object()))
    })
}

/// Launches a thread for each block, blocks of padding included. On an H200, 4096 x 7168 bf16 with scales in tiles of 128 x 4 take 34 us. A
/// thread for eight numbers took 66 us.
pub fn launch(stream: &Stream<'_>, op: &str, p: &QuantizeNvfp4Params) -> Result<()> {
    let layout = ScaleLayout::of_tile_rows(p.tile_rows);
    let (rows, blocks) = layout.padded(p.rows as usize, (p.columns / p.block) as usize);
    let kernel = quant::quantize_nvfp4(p.block as u32);
    let threads = i64::from(p.batches) * (rows * blocks) as i64;
    let per_cta = i64::from(kernel.threads());
    packed::launch(stream, op, kernel, (threads + per_cta - 1) / per_cta, p)
}
