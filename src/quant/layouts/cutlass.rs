//! The layouts of flashinfer's CUTLASS MoE for Hopper with 4-bit weights (`interleave_moe_weights_for_sm90_mixed_gemm`,
//! `interleave_moe_scales_for_sm90_mixed_gemm`), in which SGLang's `flashinfer_mxfp4` runner holds MXFP4 weights on sm_90.

use super::words::{self, Quads, Words};
use super::Matrices;

/// The release of flashinfer, because the layout changed between them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Release {
    /// 0.6.11: scales have as many dimensions as weights.
    V0_6,
    /// 0.7.2: scales have two more dimensions than weights.
    V0_7,
}

/// The rows of a matrix, and the bytes of a row, are multiples of these.
pub const ROWS: usize = words::TILE_ROWS;
pub const COLUMNS: usize = words::TILE_BYTES;
/// Groups whose scales stay together: those of 128 columns.
pub const GROUPS: usize = 4;
/// Rows whose scales are folded together in flashinfer 0.7.
pub const FOLDED_ROWS: usize = 64;

/// Steps alternate between the upper and the lower 8 rows of the tile.
fn offset(quads: Quads, columns: usize) -> usize {
    let Quads { row, tile, step } = quads;
    (row + step % 2 * 8) * columns + tile * words::TILE_BYTES + step / 2 * 16
}

struct Pairs;

impl Words for Pairs {
    const STRIDE: usize = 4;

    fn offset(quads: Quads, columns: usize) -> usize {
        offset(quads, columns)
    }

    fn pack(quad: [u8; 4]) -> u32 {
        words::pairs(quad)
    }

    fn unpack(word: u32) -> [u8; 4] {
        words::unpairs(word)
    }
}

struct Spread;

impl Words for Spread {
    const STRIDE: usize = 4;

    fn offset(quads: Quads, columns: usize) -> usize {
        offset(quads, columns)
    }

    fn pack(quad: [u8; 4]) -> u32 {
        words::spread(quad)
    }

    fn unpack(word: u32) -> [u8; 4] {
        words::unspread(word)
    }
}

pub fn interleave_values(release: Release, from: &[u8], to: &mut [u8], shape: Matrices) {
    match release {
        Release::V0_6 => words::encode::<Pairs>(from, shape, to, shape),
        Release::V0_7 => words::encode::<Spread>(from, shape, to, shape),
    }
}

pub fn deinterleave_values(release: Release, from: &[u8], to: &mut [u8], shape: Matrices) {
    match release {
        Release::V0_6 => words::decode::<Pairs>(from, shape, to, shape),
        Release::V0_7 => words::decode::<Spread>(from, shape, to, shape),
    }
}

/// (Rows whose scales stay together, function that gives the place of a scale among theirs). In 0.6 it is [K/128, rows, 4] of all rows. In
/// 0.7 it is [K/128, 16, 4, 4] of 64 rows, in which the four scales of rows r, r + 16, r + 32 and r + 48 make 16 bytes.
fn scale_offset(release: Release, shape: Matrices) -> (usize, impl Fn(usize, usize) -> usize + Sync) {
    let band = match release {
        Release::V0_6 => shape.rows,
        Release::V0_7 => FOLDED_ROWS,
    };
    (band, move |row, group| {
        let place = match release {
            Release::V0_6 => row,
            Release::V0_7 => row % 16 * 4 + row / 16,
        };
        (group / GROUPS * band + place) * GROUPS + group % GROUPS
    })
}

pub fn interleave_scales(release: Release, from: &[u8], to: &mut [u8], shape: Matrices) {
    let (band, offset) = scale_offset(release, shape);
    super::scatter(from, shape, to, shape, band, offset);
}

pub fn deinterleave_scales(release: Release, from: &[u8], to: &mut [u8], shape: Matrices) {
    let (band, offset) = scale_offset(release, shape);
    super::gather(from, shape, to, shape, band, offset);
}
