//! Matrices of MXFP4: what kernels and contracts need to know of them.

use super::e2m1;

/// What a matrix of codes needs beside their address.
#[derive(Clone, Copy, Debug)]
pub struct Blocks {
    /// E8M0 `[experts, rows, row_blocks]`; the codes are `[experts, rows, 16 * row_blocks]` bytes.
    pub scales: *const u8,
    /// Blocks of a row: at least the GEMM's `k` over 32; columns beyond `k` are padding.
    pub row_blocks: usize,
    /// `[experts]` or null: the scale byte that smaller ones of an expert are brought up to, their codes rounded.
    pub least: *const u8,
}

// SAFETY: an address of a tensor that ExpertWeights keeps alive and never writes.
unsafe impl Send for Blocks {}
// SAFETY: as above.
unsafe impl Sync for Blocks {}

/// The E8M0 byte of a power of two from 2^-127 to 2^127, or of NaN; None for every other number.
pub fn e8m0(scale: f32) -> Option<u8> {
    if scale.is_nan() {
        return Some(255);
    }
    let byte = if scale.to_bits() == e2m1::scale(0).to_bits() { 0 } else { (scale.to_bits() >> 23) as u8 };
    (scale.to_bits() == e2m1::scale(byte).to_bits()).then_some(byte)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn e8m0_is_the_inverse_of_scale() {
        for byte in 0..=255 {
            assert_eq!(e8m0(e2m1::scale(byte)), Some(byte));
        }
        for wrong in [0.0, -0.0, -1.0, 3.0, 1.0 + f32::EPSILON, f32::INFINITY, 2f32.powi(-128), 2f32.powi(-149)] {
            assert_eq!(e8m0(wrong), None, "{wrong}");
        }
    }
}
