//! The Python function that quantises rows to e4m3, on CPU and CUDA tensors.

use super::ops::check_vectors;
use super::ops::{check_aligned, check_multiple, dims, leading, shape, Pair};
use super::packed;
use crate::contract;
use crate::cpu;
use crate::device::{gpu, Arch};
use crate::error::{guard, Error, Result};
use crate::kernel::Stream;
use crate::params::QuantizeRowsParams;
use crate::sizes::{int, product};
use crate::tensor::{Contract, Dim, Elem, Place};
use crate::variants::quant;
use half::bf16;
use pyo3::prelude::*;

#[doc = crate::help!("quantize_rows_e4m3")]
#[pyfunction(crate = "crate::python")]
pub fn quantize_rows_e4m3<'py>(x: &Bound<'py, PyAny>) -> PyResult<Pair<'py>> {
    let py = x.py();
    guard(|| {
        let mut contract = Contract::new();
        let from = contract.input("x", x)?;
        let lead = leading("x", &from, 1, "K")?;
        let k = from.shape()[lead.len()];
        contract.check("x", &from, &dims(lead, &[Dim::Named("K")]), &[Elem::Bf16])?;
        let rows = product("x", lead)?;
        if rows.max(k) > i64::from(i32::MAX) / 2 {
            contract!("x: expected up to 2^30 rows and columns, got {rows} and {k}");
        }
        let codes = contract.new_output("codes", &from, &shape(lead, &[k]), Elem::U8)?;
        let scales = contract.new_output("scales", &from, lead, Elem::F32)?;
        check_aligned::<f32>("scales", &scales)?;
        let params = QuantizeRowsParams {
            x: from.data,
            out: codes.data,
            scales: scales.data.cast(),
            rows: int("x: rows", rows)?,
            columns: int("x: K", k)?,
            out_columns: int("x: K", k)?,
            tiles: std::ptr::null(),
            tile_count: std::ptr::null(),
            x_is_older: false,
        };
        let checked = contract.finish()?;
        match from.place {
            Place::Cpu => {
                check_aligned::<bf16>("x", &from)?;
                // SAFETY: the shapes were checked, and the outputs are new.
                checked.on_cpu(py, || unsafe { cpu::quantize_rows_e4m3(&params) })?;
            }
            Place::Cuda(ordinal) => {
                check_multiple("x", lead.len(), "K", k, 8)?;
                check_vectors("x", &from)?;
                let gpu = gpu(ordinal)?;
                require(gpu.device.arch)?;
                let ctas = rows.min(16 * i64::from(gpu.device.multiprocessors));
                let stream = Stream::new(gpu, from.current_stream(py)?, &checked)?;
                packed::launch(&stream, "rows_e4m3", quant::QUANTIZE_ROWS_E4M3.kernel(), ctas, &params)?;
            }
        }
        Ok((codes.into_object(), scales.into_object()))
    })
}

fn require(arch: Arch) -> Result<()> {
    if arch == Arch::SM90 {
        return Ok(());
    }
    Err(Error::Unsupported(format!("rows_e4m3 on {arch}; supported: sm_90 and CPU tensors")))
}
