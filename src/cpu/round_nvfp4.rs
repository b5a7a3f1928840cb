//! Rows of a layer rounded to NVFP4, or expanded from it, before a GEMM of NVFP4 weights. They are numbers of the compute type, which holds
//! an element times its block's scale exactly.

use crate::parallel::*;

use super::narrow::e4m3_value;
use super::{for_dtype, Element, Shared};
use crate::params::RoundNvfp4Params;
use crate::quant::e2m1;
use crate::quant::nvfp4::{quantize_block, BLOCK};

/// Rounds or expands the rows of a schedule.
///
/// # Safety
/// The pointers must be valid for these shapes and the rows that the schedule names. If `out` is x, slots are rows of x.
pub unsafe fn round_to_nvfp4(p: &RoundNvfp4Params) {
    // SAFETY: the caller's contract.
    for_dtype!(p.dtype, T => unsafe { round::<T>(p) })
}

/// # Safety
/// The pointers must be valid for these shapes and the rows that the schedule names; see [`round_to_nvfp4`].
unsafe fn round<T: Element>(p: &RoundNvfp4Params) {
    // SAFETY: `tiles` and `tile_count` are a schedule, by the caller's contract.
    let tiles = unsafe {
        match *p.tile_count {
            0 => &[],
            count => std::slice::from_raw_parts(p.tiles, count as usize),
        }
    };
    let places: Vec<(usize, usize)> = tiles
        .iter()
        .flat_map(|tile| (tile.first..tile.first + tile.count).map(|place| (tile.expert as usize, place as usize)))
        .collect();
    let shared = Shared(p);
    places.into_par_iter().for_each(|(expert, place)| {
        let p = shared.get();
        // SAFETY: the caller's contract; only this task writes the row of the slot.
        unsafe {
            let slot = if p.slot_of_place.is_null() { place } else { *p.slot_of_place.add(place) as usize };
            let columns = p.columns as usize;
            let (row, blocks) = (slot / p.row_divisor as usize, columns / BLOCK);
            let out = p.out.cast::<T>().add(slot * columns);
            for block in 0..blocks {
                let mut codes = [0; BLOCK / 2];
                let scale = if p.scales.is_null() {
                    let x = p.x.cast::<T>().add(row * columns + block * BLOCK);
                    let values: [f32; BLOCK] = std::array::from_fn(|i| (*x.add(i)).to_f32());
                    quantize_block(&values, *p.global_scales.add(expert), false, &mut codes)
                } else {
                    codes = *p.x.add((row * columns + block * BLOCK) / 2).cast();
                    *p.scales.add(row * blocks + block)
                };
                let scale = e4m3_value(scale);
                for i in 0..BLOCK {
                    let value = e2m1::VALUES[usize::from(codes[i / 2] >> (4 * (i % 2)) & 15)];
                    *out.add(block * BLOCK + i) = T::from_f32(value * scale);
                }
            }
        }
    });
}
