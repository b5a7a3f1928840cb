//! What the weights of a layer are made of, from the options of a call.

use super::fp8::{Activations, Scaling};
use crate::contract;
use crate::error::{Error, Result};
use crate::params::Dtype;
use crate::quant::{self, Format, Weights};
use crate::tensor::Elem;

/// What the weights are made of.
#[derive(Clone, Debug)]
pub enum Numbers {
    Plain(Elem),
    Mxfp4 {
        dtype: Dtype,
        /// Activations are quantised to it.
        e4m3: bool,
        /// Columns of x and of the output where w13 and w2 are padded beyond them.
        hidden: Option<i64>,
    },
    Fp8(Scaling),
    Mxfp8 {
        /// As of MXFP4.
        hidden: Option<i64>,
    },
    Nvfp4(super::nvfp4::Spec),
    Int4(super::int4::Spec),
}

impl Numbers {
    /// From the options of `moe_tensors`; without a format it is that of w13's dtype.
    pub fn new(format: Option<&str>, dtype: Option<&str>, hidden_size: Option<i64>, w13: Elem) -> Result<Numbers> {
        let spec = match format {
            Some(name) => quant::by_name(name).ok_or_else(|| quant::unknown(name))?,
            None => match w13.dtype() {
                Some(dtype) => Format::plain(dtype).spec(),
                None => {
                    return Err(Error::Unsupported(format!(
                        "w13: dtype {w13}; oxmoe serves bfloat16, float16, float32 (on CPU), uint8 codes as format \"mxfp4\", float8_e4m3fn as \"fp8_block\" or \"mxfp8\""
                    )))
                }
            },
        };
        if spec.format.weights() == Weights::Mxfp4 {
            let e4m3 = spec.format == Format::Mxfp4A8;
            return Numbers::mxfp4(dtype.unwrap_or(quant::name(spec.compute)), e4m3, hidden_size);
        }
        if spec.format == Format::Mxfp8 && dtype.is_none_or(|dtype| dtype == "bf16") {
            return Ok(Numbers::Mxfp8 { hidden: hidden_size });
        }
        if !spec.format.has_bare_tensors() {
            let name = spec.name.split('-').next().unwrap_or_default();
            return Err(Error::Unsupported(format!(
                "{name} experts as bare tensors; supported: oxmoe.moe with an ExpertWeights.{name}"
            )));
        }
        if dtype.is_some() || hidden_size.is_some() {
            contract!(
                "dtype and hidden_size: only for formats \"mxfp4\" and (bf16) \"mxfp8\", got them with {:?}",
                spec.name
            );
        }
        if spec.format == Format::Fp8Block {
            return Ok(Numbers::Fp8(Activations::Groups.into()));
        }
        Ok(Numbers::Plain(match spec.compute {
            Dtype::F16 => Elem::F16,
            Dtype::Bf16 => Elem::Bf16,
            _ => Elem::F32,
        }))
    }

    pub fn mxfp4(dtype: &str, e4m3: bool, hidden: Option<i64>) -> Result<Numbers> {
        match quant::by_name(dtype) {
            Some(spec) if spec.block == 1 => Ok(Numbers::Mxfp4 { dtype: spec.compute, e4m3, hidden }),
            _ => contract!("dtype: expected \"bf16\", \"f16\" or \"f32\", got {dtype:?}"),
        }
    }
}
