//! Counts of what this process has done so far: calls by function, launches by kernel. Servers read them as `oxmoe.stats`. With
//! `OXMOE_LOG_PLANS`, the plan of each call is printed once for each shape.

use crate::kernel;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::collections::HashSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock};

/// The functions whose calls are counted.
#[derive(Clone, Copy)]
pub enum Call {
    Moe,
    MoeMasked,
    MoeContiguous,
    TopK,
    MmMxfp8,
    AllReduceFusion,
}

const NAMES: [&str; 6] = ["moe", "moe_masked", "moe_contiguous", "topk", "mm_mxfp8", "allreduce_fusion"];

/// The calls of each function that returned, and their rows.
static CALLS: [[AtomicU64; 2]; NAMES.len()] = [const { [const { AtomicU64::new(0) }; 2] }; NAMES.len()];

/// Counts a call that returns, with its number of rows. A call without rows does nothing and is not counted.
pub fn count(call: Call, rows: i64) {
    if rows == 0 {
        return;
    }
    let [calls, of_rows] = &CALLS[call as usize];
    calls.fetch_add(1, Ordering::Relaxed);
    of_rows.fetch_add(rows.unsigned_abs(), Ordering::Relaxed);
}

fn read(counter: &AtomicU64, reset: bool) -> u64 {
    match reset {
        true => counter.swap(0, Ordering::Relaxed),
        false => counter.load(Ordering::Relaxed),
    }
}

#[doc = crate::help!("stats")]
#[pyfunction(crate = "crate::python")]
#[pyo3(signature = (*, reset=false))]
pub fn stats(py: Python<'_>, reset: bool) -> PyResult<Bound<'_, PyDict>> {
    let (all, calls, launches) = (PyDict::new(py), PyDict::new(py), PyDict::new(py));
    for (name, [count, rows]) in NAMES.iter().zip(&CALLS) {
        let of_function = PyDict::new(py);
        of_function.set_item("calls", read(count, reset))?;
        of_function.set_item("rows", read(rows, reset))?;
        calls.set_item(name, of_function)?;
    }
    for (symbol, count) in kernel::launches() {
        match read(count, reset) {
            0 => {}
            count => launches.set_item(symbol, count)?,
        }
    }
    all.set_item("calls", calls)?;
    all.set_item("launches", launches)?;
    Ok(all)
}

/// Prints a plan to standard error if OXMOE_LOG_PLANS is 1 and no plan of the same `shape` was printed before.
#[allow(clippy::print_stderr)] // the user asks for this output with an environment variable
pub fn log_plan(shape: impl FnOnce() -> String, plan: impl FnOnce() -> String) {
    static WANTED: OnceLock<bool> = OnceLock::new();
    static PRINTED: Mutex<Option<HashSet<String>>> = Mutex::new(None);
    if !WANTED.get_or_init(|| std::env::var("OXMOE_LOG_PLANS").is_ok_and(|value| value == "1")) {
        return;
    }
    let mut printed = PRINTED.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    if printed.get_or_insert_with(HashSet::new).insert(shape()) {
        eprintln!("oxmoe: {}", plan().trim_end().replace('\n', "\noxmoe:   "));
    }
}
