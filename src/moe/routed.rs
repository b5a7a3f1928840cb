//! The layer in one launch, with the routing inside and without, and the counters of launches that nothing else prepares.
//!
//! With the routing inside, or where `moe_masked` has one launch, nothing zeroes the counters before it runs, so they are the kernel's own, and launches that may overlap must
//! have different ones. Launches on one workspace follow each other: each workspace has its slot of counters.

use super::grouped_gemm;
use super::plan::masked::{MaskedDesc, MaskedPlan};
use super::plan::sm90::ROUTED_WORKSPACES;
use super::plan::{self, Counters, Experts, MoeDesc, MoePlan};
use super::weights::Layer;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::kernel::{Launch, Stream};
use crate::params::{CombineParams, GroupedGemmParams, LayerParams, RouteParams, RoutedLayerParams, SelectParams};
use std::sync::Mutex;

/// (device, address of the workspace), in the order of the slots that were handed out.
static TAKEN: Mutex<Vec<(i32, usize)>> = Mutex::new(Vec::new());

/// The slot of a workspace, the same at every call; None: all of the device's are taken.
fn of(device: i32, workspace: usize) -> Option<i32> {
    let mut taken = TAKEN.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let mut number = 0;
    for &(_, base) in taken.iter().filter(|(other, _)| *other == device) {
        if base == workspace {
            return Some(number);
        }
        number += 1;
    }
    if number as usize == ROUTED_WORKSPACES {
        return None;
    }
    taken.push((device, workspace));
    Some(number)
}

/// The plan of a call and, where it needs one, the slot of its workspace (device, address). Without a slot: the plan without routing
/// inside, which has the same bits.
pub fn plan_call(desc: &MoeDesc, device: &Device, (ordinal, workspace): (i32, usize)) -> Result<(MoePlan, i32)> {
    let plan = MoePlan::new(desc, device)?;
    if !matches!(plan.experts, Experts::Routed(_)) {
        return Ok((plan, 0));
    }
    match of(ordinal, workspace) {
        Some(slot) => Ok((plan, slot)),
        None => Ok((MoePlan::new(&MoeDesc { routes_inside: false, ..*desc }, device)?, 0)),
    }
}

/// The same of rows that lie expert by expert: without a slot a launch makes their schedule.
pub fn plan_masked(
    desc: &MaskedDesc,
    device: &Device,
    (ordinal, workspace): (i32, usize),
) -> Result<(MaskedPlan, i32)> {
    let plan = MaskedPlan::new(desc, device)?;
    if plan.schedule.is_some() {
        return Ok((plan, 0));
    }
    match of(ordinal, workspace) {
        Some(slot) => Ok((plan, slot)),
        None => Ok((MaskedPlan::new(&MaskedDesc { finds_tiles: false, ..*desc }, device)?, 0)),
    }
}

/// Runs a call by its plan for the whole GPU and, where the stream has too small a part of it for a launch whose CTAs wait for each other,
/// by the plan of launches apart, which has the same bits. `run` may have launched the routing by then, which is done anew in the same
/// workspace.
pub fn whole_or_part(stream: &Stream<'_>, run: impl Fn(&Device) -> Result<()>) -> Result<()> {
    match run(stream.device()) {
        Err(Error::TooLarge(_)) => run(&Device { whole: false, ..stream.device().clone() }),
        done => done,
    }
}

/// Before anything of a call is launched: an error where it is known that the stream cannot hold its plan's launch in one.
pub fn require(stream: &Stream<'_>, experts: &Experts) -> Result<()> {
    match experts {
        Experts::Fused(launch) | Experts::Routed(launch) if !stream.holds(launch) => {
            Err(Error::TooLarge("moe: this stream has too few multiprocessors for all CTAs of a launch at once".into()))
        }
        _ => Ok(()),
    }
}

pub fn launch(
    stream: &Stream<'_>,
    launch: &Launch,
    layer: &Layer,
    select: &SelectParams,
    route: &RouteParams,
    (up, down, combine): (GroupedGemmParams, GroupedGemmParams, CombineParams),
    counter_slot: i32,
) -> Result<()> {
    let blocks = |gemm: &GroupedGemmParams| (gemm.k as u32).div_ceil(64) as i32;
    let none = std::ptr::null_mut();
    let params = RoutedLayerParams {
        layer: LayerParams { up, down, combine, max_tiles: route.max_tiles, tiles_done: none, rows_done: none },
        select: *select,
        experts: route.experts,
        first_expert: route.first_expert,
        counter_slot,
        extra_rounds: blocks(&up) / blocks(&down),
    };
    grouped_gemm::launch_routed(stream, "moe: layer", launch, layer, &params)
}

/// The layer in one launch behind the routing's.
pub fn launch_given(
    stream: &Stream<'_>,
    launch: &Launch,
    layer: &Layer,
    route: &RouteParams,
    (up, down, combine): (GroupedGemmParams, GroupedGemmParams, CombineParams),
    max_tiles: i32,
) -> Result<()> {
    let rows_done = plan::counters(max_tiles, layer.desc.hidden).rows_done();
    let params = LayerParams {
        up,
        down,
        combine,
        max_tiles,
        tiles_done: route.counters.wrapping_add(Counters::TILES_DONE),
        rows_done: route.counters.wrapping_add(rows_done),
    };
    grouped_gemm::launch_fused(stream, "moe: GEMM1, GEMM2 and combine", launch, layer, &params)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_workspace_keeps_its_slot() {
        assert_eq!((of(900, 64), of(900, 128), of(901, 64), of(900, 64)), (Some(0), Some(1), Some(0), Some(0)));
        for i in 2..ROUTED_WORKSPACES {
            assert_eq!(of(900, 64 * (i + 1)), Some(i as i32));
        }
        assert_eq!((of(900, 1 << 30), of(900, 128)), (None, Some(1)));
    }
}
