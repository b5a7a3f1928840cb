//! The kernels of csrc/quant/quantize_rows_e4m3.cuh on host memory.

use super::narrow::{e4m3, e4m3_value};
use super::{schedule, slice, slice_mut, Shared};
use crate::parallel::*;
use crate::params::QuantizeRowsParams;
use half::bf16;
use std::sync::LazyLock;

/// The value of every e4m3 code. bf16 holds each of them exactly.
static VALUES: LazyLock<[bf16; 256]> =
    LazyLock::new(|| std::array::from_fn(|code| bf16::from_f32(e4m3_value(code as u8))));

/// The scale of a row: amax / 448, or 1 if that is less than the least normal number. NaN counts as the largest.
fn scale(row: &[bf16]) -> f32 {
    let peak = row.iter().map(|x| x.to_bits() & 0x7FFF).max().unwrap_or(0);
    let scale = bf16::from_bits(peak).to_f32() / 448.0;
    if scale < f32::MIN_POSITIVE {
        1.0
    } else {
        scale
    }
}

/// Numbers of the rows that the parameters name: all rows, or the rows of a schedule.
///
/// # Safety
/// `tiles` is null, or `tiles` and `tile_count` are a schedule.
pub(super) unsafe fn placed_rows(p: &QuantizeRowsParams) -> Vec<usize> {
    if p.tiles.is_null() {
        return (0..p.rows as usize).collect();
    }
    // SAFETY: the caller's contract.
    unsafe { schedule::rows(p.tiles, p.tile_count) }
}

/// Calls `f(row number, inverse of its scale)` for every row, on many threads, and writes the scales.
///
/// # Safety
/// The pointers are valid as `QuantizeRowsParams` says, and nobody else writes to `out` and `scales`. `f` may write to x only in the row
/// that it is called for.
unsafe fn for_each_row(p: &QuantizeRowsParams, f: impl Fn(&QuantizeRowsParams, usize, f32) + Sync) {
    // SAFETY: the caller's contract.
    let rows = unsafe { placed_rows(p) };
    let shared = Shared(p);
    rows.into_par_iter().for_each(|row| {
        let p = shared.get();
        let columns = p.columns as usize;
        // SAFETY: the slice is a row of x, by the caller's contract. This thread alone writes the scale.
        let scale = unsafe {
            let scale = scale(slice(p.x.cast::<bf16>().add(row * columns), columns));
            *p.scales.add(row) = scale;
            scale
        };
        f(p, row, 1.0 / scale);
    });
}

/// Writes the codes that the kernel writes.
///
/// # Safety
/// The pointers are valid as `QuantizeRowsParams` says, and nobody else writes to that memory.
pub unsafe fn quantize_rows_e4m3(p: &QuantizeRowsParams) {
    // SAFETY: the caller's contract; no two rows overlap.
    unsafe {
        for_each_row(p, |p, row, inverse| {
            let (columns, out_columns) = (p.columns as usize, p.out_columns as usize);
            let x = slice(p.x.cast::<bf16>().add(row * columns), columns);
            let (codes, padding) = slice_mut(p.out.add(row * out_columns), out_columns).split_at_mut(columns);
            for (code, x) in codes.iter_mut().zip(x) {
                *code = e4m3(x.to_f32() * inverse);
            }
            padding.fill(0);
        });
    }
}

/// Writes the values of the codes as bf16 `[rows, columns]` to `out`, which may be x.
///
/// # Safety
/// The pointers are valid as `QuantizeRowsParams` says, and nobody else writes to that memory.
pub unsafe fn round_rows_to_e4m3(p: &QuantizeRowsParams) {
    let values = &*VALUES;
    // SAFETY: the caller's contract; no two rows overlap. There are no slices, because `out` may be x.
    unsafe {
        for_each_row(p, |p, row, inverse| {
            let (from, to) = (p.x.cast::<bf16>(), p.out.cast::<bf16>());
            for i in row * p.columns as usize..(row + 1) * p.columns as usize {
                *to.add(i) = values[e4m3((*from.add(i)).to_f32() * inverse) as usize];
            }
        });
    }
}
