//! The arithmetic of a fused all-reduce: the sum of every rank's rows, residual, RMSNorm and quantisation, row by row.
//!
//! Contributions are added in rank order in fp32 and rounded once, so every rank gets the same bits. The order of additions in the norm
//! depends on the hidden size and dtype alone.

use crate::parallel::*;

use super::narrow::e4m3;
use super::{for_dtype, Element, Shared};
use crate::params::Dtype;
pub use crate::quant::nvfp4::ScaleLayout;
use crate::quant::nvfp4::{amax, power_of_two_above, quantize_block, BLOCK};

/// The form in which a row of the norm is quantised.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Quantise {
    None,
    /// e4m3 of value x (1 / scale).
    Fp8 {
        scale: f32,
    },
    /// Pairs of e2m1 codes, the first in the low nibble, with one e4m3 scale per 16 values: e4m3(scale x amax / 6).
    Nvfp4 {
        scale: f32,
        layout: ScaleLayout,
    },
    /// e4m3 with a power-of-two scale per `group` values: max(amax / 448, 1e-10) rounded up. The scale of group g is its exponent byte, in
    /// byte g % 4 of column g / 4. Columns are int32 and lie `stride` apart.
    Groups {
        group: usize,
        stride: usize,
    },
    /// e4m3 with one fp32 scale for each row: max(amax / 448, 2^-9 / 448).
    PerToken,
}

/// The rows of one call. Pointers are null if the pattern has no such tensor.
pub struct ReduceRows {
    /// The [tokens, hidden] of each rank, in rank order.
    pub parts: Vec<*const u8>,
    pub tokens: usize,
    pub hidden: usize,
    pub output: *mut u8,
    pub residual_in: *const u8,
    pub gamma: *const u8,
    pub residual_out: *mut u8,
    pub norm_out: *mut u8,
    pub quant_out: *mut u8,
    pub scale_out: *mut u8,
    pub epsilon: f32,
    pub weight_bias: f32,
    pub quantise: Quantise,
    /// On GPUs, one fp32 that counts in place of the number in `quantise`.
    pub scale_factor: *const f32,
}

/// Replaces any NaN by the one that GPU conversions give, so that the payload of a NaN does not depend on the order of operands.
pub fn canonical(x: f32) -> f32 {
    if x.is_nan() {
        f32::from_bits(0x7FFF_FFFF)
    } else {
        x
    }
}

fn round<T: Element>(x: f32) -> T {
    T::from_f32(canonical(x))
}

/// Computes all outputs of all rows.
///
/// # Safety
/// Pointers that are not null must be valid for the shape; outputs are apart from each other and either apart from inputs or, element for
/// element, the same memory as an input of the same dtype.
pub unsafe fn reduce_rows(p: &ReduceRows, dtype: Dtype) {
    let blocks = p.hidden / BLOCK;
    match p.quantise {
        Quantise::Nvfp4 { layout, .. } if !p.scale_out.is_null() => {
            // SAFETY: scale_out has this many bytes, by the caller's contract. The padding stays zero; the scales of the rows are written
            // below.
            unsafe { p.scale_out.write_bytes(0, layout.bytes(p.tokens, blocks)) }
        }
        Quantise::Groups { group, stride } if p.tokens > 0 => {
            // SAFETY: every column but the last is `stride` long, and the last one ends with the last token.
            unsafe { p.scale_out.write_bytes(0, 4 * ((p.hidden / group).div_ceil(4) * stride - (stride - p.tokens))) }
        }
        _ => {}
    }
    let (shared, hidden) = (Shared(p), p.hidden);
    // SAFETY: the caller's contract is unchanged, and each row is written by one task.
    for_dtype!(dtype, T => (0..p.tokens).into_par_iter().for_each_init(
        || (vec![0.0f32; hidden], vec![0.0f32; hidden.div_ceil(32)]),
        |(row_values, group_sums), row| unsafe { reduce_row::<T>(shared.get(), row, row_values, group_sums) },
    ))
}

/// # Safety
/// The pointers in `p` are valid for the shape; see [`reduce_rows`]. No other task writes this row.
unsafe fn reduce_row<T: Element>(p: &ReduceRows, row: usize, values: &mut [f32], group_sums: &mut [f32]) {
    let first = row * p.hidden;
    // SAFETY: `i` is below the number of elements of the caller's tensor.
    let load = |from: *const u8, i: usize| unsafe { (*from.cast::<T>().add(i)).to_f32() };
    // SAFETY: `i` is below the number of elements of the caller's tensor, and only this task writes this row.
    let store = |to: *mut u8, i: usize, x: T| unsafe { *to.cast::<T>().add(i) = x };
    for (i, value) in values.iter_mut().enumerate() {
        let mut sum = load(p.parts[0], first + i);
        for &part in &p.parts[1..] {
            sum += load(part, first + i);
        }
        *value = round::<T>(sum).to_f32();
    }
    for (i, value) in values.iter_mut().enumerate() {
        // The output may be residual_in itself, so each element is read before it is written.
        let residual = if p.residual_in.is_null() { 0.0 } else { load(p.residual_in, first + i) };
        if !p.output.is_null() {
            store(p.output, first + i, round(*value));
        }
        let sum: T = round(*value + residual);
        *value = sum.to_f32();
        if !p.residual_out.is_null() {
            store(p.residual_out, first + i, sum);
        }
    }
    if p.residual_in.is_null() {
        return;
    }
    if p.norm_out.is_null() && p.quant_out.is_null() {
        return;
    }
    let mean = sum_of_squares(values, 16 / size_of::<T>(), group_sums) * (1.0 / p.hidden as f32);
    let scale = 1.0 / (mean + p.epsilon).sqrt();
    for (i, value) in values.iter_mut().enumerate() {
        let norm: T = round(*value * scale * (p.weight_bias + load(p.gamma, i)));
        *value = norm.to_f32();
        if !p.norm_out.is_null() {
            store(p.norm_out, first + i, norm);
        }
    }
    if !p.quant_out.is_null() {
        // SAFETY: the caller's contract.
        unsafe { quantise_row(p, row, values) }
    }
}

/// Adds squares in the same tree as the kernels. Each lane adds `chunk` values (16 bytes of the dtype) in order, and a butterfly adds 32
/// lanes. Then lane l adds groups l, l + 32, ..., and a butterfly adds the lanes again.
fn sum_of_squares(values: &[f32], chunk: usize, group_sums: &mut [f32]) -> f32 {
    let groups = values.len().div_ceil(32 * chunk);
    for (group, sum) in values.chunks(32 * chunk).zip(group_sums.iter_mut()) {
        let mut lanes = [0.0f32; 32];
        for (lane, values) in lanes.iter_mut().zip(group.chunks(chunk)) {
            *lane = values.iter().fold(0.0, |sum: f32, x| x.mul_add(*x, sum));
        }
        *sum = butterfly(lanes);
    }
    let mut lanes = [0.0f32; 32];
    for (i, sum) in group_sums[..groups].iter().enumerate() {
        lanes[i % 32] += sum;
    }
    butterfly(lanes)
}

fn butterfly(mut lanes: [f32; 32]) -> f32 {
    for distance in [16, 8, 4, 2, 1] {
        for lane in 0..distance {
            lanes[lane] += lanes[lane + distance];
        }
    }
    lanes[0]
}

/// # Safety
/// The pointers in `p` are valid for the shape; see [`reduce_rows`]. No other task writes this row.
unsafe fn quantise_row(p: &ReduceRows, row: usize, values: &[f32]) {
    let hidden = p.hidden;
    let bytes = if matches!(p.quantise, Quantise::Nvfp4 { .. }) { hidden / 2 } else { hidden };
    // SAFETY: the slice is this row of quant_out, which no other task writes.
    let out = unsafe { std::slice::from_raw_parts_mut(p.quant_out.add(row * bytes), bytes) };
    match p.quantise {
        Quantise::None => {}
        Quantise::Fp8 { scale } => {
            let inverse = 1.0 / scale;
            for (out, x) in out.iter_mut().zip(values) {
                *out = e4m3(x * inverse);
            }
        }
        Quantise::PerToken => {
            let scale = (amax(values) / 448.0).max(1.0 / 512.0 / 448.0);
            for (out, x) in out.iter_mut().zip(values) {
                *out = e4m3(x / scale);
            }
            // SAFETY: scale_out has one fp32 for each row.
            unsafe { *p.scale_out.cast::<f32>().add(row) = scale }
        }
        Quantise::Groups { group, stride } => {
            for (g, (out, values)) in out.chunks_mut(group).zip(values.chunks(group)).enumerate() {
                let scale = power_of_two_above((amax(values) / 448.0).max(1e-10));
                for (out, x) in out.iter_mut().zip(values) {
                    *out = e4m3(x / scale);
                }
                // SAFETY: the address is byte g % 4 of the int32 of this row in column g / 4.
                unsafe { *p.scale_out.add((g / 4 * stride + row) * 4 + g % 4) = (scale.to_bits() >> 23) as u8 }
            }
        }
        Quantise::Nvfp4 { scale, layout } => {
            for (block, (out, values)) in out.chunks_mut(BLOCK / 2).zip(values.chunks(BLOCK)).enumerate() {
                let code = quantize_block(values, scale, false, out);
                // SAFETY: the address is the scale of this block.
                unsafe { *p.scale_out.add(layout.offset(row, block, hidden / BLOCK)) = code }
            }
        }
    }
}

/// The contribution of one rank in the MoE patterns.
pub struct Contribution {
    /// Rows of experts' outputs.
    pub rows: *const u8,
    /// Row of slot `t * slots + j`, or -1 if the slot has none. If the pointer is null, slot j of token t is row `j * tokens + t`.
    pub row_of_slot: *const i32,
    pub weights: *const u8,
    /// None means that all weights are 1.
    pub weight_dtype: Option<Dtype>,
    /// Rows of the shared expert, [tokens, hidden], which are added last. Null if there are none.
    pub shared: *const u8,
    /// Sums in slot order in fp32. Products are rounded before they are added, and sums are rounded once.
    pub out: *mut u8,
    pub tokens: usize,
    pub slots: usize,
    pub hidden: usize,
}

/// # Safety
/// Pointers must be valid for the shape, row numbers below the number of rows, and `out` apart from everything read.
pub unsafe fn contribute(p: &Contribution, dtype: Dtype) {
    let (shared, hidden) = (Shared(p), p.hidden);
    // SAFETY: the caller's contract is unchanged, and each row of `out` is written by one task.
    for_dtype!(dtype, T => (0..p.tokens).into_par_iter().for_each_init(
        || vec![0.0f32; hidden],
        |sums, token| unsafe { contribute_row::<T>(shared.get(), token, sums) },
    ))
}

/// # Safety
/// The pointers in `p` are valid for the shape; see [`contribute`]. No other task writes this token's row of `out`.
unsafe fn contribute_row<T: Element>(p: &Contribution, token: usize, sums: &mut [f32]) {
    sums.fill(0.0);
    // SAFETY: the slice is a row of one of the caller's tensors.
    let row = |from: *const u8, row: usize| unsafe {
        std::slice::from_raw_parts(from.cast::<T>().add(row * p.hidden), p.hidden)
    };
    for slot in 0..p.slots {
        // Without a table, rows and weights lie expert by expert.
        let (place, weight_at) = if p.row_of_slot.is_null() {
            (slot * p.tokens + token, slot * p.tokens + token)
        } else {
            let at = token * p.slots + slot;
            // SAFETY: the table has tokens x slots numbers.
            let Ok(place) = usize::try_from(unsafe { *p.row_of_slot.add(at) }) else { continue };
            (place, at)
        };
        let weight = match p.weight_dtype {
            None => 1.0,
            Some(dtype) => for_dtype!(dtype, W => {
                // SAFETY: there are tokens x slots weights of this type.
                unsafe { (*p.weights.cast::<W>().add(weight_at)).to_f32() }
            }),
        };
        for (sum, x) in sums.iter_mut().zip(row(p.rows, place)) {
            *sum += weight * x.to_f32();
        }
    }
    if !p.shared.is_null() {
        for (sum, x) in sums.iter_mut().zip(row(p.shared, token)) {
            *sum += x.to_f32();
        }
    }
    // SAFETY: only this task writes this row.
    let out = unsafe { std::slice::from_raw_parts_mut(p.out.cast::<T>().add(token * p.hidden), p.hidden) };
    for (out, &sum) in out.iter_mut().zip(sums.iter()) {
        *out = round(sum);
    }
}
