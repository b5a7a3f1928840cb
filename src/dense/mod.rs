//! The dense MXFP8 GEMM: contract, plan, launches.

pub mod plan;

use crate::contract;
use crate::cpu;
use crate::device::{gpu, Arch};
use crate::error::{guard, Error, Result};
use crate::kernel::Stream;
use crate::params::{Dtype, MmMxfp8FewParams, MmMxfp8Params, ScaleView};
use crate::quant::mxfp8::BLOCK;
use crate::quant::nvfp4::ScaleLayout;
use crate::quant::ops::check_vectors;
use crate::quant::ops::float_dtype;
use crate::sizes::int;
use crate::stats;
use crate::tensor::{check_dtype, Contract, Dim, Elem, Origin, Place, View};
use plan::MmLaunches;
use pyo3::prelude::*;

#[doc = crate::help!("mm_mxfp8")]
#[pyfunction(crate = "crate::python")]
#[pyo3(signature = (a, b, a_descale, b_descale, *, out=None, out_dtype=None, use_8x4_sf_layout=false))]
pub fn mm_mxfp8<'py>(
    a: &Bound<'py, PyAny>,
    b: &Bound<'py, PyAny>,
    a_descale: &Bound<'py, PyAny>,
    b_descale: &Bound<'py, PyAny>,
    out: Option<&Bound<'py, PyAny>>,
    out_dtype: Option<&Bound<'py, PyAny>>,
    use_8x4_sf_layout: bool,
) -> PyResult<Bound<'py, PyAny>> {
    let py = a.py();
    guard(|| {
        let mut contract = Contract::new();
        let (from_a, from_b) = (contract.input("a", a)?, contract.input("b", b)?);
        for (operand, matrix) in [("a", &*from_a), ("b", &*from_b)] {
            if matrix.shape().len() != 2 {
                contract!("{operand}: mm_mxfp8 accepts 2d tensors, got shape {:?}", matrix.shape());
            }
        }
        // numpy has no float8.
        let codes: &[Elem] = if from_a.origin == Origin::Other { &[Elem::U8] } else { &[Elem::E4M3] };
        check_dtype("a", &from_a, codes)?;
        check_dtype("b", &from_b, codes)?;
        let (a_tensor, b_tensor) = (contract.input("a_descale", a_descale)?, contract.input("b_descale", b_descale)?);
        for (operand, scales) in [("a_descale", &*a_tensor), ("b_descale", &*b_tensor)] {
            check_kind(operand, scales)?;
        }
        let (k, n) = (from_b.shape()[0], from_b.shape()[1]);
        if from_a.shape()[1] != k {
            contract!("b: dimension 0 \"k\": expected {} (from a), got {k}", from_a.shape()[1]);
        }
        let columns = from_b.transposed();
        if !columns.contiguous() {
            contract!(
                "b: expected column-major [k, n], strides (1, {k}), got strides ({}, {}): the transpose of a contiguous [n, k]",
                columns.strides()[1],
                columns.strides()[0]
            );
        }
        contract.check("a", &from_a, &[Dim::Named("m"), Dim::Named("k")], codes)?;
        contract.check("b", &columns, &[Dim::Named("n"), Dim::Named("k")], codes)?;
        let m = contract.get("m");
        if k % BLOCK as i64 != 0 {
            contract!("a: dimension 1 \"k\": expected a multiple of 32, got {k}");
        }
        if m.max(n).max(k) > i64::from(i32::MAX) / 256 {
            return Err(Error::Unsupported(format!("m, n, k {m}, {n}, {k}; supported: up to 2^23")));
        }
        let of_a = if use_8x4_sf_layout { ScaleLayout::Swizzled8x4 } else { ScaleLayout::Swizzled128x4 };
        let a_scales = scales("a_descale", &a_tensor, &from_a, ("m", m), k, of_a, false)?;
        let b_scales = scales("b_descale", &b_tensor, &from_a, ("n", n), k, ScaleLayout::Swizzled128x4, true)?;
        let elem = out_dtype.map_or(Ok(Elem::Bf16), |dtype| float_dtype("out_dtype", dtype))?;
        let to = match out {
            Some(out) => contract.output("out", out)?,
            None => contract.new_output("out", &from_a, &[m, n], elem)?,
        };
        contract.check("out", &to, &[Dim::Named("m"), Dim::Named("n")], &[elem])?;
        let checked = contract.finish()?;
        let mut params = MmMxfp8Params {
            a: from_a.data,
            b: columns.data,
            a_scales,
            b_scales,
            out: to.data,
            out_dtype: elem.dtype().unwrap_or(Dtype::F32),
            m: int("m", m)?,
            n: int("n", n)?,
            k: int("k", k)?,
            splits: 1,
            shared_tiles: 0,
            tokens: std::ptr::null_mut(),
            tile_tokens: 0,
            partial_sums: std::ptr::null_mut(),
            arrived: std::ptr::null_mut(),
            arrivals: 0,
        };
        if m == 0 || n == 0 {
            return Ok(to.into_object());
        }
        match from_a.place {
            Place::Cpu => {
                // SAFETY: shapes, dtypes and extents were checked, and out overlaps nothing.
                checked.on_cpu(py, || unsafe { cpu::mm_mxfp8(&params) })??;
            }
            Place::Cuda(ordinal) => {
                for (operand, tensor) in [("a", &from_a), ("b", &columns), ("out", &to)] {
                    check_vectors(operand, tensor)?;
                }
                let gpu = gpu(ordinal)?;
                if gpu.device.arch != Arch::SM90 {
                    return Err(Error::Unsupported(format!(
                        "mm_mxfp8 on {}; supported: sm_90 and CPU tensors",
                        gpu.device.arch
                    )));
                }
                let plan = plan::MmPlan::new(m, n, k, &gpu.device);
                // The workspace holds the tokens, the partial sums and the counters that count them. Each has a multiple of 16 bytes.
                let arrivals = i64::from(plan.arrivals);
                let workspace = match plan.token_bytes + plan.partial_bytes + arrivals * 4 {
                    0 => None,
                    bytes => Some(contract.new_output("workspace", &from_a, &[bytes], Elem::U8)?),
                };
                if let Some(workspace) = &workspace {
                    params.tokens = workspace.data;
                    params.partial_sums = params.tokens.wrapping_add(plan.token_bytes as usize);
                    params.arrived = params.partial_sums.wrapping_add(plan.partial_bytes as usize).cast();
                }
                params.splits = plan.splits as i32;
                params.shared_tiles = plan.shared_tiles as i32;
                params.tile_tokens = plan.tile_tokens as i32;
                params.arrivals = plan.arrivals as i32;
                let stream = Stream::new(gpu, from_a.current_stream(py)?, &checked)?;
                let (passes, pass_rows) = (plan.passes as i32, plan.pass_rows as i32);
                match &plan.launches {
                    MmLaunches::Few(launch) => {
                        let few = MmMxfp8FewParams { product: params, passes, pass_rows };
                        stream.launch("mm_mxfp8", launch, &few)?;
                    }
                    MmLaunches::Wide(launches) => {
                        launches.iter().try_for_each(|launch| stream.launch("mm_mxfp8", launch, &params))?;
                    }
                }
            }
        }
        stats::count(stats::Call::MmMxfp8, m);
        Ok(to.into_object())
    })
}

/// Refuses scales with another dtype or number of dimensions.
fn check_kind(operand: &str, scales: &View) -> Result<()> {
    if ![Elem::U8, Elem::E8M0].contains(&scales.elem) {
        contract!("{operand}: expected dtype uint8, got {}", scales.elem);
    }
    match scales.shape().len() {
        1 | 2 => Ok(()),
        _ => Err(of_other_dimensions(operand, scales)),
    }
}

fn of_other_dimensions(operand: &str, scales: &View) -> Error {
    let shape = scales.shape();
    Error::Contract(format!("{operand}: {operand} must be 1D (swizzled) or 2D (non-swizzled), got shape {shape:?}"))
}

/// The scales of a matrix: a 2D tensor with its strides, or a 1D tensor in the tiles of `layout`. If `turned`, the 2D shape is [blocks,
/// rows].
fn scales(
    operand: &'static str,
    scales: &View,
    like: &View,
    (name, rows): (&str, i64),
    k: i64,
    layout: ScaleLayout,
    turned: bool,
) -> Result<ScaleView> {
    if scales.place != like.place {
        contract!("{operand}: is on {}, but a is on {}", scales.place, like.place);
    }
    let blocks = k / BLOCK as i64;
    let data = scales.data.cast_const();
    match *scales.shape() {
        [length] => {
            let expected = layout.bytes(rows as usize, blocks as usize) as i64;
            if length != expected {
                let (rows_padded, blocks_padded) = layout.padded(rows as usize, blocks as usize);
                contract!(
                    "{operand}: swizzled scales of {name} {rows} and k {k}: expected ({expected},), {rows_padded} x {blocks_padded}, got ({length},)"
                );
            }
            if !scales.contiguous() {
                contract!("{operand}: is not contiguous (strides {:?}); pass {operand}.contiguous()", scales.strides());
            }
            Ok(ScaleView { data, tile_rows: layout.tile_rows(), row_stride: 0, block_stride: 0 })
        }
        [first, second] => {
            let expected = if turned { (blocks, rows) } else { (rows, blocks) };
            if (first, second) != expected {
                contract!("{operand}: expected shape {expected:?}, got {:?}", (first, second));
            }
            let (mut row_stride, mut block_stride) = (scales.strides()[0], scales.strides()[1]);
            if turned {
                std::mem::swap(&mut row_stride, &mut block_stride);
            }
            Ok(ScaleView { data, tile_rows: 0, row_stride, block_stride })
        }
        _ => Err(of_other_dimensions(operand, scales)),
    }
}
