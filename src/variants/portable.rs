//! Tiles of the kernels for any GPU.

use super::{fp8::Fp8, mxfp8::Mxfp8, nvfp4::Nvfp4, Element, Variant};

/// What the weights of a portable kernel are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PortableForm {
    /// 16-bit elements.
    Plain,
    /// Packed MXFP4, MXFP8, NVFP4.
    Mxfp4,
    Mxfp8,
    Nvfp4,
    /// e4m3 with block scales.
    Fp8,
}

/// Tile of the portable kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortableTile {
    pub form: PortableForm,
    pub tokens: u32,
    pub rows: u32,
    pub warps: u32,
    pub stages: u32,
    pub vector: u32,
}

impl PortableTile {
    /// `element` is bf16 where weights are not plain.
    pub fn variant(self, element: Element, gated: bool) -> Variant {
        let PortableTile { form, tokens, rows, warps, stages, vector } = self;
        match form {
            PortableForm::Plain => Variant::GroupedGemmPortable { element, gated, tokens, rows, warps, stages, vector },
            PortableForm::Mxfp4 => Variant::GroupedGemmMxfp4Portable { gated, tokens, rows, warps, stages, vector },
            PortableForm::Mxfp8 => Variant::Mxfp8(Mxfp8::GemmPortable { gated, tokens, rows, warps, stages }),
            PortableForm::Nvfp4 => {
                Variant::Nvfp4(Nvfp4::GroupedGemmNvfp4Portable { gated, tokens, rows, warps, stages })
            }
            PortableForm::Fp8 => Variant::Fp8(Fp8::GroupedGemmFp8Portable { gated, tokens, rows, warps, stages }),
        }
    }

    /// Stages of 128 bytes of each token: 64 K, of e4m3 tokens 128. Of a weight row there are as many; packed, 34, 36 or 66; of e4m3 there are
    /// the scales of tokens and of two blocks of rows.
    pub const fn shared_bytes(self) -> u32 {
        let weights = match self.form {
            PortableForm::Plain => self.rows * 128,
            PortableForm::Mxfp4 => self.rows * 34,
            PortableForm::Mxfp8 => self.rows * 66,
            PortableForm::Nvfp4 => self.rows * 36,
            PortableForm::Fp8 => self.rows * 128 + (self.tokens * 4 + 8).next_multiple_of(128),
        };
        self.stages * (weights + self.tokens * 128)
    }

    /// Most registers a thread may have. e4m3 has a block's product beside the sums.
    pub const fn registers(self) -> u32 {
        match self.rows * self.tokens / (32 * self.warps) {
            ..=16 if !matches!(self.form, PortableForm::Plain) => 128,
            ..=64 if !matches!(self.form, PortableForm::Fp8) => 168,
            _ => 255,
        }
    }

    /// CTAs that registers allow on one multiprocessor.
    pub const fn ctas(self) -> u32 {
        65536 / (self.registers() * 32 * self.warps)
    }
}

const fn tile(form: PortableForm, tokens: u32, stages: u32) -> PortableTile {
    PortableTile { form, tokens, rows: 128, warps: 4, stages, vector: 8 }
}

/// By tokens. The one of vector 1 serves every k that is no multiple of 8.
pub const PORTABLE_TILES: [PortableTile; 4] = [
    tile(PortableForm::Plain, 16, 5),
    tile(PortableForm::Plain, 64, 3),
    tile(PortableForm::Plain, 128, 3),
    PortableTile { vector: 1, ..tile(PortableForm::Plain, 64, 2) },
];

/// The same for packed MXFP4, where a stage is a third as large. Chosen from bytes in flight, not measured: with 16 tokens 20 KiB of
/// weights a CTA, 40 to 80 KiB a multiprocessor; with 128, two CTAs fit in 99 KiB.
pub const MXFP4_PORTABLE_TILES: [PortableTile; 4] = [
    tile(PortableForm::Mxfp4, 16, 6),
    tile(PortableForm::Mxfp4, 64, 4),
    tile(PortableForm::Mxfp4, 128, 2),
    PortableTile { vector: 1, ..tile(PortableForm::Mxfp4, 64, 3) },
];

/// Of packed MXFP8 and NVFP4 one, which multiplies the tokens that there are, for few instances; two CTAs fit in 99 KiB. Not measured.
pub const MXFP8_PORTABLE_TILES: [PortableTile; 1] = [tile(PortableForm::Mxfp8, 64, 3)];
pub const NVFP4_PORTABLE_TILES: [PortableTile; 1] = [tile(PortableForm::Nvfp4, 64, 3)];

/// Of e4m3 with block scales, whose stages are 128 K: two, so that two CTAs fit in 99 KiB (with 16 tokens four in 163). Not measured.
pub const FP8_PORTABLE_TILES: [PortableTile; 2] = [tile(PortableForm::Fp8, 16, 2), tile(PortableForm::Fp8, 64, 2)];
