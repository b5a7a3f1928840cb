//! MXFP4 experts with e4m3 activations: what is quantised on the way, and the range of scales that e4m3 leaves.

use crate::moe::layer::Layer;
use crate::moe::plan::{e4m3_columns, MoeDesc, MoeWorkspace};
use crate::moe::rounding::Rounding;
use crate::parallel::*;
use crate::params::{GroupedGemmParams, QuantizeRowsParams, RouteParams};
use crate::quant::blocks::Blocks;
use crate::quant::packed_e4m3;
use std::sync::Arc;

/// Of x and of GEMM1's output. Makes the GEMMs read what these write. `packed`: weights are, so that rows are bytes, padded to whole blocks;
/// else bf16 numbers.
pub fn round_slots(
    packed: bool,
    desc: &MoeDesc,
    (ws, base): (&MoeWorkspace, *mut u8),
    route: &RouteParams,
    (up, down): (&mut GroupedGemmParams, &mut GroupedGemmParams),
) -> [Rounding; 2] {
    let columns = |k: i32| if packed { e4m3_columns(k.into()) as i32 } else { k };
    let of_x = QuantizeRowsParams {
        x: up.x,
        // GEMM2 writes there once GEMM1 is done.
        out: ws.rows.at(base),
        scales: ws.row_scales.at(base),
        rows: desc.tokens as i32,
        columns: up.k,
        out_columns: columns(up.k),
        tiles: std::ptr::null(),
        tile_count: std::ptr::null(),
        x_is_older: true,
    };
    let of_hidden = QuantizeRowsParams {
        x: down.x,
        out: if packed { ws.hidden_e4m3.at(base) } else { ws.hidden.at(base) },
        rows: route.tokens * route.top_k,
        columns: down.k,
        out_columns: columns(down.k),
        tiles: route.tiles,
        tile_count: route.tile_count,
        x_is_older: false,
        ..of_x
    };
    for (gemm, quantize) in [(up, &of_x), (down, &of_hidden)] {
        gemm.x = quantize.out;
        gemm.row_scales = quantize.scales;
        if packed {
            // The kernel counts pairs of columns.
            gemm.k = quantize.out_columns / 2;
        }
    }
    [of_x, of_hidden].map(Rounding::E4m3)
}

/// `Blocks::least` of a checkpoint's matrices [experts, rows, 32 row_blocks] on the host, of whose rows and columns the first are used.
///
/// # Safety
/// `blocks` has the scales of all of them.
pub unsafe fn least_scales(blocks: &Blocks, experts: i64, (rows, used_rows): (i64, i64), k: i64) -> Arc<[u8]> {
    let (row_blocks, rows) = (blocks.row_blocks, rows as usize);
    // SAFETY: the caller's contract.
    let scales = unsafe { std::slice::from_raw_parts(blocks.scales, experts as usize * rows * row_blocks) };
    let used = (k as usize).div_ceil(crate::quant::mxfp4::BLOCK);
    let least: Vec<u8> = scales.par_chunks(rows * row_blocks).map_collect(|expert| {
        let rows = expert.chunks(row_blocks).take(used_rows as usize).flat_map(|row| &row[..used]);
        let largest = rows.copied().filter(|&scale| scale != 255).max().unwrap_or(0);
        packed_e4m3::least(packed_e4m3::peak(largest))
    });
    least.into()
}
