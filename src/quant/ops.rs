//! The Python functions of MXFP4's quantisation, and checks that other formats share, on CPU and CUDA tensors.

use super::mxfp4::{self, Float, Rounding};
use super::packed;
use crate::contract;
use crate::device::gpu;
use crate::error::{guard, Result};
use crate::kernel::Stream;
use crate::params::{Dtype, QuantizeMxfp4Params};
use crate::tensor::{self, Checked, Contract, Dim, Elem, Place, View};
use crate::variants::quant::{DEQUANTIZE_MXFP4, QUANTIZE_MXFP4, QUANTIZE_UNITS};
use crate::variants::Kernel;
use half::{bf16, f16};
use pyo3::prelude::*;

/// Elements that share a scale, in the type of tensor sizes.
pub(super) const BLOCK: i64 = mxfp4::BLOCK as i64;
/// Types of E8M0 bytes: plain bytes, or torch.float8_e8m0fnu.
pub(super) const E8M0: [Elem; 2] = [Elem::U8, Elem::Other(14, 8)];

pub(super) type Pair<'py> = (Bound<'py, PyAny>, Bound<'py, PyAny>);

/// The elements of a host tensor that a contract has checked.
///
/// # Safety
/// `tensor` is contiguous, any `T` can be read from its elements, and nobody writes to it meanwhile.
pub(super) unsafe fn elements<'a, T>(operand: &str, tensor: &'a View) -> Result<&'a [T]> {
    check_aligned::<T>(operand, tensor)?;
    if tensor.numel() == 0 {
        return Ok(&[]);
    }
    // SAFETY: the data is aligned and not null (`View`). The rest is the caller's contract.
    Ok(unsafe { std::slice::from_raw_parts(tensor.data.cast(), tensor.numel() as usize) })
}

/// The elements of a host tensor that a contract has checked, for an output.
///
/// # Safety
/// `tensor` is contiguous, any `T` can be read from its elements, and nobody else reads or writes it; see [`elements`].
#[allow(clippy::mut_from_ref)] // the tensor is a view
pub(super) unsafe fn elements_mut<'a, T>(operand: &str, tensor: &'a View) -> Result<&'a mut [T]> {
    check_aligned::<T>(operand, tensor)?;
    if tensor.numel() == 0 {
        return Ok(&mut []);
    }
    // SAFETY: the data is aligned and not null (`View`). The rest is the caller's contract.
    Ok(unsafe { std::slice::from_raw_parts_mut(tensor.data.cast(), tensor.numel() as usize) })
}

/// Refuses a CUDA tensor that does not start at a multiple of 16 bytes: kernels read and write vectors of 16 bytes.
pub fn check_vectors(operand: &str, tensor: &View) -> Result<()> {
    if tensor.place != Place::Cpu && !(tensor.data as usize).is_multiple_of(16) {
        contract!(
            "{operand}: must start at a multiple of 16 bytes, got address {:p}; pass {operand}.clone()",
            tensor.data
        );
    }
    Ok(())
}

pub(super) fn check_aligned<T>(operand: &str, tensor: &View) -> Result<()> {
    if !tensor.data.cast::<T>().is_aligned() {
        contract!("{operand}: expected data aligned to {} bytes, got {:p}", align_of::<T>(), tensor.data);
    }
    Ok(())
}

/// The dimensions before the last `trailing` ones.
pub(super) fn leading<'a>(operand: &str, tensor: &'a View, trailing: usize, expected: &str) -> Result<&'a [i64]> {
    match tensor.shape().len().checked_sub(trailing) {
        Some(count) => Ok(&tensor.shape()[..count]),
        None => contract!("{operand}: expected [..., {expected}], got shape {:?}", tensor.shape()),
    }
}

pub(super) fn shape(leading: &[i64], trailing: &[i64]) -> Vec<i64> {
    [leading, trailing].concat()
}

pub(super) fn dims(leading: &[i64], trailing: &[Dim]) -> Vec<Dim> {
    leading.iter().map(|&size| Dim::Is("as of codes", size)).chain(trailing.iter().copied()).collect()
}

pub(super) fn check_multiple(operand: &str, dimension: usize, name: &str, got: i64, multiple: i64) -> Result<()> {
    if got % multiple != 0 {
        contract!("{operand}: dimension {dimension} \"{name}\": expected a multiple of {multiple}, got {got}");
    }
    Ok(())
}

#[doc = crate::help!("quantize_mxfp4")]
#[pyfunction(crate = "crate::python")]
#[pyo3(signature = (x, *, rounding="up"))]
pub fn quantize_mxfp4<'py>(x: &Bound<'py, PyAny>, rounding: &str) -> PyResult<Pair<'py>> {
    let py = x.py();
    guard(|| {
        let rounding = match rounding {
            "up" => Rounding::Up,
            "down" => Rounding::Down,
            other => contract!("rounding: expected \"up\" or \"down\", got {other:?}"),
        };
        let mut contract = Contract::new();
        let from = contract.input("x", x)?;
        let lead = leading("x", &from, 1, "K")?;
        let k = from.shape()[lead.len()];
        contract.check("x", &from, &dims(lead, &[Dim::Named("K")]), &[Elem::Bf16, Elem::F16, Elem::F32])?;
        check_multiple("x", lead.len(), "K", k, BLOCK)?;
        let codes = contract.new_output("codes", &from, &shape(lead, &[k / 2]), Elem::U8)?;
        let scales = contract.new_output("scales", &from, &shape(lead, &[k / BLOCK]), Elem::U8)?;
        let checked = contract.finish()?;
        if let Place::Cuda(ordinal) = from.place {
            check_vectors("x", &from)?;
            let stream = Stream::new(gpu(ordinal)?, from.current_stream(py)?, &checked)?;
            launch(&stream, "mxfp4", QUANTIZE_MXFP4.kernel(), [&from, &codes, &scales], rounding == Rounding::Up)?;
            return Ok((codes.into_object(), scales.into_object()));
        }
        let cpu = (py, &checked);
        // SAFETY: the tensors were checked against these types above, and the outputs are new.
        unsafe {
            let outputs = (elements_mut("codes", &codes)?, elements_mut("scales", &scales)?);
            match from.elem {
                Elem::Bf16 => quantize::<bf16>(cpu, elements("x", &from)?, rounding, outputs),
                Elem::F16 => quantize::<f16>(cpu, elements("x", &from)?, rounding, outputs),
                _ => quantize::<f32>(cpu, elements("x", &from)?, rounding, outputs),
            }?;
        }
        Ok((codes.into_object(), scales.into_object()))
    })
}

fn quantize<T: Float>(
    (py, checked): (Python<'_>, &Checked<'_>),
    x: &[T],
    rounding: Rounding,
    (codes, scales): (&mut [u8], &mut [u8]),
) -> Result<()> {
    checked.on_cpu(py, || mxfp4::quantize(x, rounding, codes, scales))
}

#[doc = crate::help!("dequantize_mxfp4")]
#[pyfunction(crate = "crate::python")]
#[pyo3(signature = (codes, scales, dtype=None))]
pub fn dequantize_mxfp4<'py>(
    codes: &Bound<'py, PyAny>,
    scales: &Bound<'py, PyAny>,
    dtype: Option<&Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyAny>> {
    let py = codes.py();
    guard(|| {
        let mut contract = Contract::new();
        let (from, from_scales) = (contract.input("codes", codes)?, contract.input("scales", scales)?);
        let elem = dtype.map_or(Ok(Elem::F32), |dtype| float_dtype("dtype", dtype))?;
        if elem == Elem::Bf16 && from.origin == tensor::Origin::Other {
            contract!("dtype: expected float32 or float16 for numpy arrays, got bfloat16, which numpy does not have");
        }
        let lead = leading("codes", &from, 1, "K / 2")?;
        let bytes = from.shape()[lead.len()];
        contract.check("codes", &from, &dims(lead, &[Dim::Named("K / 2")]), &[Elem::U8])?;
        check_multiple("codes", lead.len(), "K / 2", bytes, BLOCK / 2)?;
        let groups = Dim::Is("K / 32", bytes * 2 / BLOCK);
        contract.check("scales", &from_scales, &dims(lead, &[groups]), &E8M0)?;
        let out = contract.new_output("out", &from, &shape(lead, &[bytes * 2]), elem)?;
        let checked = contract.finish()?;
        if let Place::Cuda(ordinal) = from.place {
            check_vectors("codes", &from)?;
            let stream = Stream::new(gpu(ordinal)?, from.current_stream(py)?, &checked)?;
            launch(&stream, "dequantize", DEQUANTIZE_MXFP4.kernel(), [&out, &from, &from_scales], false)?;
            return Ok(out.into_object());
        }
        let cpu = (py, &checked);
        // SAFETY: the tensors were checked against these types above, and the output is new.
        unsafe {
            let inputs = (elements("codes", &from)?, elements("scales", &from_scales)?);
            match elem {
                Elem::Bf16 => dequantize::<bf16>(cpu, inputs, elements_mut("out", &out)?),
                Elem::F16 => dequantize::<f16>(cpu, inputs, elements_mut("out", &out)?),
                _ => dequantize::<f32>(cpu, inputs, elements_mut("out", &out)?),
            }?;
        }
        Ok(out.into_object())
    })
}

fn dequantize<T: Float>(
    (py, checked): (Python<'_>, &Checked<'_>),
    (codes, scales): (&[u8], &[u8]),
    out: &mut [T],
) -> Result<()> {
    checked.on_cpu(py, || mxfp4::dequantize(codes, scales, out))
}

/// Launches a conversion between numbers and their codes and scales on a GPU. `up` says how scales are rounded.
fn launch(
    stream: &Stream<'_>,
    op: &str,
    kernel: Kernel<QuantizeMxfp4Params>,
    [numbers, codes, scales]: [&View; 3],
    up: bool,
) -> Result<()> {
    let params = QuantizeMxfp4Params {
        numbers: numbers.data,
        codes: codes.data,
        scales: scales.data,
        blocks: scales.numel(),
        dtype: numbers.elem.dtype().unwrap_or(Dtype::F32),
        up,
    };
    // A block has four threads.
    let per_cta = i64::from(kernel.threads() * QUANTIZE_UNITS) / 4;
    let ctas = (params.blocks + per_cta - 1) / per_cta;
    packed::launch(stream, op, kernel, ctas, &params)
}

/// The element type of a name, a torch.dtype, a numpy.dtype or a numpy scalar type.
pub fn float_dtype(operand: &str, dtype: &Bound<'_, PyAny>) -> Result<Elem> {
    let name = match dtype.getattr_opt("__name__")? {
        Some(name) => name.to_string(),
        None => dtype.to_string(),
    };
    match name.strip_prefix("torch.").unwrap_or(&name) {
        "float32" => Ok(Elem::F32),
        "float16" => Ok(Elem::F16),
        "bfloat16" => Ok(Elem::Bf16),
        other => contract!("{operand}: expected float32, float16 or bfloat16, got {other}"),
    }
}
