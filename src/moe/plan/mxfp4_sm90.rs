//! Tile choice of the Hopper grouped GEMM of packed MXFP4 weights, from measurements on H200 (both GEMMs of cold layers, random routing).

use super::tiles;
use super::{sm90, GemmDesc, MoeDesc};
use crate::desc::LayerDesc;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::kernel::Launch;
use crate::quant::Format;
use crate::variants::packed::{stages_beside, MXFP4_E4M3_TILES, MXFP4_FOURS, MXFP4_LAYER_TILE, MXFP4_TILES};
use crate::variants::{Family, Variant};

/// Whether the kernel takes a GEMM of this shape: 16-byte rows of x and of the output, and whole slices of weight rows.
pub fn serves(device: &Device, rows: u32, k: u32, out_columns: u32) -> bool {
    device.is_hopper() && k.is_multiple_of(8) && rows.is_multiple_of(16) && out_columns.is_multiple_of(8)
}

/// The error for e4m3 activations where this kernel is not.
pub fn require_e4m3(device: &Device, layer: &LayerDesc) -> Result<()> {
    let (rows, hidden, intermediate) = (layer.up_rows() as u32, layer.hidden as u32, layer.intermediate as u32);
    if serves(device, rows, hidden, intermediate) && serves(device, 32, intermediate, hidden) {
        return Ok(());
    }
    Err(Error::Unsupported(format!(
        "activation_dtype float8_e4m3fn for mxfp4 experts with hidden {hidden}, intermediate {intermediate} on {}; supported: sm_90 with a \
hidden size that is a multiple of 8, and CPU tensors (without activation_dtype: every GPU from sm_80)",
        device.arch
    )))
}

/// By tokens.
fn tiles_of(format: Format) -> &'static [Variant] {
    if format == Format::Mxfp4A8 {
        &MXFP4_E4M3_TILES
    } else {
        &MXFP4_TILES
    }
}

/// Up to this many work units of 128 rows for each CTA that fits, units of 64 rows are better. us a layer, 128 and 64 rows:
///   gpt-oss-120b (E128 k4)     M 1 (0.7 units)  30.0, 24.8;   M 4 (2.7)  63.4, 60.6;   M 8 (5.5)  116.3, 111.1;   M 16 (11)  175.2, 175.7
///   deepseek-v4 (E256 k6)      M 1 (0.7)        31.9, 27.4;   M 4 (2.9)  94.9, 91.1
const FEW_UNITS: u32 = 6;

/// The narrowest tile that takes this many tokens.
fn tile(gemm: &GemmDesc, tokens: i32, device: &Device) -> Variant {
    let fours: &[_] = if gemm.format == Format::Mxfp4A8 { &[] } else { &MXFP4_FOURS };
    tiles::narrowest_by_k((tiles_of(gemm.format), fours), FEW_UNITS, gemm, tokens, device)
}

/// Of packed 4-bit weights and bf16 activations by an expert's mean, where K is whole stages of four blocks and where not: nearly every expert
/// must fit in one tile, so that weights are decoded once. us by tile (docs/kernels/grouped_gemm_mxfp4_sm90.md has more; borders between the
/// means are chosen):
///   gpt-oss-120b   M 256 (mean 8)  465 at 16, 514 at 32;   M 512 (16)  553 at 32, 567 at 64
///   gpt-oss-20b    M 1024 (128)  446 at 128, 412 at 192
/// and of 32 experts of dsv3 on rows in order: mean 8 218 at 16, 233 at 48; 10 245, 234; 36 298 at 48, 308 at 64; 48 317 at 64, 321 at 80; 56 340, 329;
/// 70 390 at 80, 430 at 128; 84 521, 454. With both GEMMs in one launch (2026-11-24, medians of six in turn) at 48 and 64: dsv3 24 250, 244;
/// 32 272, 264; 36 283, 271; NVFP4 24 257, 257; 32 288, 279; qwen3-30b-a3b, 64 experts, 12 57.9, 59.6; 24 61.0, 61.9; 128 experts, 24 115.7, 116.3;
/// 32 117.7, 118.0.
pub fn tile_of_mean(mean: f64, fours: bool) -> i32 {
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

/// The schedule's tile for both GEMMs of a layer. us of e4m3 activations, both quantisations included, by tile:
///   gpt-oss-120b   M 256  418 at 16, 444 at 32;   M 512  471 at 32, 467 at 64;   M 1024  530 at 64, 562 at 128
///                  M 2048 785 at 64, 683 at 128;  M 4096 1223 at 128, 1021 at 192
pub fn tile_tokens(gemm: &GemmDesc) -> i32 {
    let mean = gemm.slots as f64 / gemm.experts.max(1) as f64;
    if gemm.format != Format::Mxfp4A8 {
        return tile_of_mean(mean, tiles::takes_fours(gemm));
    }
    match mean {
        mean if mean <= 11.0 => 16,
        mean if mean <= 44.0 => 64,
        mean if mean <= 96.0 => 128,
        _ => 192,
    }
}

/// GEMM1 and, where its launch has not both, GEMM2. Of e4m3 activations a launch between them quantises.
pub fn gemms(up: &GemmDesc, down: &GemmDesc, tile_tokens: i32, device: &Device) -> (Launch, Option<Launch>) {
    let launch = |of: &GemmDesc, gemms: &[&GemmDesc]| {
        let tile = tile(of, tile_tokens, device);
        tiles::launch(gemms, tile_tokens, tile.gated(of.gated), device)
    };
    match up.format {
        Format::Mxfp4A8 => (launch(up, &[up]), Some(launch(down, &[down]))),
        _ => (launch(up, &[up, down]), None),
    }
}

/// The layer in one launch, with the routing inside, for so many tokens, where the tokens leave each warp a deep enough ring. us a layer,
/// separate launches and one:
///   gpt-oss-120b (E128 k4)   M 1  30.3, 23.8;   M 2  47.1, 41.0;   M 4  67.0, 68.3;   M 8  117.0, 112.2
/// The last two with all of an SM's shared memory, which they need.
const LAYER_TOKENS: i64 = 2;
const LEAST_STAGES: i64 = 3;

pub fn layer(desc: &MoeDesc, up: &GemmDesc, down: &GemmDesc, device: &Device) -> Option<Launch> {
    // Bytes of the tokens in shared memory, each in K blocks of 64 and 16 more; 64 behind them.
    let bytes = |gemm: &GemmDesc| desc.tokens * ((gemm.k + 63) / 64 * 128 + 16) + 64;
    let fits = sm90::routes_inside(desc, up, sm90::ROUTED_EXPERTS, false)
        && desc.tokens <= LAYER_TOKENS
        && stages_beside(&MXFP4_LAYER_TILE, bytes(up), bytes(down)) >= LEAST_STAGES;
    let variant = MXFP4_LAYER_TILE.gated(up.gated);
    fits.then(|| Launch {
        variant,
        // NOTE: one an SM, though two fit: the other place is the next launch's.
        grid: device.multiprocessors,
        block: variant.threads(),
        cluster: 1,
        shared_bytes: variant.shared_bytes().unwrap_or(0),
    })
}

/// A CTA takes row after row; a multiprocessor has room for 16.
pub fn quantize(rows: i64, device: &Device) -> Launch {
    let variant = Variant::of(Family::QuantizeRowsE4m3);
    let grid = (rows as u32).min(16 * device.multiprocessors);
    Launch { variant, grid, block: variant.threads(), cluster: 1, shared_bytes: 0 }
}

pub fn variants(format: Format, gated: bool) -> Vec<Variant> {
    let gemms = |gated| tiles_of(format).iter().map(move |t| t.gated(gated));
    match format {
        Format::Mxfp4A8 => gemms(gated).chain(gemms(false)).chain([Variant::of(Family::QuantizeRowsE4m3)]).collect(),
        _ => {
            let fours = MXFP4_FOURS.iter().map(|t| t.gated(gated));
            gemms(gated).chain(fours).chain([MXFP4_LAYER_TILE.gated(gated)]).collect()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::routing::Logits;
    use super::super::{Experts, MoePlan};
    use super::*;
    use crate::device::Arch;
    use crate::params::Dtype;
    use crate::variants::Element;

    #[test]
    fn stages_of_four_blocks_where_k_is_whole_ones() {
        let (device, element, format) = (Device::typical(Arch::SM90), Element::Bf16, Format::Mxfp4);
        let chosen = |k, mean: i64| {
            let gemm = GemmDesc { element, format, gated: true, slots: 32 * mean, experts: 32, rows: 4096, k };
            gemms(&gemm, &gemm, tile_tokens(&gemm), &device).0.variant
        };
        let fours = MXFP4_FOURS.map(|t| t.gated(true));
        assert_eq!([20, 40, 61].map(|mean| chosen(7168, mean)), fours);
        assert!([20, 40, 61].iter().all(|&mean| !fours.contains(&chosen(2880, mean))));
        assert_eq!((chosen(7168, 112), chosen(7168, 113)), (chosen(2880, 96), chosen(2880, 97)));
    }

    #[test]
    fn tiles_grow_with_the_mean_and_every_one_is_chosen() {
        let device = Device::typical(Arch::SM90);
        for format in [Format::Mxfp4, Format::Mxfp4A8] {
            let mut chosen = Vec::new();
            for tokens in [1, 16, 64, 256, 512, 1024, 2048, 2500, 4096] {
                let (slots, element) = (tokens * 4, Element::Bf16);
                let gemm = GemmDesc { element, format, gated: true, slots, experts: 128, rows: 5760, k: 2880 };
                let (launch, _) = gemms(&gemm, &gemm, tile_tokens(&gemm), &device);
                assert!(launch.shared_bytes <= device.shared_bytes && launch.grid > 0);
                chosen.push(launch.variant);
            }
            chosen.dedup();
            assert_eq!(chosen, tiles_of(format).iter().map(|t| t.gated(true)).collect::<Vec<_>>());
        }
    }

    #[test]
    fn one_launch_for_a_token_or_two_that_leave_room() {
        let device = Device::typical(Arch::SM90);
        let one = |tokens, experts, hidden, intermediate| {
            let dtype = Dtype::Bf16;
            let layer = LayerDesc { experts, hidden, intermediate, gated: true, dtype, format: Format::Mxfp4 };
            let logits = Some(Logits { experts: experts as u32, groups: 1, plain: true });
            let desc = MoeDesc { layer, tokens, top_k: 4, logits, routes_inside: true, plain_x: true };
            let plan = |desc| matches!(MoePlan::new(&desc, &device).unwrap().experts, Experts::Routed(_));
            assert!(!plan(MoeDesc { routes_inside: false, ..desc }) && !plan(MoeDesc { logits: None, ..desc }));
            plan(desc)
        };
        assert_eq!([1, 2, 3, 8].map(|tokens| one(tokens, 128, 2880, 2880)), [true, true, false, false]);
        assert_eq!([128, 129].map(|experts| one(1, experts, 2880, 2880)), [true, false]);
        // GEMM2's tokens count twice.
        assert_eq!([5760, 8640].map(|wide| one(1, 8, 2880, wide)), [true, false]);
        assert_eq!([11520, 20160].map(|wide| one(1, 8, wide, 2880)), [true, false]);
    }
}
