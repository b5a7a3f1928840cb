//! The Python functions of fp8: quantisation of rows, on CPU and CUDA tensors.

use super::ops::check_vectors;
use super::ops::{check_aligned, check_multiple, dims, leading, shape};
use crate::contract;
use crate::cpu;
use crate::device::gpu;
use crate::error::{guard, Error};
use crate::kernel::{Launch, Stream};
use crate::params::{Dtype, ExpandScalesParams, Fp8Scaling, QuantizeFp8Params};
use crate::sizes::{int, product};
use crate::tensor::{Contract, Dim, Elem, Place};
use crate::variants::signature::Signature;
use crate::variants::{quant, Kernels};
use pyo3::prelude::*;

const GROUPS: [i64; 4] = [16, 32, 64, 128];

#[doc = crate::help!("quantize_fp8")]
#[pyfunction(crate = "crate::python")]
#[pyo3(signature = (x, group, eps, *, column_major=false, row_multiple=1, powers=false))]
pub fn quantize_fp8<'py>(
    x: &Bound<'py, PyAny>,
    group: i64,
    eps: f32,
    column_major: bool,
    row_multiple: i64,
    powers: bool,
) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyAny>)> {
    let py = x.py();
    guard(|| {
        if !GROUPS.contains(&group) {
            return Err(Error::Unsupported(format!("group_size {group}; supported: 16, 32, 64, 128")));
        }
        if !(1e-30..=1e30).contains(&eps) {
            contract!("eps: expected 1e-30 to 1e30, got {eps}");
        }
        let mut contract = Contract::new();
        let from = contract.input("x", x)?;
        let lead = leading("x", &from, 1, "K")?;
        let columns = from.shape()[lead.len()];
        contract.check("x", &from, &dims(lead, &[Dim::Named("K")]), &[Elem::Bf16, Elem::F16, Elem::F32])?;
        check_multiple("x", lead.len(), "K", columns, group)?;
        let (rows, groups) = (product("x", lead)?, columns / group);
        if columns > i64::from(i32::MAX) || from.numel() / 8 > i64::from(i32::MAX) {
            return Err(Error::Unsupported(format!(
                "x: {rows} rows of {columns} numbers; supported: up to 2^34 numbers"
            )));
        }
        let padded = (rows + row_multiple - 1) / row_multiple * row_multiple;
        let codes = contract.new_output("codes", &from, from.shape(), Elem::E4M3)?;
        let scales = if powers {
            contract.new_output("scales", &from, &[(groups + 3) / 4, padded], Elem::I32)?
        } else if column_major {
            contract.new_output("scales", &from, &[groups, padded], Elem::F32)?
        } else {
            contract.new_output("scales", &from, &shape(lead, &[groups]), Elem::F32)?
        };
        if powers {
            let zero = if from.origin == crate::tensor::Origin::Other { "fill" } else { "fill_" };
            scales.object().call_method1(zero, (0,))?;
        }
        let (row_stride, group_stride) = if column_major || powers { (1, padded) } else { (groups, 1) };
        let params = QuantizeFp8Params {
            x: from.data,
            dtype: from.elem.dtype().unwrap_or(Dtype::F32),
            codes: codes.data,
            scales: scales.data,
            rows,
            row_count: std::ptr::null(),
            columns: int("x: K", columns)?,
            group: int("group_size", group)?,
            row_stride,
            group_stride,
            eps,
            powers,
            tiles: std::ptr::null(),
            tile_count: std::ptr::null(),
            tile_rows: 0,
            scaling: Fp8Scaling::Groups,
            given: std::ptr::null_mut(),
            row_threads: 0,
            place_of_slot: std::ptr::null(),
            top_k: 0,
            x_is_older: false,
        };
        let checked = contract.finish()?;
        if from.numel() == 0 {
            return Ok((codes.into_object(), scales.into_object()));
        }
        if let Place::Cuda(ordinal) = from.place {
            check_vectors("x", &from)?;
            let stream = Stream::new(gpu(ordinal)?, from.current_stream(py)?, &checked)?;
            let launch = groups_of(from.numel(), group, from.elem);
            stream.launch("per_token_group_quant_fp8", &launch, &params)?;
        } else {
            match from.elem {
                Elem::F32 => check_aligned::<f32>("x", &from)?,
                _ => check_aligned::<u16>("x", &from)?,
            }
            // SAFETY: the contract checked shapes and dtypes, and the outputs are new.
            checked.on_cpu(py, || unsafe { cpu::quantize_fp8(&params) })?;
        }
        Ok((codes.into_object(), scales.into_object()))
    })
}

/// The launch that quantises `numbers` in groups of `group` columns. A thread takes 32 numbers in groups of 128 16-bit numbers, and
/// otherwise eight.
fn groups_of(numbers: i64, group: i64, elem: Elem) -> Launch<QuantizeFp8Params> {
    launch_of(&quant::QUANTIZE_FP8, numbers / if group == 128 && elem != Elem::F32 { 32 } else { 8 })
}

/// The largest number of CTAs that find the largest magnitude. The data that they read ahead covers the memory's latency.
const MOST_PEAK_CTAS: u32 = 256;

/// Up to this many numbers, one CTA finds the largest magnitude and quantises.
const ONE_CTA_NUMBERS: i64 = 1 << 14;

/// The launches that quantise bf16 activations in groups of 128. The first finds the largest magnitude, if all rows have one scale.
pub fn plan(scaling: Fp8Scaling, rows: i64, columns: i64) -> [Option<Launch<QuantizeFp8Params>>; 2] {
    let groups = launch_of(&quant::QUANTIZE_FP8, rows * columns / 32);
    match scaling {
        Fp8Scaling::Rows => {
            let threads = rows * i64::from(row_threads(columns as i32));
            [None, Some(launch_of(&quant::QUANTIZE_FP8_ROWS, threads))]
        }
        Fp8Scaling::Peak if rows * columns <= ONE_CTA_NUMBERS => [None, Some(launch_of(&quant::QUANTIZE_FP8_ROWS, 1))],
        Fp8Scaling::Peak => {
            let peak = launch_of(&quant::QUANTIZE_FP8_PEAK, rows * columns / 32);
            [Some(Launch { grid: peak.grid.min(MOST_PEAK_CTAS), ..peak }), Some(groups)]
        }
        _ => [None, Some(groups)],
    }
}

/// The launch that quantises rows of bf16 in groups of 128 and writes them to their slots' places.
pub fn to_slots(rows: i64, columns: i64) -> Launch<QuantizeFp8Params> {
    launch_of(&quant::QUANTIZE_FP8_SLOTS, rows * columns / 32)
}

/// Threads of a row with one scale. A thread takes four vectors of eight numbers, and a row has at most the 256 threads of a CTA.
pub fn row_threads(columns: i32) -> i32 {
    ((columns / 32).max(1) as u32).next_power_of_two().min(256) as i32
}

/// The launch that brings a caller's scales of `rows` rows and `groups` groups into order.
pub fn expansion(rows: i64, groups: i64) -> Launch<ExpandScalesParams> {
    launch_of(&quant::EXPAND_SCALES, rows * groups)
}

fn launch_of<P: Signature>(kernels: &Kernels<P>, threads: i64) -> Launch<P> {
    let kernel = kernels.kernel();
    let block = kernel.threads();
    let grid = u32::try_from(threads.max(1).unsigned_abs().div_ceil(block.into())).unwrap_or(u32::MAX);
    Launch { kernel, grid, block, cluster: 1, shared_bytes: 0 }
}
