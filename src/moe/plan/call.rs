//! A call of a layer as plain data: everything that its program depends on, beside the device.

use super::routing::Logits;
use crate::desc::LayerDesc;
use crate::quant::Activations;

/// One call of a layer: everything that its program depends on, beside the device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CallDesc {
    pub layer: LayerDesc,
    pub source: Source,
    pub x: X,
    /// What becomes of activations: what the format says, and on CPUs NVFP4 where the layer has factors for them.
    pub activations: Activations,
    /// NVFP4: x has one factor, that of all experts.
    pub one_x_factor: bool,
}

/// Where the rows of GEMM1 come from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Source {
    /// Tokens choose experts: routing before the GEMMs, the combine behind them.
    Routed(Routed),
    /// Rows lie expert by expert: a schedule of them before the GEMMs.
    InOrder(InOrder),
}

/// Tokens that choose experts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Routed {
    pub tokens: i64,
    pub top_k: i64,
    /// Experts with a router logit and their groups; None: ids and weights are given.
    pub logits: Option<Logits>,
    /// Whether routing may be part of the layer's launch (csrc/moe/routed_layer_sm90.cuh): weights are made of the chosen logits alone
    /// and multiply GEMM2's rows.
    pub routes_inside: bool,
}

/// Rows that lie expert by expert.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct InOrder {
    /// Rows there is room for, of all experts.
    pub rows: i64,
    /// Rows of an expert that are expected: they choose the tile, and no bit of the result.
    pub expected: i64,
    /// Whether an expert's rows begin at a multiple of a number, so that a launch can find its tiles itself.
    pub finds_tiles: bool,
}

/// What x is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum X {
    /// Numbers of the layer's dtype.
    Plain,
    /// Codes that the caller made, with scales as the launches read them.
    Codes,
    /// Codes with scales that are brought into that order first.
    LooseCodes,
}

impl CallDesc {
    /// A call on numbers of the layer's dtype, whose activations the format rounds.
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

    /// Rows of GEMM1's output that there is room for.
    pub fn slots(&self) -> i64 {
        match self.source {
            Source::Routed(Routed { tokens, top_k, .. }) => tokens * top_k,
            Source::InOrder(InOrder { rows, .. }) => rows,
        }
    }
}
