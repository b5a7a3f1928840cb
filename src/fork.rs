//! The number of fork() calls between this process and the one that loaded the module. A parent's threads and CUDA contexts do not exist in
//! its child, and a lock that another of its threads held at the fork stays locked there.

use crate::error::Error;
use std::ffi::c_int;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

static GENERATION: AtomicU32 = AtomicU32::new(0);

extern "C" {
    fn pthread_atfork(
        prepare: Option<extern "C" fn()>,
        parent: Option<extern "C" fn()>,
        child: Option<extern "C" fn()>,
    ) -> c_int;
}

extern "C" fn count_child() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
}

/// Starts to count. It is called once, when Python loads the module.
pub fn watch() {
    // SAFETY: the handler changes one atomic number, and the module that it lies in is never unloaded.
    unsafe { pthread_atfork(None, None, Some(count_child)) };
}

/// 0 in the process that loaded the module. Each fork() adds one in the child.
pub fn generation() -> u32 {
    GENERATION.load(Ordering::Relaxed)
}

/// A value that each process makes for itself at its first use, and never frees. A child of fork() makes a new one and leaves its parent's
/// alone.
///
/// NOTE: there is no lock, because another thread of the parent may have held it at the fork.
pub struct PerProcess<T>(AtomicPtr<Made<T>>);

struct Made<T> {
    /// The `generation()` of the process that made the value.
    generation: u32,
    value: T,
}

impl<T> PerProcess<T> {
    pub const fn new() -> PerProcess<T> {
        PerProcess(AtomicPtr::new(std::ptr::null_mut()))
    }

    /// This process's value. Two threads that are here first at the same time both call `make`, and one of the values is dropped.
    pub fn get(&'static self, make: impl FnOnce() -> T) -> &'static T {
        let generation = generation();
        let current = self.0.load(Ordering::Acquire);
        // SAFETY: the pointer is null, or a value that was stored below and is never freed.
        if let Some(made) = unsafe { current.as_ref() }.filter(|made| made.generation == generation) {
            return &made.value;
        }
        let made = Box::into_raw(Box::new(Made { generation, value: make() }));
        match self.0.compare_exchange(current, made, Ordering::AcqRel, Ordering::Acquire) {
            // SAFETY: the value was made above, and from here on it is never freed.
            Ok(_) => unsafe { &(*made).value },
            Err(faster) => {
                // SAFETY: another thread of this process was faster. Nobody has seen the value that was made here, and the other one is
                // never freed.
                unsafe {
                    drop(Box::from_raw(made));
                    &(*faster).value
                }
            }
        }
    }
}

/// The error of a call on a GPU in a child whose parent had used CUDA.
pub fn cuda_error(what: &str) -> Error {
    Error::Cuda(format!(
        "{what}: this process was made by fork() after its parent had used CUDA, and a driver does not work in such a child; start \
         processes that use CUDA with multiprocessing's \"spawn\" or \"forkserver\" method"
    ))
}
