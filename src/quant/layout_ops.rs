//! The Python functions of other projects' layouts of MXFP4 weights, on CPU and CUDA tensors.

use super::layouts::cutlass::{self, Release};
use super::layouts::{gpu, hopper, Conversion, Layout, Matrices};
use super::ops::check_vectors;
use super::ops::{check_multiple, dims, elements, elements_mut, leading, shape, Pair, BLOCK, E8M0};
use crate::contract;
use crate::device;
use crate::error::{guard, Result};
use crate::kernel::Stream;
use crate::tensor::{Borrowed, Contract, Dim, Elem, Place, View};
use pyo3::prelude::*;

fn matrices(leading: &[i64], rows: i64, columns: i64) -> Matrices {
    Matrices { count: leading.iter().product::<i64>() as usize, rows: rows as usize, columns: columns as usize }
}

/// Converts codes and scales on their device. `tensors` has (operand, its bytes, the new tensor) of each.
fn convert(
    py: Python<'_>,
    op: &str,
    conversions: [Conversion; 2],
    tensors: [(&'static str, &View, &View); 2],
    contract: &Contract<'_>,
) -> Result<()> {
    let checked = contract.finish()?;
    match tensors[0].1.place {
        Place::Cpu => {
            for (conversion, (operand, from, to)) in conversions.iter().zip(tensors) {
                // SAFETY: the tensors are contiguous bytes (or contiguous as transposed), and the outputs are new.
                let (from, to) = unsafe { (elements(operand, from)?, elements_mut("out", to)?) };
                checked.on_cpu(py, || conversion.on_host(from, to))?;
            }
        }
        Place::Cuda(ordinal) => {
            for (conversion, (operand, from, _)) in conversions.iter().zip(tensors) {
                // A checkpoint's scales are read and written byte by byte.
                if conversion.back || !conversion.scales {
                    check_vectors(operand, from)?;
                }
            }
            let stream = Stream::new(device::gpu(ordinal)?, tensors[0].1.current_stream(py)?, &checked)?;
            for (conversion, (_, from, to)) in conversions.iter().zip(tensors) {
                gpu::launch(&stream, op, conversion, from.data, to.data)?;
            }
        }
    }
    Ok(())
}

fn check_num_warps(num_warps: i64) -> Result<()> {
    if !(1..=32).contains(&num_warps) || num_warps.count_ones() != 1 {
        contract!("num_warps: expected a power of two from 1 to 32, got {num_warps}");
    }
    Ok(())
}

#[doc = crate::help!("swizzle_hopper_mxfp4")]
#[pyfunction(crate = "crate::python")]
#[pyo3(signature = (codes, scales, *, num_warps=8, row_multiple=64))]
pub fn swizzle_hopper_mxfp4<'py>(
    codes: &Bound<'py, PyAny>,
    scales: &Bound<'py, PyAny>,
    num_warps: i64,
    row_multiple: i64,
) -> PyResult<Pair<'py>> {
    let py = codes.py();
    guard(|| {
        let mut contract = Contract::new();
        let (from, from_scales) = (contract.input("codes", codes)?, contract.input("scales", scales)?);
        let lead = leading("codes", &from, 2, "rows, K / 2")?;
        let (rows, bytes) = (from.shape()[lead.len()], from.shape()[lead.len() + 1]);
        contract.check("codes", &from, &dims(lead, &[Dim::Named("rows"), Dim::Named("K / 2")]), &[Elem::U8])?;
        check_multiple("codes", lead.len() + 1, "K / 2", bytes, BLOCK / 2)?;
        contract.check("scales", &from_scales, &dims(lead, &[Dim::Named("rows"), Dim::Named("groups")]), &E8M0)?;
        let groups = contract.get("groups");
        if groups < bytes * 2 / BLOCK {
            let dimension = lead.len() + 1;
            contract!("scales: dimension {dimension} \"K / 32\": expected {} or more, got {groups}", bytes * 2 / BLOCK);
        }
        check_num_warps(num_warps)?;
        if row_multiple != 64 && row_multiple != 256 {
            contract!("row_multiple: expected 64 (triton_kernels 3.6) or 256 (3.8), got {row_multiple}");
        }
        let (plain, plain_scales) = (matrices(lead, rows, bytes), matrices(lead, rows, groups));
        let padded = hopper::padded_values(plain, row_multiple as usize);
        let padded_scales = hopper::padded_scales(plain_scales, num_warps as usize);
        let stored = |padded: &Matrices, fold: usize| {
            shape(lead, &[(padded.rows / fold) as i64, (padded.columns * fold) as i64])
        };
        let to = contract.new_output("out", &from, &stored(&padded, 4), Elem::U8)?;
        let to_scales = contract.new_output("out scales", &from, &stored(&padded_scales, 32), Elem::U8)?;
        let layout = Layout::Hopper { num_warps: num_warps as usize };
        let codes = Conversion { layout, scales: false, back: false, plain, held: padded };
        let scales = Conversion { scales: true, plain: plain_scales, held: padded_scales, ..codes };
        let tensors: [(&'static str, &View, &View); 2] = [("codes", &from, &to), ("scales", &from_scales, &to_scales)];
        convert(py, "swizzle_hopper_mxfp4", [codes, scales], tensors, &contract)?;
        let transpose = |object: Bound<'py, PyAny>| object.call_method1("swapaxes", (-2, -1));
        Ok((transpose(to.into_object())?, transpose(to_scales.into_object())?))
    })
}

/// Borrows a tensor as triton_kernels stores it, transposed. Its shape must be [leading, folded rows, row length].
fn borrow_swizzled<'py>(
    operand: &'static str,
    object: &Bound<'py, PyAny>,
    contract: &mut Contract<'_>,
) -> Result<Borrowed<'py>> {
    let tensor = contract.input(operand, object)?;
    if tensor.shape().len() < 2 {
        contract!("{operand}: expected [..., K, rows] as triton_kernels stores it, got shape {:?}", tensor.shape());
    }
    let tensor = tensor.transposed();
    if !tensor.contiguous() {
        let tensor = tensor.transposed();
        contract!(
            "{operand}: expected triton_kernels' storage, contiguous in its last dimension but one, got shape {:?}, strides {:?}",
            tensor.shape(),
            tensor.strides()
        );
    }
    Ok(tensor)
}

#[doc = crate::help!("unswizzle_hopper_mxfp4")]
#[pyfunction(crate = "crate::python")]
#[pyo3(signature = (values, scales, *, rows, columns, num_warps=8))]
pub fn unswizzle_hopper_mxfp4<'py>(
    values: &Bound<'py, PyAny>,
    scales: &Bound<'py, PyAny>,
    rows: i64,
    columns: i64,
    num_warps: i64,
) -> PyResult<Pair<'py>> {
    let py = values.py();
    guard(|| {
        let mut contract = Contract::new();
        let from = borrow_swizzled("values", values, &mut contract)?;
        let from_scales = borrow_swizzled("scales", scales, &mut contract)?;
        check_num_warps(num_warps)?;
        if rows < 0 || columns < 0 || columns % BLOCK != 0 {
            contract!(
                "rows, columns: expected sizes of the weight, columns a multiple of {BLOCK}, got {rows}, {columns}"
            );
        }
        let lead = leading("values", &from, 2, "K, rows")?;
        let trailing = [Dim::Named("folded rows"), Dim::Named("folded columns")];
        contract.check("values", &from, &dims(lead, &trailing), &[Elem::U8])?;
        let trailing = [Dim::Named("folded scale rows"), Dim::Named("folded scale columns")];
        contract.check("scales", &from_scales, &dims(lead, &trailing), &E8M0)?;

        let (at, groups) = (lead.len(), columns / BLOCK);
        let (folded_rows, length) = (contract.get("folded rows"), contract.get("folded columns"));
        check_multiple("values", at, "4 K / 2", length, 4 * hopper::VALUE_COLUMNS as i64)?;
        check_multiple("values", at + 1, "rows / 4", folded_rows, 16)?;
        let (folded_scale_rows, scale_length) =
            (contract.get("folded scale rows"), contract.get("folded scale columns"));
        check_multiple("scales", at, "32 K / 32", scale_length, 64)?;
        check_multiple("scales", at + 1, "rows / 32", folded_scale_rows, num_warps)?;
        for (operand, name, held, wanted) in [
            ("values", "rows", folded_rows * 4, rows),
            ("values", "columns", length / 4 * 2, columns),
            ("scales", "rows", folded_scale_rows * 32, rows),
            ("scales", "columns", scale_length / 32 * BLOCK, columns),
        ] {
            if wanted > held {
                contract!("{name}: {operand} of shape {:?} hold {held}, got {wanted}", {
                    let t = if operand == "values" { &from } else { &from_scales };
                    shape(lead, &[t.shape()[at + 1], t.shape()[at]])
                });
            }
        }
        let padded = matrices(lead, folded_rows * 4, length / 4);
        let padded_scales = matrices(lead, folded_scale_rows * 32, scale_length / 32);
        let (plain, plain_scales) = (matrices(lead, rows, columns / 2), matrices(lead, rows, groups));
        let to = contract.new_output("out", &from, &shape(lead, &[rows, columns / 2]), Elem::U8)?;
        let to_scales = contract.new_output("out scales", &from, &shape(lead, &[rows, groups]), Elem::U8)?;
        let layout = Layout::Hopper { num_warps: num_warps as usize };
        let codes = Conversion { layout, scales: false, back: true, plain, held: padded };
        let scales = Conversion { scales: true, plain: plain_scales, held: padded_scales, ..codes };
        let tensors: [(&'static str, &View, &View); 2] = [("values", &from, &to), ("scales", &from_scales, &to_scales)];
        convert(py, "unswizzle_hopper_mxfp4", [codes, scales], tensors, &contract)?;
        Ok((to.into_object(), to_scales.into_object()))
    })
}

/// The shape of the scales of one matrix [rows, groups], as flashinfer folds them.
fn folded(release: Release, rows: i64, groups: i64) -> Vec<i64> {
    let (kept, folded) = (cutlass::GROUPS as i64, cutlass::FOLDED_ROWS as i64);
    match release {
        Release::V0_6 => vec![groups / kept, rows * kept],
        Release::V0_7 => vec![rows / folded, groups / kept, 16, 16],
    }
}

fn check_sm90(codes: &View, lead: &[i64], release: Release) -> Result<(i64, i64)> {
    let (rows, bytes) = (codes.shape()[lead.len()], codes.shape()[lead.len() + 1]);
    let row_multiple = match release {
        Release::V0_6 => cutlass::ROWS,
        Release::V0_7 => cutlass::FOLDED_ROWS,
    };
    check_multiple("codes", lead.len(), "rows", rows, row_multiple as i64)?;
    check_multiple("codes", lead.len() + 1, "K / 2", bytes, cutlass::GROUPS as i64 * BLOCK / 2)?;
    Ok((rows, bytes))
}

#[doc = crate::help!("interleave_sm90_mxfp4")]
#[pyfunction(crate = "crate::python")]
#[pyo3(signature = (codes, scales, *, flashinfer="0.7"))]
pub fn interleave_sm90_mxfp4<'py>(
    codes: &Bound<'py, PyAny>,
    scales: &Bound<'py, PyAny>,
    flashinfer: &str,
) -> PyResult<Pair<'py>> {
    let py = codes.py();
    guard(|| {
        let release = match flashinfer {
            "0.6" => Release::V0_6,
            "0.7" => Release::V0_7,
            other => contract!("flashinfer: expected \"0.6\" or \"0.7\", got {other:?}"),
        };
        let mut contract = Contract::new();
        let (from, from_scales) = (contract.input("codes", codes)?, contract.input("scales", scales)?);
        let lead = leading("codes", &from, 2, "rows, K / 2")?;
        contract.check("codes", &from, &dims(lead, &[Dim::Named("rows"), Dim::Named("K / 2")]), &[Elem::U8])?;
        let (rows, bytes) = check_sm90(&from, lead, release)?;
        let groups = bytes * 2 / BLOCK;
        contract.check("scales", &from_scales, &dims(lead, &[Dim::Named("rows"), Dim::Is("K / 32", groups)]), &E8M0)?;
        let to = contract.new_output("out", &from, from.shape(), Elem::U8)?;
        let folded = folded(release, rows, groups);
        let to_scales = contract.new_output("out scales", &from, &shape(lead, &folded), Elem::U8)?;
        let (all, all_scales) = (matrices(lead, rows, bytes), matrices(lead, rows, groups));
        let layout = Layout::Cutlass(release);
        let codes = Conversion { layout, scales: false, back: false, plain: all, held: all };
        let scales = Conversion { scales: true, plain: all_scales, held: all_scales, ..codes };
        let tensors: [(&'static str, &View, &View); 2] = [("codes", &from, &to), ("scales", &from_scales, &to_scales)];
        convert(py, "interleave_sm90_mxfp4", [codes, scales], tensors, &contract)?;
        Ok((to.into_object(), to_scales.into_object()))
    })
}

#[doc = crate::help!("deinterleave_sm90_mxfp4")]
#[pyfunction(crate = "crate::python")]
#[pyo3(signature = (codes, scales))]
pub fn deinterleave_sm90_mxfp4<'py>(codes: &Bound<'py, PyAny>, scales: &Bound<'py, PyAny>) -> PyResult<Pair<'py>> {
    let py = codes.py();
    guard(|| {
        let mut contract = Contract::new();
        let (from, from_scales) = (contract.input("codes", codes)?, contract.input("scales", scales)?);
        let lead = leading("codes", &from, 2, "rows, K / 2")?;
        let release = match from_scales.shape().len().checked_sub(from.shape().len()) {
            Some(0) => Release::V0_6,
            Some(2) => Release::V0_7,
            _ => contract!(
                "scales: expected {} dimensions [..., K / 128, 4 rows] (flashinfer 0.6) or {} [..., rows / 64, K / 128, 16, 16] (0.7), got shape {:?}",
                from.shape().len(),
                from.shape().len() + 2,
                from_scales.shape()
            ),
        };
        contract.check("codes", &from, &dims(lead, &[Dim::Named("rows"), Dim::Named("K / 2")]), &[Elem::U8])?;
        let (rows, bytes) = check_sm90(&from, lead, release)?;
        let groups = bytes * 2 / BLOCK;
        let names: &[&'static str] = match release {
            Release::V0_6 => &["K / 128", "4 rows"],
            Release::V0_7 => &["rows / 64", "K / 128", "16", "16"],
        };
        let trailing: Vec<Dim> =
            names.iter().zip(folded(release, rows, groups)).map(|(name, size)| Dim::Is(name, size)).collect();
        contract.check("scales", &from_scales, &dims(lead, &trailing), &E8M0)?;
        let to = contract.new_output("out", &from, from.shape(), Elem::U8)?;
        let to_scales = contract.new_output("out scales", &from, &shape(lead, &[rows, groups]), Elem::U8)?;
        let (all, all_scales) = (matrices(lead, rows, bytes), matrices(lead, rows, groups));
        let layout = Layout::Cutlass(release);
        let codes = Conversion { layout, scales: false, back: true, plain: all, held: all };
        let scales = Conversion { scales: true, plain: all_scales, held: all_scales, ..codes };
        let tensors: [(&'static str, &View, &View); 2] = [("codes", &from, &to), ("scales", &from_scales, &to_scales)];
        convert(py, "deinterleave_sm90_mxfp4", [codes, scales], tensors, &contract)?;
        Ok((to.into_object(), to_scales.into_object()))
    })
}
