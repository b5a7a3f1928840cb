//! NVFP4 experts on GPUs: numbers of experts in device memory, and biases in the order of packed weights' rows.

use crate::contract;
use crate::error::Result;
use crate::params::W13Layout;
use crate::python;
use crate::tensor::{Borrowed, Contract, Elem, Origin, Place};
use pyo3::prelude::*;

/// fp32 [E, parts] on the device of `like`, made from what `numbers_of` takes, and whether it is one number for all. The given tensor may
/// also be on the CPU.
pub fn numbers_on_device<'py>(
    contract: &mut Contract<'_>,
    operand: &'static str,
    object: &Bound<'py, PyAny>,
    like: &Borrowed<'py>,
    experts: i64,
    parts: i64,
) -> Result<(Borrowed<'py>, bool)> {
    if !object.hasattr("__dlpack__")? && !object.hasattr("__dlpack_c_exchange_api__")? {
        let number: f32 = python::extract(operand, object)?;
        let made = contract.new_output(operand, like, &[experts, parts], Elem::F32)?;
        made.object().call_method1("fill_", (number,))?;
        return Ok((made, true));
    }
    let given = contract.input(operand, object)?;
    if given.elem != Elem::F32 || given.origin == Origin::Other {
        contract!("{operand}: expected a float32 torch tensor or a number, got {}", given.elem);
    }
    if given.place != Place::Cpu && given.place != like.place {
        contract!("{operand}: is on {}, but w13 is on {}", given.place, like.place);
    }
    let held = match *given.shape() {
        [] | [1] => [1, 1],
        [e] if e == experts => [experts, 1],
        [e, p] if (e, p) == (experts, parts) => [experts, parts],
        ref shape => {
            let each = if parts > 1 { format!(" or [{experts}, {parts}] (gate, up)") } else { String::new() };
            contract!("{operand}: expected one number, [{experts}]{each}, got shape {shape:?}")
        }
    };
    let mut all = object.call_method1("reshape", (held,))?.call_method1("expand", ([experts, parts],))?;
    if given.place == Place::Cpu {
        all = all.call_method1("to", (like.object().getattr("device")?,))?;
    }
    // NOTE: this is a copy, because a later write of the caller would change the layer between two launches.
    let made = contract.new_output(operand, like, &[experts, parts], Elem::F32)?;
    made.object().call_method1("copy_", (all,))?;
    Ok((made, given.numel() == 1))
}

/// A bias of w13 [E, 2I] whose rows lie in 64s, rearranged so that its halves lie one after the other, as packing brings the rows.
pub fn bias_in_halves<'py>(bias: &Bound<'py, PyAny>, experts: i64, rows: i64) -> PyResult<Bound<'py, PyAny>> {
    let halves = bias.call_method1("reshape", ([experts, rows / 128, 2, 64],))?.call_method1("transpose", (1, 2))?;
    halves.call_method1("reshape", ([experts, rows],))
}

/// Whether rows of w13 lie in 64s: 64 rows of one half, then 64 of the other.
pub fn is_in_64s(layout: W13Layout) -> bool {
    matches!(layout, W13Layout::GateUp64 | W13Layout::UpGate64)
}
