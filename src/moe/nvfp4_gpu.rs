//! NVFP4 experts on GPUs: the packed form of weights, and numbers of experts in device memory.

use super::weights::{Arguments, Layer, Operands, PackedTensors};
use crate::contract;
use crate::device::gpu;
use crate::error::Result;
use crate::kernel::Stream;
use crate::params::{PackNvfp4Params, W13Layout};
use crate::python;
use crate::quant::blocks::Blocks;
use crate::quant::packed::{self, Extent, Form, Packed};
use crate::quant::packed_ops::check_vectors;
use crate::tensor::{self, Elem, Origin, Place, TensorRef};
use pyo3::prelude::*;

/// fp32 [E, parts] beside `like`, as `numbers_of` takes them, and whether it is one number for all. Tensors may be on the CPU, too.
pub fn numbers_on_device<'py>(
    operand: &'static str,
    object: &Bound<'py, PyAny>,
    like: (&Bound<'py, PyAny>, &TensorRef),
    experts: i64,
    parts: i64,
) -> Result<(Bound<'py, PyAny>, bool)> {
    if !object.hasattr("__dlpack__")? && !object.hasattr("__dlpack_c_exchange_api__")? {
        let number: f32 = python::extract(operand, object)?;
        let made = tensor::empty(like.0, like.1, &[experts, parts], Elem::F32)?;
        return Ok((made.call_method1("fill_", (number,))?, true));
    }
    let given = TensorRef::borrow(operand, object)?;
    if given.elem != Elem::F32 || given.origin == Origin::Other {
        contract!("{operand}: expected a float32 torch tensor or a number, got {}", given.elem);
    }
    if given.place != Place::Cpu && given.place != like.1.place {
        contract!("{operand}: is on {}, but w13 is on {}", given.place, like.1.place);
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
        all = all.call_method1("to", (like.0.getattr("device")?,))?;
    }
    // NOTE: a copy: what the caller writes later would change the layer between two launches.
    let made = tensor::empty(like.0, like.1, &[experts, parts], Elem::F32)?;
    Ok((made.call_method1("copy_", (all,))?, given.numel() == 1))
}

/// A bias of w13 [E, 2I] whose rows lie in 64s, with its halves one after the other, as `in_halves` has the layout.
pub fn bias_in_halves<'py>(bias: &Bound<'py, PyAny>, experts: i64, rows: i64) -> PyResult<Bound<'py, PyAny>> {
    let halves = bias.call_method1("reshape", ([experts, rows / 128, 2, 64],))?.call_method1("transpose", (1, 2))?;
    halves.call_method1("reshape", ([experts, rows],))
}

/// Whether rows lie in 64s.
pub fn is_in_64s(layout: W13Layout) -> bool {
    matches!(layout, W13Layout::GateUp64 | W13Layout::UpGate64)
}

/// The layout whose halves are in the same order.
fn in_halves(layout: W13Layout) -> W13Layout {
    match layout {
        W13Layout::GateUp64 => W13Layout::GateUp,
        W13Layout::UpGate64 => W13Layout::UpGate,
        other => other,
    }
}

/// The packed form of a CUDA layer's weights in new tensors; `layer` then describes that form.
pub fn pack(layer: &mut Layer, arguments: &Arguments<'_, '_>, operands: &Operands<'_>) -> Result<[PackedTensors; 2]> {
    let (experts, gated, layout) = (layer.desc.experts, layer.desc.gated, layer.layout);
    let (object, borrowed) = (arguments.w13, &operands.w13);
    let Place::Cuda(ordinal) = borrowed.place else { contract!("w13: is on {}", borrowed.place) };
    let stream = Stream::new(gpu(ordinal)?, borrowed.current_stream(object.py())?)?;
    let new = |shape: &[i64], elem| -> Result<_> {
        let made = tensor::empty(object, borrowed, shape, elem)?;
        let address = TensorRef::borrow("packed weights", &made)?.data;
        Ok((made.unbind(), address))
    };
    let mut made = Vec::new();
    for (name, matrix, gated) in [("w13", &mut layer.up, gated), ("w2", &mut layer.down, false)] {
        let codes = if name == "w13" { &operands.w13 } else { &operands.w2 };
        check_vectors(name, codes)?;
        let Some(Blocks { scales: given, nvfp4: Some(own), .. }) = matrix.blocks else {
            contract!("{name}: no block scales");
        };
        let form = Form::Nvfp4;
        let extent = Extent { form, experts, rows: matrix.rows, k: matrix.k };
        let parts: &[i64] = if gated { &[experts, 2] } else { &[experts] };
        let (codes, packed_codes) = new(&extent.codes_shape(), Elem::U8)?;
        let (scales, packed_scales) = new(&extent.scales_shape(), Elem::U8)?;
        let (factors, expert_scales) = new(parts, Elem::F32)?;
        let expert_scales = expert_scales.cast();
        let params = PackNvfp4Params {
            codes: matrix.data,
            scales: given,
            tile_rows: own.layout.tile_rows(),
            factors: own.factors,
            experts: experts as i32,
            rows: matrix.rows as i32,
            k: matrix.k as i32,
            gated,
            layout,
            packed_codes,
            packed_scales,
            expert_scales,
        };
        packed::launch_pack_nvfp4(&stream, "ExpertWeights: packing", &params)?;
        matrix.data = packed_codes;
        matrix.blocks = None;
        matrix.packed = Some(Packed { form, codes: packed_codes, scales: packed_scales, expert_scales });
        made.push((codes, scales, factors));
    }
    layer.layout = in_halves(layout);
    match <[PackedTensors; 2]>::try_from(made) {
        Ok(both) => Ok(both),
        Err(_) => contract!("w13 and w2: both are needed"),
    }
}
