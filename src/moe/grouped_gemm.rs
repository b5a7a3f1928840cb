//! The two grouped GEMMs: tensor maps at load, parameters and launch per call.

use super::plan::{fp8_sm90, sm90, Counters, Overlap};
use super::weights::{Layer, LayerDesc, Matrix};
use crate::counters::{self, Counts};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::kernel::{Args, Launch, Stream};
use crate::params::{
    Activation, ActivationKind, Dtype, GemmPairParams, GroupedGemmParams, LayerParams, OrderedGemmParams,
    RoutedLayerParams, ScheduleParams, Tile, W13Layout,
};
use crate::tma::{self, TensorMap};
use crate::variants::fp8::{Fp8, Fp8Tile, FP8_TILES, WIDE_TOKENS};
use crate::variants::Variant;

/// Tensor maps of one weight tensor, one for each (row tiles, consumers) that a Hopper tile can have and the weights' shape allows.
/// Empty where a portable kernel serves.
#[derive(Clone, Debug, Default)]
pub struct WeightMaps(Vec<((u32, u32), TensorMap)>);

impl WeightMaps {
    fn get(&self, op: &str, row_tiles: u32, consumers: u32) -> Result<&TensorMap> {
        self.0.iter().find(|m| m.0 == (row_tiles, consumers)).map(|m| &m.1).ok_or_else(|| {
            Error::Cuda(format!(
                "{op}: the plan wants tiles of {consumers} x {row_tiles} x 64 rows and no such tensor map was encoded"
            ))
        })
    }
}

/// Views of w [experts, rows, k] whose boxes are wgmma A tiles: slices of 16 rows, each two halves of 8.
///
/// Gated: a slice has 8 gate rows, then the 8 up rows that belong to them, so that one thread holds both sums. The three layouts of
/// w13 are three distances; [up; gate] is read as if it were [gate; up], and the epilogue swaps the halves.
pub fn encode(device: &Device, desc: &LayerDesc, w: &Matrix, gated: bool, layout: W13Layout) -> Result<WeightMaps> {
    let (experts, rows, k) = (desc.experts as u64, w.rows as u64, w.k as u64);
    if fp8_sm90::serves(device, desc) {
        return encode_fp8(w.data, (experts, rows, k), gated);
    }
    if desc.format.spec().block != 1 || !sm90::serves(device, desc.dtype, gated, w.rows as u32, w.k as u32) {
        return Ok(WeightMaps::default());
    }
    let split = gated && layout != W13Layout::Interleaved;
    let map = |(row_tiles, consumers): (u32, u32)| -> Result<_> {
        let slices = 4 * row_tiles * consumers;
        // Distances in rows: between the rows of a half, between the halves of a slice, between slices; of pairs of row tiles: between
        // the rows of a half, the tiles of a pair, the halves, the strips of 32 rows, which count on from expert to expert.
        let dims = match (row_tiles, gated) {
            (2, _) if split => [(8, 2, 8), (2, 1, 1), (2, rows / 2, 2), ((2 * experts - 1) * rows / 32, 16, 4)],
            (2, _) => [(8, 4, 8), (2, 2, 1), (2, 1, 2), (experts * rows / 32, 32, 4)],
            (_, false) => [(8, 1, 8), (2, 8, 2), (rows / 16, 16, slices), (experts, rows, 1)],
            (_, true) if split => [(8, 1, 8), (2, rows / 2, 2), (rows / 16, 8, slices), (experts, rows, 1)],
            (_, true) => [(8, 2, 8), (2, 1, 2), (rows / 16, 16, slices), (experts, rows, 1)],
        };
        Ok(((row_tiles, consumers), tma::encode_16bit(w.data, desc.dtype == Dtype::Bf16, k, &dims)?))
    };
    sm90::tile_shapes(w.rows as u32).into_iter().map(map).collect::<Result<Vec<_>>>().map(WeightMaps)
}

/// Views of e4m3 w [experts, rows, k], in pairs of elements: those of narrow tiles as above, and that of the wide one
/// (csrc/moe/grouped_gemm_fp8_wide_sm90.cuh).
fn encode_fp8(data: *const u8, (experts, rows, k): (u64, u64, u64), gated: bool) -> Result<WeightMaps> {
    let map = |tile: &Fp8Tile| -> Result<_> {
        let slices = 4 * tile.consumers;
        let dims = match gated {
            _ if tile.tokens == WIDE_TOKENS => [(2, 1, 2), (4, 8, 4), (4, 2, 4), (experts * rows / 32, 32, 4)],
            true => [(8, 1, 8), (2, rows / 2, 2), (rows / 16, 8, slices), (experts, rows, 1)],
            false => [(8, 1, 8), (2, 8, 2), (rows / 16, 16, slices), (experts, rows, 1)],
        };
        Ok((fp8_shape(tile.kernel(gated)), tma::encode_16bit(data, true, k / 2, &dims)?))
    };
    FP8_TILES.iter().map(map).collect::<Result<Vec<_>>>().map(WeightMaps)
}

/// (row tiles, consumers) of a kernel of e4m3.
fn fp8_shape(kernel: Fp8) -> (u32, u32) {
    match kernel {
        Fp8::GroupedGemmFp8Sm90 { consumers, .. } => (1, consumers),
        _ => (2, 2),
    }
}

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
        rows: layer.up.rows as i32,
        k: layer.up.k as i32,
        out_columns: layer.desc.intermediate as i32,
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
        k: layer.down.k as i32,
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
    match launch.variant {
        Variant::GroupedGemmSm90 { row_tiles, consumers, .. } => {
            stream.launch(op, launch, Args::GemmSm90(maps.get(op, row_tiles, consumers)?, p))
        }
        Variant::Fp8(Fp8::GroupedGemmFp8Portable { .. }) => {
            // As those below.
            stream.launch(op, launch, Args::Gemm(&GroupedGemmParams { k: p.k / 2, ..*p }))
        }
        Variant::Fp8(kernel) => {
            let (row_tiles, consumers) = fp8_shape(kernel);
            // Its kernels count pairs of elements.
            let (map, gemm) = (maps.get(op, row_tiles, consumers)?, GroupedGemmParams { k: p.k / 2, ..*p });
            let Fp8::GroupedGemmFp8OrderedSm90 { .. } = kernel else {
                return stream.launch(op, launch, Args::GemmSm90(map, &gemm));
            };
            let Some(order) = order else {
                return Err(Error::Unsupported(format!("{op}: rows in no order with a kernel for rows in order")));
            };
            // NOTE: here and not at load: x lies elsewhere in every call.
            let tokens = tma::encode_rows_e4m3(p.x, order.rows as u64, p.k as u64)?;
            let (x, out) = (order.x_scales, order.out_scales);
            let p = OrderedGemmParams {
                gemm,
                x_scale_row: x.0 as i32,
                x_scale_group: x.1 as i32,
                out_scale_row: out.0 as i32,
                out_scale_group: out.1 as i32,
            };
            stream.launch(op, launch, Args::OrderedGemm(map, &tokens, &p))
        }
        _ => stream.launch(op, launch, Args::Gemm(p)),
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
    stream.launch(op, launch, Args::GemmPair(&pair(up, down)))
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

/// The same of rows that lie expert by expert, whose schedule nobody has made. `workspace`: where it starts, by which its counters
/// are known.
pub fn launch_both_of_rows(
    stream: &Stream<'_>,
    op: &str,
    launch: &Launch,
    (up, down): (&GroupedGemmParams, &GroupedGemmParams),
    schedule: &ScheduleParams,
    workspace: *mut u8,
) -> Result<()> {
    let counts = Counts::Pair { experts: schedule.experts.into() };
    let counters = counters::of_launch(stream, op, counts, workspace, schedule.counters)?;
    let of_rows = GemmPairParams {
        tiles: std::ptr::null_mut(),
        row_counts: schedule.row_counts,
        experts: schedule.experts,
        rows_each: schedule.rows_each,
        tile_tokens: schedule.tile_tokens,
        tile_step: schedule.tile_step,
        counters,
        ..pair(&GroupedGemmParams { next_unit: counters, ..*up }, down)
    };
    stream.launch(op, launch, Args::GemmPair(&of_rows))
}

/// The maps of both weights for a layer in one launch.
fn layer_maps<'a>(op: &str, layer: &'a Layer) -> Result<(&'a TensorMap, &'a TensorMap)> {
    let (row_tiles, consumers) = sm90::LAYER_SHAPE;
    Ok((layer.up_maps.get(op, row_tiles, consumers)?, layer.down_maps.get(op, row_tiles, consumers)?))
}

/// Both GEMMs and the combine in one launch.
pub fn launch_fused(stream: &Stream<'_>, op: &str, launch: &Launch, layer: &Layer, p: &LayerParams) -> Result<()> {
    let (up, down) = layer_maps(op, layer)?;
    stream.launch(op, launch, Args::LayerSm90(up, down, p))
}

/// The routing as well.
pub fn launch_routed(
    stream: &Stream<'_>,
    op: &str,
    launch: &Launch,
    layer: &Layer,
    p: &RoutedLayerParams,
) -> Result<()> {
    if let Variant::RoutedLayerMxfp4Sm90 { .. } = launch.variant {
        return stream.launch(op, launch, Args::RoutedLayerMxfp4(p));
    }
    let (up, down) = layer_maps(op, layer)?;
    stream.launch(op, launch, Args::RoutedLayerSm90(up, down, p))
}
