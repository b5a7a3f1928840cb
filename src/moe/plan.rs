//! Plans: every kernel, tile, grid, shared-memory and workspace size of a layer call, as a pure function of shape and device. There is no tuner,
//! no file and no environment: a plan is the same on every rank, and `oxmoe.explain` prints it without a GPU. `program` puts the parts together.

pub mod call;
mod counters;
pub mod fp8_sm90;
mod gemms;
mod kernels;
mod packed_sm90;
mod portable;
pub mod program;
mod rounding;
pub mod rounds;
pub mod routing;
pub mod sm90;
pub mod steps;
mod tiles;
pub mod workspace;

use crate::desc::LayerDesc;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::kernel::{AnyLaunch, Launch};
use crate::params::{CombineParams, Dtype, ScheduleParams};
use crate::quant::{Activations, Format};
use crate::variants::{self, Element, Family, Variant};
pub use call::{CallDesc, InOrder, Routed, Source, X};
pub use counters::{counters, Counters};
use gemms::set_of;
pub use program::{program, Program};
use routing::{RoutingDesc, RoutingPlan};
use std::fmt::Write as _;
use steps::Schedule;
pub use steps::{Step, Task};
pub use workspace::Workspace;

/// Bytes of a row of e4m3, padded with zeros to whole blocks of packed weights.
pub fn e4m3_columns(columns: i64) -> usize {
    (columns as usize).next_multiple_of(64)
}

/// The narrowest tile that a plan chooses.
const MIN_TILE_TOKENS: i32 = 8;

/// CPU tiles: wide enough that a weight panel is read once for all tokens of an expert in every usual batch.
pub const CPU_TILE_TOKENS: i32 = 128;

/// The most tiles of a schedule for `slots` slots of `experts` experts: every expert may have one partial tile.
pub fn max_tiles(slots: i64, experts: i64, tile_tokens: i32) -> i32 {
    let partial = slots.min(experts);
    (partial + (slots - partial) / tile_tokens as i64) as i32
}

/// The units of work if each tile has a unit for each block of rows. Only sizes that no memory holds, as `explain` takes them, do not fit into
/// 32 bits.
pub fn units(tiles: u32, row_blocks: u32) -> u32 {
    tiles.saturating_mul(row_blocks)
}

/// The facts of GEMM1 for a GEMM2 that begins where GEMM1 ends (csrc/moe/gemm_overlap_sm90.cuh).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Overlap {
    /// CTAs of GEMM1.
    pub ctas: u32,
    /// Units of GEMM1 for a tile.
    pub units: u32,
}

fn element(dtype: Dtype) -> Element {
    if dtype == Dtype::F16 {
        Element::F16
    } else {
        Element::Bf16
    }
}

/// An error if no kernel of this GPU takes the layer.
pub fn require(layer: &LayerDesc, device: &Device) -> Result<()> {
    layer.format.require_cuda()?;
    if layer.format.is_fp8() {
        fp8_sm90::require(layer)?;
    }
    if layer.format.activations() == Activations::E4m3Rows {
        packed_sm90::require_e4m3(device, layer)?;
    }
    Ok(())
}

/// The routing launches of `tokens` tokens.
pub fn routing(
    tokens: i64,
    top_k: i64,
    experts: i64,
    logits: Option<routing::Logits>,
    device: &Device,
) -> Result<RoutingPlan> {
    let (tokens, top_k, experts) = (tokens as u32, top_k as u32, experts as u32);
    RoutingPlan::new(&RoutingDesc { tokens, top_k, experts, logits, sm: device.arch.0 }).ok_or_else(|| {
        let router = match logits {
            Some(logits) => format!("router logits (groups: {})", logits.groups),
            None => "given ids".into(),
        };
        Error::Unsupported(format!(
            "routing {experts} experts with top-{top_k} and {router}; supported on GPUs: up to {} experts, fused shared ones included, with logits in up to 32 groups, top_k up to {}",
            routing::MAX_EXPERTS, routing::MAX_TOP_K
        ))
    })
}

/// One grouped GEMM, as data for the choice of its tile.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GemmDesc {
    pub element: Element,
    /// Format of the weights.
    pub format: Format,
    pub gated: bool,
    pub slots: i64,
    pub experts: i64,
    pub rows: i64,
    pub k: i64,
}

impl GemmDesc {
    /// Columns of the output.
    pub fn outputs(&self) -> i64 {
        self.rows / if self.gated { 2 } else { 1 }
    }
}

/// The launch that makes a schedule from the experts' numbers of rows.
fn schedule() -> Launch<ScheduleParams> {
    let kernel = variants::routing::SCHEDULE.kernel();
    Launch { kernel, grid: 1, block: kernel.threads(), cluster: 1, shared_bytes: 0 }
}

/// Columns that a thread of the combine takes. With few outputs, few columns are better: there is less code to fetch. With many outputs,
/// many columns are better: loads are fewer and larger. us on H200 with 2, 4 and 8 columns:
/// a layer of qwen3 at M = 16 195.1, 196.1, 197.6, at M = 256 303.5, 303.5, 307.6 (8 with spills); the combine alone at M = 4096 72, 51,
/// 37. The borders between them are chosen, not measured.
pub fn combine_columns(tokens: i64, hidden: i64) -> u32 {
    match hidden % 8 {
        0 if tokens * hidden <= 1 << 19 => 2,
        0 if tokens * hidden < 1 << 21 => 4,
        0 => 8,
        _ => 1,
    }
}

/// The launch of the combine. A CTA takes a part of one token's row.
fn combine(tokens: i64, hidden: i64, element: Element) -> Launch<CombineParams> {
    let kernel = variants::routing::combine(element);
    let parts = (hidden as u32).div_ceil(kernel.threads() * combine_columns(tokens, hidden));
    Launch { kernel, grid: units(tokens as u32, parts), block: kernel.threads(), cluster: 1, shared_bytes: 0 }
}

/// Every kernel that some call of this layer can use on this device. These kernels are loaded with the weights.
pub fn reachable(device: &Device, layer: &LayerDesc) -> Vec<Variant> {
    let mut all = (set_of(device, layer).variants)(layer);
    all.extend([variants::routing::combine(element(layer.dtype)).variant(), Variant::of(Family::Schedule)]);
    all.extend(rounding::variants(device, layer.format));
    all.extend(routing::variants());
    all
}

/// The least times of a call on a device, (memory, compute) in microseconds, from the bytes that must move and the flops that must be done.
/// Each expert that is expected to be active under uniform routing is read once, as are x and the output. e4m3 products take half the
/// time of bf16 products.
pub fn floor(layer: &LayerDesc, routed: &Routed, device: &Device) -> (f64, f64) {
    let Routed { tokens, top_k, .. } = *routed;
    let spec = layer.format.spec();
    let matrices = if layer.gated { 3.0 } else { 2.0 };
    let weights = matrices * (layer.hidden * layer.intermediate) as f64;
    let (experts, slots) = (layer.experts as f64, (tokens * top_k) as f64);
    let active = experts * (1.0 - (1.0 - top_k as f64 / experts).max(0.0).powf(tokens as f64));
    let io = 2.0 * (tokens * layer.hidden) as f64 * 2.0;
    let memory = (active * weights * spec.bits_per_weight / 8.0 + io) / device.bandwidth;
    (memory * 1e6, slots * 2.0 * weights / (device.flops * spec.speed) * 1e6)
}

/// The program as text. `device`: None for the CPU backend.
pub fn explain(call: &CallDesc, device: Option<&Device>) -> Result<String> {
    match call.source {
        Source::Routed(routed) => explain_routed(call, &routed, None, device),
        Source::InOrder(rows) => explain_in_order(call, &rows, device),
    }
}

/// The program of a call from router logits as text, and what is different if ids are given.
pub fn explain_both(call: &CallDesc, with_ids: &CallDesc, device: Option<&Device>) -> Result<String> {
    match call.source {
        Source::Routed(routed) => explain_routed(call, &routed, Some(with_ids), device),
        Source::InOrder(_) => explain(call, device),
    }
}

fn explain_routed(
    call: &CallDesc,
    routed: &Routed,
    with_ids: Option<&CallDesc>,
    device: Option<&Device>,
) -> Result<String> {
    let layer = &call.layer;
    let mut text = String::new();
    let form = if layer.gated { "gated" } else { "plain" };
    let _ = writeln!(
        text,
        "MoE layer: {} experts, top-{}, hidden {}, intermediate {} ({form}), {}, {} tokens",
        layer.experts,
        routed.top_k,
        layer.hidden,
        layer.intermediate,
        layer.format.spec().name,
        routed.tokens
    );
    if let Some(device) = device {
        if layer.format != Format::F32 {
            require(layer, device)?;
        }
        let _ = writeln!(
            text,
            "on {} ({}, {} multiprocessors, {} KiB shared memory a CTA)",
            device.name,
            device.arch,
            device.multiprocessors,
            device.shared_bytes / 1024
        );
        let (memory, compute) = floor(layer, routed, device);
        let _ = writeln!(text, "floor: {memory:.1} us of memory traffic, {compute:.1} us of arithmetic");
        if routed.tokens > 0 && layer.dtype != Dtype::F32 {
            let program = program(call, Some(device))?;
            explain_launches(&mut text, &program);
            if let Some(with_ids) = with_ids {
                explain_difference(&mut text, &program, &self::program(with_ids, Some(device))?);
            }
            if let Some(rule) = portable::warps_rule(device, layer.format) {
                let _ = writeln!(text, "{rule}");
            }
        } else if layer.dtype == Dtype::F32 {
            let _ = writeln!(text, "fp32 runs on CPU tensors only");
        }
    } else {
        let _ =
            writeln!(text, "on the CPU ({}), {} threads", crate::cpu::instruction_set(), crate::parallel::threads());
    }
    let workspace = Workspace::of(call);
    let _ = writeln!(text, "workspace: {} bytes", workspace.bytes);
    for range in workspace.ranges() {
        let _ = writeln!(text, "  {:>12} + {:<12} {}", range.offset, range.bytes, range.name);
    }
    Ok(text)
}

/// The schedule and the launches, a line each.
fn explain_launches(text: &mut String, program: &Program) {
    let own = |own: &Schedule| format!("; of GEMM2: up to {}", own.tile_tokens);
    let _ = writeln!(
        text,
        "schedule: tiles of up to {} tokens, at most {} of them{}",
        program.schedule.tile_tokens,
        program.max_tiles,
        program.down_schedule.as_ref().map_or(String::new(), own)
    );
    for (number, launch) in program.launches().enumerate() {
        let _ = writeln!(text, "launch {number}: {}", described(&launch));
    }
    if program.overlap.is_some() {
        let _ = writeln!(text, "GEMM2 begins where GEMM1 ends");
    }
}

/// The launches that are different if ids are given: single ones, or all if their number is another one.
fn explain_difference(text: &mut String, program: &Program, with_ids: &Program) {
    if program.launches().count() != with_ids.launches().count() {
        let _ = writeln!(text, "with topk_ids in place of router logits:");
        return explain_launches(text, with_ids);
    }
    for (number, (launch, other)) in program.launches().zip(with_ids.launches()).enumerate() {
        if launch != other {
            let _ = writeln!(text, "with topk_ids in place of router logits: launch {number}: {}", described(&other));
        }
    }
}

fn described(launch: &AnyLaunch) -> String {
    let cluster = if launch.cluster > 1 { format!(" in clusters of {}", launch.cluster) } else { String::new() };
    format!(
        "{}: {} CTAs{cluster} x {} warps, {} bytes of shared memory",
        launch.variant.symbol(),
        launch.grid,
        launch.block / 32,
        launch.shared_bytes
    )
}

fn explain_in_order(call: &CallDesc, rows: &InOrder, device: Option<&Device>) -> Result<String> {
    let LayerDesc { experts, hidden, intermediate, format, .. } = call.layer;
    let (InOrder { rows, expected, .. }, format) = (rows, format.spec().name);
    let mut text = format!(
        "rows in expert order: {experts} experts, hidden {hidden}, intermediate {intermediate}, {format}, room for {rows} rows, {expected} expected an expert\n"
    );
    for (number, launch) in program(call, device)?.launches().enumerate() {
        let _ = writeln!(text, "launch {number}: {launch}");
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn schedule_length() {
        assert_eq!(max_tiles(3, 128, 16), 3);
        assert_eq!(max_tiles(128 + 32, 128, 16), 130);
        assert_eq!(max_tiles(0, 128, 192), 0);
    }
}
