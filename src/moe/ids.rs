//! The check that top-k ids name existing experts. It is always done on CPUs, and on GPUs with OXMOE_CHECK_IDS=1.
//!
//! An id that is not -1 and names no expert is a mistake of the caller: most often ids of all ranks' experts that come without `ep_size`.
//! Kernels skip such a slot, and its token lacks a part of its sum. On a GPU ids must be read back for the check, which waits for the
//! stream; a CUDA graph that is being captured has no ids yet, so such calls are not checked.

use crate::contract;
use crate::device::gpu;
use crate::error::Result;
use crate::kernel::Stream;
use crate::tensor::{Contract, Elem, Place, View};
use pyo3::prelude::*;
use std::sync::OnceLock;

/// Whether ids on GPUs are checked. The variable is read once.
fn on_gpus() -> bool {
    static ASKED: OnceLock<bool> = OnceLock::new();
    *ASKED.get_or_init(|| std::env::var_os("OXMOE_CHECK_IDS").is_some_and(|value| value == "1"))
}

/// The first id that is neither -1 nor one of so many experts, and its index.
fn first_wrong<T: Copy + Into<i64>>(ids: &[T], experts: i64) -> Option<(usize, i64)> {
    let wrong = |id: T| !(-1..experts).contains(&id.into());
    ids.iter().position(|&id| wrong(id)).map(|index| (index, ids[index].into()))
}

/// # Safety
/// `data` has `count` ids of this type, which nobody writes meanwhile.
unsafe fn first_wrong_of(elem: Elem, data: *const u8, count: usize, experts: i64) -> Option<(usize, i64)> {
    if count == 0 {
        return None;
    }
    // SAFETY: the caller's contract.
    unsafe {
        match elem {
            Elem::I64 => first_wrong(std::slice::from_raw_parts(data.cast::<i64>(), count), experts),
            _ => first_wrong(std::slice::from_raw_parts(data.cast::<i32>(), count), experts),
        }
    }
}

/// ValueError if an id is neither -1 nor below `experts`, the number of all ranks' experts (`i64::MAX` if there is no bound).
/// ids: int32 or int64, [tokens, top_k], contiguous.
pub fn check(py: Python<'_>, contract: &Contract<'_>, ids: &View, experts: i64) -> Result<()> {
    let count = ids.numel() as usize;
    let wrong = match ids.place {
        // SAFETY: the tensor has so many ids, and the caller lends it.
        Place::Cpu => unsafe { first_wrong_of(ids.elem, ids.data, count, experts) },
        Place::Cuda(ordinal) if on_gpus() && count > 0 => {
            let stream = Stream::new(gpu(ordinal)?, ids.current_stream(py)?, &contract.finish()?)?;
            if stream.is_capturing()? {
                return Ok(());
            }
            // The copy is aligned for either type of ids.
            let mut copy = vec![0u64; ids.bytes().div_ceil(8)];
            // SAFETY: the bytes are the tensor's, and this vector has at least as many.
            unsafe { stream.read("topk_ids", copy.as_mut_ptr().cast(), ids.data, ids.bytes()) }?;
            // SAFETY: the vector holds the ids that were copied.
            unsafe { first_wrong_of(ids.elem, copy.as_ptr().cast(), count, experts) }
        }
        Place::Cuda(_) => None,
    };
    if let Some((index, id)) = wrong {
        let (token, slot) = (index / ids.shape()[1] as usize, index % ids.shape()[1] as usize);
        if experts == i64::MAX {
            contract!("topk_ids: token {token}, slot {slot}: expected -1 (no expert) or more, got {id}");
        }
        contract!(
            "topk_ids: token {token}, slot {slot}: expected -1 (no expert) or 0 to {}, got {id}; ids of other ranks' experts need ep_size and \
             ep_rank (sort_by_expert: first_expert)",
            experts - 1
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_id_that_is_no_expert() {
        assert_eq!(first_wrong(&[0i32, -1, 6, 5], 7), None);
        assert_eq!(first_wrong(&[0i32, 7, -2], 7), Some((1, 7)));
        assert_eq!(first_wrong(&[-1, i64::MIN], 7), Some((1, i64::MIN)));
        assert_eq!(first_wrong(&[i64::MAX, 0], i64::MAX), Some((0, i64::MAX)));
    }
}
