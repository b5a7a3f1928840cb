//! Launching the routing: top-k, sort by expert and tile schedule, in the one to three kernels that the plan chose.

use super::plan::routing::RoutingPlan;
use crate::error::Result;
use crate::kernel::{Args, Stream};
use crate::params::{Dtype, GroupScore, RouteParams, Scoring, SelectParams};
use crate::variants::Variant;

/// What the routing kernel gets as selection when ids are given.
const NO_SELECTION: SelectParams = SelectParams {
    logits: std::ptr::null(),
    logits_dtype: Dtype::F32,
    tokens: 0,
    experts: 0,
    top_k: 0,
    correction_bias: std::ptr::null(),
    scoring: Scoring::Softmax,
    renormalize: false,
    scale: 1.0,
    group_score: GroupScore::None,
    groups: 0,
    topk_group: 0,
    shared_experts: 0,
    shared_scale: 1.0,
    num_token_non_padded: std::ptr::null(),
    ids: std::ptr::null_mut(),
    weights: std::ptr::null_mut(),
};

pub fn launch(
    stream: &Stream<'_>,
    op: &str,
    plan: &RoutingPlan,
    select: Option<&SelectParams>,
    route: &RouteParams,
) -> Result<()> {
    let select = select.unwrap_or(&NO_SELECTION);
    for launch in plan.launches() {
        let args = match launch.variant {
            Variant::Select { .. } => Args::Select(select),
            Variant::Route { .. } => Args::Route(select, route),
            _ => Args::Sort(route),
        };
        stream.launch(op, &launch, args)?;
    }
    Ok(())
}
