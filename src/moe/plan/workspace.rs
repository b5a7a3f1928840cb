//! The ranges of a call's workspace. They are ranges of one buffer, the same on every device.

use super::call::{CallDesc, InOrder, Routed, Source};
use super::{e4m3_columns, fp8_sm90, max_tiles, routing, Counters, MIN_TILE_TOKENS};
use crate::counters::{Counts, MOST_EXPERTS};
use crate::desc::LayerDesc;
use crate::params::{Dtype, Fp8Scaling, Tile};
use crate::quant::fp8::GROUP;
use crate::quant::{Activations, Weights};
use crate::workspace::{Layout, Range};

/// The ranges of a call. Ranges that the call does not use are empty.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Workspace {
    pub ids: Range,
    pub weights: Range,
    pub histogram: Range,
    pub offsets: Range,
    pub place_of_slot: Range,
    pub slot_of_place: Range,
    pub tiles: Range,
    pub tile_count: Range,
    pub counters: Range,
    pub block_histogram: Range,
    /// GEMM1's output, [slots, `LayerDesc::inner`].
    pub hidden: Range,
    /// GEMM2's output, [slots, hidden]. Before GEMM2 runs, x in e4m3 or in the order of places may lie here. A call on rows in order has
    /// no such range: its GEMM2 writes to the caller's memory.
    pub rows: Range,
    /// Formats of e4m3 with fp32 scales: codes of x and of GEMM1's output, and the scales of both.
    pub x_codes: Range,
    pub x_scales: Range,
    pub hidden_codes: Range,
    pub hidden_scales: Range,
    /// MXFP4 with e4m3 activations: GEMM1's output in e4m3. With rows in order it first holds x in e4m3.
    pub hidden_e4m3: Range,
    /// MXFP4 with e4m3 activations: the scales of x's rows, later the scales of GEMM1's output.
    pub row_scales: Range,
    /// MXFP8: x, rounded to the numbers of MXFP8. NVFP4 has its rounded x here if a token has the same numbers for all experts.
    pub x_rounded: Range,
    /// Formats of e4m3 with fp32 scales: GEMM2's schedule, if it has its own.
    pub down_tiles: Range,
    pub down_tile_count: Range,
    pub bytes: usize,
}

impl Workspace {
    /// The ranges of a call.
    pub fn of(call: &CallDesc) -> Workspace {
        match call.source {
            Source::Routed(Routed { tokens, top_k, .. }) => Workspace::of_slots(&call.layer, tokens, top_k),
            Source::InOrder(InOrder { rows, .. }) => Workspace::of_rows(&call.layer, rows),
        }
    }

    /// The ranges of a routed call. They are sized for the smallest tile and for both ways of routing, so that one buffer serves every call of
    /// up to `tokens` tokens.
    pub fn of_slots(layer: &LayerDesc, tokens: i64, top_k: i64) -> Workspace {
        let slots = (tokens * top_k) as usize;
        let (experts, element) = (layer.experts as usize, element_bytes(layer));
        let most_tiles = max_tiles(tokens * top_k, layer.experts, MIN_TILE_TOKENS) as usize;
        let down_tiles = max_tiles(tokens * top_k, layer.experts, fp8_sm90::DOWN_TILE_TOKENS) as usize;
        let only_fp8 = |bytes: usize| if layer.format.is_fp8() { bytes } else { 0 };
        let e4m3 = layer.format.activations() == Activations::E4m3Rows;
        let only_e4m3 = |bytes| if e4m3 { bytes } else { 0 };
        let counters = super::counters(most_tiles as i32, layer.hidden).count().max(Counters::with_done(layer.experts));
        let mut layout = Layout::default();
        let mut add = |name, bytes| layout.add(name, bytes);
        let mut w = Workspace {
            ids: add("ids", slots * 4),
            weights: add("weights", slots * 4),
            histogram: add("histogram", experts * 4),
            offsets: add("offsets", (experts + 1) * 4),
            place_of_slot: add("place_of_slot", slots * 4),
            slot_of_place: add("slot_of_place", slots * 4),
            tiles: add("tiles", most_tiles * size_of::<Tile>()),
            tile_count: add("tile_count", 4),
            counters: add("counters", counters as usize * 4),
            block_histogram: add(
                "block_histogram",
                routing::block_histogram_bytes(tokens as u32, layer.experts as u32, top_k as u32),
            ),
            hidden: add("hidden", slots * layer.inner() as usize * element),
            rows: add(
                "rows",
                (slots * layer.hidden as usize * element).max(only_e4m3(tokens as usize * e4m3_columns(layer.hidden))),
            ),
            x_codes: add("x_codes", fp8(layer, tokens as usize, layer.hidden, 1)),
            x_scales: add("x_scales", fp8(layer, tokens as usize, layer.hidden, GROUP / 4)),
            hidden_codes: add("hidden_codes", fp8(layer, slots, layer.inner(), 1)),
            hidden_scales: add("hidden_scales", fp8(layer, slots, layer.inner(), GROUP / 4)),
            hidden_e4m3: add("hidden_e4m3", only_e4m3(slots * e4m3_columns(layer.intermediate))),
            row_scales: add("row_scales", only_e4m3(slots * 4)),
            x_rounded: add(
                "x_rounded",
                match layer.format.activations() {
                    Activations::Mxfp8 | Activations::Nvfp4 => tokens as usize * layer.hidden as usize * element,
                    _ => 0,
                },
            ),
            down_tiles: add("down_tiles", only_fp8(down_tiles * size_of::<Tile>())),
            down_tile_count: add("down_tile_count", only_fp8(4)),
            bytes: 0,
        };
        w.bytes = layout.bytes;
        w
    }

    /// The ranges of a call on rows in the experts' order, with room for so many rows.
    pub fn of_rows(layer: &LayerDesc, rows: i64) -> Workspace {
        let slots = rows as usize;
        let tiles = max_tiles(rows, layer.experts, MIN_TILE_TOKENS);
        let e4m3 = |bytes: usize| if layer.format.activations() == Activations::E4m3Rows { bytes } else { 0 };
        let mut layout = Layout::default();
        let mut add = |name, bytes| layout.add(name, bytes);
        let mut w = Workspace {
            tiles: add("tiles", tiles as usize * size_of::<Tile>()),
            tile_count: add("tile_count", 4),
            counters: add("counters", own_counters(layer).max(counters_of_rows(layer) as usize) * 4),
            hidden: add("hidden", slots * layer.inner() as usize * element_bytes(layer)),
            x_codes: add("x_codes", fp8(layer, slots, layer.hidden, 1)),
            x_scales: add("x_scales", fp8(layer, slots, layer.hidden, GROUP / 4)),
            hidden_codes: add("hidden_codes", fp8(layer, slots, layer.inner(), 1)),
            hidden_scales: add("hidden_scales", fp8(layer, slots, layer.inner(), GROUP / 4)),
            hidden_e4m3: add("hidden_e4m3", e4m3(slots * e4m3_columns(layer.hidden.max(layer.intermediate)))),
            row_scales: add("row_scales", e4m3(slots * 4)),
            ..Workspace::default()
        };
        w.bytes = layout.bytes;
        w
    }

    /// The ranges that a routed call of the layer's format has, in the order of `explain`.
    pub fn ranges(&self) -> impl Iterator<Item = &Range> {
        let all = [
            &self.ids,
            &self.weights,
            &self.histogram,
            &self.offsets,
            &self.place_of_slot,
            &self.slot_of_place,
            &self.tiles,
            &self.tile_count,
            &self.counters,
            &self.block_histogram,
            &self.hidden,
            &self.rows,
            &self.x_codes,
            &self.x_scales,
            &self.hidden_codes,
            &self.hidden_scales,
            &self.down_tiles,
            &self.down_tile_count,
            &self.hidden_e4m3,
            &self.row_scales,
            &self.x_rounded,
        ];
        let (fp8, e4m3, rounded) = (self.x_codes.bytes > 0, self.row_scales.bytes > 0, self.x_rounded.bytes > 0);
        let has = move |i| match i {
            0..12 => true,
            12..18 => fp8,
            18..20 => e4m3,
            _ => rounded,
        };
        all.into_iter().enumerate().filter(move |&(i, _)| has(i)).map(|(_, range)| range)
    }
}

fn element_bytes(layer: &LayerDesc) -> usize {
    if layer.dtype == Dtype::F32 {
        4
    } else {
        2
    }
}

/// Bytes of rows of e4m3 in a format of e4m3 with fp32 scales, 0 in other formats. With more columns a byte: bytes of the rows' scales.
fn fp8(layer: &LayerDesc, rows: usize, columns: i64, columns_a_byte: usize) -> usize {
    if layer.format.is_fp8() {
        rows * columns as usize / columns_a_byte
    } else {
        0
    }
}

/// How many of `Counters` a call on rows in order has. Such a call counts no tiles. It has `Counters::DONE` only if it has no peaks.
pub fn counters_of_rows(layer: &LayerDesc) -> i32 {
    let counts = match layer.format.weights() {
        Weights::Plain => true,
        Weights::Fp8 => layer.format.activations() == Activations::Fp8(Fp8Scaling::Groups),
        _ => false,
    };
    let done = if counts { Counters::with_done(layer.experts) } else { 0 };
    done.max(Counters::PEAK_HIDDEN as i32 + 1)
}

/// How many counters a launch has that finds its tiles itself. No schedule sets them to 0. Formats without such a launch have none.
fn own_counters(layer: &LayerDesc) -> usize {
    let kept = layer.format.is_packed() && layer.format.activations() == Activations::Kept;
    if kept && layer.experts <= MOST_EXPERTS {
        Counts::Pair { experts: layer.experts }.count()
    } else {
        0
    }
}
