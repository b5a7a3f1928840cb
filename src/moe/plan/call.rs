//! A call of a layer as plain data: everything except the device on which its program depends.

use super::routing::Logits;
use crate::desc::LayerDesc;
use crate::quant::Activations;

/// One call of a layer: everything except the device on which its program depends.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CallDesc {
    pub layer: LayerDesc,
    pub source: Source,
    pub x: X,
    /// Numbers to which activations are rounded: the format's, or NVFP4 on CPUs if the layer has factors for them.
    pub activations: Activations,
    /// NVFP4: one factor of x serves all experts.
    pub one_x_factor: bool,
}

/// The origin of GEMM1's rows.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Source {
    /// Tokens choose experts. Routing runs before the GEMMs, and the combine after them.
    Routed(Routed),
    /// Rows lie expert by expert. A schedule of the rows is made before the GEMMs.
    InOrder(InOrder),
}

/// Tokens that choose experts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Routed {
    pub tokens: i64,
    pub top_k: i64,
    /// Experts with a router logit, and their groups. None if ids and weights are given.
    pub logits: Option<Logits>,
    /// Whether routing may be part of the layer's launch (csrc/moe/few_slots.cuh). It may if weights are given, or made of the chosen logits
    /// alone, and if they multiply GEMM2's rows.
    pub routes_inside: bool,
}

/// Rows that lie expert by expert.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct InOrder {
    /// Rows of all experts for which there is room.
    pub rows: i64,
    /// Expected rows of an expert. They decide the tile, and no bit of the result.
    pub expected: i64,
    /// Whether each expert's rows begin at a multiple of one number, so that a launch can find its tiles itself.
    pub finds_tiles: bool,
}

/// The kinds of x.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum X {
    /// Numbers of the layer's dtype.
    Plain,
    /// Codes that the caller made, with scales in the order that the GEMMs read.
    Codes,
    /// Codes that the caller made, with scales that a step first brings into the order that the GEMMs read.
    LooseCodes,
}

impl CallDesc {
    /// A call on numbers of the layer's dtype, whose activations are rounded to the format's numbers.
    pub fn new(layer: LayerDesc, source: Source) -> CallDesc {
        CallDesc { layer, source, x: X::Plain, activations: layer.format.activations(), one_x_factor: false }
    }

    /// Rows of x.
    pub fn rows(&self) -> i64 {
        match self.source {
            Source::Routed(Routed { tokens, .. }) => tokens,
            Source::InOrder(InOrder { rows, .. }) => rows,
        }
    }

    /// Rows of GEMM1's output for which there is room.
    pub fn slots(&self) -> i64 {
        match self.source {
            Source::Routed(Routed { tokens, top_k, .. }) => tokens * top_k,
            Source::InOrder(InOrder { rows, .. }) => rows,
        }
    }
}
