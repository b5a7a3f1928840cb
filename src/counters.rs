//! Counters of launches that no other launch zeroes before. Such launches are layers with the routing inside, and `moe_masked` if it is one
//! launch. The kernel gets the address of its counters, so its plan does not depend on which counters it has.
//!
//! Launches that may overlap must have different counters, and launches on one workspace follow each other. So counters belong to a
//! workspace. The first workspaces of a device have their counters in one array, which is zero when it is made. Every launch leaves in it
//! what the next launch needs. All further workspaces have their counters inside, and a memset on the launch's stream zeroes them each
//! time.
//!
//! A workspace is known by its address, which may later be the address of another tensor. That is safe: a launch counts for no longer than
//! it writes to its workspace. So a launch that may write to a freed workspace's memory may also count in its counters. torch's allocator
//! gives a freed block to the stream that it was allocated on, behind the launches there. It gives the block to another stream after events
//! of every stream that `record_stream` named, or once the device was synchronised (`cudaFree`). Memory of a CUDA graph stays the graph's,
//! and graphs that share a pool may not be replayed at the same time. Two live workspaces have two addresses.

use crate::device::{cuda_error, Current, Gpu, MAX_DEVICES};
use crate::error::Result;
use crate::kernel::Stream;
use crate::variants::Variant;
use cudarc::driver::result;
use std::fmt::Display;
use std::sync::{Mutex, OnceLock};

/// Number of workspaces of a device that have a part of the array.
const WORKSPACES: usize = 256;
/// Most experts of a launch that counts by expert.
pub const MOST_EXPERTS: i64 = 128;
/// Bytes of a workspace's part of the array, which holds both kinds of counters, apart from each other.
const PART: usize = 128 + 640;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Counts {
    /// `LayerCounters` of csrc/moe/layer_parts.cuh.
    Layer,
    /// `PairCounters` of csrc/moe/pair_schedule_sm90.cuh.
    Pair { experts: i64 },
}

impl Counts {
    /// The number of i32 counters.
    pub const fn count(self) -> usize {
        match self {
            Counts::Layer => 2,
            Counts::Pair { experts } => 2 + experts as usize,
        }
    }

    /// The offset of the counters in a part, in bytes.
    const fn offset(self) -> usize {
        match self {
            Counts::Layer => 0,
            Counts::Pair { .. } => 128,
        }
    }
}

const _: () = assert!(128 + 4 * Counts::Pair { experts: MOST_EXPERTS }.count() <= PART);

/// (device, address of the workspace), in the order of the parts that were handed out.
static TAKEN: Mutex<Vec<(i32, usize)>> = Mutex::new(Vec::new());

/// The number of a workspace's part, which is the same at every call. None if all parts of the device are taken.
fn part(device: i32, workspace: usize) -> Option<usize> {
    let mut taken = TAKEN.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let mut number = 0;
    for &(_, base) in taken.iter().filter(|(other, _)| *other == device) {
        if base == workspace {
            return Some(number);
        }
        number += 1;
    }
    if number == WORKSPACES {
        return None;
    }
    taken.push((device, workspace));
    Some(number)
}

/// Makes the device's array if one of these kernels counts. It is called when weights are loaded, so that no call inside a stream capture
/// has to make the array.
pub fn prepare(gpu: &Gpu, variants: &[Variant]) -> Result<()> {
    if variants.iter().any(Variant::counts) {
        let _current = Current::new(gpu)?;
        array(gpu)?;
    }
    Ok(())
}

/// The address of the device's array. The device's context must be current.
fn array(gpu: &Gpu) -> Result<usize> {
    static ARRAYS: [OnceLock<usize>; MAX_DEVICES] = [const { OnceLock::new() }; MAX_DEVICES];
    static MAKING: Mutex<()> = Mutex::new(());
    let made = &ARRAYS[gpu.ordinal as usize];
    if let Some(&address) = made.get() {
        return Ok(address);
    }
    let _making = MAKING.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    if let Some(&address) = made.get() {
        return Ok(address);
    }
    let bytes = WORKSPACES * PART;
    let failed = |e| cuda_error(format_args!("counters of cuda:{}: {bytes} bytes", gpu.ordinal), e);
    // SAFETY: the memory is new, is zero before anybody gets its address, and is never freed.
    let address = unsafe {
        let address = result::malloc_sync(bytes).map_err(failed)?;
        result::memset_d8_sync(address, 0, bytes).map_err(failed)?;
        result::ctx::synchronize().map_err(failed)?;
        address as usize
    };
    Ok(*made.get_or_init(|| address))
}

/// The counters of the next launch on this stream. `own` is room for them in the workspace.
pub fn of_launch(
    stream: &Stream<'_>,
    op: impl Display,
    counts: Counts,
    workspace: *mut u8,
    own: *mut i32,
) -> Result<*mut i32> {
    let gpu = stream.gpu();
    if let Some(part) = part(gpu.ordinal, workspace as usize) {
        return Ok((array(gpu)? + part * PART + counts.offset()) as *mut i32);
    }
    // SAFETY: this is a range of the workspace, and in stream order all launches before this one have finished with it.
    unsafe { stream.zero(op, own, counts.count()) }?;
    Ok(own)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_workspace_keeps_its_part() {
        assert_eq!((part(900, 64), part(900, 128), part(901, 64), part(900, 64)), (Some(0), Some(1), Some(0), Some(0)));
        for i in 2..WORKSPACES {
            assert_eq!(part(900, 64 * (i + 1)), Some(i));
        }
        assert_eq!((part(900, 1 << 30), part(900, 128)), (None, Some(1)));
    }
}
