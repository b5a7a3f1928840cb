//! MXFP4 (OCP Microscaling Formats 1.0): e2m1 elements, two a byte with the low nibble first, and one E8M0 scale for 32 of them.

use super::e2m1;
use crate::cpu::Element;
use crate::parallel::*;
use half::{bf16, f16};

/// Elements that share a scale.
pub const BLOCK: usize = 32;
const BYTES: usize = BLOCK / 2;
/// Blocks that one task converts.
const TASK: usize = 2048;

const INFINITY: u32 = 0x7f80_0000;

/// How a block's scale is rounded to a power of two. `amax` is its largest magnitude.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rounding {
    /// 2^ceil(log2(amax / 6)): nothing is clipped. triton_kernels' ROUND_UP, its default.
    Up,
    /// 2^(floor(log2(amax)) - 2), the rule of the OCP specification (section 6.3): magnitudes above 6 scales are clipped. ROUND_DOWN.
    Down,
}

/// A type that blocks are quantised from and dequantised to.
pub trait Float: Element {
    /// The largest finite value.
    const MAX: f32;
}

impl Float for f32 {
    const MAX: f32 = f32::MAX;
}

impl Float for f16 {
    const MAX: f32 = f16::MAX.to_f32_const();
}

impl Float for bf16 {
    const MAX: f32 = bf16::MAX.to_f32_const();
}

/// Whole blocks of `x` to 16 bytes of codes and a scale byte each: elements to nearest, ties to even, saturating at 6 scales.
///
/// NOTE: blocks with NaN or infinity come out as from triton_kernels' `downcast_to_mxfp_torch`, see `non_finite`.
pub fn quantize<T: Float>(x: &[T], rounding: Rounding, codes: &mut [u8], scales: &mut [u8]) {
    let tasks = x.par_chunks(TASK * BLOCK).zip(codes.par_chunks_mut(TASK * BYTES)).zip(scales.par_chunks_mut(TASK));
    tasks.for_each(|((x, codes), scales)| {
        let blocks = x.chunks_exact(BLOCK).zip(codes.chunks_exact_mut(BYTES)).zip(scales);
        for ((x, codes), scale) in blocks {
            *scale = quantize_block(&std::array::from_fn(|i| x[i].to_f32()), rounding, codes);
        }
    });
}

fn quantize_block(x: &[f32; BLOCK], rounding: Rounding, codes: &mut [u8]) -> u8 {
    // Magnitudes order as their bits do; NaN is above infinity.
    let amax = x.iter().fold(0, |max, x| max.max(x.to_bits() & !(1 << 31)));
    let scale = scale_byte(amax, rounding);
    if amax >= INFINITY {
        pack(codes, |i| non_finite(x[i]));
        return scale;
    }
    // 0 for the scale byte 0: amax / 6 has underflowed.
    let inverse = if scale == 0 { 0.0 } else { 1.0 / e2m1::scale(scale) };
    let elements = x.map(|x| nearest(x.abs() * inverse) | x.to_bits() >> 28 & 8);
    pack(codes, |i| elements[i] as u8);
    scale
}

/// The E8M0 byte for a block whose largest magnitude has the bits `amax`.
fn scale_byte(amax: u32, rounding: Rounding) -> u8 {
    let amax_value = f32::from_bits(amax);
    match rounding {
        // triton_kernels rounds by an addition to the bits, which carries NaN over into 0.
        Rounding::Up if amax > INFINITY => 0,
        Rounding::Up => (((amax_value / 6.0).to_bits() + 0x007f_ffff) >> 23) as u8,
        Rounding::Down if amax > INFINITY => 255,
        Rounding::Down => ((amax_value / 4.0).to_bits() >> 23) as u8,
    }
}

fn sign(x: f32) -> u8 {
    (x.to_bits() >> 28) as u8 & 8
}

/// The code of the nearest e2m1 magnitude. At a midpoint the even code wins: `>` where that is the lower one, `>=` where it is the upper.
fn nearest(y: f32) -> u32 {
    u32::from(y > 0.25)
        + u32::from(y >= 0.75)
        + u32::from(y > 1.25)
        + u32::from(y >= 1.75)
        + u32::from(y > 2.5)
        + u32::from(y >= 3.5)
        + u32::from(y > 5.0)
}

/// An element of a block with NaN or infinity: x * 0, saturated. Of these products NaN keeps its sign, and infinity becomes x86's
/// default NaN, which is negative.
fn non_finite(x: f32) -> u8 {
    if x.is_nan() {
        7 | sign(x)
    } else if x.is_infinite() {
        15
    } else {
        sign(x)
    }
}

fn pack(codes: &mut [u8], element: impl Fn(usize) -> u8) {
    for (i, byte) in codes.iter_mut().enumerate() {
        *byte = element(2 * i) | element(2 * i + 1) << 4;
    }
}

/// Whole blocks back to `out`: element times scale, rounded once, saturated at the largest finite value; NaN for the scale byte 255.
pub fn dequantize<T: Float>(codes: &[u8], scales: &[u8], out: &mut [T]) {
    let tasks = codes.par_chunks(TASK * BYTES).zip(scales.par_chunks(TASK)).zip(out.par_chunks_mut(TASK * BLOCK));
    tasks.for_each(|((codes, scales), out)| {
        let blocks = codes.chunks_exact(BYTES).zip(scales).zip(out.chunks_exact_mut(BLOCK));
        for ((codes, &scale), out) in blocks {
            let scale = e2m1::scale(scale);
            // One NaN for all codes: the sign of a product with NaN is the processor's choice.
            let number = |x: f32| T::from_f32(if scale.is_nan() { scale } else { (x * scale).clamp(-T::MAX, T::MAX) });
            let values = e2m1::VALUES.map(number);
            for (out, code) in out.chunks_exact_mut(2).zip(codes) {
                out[0] = values[usize::from(code & 15)];
                out[1] = values[usize::from(code >> 4)];
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every e2m1 magnitude, the midpoints between them and the floats next to those, against the distances.
    #[test]
    fn nearest_is_nearest_even() {
        for y in (0..=800).map(|i| i as f32 / 100.0).flat_map(|y| [y.next_down().max(0.0), y, y.next_up()]) {
            let code = nearest(y);
            let distance = |code: u32| (f64::from(e2m1::VALUES[code as usize]) - f64::from(y)).abs();
            for other in 0..8 {
                assert!(distance(code) <= distance(other), "{y}: {code} is farther than {other}");
                assert!(other == code || distance(code) < distance(other) || code & 1 == 0, "{y}: tie to {code}");
            }
        }
    }

    #[test]
    fn scale_bytes() {
        let byte = |amax: f32, rounding| scale_byte(amax.to_bits(), rounding);
        for (amax, up, down) in [
            (0.0, 0, 0),
            (6.0, 127, 127),
            (6.0f32.next_up(), 128, 127),
            (8.0f32.next_down(), 128, 127),
            (8.0, 128, 128),
            (f32::from_bits(1), 0, 0),
            (f32::MIN_POSITIVE, 1, 0),
            (f32::MAX, 253, 252),
            (f32::INFINITY, 255, 255),
            (f32::NAN, 0, 255),
        ] {
            assert_eq!((byte(amax, Rounding::Up), byte(amax, Rounding::Down)), (up, down), "{amax}");
        }
    }

    /// What is exact in MXFP4 comes back, with every scale and in every dtype that holds it.
    #[test]
    fn exact_values_come_back() {
        let codes: Vec<u8> = (0..16).map(|i| i | (15 - i) << 4).collect();
        for byte in 0..=255u8 {
            let mut x = [0f32; BLOCK];
            dequantize(&codes, &[byte], &mut x);
            assert!(x.iter().all(|x| x.is_nan() == (byte == 255)));
            let (mut again, mut scale) = ([0; BYTES], [0]);
            quantize(&x, Rounding::Down, &mut again, &mut scale);
            // 2^-127 is below the scales that quantisation gives, and 6 * 2^127 beyond f32.
            if (1..=252).contains(&byte) {
                assert_eq!((&again[..], scale[0]), (&codes[..], byte));
            }
        }
    }
}
