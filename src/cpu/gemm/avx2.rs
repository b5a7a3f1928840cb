//! The block kernel of AVX2, FMA and F16C: 3 x 4 accumulators, 8 products for each instruction.

use std::arch::x86_64::*;

use half::{bf16, f16};

use super::{Operands, Sums, BLOCK_ROWS, BLOCK_TOKENS};
use crate::cpu::Element;

/// Tokens that the sixteen registers have room for.
const TOKENS_AT_ONCE: usize = 3;
const LANES: usize = 8;

/// Eight elements as fp32.
pub(super) trait Load: Element {
    const ZERO: Self;

    /// # Safety
    /// The CPU must have AVX2 and F16C; `data` holds 8 elements.
    unsafe fn load(data: *const Self) -> __m256;

    /// The first `count` elements, then zeros.
    ///
    /// # Safety
    /// The CPU must have AVX2 and F16C; `data` holds `count` elements, at most 8.
    #[inline(always)]
    unsafe fn load_some(data: *const Self, count: usize) -> __m256 {
        // SAFETY: the caller's contract.
        unsafe {
            if count == LANES {
                return Self::load(data);
            }
            let mut some = [Self::ZERO; LANES];
            std::ptr::copy_nonoverlapping(data, some.as_mut_ptr(), count);
            Self::load(some.as_ptr())
        }
    }
}

impl Load for f32 {
    const ZERO: Self = 0.0;

    #[inline(always)]
    unsafe fn load(data: *const Self) -> __m256 {
        // SAFETY: the caller's contract.
        unsafe { _mm256_loadu_ps(data) }
    }
}

impl Load for f16 {
    const ZERO: Self = f16::ZERO;

    #[inline(always)]
    unsafe fn load(data: *const Self) -> __m256 {
        // SAFETY: the caller's contract.
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(data.cast())) }
    }
}

impl Load for bf16 {
    const ZERO: Self = bf16::ZERO;

    #[inline(always)]
    unsafe fn load(data: *const Self) -> __m256 {
        // SAFETY: the caller's contract.
        unsafe {
            let widened = _mm256_cvtepu16_epi32(_mm_loadu_si128(data.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(widened))
        }
    }
}

/// # Safety
/// The CPU must have AVX2, FMA and F16C; every row holds `k` elements of `T`.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn block<T: Load>(o: &Operands) -> Sums {
    let mut out = [[0.0; BLOCK_ROWS]; BLOCK_TOKENS];
    for (tokens, out) in o.tokens.chunks(TOKENS_AT_ONCE).zip(out.chunks_mut(TOKENS_AT_ONCE)) {
        // SAFETY: the caller's contract; the number of tokens is the constant.
        unsafe {
            match tokens.len() {
                1 => multiply_tokens::<T, 1>(o, tokens, out),
                2 => multiply_tokens::<T, 2>(o, tokens, out),
                _ => multiply_tokens::<T, TOKENS_AT_ONCE>(o, tokens, out),
            }
        }
    }
    out
}

/// # Safety
/// The CPU must have AVX2, FMA and F16C; every row holds `k` elements of `T`. `tokens` has `TOKENS` tokens.
#[inline(always)]
unsafe fn multiply_tokens<T: Load, const TOKENS: usize>(
    o: &Operands,
    tokens: &[*const u8],
    out: &mut [[f32; BLOCK_ROWS]],
) {
    // SAFETY: the caller's contract; no row is read beyond `k`.
    unsafe {
        let mut sums = [[_mm256_setzero_ps(); TOKENS]; BLOCK_ROWS];
        let whole = o.k / LANES * LANES;
        for at in (0..whole).step_by(LANES) {
            step::<T, TOKENS>(o, tokens, &mut sums, at, LANES);
        }
        if whole < o.k {
            step::<T, TOKENS>(o, tokens, &mut sums, whole, o.k - whole);
        }
        let [a, b, c, d] = sums;
        for (token, out) in out.iter_mut().enumerate().take(TOKENS) {
            _mm_storeu_ps(out.as_mut_ptr(), reduce([a[token], b[token], c[token], d[token]]));
        }
    }
}

/// Adds the products of elements `at .. at + count`.
///
/// # Safety
/// The CPU must have AVX2, FMA and F16C; every row holds `k` elements of `T`, and `at + count <= k`.
#[inline(always)]
unsafe fn step<T: Load, const TOKENS: usize>(
    o: &Operands,
    tokens: &[*const u8],
    sums: &mut [[__m256; TOKENS]; BLOCK_ROWS],
    at: usize,
    count: usize,
) {
    // SAFETY: the caller's contract.
    unsafe {
        let mut x = [_mm256_setzero_ps(); TOKENS];
        for (x, token) in x.iter_mut().zip(tokens) {
            *x = T::load_some(token.cast::<T>().add(at), count);
        }
        for (sums, weights) in sums.iter_mut().zip(o.weights) {
            let weights = T::load_some(weights.cast::<T>().add(at), count);
            for (sum, x) in sums.iter_mut().zip(x) {
                *sum = _mm256_fmadd_ps(x, weights, *sum);
            }
        }
    }
}

/// The sum of each register: adds the halves, then neighbours.
///
/// # Safety
/// The CPU must have AVX2.
#[inline(always)]
unsafe fn reduce([a, b, c, d]: [__m256; 4]) -> __m128 {
    // SAFETY: the caller's contract.
    unsafe { _mm_hadd_ps(_mm_hadd_ps(halve(a), halve(b)), _mm_hadd_ps(halve(c), halve(d))) }
}

/// # Safety
/// The CPU must have AVX2.
#[inline(always)]
unsafe fn halve(sum: __m256) -> __m128 {
    // SAFETY: the caller's contract.
    unsafe { _mm_add_ps(_mm256_castps256_ps128(sum), _mm256_extractf128_ps::<1>(sum)) }
}
