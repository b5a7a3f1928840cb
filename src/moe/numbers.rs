//! The format of a layer's weights, from the options of a call on bare tensors.

use super::formats::fp8::{Activations, Scaling};
use super::formats::plain::Plain;
use super::formats::{mxfp4, mxfp8, Source};
use super::options::compute_type;
use crate::contract;
use crate::error::{Error, Result};
use crate::params::Dtype;
use crate::quant::{self, Format, Weights};
use crate::tensor::Elem;

/// The formats whose weights a call takes as bare tensors too.
#[derive(Clone, Debug)]
pub enum Numbers {
    Plain(Plain),
    Mxfp4(mxfp4::Spec),
    Fp8(Scaling),
    Mxfp8(mxfp8::Spec),
}

impl Numbers {
    pub fn source(&self) -> &dyn Source {
        match self {
            Numbers::Plain(plain) => plain,
            Numbers::Mxfp4(spec) => spec,
            Numbers::Fp8(scaling) => scaling,
            Numbers::Mxfp8(spec) => spec,
        }
    }

    /// Reads the options of `moe_tensors`. If no format is given, it is the plain format of w13's dtype.
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
            let dtype = compute_type(dtype.unwrap_or(quant::name(spec.compute)))?;
            return Ok(Numbers::Mxfp4(mxfp4::Spec { dtype, e4m3, hidden: hidden_size, in_place: false }));
        }
        if spec.format == Format::Mxfp8 && dtype.is_none_or(|dtype| dtype == "bf16") {
            return Ok(Numbers::Mxfp8(mxfp8::Spec { hidden: hidden_size, in_place: false }));
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
        Ok(Numbers::Plain(Plain(match spec.compute {
            Dtype::F16 => Elem::F16,
            Dtype::Bf16 => Elem::Bf16,
            _ => Elem::F32,
        })))
    }
}
