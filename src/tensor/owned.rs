//! Tensors that outlive a call: weights, scales, biases and the packed forms that a layer made of them.

use super::storage::{Fields, Memory};
use super::{Borrowed, Origin, Span};
use crate::contract;
use crate::error::Result;
use pyo3::intern;
use pyo3::prelude::*;

/// A tensor's storage, kept for as long as this lives.
///
/// torch lets anybody give a tensor object another storage (`.data =`, `set_`, `Module.to`), so keeping the caller's object keeps nothing.
/// Instead this keeps the storage that the object had when it was given. Nobody can own the memory behind a storage: `resize_` and
/// `share_memory_` free or move it under everybody who holds the storage. `unchanged` notices that before a call follows the old address.
#[derive(Debug)]
pub struct Owned {
    span: Span,
    source: Source,
}

#[derive(Debug)]
enum Source {
    /// torch's storage, and the memory that it had.
    Storage { object: Py<PyAny>, fields: Option<Fields>, was: Memory },
    /// Another package's array, and the capsule that it exported. An array that exports its own memory is asked at each call where that
    /// memory is. An array that exports copies has given us a copy.
    Array { object: Py<PyAny>, _exported: Option<Py<PyAny>>, exports_copies: bool, was: Memory },
}

impl Owned {
    /// Keeps the memory that `borrowed` is a view of. `operand` names it in errors.
    pub fn new(operand: &'static str, borrowed: &Borrowed<'_>) -> Result<Owned> {
        let object = borrowed.object();
        let py = object.py();
        let (start, end) = borrowed.extent();
        let span = Span { operand, place: borrowed.place, start, end };
        let storage = object.getattr_opt(intern!(py, "untyped_storage"))?;
        let Some(storage) = storage.filter(|_| borrowed.origin != Origin::Other) else {
            let was = Memory { address: borrowed.data as usize, bytes: borrowed.bytes() };
            let source = Source::Array {
                object: object.clone().unbind(),
                _exported: borrowed._capsule.as_ref().map(|capsule| capsule.0.clone().unbind()),
                exports_copies: Borrowed::borrow(operand, object)?.data as usize != was.address,
                was,
            };
            return Ok(Owned { span, source });
        };
        let storage = storage.call0()?;
        let was = Memory::of(&storage)?;
        // Another thread may have resized the storage between the borrow and this line.
        if !span.is_empty() && !was.holds((start, end)) {
            contract!("{operand}: its storage has {} bytes, which do not hold it", was.bytes);
        }
        let fields = Fields::of(&storage)?.filter(|fields| fields.read() == was);
        Ok(Owned { span, source: Source::Storage { object: storage.unbind(), fields, was } })
    }

    /// The memory that a call may read.
    pub fn span(&self) -> Span {
        self.span
    }

    /// An error if the memory was moved, freed or resized since `new`.
    pub fn unchanged(&self, py: Python<'_>) -> Result<()> {
        let same = match &self.source {
            Source::Storage { fields: Some(fields), was, .. } => fields.read() == *was,
            Source::Storage { object, was, .. } => Memory::of(object.bind(py))? == *was,
            Source::Array { exports_copies: true, .. } => true,
            Source::Array { object, was, .. } => {
                let now = Borrowed::borrow(self.span.operand, object.bind(py))?;
                Memory { address: now.data as usize, bytes: now.bytes() } == *was
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
