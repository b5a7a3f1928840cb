//! The kernel of csrc/quant/quantize_nvfp4.cuh on host memory.

use crate::parallel::*;

use super::{for_dtype, Element, Shared};
use crate::params::QuantizeNvfp4Params;
use crate::quant::nvfp4::{quantize_block, ScaleLayout};

/// Elements below which threads cost more time than they save.
const ELEMENTS_PER_TASK: usize = 1 << 14;
const MOST_COLUMNS: usize = 32;

/// # Safety
/// The pointers must be valid for the shapes in [`QuantizeNvfp4Params`]; codes and scales are writable and apart from everything read.
pub unsafe fn quantize_nvfp4(p: &QuantizeNvfp4Params) {
    // SAFETY: the caller's contract, unchanged.
    for_dtype!(p.dtype, T => unsafe { quantize::<T>(p) })
}

/// # Safety
/// The pointers must be valid for the shapes in [`QuantizeNvfp4Params`]; see [`quantize_nvfp4`]. `x` is of type `T`.
unsafe fn quantize<T: Element>(p: &QuantizeNvfp4Params) {
    let (columns, block) = (p.columns as usize, p.block as usize);
    let (layout, blocks) = (ScaleLayout::of_tile_rows(p.tile_rows), columns / block);
    let (padded_rows, padded_blocks) = layout.padded(p.rows as usize, blocks);
    let (tasks_each, shared) = ((ELEMENTS_PER_TASK / columns.max(1)).max(1), Shared(p));
    (0..p.batches as usize * padded_rows).into_par_iter().for_each_least(tasks_each, |number| {
        let p = shared.get();
        let (batch, row) = (number / padded_rows, number % padded_rows);
        // SAFETY: there is one scale, or one for each batch, and one row count for each batch, by the caller's contract.
        let (scale, count) = unsafe {
            let scale =
                if p.global_scale.is_null() { 1.0 } else { *p.global_scale.add(if p.of_batch { batch } else { 0 }) };
            (scale, if p.row_counts.is_null() { None } else { Some(*p.row_counts.add(batch)) })
        };
        if count.is_some_and(|count| row as i64 >= i64::from(count)) {
            return;
        }
        let scale = if p.inverse { 1.0 / scale } else { scale };
        let scales = p.scales.wrapping_add(batch * padded_rows * padded_blocks);
        let first = (batch * p.rows as usize + row) * columns;
        for i in 0..padded_blocks {
            let mut byte = 0;
            if row < p.rows as usize && i < blocks {
                let mut values = [0.0; MOST_COLUMNS];
                // SAFETY: this is a block of this row, and only this task writes its codes.
                let codes = unsafe {
                    let x = std::slice::from_raw_parts(p.x.cast::<T>().add(first + i * block), block);
                    values.iter_mut().zip(x).for_each(|(value, x)| *value = x.to_f32());
                    std::slice::from_raw_parts_mut(p.codes.add((first + i * block) / 2), block / 2)
                };
                byte = quantize_block(&values[..block], scale, p.powers, codes);
            }
            // SAFETY: the address is the place of this block's scale, or of padding.
            unsafe { *scales.add(layout.offset(row, i, padded_blocks)) = byte };
        }
    });
}
