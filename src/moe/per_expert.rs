//! alpha, beta and limit of SwiGLU: numbers of the layer, or tensors with one for each expert.

use crate::contract;
use crate::error::Result;
use crate::tensor::{Borrowed, Contract, Dim, Elem, Place};
use pyo3::prelude::*;
use pyo3::types::{PyFloat, PyInt};

pub const NAMES: [&str; 3] = ["alpha", "beta", "limit"];

/// One of the three as Python gives it.
pub enum Scalar<'py> {
    Layer(f32),
    /// fp32 [E].
    Experts(Bound<'py, PyAny>),
}

impl<'py> FromPyObject<'_, 'py> for Scalar<'py> {
    type Error = PyErr;

    fn extract(object: pyo3::Borrowed<'_, 'py, PyAny>) -> PyResult<Scalar<'py>> {
        let number = object.is_instance_of::<PyFloat>() || object.is_instance_of::<PyInt>();
        // NOTE: a tensor of one element would turn itself into a number, and wait for its GPU.
        if !number && object.hasattr("__dlpack__")? {
            return Ok(Scalar::Experts(object.to_owned()));
        }
        Ok(Scalar::Layer(object.extract()?))
    }
}

impl<'py> Scalar<'py> {
    fn object(&self, py: Python<'py>) -> Py<PyAny> {
        match self {
            Scalar::Layer(number) => PyFloat::new(py, f64::from(*number)).into_any().unbind(),
            Scalar::Experts(tensor) => tensor.clone().unbind(),
        }
    }
}

/// The three as Python gives them.
pub struct Given<'py> {
    pub alpha: Scalar<'py>,
    pub beta: Scalar<'py>,
    pub limit: Option<Scalar<'py>>,
}

impl<'py> Given<'py> {
    pub fn borrow(&self, contract: &mut Contract<'_>) -> Result<Swiglu<'py>> {
        let mut swiglu = Swiglu { alpha: 1.0, beta: 0.0, limit: None, experts: [None, None, None] };
        for (i, given) in [Some(&self.alpha), Some(&self.beta), self.limit.as_ref()].into_iter().enumerate() {
            match given {
                Some(Scalar::Experts(tensor)) => swiglu.experts[i] = Some(contract.input(NAMES[i], tensor)?),
                Some(Scalar::Layer(number)) => match i {
                    0 => swiglu.alpha = *number,
                    1 => swiglu.beta = *number,
                    _ => swiglu.limit = Some(*number),
                },
                None => {}
            }
        }
        Ok(swiglu)
    }

    /// alpha, beta and limit as attributes of `ExpertWeights`.
    pub fn objects(&self, py: Python<'py>) -> (Py<PyAny>, Py<PyAny>, Option<Py<PyAny>>) {
        (self.alpha.object(py), self.beta.object(py), self.limit.as_ref().map(|limit| limit.object(py)))
    }
}

/// The same, borrowed: numbers of the layer, neutral where the experts have their own.
pub struct Swiglu<'py> {
    pub alpha: f32,
    pub beta: f32,
    pub limit: Option<f32>,
    /// alpha, beta and limit of the experts.
    pub experts: [Option<Borrowed<'py>>; 3],
}

impl Swiglu<'_> {
    /// Whether any of the three is a tensor.
    pub fn of_experts(&self) -> bool {
        self.experts.iter().any(Option::is_some)
    }

    /// silu(gate) * up, without a bound.
    pub fn is_plain(&self) -> bool {
        self.alpha == 1.0 && self.beta == 0.0 && self.limit.is_none() && !self.of_experts()
    }

    /// Refuses numbers of the layer that are none.
    pub fn check(&self) -> Result<()> {
        if !self.alpha.is_finite() || !self.beta.is_finite() || !self.limit.is_none_or(is_limit) {
            contract!(
                "alpha and beta must be finite and limit positive, got alpha {}, beta {}, limit {:?}",
                self.alpha,
                self.beta,
                self.limit
            );
        }
        Ok(())
    }

    /// Checks the tensors: fp32 [experts] at `place`; on CPU also what is in them.
    pub fn pointers(&self, place: Place, experts: i64, limit_after: bool) -> Result<PerExpert> {
        let mut contract = Contract::new().with("w13", place, &[("experts", experts)]);
        let mut pointers = [std::ptr::null(); 3];
        for (i, tensor) in self.experts.iter().enumerate() {
            let Some(tensor) = tensor else { continue };
            let name = NAMES[i];
            contract.check(name, tensor, &[Dim::Named("experts")], &[Elem::F32])?;
            let data = tensor.data.cast::<f32>().cast_const();
            if place == Place::Cpu {
                // SAFETY: a contiguous, aligned tensor of this many numbers.
                let numbers = unsafe { std::slice::from_raw_parts(data, experts as usize) };
                let right = |number: f32| if i == 2 { is_limit(number) } else { number.is_finite() };
                if let Some(expert) = numbers.iter().position(|&number| !right(number)) {
                    let expected = if i == 2 { "positive" } else { "finite" };
                    contract!("{name}: expected {expected} numbers, got {} for expert {expert}", numbers[expert]);
                }
            }
            pointers[i] = data;
        }
        let [alpha, beta, limit] = pointers;
        Ok(PerExpert { alpha, beta, limit, limit_after })
    }
}

fn is_limit(number: f32) -> bool {
    number > 0.0
}

/// What a call reads: fp32 [experts] or null, which is the layer's number.
#[derive(Clone, Copy, Debug)]
pub struct PerExpert {
    pub alpha: *const f32,
    pub beta: *const f32,
    pub limit: *const f32,
    /// `limit` bounds the gate after the sigmoid, not before.
    pub limit_after: bool,
}

impl PerExpert {
    pub const NONE: PerExpert =
        PerExpert { alpha: std::ptr::null(), beta: std::ptr::null(), limit: std::ptr::null(), limit_after: false };
}

// SAFETY: addresses of tensors that ExpertWeights or the caller keeps alive and nobody here writes.
unsafe impl Send for PerExpert {}
// SAFETY: as above.
unsafe impl Sync for PerExpert {}
