//! Weight formats. A format is a value: what the weights are made of. New ones are rows here.

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

use crate::error::{Error, Result};
use crate::params::{Dtype, Fp8Scaling};

/// The formats of [`FORMATS`], in its order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    Bf16,
    F16,
    F32,
    Mxfp4,
    /// e4m3 with an fp32 scale for 128 x 128 weights; activations e4m3 with one for 128 columns of a token.
    Fp8Block,
    /// Mxfp4 weights, multiplied by activations that are quantised to e4m3 with one scale a row.
    Mxfp4A8,
    /// e4m3 with an E8M0 scale for 32 columns; activations too.
    Mxfp8,
    /// e2m1 with an e4m3 scale for 16 columns and fp32 ones for an expert's matrix; activations may be rounded to NVFP4 too.
    Nvfp4,
    /// e4m3 with an fp32 scale for an expert's matrix (or each half of w13); activations e4m3 with one scale for all of a call's.
    Fp8Tensor,
    /// The same with one scale for each row of activations.
    Fp8TensorToken,
    /// The same with scales of activations that were made before.
    Fp8TensorStatic,
    /// Nvfp4 on GPUs whose activations are rounded to NVFP4 too.
    Nvfp4A4,
    /// 4-bit integers less 8 with a scale for 32 columns or a multiple of them.
    Int4,
    /// The same less a zero point for each scale.
    Int4Zeros,
}

/// What weights are made of.
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
    /// 4-bit integers with a scale for 32 columns or more, and with a zero point for it.
    Int4 { zeros: bool },
}

/// What a layer does to activations before it multiplies them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activations {
    /// Nothing.
    Kept,
    /// They become e4m3 with fp32 scales.
    Fp8(Fp8Scaling),
    /// They become e4m3 with one scale a row.
    E4m3Rows,
    /// They are rounded to the numbers of MXFP8.
    Mxfp8,
    /// They are rounded to the numbers of NVFP4.
    Nvfp4,
}

/// A format: what weights are made of, and what becomes of activations.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QuantSpec {
    pub format: Format,
    /// The name of what `ExpertWeights.<name>` makes (`mxfp4-a8`: mxfp4 with an activation_dtype; `nvfp4-a4`: nvfp4 with an
    /// input_global_scale, on GPUs; `fp8_tensor-token`, `-static`: fp8_tensor
    /// as it is by default or with scales; `fp8_tensor`: with per_token=False; `int4-zeros`: int4 with zero points), and on the command line.
    pub name: &'static str,
    pub weights: Weights,
    pub activations: Activations,
    /// Type that activations have and products are taken in; where weights allow others, the default.
    pub compute: Dtype,
    /// Weight bits with scales, for the roofline.
    pub bits_per_weight: f64,
    /// The hidden size must be a multiple of this, and the intermediate size one of the next.
    pub block: i64,
    pub inner_block: i64,
    /// Rate of its products on GPUs, as a multiple of that of 16-bit elements: for the roofline. e4m3's was measured on H200: 1400 and 790 TFLOP/s.
    pub speed: f64,
    /// Whether CUDA kernels exist.
    pub cuda: bool,
}

const E4M3_SPEED: f64 = 1.77;

pub const FORMATS: [QuantSpec; 14] = [
    plain(Format::Bf16, "bf16", Dtype::Bf16, 16.0),
    plain(Format::F16, "f16", Dtype::F16, 16.0),
    QuantSpec { cuda: false, ..plain(Format::F32, "f32", Dtype::F32, 32.0) },
    MXFP4,
    QuantSpec {
        bits_per_weight: 8.0 + 32.0 / (fp8::GROUP * fp8::GROUP) as f64,
        inner_block: fp8::GROUP as i64,
        ..fp8(Format::Fp8Block, "fp8_block", Fp8Scaling::Groups)
    },
    QuantSpec {
        format: Format::Mxfp4A8,
        name: "mxfp4-a8",
        activations: Activations::E4m3Rows,
        speed: E4M3_SPEED,
        ..MXFP4
    },
    QuantSpec {
        format: Format::Mxfp8,
        name: "mxfp8",
        weights: Weights::Mxfp8,
        activations: Activations::Mxfp8,
        compute: Dtype::Bf16,
        bits_per_weight: 8.25,
        block: mxfp8::BLOCK as i64,
        inner_block: mxfp8::BLOCK as i64,
        speed: 1.0,
        cuda: true,
    },
    NVFP4,
    fp8(Format::Fp8Tensor, "fp8_tensor", Fp8Scaling::Peak),
    fp8(Format::Fp8TensorToken, "fp8_tensor-token", Fp8Scaling::Rows),
    fp8(Format::Fp8TensorStatic, "fp8_tensor-static", Fp8Scaling::Given),
    QuantSpec { format: Format::Nvfp4A4, name: "nvfp4-a4", activations: Activations::Nvfp4, ..NVFP4 },
    INT4,
    QuantSpec {
        format: Format::Int4Zeros,
        name: "int4-zeros",
        weights: Weights::Int4 { zeros: true },
        bits_per_weight: 4.75,
        ..INT4
    },
];

const MXFP4: QuantSpec = QuantSpec {
    format: Format::Mxfp4,
    name: "mxfp4",
    weights: Weights::Mxfp4,
    activations: Activations::Kept,
    compute: Dtype::Bf16,
    bits_per_weight: 4.25,
    block: mxfp4::BLOCK as i64,
    inner_block: mxfp4::BLOCK as i64,
    speed: 1.0,
    cuda: true,
};

const NVFP4: QuantSpec = QuantSpec {
    format: Format::Nvfp4,
    name: "nvfp4",
    weights: Weights::Nvfp4,
    bits_per_weight: 4.5,
    block: nvfp4::BLOCK as i64,
    inner_block: nvfp4::BLOCK as i64,
    ..MXFP4
};

/// Bits of the packed form, which has a bf16 scale for 32 columns of longer groups too.
const INT4: QuantSpec = QuantSpec {
    format: Format::Int4,
    name: "int4",
    weights: Weights::Int4 { zeros: false },
    bits_per_weight: 4.5,
    block: int4::BLOCK as i64,
    ..MXFP4
};

const fn plain(format: Format, name: &'static str, compute: Dtype, bits_per_weight: f64) -> QuantSpec {
    QuantSpec { format, name, weights: Weights::Plain, compute, bits_per_weight, block: 1, inner_block: 1, ..MXFP4 }
}

const fn fp8(format: Format, name: &'static str, scaling: Fp8Scaling) -> QuantSpec {
    QuantSpec {
        format,
        name,
        weights: Weights::Fp8,
        activations: Activations::Fp8(scaling),
        compute: Dtype::Bf16,
        bits_per_weight: 8.0,
        block: fp8::GROUP as i64,
        inner_block: fp8::LEAST_COLUMNS,
        speed: E4M3_SPEED,
        cuda: true,
    }
}

impl Format {
    pub fn spec(self) -> &'static QuantSpec {
        &FORMATS[self as usize]
    }

    /// What the weights are made of.
    pub fn weights(self) -> Weights {
        self.spec().weights
    }

    /// What a layer does to activations.
    pub fn activations(self) -> Activations {
        self.spec().activations
    }

    /// Whether GPUs read the weights in a form of their own, made at load.
    pub fn is_packed(self) -> bool {
        matches!(self.weights(), Weights::Mxfp4 | Weights::Mxfp8 | Weights::Nvfp4 | Weights::Int4 { .. })
    }

    /// Whether a call takes the weights as tensors, too. Those of the others are more tensors than `moe_tensors` has.
    pub fn has_bare_tensors(self) -> bool {
        !matches!(self.weights(), Weights::Nvfp4 | Weights::Int4 { .. })
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

    /// An error where no CUDA kernel takes the format.
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

/// A hyphen counts as an underscore and the reverse: "fp8-block" is "fp8_block".
pub fn by_name(name: &str) -> Option<&'static QuantSpec> {
    let letters = |text: &str| text.replace('-', "_");
    FORMATS.iter().find(|f| f.name == name).or_else(|| FORMATS.iter().find(|f| letters(f.name) == letters(name)))
}

/// The error for a name that is none.
pub fn unknown(name: &str) -> Error {
    let known = FORMATS.map(|f| f.name);
    Error::Unsupported(format!("format {name:?}; supported: {}", known.join(", ")))
}

/// The name of a compute type: that of its plain format.
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
