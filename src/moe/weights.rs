//! `ExpertWeights`: the experts of a layer, checked and described once at load.

use super::grouped_gemm;
pub use super::layer::{Layer, LayerDesc, Matrix};
use super::mxfp4_a8::is_e4m3;
use super::numbers::Numbers;
pub use super::options::{w13_layout, Options};
use super::per_expert::NAMES;
use super::per_expert::{Given, Scalar};
use super::{fp8, fp8_tensor, mxfp4, mxfp8, nvfp4, nvfp4_gpu};
use crate::contract;
use crate::device::gpu;
use crate::error::{guard, Result};
use crate::kernel;
use crate::quant::{self, Format};
use crate::tensor::{Borrowed, Contract, Dim, Elem, Owned, Place, Span, View};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

/// A layer's tensors as Python gives them.
pub struct Arguments<'a, 'py> {
    pub w13: &'a Bound<'py, PyAny>,
    pub w2: &'a Bound<'py, PyAny>,
    pub b13: Option<&'a Bound<'py, PyAny>>,
    pub b2: Option<&'a Bound<'py, PyAny>>,
    pub w13_scale: Option<&'a Bound<'py, PyAny>>,
    pub w2_scale: Option<&'a Bound<'py, PyAny>>,
}

/// The same, borrowed.
pub struct Operands<'py> {
    pub w13: Borrowed<'py>,
    pub w2: Borrowed<'py>,
    pub b13: Option<Borrowed<'py>>,
    pub b2: Option<Borrowed<'py>>,
    /// Of w13 and w2: E8M0 bytes that were made of fp32 scales are new tensors.
    pub scales: Option<[Borrowed<'py>; 2]>,
}

impl<'py> Operands<'py> {
    /// `fp8`: block scales stay as they are; else they become E8M0. `in_place`: weights and scales are written, too.
    pub fn borrow(
        contract: &mut Contract<'_>,
        arguments: &Arguments<'_, 'py>,
        (fp8, in_place): (bool, bool),
    ) -> Result<Operands<'py>> {
        let scales = match (arguments.w13_scale, arguments.w2_scale) {
            (None, None) => None,
            (Some(up), Some(down)) => {
                let mut borrow = |name, scale: &Bound<'py, PyAny>| match (fp8, in_place) {
                    (true, _) => contract.input(name, scale),
                    (false, _) => mxfp4::borrow_scale(name, scale, contract, in_place),
                };
                Some([borrow("w13_scale", up)?, borrow("w2_scale", down)?])
            }
            (None, _) => contract!("w13_scale: needed where w2_scale is given"),
            (_, None) => contract!("w2_scale: needed where w13_scale is given"),
        };
        let mut weights = |name, w: &Bound<'py, PyAny>| match in_place {
            true => contract.output(name, w),
            false => contract.input(name, w),
        };
        let (w13, w2) = (weights("w13", arguments.w13)?, weights("w2", arguments.w2)?);
        let mut bias = |name, bias: Option<&Bound<'py, PyAny>>| bias.map(|b| contract.input(name, b)).transpose();
        let (b13, b2) = (bias("b13", arguments.b13)?, bias("b2", arguments.b2)?);
        Ok(Operands { w13, w2, b13, b2, scales })
    }
}

impl Layer {
    /// Checks the tensors and describes them.
    pub fn new(operands: &Operands<'_>, numbers: Numbers, options: &Options<'_, '_>) -> Result<Layer> {
        let mut layer = match numbers {
            Numbers::Plain(elem) => Layer::plain(operands, elem, options),
            Numbers::Mxfp4 { dtype, e4m3, hidden } => mxfp4::layer(operands, (dtype, e4m3), hidden, options),
            Numbers::Fp8(scaling) => fp8::layer(operands, scaling, options),
            Numbers::Mxfp8 { hidden } => mxfp8::layer(operands, hidden, options),
            Numbers::Nvfp4(spec) => nvfp4::layer(operands, &spec, options),
        }?;
        if options.swiglu.of_experts() {
            layer.per_expert = options.swiglu.pointers(layer.place, layer.desc.experts, options.clamp == "after")?;
        }
        Ok(layer)
    }

    /// `bias` tensors may be fp32 or of the weights' dtype.
    fn plain(operands: &Operands<'_>, elem: Elem, options: &Options<'_, '_>) -> Result<Layer> {
        let Operands { w13, w2, b13, b2, scales } = operands;
        let (layout, activation, gated) = (options.layout()?, options.activation()?, options.gated());
        let Some(dtype) = elem.dtype() else { contract!("w13: {elem} is no compute type") };
        let format = Format::plain(dtype);
        if scales.is_some() {
            contract!("w13_scale and w2_scale: format {:?} has no scales", format.spec().name);
        }
        let mut contract = Contract::new();
        contract.check(
            "w13",
            w13,
            &[Dim::Named("experts"), Dim::Named("rows of w13"), Dim::Named("hidden")],
            &[elem],
        )?;
        let (experts, rows, hidden) = (w13.shape()[0], w13.shape()[1], w13.shape()[2]);
        let intermediate = intermediate_size(w13, gated)?;
        contract.check(
            "w2",
            w2,
            &[Dim::Named("experts"), Dim::Named("hidden"), Dim::Is("intermediate", intermediate)],
            &[elem],
        )?;
        check_biases(&mut contract, operands, Dim::Named("hidden"), &[elem, Elem::F32])?;
        check_sizes(w13, hidden)?;
        let up = Matrix::new(w13, b13, dtype, (rows, hidden));
        let down = Matrix::new(w2, b2, dtype, (hidden, intermediate));
        let desc = LayerDesc { experts, hidden, intermediate, gated, dtype, format };
        let mut layer = Layer::described((desc, w13.place), [up, down], (layout, activation));
        if let Place::Cuda(ordinal) = layer.place {
            format.require_cuda()?;
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

/// Columns of GEMM1's output, from the rows of w13.
pub fn intermediate_size(w13: &View, gated: bool) -> Result<i64> {
    let rows = w13.shape()[1];
    if gated && rows % 2 != 0 {
        contract!("w13: dimension 1 holds gate and up rows and must be even, got {rows}");
    }
    Ok(if gated { rows / 2 } else { rows })
}

/// b13 `[E, rows of w13]` and b2 `[E, hidden]`, where they are given.
pub fn check_biases(contract: &mut Contract, operands: &Operands<'_>, hidden: Dim, elems: &[Elem]) -> Result<()> {
    for (name, bias, dim) in [("b13", &operands.b13, Dim::Named("rows of w13")), ("b2", &operands.b2, hidden)] {
        if let Some(bias) = bias {
            contract.check(name, bias, &[Dim::Named("experts"), dim], elems)?;
        }
    }
    Ok(())
}

/// What kernels can count, and no empty layer.
pub fn check_sizes(w13: &View, hidden: i64) -> Result<()> {
    let (experts, rows, limit) = (w13.shape()[0], w13.shape()[1], i32::MAX as i64 / 2);
    if experts == 0 || rows == 0 || hidden == 0 {
        contract!("w13: no dimension may be 0, got shape {:?}", w13.shape());
    }
    if experts > 4096 || rows > limit || hidden > limit {
        contract!("w13: shape {:?} is beyond 4096 experts or 2^30 rows", w13.shape());
    }
    Ok(())
}

/// Codes, scales and expert_scales of packed weights.
pub type PackedTensors<'py> = [Extra<'py>; 3];
/// The same as attributes.
type PackedObjects = (Py<PyAny>, Py<PyAny>, Py<PyAny>);

#[doc = crate::help!("ExpertWeights")]
#[pyclass(frozen, module = "oxmoe", name = "ExpertWeights", subclass)]
pub struct ExpertWeights {
    layer: Layer,
    /// What calls read of the layer.
    spans: Vec<Span>,
    /// The tensors in which these spans lie.
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
    pub(super) w13_scale: Option<Py<PyAny>>,
    #[doc = crate::help!("ExpertWeights.w2_scale")]
    #[pyo3(get)]
    pub(super) w2_scale: Option<Py<PyAny>>,
    #[doc = crate::help!("ExpertWeights.a13_scale")]
    #[pyo3(get)]
    pub(super) a13_scale: Option<Py<PyAny>>,
    #[doc = crate::help!("ExpertWeights.a2_scale")]
    #[pyo3(get)]
    pub(super) a2_scale: Option<Py<PyAny>>,
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
    #[doc = crate::help!("ExpertWeights.clamp")]
    #[pyo3(get)]
    clamp: String,
}

/// A tensor that a layer reads beside its weights, scales, biases and numbers of SwiGLU, with the operand's name.
pub type Extra<'py> = (&'static str, Borrowed<'py>);

impl ExpertWeights {
    /// The layer for a call, or an error where memory that it reads is no longer where it was.
    pub fn layer(&self, py: Python<'_>) -> Result<&Layer> {
        for owned in &self.owned {
            owned.unchanged(py)?;
        }
        Ok(&self.layer)
    }

    /// What calls read of the layer.
    pub fn spans(&self) -> &[Span] {
        &self.spans
    }

    /// The layer's shape, which reads no memory.
    pub fn desc(&self) -> &LayerDesc {
        &self.layer.desc
    }

    pub fn new<'py>(
        mut contract: Contract<'_>,
        arguments: &Arguments<'_, 'py>,
        numbers: Numbers,
        options: Options<'_, 'py>,
        given: &Given<'py>,
        in_place: bool,
        extra: Vec<Extra<'py>>,
    ) -> Result<ExpertWeights> {
        let fp8 = matches!(numbers, Numbers::Fp8(_) | Numbers::Nvfp4(_));
        let operands = Operands::borrow(&mut contract, arguments, (fp8, in_place))?;
        let mut layer = Layer::new(&operands, numbers, &options)?;
        let mut packed = None;
        if let Place::Cuda(ordinal) = layer.place {
            let gpu = gpu(ordinal)?;
            kernel::prepare(gpu, &super::plan::reachable(&gpu.device, &layer.desc))?;
            if layer.desc.format.is_packed() {
                packed = Some(match layer.desc.format.is_nvfp4() {
                    true => nvfp4_gpu::pack(&mut layer, &mut contract, &operands)?,
                    false => mxfp4::pack(&mut layer, &mut contract, &operands, in_place)?,
                });
            }
        } else if in_place {
            contract!("in_place: only for weights on CUDA, w13 is on {}", layer.place);
        }
        let own = |o: Option<&Bound<'_, PyAny>>| o.map(|o| o.clone().unbind());
        let (alpha, beta, limit) = given.objects(arguments.w13.py());
        let Operands { w13, w2, b13, b2, scales } = operands;
        let biases = [("b13", b13), ("b2", b2)].into_iter().chain(NAMES.into_iter().zip(options.swiglu.experts));
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
            alpha,
            beta,
            limit,
            clamp: options.clamp.into(),
        })
    }
}

/// One constructor per plain format, which differ in the element type alone, and the others.
macro_rules! constructors {
    ($($name:ident = $elem:expr;)*) => {
        #[pymethods]
        #[pyo3(crate = "crate::python")]
        impl ExpertWeights {
            $(
                #[doc = crate::help!("ExpertWeights.", $name)]
                #[staticmethod]
                #[allow(clippy::too_many_arguments)] // keyword arguments of Python, not positions
                #[pyo3(signature = (w13, w2, *, b13=None, b2=None, layout="gate_up", activation="silu", gated=None, alpha=Scalar::Layer(1.0), beta=Scalar::Layer(0.0), limit=None, clamp="before"),
                    text_signature = "(w13, w2, *, b13=None, b2=None, layout=\"gate_up\", activation=\"silu\", gated=None, alpha=1.0, beta=0.0, limit=None, clamp=\"before\")")]
                fn $name(
                    w13: &Bound<'_, PyAny>,
                    w2: &Bound<'_, PyAny>,
                    b13: Option<&Bound<'_, PyAny>>,
                    b2: Option<&Bound<'_, PyAny>>,
                    layout: &str,
                    activation: &str,
                    gated: Option<bool>,
                    alpha: Scalar<'_>,
                    beta: Scalar<'_>,
                    limit: Option<Scalar<'_>>,
                    clamp: &str,
                ) -> PyResult<ExpertWeights> {
                    let arguments = Arguments { w13, w2, b13, b2, w13_scale: None, w2_scale: None };
                    let given = Given { alpha, beta, limit };
                    guard(|| {
                        let mut contract = Contract::new();
                        let swiglu = given.borrow(&mut contract)?;
                        let options = Options { layout, activation, gated, swiglu, clamp };
                        let numbers = Numbers::Plain($elem);
                        ExpertWeights::new(contract, &arguments, numbers, options, &given, false, Vec::new())
                    })
                }
            )*

            #[doc = crate::help!("ExpertWeights.mxfp4")]
            #[staticmethod]
            #[allow(clippy::too_many_arguments)] // keyword arguments of Python, not positions
            #[pyo3(signature = (w13, w2, w13_scale, w2_scale, *, b13=None, b2=None, layout="gate_up", activation="silu", gated=None, alpha=Scalar::Layer(1.0), beta=Scalar::Layer(0.0), limit=None, clamp="before", dtype="bf16", hidden_size=None, in_place=false, activation_dtype=None),
                text_signature = "(w13, w2, w13_scale, w2_scale, *, b13=None, b2=None, layout=\"gate_up\", activation=\"silu\", gated=None, alpha=1.0, beta=0.0, limit=None, clamp=\"before\", dtype=\"bf16\", hidden_size=None, in_place=False, activation_dtype=None)")]
            fn mxfp4(
                w13: &Bound<'_, PyAny>,
                w2: &Bound<'_, PyAny>,
                w13_scale: &Bound<'_, PyAny>,
                w2_scale: &Bound<'_, PyAny>,
                b13: Option<&Bound<'_, PyAny>>,
                b2: Option<&Bound<'_, PyAny>>,
                layout: &str,
                activation: &str,
                gated: Option<bool>,
                alpha: Scalar<'_>,
                beta: Scalar<'_>,
                limit: Option<Scalar<'_>>,
                clamp: &str,
                dtype: &str,
                hidden_size: Option<i64>,
                in_place: bool,
                activation_dtype: Option<&Bound<'_, PyAny>>,
            ) -> PyResult<ExpertWeights> {
                let arguments = Arguments { w13, w2, b13, b2, w13_scale: Some(w13_scale), w2_scale: Some(w2_scale) };
                let given = Given { alpha, beta, limit };
                guard(|| {
                    let mut contract = Contract::new();
                    let options = Options { layout, activation, gated, swiglu: given.borrow(&mut contract)?, clamp };
                    let numbers = Numbers::mxfp4(dtype, is_e4m3(activation_dtype)?, hidden_size)?;
                    ExpertWeights::new(contract, &arguments, numbers, options, &given, in_place, Vec::new())
                })
            }

            #[doc = crate::help!("ExpertWeights.fp8_block")]
            #[staticmethod]
            #[allow(clippy::too_many_arguments)] // keyword arguments of Python, not positions
            #[pyo3(signature = (w13, w2, w13_scale, w2_scale, *, b13=None, b2=None, layout="gate_up", activation="silu", gated=None, alpha=Scalar::Layer(1.0), beta=Scalar::Layer(0.0), limit=None, clamp="before"),
                text_signature = "(w13, w2, w13_scale, w2_scale, *, b13=None, b2=None, layout=\"gate_up\", activation=\"silu\", gated=None, alpha=1.0, beta=0.0, limit=None, clamp=\"before\")")]
            fn fp8_block(
                w13: &Bound<'_, PyAny>,
                w2: &Bound<'_, PyAny>,
                w13_scale: &Bound<'_, PyAny>,
                w2_scale: &Bound<'_, PyAny>,
                b13: Option<&Bound<'_, PyAny>>,
                b2: Option<&Bound<'_, PyAny>>,
                layout: &str,
                activation: &str,
                gated: Option<bool>,
                alpha: Scalar<'_>,
                beta: Scalar<'_>,
                limit: Option<Scalar<'_>>,
                clamp: &str,
            ) -> PyResult<ExpertWeights> {
                let arguments = Arguments { w13, w2, b13, b2, w13_scale: Some(w13_scale), w2_scale: Some(w2_scale) };
                let given = Given { alpha, beta, limit };
                guard(|| {
                    let mut contract = Contract::new();
                    let options = Options { layout, activation, gated, swiglu: given.borrow(&mut contract)?, clamp };
                    let numbers = Numbers::Fp8(fp8::Activations::Groups.into());
                    ExpertWeights::new(contract, &arguments, numbers, options, &given, false, Vec::new())
                })
            }

            #[doc = crate::help!("ExpertWeights.fp8_tensor")]
            #[staticmethod]
            #[allow(clippy::too_many_arguments)] // keyword arguments of Python, not positions
            #[pyo3(signature = (w13, w2, w13_scale, w2_scale, *, a13_scale=None, a2_scale=None, per_token=None, b13=None, b2=None, layout="gate_up", activation="silu", gated=None, alpha=Scalar::Layer(1.0), beta=Scalar::Layer(0.0), limit=None, clamp="before"),
                text_signature = "(w13, w2, w13_scale, w2_scale, *, a13_scale=None, a2_scale=None, per_token=None, b13=None, b2=None, layout=\"gate_up\", activation=\"silu\", gated=None, alpha=1.0, beta=0.0, limit=None, clamp=\"before\")")]
            fn fp8_tensor(
                w13: &Bound<'_, PyAny>,
                w2: &Bound<'_, PyAny>,
                w13_scale: &Bound<'_, PyAny>,
                w2_scale: &Bound<'_, PyAny>,
                a13_scale: Option<&Bound<'_, PyAny>>,
                a2_scale: Option<&Bound<'_, PyAny>>,
                per_token: Option<bool>,
                b13: Option<&Bound<'_, PyAny>>,
                b2: Option<&Bound<'_, PyAny>>,
                layout: &str,
                activation: &str,
                gated: Option<bool>,
                alpha: Scalar<'_>,
                beta: Scalar<'_>,
                limit: Option<Scalar<'_>>,
                clamp: &str,
            ) -> PyResult<ExpertWeights> {
                let given = Given { alpha, beta, limit };
                guard(|| {
                    let mut contract = Contract::new();
                    let options = Options { layout, activation, gated, swiglu: given.borrow(&mut contract)?, clamp };
                    let (scales, of_x) = ([Some(w13_scale), Some(w2_scale)], [a13_scale, a2_scale]);
                    let gated = options.gated();
                    let tensor = fp8_tensor::prepare(&mut contract, (w13, w2), scales, of_x, per_token, gated)?;
                    let [w13_scale, w2_scale] = tensor.tables.each_ref().map(Some);
                    let arguments = Arguments { w13, w2, b13, b2, w13_scale, w2_scale };
                    let (numbers, extra) = (Numbers::Fp8(tensor.scaling()), tensor.tensors());
                    let mut made =
                        ExpertWeights::new(contract, &arguments, numbers, options, &given, false, extra)?;
                    tensor.show(&mut made);
                    Ok(made)
                })
            }

            #[doc = crate::help!("ExpertWeights.mxfp8")]
            #[staticmethod]
            #[allow(clippy::too_many_arguments)] // keyword arguments of Python, not positions
            #[pyo3(signature = (w13, w2, w13_scale, w2_scale, *, b13=None, b2=None, layout="gate_up", activation="silu", gated=None, alpha=Scalar::Layer(1.0), beta=Scalar::Layer(0.0), limit=None, clamp="before", hidden_size=None, in_place=false),
                text_signature = "(w13, w2, w13_scale, w2_scale, *, b13=None, b2=None, layout=\"gate_up\", activation=\"silu\", gated=None, alpha=1.0, beta=0.0, limit=None, clamp=\"before\", hidden_size=None, in_place=False)")]
            fn mxfp8(
                w13: &Bound<'_, PyAny>,
                w2: &Bound<'_, PyAny>,
                w13_scale: &Bound<'_, PyAny>,
                w2_scale: &Bound<'_, PyAny>,
                b13: Option<&Bound<'_, PyAny>>,
                b2: Option<&Bound<'_, PyAny>>,
                layout: &str,
                activation: &str,
                gated: Option<bool>,
                alpha: Scalar<'_>,
                beta: Scalar<'_>,
                limit: Option<Scalar<'_>>,
                clamp: &str,
                hidden_size: Option<i64>,
                in_place: bool,
            ) -> PyResult<ExpertWeights> {
                let arguments = Arguments { w13, w2, b13, b2, w13_scale: Some(w13_scale), w2_scale: Some(w2_scale) };
                let given = Given { alpha, beta, limit };
                guard(|| {
                    let mut contract = Contract::new();
                    let options = Options { layout, activation, gated, swiglu: given.borrow(&mut contract)?, clamp };
                    let numbers = Numbers::Mxfp8 { hidden: hidden_size };
                    ExpertWeights::new(contract, &arguments, numbers, options, &given, in_place, Vec::new())
                })
            }

            #[doc = crate::help!("ExpertWeights.nvfp4")]
            #[staticmethod]
            #[pyo3(signature = (*arguments, **options), text_signature = "(w13, w2, w13_scale, w2_scale, w13_global_scale, w2_global_scale, *, input_global_scale=None, a2_global_scale=None, scale_layout=None, b13=None, b2=None, layout=\"gate_up\", activation=\"silu\", gated=None, alpha=1.0, beta=0.0, limit=None, clamp=\"before\", dtype=\"bf16\")")]
            fn nvfp4<'py>(
                arguments: &Bound<'py, PyTuple>,
                options: Option<&Bound<'py, PyDict>>,
            ) -> PyResult<Bound<'py, PyAny>> {
                pyo3::wrap_pyfunction!(nvfp4::nvfp4_experts, arguments.py())?.call(arguments, options)
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
