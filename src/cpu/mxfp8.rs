//! Rows of bf16 rounded to MXFP8, as csrc/quant/round_rows_mxfp8.cuh and the epilogue of the MXFP8 GEMM round them.

use crate::parallel::*;
use half::bf16;

use super::e4m3::placed_rows;
use super::Shared;
use crate::params::QuantizeRowsParams;
use crate::quant::mxfp8::{quantize_group, value, BLOCK};

/// Rounds bf16 rows `[rows, columns]` of x to the numbers that MXFP8 has, and writes them to `out` as bf16; `out` may be x. Columns are
/// whole groups of 32. The scales are not written.
///
/// # Safety
/// The pointers are valid as `QuantizeRowsParams` says, and nobody else writes to that memory.
pub unsafe fn round_rows_mxfp8(p: &QuantizeRowsParams) {
    // SAFETY: `tiles` is null or a schedule, by the caller's contract.
    let rows = unsafe { placed_rows(p) };
    let shared = Shared(p);
    rows.into_par_iter().for_each(|row| {
        let (p, columns) = (shared.get(), shared.get().columns as usize);
        // SAFETY: this thread alone uses this row of x and of out. There are no slices, because out may be x.
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
