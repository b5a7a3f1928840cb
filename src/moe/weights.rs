//! `ExpertWeights`: the experts of a layer, checked and described once at load.

pub mod handle;

use super::formats::plain::Plain;
use super::formats::{self, fp8, fp8_tensor, mxfp4, mxfp8, Source};
use super::layer::Layer;
use super::operands::{Arguments, Extra, Operands};
use super::options::{Common, Compute, Options};
use super::per_expert::Given;
use super::per_expert::NAMES;
use crate::contract;
use crate::counters;
use crate::desc::LayerDesc;
use crate::device::gpu;
use crate::error::{guard, Result};
use crate::kernel;
use crate::params::Dtype;
use crate::quant::arguments::is_e4m3;
use crate::quant::{self, Format};
use crate::tensor::{Contract, Elem, Owned, Place, Span};
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// Codes, scales and expert_scales of packed weights, as attributes.
type PackedObjects = (Py<PyAny>, Py<PyAny>, Py<PyAny>);

#[doc = crate::help!("ExpertWeights")]
#[pyclass(frozen, module = "oxmoe", name = "ExpertWeights", subclass, weakref)]
pub struct ExpertWeights {
    layer: Layer,
    /// The number by which operators name these experts.
    handle: i64,
    /// The memory of the layer that calls read.
    spans: Vec<Span>,
    /// The tensors in which `spans` lie.
    owned: Vec<Owned>,
    #[doc = crate::help!("ExpertWeights.w13")]
    #[pyo3(get)]
    w13: Option<Py<PyAny>>,
    #[doc = crate::help!("ExpertWeights.w2")]
    #[pyo3(get)]
    w2: Option<Py<PyAny>>,
    #[doc = crate::help!("ExpertWeights.b13")]
    #[pyo3(get)]
    pub(super) b13: Option<Py<PyAny>>,
    #[doc = crate::help!("ExpertWeights.b2")]
    #[pyo3(get)]
    b2: Option<Py<PyAny>>,
    #[doc = crate::help!("ExpertWeights.w13_scale")]
    #[pyo3(get)]
    w13_scale: Option<Py<PyAny>>,
    #[doc = crate::help!("ExpertWeights.w2_scale")]
    #[pyo3(get)]
    w2_scale: Option<Py<PyAny>>,
    #[doc = crate::help!("ExpertWeights.a13_scale")]
    #[pyo3(get)]
    a13_scale: Option<Py<PyAny>>,
    #[doc = crate::help!("ExpertWeights.a2_scale")]
    #[pyo3(get)]
    a2_scale: Option<Py<PyAny>>,
    #[doc = crate::help!("ExpertWeights.w13_packed")]
    #[pyo3(get)]
    w13_packed: Option<PackedObjects>,
    #[doc = crate::help!("ExpertWeights.w2_packed")]
    #[pyo3(get)]
    w2_packed: Option<PackedObjects>,
    #[doc = crate::help!("ExpertWeights.layout")]
    #[pyo3(get)]
    layout: String,
    #[doc = crate::help!("ExpertWeights.activation")]
    #[pyo3(get)]
    activation: String,
    #[doc = crate::help!("ExpertWeights.alpha")]
    #[pyo3(get)]
    alpha: Py<PyAny>,
    #[doc = crate::help!("ExpertWeights.beta")]
    #[pyo3(get)]
    beta: Py<PyAny>,
    #[doc = crate::help!("ExpertWeights.limit")]
    #[pyo3(get)]
    limit: Option<Py<PyAny>>,
    #[doc = crate::help!("ExpertWeights.situ_beta")]
    #[pyo3(get)]
    situ_beta: Option<Py<PyAny>>,
    #[doc = crate::help!("ExpertWeights.situ_linear_beta")]
    #[pyo3(get)]
    situ_linear_beta: Option<Py<PyAny>>,
    #[doc = crate::help!("ExpertWeights.clamp")]
    #[pyo3(get)]
    clamp: String,
}

impl ExpertWeights {
    /// The layer for a call, or an error if memory that it reads is no longer where it was.
    pub fn layer(&self, py: Python<'_>) -> Result<&Layer> {
        for owned in &self.owned {
            owned.unchanged(py)?;
        }
        Ok(&self.layer)
    }

    /// The memory of the layer that calls read.
    pub fn spans(&self) -> &[Span] {
        &self.spans
    }

    /// The layer's shape. It needs no check, because it names no memory.
    pub fn desc(&self) -> &LayerDesc {
        &self.layer.desc
    }

    pub fn new<'py>(
        mut contract: Contract<'_>,
        arguments: &Arguments<'_, 'py>,
        source: &dyn Source,
        options: Options<'_, 'py>,
        given: &Given<'py>,
        extra: Vec<Extra<'py>>,
    ) -> Result<ExpertWeights> {
        let in_place = source.in_place();
        let operands = Operands::borrow(&mut contract, arguments, (!source.has_e8m0_scales(), in_place))?;
        let mut layer = formats::layer(&operands, source, &options)?;
        let mut packed = None;
        if let Place::Cuda(ordinal) = layer.place {
            let gpu = gpu(ordinal)?;
            let kernels = super::plan::reachable(&gpu.device, &layer.desc);
            kernel::prepare(gpu, &kernels)?;
            counters::prepare(gpu, &kernels)?;
            if layer.desc.format.is_packed() {
                packed = Some(source.pack(&mut layer, &mut contract, &operands)?);
            }
        } else if in_place {
            contract!("in_place: only for weights on CUDA, w13 is on {}", layer.place);
        }
        let own = |o: Option<&Bound<'_, PyAny>>| o.map(|o| o.clone().unbind());
        let numbers = given.objects(arguments.w13.py(), layer.activation.kind);
        let Operands { w13, w2, b13, b2, scales } = operands;
        let biases = [("b13", b13), ("b2", b2)].into_iter().chain(NAMES.into_iter().zip(options.scalars.experts));
        let mut read: Vec<Extra<'py>> =
            biases.filter_map(|(name, tensor)| Some((name, tensor?))).chain(extra).collect();
        // A layer that was packed keeps nothing that it does not read.
        let (mut weights, mut weight_scales) = ([None, None], [None, None]);
        let [w13_packed, w2_packed] = match packed {
            Some(pair) => pair.map(|tensors| {
                let objects = tensors.each_ref().map(|(_, tensor)| tensor.object().clone().unbind());
                read.extend(tensors);
                Some(objects.into())
            }),
            None => {
                weights = [&w13, &w2].map(|w| Some(w.object().clone().unbind()));
                read.extend([("w13", w13), ("w2", w2)]);
                if let Some(scales) = scales {
                    weight_scales = scales.each_ref().map(|scale| Some(scale.object().clone().unbind()));
                    read.extend(["w13_scale", "w2_scale"].into_iter().zip(scales));
                }
                [None, None]
            }
        };
        let owned = read.iter().map(|(name, tensor)| Owned::new(name, tensor)).collect::<Result<Vec<_>>>()?;
        let spans = layer.spans();
        if let Some(span) = spans.iter().find(|span| !owned.iter().any(|owned| owned.covers(span))) {
            panic!("nothing keeps {} alive", span.operand);
        }
        let ([w13, w2], [w13_scale, w2_scale]) = (weights, weight_scales);
        Ok(ExpertWeights {
            layer,
            handle: handle::next(),
            spans,
            owned,
            w13,
            w2,
            b13: own(arguments.b13),
            b2: own(arguments.b2),
            w13_scale,
            w2_scale,
            a13_scale: None,
            a2_scale: None,
            w13_packed,
            w2_packed,
            layout: options.layout.into(),
            activation: options.activation.into(),
            alpha: numbers.alpha,
            beta: numbers.beta,
            limit: numbers.limit,
            situ_beta: numbers.situ_beta,
            situ_linear_beta: numbers.situ_linear_beta,
            clamp: options.clamp.into(),
        })
    }
}

/// The constructors of plain formats, which differ in the element type alone, and of formats that a call takes as bare tensors too. The
/// other constructors are in their formats' files (`formats::add_constructors`).
macro_rules! constructors {
    ($($name:ident = $elem:expr;)*) => {
        #[pymethods]
        #[pyo3(crate = "crate::python")]
        impl ExpertWeights {
            $(
                #[doc = crate::help!("ExpertWeights.", $name)]
                #[staticmethod]
                #[pyo3(signature = (w13, w2, **options),
                    text_signature = "(w13, w2, *, b13=None, b2=None, layout=\"gate_up\", activation=\"silu\", gated=None, alpha=1.0, beta=0.0, limit=None, clamp=\"before\", situ_beta=None, situ_linear_beta=None)")]
                fn $name<'py>(
                    w13: &Bound<'py, PyAny>,
                    w2: &Bound<'py, PyAny>,
                    options: Option<&Bound<'py, PyDict>>,
                ) -> PyResult<ExpertWeights> {
                    let common = Common::new(concat!("ExpertWeights.", stringify!($name)), options)?;
                    guard(|| {
                        let mut contract = Contract::new();
                        let options = common.options(&mut contract)?;
                        let arguments = common.arguments([w13, w2], [None, None]);
                        ExpertWeights::new(contract, &arguments, &Plain($elem), options, &common.given, Vec::new())
                    })
                }
            )*

            #[doc = crate::help!("ExpertWeights.mxfp4")]
            #[staticmethod]
            #[allow(clippy::too_many_arguments)] // keyword arguments of Python, not positions
            #[pyo3(signature = (w13, w2, w13_scale, w2_scale, *, dtype=Compute(Dtype::Bf16), hidden_size=None, in_place=false, activation_dtype=None, **options),
                text_signature = "(w13, w2, w13_scale, w2_scale, *, b13=None, b2=None, layout=\"gate_up\", activation=\"silu\", gated=None, alpha=1.0, beta=0.0, limit=None, clamp=\"before\", situ_beta=None, situ_linear_beta=None, dtype=\"bf16\", hidden_size=None, in_place=False, activation_dtype=None)")]
            fn mxfp4<'py>(
                w13: &Bound<'py, PyAny>,
                w2: &Bound<'py, PyAny>,
                w13_scale: &Bound<'py, PyAny>,
                w2_scale: &Bound<'py, PyAny>,
                dtype: Compute,
                hidden_size: Option<i64>,
                in_place: bool,
                activation_dtype: Option<&Bound<'py, PyAny>>,
                options: Option<&Bound<'py, PyDict>>,
            ) -> PyResult<ExpertWeights> {
                let common = Common::new("ExpertWeights.mxfp4", options)?;
                guard(|| {
                    let mut contract = Contract::new();
                    let options = common.options(&mut contract)?;
                    let arguments = common.arguments([w13, w2], [Some(w13_scale), Some(w2_scale)]);
                    let (Compute(dtype), e4m3) = (dtype, is_e4m3(activation_dtype)?);
                    let spec = mxfp4::Spec { dtype, e4m3, hidden: hidden_size, in_place };
                    ExpertWeights::new(contract, &arguments, &spec, options, &common.given, Vec::new())
                })
            }

            #[doc = crate::help!("ExpertWeights.fp8_block")]
            #[staticmethod]
            #[pyo3(signature = (w13, w2, w13_scale, w2_scale, **options),
                text_signature = "(w13, w2, w13_scale, w2_scale, *, b13=None, b2=None, layout=\"gate_up\", activation=\"silu\", gated=None, alpha=1.0, beta=0.0, limit=None, clamp=\"before\", situ_beta=None, situ_linear_beta=None)")]
            fn fp8_block<'py>(
                w13: &Bound<'py, PyAny>,
                w2: &Bound<'py, PyAny>,
                w13_scale: &Bound<'py, PyAny>,
                w2_scale: &Bound<'py, PyAny>,
                options: Option<&Bound<'py, PyDict>>,
            ) -> PyResult<ExpertWeights> {
                let common = Common::new("ExpertWeights.fp8_block", options)?;
                guard(|| {
                    let mut contract = Contract::new();
                    let options = common.options(&mut contract)?;
                    let arguments = common.arguments([w13, w2], [Some(w13_scale), Some(w2_scale)]);
                    let scaling = fp8::Scaling::from(fp8::Activations::Groups);
                    ExpertWeights::new(contract, &arguments, &scaling, options, &common.given, Vec::new())
                })
            }

            #[doc = crate::help!("ExpertWeights.fp8_tensor")]
            #[staticmethod]
            #[allow(clippy::too_many_arguments)] // keyword arguments of Python, not positions
            #[pyo3(signature = (w13, w2, w13_scale, w2_scale, *, a13_scale=None, a2_scale=None, per_token=None, **options),
                text_signature = "(w13, w2, w13_scale, w2_scale, *, a13_scale=None, a2_scale=None, per_token=None, b13=None, b2=None, layout=\"gate_up\", activation=\"silu\", gated=None, alpha=1.0, beta=0.0, limit=None, clamp=\"before\", situ_beta=None, situ_linear_beta=None)")]
            fn fp8_tensor<'py>(
                w13: &Bound<'py, PyAny>,
                w2: &Bound<'py, PyAny>,
                w13_scale: &Bound<'py, PyAny>,
                w2_scale: &Bound<'py, PyAny>,
                a13_scale: Option<&Bound<'py, PyAny>>,
                a2_scale: Option<&Bound<'py, PyAny>>,
                per_token: Option<bool>,
                options: Option<&Bound<'py, PyDict>>,
            ) -> PyResult<ExpertWeights> {
                let common = Common::new("ExpertWeights.fp8_tensor", options)?;
                guard(|| {
                    let mut contract = Contract::new();
                    let options = common.options(&mut contract)?;
                    let (scales, of_x) = ([Some(w13_scale), Some(w2_scale)], [a13_scale, a2_scale]);
                    let gated = options.gated();
                    let weights = (w13, w2, common.b13.as_ref());
                    let tensor = fp8_tensor::prepare(&mut contract, weights, scales, of_x, per_token, gated)?;
                    let arguments = common.arguments([w13, w2], tensor.tables.each_ref().map(Some));
                    let (scaling, extra) = (tensor.scaling(), tensor.tensors());
                    let mut made = ExpertWeights::new(contract, &arguments, &scaling, options, &common.given, extra)?;
                    let ExpertWeights { w13_scale, w2_scale, a13_scale, a2_scale, b13, .. } = &mut made;
                    tensor.show([w13_scale, w2_scale, a13_scale, a2_scale, b13]);
                    Ok(made)
                })
            }

            #[doc = crate::help!("ExpertWeights.mxfp8")]
            #[staticmethod]
            #[allow(clippy::too_many_arguments)] // keyword arguments of Python, not positions
            #[pyo3(signature = (w13, w2, w13_scale, w2_scale, *, hidden_size=None, in_place=false, **options),
                text_signature = "(w13, w2, w13_scale, w2_scale, *, b13=None, b2=None, layout=\"gate_up\", activation=\"silu\", gated=None, alpha=1.0, beta=0.0, limit=None, clamp=\"before\", situ_beta=None, situ_linear_beta=None, hidden_size=None, in_place=False)")]
            fn mxfp8<'py>(
                w13: &Bound<'py, PyAny>,
                w2: &Bound<'py, PyAny>,
                w13_scale: &Bound<'py, PyAny>,
                w2_scale: &Bound<'py, PyAny>,
                hidden_size: Option<i64>,
                in_place: bool,
                options: Option<&Bound<'py, PyDict>>,
            ) -> PyResult<ExpertWeights> {
                let common = Common::new("ExpertWeights.mxfp8", options)?;
                guard(|| {
                    let mut contract = Contract::new();
                    let options = common.options(&mut contract)?;
                    let arguments = common.arguments([w13, w2], [Some(w13_scale), Some(w2_scale)]);
                    let spec = mxfp8::Spec { hidden: hidden_size, in_place };
                    ExpertWeights::new(contract, &arguments, &spec, options, &common.given, Vec::new())
                })
            }

            #[doc = crate::help!("ExpertWeights.handle")]
            #[getter]
            fn handle(slf: &Bound<'_, Self>) -> PyResult<i64> {
                handle::of(slf)
            }

            #[doc = crate::help!("ExpertWeights.num_experts")]
            #[getter]
            fn num_experts(&self) -> i64 {
                self.layer.desc.experts
            }

            #[doc = crate::help!("ExpertWeights.hidden_size")]
            #[getter]
            fn hidden_size(&self) -> i64 {
                self.layer.desc.hidden
            }

            #[doc = crate::help!("ExpertWeights.intermediate_size")]
            #[getter]
            fn intermediate_size(&self) -> i64 {
                self.layer.desc.intermediate
            }

            #[doc = crate::help!("ExpertWeights.gated")]
            #[getter]
            fn gated(&self) -> bool {
                self.layer.desc.gated
            }

            #[doc = crate::help!("ExpertWeights.format")]
            #[getter]
            fn format(&self) -> &'static str {
                self.layer.desc.format.spec().name
            }

            #[doc = crate::help!("ExpertWeights.dtype")]
            #[getter]
            fn dtype(&self) -> &'static str {
                quant::name(self.layer.desc.dtype)
            }

            #[doc = crate::help!("ExpertWeights.device")]
            #[getter]
            fn device(&self) -> String {
                self.layer.place.to_string()
            }

            fn __repr__(&self) -> String {
                let d = &self.layer.desc;
                let dtype = match d.format {
                    Format::Mxfp4 => format!(", dtype={:?}", self.dtype()),
                    Format::Mxfp4A8 => ", activation_dtype=float8_e4m3fn".into(),
                    Format::Fp8Tensor => ", per_token=False".into(),
                    Format::Fp8TensorStatic => ", a13_scale, a2_scale".into(),
                    _ => String::new(),
                };
                let name = self.format().split('-').next().unwrap_or_default();
                format!(
                    "ExpertWeights.{name}(experts={}, hidden={}, intermediate={}, activation={:?}, layout={:?}{dtype}, device={})",
                    d.experts, d.hidden, d.intermediate, self.activation, self.layout, self.layer.place
                )
            }
        }
    };
}

constructors! {
    bf16 = Elem::Bf16;
    f16 = Elem::F16;
    f32 = Elem::F32;
}
