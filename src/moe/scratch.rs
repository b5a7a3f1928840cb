//! The workspace of a call, and what nothing may be written over.

use super::weights::Layer;
use crate::contract;
use crate::error::Result;
use crate::tensor::{self, Contract, Dim, Elem, Place, TensorRef};
use pyo3::prelude::*;

/// A workspace and what keeps it alive for the call.
pub struct Scratch<'py> {
    pub base: *mut u8,
    /// The caller's: it may overlap nothing that the call reads.
    pub given: Option<TensorRef>,
    _own: Vec<u128>,
    _tensor: Option<Bound<'py, PyAny>>,
}

impl<'py> Scratch<'py> {
    /// The caller's workspace, or one for this call.
    pub fn new(
        (x_object, x): (&Bound<'py, PyAny>, &TensorRef),
        given: Option<&Bound<'py, PyAny>>,
        contract: &mut Contract,
        bytes: usize,
        out: &TensorRef,
    ) -> Result<Scratch<'py>> {
        let Some(object) = given else {
            if x.place == Place::Cpu {
                let mut own = Vec::<u128>::with_capacity(bytes.div_ceil(16));
                return Ok(Scratch { base: own.as_mut_ptr().cast(), given: None, _own: own, _tensor: None });
            }
            // torch's caching allocator reuses the block in stream order: letting go of it after the launches is safe.
            let object = tensor::empty(x_object, x, &[bytes as i64], Elem::U8)?;
            let base = TensorRef::borrow("workspace", &object)?.data;
            return Ok(Scratch { base, given: None, _own: Vec::new(), _tensor: Some(object) });
        };
        let given = TensorRef::borrow("workspace", object)?;
        contract.check("workspace", &given, &[Dim::Named("bytes")], &[Elem::U8])?;
        if given.bytes() < bytes {
            contract!("workspace: expected at least {bytes} bytes (workspace_bytes), got {}", given.bytes());
        }
        // What torch's allocators give: 64 on CPU, 512 on GPUs.
        let alignment = if x.place == Place::Cpu { 64 } else { crate::workspace::ALIGNMENT };
        if !(given.data as usize).is_multiple_of(alignment) {
            contract!("workspace: must be {alignment}-byte aligned, got address {:p}", given.data);
        }
        if given.overlaps(x) || given.overlaps(out) {
            contract!("workspace: overlaps x or out");
        }
        Ok(Scratch { base: given.data, given: Some(given), _own: Vec::new(), _tensor: None })
    }
}

/// An error where what is written shares memory with the experts.
pub fn refuse_weights(layer: &Layer, operand: &str, written: &TensorRef) -> Result<()> {
    let Layer { desc, up, down, .. } = layer;
    for (names, matrix) in [(["w13", "w13_scale"], up), (["w2", "w2_scale"], down)] {
        for (name, (data, bytes)) in names.into_iter().zip(matrix.ranges(desc.experts, desc.dtype)) {
            if bytes > 0 && written.overlaps_range(data, bytes) {
                contract!("{operand}: overlaps {name}");
            }
        }
    }
    Ok(())
}
