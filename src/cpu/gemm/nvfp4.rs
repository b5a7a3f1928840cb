//! NVFP4 rows to rows of the compute type, block by block through a table: a scale and a code name one of 4096 numbers, all of them exact
//! in every compute type.

use std::sync::LazyLock;

use half::{bf16, f16};

use super::mxfp4::Expand;
use super::InstructionSet;
use crate::cpu::narrow::e4m3_value;
use crate::cpu::Element;
use crate::quant::e2m1;
use crate::quant::nvfp4::BLOCK;

/// Columns of a block.
pub(super) const COLUMNS: usize = BLOCK;

type Table<T> = [[T; 16]; 256];

fn table<T: Element>() -> Table<T> {
    std::array::from_fn(|scale| {
        let scale = e4m3_value(scale as u8);
        // NOTE: the sign of a NaN that arithmetic makes is not specified.
        e2m1::VALUES.map(|value| T::from_f32(if scale.is_nan() { f32::from_bits(0x7fc0_0000) } else { value * scale }))
    })
}

/// An element type that NVFP4 is expanded to.
pub(super) trait Expandable: Element {
    fn table() -> &'static Table<Self>;

    /// The fastest of an instruction set. Blocks have 16 elements, scales are e4m3.
    fn expand_nvfp4(_set: InstructionSet) -> Expand {
        scalar::<Self>
    }
}

macro_rules! expandable {
    ($type:ty, $($wide:path)?) => {
        impl Expandable for $type {
            fn table() -> &'static Table<$type> {
                static TABLE: LazyLock<Table<$type>> = LazyLock::new(table);
                &TABLE
            }

            $(
                #[cfg(target_arch = "x86_64")]
                fn expand_nvfp4(set: InstructionSet) -> Expand {
                    match set {
                        InstructionSet::Avx512Bf16 | InstructionSet::Avx512 => $wide,
                        _ => scalar::<$type>,
                    }
                }
            )?
        }
    };
}

expandable!(bf16, x86::avx512_16::<bf16>);
expandable!(f16, x86::avx512_16::<f16>);
expandable!(f32,);

/// # Safety
/// The pointers hold `8 * blocks` bytes of codes, `blocks` scales and room for `16 * blocks` elements.
unsafe fn scalar<T: Expandable>(codes: *const u8, scales: *const u8, blocks: usize, out: *mut u8) {
    // SAFETY: the caller's contract.
    let (codes, scales, out) = unsafe {
        (
            std::slice::from_raw_parts(codes.cast::<[u8; BLOCK / 2]>(), blocks),
            std::slice::from_raw_parts(scales, blocks),
            std::slice::from_raw_parts_mut(out.cast::<[[T; 2]; BLOCK / 2]>(), blocks),
        )
    };
    let table = T::table();
    for ((codes, &scale), out) in codes.iter().zip(scales).zip(out) {
        let values = &table[scale as usize];
        for (code, out) in codes.iter().zip(out) {
            *out = [values[(code & 15) as usize], values[(code >> 4) as usize]];
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::{Expandable, BLOCK};

    /// Two blocks at a time.
    ///
    /// # Safety
    /// As for [`super::scalar`] with AVX-512 F and BW; `T` has two bytes.
    #[target_feature(enable = "avx512f,avx512bw")]
    pub unsafe fn avx512_16<T: Expandable>(codes: *const u8, scales: *const u8, blocks: usize, out: *mut u8) {
        let table = T::table();
        // SAFETY: the caller's contract.
        unsafe {
            // The fifth bit of an index names the second block's numbers.
            let second = _mm512_inserti64x4::<1>(_mm512_setzero_si512(), _mm256_set1_epi16(16));
            let values = |i: usize| _mm256_loadu_si256(table[*scales.add(i) as usize].as_ptr().cast());
            for i in (0..blocks / 2 * 2).step_by(2) {
                let values = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(values(i)), values(i + 1));
                let bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(codes.add(i * BLOCK / 2).cast()));
                let spread = _mm512_or_si512(bytes, _mm512_slli_epi32::<12>(bytes));
                let index = _mm512_or_si512(_mm512_and_si512(spread, _mm512_set1_epi16(15)), second);
                let numbers = _mm512_permutexvar_epi16(index, values);
                _mm512_storeu_si512(out.cast::<T>().add(i * BLOCK).cast(), numbers);
            }
            if blocks % 2 == 1 {
                let last = blocks - 1;
                super::scalar::<T>(
                    codes.add(last * BLOCK / 2),
                    scales.add(last),
                    1,
                    out.cast::<T>().add(last * BLOCK).cast(),
                );
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every scale with every code, by its definition and by every instruction set.
    fn check<T: Expandable>(bits: impl Fn(T) -> u32) {
        let blocks = 257;
        let scales: Vec<u8> = (0..blocks).map(|i| i as u8).collect();
        let codes: Vec<u8> = (0..blocks * BLOCK / 2).map(|i| (2 * (i % 8) + 16 * (2 * (i % 8) + 1)) as u8).collect();
        for set in InstructionSet::ALL.into_iter().filter(|set| set.is_available()) {
            let mut out = vec![T::from_f32(7.0); blocks * BLOCK];
            // SAFETY: sizes as documented; the set is available.
            unsafe { T::expand_nvfp4(set)(codes.as_ptr(), scales.as_ptr(), blocks, out.as_mut_ptr().cast()) };
            for (i, &got) in out.iter().enumerate() {
                let exact = e4m3_value(scales[i / BLOCK]) * e2m1::VALUES[i % BLOCK];
                assert_eq!(got.to_f32().is_nan(), exact.is_nan());
                if !exact.is_nan() {
                    assert_eq!((got.to_f32(), bits(got)), (exact, bits(T::from_f32(exact))), "{set:?} {i}");
                }
            }
        }
    }

    #[test]
    fn numbers_are_exact() {
        check::<f32>(f32::to_bits);
        check::<f16>(|x| x.to_bits().into());
        check::<bf16>(|x| x.to_bits().into());
    }
}
