//! `ExpertWeights.nvfp4`: the constructor, whose numbers of experts are tensors on GPUs and numbers on CPUs.

use super::ExpertWeights;
use crate::contract;
use crate::error::{guard, Error, Result};
use crate::moe::numbers::Numbers;
use crate::moe::numbers_of::numbers_of;
use crate::moe::nvfp4::{layout as parse_layout, scales, Spec, Values};
use crate::moe::nvfp4_gpu::{self, numbers_on_device};
use crate::moe::operands::Arguments;
use crate::moe::options::Options;
use crate::moe::per_expert::{Given, Scalar};
use crate::params::Dtype;
use crate::quant;
use crate::quant::nvfp4::BLOCK;
use crate::tensor::{self, Contract, Place, View};
use pyo3::prelude::*;

/// Makes the experts of `ExpertWeights.nvfp4`.
#[pyfunction(crate = "crate::python", name = "nvfp4")]
#[allow(clippy::too_many_arguments)] // keyword arguments of Python, not positions
#[pyo3(signature = (w13, w2, w13_scale, w2_scale, w13_global_scale, w2_global_scale, *, input_global_scale=None, a2_global_scale=None,
    scale_layout=None, b13=None, b2=None, layout="gate_up", activation="silu", gated=None, alpha=Scalar::Layer(1.0), beta=Scalar::Layer(0.0),
    limit=None, clamp="before", dtype="bf16"),
    text_signature = "(w13, w2, w13_scale, w2_scale, w13_global_scale, w2_global_scale, *, input_global_scale=None, a2_global_scale=None, \
scale_layout=None, b13=None, b2=None, layout=\"gate_up\", activation=\"silu\", gated=None, alpha=1.0, beta=0.0, limit=None, clamp=\"before\", dtype=\"bf16\")")]
pub fn nvfp4_experts<'py>(
    w13: &Bound<'py, PyAny>,
    w2: &Bound<'py, PyAny>,
    w13_scale: &Bound<'py, PyAny>,
    w2_scale: &Bound<'py, PyAny>,
    w13_global_scale: &Bound<'py, PyAny>,
    w2_global_scale: &Bound<'py, PyAny>,
    input_global_scale: Option<&Bound<'py, PyAny>>,
    a2_global_scale: Option<&Bound<'py, PyAny>>,
    scale_layout: Option<&str>,
    b13: Option<&Bound<'py, PyAny>>,
    b2: Option<&Bound<'py, PyAny>>,
    layout: &str,
    activation: &str,
    gated: Option<bool>,
    alpha: Scalar<'py>,
    beta: Scalar<'py>,
    limit: Option<Scalar<'py>>,
    clamp: &str,
    dtype: &str,
) -> PyResult<ExpertWeights> {
    let given = Given { alpha, beta, limit };
    guard(|| {
        let mut contract = Contract::new();
        let (up, down) = (contract.input("w13", w13)?, tensor::describe("w2", w2)?);
        let cuda = up.place != Place::Cpu;
        let dtype = match quant::by_name(dtype) {
            Some(spec) if spec.block == 1 => spec.compute,
            _ => contract!("dtype: expected \"bf16\", \"f16\" or \"f32\", got {dtype:?}"),
        };
        if cuda && dtype != Dtype::Bf16 {
            return Err(Error::Unsupported(format!(
                "dtype: {:?} for nvfp4 experts on {}; supported there: \"bf16\" (others run on CPU tensors)",
                quant::name(dtype),
                up.place
            )));
        }
        let three = |name: &str, t: &View| match t.shape() {
            &[experts, rows, bytes] => Ok((experts, rows, 2 * bytes / BLOCK as i64)),
            shape => contract!("{name}: expected [experts, rows, columns / 2], got shape {shape:?}"),
        };
        let ((experts, rows, blocks), (_, w2_rows, w2_blocks)) = (three("w13", &up)?, three("w2", &down)?);
        let options = Options { layout, activation, gated, swiglu: given.borrow(&mut contract)?, clamp };
        let parts = if options.gated() { 2 } else { 1 };
        let (w13_scale, up_layout) = scales("w13_scale", w13_scale, (rows, blocks), scale_layout)?;
        let (w2_scale, down_layout) = scales("w2_scale", w2_scale, (w2_rows, w2_blocks), scale_layout)?;
        let mut extra = Vec::new();
        let mut values = |operand, object: &Bound<'py, PyAny>, parts| -> Result<Values> {
            if !cuda {
                return Ok(Values::Host(numbers_of(operand, object, experts, parts)?));
            }
            let (made, one) = numbers_on_device(&mut contract, operand, object, &up, experts, parts)?;
            let address = made.data.cast_const().cast();
            extra.push((operand, made));
            Ok(Values::Device(address, one))
        };
        let activations = match (input_global_scale, a2_global_scale) {
            (None, None) => None,
            (Some(of_x), Some(of_hidden)) => {
                Some([values("input_global_scale", of_x, 1)?, values("a2_global_scale", of_hidden, 1)?])
            }
            (None, _) => contract!("input_global_scale: needed where a2_global_scale is given"),
            (_, None) => contract!("a2_global_scale: needed where input_global_scale is given"),
        };
        let spec = Spec {
            dtype,
            layouts: [up_layout, down_layout],
            factors: [
                values("w13_global_scale", w13_global_scale, parts)?,
                values("w2_global_scale", w2_global_scale, 1)?,
            ],
            activations,
        };
        let arranged = match b13 {
            Some(bias) if cuda && parts == 2 && nvfp4_gpu::is_in_64s(parse_layout(layout)?) => {
                let whole = tensor::describe("b13", bias)?.shape() == [experts, rows] && rows % 128 == 0;
                whole.then(|| nvfp4_gpu::bias_in_halves(bias, experts, rows)).transpose()?
            }
            _ => None,
        };
        let arguments = Arguments {
            w13,
            w2,
            b13: arranged.as_ref().or(b13),
            b2,
            w13_scale: Some(&w13_scale),
            w2_scale: Some(&w2_scale),
        };
        let numbers = Numbers::Nvfp4(spec);
        let mut made = ExpertWeights::new(contract, &arguments, numbers, options, &given, false, extra)?;
        // The attribute is what was given.
        made.b13 = b13.map(|bias| bias.clone().unbind());
        Ok(made)
    })
}
