//! The workspace of a call.

use crate::contract;
use crate::error::{try_vec, Result};
use crate::tensor::{Borrowed, Contract, Dim, Elem, Place};
use pyo3::prelude::*;

/// A workspace, and the memory that keeps it alive during the call.
pub struct Scratch<'py> {
    pub base: *mut u8,
    _own: Vec<u128>,
    _tensor: Option<Borrowed<'py>>,
}

impl<'py> Scratch<'py> {
    /// The caller's workspace, or a new one for this call.
    pub fn new(
        x: &Borrowed<'py>,
        given: Option<&Bound<'py, PyAny>>,
        contract: &mut Contract<'_>,
        bytes: usize,
    ) -> Result<Scratch<'py>> {
        let Some(object) = given else {
            if x.place == Place::Cpu {
                let mut own = try_vec::<u128>(bytes.div_ceil(16), "the workspace of this call")?;
                return Ok(Scratch { base: own.as_mut_ptr().cast(), _own: own, _tensor: None });
            }
            // torch's caching allocator reuses the block in stream order: letting go of it after the launches is safe.
            let tensor = contract.new_output("workspace", x, &[bytes as i64], Elem::U8)?;
            return Ok(Scratch { base: tensor.data, _own: Vec::new(), _tensor: Some(tensor) });
        };
        let given = contract.output("workspace", object)?;
        contract.check("workspace", &given, &[Dim::Named("bytes")], &[Elem::U8])?;
        if given.bytes() < bytes {
            contract!("workspace: expected at least {bytes} bytes (workspace_bytes), got {}", given.bytes());
        }
        // torch's allocators align to 64 bytes on CPU, and to 512 on GPUs.
        let alignment = if x.place == Place::Cpu { 64 } else { crate::workspace::ALIGNMENT };
        if !(given.data as usize).is_multiple_of(alignment) {
            contract!("workspace: must be {alignment}-byte aligned, got address {:p}", given.data);
        }
        Ok(Scratch { base: given.data, _own: Vec::new(), _tensor: Some(given) })
    }
}
