//! Tile choice of the Hopper grouped GEMM of packed NVFP4 weights. Borders are those of packed MXFP4.

use super::tiles;
use super::{mxfp4_sm90, GemmDesc};
use crate::desc::LayerDesc;
use crate::device::Device;
use crate::kernel::Launch;
use crate::quant::Format;
use crate::variants::packed::{NVFP4_FOURS, NVFP4_TILES};
use crate::variants::{Family, Variant};

/// Whether the kernel takes the layer: its sizes are multiples of 16, so that GPUs alone decide.
pub fn serves(device: &Device, layer: &LayerDesc) -> bool {
    let (rows, hidden, intermediate) = (layer.up_rows() as u32, layer.hidden as u32, layer.intermediate as u32);
    layer.format.is_nvfp4()
        && mxfp4_sm90::serves(device, rows, hidden, intermediate)
        && mxfp4_sm90::serves(device, hidden, intermediate, hidden)
}

/// There is one tile of each width.
const FEW_UNITS: u32 = 0;

/// The schedule's tile for both GEMMs of a layer. us of 64 experts of qwen3-30b-a3b on rows in order: mean 8 59 at 16, 63 at 48; 16 68 at 32,
/// 64 at 48.
pub fn tile_tokens(gemm: &GemmDesc) -> i32 {
    mxfp4_sm90::tile_of_mean(gemm.slots as f64 / gemm.experts.max(1) as f64, tiles::takes_fours(gemm))
}

/// Both GEMMs.
pub fn gemms(up: &GemmDesc, down: &GemmDesc, tile_tokens: i32, device: &Device) -> Launch {
    let tile = tiles::narrowest_by_k((&NVFP4_TILES, &NVFP4_FOURS), FEW_UNITS, up, tile_tokens, device);
    tiles::launch(&[up, down], tile_tokens, tile.gated(up.gated), device)
}

/// The kernel that rounds activations to NVFP4.
pub fn round_rows(hopper: bool) -> Variant {
    Variant::of(if hopper { Family::RoundRowsNvfp4 } else { Family::RoundRowsNvfp4Portable })
}

/// Rounding of up to so many elements, 8 a thread; CTAs go on where there are more than a multiprocessor holds.
fn round(elements: i64, device: &Device) -> Launch {
    let variant = round_rows(device.is_hopper());
    let ctas = (elements as u64).div_ceil(8 * u64::from(variant.threads()));
    let grid = ctas.clamp(1, u64::from(variant.ctas_per_multiprocessor() * device.multiprocessors)) as u32;
    Launch { variant, grid, block: variant.threads(), cluster: 1, shared_bytes: 0 }
}

/// Of x and, in front of portable kernels, of GEMM1's output, where activations are NVFP4.
pub fn rounds(layer: &LayerDesc, slots: i64, device: &Device) -> [Option<Launch>; 2] {
    let rounds = layer.format == Format::Nvfp4A4;
    [(layer.hidden, rounds), (layer.intermediate, rounds && !serves(device, layer))]
        .map(|(columns, rounds)| rounds.then(|| round(slots * columns, device)))
}

pub fn variants(layer: &LayerDesc) -> Vec<Variant> {
    let gemms = NVFP4_TILES.iter().chain(&NVFP4_FOURS).map(|t| t.gated(layer.gated));
    let round = round_rows(true);
    let round = (layer.format == Format::Nvfp4A4).then_some(round);
    gemms.chain(round).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::Arch;
    use crate::variants::Element;

    #[test]
    fn stages_of_four_blocks_where_k_is_whole_ones() {
        let (device, element, format) = (Device::typical(Arch::SM90), Element::Bf16, Format::Nvfp4);
        let chosen = |k, mean: i64| {
            let gemm = GemmDesc { element, format, gated: true, slots: 32 * mean, experts: 32, rows: 4096, k };
            gemms(&gemm, &gemm, tile_tokens(&gemm), &device).variant
        };
        let fours = NVFP4_FOURS.map(|t| t.gated(true));
        assert_eq!([20, 40, 61].map(|mean| chosen(7168, mean)), fours);
        assert!([20, 40, 61].iter().all(|&mean| !fours.contains(&chosen(2880, mean))));
        assert_eq!((chosen(7168, 112), chosen(7168, 113)), (chosen(2880, 96), chosen(2880, 97)));
    }

    #[test]
    fn tiles_grow_with_the_mean_and_every_one_is_chosen() {
        let device = Device::typical(Arch::SM90);
        let mut chosen = Vec::new();
        for tokens in [1, 16, 64, 256, 512, 1024, 2048, 2500, 4096] {
            let (slots, element, format) = (tokens * 4, Element::Bf16, Format::Nvfp4);
            let gemm = GemmDesc { element, format, gated: true, slots, experts: 128, rows: 5760, k: 2880 };
            let launch = gemms(&gemm, &gemm, tile_tokens(&gemm), &device);
            assert!(launch.shared_bytes <= device.shared_bytes && launch.grid > 0);
            chosen.push(launch.variant);
        }
        chosen.dedup();
        assert_eq!(chosen, NVFP4_TILES.map(|t| t.gated(true)));
    }
}
