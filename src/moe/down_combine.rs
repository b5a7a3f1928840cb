//! GEMM2 and combine in one launch.

use super::grouped_gemm;
use super::plan::down_combine::Panels;
use super::plan::Counters;
use super::weights::Layer;
use crate::error::Result;
use crate::kernel::{Args, Launch, Stream};
use crate::params::{CombineParams, DownCombineParams, GroupedGemmParams, RouteParams};

pub fn launch(
    stream: &Stream<'_>,
    (launch, panels): (&Launch, Panels),
    layer: &Layer,
    route: &RouteParams,
    (down, combine): (GroupedGemmParams, CombineParams),
) -> Result<()> {
    let op = "moe: GEMM2 and combine";
    let params = DownCombineParams {
        // It counts pairs of elements.
        down: GroupedGemmParams { k: down.k / 2, ..down },
        combine,
        offsets: route.offsets,
        slot_of_place: route.slot_of_place,
        experts: route.experts,
        chunks: panels.chunks,
        chunk_tokens: panels.chunk_tokens,
        token_blocks: panels.token_blocks,
        buffers: panels.buffers,
        slots: route.tokens * route.top_k,
        counters: route.counters.wrapping_add(Counters::PANELS),
    };
    stream.launch(op, launch, Args::DownCombine(grouped_gemm::wide_map(op, &layer.down_maps)?, &params))
}
