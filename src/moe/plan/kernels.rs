//! What a set of kernels is that runs the GEMMs of a layer, and what it is asked.

use super::call::Routed;
use super::steps::Step;
use super::{GemmDesc, Overlap};
use crate::desc::LayerDesc;
use crate::device::Device;
use crate::kernel::Launch;
use crate::variants::Variant;

/// Both GEMMs of a layer, as the choices of tiles and launches see them.
#[derive(Clone, Copy)]
pub struct Gemms<'a> {
    pub device: &'a Device,
    pub rows: Rows,
    pub up: GemmDesc,
    pub down: GemmDesc,
    /// Parts of an expert's rows of w13, or rows of its w2, end inside a block (fp8); both GEMMs count whole blocks.
    pub cut: bool,
    /// The same with as many slots as are likely, which choose tiles; grids hold all.
    pub likely: [GemmDesc; 2],
}

/// Where the rows of GEMM1 come from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Rows {
    /// Each slot of so many tokens takes its token's row. `plain_x`: x is of the layer's dtype, not quantised by the caller.
    Gathered { tokens: i64, plain_x: bool },
    /// They lie in the experts' order. `expected` rows an expert are likely; `quantizes_x`: x is of the layer's dtype.
    InOrder { expected: i64, quantizes_x: bool },
}

impl<'a> Gemms<'a> {
    /// The GEMMs of `slots` slots of a layer.
    pub fn new(layer: &LayerDesc, slots: i64, rows: Rows, device: &'a Device) -> Gemms<'a> {
        let (element, format, experts) = (super::element(layer.dtype), layer.format, layer.experts);
        let inner = layer.inner();
        let rows_of_up = inner * if layer.gated { 2 } else { 1 };
        let up = GemmDesc { element, format, gated: layer.gated, slots, experts, rows: rows_of_up, k: layer.hidden };
        let down = GemmDesc { gated: false, rows: layer.hidden, k: inner, ..up };
        let slots = match rows {
            Rows::Gathered { .. } => slots,
            Rows::InOrder { expected, .. } => (expected * experts).clamp(1, slots.max(1)),
        };
        let likely = [up, down].map(|gemm| GemmDesc { slots, ..gemm });
        Gemms { device, rows, up, down, cut: layer.is_cut(), likely }
    }

    /// One GEMM in the place of both.
    #[cfg(test)]
    pub fn alone(gemm: &GemmDesc, device: &'a Device) -> Gemms<'a> {
        let rows = Rows::Gathered { tokens: gemm.slots, plain_x: true };
        Gemms { device, rows, up: *gemm, down: *gemm, cut: false, likely: [*gemm; 2] }
    }
}

/// A set of kernels.
#[derive(Clone, Copy)]
pub struct KernelSet {
    /// Whether it takes the layer on this device.
    pub serves: fn(&Device, &LayerDesc) -> bool,
    /// Most tokens of a tile of the schedule.
    pub tile_tokens: fn(&Gemms<'_>) -> i32,
    /// Most tokens of a tile of GEMM2's own schedule, where it has one.
    pub down_tile_tokens: fn(&Gemms<'_>, i32) -> Option<i32>,
    /// GEMM1 and GEMM2 with tiles of so many tokens; without a second launch the first has both.
    pub launches: fn(&Gemms<'_>, i32) -> (Launch, Option<Launch>),
    /// Whether GEMM1 rounds what GEMM2 reads.
    pub rounds_inside: fn(&Gemms<'_>, i32) -> bool,
    /// What a GEMM2 knows that begins where GEMM1, so launched, ends.
    pub overlap: fn(&Gemms<'_>, i32, Launch) -> Option<Overlap>,
    /// The layer in one launch, where that is the faster form.
    pub one_launch: fn(&Routed, &Gemms<'_>) -> Option<Step>,
    /// Every kernel with a GEMM in it that calls of a layer may take: they are loaded with the weights.
    pub variants: fn(&LayerDesc) -> Vec<Variant>,
}

impl KernelSet {
    /// What rows begin with: a set without layers in one launch, whose GEMMs have one schedule and do not overlap.
    pub const NONE: KernelSet = KernelSet {
        serves: |_, _| false,
        tile_tokens: |_| 0,
        down_tile_tokens: |_, _| None,
        launches: |_, _| unreachable!("a set has launches"),
        rounds_inside: |_, _| false,
        overlap: |_, _, _| None,
        one_launch: |_, _| None,
        variants: |_| Vec::new(),
    };
}
