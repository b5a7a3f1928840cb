//! The two grouped GEMMs: tensor maps at load, parameters and launch per call.

use super::plan::sm90;
use super::weights::{Layer, LayerDesc, Matrix};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::kernel::{Args, Launch, Stream};
use crate::params::{Dtype, GroupedGemmParams, LayerParams, W13Layout};
use crate::tma::{self, TensorMap};
use crate::variants::Variant;

/// Tensor maps of one weight tensor, one per number of rows that a Hopper tile can have. Empty where the portable kernel serves.
#[derive(Clone, Debug, Default)]
pub struct WeightMaps(Vec<(u32, TensorMap)>);

impl WeightMaps {
    fn get(&self, op: &str, rows: u32) -> Result<&TensorMap> {
        self.0.iter().find(|m| m.0 == rows).map(|m| &m.1).ok_or_else(|| {
            Error::Cuda(format!("{op}: the plan wants {rows}-row tiles and no such tensor map was encoded"))
        })
    }
}

/// Views of w [experts, rows, k] whose boxes are wgmma A tiles of `tile_rows` rows: slices of 16, each two halves of 8.
///
/// Gated: a slice has 8 gate rows, then the 8 up rows that belong to them, so that one thread holds both sums. The three layouts of
/// w13 are three distances; [up; gate] is read as if it were [gate; up], and the epilogue swaps the halves.
pub fn encode(device: &Device, desc: &LayerDesc, w: &Matrix, gated: bool, layout: W13Layout) -> Result<WeightMaps> {
    let (experts, rows, k) = (desc.experts as u64, w.rows as u64, w.k as u64);
    if !sm90::serves(device, desc.dtype, gated, w.rows as u32, w.k as u32) {
        return Ok(WeightMaps::default());
    }
    let map = |tile_rows: u32| -> Result<(u32, TensorMap)> {
        let slices = tile_rows / 16;
        // Distances in rows: between the rows of a half, between the halves of a slice, between slices.
        let (row, half, slice) = match (gated, layout) {
            (false, _) => (1, 8, 16),
            (true, W13Layout::Interleaved) => (2, 1, 16),
            (true, _) => (1, rows / 2, 8),
        };
        let dims = [(8, row, 8), (2, half, 2), (rows / 16, slice, slices), (experts, rows, 1)];
        Ok((tile_rows, tma::encode_16bit(w.data, desc.dtype == Dtype::Bf16, k, &dims)?))
    };
    sm90::tile_rows().into_iter().map(map).collect::<Result<Vec<_>>>().map(WeightMaps)
}

pub fn launch(stream: &Stream<'_>, op: &str, launch: &Launch, maps: &WeightMaps, p: &GroupedGemmParams) -> Result<()> {
    match launch.variant {
        Variant::GroupedGemmSm90 { row_tiles, consumers, .. } => {
            stream.launch(op, launch, Args::GemmSm90(maps.get(op, 64 * row_tiles * consumers)?, p))
        }
        _ => stream.launch(op, launch, Args::GemmPortable(p)),
    }
}

/// Both GEMMs, and perhaps the combine, in one launch.
pub fn launch_fused(stream: &Stream<'_>, op: &str, launch: &Launch, layer: &Layer, p: &LayerParams) -> Result<()> {
    let [up, down] = [&layer.up_maps, &layer.down_maps].map(|maps| maps.get(op, sm90::LAYER_ROWS));
    stream.launch(op, launch, Args::LayerSm90(up?, down?, p))
}
