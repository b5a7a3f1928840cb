//! Matrices of MXFP4, MXFP8, NVFP4 and int4: what kernels and contracts need to know of them.

use super::nvfp4::{self, ScaleLayout};
use super::{e2m1, mxfp4};
use crate::params::Dtype;

/// What a matrix of codes needs beside their address.
#[derive(Clone, Copy, Debug)]
pub struct Blocks {
    /// E8M0 `[experts, rows, row_blocks]`; the codes are `[experts, rows, code_bytes() * row_blocks]` bytes.
    pub scales: *const u8,
    /// Codes are e4m3, else e2m1.
    pub e4m3: bool,
    /// Blocks of a row: at least the GEMM's `k` over 32; columns beyond `k` are padding.
    pub row_blocks: usize,
    /// `[experts]` or null: the scale byte that smaller ones of an expert are brought up to, their codes rounded.
    pub least: *const u8,
    /// NVFP4: e4m3 scales for 16 columns each, else E8M0 for 32.
    pub nvfp4: Option<Nvfp4>,
    /// int4: `scales` are of its type, one for a group.
    pub int4: Option<Int4>,
}

/// What is NVFP4's own.
#[derive(Clone, Copy, Debug)]
pub struct Nvfp4 {
    /// Where scales lie, padded for each expert.
    pub layout: ScaleLayout,
    /// As `GroupedGemmParams::expert_scales`.
    pub factors: *const f32,
}

/// What is int4's own.
#[derive(Clone, Copy, Debug)]
pub struct Int4 {
    /// Type of scales.
    pub dtype: Dtype,
    /// Blocks of 32 columns that share a scale.
    pub group_blocks: usize,
    /// `[experts, rows, groups]` or null: 8 everywhere.
    pub zeros: *const u8,
}

impl Int4 {
    /// Bytes of a scale.
    pub fn scale_bytes(&self) -> usize {
        if self.dtype == Dtype::F32 {
            4
        } else {
            2
        }
    }
}

impl Blocks {
    /// Of a row's `row_blocks` blocks with E8M0 `scales`: MXFP8 (`e4m3`) or MXFP4.
    pub fn of_32(scales: *const u8, e4m3: bool, row_blocks: usize) -> Blocks {
        Blocks { scales, e4m3, row_blocks, least: std::ptr::null(), nvfp4: None, int4: None }
    }

    /// Columns of a block.
    pub fn columns(&self) -> usize {
        if self.nvfp4.is_some() {
            nvfp4::BLOCK
        } else {
            mxfp4::BLOCK
        }
    }

    /// Bytes of a block's codes.
    pub fn code_bytes(&self) -> usize {
        self.columns() / if self.e4m3 { 1 } else { 2 }
    }

    /// Bytes of an expert's scales.
    pub fn scale_bytes(&self, rows: usize) -> usize {
        match (self.nvfp4, self.int4) {
            (Some(own), _) => own.layout.bytes(rows, self.row_blocks),
            (None, Some(own)) => self.groups(rows) * own.scale_bytes(),
            (None, None) => rows * self.row_blocks,
        }
    }

    /// Groups of `rows` rows of int4, each with a scale.
    pub fn groups(&self, rows: usize) -> usize {
        self.int4.map_or(0, |own| rows * (self.row_blocks / own.group_blocks))
    }
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
