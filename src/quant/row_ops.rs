//! What Python sees of the quantisation of rows to e4m3, on CPU and CUDA tensors.

use super::ops::{check_aligned, check_multiple, dims, leading, new_tensor, shape, Pair};
use super::packed;
use super::packed_ops::check_vectors;
use crate::contract;
use crate::cpu;
use crate::device::{gpu, Arch};
use crate::error::{guard, Error, Result};
use crate::kernel::{Args, Stream};
use crate::params::QuantizeRowsParams;
use crate::sizes::{int, product};
use crate::tensor::{Contract, Dim, Elem, Place, TensorRef};
use crate::variants::Variant;
use half::bf16;
use pyo3::prelude::*;

/// bf16 x [..., K] in e4m3 with one scale a row: (codes uint8 [..., K], scales fp32 [...]); x is about codes times scales.
///
/// scale = amax / 448, or 1 where that is less than 2^-126; codes are those of x * (1 / scale), both products rounded to nearest even. A
/// NaN makes its whole row NaN; of a row with an infinity, infinities become NaN and the rest 0.
#[pyfunction]
pub fn quantize_rows_e4m3<'py>(x: &Bound<'py, PyAny>) -> PyResult<Pair<'py>> {
    let py = x.py();
    guard(|| {
        let from = TensorRef::borrow("x", x)?;
        let lead = leading("x", &from, 1, "K")?;
        let k = from.shape()[lead.len()];
        Contract::new().check("x", &from, &dims(lead, &[Dim::Named("K")]), &[Elem::Bf16])?;
        let rows = product("x", lead)?;
        if rows.max(k) > i64::from(i32::MAX) / 2 {
            contract!("x: expected up to 2^30 rows and columns, got {rows} and {k}");
        }
        let (codes_object, codes) = new_tensor((x, &from), &shape(lead, &[k]), Elem::U8)?;
        let (scales_object, scales) = new_tensor((x, &from), lead, Elem::F32)?;
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
        match from.place {
            Place::Cpu => {
                check_aligned::<bf16>("x", &from)?;
                // SAFETY: the shapes were checked, and the outputs are new.
                py.detach(|| unsafe { cpu::quantize_rows_e4m3(&params) });
            }
            Place::Cuda(ordinal) => {
                check_multiple("x", lead.len(), "K", k, 8)?;
                check_vectors("x", &from)?;
                let gpu = gpu(ordinal)?;
                require(gpu.device.arch)?;
                let ctas = rows.min(16 * i64::from(gpu.device.multiprocessors));
                let stream = Stream::new(gpu, from.current_stream(py)?)?;
                packed::launch(&stream, "rows_e4m3", Variant::QuantizeRowsE4m3, ctas, Args::QuantizeRows(&params))?;
            }
        }
        Ok((codes_object, scales_object))
    })
}

fn require(arch: Arch) -> Result<()> {
    if arch == Arch::SM90 {
        return Ok(());
    }
    Err(Error::Unsupported(format!("rows_e4m3 on {arch}; supported: sm_90 and CPU tensors")))
}
