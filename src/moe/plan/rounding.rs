//! The launches that round activations: x before GEMM1, and GEMM1's output before GEMM2. If GEMM1 gathers, they take rows of tokens or
//! places; with rows in the experts' order they take the rows of a schedule.

use super::kernels::{Gemms, Rows};
use super::steps::RoundLaunch;
use super::{fp8_sm90, max_tiles};
use crate::device::Device;
use crate::kernel::Launch;
use crate::params::{Fp8Scaling, QuantizeRowsParams, RoundNvfp4Params, TileRowsParams};
use crate::quant::fp8::GROUP;
use crate::quant::{fp8_ops, Activations, Format, Weights};
use crate::variants::{quant, Family, Kernel, Variant};

/// The launches for x and for GEMM1's output. `inside`: GEMM1 rounds its output itself.
pub fn launches(gemms: &Gemms<'_>, tile_tokens: i32, inside: bool) -> [[Option<RoundLaunch>; 2]; 2] {
    let (up, down) = (&gemms.up, &gemms.down);
    let [of_x, of_hidden] = match gemms.rows {
        Rows::Gathered { tokens, .. } => {
            let x = match up.format.is_fp8() && fp8_sm90::in_order(tile_tokens) {
                true => [None, Some(RoundLaunch::Fp8(fp8_ops::to_slots(tokens, up.k)))],
                false => of_rows(up.format, (tokens, up.slots), up.k, gemms.device),
            };
            [x, of_rows(up.format, (up.slots, up.slots), down.k, gemms.device)]
        }
        Rows::InOrder { quantizes_x, .. } => {
            let tiles = max_tiles(up.slots, up.experts, tile_tokens).into();
            let room = Room { tiles, tile_tokens: tile_tokens.into(), slots: up.slots, device: gemms.device };
            // The launch that rounds x to NVFP4 also expands an x that came as codes.
            let rounds_x = quantizes_x || up.format.weights() == Weights::Nvfp4;
            [if rounds_x { room.launches(up.format, up.k) } else { [None; 2] }, room.launches(up.format, down.k)]
        }
    };
    [of_x, if inside { [None; 2] } else { of_hidden }]
}

/// The launches that round `rows` rows. With NVFP4 they round up to `slots` rows.
fn of_rows(format: Format, (rows, slots): (i64, i64), columns: i64, device: &Device) -> [Option<RoundLaunch>; 2] {
    match format.activations() {
        Activations::Kept => [None; 2],
        Activations::Fp8(scaling) => fp8_ops::plan(scaling, rows, columns).map(|launch| launch.map(RoundLaunch::Fp8)),
        Activations::E4m3Rows => [None, Some(RoundLaunch::Rows(rows_to_e4m3(rows, device)))],
        Activations::Mxfp8 => [None, Some(RoundLaunch::Rows(round_mxfp8(rows * columns, device)))],
        Activations::Nvfp4 => [None, Some(RoundLaunch::Nvfp4(round_nvfp4(slots * columns, device)))],
    }
}

/// The launch that rounds to e4m3 with one scale a row. A CTA takes row after row; a multiprocessor has room for 16 CTAs.
fn rows_to_e4m3(rows: i64, device: &Device) -> Launch<QuantizeRowsParams> {
    let kernel = quant::QUANTIZE_ROWS_E4M3.kernel();
    let grid = (rows as u32).min(16 * device.multiprocessors);
    Launch { kernel, grid, block: kernel.threads(), cluster: 1, shared_bytes: 0 }
}

/// The launch that rounds so many elements to MXFP8, 8 a thread. CTAs take further elements if there are more than the GPU holds at once.
fn round_mxfp8(elements: i64, device: &Device) -> Launch<QuantizeRowsParams> {
    let kernel = quant::ROUND_ROWS_MXFP8.kernel();
    let ctas = (elements as u64).div_ceil(8 * u64::from(kernel.threads()));
    let grid = ctas.min(u64::from(8 * device.multiprocessors)) as u32;
    Launch { kernel, grid, block: kernel.threads(), cluster: 1, shared_bytes: 0 }
}

/// The launch that rounds up to so many elements to NVFP4, 8 a thread. CTAs take further elements if there are more than the GPU holds at
/// once.
fn round_nvfp4(elements: i64, device: &Device) -> Launch<RoundNvfp4Params> {
    let kernel = round_rows_nvfp4(device);
    let ctas = (elements as u64).div_ceil(8 * u64::from(kernel.threads()));
    let grid = ctas.clamp(1, u64::from(kernel.ctas_per_multiprocessor() * device.multiprocessors)) as u32;
    Launch { kernel, grid, block: kernel.threads(), cluster: 1, shared_bytes: 0 }
}

/// The kernel that rounds rows to NVFP4.
fn round_rows_nvfp4(device: &Device) -> Kernel<RoundNvfp4Params> {
    let kernels = if device.is_hopper() { quant::ROUND_ROWS_NVFP4 } else { quant::ROUND_ROWS_NVFP4_PORTABLE };
    kernels.kernel()
}

/// The kernel that rounds a schedule's rows to MXFP8.
fn round_tiles_mxfp8(device: &Device) -> Kernel<TileRowsParams> {
    let kernels = if device.is_hopper() { quant::ROUND_TILES_MXFP8 } else { quant::ROUND_TILES_MXFP8_PORTABLE };
    kernels.kernel()
}

/// Threads of a CTA that quantises several rows at a time.
const CTA_THREADS: i64 = 256;
/// Vectors of 8 numbers that a thread of csrc/quant/round_tiles_mxfp8.cuh takes at a time.
const ROUND_VECTORS: i64 = 2;
/// Vectors of 8 numbers that a thread takes at a time when csrc/quant/quantize_fp8_rows.cuh finds the largest magnitude of a schedule's
/// rows.
const PEAK_VECTORS: i64 = 4;

/// The most that a schedule may name.
struct Room<'a> {
    tiles: i64,
    tile_tokens: i64,
    slots: i64,
    device: &'a Device,
}

impl Room<'_> {
    /// The launches that round rows of so many columns. Formats whose activations are not rounded have none.
    fn launches(&self, format: Format, columns: i64) -> [Option<RoundLaunch>; 2] {
        let vectors = self.tile_tokens * columns / 8;
        let fp8 = |kernel, parts, each| Some(RoundLaunch::Fp8(self.launch(kernel, parts, each)));
        let rows = |kernel, parts, each| Some(RoundLaunch::TileRows(self.launch(kernel, parts, each)));
        let groups = || fp8(quant::QUANTIZE_FP8_TILES.kernel(), vectors * 8 / GROUP as i64, 64);
        match format.activations() {
            Activations::Kept => [None; 2],
            Activations::Fp8(Fp8Scaling::Rows) => {
                let each = CTA_THREADS / i64::from(fp8_ops::row_threads(columns as i32));
                [None, fp8(quant::QUANTIZE_FP8_TILE_ROWS.kernel(), self.tile_tokens, each)]
            }
            Activations::Fp8(Fp8Scaling::Peak) => {
                [fp8(quant::QUANTIZE_FP8_TILE_PEAK.kernel(), vectors, PEAK_VECTORS * CTA_THREADS), groups()]
            }
            Activations::Fp8(_) => [None, groups()],
            Activations::E4m3Rows => [None, rows(quant::QUANTIZE_TILES_E4M3.kernel(), self.tile_tokens, 1)],
            Activations::Mxfp8 => [None, rows(round_tiles_mxfp8(self.device), vectors, ROUND_VECTORS * CTA_THREADS)],
            Activations::Nvfp4 => [None, Some(RoundLaunch::Nvfp4(round_nvfp4(self.slots * columns, self.device)))],
        }
    }

    /// A launch whose CTAs take `each` of a tile's `parts` at a time, and take further parts if there are more than the GPU holds at once.
    fn launch<P>(&self, kernel: Kernel<P>, parts: i64, each: i64) -> Launch<P> {
        let most = self.device.multiprocessors * kernel.ctas_per_multiprocessor();
        let units = self.tiles * parts.max(each) / each;
        let grid = units.clamp(1, most.into()) as u32;
        Launch { kernel, grid, block: kernel.threads(), cluster: 1, shared_bytes: 0 }
    }
}

/// Every kernel that rounds activations of a format on this device. These kernels are loaded with the weights.
pub fn variants(device: &Device, format: Format) -> Vec<Variant> {
    let families = |families: &[Family]| families.iter().copied().map(Variant::of).collect();
    let fp8 = [
        Family::QuantizeFp8,
        Family::QuantizeFp8Tiles,
        Family::QuantizeFp8Rows,
        Family::QuantizeFp8Peak,
        Family::ExpandScales,
    ];
    match format.activations() {
        Activations::Kept => Vec::new(),
        Activations::E4m3Rows => families(&[Family::QuantizeRowsE4m3, Family::QuantizeTilesE4m3]),
        Activations::Mxfp8 => vec![Variant::of(Family::RoundRowsMxfp8), round_tiles_mxfp8(device).variant()],
        Activations::Nvfp4 => vec![round_rows_nvfp4(device).variant()],
        Activations::Fp8(scaling) => {
            let own = match scaling {
                Fp8Scaling::Peak => &[Family::QuantizeFp8TilePeak][..],
                Fp8Scaling::Rows => &[Family::QuantizeFp8TileRows],
                _ => &[],
            };
            let to_slots = if device.is_hopper() { &[Family::QuantizeFp8Slots][..] } else { &[] };
            families(&[&fp8, own, to_slots].concat())
        }
    }
}
