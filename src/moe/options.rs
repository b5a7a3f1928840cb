//! The arithmetic of a layer between its GEMMs, from its Python arguments.

use super::per_expert::Swiglu;
use crate::contract;
use crate::error::{Error, Result};
use crate::params::{Activation, ActivationKind, W13Layout};
use crate::quant::arguments::w13_layout;

/// The Python arguments that describe a layer's arithmetic.
pub struct Options<'a, 'py> {
    pub layout: &'a str,
    pub activation: &'a str,
    pub gated: Option<bool>,
    pub swiglu: Swiglu<'py>,
    pub clamp: &'a str,
}

const ACTIVATIONS: &str = "gated silu, gelu, gelu_tanh; not gated relu2, silu, gelu, gelu_tanh";

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
            ("relu2", true) => {
                return Err(Error::Unsupported(format!("activation gated \"relu2\"; supported: {ACTIVATIONS}")))
            }
            (other, _) => {
                contract!("activation: expected \"silu\", \"gelu\", \"gelu_tanh\" or \"relu2\", got {other:?}")
            }
        };
        if kind != ActivationKind::Swiglu && !self.swiglu.is_plain() {
            contract!(
                "alpha, beta, limit: only for activation \"silu\" with gated weights, got them with {:?}",
                self.activation
            );
        }
        self.swiglu.check()?;
        let Swiglu { alpha, beta, limit, .. } = self.swiglu;
        let (none, limit) = (f32::INFINITY, limit.unwrap_or(f32::INFINITY));
        let (gate_limit, silu_limit) = match self.clamp {
            "before" => (limit, none),
            "after" => (none, limit),
            other => contract!("clamp: expected \"before\" or \"after\", got {other:?}"),
        };
        let kind = if self.swiglu.of_experts() { ActivationKind::ExpertSwiglu } else { kind };
        Ok(Activation { kind, alpha, beta, gate_limit, silu_limit, up_limit: limit })
    }
}
