//! The kernels of csrc/quant/quantize_fp8.cuh, quantize_fp8_rows.cuh and expand_scales.cuh on host memory.

use crate::parallel::*;

use super::{for_dtype, schedule, slice, slice_mut, Element, Shared};
use crate::params::{ExpandScalesParams, Fp8Scaling, QuantizeFp8Params};
use crate::quant::fp8::{peak, power_of, quantize_group, quantize_with, scale_of};

/// Elements below which threads cost more time than they save.
const ELEMENTS_PER_TASK: usize = 1 << 14;

/// # Safety
/// The pointers must be valid for the shapes in [`QuantizeFp8Params`]; codes and scales are writable and apart from everything read.
pub unsafe fn quantize_fp8(p: &QuantizeFp8Params) {
    // SAFETY: the caller's contract, unchanged.
    for_dtype!(p.dtype, T => unsafe { quantize::<T>(p) })
}

/// # Safety
/// The pointers must be valid for the shapes in [`QuantizeFp8Params`]; see [`quantize_fp8`]. `x` is of type `T`.
unsafe fn quantize<T: Element>(p: &QuantizeFp8Params) {
    let (columns, group) = (p.columns as usize, p.group as usize);
    // SAFETY: row_count is one number, by the caller's contract.
    let rows = if p.row_count.is_null() { p.rows } else { p.rows.min(i64::from(unsafe { *p.row_count })) } as usize;
    let (tasks_each, shared) = ((ELEMENTS_PER_TASK / columns.max(1)).max(1), Shared(p));
    // SAFETY: the slice is a row of x, by the caller's contract.
    let row_of = |p: &QuantizeFp8Params, row| unsafe { slice(p.x.cast::<T>().add(row * columns), columns) };
    // SAFETY: `tiles` and `tile_count` are a schedule, by the caller's contract.
    let listed = (!p.tiles.is_null()).then(|| unsafe { schedule::rows(p.tiles, p.tile_count) });
    let count = listed.as_ref().map_or(rows, Vec::len);
    let number = |i: usize| listed.as_ref().map_or(i, |rows| rows[i]);
    let given = match p.scaling {
        Fp8Scaling::Peak => {
            let rows = (0..count).into_par_iter();
            let amax = rows.largest(tasks_each, |i| peak(row_of(shared.get(), number(i)), 0.0));
            // SAFETY: `given` has room for one number, by the caller's contract.
            unsafe { *p.given = amax };
            scale_of(amax, p.eps)
        }
        // SAFETY: `given` is one scale, by the caller's contract.
        Fp8Scaling::Given => unsafe { *p.given },
        _ => 0.0,
    };
    (0..count).into_par_iter().for_each_least(tasks_each, |i| {
        let row = number(i);
        let p = shared.get();
        let x = row_of(p, row);
        // SAFETY: the caller's contract; only this task writes the row.
        let codes = unsafe { slice_mut(p.codes.add(row * columns), columns) };
        let of_row = match p.scaling {
            Fp8Scaling::Groups => None,
            Fp8Scaling::Rows => Some(scale_of(peak(x, 0.0), p.eps)),
            _ => Some(given),
        };
        for (i, (x, codes)) in x.chunks(group).zip(codes.chunks_mut(group)).enumerate() {
            let scale = match of_row {
                Some(scale) => {
                    quantize_with(x, scale, codes);
                    scale
                }
                None => quantize_group(x, p.eps, p.powers, codes),
            };
            let at = |i: usize| row * p.row_stride as usize + i * p.group_stride as usize;
            // SAFETY: the caller's contract; only this task writes the scales of the row.
            unsafe {
                if p.powers {
                    *p.scales.add(4 * at(i / 4) + i % 4) = (scale.to_bits() >> 23) as u8;
                } else {
                    *p.scales.cast::<f32>().add(at(i)) = scale;
                }
            }
        }
    });
}

/// Does what the kernel of csrc/quant/expand_scales.cuh does.
///
/// # Safety
/// The pointers must be valid for the shapes in [`ExpandScalesParams`]; the table is writable and apart from the scales.
pub unsafe fn expand_scales(p: &ExpandScalesParams) {
    let groups = p.groups as usize;
    for row in 0..p.rows as usize {
        for group in 0..groups {
            let part = if p.powers { group / 4 } else { group };
            let at = row * p.row_stride as usize + part * p.group_stride as usize;
            // SAFETY: the caller's contract.
            unsafe {
                *p.table.add(row * groups + group) = match p.powers {
                    true => power_of(*p.scales.add(4 * at + group % 4)),
                    false => *p.scales.cast::<f32>().add(at),
                };
            }
        }
    }
}
