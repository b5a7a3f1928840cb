//! `ExpertWeights.int4`: the constructor.

use super::ExpertWeights;
use crate::contract;
use crate::error::{guard, Result};
use crate::moe::int4::{check_zero, Spec};
use crate::moe::numbers::Numbers;
use crate::moe::operands::Arguments;
use crate::moe::options::Options;
use crate::moe::per_expert::{Given, Scalar};
use crate::quant;
use crate::tensor::{Borrowed, Contract, Origin, Place};
use pyo3::prelude::*;

/// An error for zero points on a GPU that are out of range, which this waits for. Those on CPUs are looked at with the rest of the contract.
fn refuse_on_gpus(name: &str, zeros: &Borrowed<'_>) -> Result<()> {
    if zeros.place == Place::Cpu || zeros.numel() == 0 {
        return Ok(());
    }
    if zeros.origin == Origin::Other {
        contract!("{name}: expected a torch tensor on {}", zeros.place);
    }
    for of_all in ["min", "max"] {
        let number: i64 = zeros.object().call_method0(of_all)?.call_method0("item")?.extract()?;
        check_zero(name, number)?;
    }
    Ok(())
}

/// Makes the experts of `ExpertWeights.int4`.
#[pyfunction(crate = "crate::python", name = "int4")]
#[allow(clippy::too_many_arguments)] // keyword arguments of Python, not positions
#[pyo3(signature = (w13, w2, w13_scale, w2_scale, *, w13_zeros=None, w2_zeros=None, b13=None, b2=None, layout="gate_up",
    activation="silu", gated=None, alpha=Scalar::Layer(1.0), beta=Scalar::Layer(0.0), limit=None, clamp="before", dtype="bf16"),
    text_signature = "(w13, w2, w13_scale, w2_scale, *, w13_zeros=None, w2_zeros=None, b13=None, b2=None, layout=\"gate_up\", \
activation=\"silu\", gated=None, alpha=1.0, beta=0.0, limit=None, clamp=\"before\", dtype=\"bf16\")")]
pub fn int4_experts<'py>(
    w13: &Bound<'py, PyAny>,
    w2: &Bound<'py, PyAny>,
    w13_scale: &Bound<'py, PyAny>,
    w2_scale: &Bound<'py, PyAny>,
    w13_zeros: Option<&Bound<'py, PyAny>>,
    w2_zeros: Option<&Bound<'py, PyAny>>,
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
        let options = Options { layout, activation, gated, swiglu: given.borrow(&mut contract)?, clamp };
        let dtype = match quant::by_name(dtype) {
            Some(spec) if spec.block == 1 => spec.compute,
            _ => contract!("dtype: expected \"bf16\", \"f16\" or \"f32\", got {dtype:?}"),
        };
        let zeros = match (w13_zeros, w2_zeros) {
            (None, None) => None,
            (Some(up), Some(down)) => Some([contract.input("w13_zeros", up)?, contract.input("w2_zeros", down)?]),
            (None, _) => contract!("w13_zeros: needed where w2_zeros is given"),
            (_, None) => contract!("w2_zeros: needed where w13_zeros is given"),
        };
        if let Some(zeros) = &zeros {
            refuse_on_gpus("w13_zeros", &zeros[0])?;
            refuse_on_gpus("w2_zeros", &zeros[1])?;
        }
        let views = zeros.as_ref().map(|both| both.each_ref().map(|zeros| (**zeros).clone()));
        let arguments = Arguments { w13, w2, b13, b2, w13_scale: Some(w13_scale), w2_scale: Some(w2_scale) };
        let numbers = Numbers::Int4(Spec { dtype, zeros: views });
        // On GPUs the packed form has the zero points; these tensors are read before this call ends.
        let kept = zeros.clone().filter(|[up, _]| up.place == Place::Cpu);
        let extra = kept.into_iter().flat_map(|both| ["w13_zeros", "w2_zeros"].into_iter().zip(both)).collect();
        ExpertWeights::new(contract, &arguments, numbers, options, &given, false, extra)
    })
}
