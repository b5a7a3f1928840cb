//! GEMM2 and combine of e4m3 in one launch (csrc/moe/down_combine_fp8_sm90.cuh): who takes it, and how its output is cut.

use super::{fp8_sm90, MoeDesc};
use crate::device::Device;
use crate::kernel::Launch;
use crate::moe::weights::LayerDesc;
use crate::variants::fp8::{Fp8, WIDE_TOKENS};
use crate::variants::Variant;

/// Columns between the GEMMs that the kernel is made for.
const INNER: i64 = 256;
/// Columns of a panel, tokens of a block, and blocks of tokens that a CTA has room for beside four stages of weights.
const COLUMNS: i64 = 128;
const BLOCK_TOKENS: i64 = 64;
const MOST_BLOCKS: i64 = 10;

/// Panels beyond the two that are written and read let CTAs run apart, as far as all of them stay in L2 (50 MB on an H200).
const BUFFERS: std::ops::RangeInclusive<i64> = 2..=8;
const BUFFER_BYTES: i64 = 36 << 20;

/// How much of the time the CTA with most blocks leaves to the others, at most: as they have the same blocks in every panel, all wait for
/// that one.
const LEAST_EVEN: f64 = 0.8;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Panels {
    pub chunks: i32,
    pub chunk_tokens: i32,
    /// Room for blocks of tokens in a CTA.
    pub token_blocks: i32,
    pub buffers: i32,
}

impl Panels {
    /// Of a layer with `hidden` columns of output.
    pub fn counters(self, hidden: i64) -> i32 {
        2 * self.chunks * (hidden / COLUMNS) as i32
    }
}

/// Most blocks that `slots` slots over `experts` experts can need: every expert may have one that is not full.
fn most_blocks(slots: i64, experts: i64) -> i64 {
    let partial = slots.min(experts);
    partial + (slots - partial) / BLOCK_TOKENS
}

/// Blocks to expect: half a block an expert is not full, or more where it has less than one.
fn usual_blocks(slots: i64, experts: i64) -> f64 {
    let (slots, experts) = (slots as f64, experts as f64);
    (slots / BLOCK_TOKENS as f64 + experts / 2.0).max(experts)
}

/// The kernel that the weights are loaded with.
pub fn variant(device: &Device, layer: &LayerDesc) -> Option<Variant> {
    let fits = device.experimental && fp8_sm90::serves(device, layer) && layer.intermediate == INNER;
    fits.then_some(Variant::Fp8(Fp8::DownCombineFp8Sm90))
}

/// Predicted, not measured. us of dsv3-tp8 (E256 k8 H7168 I256) at M = 1024, 4096, 16384: GEMM2 139, 253, 753 and the combine 30, 120, 470 as
/// launches of their own, together 130, 220, 750:
///   1024    w2 once, 470 MB at 4.3 TB/s, is 110; rows come and go in L2, the combine's 15 MB of output beside them
///   4096    640 blocks of 64 x 7168 x 256 are 150 GFLOP, at 850 TFLOP/s 177, the first and last panel's latency 2 x 8, the busiest CTA 5 blocks
///           where the mean is 4.85
///   16384   two chunks with 1152 blocks each, 541 GFLOP at 950 TFLOP/s 570, 9 blocks for 8.7, 2 x 20 between chunks; L2 has 1.9 GB of weights
///           and rows to read and as much to write in that time, near what it can do: 700 to 800
/// With K = 768 (qwen3-30b-a3b) a CTA has room for three blocks: eight chunks at M = 16384, each with all weights, and with uneven work and
/// padding half as much multiplication again, to save 140 us of combine beside 480 of GEMM2: not worth it.
pub fn plan(desc: &MoeDesc, tile_tokens: i32, device: &Device) -> Option<(Launch, Panels)> {
    let (layer, ctas) = (&desc.layer, i64::from(device.multiprocessors));
    let variant = variant(device, layer)?;
    if tile_tokens != WIDE_TOKENS as i32 {
        return None;
    }
    let tokens_of = |chunks: i64| (desc.tokens + chunks - 1) / chunks;
    let fits = |chunks: &i64| most_blocks(tokens_of(*chunks) * desc.top_k, layer.experts) <= MOST_BLOCKS * ctas;
    let chunk_tokens = tokens_of((1..=desc.tokens).find(fits)?);
    let each = usual_blocks(chunk_tokens * desc.top_k, layer.experts) / ctas as f64;
    if each / each.ceil() < LEAST_EVEN {
        return None;
    }
    let panel_bytes = chunk_tokens * desc.top_k * COLUMNS * 2;
    let buffers = (BUFFER_BYTES / panel_bytes).clamp(*BUFFERS.start(), *BUFFERS.end()).min(layer.hidden / COLUMNS);
    let panels = Panels {
        chunks: ((desc.tokens + chunk_tokens - 1) / chunk_tokens) as i32,
        chunk_tokens: chunk_tokens as i32,
        token_blocks: ((most_blocks(chunk_tokens * desc.top_k, layer.experts) + ctas - 1) / ctas) as i32,
        buffers: buffers as i32,
    };
    let launch = Launch {
        variant,
        // NOTE: all CTAs must fit on the GPU at once: they wait for each other.
        grid: device.multiprocessors,
        block: variant.threads(),
        cluster: 1,
        shared_bytes: variant.shared_bytes()?,
    };
    Some((launch, panels))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::Arch;
    use crate::params::Dtype;
    use crate::quant::Format;

    fn panels(experts: i64, top_k: i64, tokens: i64) -> Option<Panels> {
        let layer = LayerDesc {
            experts,
            hidden: 7168,
            intermediate: INNER,
            gated: true,
            dtype: Dtype::Bf16,
            format: Format::Fp8Block,
        };
        let desc = MoeDesc { layer, tokens, top_k, logits: None, routes_inside: false };
        let device = Device { experimental: true, ..Device::typical(Arch::SM90) };
        plan(&desc, WIDE_TOKENS as i32, &device).map(|(launch, panels)| {
            assert_eq!(launch.grid, device.multiprocessors);
            let slots = i64::from(panels.chunk_tokens) * top_k;
            assert!(i64::from(panels.chunks - 1) * i64::from(panels.chunk_tokens) < tokens);
            assert!(i64::from(panels.chunks) * i64::from(panels.chunk_tokens) >= tokens);
            assert!(most_blocks(slots, experts) <= i64::from(panels.token_blocks) * 132 && panels.token_blocks <= 10);
            panels
        })
    }

    #[test]
    fn dsv3() {
        let panels = |tokens| panels(256, 8, tokens);
        let of = |chunks, chunk_tokens, token_blocks, buffers| Panels { chunks, chunk_tokens, token_blocks, buffers };
        assert_eq!(panels(1024), Some(of(1, 1024, 3, 8)));
        assert_eq!(panels(4096), Some(of(1, 4096, 6, 4)));
        assert_eq!(panels(16384), Some(of(2, 8192, 10, 2)));
        assert_eq!(panels(16383), Some(of(2, 8192, 10, 2)));
    }

    #[test]
    fn work_that_is_not_even_goes_to_separate_launches() {
        assert_eq!(panels(8, 2, 512), None);
        for tokens in (300..70000).step_by(97) {
            panels(256, 8, tokens);
            panels(512, 10, tokens);
            panels(40, 4, tokens);
        }
    }
}
