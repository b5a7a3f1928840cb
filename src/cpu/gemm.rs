//! Grouped GEMM: every tile's token rows times its expert's weight rows, with the activation in the epilogue.
//!
//! Work items are (tile, panel of output columns), run on many threads. A panel's weight rows stay in the second-level cache while the
//! tile's tokens pass in groups, so weights come from memory once for each tile. Weights in blocks are expanded once for each tile into a
//! buffer of the thread, just before the first group is multiplied. From there on they are rows like any other.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod fp8;
mod scalar;

use std::cell::RefCell;

use crate::parallel::*;

use super::{activation, for_dtype, Element, InstructionSet, Shared};
use crate::params::{Dtype, GroupedGemmParams, Tile, W13Layout};
use crate::quant::blocks::{Blocks, CodeRow, ExpandRow};
use crate::quant::fp8::GROUP;

/// Weight rows and token rows that a block kernel multiplies at once.
const BLOCK_ROWS: usize = 4;
const BLOCK_TOKENS: usize = 6;
/// Weight bytes of a panel.
const PANEL_BYTES: usize = 256 << 10;
const MAX_PANEL_COLUMNS: usize = 128;

/// The operands of a block kernel, which multiplies every weight row with every token row.
struct Operands<'a> {
    weights: [*const u8; BLOCK_ROWS],
    /// Rows that the next block reads. Kernels prefetch them.
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))] // scalar code prefetches nothing
    next_weights: [*const u8; BLOCK_ROWS],
    /// Token rows: 1 to [`BLOCK_TOKENS`] of them.
    tokens: &'a [*const u8],
    k: usize,
}

/// Sums of four weight rows, for each token.
type Sums = [[f32; BLOCK_ROWS]; BLOCK_TOKENS];

/// NOTE: a sum's order may depend on `k` and the kernel only. The number of tokens in a block must not change any bit.
type Block = unsafe fn(&Operands) -> Sums;

fn block_kernel<T: BlockKernels>(set: InstructionSet) -> Block {
    match set {
        #[cfg(target_arch = "x86_64")]
        InstructionSet::Avx512Bf16 => T::AVX512_BF16,
        #[cfg(target_arch = "x86_64")]
        InstructionSet::Avx512 => avx512::block::<T>,
        #[cfg(target_arch = "x86_64")]
        InstructionSet::Avx2 => avx2::block::<T>,
        _ => scalar::block::<T>,
    }
}

/// An element type with kernels for every instruction set.
#[cfg(target_arch = "x86_64")]
trait BlockKernels: avx512::Load + avx2::Load {
    const AVX512_BF16: Block = avx512::block::<Self>;
}
#[cfg(target_arch = "x86_64")]
impl BlockKernels for f32 {}
#[cfg(target_arch = "x86_64")]
impl BlockKernels for half::f16 {}
#[cfg(target_arch = "x86_64")]
impl BlockKernels for half::bf16 {
    const AVX512_BF16: Block = avx512::block_bf16;
}

#[cfg(not(target_arch = "x86_64"))]
trait BlockKernels: Element {}
#[cfg(not(target_arch = "x86_64"))]
impl<T: Element> BlockKernels for T {}

/// Runs every tile of the schedule with the best instructions of this machine. With `blocks`, weights are codes of a format that has blocks
/// (`dtype` is bf16 for MXFP8). With `x_scales`, tokens and weights are e4m3, and `dtype` (bf16) is that of the output alone.
///
/// # Safety
/// The pointers must be valid for the shapes in [`GroupedGemmParams`] and the rows that the schedule names; `x`,
/// `weights` (without `blocks`) and `out` are of type `dtype`, `out` is writable and apart from everything read, tiles do
/// not overlap, and `rows` and `out_columns` fit the activation. With `blocks`, `weights` and `blocks` are as [`Blocks`] says.
pub unsafe fn grouped_gemm(p: &GroupedGemmParams, dtype: Dtype, blocks: Option<Blocks>) {
    // SAFETY: the caller's contract. `detect` found the instruction set on this machine.
    unsafe { grouped_gemm_on(InstructionSet::detect(), p, dtype, blocks) }
}

/// Runs [`grouped_gemm`] with the given instruction set.
///
/// # Safety
/// The pointers in `p` are valid for the shapes in [`GroupedGemmParams`]; see [`grouped_gemm`]. This machine must have `set`.
pub unsafe fn grouped_gemm_on(set: InstructionSet, p: &GroupedGemmParams, dtype: Dtype, blocks: Option<Blocks>) {
    // SAFETY: the caller's contract, unchanged.
    for_dtype!(dtype, T => unsafe { grouped_gemm_typed::<T>(set, p, (dtype, blocks)) })
}

/// # Safety
/// The pointers in `p` are valid for the shapes in [`GroupedGemmParams`]; see [`grouped_gemm_on`]. The elements are of type `T`, which is
/// that of `dtype`.
unsafe fn grouped_gemm_typed<T: BlockKernels>(
    set: InstructionSet,
    p: &GroupedGemmParams,
    (dtype, blocks): (Dtype, Option<Blocks>),
) {
    // SAFETY: `tile_count` belongs to a schedule, by the caller's contract.
    let count = unsafe { *p.tile_count } as usize;
    if count == 0 {
        return;
    }
    // SAFETY: the schedule has `count` tiles, by the caller's contract.
    let tiles = unsafe { std::slice::from_raw_parts(p.tiles, count) };
    let expand = |blocks: Blocks| Expansion { set, blocks, row: (blocks.kind.expand)(dtype) };
    let (block, packed) = (block_kernel::<T>(set), blocks.map(expand));
    let rows_per_column = if activation::is_gated(p.activation.kind) { 2 } else { 1 };
    let column_bytes = rows_per_column * p.k as usize * size_of::<T>();
    let width = (PANEL_BYTES / column_bytes.max(1)).clamp(BLOCK_ROWS, MAX_PANEL_COLUMNS) / BLOCK_ROWS * BLOCK_ROWS;
    let panels = (p.out_columns as usize).div_ceil(width);
    let shared = Shared(p);
    (0..count * panels).into_par_iter().with_max_len(1).for_each(|item| {
        let panel = Panel::new(shared.get(), &tiles[item / panels], item % panels * width, width);
        // SAFETY: each (tile, panel) of `out` is written by one item. The rest is the caller's contract.
        unsafe { panel.run::<T>(block, packed) }
    });
}

/// How weights in blocks become rows of the compute type.
#[derive(Clone, Copy)]
struct Expansion {
    set: InstructionSet,
    blocks: Blocks,
    row: ExpandRow,
}

/// Some output columns of one tile.
struct Panel<'a> {
    p: &'a GroupedGemmParams,
    tile: &'a Tile,
    first_column: usize,
    columns: usize,
    gated: bool,
}

/// Sums of a panel for a token: all gate (or only) rows, then all up rows.
type PanelSums = [f32; 2 * MAX_PANEL_COLUMNS];

impl<'a> Panel<'a> {
    fn new(p: &'a GroupedGemmParams, tile: &'a Tile, first_column: usize, width: usize) -> Self {
        let columns = (p.out_columns as usize - first_column).min(width);
        Self { p, tile, first_column, columns, gated: activation::is_gated(p.activation.kind) }
    }

    /// The number of weight rows of the panel.
    fn rows(&self) -> usize {
        self.columns * if self.gated { 2 } else { 1 }
    }

    /// Row, among the expert's weights, of the panel's row `row`.
    fn weight_row(&self, row: usize) -> usize {
        let out_columns = self.p.out_columns as usize;
        let column = self.first_column + row % self.columns;
        let is_up = usize::from(row >= self.columns);
        match self.p.layout {
            _ if !self.gated => column,
            W13Layout::UpGate => column + (1 - is_up) * out_columns,
            W13Layout::Interleaved => 2 * column + is_up,
            W13Layout::GateUp64 => column / 64 * 128 + column % 64 + 64 * is_up,
            W13Layout::UpGate64 => column / 64 * 128 + column % 64 + 64 * (1 - is_up),
            _ => column + is_up * out_columns,
        }
    }

    /// Columns of a row of `out` in memory. fp8 has whole groups there, and the columns behind `out_columns` are zeros.
    fn out_stride(&self) -> usize {
        (self.p.out_columns as usize).next_multiple_of(if self.p.x_scales.is_null() { 1 } else { GROUP })
    }

    /// fp8: the block of weights, among all experts' blocks, that has the panel's row `row`. Each part of an expert's rows begins with a
    /// new block.
    fn block_of_scales(&self, row: usize) -> usize {
        let part_blocks = self.out_stride() / GROUP;
        let (parts, is_up) = (if self.gated { 2 } else { 1 }, row >= self.columns);
        let second = self.gated && is_up != (self.p.layout == W13Layout::UpGate);
        let block = (self.first_column + row % self.columns) / GROUP + usize::from(second) * part_blocks;
        self.tile.expert as usize * parts * part_blocks + block
    }

    /// # Safety
    /// The pointers are valid for the shapes in [`GroupedGemmParams`]; see [`grouped_gemm_typed`]. No other thread writes this panel's part
    /// of `out`.
    unsafe fn run<T: BlockKernels>(&self, block: Block, packed: Option<Expansion>) {
        if !self.p.x_scales.is_null() {
            // SAFETY: the caller's contract.
            return unsafe { fp8::run(self, block) };
        }
        let Some(expansion) = packed else {
            let k = self.p.k as usize;
            // SAFETY: the caller's contract; the rows are rows of this expert.
            return unsafe {
                let address = |row| self.p.weights.cast::<T>().add(row * k).cast::<u8>();
                let rows = |row| self.expert_rows(row).map(address);
                self.multiply::<T>(block, |row, _| [rows(row), rows(row + BLOCK_ROWS)])
            };
        };
        EXPANDED.with_borrow_mut(|room| {
            let mut expanded = Expanded::new::<T>(self, expansion, room);
            // SAFETY: the caller's contract.
            unsafe { self.multiply::<T>(block, |row, first| expanded.rows(row, first)) }
        });
    }

    /// Rows of all experts' weights for a block of the panel's rows. Rows beyond the last repeat the last; nobody reads their sums.
    fn expert_rows(&self, row: usize) -> [usize; BLOCK_ROWS] {
        let expert_row = self.tile.expert as usize * self.p.rows as usize;
        std::array::from_fn(|i| expert_row + self.weight_row((row + i).min(self.rows() - 1)))
    }

    /// `weight_rows` takes a row of the panel and whether the call is for the tile's first tokens. It gives the addresses of a block of
    /// rows from there on, and of the rows that the next block reads.
    ///
    /// # Safety
    /// The contract of [`Panel::run`] holds: pointers are valid, and no other thread writes this panel's part of `out`.
    unsafe fn multiply<T: BlockKernels>(
        &self,
        block: Block,
        mut weight_rows: impl FnMut(usize, bool) -> [[*const u8; BLOCK_ROWS]; 2],
    ) {
        let (k, rows) = (self.p.k as usize, self.rows());
        // SAFETY: the caller's contract.
        let bias = unsafe { self.bias(self.tile.expert as usize * self.p.rows as usize) };

        let count = self.tile.count as usize;
        let group = count.div_ceil(count.div_ceil(BLOCK_TOKENS));
        for first in (0..count).step_by(group) {
            let first_place = self.tile.first as usize + first;
            let mut tokens = [std::ptr::null(); BLOCK_TOKENS];
            let tokens = &mut tokens[..group.min(count - first)];
            for (i, token) in tokens.iter_mut().enumerate() {
                // SAFETY: the caller's contract; the place is in the tile.
                *token = unsafe { self.x_row::<T>(first_place + i) };
            }

            let mut sums = [[0.0; 2 * MAX_PANEL_COLUMNS]; BLOCK_TOKENS];
            for row in (0..rows).step_by(BLOCK_ROWS) {
                let [weights, next_weights] = weight_rows(row, first == 0);
                let operands = Operands { weights, next_weights, tokens, k };
                // SAFETY: all rows hold `k` elements of `T`, for which `block` was made.
                let block_sums = unsafe { block(&operands) };
                for (sums, block_sums) in sums.iter_mut().zip(&block_sums) {
                    sums[row..row + BLOCK_ROWS].copy_from_slice(block_sums);
                }
            }
            for (i, sums) in sums[..tokens.len()].iter_mut().enumerate() {
                // SAFETY: the caller's contract; the place is in the tile.
                unsafe { self.write::<T>(first_place + i, sums, bias.as_ref()) }
            }
        }
    }

    /// The row of `x` that belongs to a place.
    ///
    /// # Safety
    /// The pointers are valid for the shapes in [`GroupedGemmParams`]; see [`Panel::run`]. `place` is in the schedule.
    unsafe fn x_row<T>(&self, place: usize) -> *const u8 {
        // SAFETY: the caller's contract.
        unsafe { self.p.x.cast::<T>().add(self.x_number(place) * self.p.k as usize).cast() }
    }

    /// The number of the row of `x` that belongs to a place.
    ///
    /// # Safety
    /// The pointers are valid for the shapes in [`GroupedGemmParams`]; see [`Panel::run`]. `place` is in the schedule.
    unsafe fn x_number(&self, place: usize) -> usize {
        // SAFETY: the caller's contract.
        unsafe { self.slot(place).map_or(place, |slot| slot / self.p.row_divisor as usize) }
    }

    /// The slot of a place, or None if places are not mapped to slots.
    ///
    /// # Safety
    /// The pointers are valid for the shapes in [`GroupedGemmParams`]; see [`Panel::run`]. `place` is in the schedule.
    unsafe fn slot(&self, place: usize) -> Option<usize> {
        // SAFETY: the caller's contract.
        (!self.p.slot_of_place.is_null()).then(|| unsafe { *self.p.slot_of_place.add(place) } as usize)
    }

    /// The panel's bias in fp32.
    ///
    /// # Safety
    /// The pointers are valid for the shapes in [`GroupedGemmParams`]; see [`Panel::run`].
    unsafe fn bias(&self, expert_row: usize) -> Option<PanelSums> {
        if self.p.bias.is_null() {
            return None;
        }
        let mut bias = [0.0; 2 * MAX_PANEL_COLUMNS];
        for (row, bias) in bias[..self.rows()].iter_mut().enumerate() {
            let row = expert_row + self.weight_row(row);
            // SAFETY: `bias` holds one value of `bias_dtype` for each weight row.
            *bias = for_dtype!(self.p.bias_dtype, B => unsafe { *self.p.bias.cast::<B>().add(row) }.to_f32());
        }
        Some(bias)
    }

    /// The epilogue of a row. It applies the scale of the row of x, the scales of the expert or its rows, the bias, the router weight, and
    /// the activation, and rounds the result.
    ///
    /// # Safety
    /// The contract of [`Panel::run`] holds, and `place` is in the tile.
    unsafe fn write<T: Element>(&self, place: usize, sums: &mut PanelSums, bias: Option<&PanelSums>) {
        let p = self.p;
        let sums = &mut sums[..self.rows()];
        if !p.row_scales.is_null() {
            // SAFETY: there is one scale for each row of x, by the caller's contract.
            let scale = unsafe { *p.row_scales.add(self.x_number(place)) };
            sums.iter_mut().for_each(|sum| *sum *= scale);
        }
        if !p.expert_scales.is_null() && !p.x_scales.is_null() {
            for (row, sum) in sums.iter_mut().enumerate() {
                let row = self.tile.expert as usize * p.rows as usize + self.weight_row(row);
                // SAFETY: there is a scale for each row of every expert, by the caller's contract.
                *sum *= unsafe { *p.expert_scales.add(row) };
            }
        } else if !p.expert_scales.is_null() {
            let parts = if self.gated { 2 } else { 1 };
            for (part, sums) in sums.chunks_mut(self.columns).enumerate() {
                // SAFETY: there is a number for each part of every expert, by the caller's contract.
                let factor = unsafe { *p.expert_scales.add(self.tile.expert as usize * parts + part) };
                sums.iter_mut().for_each(|sum| *sum *= factor);
            }
        }
        if let Some(bias) = bias {
            sums.iter_mut().zip(bias).for_each(|(sum, bias)| *sum += bias);
        }
        if !p.slot_weights.is_null() {
            // SAFETY: there is one weight for each slot, by the caller's contract.
            let weight = unsafe { *p.slot_weights.add(self.slot(place).unwrap_or(place)) };
            sums.iter_mut().for_each(|sum| *sum *= weight);
        }
        let (gate, up) = sums.split_at_mut(self.columns);
        // SAFETY: there is one number for each expert, by the caller's contract.
        activation::apply(&unsafe { activation::of_expert(p, self.tile.expert as usize) }, gate, up);
        let (stride, end) = (self.out_stride(), self.first_column + self.columns);
        let behind = if end == p.out_columns as usize { stride - end } else { 0 };
        // SAFETY: the slice is this panel's columns of the place's row, and the last panel's slice ends with the row. Only this thread
        // writes it.
        let out = unsafe {
            let first = place * stride + self.first_column;
            std::slice::from_raw_parts_mut(p.out.cast::<T>().add(first), self.columns + behind)
        };
        let (own, zeros) = out.split_at_mut(self.columns);
        for (out, value) in own.iter_mut().zip(gate) {
            *out = T::from_f32(*value);
        }
        zeros.fill(T::from_f32(0.0));
    }
}

/// A cache line. Rows that start on one are loaded and stored in whole lines.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Line(#[allow(dead_code)] [u8; 64]);

thread_local! {
    /// Room for the expanded rows of a panel. The thread keeps it, because every panel of a layer needs about as much.
    static EXPANDED: RefCell<Vec<Line>> = const { RefCell::new(Vec::new()) };
}

/// A panel's weight rows in the compute type. If several groups of tokens read the rows, it holds all of them. Otherwise it holds one block
/// at a time, which then never leaves the first-level cache.
struct Expanded<'a> {
    panel: &'a Panel<'a>,
    expansion: Expansion,
    keep: bool,
    /// Lines of a row. The number is odd, so that rows of a power of two do not share their places in a cache.
    stride: usize,
    room: &'a mut [Line],
}

impl<'a> Expanded<'a> {
    fn new<T>(panel: &'a Panel<'a>, expansion: Expansion, room: &'a mut Vec<Line>) -> Self {
        let keep = panel.tile.count as usize > BLOCK_TOKENS;
        let columns = Self::row_blocks(panel, &expansion) * expansion.blocks.kind.columns;
        let stride = (columns * size_of::<T>()).div_ceil(size_of::<Line>()) | 1;
        let rows = if keep { panel.rows().next_multiple_of(BLOCK_ROWS) } else { BLOCK_ROWS };
        if room.len() < rows * stride {
            room.resize(rows * stride, Line([0; 64]));
        }
        Self { panel, expansion, keep, stride, room }
    }

    /// Blocks of a row that the GEMM reads.
    fn row_blocks(panel: &Panel, expansion: &Expansion) -> usize {
        (panel.p.k as usize).div_ceil(expansion.blocks.kind.columns)
    }

    /// The block of rows from the panel's row `row` on. The block is expanded now if `first`.
    ///
    /// # Safety
    /// The pointers are valid for the shapes in [`GroupedGemmParams`]; see [`Panel::run`].
    unsafe fn rows(&mut self, row: usize, first: bool) -> [[*const u8; BLOCK_ROWS]; 2] {
        let at = if self.keep { row } else { 0 };
        if first {
            let Expansion { set, blocks, row: expand } = &self.expansion;
            let (rows, count) = (self.panel.p.rows as usize, Self::row_blocks(self.panel, &self.expansion));
            for (i, row) in self.panel.expert_rows(row).into_iter().enumerate() {
                let out = self.room[(at + i) * self.stride..].as_mut_ptr().cast();
                // SAFETY: the row has codes and scales of this expert, and `new` made room for the expanded row.
                unsafe {
                    let codes = self.panel.p.weights.add(row * blocks.row_blocks * blocks.kind.code_bytes);
                    expand(*set, blocks, &CodeRow { row, rows, codes, count }, out);
                }
            }
        }
        let addresses = |at| std::array::from_fn(|i| self.room.as_ptr().wrapping_add((at + i) * self.stride).cast());
        [addresses(at), addresses(if self.keep && !first { at + BLOCK_ROWS } else { at })]
    }
}
