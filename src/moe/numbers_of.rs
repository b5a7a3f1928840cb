//! Numbers of experts that are read at load: one for all experts, one for each expert, or one for each part of an expert.

use crate::contract;
use crate::error::Result;
use crate::python;
use crate::tensor::{Contract, Elem, Place};
use pyo3::prelude::*;
use std::sync::Arc;

/// fp32 [E, parts], made from a number, or from an fp32 tensor on the CPU with one element, [E] or [E, parts].
pub fn numbers_of(operand: &'static str, object: &Bound<'_, PyAny>, experts: i64, parts: i64) -> Result<Arc<[f32]>> {
    let count = (experts * parts) as usize;
    if !object.hasattr("__dlpack__")? {
        let number: f32 = python::extract(operand, object)?;
        return Ok(vec![number; count].into());
    }
    let given = Contract::new().input(operand, object)?;
    if given.elem != Elem::F32 || given.place != Place::Cpu || !given.contiguous() {
        contract!("{operand}: expected contiguous float32 on the CPU, got {} on {}", given.elem, given.place);
    }
    if !given.data.cast::<f32>().is_aligned() {
        contract!("{operand}: must be aligned to 4 bytes, got address {:p}", given.data);
    }
    let values: &[f32] = match given.numel() {
        0 => &[],
        // SAFETY: the tensor was checked above: it is contiguous, aligned fp32 on the host.
        numel => unsafe { std::slice::from_raw_parts(given.data.cast(), numel as usize) },
    };
    Ok(match given.shape() {
        &[] | &[1] => vec![values[0]; count].into(),
        &[e] if e == experts => values.iter().flat_map(|&value| (0..parts).map(move |_| value)).collect(),
        &[e, p] if (e, p) == (experts, parts) => values.into(),
        shape => {
            let each = if parts > 1 { format!(" or [{experts}, {parts}] (gate, up)") } else { String::new() };
            contract!("{operand}: expected one number, [{experts}]{each}, got shape {shape:?}")
        }
    })
}
