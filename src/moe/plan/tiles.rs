//! Functions that the choices among a Hopper kernel's tiles share: grids of resident CTAs, and a first tile for few work units.

use super::{max_tiles, units, GemmDesc};
use crate::device::Device;
use crate::kernel::Launch;
use crate::variants::Kernel;

/// CTAs of a kernel that are resident on the GPU at once.
pub fn resident<P>(kernel: Kernel<P>, device: &Device) -> u32 {
    device.multiprocessors * kernel.ctas_per_multiprocessor()
}

/// Work units of `unit_rows` weight rows, if each expert has one tile. The schedule's tile was chosen for that.
pub fn likely_units(gemm: &GemmDesc, unit_rows: u32) -> u32 {
    units(gemm.slots.min(gemm.experts) as u32, (gemm.rows as u32).div_ceil(unit_rows))
}

/// The narrowest of `tiles` that takes so many tokens; the tiles are sorted by tokens. If two tiles have the same width, the first is for
/// up to `few` work units of the second for each CTA of the second that fits.
pub fn narrowest<P>(tiles: &[Kernel<P>], few: u32, gemm: &GemmDesc, tokens: i32, device: &Device) -> Kernel<P> {
    let first = tiles.iter().position(|t| t.tokens >= tokens as u32).unwrap_or(tiles.len() - 1);
    let narrow = tiles[first];
    match tiles.get(first + 1) {
        Some(wide) if wide.tokens == narrow.tokens => {
            if likely_units(gemm, wide.unit_rows()) <= few * resident(wide.gated(gemm.gated), device) {
                narrow
            } else {
                *wide
            }
        }
        _ => narrow,
    }
}

/// The tile that `narrowest` finds in the first list. If K is whole stages of four blocks, it is the narrowest of the second list that
/// takes so many tokens, unless that is wider.
pub fn narrowest_by_k<P>(
    lists: (&[Kernel<P>], &[Kernel<P>]),
    few: u32,
    gemm: &GemmDesc,
    tokens: i32,
    device: &Device,
) -> Kernel<P> {
    let (tiles, fours) = lists;
    let tile = narrowest(tiles, few, gemm, tokens, device);
    let four = fours.iter().find(|four| four.tokens >= tokens as u32);
    four.copied().filter(|four| takes_fours(gemm) && four.tokens <= tile.tokens).unwrap_or(tile)
}

/// Whether K is whole stages of four blocks of 64.
pub fn takes_fours(gemm: &GemmDesc) -> bool {
    gemm.k % 256 == 0
}

/// The launch of one or both GEMMs of a layer. Its CTAs take the kernel's units, weight rows by a tile of the schedule, one after the
/// other.
pub fn launch<P>(gemms: &[&GemmDesc], tile_tokens: i32, kernel: Kernel<P>, device: &Device) -> Launch<P> {
    launch_units(gemms, tile_tokens, (kernel, kernel.unit_rows()), device)
}

/// The launch of one or both GEMMs of a layer. Its CTAs take units of `unit_rows` weight rows by a tile of the schedule.
pub fn launch_units<P>(
    gemms: &[&GemmDesc],
    tile_tokens: i32,
    (kernel, unit_rows): (Kernel<P>, u32),
    device: &Device,
) -> Launch<P> {
    let units_of = |gemm: &&GemmDesc| {
        units(max_tiles(gemm.slots, gemm.experts, tile_tokens) as u32, (gemm.rows as u32).div_ceil(unit_rows))
    };
    let units: u32 = gemms.iter().map(units_of).fold(0, u32::saturating_add);
    Launch {
        kernel,
        grid: units.min(resident(kernel, device)).max(1),
        block: kernel.threads(),
        cluster: 1,
        shared_bytes: kernel.shared_bytes().unwrap_or(0),
    }
}
