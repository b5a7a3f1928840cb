//! triton_kernels' Hopper layouts (HopperMXValueLayout with mma_version 3, HopperMXScaleLayout), in which SGLang's `triton_kernel`
//! runner holds MXFP4 weights on sm_90. triton_kernels shows both transposed: [.., K, rows] views of what is described here.

use super::words::{self, Quads, Words};
use super::Matrices;

struct Swizzle;

impl Words for Swizzle {
    const STRIDE: usize = 16;

    /// Four rows become one row of four times the length: row pairs (r, r + 1) side by side, then a lane's four words along K.
    fn offset(quads: Quads, columns: usize) -> usize {
        let Quads { row, tile, step } = quads;
        row / 2 * 4 * columns + tile * 128 + row % 2 * 64 + step * 4
    }

    fn pack(quad: [u8; 4]) -> u32 {
        words::spread(quad)
    }

    fn unpack(word: u32) -> [u8; 4] {
        words::unspread(word)
    }
}

/// Bytes of a row are padded to this multiple. Rows are padded to 64 or 256, by release.
pub const VALUE_COLUMNS: usize = 64;

/// The extent of swizzled codes [rows, K/2]; they are stored as [rows / 4, 4 K/2].
pub fn padded_values(plain: Matrices, row_multiple: usize) -> Matrices {
    plain.padded(row_multiple, VALUE_COLUMNS)
}

pub fn swizzle_values(from: &[u8], plain: Matrices, to: &mut [u8], padded: Matrices) {
    words::encode::<Swizzle>(from, plain, to, padded);
}

pub fn unswizzle_values(from: &[u8], padded: Matrices, to: &mut [u8], plain: Matrices) {
    words::decode::<Swizzle>(from, padded, to, plain);
}

/// The extent of swizzled scales [rows, K/32]; they are stored as [rows / 32, 32 K/32].
pub fn padded_scales(plain: Matrices, num_warps: usize) -> Matrices {
    plain.padded(32 * num_warps, 2)
}

/// The place of a scale within 32 `num_warps` rows. Each warp's two 16-row tiles lie side by side. In a tile, the scales that a lane needs
/// for 64 columns lie together.
fn scale_offset(row: usize, group: usize, num_warps: usize, groups: usize) -> usize {
    let (tile, warp, half, lane) = (row / (16 * num_warps), row / 16 % num_warps, row / 8 % 2, row % 8);
    warp * 32 * groups + group / 2 * 64 + tile * 32 + lane * 4 + group % 2 * 2 + half
}

pub fn swizzle_scales(from: &[u8], plain: Matrices, to: &mut [u8], padded: Matrices, num_warps: usize) {
    super::scatter(from, plain, to, padded, 32 * num_warps, |row, group| {
        scale_offset(row, group, num_warps, padded.columns)
    });
}

pub fn unswizzle_scales(from: &[u8], padded: Matrices, to: &mut [u8], plain: Matrices, num_warps: usize) {
    super::gather(from, padded, to, plain, 32 * num_warps, |row, group| {
        scale_offset(row, group, num_warps, padded.columns)
    });
}
