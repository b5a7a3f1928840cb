//! Tile choice of the Hopper grouped GEMM, from measurements on H200 (bf16; GEMM1, GEMM2 and combine of cold layers, random routing).

use super::call::Routed;
use super::kernels::{GemmLaunches, Gemms, KernelSet};
use super::routing::Logits;
use super::steps::{GemmLaunch, RoutedLayerLaunch, Step};
use super::{element, max_tiles, units, GemmDesc, Overlap};
use crate::desc::LayerDesc;
use crate::device::Device;
use crate::kernel::{AnyLaunch, Launch};
use crate::params::Dtype;
use crate::variants::layer::{INNER_COLUMNS, LAYER_TILE, ROUTED_TILE};
use crate::variants::signature::{Layer, MappedGemm, RoutedLayer};
use crate::variants::sm90::TILES;
use crate::variants::{Element, Kernel, Variant};

pub const KERNELS: KernelSet = KernelSet {
    serves: |device, layer| {
        let LayerDesc { hidden, intermediate, gated, dtype, .. } = *layer;
        layer.format.spec().block == 1
            && serves(device, dtype, gated, layer.up_rows() as u32, hidden as u32)
            && serves(device, dtype, false, hidden as u32, intermediate as u32)
    },
    tile_tokens: |gemms| tile_tokens(&gemms.likely[0], &gemms.likely[1], gemms.device),
    launches: |gemms, tile_tokens| {
        GemmLaunches::Apart([gemms.up, gemms.down].map(|of| GemmLaunch::Mapped(gemm(&of, tile_tokens, gemms.device))))
    },
    overlap: |gemms, _, up| Some(overlap(&gemms.up, up)),
    one_launch: |call, Gemms { up, down, device, .. }| {
        let routed = routed_layer(call, up, down, device);
        let routed = routed.map(|launch| Step::RoutedLayer(RoutedLayerLaunch::Mapped(launch)));
        routed.or_else(|| layer(call.tokens, up, down, device).map(Step::Layer))
    },
    variants: |layer| variants(element(layer.dtype), layer.gated),
    ..KernelSet::NONE
};

/// Whether the kernel takes a GEMM of this shape: rows are multiples of 16 bytes, and slices have 16 weight rows (gated: 8 gate and 8 up
/// rows).
pub fn serves(device: &Device, dtype: Dtype, _gated: bool, rows: u32, k: u32) -> bool {
    device.is_hopper() && dtype != Dtype::F32 && k.is_multiple_of(8) && rows.is_multiple_of(16)
}

/// (row tiles, consumers) of the fused layer.
pub const LAYER_SHAPE: (u32, u32) = (1, 1);
/// Weight rows of a work unit of the fused layer.
pub const LAYER_ROWS: u32 = 64;

/// The schedule's tile of a layer in one launch.
pub const LAYER_TOKENS: i32 = LAYER_TILE.variant().tokens as i32;

/// Whether a tile takes weights of this many rows. A pair of row tiles is cut into strips of 32 rows.
fn takes(tile: Kernel<MappedGemm>, rows: u32) -> bool {
    tile.row_tiles == 1 || rows.is_multiple_of(32)
}

/// The distinct (row tiles, consumers) of all tiles that take weights of this many rows. Each needs a tensor map.
pub fn tile_shapes(rows: u32) -> Vec<(u32, u32)> {
    let fitting = TILES.iter().filter(|t| takes(**t, rows));
    let mut shapes: Vec<(u32, u32)> = fitting.map(|t| (t.row_tiles, t.consumers)).chain([LAYER_SHAPE]).collect();
    shapes.sort_unstable();
    shapes.dedup();
    shapes
}

/// Up to this many work units a multiprocessor, one deep CTA on it is better than two: the last units of a GEMM are finished by fewer
/// CTAs than fit, and each then reads twice as fast. us a layer, two CTAs of 4 stages against one of 8:
///   mixtral (6.8 and 1.9 units)    M 4  265.6, 254.4;    M 16  347.7, 344.4;    M 64  353.6, 349.3
///   qwen3 (11.6 and 15.5)          M 16  201.3, 202.9;   M 64  293.4, 293.5;    M 256  307.2, 308.8
const FEW_UNITS: u32 = 7;

/// The narrowest tile that takes this many tokens.
fn tile(gemm: &GemmDesc, tokens: i32, device: &Device) -> Kernel<MappedGemm> {
    let first = TILES.iter().position(|t| t.tokens >= tokens as u32).unwrap_or(TILES.len() - 1);
    let tile = TILES[first];
    // The schedule's tile was chosen so that an expert has one tile.
    let units = units(gemm.slots.min(gemm.experts) as u32, (gemm.rows as u32).div_ceil(tile.unit_rows()));
    match TILES.get(first + 1) {
        Some(deep) if deep.tokens == tile.tokens && units <= FEW_UNITS * device.multiprocessors => *deep,
        _ => tile,
    }
}

/// Waves of CTAs in a GEMM in which every expert has one tile.
fn waves(gemm: &GemmDesc, tile: Kernel<MappedGemm>, device: &Device) -> u32 {
    let ctas = device.multiprocessors * tile.with_element(gemm.element).gated(gemm.gated).ctas_per_multiprocessor();
    let units = units(gemm.slots.min(gemm.experts) as u32, (gemm.rows as u32).div_ceil(tile.unit_rows()));
    units.div_ceil(ctas)
}

/// Whether the widest tile suits a GEMM whose experts fit in narrower tiles. It copies fewer tokens a row, but its last wave must not be
/// emptier. This was measured with 6 and 8 waves. A few waves are left to the narrower tile, which has more CTAs to spread.
fn wide_pays(gemm: &GemmDesc, narrow: Kernel<MappedGemm>, wide: Kernel<MappedGemm>, device: &Device) -> bool {
    let [by_narrow, by_wide] = [narrow, wide].map(|tile| (waves(gemm, tile, device), tile.unit_rows()));
    by_wide.0 > 4 && by_wide.0 * by_wide.1 <= by_narrow.0 * by_narrow.1
}

/// The schedule's tile for both GEMMs of a layer. Nearly every expert must fit in one tile, so that weights are read once. Larger experts
/// get 192 tokens by 256 rows, which moves the fewest bytes a flop. A tile is multiplied at the width of its own count: a wide variant
/// costs stages and resident CTAs, not columns. us a layer by tile (docs/measured_kernels.md):
///   qwen3 (E128 k8)     M 1 (mean 0.06)  27.1 at 16, 28.7 at 64;    M 256 (16)  293 at 64, 302 at 128, 316 at 256
///   mixtral (E8 k2)     M 1 (0.25)       98.5 at 16, 108 at 64;     M 256 (64)  441 at 64, 360 at 128, 398 at 256
///   mixtral             M 1024 (256)     791 at 256 x 128 rows, 772 at 128 x 256, 703 at 192 x 256
///   qwen3               M 1024 (64)      344 at 128, 337 at 192
fn tile_tokens(up: &GemmDesc, down: &GemmDesc, device: &Device) -> i32 {
    let mean = up.slots as f64 / up.experts.max(1) as f64;
    // The means leave room for the spread of random routing: 40 + 3.8 and 96 + 3.2 standard deviations.
    if mean <= 0.5 {
        16
    } else if mean <= 40.0 {
        64
    } else {
        let [narrow, wide] = [128, 192].map(|tokens| tile(up, tokens, device));
        let suits =
            |gemm: &GemmDesc| takes(wide, gemm.rows as u32) && (mean > 96.0 || wide_pays(gemm, narrow, wide, device));
        if suits(up) && suits(down) {
            192
        } else {
            128
        }
    }
}

fn gemm(gemm: &GemmDesc, tile_tokens: i32, device: &Device) -> Launch<MappedGemm> {
    let tile = tile(gemm, tile_tokens, device);
    let units =
        units(max_tiles(gemm.slots, gemm.experts, tile_tokens) as u32, (gemm.rows as u32).div_ceil(tile.unit_rows()));
    let kernel = tile.with_element(gemm.element).gated(gemm.gated);
    Launch {
        kernel,
        grid: units.min(device.multiprocessors * kernel.ctas_per_multiprocessor()).max(1),
        block: kernel.threads(),
        cluster: 1,
        shared_bytes: kernel.shared_bytes().unwrap_or(0),
    }
}

/// The facts of this launch of GEMM1 for a GEMM2 that begins where GEMM1 ends. `up`: GEMM1.
fn overlap(up: &GemmDesc, launch: AnyLaunch) -> Overlap {
    Overlap { ctas: launch.grid, units: (up.rows as u32).div_ceil(launch.variant.unit_rows()) }
}

/// Number of weights from which on an expert is large. It decides between the forms in one launch.
const LARGE_EXPERT: i64 = 32 << 20;

fn expert_weights(up: &GemmDesc, down: &GemmDesc) -> i64 {
    up.rows * up.k + down.rows * down.k
}

/// The fused layer, if it is the faster form: for few tokens of layers with large experts. us a layer, in separate launches and fused, by
/// M:
///   mixtral (E8 k2, 88 M weights an expert)   1: 114, 107   2: 182, 166   4: 261, 248   8: 333, 329   16: 347, 344
///   qwen3 (E128 k8, 4.7 M)                    1: 35, 36     2: 50, 52     4: 83, 85     8: 127, 131   16: 199, 206
/// The separate launches have become 2 to 5 us faster since; sizes in between were not measured.
fn layer(tokens: i64, up: &GemmDesc, down: &GemmDesc, device: &Device) -> Option<Launch<Layer>> {
    if expert_weights(up, down) < LARGE_EXPERT || tokens > i64::from(LAYER_TILE.tokens) {
        return None;
    }
    Some(one_launch(LAYER_TILE.with_element(up.element).gated(up.gated), up, down, device))
}

/// Most slots and most experts for which csrc/moe/few_slots.cuh and csrc/moe/routed_layer_sm90.cuh have room.
const ROUTED_SLOTS: i64 = 64;
pub const ROUTED_EXPERTS: i64 = 128;

/// Parts of 16 columns of the output's rows, of which there may be one for each slot. csrc/moe/layer_parts.cuh divides their numbers exactly
/// below this one.
const ROUTED_PARTS: i64 = 1 << 21;

/// The layer with the routing inside, if there is room for its tables and tokens. us a layer, routing, GEMM1, GEMM2 and combine in
/// separate launches, and in one launch, by M:
///   qwen3 (E128 k8 I768, 4.7 M weights an expert)  1: 30.4, 26.4   2: 46.4, 42.9   4: 77.9, 71.3   8: 126.9, 121.2
///   qwen3 TP 4 (I192)                              1: 20.0, 14.9   4: 29.2, 27.0
///   deepseek-v2-lite (E64 k6 I1408)                1: 37.8, 33.1   4: 99.3, 92.5
/// Layers with large experts were measured in the form with counters: mixtral 1: 96.1 by `layer`, 99.0 with the routing inside. They were
/// not measured in the form that polls.
fn routed_layer(call: &Routed, up: &GemmDesc, down: &GemmDesc, device: &Device) -> Option<Launch<RoutedLayer>> {
    let fits = routes_inside(call, up, ROUTED_EXPERTS, false)
        && call.tokens <= i64::from(ROUTED_TILE.tokens)
        && expert_weights(up, down) < LARGE_EXPERT
        && down.k <= i64::from(INNER_COLUMNS)
        && up.slots * ((up.k + 15) / 16) < ROUTED_PARTS;
    fits.then(|| one_launch(ROUTED_TILE.with_element(up.element).gated(up.gated), up, down, device))
}

/// Whether a launch with GEMMs in it can route, or take given ids (csrc/moe/few_slots.cuh). Its tables have room for `most_experts` experts.
/// `any`: its kernel knows bias and groups.
pub fn routes_inside(call: &Routed, up: &GemmDesc, most_experts: i64, any: bool) -> bool {
    let serves = |l: Logits| {
        let lanes = l.plain || any && l.per_lane().is_some_and(|own| i64::from(own) * 32 <= most_experts);
        lanes && i64::from(l.experts) <= most_experts && up.experts <= i64::from(l.experts)
    };
    let has_room = call.logits.map_or(up.experts <= most_experts, serves);
    call.routes_inside && up.slots <= ROUTED_SLOTS && has_room
}

/// The most tiles that a launch which routes may have: one for each expert, or more if given ids repeat an expert.
pub fn most_tiles(call: &Routed, up: &GemmDesc) -> i64 {
    if call.logits.is_some() {
        up.slots.min(up.experts)
    } else {
        up.slots
    }
}

fn one_launch<P>(kernel: Kernel<P>, up: &GemmDesc, down: &GemmDesc, device: &Device) -> Launch<P> {
    let row_blocks = [up, down].map(|gemm| (gemm.rows as u32).div_ceil(LAYER_ROWS));
    let units = units(max_tiles(up.slots, up.experts, LAYER_TOKENS) as u32, row_blocks.iter().sum());
    Launch {
        kernel,
        // NOTE: all CTAs must fit on the GPU at once: they wait for each other.
        grid: units.min(device.multiprocessors * kernel.ctas_per_multiprocessor()),
        block: kernel.threads(),
        cluster: 1,
        shared_bytes: kernel.shared_bytes().unwrap_or(0),
    }
}

fn variants(element: Element, gated: bool) -> Vec<Variant> {
    let gemms = TILES.iter().flat_map(|t| [gated, false].map(|gated| t.with_element(element).gated(gated).variant()));
    let layers = [
        LAYER_TILE.with_element(element).gated(gated).variant(),
        ROUTED_TILE.with_element(element).gated(gated).variant(),
    ];
    gemms.chain(layers).collect()
}

#[cfg(test)]
mod tests {
    use super::super::{program, CallDesc, Source, Task};
    use super::*;
    use crate::device::Arch;
    use crate::quant::Format;

    #[test]
    fn tiles_grow_with_the_mean_and_every_one_is_chosen() {
        let device = Device::typical(Arch::SM90);
        let mut chosen = Vec::new();
        let qwen3 = [1, 4, 16, 64, 256, 1024, 4096, 16384].map(|tokens| (tokens * 8, 128, 1536, 2048));
        let mixtral = [128, 512].map(|slots| (slots, 8, 14336, 4096));
        for (slots, experts, rows, k) in [&qwen3[..5], &mixtral, &qwen3[5..]].concat() {
            let gemm = GemmDesc { element: Element::Bf16, format: Format::Bf16, gated: true, slots, experts, rows, k };
            let launch = super::gemm(&gemm, tile_tokens(&gemm, &gemm, &device), &device);
            assert!(launch.shared_bytes <= device.shared_bytes && launch.grid > 0);
            chosen.push(launch.kernel);
        }
        chosen.dedup();
        assert_eq!(chosen, TILES.map(|t| t.gated(true)));
    }

    #[test]
    fn one_launch_has_no_more_parts_than_it_can_divide() {
        let device = Device::typical(Arch::SM90);
        let one = |hidden, top_k| {
            let layer = LayerDesc {
                experts: 8,
                hidden,
                intermediate: 8,
                gated: true,
                dtype: Dtype::Bf16,
                format: Format::Bf16,
            };
            let call = Routed { tokens: 8, top_k, logits: None, routes_inside: true };
            let program = program(&CallDesc::new(layer, Source::Routed(call)), Some(&device)).unwrap();
            program.launches_of(Task::RoutedLayer).count()
        };
        assert_eq!([one((1 << 19) - 16, 8), one(1 << 19, 8), one(1 << 19, 7)], [1, 0, 1]);
    }

    #[test]
    fn pairs_of_row_tiles_take_whole_strips() {
        let device = Device::typical(Arch::SM90);
        let gemm = |rows| GemmDesc {
            element: Element::Bf16,
            format: Format::Bf16,
            gated: true,
            slots: 4096,
            experts: 8,
            rows,
            k: 256,
        };
        assert_eq!(tile_tokens(&gemm(1408), &gemm(704), &device), 192);
        assert_eq!(tile_tokens(&gemm(1424), &gemm(704), &device), 128);
        assert_eq!(tile_tokens(&gemm(1408), &gemm(720), &device), 128);
        assert_eq!((tile_shapes(1408).len(), tile_shapes(1424).len()), (3, 2));
    }

    #[test]
    fn the_widest_tile_where_its_waves_are_full() {
        let device = Device::typical(Arch::SM90);
        let gemm = |experts, rows| GemmDesc {
            element: Element::Bf16,
            format: Format::Bf16,
            gated: true,
            slots: experts * 64,
            experts,
            rows,
            k: 2048,
        };
        assert_eq!(tile_tokens(&gemm(128, 1536), &gemm(128, 2048), &device), 192);
        assert_eq!(tile_tokens(&gemm(8, 14336), &gemm(8, 4096), &device), 128);
        assert_eq!(tile_tokens(&gemm(128, 1536), &gemm(128, 1024), &device), 128);
    }
}
