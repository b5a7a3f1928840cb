//! The plan of a layer whose rows lie expert by expert already: a schedule from their counts, the GEMMs, no combine.

use super::{
    e4m3_columns, element, fp8_sm90, max_tiles, mxfp4_sm90, mxfp8_sm90, nvfp4_sm90, portable, schedule, sm90, Counters,
    GemmDesc, Kernels, MoeWorkspace, Overlap, MIN_TILE_TOKENS,
};
use crate::counters::{Counts, MOST_EXPERTS};
use crate::device::Device;
use crate::error::Result;
use crate::kernel::Launch;
use crate::moe::weights::LayerDesc;
use crate::params::{Dtype, Fp8Scaling, Tile};
use crate::quant::fp8::GROUP;
use crate::quant::{fp8_ops, Format};
use crate::variants::fp8::Fp8;
use crate::variants::mxfp8::Mxfp8;
use crate::variants::Variant;
use crate::workspace::Layout;

/// Those of `Counters` that a call has: no tile is counted, and `Counters::DONE` where peaks are not.
pub fn counters(layer: &LayerDesc) -> i32 {
    let counts = layer.format == Format::Fp8Block || layer.format.spec().block == 1;
    let done = if counts { Counters::with_done(layer.experts) } else { 0 };
    done.max(Counters::PEAK_HIDDEN as i32 + 1)
}

/// Those of a launch that finds its tiles itself, which no schedule makes zero; none for formats without such a launch.
fn own_counters(layer: &LayerDesc) -> usize {
    match layer.format {
        Format::Mxfp4 | Format::Nvfp4 if layer.experts <= MOST_EXPERTS => {
            Counts::Pair { experts: layer.experts }.count()
        }
        _ => 0,
    }
}

/// One call.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MaskedDesc {
    pub layer: LayerDesc,
    /// Rows there is room for, of all experts.
    pub rows: i64,
    /// Rows of an expert that are expected: they choose the tile, and no bit of the result.
    pub expected: i64,
    /// Whether x is quantised here (fp8).
    pub quantizes_x: bool,
    /// Whether an expert's rows begin at a multiple of a number.
    pub finds_tiles: bool,
}

/// Its launches. A pure function of shape and device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MaskedPlan {
    pub tile_tokens: i32,
    pub max_tiles: i32,
    /// None: the GEMMs' launch finds the tiles itself.
    pub schedule: Option<Launch>,
    /// Of e4m3, MXFP8 and NVFP4 activations: x, before GEMM1, and GEMM1's output, where GEMM1 does not do it itself, in up to two launches.
    pub quantize: [[Option<Launch>; 2]; 2],
    pub up: Launch,
    /// None: `up` has both GEMMs.
    pub down: Option<Launch>,
    /// As in `MoePlan`.
    pub overlap: Option<Overlap>,
}

impl MaskedPlan {
    pub fn new(desc: &MaskedDesc, device: &Device) -> Result<MaskedPlan> {
        let MaskedDesc { layer, rows: slots, .. } = desc;
        layer.require_cuda(device)?;
        let (element, format, experts) = (element(layer.dtype), layer.format, layer.experts);
        let up = GemmDesc {
            element,
            format,
            gated: layer.gated,
            slots: *slots,
            experts,
            rows: layer.up_rows(),
            k: layer.hidden,
        };
        let down = GemmDesc { gated: false, rows: layer.hidden, k: layer.intermediate, ..up };
        // Tiles by what is expected, grids by what may come.
        let expected = (desc.expected * experts).clamp(1, (*slots).max(1));
        let [few_up, few_down] = [up, down].map(|gemm| GemmDesc { slots: expected, ..gemm });
        let kernels = Kernels::of(device, layer);
        let tile_tokens = match kernels {
            Kernels::Hopper => sm90::tile_tokens(&few_up, &few_down, device),
            Kernels::HopperMxfp4 => mxfp4_sm90::tile_tokens(&few_up),
            Kernels::HopperFp8 => fp8_sm90::tile_tokens(&few_up, fp8_sm90::Order::Given),
            Kernels::HopperMxfp8 => mxfp8_sm90::tile_tokens(&few_up),
            Kernels::HopperNvfp4 => nvfp4_sm90::tile_tokens(&few_up),
            Kernels::Portable => portable::tile_tokens(&few_up, &few_down, device),
        };
        let inside_fp8 = kernels == Kernels::HopperFp8 && fp8_sm90::quantises_inside(&few_up, tile_tokens, device);
        let each = |gemm: fn(&GemmDesc, i32, &Device) -> Launch| {
            (gemm(&up, tile_tokens, device), Some(gemm(&down, tile_tokens, device)))
        };
        let gemm1 = up;
        let (up, down) = match kernels {
            Kernels::Hopper => each(sm90::gemm),
            Kernels::HopperMxfp4 => mxfp4_sm90::gemms(&up, &down, tile_tokens, device),
            Kernels::HopperFp8 => {
                let down = fp8_sm90::down_of_rows((&few_down, &down), tile_tokens, device);
                let gemm = if inside_fp8 { fp8_sm90::quantising_gemm } else { fp8_sm90::gemm };
                (gemm(&up, tile_tokens, device), Some(down))
            }
            Kernels::HopperMxfp8 => (mxfp8_sm90::gemms(&up, &down, tile_tokens, device), None),
            Kernels::HopperNvfp4 => (nvfp4_sm90::gemms(&up, &down, tile_tokens, device), None),
            Kernels::Portable => each(portable::gemm),
        };
        let max_tiles = max_tiles(*slots, experts, tile_tokens);
        let room = Room { tiles: max_tiles.into(), tile_tokens: tile_tokens.into(), device };
        let [of_x, of_hidden] = [layer.hidden, layer.intermediate].map(|columns| room.quantise(layer.format, columns));
        let inside = match kernels {
            Kernels::HopperFp8 => inside_fp8,
            _ => kernels == Kernels::HopperMxfp8,
        };
        let quantize = match layer.format {
            // x that came as codes is expanded by the same launch.
            format if format.is_nvfp4() => nvfp4_sm90::rounds(layer, *slots, device).map(|launch| [None, launch]),
            _ => [if desc.quantizes_x { of_x } else { [None; 2] }, if inside { [None; 2] } else { of_hidden }],
        };
        // What quantises rows needs a schedule, too.
        let alone = down.is_none() && quantize.iter().flatten().all(Option::is_none);
        let finds_tiles = desc.finds_tiles && alone && experts <= MOST_EXPERTS;
        let schedule = (!finds_tiles).then(schedule);
        let overlap = match kernels {
            Kernels::Hopper => Some(sm90::overlap(&gemm1, up)),
            Kernels::HopperFp8 if inside => Some(fp8_sm90::overlap(&gemm1, tile_tokens, up)),
            _ => None,
        };
        Ok(MaskedPlan { tile_tokens, max_tiles, schedule, quantize, up, down, overlap })
    }

    /// All launches in their order.
    pub fn launches(&self) -> Vec<Launch> {
        let [x, hidden] = self.quantize;
        let gemms = [Some(self.up)].into_iter().chain(hidden).chain([self.down]);
        [self.schedule].into_iter().chain(x).chain(gemms).flatten().collect()
    }
}

/// In steps of what an expert's rows are cut into tiles.
pub fn tile_step(format: Format, tile_tokens: i32) -> i32 {
    match format.is_fp8() && fp8_sm90::in_order(tile_tokens) {
        true => tile_tokens / 3,
        false => 16,
    }
}

/// Threads of the kernels that quantise several rows at a time, and the vectors of 8 numbers that each takes at a time of
/// csrc/quant/round_tiles_mxfp8.cuh and of the peak in quantize_fp8_rows.cuh.
const CTA_THREADS: i64 = 256;
const ROUND_VECTORS: i64 = 2;
const PEAK_VECTORS: i64 = 4;

/// What a schedule may name, at most.
struct Room<'a> {
    tiles: i64,
    tile_tokens: i64,
    device: &'a Device,
}

impl Room<'_> {
    /// The launches that quantise rows of so many columns, none for formats whose activations stay as they are.
    fn quantise(&self, format: Format, columns: i64) -> [Option<Launch>; 2] {
        let vectors = self.tile_tokens * columns / 8;
        let fp8 = |kernel, parts, each| Some(self.launch(Variant::Fp8(kernel), parts, each));
        let groups = || fp8(Fp8::TilesToE4m3, vectors * 8 / GROUP as i64, 64);
        match format {
            Format::Mxfp8 => {
                let round = Mxfp8::RoundTiles { portable: !self.device.is_hopper() };
                [None, Some(self.launch(Variant::Mxfp8(round), vectors, ROUND_VECTORS * CTA_THREADS))]
            }
            Format::Mxfp4A8 => [None, Some(self.launch(Variant::QuantizeTilesE4m3, self.tile_tokens, 1))],
            _ if !format.is_fp8() => [None; 2],
            _ => match fp8_sm90::scaling(format) {
                Fp8Scaling::Rows => {
                    let rows = CTA_THREADS / i64::from(fp8_ops::row_threads(columns as i32));
                    [None, fp8(Fp8::WholeRowsOfTiles, self.tile_tokens, rows)]
                }
                Fp8Scaling::Peak => [fp8(Fp8::PeakOfTiles, vectors, PEAK_VECTORS * CTA_THREADS), groups()],
                _ => [None, groups()],
            },
        }
    }

    /// CTAs that take `each` of a tile's `parts` at a time and go on where there are more than the GPU holds.
    fn launch(&self, variant: Variant, parts: i64, each: i64) -> Launch {
        let most = self.device.multiprocessors * variant.ctas_per_multiprocessor();
        let units = self.tiles * parts.max(each) / each;
        let grid = units.clamp(1, most.into()) as u32;
        Launch { variant, grid, block: variant.threads(), cluster: 1, shared_bytes: 0 }
    }
}

/// The variants of `Room::quantise` that no call of `moe` has.
pub fn variants(device: &Device, format: Format) -> Vec<Variant> {
    match format {
        Format::Mxfp8 => vec![Variant::Mxfp8(Mxfp8::RoundTiles { portable: !device.is_hopper() })],
        Format::Mxfp4A8 => vec![Variant::QuantizeTilesE4m3],
        Format::Fp8Tensor => vec![Variant::Fp8(Fp8::PeakOfTiles)],
        Format::Fp8TensorToken => vec![Variant::Fp8(Fp8::WholeRowsOfTiles)],
        _ => vec![],
    }
}

/// The ranges of a call, on any device; those that it has no use for are empty. GEMM2 writes to the caller's memory.
pub fn workspace(layer: &LayerDesc, rows: i64) -> MoeWorkspace {
    let (slots, element) = (rows as usize, if layer.dtype == Dtype::F32 { 4 } else { 2 });
    let tiles = max_tiles(rows, layer.experts, MIN_TILE_TOKENS);
    let of = |format, bytes: usize| if layer.format == format { bytes } else { 0 };
    let fp8 = |columns: i64, columns_a_byte: usize| match layer.format.is_fp8() {
        true => slots * columns as usize / columns_a_byte,
        false => 0,
    };
    let mut layout = Layout::default();
    let mut add = |name, bytes| layout.add(name, bytes);
    let mut w = MoeWorkspace {
        tiles: add("tiles", tiles as usize * size_of::<Tile>()),
        tile_count: add("tile_count", 4),
        counters: add("counters", own_counters(layer).max(counters(layer) as usize) * 4),
        hidden: add("hidden", slots * layer.intermediate as usize * element),
        x_codes: add("x_codes", fp8(layer.hidden, 1)),
        x_scales: add("x_scales", fp8(layer.hidden, GROUP / 4)),
        hidden_codes: add("hidden_codes", fp8(layer.intermediate, 1)),
        hidden_scales: add("hidden_scales", fp8(layer.intermediate, GROUP / 4)),
        // x, and once GEMM1 has read that, its output.
        hidden_e4m3: add(
            "hidden_e4m3",
            of(Format::Mxfp4A8, slots * e4m3_columns(layer.hidden.max(layer.intermediate))),
        ),
        row_scales: add("row_scales", of(Format::Mxfp4A8, slots * 4)),
        ..MoeWorkspace::default()
    };
    w.bytes = layout.bytes;
    w
}
