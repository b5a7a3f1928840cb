//! The two grouped GEMMs of a layer: their parameters and launches.

use super::layer::Layer;
use super::plan::{sm90, Counters, Overlap};
use crate::error::{Error, Result};
use crate::kernel::{Launch, Stream};
use crate::params::{
    Activation, ActivationKind, GemmPairParams, GroupedGemmParams, LayerParams, OrderedGemmParams, RoutedLayerParams,
    Tile,
};
use crate::tma::{self, TensorMap};
use crate::variants::Family;

/// What both GEMMs of a layer are called with beside its weights.
pub struct Rows {
    pub x: *const u8,
    /// As in `GroupedGemmParams`; null: places are rows of x.
    pub slot_of_place: *const i32,
    pub row_divisor: i32,
    pub slot_weights: *const f32,
    pub tiles: *const Tile,
    pub tile_count: *const i32,
    /// Zeros once the schedule is written.
    pub counters: *mut i32,
    /// GEMM1's output and GEMM2's, a row a place.
    pub hidden: *mut u8,
    pub out: *mut u8,
}

const IDENTITY: Activation = Activation {
    kind: ActivationKind::Identity,
    alpha: 1.0,
    beta: 0.0,
    gate_limit: f32::INFINITY,
    silu_limit: f32::INFINITY,
    up_limit: f32::INFINITY,
};

/// GEMM1 and GEMM2.
pub fn params(layer: &Layer, rows: &Rows) -> [GroupedGemmParams; 2] {
    let inner = |own: i64| if layer.counts_whole_blocks() { layer.desc.inner() } else { own };
    let up = GroupedGemmParams {
        x: rows.x,
        row_scales: std::ptr::null(),
        slot_of_place: rows.slot_of_place,
        row_divisor: rows.row_divisor,
        tiles: rows.tiles,
        tile_count: rows.tile_count,
        weights: layer.up.data,
        block_scales: layer.up.packed.map_or(layer.up.block_scales.cast(), |p| p.scales),
        x_scales: std::ptr::null(),
        expert_scales: layer.up.expert_scales(),
        bias: layer.up.bias,
        bias_dtype: layer.up.bias_dtype,
        slot_weights: rows.slot_weights,
        out: rows.hidden,
        out_scales: std::ptr::null_mut(),
        done: std::ptr::null_mut(),
        awaited: std::ptr::null(),
        awaited_ctas: 0,
        awaited_units: 0,
        rows: layer.up.numbers as i32,
        k: layer.up.k as i32,
        out_columns: inner(layer.desc.intermediate) as i32,
        layout: layer.layout,
        activation: layer.activation,
        expert_alpha: layer.per_expert.alpha,
        expert_beta: layer.per_expert.beta,
        expert_limit: layer.per_expert.limit,
        expert_limit_after: layer.per_expert.limit_after,
        out_global_scales: std::ptr::null(),
        next_unit: rows.counters.wrapping_add(Counters::NEXT_UP),
        schedule_is_older: false,
    };
    let down = GroupedGemmParams {
        x: up.out,
        slot_of_place: std::ptr::null(),
        row_divisor: 1,
        weights: layer.down.data,
        block_scales: layer.down.packed.map_or(layer.down.block_scales.cast(), |p| p.scales),
        expert_scales: layer.down.expert_scales(),
        bias: layer.down.bias,
        bias_dtype: layer.down.bias_dtype,
        slot_weights: std::ptr::null(),
        out: rows.out,
        rows: layer.down.rows as i32,
        k: inner(layer.down.k) as i32,
        out_columns: layer.desc.hidden as i32,
        activation: IDENTITY,
        next_unit: rows.counters.wrapping_add(Counters::NEXT_DOWN),
        // GEMM1 lets its successor start only after its own wait, so the schedule is complete by then.
        schedule_is_older: true,
        ..up
    };
    [up, down]
}

/// GEMM2 begins where GEMM1 ends, if so planned. `counters`: zeros, as in `Counters`.
pub fn overlap(
    plan: Option<Overlap>,
    counters: *mut i32,
    (up, down): (&mut GroupedGemmParams, &mut GroupedGemmParams),
) {
    if let Some(Overlap { ctas, units }) = plan {
        up.done = counters.wrapping_add(Counters::DONE);
        (down.awaited, down.awaited_ctas, down.awaited_units) = (up.done, ctas as i32, units as i32);
    }
}

/// What a GEMM of e4m3 takes whose rows of x lie in the order of places.
#[derive(Clone, Copy)]
pub struct Order {
    /// Of x.
    pub rows: i64,
    /// Distances between the scales of neighbouring rows and groups of columns.
    pub x_scales: (i64, i64),
    pub out_scales: (i64, i64),
}

/// One of a layer's GEMMs.
#[derive(Clone, Copy, PartialEq)]
pub enum Gemm {
    Up,
    Down,
}

/// `order`: of fp8.
pub fn launch(
    stream: &Stream<'_>,
    op: &str,
    launch: &Launch,
    (layer, which): (&Layer, Gemm),
    p: &GroupedGemmParams,
    order: Option<Order>,
) -> Result<()> {
    let maps = if which == Gemm::Up { &layer.up_maps } else { &layer.down_maps };
    let map = || {
        let (row_tiles, consumers) = launch.variant.map_shape();
        maps.get(op, row_tiles, consumers)
    };
    // Kernels of e4m3 count pairs of elements.
    let pairs = GroupedGemmParams { k: p.k / 2, ..*p };
    match launch.variant.family {
        Family::GroupedGemmSm90 => stream.launch(op, launch, (map()?, p)),
        Family::GroupedGemmFp8Portable => stream.launch(op, launch, &pairs),
        Family::GroupedGemmFp8OrderedSm90 => {
            let Some(order) = order else {
                return Err(Error::Unsupported(format!("{op}: rows in no order with a kernel for rows in order")));
            };
            // NOTE: here and not at load: x lies elsewhere in every call.
            let tokens = tma::encode_rows_e4m3(p.x, order.rows as u64, p.k as u64)?;
            let (x, out) = (order.x_scales, order.out_scales);
            let p = OrderedGemmParams {
                gemm: pairs,
                x_scale_row: x.0 as i32,
                x_scale_group: x.1 as i32,
                out_scale_row: out.0 as i32,
                out_scale_group: out.1 as i32,
            };
            stream.launch(op, launch, (map()?, &tokens, &p))
        }
        Family::GroupedGemmFp8Sm90
        | Family::GroupedGemmFp8WideSm90
        | Family::GroupedGemmFp8WideCutSm90
        | Family::GroupedGemmFp8StationarySm90 => stream.launch(op, launch, (map()?, &pairs)),
        _ => stream.launch(op, launch, p),
    }
}

/// Both GEMMs of a layer in one launch.
pub fn launch_both(
    stream: &Stream<'_>,
    op: &str,
    launch: &Launch,
    up: &GroupedGemmParams,
    down: &GroupedGemmParams,
) -> Result<()> {
    stream.launch(op, launch, &pair(up, down))
}

/// Both with a schedule.
fn pair(up: &GroupedGemmParams, down: &GroupedGemmParams) -> GemmPairParams {
    GemmPairParams {
        up: *up,
        down: *down,
        tiles: up.tiles.cast_mut(),
        row_counts: std::ptr::null(),
        experts: 0,
        rows_each: 0,
        tile_tokens: 1,
        tile_step: 1,
        counters: std::ptr::null_mut(),
    }
}

/// The maps of both weights for a layer in one launch.
fn layer_maps<'a>(op: &str, layer: &'a Layer) -> Result<(&'a TensorMap, &'a TensorMap)> {
    let (row_tiles, consumers) = sm90::LAYER_SHAPE;
    Ok((layer.up_maps.get(op, row_tiles, consumers)?, layer.down_maps.get(op, row_tiles, consumers)?))
}

/// Both GEMMs and the combine in one launch.
pub fn launch_fused(stream: &Stream<'_>, op: &str, launch: &Launch, layer: &Layer, p: &LayerParams) -> Result<()> {
    let (up, down) = layer_maps(op, layer)?;
    stream.launch(op, launch, (up, down, p))
}

/// The routing as well.
pub fn launch_routed(
    stream: &Stream<'_>,
    op: &str,
    launch: &Launch,
    layer: &Layer,
    p: &RoutedLayerParams,
) -> Result<()> {
    if launch.variant.family == Family::RoutedLayerMxfp4Sm90 {
        return stream.launch(op, launch, p);
    }
    let (up, down) = layer_maps(op, layer)?;
    stream.launch(op, launch, (up, down, p))
}
