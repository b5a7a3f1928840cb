//! NVFP4: e2m1 elements, two in a byte with the low nibble first, one e4m3 scale for 16 of them, and a number for the whole tensor. This
//! quantisation makes MXFP4 if its scales are E8M0.

use super::blocks::{BlockKind, Blocks, CodeRow};
use super::mxfp4::Expand;
pub use super::scale_layout::ScaleLayout;
use super::{packed_as, Activations, Borders, Format, QuantSpec, Weights};
use crate::cpu::element::{for_dtype, Element};
use crate::cpu::instructions::InstructionSet;
use crate::cpu::narrow::{e2m1, e4m3, e4m3_value};
use crate::quant::e2m1::VALUES;
use crate::variants::Form;
use half::{bf16, f16};
use std::sync::LazyLock;

/// Elements that share a scale.
pub const BLOCK: usize = 16;

/// The format NVFP4. On CPUs a layer may round activations to NVFP4, too. On GPUs such layers have the format [`A4_ROW`].
pub const ROW: QuantSpec = QuantSpec {
    format: Format::Nvfp4,
    name: "nvfp4",
    weights: Weights::Nvfp4,
    block: BLOCK as i64,
    inner_block: BLOCK as i64,
    bare_tensors: false,
    ..packed_as(Form::Nvfp4, Borders::FourBitsOfOneWidth)
};

/// The format on GPUs whose activations are rounded to NVFP4, too.
pub const A4_ROW: QuantSpec =
    QuantSpec { format: Format::Nvfp4A4, name: "nvfp4-a4", activations: Activations::Nvfp4, ..ROW };

pub static BLOCKS: BlockKind = BlockKind {
    columns: BLOCK,
    code_bytes: BLOCK / 2,
    scale_bytes: |blocks, rows| blocks.layout.bytes(rows, blocks.row_blocks),
    expand: |dtype| for_dtype!(dtype, T => expand_row::<T>),
};

/// The largest magnitude. NaN does not count.
pub fn amax(values: &[f32]) -> f32 {
    values.iter().fold(0.0, |max, x| x.abs().max(max))
}

/// `x` rounded up to a power of two. Infinity stays, and NaN becomes 0.
pub fn power_of_two_above(x: f32) -> f32 {
    let bits = x.to_bits();
    f32::from_bits(if bits & 0x7F_FFFF == 0 { bits } else { bits.wrapping_add(0x80_0000) & 0x7F80_0000 })
}

/// Quantises values that share a scale to e2m1, and returns the byte of that scale. The scale is `scale` x amax / 6, in e4m3, or in E8M0
/// (rounded up) with `powers`. Values are multiplied by `scale` over that scale; all become 0 if it is 0.
pub fn quantize_block(values: &[f32], scale: f32, powers: bool, codes: &mut [u8]) -> u8 {
    let wanted = scale * (amax(values) * (1.0 / 6.0));
    let (byte, narrow) = if powers {
        let power = power_of_two_above(wanted).min(2f32.powi(127));
        ((power.to_bits() >> 23) as u8, power)
    } else {
        let code = e4m3(wanted);
        (code, e4m3_value(code))
    };
    let factor = if narrow != 0.0 { scale / narrow } else { 0.0 };
    for (code, pair) in codes.iter_mut().zip(values.chunks(2)) {
        *code = e2m1(pair[0] * factor) | e2m1(pair[1] * factor) << 4;
    }
    byte
}

/// The numbers of each scale and code. All of them are exact in every compute type.
type Table<T> = [[T; 16]; 256];

fn table<T: Element>() -> Table<T> {
    std::array::from_fn(|scale| {
        let scale = e4m3_value(scale as u8);
        // NOTE: the sign of a NaN that arithmetic makes is not specified.
        VALUES.map(|value| T::from_f32(if scale.is_nan() { f32::from_bits(0x7fc0_0000) } else { value * scale }))
    })
}

/// An element type that NVFP4 is expanded to.
trait Expandable: Element {
    fn table() -> &'static Table<Self>;

    /// The fastest way to expand blocks with an instruction set. Blocks have 16 elements, scales are e4m3.
    fn expander(_set: InstructionSet) -> Expand {
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
                fn expander(set: InstructionSet) -> Expand {
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

    /// Expands two blocks at a time.
    ///
    /// # Safety
    /// The CPU must have AVX-512 F and BW. The pointers are valid as [`super::scalar`] requires; `T` has two bytes.
    #[target_feature(enable = "avx512f,avx512bw")]
    pub unsafe fn avx512_16<T: Expandable>(codes: *const u8, scales: *const u8, blocks: usize, out: *mut u8) {
        let table = T::table();
        // SAFETY: the caller's contract.
        unsafe {
            // The fifth bit of an index chooses the second block's numbers.
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

/// Expands a row. Its scales lie in the layout of `blocks`.
///
/// # Safety
/// The contract of [`super::blocks::ExpandRow`] holds: codes, scales and `out` are valid for the row. The elements are of type `T`.
unsafe fn expand_row<T: Expandable>(set: InstructionSet, blocks: &Blocks, row: &CodeRow, out: *mut u8) {
    let (expand, layout) = (T::expander(set), blocks.layout);
    let scales = blocks.scales.wrapping_add(row.row / row.rows * blocks.scale_bytes(row.rows));
    // In tiles, the scales of four neighbours of a row lie together.
    let together = if layout == ScaleLayout::Linear { row.count } else { 4 };
    for first in (0..row.count).step_by(together) {
        let size = (row.count - first).min(together);
        // SAFETY: the caller's contract.
        unsafe {
            let scales = scales.add(layout.offset(row.row % row.rows, first, blocks.row_blocks));
            expand(row.codes.add(first * BLOCK / 2), scales, size, out.cast::<T>().add(first * BLOCK).cast());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks every scale with every code against their definition, for every instruction set.
    fn check<T: Expandable>(bits: impl Fn(T) -> u32) {
        let blocks = 257;
        let scales: Vec<u8> = (0..blocks).map(|i| i as u8).collect();
        let codes: Vec<u8> = (0..blocks * BLOCK / 2).map(|i| (2 * (i % 8) + 16 * (2 * (i % 8) + 1)) as u8).collect();
        for set in InstructionSet::ALL.into_iter().filter(|set| set.is_available()) {
            let mut out = vec![T::from_f32(7.0); blocks * BLOCK];
            // SAFETY: the buffers have the documented sizes, and the set is available.
            unsafe { T::expander(set)(codes.as_ptr(), scales.as_ptr(), blocks, out.as_mut_ptr().cast()) };
            for (i, &got) in out.iter().enumerate() {
                let exact = e4m3_value(scales[i / BLOCK]) * VALUES[i % BLOCK];
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

    #[test]
    fn powers_of_two() {
        for (x, power) in [(0.0, 0.0), (1.0, 1.0), (1.1, 2.0), (0.26, 0.5), (f32::INFINITY, f32::INFINITY)] {
            assert_eq!(power_of_two_above(x), power);
        }
        for nan in [f32::NAN, -f32::NAN] {
            assert_eq!(power_of_two_above(nan), 0.0);
        }
    }

    #[test]
    fn a_block() {
        let mut codes = [9; 8];
        let values: [f32; BLOCK] = std::array::from_fn(|i| [6.0, -3.0, 0.5, 0.0][i % 4]);
        assert_eq!(quantize_block(&values, 1.0, false, &mut codes), e4m3(1.0));
        assert_eq!(codes, [0xD7, 0x01, 0xD7, 0x01, 0xD7, 0x01, 0xD7, 0x01]);
        // A larger scale of the tensor goes into the scale of the block.
        assert_eq!(quantize_block(&values, 448.0, false, &mut codes), e4m3(448.0));
        assert_eq!(codes[0], 0xD7);
        assert_eq!(quantize_block(&[0.0; BLOCK], 1.0, false, &mut codes), 0);
        assert_eq!(codes, [0; 8]);
        // 7 / 6 is rounded up to 2.
        assert_eq!(quantize_block(&[7.0; BLOCK], 1.0, true, &mut codes), 128);
        assert_eq!(codes, [0x66; 8]);
        assert_eq!(quantize_block(&[0.0; BLOCK], 1.0, true, &mut codes), 0);
    }
}
