//! The type of a set of kernels that runs the GEMMs of a layer, and the data from which it chooses tiles and launches.

use super::call::Routed;
use super::steps::{GemmLaunch, Step};
use super::{GemmDesc, Overlap};
use crate::desc::LayerDesc;
use crate::device::Device;
use crate::kernel::{AnyLaunch, Launch};
use crate::params::GemmPairParams;
use crate::variants::Variant;

/// Both GEMMs of a layer, as data for the choices of tiles and launches.
#[derive(Clone, Copy)]
pub struct Gemms<'a> {
    pub device: &'a Device,
    pub rows: Rows,
    pub up: GemmDesc,
    pub down: GemmDesc,
    /// Whether parts of an expert's rows of w13, or rows of its w2, end inside a block (fp8). Both GEMMs then count whole blocks.
    pub cut: bool,
    /// Both GEMMs with as many slots as are likely. Tiles are chosen for these; grids are large enough for all slots.
    pub likely: [GemmDesc; 2],
}

/// The origin of GEMM1's rows.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Rows {
    /// Each slot of so many tokens takes its token's row. `plain_x`: x has the layer's dtype and was not quantised by the caller.
    Gathered { tokens: i64, plain_x: bool },
    /// Rows lie in the experts' order. `expected` rows an expert are likely. `quantizes_x`: x has the layer's dtype.
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
            Rows::InOrder { expected, .. } => expected.saturating_mul(experts).clamp(1, slots.max(1)),
        };
        let likely = [up, down].map(|gemm| GemmDesc { slots, ..gemm });
        Gemms { device, rows, up, down, cut: layer.is_cut(), likely }
    }

    /// A pair in which both GEMMs are this one.
    #[cfg(test)]
    pub fn alone(gemm: &GemmDesc, device: &'a Device) -> Gemms<'a> {
        let rows = Rows::Gathered { tokens: gemm.slots, plain_x: true };
        Gemms { device, rows, up: *gemm, down: *gemm, cut: false, likely: [*gemm; 2] }
    }
}

/// The launches of GEMM1 and GEMM2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GemmLaunches {
    Apart([GemmLaunch; 2]),
    Together(Launch<GemmPairParams>),
}

/// A set of kernels.
#[derive(Clone, Copy)]
pub struct KernelSet {
    /// Whether the set takes the layer on this device.
    pub serves: fn(&Device, &LayerDesc) -> bool,
    /// Most tokens of a tile of the schedule.
    pub tile_tokens: fn(&Gemms<'_>) -> i32,
    /// Most tokens of a tile of GEMM2's own schedule, if it has one.
    pub down_tile_tokens: fn(&Gemms<'_>, i32) -> Option<i32>,
    /// The launches of GEMM1 and GEMM2 with tiles of so many tokens.
    pub launches: fn(&Gemms<'_>, i32) -> GemmLaunches,
    /// Whether GEMM1 rounds its output for GEMM2.
    pub rounds_inside: fn(&Gemms<'_>, i32) -> bool,
    /// The facts of this launch of GEMM1 that GEMM2 needs. None if GEMM2 does not begin where GEMM1 ends.
    pub overlap: fn(&Gemms<'_>, i32, AnyLaunch) -> Option<Overlap>,
    /// The layer in one launch, if that is the faster form.
    pub one_launch: fn(&Routed, &Gemms<'_>) -> Option<Step>,
    /// Every kernel with a GEMM in it that calls of a layer may take. These kernels are loaded with the weights.
    pub variants: fn(&LayerDesc) -> Vec<Variant>,
}

impl KernelSet {
    /// The set from which others are made. It has no layers in one launch, and its GEMMs have one schedule and do not overlap.
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
