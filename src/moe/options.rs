//! The arithmetic of a layer between its GEMMs, read from the Python arguments.

use super::operands::Arguments;
use super::per_expert::{Given, Scalar, Scalars};
use crate::contract;
use crate::error::{Error, Result};
use crate::params::{Activation, ActivationKind, Dtype, W13Layout};
use crate::python::extract;
use crate::quant;
use crate::quant::arguments::w13_layout;
use crate::tensor::Contract;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString};

/// The Python arguments that describe a layer's arithmetic.
pub struct Options<'a, 'py> {
    pub layout: &'a str,
    pub activation: &'a str,
    pub gated: Option<bool>,
    pub scalars: Scalars<'py>,
    pub clamp: &'a str,
}

const ACTIVATIONS: &str = "gated silu, gelu, gelu_tanh, situ; not gated relu2, silu, gelu, gelu_tanh";

impl Options<'_, '_> {
    pub fn gated(&self) -> bool {
        self.gated.unwrap_or(self.activation != "relu2")
    }

    pub fn layout(&self) -> Result<W13Layout> {
        w13_layout(self.layout)
    }

    pub fn activation(&self) -> Result<Activation> {
        let gated = self.gated();
        let kind = match (self.activation, gated) {
            ("silu", true) => ActivationKind::Swiglu,
            ("gelu", true) => ActivationKind::Geglu,
            ("gelu_tanh", true) => ActivationKind::GegluTanh,
            ("relu2", false) => ActivationKind::Relu2,
            ("silu", false) => ActivationKind::Silu,
            ("gelu", false) => ActivationKind::Gelu,
            ("gelu_tanh", false) => ActivationKind::GeluTanh,
            ("situ", true) => ActivationKind::Situ,
            ("relu2", true) => {
                return Err(Error::Unsupported(format!("activation gated \"relu2\"; supported: {ACTIVATIONS}")))
            }
            ("situ", false) => {
                return Err(Error::Unsupported(format!("activation \"situ\" without gates; supported: {ACTIVATIONS}")))
            }
            (other, _) => {
                contract!(
                    "activation: expected \"silu\", \"gelu\", \"gelu_tanh\", \"relu2\" or \"situ\", got {other:?}"
                )
            }
        };
        let scalars = &self.scalars;
        scalars.check_read(kind, self.activation)?;
        scalars.check()?;
        let (none, limit) = (f32::INFINITY, scalars.limit());
        let (gate_limit, silu_limit) = match self.clamp {
            "before" => (limit, none),
            "after" => (none, limit),
            other => contract!("clamp: expected \"before\" or \"after\", got {other:?}"),
        };
        let (kind, alpha, beta) = match kind {
            ActivationKind::Situ => (kind, scalars.situ_beta(), scalars.situ_linear_beta()),
            _ if scalars.of_experts() => (ActivationKind::ExpertSwiglu, scalars.alpha(), scalars.beta()),
            _ => (kind, scalars.alpha(), scalars.beta()),
        };
        Ok(Activation { kind, alpha, beta, gate_limit, silu_limit, up_limit: limit })
    }
}

/// The type of activations and products that an option `dtype` names.
pub fn compute_type(dtype: &str) -> Result<Dtype> {
    match quant::by_name(dtype) {
        Some(spec) if spec.block == 1 => Ok(spec.compute),
        _ => contract!("dtype: expected \"bf16\", \"f16\" or \"f32\", got {dtype:?}"),
    }
}

/// The type of activations and products that an argument `dtype` of Python names: by its own name, or by torch's dtype.
#[derive(Clone, Copy)]
pub struct Compute(pub Dtype);

impl FromPyObject<'_, '_> for Compute {
    type Error = PyErr;

    fn extract(object: pyo3::Borrowed<'_, '_, PyAny>) -> PyResult<Compute> {
        let text = object.str()?.to_string();
        let Some(of_torch) = text.strip_prefix("torch.").filter(|_| !object.is_instance_of::<PyString>()) else {
            return Ok(Compute(compute_type(&object.extract::<String>()?)?));
        };
        match of_torch {
            "bfloat16" => Ok(Compute(Dtype::Bf16)),
            "float16" => Ok(Compute(Dtype::F16)),
            "float32" => Ok(Compute(Dtype::F32)),
            _ => Err(PyValueError::new_err(format!(
                "dtype: expected torch.bfloat16, torch.float16 or torch.float32, or \"bf16\", \"f16\" or \"f32\", got {text}"
            ))),
        }
    }
}

/// The options that every constructor of `ExpertWeights` has, as Python gives them.
pub struct Common<'py> {
    pub b13: Option<Bound<'py, PyAny>>,
    pub b2: Option<Bound<'py, PyAny>>,
    pub layout: String,
    pub activation: String,
    pub gated: Option<bool>,
    pub given: Given<'py>,
    pub clamp: String,
}

impl<'py> Common<'py> {
    /// Reads the keyword arguments that are not a format's own. `constructor`: the constructor's name in errors.
    pub fn new(constructor: &str, options: Option<&Bound<'py, PyDict>>) -> PyResult<Common<'py>> {
        let mut common = Common {
            b13: None,
            b2: None,
            layout: "gate_up".into(),
            activation: "silu".into(),
            gated: None,
            given: Given {
                alpha: Scalar::Layer(1.0),
                beta: Scalar::Layer(0.0),
                limit: None,
                situ_beta: None,
                situ_linear_beta: None,
            },
            clamp: "before".into(),
        };
        for (name, value) in options.into_iter().flatten() {
            let name: String = name.extract()?;
            match name.as_str() {
                "b13" => common.b13 = extract(&name, &value)?,
                "b2" => common.b2 = extract(&name, &value)?,
                "layout" => common.layout = extract(&name, &value)?,
                "activation" => common.activation = extract(&name, &value)?,
                "gated" => common.gated = extract(&name, &value)?,
                "alpha" => common.given.alpha = extract(&name, &value)?,
                "beta" => common.given.beta = extract(&name, &value)?,
                "limit" => common.given.limit = extract(&name, &value)?,
                "situ_beta" => common.given.situ_beta = extract(&name, &value)?,
                "situ_linear_beta" => common.given.situ_linear_beta = extract(&name, &value)?,
                "clamp" => common.clamp = extract(&name, &value)?,
                _ => {
                    let text = format!("{constructor}() got an unexpected keyword argument '{name}'");
                    return Err(PyTypeError::new_err(text));
                }
            }
        }
        Ok(common)
    }

    /// The layer's tensors: these weights and scales, and the biases.
    pub fn arguments<'a>(
        &'a self,
        [w13, w2]: [&'a Bound<'py, PyAny>; 2],
        [w13_scale, w2_scale]: [Option<&'a Bound<'py, PyAny>>; 2],
    ) -> Arguments<'a, 'py> {
        Arguments { w13, w2, b13: self.b13.as_ref(), b2: self.b2.as_ref(), w13_scale, w2_scale }
    }

    /// The arithmetic, whose numbers of experts the contract borrows.
    pub fn options(&self, contract: &mut Contract<'_>) -> Result<Options<'_, 'py>> {
        let Common { layout, activation, gated, given, clamp, .. } = self;
        Ok(Options { layout, activation, gated: *gated, scalars: given.borrow(contract)?, clamp })
    }
}
