//! Routing that stands alone: the launches of `sort_by_expert`, and the sort parameters of `topk`, which sorts nothing.

use super::plan::routing::RoutingPlan;
use super::plan::steps::RouteLaunch;
use crate::error::{Error, Result};
use crate::kernel::Stream;
use crate::params::RouteParams;

/// The sort parameters of a top-k after which nothing is sorted.
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

/// Launches the sort of given ids.
pub fn launch(stream: &Stream<'_>, op: &str, plan: &RoutingPlan, route: &RouteParams) -> Result<()> {
    plan.launches().try_for_each(|launch| match launch {
        RouteLaunch::Sort(launch) => stream.launch(op, &launch, route),
        RouteLaunch::Select(_) => Err(Error::Cuda(format!(
            "oxmoe: internal error, please report it: {op}: the plan is of router logits, not of given ids"
        ))),
    })
}
