//! Conversions of quads of bytes to words and back. `layouts/mod.rs` says what a quad is.

use super::Matrices;
use crate::parallel::*;

/// Rows and byte columns of a tile, which has 16 x 64 elements: 8 x 4 x 4 quads.
pub(super) const TILE_ROWS: usize = 16;
pub(super) const TILE_BYTES: usize = 32;

/// Four quads next to each other: their first row in the tile (0 to 7), the tile, and their first byte column, tile * 32 + step * 8.
#[derive(Clone, Copy)]
pub(super) struct Quads {
    pub row: usize,
    pub tile: usize,
    pub step: usize,
}

/// A layout of quads.
pub(super) trait Words {
    /// Distance in bytes between the words of neighbouring quads.
    const STRIDE: usize;
    /// The byte offset of the first word of four within its 16 rows, which have `columns` bytes each.
    fn offset(quads: Quads, columns: usize) -> usize;
    /// The bytes of (row, column), (row + 8, column), (row, column + 4), (row + 8, column + 4) as a word.
    fn pack(quad: [u8; 4]) -> u32;
    fn unpack(word: u32) -> [u8; 4];
}

/// Calls `f` with four quads and their first byte column.
fn for_each_quads(columns: usize, mut f: impl FnMut(Quads, usize)) {
    for row in 0..TILE_ROWS / 2 {
        for tile in 0..columns / TILE_BYTES {
            for step in 0..4 {
                f(Quads { row, tile, step }, tile * TILE_BYTES + step * 8);
            }
        }
    }
}

/// Converts codes to words. Rows and columns between `plain` and `padded` become zeros. `padded` is whole tiles, and `plain.columns` a
/// multiple of 8.
pub(super) fn encode<W: Words>(from: &[u8], plain: Matrices, to: &mut [u8], padded: Matrices) {
    if to.is_empty() {
        return;
    }
    let bands = padded.rows / TILE_ROWS;
    to.par_chunks_mut(TILE_ROWS * padded.columns).enumerate().for_each(|(i, to)| {
        let (matrix, first) = (i / bands, i % bands * TILE_ROWS);
        let octet = |row, column| {
            let mut octet = [0; 8];
            if first + row < plain.rows && column < plain.columns {
                let at = (matrix * plain.rows + first + row) * plain.columns + column;
                octet.copy_from_slice(&from[at..at + 8]);
            }
            octet
        };
        for_each_quads(padded.columns, |quads, column| {
            let (upper, lower) = (octet(quads.row, column), octet(quads.row + 8, column));
            let to = &mut to[W::offset(quads, padded.columns)..][..3 * W::STRIDE + 4];
            for lane in 0..4 {
                let word = W::pack([upper[lane], lower[lane], upper[lane + 4], lower[lane + 4]]);
                to[lane * W::STRIDE..][..4].copy_from_slice(&word.to_le_bytes());
            }
        });
    });
}

/// The inverse of `encode`. Bytes outside `plain` are dropped.
pub(super) fn decode<W: Words>(from: &[u8], padded: Matrices, to: &mut [u8], plain: Matrices) {
    if to.is_empty() {
        return;
    }
    let bands = padded.rows / TILE_ROWS;
    to.par_chunks_mut(plain.rows * plain.columns).enumerate().for_each(|(matrix, to)| {
        to.par_chunks_mut(TILE_ROWS * plain.columns).enumerate().for_each(|(band, to)| {
            let band_bytes = TILE_ROWS * padded.columns;
            let from = &from[(matrix * bands + band) * band_bytes..][..band_bytes];
            for_each_quads(padded.columns, |quads, column| {
                if column >= plain.columns {
                    return;
                }
                let from = &from[W::offset(quads, padded.columns)..][..3 * W::STRIDE + 4];
                let (mut upper, mut lower) = ([0; 8], [0; 8]);
                for lane in 0..4 {
                    let word = &from[lane * W::STRIDE..][..4];
                    let quad = W::unpack(u32::from_le_bytes([word[0], word[1], word[2], word[3]]));
                    [upper[lane], lower[lane], upper[lane + 4], lower[lane + 4]] = quad;
                }
                for (row, octet) in [(quads.row, upper), (quads.row + 8, lower)] {
                    let at = row * plain.columns + column;
                    if let Some(to) = to.get_mut(at..at + 8) {
                        to.copy_from_slice(&octet);
                    }
                }
            });
        });
    });
}

/// Spreads the eight elements s e e m of a quad over a word so that `w & m`, `(w << 3) & m`, `(w << 6) & m` and three more shifts give
/// them two at a time as bf16 with sign, two exponent bits and mantissa in place (m = 0x81c081c0). Elements 0, 2, 4, 6, the low nibbles,
/// go to the low halfword, the others to the high one.
pub(super) fn spread(quad: [u8; 4]) -> u32 {
    // This converts both nibbles at once, each in its halfword.
    let [a, b, c, d] = quad.map(|byte| u32::from(byte & 0x0f) | u32::from(byte & 0xf0) << 12);
    let element = |x: u32| (x & 0x0008_0008) << 12 | (x & 0x0007_0007) << 6;
    let last = (d & 0x0008_0008) << 11 | (d & 0x0006_0006) << 9 | (d & 0x0001_0001) << 13;
    element(a) | element(b) >> 3 | element(c) >> 6 | last
}

pub(super) fn unspread(word: u32) -> [u8; 4] {
    let element = |x: u32| x >> 12 & 0x0008_0008 | x >> 6 & 0x0007_0007;
    let last = word >> 11 & 0x0008_0008 | word >> 9 & 0x0006_0006 | word >> 13 & 0x0001_0001;
    [element(word), element(word << 3), element(word << 6), last].map(|x| (x | x >> 12) as u8)
}

/// Puts elements of rows r and r + 8 side by side: the low nibbles of both rows, the high nibbles of both, for both columns.
pub(super) fn pairs([a, b, c, d]: [u8; 4]) -> u32 {
    u32::from_le_bytes([a & 15 | b << 4, a >> 4 | b & 0xf0, c & 15 | d << 4, c >> 4 | d & 0xf0])
}

/// `pairs` is its own inverse.
pub(super) fn unpairs(word: u32) -> [u8; 4] {
    pairs(word.to_le_bytes()).to_le_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks the three shifts and the mask with which a kernel reads a word.
    #[test]
    fn spread_reads_as_bf16() {
        const MASK: u32 = 0x81c0_81c0;
        for seed in 0..4096u32 {
            let quad = seed.wrapping_mul(0x9e37_79b9).to_le_bytes();
            let w = spread(quad);
            let last = (w << 1 & 0x8000_8000) | (w >> 3 & 0x0180_0180) | (w >> 7 & 0x0040_0040);
            for (byte, pair) in quad.into_iter().zip([w & MASK, w << 3 & MASK, w << 6 & MASK, last]) {
                let bf16 = |code: u8| u32::from(code & 8) << 12 | u32::from(code & 7) << 6;
                assert_eq!(pair, bf16(byte & 15) | bf16(byte >> 4) << 16, "{quad:x?} is {w:08x}");
            }
            assert_eq!(unspread(w), quad);
            assert_eq!(unpairs(pairs(quad)), quad);
        }
    }
}
