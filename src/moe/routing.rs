//! Launching the routing: top-k, sort by expert and tile schedule, in the one to three kernels that the plan chose.

use super::plan::routing::RoutingPlan;
use super::plan::{self, Experts, GemmsPlan, MoeDesc, MoePlan, MoeWorkspace};
use crate::error::Result;
use crate::kernel::Stream;
use crate::params::{RouteParams, ScheduleParams, SelectParams};
use crate::variants::Family;

/// What a plan says of the schedules.
#[derive(Clone, Copy)]
pub struct Tiling {
    pub tile_tokens: i32,
    pub max_tiles: i32,
    pub counter_count: i32,
    /// Of GEMM2, where they are not GEMM1's.
    pub down_tile_tokens: Option<i32>,
    /// Both GEMMs are one launch.
    pub in_one_launch: bool,
}

impl Tiling {
    pub fn of(plan: &MoePlan) -> Tiling {
        Tiling {
            tile_tokens: plan.tile_tokens,
            max_tiles: plan.max_tiles,
            counter_count: plan.counter_count(),
            down_tile_tokens: plan.down_schedule.map(|(_, tokens)| tokens),
            in_one_launch: matches!(plan.experts, Experts::Gemms(GemmsPlan { down: None, .. })),
        }
    }

    pub fn on_cpu(desc: &MoeDesc) -> Tiling {
        let tile_tokens = plan::CPU_TILE_TOKENS;
        let max_tiles = plan::max_tiles(desc.tokens * desc.top_k, desc.layer.experts, tile_tokens);
        Tiling { tile_tokens, max_tiles, counter_count: 0, down_tile_tokens: None, in_one_launch: false }
    }
}

/// GEMM2's own schedule, of the experts' places.
pub fn down_schedule(
    desc: &MoeDesc,
    route: &RouteParams,
    (ws, base): (&MoeWorkspace, *mut u8),
    tile_tokens: i32,
) -> ScheduleParams {
    ScheduleParams {
        row_counts: route.histogram,
        experts: route.experts,
        rows_each: 0,
        alignment: 1,
        rows: route.tokens * route.top_k,
        tile_tokens,
        tile_step: plan::tile_step(desc, tile_tokens),
        tiles: ws.down_tiles.at(base),
        tile_count: ws.down_tile_count.at(base),
        counters: std::ptr::null_mut(),
        counter_count: 0,
    }
}

/// What top-k gets when nothing is sorted.
pub const NO_SORT: RouteParams = RouteParams {
    ids: std::ptr::null(),
    ids_are_i64: false,
    tokens: 0,
    top_k: 0,
    experts: 0,
    first_expert: 0,
    tile_tokens: 16,
    tile_step: 16,
    max_tiles: 0,
    histogram: std::ptr::null_mut(),
    offsets: std::ptr::null_mut(),
    place_of_slot: std::ptr::null_mut(),
    slot_of_place: std::ptr::null_mut(),
    tiles: std::ptr::null_mut(),
    tile_count: std::ptr::null_mut(),
    counters: std::ptr::null_mut(),
    counter_count: 0,
    block_histogram: std::ptr::null_mut(),
};

pub fn launch(
    stream: &Stream<'_>,
    op: &str,
    plan: &RoutingPlan,
    select: Option<&SelectParams>,
    route: &RouteParams,
) -> Result<()> {
    for launch in plan.launches() {
        match (launch.variant.family, select) {
            (Family::Select | Family::Route, Some(select)) => stream.launch(op, &launch, (select, route))?,
            _ => stream.launch(op, &launch, route)?,
        }
    }
    Ok(())
}
