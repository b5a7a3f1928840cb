//! Block scales that are given as fp32 powers of two. They become E8M0 bytes when weights are loaded.

use crate::contract;
use crate::device::gpu;
use crate::error::Result;
use crate::kernel::Stream;
use crate::parallel::*;
use crate::params::ScaleBytesParams;
use crate::quant::blocks::e8m0;
use crate::quant::packed;
use crate::tensor::{self, Borrowed, Checked, Contract, Dim, Elem, Place, View};
use pyo3::prelude::*;

const OP: &str = "ExpertWeights: scales";

/// Borrows block scales. fp32 powers of two become a new tensor of E8M0 bytes.
pub fn borrow_scale<'py>(
    operand: &'static str,
    object: &Bound<'py, PyAny>,
    contract: &mut Contract<'_>,
    in_place: bool,
) -> Result<Borrowed<'py>> {
    let elem = tensor::describe(operand, object)?.elem;
    if elem != Elem::F32 {
        return if in_place { contract.output(operand, object) } else { contract.input(operand, object) };
    }
    let given = contract.input(operand, object)?;
    let dims = ["experts", "rows", "blocks"].map(Dim::Named);
    Contract::new().check(operand, &given, &dims, &[Elem::F32])?;
    let made = contract.new_output(operand, &given, given.shape(), Elem::U8)?;
    let wrong = match given.place {
        _ if given.numel() == 0 => None,
        Place::Cpu => scale_bytes(object.py(), &contract.finish()?, &given, &made)?,
        Place::Cuda(ordinal) => scale_bytes_on_cuda(ordinal, contract, &given, &made)?,
    };
    if let Some((wrong, scale)) = wrong {
        let [_, rows, blocks] = [0, 1, 2].map(|i| given.shape()[i] as usize);
        let place = [wrong / (rows * blocks), wrong / blocks % rows, wrong % blocks];
        contract!("{operand}: expected powers of two from 2^-127 to 2^127, got {scale:e} at {place:?}");
    }
    Ok(made)
}

/// Writes the bytes. Returns the first scale that has no byte, and its index.
fn scale_bytes(py: Python<'_>, checked: &Checked<'_>, given: &View, made: &View) -> Result<Option<(usize, f32)>> {
    // SAFETY: both are contiguous tensors of as many elements, and nobody else has the new one.
    let (scales, out) = unsafe {
        let count = given.numel() as usize;
        (std::slice::from_raw_parts(given.data.cast::<f32>(), count), std::slice::from_raw_parts_mut(made.data, count))
    };
    const CHUNK: usize = 1 << 16;
    let wrong = checked.on_cpu(py, || {
        out.par_chunks_mut(CHUNK).zip(scales.par_chunks(CHUNK)).enumerate().find_map_first(|(chunk, (out, scales))| {
            let mut wrong = None;
            for (i, (out, &scale)) in out.iter_mut().zip(scales).enumerate() {
                match e8m0(scale) {
                    Some(byte) => *out = byte,
                    None => wrong = wrong.or(Some(chunk * CHUNK + i)),
                }
            }
            wrong
        })
    })?;
    Ok(wrong.map(|wrong| (wrong, scales[wrong])))
}

/// Writes the bytes on the GPU, and waits for it, because a wrong scale must be an error before the weights are used.
fn scale_bytes_on_cuda(
    ordinal: i32,
    contract: &mut Contract<'_>,
    given: &Borrowed<'_>,
    made: &View,
) -> Result<Option<(usize, f32)>> {
    let flag = contract.new_output("flag", given, &[1], Elem::I64)?;
    let (object, flag_object) = (given.object(), flag.object());
    flag_object.call_method1("fill_", (-1,))?;
    let stream = Stream::new(gpu(ordinal)?, given.current_stream(object.py())?, &contract.finish()?)?;
    let params = ScaleBytesParams {
        scales: given.data.cast(),
        bytes: made.data,
        count: given.numel(),
        first_wrong: flag.data.cast(),
    };
    packed::launch_scale_bytes(&stream, OP, &params)?;
    let wrong: i64 = flag_object.call_method0("item")?.extract()?;
    let Ok(wrong) = usize::try_from(wrong) else { return Ok(None) };
    let scale = object.call_method1("reshape", (-1,))?.get_item(wrong)?.call_method0("item")?.extract()?;
    Ok(Some((wrong, scale)))
}
