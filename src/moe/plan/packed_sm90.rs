//! Packed weights on Hopper: which layers the kernels serve, and the choice of their tiles, from measurements on H200 (both GEMMs of cold
//! layers, random routing). Each packed format has a row of tiles.

use super::call::Routed;
use super::kernels::{GemmLaunches, Gemms, KernelSet};
use super::steps::{GemmLaunch, RoutedLayerLaunch, Step};
use super::{sm90, tiles, GemmDesc};
use crate::desc::LayerDesc;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::kernel::Launch;
use crate::quant::{Activations, Borders, Format, PackedGemms, Packing, Weights};
use crate::variants::packed::fits_beside_rings;
use crate::variants::Variant;

pub const KERNELS: KernelSet = KernelSet {
    serves,
    tile_tokens: |gemms| tile_tokens(&gemms.likely[0]),
    launches,
    // GEMM1's epilogue rounds its output, except to e4m3, whose scale depends on a whole row.
    rounds_inside: |gemms, _| gemms.up.format.activations() != Activations::E4m3Rows,
    one_launch: layer,
    variants,
    ..KernelSet::NONE
};

/// How tiles are chosen for one kind of `Borders`.
struct Choice {
    /// Most work units for which the first of two tiles of equal width is taken; see `tiles::narrowest`.
    few_units: u32,
    /// The schedule's tile for a mean number of slots an expert. The second argument: whether K is whole stages of four blocks.
    of_mean: fn(f64, bool) -> i32,
}

fn choice(borders: Borders) -> Choice {
    match borders {
        Borders::FourBits => Choice { few_units: MXFP4_FEW_UNITS, of_mean: four_bits },
        // us of 64 experts of qwen3-30b-a3b in NVFP4 on rows in order, by tile: mean 8 59 at 16, 63 at 48; mean 16 68 at 32, 64 at 48.
        Borders::FourBitsOfOneWidth => Choice { few_units: 0, of_mean: four_bits },
        Borders::E4m3 => Choice { few_units: MXFP4_FEW_UNITS, of_mean: e4m3 },
        Borders::Mxfp8 => Choice { few_units: MXFP8_FEW_UNITS, of_mean: mxfp8 },
    }
}

/// The packed form of a format, and how its kernels are launched. Plans call it for packed formats alone.
fn packing(format: Format) -> Packing {
    format.spec().packing.expect("these kernels serve packed formats alone")
}

/// Whether the kernels take a GEMM of this shape: rows of x and of the output are multiples of 16 bytes, and slices of weight rows are
/// whole.
fn takes(device: &Device, rows: i64, k: i64, out_columns: i64) -> bool {
    device.is_hopper() && k % 8 == 0 && rows % 16 == 0 && out_columns % 8 == 0
}

/// Whether the kernels take the layer. Sizes of MXFP8, int4 and NVFP4 are multiples of 32 and 16, so that only the GPU decides.
fn serves(device: &Device, layer: &LayerDesc) -> bool {
    // Rows of packed MXFP4 down weights are padded to a multiple of 32; only the output's columns count.
    let down_rows = if layer.format.weights() == Weights::Mxfp4 { 32 } else { layer.hidden };
    layer.format.is_packed()
        && takes(device, layer.up_rows(), layer.hidden, layer.intermediate)
        && takes(device, down_rows, layer.intermediate, layer.hidden)
}

/// The error for e4m3 activations if these kernels do not take the layer.
pub fn require_e4m3(device: &Device, layer: &LayerDesc) -> Result<()> {
    if serves(device, layer) {
        return Ok(());
    }
    Err(Error::Unsupported(format!(
        "activation_dtype float8_e4m3fn for mxfp4 experts with hidden {}, intermediate {} on {}; supported: sm_90 with a \
hidden size that is a multiple of 8, and CPU tensors (without activation_dtype: every GPU from sm_80)",
        layer.hidden, layer.intermediate, device.arch
    )))
}

/// Up to this many work units of 128 rows for each CTA that fits, units of 64 rows are better. us a layer, 128 and 64 rows:
///   gpt-oss-120b (E128 k4)     M 1 (0.7 units)  30.0, 24.8;   M 4 (2.7)  63.4, 60.6;   M 8 (5.5)  116.3, 111.1;   M 16 (11)  175.2, 175.7
///   deepseek-v4 (E256 k6)      M 1 (0.7)        31.9, 27.4;   M 4 (2.9)  94.9, 91.1
const MXFP4_FEW_UNITS: u32 = 6;

/// If GEMM2's K is at most this, units of 64 rows are better up to `SHORT_FEW_UNITS` only: a unit of GEMM2 is then little work beside the
/// cost of taking it. us a layer of kimi-k2-tp8 (E384 k8 H7168 I256) on an H100, 128 and 64 rows, two runs of each in turn:
///   MXFP4   M 8 (1.0 units)  76.5 78.3, 77.0 76.5;   M 16 (1.9)  121.5 126.5, 130.9 132.3;   M 64 (5.8)  302.9 301.7, 318.5 329.1
///   int4    M 8              79.2 80.4, 80.8 80.0;   M 16        130.4 128.5, 134.6 136.1;   M 64        321.2 306.8, 333.8 337.5
/// The K of these layers is 256. The border above it is chosen; no K between was measured.
const SHORT_K: i64 = 512;
const SHORT_FEW_UNITS: u32 = 1;

/// Up to this many work units of 128 rows for each CTA that fits, units of 64 rows are better. us of GEMM1 and of GEMM2, 128 and 64 rows:
///   qwen3-30b-a3b, M = 1 (0.4 and 0.5 units)  12.0 + 5.7, 11.1 + 5.8;   M = 16 (3.7 and 5)  65.1 + 34.2, 64.8 + 34.2
///   dsv3-tp8, M = 16 (1.5 and 21)  95.4 + 48.3, 101.8 + 51.5
const MXFP8_FEW_UNITS: u32 = 1;

/// The tile of 4-bit weights and bf16 activations. Nearly every expert must fit in one tile, so that weights are decoded once. us by tile
/// (docs/kernels/grouped_gemm_mxfp4_sm90.md has more; borders between the means are chosen):
///   gpt-oss-120b   M 256 (mean 8)  465 at 16, 514 at 32;   M 512 (16)  553 at 32, 567 at 64
///   gpt-oss-20b    M 1024 (128)  446 at 128, 412 at 192
/// 32 experts of dsv3 on rows in order, by mean: 8 218 at 16, 233 at 48; 10 245, 234; 36 298 at 48, 308 at 64; 48 317 at 64, 321 at 80;
/// 56 340, 329; 70 390 at 80, 430 at 128; 84 521, 454. With both GEMMs in one launch (2026-11-24, medians of six in turn) at 48 and 64:
/// dsv3 24 250, 244; 32 272, 264; 36 283, 271; NVFP4 24 257, 257; 32 288, 279; qwen3-30b-a3b, 64 experts, 12 57.9, 59.6; 24 61.0, 61.9; 128
/// experts, 24 115.7, 116.3; 32 117.7, 118.0.
fn four_bits(mean: f64, fours: bool) -> i32 {
    match mean {
        mean if mean <= if fours { 10.0 } else { 11.0 } => 16,
        mean if mean <= 24.0 && fours => 48,
        mean if mean <= 20.0 => 32,
        mean if mean <= 52.0 => 64,
        mean if mean <= 74.0 => 80,
        mean if mean <= if fours { 112.0 } else { 96.0 } => 128,
        _ => 192,
    }
}

/// The tile of MXFP4 weights and e4m3 activations. us of a layer, both quantisations included, by tile:
///   gpt-oss-120b   M 256  418 at 16, 444 at 32;   M 512  471 at 32, 467 at 64;   M 1024  530 at 64, 562 at 128
///                  M 2048 785 at 64, 683 at 128;  M 4096 1223 at 128, 1021 at 192
fn e4m3(mean: f64, _: bool) -> i32 {
    match mean {
        mean if mean <= 11.0 => 16,
        mean if mean <= 44.0 => 64,
        mean if mean <= 96.0 => 128,
        _ => 192,
    }
}

/// The tile of MXFP8 weights. Nearly every expert must fit in one tile, so that weights are read and decoded once. us by tile
/// (the borders between the means are chosen; those of 48 and 80 are packed MXFP4's):
///   qwen3-30b-a3b  M 256 (mean 16)  173 at 16, 160 at 32, 169 at 64;   M 1024 (64)  254 at 64, 254 at 128, 308 at 192
///                  M 4096 (256)  669 at 128, 671 at 192
///   gpt-oss-20b    M 256 (32)  272 at 32, 235 at 64, 268 at 128;   M 512 (64)  339 at 64, 322 at 128, 391 at 192
///                  M 1024 (128)  542 at 128, 446 at 192;   M 4096 (512)  1710 at 128, 1404 at 192
///   dsv3-tp8       M 256 (8)  347 at 16, 365 at 32;   M 1024 (32)  515 at 32, 416 at 64, 496 at 128;   M 4096 (128)  1041 at 128, 914 at 192
fn mxfp8(mean: f64, _: bool) -> i32 {
    match mean {
        mean if mean <= 11.0 => 16,
        mean if mean <= 20.0 => 32,
        mean if mean <= 36.0 => 48,
        mean if mean <= 52.0 => 64,
        mean if mean <= 74.0 => 80,
        mean if mean <= 96.0 => 128,
        _ => 192,
    }
}

/// The schedule's tile for both GEMMs of a layer. `gemm`: GEMM1.
fn tile_tokens(gemm: &GemmDesc) -> i32 {
    let mean = gemm.slots as f64 / gemm.experts.max(1) as f64;
    (choice(packing(gemm.format).borders).of_mean)(mean, tiles::takes_fours(gemm))
}

/// A grid with one CTA less a multiprocessor is better if both GEMMs share a launch, GEMM2's K is not short, and GEMM1 has more work units
/// than this grid has CTAs, up to this many units for each CTA. CTAs of a multiprocessor share the execution units that decode weights.
/// GEMM2's units wait for all of GEMM1's units of their tile, so they wait for the slowest. us of a layer on an H100, whole grid and
/// smaller grid (units for each CTA of the smaller grid):
///   NVFP4   qwen3-30b-a3b    M 2 (1.5)  33.3 29.6;  M 3 (2.2)  40.4 35.0;  M 4 (2.9)  41.6 39.0;  M 6 (4.4)  52.5 51.5
///           qwen3-30b-a3b    M 8 (5.8)  57.9 59.0
///           gpt-oss-120b     M 1 (1.4)  40.2 42.0;  M 2 (2.7)  57.1 50.8;  M 3 (4.1)  69.8 71.4;  M 4 (5.5)  85.8 84.6
///   MXFP4   qwen3-30b-a3b    M 3 (2.2)  34.9 33.3
///           deepseek-v4      M 2 (2.9)  67.2 65.0
///           glm-4.5-air-tp2  M 3 (2.0)  51.0 48.9;  M 4 (2.7)  55.3 55.9
///   int4    qwen3-30b-a3b    M 2 (1.5)  32.4 29.3;  M 3 (2.2)  36.4 34.2;  M 4 (2.9)  38.9 38.5;  M 6 (4.4)  49.5 50.6
const FEWER_CTAS_UNITS: u32 = 3;

/// The launch of both GEMMs, or with e4m3 activations the launches of GEMM1 and GEMM2, between which another launch quantises.
fn launches(gemms: &Gemms<'_>, tile_tokens: i32) -> GemmLaunches {
    let Gemms { up, down, device, .. } = gemms;
    let Packing { form, gemms, borders } = packing(up.format);
    // `last`: the last GEMM of the launch.
    let few_units = |last: &GemmDesc| match choice(borders).few_units {
        few if last.k <= SHORT_K => few.min(SHORT_FEW_UNITS),
        few => few,
    };
    if let PackedGemms::Apart(tiles) = gemms {
        return GemmLaunches::Apart([up, down].map(|gemm| {
            let tile = tiles::narrowest(tiles, few_units(gemm), gemm, tile_tokens, device);
            GemmLaunch::Plain(tiles::launch(&[gemm], tile_tokens, tile.gated(gemm.gated), device))
        }));
    }
    let lists = (form.row().tiles, form.row().fours);
    let tile = tiles::narrowest_by_k(lists, few_units(down), up, tile_tokens, device);
    let launch = tiles::launch(&[up, down], tile_tokens, tile.gated(up.gated), device);
    let fewer = device.multiprocessors * (launch.kernel.ctas_per_multiprocessor() - 1);
    let units = tiles::likely_units(up, launch.kernel.unit_rows());
    let grid = match down.k > SHORT_K && units > fewer && units <= FEWER_CTAS_UNITS * fewer {
        true => launch.grid.min(fewer),
        false => launch.grid,
    };
    GemmLaunches::Together(Launch { grid, ..launch })
}

/// The layer runs in one launch, with the routing inside, up to so many tokens, if they fit beside the rings. us a layer of cold weights on an
/// H200, from router logits, separate launches and one launch:
///   kimi-k2-tp8      int4   M 1  33.2, 22.9;   M 2  35.6, 27.7     (three tokens do not fit)
///   qwen3-30b-a3b    MXFP4  M 3  27.2, 23.2;   M 4  30.6, 26.5;    M 6  38.0, 38.7;   M 8  45.0, 44.4
///   qwen3-30b-a3b    int4   M 1  19.8, 15.0;   M 2  24.7, 20.7;    M 3  27.5, 25.2;   M 4  32.0, 30.4;   M 6  37.7, 37.6
///   qwen3-30b-a3b    NVFP4  M 1  20.4, 14.5;   M 2  25.0, 20.3;    M 3  30.4, 26.0;   M 4  36.4, 30.6
///   glm-4.5-air-tp2  int4   M 1  29.4, 21.3;   M 2  32.7, 31.3;    M 3  42.0, 39.5;   M 4  50.1, 49.2
///   deepseek-v4      MXFP4  M 1  36.2, 33.0;   M 2  55.0, 50.4
const LAYER_TOKENS: i64 = 4;

/// MXFP8's layer in one launch serves one token. us a layer of cold weights on an H200, from router logits, separate launches and one launch,
/// two runs of each in turn:
///   qwen3-30b-a3b    M 1  25.6 25.5, 21.6 21.6;   M 2  32.3 32.8, 31.1 31.5;   M 4  45.4 46.7, 47.3 47.2
///   dsv3-tp8         M 1  33.8 33.8, 33.0 32.9;   M 2  39.4 38.8, 39.8 40.1;   M 4  56.5 55.8, 56.4 56.1
///   glm-4.5-air-tp2  M 1  33.5 33.6, 30.4 30.8;   M 2  47.5 48.5, 49.4 49.0;   M 4  73.7 75.6, 76.1 77.8
const MXFP8_LAYER_TOKENS: i64 = 1;

/// The most tokens of a layer in one launch; 0 if no such launch rounds a format's activations.
fn layer_tokens(format: Format) -> i64 {
    match format.activations() {
        Activations::Kept => LAYER_TOKENS,
        Activations::Mxfp8 => MXFP8_LAYER_TOKENS,
        _ => 0,
    }
}

fn layer(call: &Routed, gemms: &Gemms<'_>) -> Option<Step> {
    let Gemms { up, down, device, .. } = gemms;
    // Bytes of the tokens in shared memory: each token has K blocks of 64 and 16 bytes more, and 64 bytes follow the last.
    let bytes = |gemm: &GemmDesc| call.tokens * ((gemm.k + 63) / 64 * 128 + 16) + 64;
    // A CTA has room for GEMM2's tokens of two tiles. It has more tiles if there are fewer CTAs than tiles.
    let fits =
        call.tokens <= layer_tokens(up.format) && sm90::most_tiles(call, up) <= i64::from(device.multiprocessors);
    let layers = if fits { packing(up.format).form.row().layers } else { &[] };
    let kernel = layers.iter().find(|kernel| {
        sm90::routes_inside(call, up, i64::from(kernel.experts), !kernel.flag)
            && fits_beside_rings(kernel, bytes(up), bytes(down))
    })?;
    let kernel = kernel.gated(up.gated);
    let launch = Launch {
        kernel,
        // NOTE: an SM has one CTA, though two fit: the other place is for the next launch.
        grid: device.multiprocessors,
        block: kernel.threads(),
        cluster: 1,
        shared_bytes: kernel.shared_bytes().unwrap_or(0),
    };
    Some(Step::RoutedLayer(RoutedLayerLaunch::Plain(launch)))
}

/// Every kernel that a layer's calls may take.
fn variants(layer: &LayerDesc) -> Vec<Variant> {
    let Packing { form, gemms, .. } = packing(layer.format);
    let mut all: Vec<Variant> = match gemms {
        PackedGemms::Together => {
            form.row().tiles.iter().chain(form.row().fours).map(|tile| tile.gated(layer.gated).variant()).collect()
        }
        PackedGemms::Apart(tiles) => {
            tiles.iter().flat_map(|tile| [layer.gated, false].map(|gated| tile.gated(gated).variant())).collect()
        }
    };
    if layer_tokens(layer.format) > 0 {
        all.extend(form.row().layers.iter().map(|kernel| kernel.gated(layer.gated).variant()));
    }
    all
}

#[cfg(test)]
mod tests {
    use super::super::routing::Logits;
    use super::super::{program, CallDesc, Source, Task};
    use super::*;
    use crate::device::Arch;
    use crate::kernel::AnyLaunch;
    use crate::params::Dtype;
    use crate::variants::Element;

    /// Every packed format.
    fn packed() -> impl Iterator<Item = Format> {
        crate::quant::FORMATS.into_iter().filter(|row| row.packing.is_some()).map(|row| row.format)
    }

    /// The gated tiles of a format, and those for a K of whole stages of four blocks.
    fn gated_tiles(format: Format) -> [Vec<Variant>; 2] {
        let Packing { form, gemms, .. } = packing(format);
        match gemms {
            PackedGemms::Together => [form.row().tiles, form.row().fours]
                .map(|list| list.iter().map(|tile| tile.gated(true).variant()).collect()),
            PackedGemms::Apart(tiles) => [tiles.iter().map(|tile| tile.gated(true).variant()).collect(), Vec::new()],
        }
    }

    /// The launch with GEMM1.
    fn first(launches: GemmLaunches) -> AnyLaunch {
        match launches {
            GemmLaunches::Together(launch) => launch.any(),
            GemmLaunches::Apart([up, _]) => up.any(),
        }
    }

    /// GEMM1's kernel for so many slots of so many experts.
    fn chosen(format: Format, k: i64, slots: i64, experts: i64) -> Variant {
        let device = Device::typical(Arch::SM90);
        let gemm = GemmDesc { element: Element::Bf16, format, gated: true, slots, experts, rows: 5760, k };
        let gemms = Gemms::alone(&gemm, &device);
        let launch = first(launches(&gemms, tile_tokens(&gemm)));
        assert!(launch.shared_bytes <= device.shared_bytes && launch.grid > 0);
        launch.variant
    }

    #[test]
    fn stages_of_four_blocks_where_k_is_whole_ones() {
        for (format, [_, fours]) in packed().map(|format| (format, gated_tiles(format))) {
            if fours.is_empty() {
                continue;
            }
            let chosen = |k, mean: i64| chosen(format, k, 32 * mean, 32);
            assert_eq!([20, 40, 61].map(|mean| chosen(7168, mean)).to_vec(), fours);
            assert!([20, 40, 61].iter().all(|&mean| !fours.contains(&chosen(2880, mean))));
            assert_eq!((chosen(7168, 112), chosen(7168, 113)), (chosen(2880, 96), chosen(2880, 97)));
        }
    }

    #[test]
    fn tiles_grow_with_the_mean_and_every_one_is_chosen() {
        for format in packed() {
            let tokens = [1, 16, 64, 256, 512, 1024, 1500, 2048, 2500, 4096];
            let mut all = tokens.map(|tokens| chosen(format, 2880, tokens * 4, 128)).to_vec();
            all.dedup();
            assert_eq!(all, gated_tiles(format)[0], "{format:?}");
        }
    }

    #[test]
    fn a_grid_of_one_cta_less_a_multiprocessor_between_two_borders() {
        let device = Device::typical(Arch::SM90);
        let grid = |format, (experts, top_k, hidden, intermediate): (i64, i64, i64, i64), tokens: i64| {
            let layer = LayerDesc { experts, hidden, intermediate, gated: true, dtype: Dtype::Bf16, format };
            let rows = super::super::kernels::Rows::Gathered { tokens, plain_x: true };
            let gemms = Gemms::new(&layer, tokens * top_k, rows, &device);
            let GemmLaunches::Together(launch) = launches(&gemms, tile_tokens(&gemms.likely[0])) else {
                panic!("{format:?} has two launches")
            };
            (launch.grid, launch.kernel.ctas_per_multiprocessor())
        };
        let (qwen3, kimi) = ((128, 8, 2048, 768), (384, 8, 7168, 256));
        // Units have 128 weight rows: 96 units of GEMM1 a token, and 128 of GEMM2.
        let nvfp4 = [1, 2, 4, 5].map(|tokens| grid(Format::Nvfp4, qwen3, tokens));
        assert_eq!(nvfp4, [(224, 2), (132, 2), (132, 2), (264, 2)]);
        // Units have 64 weight rows: 192 units of GEMM1 a token.
        let mxfp4 = [1, 2, 4, 5].map(|tokens| grid(Format::Mxfp4, qwen3, tokens));
        assert_eq!(mxfp4, [(396, 3), (264, 3), (264, 3), (396, 3)]);
        // GEMM2's K is short.
        assert_eq!([1, 2, 4, 6].map(|tokens| grid(Format::Nvfp4, kimi, tokens)), [(264, 2); 4]);
        assert_eq!([1, 2, 4, 6].map(|tokens| grid(Format::Mxfp4, kimi, tokens)), [(396, 3); 4]);
    }

    /// The kernel of the layer in one launch, if it has one. `logits`: whether tokens choose experts, and whether the router is plain.
    fn one_launch(
        device: &Device,
        (format, experts, hidden, intermediate): (Format, i64, i64, i64),
        (tokens, top_k): (i64, i64),
        logits: Option<bool>,
    ) -> Option<Variant> {
        let layer = LayerDesc { experts, hidden, intermediate, gated: true, dtype: Dtype::Bf16, format };
        let logits = logits.map(|plain| Logits { experts: experts as u32, groups: 1, plain });
        let kernel = |routes_inside| {
            let call = Routed { tokens, top_k, logits, routes_inside };
            let program = program(&CallDesc::new(layer, Source::Routed(call)), Some(device)).unwrap();
            let mut layers = program.launches_of(Task::RoutedLayer);
            layers.next().map(|launch| launch.variant)
        };
        assert_eq!(kernel(false), None);
        kernel(true)
    }

    #[test]
    fn one_launch_for_few_tokens_that_leave_room() {
        let device = Device::typical(Arch::SM90);
        for logits in [Some(true), None] {
            let one = |tokens, experts, hidden, intermediate| {
                one_launch(&device, (Format::Mxfp4, experts, hidden, intermediate), (tokens, 4), logits)
                    .map(|kernel| kernel.experts)
            };
            assert_eq!([1, 2, 3].map(|tokens| one(tokens, 128, 2880, 2880)), [Some(128), Some(128), None]);
            assert_eq!([3, 4, 5].map(|tokens| one(tokens, 128, 2048, 768)), [Some(128), Some(128), None]);
            assert_eq!(
                [128, 129, 384, 385].map(|experts| one(1, experts, 2880, 2880)),
                [Some(128), Some(384), Some(384), None]
            );
            // GEMM2's tokens count twice.
            assert_eq!([5760, 9600, 11520].map(|wide| one(1, 8, 2880, wide)), [Some(128), Some(384), None]);
            assert_eq!([11520, 15360, 20160].map(|wide| one(1, 8, wide, 2880)), [Some(128), Some(384), None]);
        }
    }

    #[test]
    fn one_launch_knows_bias_and_groups_and_every_form() {
        let device = Device::typical(Arch::SM90);
        let kimi = |format, tokens, plain| one_launch(&device, (format, 384, 7168, 256), (tokens, 8), Some(plain));
        // Rows that are rounded to e4m3 as a whole, or with factors of experts, need launches of their own.
        let (has, lacks): (Vec<_>, Vec<_>) = packed().partition(|&format| layer_tokens(format) > 0);
        assert!(has.len() == 5 && lacks.contains(&Format::Mxfp4A8) && has.contains(&Format::Mxfp8));
        for format in has {
            for plain in [true, false] {
                let found =
                    [1, 2, 3].map(|tokens| kimi(format, tokens, plain).map(|kernel| (kernel.experts, kernel.flag)));
                // MXFP8's launch serves one token; others' rings leave room for two.
                let two = if format == Format::Mxfp8 { None } else { Some((384, false)) };
                assert_eq!(found, [Some((384, false)), two, None], "{format:?}");
            }
        }
        assert!(lacks.iter().all(|&format| kimi(format, 1, true).is_none()));
        // A router with a bias takes the kernel that knows one, however few experts there are.
        let few =
            |plain| one_launch(&device, (Format::Mxfp4, 32, 2880, 2880), (1, 4), Some(plain)).map(|kernel| kernel.flag);
        assert_eq!([few(true), few(false)], [Some(true), Some(false)]);
    }

    #[test]
    fn one_launch_has_a_cta_for_each_tile() {
        let one = |multiprocessors, experts, slots, logits| {
            let device = Device { multiprocessors, ..Device::typical(Arch::SM90) };
            one_launch(&device, (Format::Mxfp4, experts, 2880, 64), slots, logits).is_some()
        };
        let logits = Some(true);
        assert_eq!([(2, 8), (2, 9), (1, 16)].map(|slots| one(16, 128, slots, logits)), [true, false, true]);
        assert!(one(16, 16, (2, 9), logits) && one(132, 128, (2, 32), logits));
        // Given ids may repeat an expert, which then has several tiles.
        assert_eq!([(2, 8), (2, 9)].map(|slots| one(16, 16, slots, None)), [true, false]);
    }
}
