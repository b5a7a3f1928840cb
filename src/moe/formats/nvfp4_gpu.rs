//! NVFP4 experts on GPUs: the packed form of their weights, and numbers of experts in device memory.

use crate::contract;
use crate::error::Result;
use crate::moe::layer::Layer;
use crate::moe::operands::{Operands, PackedTensors};
use crate::moe::packing;
use crate::params::{PackNvfp4Params, W13Layout};
use crate::python;
use crate::quant::blocks::Blocks;
use crate::tensor::{Borrowed, Contract, Elem, Origin, Place};
use crate::variants;
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

/// A bias of w13 [E, 2I] whose rows lie in 64s, rearranged so that its halves lie one after the other, in the layout of `in_halves`.
pub fn bias_in_halves<'py>(bias: &Bound<'py, PyAny>, experts: i64, rows: i64) -> PyResult<Bound<'py, PyAny>> {
    let halves = bias.call_method1("reshape", ([experts, rows / 128, 2, 64],))?.call_method1("transpose", (1, 2))?;
    halves.call_method1("reshape", ([experts, rows],))
}

/// Whether rows of w13 lie in 64s: 64 rows of one half, then 64 of the other.
pub fn is_in_64s(layout: W13Layout) -> bool {
    matches!(layout, W13Layout::GateUp64 | W13Layout::UpGate64)
}

/// The layout with whole halves, in the order of this layout's halves.
fn in_halves(layout: W13Layout) -> W13Layout {
    match layout {
        W13Layout::GateUp64 => W13Layout::GateUp,
        W13Layout::UpGate64 => W13Layout::UpGate,
        other => other,
    }
}

/// Packs a CUDA layer's weights into new tensors; `layer` then describes the packed form.
pub fn pack<'py>(
    layer: &mut Layer,
    contract: &mut Contract<'_>,
    operands: &Operands<'py>,
) -> Result<[PackedTensors<'py>; 2]> {
    let made = packing::pack_both(layer, contract, operands, variants::quant::NVFP4_PACK.kernel(), |source| {
        let Some(Blocks { scales, layout, factors, .. }) = source.matrix.blocks else {
            contract!("w13 and w2: no block scales");
        };
        Ok(PackNvfp4Params {
            codes: source.matrix.data,
            scales,
            tile_rows: layout.tile_rows(),
            factors,
            experts: source.experts,
            rows: source.rows,
            k: source.k,
            gated: source.gated,
            layout: source.layout,
            packed_codes: source.codes,
            packed_scales: source.scales,
            expert_scales: source.factors,
        })
    })?;
    layer.layout = in_halves(layer.layout);
    Ok(made)
}
