//! int4 rows to rows of the compute type, group by group: a scale and a zero point make a table of 16 numbers.

use crate::cpu::for_dtype;
use crate::cpu::Element;
use crate::quant::blocks::Int4;
use crate::quant::int4::{values, Rounds, BLOCK, MIDDLE};

/// Expands the first blocks of 32 columns of a row.
///
/// # Safety
/// The pointers hold `16 * blocks` bytes of codes, a scale of the row and (unless null) a zero point for each group of these, and room for
/// `32 * blocks` elements.
pub(super) type Expand =
    unsafe fn(own: &Int4, codes: *const u8, of_groups: [*const u8; 2], blocks: usize, out: *mut u8);

/// # Safety
/// As for [`Expand`]; the elements are of type `T`.
pub(super) unsafe fn expand<T: Rounds>(
    own: &Int4,
    codes: *const u8,
    [scales, zeros]: [*const u8; 2],
    blocks: usize,
    out: *mut u8,
) {
    // SAFETY: the caller's contract.
    let (codes, out) = unsafe {
        (
            std::slice::from_raw_parts(codes, blocks * BLOCK / 2),
            std::slice::from_raw_parts_mut(out.cast::<[T; 2]>(), blocks * BLOCK / 2),
        )
    };
    let bytes = own.group_blocks * BLOCK / 2;
    for (group, (codes, out)) in codes.chunks(bytes).zip(out.chunks_mut(bytes)).enumerate() {
        // SAFETY: as above.
        let (scale, zero) = unsafe {
            let scale = for_dtype!(own.dtype, S => scales.cast::<S>().add(group).read_unaligned().to_f32());
            (scale, if own.zeros.is_null() { MIDDLE } else { *zeros.add(group) })
        };
        let values = values::<T>(scale, zero);
        for (&code, out) in codes.iter().zip(out) {
            *out = [values[usize::from(code & 15)], values[usize::from(code >> 4)]];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::params::Dtype;
    use half::bf16;

    #[test]
    fn groups_have_their_own_scales_and_zero_points() {
        let (blocks, group_blocks) = (5, 2);
        let codes: Vec<u8> = (0..blocks * BLOCK / 2).map(|i| (i * 37 % 256) as u8).collect();
        let scales = [0.5f32, -1.25, 3.0].map(bf16::from_f32);
        for zeros in [None, Some([3u8, 16, 0])] {
            let zeros_of = zeros.map_or(std::ptr::null(), |zeros| Box::leak(Box::new(zeros)).as_ptr());
            let own = Int4 { dtype: Dtype::Bf16, group_blocks, zeros: zeros_of };
            let mut out = vec![bf16::NAN; blocks * BLOCK];
            // SAFETY: sizes as documented.
            unsafe {
                expand::<bf16>(
                    &own,
                    codes.as_ptr(),
                    [scales.as_ptr().cast(), zeros_of],
                    blocks,
                    out.as_mut_ptr().cast(),
                )
            };
            for (i, got) in out.iter().enumerate() {
                let (code, group) = (codes[i / 2] >> (4 * (i % 2)) & 15, i / (BLOCK * group_blocks));
                let zero = zeros.map_or(8, |zeros| zeros[group]);
                let exact = (f32::from(code) - f32::from(zero)) * scales[group].to_f32();
                assert_eq!(got.to_f32(), bf16::from_f32(exact).to_f32(), "{i}");
            }
        }
    }
}
