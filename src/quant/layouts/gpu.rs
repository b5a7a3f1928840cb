//! Conversions between layouts on a GPU, with the kernels of csrc/quant/layouts_mxfp4.cuh.

use super::cutlass::{self, Release};
use super::{words, Conversion, Layout, Matrices};
use crate::contract;
use crate::error::Result;
use crate::kernel::Stream;
use crate::params::{LayoutMxfp4Params, Mxfp4Layout};
use crate::quant::packed;
use crate::variants::quant;

/// (rows of a band, threads that a conversion needs for a band).
fn bands(conversion: &Conversion) -> (usize, usize) {
    let held = conversion.held;
    if !conversion.scales {
        return (words::TILE_ROWS, held.columns / words::TILE_BYTES * words::TILE_ROWS / 2);
    }
    let rows = match conversion.layout {
        Layout::Hopper { num_warps } => 32 * num_warps,
        Layout::Cutlass(Release::V0_6) => held.rows,
        Layout::Cutlass(Release::V0_7) => cutlass::FOLDED_ROWS,
    };
    (rows, rows * held.columns / 4)
}

/// Launches a conversion from the bytes at `input` to those at `output`.
pub fn launch(stream: &Stream<'_>, op: &str, conversion: &Conversion, input: *const u8, output: *mut u8) -> Result<()> {
    let Conversion { layout, scales, back, plain, held } = *conversion;
    let Matrices { count, rows, columns } = held;
    let (band_rows, threads) = bands(conversion);
    if count * rows * columns == 0 {
        return Ok(());
    }
    // Kernels count a matrix' rows and columns, and the threads of a band, in 32 bits.
    if rows.max(columns).max(threads) > i32::MAX as usize {
        contract!("expected matrices whose bands have up to 2^31 parts, got {rows} rows of {columns} bytes");
    }
    let params = LayoutMxfp4Params {
        input,
        output,
        layout: match layout {
            Layout::Hopper { .. } => Mxfp4Layout::Hopper,
            Layout::Cutlass(Release::V0_6) => Mxfp4Layout::CutlassPairs,
            Layout::Cutlass(Release::V0_7) => Mxfp4Layout::CutlassSpread,
        },
        band_rows: band_rows as u32,
        rows: plain.rows as u32,
        columns: plain.columns as u32,
        held_rows: rows as u32,
        held_columns: columns as u32,
    };
    let kernel = quant::layout(scales, back);
    let ctas = count * (rows / band_rows) * threads.div_ceil(kernel.threads() as usize);
    packed::launch(stream, op, kernel, ctas as i64, &params)
}
