//! The one place that knows which file has what of a format: its layers, and what rounds their activations.

use super::layer::Layer;
use super::numbers::Numbers;
use super::operands::Operands;
use super::options::Options;
use super::plan::{MoeDesc, MoeWorkspace};
use super::rounding::Rounding;
use super::tokens::GivenScales;
use super::{fp8, int4, mxfp4, mxfp4_a8, mxfp8, nvfp4, plain};
use crate::error::Result;
use crate::params::{GroupedGemmParams, RouteParams, ScheduleParams};
use crate::quant::Activations;

/// Checks the tensors of a layer whose format is `numbers`, and describes them.
pub fn layer(operands: &Operands<'_>, numbers: Numbers, options: &Options<'_, '_>) -> Result<Layer> {
    let mut layer = match numbers {
        Numbers::Plain(elem) => plain::layer(operands, elem, options),
        Numbers::Mxfp4 { dtype, e4m3, hidden } => mxfp4::layer(operands, (dtype, e4m3), hidden, options),
        Numbers::Fp8(scaling) => fp8::layer(operands, scaling, options),
        Numbers::Mxfp8 { hidden } => mxfp8::layer(operands, hidden, options),
        Numbers::Nvfp4(spec) => nvfp4::layer(operands, &spec, options),
        Numbers::Int4(spec) => int4::layer(operands, &spec, options),
    }?;
    if options.swiglu.of_experts() {
        layer.per_expert = options.swiglu.pointers(layer.place, layer.desc.experts, options.clamp == "after")?;
    }
    Ok(layer)
}

/// The roundings of x and of GEMM1's output; with fp8 weights also what lies between the GEMMs.
type Roundings = ([Option<Rounding>; 2], Option<fp8::Between>);

/// The roundings of a call whose GEMM1 gathers the rows of its slots: both GEMMs then read what these write. `x_scales`: x came in codes with
/// these. `in_one_launch`: both GEMMs are.
pub fn round_slots(
    layer: &Layer,
    desc: &MoeDesc,
    (ws, base): (&MoeWorkspace, *mut u8),
    (route, in_one_launch): (&RouteParams, bool),
    x_scales: Option<GivenScales>,
    (up, down): (&mut GroupedGemmParams, &mut GroupedGemmParams),
) -> Roundings {
    match layer.desc.format.activations() {
        Activations::Fp8(_) => fp8::round_slots((ws, base), desc, x_scales, (layer, route), (up, down)),
        Activations::E4m3Rows => {
            let packed = layer.up.packed.is_some();
            (mxfp4_a8::round_slots(packed, desc, (ws, base), route, (up, down)).map(Some), None)
        }
        Activations::Mxfp8 => (mxfp8::round_slots(desc.tokens, ws.x_rounded.at(base), route, up, down).map(Some), None),
        // On CPUs a layer itself says whether activations become NVFP4.
        Activations::Kept | Activations::Nvfp4 => {
            let scales = x_scales.map_or(std::ptr::null(), |scales| scales.data);
            let room = nvfp4::Room { tokens: ws.x_rounded.at(base), slots: ws.rows.at(base) };
            let room = (room, route.tile_tokens, in_one_launch);
            (nvfp4::rounding(layer, (scales, Some(route.tokens)), room, (up, down)), None)
        }
    }
}

/// The roundings of a call whose rows lie in the experts' order, by the tiles of its schedule. GEMM2 writes to `out`.
pub fn round_rows(
    layer: &Layer,
    workspace: (&MoeWorkspace, *mut u8),
    (out, schedule, in_one_launch): (*mut u8, &ScheduleParams, bool),
    x_scales: Option<*const u8>,
    (up, down): (&mut GroupedGemmParams, &mut GroupedGemmParams),
) -> Roundings {
    match layer.desc.format.activations() {
        Activations::Fp8(_) => fp8::round_rows(layer, workspace, schedule, x_scales, (up, down)),
        Activations::E4m3Rows => (mxfp4_a8::round_rows(layer, workspace, (out, schedule), (up, down)).map(Some), None),
        Activations::Mxfp8 => (mxfp8::round_rows(workspace, (out, schedule), (up, down)).map(Some), None),
        Activations::Kept | Activations::Nvfp4 => {
            let scales = x_scales.unwrap_or(std::ptr::null());
            let room = (nvfp4::Room { tokens: out, slots: out }, schedule.tile_tokens, in_one_launch);
            (nvfp4::rounding(layer, (scales, None), room, (up, down)), None)
        }
    }
}
