//! NVFP4: e2m1 elements, two a byte with the low nibble first, one e4m3 scale for 16 of them, and a number for the whole tensor. The same
//! quantisation with E8M0 scales makes MXFP4.

use crate::cpu::narrow::{e2m1, e4m3, e4m3_value};

/// Elements that share a scale.
pub const BLOCK: usize = 16;

/// Where the scale of a row's block of values lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScaleLayout {
    /// Tiles of 128 rows by 4 blocks: [rows / 128][blocks / 4][32][4][4], row r of a tile at [r % 32][r / 32].
    Swizzled128x4,
    /// Tiles of 8 rows by 4 blocks: [rows / 8][blocks / 4][8][4].
    Swizzled8x4,
    /// Row-major.
    Linear,
}

impl ScaleLayout {
    /// Rows of a tile; 0: there are no tiles.
    pub fn tile_rows(self) -> i32 {
        match self {
            ScaleLayout::Swizzled128x4 => 128,
            ScaleLayout::Swizzled8x4 => 8,
            ScaleLayout::Linear => 0,
        }
    }

    /// The inverse of `tile_rows`.
    pub fn of_tile_rows(rows: i32) -> ScaleLayout {
        match rows {
            128 => ScaleLayout::Swizzled128x4,
            8 => ScaleLayout::Swizzled8x4,
            _ => ScaleLayout::Linear,
        }
    }

    /// Rows and blocks with padding.
    pub fn padded(self, rows: usize, blocks: usize) -> (usize, usize) {
        match self {
            ScaleLayout::Linear => (rows, blocks),
            tiled => (rows.next_multiple_of(tiled.tile_rows() as usize), blocks.next_multiple_of(4)),
        }
    }

    /// Bytes of the scales of a matrix.
    pub fn bytes(self, rows: usize, blocks: usize) -> usize {
        let (rows, blocks) = self.padded(rows, blocks);
        rows * blocks
    }

    pub fn offset(self, row: usize, block: usize, blocks: usize) -> usize {
        let tiles = blocks.div_ceil(4);
        match self {
            ScaleLayout::Swizzled128x4 => {
                (row / 128 * tiles + block / 4) * 512 + row % 32 * 16 + row % 128 / 32 * 4 + block % 4
            }
            ScaleLayout::Swizzled8x4 => (row / 8 * tiles + block / 4) * 32 + row % 8 * 4 + block % 4,
            ScaleLayout::Linear => row * blocks + block,
        }
    }
}

/// Largest magnitude; NaNs do not count.
pub fn amax(values: &[f32]) -> f32 {
    values.iter().fold(0.0, |max, x| x.abs().max(max))
}

/// `x` rounded up to a power of two; infinity stays, and NaN becomes 0.
pub fn power_of_two_above(x: f32) -> f32 {
    let bits = x.to_bits();
    f32::from_bits(if bits & 0x7F_FFFF == 0 { bits } else { bits.wrapping_add(0x80_0000) & 0x7F80_0000 })
}

/// Values that share a scale to e2m1; returns the scale's byte: e4m3, or with `powers` E8M0 (rounded up), of `scale` x amax / 6. Values are
/// multiplied by `scale` over that scale, and all are 0 where it is 0.
pub fn quantize_block(values: &[f32], scale: f32, powers: bool, codes: &mut [u8]) -> u8 {
    let wanted = scale * (amax(values) * (1.0 / 6.0));
    let (byte, narrow) = if powers {
        let power = power_of_two_above(wanted).min(2f32.powi(127));
        ((power.to_bits() >> 23) as u8, power)
    } else {
        let code = e4m3(wanted);
        (code, e4m3_value(code))
    };
    let factor = if narrow != 0.0 { scale / narrow } else { 0.0 };
    for (code, pair) in codes.iter_mut().zip(values.chunks(2)) {
        *code = e2m1(pair[0] * factor) | e2m1(pair[1] * factor) << 4;
    }
    byte
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_scale_has_its_place() {
        for layout in [ScaleLayout::Swizzled128x4, ScaleLayout::Swizzled8x4, ScaleLayout::Linear] {
            assert_eq!(ScaleLayout::of_tile_rows(layout.tile_rows()), layout);
            for (rows, blocks) in [(1, 1), (7, 4), (128, 3), (130, 9), (300, 8)] {
                let mut taken = vec![false; layout.bytes(rows, blocks)];
                for row in 0..rows {
                    for block in 0..blocks {
                        assert!(!std::mem::replace(&mut taken[layout.offset(row, block, blocks)], true));
                    }
                }
            }
        }
        assert_eq!(ScaleLayout::Swizzled128x4.offset(129 + 32, 5, 9), (3 + 1) * 512 + 16 + 4 + 1);
    }

    #[test]
    fn powers_of_two() {
        for (x, power) in [(0.0, 0.0), (1.0, 1.0), (1.1, 2.0), (0.26, 0.5), (f32::INFINITY, f32::INFINITY)] {
            assert_eq!(power_of_two_above(x), power);
        }
        for nan in [f32::NAN, -f32::NAN] {
            assert_eq!(power_of_two_above(nan), 0.0);
        }
    }

    #[test]
    fn a_block() {
        let mut codes = [9; 8];
        let values: [f32; BLOCK] = std::array::from_fn(|i| [6.0, -3.0, 0.5, 0.0][i % 4]);
        assert_eq!(quantize_block(&values, 1.0, false, &mut codes), e4m3(1.0));
        assert_eq!(codes, [0xD7, 0x01, 0xD7, 0x01, 0xD7, 0x01, 0xD7, 0x01]);
        // A larger scale of the tensor goes into the block's.
        assert_eq!(quantize_block(&values, 448.0, false, &mut codes), e4m3(448.0));
        assert_eq!(codes[0], 0xD7);
        assert_eq!(quantize_block(&[0.0; BLOCK], 1.0, false, &mut codes), 0);
        assert_eq!(codes, [0; 8]);
        // 7 / 6 is rounded up to 2.
        assert_eq!(quantize_block(&[7.0; BLOCK], 1.0, true, &mut codes), 128);
        assert_eq!(codes, [0x66; 8]);
        assert_eq!(quantize_block(&[0.0; BLOCK], 1.0, true, &mut codes), 0);
    }
}
