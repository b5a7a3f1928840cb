//! The memory of a torch tensor: a storage (c10::StorageImpl), its address and its size.
//!
//! A tensor's address alone does not say whether there is memory: `resize_` of a storage frees or shrinks it under every tensor that has
//! it. Asking torch for the storage, its address and its size takes 0.2 us for a tensor, and a call of the layer has several. So they are
//! read from the words of torch's objects. The positions of these words are found by comparing objects with what torch reports about them.
//! If that leaves any doubt, torch is asked each time.

use crate::error::Result;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

/// An address and a number of bytes there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Memory {
    pub address: usize,
    pub bytes: usize,
}

impl Memory {
    /// The memory of a torch tensor's storage. None if the tensor has no storage that can be asked. The address is 0 if there is no memory,
    /// as for a fake tensor.
    pub fn of_tensor(tensor: &Bound<'_, PyAny>) -> Result<Option<Memory>> {
        static PLACES: PyOnceLock<Option<[usize; 2]>> = PyOnceLock::new();
        let py = tensor.py();
        // An error in the search leaves doubt, so torch is asked each time.
        let words = found(py, &PLACES, find_storage);
        if let (Some([tensor_word, storage_word]), Some(places)) = (words, storage_fields(py)) {
            let storage = word(word(tensor.as_ptr() as usize, tensor_word), storage_word);
            if storage != 0 {
                return Ok(Some(Fields::at(storage, places).read()));
            }
        }
        let Some(method) = tensor.getattr_opt(intern!(py, "untyped_storage"))? else { return Ok(None) };
        let storage = method.call0();
        // A tensor without memory raises an error or reports address 0.
        let memory = storage.map_err(Into::into).and_then(|storage| Memory::of(&storage));
        Ok(Some(memory.unwrap_or(Memory { address: 0, bytes: 0 })))
    }

    /// The memory of a storage, as torch reports it.
    pub fn of(storage: &Bound<'_, PyAny>) -> Result<Memory> {
        let py = storage.py();
        Ok(Memory { address: storage.call_method0(intern!(py, "data_ptr"))?.extract()?, bytes: storage.len()? })
    }

    /// Whether all bytes from the first address to the second one lie in this memory.
    pub fn holds(&self, (start, end): (usize, usize)) -> bool {
        self.address <= start && end <= self.address.saturating_add(self.bytes)
    }
}

/// The two fields of a storage that hold its address and its size.
#[derive(Debug)]
pub(super) struct Fields {
    address: usize,
    bytes: usize,
}

impl Fields {
    pub fn of(storage: &Bound<'_, PyAny>) -> Result<Option<Fields>> {
        let Some(places) = storage_fields(storage.py()) else { return Ok(None) };
        Ok(Some(Fields::at(implementation(storage)?, places)))
    }

    fn at(storage: usize, [address, bytes]: [usize; 2]) -> Fields {
        Fields { address: storage + address * WORD, bytes: storage + bytes * WORD }
    }

    pub fn read(&self) -> Memory {
        Memory { address: word(self.address, 0), bytes: word(self.bytes, 0) }
    }
}

const WORD: usize = size_of::<usize>();
/// Words of a c10::StorageImpl or c10::TensorImpl that are searched. Both objects are larger than this, and the words sought are among
/// these.
const WORDS: usize = 8;

/// The address of the C++ object behind a storage or a tensor.
fn implementation(object: &Bound<'_, PyAny>) -> Result<usize> {
    Ok(object.getattr(intern!(object.py(), "_cdata"))?.extract()?)
}

fn word(start: usize, index: usize) -> usize {
    // SAFETY: this is one of the first words of a torch object. A Python object that we or the caller's frame hold keeps it alive.
    unsafe { AtomicUsize::from_ptr((start + index * WORD) as *mut usize) }.load(Ordering::Relaxed)
}

/// The index of the only word that matched each time.
fn only<const N: usize>(matches: [bool; N]) -> Option<usize> {
    let mut places = (0..N).filter(|&i| matches[i]);
    places.next().filter(|_| places.next().is_none())
}

/// The result of a search, which the first call makes. The search runs before the cell is taken: torch runs a mode's own code, which may call
/// this module again.
fn found<T: Copy + Send + Sync>(
    py: Python<'_>,
    places: &PyOnceLock<Option<T>>,
    find: fn(Python<'_>) -> Result<Option<T>>,
) -> Option<T> {
    if let Some(found) = places.get(py) {
        return *found;
    }
    let found = find(py).unwrap_or_default();
    let _ = places.set(py, found);
    found
}

/// The indices of the words of a storage that are its address and its size: they follow both through four sizes. An allocator's own pointer
/// to the memory stands behind the address, and is the same address for most allocators.
fn storage_fields(py: Python<'_>) -> Option<[usize; 2]> {
    static PLACES: PyOnceLock<Option<[usize; 2]>> = PyOnceLock::new();
    found(py, &PLACES, find_fields)
}

fn find_fields(py: Python<'_>) -> Result<Option<[usize; 2]>> {
    let probe = py.import(intern!(py, "torch"))?.getattr(intern!(py, "UntypedStorage"))?.call1((1111,))?;
    let start = implementation(&probe)?;
    if start == 0 || start % WORD != 0 {
        return Ok(None);
    }
    let (mut addresses, mut sizes) = ([true; WORDS], [true; WORDS]);
    for bytes in [1111usize, 0, 54321, 2222] {
        probe.call_method1(intern!(py, "resize_"), (bytes,))?;
        let now = Memory::of(&probe)?;
        for i in 0..WORDS {
            let found = word(start, i);
            addresses[i] &= found == now.address;
            sizes[i] &= found == now.bytes;
        }
    }
    let address = (0..WORDS).find(|&i| addresses[i]);
    Ok(address.zip(only(sizes)).map(|(address, size)| [address, size]))
}

/// The index of the word of a Python tensor that points to its c10::TensorImpl, and of the word of that object that points to its storage.
/// Both are the same in three tensors.
fn find_storage(py: Python<'_>) -> Result<Option<[usize; 2]>> {
    let torch = py.import(intern!(py, "torch"))?;
    let first = torch.getattr(intern!(py, "empty"))?.call1((6,))?;
    let view = first.get_item(2)?;
    let other = torch.getattr(intern!(py, "empty"))?.call1((3, 4))?;
    let (mut tensors, mut storages) = ([true; WORDS], [true; WORDS]);
    for probe in [&first, &view, &other] {
        let size: usize = probe.get_type().getattr(intern!(py, "__basicsize__"))?.extract()?;
        let (tensor, storage) =
            (implementation(probe)?, implementation(&probe.call_method0(intern!(py, "untyped_storage"))?)?);
        if tensor == 0 || tensor % WORD != 0 || storage == 0 || storage % WORD != 0 {
            return Ok(None);
        }
        for i in 0..WORDS {
            tensors[i] &= (i + 1) * WORD <= size && word(probe.as_ptr() as usize, i) == tensor;
            storages[i] &= word(tensor, i) == storage;
        }
    }
    Ok(only(tensors).zip(only(storages)).map(|(tensor, storage)| [tensor, storage]))
}
