//! MXFP8 (OCP Microscaling Formats 1.0): e4m3 elements and one E8M0 scale for 32 of them.

use super::blocks::{byte_a_block, BlockKind};
use super::packed::Packers;
use super::{e2m1, packed_as, Activations, Borders, Format, QuantSpec, Weights};
use crate::cpu::narrow::{e4m3, e4m3_value};
use crate::variants::{self, Form};
use half::bf16;
use std::sync::LazyLock;

/// Elements that share a scale.
pub const BLOCK: usize = 32;

/// The format MXFP8. Activations become MXFP8, too.
pub const ROW: QuantSpec = QuantSpec {
    format: Format::Mxfp8,
    name: "mxfp8",
    weights: Weights::Mxfp8,
    activations: Activations::Mxfp8,
    block: BLOCK as i64,
    inner_block: BLOCK as i64,
    ..packed_as(Form::Mxfp8, Borders::Mxfp8)
};

/// The kernels that pack.
pub const PACKERS: Packers =
    Packers { peak: variants::quant::MXFP8_PEAK.kernel(), pack: variants::quant::MXFP8_PACK.kernel() };

/// Blocks of MXFP8. They are expanded to bf16 only.
pub static BLOCKS: BlockKind = BlockKind {
    columns: BLOCK,
    code_bytes: BLOCK,
    scale_bytes: byte_a_block,
    expand: |_| {
        |_, blocks, row, out| {
            // SAFETY: the caller's contract, which is that of `ExpandRow`.
            unsafe { expand(row.codes, blocks.scales.add(row.row * blocks.row_blocks), row.count, out) }
        }
    },
};

/// The E8M0 byte of a group whose largest magnitude is `amax`: 2^ceil(log2(amax / 448)), at least 2^-127, so that nothing is clipped. It is
/// 254 for infinity and 255 for NaN.
pub fn e8m0_of_amax(amax: f32) -> u8 {
    let bits = amax.to_bits() & !(1 << 31);
    match bits {
        0..0x7f80_0000 => {
            // 448 is 1.75 * 2^8, so a mantissa above 0.75 carries.
            let exponent = (bits + 0x1f_ffff) >> 23;
            exponent.saturating_sub(8) as u8
        }
        0x7f80_0000 => 254,
        _ => 255,
    }
}

/// The factor that elements are multiplied by before they are rounded. It is 0 for scales that have no reciprocal in flashinfer's kernel.
pub fn inverse(scale: u8) -> f32 {
    match scale {
        1..=253 => f32::from_bits((254 - u32::from(scale)) << 23),
        255 => f32::NAN,
        _ => 0.0,
    }
}

/// A group's scale byte and codes, to nearest, ties to even. NaN becomes NaN, and counts for the scale only in a group of nothing else.
/// Infinity becomes NaN, and finite elements beside it become 0. Elements of a group whose largest magnitude is at most 448 * 2^-127 become
/// 0, too.
pub fn quantize_group(x: &[f32; BLOCK]) -> (u8, [u8; BLOCK]) {
    let scale = e8m0_of_amax(x.iter().fold(f32::NAN, |most, x| most.max(x.abs())));
    let inverse = inverse(scale);
    (scale, x.map(|x| e4m3(x * inverse)))
}

/// Element times scale in fp32, exact except for overflow. The scale 255 gives NaN.
pub fn value(code: u8, scale: u8) -> f32 {
    e4m3_value(code) * e2m1::scale(scale)
}

static VALUES: LazyLock<[f32; 256]> = LazyLock::new(|| std::array::from_fn(|code| e4m3_value(code as u8)));

/// Expands blocks of e4m3 codes to bf16: code times scale, exact from 2^-133 to the largest bf16. Larger products become the largest bf16.
///
/// # Safety
/// The pointers hold `32 * blocks` bytes of codes, `blocks` scales and room for `32 * blocks` elements.
unsafe fn expand(codes: *const u8, scales: *const u8, blocks: usize, out: *mut u8) {
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
            // In this range bf16 has all bits of the product, so cutting off the lower half is exact.
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

    #[test]
    fn every_code_with_every_scale() {
        for scale in 0..=255u8 {
            for first in (0..256).step_by(BLOCK) {
                let codes: [u8; BLOCK] = std::array::from_fn(|i| (first + i) as u8);
                let mut out = [bf16::ZERO; BLOCK];
                // SAFETY: the pointers hold one block of codes, one scale and room for one block.
                unsafe { expand(codes.as_ptr(), &scale, 1, out.as_mut_ptr().cast()) };
                for (code, out) in codes.into_iter().zip(out) {
                    let expected = value(code, scale);
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

    #[test]
    fn scales_are_the_least_that_clip_nothing() {
        for (amax, byte) in [
            (0.0, 0),
            (448.0, 127),
            (448f32.next_up(), 128),
            (448f32.next_down(), 127),
            (1.0, 119),
            (-1.0, 119),
            (f32::from_bits(1), 0),
            (448.0 * 2f32.powi(-126), 1),
            (448.0 * 2f32.powi(-127), 0),
            ((448.0 * 2f32.powi(-127)).next_up(), 1),
            (f32::MAX, 247),
            (f32::INFINITY, 254),
            (f32::NAN, 255),
        ] {
            assert_eq!(e8m0_of_amax(amax), byte, "{amax}");
        }
        for bits in (0x0080_0000..0x7f80_0000u32).step_by(99_991) {
            let (amax, byte) = (f64::from(f32::from_bits(bits)), e8m0_of_amax(f32::from_bits(bits)));
            let scale = 2f64.powi(i32::from(byte) - 127);
            assert!(amax <= 448.0 * scale && (byte == 0 || amax > 224.0 * scale), "{amax} has {byte}");
        }
    }

    /// Quantising dequantised values again changes nothing, and bf16 holds the values.
    #[test]
    fn values_come_back_from_bf16() {
        for seed in 0..4000u32 {
            let power = 2f32.powi(seed as i32 % 220 - 105);
            let x: [f32; BLOCK] = std::array::from_fn(|i| {
                let random = (seed * 32 + i as u32).wrapping_mul(0x9e37_79b9).rotate_left(13).wrapping_mul(0x85eb_ca6b);
                (random as i32 as f32) * 2f32.powi(-31) * power
            });
            let (scale, codes) = quantize_group(&x);
            let values = codes.map(|code| value(code, scale));
            for (x, value) in x.iter().zip(&values) {
                assert_eq!(bf16::from_f32(*value).to_f32(), *value);
                let step = 2f32.powi(i32::from(scale) - 127) / 512.0;
                assert!((x - value).abs() <= (x.abs() / 16.0).max(step / 2.0), "{x} became {value}");
            }
            let (again, same) = quantize_group(&values);
            assert_eq!(same.map(|code| value(code, again)), values);
        }
    }

    #[test]
    fn not_a_number() {
        let mut x = [0.0; BLOCK];
        assert_eq!(quantize_group(&x), (0, [0; BLOCK]));
        x[3] = -0.0;
        assert_eq!(quantize_group(&x).1[3], 0x80);
        (x[0], x[1]) = (f32::NAN, 448.0);
        let (scale, codes) = quantize_group(&x);
        assert_eq!((scale, codes[0], codes[1], codes[2]), (127, 0x7F, 0x7E, 0));
        x[5] = f32::INFINITY;
        let (scale, codes) = quantize_group(&x);
        assert_eq!((scale, codes[0], codes[1], codes[5]), (254, 0x7F, 0, 0x7F));
        let (scale, codes) = quantize_group(&[f32::NAN; BLOCK]);
        assert_eq!((scale, codes), (255, [0x7F; BLOCK]));
        assert!(value(0x7E, 255).is_nan() && value(0x7F, 127).is_nan());
    }
}
