//! The plan of a layer whose rows lie expert by expert already: a schedule from their counts, the GEMMs, no combine.

use super::gemms::{set_of, GemmsPlan};
use super::kernels::{Gemms, Rows};
use super::{e4m3_columns, fp8_sm90, max_tiles, schedule, Counters, MoeWorkspace, MIN_TILE_TOKENS};
use crate::counters::{Counts, MOST_EXPERTS};
use crate::desc::LayerDesc;
use crate::device::Device;
use crate::error::Result;
use crate::kernel::Launch;
use crate::params::{Dtype, Fp8Scaling, Tile};
use crate::quant::fp8::GROUP;
use crate::quant::{Activations, Format, Weights};
use crate::workspace::Layout;

/// How many of `Counters` a call has: it counts no tile, and `Counters::DONE` where it counts no peaks.
pub fn counters(layer: &LayerDesc) -> i32 {
    let counts = match layer.format.weights() {
        Weights::Plain => true,
        Weights::Fp8 => layer.format.activations() == Activations::Fp8(Fp8Scaling::Groups),
        _ => false,
    };
    let done = if counts { Counters::with_done(layer.experts) } else { 0 };
    done.max(Counters::PEAK_HIDDEN as i32 + 1)
}

/// Counters of a launch that finds its tiles itself, which no schedule makes zero; 0 for formats without such a launch.
fn own_counters(layer: &LayerDesc) -> usize {
    let kept = layer.format.is_packed() && layer.format.activations() == Activations::Kept;
    if kept && layer.experts <= MOST_EXPERTS {
        Counts::Pair { experts: layer.experts }.count()
    } else {
        0
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
    pub max_tiles: i32,
    /// None: the GEMMs' launch finds the tiles itself.
    pub schedule: Option<Launch>,
    pub gemms: GemmsPlan,
}

impl MaskedPlan {
    pub fn new(desc: &MaskedDesc, device: &Device) -> Result<MaskedPlan> {
        let MaskedDesc { layer, rows: slots, expected, quantizes_x, finds_tiles } = *desc;
        super::require(&layer, device)?;
        let rows = Rows::InOrder { expected, quantizes_x };
        let gemms = GemmsPlan::new(set_of(device, &layer), &Gemms::new(&layer, slots, rows, device));
        // What quantises rows needs a schedule, too.
        let alone = gemms.down.is_none() && gemms.quantize.iter().flatten().all(Option::is_none);
        let finds_tiles = finds_tiles && alone && layer.experts <= MOST_EXPERTS;
        Ok(MaskedPlan {
            max_tiles: max_tiles(slots, layer.experts, gemms.tile_tokens),
            schedule: (!finds_tiles).then(schedule),
            gemms,
        })
    }

    /// The plan as text.
    pub fn explain(&self, desc: &MaskedDesc) -> String {
        let MaskedDesc { layer, rows, expected, .. } = desc;
        let (experts, format) = (layer.experts, layer.format.spec().name);
        let mut text = format!(
            "rows in expert order: {experts} experts, hidden {}, intermediate {}, {format}, room for {rows} rows, {expected} expected an expert\n",
            layer.hidden, layer.intermediate
        );
        for (number, launch) in self.launches().iter().enumerate() {
            text += &format!("launch {number}: {launch}\n");
        }
        text
    }

    /// All launches in their order.
    pub fn launches(&self) -> Vec<Launch> {
        self.schedule.into_iter().chain(self.gemms.launches()).collect()
    }
}

/// In steps of what an expert's rows are cut into tiles.
pub fn tile_step(format: Format, tile_tokens: i32) -> i32 {
    match format.is_fp8() && fp8_sm90::in_order(tile_tokens) {
        true => tile_tokens / 3,
        false => 16,
    }
}

/// The ranges of a call, on any device; those that it has no use for are empty. GEMM2 writes to the caller's memory.
pub fn workspace(layer: &LayerDesc, rows: i64) -> MoeWorkspace {
    let (slots, element) = (rows as usize, if layer.dtype == Dtype::F32 { 4 } else { 2 });
    let tiles = max_tiles(rows, layer.experts, MIN_TILE_TOKENS);
    let e4m3 = |bytes: usize| if layer.format.activations() == Activations::E4m3Rows { bytes } else { 0 };
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
        hidden: add("hidden", slots * layer.inner() as usize * element),
        x_codes: add("x_codes", fp8(layer.hidden, 1)),
        x_scales: add("x_scales", fp8(layer.hidden, GROUP / 4)),
        hidden_codes: add("hidden_codes", fp8(layer.inner(), 1)),
        hidden_scales: add("hidden_scales", fp8(layer.inner(), GROUP / 4)),
        // x, and once GEMM1 has read that, its output.
        hidden_e4m3: add("hidden_e4m3", e4m3(slots * e4m3_columns(layer.hidden.max(layer.intermediate)))),
        row_scales: add("row_scales", e4m3(slots * 4)),
        ..MoeWorkspace::default()
    };
    w.bytes = layout.bytes;
    w
}
