//! The kernel of csrc/quant/quantize_fp8.cuh on host memory.

use rayon::prelude::*;

use super::{for_dtype, Element, Shared};
use crate::params::QuantizeFp8Params;
use crate::quant::fp8::quantize_group;

/// Elements below which threads cost more than they give.
const ELEMENTS_PER_TASK: usize = 1 << 14;

/// # Safety
/// The pointers must be valid for the shapes in [`QuantizeFp8Params`]; codes and scales are writable and apart from everything read.
pub unsafe fn quantize_fp8(p: &QuantizeFp8Params) {
    // SAFETY: the caller's contract, unchanged.
    for_dtype!(p.dtype, T => unsafe { quantize::<T>(p) })
}

/// # Safety
/// As for [`quantize_fp8`]; `x` is of type `T`.
unsafe fn quantize<T: Element>(p: &QuantizeFp8Params) {
    let (columns, group) = (p.columns as usize, p.group as usize);
    // SAFETY: a scalar, by the caller's contract.
    let rows = if p.row_count.is_null() { p.rows } else { p.rows.min(i64::from(unsafe { *p.row_count })) } as usize;
    let (tasks_each, shared) = ((ELEMENTS_PER_TASK / columns.max(1)).max(1), Shared(p));
    (0..rows).into_par_iter().with_min_len(tasks_each).for_each(|row| {
        let p = shared.get();
        for (i, first) in (0..columns).step_by(group).enumerate() {
            // SAFETY: the caller's contract; this task alone writes the row.
            unsafe {
                let x = std::slice::from_raw_parts(p.x.cast::<T>().add(row * columns + first), group);
                let codes = std::slice::from_raw_parts_mut(p.codes.add(row * columns + first), group);
                let scale = quantize_group(x, p.eps, p.powers, codes);
                let at = |i: usize| row * p.row_stride as usize + i * p.group_stride as usize;
                if p.powers {
                    *p.scales.add(4 * at(i / 4) + i % 4) = (scale.to_bits() >> 23) as u8;
                } else {
                    *p.scales.cast::<f32>().add(at(i)) = scale;
                }
            }
        }
    });
}
