//! Tile choice of the Hopper grouped GEMM of packed MXFP8 weights, from measurements on H200 (both GEMMs of cold layers, random routing).

use super::tiles;
use super::{mxfp4_sm90, GemmDesc};
use crate::desc::LayerDesc;
use crate::device::Device;
use crate::kernel::Launch;
use crate::quant::Format;
use crate::variants::packed::MXFP8_TILES;
use crate::variants::{Family, Variant};

/// Whether the kernel takes the layer: its sizes are multiples of 32, so that GPUs alone decide. Others have the portable one.
pub fn serves(device: &Device, layer: &LayerDesc) -> bool {
    let (rows, hidden, intermediate) = (layer.up_rows() as u32, layer.hidden as u32, layer.intermediate as u32);
    layer.format == Format::Mxfp8
        && mxfp4_sm90::serves(device, rows, hidden, intermediate)
        && mxfp4_sm90::serves(device, hidden, intermediate, hidden)
}

/// Up to this many work units of 128 rows for each CTA that fits, units of 64 rows are better. us of GEMM1 and of GEMM2, 128 and 64 rows:
///   qwen3-30b-a3b, M = 1 (0.4 and 0.5 units)  12.0 + 5.7, 11.1 + 5.8;   M = 16 (3.7 and 5)  65.1 + 34.2, 64.8 + 34.2
///   dsv3-tp8, M = 16 (1.5 and 21)  95.4 + 48.3, 101.8 + 51.5
const FEW_UNITS: u32 = 1;

/// The narrowest tile that takes this many tokens.
fn tile(gemm: &GemmDesc, tokens: i32, device: &Device) -> Variant {
    tiles::narrowest(&MXFP8_TILES, FEW_UNITS, gemm, tokens, device)
}

/// The schedule's tile for both GEMMs of a layer: nearly every expert must fit in one, so that weights are read and decoded once. us by tile
/// (the borders between the means are chosen, those of 48 and 80 as packed MXFP4's):
///   qwen3-30b-a3b  M 256 (mean 16)  173 at 16, 160 at 32, 169 at 64;   M 1024 (64)  254 at 64, 254 at 128, 308 at 192
///                  M 4096 (256)  669 at 128, 671 at 192
///   gpt-oss-20b    M 256 (32)  272 at 32, 235 at 64, 268 at 128;   M 512 (64)  339 at 64, 322 at 128, 391 at 192
///                  M 1024 (128)  542 at 128, 446 at 192;   M 4096 (512)  1710 at 128, 1404 at 192
///   dsv3-tp8       M 256 (8)  347 at 16, 365 at 32;   M 1024 (32)  515 at 32, 416 at 64, 496 at 128;   M 4096 (128)  1041 at 128, 914 at 192
pub fn tile_tokens(gemm: &GemmDesc) -> i32 {
    match gemm.slots as f64 / gemm.experts.max(1) as f64 {
        mean if mean <= 11.0 => 16,
        mean if mean <= 20.0 => 32,
        mean if mean <= 36.0 => 48,
        mean if mean <= 52.0 => 64,
        mean if mean <= 74.0 => 80,
        mean if mean <= 96.0 => 128,
        _ => 192,
    }
}

/// Both GEMMs.
pub fn gemms(up: &GemmDesc, down: &GemmDesc, tile_tokens: i32, device: &Device) -> Launch {
    let tile = tile(up, tile_tokens, device);
    tiles::launch(&[up, down], tile_tokens, tile.gated(up.gated), device)
}

/// Rounding of so many elements of x, 8 a thread; CTAs go on where there are more than a multiprocessor holds.
pub fn round(elements: i64, device: &Device) -> Launch {
    let variant = Variant::of(Family::RoundRowsMxfp8);
    let ctas = (elements as u64).div_ceil(8 * u64::from(variant.threads()));
    let grid = ctas.min(u64::from(8 * device.multiprocessors)) as u32;
    Launch { variant, grid, block: variant.threads(), cluster: 1, shared_bytes: 0 }
}

pub fn variants(gated: bool) -> Vec<Variant> {
    let gemms = MXFP8_TILES.iter().map(|t| t.gated(gated));
    gemms.chain([Variant::of(Family::RoundRowsMxfp8)]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::Arch;
    use crate::variants::Element;

    #[test]
    fn tiles_grow_with_the_mean_and_every_one_is_chosen() {
        let device = Device::typical(Arch::SM90);
        let mut chosen = Vec::new();
        for tokens in [1, 16, 64, 256, 512, 1024, 1500, 2048, 2500, 4096] {
            let (slots, element, format) = (tokens * 4, Element::Bf16, Format::Mxfp8);
            let gemm = GemmDesc { element, format, gated: true, slots, experts: 128, rows: 5760, k: 2880 };
            let launch = gemms(&gemm, &gemm, tile_tokens(&gemm), &device);
            assert!(launch.shared_bytes <= device.shared_bytes && launch.grid > 0);
            chosen.push(launch.variant);
        }
        chosen.dedup();
        assert_eq!(chosen, MXFP8_TILES.map(|t| t.gated(true)));
    }
}
