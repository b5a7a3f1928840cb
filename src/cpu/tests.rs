//! Tests against naive references on random data, with every instruction set of the machine that runs the tests.

mod combine;
mod gemm;
mod mxfp4;
mod route;
mod select;
mod speed;

use super::{for_dtype, Element};
use crate::params::Dtype;

/// The random numbers of xorshift64*.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, n: usize) -> usize {
        ((self.next() >> 33) % n as u64) as usize
    }

    /// A number in [-1, 1).
    fn uniform(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    fn uniforms(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.uniform()).collect()
    }
}

/// A tensor as a kernel sees it.
struct Tensor {
    dtype: Dtype,
    bytes: Vec<u8>,
}

impl Tensor {
    fn new(dtype: Dtype, values: &[f32]) -> Self {
        let bytes = for_dtype!(dtype, T => {
            let values: Vec<T> = values.iter().map(|&x| T::from_f32(x)).collect();
            // SAFETY: elements are plain numbers, so every byte of them can be read.
            unsafe { std::slice::from_raw_parts(values.as_ptr().cast::<u8>(), size_of_val(&*values)) }.to_vec()
        });
        Self { dtype, bytes }
    }

    fn random(dtype: Dtype, random: &mut Random, len: usize, scale: f32) -> Self {
        Self::new(dtype, &(0..len).map(|_| random.uniform() * scale).collect::<Vec<_>>())
    }

    /// A tensor filled with NaN, which a kernel must overwrite.
    fn unset(dtype: Dtype, len: usize) -> Self {
        Self::new(dtype, &vec![f32::NAN; len])
    }

    fn get(&self, i: usize) -> f64 {
        for_dtype!(self.dtype, T => {
            let bytes = &self.bytes[i * size_of::<T>()..][..size_of::<T>()];
            // SAFETY: the slice is the bytes of one element, and every bit pattern is a number.
            f64::from(unsafe { bytes.as_ptr().cast::<T>().read_unaligned() }.to_f32())
        })
    }

    fn row(&self, row: usize, columns: usize) -> &[u8] {
        let bytes = columns * element_size(self.dtype);
        &self.bytes[row * bytes..][..bytes]
    }
}

const DTYPES: [Dtype; 3] = [Dtype::F32, Dtype::F16, Dtype::Bf16];

fn element_size(dtype: Dtype) -> usize {
    for_dtype!(dtype, T => size_of::<T>())
}

/// Relative error of a rounding to `dtype`; for fp32, the error of a long sum.
fn rounding(dtype: Dtype) -> f64 {
    match dtype {
        Dtype::F16 => 1.0 / 2048.0,
        Dtype::Bf16 => 1.0 / 256.0,
        _ => 1e-5,
    }
}

fn assert_close(got: f64, expected: f64, dtype: Dtype, what: &dyn std::fmt::Debug) {
    let tolerance = 1.01 * rounding(dtype) * expected.abs() + 3e-5;
    assert!((got - expected).abs() <= tolerance, "{what:?}: got {got}, expected {expected}");
}

/// Outputs of `route`.
struct Routed {
    histogram: Vec<i32>,
    offsets: Vec<i32>,
    place_of_slot: Vec<i32>,
    slot_of_place: Vec<i32>,
    tiles: Vec<crate::params::Tile>,
    tile_count: i32,
}

impl Routed {
    fn new(ids: &[i32], top_k: usize, experts: usize, tile_tokens: i32) -> Self {
        Self::call(ids.as_ptr().cast(), false, [ids.len(), top_k, experts], 0, tile_tokens)
    }

    /// Runs `route`. `sizes` are slots, top_k, experts.
    fn call(ids: *const u8, ids_are_i64: bool, sizes: [usize; 3], first_expert: i32, tile_tokens: i32) -> Self {
        let [slots, top_k, experts] = sizes;
        let max_tiles = experts + slots / tile_tokens as usize + 1;
        let mut r = Self {
            histogram: vec![-7; experts],
            offsets: vec![-7; experts + 1],
            place_of_slot: vec![-7; slots],
            slot_of_place: vec![-7; slots],
            tiles: vec![Default::default(); max_tiles],
            tile_count: -7,
        };
        let p = crate::params::RouteParams {
            ids,
            ids_are_i64,
            tokens: (slots / top_k) as i32,
            top_k: top_k as i32,
            experts: experts as i32,
            first_expert,
            tile_tokens,
            tile_step: 16,
            max_tiles: max_tiles as i32,
            histogram: r.histogram.as_mut_ptr(),
            offsets: r.offsets.as_mut_ptr(),
            place_of_slot: r.place_of_slot.as_mut_ptr(),
            slot_of_place: r.slot_of_place.as_mut_ptr(),
            tiles: r.tiles.as_mut_ptr(),
            tile_count: &mut r.tile_count,
            counters: std::ptr::null_mut(),
            counter_count: 0,
            block_histogram: std::ptr::null_mut(),
        };
        // SAFETY: the buffers above have the documented shapes.
        unsafe { super::route(&p) };
        r
    }
}
