//! Conversions of fp32 to 8- and 4-bit floats. They round to nearest with ties to even and saturate, as the conversion instructions of GPUs
//! do.

/// Rounds to e4m3 (fn: no infinities, largest 448). NaN gives 0x7F.
pub fn e4m3(x: f32) -> u8 {
    if x.is_nan() {
        return 0x7F;
    }
    let sign = (x.to_bits() >> 24) as u8 & 0x80;
    let magnitude = x.abs();
    if magnitude >= 448.0 {
        return sign | 0x7E;
    }
    // Below the smallest normal number, 2^-6, codes count steps of 2^-9. 8 of these steps are the code of 2^-6.
    if magnitude < 1.0 / 64.0 {
        return sign | (magnitude * 512.0).round_ties_even() as u8;
    }
    let bits = magnitude.to_bits();
    let rounded = bits + 0x7_FFFF + (bits >> 20 & 1);
    // The exponent bias goes from 127 to 7, and the mantissa from 23 bits to 3. Values from 448 on returned above, so this rounds up to 448
    // at most.
    sign | ((rounded >> 20) - (120 << 3)) as u8
}

/// The value of an e4m3 code.
pub fn e4m3_value(code: u8) -> f32 {
    let (exponent, mantissa) = (code >> 3 & 15, (code & 7) as f32);
    let magnitude = match (exponent, code & 7) {
        (15, 7) => f32::NAN,
        (0, _) => mantissa / 512.0,
        _ => (8.0 + mantissa) * 2f32.powi(exponent as i32 - 10),
    };
    if code & 0x80 == 0 {
        magnitude
    } else {
        -magnitude
    }
}

/// Rounds to e2m1 (0, 0.5, 1, 1.5, 2, 3, 4, 6) in the low four bits. NaN gives +6, because the type has no NaN.
pub fn e2m1(x: f32) -> u8 {
    if x.is_nan() {
        return 7;
    }
    let magnitude = x.abs();
    // Midpoints between neighbours go to the even code.
    let code = match magnitude {
        m if m <= 0.25 => 0,
        m if m < 0.75 => 1,
        m if m <= 1.25 => 2,
        m if m < 1.75 => 3,
        m if m <= 2.5 => 4,
        m if m < 3.5 => 5,
        m if m <= 5.0 => 6,
        _ => 7,
    };
    code | (x.to_bits() >> 28) as u8 & 8
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks a conversion around every value and every midpoint. `values` has the values of a type's codes from 0 on, in order.
    fn check_nearest(values: &[f32], convert: impl Fn(f32) -> u8) {
        for (i, pair) in values.windows(2).enumerate() {
            let (low, high) = (i as u8, i as u8 + 1);
            let middle = (pair[0] + pair[1]) / 2.0;
            assert_eq!(convert(pair[0]), low);
            assert_eq!(convert(pair[1]), high);
            assert_eq!(convert(middle), if low % 2 == 0 { low } else { high }, "{middle}");
            assert_eq!(convert(middle.next_down()), low);
            assert_eq!(convert(middle.next_up()), high);
        }
    }

    #[test]
    fn e4m3_rounds_to_nearest_even_and_saturates() {
        let values: Vec<f32> = (0..0x7F).map(e4m3_value).collect();
        assert!(values.windows(2).all(|pair| pair[0] < pair[1]) && values[0x7E] == 448.0);
        check_nearest(&values, e4m3);
        for x in [448.0, 460.0, 1e30, f32::INFINITY] {
            assert_eq!((e4m3(x), e4m3(-x)), (0x7E, 0xFE));
        }
        assert_eq!((e4m3(0.0), e4m3(-0.0), e4m3(f32::NAN), e4m3(-f32::NAN)), (0, 0x80, 0x7F, 0x7F));
        for code in (0..=255).filter(|code| code & 0x7F != 0x7F) {
            assert_eq!(e4m3(e4m3_value(code)), code);
        }
        assert!(e4m3_value(0x7F).is_nan() && e4m3_value(0xFF).is_nan());
    }

    #[test]
    fn e2m1_rounds_to_nearest_even_and_saturates() {
        check_nearest(&[0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], e2m1);
        assert_eq!((e2m1(7.0), e2m1(-f32::INFINITY), e2m1(-0.0), e2m1(-1.0), e2m1(f32::NAN)), (7, 15, 8, 10, 7));
    }
}
