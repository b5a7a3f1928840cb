//! What Python sees of the formats: quantisation and layouts of weights, on host memory.

use super::layouts::cutlass::{self, Release};
use super::layouts::{hopper, Matrices};
use super::mxfp4::{self, Float, Rounding};
use crate::contract;
use crate::error::{guard, Error, Result};
use crate::tensor::{self, Contract, Dim, Elem, Place, TensorRef};
use half::{bf16, f16};
use pyo3::prelude::*;

/// Elements that share a scale, as sizes of tensors are counted.
pub(super) const BLOCK: i64 = mxfp4::BLOCK as i64;
/// E8M0 bytes, plain or as torch.float8_e8m0fnu.
pub(super) const E8M0: [Elem; 2] = [Elem::U8, Elem::Other(14, 8)];

type Pair<'py> = (Bound<'py, PyAny>, Bound<'py, PyAny>);

fn borrow_host(operand: &'static str, object: &Bound<'_, PyAny>) -> Result<TensorRef> {
    let tensor = TensorRef::borrow(operand, object)?;
    match tensor.place {
        Place::Cpu => Ok(tensor),
        Place::Cuda(_) => Err(Error::Unsupported(format!(
            "{operand}: is on {}; MXFP4 tensors are converted on cpu: pass {operand}.cpu()",
            tensor.place
        ))),
    }
}

/// The elements of a host tensor that a contract has checked.
///
/// # Safety
/// `tensor` is contiguous, of elements that any `T` can be read from, and nobody writes to it meanwhile.
pub(super) unsafe fn elements<'a, T>(operand: &str, tensor: &'a TensorRef) -> Result<&'a [T]> {
    check_aligned::<T>(operand, tensor)?;
    if tensor.numel() == 0 {
        return Ok(&[]);
    }
    // SAFETY: aligned and not null (`TensorRef`); the rest is the caller's contract.
    Ok(unsafe { std::slice::from_raw_parts(tensor.data.cast(), tensor.numel() as usize) })
}

/// The same for an output.
///
/// # Safety
/// As for [`elements`], and nobody else reads or writes it.
#[allow(clippy::mut_from_ref)] // the tensor is a view
unsafe fn elements_mut<'a, T>(operand: &str, tensor: &'a TensorRef) -> Result<&'a mut [T]> {
    check_aligned::<T>(operand, tensor)?;
    if tensor.numel() == 0 {
        return Ok(&mut []);
    }
    // SAFETY: as above.
    Ok(unsafe { std::slice::from_raw_parts_mut(tensor.data.cast(), tensor.numel() as usize) })
}

pub(super) fn check_aligned<T>(operand: &str, tensor: &TensorRef) -> Result<()> {
    if !tensor.data.cast::<T>().is_aligned() {
        contract!("{operand}: expected data aligned to {} bytes, got {:p}", align_of::<T>(), tensor.data);
    }
    Ok(())
}

/// A new contiguous tensor of `like`'s package.
pub(super) fn new_tensor<'py>(
    like: (&Bound<'py, PyAny>, &TensorRef),
    shape: &[i64],
    elem: Elem,
) -> Result<(Bound<'py, PyAny>, TensorRef)> {
    let object = tensor::empty(like.0, like.1, shape, elem)?;
    let borrowed = TensorRef::borrow("out", &object)?;
    Ok((object, borrowed))
}

/// The dimensions before the last `trailing` ones.
pub(super) fn leading<'a>(operand: &str, tensor: &'a TensorRef, trailing: usize, expected: &str) -> Result<&'a [i64]> {
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

fn matrices(leading: &[i64], rows: i64, columns: i64) -> Matrices {
    Matrices { count: leading.iter().product::<i64>() as usize, rows: rows as usize, columns: columns as usize }
}

pub(super) fn check_multiple(operand: &str, dimension: usize, name: &str, got: i64, multiple: i64) -> Result<()> {
    if got % multiple != 0 {
        contract!("{operand}: dimension {dimension} \"{name}\": expected a multiple of {multiple}, got {got}");
    }
    Ok(())
}

/// MXFP4 of bf16, f16 or fp32 x [..., K], K a multiple of 32, on CPU: (codes uint8 [..., K / 2], scales uint8 E8M0 [..., K / 32]).
///
/// Two e2m1 elements a byte, the low nibble first; one scale 2^(byte - 127) for 32 of them. Elements are rounded to nearest, ties to even,
/// and saturate at 6 scales. rounding "up": 2^ceil(log2(amax / 6)), which clips nothing (triton_kernels' ROUND_UP, its default);
/// "down": 2^(floor(log2(amax)) - 2), the rule of the OCP Microscaling Formats specification 1.0, section 6.3 (ROUND_DOWN).
/// Bits are those of triton_kernels' downcast_to_mxfp_torch, also where x is not finite: then "down" marks the block with the scale 255
/// (NaN), and so does "up" for infinity; for NaN, "up" gives the scale 0.
#[pyfunction]
#[pyo3(signature = (x, *, rounding="up"))]
pub fn quantize_mxfp4<'py>(x: &Bound<'py, PyAny>, rounding: &str) -> PyResult<Pair<'py>> {
    let py = x.py();
    guard(|| {
        let rounding = match rounding {
            "up" => Rounding::Up,
            "down" => Rounding::Down,
            other => contract!("rounding: expected \"up\" or \"down\", got {other:?}"),
        };
        let from = borrow_host("x", x)?;
        let lead = leading("x", &from, 1, "K")?;
        let k = from.shape()[lead.len()];
        Contract::new().check("x", &from, &dims(lead, &[Dim::Named("K")]), &[Elem::Bf16, Elem::F16, Elem::F32])?;
        check_multiple("x", lead.len(), "K", k, BLOCK)?;
        let (codes_object, codes) = new_tensor((x, &from), &shape(lead, &[k / 2]), Elem::U8)?;
        let (scales_object, scales) = new_tensor((x, &from), &shape(lead, &[k / BLOCK]), Elem::U8)?;
        // SAFETY: checked against these types above; the outputs are new.
        unsafe {
            let outputs = (elements_mut("codes", &codes)?, elements_mut("scales", &scales)?);
            match from.elem {
                Elem::Bf16 => quantize::<bf16>(py, elements("x", &from)?, rounding, outputs),
                Elem::F16 => quantize::<f16>(py, elements("x", &from)?, rounding, outputs),
                _ => quantize::<f32>(py, elements("x", &from)?, rounding, outputs),
            }
        }
        Ok((codes_object, scales_object))
    })
}

fn quantize<T: Float>(py: Python<'_>, x: &[T], rounding: Rounding, (codes, scales): (&mut [u8], &mut [u8])) {
    py.detach(|| mxfp4::quantize(x, rounding, codes, scales));
}

/// The dtype [..., K] of MXFP4 codes uint8 [..., K / 2] and scales uint8 or float8_e8m0fnu [..., K / 32], on CPU.
///
/// dtype: "float32", "float16" or "bfloat16", or the dtype itself. Element times scale, rounded once, saturated at the largest finite
/// value of the dtype. A scale byte b is 2^(b - 127), 0 included, and 255 makes its 32 elements NaN (OCP Microscaling Formats 1.0).
/// Bits are those of triton_kernels' upcast_from_mxfp_torch for the bytes 1 to 254; it reads 0 as 0.0, and 255 as infinity.
#[pyfunction]
#[pyo3(signature = (codes, scales, dtype=None))]
pub fn dequantize_mxfp4<'py>(
    codes: &Bound<'py, PyAny>,
    scales: &Bound<'py, PyAny>,
    dtype: Option<&Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyAny>> {
    let py = codes.py();
    guard(|| {
        let (from, from_scales) = (borrow_host("codes", codes)?, borrow_host("scales", scales)?);
        let elem = dtype.map_or(Ok(Elem::F32), float_dtype)?;
        if elem == Elem::Bf16 && from.origin == tensor::Origin::Other {
            contract!("dtype: expected float32 or float16 for numpy arrays, got bfloat16, which numpy does not have");
        }
        let lead = leading("codes", &from, 1, "K / 2")?;
        let bytes = from.shape()[lead.len()];
        let mut contract = Contract::new();
        contract.check("codes", &from, &dims(lead, &[Dim::Named("K / 2")]), &[Elem::U8])?;
        check_multiple("codes", lead.len(), "K / 2", bytes, BLOCK / 2)?;
        let groups = Dim::Is("K / 32", bytes * 2 / BLOCK);
        contract.check("scales", &from_scales, &dims(lead, &[groups]), &E8M0)?;
        let (object, out) = new_tensor((codes, &from), &shape(lead, &[bytes * 2]), elem)?;
        // SAFETY: checked against these types above; the output is new.
        unsafe {
            let inputs = (elements("codes", &from)?, elements("scales", &from_scales)?);
            match elem {
                Elem::Bf16 => dequantize::<bf16>(py, inputs, elements_mut("out", &out)?),
                Elem::F16 => dequantize::<f16>(py, inputs, elements_mut("out", &out)?),
                _ => dequantize::<f32>(py, inputs, elements_mut("out", &out)?),
            }
        }
        Ok(object)
    })
}

fn dequantize<T: Float>(py: Python<'_>, (codes, scales): (&[u8], &[u8]), out: &mut [T]) {
    py.detach(|| mxfp4::dequantize(codes, scales, out));
}

/// From a name, a torch.dtype, a numpy.dtype or a numpy scalar type.
fn float_dtype(dtype: &Bound<'_, PyAny>) -> Result<Elem> {
    let name = match dtype.getattr_opt("__name__")? {
        Some(name) => name.to_string(),
        None => dtype.to_string(),
    };
    match name.strip_prefix("torch.").unwrap_or(&name) {
        "float32" => Ok(Elem::F32),
        "float16" => Ok(Elem::F16),
        "bfloat16" => Ok(Elem::Bf16),
        other => contract!("dtype: expected float32, float16 or bfloat16, got {other}"),
    }
}

fn check_num_warps(num_warps: i64) -> Result<()> {
    if !(1..=32).contains(&num_warps) || num_warps.count_ones() != 1 {
        contract!("num_warps: expected a power of two from 1 to 32, got {num_warps}");
    }
    Ok(())
}

/// Checkpoint MXFP4 weights (codes uint8 [..., R, K / 2], scales uint8 [..., R, G], G >= K / 32) as triton_kernels holds them on Hopper:
/// (values uint8 [..., 4 ceil64(K / 2), R' / 4], scales uint8 [..., 32 ceil2(G), R'' / 32]), each contiguous in its last dimension but one.
///
/// HopperMXValueLayout (mma_version 3) and HopperMXScaleLayout along K. R' is R rounded up to row_multiple: 64 in triton_kernels 3.6
/// (sglang-kernel 0.4.2), 256 in 3.8 (0.4.10); R'' is R rounded up to 32 num_warps. Padding is 0.
#[pyfunction]
#[pyo3(signature = (codes, scales, *, num_warps=8, row_multiple=64))]
pub fn swizzle_hopper_mxfp4<'py>(
    codes: &Bound<'py, PyAny>,
    scales: &Bound<'py, PyAny>,
    num_warps: i64,
    row_multiple: i64,
) -> PyResult<Pair<'py>> {
    let py = codes.py();
    guard(|| {
        let (from, from_scales) = (borrow_host("codes", codes)?, borrow_host("scales", scales)?);
        let lead = leading("codes", &from, 2, "rows, K / 2")?;
        let (rows, bytes) = (from.shape()[lead.len()], from.shape()[lead.len() + 1]);
        let mut contract = Contract::new();
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
        let like = (codes, &from);
        let (values_object, to) = new_tensor(like, &stored(&padded, 4), Elem::U8)?;
        let (scales_object, to_scales) = new_tensor(like, &stored(&padded_scales, 32), Elem::U8)?;
        // SAFETY: bytes of contiguous tensors; the outputs are new.
        unsafe {
            let (from, to) = (elements("codes", &from)?, elements_mut("values", &to)?);
            let (from_scales, to_scales) = (elements("scales", &from_scales)?, elements_mut("scales", &to_scales)?);
            py.detach(|| {
                hopper::swizzle_values(from, plain, to, padded);
                hopper::swizzle_scales(from_scales, plain_scales, to_scales, padded_scales, num_warps as usize);
            });
        }
        let transpose = |object: Bound<'py, PyAny>| object.call_method1("swapaxes", (-2, -1));
        Ok((transpose(values_object)?, transpose(scales_object)?))
    })
}

/// A tensor as triton_kernels stores it, transposed: its shape must be [leading, folded rows, row length].
fn borrow_swizzled(operand: &'static str, object: &Bound<'_, PyAny>) -> Result<TensorRef> {
    let tensor = borrow_host(operand, object)?;
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

/// The inverse of swizzle_hopper_mxfp4: (codes uint8 [..., rows, columns / 2], scales uint8 [..., rows, columns / 32]), the checkpoint's form.
///
/// values and scales are the `storage.data` of triton_kernels' weight and weight scale, with its strides; rows, columns (K) are the sizes
/// of the weight without padding (the last and the last but one of its `shape`), num_warps that of the scale's layout. Any row_multiple.
#[pyfunction]
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
        let (from, from_scales) = (borrow_swizzled("values", values)?, borrow_swizzled("scales", scales)?);
        check_num_warps(num_warps)?;
        if rows < 0 || columns < 0 || columns % BLOCK != 0 {
            contract!(
                "rows, columns: expected sizes of the weight, columns a multiple of {BLOCK}, got {rows}, {columns}"
            );
        }
        let lead = leading("values", &from, 2, "K, rows")?;
        let mut contract = Contract::new();
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
        let like = (values, &from);
        let (codes_object, to) = new_tensor(like, &shape(lead, &[rows, columns / 2]), Elem::U8)?;
        let (scales_object, to_scales) = new_tensor(like, &shape(lead, &[rows, groups]), Elem::U8)?;
        // SAFETY: bytes of tensors that are contiguous as transposed; the outputs are new.
        unsafe {
            let (from, to) = (elements("values", &from)?, elements_mut("codes", &to)?);
            let (from_scales, to_scales) = (elements("scales", &from_scales)?, elements_mut("scales", &to_scales)?);
            py.detach(|| {
                hopper::unswizzle_values(from, padded, to, plain);
                hopper::unswizzle_scales(from_scales, padded_scales, to_scales, plain_scales, num_warps as usize);
            });
        }
        Ok((codes_object, scales_object))
    })
}

/// Scales of one matrix [rows, groups] as flashinfer shapes them.
fn folded(release: Release, rows: i64, groups: i64) -> Vec<i64> {
    let (kept, folded) = (cutlass::GROUPS as i64, cutlass::FOLDED_ROWS as i64);
    match release {
        Release::V0_6 => vec![groups / kept, rows * kept],
        Release::V0_7 => vec![rows / folded, groups / kept, 16, 16],
    }
}

fn check_sm90(codes: &TensorRef, lead: &[i64], release: Release) -> Result<(i64, i64)> {
    let (rows, bytes) = (codes.shape()[lead.len()], codes.shape()[lead.len() + 1]);
    let row_multiple = match release {
        Release::V0_6 => cutlass::ROWS,
        Release::V0_7 => cutlass::FOLDED_ROWS,
    };
    check_multiple("codes", lead.len(), "rows", rows, row_multiple as i64)?;
    check_multiple("codes", lead.len() + 1, "K / 2", bytes, cutlass::GROUPS as i64 * BLOCK / 2)?;
    Ok((rows, bytes))
}

/// Checkpoint MXFP4 weights (codes uint8 [..., R, K / 2], scales uint8 [..., R, K / 32]) as flashinfer's CUTLASS MoE for Hopper reads them:
/// (codes uint8 [..., R, K / 2], scales), the results of interleave_moe_weights_for_sm90_mixed_gemm ("fp4") and
/// interleave_moe_scales_for_sm90_mixed_gemm.
///
/// flashinfer "0.6": scales [..., K / 128, 4 R], R a multiple of 16; "0.7": scales [..., R / 64, K / 128, 16, 16], R a multiple of 64.
/// K is a multiple of 128. Rows keep their order: flashinfer wants [up; gate].
#[pyfunction]
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
        let (from, from_scales) = (borrow_host("codes", codes)?, borrow_host("scales", scales)?);
        let lead = leading("codes", &from, 2, "rows, K / 2")?;
        let mut contract = Contract::new();
        contract.check("codes", &from, &dims(lead, &[Dim::Named("rows"), Dim::Named("K / 2")]), &[Elem::U8])?;
        let (rows, bytes) = check_sm90(&from, lead, release)?;
        let groups = bytes * 2 / BLOCK;
        contract.check("scales", &from_scales, &dims(lead, &[Dim::Named("rows"), Dim::Is("K / 32", groups)]), &E8M0)?;
        let like = (codes, &from);
        let (codes_object, to) = new_tensor(like, from.shape(), Elem::U8)?;
        let (scales_object, to_scales) = new_tensor(like, &shape(lead, &folded(release, rows, groups)), Elem::U8)?;
        // SAFETY: bytes of contiguous tensors; the outputs are new.
        unsafe {
            let (from, to) = (elements("codes", &from)?, elements_mut("codes", &to)?);
            let (from_scales, to_scales) = (elements("scales", &from_scales)?, elements_mut("scales", &to_scales)?);
            py.detach(|| {
                cutlass::interleave_values(release, from, to, matrices(lead, rows, bytes));
                cutlass::interleave_scales(release, from_scales, to_scales, matrices(lead, rows, groups));
            });
        }
        Ok((codes_object, scales_object))
    })
}

/// The inverse of interleave_sm90_mxfp4: (codes uint8 [..., R, K / 2], scales uint8 [..., R, K / 32]), the checkpoint's form.
///
/// Which flashinfer is told by the scales' dimensions: as many as the codes have (0.6), or two more (0.7). Rows keep their order, [up; gate],
/// and the padding that was added before stays.
#[pyfunction]
#[pyo3(signature = (codes, scales))]
pub fn deinterleave_sm90_mxfp4<'py>(codes: &Bound<'py, PyAny>, scales: &Bound<'py, PyAny>) -> PyResult<Pair<'py>> {
    let py = codes.py();
    guard(|| {
        let (from, from_scales) = (borrow_host("codes", codes)?, borrow_host("scales", scales)?);
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
        let mut contract = Contract::new();
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
        let like = (codes, &from);
        let (codes_object, to) = new_tensor(like, from.shape(), Elem::U8)?;
        let (scales_object, to_scales) = new_tensor(like, &shape(lead, &[rows, groups]), Elem::U8)?;
        // SAFETY: bytes of contiguous tensors; the outputs are new.
        unsafe {
            let (from, to) = (elements("codes", &from)?, elements_mut("codes", &to)?);
            let (from_scales, to_scales) = (elements("scales", &from_scales)?, elements_mut("scales", &to_scales)?);
            py.detach(|| {
                cutlass::deinterleave_values(release, from, to, matrices(lead, rows, bytes));
                cutlass::deinterleave_scales(release, from_scales, to_scales, matrices(lead, rows, groups));
            });
        }
        Ok((codes_object, scales_object))
    })
}
