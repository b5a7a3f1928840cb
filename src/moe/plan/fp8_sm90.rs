//! Tile choice of the Hopper grouped GEMMs of e4m3 with block scales.

use super::call::Routed;
use super::kernels::{GemmLaunches, Gemms, KernelSet, Rows};
use super::steps::{GemmLaunch, RoutedLayerLaunch, Step};
use super::tiles;
use super::{max_tiles, sm90, units, GemmDesc, Overlap};
use crate::desc::LayerDesc;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::kernel::{AnyLaunch, Launch};
use crate::params::Fp8Scaling;
use crate::quant::fp8::GROUP;
use crate::quant::{Activations, Format};
use crate::variants::fp8::{self, LAYER_LEAST_STAGES, ORDERED_TOKENS, WIDE_TOKENS};
use crate::variants::signature::{MappedGemm, RoutedLayer};
use crate::variants::{Family, Kernel, Variant};

pub const KERNELS: KernelSet = KernelSet {
    serves,
    tile_tokens: |gemms| {
        let order = match gemms.rows {
            // The kernel for rows in order reads whole blocks of rows.
            _ if gemms.cut => Order::Gathered,
            Rows::Gathered { plain_x: true, .. } if by_groups(gemms.up.format) => Order::Possible,
            Rows::Gathered { .. } => Order::Gathered,
            Rows::InOrder { .. } => Order::Given,
        };
        tile_tokens(&gemms.likely[0], order)
    },
    down_tile_tokens: |gemms, tile_tokens| match gemms.rows {
        Rows::Gathered { .. } => down_tile_tokens(&gemms.down, tile_tokens),
        Rows::InOrder { .. } => None,
    },
    rounds_inside: |gemms, tile_tokens| quantises_inside(&gemms.likely[0], tile_tokens, gemms.device),
    launches,
    overlap: |gemms, tile_tokens, up| {
        // If rows of x were written in the order of places, GEMM2 writes to the memory that GEMM1 reads.
        let apart = matches!(gemms.rows, Rows::Gathered { .. }) && in_order(tile_tokens);
        let inside = quantises_inside(&gemms.likely[0], tile_tokens, gemms.device);
        (inside && !apart).then(|| overlap(&gemms.up, tile_tokens, up))
    },
    one_launch: |call, Gemms { up, down, device, .. }| {
        let launch = by_groups(up.format).then(|| layer(call, up, down, device)).flatten();
        launch.map(|launch| Step::RoutedLayer(RoutedLayerLaunch::Mapped(launch)))
    },
    variants,
};

/// The launches of GEMM1 and GEMM2.
fn launches(gemms: &Gemms<'_>, tile_tokens: i32) -> GemmLaunches {
    let Gemms { device, up, down, likely, .. } = gemms;
    let up = match quantises_inside(&likely[0], tile_tokens, device) {
        true => quantising_gemm(up, tile_tokens, device),
        false => gemm(up, tile_tokens, device),
    };
    let up = match up {
        GemmLaunch::Mapped(up) if gemms.cut => GemmLaunch::Mapped(Launch { kernel: fp8::cut(up.kernel), ..up }),
        up => up,
    };
    let down = match gemms.rows {
        Rows::Gathered { .. } => self::down(down, down_tile_tokens(down, tile_tokens).unwrap_or(tile_tokens), device),
        Rows::InOrder { .. } => down_of_rows((&likely[1], down), tile_tokens, device),
    };
    GemmLaunches::Apart([up, down])
}

/// An error if neither these kernels nor the portable one of other GPUs takes the layer.
pub fn require(layer: &LayerDesc) -> Result<()> {
    let spec = layer.format.spec();
    let (name, block, inner_block) = (spec.name, spec.block, spec.inner_block);
    if layer.hidden % block != 0 || layer.intermediate % inner_block != 0 {
        return Err(Error::Unsupported(format!(
            "{name} experts of hidden {} and intermediate {}; supported: multiples of {block} and {inner_block}",
            layer.hidden, layer.intermediate
        )));
    }
    Ok(())
}

/// Whether these kernels serve the layer.
pub fn serves(device: &Device, layer: &LayerDesc) -> bool {
    layer.format.is_fp8() && device.is_hopper() && require(layer).is_ok()
}

/// Up to this many work units of 128 rows for each CTA that fits, units of 64 rows are better.
const FEW_UNITS: u32 = 1;

/// The narrowest tile that takes this many tokens.
fn tile(gemm: &GemmDesc, tokens: i32, device: &Device) -> Kernel<MappedGemm> {
    tiles::narrowest(&fp8::TILES, FEW_UNITS, gemm, tokens, device)
}

/// The schedule's tile for both GEMMs of a layer. Nearly every expert must fit in one tile, so that weights are read once. us on an H200 of
/// `moe_masked` with x in e4m3 and rows drawn from Poisson distributions, with tiles of 16, 64 and 128 (GEMM2 has the kernel that `down`
/// chooses), by mean:
///   E64 H2048 I768     4: 79.5, 80.5, 93.3   10: 80.3, 81.8, 94.5   32: 117, 85.8, 98.1   52: 141, 92.6, 103   56: 144, 95.7, 104
///   E128 H2048 I512    4: 101.5, 102, 114    10: 109, 105.8, 119    32: 155, 113, 127     52: 206, 129, 139    60: 223, 136, 141
///   E32 H7168 I2048    4: 337, 336, 357      10: 338, 340, 362      32: 488, 352, 378     52: 603, 377, 404    56: 647, 414, 405
///   E64 H7168 I256     1: 70.3, 74.0, 69.3   2: 92.9, 88.9, 90.2    10: 106, 100, 103     24: 134, 106, 108    48: 197, 121, 120
/// The borders between these means are chosen. `gemm`: GEMM1.
fn tile_tokens(gemm: &GemmDesc, order: Order) -> i32 {
    let short = gemm.outputs() < SHORT;
    match gemm.slots as f64 / gemm.experts.max(1) as f64 {
        mean if mean <= if short { 1.0 } else { 8.0 } => 16,
        mean if mean <= if short { 24.0 } else { 54.0 } => 64,
        mean if order.bounds().is_some_and(|(slots, columns)| mean > slots && gemm.outputs() >= columns) => {
            ORDERED_TOKENS as i32
        }
        _ => WIDE_TOKENS as i32,
    }
}

/// Whether rows of x lie in the order of places.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// They do not: each slot's row is gathered.
    Gathered,
    /// The launch that quantises x can write each slot's row to its place.
    Possible,
    /// The caller's rows lie in this order.
    Given,
}

/// Below so many columns between the GEMMs, GEMM2's tokens stay even in tiles of 16.
const SHORT: i64 = 512;

impl Order {
    /// The kernel for rows in order is faster above so many slots an expert, if there are at least so many columns between the GEMMs. us of
    /// both GEMMs alone, wide and in order: 32 experts of dsv3 (I 2048) at a mean of 256 and 1024 938, 859 and 3103, 2649; qwen3-30b-a3b (I
    /// 768) 450, 419 and 1508, 1315. For given rows at a mean of 102 414, 459 and 117, 127; at 128, where half of the experts have two wide
    /// tiles, 592, 505 and 144, 135.
    ///
    /// For possible rows each slot's row is written first, and GEMM2 begins after GEMM1, not where GEMM1 ends. us of a layer of dsv3-ep8,
    /// wide and in order, at a mean of 192 649, 660; 224 699, 766; 256 778, 842; 320 922, 944; 384 1076, 1130; 512 1500, 1444. The launch
    /// that writes the rows takes 120 us where the GEMMs of qwen3-30b-a3b gain 110 (16384 tokens). DeepSeek-V3's 256 columns between 8
    /// ranks gain nothing.
    fn bounds(self) -> Option<(f64, i64)> {
        match self {
            Order::Gathered => None,
            Order::Possible => Some((448.0, 1024)),
            Order::Given => Some((112.0, 512)),
        }
    }
}

/// Whether both GEMMs are the kernel for rows in order.
pub fn in_order(tile_tokens: i32) -> bool {
    tile_tokens == ORDERED_TOKENS as i32
}

/// The step in which an expert's slots are cut into tiles. A half of a wide tile is multiplied whole. So with several tiles an expert, full
/// tiles and a rest are less work than even parts. us of GEMM1, even parts and full tiles: dsv3-tp8 M = 4096 (mean 128) 367, 385; 16384
/// (512) 1114, 1082; qwen3-30b-a3b 4096 (256) 290, 280; 16384 (1024) 924, 926.
pub fn tile_step(slots: i64, experts: i64, tile_tokens: i32) -> i32 {
    if in_order(tile_tokens) {
        tile_tokens / 3
    } else if tile_tokens == WIDE_TOKENS as i32 && slots > 192 * experts {
        tile_tokens / 2
    } else {
        tile_tokens.min(16)
    }
}

/// From so many groups of the experts' columns between the GEMMs for each multiprocessor on, units of a whole group are as good as units
/// of half a group.
const LEAST_GROUPS: i64 = 1;

/// Whether GEMM1's own epilogue quantises its output for GEMM2. Its CTAs have whole groups of a row, not whole rows. With tiles of few
/// tokens units are then twice as long, and few of them would leave multiprocessors idle.
fn quantises_inside(gemm: &GemmDesc, tile_tokens: i32, device: &Device) -> bool {
    if !by_groups(gemm.format) || tile_tokens >= WIDE_TOKENS as i32 {
        return by_groups(gemm.format);
    }
    let units = gemm.slots.min(gemm.experts) * gemm.outputs() / GROUP as i64;
    fp8::quantises(&tile(gemm, tile_tokens, device)) && units >= LEAST_GROUPS * i64::from(device.multiprocessors)
}

/// The facts of GEMM1 for a GEMM2 that begins where GEMM1 ends. A unit of GEMM1 is a group of a row, except in wide tiles. `up`: GEMM1.
fn overlap(up: &GemmDesc, tile_tokens: i32, launch: AnyLaunch) -> Overlap {
    let group = GROUP as u32 * if up.gated { 2 } else { 1 };
    let unit_rows = if tile_tokens == WIDE_TOKENS as i32 { launch.variant.unit_rows() } else { group };
    Overlap { ctas: launch.grid, units: (up.rows as u32).div_ceil(unit_rows) }
}

/// Whether each group of a row's columns has a scale.
fn by_groups(format: Format) -> bool {
    format.activations() == Activations::Fp8(Fp8Scaling::Groups)
}

/// The launch of a GEMM1 whose epilogue quantises. A unit has 128 outputs.
fn quantising_gemm(gemm: &GemmDesc, tile_tokens: i32, device: &Device) -> GemmLaunch {
    if tile_tokens >= WIDE_TOKENS as i32 {
        return self::gemm(gemm, tile_tokens, device);
    }
    let tile = tile(gemm, tile_tokens, device).gated(gemm.gated);
    let unit_rows = GROUP as u32 * if gemm.gated { 2 } else { 1 };
    GemmLaunch::Mapped(tiles::launch_units(&[gemm], tile_tokens, (tile, unit_rows), device))
}

fn gemm(gemm: &GemmDesc, tile_tokens: i32, device: &Device) -> GemmLaunch {
    if in_order(tile_tokens) {
        let ordered = (fp8::ordered(gemm.gated), if gemm.gated { 256 } else { 128 });
        return GemmLaunch::Ordered(tiles::launch_units(&[gemm], tile_tokens, ordered, device));
    }
    let tile = tile(gemm, tile_tokens, device);
    GemmLaunch::Mapped(tiles::launch(&[gemm], tile_tokens, tile.gated(gemm.gated), device))
}

/// Tokens of GEMM2's tiles, if it has its own schedule.
pub const DOWN_TILE_TOKENS: i32 = ORDERED_TOKENS as i32;

/// GEMM2 has its own schedule above so many slots an expert, and from so many columns between the GEMMs on.
const DOWN_MEAN: f64 = 96.0;
const DOWN_LEAST_K: i64 = 640;

/// Tokens of GEMM2's own tiles after a GEMM1 that gathers. GEMM2's rows lie in order whatever GEMM1 reads. us of GEMM2 in ncu, with GEMM1's
/// schedule (`down`) and with its own, without the launch that makes its schedule:
///   qwen3-30b-a3b (K 768)               M 2048 (mean 128)  109, 98;   3072  142, 127;   4096  167, 159;   16384  524, 463
///   dsv3-ep8 (K 2048), tokens in e4m3   M 1024 (mean 256)  309, 292;   4096  996, 889
/// With K 512 GEMM2 gains 4 to 6 %, and the layer nothing.
fn down_tile_tokens(gemm: &GemmDesc, tile_tokens: i32) -> Option<i32> {
    let many = gemm.slots as f64 > DOWN_MEAN * gemm.experts as f64;
    (tile_tokens == WIDE_TOKENS as i32 && many && gemm.k >= DOWN_LEAST_K).then_some(DOWN_TILE_TOKENS)
}

/// The launch of GEMM2. If its K is short, it is the kernel whose tokens stay, with the largest units that leave each multiprocessor
/// several. us of GEMM2, wide, units of 4, of 8, of 16 blocks (both GEMMs for M = 1024), variants in turn:
///   dsv3-tp8 (K 256)        M 1024  402, 389, 390, 393;   4096  282, 253, 255, 266;   16384  975, 824, 799, 768
///   qwen3-30b-a3b (K 768)   M 1024  190, 183, 183, 183;   4096  152, 159, 155, 174;   16384  505, 527, 485, 479
/// us of a layer with tiles of fewer tokens, in turn, GEMM2 with that tile and this kernel: dsv3-tp8 (16) M 16 153, 153; 64 309, 300; (64)
/// 256 417, 363; 512 440, 384; qwen3-30b-a3b (16) 64 153, 155; (64) 256 165.0, 163.0; 512 172.6, 169.5.
fn down(gemm: &GemmDesc, tile_tokens: i32, device: &Device) -> GemmLaunch {
    let pairs = 2 * GROUP as i64;
    let short = gemm.k < SHORT || tile_tokens >= 64 && gemm.k <= 4 * pairs;
    if in_order(tile_tokens) || gemm.k % pairs != 0 || !short {
        return self::gemm(gemm, tile_tokens, device);
    }
    let group = GROUP as u32;
    let [few, many] = fp8::STATIONARY_BLOCKS;
    let tiles = (gemm.slots / i64::from(tile_tokens)).max(gemm.slots.min(gemm.experts)) as u32;
    let rounds = units(tiles, (gemm.rows as u32).div_ceil(many * group)) / device.multiprocessors;
    let blocks = match (rounds, gemm.k) {
        (16.., _) => many,
        (8.., k) if k > pairs => many,
        // An expert with several tiles shares its weights among them.
        (_, k) if k > pairs && gemm.slots > gemm.experts * i64::from(tile_tokens) => {
            return self::gemm(gemm, tile_tokens, device)
        }
        _ => few,
    };
    let stationary = (fp8::stationary(blocks), blocks * group);
    GemmLaunch::Mapped(tiles::launch_units(&[gemm], tile_tokens, stationary, device))
}

/// The launch of GEMM2 on rows in order. Only the rows of `expected` are likely; `all` has all rows for which there is room.
fn down_of_rows((expected, all): (&GemmDesc, &GemmDesc), tile_tokens: i32, device: &Device) -> GemmLaunch {
    let (few, many) = (down(expected, tile_tokens, device), gemm(all, tile_tokens, device));
    match few {
        GemmLaunch::Mapped(few) if few.kernel.family == Family::GroupedGemmFp8StationarySm90 => {
            let grid = many.any().grid.min(tiles::resident(few.kernel, device));
            GemmLaunch::Mapped(Launch { grid, ..few })
        }
        _ => many,
    }
}

/// Most columns of x, and between the GEMMs, for which csrc/moe/routed_layer_fp8_sm90.cuh has room.
const LAYER_HIDDEN: i64 = 8192;
const LAYER_INNER: i64 = 2048;

/// Most tokens of a layer in one launch: `LAYER_TOKENS`, or `LONG_TOKENS` if x has more than `LONG_HIDDEN` columns. Long tokens leave the
/// rings less room.
const LAYER_TOKENS: i64 = 8;
const LONG_HIDDEN: i64 = 4096;
const LONG_TOKENS: i64 = 4;

/// The layer in one launch, with the routing and both quantisations inside. us a layer of cold weights: separate launches (without routing,
/// which takes 3 to 4), one launch with two CTAs a multiprocessor, and one launch with one CTA:
///   qwen3-30b-a3b (E128 H2048 I768)   1: 18.0, 16.9, 18.4   2: 28.1, 26.4, 27.7   4: 43.7, 40.5, 43.2   8: 74.6, 71.0, 76.3
///   E256 H2048 I512                   1: 15.6, 13.8, 13.8   2: 21.5, 21.0, 21.7   4: 34.4, 33.9, 35.6   8: 53.3, 52.6, 56.2
///   dsv3-tp8 (E256 H7168 I256)        1: 27.9, 23.3, 20.9   2: 35.6, 30.9, 33.1   4: 53.0, 51.5, 57.0   8: 84.7, 87.3, 98.0
/// Two CTAs a multiprocessor leave their rings one stage for the longest tokens (8192 and 2048 columns), and then the layer has separate
/// launches; one CTA was not measured there.
/// With bias and 8 groups dsv3-tp8 takes 27.8, 37.2, 53.5 at M = 1, 2, 4 as one launch, 32.5, 39.5, 56.8 as separate ones with their
/// routing.
fn layer(call: &Routed, up: &GemmDesc, down: &GemmDesc, device: &Device) -> Option<Launch<RoutedLayer>> {
    let pairs = 2 * GROUP as i64;
    let row_blocks = [up, down].map(|gemm| gemm.rows as u32 / sm90::LAYER_ROWS);
    let tiles = max_tiles(up.slots, up.experts, sm90::LAYER_TOKENS) as u32;
    let long = up.k > LONG_HIDDEN;
    // Few long units of GEMM1 end sooner if each has a multiprocessor to itself.
    let alone = long && units(2 * tiles, row_blocks[0]) <= device.multiprocessors;
    // Without logits the kernel's tables have room for local experts alone, and it needs to know no router.
    let (tables, plain) = call.logits.map_or((up.experts, true), |logits| (logits.experts.into(), logits.plain));
    let (experts, ctas) =
        fp8::LAYERS.into_iter().find(|(most, ctas)| i64::from(*most) >= tables && (*ctas == 1) == alone)?;
    let kernel = fp8::layer(up.gated, (experts, ctas), plain);
    let fits = sm90::routes_inside(call, up, i64::from(experts), up.gated)
        && call.tokens <= if long { LONG_TOKENS } else { LAYER_TOKENS }
        && up.k % pairs == 0
        && down.k % pairs == 0
        && up.k <= LAYER_HIDDEN
        && down.k <= LAYER_INNER
        && fp8::layer_stages(&kernel, (up.k, down.k)) >= LAYER_LEAST_STAGES;
    fits.then(|| Launch {
        kernel,
        // NOTE: all CTAs must fit on the GPU at once: they wait for each other.
        grid: units(tiles, row_blocks.iter().sum()).min(device.multiprocessors * ctas),
        block: kernel.threads(),
        cluster: 1,
        shared_bytes: kernel.shared_bytes().unwrap_or(0),
    })
}

/// Every kernel with a GEMM in it that calls of a layer may take.
fn variants(layer: &LayerDesc) -> Vec<Variant> {
    let gated = layer.gated;
    let gemms = fp8::TILES.iter().flat_map(|t| [gated, false].map(|gated| t.gated(gated)));
    let cut = layer.is_cut().then(|| fp8::WIDE_CUT_TILE.gated(gated));
    let mapped = gemms.chain(cut).chain(fp8::STATIONARY_BLOCKS.map(fp8::stationary)).map(Kernel::variant);
    let ordered = [gated, false].map(|gated| fp8::ordered(gated).variant());
    mapped.chain(ordered).chain(fp8::layers(gated).map(Kernel::variant)).collect()
}

#[cfg(test)]
mod tests {
    use super::super::{program, CallDesc, Source, Task};
    use super::*;
    use crate::device::Arch;
    use crate::params::Dtype;
    use crate::variants::Element;

    #[test]
    fn rows_are_in_order_where_that_is_worth_it() {
        let tile = |intermediate: i64, mean: i64, order| {
            let (element, format) = (Element::Bf16, Format::Fp8Block);
            let slots = 32 * mean;
            tile_tokens(
                &GemmDesc { element, format, gated: true, slots, experts: 32, rows: 2 * intermediate, k: 7168 },
                order,
            )
        };
        let (wide, ordered) = (WIDE_TOKENS as i32, ORDERED_TOKENS as i32);
        assert_eq!([448, 449].map(|mean| tile(2048, mean, Order::Possible)), [wide, ordered]);
        assert_eq!([112, 113].map(|mean| tile(2048, mean, Order::Given)), [wide, ordered]);
        assert_eq!([896, 1024].map(|columns| tile(columns, 500, Order::Possible)), [wide, ordered]);
        assert_eq!([384, 512].map(|columns| tile(columns, 500, Order::Given)), [wide, ordered]);
        assert_eq!(tile(2048, 500, Order::Gathered), wide);
        assert!(in_order(ordered) && !in_order(wide) && tile_step(1 << 20, 1, ordered) == 64);
    }

    #[test]
    fn a_layer_in_one_launch_has_room_for_its_ring() {
        let device = Device::typical(Arch::SM90);
        let one = |experts, hidden, intermediate, (tokens, top_k)| {
            let layer =
                LayerDesc { experts, hidden, intermediate, gated: true, dtype: Dtype::Bf16, format: Format::Fp8Block };
            let call = Routed { tokens, top_k, logits: None, routes_inside: true };
            let program = program(&CallDesc::new(layer, Source::Routed(call)), Some(&device)).unwrap();
            let launch = program.launches_of(Task::RoutedLayer).next()?;
            let stages = fp8::layer_stages(&launch.variant, (hidden, intermediate));
            assert!(stages >= LAYER_LEAST_STAGES, "{launch:?}: {stages} stages");
            Some(stages)
        };
        for (hidden, intermediate) in (1..=33).flat_map(|h| (1..=9).map(move |i| (256 * h, 256 * i))) {
            for experts in [8, 256] {
                for slots in [(1, 1), (1, 2), (1, 8), (4, 8), (8, 8)] {
                    one(experts, hidden, intermediate, slots);
                }
            }
        }
        assert_eq!([(7168, 2048), (8192, 1536)].map(|(h, i)| one(256, h, i, (1, 8))), [Some(2), Some(2)]);
        assert_eq!([(7680, 2048), (8192, 1792), (8192, 2048)].map(|(h, i)| one(256, h, i, (1, 8))), [None; 3]);
        // One tile has a multiprocessor to itself.
        assert_eq!(one(8, 8192, 2048, (1, 1)), Some(15));
        assert_eq!(one(256, 2048, 512, (1, 8)), Some(10));
    }

    #[test]
    fn tiles_grow_with_the_mean_and_every_one_is_chosen() {
        let device = Device::typical(Arch::SM90);
        let mut chosen = Vec::new();
        for tokens in [1, 64, 512, 4096, 16384] {
            let (element, format) = (Element::Bf16, Format::Fp8Block);
            let gemm = GemmDesc { element, format, gated: true, slots: tokens * 8, experts: 256, rows: 1536, k: 2048 };
            let launch = super::gemm(&gemm, tile_tokens(&gemm, Order::Gathered), &device);
            let GemmLaunch::Mapped(launch) = launch else { panic!("{launch:?} is in order") };
            assert!(launch.shared_bytes <= device.shared_bytes && launch.grid > 0);
            chosen.push(launch.kernel);
        }
        chosen.dedup();
        assert_eq!(chosen, fp8::TILES.map(|t| t.gated(true)));
    }
}
