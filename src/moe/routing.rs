//! Launching the routing: top-k, sort by expert and tile schedule, in the one to three kernels that the plan chose.

use super::plan::routing::RoutingPlan;
use crate::error::Result;
use crate::kernel::{Args, Stream};
use crate::params::{RouteParams, SelectParams};
use crate::variants::Variant;

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
        let args = match (launch.variant, select) {
            (Variant::Select { .. } | Variant::Route { experts_per_lane: 1.., .. }, Some(select)) => {
                Args::Select(select, route)
            }
            _ => Args::Sort(route),
        };
        stream.launch(op, &launch, args)?;
    }
    Ok(())
}
