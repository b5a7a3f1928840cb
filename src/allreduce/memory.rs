//! Device memory that every process of a group maps: cuMemCreate, passed on as a file descriptor. The memory is our own, so torch's
//! allocator and its expandable segments do not matter. It may be freed in any order: memory lives as long as somebody maps it.

use crate::contract;
use crate::device::{cuda_error, Current, Gpu};
use crate::error::Result;
use cudarc::driver::{result, sys};
use std::ffi::c_void;
use std::fs::{File, Metadata};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::sync::atomic::{AtomicU64, Ordering};

const POSIX_FD: sys::CUmemAllocationHandleType =
    sys::CUmemAllocationHandleType_enum::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

fn location(gpu: &Gpu) -> sys::CUmemLocation {
    sys::CUmemLocation { type_: sys::CUmemLocationType_enum::CU_MEM_LOCATION_TYPE_DEVICE, id: gpu.ordinal }
}

/// An error that says which call failed, and on which device or memory.
fn checked(code: sys::CUresult, doing: impl std::fmt::Display) -> Result<()> {
    code.result().map_err(|e| cuda_error(format_args!("all-reduce workspace: {doing}"), e))
}

/// A physical allocation in this process's address space.
pub struct Mapping {
    address: sys::CUdeviceptr,
    bytes: usize,
    mapped: bool,
}

impl Mapping {
    /// Takes the handle over: the mapping keeps the memory.
    fn new(gpu: &Gpu, handle: sys::CUmemGenericAllocationHandle, bytes: usize) -> Result<Mapping> {
        let mut map = Mapping { address: 0, bytes, mapped: false };
        // SAFETY: out pointers and structs live through the calls; `map` frees what it got when one fails.
        let mut fill = || unsafe {
            checked(sys::cuMemAddressReserve(&mut map.address, bytes, 0, 0, 0), "cuMemAddressReserve")?;
            checked(sys::cuMemMap(map.address, bytes, 0, handle, 0), "cuMemMap")?;
            map.mapped = true;
            let access = sys::CUmemAccessDesc {
                location: location(gpu),
                flags: sys::CUmemAccess_flags_enum::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
            };
            checked(
                sys::cuMemSetAccess(map.address, bytes, &access, 1),
                format_args!(
                    "cuMemSetAccess from cuda:{} (peers must be joined by NVLink or PCIe peer access)",
                    gpu.ordinal
                ),
            )
        };
        let filled = fill();
        // SAFETY: the handle was ours to release.
        let released = unsafe { checked(sys::cuMemRelease(handle), "cuMemRelease") };
        filled.and(released).map(|()| map)
    }

    pub fn address(&self) -> *mut u8 {
        self.address as *mut u8
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: `new` reserved and mapped this range, once. A failure at the end of a process leaves nothing to do.
        unsafe {
            if self.mapped {
                let _ = sys::cuMemUnmap(self.address, self.bytes);
            }
            if self.address != 0 {
                let _ = sys::cuMemAddressFree(self.address, self.bytes);
            }
        }
    }
}

/// A new allocation of at least `bytes`, filled with 0xFF except for its first `zeros` bytes, which are 0, and the descriptor by which
/// peers map it.
pub fn create(gpu: &Gpu, bytes: u64, zeros: usize) -> Result<(Mapping, OwnedFd)> {
    let _current = Current::new(gpu)?;
    // SAFETY: this is a plain struct of numbers and pointers, and zeros are valid for all of them.
    let mut prop: sys::CUmemAllocationProp = unsafe { std::mem::zeroed() };
    prop.type_ = sys::CUmemAllocationType_enum::CU_MEM_ALLOCATION_TYPE_PINNED;
    prop.requestedHandleTypes = POSIX_FD;
    prop.location = location(gpu);
    let bytes = size(gpu, &prop, bytes)?;
    let (mut handle, mut descriptor) = (0, -1i32);
    // SAFETY: out pointers live through the calls.
    unsafe {
        checked(
            sys::cuMemCreate(&mut handle, bytes, &prop, 0),
            format_args!("cuMemCreate of {bytes} bytes on cuda:{}", gpu.ordinal),
        )?;
        let out = (&mut descriptor as *mut i32).cast::<c_void>();
        let exported = checked(sys::cuMemExportToShareableHandle(out, handle, POSIX_FD, 0), "exporting");
        if let Err(error) = exported {
            let _ = sys::cuMemRelease(handle);
            return Err(error);
        }
    }
    // SAFETY: the driver made this descriptor, and nobody else owns it.
    let descriptor = unsafe { OwnedFd::from_raw_fd(descriptor) };
    let map = Mapping::new(gpu, handle, bytes)?;
    // SAFETY: both ranges lie inside the mapping.
    unsafe {
        checked(sys::cuMemsetD8_v2(map.address, 0xFF, bytes), "filling")?;
        checked(sys::cuMemsetD8_v2(map.address, 0, zeros), "filling")?;
    }
    result::ctx::synchronize().map_err(|e| cuda_error("all-reduce workspace: filling", e))?;
    Ok((map, descriptor))
}

/// Maps a peer's allocation, which is like ours: `own` is our mapping and the descriptor that the driver exported for it.
pub fn open(gpu: &Gpu, theirs: BorrowedFd, own: (&Mapping, &OwnedFd), peer: usize) -> Result<Mapping> {
    let (ours, exported) = own;
    require_alike(theirs, exported.as_fd(), peer)?;
    let _current = Current::new(gpu)?;
    let mut handle = 0;
    let number = theirs.as_raw_fd() as usize as *mut c_void;
    // SAFETY: the driver takes the descriptor's number in place of a pointer.
    let imported = unsafe { sys::cuMemImportFromShareableHandle(&mut handle, number, POSIX_FD) };
    checked(imported, format_args!("importing the memory of rank {peer}"))?;
    if let Err(error) = require_device_memory(handle, peer) {
        // SAFETY: the handle is ours to release.
        unsafe {
            let _ = sys::cuMemRelease(handle);
        }
        return Err(error);
    }
    // cuMemMap refuses a range beyond the allocation, so an allocation that is smaller than ours cannot be mapped.
    Mapping::new(gpu, handle, ours.bytes)
}

/// Refuses a descriptor of another kind than the driver's own export: a plain file, a pipe, a socket, another device's.
fn require_alike(theirs: BorrowedFd, ours: BorrowedFd, peer: usize) -> Result<()> {
    let (Ok(theirs), Ok(ours)) = (status(theirs), status(ours)) else {
        contract!("descriptors: rank {peer}'s cannot be looked at");
    };
    if kind(&theirs) != kind(&ours) {
        contract!(
            "descriptors: rank {peer}'s is {}, and the driver exports memory as {}",
            describe(&theirs),
            describe(&ours)
        );
    }
    Ok(())
}

fn status(descriptor: BorrowedFd) -> std::io::Result<Metadata> {
    File::from(descriptor.try_clone_to_owned()?).metadata()
}

/// Attributes that two exports of equal size on one host share. Minor numbers of devices differ from GPU to GPU, and the file system of a
/// device's node differs from container to container.
fn kind(of: &Metadata) -> (u32, u64, u64) {
    const TYPE: u32 = 0o170_000;
    if of.file_type().is_char_device() {
        (of.mode() & TYPE, major(of), 0)
    } else {
        (of.mode() & TYPE, of.dev(), of.size())
    }
}

/// The major number of a device, as glibc's macro `major` computes it.
fn major(of: &Metadata) -> u64 {
    let device = of.rdev();
    (device >> 8 & 0xFFF) | (device >> 32 & !0xFFF)
}

fn describe(of: &Metadata) -> String {
    let kind = of.file_type();
    if kind.is_char_device() {
        format!("a device of major number {}", major(of))
    } else if kind.is_file() {
        format!("a file of {} bytes on device {}", of.size(), of.dev())
    } else {
        format!("of mode {:o} on device {}, of {} bytes", of.mode(), of.dev(), of.size())
    }
}

/// Refuses an imported allocation that is no memory of a GPU. A driver that does not answer (the peer's GPU may be hidden from this
/// process) leaves the question to the mapping.
fn require_device_memory(handle: sys::CUmemGenericAllocationHandle, peer: usize) -> Result<()> {
    // SAFETY: this is a plain struct of numbers and pointers, and zeros are valid for all of them.
    let mut prop: sys::CUmemAllocationProp = unsafe { std::mem::zeroed() };
    // SAFETY: the out pointer lives through the call.
    let answer = unsafe { sys::cuMemGetAllocationPropertiesFromHandle(&mut prop, handle) };
    let device = sys::CUmemLocationType_enum::CU_MEM_LOCATION_TYPE_DEVICE;
    if answer.result().is_ok() && prop.location.type_ != device {
        contract!("descriptors: rank {peer}'s is memory of {:?}, expected a GPU's", prop.location.type_);
    }
    Ok(())
}

/// `bytes` rounded up to a multiple of the device's granularity.
fn size(gpu: &Gpu, prop: &sys::CUmemAllocationProp, bytes: u64) -> Result<usize> {
    let mut unit = 0usize;
    let option = sys::CUmemAllocationGranularity_flags_enum::CU_MEM_ALLOC_GRANULARITY_RECOMMENDED;
    // SAFETY: the out pointer lives through the call.
    let code = unsafe { sys::cuMemGetAllocationGranularity(&mut unit, prop, option) };
    checked(code, format_args!("asking cuda:{} for its granularity", gpu.ordinal))?;
    Ok((bytes as usize).next_multiple_of(unit.max(1)))
}

/// Words of host memory that kernels write and the host reads without a driver call.
pub struct HostWords(*mut u64);
// SAFETY: the memory belongs to no thread, and it is freed once, by `drop`.
unsafe impl Send for HostWords {}
// SAFETY: threads read and write the words as atomic numbers alone; see `word`.
unsafe impl Sync for HostWords {}

impl HostWords {
    const COUNT: usize = 8;

    pub fn new(gpu: &Gpu) -> Result<HostWords> {
        let _current = Current::new(gpu)?;
        let mut address = std::ptr::null_mut();
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: the out pointer lives through the call.
        checked(unsafe { sys::cuMemHostAlloc(&mut address, 8 * Self::COUNT, flags) }, "cuMemHostAlloc")?;
        // SAFETY: this is new memory of that size.
        unsafe { address.cast::<u64>().write_bytes(0, Self::COUNT) };
        Ok(HostWords(address.cast()))
    }

    /// The address of the words on the host and, because of unified addressing, on the device too.
    pub fn address(&self) -> *mut u64 {
        self.0
    }

    /// Kernels write whole words as well, and the host never sees half of one.
    fn word(&self, i: usize) -> &AtomicU64 {
        assert!(i < Self::COUNT);
        // SAFETY: word i is inside the allocation, which is aligned for words and lives as long as self. The host uses it by this function
        // alone.
        unsafe { AtomicU64::from_ptr(self.0.add(i)) }
    }

    /// Reads after this one see everything that a kernel wrote before this word.
    pub fn read(&self, i: usize) -> u64 {
        self.word(i).load(Ordering::Acquire)
    }

    pub fn write(&self, i: usize, word: u64) {
        self.word(i).store(word, Ordering::Release);
    }
}

impl Drop for HostWords {
    fn drop(&mut self) {
        // SAFETY: `new` allocated this memory, and it is freed once.
        unsafe {
            let _ = sys::cuMemFreeHost(self.0.cast());
        }
    }
}
