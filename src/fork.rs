//! The number of fork() calls between this process and the one that loaded the module. A parent's threads and CUDA contexts do not exist in
//! its child.

use crate::error::Error;
use std::ffi::c_int;
use std::sync::atomic::{AtomicU32, Ordering};

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

/// The error of a call on a GPU in a child whose parent had used CUDA.
pub fn cuda_error(what: &str) -> Error {
    Error::Cuda(format!(
        "{what}: this process was made by fork() after its parent had used CUDA, and a driver does not work in such a child; start \
         processes that use CUDA with multiprocessing's \"spawn\" or \"forkserver\" method"
    ))
}
