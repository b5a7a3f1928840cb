//! The packed forms of weights that GPU kernels read. A form is a template argument of the packed GEMMs and of the packer. Its row here
//! says what it is in C++, how many bytes it has, and which tiles its kernels have.

use super::*;

/// The forms of [`FORMS`], in its order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Form {
    Mxfp4,
    Mxfp8,
    Nvfp4,
    Int4,
    /// Int4 with a zero point for each scale.
    Int4Zeros,
}

/// A row of the table: the properties of a packed form.
pub struct FormRow {
    pub form: Form,
    /// The name in symbols: `mxfp4` in `grouped_gemm_mxfp4_sm90_gated_t16`.
    pub name: &'static str,
    /// The end of the name, which symbols have after `gated` or `plain`.
    pub option: &'static str,
    /// The struct in namespace oxmoe that GEMMs take as `Form`.
    pub device_type: &'static str,
    /// The struct in namespace oxmoe that `Pack` takes as `Packer`. Empty if the form has kernels of its own that pack.
    pub packer: &'static str,
    /// The header under csrc/ that defines these structs.
    pub header: &'static str,
    /// Bytes of the codes and of the scales of a block of 64 x 64 weights.
    pub code_bytes: u32,
    pub scale_bytes: u32,
    /// Whether gate and up rows of an expert have a factor each.
    pub factors_of_halves: bool,
    /// Traits of the GEMMs on Hopper.
    pub traits: &'static [Trait],
    /// The tiles on Hopper, sorted by tokens. Each serves every narrower tile at its own width too. If the first two have the same width,
    /// the first is for few work units.
    pub tiles: &'static [Kernel<GemmPairParams>],
    /// The tiles for a K of whole stages of four blocks. One is taken if it is as narrow as the tile whose place it takes.
    pub fours: &'static [Kernel<GemmPairParams>],
    /// The kernels of a layer in one launch, those for fewer experts first.
    pub layers: &'static [Kernel<RoutedLayerParams>],
    /// The tiles of the portable GEMM, sorted by tokens.
    pub portable: &'static [Kernel<GroupedGemmParams>],
    /// The kernel that packs, if it is a `Pack`.
    pub pack: Option<Kernel<PackParams>>,
}

/// Every packed form.
pub static FORMS: [FormRow; 5] = [MXFP4, MXFP8, NVFP4, INT4, INT4_ZEROS];

// A form finds its row by its number.
const _: () = {
    let mut number = 0;
    while number < FORMS.len() {
        assert!(FORMS[number].form as usize == number);
        number += 1;
    }
};

const MXFP4: FormRow = FormRow {
    form: Form::Mxfp4,
    name: "mxfp4",
    option: "",
    device_type: "mxfp4::Form",
    packer: "",
    header: "common/mxfp4.cuh",
    code_bytes: 2048,
    scale_bytes: 128,
    factors_of_halves: false,
    traits: &[Trait::BothGemms, Trait::Counts],
    tiles: &[
        tile(Form::Mxfp4, 16, 1, 3, 5),
        tile(Form::Mxfp4, 16, 2, 3, 5),
        tile(Form::Mxfp4, 32, 3, 3, 5),
        tile(Form::Mxfp4, 64, 3, 4, 3),
        tile(Form::Mxfp4, 80, 3, 4, 3),
        tile(Form::Mxfp4, 128, 3, 4, 2),
        tile(Form::Mxfp4, 192, 3, 5, 1),
    ],
    fours: &fours(Form::Mxfp4),
    layers: &[packed::layer(Form::Mxfp4, (12, 3, 4), (128, true)), layer(Form::Mxfp4)],
    portable: &portable::MXFP4_TILES,
    pack: None,
};

const MXFP8: FormRow = FormRow {
    form: Form::Mxfp8,
    name: "mxfp8",
    device_type: "mxfp8::Form",
    header: "common/mxfp8.cuh",
    code_bytes: 4096,
    traits: &[Trait::BothGemms],
    tiles: &[
        tile(Form::Mxfp8, 16, 1, 3, 3),
        tile(Form::Mxfp8, 16, 2, 2, 4),
        tile(Form::Mxfp8, 32, 3, 3, 4),
        tile(Form::Mxfp8, 48, 4, 4, 2),
        tile(Form::Mxfp8, 64, 3, 3, 3),
        tile(Form::Mxfp8, 80, 3, 4, 2),
        tile(Form::Mxfp8, 128, 3, 3, 2),
        tile(Form::Mxfp8, 192, 3, 5, 1),
    ],
    fours: &[],
    layers: &[packed::layer(Form::Mxfp8, MXFP8_RINGS, (384, false))],
    portable: &[portable_tile(Form::Mxfp8)],
    ..MXFP4
};

const NVFP4: FormRow = FormRow {
    form: Form::Nvfp4,
    name: "nvfp4",
    device_type: "nvfp4::Form",
    packer: "nvfp4::Packer",
    header: "common/nvfp4_packed.cuh",
    scale_bytes: 256,
    factors_of_halves: true,
    tiles: &[
        tile(Form::Nvfp4, 16, 2, 3, 5),
        tile(Form::Nvfp4, 32, 2, 2, 5),
        tile(Form::Nvfp4, 64, 3, 4, 3),
        tile(Form::Nvfp4, 80, 3, 4, 3),
        tile(Form::Nvfp4, 128, 3, 4, 2),
        tile(Form::Nvfp4, 192, 3, 5, 1),
    ],
    fours: &fours(Form::Nvfp4),
    layers: &[layer(Form::Nvfp4)],
    portable: &[portable_tile(Form::Nvfp4)],
    pack: Some(quant::pack_of(Form::Nvfp4)),
    ..MXFP4
};

const INT4: FormRow = FormRow {
    form: Form::Int4,
    name: "int4",
    device_type: "int4::Form<false>",
    packer: "int4::Packer",
    header: "common/int4.cuh",
    scale_bytes: 256,
    tiles: &int4_tiles(Form::Int4),
    fours: &fours(Form::Int4),
    layers: &[layer(Form::Int4)],
    portable: &[portable_tile(Form::Int4)],
    pack: Some(quant::pack_of(Form::Int4)),
    ..MXFP4
};

/// The kernel that packs int4 weights takes both forms.
const INT4_ZEROS: FormRow = FormRow {
    form: Form::Int4Zeros,
    option: "_zeros",
    device_type: "int4::Form<true>",
    scale_bytes: 384,
    tiles: &int4_tiles(Form::Int4Zeros),
    fours: &fours(Form::Int4Zeros),
    layers: &[layer(Form::Int4Zeros)],
    portable: &[portable_tile(Form::Int4Zeros)],
    ..INT4
};

const fn tile(form: Form, tokens: u32, consumers: u32, stages: u32, blocks: u32) -> Kernel<GemmPairParams> {
    packed::GEMM.with(Variant { form, tokens, consumers, stages, blocks, ..Variant::NONE })
}

/// The rings of MXFP8's layer in one launch, whose blocks have twice the bytes of others'. With stages of four blocks, of which there is room
/// for two, one token of qwen3-30b-a3b, dsv3-tp8 and glm-4.5-air-tp2 took 23.3, 39.6 and 33.9 us on an H200, and 21.6, 32.9 and 30.6 so.
const MXFP8_RINGS: (u32, u32, u32) = (8, 4, 2);

/// NVFP4's tiles, and before them one for few work units, as MXFP4 has.
const fn int4_tiles(form: Form) -> [Kernel<GemmPairParams>; 7] {
    [
        tile(form, 16, 1, 3, 5),
        tile(form, 16, 2, 3, 5),
        tile(form, 32, 2, 2, 5),
        tile(form, 64, 3, 4, 3),
        tile(form, 80, 3, 4, 3),
        tile(form, 128, 3, 4, 2),
        tile(form, 192, 3, 5, 1),
    ]
}

/// The tiles of codes of four bits for a K of whole stages of four blocks.
const fn fours(form: Form) -> [Kernel<GemmPairParams>; 3] {
    [tile(form, 48, 4, 3, 4), tile(form, 64, 4, 3, 4), tile(form, 80, 3, 3, 4)]
}

/// The layer in one launch for every router of up to 384 experts. Two rings of four stages leave room for two tokens of 7168 columns.
const fn layer(form: Form) -> Kernel<RoutedLayerParams> {
    packed::layer(form, (8, 4, 4), (384, false))
}

/// The portable tile of a form that has only one, so that there are few instances (`kOneTile` in C++). It multiplies only the tokens that
/// there are. Two CTAs fit in 99 KiB. The choice was not measured.
const fn portable_tile(form: Form) -> Kernel<GroupedGemmParams> {
    portable::packed_tile(form, 64, 3)
}

impl Form {
    pub const fn row(self) -> &'static FormRow {
        &FORMS[self as usize]
    }

    /// Bytes of a block of 64 x 64 weights.
    pub const fn block_bytes(self) -> u32 {
        self.row().code_bytes + self.row().scale_bytes
    }
}

/// Every kernel of a packed form.
pub fn all() -> Vec<Variant> {
    let mut all = Vec::new();
    for row in &FORMS {
        all.extend(both_forms(row.tiles).chain(both_forms(row.fours)).chain(both_forms(row.portable)));
        all.extend(both_forms(row.layers));
        all.extend(row.pack.map(Kernel::variant).filter(|pack| pack.form == row.form));
    }
    all
}
