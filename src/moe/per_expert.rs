//! The numbers of activations: alpha, beta and limit of SwiGLU, situ_beta and situ_linear_beta of SiTU. They are numbers of the layer, or tensors
//! with one for each expert.

use crate::contract;
use crate::error::Result;
use crate::params::ActivationKind;
use crate::tensor::{Borrowed, Contract, Dim, Elem, Place};
use pyo3::prelude::*;
use pyo3::types::{PyFloat, PyInt};

pub const NAMES: [&str; 5] = ["alpha", "beta", "limit", "situ_beta", "situ_linear_beta"];
const LIMIT: usize = 2;
/// SiTU's numbers in `NAMES`.
const SITU: std::ops::Range<usize> = 3..5;
/// situ_beta of SiTU if none is given. It is Kimi-K3's, and the default of SGLang's and flashinfer's kernels.
const SITU_BETA: f32 = 4.0;

/// One of the numbers, as Python gives it.
pub enum Scalar<'py> {
    /// A number of the layer.
    Layer(f32),
    /// A tensor, fp32 [E].
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

/// The numbers, as Python gives them. None is the activation's default.
pub struct Given<'py> {
    pub alpha: Scalar<'py>,
    pub beta: Scalar<'py>,
    pub limit: Option<Scalar<'py>>,
    pub situ_beta: Option<Scalar<'py>>,
    pub situ_linear_beta: Option<Scalar<'py>>,
}

/// The numbers as attributes of `ExpertWeights`.
pub struct Objects {
    pub alpha: Py<PyAny>,
    pub beta: Py<PyAny>,
    pub limit: Option<Py<PyAny>>,
    pub situ_beta: Option<Py<PyAny>>,
    pub situ_linear_beta: Option<Py<PyAny>>,
}

impl<'py> Given<'py> {
    pub fn borrow(&self, contract: &mut Contract<'_>) -> Result<Scalars<'py>> {
        let Given { alpha, beta, limit, situ_beta, situ_linear_beta } = self;
        let all = [Some(alpha), Some(beta), limit.as_ref(), situ_beta.as_ref(), situ_linear_beta.as_ref()];
        let mut numbers = Scalars { layer: [None; 5], experts: [const { None }; 5] };
        for (i, given) in all.into_iter().enumerate() {
            match given {
                Some(Scalar::Experts(tensor)) => numbers.experts[i] = Some(contract.input(NAMES[i], tensor)?),
                Some(Scalar::Layer(number)) => numbers.layer[i] = Some(*number),
                None => {}
            }
        }
        Ok(numbers)
    }

    /// The attributes of `ExpertWeights` with this kind of activation.
    pub fn objects(&self, py: Python<'py>, kind: ActivationKind) -> Objects {
        let object = |given: &Option<Scalar<'py>>| given.as_ref().map(|number| number.object(py));
        let situ_beta = (kind == ActivationKind::Situ).then(|| Scalar::Layer(SITU_BETA).object(py));
        Objects {
            alpha: self.alpha.object(py),
            beta: self.beta.object(py),
            limit: object(&self.limit),
            situ_beta: object(&self.situ_beta).or(situ_beta),
            situ_linear_beta: object(&self.situ_linear_beta),
        }
    }
}

/// The numbers, borrowed for one call, in the order of `NAMES`.
pub struct Scalars<'py> {
    layer: [Option<f32>; 5],
    /// Tensors with a number for each expert.
    pub experts: [Option<Borrowed<'py>>; 5],
}

impl Scalars<'_> {
    /// The layer's alpha. It is 1 if the experts have their own.
    pub fn alpha(&self) -> f32 {
        self.layer[0].unwrap_or(1.0)
    }

    pub fn beta(&self) -> f32 {
        self.layer[1].unwrap_or(0.0)
    }

    pub fn limit(&self) -> f32 {
        self.layer[LIMIT].unwrap_or(f32::INFINITY)
    }

    pub fn situ_beta(&self) -> f32 {
        self.layer[SITU.start].unwrap_or(SITU_BETA)
    }

    /// The layer's situ_linear_beta. It is +inf if up has no bound.
    pub fn situ_linear_beta(&self) -> f32 {
        self.layer[SITU.start + 1].unwrap_or(f32::INFINITY)
    }

    /// Whether any of the numbers is a tensor.
    pub fn of_experts(&self) -> bool {
        self.experts.iter().any(Option::is_some)
    }

    /// Refuses numbers that activations of this kind do not read. `activation`: the activation's name in errors.
    pub fn check_read(&self, kind: ActivationKind, activation: &str) -> Result<()> {
        let swiglu = self.experts[..SITU.start].iter().any(Option::is_some);
        let plain = self.alpha() == 1.0 && self.beta() == 0.0 && self.layer[LIMIT].is_none() && !swiglu;
        if kind != ActivationKind::Swiglu && !plain {
            contract!(
                "alpha, beta, limit: only for activation \"silu\" with gated weights, got them with {activation:?}"
            );
        }
        let given = |i: usize| self.layer[i].is_some() || self.experts[i].is_some();
        if let Some(i) = SITU.into_iter().find(|&i| kind != ActivationKind::Situ && given(i)) {
            contract!("{}: only for activation \"situ\", got it with {activation:?}", NAMES[i]);
        }
        Ok(())
    }

    /// Refuses numbers of the layer that are out of range.
    pub fn check(&self) -> Result<()> {
        for (name, number) in [("alpha", self.alpha()), ("beta", self.beta())] {
            if !number.is_finite() {
                contract!("{name}: expected a finite number, got {number}");
            }
        }
        if let Some(limit) = self.layer[LIMIT].filter(|&limit| !is_limit(limit)) {
            contract!("limit: expected a positive number or None (no limit), got {limit}");
        }
        for i in SITU {
            if let Some(number) = self.layer[i].filter(|&number| !is_situ(number)) {
                contract!("{}: expected a number from 2^-60 to 2^60, got {number}", NAMES[i]);
            }
        }
        Ok(())
    }

    /// Checks that the tensors are fp32 [experts] at `place`; on CPUs also checks their numbers.
    pub fn pointers(&self, place: Place, experts: i64, limit_after: bool) -> Result<PerExpert> {
        let mut contract = Contract::new().with("w13", place, &[("experts", experts)]);
        let mut pointers = [std::ptr::null(); 5];
        for (i, tensor) in self.experts.iter().enumerate() {
            let Some(tensor) = tensor else { continue };
            let name = NAMES[i];
            contract.check(name, tensor, &[Dim::Named("experts")], &[Elem::F32])?;
            let data = tensor.data.cast::<f32>().cast_const();
            if place == Place::Cpu {
                // SAFETY: `check` saw a contiguous, aligned tensor of this many numbers.
                let numbers = unsafe { std::slice::from_raw_parts(data, experts as usize) };
                let (right, expected): (fn(f32) -> bool, _) = match i {
                    LIMIT => (is_limit, "positive numbers"),
                    i if SITU.contains(&i) => (is_situ, "numbers from 2^-60 to 2^60"),
                    _ => (f32::is_finite, "finite numbers"),
                };
                if let Some(expert) = numbers.iter().position(|&number| !right(number)) {
                    contract!("{name}: expected {expected}, got {} for expert {expert}", numbers[expert]);
                }
            }
            pointers[i] = data;
        }
        // SwiGLU and SiTU read none of each other's numbers.
        let [alpha, beta, limit, situ_beta, situ_linear_beta] = pointers;
        let either = |a: *const f32, b: *const f32| if a.is_null() { b } else { a };
        Ok(PerExpert { alpha: either(alpha, situ_beta), beta: either(beta, situ_linear_beta), limit, limit_after })
    }
}

fn is_limit(number: f32) -> bool {
    number > 0.0
}

/// The range is bounded because kernels multiply by the reciprocal, and by 7.
fn is_situ(number: f32) -> bool {
    (2f32.powi(-60)..=2f32.powi(60)).contains(&number)
}

/// The numbers that a call reads: fp32 [experts], or null if the layer's number serves all experts. For SiTU, alpha and beta are situ_beta
/// and situ_linear_beta.
#[derive(Clone, Copy, Debug)]
pub struct PerExpert {
    pub alpha: *const f32,
    pub beta: *const f32,
    pub limit: *const f32,
    /// Whether `limit` bounds the gate after the sigmoid, not before.
    pub limit_after: bool,
}

impl PerExpert {
    pub const NONE: PerExpert =
        PerExpert { alpha: std::ptr::null(), beta: std::ptr::null(), limit: std::ptr::null(), limit_after: false };
}

// SAFETY: the addresses are of tensors that ExpertWeights or the caller keeps alive and nobody here writes.
unsafe impl Send for PerExpert {}
// SAFETY: the tensors are kept alive and not written here; see `Send`.
unsafe impl Sync for PerExpert {}
