//! Weight formats. A format is a row in its own file. [`FORMATS`] lists the rows, and plans, workspaces and roundings follow them.

pub mod arguments;
pub mod blocks;
pub mod e2m1;
pub mod fp8;
pub mod fp8_ops;
pub mod int4;
pub mod layout_ops;
pub mod layouts;
pub mod mxfp4;
pub mod mxfp8;
pub mod mxfp8_ops;
pub mod nvfp4;
pub mod nvfp4_ops;
pub mod ops;
pub mod packed;
pub mod packed_e4m3;
pub mod packed_ops;
pub mod row_ops;
pub mod scale_layout;

use crate::error::{Error, Result};
use crate::params::{Dtype, Fp8Scaling, GroupedGemmParams};
use crate::variants::{portable, Form, Kernel};

/// The formats of [`FORMATS`], in its order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    Bf16,
    F16,
    F32,
    Mxfp4,
    /// e4m3 with an fp32 scale for 128 x 128 weights. Activations are e4m3 with a scale for 128 columns of a token.
    Fp8Block,
    /// Mxfp4 weights, multiplied by activations that are quantised to e4m3 with one scale for each row.
    Mxfp4A8,
    /// e4m3 with an E8M0 scale for 32 columns, for weights and activations.
    Mxfp8,
    /// e2m1 with an e4m3 scale for 16 columns, and fp32 scales for an expert's matrix. Activations may be rounded to NVFP4 too.
    Nvfp4,
    /// e4m3 with an fp32 scale for an expert's matrix (or each half of w13). Activations are e4m3 with one scale for all rows of a call.
    Fp8Tensor,
    /// Fp8Tensor with one scale for each row of activations.
    Fp8TensorToken,
    /// Fp8Tensor with scales of activations that were made before.
    Fp8TensorStatic,
    /// Nvfp4 on GPUs whose activations are rounded to NVFP4 too.
    Nvfp4A4,
    /// 4-bit integers less 8, with a scale for 32 columns or a multiple of them.
    Int4,
    /// 4-bit integers less a zero point for each scale, with scales like those of Int4.
    Int4Zeros,
}

/// The numbers that weights are made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Weights {
    /// Numbers of the compute type.
    Plain,
    /// e4m3 codes with fp32 scales of blocks, which activations share.
    Fp8,
    /// e2m1 codes with an E8M0 scale for 32 columns.
    Mxfp4,
    /// e4m3 codes with an E8M0 scale for 32 columns.
    Mxfp8,
    /// e2m1 codes with an e4m3 scale for 16 columns.
    Nvfp4,
    /// 4-bit integers with a scale for 32 columns or more, and perhaps with a zero point for it.
    Int4,
}

/// The rounding that a layer applies to activations before it multiplies them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activations {
    /// Activations stay unchanged.
    Kept,
    /// Activations become e4m3 with fp32 scales.
    Fp8(Fp8Scaling),
    /// Activations become e4m3 with one scale for each row.
    E4m3Rows,
    /// Activations are rounded to the numbers of MXFP8.
    Mxfp8,
    /// Activations are rounded to the numbers of NVFP4.
    Nvfp4,
}

/// A format: the numbers of its weights, and the rounding of its activations.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QuantSpec {
    pub format: Format,
    /// The name of the format on the command line, and of the constructor `ExpertWeights.<name>`. Some formats are a constructor with an
    /// argument. `mxfp4-a8` is mxfp4 with an activation_dtype, and `nvfp4-a4` is nvfp4 with an input_global_scale, on GPUs.
    /// `fp8_tensor-token` is fp8_tensor by default, `fp8_tensor-static` is fp8_tensor with scales, and `fp8_tensor` is that with
    /// per_token=False. `int4-zeros` is int4 with zero points.
    pub name: &'static str,
    pub weights: Weights,
    pub activations: Activations,
    /// Dtype of activations and products. If the weights allow several, this is the default.
    pub compute: Dtype,
    /// Bits of a weight, scales included, for the roofline.
    pub bits_per_weight: f64,
    /// The hidden size must be a multiple of `block`, and the intermediate size a multiple of `inner_block`.
    pub block: i64,
    pub inner_block: i64,
    /// Rate of its products on GPUs, as a multiple of the rate of 16-bit elements, for the roofline. The rates of e4m3 and 16 bits were
    /// measured on an H200: 1400 and 790 TFLOP/s.
    pub speed: f64,
    /// Whether CUDA kernels exist.
    pub cuda: bool,
    /// Whether a call takes the weights as tensors, too. Weights of the other formats are more tensors than `moe_tensors` takes.
    pub bare_tensors: bool,
    /// The tiles of its portable kernel, ordered by tokens.
    pub portable: &'static [Kernel<GroupedGemmParams>],
    /// The packed form of weights that GPUs read, if the format has one. It is made at load.
    pub packing: Option<Packing>,
}

/// The packed form of weights, and how the Hopper kernels that read it are launched.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Packing {
    pub form: Form,
    pub gemms: PackedGemms,
    /// The borders between one tile and the next.
    pub borders: Borders,
}

/// The GEMMs of a packed format on Hopper.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum PackedGemms {
    /// A launch has both GEMMs, with the form's tiles.
    Together,
    /// Each GEMM has a launch, with these tiles, ordered by tokens.
    Apart(&'static [Kernel<GroupedGemmParams>]),
}

/// Borders between the tiles of a packed format on Hopper. `moe::plan::packed_sm90` has measured them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Borders {
    /// Borders of 4-bit weights with bf16 activations, with a tile of 64 rows for few work units.
    FourBits,
    /// Borders of 4-bit weights with bf16 activations, if there is one tile of each width.
    FourBitsOfOneWidth,
    /// Borders of MXFP4 weights with e4m3 activations.
    E4m3,
    /// Borders of MXFP8 weights.
    Mxfp8,
}

const E4M3_SPEED: f64 = 1.77;

pub const FORMATS: [QuantSpec; 14] = [
    plain(Format::Bf16, "bf16", Dtype::Bf16, 16.0),
    plain(Format::F16, "f16", Dtype::F16, 16.0),
    QuantSpec { cuda: false, ..plain(Format::F32, "f32", Dtype::F32, 32.0) },
    mxfp4::ROW,
    fp8::BLOCK_ROW,
    mxfp4::A8_ROW,
    mxfp8::ROW,
    nvfp4::ROW,
    fp8::TENSOR_ROW,
    fp8::TOKEN_ROW,
    fp8::STATIC_ROW,
    nvfp4::A4_ROW,
    int4::ROW,
    int4::ZEROS_ROW,
];

/// The row of weights that are plain numbers.
const fn plain(format: Format, name: &'static str, compute: Dtype, bits_per_weight: f64) -> QuantSpec {
    QuantSpec {
        format,
        name,
        weights: Weights::Plain,
        activations: Activations::Kept,
        compute,
        bits_per_weight,
        block: 1,
        inner_block: 1,
        speed: 1.0,
        cuda: true,
        bare_tensors: true,
        portable: &portable::PLAIN_TILES,
        packing: None,
    }
}

/// The part of a row that follows from the packed form of its weights. The row itself says which format it is.
const fn packed_as(form: Form, borders: Borders) -> QuantSpec {
    let block_bits = 8 * form.block_bytes();
    QuantSpec {
        bits_per_weight: block_bits as f64 / (packed::BLOCK_ROWS * packed::BLOCK_K) as f64,
        portable: form.row().portable,
        packing: Some(Packing { form, gemms: PackedGemms::Together, borders }),
        ..plain(Format::Bf16, "", Dtype::Bf16, 16.0)
    }
}

impl Format {
    pub fn spec(self) -> &'static QuantSpec {
        &FORMATS[self as usize]
    }

    /// The numbers that the weights are made of.
    pub fn weights(self) -> Weights {
        self.spec().weights
    }

    /// The rounding that a layer applies to activations.
    pub fn activations(self) -> Activations {
        self.spec().activations
    }

    /// Whether GPUs read the weights in a packed form, made at load.
    pub fn is_packed(self) -> bool {
        self.spec().packing.is_some()
    }

    /// Whether a call takes the weights as tensors, too.
    pub fn has_bare_tensors(self) -> bool {
        self.spec().bare_tensors
    }

    /// Whether weights are e4m3 codes with fp32 scales of blocks.
    pub fn is_fp8(self) -> bool {
        self.weights() == Weights::Fp8
    }

    /// Whether an expert's matrix has one scale.
    pub fn is_fp8_tensor(self) -> bool {
        self.is_fp8() && self.activations() != Activations::Fp8(Fp8Scaling::Groups)
    }

    /// The format of weights that are plain numbers.
    pub fn plain(dtype: Dtype) -> Format {
        match dtype {
            Dtype::F16 => Format::F16,
            Dtype::Bf16 => Format::Bf16,
            _ => Format::F32,
        }
    }

    /// An error if no CUDA kernel takes the format.
    pub fn require_cuda(self) -> Result<()> {
        let name = self.spec().name;
        if self.spec().cuda {
            return Ok(());
        }
        let served: Vec<&str> = FORMATS.iter().filter(|f| f.cuda).map(|f| f.name).collect();
        Err(Error::Unsupported(format!(
            "{name} experts on CUDA; supported there: {} ({name} runs on CPU tensors)",
            served.join(", ")
        )))
    }
}

/// The format with a name. A hyphen counts as an underscore and the reverse: "fp8-block" is "fp8_block".
pub fn by_name(name: &str) -> Option<&'static QuantSpec> {
    let letters = |text: &str| text.replace('-', "_");
    FORMATS.iter().find(|f| f.name == name).or_else(|| FORMATS.iter().find(|f| letters(f.name) == letters(name)))
}

/// The error for a name that no format has.
pub fn unknown(name: &str) -> Error {
    let known = FORMATS.map(|f| f.name);
    Error::Unsupported(format!("format {name:?}; supported: {}", known.join(", ")))
}

/// The name of a compute type, which is the name of its plain format.
pub fn name(dtype: Dtype) -> &'static str {
    Format::plain(dtype).spec().name
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_in_the_order_of_their_formats() {
        for row in &FORMATS {
            assert_eq!(row.format.spec(), row);
            assert!(row.block != 1 || Format::plain(row.compute) == row.format);
        }
    }

    #[test]
    fn a_name_has_either_spelling() {
        for row in &FORMATS {
            for name in [row.name.into(), row.name.replace('_', "-"), row.name.replace('-', "_")] {
                assert_eq!(by_name(&name), Some(row), "{name}");
            }
        }
        assert!(by_name("fp8 block").is_none() && by_name("").is_none() && by_name("fp8__block").is_none());
    }
}
