//! Tile choice for the Hopper kernel.
use super::*;
use crate::variants::{Sm90Tile, SM90_TILES};

pub fn serves(device: &Device, dtype: Dtype, gated: bool, rows: u32, k: u32) -> bool {
    device.arch == crate::device::Arch::SM90
        && dtype != Dtype::F32
        && k % 8 == 0
        && rows % 16 == 0
        && (!gated || rows % 16 == 0)
}
pub fn tile_rows() -> Vec<u32> {
    let mut r: Vec<u32> = SM90_TILES.iter().map(|t| 64 * t.row_tiles * t.consumers).collect();
    r.sort();
    r.dedup();
    r
}
fn pick(log2: i32) -> Sm90Tile {
    *SM90_TILES.iter().find(|t| t.tokens >= 1 << log2).unwrap_or(&SM90_TILES[3])
}
pub fn tile_log2(up: &GemmDesc, _down: &GemmDesc, _d: &Device) -> i32 {
    let mean = up.slots as f64 / up.experts as f64;
    if mean <= 6.0 {
        4
    } else if mean <= 40.0 {
        6
    } else if mean <= 96.0 {
        7
    } else {
        8
    }
}
pub fn gemm(g: &GemmDesc, log2: i32, d: &Device) -> Launch {
    let variant = pick(log2).variant(g.element, g.gated);
    let rows = 64 * pick(log2).row_tiles * pick(log2).consumers;
    let work = max_tiles(g.slots, g.experts, log2) as u32 * (g.rows as u32).div_ceil(rows);
    Launch {
        variant,
        grid: work.min(d.multiprocessors * variant.ctas_per_multiprocessor()),
        block: variant.threads(),
        cluster: 1,
        shared_bytes: variant.shared_bytes().unwrap_or(0),
    }
}
pub fn variants(e: Element) -> Vec<Variant> {
    SM90_TILES.iter().flat_map(|t| [t.variant(e, true), t.variant(e, false)]).collect()
}
