//! Numbers of packed MXFP4 weights for e4m3 activations. csrc/common/mxfp4_e4m3.cuh has the same on GPUs.

/// Number of levels: powers of two with which e4m3 holds every e2m1 number as a normal one.
pub const LEVELS: i32 = 12;

/// The scale byte and the code of blocks that are NaN.
pub const NAN_SCALE: u8 = 0x7F - 0x24;
pub const NAN_CODE: u32 = 7;

/// The bits of a code in its word. `column` is 0 to 7, and columns from 4 on lie in the high half.
pub const fn place(code: u32, column: usize) -> u32 {
    let sign = if column < 4 { 8 * column + 7 } else { 8 * (column - 4) + 3 };
    (code & 7) << (4 * column) | (code >> 3) << sign
}

/// The scale byte that counts as an expert's largest.
pub const fn peak(largest: u8) -> i32 {
    if largest < 7 {
        7
    } else {
        largest as i32
    }
}

/// An expert's scale, which multiplies its sums: 2^(peak - 133).
pub fn expert_scale(peak: i32) -> f32 {
    f32::from_bits((peak as u32 - 6) << 23)
}

/// The scale byte of an expert's lowest level. Smaller scale bytes are raised to it.
pub const fn least(peak: i32) -> u8 {
    if peak < LEVELS {
        0
    } else {
        (peak - LEVELS + 1) as u8
    }
}

/// The byte for weights of scale `e8m0`, which is at least `least(peak)`: 8 times the level of the scale.
pub const fn scale_byte(e8m0: u8, peak: i32) -> u8 {
    match e8m0 {
        255 => NAN_SCALE,
        _ => 8 * (e8m0 as i32 - peak + LEVELS - 1) as u8,
    }
}

/// The code whose number is nearest to that of `code` over 2^steps. Ties go to the even code.
pub const fn coarser(code: u32, steps: u32) -> u32 {
    let rounded = match steps {
        0 => 0x7654_3210u32,
        1 => 0x5432_2100,
        2 => 0x3221_1000,
        3 => 0x2110_0000,
        4 => 0x1000_0000,
        _ => 0,
    };
    (code & 8) | rounded >> (4 * (code & 7)) & 7
}

/// The codes of a block whose scale is below `least`, when that scale is raised to `least`.
pub fn raise(codes: &[u8; 16], scale: u8, least: u8) -> [u8; 16] {
    let steps = u32::from(least - scale);
    codes.map(|pair| (coarser(u32::from(pair & 15), steps) | coarser(u32::from(pair >> 4), steps) << 4) as u8)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::{e2m1, e4m3_value};
    use crate::quant::e2m1::{scale, VALUES};

    #[test]
    fn codes_do_not_touch_each_other() {
        assert_eq!((0..8).fold(0, |all, column| all ^ place(15, column)), u32::MAX);
    }

    #[test]
    fn coarser_is_the_nearest_code() {
        for steps in 0..40 {
            for code in 0..16 {
                let number = VALUES[code as usize] / 2f32.powi(steps as i32);
                assert_eq!(coarser(code, steps), u32::from(e2m1(number)), "{number}");
            }
        }
    }

    #[test]
    fn every_number_of_the_window_is_a_normal_e4m3() {
        const MAGNITUDES: [u8; 8] = [0, 0x08, 0x10, 0x14, 0x18, 0x1C, 0x20, 0x24];
        for largest in 0..255u8 {
            let peak = peak(largest);
            for byte in least(peak)..=largest {
                for (code, magnitude) in MAGNITUDES.into_iter().enumerate() {
                    let bits = if code == 0 { 0 } else { magnitude + scale_byte(byte, peak) };
                    assert!(code == 0 || (8..0x7F).contains(&bits));
                    let exact = f64::from(VALUES[code]) * f64::from(scale(byte));
                    assert_eq!(f64::from(e4m3_value(bits)) * f64::from(expert_scale(peak)), exact);
                }
            }
        }
        assert!(e4m3_value(MAGNITUDES[NAN_CODE as usize] + NAN_SCALE).is_nan());
    }
}
