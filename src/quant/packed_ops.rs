//! The Python functions of the packed form of MXFP4 weights, on CPU and CUDA tensors.

use super::arguments::{is_e4m3, w13_layout};
use super::mxfp4;
use super::ops::{check_aligned, check_multiple, check_vectors, dims, elements, leading, shape, BLOCK, E8M0};
use super::packed::{self, Extent};
use crate::contract;
use crate::cpu;
use crate::device::gpu;
use crate::error::{guard, Result};
use crate::kernel::Stream;
use crate::params::PackMxfp4Params;
use crate::sizes::{int, product};
use crate::tensor::{Contract, Dim, Elem, Place};
use crate::variants::Form;
use pyo3::prelude::*;

type Triple<'py> = (Bound<'py, PyAny>, Bound<'py, PyAny>, Bound<'py, PyAny>);

/// Refuses sizes that packing and its inverse do not take.
fn check_rows(operand: &str, rows: i64, columns: i64, gated: bool) -> Result<()> {
    if gated && rows % 2 != 0 {
        contract!("{operand}: rows are gate and up rows where gated and must be even, got {rows}");
    }
    if rows.max(columns) > i64::from(i32::MAX) / 2 {
        contract!("{operand}: expected up to 2^30 rows and columns, got {rows} and {columns}");
    }
    Ok(())
}

fn count(leading: &[i64]) -> Result<i32> {
    int("codes: matrices", product("codes", leading)?)
}

#[doc = crate::help!("pack_mxfp4")]
#[pyfunction(crate = "crate::python")]
#[pyo3(signature = (codes, scales, *, gated=false, layout="gate_up", activation_dtype=None))]
pub fn pack_mxfp4<'py>(
    codes: &Bound<'py, PyAny>,
    scales: &Bound<'py, PyAny>,
    gated: bool,
    layout: &str,
    activation_dtype: Option<&Bound<'py, PyAny>>,
) -> PyResult<Triple<'py>> {
    let py = codes.py();
    guard(|| {
        let layout = w13_layout(layout)?;
        let mut contract = Contract::new();
        let (from, from_scales) = (contract.input("codes", codes)?, contract.input("scales", scales)?);
        let lead = leading("codes", &from, 2, "rows, K / 2")?;
        let (rows, bytes) = (from.shape()[lead.len()], from.shape()[lead.len() + 1]);
        contract.check("codes", &from, &dims(lead, &[Dim::Named("rows"), Dim::Named("K / 2")]), &[Elem::U8])?;
        check_multiple("codes", lead.len() + 1, "K / 2", bytes, BLOCK / 2)?;
        let groups = bytes * 2 / BLOCK;
        contract.check("scales", &from_scales, &dims(lead, &[Dim::Named("rows"), Dim::Is("K / 32", groups)]), &E8M0)?;
        check_rows("codes", rows, bytes * 2, gated)?;
        check_vectors("codes", &from)?;
        let extent = Extent { form: Form::Mxfp4, experts: count(lead)?.into(), rows, k: bytes * 2 };
        let to = contract.new_output("packed codes", &from, &shape(lead, &extent.codes_shape()[1..]), Elem::U8)?;
        let scales_shape = shape(lead, &extent.scales_shape()[1..]);
        let to_scales = contract.new_output("packed scales", &from, &scales_shape, Elem::U8)?;
        let factors = contract.new_output("expert_scales", &from, lead, Elem::F32)?;
        let checked = contract.finish()?;
        check_aligned::<f32>("expert_scales", &factors)?;
        let params = PackMxfp4Params {
            codes: from.data,
            scales: from_scales.data,
            row_blocks: int("codes: K / 32", groups)?,
            experts: int("codes: matrices", extent.experts)?,
            rows: int("codes: rows", rows)?,
            used_rows: int("codes: rows", rows)?,
            k: int("codes: K", extent.k)?,
            gated,
            layout,
            packed_codes: to.data,
            packed_scales: to_scales.data,
            expert_scales: factors.data.cast(),
            e4m3: is_e4m3(activation_dtype)?,
        };
        match from.place {
            // SAFETY: extents were checked; the outputs are new, and the inputs are only read.
            Place::Cpu => checked.on_cpu(py, || unsafe { cpu::pack_mxfp4(&params) })?,
            Place::Cuda(ordinal) => {
                let stream = Stream::new(gpu(ordinal)?, from.current_stream(py)?, &checked)?;
                packed::launch_peak(&stream, "mxfp4_pack", mxfp4::PACKERS, &params)?;
                packed::launch_pack(&stream, "mxfp4_pack", mxfp4::PACKERS.pack, extent, &params)?;
            }
        }
        Ok((to.into_object(), to_scales.into_object(), factors.into_object()))
    })
}

#[doc = crate::help!("unpack_mxfp4")]
#[pyfunction(crate = "crate::python")]
#[pyo3(signature = (codes, scales, expert_scales, *, rows, columns, gated=false, layout="gate_up"))]
#[allow(clippy::too_many_arguments)] // keyword arguments of Python
pub fn unpack_mxfp4<'py>(
    codes: &Bound<'py, PyAny>,
    scales: &Bound<'py, PyAny>,
    expert_scales: &Bound<'py, PyAny>,
    rows: i64,
    columns: i64,
    gated: bool,
    layout: &str,
) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyAny>)> {
    let py = codes.py();
    guard(|| {
        let layout = w13_layout(layout)?;
        let mut contract = Contract::new();
        let (from, from_scales) = (contract.input("codes", codes)?, contract.input("scales", scales)?);
        let factors = contract.input("expert_scales", expert_scales)?;
        if rows < 0 || columns < 0 || columns % BLOCK != 0 {
            contract!(
                "rows, columns: expected sizes of the weight, columns a multiple of {BLOCK}, got {rows}, {columns}"
            );
        }
        check_rows("rows, columns", rows, columns, gated)?;
        let lead = leading("codes", &from, 3, "row tiles, K blocks, 2048")?;
        let extent = Extent { form: Form::Mxfp4, experts: count(lead)?.into(), rows, k: columns };
        let trailing = |last: &'static str, bytes: usize| {
            let tiles =
                [Dim::Is("ceil(rows / 64)", extent.row_tiles()), Dim::Is("ceil(columns / 64)", extent.k_blocks())];
            [tiles[0], tiles[1], Dim::Is(last, bytes as i64)]
        };
        contract.check("codes", &from, &dims(lead, &trailing("bytes", packed::CODE_BYTES)), &[Elem::U8])?;
        contract.check("scales", &from_scales, &dims(lead, &trailing("bytes", packed::SCALE_BYTES)), &[Elem::U8])?;
        contract.check("expert_scales", &factors, &dims(lead, &[]), &[Elem::F32])?;
        for (name, tensor) in [("codes", &from), ("scales", &from_scales)] {
            check_vectors(name, tensor)?;
        }
        if from.place == Place::Cpu {
            // SAFETY: the tensor is contiguous fp32, and the caller lends it: nobody writes to it meanwhile.
            let factors: &[f32] = unsafe { elements("expert_scales", &factors)? };
            let is_power = |x: f32| x.to_bits() << 9 == 0 && (1.0..=2f32.powi(126)).contains(&x);
            if let Some(wrong) = factors.iter().find(|&&x| !is_power(x)) {
                contract!("expert_scales: expected powers of two from 1 to 2^126, got {wrong:e}");
            }
        }
        let to = contract.new_output("out", &from, &shape(lead, &[rows, columns / 2]), Elem::U8)?;
        let to_scales = contract.new_output("out scales", &from, &shape(lead, &[rows, columns / BLOCK]), Elem::U8)?;
        let checked = contract.finish()?;
        let params = PackMxfp4Params {
            codes: to.data,
            scales: to_scales.data,
            row_blocks: int("columns / 32", columns / BLOCK)?,
            experts: int("codes: matrices", extent.experts)?,
            rows: int("rows", rows)?,
            used_rows: int("rows", rows)?,
            k: int("columns", columns)?,
            gated,
            layout,
            packed_codes: from.data,
            packed_scales: from_scales.data,
            expert_scales: factors.data.cast(),
            e4m3: false,
        };
        match from.place {
            // SAFETY: extents were checked; the outputs are new, and the inputs are only read.
            Place::Cpu => checked.on_cpu(py, || unsafe { cpu::unpack_mxfp4(&params) })?,
            Place::Cuda(ordinal) => {
                let stream = Stream::new(gpu(ordinal)?, from.current_stream(py)?, &checked)?;
                packed::launch_unpack(&stream, "mxfp4_unpack", extent, &params)?;
            }
        }
        Ok((to.into_object(), to_scales.into_object()))
    })
}
