//! A call's x: numbers of the layer's dtype, or e4m3 or NVFP4 codes that the caller quantised, with their scales.

use super::formats::nvfp4;
pub use super::given_scales::GivenScales;
use super::layer::Layer;
use super::plan::X;
use crate::contract;
use crate::desc::LayerDesc;
use crate::error::{Error, Result};
use crate::params::Dtype;
use crate::quant::fp8::GROUP;
use crate::quant::nvfp4::BLOCK;
use crate::tensor::{Borrowed, Contract, Dim, Elem, View};
use pyo3::prelude::*;

pub struct Tokens<'py> {
    pub x: Borrowed<'py>,
    pub scale: Option<GivenScales>,
}

impl<'py> Tokens<'py> {
    /// Borrows and checks x: [T, H] of the layer's dtype. With x_scale, x is float8_e4m3fn for fp8 layers. For nvfp4 layers that round
    /// their tokens it is pairs of e2m1 codes [T, H / 2].
    pub fn borrow(
        layer: &Layer,
        (x, x_scale): (&Bound<'py, PyAny>, Option<&Bound<'py, PyAny>>),
        contract: &mut Contract<'_>,
    ) -> Result<Tokens<'py>> {
        let x = contract.input("x", x)?;
        let dims = [Dim::Named("tokens"), Dim::Named("hidden")];
        let Some(scale) = x_scale else {
            if x.elem == Elem::E4M3 && layer.desc.format.is_fp8() {
                contract!("x_scale: needed where x is {}", x.elem);
            }
            contract.check("x", &x, &dims, &[elem(layer.desc.dtype)])?;
            return Ok(Tokens { x, scale: None });
        };
        if nvfp4::rounds(layer) {
            let hidden = layer.desc.hidden;
            let scale = contract.input("x_scale", scale)?;
            let of = |name, block| [dims[0], Dim::Is(name, hidden / block)];
            contract.check("x", &x, &of("hidden / 2", 2), &nvfp4::CODES)?;
            contract.check("x_scale", &scale, &of("hidden / 16", BLOCK as i64), &nvfp4::SCALES)?;
            let form =
                GivenScales { data: scale.data, powers: false, row_stride: hidden / BLOCK as i64, group_stride: 1 };
            return Ok(Tokens { x, scale: Some(form) });
        }
        if !layer.desc.format.is_fp8() {
            return Err(Error::Unsupported(format!(
                "x_scale (quantised tokens) with {} experts; supported with: fp8_block, fp8_tensor, and nvfp4 with an input_global_scale",
                layer.desc.format.spec().name
            )));
        }
        contract.check("x", &x, &dims, &[Elem::E4M3])?;
        let scale = contract.input("x_scale", scale)?;
        let form = form(&x, &scale)?;
        Ok(Tokens { x, scale: Some(form) })
    }
}

impl Tokens<'_> {
    /// The kind of x, from which the call's program is made.
    pub fn form(&self, layer: &LayerDesc) -> X {
        let is_table = |scale: &GivenScales| scale.is_table(self.x.shape()[0], layer.hidden / GROUP as i64);
        match &self.scale {
            None => X::Plain,
            Some(scale) if layer.format.is_fp8() && !is_table(scale) => X::LooseCodes,
            Some(_) => X::Codes,
        }
    }
}

/// Describes the scales of e4m3 rows, in any form that a call accepts.
fn form(x: &View, scale: &View) -> Result<GivenScales> {
    let (tokens, hidden) = (x.shape()[0], x.shape()[1]);
    let (groups, words) = (hidden / GROUP as i64, (hidden + 511) / 512);
    if scale.place != x.place {
        contract!("x_scale: is on {}, but x is on {}", scale.place, x.place);
    }
    let form = |powers, row_stride, group_stride| GivenScales { data: scale.data, powers, row_stride, group_stride };
    let strides = scale.strides();
    let found = match (scale.elem, scale.shape()) {
        (Elem::F32, shape) if shape.len() <= 2 && scale.numel() == 1 => Some(form(false, 0, 0)),
        (Elem::F32, &[rows] | &[rows, 1]) if rows == tokens => Some(form(false, strides[0], 0)),
        (Elem::F32, &[rows, columns]) if (rows, columns) == (tokens, groups) => {
            Some(form(false, strides[0], strides[1]))
        }
        (Elem::I32, &[rows, columns]) if (rows, columns) == (tokens, words) => Some(form(true, strides[0], strides[1])),
        _ => None,
    };
    match found {
        Some(form) if strides.iter().all(|&stride| stride >= 0) => Ok(form),
        _ => contract!(
            "x_scale: expected float32 [{tokens}, {groups}] (a scale for each 128 columns), [{tokens}, 1] or one number, or int32 [{tokens}, {words}] of E8M0 bytes, got {} {:?}",
            scale.elem,
            scale.shape()
        ),
    }
}

/// The element type of a dtype.
pub fn elem(dtype: Dtype) -> Elem {
    match dtype {
        Dtype::F16 => Elem::F16,
        Dtype::Bf16 => Elem::Bf16,
        _ => Elem::F32,
    }
}
