//! MXFP4 weights in other kernels' layouts, converted to and from the checkpoint's form (codes [rows, K/2], scales [rows, K/32]).
//!
//! Three of these layouts are one idea. A *quad* is the four bytes at rows r, r + 8 and byte columns c, c + 4: the eight elements that
//! one lane of a 16 x 64 tensor-core tile owns. Each quad becomes one little-endian 32-bit word; layouts differ in the bits within the
//! word (`spread` or `pairs`) and in the place of the word (`hopper`, `cutlass`).

pub mod cutlass;
pub mod gpu;
pub mod hopper;
mod words;

use crate::parallel::*;

/// Matrices in row-major order, one after another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Matrices {
    pub count: usize,
    pub rows: usize,
    pub columns: usize,
}

impl Matrices {
    pub fn bytes(&self) -> usize {
        self.count * self.rows * self.columns
    }

    fn padded(&self, row_multiple: usize, column_multiple: usize) -> Matrices {
        Matrices {
            count: self.count,
            rows: self.rows.next_multiple_of(row_multiple),
            columns: self.columns.next_multiple_of(column_multiple),
        }
    }
}

/// The project whose layout it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    Hopper { num_warps: usize },
    Cutlass(cutlass::Release),
}

/// A conversion of codes or scales from the checkpoint's form to a layout, or in the other direction if `back`. `held` has the layout's
/// padding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Conversion {
    pub layout: Layout,
    pub scales: bool,
    pub back: bool,
    pub plain: Matrices,
    pub held: Matrices,
}

impl Conversion {
    pub fn on_host(&self, from: &[u8], to: &mut [u8]) {
        let Conversion { layout, scales, back, plain, held } = *self;
        match (layout, scales, back) {
            (Layout::Hopper { .. }, false, false) => hopper::swizzle_values(from, plain, to, held),
            (Layout::Hopper { .. }, false, true) => hopper::unswizzle_values(from, held, to, plain),
            (Layout::Hopper { num_warps }, true, false) => hopper::swizzle_scales(from, plain, to, held, num_warps),
            (Layout::Hopper { num_warps }, true, true) => hopper::unswizzle_scales(from, held, to, plain, num_warps),
            (Layout::Cutlass(release), false, false) => cutlass::interleave_values(release, from, to, plain),
            (Layout::Cutlass(release), false, true) => cutlass::deinterleave_values(release, from, to, plain),
            (Layout::Cutlass(release), true, false) => cutlass::interleave_scales(release, from, to, plain),
            (Layout::Cutlass(release), true, true) => cutlass::deinterleave_scales(release, from, to, plain),
        }
    }
}

/// Moves bytes to a layout that keeps bands of `band` rows together. Within a band the byte of (row, column) goes to `offset`. Rows and
/// columns between `plain` and `padded` become 0. `padded.rows` is a multiple of `band`.
fn scatter(
    from: &[u8],
    plain: Matrices,
    to: &mut [u8],
    padded: Matrices,
    band: usize,
    offset: impl Fn(usize, usize) -> usize + Sync,
) {
    if to.is_empty() {
        return;
    }
    let bands = padded.rows / band;
    to.par_chunks_mut(band * padded.columns).enumerate().for_each(|(i, to)| {
        to.fill(0);
        let first = i % bands * band;
        for row in 0..band.min(plain.rows.saturating_sub(first)) {
            let from = &from[((i / bands) * plain.rows + first + row) * plain.columns..][..plain.columns];
            for (column, &byte) in from.iter().enumerate() {
                to[offset(row, column)] = byte;
            }
        }
    });
}

/// The inverse of `scatter`. Bytes outside `plain` are dropped.
fn gather(
    from: &[u8],
    padded: Matrices,
    to: &mut [u8],
    plain: Matrices,
    band: usize,
    offset: impl Fn(usize, usize) -> usize + Sync,
) {
    if to.is_empty() {
        return;
    }
    let bands = padded.rows / band;
    to.par_chunks_mut(plain.columns).enumerate().for_each(|(i, to)| {
        let (matrix, row) = (i / plain.rows, i % plain.rows);
        let from = &from[(matrix * bands + row / band) * band * padded.columns..][..band * padded.columns];
        for (column, byte) in to.iter_mut().enumerate() {
            *byte = from[offset(row % band, column)];
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes without a pattern that a wrong permutation could keep.
    fn noise(count: usize) -> Vec<u8> {
        let mut state = 0x9e37_79b9_7f4a_7c15u64 ^ count as u64;
        let mut next = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 32) as u8
        };
        (0..count).map(|_| next()).collect()
    }

    /// Converts plain bytes to a layout with `apply` and back with `undo`, into poisoned buffers.
    fn round_trip(
        plain: Matrices,
        padded: Matrices,
        apply: impl Fn(&[u8], &mut [u8]),
        undo: impl Fn(&[u8], &mut [u8]),
    ) {
        let from = noise(plain.bytes());
        let (mut to, mut back) = (vec![0xaa; padded.bytes()], vec![0xaa; plain.bytes()]);
        apply(&from, &mut to);
        undo(&to, &mut back);
        assert_eq!(back, from, "{plain:?} in {padded:?}");
    }

    #[test]
    fn hopper_round_trips() {
        for (rows, columns) in [(64, 64), (1, 16), (37, 48), (130, 720), (256, 0), (0, 64)] {
            let plain = Matrices { count: 2, rows, columns };
            for row_multiple in [64, 256] {
                let padded = hopper::padded_values(plain, row_multiple);
                round_trip(
                    plain,
                    padded,
                    |from, to| hopper::swizzle_values(from, plain, to, padded),
                    |from, to| hopper::unswizzle_values(from, padded, to, plain),
                );
            }
            for num_warps in [1, 4, 8] {
                let plain = Matrices { columns: columns / 16, ..plain };
                let padded = hopper::padded_scales(plain, num_warps);
                round_trip(
                    plain,
                    padded,
                    |from, to| hopper::swizzle_scales(from, plain, to, padded, num_warps),
                    |from, to| hopper::unswizzle_scales(from, padded, to, plain, num_warps),
                );
            }
        }
    }

    #[test]
    fn cutlass_round_trips() {
        for release in [cutlass::Release::V0_6, cutlass::Release::V0_7] {
            for (rows, columns) in [(64, 64), (192, 128), (0, 64), (64, 0)] {
                let values = Matrices { count: 3, rows, columns };
                round_trip(
                    values,
                    values,
                    |from, to| cutlass::interleave_values(release, from, to, values),
                    |from, to| cutlass::deinterleave_values(release, from, to, values),
                );
                let scales = Matrices { columns: columns / 16, ..values };
                round_trip(
                    scales,
                    scales,
                    |from, to| cutlass::interleave_scales(release, from, to, scales),
                    |from, to| cutlass::deinterleave_scales(release, from, to, scales),
                );
            }
        }
    }

    #[test]
    fn gather_undoes_scatter() {
        let plain = Matrices { count: 3, rows: 37, columns: 5 };
        let padded = plain.padded(8, 4);
        let from = noise(plain.bytes());
        let offset = |row, column| (padded.columns - 1 - column) * 8 + (row ^ 5);
        let (mut to, mut back) = (vec![0xaa; padded.bytes()], vec![0xaa; plain.bytes()]);
        scatter(&from, plain, &mut to, padded, 8, offset);
        gather(&to, padded, &mut back, plain, 8, offset);
        assert_eq!(back, from);
        let sum = |bytes: &[u8]| bytes.iter().map(|&b| u64::from(b)).sum::<u64>();
        assert_eq!(sum(&to), sum(&from));
    }
}
