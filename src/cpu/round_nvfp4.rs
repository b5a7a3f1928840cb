//! Rows of a layer rounded to NVFP4, or expanded from it, on their way into a GEMM of NVFP4 weights: as numbers of the compute type, which
//! holds an element times its block's scale exactly.

use rayon::prelude::*;

use super::narrow::e4m3_value;
use super::{for_dtype, Element, Shared};
use crate::params::{Dtype, Tile};
use crate::quant::e2m1;
use crate::quant::nvfp4::{quantize_block, BLOCK};

#[derive(Clone, Copy, Debug)]
pub struct RoundNvfp4 {
    /// `[*, columns]` of `dtype`, or with `scales` codes `[*, columns / 2]`.
    pub x: *const u8,
    /// e4m3 `[*, columns / 16]`, or null.
    pub scales: *const u8,
    /// `[*, columns]` of `dtype`, a row a slot (where places are not mapped: a place); may be x.
    pub out: *mut u8,
    pub dtype: Dtype,
    pub columns: usize,
    pub tiles: *const Tile,
    pub tile_count: *const i32,
    /// As in `GroupedGemmParams`.
    pub slot_of_place: *const i32,
    pub row_divisor: i32,
    /// fp32 `[experts]`: what rows are multiplied by before.
    pub global_scales: *const f32,
}

/// # Safety
/// The pointers must be valid for these shapes and the rows that the schedule names; where `out` is x, slots are rows of x.
pub unsafe fn round_to_nvfp4(p: &RoundNvfp4) {
    // SAFETY: the caller's contract.
    for_dtype!(p.dtype, T => unsafe { round::<T>(p) })
}

/// # Safety
/// As for [`round_to_nvfp4`].
unsafe fn round<T: Element>(p: &RoundNvfp4) {
    // SAFETY: a schedule, by the caller's contract.
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
        // SAFETY: the caller's contract; a slot's row is written by this task alone.
        unsafe {
            let slot = if p.slot_of_place.is_null() { place } else { *p.slot_of_place.add(place) as usize };
            let (row, blocks) = (slot / p.row_divisor as usize, p.columns / BLOCK);
            let out = p.out.cast::<T>().add(slot * p.columns);
            for block in 0..blocks {
                let mut codes = [0; BLOCK / 2];
                let scale = if p.scales.is_null() {
                    let x = p.x.cast::<T>().add(row * p.columns + block * BLOCK);
                    let values: [f32; BLOCK] = std::array::from_fn(|i| (*x.add(i)).to_f32());
                    quantize_block(&values, *p.global_scales.add(expert), false, &mut codes)
                } else {
                    codes = *p.x.add((row * p.columns + block * BLOCK) / 2).cast();
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
