use super::{assert_close, Random, Tensor, DTYPES};
use crate::{
    cpu,
    params::{CombineParams, Dtype},
};

struct Case {
    dtype: Dtype,
    tokens: usize,
    top_k: usize,
    hidden: usize,
    weighted: bool,
    keep_slots: bool,
    scale: f32,
}

fn check(c: &Case, random: &mut Random) {
    let slots = c.tokens * c.top_k;
    let y = Tensor::random(c.dtype, random, slots * c.hidden, 1.0);
    let weights = random.uniforms(slots);
    // Every fourth slot is skipped, the others are permuted.
    let place_of_slot: Vec<i32> =
        (0..slots).map(|s| if s % 4 == 1 { -1 } else { ((s * 7 + 3) % slots) as i32 }).collect();
    let rows = if c.keep_slots { slots } else { c.tokens };
    let mut out = Tensor::unset(c.dtype, rows * c.hidden);
    let p = CombineParams {
        y: y.bytes.as_ptr(),
        place_of_slot: place_of_slot.as_ptr(),
        weights: if c.weighted { weights.as_ptr() } else { std::ptr::null() },
        out: out.bytes.as_mut_ptr(),
        tokens: c.tokens as i32,
        top_k: c.top_k as i32,
        hidden: c.hidden as i32,
        scale: c.scale,
        keep_slots: c.keep_slots,
        columns: 1,
    };
    // SAFETY: the buffers above have the documented shapes.
    unsafe { cpu::combine(&p, c.dtype) };
    for row in 0..rows {
        let slots = if c.keep_slots { row..row + 1 } else { row * c.top_k..(row + 1) * c.top_k };
        for column in 0..c.hidden {
            let terms = slots.clone().filter(|&s| place_of_slot[s] >= 0).map(|s| {
                let weight = if c.weighted { f64::from(weights[s]) } else { 1.0 };
                weight * y.get(place_of_slot[s] as usize * c.hidden + column)
            });
            let expected = f64::from(c.scale) * terms.sum::<f64>();
            assert_close(out.get(row * c.hidden + column), expected, c.dtype, &(row, column));
        }
    }
}

#[test]
fn all_forms() {
    let mut random = Random(2);
    for dtype in DTYPES {
        for (tokens, top_k, hidden) in [(1, 8, 2048), (5, 1, 7), (33, 4, 1100), (0, 4, 16)] {
            for (weighted, keep_slots, scale) in [(true, false, 1.0), (false, false, 2.5), (true, true, 2.5)] {
                check(&Case { dtype, tokens, top_k, hidden, weighted, keep_slots, scale }, &mut random);
            }
        }
    }
}
