//! Grouped GEMM: every tile's token rows times its expert's weight rows, with the activation on the way out.
//!
//! Work items are (tile, panel of output columns), run by rayon. A panel's weight rows stay in the second-level cache
//! while the tile's tokens pass in groups, so weights come from memory once a tile.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod scalar;

use rayon::prelude::*;

use super::{activation, for_dtype, Element, Shared};
use crate::params::{Dtype, GroupedGemmParams, Tile, W13Layout};

/// Weight rows and token rows that a block kernel multiplies at once.
const BLOCK_ROWS: usize = 4;
const BLOCK_TOKENS: usize = 6;
/// Weight bytes of a panel.
const PANEL_BYTES: usize = 256 << 10;
const MAX_PANEL_COLUMNS: usize = 128;

/// The instructions a kernel is made of. All accumulate in fp32 and differ in the order of the sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InstructionSet {
    /// bf16 products in pairs (`vdpbf16ps`); fp16 and fp32 as `Avx512`.
    /// NOTE: `vdpbf16ps` takes denormal inputs as zero and flushes denormal results, whatever the mode.
    Avx512Bf16,
    /// fp16 and bf16 are converted to fp32 on their way from memory.
    Avx512,
    /// AVX2, FMA and F16C, as `Avx512`.
    Avx2,
    /// No intrinsics; products are rounded before they are added.
    Scalar,
}

impl InstructionSet {
    /// The best of this machine.
    pub fn detect() -> Self {
        Self::ALL.into_iter().find(|set| set.is_available()).unwrap_or(Self::Scalar)
    }

    /// Best first.
    pub const ALL: [Self; 4] = [Self::Avx512Bf16, Self::Avx512, Self::Avx2, Self::Scalar];

    pub fn name(self) -> &'static str {
        match self {
            Self::Avx512Bf16 => "avx512_bf16",
            Self::Avx512 => "avx512",
            Self::Avx2 => "avx2",
            Self::Scalar => "scalar",
        }
    }

    #[cfg(target_arch = "x86_64")]
    pub fn is_available(self) -> bool {
        let avx512 = || is_x86_feature_detected!("avx512bw") && is_x86_feature_detected!("avx512vl");
        match self {
            Self::Avx512Bf16 => avx512() && is_x86_feature_detected!("avx512bf16"),
            Self::Avx512 => avx512(),
            Self::Avx2 => {
                is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c")
            }
            Self::Scalar => true,
        }
    }

    #[cfg(not(target_arch = "x86_64"))]
    pub fn is_available(self) -> bool {
        self == Self::Scalar
    }
}

/// Name of the instruction set that [`grouped_gemm`] uses on this machine.
pub fn instruction_set() -> &'static str {
    InstructionSet::detect().name()
}

/// What a block kernel multiplies: every weight row with every token row.
struct Operands<'a> {
    weights: [*const u8; BLOCK_ROWS],
    /// Rows whose bytes are wanted next.
    next_weights: [*const u8; BLOCK_ROWS],
    /// 1 to [`BLOCK_TOKENS`] rows.
    tokens: &'a [*const u8],
    k: usize,
}

/// Sums of four weight rows, for each token.
type Sums = [[f32; BLOCK_ROWS]; BLOCK_TOKENS];

/// NOTE: a sum's order may depend on `k` and the kernel only. How many tokens a block has must not show in any bit.
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

/// Runs every tile of the schedule with the best instructions of this machine.
///
/// # Safety
/// The pointers must be valid for the shapes in [`GroupedGemmParams`] and the rows that the schedule names; `x`,
/// `weights` and `out` are of type `dtype`, `out` is writable and apart from everything read, tiles do not overlap, and
/// `rows` and `out_columns` fit the activation.
pub unsafe fn grouped_gemm(p: &GroupedGemmParams, dtype: Dtype) {
    // SAFETY: the caller's contract; the set was found on this machine.
    unsafe { grouped_gemm_on(InstructionSet::detect(), p, dtype) }
}

/// [`grouped_gemm`] with given instructions.
///
/// # Safety
/// As for [`grouped_gemm`], and `set` must be available.
pub unsafe fn grouped_gemm_on(set: InstructionSet, p: &GroupedGemmParams, dtype: Dtype) {
    // SAFETY: the caller's contract, unchanged.
    for_dtype!(dtype, T => unsafe { grouped_gemm_typed::<T>(set, p) })
}

/// # Safety
/// As for [`grouped_gemm_on`]; the elements are of type `T`.
unsafe fn grouped_gemm_typed<T: BlockKernels>(set: InstructionSet, p: &GroupedGemmParams) {
    // SAFETY: the schedule, by the caller's contract.
    let count = unsafe { *p.tile_count } as usize;
    if count == 0 {
        return;
    }
    // SAFETY: as above.
    let tiles = unsafe { std::slice::from_raw_parts(p.tiles, count) };
    let block = block_kernel::<T>(set);
    let rows_per_column = if activation::is_gated(p.activation.kind) { 2 } else { 1 };
    let column_bytes = rows_per_column * p.k as usize * size_of::<T>();
    let width = (PANEL_BYTES / column_bytes.max(1)).clamp(BLOCK_ROWS, MAX_PANEL_COLUMNS) / BLOCK_ROWS * BLOCK_ROWS;
    let panels = (p.out_columns as usize).div_ceil(width);
    let shared = Shared(p);
    (0..count * panels).into_par_iter().with_max_len(1).for_each(|item| {
        let panel = Panel::new(shared.get(), &tiles[item / panels], item % panels * width, width);
        // SAFETY: each (tile, panel) of `out` is written by one item; the rest is the caller's contract.
        unsafe { panel.run::<T>(block) }
    });
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

    /// Weight rows.
    fn rows(&self) -> usize {
        self.columns * if self.gated { 2 } else { 1 }
    }

    /// Row of the expert's weights of the panel's row `row`.
    fn weight_row(&self, row: usize) -> usize {
        let out_columns = self.p.out_columns as usize;
        let column = self.first_column + row % self.columns;
        let is_up = usize::from(row >= self.columns);
        match self.p.layout {
            _ if !self.gated => column,
            W13Layout::UpGate => column + (1 - is_up) * out_columns,
            W13Layout::Interleaved => 2 * column + is_up,
            _ => column + is_up * out_columns,
        }
    }

    /// # Safety
    /// As for [`grouped_gemm_typed`], and no other thread writes this panel's part of `out`.
    unsafe fn run<T: BlockKernels>(&self, block: Block) {
        let (p, k) = (self.p, self.p.k as usize);
        let expert_row = self.tile.expert as usize * p.rows as usize;
        let rows = self.rows();
        // Rows beyond the last repeat it; nobody reads their sums.
        let weight_rows = |row: usize| {
            std::array::from_fn::<_, BLOCK_ROWS, _>(|i| {
                let row = expert_row + self.weight_row((row + i).min(rows - 1));
                // SAFETY: a row of this expert's weights.
                unsafe { p.weights.cast::<T>().add(row * k).cast::<u8>() }
            })
        };
        // SAFETY: the caller's contract.
        let bias = unsafe { self.bias(expert_row) };

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
                let operands =
                    Operands { weights: weight_rows(row), next_weights: weight_rows(row + BLOCK_ROWS), tokens, k };
                // SAFETY: all rows hold `k` elements of `T`, which `block` was made for.
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
    /// As for [`Panel::run`]; `place` is in the schedule.
    unsafe fn x_row<T>(&self, place: usize) -> *const u8 {
        // SAFETY: the caller's contract.
        unsafe {
            let row = self.slot(place).map_or(place, |slot| slot / self.p.row_divisor as usize);
            self.p.x.cast::<T>().add(row * self.p.k as usize).cast()
        }
    }

    /// The slot of a place; none where places are not mapped.
    ///
    /// # Safety
    /// As for [`Panel::run`]; `place` is in the schedule.
    unsafe fn slot(&self, place: usize) -> Option<usize> {
        // SAFETY: the caller's contract.
        (!self.p.slot_of_place.is_null()).then(|| unsafe { *self.p.slot_of_place.add(place) } as usize)
    }

    /// The panel's bias in fp32.
    ///
    /// # Safety
    /// As for [`Panel::run`].
    unsafe fn bias(&self, expert_row: usize) -> Option<PanelSums> {
        if self.p.bias.is_null() {
            return None;
        }
        let mut bias = [0.0; 2 * MAX_PANEL_COLUMNS];
        for (row, bias) in bias[..self.rows()].iter_mut().enumerate() {
            let row = expert_row + self.weight_row(row);
            // SAFETY: `bias` holds one value of `bias_dtype` a weight row.
            *bias = for_dtype!(self.p.bias_dtype, B => unsafe { *self.p.bias.cast::<B>().add(row) }.to_f32());
        }
        Some(bias)
    }

    /// Bias, router weight, activation, rounding.
    ///
    /// # Safety
    /// As for [`Panel::run`]; `place` is in the tile.
    unsafe fn write<T: Element>(&self, place: usize, sums: &mut PanelSums, bias: Option<&PanelSums>) {
        let p = self.p;
        let sums = &mut sums[..self.rows()];
        if let Some(bias) = bias {
            sums.iter_mut().zip(bias).for_each(|(sum, bias)| *sum += bias);
        }
        if !p.slot_weights.is_null() {
            // SAFETY: one weight a slot, by the caller's contract.
            let weight = unsafe { *p.slot_weights.add(self.slot(place).unwrap_or(place)) };
            sums.iter_mut().for_each(|sum| *sum *= weight);
        }
        let (gate, up) = sums.split_at_mut(self.columns);
        activation::apply(&p.activation, gate, up);
        // SAFETY: this panel's columns of the place's row, which only this thread writes.
        let out = unsafe {
            let first = place * p.out_columns as usize + self.first_column;
            std::slice::from_raw_parts_mut(p.out.cast::<T>().add(first), self.columns)
        };
        for (out, value) in out.iter_mut().zip(gate) {
            *out = T::from_f32(*value);
        }
    }
}
