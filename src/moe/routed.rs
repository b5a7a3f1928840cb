//! The layer in one launch, with the routing inside and without.

use super::grouped_gemm;
use super::layer::Layer;
use super::plan::{self, Counters, Experts};
use crate::counters::{self, Counts};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::kernel::{Launch, Stream};
use crate::params::{CombineParams, GroupedGemmParams, LayerParams, RouteParams, RoutedLayerParams, SelectParams};

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

/// `workspace`: where it starts, by which its counters are known.
pub fn launch(
    stream: &Stream<'_>,
    launch: &Launch,
    layer: &Layer,
    select: &SelectParams,
    route: &RouteParams,
    (up, down, combine): (GroupedGemmParams, GroupedGemmParams, CombineParams),
    workspace: *mut u8,
) -> Result<()> {
    const OP: &str = "moe: layer";
    let blocks = |gemm: &GroupedGemmParams| (gemm.k as u32).div_ceil(64) as i32;
    let none = std::ptr::null_mut();
    let params = RoutedLayerParams {
        layer: LayerParams { up, down, combine, max_tiles: route.max_tiles, tiles_done: none, rows_done: none },
        select: *select,
        counters: counters::of_launch(stream, OP, Counts::Layer, workspace, route.counters)?,
        experts: route.experts,
        first_expert: route.first_expert,
        extra_rounds: blocks(&up) / blocks(&down),
    };
    grouped_gemm::launch_routed(stream, OP, launch, layer, &params)
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
