//! The kernels of csrc/quant/quantize_mxfp8.cuh on host memory.

use crate::parallel::*;

use super::{for_dtype, Element, Shared};
use crate::params::QuantizeMxfp8Params;
use crate::quant::mxfp8::{quantize_group, value, BLOCK};
use crate::quant::nvfp4::ScaleLayout;

/// Elements below which threads cost more time than they save.
const ELEMENTS_PER_TASK: usize = 1 << 14;

/// # Safety
/// The pointers must be valid for the shapes in [`QuantizeMxfp8Params`]; codes and scales are writable and apart from everything read.
pub unsafe fn quantize_mxfp8(p: &QuantizeMxfp8Params) {
    // SAFETY: the caller's contract, unchanged.
    for_dtype!(p.dtype, T => unsafe { quantize::<T>(p) })
}

/// # Safety
/// The pointers must be valid for the shapes in [`QuantizeMxfp8Params`]; numbers are writable and apart from codes and scales.
pub unsafe fn dequantize_mxfp8(p: &QuantizeMxfp8Params) {
    // SAFETY: the caller's contract, unchanged.
    for_dtype!(p.dtype, T => unsafe { dequantize::<T>(p) })
}

/// (rows with scales, groups with scales, groups with codes, groups with numbers).
fn extent(p: &QuantizeMxfp8Params) -> (usize, usize, usize, usize) {
    let stored = p.padded_columns as usize / BLOCK;
    let (rows, groups) = ScaleLayout::of_tile_rows(p.tile_rows).padded(p.rows as usize, stored);
    (rows, groups, stored, p.columns as usize / BLOCK)
}

/// # Safety
/// The pointers must be valid for the shapes in [`QuantizeMxfp8Params`]; see [`quantize_mxfp8`]. The numbers are of type `T`.
unsafe fn quantize<T: Element>(p: &QuantizeMxfp8Params) {
    let (rows, groups, stored, real) = extent(p);
    let tasks_each = (ELEMENTS_PER_TASK / (groups * BLOCK).max(1)).max(1);
    let shared = Shared(p);
    (0..rows).into_par_iter().for_each_least(tasks_each, |row| {
        let p = shared.get();
        let layout = ScaleLayout::of_tile_rows(p.tile_rows);
        for group in 0..groups {
            let here = row < p.rows as usize;
            let (scale, codes) = if here && group < real {
                let first = row * p.columns as usize + group * BLOCK;
                // SAFETY: `first` is inside the numbers, by the caller's contract.
                let from = unsafe { p.numbers.cast::<T>().add(first) };
                // SAFETY: the BLOCK numbers from `first` on are inside the numbers, by the caller's contract.
                quantize_group(&std::array::from_fn(|i| unsafe { *from.add(i) }.to_f32()))
            } else {
                (0, [0; BLOCK])
            };
            // SAFETY: these are this row's codes and scales, which nobody else writes.
            unsafe {
                if here && group < stored {
                    let to = p.codes.add(row * p.padded_columns as usize + group * BLOCK);
                    std::ptr::copy_nonoverlapping(codes.as_ptr(), to, BLOCK);
                }
                *p.scales.add(layout.offset(row, group, stored)) = scale;
            }
        }
    });
}

/// # Safety
/// The pointers must be valid for the shapes in [`QuantizeMxfp8Params`]; see [`dequantize_mxfp8`]. The numbers are of type `T`.
unsafe fn dequantize<T: Element>(p: &QuantizeMxfp8Params) {
    let columns = p.columns as usize;
    let tasks_each = (ELEMENTS_PER_TASK / columns.max(1)).max(1);
    let shared = Shared(p);
    (0..p.rows as usize).into_par_iter().for_each_least(tasks_each, |row| {
        let p = shared.get();
        let layout = ScaleLayout::of_tile_rows(p.tile_rows);
        for group in 0..columns / BLOCK {
            let first = row * columns + group * BLOCK;
            // SAFETY: these are this row's codes, scales and numbers. Nobody else writes the numbers.
            unsafe {
                let scale = *p.scales.add(layout.offset(row, group, columns / BLOCK));
                for i in first..first + BLOCK {
                    let value = value(*p.codes.add(i), scale);
                    *p.numbers.cast::<T>().add(i) = T::from_f32(if value.is_nan() { f32::NAN } else { value });
                }
            }
        }
    });
}
