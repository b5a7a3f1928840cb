//! Matrices of codes whose columns have scales in blocks, as a checkpoint has them on the host: the description of a format's blocks, and
//! the operands of the CPU's GEMM.

use super::e2m1;
use super::scale_layout::ScaleLayout;
use crate::cpu::instructions::InstructionSet;
use crate::params::Dtype;
use std::fmt;

/// The description of a format's blocks. Each format with blocks has one, in its own file.
pub struct BlockKind {
    /// Columns of a block.
    pub columns: usize,
    /// Bytes of a block's codes.
    pub code_bytes: usize,
    /// Bytes of the scales of an expert's rows.
    pub scale_bytes: fn(&Blocks, usize) -> usize,
    /// Gives the function that expands rows to a compute type.
    pub expand: fn(Dtype) -> ExpandRow,
}

impl fmt::Debug for BlockKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "blocks of {} columns in {} bytes", self.columns, self.code_bytes)
    }
}

/// A row that is expanded.
pub struct CodeRow {
    /// The number of this row among the rows of all experts.
    pub row: usize,
    /// Rows of an expert.
    pub rows: usize,
    pub codes: *const u8,
    /// Blocks of the row that are expanded, from the first on.
    pub count: usize,
}

/// Expands a row to `out`, in elements of the compute type that it was chosen for.
///
/// # Safety
/// The CPU must have the instructions. The row's codes hold `count` blocks, the addresses of [`Blocks`] are valid for it, and `out` has
/// room for the elements of `count` blocks.
pub type ExpandRow = unsafe fn(set: InstructionSet, blocks: &Blocks, row: &CodeRow, out: *mut u8);

/// The facts about a matrix of codes that a GEMM needs beside their address. A field that a format does not have keeps its value of
/// [`Blocks::new`].
#[derive(Clone, Copy, Debug)]
pub struct Blocks {
    pub kind: &'static BlockKind,
    /// Scales `[experts, rows, row_blocks]`, unless `layout` and `groups` say otherwise.
    pub scales: *const u8,
    /// Blocks of a row: at least as many as hold the GEMM's `k`. Columns beyond `k` are padding.
    pub row_blocks: usize,
    /// `[experts]` or null: the least scale byte of an expert. Smaller scales are raised to it, and their codes are rounded.
    pub least: *const u8,
    /// The layout of scales, which are padded for each expert.
    pub layout: ScaleLayout,
    /// Factors of the experts' sums, in the form of `GroupedGemmParams::expert_scales`, or null.
    pub factors: *const f32,
    /// Blocks that share a scale, for formats with such groups.
    pub groups: Groups,
}

/// Blocks that share a scale.
#[derive(Clone, Copy, Debug)]
pub struct Groups {
    /// Blocks of a group.
    pub blocks: usize,
    /// Dtype of the scales.
    pub dtype: Dtype,
    /// Zero points `[experts, rows, groups]`, or null.
    pub zeros: *const u8,
}

impl Blocks {
    /// A matrix with a scale byte for each block, row by row.
    pub fn new(kind: &'static BlockKind, scales: *const u8, row_blocks: usize) -> Blocks {
        let groups = Groups { blocks: 1, dtype: Dtype::F32, zeros: std::ptr::null() };
        let (least, layout, factors) = (std::ptr::null(), ScaleLayout::Linear, std::ptr::null());
        Blocks { kind, scales, row_blocks, least, layout, factors, groups }
    }

    /// Bytes of an expert's scales.
    pub fn scale_bytes(&self, rows: usize) -> usize {
        (self.kind.scale_bytes)(self, rows)
    }

    /// Number of groups of `rows` rows.
    pub fn groups_of(&self, rows: usize) -> usize {
        rows * (self.row_blocks / self.groups.blocks)
    }
}

/// Bytes of `rows` rows' scales, in formats with a scale byte for each block, row by row.
pub fn byte_a_block(blocks: &Blocks, rows: usize) -> usize {
    rows * blocks.row_blocks
}

// SAFETY: the addresses are those of tensors that ExpertWeights keeps alive and never writes.
unsafe impl Send for Blocks {}
// SAFETY: the addresses are those of tensors that ExpertWeights keeps alive and never writes.
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
