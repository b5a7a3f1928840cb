//! int4: 4-bit integers with a scale, and perhaps a zero point, for a group of a row's columns.
//!
//! A weight is (code - zero point) * scale. The scale is rounded to the compute type first. The difference is exact, and the product is
//! rounded to the compute type once. Without zero points the zero point is 8. So a layer of these weights is a layer of plain weights, to
//! the bit.

use super::blocks::{BlockKind, Blocks, CodeRow};
use super::{packed_as, Borders, Format, QuantSpec, Weights};
use crate::cpu::element::{for_dtype, Element};
use crate::cpu::instructions::InstructionSet;
use crate::params::Dtype;
use crate::variants::Form;

/// The least number of columns that share a scale. The columns of a group are a multiple of it.
pub const BLOCK: usize = 32;

/// The zero point of formats without zero points.
pub const MIDDLE: u8 = 8;

/// The format without zero points. Its packed form has a bf16 scale for 32 columns even if groups are longer.
pub const ROW: QuantSpec = QuantSpec {
    format: Format::Int4,
    name: "int4",
    weights: Weights::Int4,
    block: BLOCK as i64,
    inner_block: BLOCK as i64,
    bare_tensors: false,
    ..packed_as(Form::Int4, Borders::FourBits)
};

/// The format with a zero point for each scale.
pub const ZEROS_ROW: QuantSpec = QuantSpec {
    format: Format::Int4Zeros,
    name: "int4-zeros",
    weights: Weights::Int4,
    block: BLOCK as i64,
    inner_block: BLOCK as i64,
    bare_tensors: false,
    ..packed_as(Form::Int4Zeros, Borders::FourBits)
};

pub static BLOCKS: BlockKind = BlockKind {
    columns: BLOCK,
    code_bytes: BLOCK / 2,
    scale_bytes: |blocks, rows| blocks.groups_of(rows) * bytes_of_scale(blocks.groups.dtype),
    expand: |dtype| for_dtype!(dtype, T => expand::<T>),
};

fn bytes_of_scale(dtype: Dtype) -> usize {
    if dtype == Dtype::F32 {
        4
    } else {
        2
    }
}

/// The weights of all codes of a group.
fn values<T: Element>(scale: f32, zero: u8) -> [T; 16] {
    let scale = T::from_f32(scale).to_f32();
    std::array::from_fn(|code| T::from_f32((code as i32 - i32::from(zero)) as f32 * scale))
}

/// Expands a row group by group. A scale and a zero point make a table of 16 numbers.
///
/// # Safety
/// The contract of [`super::blocks::ExpandRow`] holds: codes, scales and `out` are valid for the row. The elements are of type `T`.
unsafe fn expand<T: Element>(_set: InstructionSet, blocks: &Blocks, row: &CodeRow, out: *mut u8) {
    let (groups, first) = (&blocks.groups, blocks.groups_of(row.row));
    let size = row.count * BLOCK / 2;
    // SAFETY: the caller's contract.
    let (codes, out) = unsafe {
        (std::slice::from_raw_parts(row.codes, size), std::slice::from_raw_parts_mut(out.cast::<[T; 2]>(), size))
    };
    let bytes = groups.blocks * BLOCK / 2;
    for (group, (codes, out)) in codes.chunks(bytes).zip(out.chunks_mut(bytes)).enumerate() {
        let at = first + group;
        // SAFETY: the scales and zero points are valid for this row, by the caller's contract.
        let (scale, zero) = unsafe {
            let scale = for_dtype!(groups.dtype, S => blocks.scales.cast::<S>().add(at).read_unaligned().to_f32());
            (scale, if groups.zeros.is_null() { MIDDLE } else { *groups.zeros.add(at) })
        };
        let values = values::<T>(scale, zero);
        for (&code, out) in codes.iter().zip(out) {
            *out = [values[usize::from(code & 15)], values[usize::from(code >> 4)]];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::blocks::Groups;
    use super::*;
    use half::{bf16, f16};

    #[test]
    fn a_weight_is_rounded_once_after_its_scale() {
        for (scale, zero) in [(0.37f32, 8u8), (-1.5e-3, 0), (3.0e38, 15), (1.0e-40, 3), (0.1, 7)] {
            let rounded = bf16::from_f32(scale).to_f32();
            for (code, got) in values::<bf16>(scale, zero).into_iter().enumerate() {
                let exact = (code as f64 - f64::from(zero)) * f64::from(rounded);
                let expected = bf16::from_f64(exact);
                assert!(got.to_bits() == expected.to_bits() || (exact == 0.0 && got.to_f32() == 0.0), "{scale} {code}");
            }
            let plain = values::<f32>(scale, zero);
            assert!((0..16).all(|code| plain[code] == (code as f32 - f32::from(zero)) * scale));
        }
        assert!(values::<f16>(f32::NAN, 8).iter().all(|x| x.is_nan()));
    }

    #[test]
    fn groups_have_their_own_scales_and_zero_points() {
        let (count, group_blocks) = (6, 2);
        let codes: Vec<u8> = (0..count * BLOCK / 2).map(|i| (i * 37 % 256) as u8).collect();
        // There are two rows, and the second is expanded.
        let scales = [9.0f32, 9.0, 9.0, 0.5, -1.25, 3.0].map(bf16::from_f32);
        for zeros in [None, Some([9u8, 9, 9, 3, 16, 0])] {
            let zeros_at = zeros.as_ref().map_or(std::ptr::null(), |zeros| zeros.as_ptr());
            let groups = Groups { blocks: group_blocks, dtype: Dtype::Bf16, zeros: zeros_at };
            let blocks = Blocks { groups, ..Blocks::new(&BLOCKS, scales.as_ptr().cast(), count) };
            // The row's last block is padding.
            let row = CodeRow { row: 1, rows: 2, codes: codes.as_ptr(), count: count - 1 };
            let mut out = vec![bf16::NAN; row.count * BLOCK];
            // SAFETY: the buffers have the documented sizes.
            unsafe { (BLOCKS.expand)(Dtype::Bf16)(InstructionSet::Scalar, &blocks, &row, out.as_mut_ptr().cast()) };
            for (i, got) in out.iter().enumerate() {
                let (code, group) = (codes[i / 2] >> (4 * (i % 2)) & 15, 3 + i / (BLOCK * group_blocks));
                let zero = zeros.map_or(8, |zeros| zeros[group]);
                let exact = (f32::from(code) - f32::from(zero)) * scales[group].to_f32();
                assert_eq!(got.to_f32(), bf16::from_f32(exact).to_f32(), "{i}");
            }
        }
    }
}
