//! Tensors that outlive a call: weights, scales, biases and what a layer packed of them.

use super::{Borrowed, Origin, Span};
use crate::contract;
use crate::error::Result;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A tensor's storage, kept for as long as this lives.
///
/// torch lets anybody give a tensor object another storage (`.data =`, `set_`, `Module.to`), so keeping the caller's object keeps nothing. The
/// storage that it had when it was given is kept instead. What nobody can own is the memory behind a storage: `resize_` and `share_memory_`
/// free or move it under everybody who holds the storage. `unchanged` notices that before a call follows the old address.
#[derive(Debug)]
pub struct Owned {
    span: Span,
    source: Source,
}

#[derive(Debug)]
enum Source {
    /// torch's storage, and where its memory was.
    Storage { object: Py<PyAny>, fields: Option<Fields>, was: Memory },
    /// Another package's array and what it exported. One that exports its own memory is asked again at each call where that is; one that
    /// exports copies has given us a copy.
    Array { object: Py<PyAny>, _exported: Option<Py<PyAny>>, exports_copies: bool, was: Memory },
}

/// An address and a number of bytes there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Memory {
    address: usize,
    bytes: usize,
}

impl Owned {
    /// Keeps what `borrowed` is a view of. `operand` names it in errors.
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
        let was = memory_of(&storage)?;
        // Another thread may have come between the borrow and this.
        if !span.is_empty() && !(was.address <= start && end <= was.address + was.bytes) {
            contract!("{operand}: its storage has {} bytes, which do not hold it", was.bytes);
        }
        let fields = Fields::of(&storage)?.filter(|fields| fields.read() == was);
        Ok(Owned { span, source: Source::Storage { object: storage.unbind(), fields, was } })
    }

    /// Where the memory is that a call may read.
    pub fn span(&self) -> Span {
        self.span
    }

    /// An error where the memory was moved, freed or resized since.
    pub fn unchanged(&self, py: Python<'_>) -> Result<()> {
        let same = match &self.source {
            Source::Storage { fields: Some(fields), was, .. } => fields.read() == *was,
            Source::Storage { object, was, .. } => memory_of(object.bind(py))? == *was,
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

/// Where a storage's memory is, as torch says it.
fn memory_of(storage: &Bound<'_, PyAny>) -> Result<Memory> {
    let py = storage.py();
    Ok(Memory { address: storage.call_method0(intern!(py, "data_ptr"))?.extract()?, bytes: storage.len()? })
}

/// The two fields of a storage (c10::StorageImpl) that hold its address and its size.
///
/// Asking torch for both takes 0.1 to 0.2 us a tensor, which would be a tenth of a call of the layer for each of its tensors. Where the fields
/// are is found by looking at a storage while torch resizes it; where that leaves any doubt, torch is asked.
#[derive(Debug)]
struct Fields {
    address: usize,
    bytes: usize,
}

/// Words of a storage that are looked at: its fields are among them, and it is larger.
const WORDS: usize = 8;

impl Fields {
    fn of(storage: &Bound<'_, PyAny>) -> Result<Option<Fields>> {
        static PLACES: PyOnceLock<Option<[usize; 2]>> = PyOnceLock::new();
        let py = storage.py();
        let Some([address, bytes]) = *PLACES.get_or_try_init(py, || find_fields(py))? else { return Ok(None) };
        let start = words_of(storage)?;
        Ok(Some(Fields { address: start + address * size_of::<usize>(), bytes: start + bytes * size_of::<usize>() }))
    }

    fn read(&self) -> Memory {
        Memory { address: word(self.address), bytes: word(self.bytes) }
    }
}

/// The address of the StorageImpl.
fn words_of(storage: &Bound<'_, PyAny>) -> Result<usize> {
    Ok(storage.getattr(intern!(storage.py(), "_cdata"))?.extract()?)
}

fn word(address: usize) -> usize {
    // SAFETY: one of the first words of a StorageImpl that a storage object of ours or of the caller's frame keeps alive.
    unsafe { AtomicUsize::from_ptr(address as *mut usize) }.load(Ordering::Relaxed)
}

/// Which words of a storage are its address and its size: those that follow both through four sizes. An allocator's own pointer to the memory
/// stands behind the address and is the same for most.
fn find_fields(py: Python<'_>) -> Result<Option<[usize; 2]>> {
    let probe = py.import(intern!(py, "torch"))?.getattr(intern!(py, "UntypedStorage"))?.call1((1111,))?;
    let start = words_of(&probe)?;
    if start == 0 || start % size_of::<usize>() != 0 {
        return Ok(None);
    }
    let (mut addresses, mut sizes) = ([true; WORDS], [true; WORDS]);
    for bytes in [1111usize, 0, 54321, 2222] {
        probe.call_method1(intern!(py, "resize_"), (bytes,))?;
        let now = memory_of(&probe)?;
        for i in 0..WORDS {
            let found = word(start + i * size_of::<usize>());
            addresses[i] &= found == now.address;
            sizes[i] &= found == now.bytes;
        }
    }
    let places = |matches: [bool; WORDS]| (0..WORDS).filter(move |&i| matches[i]);
    let size = places(sizes).next().filter(|_| places(sizes).count() == 1);
    Ok(places(addresses).next().zip(size).map(|(address, size)| [address, size]))
}
