//! The Python side of every function: its docstring, and errors that name the argument.
//!
//! `#[pyfunction(crate = "crate::python")]` (`#[pyo3(crate = ...)]` on `#[pymethods]`) makes pyo3's macros look for pyo3 here. This module
//! is pyo3 except for the functions that read arguments. pyo3 leaves the argument's name to a note of the exception, which `str(e)` does
//! not show and Python 3.10 does not have.

use pyo3::conversion::FromPyObjectOwned;
use pyo3::exceptions::{PyOverflowError, PyTypeError, PyValueError};
use pyo3::types::PyAnyMethods as _;
pub use pyo3::*;

/// The docstring of a name in `python/oxmoe/_oxmoe.pyi`, which `build.rs` reads. An item gets it with `#[doc = crate::help!("moe")]`.
#[macro_export]
macro_rules! help {
    ($name:literal) => {
        include_str!(concat!(env!("OUT_DIR"), "/help/", $name))
    };
    ($class:literal, $name:ident) => {
        include_str!(concat!(env!("OUT_DIR"), "/help/", $class, stringify!($name)))
    };
}

/// The value of an operand, for code that reads it only once its type is known.
pub fn extract<'py, T: FromPyObjectOwned<'py>>(operand: &str, object: &Bound<'py, PyAny>) -> PyResult<T> {
    object.extract().map_err(|error: T::Error| named(object.py(), operand, error.into()))
}

/// The error with the argument's name in front: a TypeError, or a ValueError if a number does not fit its type. Other errors stay
/// unchanged.
#[cold]
fn named(py: Python<'_>, name: &str, error: PyErr) -> PyErr {
    let text = || {
        let text = format!("{name}: {}", error.value(py));
        // This is the first mistake of users who come from calls on bare tensors.
        let hint = "; make them once, with a constructor such as oxmoe.ExpertWeights.bf16(w13, w2)";
        let bare = text.ends_with("is not an instance of 'ExpertWeights'");
        if bare {
            text + hint
        } else {
            text
        }
    };
    if error.is_instance_of::<PyTypeError>(py) {
        PyTypeError::new_err(text())
    } else if error.is_instance_of::<PyOverflowError>(py) {
        PyValueError::new_err(text())
    } else {
        error
    }
}

#[doc(hidden)]
pub mod impl_ {
    pub use pyo3::impl_::*;

    pub mod extract_argument {
        use crate::python::named;
        pub use pyo3::impl_::extract_argument::*;
        use pyo3::{Borrowed, PyAny, PyResult};

        pub fn extract_argument<'a, 'holder, 'py, T, const IMPLEMENTS_FROMPYOBJECT: bool>(
            object: Borrowed<'a, 'py, PyAny>,
            holder: &'holder mut T::Holder,
            name: &str,
        ) -> PyResult<T>
        where
            T: PyFunctionArgument<'a, 'holder, 'py, IMPLEMENTS_FROMPYOBJECT>,
        {
            T::extract(object, holder).map_err(|error| named(object.py(), name, error.into()))
        }

        #[inline]
        pub fn extract_required_argument<'a, 'holder, 'py, T, const IMPLEMENTS_FROMPYOBJECT: bool>(
            object: Option<Borrowed<'a, 'py, PyAny>>,
            holder: &'holder mut T::Holder,
            name: &str,
        ) -> PyResult<T>
        where
            T: PyFunctionArgument<'a, 'holder, 'py, IMPLEMENTS_FROMPYOBJECT>,
        {
            match object {
                Some(object) => extract_argument(object, holder, name),
                None => unreachable!("pyo3 refuses a call without a required argument"),
            }
        }

        pub fn extract_argument_with_default<'a, 'holder, 'py, T, const IMPLEMENTS_FROMPYOBJECT: bool>(
            object: Option<Borrowed<'a, 'py, PyAny>>,
            holder: &'holder mut T::Holder,
            name: &str,
            default: fn() -> T,
        ) -> PyResult<T>
        where
            T: PyFunctionArgument<'a, 'holder, 'py, IMPLEMENTS_FROMPYOBJECT>,
        {
            object.map_or_else(|| Ok(default()), |object| extract_argument(object, holder, name))
        }
    }
}
