//! The dense MXFP8 GEMM of csrc/gemm on host memory. Elements are multiplied by their scales in fp32, products are summed in fp32, and sums
//! are rounded once.

use crate::parallel::*;

use super::{for_dtype, Element, Shared};
use crate::cpu::narrow::e4m3_value;
use crate::error::{try_filled, Result};
use crate::params::{MmMxfp8Params, ScaleView};
use crate::quant::e2m1;
use crate::quant::mxfp8::BLOCK;
use crate::quant::nvfp4::ScaleLayout;
use std::sync::LazyLock;

/// Rows of b that are expanded at a time.
const PANEL: usize = 4;
/// Partial sums of a product.
const LANES: usize = 16;

static VALUES: LazyLock<[f32; 256]> = LazyLock::new(|| std::array::from_fn(|code| e4m3_value(code as u8)));

/// Gives an error, before anything is written, if the host has no memory for the expanded matrices.
///
/// # Safety
/// The pointers must be valid for the shapes in [`MmMxfp8Params`]; out is writable and apart from everything read.
pub unsafe fn mm_mxfp8(p: &MmMxfp8Params) -> Result<()> {
    // SAFETY: the caller's contract, unchanged.
    for_dtype!(p.out_dtype, T => unsafe { multiply::<T>(p) })
}

/// # Safety
/// `codes` and `scales` are those of a matrix [*, k], valid as [`mm_mxfp8`] requires, and `row` is one of its rows.
unsafe fn expand(codes: *const u8, scales: &ScaleView, row: usize, to: &mut [f32]) {
    let (values, k) = (&*VALUES, to.len());
    for (block, to) in to.as_chunks_mut::<BLOCK>().0.iter_mut().enumerate() {
        let offset = match scales.tile_rows {
            0 => row as i64 * scales.row_stride + block as i64 * scales.block_stride,
            tile_rows => ScaleLayout::of_tile_rows(tile_rows).offset(row, block, k / BLOCK) as i64,
        };
        // SAFETY: the caller's contract.
        unsafe {
            let scale = e2m1::scale(*scales.data.offset(offset as isize));
            for (i, to) in to.iter_mut().enumerate() {
                *to = values[*codes.add(row * k + block * BLOCK + i) as usize] * scale;
            }
        }
    }
}

/// # Safety
/// The pointers must be valid for the shapes in [`MmMxfp8Params`]; see [`mm_mxfp8`]. out is of type `T`.
unsafe fn multiply<T: Element>(p: &MmMxfp8Params) -> Result<()> {
    let (m, n, k) = (p.m as usize, p.n as usize, p.k as usize);
    // Every worker has room for a panel of b.
    let panels = n.div_ceil(PANEL);
    let workers = crate::parallel::threads().min(panels);
    let mut a: Vec<f32> = try_filled(m * k, "mm_mxfp8: a expanded to fp32")?;
    // Every worker has room for at least one number, so that k = 0 has workers too.
    let room = (PANEL * k).max(1);
    let mut rooms: Vec<f32> = try_filled(workers * room, "mm_mxfp8: rows of b expanded to fp32")?;
    let shared = Shared(p);
    if k > 0 {
        a.par_chunks_mut(k).enumerate().for_each(|(row, to)| {
            let p = shared.get();
            // SAFETY: `row` is a row of a.
            unsafe { expand(p.a, &p.a_scales, row, to) }
        });
    }
    rooms.par_chunks_mut(room).enumerate().for_each(|(worker, b)| {
        for panel in (worker..panels).step_by(workers) {
            // SAFETY: the caller's contract; only this worker writes the panels' columns of out.
            unsafe { multiply_panel::<T>(shared.get(), &a, b, panel * PANEL) }
        }
    });
    Ok(())
}

/// Computes up to [`PANEL`] columns of out from column `first` on.
///
/// # Safety
/// The pointers in `p` are valid; see [`multiply`]. `a` is expanded, `b` has room for a panel, and nobody else writes these columns of out.
unsafe fn multiply_panel<T: Element>(p: &MmMxfp8Params, a: &[f32], b: &mut [f32], first: usize) {
    let (m, n, k) = (p.m as usize, p.n as usize, p.k as usize);
    let rows = PANEL.min(n - first);
    for row in 0..rows {
        // SAFETY: `first + row` is a row of b.
        unsafe { expand(p.b, &p.b_scales, first + row, &mut b[row * k..][..k]) }
    }
    for token in 0..m {
        for row in 0..rows {
            let sum = dot(&a[token * k..][..k], &b[row * k..][..k]);
            // SAFETY: nobody else writes these columns of out, by the caller's contract.
            unsafe { *p.out.cast::<T>().add(token * n + first + row) = T::from_f32(sum) };
        }
    }
}

/// The sum of products in a fixed order; k is a multiple of [`BLOCK`].
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0f32; LANES];
    for (a, b) in a.as_chunks::<LANES>().0.iter().zip(b.as_chunks::<LANES>().0) {
        for i in 0..LANES {
            sums[i] += a[i] * b[i];
        }
    }
    let mut width = LANES;
    while width > 1 {
        width /= 2;
        for i in 0..width {
            sums[i] += sums[i + width];
        }
    }
    sums[0]
}
