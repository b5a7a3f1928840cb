//! MXFP4 rows to rows of the compute type, block by block through a table: a scale and a code name one of 4096 numbers.

use half::{bf16, f16};

use super::InstructionSet;
use crate::quant::e2m1;
use crate::quant::mxfp4::{Float, BLOCK};

/// The numbers of each scale: code times scale, rounded to nearest, at most the largest finite number. Exact in fp32 and bf16 but for the
/// scales 2^126 and 2^127, and in fp16 from 2^-23 to 2^13. All NaN with scale 255.
type Table<T> = [[T; 16]; 256];

/// Expands blocks that follow each other in memory.
///
/// # Safety
/// The instructions are there; the pointers hold `16 * blocks` bytes of codes, `blocks` scales and room for `32 * blocks` elements.
pub(super) type Expand = unsafe fn(codes: *const u8, scales: *const u8, blocks: usize, out: *mut u8);

/// An element type that MXFP4 is expanded to.
pub(super) trait Expandable: Float {
    const TABLE: &'static Table<Self>;

    /// The fastest of an instruction set.
    fn expand(set: InstructionSet) -> Expand;
}

const fn value(scale: usize, code: usize, max: f32) -> f32 {
    // NOTE: the sign of a NaN that arithmetic makes is not specified.
    if scale == 255 {
        f32::from_bits(0x7fc0_0000)
    } else {
        (e2m1::VALUES[code] * e2m1::scale(scale as u8)).clamp(-max, max)
    }
}

macro_rules! expandable {
    ($type:ty, $from_f32:path, $avx512:path, $avx2:path) => {
        impl Expandable for $type {
            const TABLE: &'static Table<$type> = {
                const fn table() -> Table<$type> {
                    let mut table = [[$from_f32(0.0); 16]; 256];
                    let mut i = 0;
                    while i < 256 * 16 {
                        table[i / 16][i % 16] = $from_f32(value(i / 16, i % 16, <$type as Float>::MAX));
                        i += 1;
                    }
                    table
                }
                static TABLE: Table<$type> = table();
                &TABLE
            };

            fn expand(set: InstructionSet) -> Expand {
                match set {
                    #[cfg(target_arch = "x86_64")]
                    InstructionSet::Avx512Bf16 | InstructionSet::Avx512 => $avx512,
                    #[cfg(target_arch = "x86_64")]
                    InstructionSet::Avx2 => $avx2,
                    _ => scalar::<$type>,
                }
            }
        }
    };
}

const fn same(x: f32) -> f32 {
    x
}

expandable!(bf16, bf16::from_f32_const, x86::avx512_16::<bf16>, x86::avx2_16::<bf16>);
expandable!(f16, f16::from_f32_const, x86::avx512_16::<f16>, x86::avx2_16::<f16>);
expandable!(f32, same, x86::avx512_32, scalar::<f32>);

/// # Safety
/// As for [`Expand`].
unsafe fn scalar<T: Expandable>(codes: *const u8, scales: *const u8, blocks: usize, out: *mut u8) {
    // SAFETY: the caller's contract.
    let (codes, scales, out) = unsafe {
        (
            std::slice::from_raw_parts(codes.cast::<[u8; BLOCK / 2]>(), blocks),
            std::slice::from_raw_parts(scales, blocks),
            std::slice::from_raw_parts_mut(out.cast::<[[T; 2]; BLOCK / 2]>(), blocks),
        )
    };
    for ((codes, &scale), out) in codes.iter().zip(scales).zip(out) {
        let values = &T::TABLE[scale as usize];
        for (code, out) in codes.iter().zip(out) {
            *out = [values[(code & 15) as usize], values[(code >> 4) as usize]];
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::{Expandable, BLOCK};

    /// # Safety
    /// As for [`super::Expand`] with AVX-512 F and BW; `T` has two bytes.
    #[target_feature(enable = "avx512f,avx512bw")]
    pub unsafe fn avx512_16<T: Expandable>(codes: *const u8, scales: *const u8, blocks: usize, out: *mut u8) {
        // SAFETY: the caller's contract.
        unsafe {
            for i in 0..blocks {
                let values = _mm256_loadu_si256(T::TABLE[*scales.add(i) as usize].as_ptr().cast());
                let bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(codes.add(i * BLOCK / 2).cast()));
                // Each 32-bit lane: the low nibble at bit 0, the high one at bit 16. Of a 16-bit index the permutation reads five bits,
                // and the fifth chooses between two equal tables.
                let index = _mm512_or_si512(bytes, _mm512_slli_epi32::<12>(bytes));
                let values = _mm512_permutexvar_epi16(index, _mm512_broadcast_i64x4(values));
                _mm512_storeu_si512(out.cast::<T>().add(i * BLOCK).cast(), values);
            }
        }
    }

    /// # Safety
    /// As for [`super::Expand`] to fp32 with AVX-512 F.
    #[target_feature(enable = "avx512f")]
    pub unsafe fn avx512_32(codes: *const u8, scales: *const u8, blocks: usize, out: *mut u8) {
        // SAFETY: the caller's contract.
        unsafe {
            for i in 0..blocks {
                let values = _mm512_loadu_ps(f32::TABLE[*scales.add(i) as usize].as_ptr());
                let [first, second] = nibbles(codes.add(i * BLOCK / 2));
                for (half, index) in [first, second].into_iter().enumerate() {
                    let values = _mm512_permutexvar_ps(_mm512_cvtepu8_epi32(index), values);
                    _mm512_storeu_ps(out.cast::<f32>().add(i * BLOCK + 16 * half), values);
                }
            }
        }
    }

    /// # Safety
    /// As for [`super::Expand`] with AVX2; `T` has two bytes.
    #[target_feature(enable = "avx2")]
    pub unsafe fn avx2_16<T: Expandable>(codes: *const u8, scales: *const u8, blocks: usize, out: *mut u8) {
        // SAFETY: the caller's contract.
        unsafe {
            // Even bytes first: the low bytes of the sixteen numbers, then the high ones.
            let apart = _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
            for i in 0..blocks {
                let values = T::TABLE[*scales.add(i) as usize].as_ptr().cast::<__m128i>();
                let a = _mm_shuffle_epi8(_mm_loadu_si128(values), apart);
                let b = _mm_shuffle_epi8(_mm_loadu_si128(values.add(1)), apart);
                let (low, high) = (_mm_unpacklo_epi64(a, b), _mm_unpackhi_epi64(a, b));
                for (half, index) in nibbles(codes.add(i * BLOCK / 2)).into_iter().enumerate() {
                    let (low, high) = (_mm_shuffle_epi8(low, index), _mm_shuffle_epi8(high, index));
                    let out = out.cast::<T>().add(i * BLOCK + 16 * half).cast::<__m128i>();
                    _mm_storeu_si128(out, _mm_unpacklo_epi8(low, high));
                    _mm_storeu_si128(out.add(1), _mm_unpackhi_epi8(low, high));
                }
            }
        }
    }

    /// The 32 codes of a block, a byte each, in their order.
    ///
    /// # Safety
    /// `codes` holds 16 bytes.
    #[inline(always)]
    unsafe fn nibbles(codes: *const u8) -> [__m128i; 2] {
        // SAFETY: the caller's contract; SSE2 is part of the architecture.
        unsafe {
            let (bytes, mask) = (_mm_loadu_si128(codes.cast()), _mm_set1_epi8(15));
            let (low, high) = (_mm_and_si128(bytes, mask), _mm_and_si128(_mm_srli_epi16::<4>(bytes), mask));
            [_mm_unpacklo_epi8(low, high), _mm_unpackhi_epi8(low, high)]
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The number by its definition, rounded once; exact for these exponents.
    fn check<T: Expandable>(exact: std::ops::RangeInclusive<i32>) {
        for scale in 0..=255u8 {
            for (code, got) in T::TABLE[scale as usize].iter().enumerate() {
                let (got, exponent) = (f64::from(got.to_f32()), i32::from(scale) - 127);
                let sign = if code < 8 { 1.0 } else { -1.0 };
                let expected = sign * [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][code % 8] * 2f64.powi(exponent);
                if scale == 255 {
                    assert!(got.is_nan());
                    continue;
                }
                let max = f64::from(T::MAX);
                let rounded = f64::from(T::from_f32(expected.clamp(-max, max) as f32).to_f32());
                assert_eq!((got, got.is_sign_negative()), (rounded, code >= 8), "{code} x 2^{exponent}");
                assert!(!exact.contains(&exponent) || got == expected, "{code} x 2^{exponent}");
            }
        }
    }

    #[test]
    fn tables() {
        check::<f32>(-127..=125);
        check::<bf16>(-127..=125);
        check::<f16>(-23..=13);
    }

    /// Every scale with every pair of codes, by every instruction set.
    fn instruction_sets_agree<T: Expandable>(bits: impl Fn(T) -> u32) {
        let blocks = 256 * 16;
        let scales: Vec<u8> = (0..blocks).map(|i| (i / 16) as u8).collect();
        let codes: Vec<u8> = (0..blocks * BLOCK / 2).map(|i| i as u8).collect();
        for set in InstructionSet::ALL.into_iter().filter(|set| set.is_available()) {
            let mut out = vec![T::from_f32(7.0); blocks * BLOCK];
            // SAFETY: sizes as documented; the set is available.
            unsafe { T::expand(set)(codes.as_ptr(), scales.as_ptr(), blocks, out.as_mut_ptr().cast()) };
            for (i, &got) in out.iter().enumerate() {
                let code = codes[i / 2] >> (4 * (i % 2)) & 15;
                assert_eq!(bits(got), bits(T::TABLE[scales[i / BLOCK] as usize][code as usize]), "{set:?} {i}");
            }
        }
    }

    #[test]
    fn instructions() {
        instruction_sets_agree::<f32>(f32::to_bits);
        instruction_sets_agree::<f16>(|x| x.to_bits().into());
        instruction_sets_agree::<bf16>(|x| x.to_bits().into());
    }
}
