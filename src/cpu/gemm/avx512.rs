//! The block kernels of AVX-512: 6 x 4 accumulators, 16 (fp32) or 32 (bf16 pairs) products for each instruction.

use std::arch::x86_64::*;

use half::{bf16, f16};

use super::{Operands, Sums, BLOCK_ROWS, BLOCK_TOKENS};
use crate::cpu::Element;

/// Sixteen elements as fp32.
pub(super) trait Load: Element {
    /// # Safety
    /// The CPU must have AVX-512 F, BW and VL; `data` holds 16 elements.
    unsafe fn load(data: *const Self) -> __m512;

    /// The elements whose bit in `mask` is set, and zeros for the others.
    ///
    /// # Safety
    /// The CPU must have AVX-512 F, BW and VL; `data` holds the elements of `mask`.
    unsafe fn load_masked(mask: __mmask16, data: *const Self) -> __m512;
}

impl Load for f32 {
    #[inline(always)]
    unsafe fn load(data: *const Self) -> __m512 {
        // SAFETY: the caller's contract.
        unsafe { _mm512_loadu_ps(data) }
    }
    #[inline(always)]
    unsafe fn load_masked(mask: __mmask16, data: *const Self) -> __m512 {
        // SAFETY: the caller's contract.
        unsafe { _mm512_maskz_loadu_ps(mask, data) }
    }
}

impl Load for f16 {
    #[inline(always)]
    unsafe fn load(data: *const Self) -> __m512 {
        // SAFETY: the caller's contract.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(data.cast())) }
    }
    #[inline(always)]
    unsafe fn load_masked(mask: __mmask16, data: *const Self) -> __m512 {
        // SAFETY: the caller's contract.
        unsafe { _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, data.cast())) }
    }
}

impl Load for bf16 {
    #[inline(always)]
    unsafe fn load(data: *const Self) -> __m512 {
        // SAFETY: the caller's contract.
        unsafe { widen(_mm256_loadu_si256(data.cast())) }
    }
    #[inline(always)]
    unsafe fn load_masked(mask: __mmask16, data: *const Self) -> __m512 {
        // SAFETY: the caller's contract.
        unsafe { widen(_mm256_maskz_loadu_epi16(mask, data.cast())) }
    }
}

/// Converts bf16 to fp32: a bf16 is the upper half of the fp32 bits.
///
/// # Safety
/// The CPU must have AVX-512 F.
#[inline(always)]
unsafe fn widen(values: __m256i) -> __m512 {
    // SAFETY: the caller's contract.
    unsafe { _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(values))) }
}

/// # Safety
/// The CPU must have AVX-512 F, BW and VL; every row holds `k` elements of `T`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub(super) unsafe fn block<T: Load>(o: &Operands) -> Sums {
    // SAFETY: the caller's contract.
    unsafe { multiply::<Converted<T>>(o) }
}

/// # Safety
/// The CPU must have AVX-512 F, BW, VL and BF16; every row holds `k` bf16.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub(super) unsafe fn block_bf16(o: &Operands) -> Sums {
    // SAFETY: the caller's contract.
    unsafe { multiply::<Pairs>(o) }
}

/// One step along `k`: the contents of a register, and how two registers are multiplied and added.
trait Step {
    type Element;
    type Register: Copy;
    const ELEMENTS: usize;

    /// # Safety
    /// The CPU must have the instructions of the kernel; `data` holds `count` elements, at most `ELEMENTS`.
    unsafe fn load(data: *const Self::Element, count: usize) -> Self::Register;

    /// # Safety
    /// The CPU must have the instructions of the kernel.
    unsafe fn multiply_add(sum: __m512, a: Self::Register, b: Self::Register) -> __m512;
}

struct Converted<T>(std::marker::PhantomData<T>);

impl<T: Load> Step for Converted<T> {
    type Element = T;
    type Register = __m512;
    const ELEMENTS: usize = 16;

    #[inline(always)]
    unsafe fn load(data: *const T, count: usize) -> __m512 {
        // SAFETY: the caller's contract.
        unsafe {
            if count == 16 {
                T::load(data)
            } else {
                T::load_masked(((1u32 << count) - 1) as __mmask16, data)
            }
        }
    }
    #[inline(always)]
    unsafe fn multiply_add(sum: __m512, a: __m512, b: __m512) -> __m512 {
        // SAFETY: the caller's contract.
        unsafe { _mm512_fmadd_ps(a, b, sum) }
    }
}

struct Pairs;

impl Step for Pairs {
    type Element = bf16;
    type Register = __m512bh;
    const ELEMENTS: usize = 32;

    #[inline(always)]
    unsafe fn load(data: *const bf16, count: usize) -> __m512bh {
        // SAFETY: the caller's contract; the two vector types have the same bits.
        unsafe {
            std::mem::transmute(if count == 32 {
                _mm512_loadu_si512(data.cast())
            } else {
                _mm512_maskz_loadu_epi16((1 << count) - 1, data.cast())
            })
        }
    }
    #[inline(always)]
    unsafe fn multiply_add(sum: __m512, a: __m512bh, b: __m512bh) -> __m512 {
        // SAFETY: the caller's contract.
        unsafe { _mm512_dpbf16_ps(sum, a, b) }
    }
}

/// # Safety
/// The CPU must have the instructions of `S`; every row holds `k` elements.
#[inline(always)]
unsafe fn multiply<S: Step>(o: &Operands) -> Sums {
    // SAFETY: the caller's contract; the number of tokens is the constant.
    unsafe {
        match o.tokens.len() {
            1 => multiply_tokens::<S, 1>(o),
            2 => multiply_tokens::<S, 2>(o),
            3 => multiply_tokens::<S, 3>(o),
            4 => multiply_tokens::<S, 4>(o),
            5 => multiply_tokens::<S, 5>(o),
            _ => multiply_tokens::<S, BLOCK_TOKENS>(o),
        }
    }
}

/// # Safety
/// The CPU must have the instructions of `S`; every row holds `k` elements. There are `TOKENS` tokens.
#[inline(always)]
unsafe fn multiply_tokens<S: Step, const TOKENS: usize>(o: &Operands) -> Sums {
    // SAFETY: the caller's contract; no row is read beyond `k`.
    unsafe {
        let mut sums = [[_mm512_setzero_ps(); BLOCK_ROWS]; TOKENS];
        let whole = o.k / S::ELEMENTS * S::ELEMENTS;
        for at in (0..whole).step_by(S::ELEMENTS) {
            step::<S, TOKENS>(o, &mut sums, at, S::ELEMENTS);
        }
        if whole < o.k {
            step::<S, TOKENS>(o, &mut sums, whole, o.k - whole);
        }
        let mut out = [[0.0; BLOCK_ROWS]; BLOCK_TOKENS];
        for (out, sums) in out.iter_mut().zip(sums) {
            _mm_storeu_ps(out.as_mut_ptr(), reduce(sums));
        }
        out
    }
}

/// Adds the products of elements `at .. at + count`.
///
/// # Safety
/// The CPU must have the instructions of `S`; every row holds `k` elements, and `at + count <= k`.
#[inline(always)]
unsafe fn step<S: Step, const TOKENS: usize>(
    o: &Operands,
    sums: &mut [[__m512; BLOCK_ROWS]; TOKENS],
    at: usize,
    count: usize,
) {
    // SAFETY: the caller's contract; a prefetch may name any address.
    unsafe {
        let [a, b, c, d] = o.weights;
        let weights = [
            S::load(a.cast::<S::Element>().add(at), count),
            S::load(b.cast::<S::Element>().add(at), count),
            S::load(c.cast::<S::Element>().add(at), count),
            S::load(d.cast::<S::Element>().add(at), count),
        ];
        for next in o.next_weights {
            _mm_prefetch::<_MM_HINT_T0>(next.cast::<S::Element>().add(at).cast());
        }
        for (sums, token) in sums.iter_mut().zip(o.tokens) {
            let x = S::load(token.cast::<S::Element>().add(at), count);
            for (sum, weights) in sums.iter_mut().zip(weights) {
                *sum = S::multiply_add(*sum, x, weights);
            }
        }
    }
}

/// The sum of each register: adds the halves, then the quarters, then the elements of a quarter.
///
/// # Safety
/// The CPU must have AVX-512 F.
#[inline(always)]
unsafe fn reduce([a, b, c, d]: [__m512; 4]) -> __m128 {
    // SAFETY: the caller's contract.
    unsafe {
        let ab = _mm512_add_ps(_mm512_shuffle_f32x4::<0x44>(a, b), _mm512_shuffle_f32x4::<0xee>(a, b));
        let cd = _mm512_add_ps(_mm512_shuffle_f32x4::<0x44>(c, d), _mm512_shuffle_f32x4::<0xee>(c, d));
        let abcd = _mm512_add_ps(_mm512_shuffle_f32x4::<0x88>(ab, cd), _mm512_shuffle_f32x4::<0xdd>(ab, cd));
        let pairs = _mm512_add_ps(abcd, _mm512_permute_ps::<0x4e>(abcd));
        let sums = _mm512_add_ps(pairs, _mm512_permute_ps::<0xb1>(pairs));
        let first_of_quarters = _mm512_setr_epi32(0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
        _mm512_castps512_ps128(_mm512_permutexvar_ps(first_of_quarters, sums))
    }
}
