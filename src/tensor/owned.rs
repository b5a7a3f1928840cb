//! Tensors that outlive a call: weights, scales, biases and what a layer packed of them.

use super::{exchange, origin_of, Borrowed, Origin, Span};
use crate::contract;
use crate::error::Result;
use pyo3::intern;
use pyo3::prelude::*;

/// A tensor's storage, kept for as long as this lives.
///
/// torch lets anybody give a tensor object another storage (`.data =`, `set_`, `Module.to`), so the caller's object is not enough. An alias
/// of our own (`detach`) has the storage that the caller's object had. What nobody can own is the memory behind a storage: `resize_` and
/// `share_memory_` move or free it under every alias. `unchanged` notices that before a call follows the old address.
#[derive(Debug)]
pub struct Owned {
    span: Span,
    source: Source,
}

#[derive(Debug)]
enum Source {
    /// torch's tensor, an alias of ours, and its storage, whose length is in bytes.
    Torch { alias: Py<PyAny>, storage: Py<PyAny>, address: usize, storage_bytes: usize },
    /// Another package's array and what it exported. One that exports its own memory is asked again at each call where that is; one that
    /// exports copies has given us a copy.
    Array { object: Py<PyAny>, _exported: Option<Py<PyAny>>, exports_copies: bool, address: usize, numel: i64 },
}

impl Owned {
    /// Keeps what `borrowed` is a view of.
    pub fn new(operand: &'static str, borrowed: &Borrowed<'_>) -> Result<Owned> {
        let object = borrowed.object();
        let py = object.py();
        let (start, end) = borrowed.extent();
        let span = Span { operand, place: borrowed.place, start, end };
        let address = borrowed.data as usize;
        if borrowed.origin == Origin::Other {
            let source = Source::Array {
                object: object.clone().unbind(),
                _exported: borrowed._capsule.as_ref().map(|capsule| capsule.0.clone().unbind()),
                exports_copies: Borrowed::borrow(operand, object)?.data as usize != address,
                address,
                numel: borrowed.numel(),
            };
            return Ok(Owned { span, source });
        }
        let alias = object.call_method0(intern!(py, "detach"))?;
        let storage = alias.call_method0(intern!(py, "untyped_storage"))?;
        let storage_bytes = storage.len()?;
        let owned = Source::Torch { alias: alias.unbind(), storage: storage.unbind(), address, storage_bytes };
        let owned = Owned { span, source: owned };
        // The alias was made after the borrow: another thread may have come between.
        owned.unchanged(py)?;
        Ok(owned)
    }

    /// Where the memory is that a call may read.
    pub fn span(&self) -> Span {
        self.span
    }

    /// An error where the storage was moved, freed or resized since.
    pub fn unchanged(&self, py: Python<'_>) -> Result<()> {
        let same = match &self.source {
            Source::Torch { alias, storage, address, storage_bytes } => {
                storage.bind(py).len()? == *storage_bytes && address_of(alias.bind(py))? == *address
            }
            Source::Array { exports_copies: true, .. } => true,
            Source::Array { object, address, numel, .. } => {
                let now = Borrowed::borrow(self.span.operand, object.bind(py))?;
                (now.data as usize, now.numel()) == (*address, *numel)
            }
        };
        if !same {
            let operand = self.span.operand;
            contract!(
                "{operand}: its memory was moved, freed or resized after these ExpertWeights were made (resize_, share_memory_, weight offload); \
                 make new ExpertWeights of the tensors as they are now"
            );
        }
        Ok(())
    }

    /// Whether the span lies inside this tensor.
    pub fn covers(&self, span: &Span) -> bool {
        self.span.place == span.place && self.span.start <= span.start && span.end <= self.span.end
    }
}

/// Where a torch tensor's elements are now.
fn address_of(tensor: &Bound<'_, PyAny>) -> Result<usize> {
    if let Origin::Torch(api) = origin_of(tensor)? {
        let now = exchange("weights", tensor, api)?;
        return Ok((now.data as usize).wrapping_add(now.byte_offset as usize));
    }
    Ok(tensor.call_method0(intern!(tensor.py(), "data_ptr"))?.extract()?)
}
