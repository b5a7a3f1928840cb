//! Handles of experts. Operators of torch take tensors and numbers, so they name an `ExpertWeights` by a number.

use super::ExpertWeights;
use crate::contract;
use crate::error::{guard, Result};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use std::sync::atomic::{AtomicI64, Ordering};

/// A number that no other experts of this process have or had.
pub fn next() -> i64 {
    static NEXT: AtomicI64 = AtomicI64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// The experts whose handle was asked for, by handle. They are held weakly, so that a handle keeps no memory.
fn registry(py: Python<'_>) -> PyResult<&Bound<'_, PyAny>> {
    static REGISTRY: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let made = REGISTRY.get_or_try_init(py, || {
        Ok::<_, PyErr>(py.import("weakref")?.getattr("WeakValueDictionary")?.call0()?.unbind())
    })?;
    Ok(made.bind(py))
}

/// The experts' handle, by which `experts_of` finds them from now on.
pub fn of(experts: &Bound<'_, ExpertWeights>) -> PyResult<i64> {
    let handle = experts.get().handle;
    registry(experts.py())?.set_item(handle, experts)?;
    Ok(handle)
}

/// The experts of a handle, or an error if they no longer exist.
fn find(py: Python<'_>, handle: i64) -> Result<Bound<'_, ExpertWeights>> {
    let found = registry(py)?.call_method1("get", (handle,))?;
    if found.is_none() {
        contract!("handle: no ExpertWeights has the handle {handle}; they were freed, or are of another process");
    }
    Ok(found.cast_into().map_err(PyErr::from)?)
}

#[doc = crate::help!("experts_of")]
#[pyfunction(crate = "crate::python")]
pub fn experts_of(py: Python<'_>, handle: i64) -> PyResult<Bound<'_, ExpertWeights>> {
    guard(|| find(py, handle))
}
