//! Rows of bf16 rounded to MXFP8, as csrc/quant/round_rows_mxfp8.cuh and the epilogue of the MXFP8 GEMM round them.

use crate::parallel::*;
use half::bf16;

use super::e4m3::placed_rows;
use super::Shared;
use crate::params::QuantizeRowsParams;
use crate::quant::mxfp8::{quantize_group, value, BLOCK};

/// The bf16 numbers that MXFP8 has for those of x, `[rows, columns]`, which `out` holds; `out` may be x. Columns are whole groups of 32; the
/// scales are not written.
///
/// # Safety
/// As `QuantizeRowsParams` says; nobody else writes to what it points at.
pub unsafe fn round_rows_mxfp8(p: &QuantizeRowsParams) {
    // SAFETY: a schedule, by the caller's contract.
    let rows = unsafe { placed_rows(p) };
    let shared = Shared(p);
    rows.into_par_iter().for_each(|row| {
        let (p, columns) = (shared.get(), shared.get().columns as usize);
        // SAFETY: a row of x and of out, which this thread alone uses; no slices, since out may be x.
        unsafe {
            let from = p.x.cast::<[bf16; BLOCK]>().add(row * columns / BLOCK);
            let to = p.out.cast::<[bf16; BLOCK]>().add(row * columns / BLOCK);
            for group in 0..columns / BLOCK {
                let (scale, codes) = quantize_group(&(*from.add(group)).map(bf16::to_f32));
                *to.add(group) = codes.map(|code| bf16::from_f32(value(code, scale)));
            }
        }
    });
}
