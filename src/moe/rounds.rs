//! The steps that round activations: x before GEMM1, and GEMM1's output before GEMM2. Kernels and the CPU's functions take the same
//! parameters.

use super::parameters::{Operands, Parameters};
use super::plan::rounds::{Fp8, Numbers, Nvfp4, Round, Which};
use super::plan::steps::{At, RoundLaunch};
use crate::cpu;
use crate::error::{Error, Result};
use crate::kernel::Stream;
use crate::params::{
    Dtype, ExpandScalesParams, QuantizeFp8Params, QuantizeRowsParams, RoundNvfp4Params, Tile, TileRowsParams,
};
use crate::quant::fp8::{EPS, GROUP};
use crate::quant::fp8_ops;
use std::fmt::Display;
use std::ptr::{null, null_mut};

/// Launches a step that rounds.
pub fn launch(
    stream: &Stream<'_>,
    op: impl Display,
    launch: &RoundLaunch,
    parameters: &Parameters<'_>,
    round: &Round,
) -> Result<()> {
    match (launch, round.to) {
        (RoundLaunch::Fp8(launch), Numbers::Fp8(own)) => stream.launch(op, launch, &fp8(parameters, round, &own)),
        (RoundLaunch::Fp8Scales(launch), Numbers::Fp8Scales) => {
            stream.launch(op, launch, &fp8_scales(parameters, round))
        }
        (RoundLaunch::Rows(launch), Numbers::E4m3 | Numbers::Mxfp8) => {
            stream.launch(op, launch, &rows(parameters, round))
        }
        (RoundLaunch::TileRows(launch), Numbers::E4m3 | Numbers::Mxfp8) => {
            stream.launch(op, launch, &tile_rows(parameters, round))
        }
        (RoundLaunch::Nvfp4(launch), Numbers::Nvfp4(own)) => stream.launch(op, launch, &nvfp4(parameters, round, &own)),
        (_, to) => Err(Error::Cuda(format!(
            "oxmoe: internal error, please report it: {op}: {} does not round to {to:?}",
            launch.any()
        ))),
    }
}

/// Does a step that rounds on the CPU.
///
/// # Safety
/// The places that the program names must be valid for the call's shapes, and the schedule must have been written.
pub unsafe fn on_cpu(parameters: &Parameters<'_>, round: &Round) {
    // SAFETY: the caller's contract.
    unsafe {
        match round.to {
            Numbers::Fp8(own) => cpu::quantize_fp8(&fp8(parameters, round, &own)),
            Numbers::Fp8Scales => cpu::expand_scales(&fp8_scales(parameters, round)),
            Numbers::E4m3 => cpu::round_rows_to_e4m3(&rows(parameters, round)),
            Numbers::Mxfp8 => cpu::round_rows_mxfp8(&rows(parameters, round)),
            Numbers::Nvfp4(own) => cpu::round_to_nvfp4(&nvfp4(parameters, round, &own)),
        }
    }
}

/// The tiles of the schedule and their number. Both are null if a step takes all rows.
fn tiles(parameters: &Parameters<'_>, which: Which) -> (*const Tile, *const i32) {
    let schedule = &parameters.program.schedule;
    match which {
        Which::All => (null(), null()),
        Which::Placed | Which::OfTiles => (parameters.at(schedule.tiles), parameters.at(schedule.tile_count)),
    }
}

fn fp8(parameters: &Parameters<'_>, round: &Round, own: &Fp8) -> QuantizeFp8Params {
    let (call, program) = (parameters.call, parameters.program);
    let in_tiles = round.which == Which::OfTiles;
    let (tiles, tile_count) = if in_tiles { tiles(parameters, round.which) } else { (null(), null()) };
    // The number of placed slots lies after the experts' first places.
    let placed = At::range(&program.workspace.offsets).plus(call.layer.experts as usize * size_of::<i32>());
    let (place_of_slot, top_k): (*mut i32, i64) = if own.to_places {
        (parameters.at(At::range(&program.workspace.place_of_slot)), call.slots() / round.rows)
    } else {
        (null_mut(), 0)
    };
    QuantizeFp8Params {
        x: parameters.at(round.from),
        dtype: Dtype::Bf16,
        codes: parameters.at(round.out),
        scales: parameters.at(round.scales),
        rows: round.rows,
        row_count: if round.which == Which::Placed { parameters.at(placed) } else { null_mut() },
        columns: round.columns,
        group: GROUP as i32,
        row_stride: own.strides.0,
        group_stride: own.strides.1,
        eps: EPS,
        powers: false,
        tiles,
        tile_count,
        tile_rows: if in_tiles { program.schedule.tile_tokens } else { 0 },
        scaling: own.scaling,
        given: parameters.at(own.of_all),
        row_threads: fp8_ops::row_threads(round.columns),
        place_of_slot,
        top_k: top_k as i32,
        x_is_older: round.x_is_older,
    }
}

fn fp8_scales(parameters: &Parameters<'_>, round: &Round) -> ExpandScalesParams {
    let Operands { scales_are_powers: powers, scale_strides: (row_stride, group_stride), .. } = *parameters.operands;
    ExpandScalesParams {
        scales: parameters.at(round.from),
        powers,
        row_stride,
        group_stride,
        table: parameters.at(round.scales),
        rows: round.rows as i32,
        groups: round.columns / GROUP as i32,
        scales_are_older: round.x_is_older,
    }
}

/// The parameters for rounding rows to MXFP8, or to e4m3 with one scale a row.
fn rows(parameters: &Parameters<'_>, round: &Round) -> QuantizeRowsParams {
    let (tiles, tile_count) = tiles(parameters, round.which);
    QuantizeRowsParams {
        x: parameters.at(round.from),
        out: parameters.at(round.out),
        scales: parameters.at(round.scales),
        rows: round.rows as i32,
        columns: round.columns,
        out_columns: round.out_columns,
        tiles,
        tile_count,
        x_is_older: round.x_is_older,
    }
}

/// The parameters for rounding the rows of a schedule.
fn tile_rows(parameters: &Parameters<'_>, round: &Round) -> TileRowsParams {
    TileRowsParams { rows: rows(parameters, round), tile_rows: parameters.program.schedule.tile_tokens }
}

fn nvfp4(parameters: &Parameters<'_>, round: &Round, own: &Nvfp4) -> RoundNvfp4Params {
    let (schedule, ws) = (&parameters.program.schedule, &parameters.program.workspace);
    RoundNvfp4Params {
        x: parameters.at(round.from),
        scales: parameters.at(own.codes_scales),
        out: parameters.at(round.out),
        dtype: parameters.layer.desc.dtype,
        columns: round.columns,
        rows: round.rows as i32,
        tiles: tiles(parameters, round.which).0,
        tile_count: parameters.at(schedule.tile_count),
        tile_rows: schedule.tile_tokens,
        slot_of_place: if own.gathers { parameters.at(At::range(&ws.slot_of_place)) } else { null_mut() },
        row_divisor: own.row_divisor,
        by_place: own.by_place,
        global_scales: parameters.at(own.factors),
        x_is_older: round.x_is_older,
    }
}
