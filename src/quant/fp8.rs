//! e4m3 with fp32 scales: groups of a token's columns, and blocks of weights.

use super::{plain, Activations, Format, QuantSpec, Weights, E4M3_SPEED};
use crate::cpu::element::Element;
use crate::cpu::narrow::e4m3;
use crate::params::{Dtype, Fp8Scaling};
use crate::variants::portable;

/// Columns of an activation row, and rows and columns of a weight matrix, that share a scale in `Format::Fp8Block`.
pub const GROUP: usize = 128;

/// If a matrix has one scale, or one for each row, rows and columns between the GEMMs are multiples of this: kernels read 16 codes at a
/// time.
pub const LEAST_COLUMNS: i64 = 16;

/// The least magnitude that a scale is made for. SGLang's `per_token_group_quant_fp8` has this default.
pub const EPS: f32 = 1e-10;

/// The format whose blocks of 128 x 128 weights have a scale each.
pub const BLOCK_ROW: QuantSpec = QuantSpec {
    format: Format::Fp8Block,
    name: "fp8_block",
    activations: Activations::Fp8(Fp8Scaling::Groups),
    bits_per_weight: 8.0 + 32.0 / (GROUP * GROUP) as f64,
    inner_block: GROUP as i64,
    ..TENSOR_ROW
};

/// The format whose matrices have one scale each, or one for each row. Activations have one scale for all rows of a call.
pub const TENSOR_ROW: QuantSpec = QuantSpec {
    weights: Weights::Fp8,
    activations: Activations::Fp8(Fp8Scaling::Peak),
    block: GROUP as i64,
    inner_block: LEAST_COLUMNS,
    speed: E4M3_SPEED,
    portable: &portable::FP8_TILES,
    ..plain(Format::Fp8Tensor, "fp8_tensor", Dtype::Bf16, 8.0)
};

/// The format fp8_tensor with a scale for each row of activations.
pub const TOKEN_ROW: QuantSpec = QuantSpec {
    format: Format::Fp8TensorToken,
    name: "fp8_tensor-token",
    activations: Activations::Fp8(Fp8Scaling::Rows),
    ..TENSOR_ROW
};

/// The format fp8_tensor with scales of activations that were made before.
pub const STATIC_ROW: QuantSpec = QuantSpec {
    format: Format::Fp8TensorStatic,
    name: "fp8_tensor-static",
    activations: Activations::Fp8(Fp8Scaling::Given),
    ..TENSOR_ROW
};

/// The largest e4m3 number.
const LARGEST: f32 = 448.0;

/// Quantises elements that share a scale to e4m3, to nearest, ties to even, and returns the scale. The scale is the largest magnitude, at
/// least `eps`, over 448. With `powers`, it is rounded up to a power of two. NaN becomes NaN and does not count for the scale. Infinity
/// makes all elements of its group NaN or 0.
///
/// NOTE: elements are multiplied by the rounded reciprocal, as SGLang's Triton kernel does. A division gives another result if that is a
/// tie.
pub fn quantize_group<T: Element>(x: &[T], eps: f32, powers: bool, codes: &mut [u8]) -> f32 {
    let mut scale = peak(x, eps) / LARGEST;
    if powers {
        scale = f32::from_bits((scale.to_bits() + 0x007f_ffff) & 0xff80_0000);
    }
    quantize_with(x, scale, codes);
    scale
}

/// The largest magnitude, at least `least`. NaN does not count.
pub fn peak<T: Element>(x: &[T], least: f32) -> f32 {
    x.iter().fold(least, |most, x| most.max(x.to_f32().abs()))
}

/// The scale of elements whose largest magnitude is `amax`.
pub fn scale_of(amax: f32, eps: f32) -> f32 {
    amax.max(eps) / LARGEST
}

/// Quantises elements to e4m3 with a given scale.
pub fn quantize_with<T: Element>(x: &[T], scale: f32, codes: &mut [u8]) {
    let inverse = 1.0 / scale;
    for (code, x) in codes.iter_mut().zip(x) {
        *code = e4m3(x.to_f32() * inverse);
    }
}

/// The fp32 value of an E8M0 byte.
pub fn power_of(byte: u8) -> f32 {
    match byte {
        255 => f32::NAN,
        0 => f32::from_bits(0x0040_0000),
        byte => f32::from_bits(u32::from(byte) << 23),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::narrow::e4m3_value;

    #[test]
    fn the_largest_is_448_and_zeros_stay() {
        let mut codes = [9; 4];
        let scale = quantize_group(&[3.5f32, -7.0, 0.0, -0.0], EPS, false, &mut codes);
        assert_eq!((scale, codes.map(e4m3_value)), (7.0 / 448.0, [224.0, -448.0, 0.0, -0.0]));
        assert_eq!(quantize_group(&[0.0f32; 4], EPS, false, &mut codes), EPS / 448.0);
        assert_eq!(codes, [0; 4]);
    }

    #[test]
    fn powers_of_two_clip_nothing() {
        let mut codes = [0; 2];
        for (amax, expected) in [(448.0f32, 1.0), (449.0, 2.0), (447.0, 1.0), (1.0, 1.0 / 256.0)] {
            assert_eq!(quantize_group(&[amax, 0.0], EPS, true, &mut codes), expected);
        }
    }

    #[test]
    fn not_a_number() {
        let mut codes = [0; 3];
        assert_eq!(quantize_group(&[f32::NAN, 448.0, 1.0], EPS, false, &mut codes), 1.0);
        assert_eq!(codes, [0x7F, 0x7E, e4m3(1.0)]);
        assert_eq!(quantize_group(&[f32::INFINITY, 448.0, -1.0], EPS, false, &mut codes), f32::INFINITY);
        assert_eq!(codes, [0x7F, 0, 0x80]);
    }
}
