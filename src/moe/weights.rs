//! `ExpertWeights`: the experts of a layer, checked and described once at load.

use super::grouped_gemm;
pub use super::layer::{Layer, LayerDesc, Matrix};
use super::mxfp4_a8::is_e4m3;
use super::numbers::Numbers;
pub use super::options::{w13_layout, Options};
use super::per_expert::{Given, Scalar};
use super::{fp8, fp8_tensor, mxfp4, mxfp8, nvfp4, nvfp4_gpu};
use crate::contract;
use crate::device::gpu;
use crate::error::{guard, Result};
use crate::kernel;
use crate::quant::{self, Format};
use crate::tensor::{Contract, Dim, Elem, Place, TensorRef};
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
    pub w13: TensorRef,
    pub w2: TensorRef,
    pub b13: Option<TensorRef>,
    pub b2: Option<TensorRef>,
    /// Of w13 and w2, with the objects that own them: E8M0 bytes that were made of fp32 scales are new tensors.
    pub scales: Option<[(Bound<'py, PyAny>, TensorRef); 2]>,
}

impl<'py> Operands<'py> {
    /// `fp8`: block scales stay as they are; else they become E8M0.
    pub fn borrow(arguments: &Arguments<'_, 'py>, fp8: bool) -> Result<Operands<'py>> {
        let optional = |name, bias: Option<&Bound<'py, PyAny>>| bias.map(|b| TensorRef::borrow(name, b)).transpose();
        let scales = match (arguments.w13_scale, arguments.w2_scale) {
            (None, None) => None,
            (Some(up), Some(down)) => {
                let borrow = |name, scale: &Bound<'py, PyAny>| {
                    if fp8 {
                        Ok((scale.clone(), TensorRef::borrow(name, scale)?))
                    } else {
                        mxfp4::borrow_scale(name, scale)
                    }
                };
                Some([borrow("w13_scale", up)?, borrow("w2_scale", down)?])
            }
            (None, _) => contract!("w13_scale: needed where w2_scale is given"),
            (_, None) => contract!("w2_scale: needed where w13_scale is given"),
        };
        Ok(Operands {
            w13: TensorRef::borrow("w13", arguments.w13)?,
            w2: TensorRef::borrow("w2", arguments.w2)?,
            b13: optional("b13", arguments.b13)?,
            b2: optional("b2", arguments.b2)?,
            scales,
        })
    }
}

impl Layer {
    /// Checks the tensors and describes them.
    pub fn new(operands: &Operands<'_>, numbers: Numbers, options: &Options<'_>) -> Result<Layer> {
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
    fn plain(operands: &Operands<'_>, elem: Elem, options: &Options<'_>) -> Result<Layer> {
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
pub fn intermediate_size(w13: &TensorRef, gated: bool) -> Result<i64> {
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
pub fn check_sizes(w13: &TensorRef, hidden: i64) -> Result<()> {
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
pub type PackedTensors = (Py<PyAny>, Py<PyAny>, Py<PyAny>);

/// The experts of one MoE layer: checked, described and (on Hopper) tensor maps encoded once, at load. Immutable; keeps the tensors alive that it reads.
#[pyclass(frozen, module = "oxmoe", name = "ExpertWeights", subclass)]
pub struct ExpertWeights {
    pub layer: Layer,
    #[pyo3(get)]
    w13: Option<Py<PyAny>>,
    #[pyo3(get)]
    w2: Option<Py<PyAny>>,
    #[pyo3(get)]
    pub(super) b13: Option<Py<PyAny>>,
    #[pyo3(get)]
    b2: Option<Py<PyAny>>,
    #[pyo3(get)]
    pub(super) w13_scale: Option<Py<PyAny>>,
    #[pyo3(get)]
    pub(super) w2_scale: Option<Py<PyAny>>,
    /// Of fp8_tensor with scales of activations, else None.
    #[pyo3(get)]
    pub(super) a13_scale: Option<Py<PyAny>>,
    #[pyo3(get)]
    pub(super) a2_scale: Option<Py<PyAny>>,
    /// (codes, scales, expert_scales) where the weights were packed: then the four above are None.
    #[pyo3(get)]
    w13_packed: Option<PackedTensors>,
    #[pyo3(get)]
    w2_packed: Option<PackedTensors>,
    /// Keep the DLPack borrows of tensors that are not torch's.
    pub(super) _borrows: Vec<TensorRef>,
    /// Keep tensors that are read and no attribute.
    pub(super) _tensors: Vec<Py<PyAny>>,
    #[pyo3(get)]
    layout: String,
    #[pyo3(get)]
    activation: String,
    #[pyo3(get)]
    alpha: Py<PyAny>,
    #[pyo3(get)]
    beta: Py<PyAny>,
    #[pyo3(get)]
    limit: Option<Py<PyAny>>,
    #[pyo3(get)]
    clamp: String,
}

// SAFETY: the borrows hold addresses and Python references only; the references are dropped under the GIL by pyo3.
unsafe impl Send for ExpertWeights {}
// SAFETY: immutable.
unsafe impl Sync for ExpertWeights {}

impl ExpertWeights {
    pub fn new(
        arguments: &Arguments<'_, '_>,
        numbers: Numbers,
        options: Options<'_>,
        given: &Given<'_>,
        in_place: bool,
    ) -> Result<ExpertWeights> {
        let operands = Operands::borrow(arguments, matches!(numbers, Numbers::Fp8(_) | Numbers::Nvfp4(_)))?;
        let mut layer = Layer::new(&operands, numbers, &options)?;
        let mut packed = None;
        if let Place::Cuda(ordinal) = layer.place {
            let gpu = gpu(ordinal)?;
            kernel::prepare(gpu, &super::plan::reachable(&gpu.device, &layer.desc))?;
            if layer.desc.format.is_packed() {
                packed = Some(match layer.desc.format.is_nvfp4() {
                    true => nvfp4_gpu::pack(&mut layer, arguments, &operands)?,
                    false => mxfp4::pack(&mut layer, arguments, &operands, in_place)?,
                });
            }
        } else if in_place {
            contract!("in_place: only for weights on CUDA, w13 is on {}", layer.place);
        }
        let own = |o: Option<&Bound<'_, PyAny>>| o.map(|o| o.clone().unbind());
        let Operands { w13, w2, b13, b2, scales } = operands;
        let mut borrows: Vec<TensorRef> = [b13, b2].into_iter().chain(options.swiglu.experts).flatten().collect();
        let (alpha, beta, limit) = given.objects(arguments.w13.py());
        // A layer that was packed keeps nothing that it does not read.
        let kept = packed.is_none();
        let [w13_scale, w2_scale] = match scales {
            Some(scales) if kept => scales.map(|(object, borrowed)| {
                borrows.push(borrowed);
                Some(object.unbind())
            }),
            _ => [None, None],
        };
        if kept {
            borrows.extend([w13, w2]);
        }
        let [w13_packed, w2_packed] = packed.map_or([None, None], |pair| pair.map(Some));
        Ok(ExpertWeights {
            layer,
            w13: own(Some(arguments.w13).filter(|_| kept)),
            w2: own(Some(arguments.w2).filter(|_| kept)),
            b13: own(arguments.b13),
            b2: own(arguments.b2),
            w13_scale,
            w2_scale,
            a13_scale: None,
            a2_scale: None,
            w13_packed,
            w2_packed,
            _borrows: borrows,
            _tensors: Vec::new(),
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
    ($($(#[$doc:meta])* $name:ident = $elem:expr;)*) => {
        #[pymethods]
        impl ExpertWeights {
            $(
                $(#[$doc])*
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
                        let options = Options { layout, activation, gated, swiglu: given.borrow()?, clamp };
                        ExpertWeights::new(&arguments, Numbers::Plain($elem), options, &given, false)
                    })
                }
            )*

            /// MXFP4 experts: w13 uint8 [El, 2I, H / 2] and w2 uint8 [El, H, I / 2], two e2m1 codes a byte, the even column in the
            /// low nibble; w13_scale [El, 2I, H / 32] and w2_scale [El, H, I / 32], E8M0 as uint8, or powers of two as fp32.
            ///
            /// The weights are e2m1 times scale in dtype ("bf16"; on CPU also "f16", "f32"), which x has too; the rest is as for bf16.
            /// On CUDA they are packed once, into new tensors or (in_place) into those given. activation_dtype=torch.float8_e4m3fn: rows of x
            /// and of GEMM1's output are quantised to e4m3 (on Hopper and CPU).
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
                    let options = Options { layout, activation, gated, swiglu: given.borrow()?, clamp };
                    let numbers = Numbers::mxfp4(dtype, is_e4m3(activation_dtype)?, hidden_size)?;
                    ExpertWeights::new(&arguments, numbers, options, &given, in_place)
                })
            }

            /// fp8 experts with block scales, as DeepSeek's and Qwen's checkpoints have them: w13 float8_e4m3fn [El, 2I, H] and w2 [El, H, I];
            /// w13_scale fp32 [El, 2I / 128, H / 128] and w2_scale [El, H / 128, I / 128] multiply their 128 x 128 weights (SGLang's
            /// w13_weight_scale_inv, w2_weight_scale_inv). H and I are multiples of 128.
            ///
            /// x is bf16. It, and GEMM1's output rounded to bf16, become e4m3 with a scale for each 128 columns of a row
            /// (`oxmoe.quantize.per_token_group_quant_fp8`); products of 128 columns are added to fp32 sums times both scales. The rest is as
            /// for bf16, without layout="interleaved".
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
                    let options = Options { layout, activation, gated, swiglu: given.borrow()?, clamp };
                    ExpertWeights::new(&arguments, Numbers::Fp8(fp8::Activations::Groups.into()), options, &given, false)
                })
            }

            /// fp8 experts with one scale for an expert's matrix: w13 float8_e4m3fn [El, 2I, H] and w2 [El, H, I]; w13_scale fp32 [El], [El, 2]
            /// (one for each half of w13's rows) or one for all, w2_scale [El] or one for all; or either a scale for each row, [El, 2I] and
            /// [El, H]. H and I are multiples of 128.
            ///
            /// x is bf16. It, and GEMM1's output rounded to bf16, become e4m3 with the scales a13_scale and a2_scale (fp32, one number; of [El]
            /// the largest counts, as in SGLang), else with a scale for each row, or with per_token=False one for all of a call's rows, whose bits
            /// then depend on each other. The rest is as for fp8_block.
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
                    let options = Options { layout, activation, gated, swiglu: given.borrow()?, clamp };
                    let scales = [Some(w13_scale), Some(w2_scale)];
                    let tensor = fp8_tensor::prepare((w13, w2), scales, [a13_scale, a2_scale], per_token, options.gated())?;
                    let [w13_scale, w2_scale] = tensor.tables.each_ref().map(Some);
                    let arguments = Arguments { w13, w2, b13, b2, w13_scale, w2_scale };
                    let mut made =
                        ExpertWeights::new(&arguments, Numbers::Fp8(tensor.scaling()), options, &given, false)?;
                    tensor.keep(&mut made);
                    Ok(made)
                })
            }

            /// MXFP8 experts: w13 e4m3 (float8_e4m3fn, or its bytes as uint8) [El, 2I, H] and w2 [El, H, I]; w13_scale [El, 2I, H / 32] and
            /// w2_scale [El, H, I / 32], E8M0 as float8_e8m0fnu or uint8, or powers of two as fp32. H and I are multiples of 32.
            ///
            /// x is bf16. It, and GEMM1's output rounded to bf16, are rounded to MXFP8, 32 columns of a row a group: scale 2^ceil(log2(amax /
            /// 448)), numbers to the nearest e4m3 times scale. Products are exact, sums fp32; the rest is as for mxfp4 (on Hopper and CPU).
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
                    let options = Options { layout, activation, gated, swiglu: given.borrow()?, clamp };
                    ExpertWeights::new(&arguments, Numbers::Mxfp8 { hidden: hidden_size }, options, &given, in_place)
                })
            }

            /// NVFP4 experts: `nvfp4_experts`.
            #[staticmethod]
            #[pyo3(signature = (*arguments, **options), text_signature = "(w13, w2, w13_scale, w2_scale, w13_global_scale, w2_global_scale, *, input_global_scale=None, a2_global_scale=None, scale_layout=None, b13=None, b2=None, layout=\"gate_up\", activation=\"silu\", gated=None, alpha=1.0, beta=0.0, limit=None, clamp=\"before\", dtype=\"bf16\")")]
            fn nvfp4<'py>(
                arguments: &Bound<'py, PyTuple>,
                options: Option<&Bound<'py, PyDict>>,
            ) -> PyResult<Bound<'py, PyAny>> {
                pyo3::wrap_pyfunction!(nvfp4::nvfp4_experts, arguments.py())?.call(arguments, options)
            }

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

            /// "bf16", "f16", "f32", "mxfp4", with an activation_dtype "mxfp4-a8", "fp8_block", "mxfp8", or "fp8_tensor-token", "fp8_tensor"
            /// (with per_token=False), "fp8_tensor-static".
            #[getter]
            fn format(&self) -> &'static str {
                self.layer.desc.format.spec().name
            }

            /// Of activations: "bf16", "f16" or "f32".
            #[getter]
            fn dtype(&self) -> &'static str {
                quant::name(self.layer.desc.dtype)
            }

            /// "cpu" or "cuda:0".
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
    /// bf16 experts: w13 [El, 2I, H] ([El, I, H] when not gated), w2 [El, H, I], biases bf16 or fp32.
    ///
    /// silu with alpha, beta, limit: `silu'(g) * (u + beta)`, `silu'(g) = g sigmoid(alpha g)`, |u| <= limit, and g <= limit
    /// (clamp="before") or silu'(g) <= limit (clamp="after"). Each of the three may be an fp32 tensor [El]: a number for each expert.
    /// GPT-OSS: layout="interleaved", alpha=1.702, beta=1.0, limit=7.0.
    bf16 = Elem::Bf16;
    /// fp16 experts, as bf16.
    f16 = Elem::F16;
    /// fp32 experts on CPU, as bf16.
    f32 = Elem::F32;
}
