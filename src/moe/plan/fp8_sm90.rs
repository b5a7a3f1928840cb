//! Tile choice of the Hopper grouped GEMMs of e4m3 with block scales.

use super::{max_tiles, GemmDesc};
use crate::device::{Arch, Device};
use crate::error::{Error, Result};
use crate::kernel::Launch;
use crate::moe::weights::LayerDesc;
use crate::quant::fp8::GROUP;
use crate::quant::Format;
use crate::variants::fp8::{Fp8, Fp8Tile, FP8_TILES, WIDE_TOKENS};
use crate::variants::Variant;

/// An error where no kernel takes the layer.
pub fn require(device: &Device, layer: &LayerDesc) -> Result<()> {
    let group = GROUP as i64;
    if device.arch != Arch::SM90 {
        return Err(Error::Unsupported(format!(
            "fp8_block experts on {}; supported: sm_90 (others run on CPU tensors)",
            device.arch
        )));
    }
    if layer.hidden % group != 0 || layer.intermediate % group != 0 {
        return Err(Error::Unsupported(format!(
            "fp8_block experts of hidden {} and intermediate {}; supported: multiples of {group}",
            layer.hidden, layer.intermediate
        )));
    }
    Ok(())
}

/// Whether the layer is served by these kernels.
pub fn serves(device: &Device, layer: &LayerDesc) -> bool {
    layer.format == Format::Fp8Block && require(device, layer).is_ok()
}

/// Up to this many work units of 128 rows for each CTA that fits, units of 64 rows are better.
const FEW_UNITS: u32 = 1;

fn row_blocks(gemm: &GemmDesc, tile: Fp8Tile) -> u32 {
    (gemm.rows as u32).div_ceil(tile.unit_rows())
}

/// CTAs that are resident at once.
fn ctas(gemm: &GemmDesc, tile: Fp8Tile, device: &Device) -> u32 {
    device.multiprocessors * tile.kernel(gemm.gated).ctas()
}

/// The narrowest tile that takes this many tokens.
fn tile(gemm: &GemmDesc, tokens: i32, device: &Device) -> Fp8Tile {
    let first = FP8_TILES.iter().position(|t| t.tokens >= tokens as u32).unwrap_or(FP8_TILES.len() - 1);
    let narrow = FP8_TILES[first];
    match FP8_TILES.get(first + 1) {
        Some(wide) if wide.tokens == narrow.tokens => {
            // One tile an expert is what the schedule's tile was chosen for.
            let units = gemm.slots.min(gemm.experts) as u32 * row_blocks(gemm, *wide);
            if units <= FEW_UNITS * ctas(gemm, *wide, device) {
                narrow
            } else {
                *wide
            }
        }
        _ => narrow,
    }
}

/// The schedule's tile for both GEMMs of a layer: nearly every expert must fit in one, so that weights are read once. us on an H200 of
/// both GEMMs and what quantises, with tiles of 16, 64 and 128: dsv3-tp8 at M = 64 (mean 2) 302, 309, -; at 256 (8) -, 363, 411; at 1024
/// (32) 516, 400, 401; at 4096 (128) -, 825, 614; qwen3-30b-a3b at 64 (4) 150, 151, -; at 256 (16) 181, 158, -; at 1024 (64) -, 207, 197.
pub fn tile_tokens(gemm: &GemmDesc) -> i32 {
    match gemm.slots as f64 / gemm.experts.max(1) as f64 {
        mean if mean <= 4.0 => 16,
        mean if mean <= 32.0 => 64,
        _ => WIDE_TOKENS as i32,
    }
}

/// Whether GEMM1's own epilogue quantises what GEMM2 reads.
pub fn quantises_inside(tile_tokens: i32) -> bool {
    tile_tokens == WIDE_TOKENS as i32
}

pub fn gemm(gemm: &GemmDesc, tile_tokens: i32, device: &Device) -> Launch {
    let tile = tile(gemm, tile_tokens, device);
    let units = max_tiles(gemm.slots, gemm.experts, tile_tokens) as u32 * row_blocks(gemm, tile);
    let kernel = tile.kernel(gemm.gated);
    Launch {
        variant: Variant::Fp8(kernel),
        grid: units.min(ctas(gemm, tile, device)).max(1),
        block: kernel.threads(),
        cluster: 1,
        shared_bytes: kernel.shared_bytes(),
    }
}

pub fn variants(gated: bool) -> Vec<Variant> {
    let gemms = FP8_TILES.iter().flat_map(|t| [gated, false].map(|gated| t.kernel(gated)));
    gemms.chain([Fp8::RowsToE4m3]).map(Variant::Fp8).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::variants::Element;

    #[test]
    fn tiles_grow_with_the_mean_and_every_one_is_chosen() {
        let device = Device::typical(Arch::SM90);
        let mut chosen = Vec::new();
        for tokens in [1, 64, 256, 1024, 4096, 16384] {
            let (element, format) = (Element::Bf16, Format::Fp8Block);
            let gemm = GemmDesc { element, format, gated: true, slots: tokens * 8, experts: 256, rows: 512, k: 7168 };
            let launch = super::gemm(&gemm, tile_tokens(&gemm), &device);
            assert!(launch.shared_bytes <= device.shared_bytes && launch.grid > 0);
            chosen.push(launch.variant);
        }
        chosen.dedup();
        assert_eq!(chosen, FP8_TILES.map(|t| Variant::Fp8(t.kernel(true))));
    }
}
