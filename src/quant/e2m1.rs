//! Numbers of the OCP Microscaling (MX) formats v1.0: four-bit elements e2m1 and their block scales E8M0.

/// Value of each e2m1 code: sign, two exponent bits, one mantissa bit. Code 8 is -0.
pub const VALUES: [f32; 16] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// Value of an E8M0 byte: 2^(byte - 127), and NaN for 255. Byte 0 is 2^-127, a denormal.
pub const fn scale(e8m0: u8) -> f32 {
    f32::from_bits(match e8m0 {
        0 => 1 << 22,
        255 => 0x7fc0_0000,
        byte => (byte as u32) << 23,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scales_are_powers_of_two() {
        for byte in 0..255u8 {
            assert_eq!(f64::from(scale(byte)), 2f64.powi(i32::from(byte) - 127));
        }
        assert!(scale(255).is_nan());
    }
}
