//! MXFP8 rows to rows of bf16.

use half::bf16;

use crate::cpu::narrow::e4m3_value;
use crate::quant::e2m1;
use crate::quant::mxfp8::BLOCK;
use std::sync::LazyLock;

static VALUES: LazyLock<[f32; 256]> = LazyLock::new(|| std::array::from_fn(|code| e4m3_value(code as u8)));

/// [`super::Expand`] of e4m3 codes to bf16: code times scale, exact from 2^-133 to the largest bf16, which bounds what is beyond.
///
/// # Safety
/// The pointers hold `32 * blocks` bytes of codes, `blocks` scales and room for `32 * blocks` elements.
pub(super) unsafe fn expand(codes: *const u8, scales: *const u8, blocks: usize, out: *mut u8) {
    // SAFETY: the caller's contract.
    let (codes, scales, out) = unsafe {
        (
            std::slice::from_raw_parts(codes.cast::<[u8; BLOCK]>(), blocks),
            std::slice::from_raw_parts(scales, blocks),
            std::slice::from_raw_parts_mut(out.cast::<[bf16; BLOCK]>(), blocks),
        )
    };
    let (values, most) = (&*VALUES, bf16::MAX.to_f32());
    for ((codes, &scale), out) in codes.iter().zip(scales).zip(out) {
        let scale_value = e2m1::scale(scale);
        for (out, &code) in out.iter_mut().zip(codes) {
            let value = values[usize::from(code)] * scale_value;
            // In this range bf16 has all of the bits, so that cutting off what lies below them is exact.
            *out = match scale {
                3..=245 => bf16::from_bits((value.to_bits() >> 16) as u16),
                _ => bf16::from_f32(value.clamp(-most, most)),
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quant::mxfp8;

    #[test]
    fn every_code_with_every_scale() {
        for scale in 0..=255u8 {
            for first in (0..256).step_by(BLOCK) {
                let codes: [u8; BLOCK] = std::array::from_fn(|i| (first + i) as u8);
                let mut out = [bf16::ZERO; BLOCK];
                // SAFETY: one block of each.
                unsafe { expand(codes.as_ptr(), &scale, 1, out.as_mut_ptr().cast()) };
                for (code, out) in codes.into_iter().zip(out) {
                    let expected = mxfp8::value(code, scale);
                    if expected.is_nan() {
                        assert!(out.is_nan(), "{code} {scale}");
                    } else if expected.abs() <= bf16::MAX.to_f32() {
                        assert_eq!(out.to_bits(), bf16::from_f32(expected).to_bits(), "{code} {scale}");
                        assert!(scale < 3 || out.to_f32() == expected, "{code} {scale}");
                    } else {
                        assert_eq!(out.to_f32().abs(), bf16::MAX.to_f32());
                    }
                }
            }
        }
    }
}
