//! The parts of packing a layer's weights for GPUs that all formats share: the stream, and the new tensors.

use super::layer::{Layer, Matrix};
use super::operands::{Operands, PackedTensors};
use crate::contract;
use crate::device::gpu;
use crate::error::Result;
use crate::kernel::Stream;
use crate::params::{PackParams, W13Layout};
use crate::quant::blocks::Blocks;
use crate::quant::ops::check_vectors;
use crate::quant::packed::{self, Extent, Packed};
use crate::tensor::{Borrowed, Contract, Elem, Place};
use crate::variants::Form;

/// The name of the launches in errors.
pub const OP: &str = "ExpertWeights: packing";

/// The current stream of the GPU that has the tensor. The contract has compared the operands' places before.
pub fn stream(name: &str, tensor: &Borrowed<'_>, contract: &Contract<'_>) -> Result<Stream<'static>> {
    let Place::Cuda(ordinal) = tensor.place else { contract!("{name}: is on {}", tensor.place) };
    Stream::new(gpu(ordinal)?, tensor.current_stream(tensor.object().py())?, &contract.finish()?)
}

/// A new tensor on the device of `beside`.
pub fn new_tensor<'py>(
    contract: &mut Contract<'_>,
    beside: &Borrowed<'py>,
    shape: &[i64],
    elem: Elem,
) -> Result<Borrowed<'py>> {
    contract.new_output("packed weights", beside, shape, elem)
}

/// The tensors of a packed matrix.
pub struct NewPacked<'py> {
    pub codes: Borrowed<'py>,
    pub scales: Borrowed<'py>,
    /// The factors of experts.
    pub factors: Borrowed<'py>,
}

impl<'py> NewPacked<'py> {
    /// New tensors of this extent. `gated`: the rows are gate and up rows.
    pub fn new(
        contract: &mut Contract<'_>,
        beside: &Borrowed<'py>,
        extent: &Extent,
        gated: bool,
    ) -> Result<NewPacked<'py>> {
        let mut new = |shape: &[i64], elem| new_tensor(contract, beside, shape, elem);
        let (codes, scales) = (new(&extent.codes_shape(), Elem::U8)?, new(&extent.scales_shape(), Elem::U8)?);
        let factors_of_expert =
            if gated && extent.form.row().factors_of_halves { &[extent.experts, 2][..] } else { &[extent.experts] };
        let factors = new(factors_of_expert, Elem::F32)?;
        Ok(NewPacked { codes, scales, factors })
    }

    /// Makes the matrix describe these tensors from now on. `names`: the operands' names of its codes and scales.
    pub fn describe(self, form: Form, names: [&'static str; 2], matrix: &mut Matrix) -> PackedTensors<'py> {
        let NewPacked { codes, scales, factors } = self;
        matrix.data = codes.data;
        matrix.blocks = None;
        let expert_scales = factors.data.cast_const().cast();
        matrix.packed = Some(Packed { form, codes: codes.data, scales: scales.data, expert_scales });
        [(names[0], codes), (names[1], scales), ("expert_scales", factors)]
    }
}

/// Packs w13 and w2 into new tensors, with a launch each of the form's packer; `layer` then describes the packed form.
pub fn pack_both<'py>(
    layer: &mut Layer,
    contract: &mut Contract<'_>,
    operands: &Operands<'py>,
) -> Result<[PackedTensors<'py>; 2]> {
    let (experts, layout, gated) = (layer.desc.experts, layer.layout, layer.desc.gated);
    let form = layer.desc.format.spec().packing.map(|packing| packing.form);
    let Some((form, kernel)) = form.and_then(|form| form.row().pack.map(|kernel| (form, kernel))) else {
        contract!("format {:?} has no packed form", layer.desc.format.spec().name);
    };
    let stream = stream("w13", &operands.w13, contract)?;
    let mut pack = |names: [&'static str; 2], given: &Borrowed<'py>, matrix: &mut Matrix, gated| -> Result<_> {
        check_vectors(names[0], given)?;
        let Some(Blocks { kind, scales, layout: scale_layout, factors, groups, .. }) = matrix.blocks else {
            contract!("{}: no block scales", names[0]);
        };
        let extent = Extent { form, experts, rows: matrix.rows, k: matrix.k };
        let made = NewPacked::new(contract, &operands.w13, &extent, gated)?;
        let params = PackParams {
            codes: matrix.data,
            scales,
            group: (groups.blocks * kind.columns) as i32,
            scale_dtype: groups.dtype,
            tile_rows: scale_layout.tile_rows(),
            zeros: groups.zeros,
            factors,
            experts: experts as i32,
            rows: matrix.rows as i32,
            k: matrix.k as i32,
            gated,
            layout,
            packed_codes: made.codes.data,
            packed_scales: made.scales.data,
            expert_scales: made.factors.data.cast(),
        };
        packed::launch_pack(&stream, OP, kernel, extent, &params)?;
        Ok(made.describe(form, names, matrix))
    };
    let up = pack(["w13", "w13_scale"], &operands.w13, &mut layer.up, gated)?;
    let down = pack(["w2", "w2_scale"], &operands.w2, &mut layer.down, false)?;
    layer.layout = in_halves(layout);
    Ok([up, down])
}

/// The layout of packed weights' biases: whole halves, in the order of the halves that were given.
fn in_halves(layout: W13Layout) -> W13Layout {
    match layout {
        W13Layout::GateUp64 => W13Layout::GateUp,
        W13Layout::UpGate64 => W13Layout::UpGate,
        other => other,
    }
}
