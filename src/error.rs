//! One error type for the whole crate and its one conversion to Python exceptions.

use pyo3::exceptions::{PyMemoryError, PyNotImplementedError, PyRuntimeError, PyValueError};
use pyo3::PyErr;
use std::fmt;

#[derive(Debug)]
pub enum Error {
    /// An operand breaks its contract. → ValueError
    Contract(String),
    /// A combination that no kernel serves; the text lists what is served. → NotImplementedError
    Unsupported(String),
    /// Missing driver, a GPU without kernels in this wheel, a failed CUDA call. → RuntimeError
    Cuda(String),
    /// The host has no memory for what a call needs. → MemoryError
    Memory(String),
    /// A launch whose CTAs wait for each other, on a part of a GPU that cannot hold them at once. → RuntimeError; `moe` runs as separate
    /// launches instead.
    TooLarge(String),
    /// An exception of Python code that we called (an allocation, `__dlpack__`). It is passed on unchanged.
    Python(PyErr),
}

pub type Result<T> = std::result::Result<T, Error>;

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Contract(text)
            | Error::Unsupported(text)
            | Error::Cuda(text)
            | Error::Memory(text)
            | Error::TooLarge(text) => f.write_str(text),
            Error::Python(error) => error.fmt(f),
        }
    }
}

impl From<Error> for PyErr {
    fn from(error: Error) -> PyErr {
        match error {
            Error::Contract(text) => PyValueError::new_err(text),
            Error::Unsupported(text) => PyNotImplementedError::new_err(text),
            Error::Cuda(text) | Error::TooLarge(text) => PyRuntimeError::new_err(text),
            Error::Memory(text) => PyMemoryError::new_err(text),
            Error::Python(error) => error,
        }
    }
}

impl From<PyErr> for Error {
    fn from(error: PyErr) -> Error {
        Error::Python(error)
    }
}

/// Runs the body of a Python-facing function. A panic (a bug here, or a driver without a symbol that cudarc loads lazily) becomes a
/// RuntimeError. `except Exception` would not catch pyo3's PanicException.
pub fn guard<T>(body: impl FnOnce() -> Result<T>) -> pyo3::PyResult<T> {
    match std::panic::catch_unwind(std::panic::AssertUnwindSafe(body)) {
        Ok(result) => Ok(result?),
        Err(panic) => {
            let text = panic
                .downcast_ref::<String>()
                .map(String::as_str)
                .or_else(|| panic.downcast_ref::<&str>().copied())
                .unwrap_or("no message");
            Err(PyRuntimeError::new_err(format!("oxmoe: internal error, please report it: {text}")))
        }
    }
}

/// An empty vector with room for `count` elements. If the host has no memory for them, this is an error, while `Vec::with_capacity` ends
/// the process. Memory whose size follows from a call's operands is taken here.
pub fn try_vec<T>(count: usize, what: &str) -> Result<Vec<T>> {
    let mut room = Vec::new();
    room.try_reserve_exact(count).map_err(|_| {
        let bytes = count.saturating_mul(size_of::<T>());
        Error::Memory(format!("out of host memory: {what} needs {bytes} bytes"))
    })?;
    Ok(room)
}

/// A vector of `count` elements with the value `T::default()`, taken with [`try_vec`].
pub fn try_filled<T: Clone + Default>(count: usize, what: &str) -> Result<Vec<T>> {
    let mut room = try_vec(count, what)?;
    room.resize(count, T::default());
    Ok(room)
}

/// Expands to `return Err(Error::Contract(format!(...)))`.
#[macro_export]
macro_rules! contract {
    ($($text:tt)*) => { return Err($crate::error::Error::Contract(format!($($text)*))) };
}
