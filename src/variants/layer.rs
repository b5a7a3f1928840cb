//! Layers of 16-bit weights in one launch on Hopper: both GEMMs and the combine of a small batch, and perhaps the routing.

use super::*;

pub const LAYER: Kernels<Layer> = Kernels::new(Row {
    arguments: &[Argument::Element, Argument::Gated, TOKENS, STAGES],
    unit_by: &[Argument::Element, Argument::Gated],
    hopper: true,
    threads: |_| 256,
    shared: Shared::Fixed(|v| shared_bytes(v, 2 * 16 * 128 + 4)),
    ctas: |_| 2,
    traits: |_| &[Trait::OneLaunch],
    ..Row::new(Family::LayerSm90, "layer_sm90", "LayerSm90", "moe/layer_sm90.cuh")
});

pub const ROUTED_LAYER: Kernels<RoutedLayer> = Kernels::new(Row {
    shared: Shared::Fixed(|v| shared_bytes(v, INNER_COLUMNS * 2 * v.tokens + 24 + few_slots_bytes(128))),
    traits: |_| &[Trait::OneLaunch, Trait::Counts],
    family: Family::RoutedLayerSm90,
    name: "routed_layer_sm90",
    device_type: "RoutedLayerSm90",
    header: "moe/routed_layer_sm90.cuh",
    ..LAYER.row
});

/// The only tiles: without the routing, and with the routing inside. A work unit has 64 weight rows.
pub const LAYER_TILE: Kernel<Layer> = LAYER.with(Variant { tokens: 8, consumers: 1, stages: 12, ..Variant::NONE });
pub const ROUTED_TILE: Kernel<RoutedLayer> =
    ROUTED_LAYER.with(Variant { tokens: 8, consumers: 1, stages: 8, ..Variant::NONE });

/// The most columns between the GEMMs of a layer with the routing inside.
pub const INNER_COLUMNS: u32 = 2048;

/// Bytes of `Shared`: stages, barriers and the rest. The rest is two staged chunks of 16 outputs and a word; with the routing inside it is
/// GEMM2's tokens, three barriers and `FewSlots`.
fn shared_bytes(v: &Variant, rest: u32) -> u32 {
    (v.stages * (v.tokens * 128 + 8192) + 2 * 8 * v.stages + rest).next_multiple_of(128)
}

/// Bytes of `FewSlotsOf<experts>`: for each of 64 slots an expert, two places, a tile and a weight; a bit for each expert, and two words.
pub const fn few_slots_bytes(experts: u32) -> u32 {
    let id = if experts <= 128 { 1 } else { 2 };
    64 * (id + 2 + 4 + 4) + experts / 8 + 8
}
