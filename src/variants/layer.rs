//! The tiles of the fused layer.

use super::{Element, Variant};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerTile {
    pub tokens: u32,
    pub stages: u32,
    pub routed: bool,
}

impl LayerTile {
    pub fn variant(self, element: Element, gated: bool) -> Variant {
        let LayerTile { tokens, stages, routed } = self;
        Variant::LayerSm90 { element, gated, tokens, stages, routed }
    }
}

/// The fused layer's only ones, without and with the routing inside.
pub const LAYER_TILE: LayerTile = LayerTile { tokens: 8, stages: 12, routed: false };
pub const INNER_COLUMNS: u32 = 2048; // most between the GEMMs
pub const ROUTED_TILE: LayerTile = LayerTile { tokens: 8, stages: 8, routed: true };

/// Bytes of `Shared`: stages, barriers, two staged chunks of 16 outputs and a word; routed, GEMM2's tokens, three barriers and `FewSlots`.
pub(super) fn layer_shared_bytes(tokens: u32, stages: u32, routed: bool) -> Option<u32> {
    let rest = if routed { INNER_COLUMNS * 2 * tokens + 24 + 720 } else { 2 * 16 * 128 + 4 };
    Some((stages * (tokens * 128 + 8192) + 2 * 8 * stages + rest).next_multiple_of(128))
}
