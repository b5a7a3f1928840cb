//! MXFP4 experts with e4m3 activations: the range of scales that decoding to e4m3 allows.

use crate::parallel::*;
use crate::quant::blocks::Blocks;
use crate::quant::packed_e4m3;
use std::sync::Arc;

/// `Blocks::least` of a checkpoint's matrices [experts, rows, 32 row_blocks] on the host. Only the first `used_rows` rows and `k` columns
/// of each matrix count.
///
/// # Safety
/// `blocks` must have the scales of all rows of all experts.
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
