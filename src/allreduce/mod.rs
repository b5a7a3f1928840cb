//! `allreduce_fusion`: all-reduce + residual + RMSNorm + quantisation. GPUs speak `protocol.rs` (`gpu.rs`, csrc/allreduce/); CPU tensors
//! exchange bytes through their process group (python/oxmoe/allreduce/fusion.py) and are added here.

pub mod gpu;
mod memory;
#[cfg(test)]
mod model;
mod operands;
mod pattern;
pub mod plan;
pub mod protocol;

use crate::contract;
use crate::cpu;
use crate::error::{guard, try_filled, Result};
use crate::params::Dtype;
use crate::stats;
use crate::tensor::{Borrowed, Contract, Elem, Place};
use operands::Operands;
use protocol::{Layout, Shape, CHUNK_BYTES};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

#[doc = crate::help!("allreduce_message")]
#[pyfunction(crate = "crate::python")]
pub fn allreduce_message<'py>(py: Python<'py>, operands: &Bound<'py, PyAny>) -> PyResult<(u64, Bound<'py, PyAny>)> {
    guard(|| {
        let operands = Operands::of(operands)?;
        let (checked, mut contract) = operands.check()?;
        checked.on_cpu()?;
        let word = checked.shape.word();
        let Some((contribution, out)) = checked.contribution(&mut contract)? else {
            return Ok((word, operands.input.clone()));
        };
        let dtype = checked.shape.dtype;
        // SAFETY: shapes and row numbers were checked, `out` is new.
        contract.finish()?.on_cpu(py, || unsafe { cpu::contribute(&contribution, dtype) })?;
        Ok((word, out))
    })
}

#[doc = crate::help!("allreduce_finish")]
#[pyfunction(crate = "crate::python")]
pub fn allreduce_finish<'py>(
    py: Python<'py>,
    operands: &Bound<'py, PyAny>,
    messages: Vec<Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyAny>> {
    guard(|| {
        let operands = Operands::of(operands)?;
        let (checked, mut contract) = operands.check()?;
        checked.on_cpu()?;
        let dtype = checked.shape.dtype;
        let bytes = checked.bytes();
        let mut kept = Vec::with_capacity(messages.len());
        for message in &messages {
            kept.push(Message::read(message, bytes, &mut contract)?);
        }
        if kept.is_empty() {
            contract!("messages: expected one of each rank, got none");
        }
        let (rows, result) = checked.rows(kept.iter().map(Message::data).collect())?;
        // SAFETY: every tensor was checked against the shape, outputs against each other and against inputs.
        contract.finish()?.on_cpu(py, || unsafe { cpu::reduce_rows(&rows, dtype) })?;
        stats::count(stats::Call::AllReduceFusion, checked.shape.tokens.into());
        Ok(result)
    })
}

/// The bytes of one rank, aligned for every dtype.
enum Message<'py> {
    Tensor(Borrowed<'py>),
    Copy(Vec<u64>),
}

impl<'py> Message<'py> {
    fn read(object: &Bound<'py, PyAny>, bytes: usize, contract: &mut Contract<'_>) -> Result<Message<'py>> {
        let copy = |from: *const u8| {
            let mut copy: Vec<u64> = try_filled(bytes.div_ceil(8), "an aligned copy of a message")?;
            // SAFETY: both callers have checked that `from` has `bytes` bytes.
            unsafe { std::ptr::copy_nonoverlapping(from, copy.as_mut_ptr().cast::<u8>(), bytes) };
            Ok(Message::Copy(copy))
        };
        if let Ok(raw) = object.cast::<PyBytes>() {
            if raw.as_bytes().len() != bytes {
                contract!("messages: expected {bytes} bytes of each rank, got {}", raw.as_bytes().len());
            }
            return copy(raw.as_bytes().as_ptr());
        }
        let tensor = contract.input("messages", object)?;
        if tensor.bytes() != bytes || tensor.place != Place::Cpu || !tensor.contiguous() {
            contract!("messages: expected {bytes} contiguous bytes on cpu, got {} on {}", tensor.bytes(), tensor.place);
        }
        if tensor.data.align_offset(8) == 0 {
            return Ok(Message::Tensor(tensor));
        }
        copy(tensor.data)
    }

    fn data(&self) -> *const u8 {
        match self {
            Message::Tensor(tensor) => tensor.data,
            Message::Copy(words) => words.as_ptr().cast(),
        }
    }
}

#[doc = crate::help!("allreduce_shape")]
#[pyfunction(crate = "crate::python")]
pub fn allreduce_shape(word: u64) -> String {
    let Shape { pattern, dtype, tokens, hidden } = Shape::from_word(word);
    let name = pattern::of(pattern.into()).map_or("unknown", |p| p.name);
    let dtype = [Elem::F32, Elem::F16, Elem::Bf16].into_iter().find(|e| e.dtype() == Some(dtype));
    let dtype = dtype.map_or("unknown".to_string(), |e| e.to_string());
    format!("pattern {name} of {dtype} [{tokens}, {hidden}]")
}

#[doc = crate::help!("allreduce_bytes")]
#[pyfunction(crate = "crate::python")]
#[pyo3(signature = (world_size, max_token_num, hidden_dim, dtype, *, device="cpu", force_oneshot_support=false))]
pub fn allreduce_bytes(
    world_size: i64,
    max_token_num: i64,
    hidden_dim: i64,
    dtype: &str,
    device: &str,
    force_oneshot_support: bool,
) -> PyResult<u64> {
    guard(|| {
        let elem = match dtype {
            "bfloat16" => Elem::Bf16,
            "float16" => Elem::F16,
            "float32" => Elem::F32,
            other => contract!("dtype: expected bfloat16, float16 or float32, got {other}"),
        };
        if !(1..=protocol::MAX_RANKS as i64).contains(&world_size) {
            contract!("world_size: expected 1 to {}, got {world_size}", protocol::MAX_RANKS);
        }
        if !(0..=u32::MAX as i64).contains(&max_token_num) {
            contract!("max_token_num: expected 0 to {}, got {max_token_num}", u32::MAX);
        }
        operands::check_hidden("hidden_dim", hidden_dim, elem)?;
        let bytes = (max_token_num as u64).checked_mul(hidden_dim as u64 * elem.bytes() as u64);
        let Some(bytes) = bytes.filter(|&bytes| bytes <= i64::MAX as u64 / 64) else {
            contract!("max_token_num: {max_token_num} rows of {hidden_dim} are more than a workspace can hold");
        };
        debug_assert!(bytes % CHUNK_BYTES == 0);
        match device {
            "cpu" => Ok(bytes * (world_size as u64 - 1)),
            "cuda" => Ok(Layout::new(bytes, world_size as usize, force_oneshot_support).bytes()),
            other => contract!("device: expected \"cpu\" or \"cuda\", got {other:?}"),
        }
    })
}

/// The dtype of a compute element.
fn dtype_of(elem: Elem) -> Dtype {
    elem.dtype().unwrap_or(Dtype::F32)
}
