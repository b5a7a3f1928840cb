//! Tensor maps of a layer's weights, through which the Hopper kernels read the weights. They are encoded when weights are loaded.

use super::plan::{fp8_sm90, sm90};
use crate::desc::LayerDesc;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::params::{Dtype, W13Layout};
use crate::tma::{self, TensorMap};
use crate::variants::signature::MappedGemm;
use crate::variants::{fp8, Family, Kernel};
use std::fmt::Display;

/// Tensor maps of one weight tensor, one for each (row tiles, consumers) that a Hopper tile can have and the weights' shape allows.
/// There are none if a portable kernel serves.
#[derive(Clone, Debug, Default)]
pub struct WeightMaps(Vec<((u32, u32), TensorMap)>);

impl WeightMaps {
    pub fn get(&self, op: impl Display, row_tiles: u32, consumers: u32) -> Result<&TensorMap> {
        self.0.iter().find(|m| m.0 == (row_tiles, consumers)).map(|m| &m.1).ok_or_else(|| {
            Error::Cuda(format!(
                "{op}: the plan wants tiles of {consumers} x {row_tiles} x 64 rows and no such tensor map was encoded"
            ))
        })
    }
}

/// Encodes views of weights w [experts, rows, k], given as (address, rows, k). Their boxes are wgmma A tiles: slices of 16 rows, each with
/// two halves of 8.
///
/// A slice of gated weights has 8 gate rows, then the 8 up rows that belong to them, so that one thread holds both sums. The three layouts
/// of w13 are three distances. [up; gate] is read as if it were [gate; up], and the epilogue swaps the halves.
pub fn encode(
    device: &Device,
    desc: &LayerDesc,
    (data, rows, k): (*const u8, i64, i64),
    gated: bool,
    layout: W13Layout,
) -> Result<WeightMaps> {
    let portable = desc.format.spec().block != 1 || !sm90::serves(device, desc.dtype, gated, rows as u32, k as u32);
    let (experts, rows, k) = (desc.experts as u64, rows as u64, k as u64);
    if fp8_sm90::serves(device, desc) {
        return encode_fp8(data, (experts, rows, k), gated);
    }
    if portable {
        return Ok(WeightMaps::default());
    }
    let split = gated && layout != W13Layout::Interleaved;
    let map = |(row_tiles, consumers): (u32, u32)| -> Result<_> {
        let slices = 4 * row_tiles * consumers;
        // The distances, in rows, are between the rows of a half, between the halves of a slice, between slices. With pairs of row tiles
        // they are between the rows of a half, the tiles of a pair, the halves, the strips of 32 rows, which count on from expert to
        // expert.
        let dims = match (row_tiles, gated) {
            (2, _) if split => [(8, 2, 8), (2, 1, 1), (2, rows / 2, 2), ((2 * experts - 1) * rows / 32, 16, 4)],
            (2, _) => [(8, 4, 8), (2, 2, 1), (2, 1, 2), (experts * rows / 32, 32, 4)],
            (_, false) => [(8, 1, 8), (2, 8, 2), (rows / 16, 16, slices), (experts, rows, 1)],
            (_, true) if split => [(8, 1, 8), (2, rows / 2, 2), (rows / 16, 8, slices), (experts, rows, 1)],
            (_, true) => [(8, 2, 8), (2, 1, 2), (rows / 16, 16, slices), (experts, rows, 1)],
        };
        Ok(((row_tiles, consumers), tma::encode_16bit(data, desc.dtype == Dtype::Bf16, k, &dims)?))
    };
    sm90::tile_shapes(rows as u32).into_iter().map(map).collect::<Result<Vec<_>>>().map(WeightMaps)
}

/// Encodes views of e4m3 w [experts, rows, k], in pairs of elements. Narrow tiles have the views of 16-bit weights; the wide tile has its
/// own (csrc/moe/grouped_gemm_fp8_wide_sm90.cuh). A part of an expert's rows (gate, up or all) may end inside a block of 128. Then the wide
/// tile's view counts parts and strips of 32 rows apart (csrc/moe/grouped_gemm_fp8_wide_cut_sm90.cuh), so that rows after a part's end are
/// read as zeros. All views read columns after k as zeros.
fn encode_fp8(data: *const u8, (experts, rows, k): (u64, u64, u64), gated: bool) -> Result<WeightMaps> {
    let parts = if gated { 2 } else { 1 };
    let part_rows = rows / parts;
    let map = |tile: &Kernel<MappedGemm>| -> Result<_> {
        let slices = 4 * tile.consumers;
        let dims = match gated {
            _ if tile.family == Family::GroupedGemmFp8WideSm90 && part_rows % fp8::BLOCK_ROWS != 0 => {
                [(2, 1, 2), (part_rows / 8, 8, 4), (4, 2, 4), (parts * experts, part_rows, 1)]
            }
            _ if tile.family == Family::GroupedGemmFp8WideSm90 => {
                [(2, 1, 2), (4, 8, 4), (4, 2, 4), (experts * rows / 32, 32, 4)]
            }
            true => [(8, 1, 8), (2, rows / 2, 2), (rows / 16, 8, slices), (experts, rows, 1)],
            false => [(8, 1, 8), (2, 8, 2), (rows / 16, 16, slices), (experts, rows, 1)],
        };
        Ok((tile.map_shape(), tma::encode_16bit(data, true, k / 2, &dims)?))
    };
    fp8::TILES.iter().map(map).collect::<Result<Vec<_>>>().map(WeightMaps)
}
