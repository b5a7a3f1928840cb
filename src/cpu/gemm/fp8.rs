//! The GEMM of e4m3 weights and tokens. They are expanded to bf16, which holds them exactly, and multiplied 128 columns at a time. The
//! products of each 128 columns are multiplied by their two scales and added to fp32 sums.

use std::cell::RefCell;
use std::sync::LazyLock;

use half::bf16;

use super::{Block, Line, Operands, Panel, BLOCK_ROWS, BLOCK_TOKENS, MAX_PANEL_COLUMNS};
use crate::cpu::narrow::e4m3_value;
use crate::quant::fp8::GROUP;

static VALUES: LazyLock<[bf16; 256]> =
    LazyLock::new(|| std::array::from_fn(|code| bf16::from_f32(e4m3_value(code as u8))));

thread_local! {
    /// Room for a panel's weight rows and a group of tokens. The thread keeps it, because every panel of a layer needs about as much.
    static EXPANDED: RefCell<Vec<Line>> = const { RefCell::new(Vec::new()) };
}

/// Elements of a cache line.
const LINE: usize = size_of::<Line>() / size_of::<bf16>();

/// # Safety
/// `codes` holds `k` bytes, and `out` has room for `k` elements.
unsafe fn expand(codes: *const u8, k: usize, out: &mut [Line]) {
    // SAFETY: the caller's contract; a line is plain bytes.
    let (codes, out) = unsafe {
        (std::slice::from_raw_parts(codes, k), std::slice::from_raw_parts_mut(out.as_mut_ptr().cast::<bf16>(), k))
    };
    let values = &*VALUES;
    for (out, &code) in out.iter_mut().zip(codes) {
        *out = values[code as usize];
    }
}

/// Computes a panel of one tile.
///
/// # Safety
/// The contract of [`Panel::run`] holds; `x`, `x_scales`, `weights` and `block_scales` are operands of fp8, and the output is bf16.
pub(super) unsafe fn run(panel: &Panel, block: Block) {
    EXPANDED.with_borrow_mut(|room| {
        // SAFETY: the caller's contract.
        unsafe { multiply(panel, block, room) }
    });
}

/// # Safety
/// The contract of [`Panel::run`] holds, and the operands are fp8; see [`run`].
unsafe fn multiply(panel: &Panel, block: Block, room: &mut Vec<Line>) {
    let (p, rows) = (panel.p, panel.rows());
    // Rows of tokens are whole groups; rows of weights may end inside a group.
    let k = p.k as usize;
    let (groups, token_stride) = (k.div_ceil(GROUP), k.next_multiple_of(GROUP));
    // Lines of a row. The number is odd, so that rows of a power of two do not share their places in a cache.
    let stride = k.div_ceil(LINE) | 1;
    let weight_lines = rows.next_multiple_of(BLOCK_ROWS) * stride;
    if room.len() < weight_lines + BLOCK_TOKENS * stride {
        room.resize(weight_lines + BLOCK_TOKENS * stride, Line([0; 64]));
    }
    let (weights, tokens) = room.split_at_mut(weight_lines);
    let mut weight_scales = [std::ptr::null::<f32>(); 2 * MAX_PANEL_COLUMNS + BLOCK_ROWS];
    for row in (0..rows).step_by(BLOCK_ROWS) {
        for (i, expert_row) in panel.expert_rows(row).into_iter().enumerate() {
            // SAFETY: this is a row of this expert's weights, by the caller's contract.
            unsafe { expand(p.weights.add(expert_row * k), k, &mut weights[(row + i) * stride..]) };
            let scales = panel.block_of_scales((row + i).min(rows - 1)) * groups;
            weight_scales[row + i] = p.block_scales.cast::<f32>().wrapping_add(scales);
        }
    }
    // SAFETY: the caller's contract.
    let bias = unsafe { panel.bias(panel.tile.expert as usize * p.rows as usize) };
    let count = panel.tile.count as usize;
    let group = count.div_ceil(count.div_ceil(BLOCK_TOKENS));
    let at = |lines: &[Line], row: usize, column: usize| {
        lines.as_ptr().wrapping_add(row * stride).cast::<bf16>().wrapping_add(column).cast::<u8>()
    };
    for first in (0..count).step_by(group) {
        let (first_place, members) = (panel.tile.first as usize + first, group.min(count - first));
        let mut token_scales = [std::ptr::null::<f32>(); BLOCK_TOKENS];
        for (i, scales) in token_scales[..members].iter_mut().enumerate() {
            // SAFETY: the caller's contract; the place is in the tile.
            unsafe {
                let row = panel.x_number(first_place + i);
                expand(p.x.add(row * token_stride), k, &mut tokens[i * stride..]);
                *scales = p.x_scales.add(row * groups);
            }
        }
        let mut sums = [[0.0; 2 * MAX_PANEL_COLUMNS]; BLOCK_TOKENS];
        for row in (0..rows).step_by(BLOCK_ROWS) {
            let mut block_sums = [[0.0f32; BLOCK_ROWS]; BLOCK_TOKENS];
            for k_group in 0..groups {
                let addresses = std::array::from_fn(|i| at(weights, row + i, k_group * GROUP));
                let token_rows: [_; BLOCK_TOKENS] = std::array::from_fn(|i| at(tokens, i, k_group * GROUP));
                let operands = Operands {
                    weights: addresses,
                    next_weights: addresses,
                    tokens: &token_rows[..members],
                    k: GROUP.min(k - k_group * GROUP),
                };
                // SAFETY: all rows hold this group of columns.
                let products = unsafe { block(&operands) };
                for (i, (sums, products)) in block_sums[..members].iter_mut().zip(&products).enumerate() {
                    for (j, (sum, product)) in sums.iter_mut().zip(products).enumerate() {
                        // SAFETY: there is a scale for each group.
                        *sum +=
                            product * unsafe { *token_scales[i].add(k_group) * *weight_scales[row + j].add(k_group) };
                    }
                }
            }
            for (sums, block_sums) in sums.iter_mut().zip(&block_sums) {
                sums[row..row + BLOCK_ROWS].copy_from_slice(block_sums);
            }
        }
        for (i, sums) in sums[..members].iter_mut().enumerate() {
            // SAFETY: the caller's contract; the place is in the tile.
            unsafe { panel.write::<bf16>(first_place + i, sums, bias.as_ref()) }
        }
    }
}
