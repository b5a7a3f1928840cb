//! Tile, grid and warps of the portable grouped GEMMs: sm_80, 89, 100 and 120, and on sm_90 the shapes that the Hopper kernel refuses.

use super::kernels::{GemmLaunches, KernelSet};
use super::steps::GemmLaunch;
use super::{element, max_tiles, units, GemmDesc};
use crate::device::{Arch, Device};
use crate::kernel::Launch;
use crate::params::GroupedGemmParams;
use crate::quant::{Format, Weights};
use crate::variants::portable;
use crate::variants::{Element, Kernel, Variant};

pub const KERNELS: KernelSet = KernelSet {
    serves: |_, _| true,
    tile_tokens: |gemms| tile_tokens(&gemms.likely[0], &gemms.likely[1], gemms.device),
    launches: |gemms, tile_tokens| {
        GemmLaunches::Apart([gemms.up, gemms.down].map(|of| GemmLaunch::Plain(gemm(&of, tile_tokens, gemms.device))))
    },
    variants: |layer| variants(element(layer.dtype), layer.format),
    ..KernelSet::NONE
};

/// The kernels walk their work in a fixed stride: the grid has the CTAs that are resident at once.
const PERSISTENT: bool = true;

/// The form in which a kernel reads MXFP4 scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scales {
    /// The checkpoint's order: the scales of a row lie one after another.
    Checkpoint,
    /// The packed form: scales lie in the order of the threads.
    Packed,
}

/// The form in which the kernels here read MXFP4 scales.
const SCALES: Scales = Scales::Packed;

/// Fewest warps a CTA may have.
///
/// Non-persistent kernels that read MXFP4 scales where the checkpoint has them (no swizzled layout) need 4 warps on sm_120: with the one
/// or two that a small tile would get, they fault or give wrong sums.
pub fn min_warps(arch: Arch, persistent: bool, format: Format, scales: Scales) -> u32 {
    if arch.image() == "120f" && !persistent && format.weights() == Weights::Mxfp4 && scales == Scales::Checkpoint {
        4
    } else {
        1
    }
}

/// The text of `explain` on the rule of `min_warps`. It is given for MXFP4 on sm_120, because the rule could matter there.
pub fn warps_rule(device: &Device, format: Format) -> Option<String> {
    let strict = min_warps(device.arch, false, format, Scales::Checkpoint);
    let here = min_warps(device.arch, PERSISTENT, format, SCALES);
    (strict > 1).then(|| {
        format!(
            "warps a GEMM needs: {here}; non-persistent kernels on the checkpoint's scales would need {strict} on {}, these are persistent and read packed ones",
            device.arch
        )
    })
}

/// The tiles that can run a GEMM, by tokens.
fn tiles<'a>(gemm: &GemmDesc, device: &'a Device) -> impl Iterator<Item = Kernel<GroupedGemmParams>> + 'a {
    let vector = if gemm.k % 8 == 0 { 8 } else { 1 };
    let warps = min_warps(device.arch, PERSISTENT, gemm.format, SCALES);
    gemm.format
        .spec()
        .portable
        .iter()
        .copied()
        .filter(move |t| t.vector == vector && t.warps >= warps && portable::shared_bytes(t) <= device.shared_bytes)
}

/// CTAs that a multiprocessor holds. It has 1 KiB more than a CTA may ask for, and keeps 1 KiB for each CTA.
fn resident(tile: Kernel<GroupedGemmParams>, device: &Device) -> u32 {
    portable::ctas(&tile).min((device.shared_bytes + 1024) / (portable::shared_bytes(&tile) + 1024))
}

/// Blocks of weight rows of an expert.
fn row_blocks(gemm: &GemmDesc, tile: Kernel<GroupedGemmParams>) -> u32 {
    (gemm.rows as u32).div_ceil(tile.rows)
}

/// The narrowest tile that takes `tokens` tokens. If there is none, the widest tile.
fn tile(gemm: &GemmDesc, tokens: u32, device: &Device) -> Kernel<GroupedGemmParams> {
    let mut fitting = tiles(gemm, device).filter(|t| t.tokens >= tokens);
    fitting.next().or_else(|| tiles(gemm, device).last()).expect("every device has the shared memory of some tile")
}

/// The schedule's tile for both GEMMs of a layer. Up to a mean of 8 tokens an expert nearly all experts fit in 16, and weights are read
/// once. Above 192, tokens and weights are read from shared memory (and weights decoded) less often, which pays for the padding. It does
/// not pay if the wide tile leaves a multiprocessor one CTA and the narrower tile leaves it two (plain weights on sm_80). No border of
/// MXFP4 was measured.
fn tile_tokens(up: &GemmDesc, down: &GemmDesc, device: &Device) -> i32 {
    let mean = up.slots as f64 / up.experts.max(1) as f64;
    let overlaps = |tokens| resident(tile(up, tokens, device), device).min(2);
    let wanted = if mean <= 8.0 {
        16
    } else if mean <= 192.0 || overlaps(128) < overlaps(64) {
        64
    } else {
        128
    };
    let fills = |tokens: u32| {
        [up, down].into_iter().all(|g| {
            units(max_tiles(g.slots, g.experts, tokens as i32) as u32, row_blocks(g, tile(g, tokens, device)))
                >= device.multiprocessors
        })
    };
    let mut tokens = wanted.min(tile(up, wanted, device).tokens).min(tile(down, wanted, device).tokens);
    // With few experts tiles become narrower, until every multiprocessor has work.
    while tokens > 16 && !fills(tokens) {
        tokens /= 2;
    }
    tokens as i32
}

fn gemm(gemm: &GemmDesc, tile_tokens: i32, device: &Device) -> Launch<GroupedGemmParams> {
    let tile = tile(gemm, tile_tokens as u32, device);
    let kernel = tile.with_element(gemm.element).gated(gemm.gated);
    let units = units(max_tiles(gemm.slots, gemm.experts, tile_tokens) as u32, row_blocks(gemm, tile));
    Launch {
        kernel,
        grid: units.min(resident(tile, device) * device.multiprocessors).max(1),
        block: kernel.threads(),
        cluster: 1,
        shared_bytes: portable::shared_bytes(&tile),
    }
}

/// Every kernel with a GEMM in it that calls of a layer may take.
fn variants(element: Element, format: Format) -> Vec<Variant> {
    let forms = |t: &Kernel<_>| [true, false].map(|gated| t.with_element(element).gated(gated).variant());
    format.spec().portable.iter().flat_map(forms).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::variants::portable::{FP8_TILES, MXFP4_TILES, PLAIN_TILES};
    use crate::variants::{Family, Form};

    const ARCHS: [u32; 5] = [80, 89, 90, 100, 120];

    fn layer(tokens: i64, top_k: i64, experts: i64, hidden: i64, intermediate: i64) -> (GemmDesc, GemmDesc) {
        let (element, format, slots) = (Element::Bf16, Format::Bf16, tokens * top_k);
        let up = GemmDesc { element, format, gated: true, slots, experts, rows: 2 * intermediate, k: hidden };
        (up, GemmDesc { gated: false, rows: hidden, k: intermediate, ..up })
    }

    fn of(format: Format, (up, down): (GemmDesc, GemmDesc)) -> (GemmDesc, GemmDesc) {
        (GemmDesc { format, ..up }, GemmDesc { format, ..down })
    }

    #[test]
    fn warps_of_the_checkpoints_mxfp4_scales_on_sm120() {
        use Scales::{Checkpoint, Packed};
        assert_eq!(min_warps(Arch::SM120, false, Format::Mxfp4, Checkpoint), 4);
        assert_eq!(min_warps(Arch(121), false, Format::Mxfp4, Checkpoint), 4);
        assert_eq!(min_warps(Arch::SM120, true, Format::Mxfp4, Checkpoint), 1);
        assert_eq!(min_warps(Arch::SM120, false, Format::Mxfp4, Packed), 1);
        assert_eq!(min_warps(Arch::SM120, false, Format::Bf16, Checkpoint), 1);
        for arch in [80, 89, 90, 100, 103] {
            assert_eq!(min_warps(Arch(arch), false, Format::Mxfp4, Checkpoint), 1);
        }
    }

    #[test]
    fn the_rule_is_said_where_it_could_matter() {
        let said = |arch, format| warps_rule(&Device::typical(Arch(arch)), format);
        let text = said(120, Format::Mxfp4).unwrap_or_default();
        assert!(text.contains("needs: 1;") && text.contains("would need 4 on sm_120"), "{text}");
        assert_eq!([said(120, Format::Bf16), said(90, Format::Mxfp4), said(80, Format::Mxfp4)], [None, None, None]);
    }

    #[test]
    fn every_tile_fits_every_device() {
        for t in [PLAIN_TILES, MXFP4_TILES].concat() {
            assert!(portable::shared_bytes(&t) <= 99 * 1024, "{t:?}");
            assert!((2..=4).contains(&portable::ctas(&t)) && portable::registers(&t) <= 255, "{t:?}");
        }
        for t in [FP8_TILES.as_slice(), Form::Mxfp8.row().portable].concat() {
            assert!((2..=4).contains(&portable::ctas(&t)) && portable::registers(&t) <= 255, "{t:?}");
        }
        // Two CTAs of every tile of narrow weights fit if a multiprocessor has 100 KiB.
        for t in [MXFP4_TILES.as_slice(), &FP8_TILES, Form::Mxfp8.row().portable].concat() {
            assert!(resident(t, &Device::typical(Arch::SM120)) >= 2, "{t:?}");
        }
        for arch in ARCHS {
            assert!(Device::typical(Arch(arch)).shared_bytes >= 99 * 1024);
        }
    }

    #[test]
    fn tile_follows_the_mean() {
        for (tokens, tile) in [(1, 16), (16, 16), (128, 16), (256, 64), (1024, 64), (4096, 128)] {
            let (up, down) = layer(tokens, 8, 128, 2048, 768);
            for arch in ARCHS {
                // Two CTAs of 64 tokens fit into the 164 KiB of sm_80, but only one CTA of 128 tokens.
                let tile = if arch == 80 { tile.min(64) } else { tile };
                assert_eq!(tile_tokens(&up, &down, &Device::typical(Arch(arch))), tile, "{tokens} tokens on {arch}");
            }
        }
        for (tokens, tile) in [(1, 16), (128, 16), (256, 64), (1024, 64), (4096, 128)] {
            let (up, down) = of(Format::Mxfp4, layer(tokens, 8, 128, 2048, 768));
            for arch in ARCHS {
                assert_eq!(tile_tokens(&up, &down, &Device::typical(Arch(arch))), tile, "{tokens} tokens on {arch}");
            }
        }
    }

    /// Tiles of e4m3 end at 64 tokens. The one tile of MXFP8 has 64 tokens too, and takes every schedule.
    #[test]
    fn tiles_of_e4m3() {
        for format in [Format::Fp8Block, Format::Mxfp8] {
            for (tokens, tile) in [(1, 16), (128, 16), (256, 64), (1024, 64), (4096, 64)] {
                let (up, down) = of(format, layer(tokens, 8, 128, 2048, 768));
                for arch in ARCHS {
                    let device = Device::typical(Arch(arch));
                    assert_eq!(tile_tokens(&up, &down, &device), tile, "{tokens} tokens on {arch}");
                    let width = super::tile(&up, tile as u32, &device).tokens;
                    assert_eq!(width, if format == Format::Mxfp8 { 64 } else { tile as u32 });
                }
            }
        }
    }

    #[test]
    fn few_experts_get_narrow_tiles() {
        let (up, down) = layer(256, 1, 1, 1024, 512);
        assert_eq!(tile_tokens(&up, &down, &Device::typical(Arch::SM80)), 16);
    }

    #[test]
    fn odd_k_takes_single_elements_in_its_own_tile() {
        let (up, down) = layer(4096, 8, 128, 511, 128);
        let device = Device::typical(Arch::SM120);
        let tile = tile_tokens(&up, &down, &device);
        assert_eq!(tile, 64);
        let vector = |g: &GemmDesc| {
            let chosen = gemm(g, tile, &device).kernel;
            assert_eq!(chosen.family, Family::GroupedGemmPortable);
            chosen.vector
        };
        assert_eq!((vector(&up), vector(&down)), (1, 8));
    }

    #[test]
    fn grids_are_resident_and_cover_small_work() {
        for arch in ARCHS {
            let device = Device::typical(Arch(arch));
            let formats = [Format::Bf16, Format::Mxfp4, Format::Mxfp8, Format::Fp8Block];
            for (tokens, format) in [0, 1, 7, 64, 4096].into_iter().flat_map(|t| formats.map(|format| (t, format))) {
                let (up, down) = of(format, layer(tokens, 8, 128, 2048, 768));
                let tile = tile_tokens(&up, &down, &device);
                for g in [up, down] {
                    let launch = gemm(&g, tile, &device);
                    let resident = launch.grid.div_ceil(device.multiprocessors);
                    assert!(launch.grid >= 1 && resident * (launch.shared_bytes + 1024) <= device.shared_bytes + 1024);
                    let units = max_tiles(g.slots, g.experts, tile) as u32
                        * row_blocks(&g, super::tile(&g, tile as u32, &device));
                    assert!(launch.grid == units.max(1) || launch.grid.is_multiple_of(device.multiprocessors));
                }
            }
        }
    }

    #[test]
    fn every_variant_is_chosen_somewhere() {
        let device = Device::typical(Arch::SM120);
        for format in [Format::Bf16, Format::Mxfp4, Format::Mxfp8, Format::Fp8Block] {
            let mut chosen = Vec::new();
            // Only 16-bit tokens may have a K that is no multiple of 8.
            let last = if matches!(format, Format::Bf16 | Format::Mxfp4) { 511 } else { 512 };
            for (tokens, hidden) in [(1, 2048), (512, 2048), (8192, 2048), (64, last)] {
                let up = GemmDesc { format, ..layer(tokens, 8, 128, hidden, 768).0 };
                let down = GemmDesc { gated: false, rows: hidden, ..up };
                let tile = tile_tokens(&up, &down, &device);
                chosen.extend([&up, &down].map(|of| gemm(of, tile, &device).kernel.variant()));
            }
            for variant in variants(Element::Bf16, format) {
                assert!(chosen.contains(&variant), "{variant:?}");
            }
        }
    }
}
