//! MXFP4 (OCP Microscaling Formats 1.0): e2m1 elements, two a byte with the low nibble first, and one E8M0 scale for 32 of them.

use super::blocks::{byte_a_block, BlockKind, Blocks, CodeRow};
use super::packed::Packers;
use super::{
    e2m1, packed_as, packed_e4m3, Activations, Borders, Format, PackedGemms, Packing, QuantSpec, Weights, E4M3_SPEED,
};
use crate::cpu::element::{for_dtype, Element};
use crate::cpu::instructions::InstructionSet;
use crate::parallel::*;
use crate::variants::{self, packed, Form};
use half::{bf16, f16};

/// Elements that share a scale.
pub const BLOCK: usize = 32;

/// The format MXFP4.
pub const ROW: QuantSpec = QuantSpec {
    format: Format::Mxfp4,
    name: "mxfp4",
    weights: Weights::Mxfp4,
    block: BLOCK as i64,
    inner_block: BLOCK as i64,
    ..packed_as(Form::Mxfp4, Borders::FourBits)
};

/// The kernels that pack.
pub const PACKERS: Packers =
    Packers { peak: variants::quant::MXFP4_PEAK.kernel(), pack: variants::quant::MXFP4_PACK.kernel() };

/// The format whose activations are quantised to e4m3, with one scale for each row.
pub const A8_ROW: QuantSpec = QuantSpec {
    format: Format::Mxfp4A8,
    name: "mxfp4-a8",
    activations: Activations::E4m3Rows,
    speed: E4M3_SPEED,
    packing: Some(Packing {
        form: Form::Mxfp4,
        gemms: PackedGemms::Apart(&packed::MXFP4_E4M3_TILES),
        borders: Borders::E4m3,
    }),
    ..ROW
};

pub static BLOCKS: BlockKind = BlockKind {
    columns: BLOCK,
    code_bytes: BLOCK / 2,
    scale_bytes: byte_a_block,
    expand: |dtype| for_dtype!(dtype, T => expand_row::<T>),
};

const BYTES: usize = BLOCK / 2;
/// Blocks that one task converts.
const TASK: usize = 2048;

const INFINITY: u32 = 0x7f80_0000;

/// The way in which a block's scale is rounded to a power of two. `amax` is the block's largest magnitude.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rounding {
    /// 2^ceil(log2(amax / 6)): nothing is clipped. This is triton_kernels' ROUND_UP, its default.
    Up,
    /// 2^(floor(log2(amax)) - 2), the rule of the OCP specification (section 6.3): magnitudes above 6 scales are clipped. This is
    /// triton_kernels' ROUND_DOWN.
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

/// Quantises whole blocks of `x` to 16 bytes of codes and a scale byte each. Elements are rounded to nearest, ties to even, and saturate at
/// 6 scales.
///
/// NOTE: blocks with NaN or infinity come out as from triton_kernels' `downcast_to_mxfp_torch`; see `non_finite`.
pub fn quantize<T: Float>(x: &[T], rounding: Rounding, codes: &mut [u8], scales: &mut [u8]) {
    let tasks = x.par_chunks(TASK * BLOCK).zip(codes.par_chunks_mut(TASK * BYTES)).zip(scales.par_chunks_mut(TASK));
    tasks.for_each(|((x, codes), scales)| {
        let blocks = x.as_chunks::<BLOCK>().0.iter().zip(codes.as_chunks_mut::<BYTES>().0).zip(scales);
        for ((x, codes), scale) in blocks {
            *scale = quantize_block(&x.map(T::to_f32), rounding, codes);
        }
    });
}

fn quantize_block(x: &[f32; BLOCK], rounding: Rounding, codes: &mut [u8]) -> u8 {
    // Magnitudes order like their bits; NaN is above infinity.
    let amax = x.iter().fold(0, |max, x| max.max(x.to_bits() & !(1 << 31)));
    let scale = scale_byte(amax, rounding);
    if amax >= INFINITY {
        pack(codes, |i| non_finite(x[i]));
        return scale;
    }
    // The inverse is 0 for the scale byte 0, because amax / 6 has underflowed.
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

/// The code of the nearest e2m1 magnitude. At a midpoint the even code wins: the comparison is `>` if that is the lower code, and `>=` if
/// it is the upper one.
fn nearest(y: f32) -> u32 {
    u32::from(y > 0.25)
        + u32::from(y >= 0.75)
        + u32::from(y > 1.25)
        + u32::from(y >= 1.75)
        + u32::from(y > 2.5)
        + u32::from(y >= 3.5)
        + u32::from(y > 5.0)
}

/// The code of an element in a block with NaN or infinity: x * 0, saturated. In these products NaN keeps its sign, and infinity becomes
/// x86's default NaN, which is negative.
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

/// Dequantises whole blocks to `out`: element times scale, rounded once, saturated at the largest finite value. The scale byte 255 gives
/// NaN.
pub fn dequantize<T: Float>(codes: &[u8], scales: &[u8], out: &mut [T]) {
    let tasks = codes.par_chunks(TASK * BYTES).zip(scales.par_chunks(TASK)).zip(out.par_chunks_mut(TASK * BLOCK));
    tasks.for_each(|((codes, scales), out)| {
        let blocks = codes.as_chunks::<BYTES>().0.iter().zip(scales).zip(out.as_chunks_mut::<BLOCK>().0);
        for ((codes, &scale), out) in blocks {
            let scale = e2m1::scale(scale);
            // All codes of a NaN block get one NaN, because the sign of a product with NaN is the processor's choice.
            let number = |x: f32| T::from_f32(if scale.is_nan() { scale } else { (x * scale).clamp(-T::MAX, T::MAX) });
            let values = e2m1::VALUES.map(number);
            for (out, code) in out.as_chunks_mut().0.iter_mut().zip(codes) {
                *out = [code & 15, code >> 4].map(|code| values[usize::from(code)]);
            }
        }
    });
}

/// The numbers of each scale: code times scale, rounded to nearest, at most the largest finite number. They are exact in fp32 and bf16
/// except for the scales 2^126 and 2^127, and in fp16 from 2^-23 to 2^13. They are all NaN with scale 255.
type Table<T> = [[T; 16]; 256];

/// Expands blocks that follow each other in memory.
///
/// # Safety
/// The CPU must have the instructions. The pointers hold `16 * blocks` bytes of codes, `blocks` scales and room for `32 * blocks` elements.
pub type Expand = unsafe fn(codes: *const u8, scales: *const u8, blocks: usize, out: *mut u8);

/// An element type that MXFP4 is expanded to.
trait Expandable: Float {
    const TABLE: &'static Table<Self>;

    /// The fastest way to expand blocks with an instruction set.
    fn expander(set: InstructionSet) -> Expand;
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

            fn expander(set: InstructionSet) -> Expand {
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
/// The pointers hold `16 * blocks` bytes of codes, `blocks` scales and room for `32 * blocks` elements; see [`Expand`].
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
    /// The CPU must have AVX-512 F and BW. The pointers are valid as [`super::Expand`] says; `T` has two bytes.
    #[target_feature(enable = "avx512f,avx512bw")]
    pub unsafe fn avx512_16<T: Expandable>(codes: *const u8, scales: *const u8, blocks: usize, out: *mut u8) {
        // SAFETY: the caller's contract.
        unsafe {
            for i in 0..blocks {
                let values = _mm256_loadu_si256(T::TABLE[*scales.add(i) as usize].as_ptr().cast());
                let bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(codes.add(i * BLOCK / 2).cast()));
                // Each 32-bit lane has the low nibble at bit 0 and the high one at bit 16. The permutation reads five bits of a 16-bit
                // index, and the fifth chooses between two equal tables.
                let index = _mm512_or_si512(bytes, _mm512_slli_epi32::<12>(bytes));
                let values = _mm512_permutexvar_epi16(index, _mm512_broadcast_i64x4(values));
                _mm512_storeu_si512(out.cast::<T>().add(i * BLOCK).cast(), values);
            }
        }
    }

    /// # Safety
    /// The CPU must have AVX-512 F. The pointers are valid as [`super::Expand`] says, with fp32 elements.
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
    /// The CPU must have AVX2. The pointers are valid as [`super::Expand`] says; `T` has two bytes.
    #[target_feature(enable = "avx2")]
    pub unsafe fn avx2_16<T: Expandable>(codes: *const u8, scales: *const u8, blocks: usize, out: *mut u8) {
        // SAFETY: the caller's contract.
        unsafe {
            // The shuffle puts even bytes first: the low bytes of the sixteen numbers, then the high ones.
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

    /// The 32 codes of a block in their order, one byte each.
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

/// Expands a row. Its small scales are raised to the expert's least scale.
///
/// # Safety
/// The contract of [`super::blocks::ExpandRow`] holds: codes, scales and `out` are valid for the row. The elements are of type `T`.
unsafe fn expand_row<T: Expandable>(set: InstructionSet, blocks: &Blocks, row: &CodeRow, out: *mut u8) {
    let (expand, codes) = (T::expander(set), row.codes);
    // SAFETY: the caller's contract.
    unsafe {
        let scales = blocks.scales.add(row.row * blocks.row_blocks);
        let least = if blocks.least.is_null() { 0 } else { *blocks.least.add(row.row / row.rows) };
        let small = |&scale: &u8| scale < least;
        if !std::slice::from_raw_parts(scales, row.count).iter().any(small) {
            return expand(codes, scales, row.count, out);
        }
        for i in 0..row.count {
            let (codes, scale) = (codes.add(i * BYTES), scales.add(i));
            let out = out.cast::<T>().add(i * BLOCK).cast();
            if small(&*scale) {
                let raised = packed_e4m3::raise(&*codes.cast(), *scale, least);
                expand(raised.as_ptr(), &least, 1, out);
            } else {
                expand(codes, scale, 1, out);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks the numbers against their definition, rounded once. They are exact for the exponents `exact`.
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

    /// Checks every scale with every pair of codes, for every instruction set.
    fn instruction_sets_agree<T: Expandable>(bits: impl Fn(T) -> u32) {
        let blocks = 256 * 16;
        let scales: Vec<u8> = (0..blocks).map(|i| (i / 16) as u8).collect();
        let codes: Vec<u8> = (0..blocks * BLOCK / 2).map(|i| i as u8).collect();
        for set in InstructionSet::ALL.into_iter().filter(|set| set.is_available()) {
            let mut out = vec![T::from_f32(7.0); blocks * BLOCK];
            // SAFETY: the buffers have the documented sizes, and the set is available.
            unsafe { T::expander(set)(codes.as_ptr(), scales.as_ptr(), blocks, out.as_mut_ptr().cast()) };
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

    /// Checks every e2m1 magnitude, the midpoints between them and the floats next to those, against the distances.
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

    /// Numbers that are exact in MXFP4 come back, with every scale and in every dtype that holds them.
    #[test]
    fn exact_values_come_back() {
        let codes: Vec<u8> = (0..16).map(|i| i | (15 - i) << 4).collect();
        for byte in 0..=255u8 {
            let mut x = [0f32; BLOCK];
            dequantize(&codes, &[byte], &mut x);
            assert!(x.iter().all(|x| x.is_nan() == (byte == 255)));
            let (mut again, mut scale) = ([0; BYTES], [0]);
            quantize(&x, Rounding::Down, &mut again, &mut scale);
            // The scale 2^-127 is below the scales that quantisation gives, and 6 * 2^127 is beyond f32.
            if (1..=252).contains(&byte) {
                assert_eq!((&again[..], scale[0]), (&codes[..], byte));
            }
        }
    }
}
