//! The block kernel without intrinsics, for any CPU.

use super::{Operands, Sums, BLOCK_ROWS, BLOCK_TOKENS};
use crate::cpu::Element;

/// Partial sums of a dot product. They are independent, so that compilers can vectorise the loop.
const LANES: usize = 8;

/// # Safety
/// Every row holds `k` elements of `T`.
pub(super) unsafe fn block<T: Element>(o: &Operands) -> Sums {
    let mut out = [[0.0; BLOCK_ROWS]; BLOCK_TOKENS];
    for (token, out) in o.tokens.iter().zip(&mut out) {
        for (weight, out) in o.weights.iter().zip(out) {
            // SAFETY: the caller's contract.
            let (x, w) = unsafe {
                (
                    std::slice::from_raw_parts(token.cast::<T>(), o.k),
                    std::slice::from_raw_parts(weight.cast::<T>(), o.k),
                )
            };
            *out = dot(x, w);
        }
    }
    out
}

fn dot<T: Element>(x: &[T], w: &[T]) -> f32 {
    let mut lanes = [0.0; LANES];
    let ((x, x_rest), (w, w_rest)) = (x.as_chunks::<LANES>(), w.as_chunks::<LANES>());
    for (x, w) in x.iter().zip(w) {
        for (lane, (x, w)) in lanes.iter_mut().zip(x.iter().zip(w)) {
            *lane += x.to_f32() * w.to_f32();
        }
    }
    for (lane, (x, w)) in lanes.iter_mut().zip(x_rest.iter().zip(w_rest)) {
        *lane += x.to_f32() * w.to_f32();
    }
    let [a, b, c, d, e, f, g, h] = lanes;
    ((a + e) + (c + g)) + ((b + f) + (d + h))
}
