//! `ExpertWeights`: the experts of a layer, checked and described once at load.

use super::grouped_gemm::{self, WeightMaps};
use crate::contract;
use crate::device::gpu;
use crate::error::{guard, Error, Result};
use crate::kernel;
use crate::params::{Activation, ActivationKind, Dtype, W13Layout};
use crate::tensor::{Contract, Dim, Elem, Place, TensorRef};
use pyo3::prelude::*;

/// Everything a plan needs to know of a layer's weights.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LayerDesc {
    /// Experts held here.
    pub experts: i64,
    pub hidden: i64,
    pub intermediate: i64,
    pub gated: bool,
    pub dtype: Dtype,
}

/// A weight matrix per expert, its bias and (on Hopper) its tensor maps.
#[derive(Clone, Copy, Debug)]
pub struct Matrix {
    pub data: *const u8,
    /// Null: no bias.
    pub bias: *const u8,
    pub bias_dtype: Dtype,
    pub rows: i64,
    pub k: i64,
}

// SAFETY: addresses of tensors that ExpertWeights keeps alive and never writes.
unsafe impl Send for Matrix {}
// SAFETY: as above.
unsafe impl Sync for Matrix {}

/// Weights as a call uses them: from `ExpertWeights`, or made for one call of `fused_experts`.
#[derive(Clone, Debug)]
pub struct Layer {
    pub desc: LayerDesc,
    pub place: Place,
    pub up: Matrix,
    pub down: Matrix,
    pub layout: W13Layout,
    pub activation: Activation,
    pub up_maps: WeightMaps,
    pub down_maps: WeightMaps,
}

/// The Python arguments that describe a layer's arithmetic.
pub struct Options<'a> {
    pub layout: &'a str,
    pub activation: &'a str,
    pub gated: Option<bool>,
    pub alpha: f32,
    pub beta: f32,
    pub limit: Option<f32>,
    pub clamp: &'a str,
}

const ACTIVATIONS: &str = "gated silu, gelu, gelu_tanh; not gated relu2, silu, gelu, gelu_tanh";

impl Options<'_> {
    fn gated(&self) -> bool {
        self.gated.unwrap_or(self.activation != "relu2")
    }

    fn layout(&self) -> Result<W13Layout> {
        Ok(match self.layout {
            "gate_up" => W13Layout::GateUp,
            "up_gate" => W13Layout::UpGate,
            "interleaved" => W13Layout::Interleaved,
            other => contract!("layout: expected \"gate_up\", \"up_gate\" or \"interleaved\", got {other:?}"),
        })
    }

    fn activation(&self) -> Result<Activation> {
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
        let plain = self.alpha == 1.0 && self.beta == 0.0 && self.limit.is_none();
        if kind != ActivationKind::Swiglu && !plain {
            contract!(
                "alpha, beta, limit: only for activation \"silu\" with gated weights, got them with {:?}",
                self.activation
            );
        }
        if !self.alpha.is_finite() || !self.beta.is_finite() || self.limit.is_some_and(|l| l.is_nan() || l <= 0.0) {
            contract!(
                "alpha and beta must be finite and limit positive, got alpha {}, beta {}, limit {:?}",
                self.alpha,
                self.beta,
                self.limit
            );
        }
        let (none, limit) = (f32::INFINITY, self.limit.unwrap_or(f32::INFINITY));
        let (gate_limit, silu_limit) = match self.clamp {
            "before" => (limit, none),
            "after" => (none, limit),
            other => contract!("clamp: expected \"before\" or \"after\", got {other:?}"),
        };
        Ok(Activation { kind, alpha: self.alpha, beta: self.beta, gate_limit, silu_limit, up_limit: limit })
    }
}

impl Layer {
    /// Checks the tensors and describes them. `bias` tensors may be fp32 or of the weights' dtype.
    pub fn new(
        w13: &TensorRef,
        w2: &TensorRef,
        b13: Option<&TensorRef>,
        b2: Option<&TensorRef>,
        elem: Elem,
        options: &Options<'_>,
    ) -> Result<Layer> {
        let (layout, activation, gated) = (options.layout()?, options.activation()?, options.gated());
        let mut contract = Contract::new();
        contract.check(
            "w13",
            w13,
            &[Dim::Named("experts"), Dim::Named("rows of w13"), Dim::Named("hidden")],
            &[elem],
        )?;
        let (experts, rows, hidden) = (w13.shape()[0], w13.shape()[1], w13.shape()[2]);
        if gated && rows % 2 != 0 {
            contract!("w13: dimension 1 holds gate and up rows and must be even, got {rows}");
        }
        let intermediate = if gated { rows / 2 } else { rows };
        contract.check(
            "w2",
            w2,
            &[Dim::Named("experts"), Dim::Named("hidden"), Dim::Is("intermediate", intermediate)],
            &[elem],
        )?;
        for (name, bias, dim) in [("b13", b13, "rows of w13"), ("b2", b2, "hidden")] {
            if let Some(bias) = bias {
                contract.check(name, bias, &[Dim::Named("experts"), Dim::Named(dim)], &[elem, Elem::F32])?;
            }
        }
        if experts == 0 || hidden == 0 || intermediate == 0 {
            contract!("w13: no dimension may be 0, got shape {:?}", w13.shape());
        }
        let Some(dtype) = elem.dtype() else { contract!("w13: {elem} is no compute type") };
        let limit = i32::MAX as i64;
        if experts > 4096 || rows > limit / 2 || hidden > limit / 2 {
            contract!("w13: shape {:?} is beyond 4096 experts or 2^30 rows", w13.shape());
        }
        let matrix = |t: &TensorRef, bias: Option<&TensorRef>, rows, k| Matrix {
            data: t.data,
            bias: bias.map_or(std::ptr::null(), |b| b.data.cast_const()),
            bias_dtype: bias.and_then(|b| b.elem.dtype()).unwrap_or(dtype),
            rows,
            k,
        };
        let mut layer = Layer {
            desc: LayerDesc { experts, hidden, intermediate, gated, dtype },
            place: w13.place,
            up: matrix(w13, b13, rows, hidden),
            down: matrix(w2, b2, hidden, intermediate),
            layout,
            activation,
            up_maps: WeightMaps::default(),
            down_maps: WeightMaps::default(),
        };
        if let Place::Cuda(ordinal) = layer.place {
            if dtype == Dtype::F32 {
                return Err(Error::Unsupported(
                    "float32 experts on CUDA; supported there: bfloat16, float16 (float32 runs on CPU tensors)".into(),
                ));
            }
            for (name, t) in [("w13", w13), ("w2", w2)] {
                if !(t.data as usize).is_multiple_of(16) {
                    contract!(
                        "{name}: must start at a multiple of 16 bytes, got address {:p}; pass {name}.clone()",
                        t.data
                    );
                }
            }
            let gpu = gpu(ordinal)?;
            layer.up_maps = grouped_gemm::encode(&gpu.device, &layer.desc, &layer.up, gated, layout)?;
            layer.down_maps = grouped_gemm::encode(&gpu.device, &layer.desc, &layer.down, false, layout)?;
        }
        Ok(layer)
    }
}

/// The experts of one MoE layer: checked, described and (on Hopper) tensor maps encoded once, at load. Immutable; keeps the tensors alive.
#[pyclass(frozen, module = "oxmoe", name = "ExpertWeights", subclass)]
pub struct ExpertWeights {
    pub layer: Layer,
    #[pyo3(get)]
    w13: Py<PyAny>,
    #[pyo3(get)]
    w2: Py<PyAny>,
    #[pyo3(get)]
    b13: Option<Py<PyAny>>,
    #[pyo3(get)]
    b2: Option<Py<PyAny>>,
    /// Keep the DLPack borrows of tensors that are not torch's.
    _borrows: Vec<TensorRef>,
    #[pyo3(get)]
    layout: String,
    #[pyo3(get)]
    activation: String,
    #[pyo3(get)]
    alpha: f32,
    #[pyo3(get)]
    beta: f32,
    #[pyo3(get)]
    limit: Option<f32>,
    #[pyo3(get)]
    clamp: String,
}

// SAFETY: the borrows hold addresses and Python references only; the references are dropped under the GIL by pyo3.
unsafe impl Send for ExpertWeights {}
// SAFETY: immutable.
unsafe impl Sync for ExpertWeights {}

impl ExpertWeights {
    fn new(
        elem: Elem,
        w13: &Bound<'_, PyAny>,
        w2: &Bound<'_, PyAny>,
        b13: Option<&Bound<'_, PyAny>>,
        b2: Option<&Bound<'_, PyAny>>,
        options: &Options<'_>,
    ) -> Result<ExpertWeights> {
        let mut borrows = vec![TensorRef::borrow("w13", w13)?, TensorRef::borrow("w2", w2)?];
        let mut optional = |name, bias: Option<&Bound<'_, PyAny>>| -> Result<Option<usize>> {
            let Some(bias) = bias else { return Ok(None) };
            borrows.push(TensorRef::borrow(name, bias)?);
            Ok(Some(borrows.len() - 1))
        };
        let (i13, i2) = (optional("b13", b13)?, optional("b2", b2)?);
        let layer =
            Layer::new(&borrows[0], &borrows[1], i13.map(|i| &borrows[i]), i2.map(|i| &borrows[i]), elem, options)?;
        if let Place::Cuda(ordinal) = layer.place {
            let gpu = gpu(ordinal)?;
            kernel::prepare(gpu, &super::plan::reachable(&gpu.device, &layer.desc))?;
        }
        let own = |o: Option<&Bound<'_, PyAny>>| o.map(|o| o.clone().unbind());
        Ok(ExpertWeights {
            layer,
            w13: w13.clone().unbind(),
            w2: w2.clone().unbind(),
            b13: own(b13),
            b2: own(b2),
            _borrows: borrows,
            layout: options.layout.into(),
            activation: options.activation.into(),
            alpha: options.alpha,
            beta: options.beta,
            limit: options.limit,
            clamp: options.clamp.into(),
        })
    }
}

/// One constructor per format; they differ in the element type alone.
macro_rules! constructors {
    ($($(#[$doc:meta])* $name:ident = $elem:expr;)*) => {
        #[pymethods]
        impl ExpertWeights {
            $(
                $(#[$doc])*
                #[staticmethod]
                #[allow(clippy::too_many_arguments)] // keyword arguments of Python, not positions
                #[pyo3(signature = (w13, w2, *, b13=None, b2=None, layout="gate_up", activation="silu", gated=None, alpha=1.0, beta=0.0, limit=None, clamp="before"))]
                fn $name(
                    w13: &Bound<'_, PyAny>,
                    w2: &Bound<'_, PyAny>,
                    b13: Option<&Bound<'_, PyAny>>,
                    b2: Option<&Bound<'_, PyAny>>,
                    layout: &str,
                    activation: &str,
                    gated: Option<bool>,
                    alpha: f32,
                    beta: f32,
                    limit: Option<f32>,
                    clamp: &str,
                ) -> PyResult<ExpertWeights> {
                    let options = Options { layout, activation, gated, alpha, beta, limit, clamp };
                    guard(|| ExpertWeights::new($elem, w13, w2, b13, b2, &options))
                }
            )*

            /// Experts held here.
            #[getter]
            fn num_experts(&self) -> i64 {
                self.layer.desc.experts
            }

            #[getter]
            fn hidden_size(&self) -> i64 {
                self.layer.desc.hidden
            }

            #[getter]
            fn intermediate_size(&self) -> i64 {
                self.layer.desc.intermediate
            }

            #[getter]
            fn gated(&self) -> bool {
                self.layer.desc.gated
            }

            /// "bf16", "f16" or "f32".
            #[getter]
            fn format(&self) -> &'static str {
                crate::quant::name(self.layer.desc.dtype)
            }

            /// "cpu" or "cuda:0".
            #[getter]
            fn device(&self) -> String {
                self.layer.place.to_string()
            }

            fn __repr__(&self) -> String {
                let d = &self.layer.desc;
                format!(
                    "ExpertWeights.{}(experts={}, hidden={}, intermediate={}, activation={:?}, layout={:?}, device={})",
                    self.format(), d.experts, d.hidden, d.intermediate, self.activation, self.layout, self.layer.place
                )
            }
        }
    };
}

constructors! {
    /// bf16 experts: w13 [El, 2I, H] ([El, I, H] when not gated), w2 [El, H, I], biases bf16 or fp32.
    ///
    /// silu with alpha, beta, limit: `silu'(g) * (u + beta)`, `silu'(g) = g sigmoid(alpha g)`, |u| <= limit, and g <= limit
    /// (clamp="before") or silu'(g) <= limit (clamp="after"). GPT-OSS: layout="interleaved", alpha=1.702, beta=1.0, limit=7.0.
    bf16 = Elem::Bf16;
    /// fp16 experts, as bf16.
    f16 = Elem::F16;
    /// fp32 experts on CPU, as bf16.
    f32 = Elem::F32;
}
