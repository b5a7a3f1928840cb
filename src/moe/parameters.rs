//! The parameters of a call's steps. Kernels and the CPU's functions take the same structs. The program says where everything lies, the
//! layer has the weights, and the call brings the rest.

use super::layer::Layer;
use super::plan::steps::{At, Buffer, Gemm, Schedule, BUFFERS};
use super::plan::{self, CallDesc, Counters, InOrder, Overlap, Program, Routed, Source};
use crate::params::{
    Activation, ActivationKind, CombineParams, GemmPairParams, GroupedGemmParams, LayerParams, OrderedGemmParams,
    RouteParams, RoutedLayerParams, ScheduleParams, SelectParams,
};
use std::ptr::{null, null_mut};

/// The address at which each buffer of a call begins.
#[derive(Clone, Copy)]
pub struct Memory([*mut u8; BUFFERS]);

// SAFETY: the addresses are of memory that the call has borrowed, or that the layer owns.
unsafe impl Send for Memory {}
// SAFETY: the memory is borrowed by the call or owned by the layer; see `Send`.
unsafe impl Sync for Memory {}

impl Memory {
    /// The addresses of these buffers. A buffer that is not named has the address null.
    pub fn new<const N: usize>(buffers: [(Buffer, *const u8); N]) -> Memory {
        let mut starts = [null_mut(); BUFFERS];
        for (buffer, start) in buffers {
            starts[buffer as usize] = start.cast_mut();
        }
        Memory(starts)
    }

    /// The address of a place.
    pub fn at<T>(&self, at: At) -> *mut T {
        self.0[at.buffer as usize].wrapping_add(at.offset).cast()
    }
}

/// The data that a call brings beside shapes and memory.
#[derive(Clone, Copy)]
pub struct Operands {
    /// Top-k of router logits. The program replaces its ids and weights.
    pub select: Option<SelectParams>,
    pub ids_are_i64: bool,
    pub first_expert: i32,
    /// Whether weights of the slots multiply GEMM1's sums.
    pub weights_on_input: bool,
    /// Whether weights of the slots multiply the rows that the combine reads.
    pub weights_on_output: bool,
    /// Whether the combine keeps the slots' rows apart.
    pub keep_slots: bool,
    pub scale: f32,
    /// Rows between the first rows of two neighbouring experts, or 0; see `ScheduleParams`.
    pub rows_each: i32,
    pub alignment: i32,
    /// Whether the caller's scales of x are words of four E8M0 bytes; see `ExpandScalesParams`.
    pub scales_are_powers: bool,
    /// Distances between the caller's scales of neighbouring rows, and of neighbouring groups.
    pub scale_strides: (i64, i64),
}

impl Operands {
    /// The operands of a call without options.
    pub const NONE: Operands = Operands {
        select: None,
        ids_are_i64: false,
        first_expert: 0,
        weights_on_input: false,
        weights_on_output: false,
        keep_slots: false,
        scale: 1.0,
        rows_each: 0,
        alignment: 1,
        scales_are_powers: false,
        scale_strides: (0, 0),
    };
}

const IDENTITY: Activation = Activation {
    kind: ActivationKind::Identity,
    alpha: 1.0,
    beta: 0.0,
    gate_limit: f32::INFINITY,
    silu_limit: f32::INFINITY,
    up_limit: f32::INFINITY,
};

/// One of a layer's GEMMs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    Up,
    Down,
}

/// A call whose memory is known.
#[derive(Clone, Copy)]
pub struct Parameters<'a> {
    pub layer: &'a Layer,
    pub call: &'a CallDesc,
    pub program: &'a Program,
    pub operands: &'a Operands,
    pub memory: &'a Memory,
}

impl Parameters<'_> {
    pub fn at<T>(&self, at: At) -> *mut T {
        self.memory.at(at)
    }

    /// The address of a range of the workspace.
    fn of<T>(&self, range: &crate::workspace::Range) -> *mut T {
        self.at(At::range(range))
    }

    /// (tokens, slots a token). Rows in order count as tokens with one slot each.
    fn tokens(&self) -> (i32, i32) {
        match self.call.source {
            Source::Routed(Routed { tokens, top_k, .. }) => (tokens as i32, top_k as i32),
            Source::InOrder(InOrder { rows, .. }) => (rows as i32, 1),
        }
    }

    pub fn select(&self) -> Option<SelectParams> {
        let Program { ids, slot_weights, .. } = self.program;
        self.operands.select.map(|select| SelectParams {
            ids: self.at(*ids),
            weights: self.at(*slot_weights),
            ..select
        })
    }

    /// The top-k of a layer in one launch: that of `select`, or without logits, where ids and weights are given.
    pub fn chosen(&self) -> SelectParams {
        let (tokens, top_k) = self.tokens();
        self.select().unwrap_or_else(|| SelectParams {
            tokens,
            top_k,
            ids: self.at(self.program.ids),
            weights: self.at(self.program.slot_weights),
            ..SelectParams::NO_LOGITS
        })
    }

    pub fn route(&self) -> RouteParams {
        let (ws, schedule) = (&self.program.workspace, &self.program.schedule);
        let (tokens, top_k) = self.tokens();
        RouteParams {
            ids: self.at::<u8>(self.program.ids),
            ids_are_i64: self.operands.ids_are_i64,
            tokens,
            top_k,
            experts: self.layer.desc.experts as i32,
            first_expert: self.operands.first_expert,
            tile_tokens: schedule.tile_tokens,
            tile_step: schedule.tile_step,
            max_tiles: self.program.max_tiles,
            histogram: self.of(&ws.histogram),
            offsets: self.of(&ws.offsets),
            place_of_slot: self.of(&ws.place_of_slot),
            slot_of_place: self.of(&ws.slot_of_place),
            tiles: self.at(schedule.tiles),
            tile_count: self.at(schedule.tile_count),
            counters: self.counters(),
            counter_count: self.program.counter_count,
            block_histogram: self.of(&ws.block_histogram),
        }
    }

    /// The counters in the workspace, which `plan::Counters` describes.
    pub fn counters(&self) -> *mut i32 {
        self.of(&self.program.workspace.counters)
    }

    /// The schedule of rows in order.
    pub fn schedule(&self) -> ScheduleParams {
        let (own, Operands { rows_each, alignment, .. }) = (&self.program.schedule, *self.operands);
        let counters = (self.counters(), self.program.counter_count);
        self.schedule_of(own, (rows_each, alignment), counters)
    }

    /// GEMM2's own schedule, whose rows are the experts' places.
    pub fn down_schedule(&self, own: &Schedule) -> ScheduleParams {
        self.schedule_of(own, (0, 1), (null_mut(), 0))
    }

    fn schedule_of(
        &self,
        own: &Schedule,
        (rows_each, alignment): (i32, i32),
        (counters, counter_count): (*mut i32, i32),
    ) -> ScheduleParams {
        ScheduleParams {
            row_counts: self.at(own.row_counts),
            experts: self.layer.desc.experts as i32,
            rows_each,
            alignment,
            rows: self.call.slots() as i32,
            tile_tokens: own.tile_tokens,
            tile_step: own.tile_step,
            tiles: self.at(own.tiles),
            tile_count: self.at(own.tile_count),
            counters,
            counter_count,
        }
    }

    pub fn gemm(&self, side: Side) -> GroupedGemmParams {
        let (layer, program) = (self.layer, self.program);
        let matrix = if side == Side::Up { &layer.up } else { &layer.down };
        let Gemm { x, x_scales, row_scales, gathers, row_divisor, k, .. } = program.gemms[side as usize];
        let Gemm { out, out_scales, out_factors, schedule_is_older, .. } = program.gemms[side as usize];
        let counters = self.counters();
        let overlap = program.overlap.map(|overlap| (counters.wrapping_add(Counters::DONE), overlap));
        let schedule = match side {
            Side::Up => &program.schedule,
            Side::Down => program.down_schedule.as_ref().unwrap_or(&program.schedule),
        };
        let (rows, out_columns, activation, next_unit) = match side {
            Side::Up => {
                let columns = if layer.counts_whole_blocks() { layer.desc.inner() } else { layer.desc.intermediate };
                (matrix.numbers, columns, layer.activation, Counters::NEXT_UP)
            }
            Side::Down => (matrix.rows, layer.desc.hidden, IDENTITY, Counters::NEXT_DOWN),
        };
        let mut p = GroupedGemmParams {
            x: self.at::<u8>(x),
            row_scales: self.at::<f32>(row_scales),
            slot_of_place: if gathers { self.of(&program.workspace.slot_of_place) } else { null_mut() },
            row_divisor,
            tiles: self.at(schedule.tiles),
            tile_count: self.at(schedule.tile_count),
            weights: matrix.data,
            block_scales: matrix.packed.map_or(matrix.block_scales.cast(), |packed| packed.scales),
            x_scales: self.at(x_scales),
            expert_scales: matrix.expert_scales(),
            bias: matrix.bias,
            bias_dtype: matrix.bias_dtype,
            slot_weights: null(),
            out: self.at(out),
            out_scales: self.at(out_scales),
            done: null_mut(),
            awaited: null(),
            awaited_ctas: 0,
            awaited_units: 0,
            rows: rows as i32,
            k,
            out_columns: out_columns as i32,
            layout: layer.layout,
            activation,
            expert_alpha: layer.per_expert.alpha,
            expert_beta: layer.per_expert.beta,
            expert_limit: layer.per_expert.limit,
            expert_limit_after: layer.per_expert.limit_after,
            out_global_scales: self.at(out_factors),
            next_unit: counters.wrapping_add(next_unit),
            schedule_is_older,
        };
        match (side, overlap) {
            (Side::Up, overlap) => {
                p.done = overlap.map_or(null_mut(), |(done, _)| done);
                if self.operands.weights_on_input {
                    p.slot_weights = self.at(program.slot_weights);
                }
            }
            (Side::Down, Some((done, Overlap { ctas, units }))) => {
                (p.awaited, p.awaited_ctas, p.awaited_units) = (done, ctas as i32, units as i32);
            }
            (Side::Down, None) => {}
        }
        p
    }

    /// A GEMM whose rows of x lie in the order of places.
    pub fn ordered_gemm(&self, side: Side) -> OrderedGemmParams {
        let order = self.program.gemms[side as usize].order;
        OrderedGemmParams {
            gemm: self.gemm(side),
            x_scale_row: order.x_scales.0 as i32,
            x_scale_group: order.x_scales.1 as i32,
            out_scale_row: order.out_scales.0 as i32,
            out_scale_group: order.out_scales.1 as i32,
        }
    }

    /// Both GEMMs with a schedule, on a GPU with so many multiprocessors.
    pub fn gemm_pair(&self, multiprocessors: u32) -> GemmPairParams {
        let (up, down) = (self.gemm(Side::Up), self.gemm(Side::Down));
        GemmPairParams {
            up,
            down,
            tiles: up.tiles.cast_mut(),
            row_counts: null(),
            experts: 0,
            rows_each: 0,
            tile_tokens: 1,
            tile_step: 1,
            counters: null_mut(),
            wave: multiprocessors as i32,
        }
    }

    /// Both GEMMs of rows that lie expert by expert and have no schedule. `counters`: those of `Counts::Pair`.
    pub fn gemm_pair_of_rows(&self, multiprocessors: u32, counters: *mut i32) -> GemmPairParams {
        let (mut pair, schedule) = (self.gemm_pair(multiprocessors), self.schedule());
        pair.up.next_unit = counters;
        GemmPairParams {
            tiles: null_mut(),
            row_counts: schedule.row_counts,
            experts: schedule.experts,
            rows_each: schedule.rows_each,
            tile_tokens: schedule.tile_tokens,
            tile_step: schedule.tile_step,
            counters,
            ..pair
        }
    }

    pub fn combine(&self) -> CombineParams {
        let (tokens, top_k) = self.tokens();
        let Operands { weights_on_output, keep_slots, scale, .. } = *self.operands;
        CombineParams {
            y: self.at(self.program.gemms[Side::Down as usize].out),
            place_of_slot: self.of(&self.program.workspace.place_of_slot),
            weights: if weights_on_output { self.at(self.program.slot_weights) } else { null_mut() },
            out: self.at(At::start(Buffer::Out)),
            tokens,
            top_k,
            hidden: self.layer.desc.hidden as i32,
            scale,
            keep_slots,
            columns: plan::combine_columns(tokens.into(), self.layer.desc.hidden) as i32,
        }
    }

    /// Both GEMMs and the combine.
    pub fn layer(&self) -> LayerParams {
        let (counters, max_tiles) = (self.counters(), self.program.max_tiles);
        LayerParams {
            up: self.gemm(Side::Up),
            down: self.gemm(Side::Down),
            combine: self.combine(),
            max_tiles,
            tiles_done: counters.wrapping_add(Counters::TILES_DONE),
            rows_done: counters.wrapping_add(plan::counters(max_tiles, self.layer.desc.hidden).rows_done()),
        }
    }

    /// The routing, both GEMMs and the combine. `counters`: those of `Counts::Layer`.
    pub fn routed_layer(&self, counters: *mut i32) -> RoutedLayerParams {
        let layer = LayerParams { tiles_done: null_mut(), rows_done: null_mut(), ..self.layer() };
        let blocks = |gemm: &GroupedGemmParams| (gemm.k as u32).div_ceil(64) as i32;
        RoutedLayerParams {
            layer,
            select: self.chosen(),
            ids_are_i64: self.operands.ids_are_i64,
            counters,
            experts: self.layer.desc.experts as i32,
            first_expert: self.operands.first_expert,
            extra_rounds: blocks(&layer.up) / blocks(&layer.down),
        }
    }
}
