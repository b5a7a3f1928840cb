//! int4: 4-bit integers with a scale, and perhaps a zero point, for a group of a row's columns.
//!
//! A weight is (code - zero point) * scale. The scale is rounded to the compute type first; the difference is exact, and the product is
//! rounded to the compute type once. Without zero points the zero point is 8. So a layer of these weights is a layer of plain weights, to
//! the bit.

use half::{bf16, f16};

/// Columns that a scale is for at least, and of which a group is a multiple.
pub const BLOCK: usize = 32;

/// The zero point where there is none.
pub const MIDDLE: u8 = 8;

/// A type of scales and of weights.
pub trait Rounds: Copy {
    fn round(x: f32) -> Self;
    fn widen(self) -> f32;
}

impl Rounds for bf16 {
    fn round(x: f32) -> bf16 {
        bf16::from_f32(x)
    }
    fn widen(self) -> f32 {
        self.to_f32()
    }
}

impl Rounds for f16 {
    fn round(x: f32) -> f16 {
        f16::from_f32(x)
    }
    fn widen(self) -> f32 {
        self.to_f32()
    }
}

impl Rounds for f32 {
    fn round(x: f32) -> f32 {
        x
    }
    fn widen(self) -> f32 {
        self
    }
}

/// The weights of all codes of a group.
pub fn values<T: Rounds>(scale: f32, zero: u8) -> [T; 16] {
    let scale = T::round(scale).widen();
    std::array::from_fn(|code| T::round((code as i32 - i32::from(zero)) as f32 * scale))
}

#[cfg(test)]
mod tests {
    use super::*;

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
}
