//! The kernels of csrc/quant/pack_mxfp4.cuh on host memory.

use super::{slice, slice_mut};
use crate::parallel::*;
use crate::params::{PackMxfp4Params, W13Layout};
use crate::quant::packed::{self, Extent, CODE_BYTES, SCALE_BYTES};
use crate::quant::packed_e4m3 as e4m3;
use crate::variants::Form;

const SCALED: usize = 32;
const SCALED_BYTES: usize = SCALED / 2;

/// The weight row of fragment row g (`half` 0) or g + 8 (1) of a slice. None if that fragment row is padding.
fn source_row(p: &PackMxfp4Params, slice: usize, g: usize, half: usize) -> Option<usize> {
    if !p.gated {
        return Some(16 * slice + 8 * half + g).filter(|&row| row < p.used_rows as usize);
    }
    let (column, columns) = (8 * slice + g, p.rows as usize / 2);
    (column < columns).then_some(match p.layout {
        W13Layout::Interleaved => 2 * column + half,
        W13Layout::GateUp => half * columns + column,
        _ => (1 - half) * columns + column,
    })
}

/// Numbers of elements that the tensors of `p` have.
struct Sizes {
    codes: usize,
    scales: usize,
    packed_codes: usize,
    packed_scales: usize,
    experts: usize,
}

impl Sizes {
    fn of(p: &PackMxfp4Params) -> Sizes {
        let (extent, experts) = (Extent::of(Form::Mxfp4, p), p.experts as usize);
        let scales = experts * p.rows as usize * p.row_blocks as usize;
        let (packed_codes, packed_scales) = (extent.code_bytes(), extent.scale_bytes());
        Sizes { codes: scales * SCALED_BYTES, scales, packed_codes, packed_scales, experts }
    }
}

fn shift_of(expert_scale: f32) -> i32 {
    (expert_scale.to_bits() >> 23) as i32 - 127
}

/// Calls `f(quad, half, weight row)` for the rows of a block. The row is fragment row g or g + 8 of the quad.
fn for_each_row(p: &PackMxfp4Params, tile: usize, mut f: impl FnMut(usize, usize, usize)) {
    for quad in 0..32 {
        for half in 0..2 {
            if let Some(row) = source_row(p, 4 * tile + quad / 8, quad % 8, half) {
                f(quad, half, row);
            }
        }
    }
}

/// Names the places of the 32 codes that share a scale. Calls `f(k16 step of the two, lane of the quad, register, side of the register,
/// code)`.
fn for_each_code(half: usize, mut f: impl FnMut(usize, usize, usize, usize, usize)) {
    for nibble in 0..SCALED {
        let (step, column) = (nibble / 16, nibble % 16);
        f(step, column % 8 / 2, column / 8 * 2 + half, column % 2, nibble);
    }
}

/// Writes the experts' factors, then codes and scales.
///
/// # Safety
/// The pointers are valid as `PackMxfp4Params` says. Nobody writes to codes and scales meanwhile, and nobody else uses the memory of the
/// packed tensors and of the factors.
pub unsafe fn pack_mxfp4(p: &PackMxfp4Params) {
    let sizes = Sizes::of(p);
    // SAFETY: the caller's contract. Codes and scales are only read, so they may overlap.
    let (codes, scales) = unsafe { (slice(p.codes, sizes.codes), slice(p.scales, sizes.scales)) };
    // SAFETY: the caller's contract. These tensors are apart from everything else.
    let (packed_codes, packed_scales, expert_scales) = unsafe {
        (
            slice_mut(p.packed_codes, sizes.packed_codes),
            slice_mut(p.packed_scales, sizes.packed_scales),
            slice_mut(p.expert_scales, sizes.experts),
        )
    };
    let (extent, row_blocks, k) = (Extent::of(Form::Mxfp4, p), p.row_blocks as usize, p.k as usize);
    let (row_tiles, k_blocks) = (extent.row_tiles() as usize, extent.k_blocks() as usize);
    expert_scales.par_iter_mut().enumerate().for_each(|(expert, expert_scale)| {
        let rows = (0..p.used_rows as usize).map(|row| (expert * p.rows as usize + row) * row_blocks);
        let used = rows.flat_map(|first| &scales[first..][..k.div_ceil(SCALED)]);
        let largest = used.copied().filter(|&scale| scale != 255).max().unwrap_or(0);
        *expert_scale =
            if p.e4m3 { e4m3::expert_scale(e4m3::peak(largest)) } else { 2f32.powi(packed::shift(largest)) };
    });
    if packed_codes.is_empty() {
        return;
    }
    let expert_scales = &*expert_scales;
    let tiles =
        packed_codes.par_chunks_mut(k_blocks * CODE_BYTES).zip(packed_scales.par_chunks_mut(k_blocks * SCALE_BYTES));
    tiles.enumerate().for_each(|(i, (tile_codes, tile_scales))| {
        let (expert, tile) = (i / row_tiles, i % row_tiles);
        let shift = shift_of(expert_scales[expert]);
        let peak = (expert_scales[expert].to_bits() >> 23) as i32 + 6;
        let blocks =
            tile_codes.as_chunks_mut::<CODE_BYTES>().0.iter_mut().zip(tile_scales.as_chunks_mut::<SCALE_BYTES>().0);
        for (block, (block_codes, block_scales)) in blocks.enumerate() {
            let (mut words, mut fields) = ([[[0u32; 4]; 4]; 32], [[[0u32; 2]; 2]; 32]);
            let mut levels = [[0u8; 4]; 32];
            for_each_row(p, tile, |quad, half, row| {
                for group in (0..2).filter(|group| 2 * block + group < k.div_ceil(SCALED)) {
                    let scaled = (expert * p.rows as usize + row) * row_blocks + 2 * block + group;
                    if p.e4m3 {
                        let least = e4m3::least(peak);
                        levels[quad][2 * group + half] = e4m3::scale_byte(scales[scaled].max(least), peak);
                        let steps = u32::from(least.saturating_sub(scales[scaled]));
                        let bytes = &codes[scaled * SCALED_BYTES..][..SCALED_BYTES];
                        // Column c of the 32 belongs to lane c % 16 / 4, and is column 4 (c / 16) + c % 4 of that lane.
                        for c in (0..SCALED).filter(|c| (2 * block + group) * SCALED + c < k) {
                            let code = match scales[scaled] {
                                255 => e4m3::NAN_CODE,
                                _ => e4m3::coarser(u32::from(bytes[c / 2] >> (c % 2 * 4) & 15), steps),
                            };
                            words[quad][c % 16 / 4][2 * group + half] |= e4m3::place(code, c / 16 * 4 + c % 4);
                        }
                        continue;
                    }
                    fields[quad][group][half] = packed::scale_field(scales[scaled], shift);
                    // The field 255 is infinity in bf16. The code 0 makes the product NaN.
                    if scales[scaled] == 255 {
                        continue;
                    }
                    let bytes = &codes[scaled * SCALED_BYTES..][..SCALED_BYTES];
                    for_each_code(half, |step, lane, register, side, nibble| {
                        if (2 * block + group) * SCALED + nibble < k {
                            let code = u32::from(bytes[nibble / 2] >> (nibble % 2 * 4) & 15);
                            words[quad][lane][2 * group + step] |= packed::place(code, register, side);
                        }
                    });
                }
            });
            for (to, word) in block_codes.as_chunks_mut().0.iter_mut().zip(words.as_flattened().as_flattened()) {
                *to = word.to_le_bytes();
            }
            for (quad, to) in block_scales.as_chunks_mut().0.iter_mut().enumerate() {
                let [first, second] = fields[quad];
                let fields = packed::place_scales(first, second).to_le_bytes();
                *to = if p.e4m3 { levels[quad] } else { fields };
            }
        }
    });
}

/// The inverse of `pack_mxfp4`: writes codes and scales of every row, in whole scaled groups.
///
/// # Safety
/// The pointers are valid as `PackMxfp4Params` says. Nobody writes to the packed tensors and the factors meanwhile, and nobody else uses
/// the memory of codes and scales.
pub unsafe fn unpack_mxfp4(p: &PackMxfp4Params) {
    let sizes = Sizes::of(p);
    // SAFETY: the caller's contract. The packed tensors and the factors are only read, so they may overlap.
    let (packed_codes, packed_scales, expert_scales) = unsafe {
        (
            slice(p.packed_codes, sizes.packed_codes),
            slice(p.packed_scales, sizes.packed_scales),
            slice(p.expert_scales, sizes.experts),
        )
    };
    // SAFETY: the caller's contract. These tensors are apart from everything else.
    let (codes, scales) = unsafe { (slice_mut(p.codes, sizes.codes), slice_mut(p.scales, sizes.scales)) };
    let (extent, rows, row_blocks) = (Extent::of(Form::Mxfp4, p), p.rows as usize, p.row_blocks as usize);
    let (row_tiles, k_blocks) = (extent.row_tiles() as usize, extent.k_blocks() as usize);
    if codes.is_empty() {
        return;
    }
    let word = |bytes: &[u8], index: usize| {
        let bytes = &bytes[4 * index..][..4];
        u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
    };
    let experts = codes
        .par_chunks_mut(rows * row_blocks * SCALED_BYTES)
        .zip(scales.par_chunks_mut(rows * row_blocks))
        .enumerate();
    experts.for_each(|(expert, (codes, scales))| {
        let shift = shift_of(expert_scales[expert]);
        for tile in 0..row_tiles {
            for block in 0..k_blocks {
                let at = (expert * row_tiles + tile) * k_blocks + block;
                let block_codes = &packed_codes[at * CODE_BYTES..][..CODE_BYTES];
                let block_scales = &packed_scales[at * SCALE_BYTES..][..SCALE_BYTES];
                for_each_row(p, tile, |quad, half, row| {
                    for group in (0..2).filter(|group| 2 * block + group < row_blocks) {
                        let scaled = row * row_blocks + 2 * block + group;
                        let field = packed::take_scale(word(block_scales, quad), group, half);
                        scales[scaled] = packed::scale_byte(field, shift);
                        let bytes = &mut codes[scaled * SCALED_BYTES..][..SCALED_BYTES];
                        bytes.fill(0);
                        for_each_code(half, |step, lane, register, side, nibble| {
                            let word = word(block_codes, (4 * quad + lane) * 4 + 2 * group + step);
                            bytes[nibble / 2] |= (packed::take(word, register, side) as u8) << (nibble % 2 * 4);
                        });
                    }
                });
            }
        }
    });
}
