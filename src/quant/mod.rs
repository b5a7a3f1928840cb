//! Weight formats. A format is a value: what the weights are made of. New ones are rows here.

pub mod arguments;
pub mod blocks;
pub mod e2m1;
pub mod fp8;
pub mod fp8_ops;
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
use crate::params::Dtype;

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
}

/// What a format's weights are made of.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QuantSpec {
    pub format: Format,
    /// The name of what `ExpertWeights.<name>` makes (`mxfp4-a8`: mxfp4 with an activation_dtype; `nvfp4-a4`: nvfp4 with an
    /// input_global_scale, on GPUs; `fp8_tensor-token`, `-static`: fp8_tensor
    /// as it is by default or with scales; `fp8_tensor`: with per_token=False), and on the command line.
    pub name: &'static str,
    /// Type that activations have and products are taken in; where weights allow others, the default.
    pub compute: Dtype,
    /// Weight bits with scales, for the roofline.
    pub bits_per_weight: f64,
    /// Hidden and intermediate size must be multiples of this.
    pub block: i64,
    /// Rate of its products on GPUs, as a multiple of that of 16-bit elements: for the roofline.
    pub speed: f64,
    /// Whether CUDA kernels exist.
    pub cuda: bool,
}

pub const FORMATS: [QuantSpec; 12] = [
    QuantSpec {
        format: Format::Bf16,
        name: "bf16",
        compute: Dtype::Bf16,
        bits_per_weight: 16.0,
        block: 1,
        speed: 1.0,
        cuda: true,
    },
    QuantSpec {
        format: Format::F16,
        name: "f16",
        compute: Dtype::F16,
        bits_per_weight: 16.0,
        block: 1,
        speed: 1.0,
        cuda: true,
    },
    QuantSpec {
        format: Format::F32,
        name: "f32",
        compute: Dtype::F32,
        bits_per_weight: 32.0,
        block: 1,
        speed: 1.0,
        cuda: false,
    },
    QuantSpec {
        format: Format::Mxfp4,
        name: "mxfp4",
        compute: Dtype::Bf16,
        bits_per_weight: 4.25,
        block: mxfp4::BLOCK as i64,
        speed: 1.0,
        cuda: true,
    },
    QuantSpec {
        format: Format::Fp8Block,
        name: "fp8_block",
        compute: Dtype::Bf16,
        bits_per_weight: 8.0 + 32.0 / (fp8::GROUP * fp8::GROUP) as f64,
        block: fp8::GROUP as i64,
        speed: 1.77, // on H200, measured: 1400 and 790 TFLOP/s
        cuda: true,
    },
    QuantSpec {
        format: Format::Mxfp4A8,
        name: "mxfp4-a8",
        compute: Dtype::Bf16,
        bits_per_weight: 4.25,
        block: mxfp4::BLOCK as i64,
        speed: 1.77,
        cuda: true,
    },
    QuantSpec {
        format: Format::Mxfp8,
        name: "mxfp8",
        compute: Dtype::Bf16,
        bits_per_weight: 8.25,
        block: mxfp8::BLOCK as i64,
        speed: 1.0,
        cuda: true,
    },
    nvfp4(Format::Nvfp4, "nvfp4"),
    fp8_tensor(Format::Fp8Tensor, "fp8_tensor"),
    fp8_tensor(Format::Fp8TensorToken, "fp8_tensor-token"),
    fp8_tensor(Format::Fp8TensorStatic, "fp8_tensor-static"),
    nvfp4(Format::Nvfp4A4, "nvfp4-a4"),
];

const fn nvfp4(format: Format, name: &'static str) -> QuantSpec {
    let (bits_per_weight, block) = (4.5, nvfp4::BLOCK as i64);
    QuantSpec { format, name, compute: Dtype::Bf16, bits_per_weight, block, speed: 1.0, cuda: true }
}

const fn fp8_tensor(format: Format, name: &'static str) -> QuantSpec {
    let (bits_per_weight, block) = (8.0, fp8::GROUP as i64);
    QuantSpec { format, name, compute: Dtype::Bf16, bits_per_weight, block, speed: 1.77, cuda: true }
}

impl Format {
    pub fn spec(self) -> &'static QuantSpec {
        &FORMATS[self as usize]
    }

    /// Whether weights are MXFP4, whatever multiplies them.
    pub fn is_mxfp4(self) -> bool {
        matches!(self, Format::Mxfp4 | Format::Mxfp4A8)
    }

    /// Whether GPUs read them in a form of their own, made at load.
    pub fn is_packed(self) -> bool {
        self.is_mxfp4() || self == Format::Mxfp8 || self.is_nvfp4()
    }

    /// Whether weights are NVFP4, whatever multiplies them.
    pub fn is_nvfp4(self) -> bool {
        matches!(self, Format::Nvfp4 | Format::Nvfp4A4)
    }

    /// Whether weights are e4m3 codes with fp32 scales of blocks, which activations share.
    pub fn is_fp8(self) -> bool {
        matches!(self, Format::Fp8Block) || self.is_fp8_tensor()
    }

    /// Whether an expert's matrix has one scale.
    pub fn is_fp8_tensor(self) -> bool {
        matches!(self, Format::Fp8Tensor | Format::Fp8TensorToken | Format::Fp8TensorStatic)
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
