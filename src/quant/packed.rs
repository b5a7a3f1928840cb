//! The packed forms of weights that GPU kernels read (csrc/common/mxfp4.cuh and the headers beside it): their sizes, MXFP4's bits, and the
//! launches that make them.

use crate::contract;
use crate::error::Result;
use crate::kernel::{Arguments, Launch, Stream};
use crate::params::{PackMxfp4Params, ScaleBytesParams};
use crate::variants::quant::{MXFP4_SCALE_BYTES, MXFP4_UNPACK, PACK_BLOCKS};
use crate::variants::{Form, Kernel};

/// Rows and columns of a block.
pub const BLOCK_ROWS: i64 = 64;
pub const BLOCK_K: i64 = 64;
/// Bytes of a block's codes and of its scales in MXFP4.
pub const CODE_BYTES: usize = Form::Mxfp4.row().code_bytes as usize;
pub const SCALE_BYTES: usize = Form::Mxfp4.row().scale_bytes as usize;

/// The kernels that pack a format's weights and find the factors of experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packers {
    /// Finds every expert's factor.
    pub peak: Kernel<PackMxfp4Params>,
    /// Packs codes and scales.
    pub pack: Kernel<PackMxfp4Params>,
}

/// Addresses of a packed matrix.
#[derive(Clone, Copy, Debug)]
pub struct Packed {
    pub form: Form,
    pub codes: *const u8,
    pub scales: *const u8,
    /// fp32 factors that multiply an expert's sums: [experts], or [experts, 2] if gate and up have a factor each.
    pub expert_scales: *const f32,
}

/// Packed matrices [experts, rows, k].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    pub form: Form,
    pub experts: i64,
    pub rows: i64,
    pub k: i64,
}

impl Extent {
    pub fn of(form: Form, p: &PackMxfp4Params) -> Extent {
        Extent { form, experts: p.experts.into(), rows: p.rows.into(), k: p.k.into() }
    }

    pub fn row_tiles(self) -> i64 {
        (self.rows + BLOCK_ROWS - 1) / BLOCK_ROWS
    }

    pub fn k_blocks(self) -> i64 {
        (self.k + BLOCK_K - 1) / BLOCK_K
    }

    fn blocks(self) -> usize {
        (self.experts * self.row_tiles() * self.k_blocks()) as usize
    }

    pub fn code_bytes(self) -> usize {
        self.blocks() * self.form.row().code_bytes as usize
    }

    pub fn scale_bytes(self) -> usize {
        self.blocks() * self.form.row().scale_bytes as usize
    }

    pub fn codes_shape(self) -> [i64; 4] {
        [self.experts, self.row_tiles(), self.k_blocks(), self.form.row().code_bytes.into()]
    }

    pub fn scales_shape(self) -> [i64; 4] {
        [self.experts, self.row_tiles(), self.k_blocks(), self.form.row().scale_bytes.into()]
    }
}

/// The bits of a code in its word. `register` is the register of the fragment, and `half` the half of that register.
pub const fn place(code: u32, register: usize, half: usize) -> u32 {
    let in_place = ((code & 8) << 12 | (code & 7) << 6) << (16 * half);
    let mantissa = 0x40 << (16 * half);
    match register {
        0 => (in_place & !mantissa) | (in_place & mantissa) << 8,
        1 => in_place >> 2,
        2 => in_place >> 6,
        _ => in_place.rotate_right(12),
    }
}

/// The code that `place` put into a word.
pub const fn take(word: u32, register: usize, half: usize) -> u32 {
    let in_place = match register {
        0 => (word & 0x8180_8180) | (word >> 8 & 0x0040_0040),
        1 => word << 2,
        2 => word << 6,
        _ => word.rotate_left(12),
    };
    let bits = in_place >> (16 * half);
    bits >> 12 & 8 | bits >> 6 & 7
}

/// log2 of the factor of an expert whose largest scale byte is `peak`.
pub const fn shift(peak: u8) -> i32 {
    if peak > 128 {
        peak as i32 - 128
    } else {
        0
    }
}

/// The bf16 exponent field of a scale byte.
pub const fn scale_field(e8m0: u8, shift: i32) -> u32 {
    let field = e8m0 as i32 + 126 - shift;
    match e8m0 {
        255 => 255,
        _ if field < 0 => 0,
        _ => field as u32,
    }
}

/// The scale byte that has a field. The shift is that of the largest byte, and of the bytes up to that one only 0 can have the field 0.
pub const fn scale_byte(field: u32, shift: i32) -> u8 {
    match field {
        0 | 255 => field as u8,
        _ => (field as i32 - 126 + shift) as u8,
    }
}

/// The word of four fields. `first` has those of the first 32 columns and `second` those of the second, each for rows g and g + 8.
pub const fn place_scales(first: [u32; 2], second: [u32; 2]) -> u32 {
    let [first, second] = [first[0] << 7 | first[1] << 23, second[0] << 7 | second[1] << 23];
    first | second.rotate_right(8)
}

/// The field of row g (`half` 0) or g + 8 (1) in 32 columns, from column 32 `group` on.
pub const fn take_scale(word: u32, group: usize, half: usize) -> u32 {
    word.rotate_left(8 * group as u32) >> (7 + 16 * half) & 255
}

fn grid(ctas: i64) -> Result<u32> {
    match u32::try_from(ctas) {
        Ok(grid) if grid <= i32::MAX as u32 => Ok(grid),
        _ => contract!("expected tensors that 2^31 thread blocks can convert, got {ctas} blocks"),
    }
}

/// Launches `ctas` CTAs of a conversion, or nothing if there are none.
pub(super) fn launch<A: Arguments>(
    stream: &Stream<'_>,
    op: &str,
    kernel: Kernel<A::Signature>,
    ctas: i64,
    arguments: A,
) -> Result<()> {
    if ctas == 0 {
        return Ok(());
    }
    let launch = Launch { kernel, grid: grid(ctas)?, block: kernel.threads(), cluster: 1, shared_bytes: 0 };
    stream.launch(op, &launch, arguments)
}

fn pack_ctas(extent: Extent) -> i64 {
    let parts = (extent.k_blocks() + i64::from(PACK_BLOCKS) - 1) / i64::from(PACK_BLOCKS);
    extent.experts * extent.row_tiles() * parts
}

/// Finds every expert's factor.
pub fn launch_peak(stream: &Stream<'_>, op: &str, packers: Packers, p: &PackMxfp4Params) -> Result<()> {
    launch(stream, op, packers.peak, p.experts.into(), p)
}

/// Packs codes and scales of matrices of this extent, once the factors are there.
pub fn launch_pack<A: Arguments>(
    stream: &Stream<'_>,
    op: &str,
    pack: Kernel<A::Signature>,
    extent: Extent,
    p: A,
) -> Result<()> {
    launch(stream, op, pack, pack_ctas(extent), p)
}

/// Brings packed MXFP4 matrices of this extent back to the checkpoint's form.
pub fn launch_unpack(stream: &Stream<'_>, op: &str, extent: Extent, p: &PackMxfp4Params) -> Result<()> {
    launch(stream, op, MXFP4_UNPACK.kernel(), pack_ctas(extent), p)
}

pub fn launch_scale_bytes(stream: &Stream<'_>, op: &str, p: &ScaleBytesParams) -> Result<()> {
    const MOST: i64 = 1 << 14;
    let ctas = (p.count + 255) / 256;
    launch(stream, op, MXFP4_SCALE_BYTES.kernel(), ctas.min(MOST), p)
}

/// Packs part of the experts at a time into the memory of the checkpoint's own tensors. Each part is copied to `scratch`, [codes, scales]
/// of `experts_at_once` experts, and packed from there. The factors must be made before.
///
/// # Safety
/// `p` has addresses of this device's memory with the extents that it names. The packed tensors lie in the memory of codes and scales.
/// `scratch` has memory of this device for `experts_at_once` experts.
pub unsafe fn pack_in_place(
    stream: &Stream<'_>,
    op: &str,
    (form, pack): (Form, Kernel<PackMxfp4Params>),
    p: &PackMxfp4Params,
    scratch: [*mut u8; 2],
    experts_at_once: i32,
) -> Result<()> {
    let one = Extent { experts: 1, ..Extent::of(form, p) };
    let mut first = 0;
    while first < p.experts {
        let experts = experts_at_once.min(p.experts - first);
        let (skipped, count) = (first as usize, experts as usize);
        let [codes, scales] =
            [p.codes.wrapping_add(skipped * one.code_bytes()), p.scales.wrapping_add(skipped * one.scale_bytes())];
        // SAFETY: the caller's contract.
        unsafe {
            stream.copy(op, scratch[0], codes, count * one.code_bytes())?;
            stream.copy(op, scratch[1], scales, count * one.scale_bytes())?;
        }
        let part = PackMxfp4Params {
            codes: scratch[0],
            scales: scratch[1],
            experts,
            packed_codes: codes,
            packed_scales: scales,
            expert_scales: p.expert_scales.wrapping_add(skipped),
            ..*p
        };
        launch_pack(stream, op, pack, Extent::of(form, &part), &part)?;
        first += experts;
    }
    Ok(())
}

/// Whether the packed form of a checkpoint's tensors has their size. Then it can take their place.
pub fn fits_in_place(extent: Extent, p: &PackMxfp4Params) -> bool {
    extent.rows % BLOCK_ROWS == 0 && extent.k_blocks() * BLOCK_K == i64::from(p.row_blocks) * 32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_come_back_and_do_not_touch_each_other() {
        let places = (0..4).flat_map(|register| [(register, 0), (register, 1)]);
        let used: Vec<u32> = places.clone().map(|(register, half)| place(15, register, half)).collect();
        assert_eq!(used.iter().fold(0, |all, bits| all ^ bits), u32::MAX);
        for seed in 0..4096u32 {
            let codes = seed.wrapping_mul(0x9e37_79b9);
            let code = |i: usize| codes >> (4 * i) & 15;
            let word =
                places.clone().enumerate().fold(0, |w, (i, (register, half))| w | place(code(i), register, half));
            for (i, (register, half)) in places.clone().enumerate() {
                assert_eq!(take(word, register, half), code(i), "{word:08x}: register {register}, half {half}");
            }
        }
    }

    #[test]
    fn scales_come_back() {
        for peak in 0..=254u8 {
            let shift = shift(peak);
            for byte in (0..=peak).chain([255]) {
                let field = scale_field(byte, shift);
                assert!(byte == 255 || field <= 254, "no number becomes infinite");
                assert_eq!(scale_byte(field, shift), byte, "{byte} where the largest is {peak}");
            }
        }
        let word = place_scales([126, 254], [255, 1]);
        let taken = [(0, 0), (0, 1), (1, 0), (1, 1)].map(|(group, half)| take_scale(word, group, half));
        assert_eq!(taken, [126, 254, 255, 1]);
    }
}
