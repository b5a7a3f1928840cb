//! Weighted sum of a token's expert rows.

use crate::parallel::*;

use super::{for_dtype, Element, Shared};
use crate::params::{CombineParams, Dtype};

/// Columns that one task sums. The sums stay in the first-level cache.
const COLUMNS: usize = 1024;
/// Elements of `y` below which threads cost more time than they save.
const ELEMENTS_PER_TASK: usize = 1 << 15;

/// Adds the rows of a token, times their weights, in slot order in fp32. Products are rounded before they are added; the sum is multiplied
/// by `scale` and rounded once. Skipped slots add nothing; a token without experts becomes zeros.
///
/// # Safety
/// The pointers must be valid for the shapes in [`CombineParams`], every place below the rows of `y`, and `out`
/// writable and apart from everything read.
pub unsafe fn combine(p: &CombineParams, dtype: Dtype) {
    // SAFETY: the caller's contract, unchanged.
    for_dtype!(dtype, T => unsafe { combine_typed::<T>(p) })
}

/// # Safety
/// The pointers in `p` are valid for the shapes in [`CombineParams`]; see [`combine`]. `y` and `out` are of type `T`.
unsafe fn combine_typed<T: Element>(p: &CombineParams) {
    // Every output row is a sum over its own run of slots: the slots of a token, or one slot.
    let (rows, slots) =
        if p.keep_slots { (p.tokens as usize * p.top_k as usize, 1) } else { (p.tokens as usize, p.top_k as usize) };
    let blocks = (p.hidden as usize).div_ceil(COLUMNS);
    let tasks_each = (ELEMENTS_PER_TASK / (slots * COLUMNS).max(1)).max(1);
    let shared = Shared(p);
    (0..rows * blocks).into_par_iter().for_each_least(tasks_each, |i| {
        // SAFETY: each (row, block) of `out` is written by one task. The rest is the caller's contract.
        unsafe { combine_block::<T>(shared.get(), i / blocks, slots, i % blocks * COLUMNS) }
    });
}

/// Computes one output row from column `first` on.
///
/// # Safety
/// The pointers in `p` are valid for the shapes in [`CombineParams`]; see [`combine_typed`]. No other thread writes this part of `out`.
unsafe fn combine_block<T: Element>(p: &CombineParams, row: usize, slots: usize, first: usize) {
    let hidden = p.hidden as usize;
    let columns = (hidden - first).min(COLUMNS);
    let mut sums = [0.0; COLUMNS];
    let sums = &mut sums[..columns];
    for slot in row * slots..(row + 1) * slots {
        // SAFETY: `slot` is below tokens * top_k.
        let place = unsafe { *p.place_of_slot.add(slot) };
        if place < 0 {
            continue;
        }
        // SAFETY: `slot` is below tokens * top_k, so it has a weight if there are weights. `place` is a row of `y`.
        let (weight, y) = unsafe {
            let weight = if p.weights.is_null() { 1.0 } else { *p.weights.add(slot) };
            (weight, std::slice::from_raw_parts(p.y.cast::<T>().add(place as usize * hidden + first), columns))
        };
        for (sum, y) in sums.iter_mut().zip(y) {
            *sum += weight * y.to_f32();
        }
    }
    // SAFETY: only this task touches this part of `out`.
    let out = unsafe { std::slice::from_raw_parts_mut(p.out.cast::<T>().add(row * hidden + first), columns) };
    for (out, sum) in out.iter_mut().zip(sums) {
        *out = T::from_f32(p.scale * *sum);
    }
}
