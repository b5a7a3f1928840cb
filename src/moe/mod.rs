//! The MoE layer: contract → plan → launches, top to bottom.

mod call;
pub mod explain;
mod formats;
mod given_scales;
mod ids;
mod layer;
pub mod masked;
mod numbers;
mod numbers_of;
mod operands;
mod options;
mod packing;
mod parameters;
mod per_expert;
pub mod plan;
mod rounds;
pub mod routing;
mod run;
mod scale_bytes;
mod scratch;
mod tokens;
pub mod topk;
mod weight_maps;
pub mod weights;

use crate::contract;
use crate::error::{guard, Result};
use crate::params::SelectParams;
use crate::quant::{self, Format};
use crate::stats;
use crate::tensor::{Contract, Dim, Elem, View};
use call::{describe, Call};
pub use formats::add_constructors;
use formats::{fp8_tensor, mxfp4};
use layer::Layer;
use numbers::Numbers;
use operands::{Arguments, Operands};
use options::Options;
use parameters::Operands as CallOperands;
use per_expert::{Given, Scalar};
use plan::steps::Buffer;
use plan::{Routed, Source};
use pyo3::prelude::*;
use std::ptr::null;
use tokens::{elem, Tokens};
use topk::Selection;
use weights::ExpertWeights;

/// The options of one call that are not tensors.
#[derive(Clone, Copy)]
struct CallOptions {
    routed_scaling_factor: f32,
    apply_router_weight_on_input: bool,
    no_combine: bool,
    keep_router_weight: bool,
    ep_size: i64,
    first_expert: i64,
}

impl CallOptions {
    fn check(&self) -> Result<()> {
        if self.keep_router_weight && !self.no_combine {
            contract!("keep_router_weight: is an option of no_combine, which was not given");
        }
        Ok(())
    }
}

/// How tokens find their experts.
enum Routing<'a> {
    Given { weights: &'a View, ids: &'a View },
    Logits(SelectParams),
}

const MAX_TOP_K: i64 = 32;

/// Runs a routed call, once its tokens and its routing are checked.
fn run<'py>(
    contract: Contract<'_>,
    layer: &Layer,
    tokens: Tokens<'py>,
    (routed, routing): (Routed, Routing<'_>),
    options: CallOptions,
    (out, workspace): (Option<&Bound<'py, PyAny>>, Option<&Bound<'py, PyAny>>),
) -> Result<Bound<'py, PyAny>> {
    let on_input = options.apply_router_weight_on_input;
    let mut operands = CallOperands {
        first_expert: options.first_expert as i32,
        weights_on_input: on_input,
        weights_on_output: !on_input && (!options.no_combine || options.keep_router_weight),
        keep_slots: options.no_combine,
        scale: options.routed_scaling_factor,
        ..CallOperands::NONE
    };
    let (ids, weights) = match routing {
        Routing::Given { weights, ids } => {
            operands.ids_are_i64 = ids.elem == Elem::I64;
            (ids.data.cast_const(), weights.data.cast_const())
        }
        Routing::Logits(select) => {
            operands.select = Some(select);
            (null(), null())
        }
    };
    if let Some(scale) = &tokens.scale {
        operands.scales_are_powers = scale.powers;
        operands.scale_strides = (scale.row_stride, scale.group_stride);
    }
    let Routed { tokens: count, top_k, .. } = routed;
    let lead = [(Dim::Named("tokens"), count), (Dim::Is("top_k", top_k), top_k)];
    let call = Call {
        name: "moe",
        counted_as: stats::Call::Moe,
        layer,
        desc: describe(layer, Source::Routed(routed), tokens.form(&layer.desc)),
        operands,
        inputs: [
            (Buffer::XScales, tokens.scale.map_or(null(), |scale| scale.data)),
            (Buffer::Ids, ids),
            (Buffer::SlotWeights, weights),
        ],
        x: tokens.x,
        lead: if options.no_combine { &lead } else { &lead[..1] },
        out,
        workspace,
    };
    call.run(contract)
}

#[doc = crate::help!("moe")]
#[pyfunction(crate = "crate::python")]
#[allow(clippy::too_many_arguments)] // keyword arguments of Python
#[pyo3(signature = (x, weights, topk_weights=None, topk_ids=None, *, router_logits=None, top_k=0, scoring_func="softmax", renormalize=true,
    correction_bias=None, num_expert_group=0, topk_group=0, num_token_non_padded=None, routed_scaling_factor=1.0,
    apply_router_weight_on_input=false, no_combine=false, keep_router_weight=false, ep_size=1, ep_rank=0, x_scale=None, out=None, workspace=None))]
pub fn moe<'py>(
    x: &Bound<'py, PyAny>,
    weights: &Bound<'py, ExpertWeights>,
    topk_weights: Option<&Bound<'py, PyAny>>,
    topk_ids: Option<&Bound<'py, PyAny>>,
    router_logits: Option<&Bound<'py, PyAny>>,
    top_k: i64,
    scoring_func: &str,
    renormalize: bool,
    correction_bias: Option<&Bound<'py, PyAny>>,
    num_expert_group: i64,
    topk_group: i64,
    num_token_non_padded: Option<&Bound<'py, PyAny>>,
    routed_scaling_factor: f32,
    apply_router_weight_on_input: bool,
    no_combine: bool,
    keep_router_weight: bool,
    ep_size: i64,
    ep_rank: i64,
    x_scale: Option<&Bound<'py, PyAny>>,
    out: Option<&Bound<'py, PyAny>>,
    workspace: Option<&Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyAny>> {
    guard(|| {
        let (layer, spans) = (weights.get().layer(x.py())?, weights.get().spans());
        let contract = Contract::new().reads_layer(spans);
        let options = CallOptions {
            routed_scaling_factor,
            apply_router_weight_on_input,
            no_combine,
            keep_router_weight,
            ep_size,
            first_expert: first_expert(layer.desc.experts, ep_size, ep_rank)?,
        };
        options.check()?;
        if let Some(logits) = router_logits {
            if topk_weights.is_some() || topk_ids.is_some() {
                contract!("router_logits: give either router_logits or topk_weights and topk_ids, not both");
            }
            let selection = Selection {
                top_k,
                scoring_func,
                renormalize,
                num_expert_group,
                topk_group,
                group_score: None,
                num_fused_shared_experts: 0,
                scale: 1.0,
                shared_weight: 1.0,
                order: "weight",
            };
            let experts = layer.desc.experts * ep_size;
            let dims = [("hidden", layer.desc.hidden), ("experts", experts)];
            let mut contract = contract.with("weights", layer.place, &dims);
            let tokens_of_x = Tokens::borrow(layer, (x, x_scale), &mut contract)?;
            let operands = topk::Operands::borrow(&mut contract, logits, correction_bias, num_token_non_padded)?;
            let select = selection.params(&operands, &mut contract)?;
            // A layer in one launch quantises its tokens itself.
            let routes_inside =
                tokens_of_x.scale.is_none() && topk::routes_inside(&select, apply_router_weight_on_input);
            let (tokens, logits) = (tokens_of_x.x.shape()[0], Some(selection.logits(&select)));
            let routed = Routed { tokens, top_k, logits, routes_inside };
            let routing = (routed, Routing::Logits(select));
            return run(contract, layer, tokens_of_x, routing, options, (out, workspace));
        }
        let (Some(topk_weights), Some(topk_ids)) = (topk_weights, topk_ids) else {
            contract!("topk_weights and topk_ids: both are needed, or router_logits with top_k");
        };
        for (name, given) in [
            ("top_k", top_k != 0),
            ("scoring_func", scoring_func != "softmax"),
            ("renormalize", !renormalize),
            ("correction_bias", correction_bias.is_some()),
            ("num_expert_group", num_expert_group != 0),
            ("topk_group", topk_group != 0),
            ("num_token_non_padded", num_token_non_padded.is_some()),
        ] {
            if given {
                contract!("{name}: is an option of router_logits, but topk_weights and topk_ids were given");
            }
        }
        forward(contract, layer, (x, x_scale), (topk_weights, topk_ids), options, out, workspace)
    })
}

/// The layer with given ids and weights: `moe` and `fused_experts` meet here.
fn forward<'py>(
    mut contract: Contract<'_>,
    layer: &Layer,
    (x, x_scale): (&Bound<'py, PyAny>, Option<&Bound<'py, PyAny>>),
    (topk_weights, topk_ids): (&Bound<'py, PyAny>, &Bound<'py, PyAny>),
    options: CallOptions,
    out: Option<&Bound<'py, PyAny>>,
    workspace: Option<&Bound<'py, PyAny>>,
) -> Result<Bound<'py, PyAny>> {
    contract.fix("weights", layer.place, &[("hidden", layer.desc.hidden)]);
    let weights = contract.input("topk_weights", topk_weights)?;
    let ids = contract.input("topk_ids", topk_ids)?;
    let tokens = Tokens::borrow(layer, (x, x_scale), &mut contract)?;
    contract.check("topk_weights", &weights, &[Dim::Named("tokens"), Dim::Named("top_k")], &[Elem::F32])?;
    contract.check("topk_ids", &ids, &[Dim::Named("tokens"), Dim::Named("top_k")], &[Elem::I32, Elem::I64])?;
    let top_k = contract.get("top_k");
    if !(1..=MAX_TOP_K).contains(&top_k) {
        contract!("topk_ids: dimension 1 \"top_k\": expected 1 to {MAX_TOP_K}, got {top_k}");
    }
    ids::check(topk_ids.py(), &contract, &ids, layer.desc.experts * options.ep_size)?;
    let routes_inside = tokens.scale.is_none() && !options.apply_router_weight_on_input;
    let routed = Routed { tokens: tokens.x.shape()[0], top_k, logits: None, routes_inside };
    let routing = Routing::Given { weights: &weights, ids: &ids };
    run(contract, layer, tokens, (routed, routing), options, (out, workspace))
}

#[doc = crate::help!("moe_tensors")]
#[pyfunction(crate = "crate::python")]
#[allow(clippy::too_many_arguments)] // keyword arguments of Python
#[pyo3(signature = (x, w13, w2, topk_weights, topk_ids, *, b13=None, b2=None, layout="gate_up", activation="silu", gated=None,
    alpha=Scalar::Layer(1.0), beta=Scalar::Layer(0.0), limit=None, clamp="before", situ_beta=None, situ_linear_beta=None, w13_scale=None, w2_scale=None, format=None, dtype=None,
    hidden_size=None, routed_scaling_factor=1.0, apply_router_weight_on_input=false, no_combine=false,
    keep_router_weight=false, ep_size=1, ep_rank=0, x_scale=None, a13_scale=None, a2_scale=None, out=None, workspace=None),
    text_signature = "(x, w13, w2, topk_weights, topk_ids, *, b13=None, b2=None, layout=\"gate_up\", activation=\"silu\", gated=None, alpha=1.0, \
beta=0.0, limit=None, clamp=\"before\", situ_beta=None, situ_linear_beta=None, w13_scale=None, w2_scale=None, format=None, dtype=None, hidden_size=None, routed_scaling_factor=1.0, \
apply_router_weight_on_input=False, no_combine=False, keep_router_weight=False, ep_size=1, ep_rank=0, x_scale=None, a13_scale=None, a2_scale=None, \
out=None, workspace=None)")]
pub fn moe_tensors<'py>(
    x: &Bound<'py, PyAny>,
    w13: &Bound<'py, PyAny>,
    w2: &Bound<'py, PyAny>,
    topk_weights: &Bound<'py, PyAny>,
    topk_ids: &Bound<'py, PyAny>,
    b13: Option<&Bound<'py, PyAny>>,
    b2: Option<&Bound<'py, PyAny>>,
    layout: &str,
    activation: &str,
    gated: Option<bool>,
    alpha: Scalar<'py>,
    beta: Scalar<'py>,
    limit: Option<Scalar<'py>>,
    clamp: &str,
    situ_beta: Option<Scalar<'py>>,
    situ_linear_beta: Option<Scalar<'py>>,
    w13_scale: Option<&Bound<'py, PyAny>>,
    w2_scale: Option<&Bound<'py, PyAny>>,
    format: Option<&str>,
    dtype: Option<&str>,
    hidden_size: Option<i64>,
    routed_scaling_factor: f32,
    apply_router_weight_on_input: bool,
    no_combine: bool,
    keep_router_weight: bool,
    ep_size: i64,
    ep_rank: i64,
    x_scale: Option<&Bound<'py, PyAny>>,
    a13_scale: Option<&Bound<'py, PyAny>>,
    a2_scale: Option<&Bound<'py, PyAny>>,
    out: Option<&Bound<'py, PyAny>>,
    workspace: Option<&Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyAny>> {
    let given = Given { alpha, beta, limit, situ_beta, situ_linear_beta };
    guard(|| {
        let mut contract = Contract::new();
        let options = Options { layout, activation, gated, scalars: given.borrow(&mut contract)?, clamp };
        if let Some(spec) =
            format.and_then(quant::by_name).filter(|spec| spec.format.has_bare_tensors() && spec.format.is_packed())
        {
            mxfp4::refuse_bare(w13, spec.format)?;
        }
        let spec = format.and_then(quant::by_name).map(|spec| spec.format);
        let tensor = match spec.filter(|format| format.is_fp8_tensor()) {
            Some(format) => {
                if format == Format::Fp8TensorStatic && (a13_scale.is_none() || a2_scale.is_none()) {
                    contract!("a13_scale and a2_scale: both are needed for format {:?}", format.spec().name);
                }
                let per_token = format == Format::Fp8TensorToken;
                let (scales, given) = ([w13_scale, w2_scale], [a13_scale, a2_scale]);
                let weights = (w13, w2, b13);
                Some(fp8_tensor::prepare(&mut contract, weights, scales, given, Some(per_token), options.gated())?)
            }
            None if a13_scale.is_some() || a2_scale.is_some() => {
                contract!("a13_scale and a2_scale: only for format \"fp8_tensor\", got them with {format:?}")
            }
            None => None,
        };
        let [w13_scale, w2_scale] =
            tensor.as_ref().map_or([w13_scale, w2_scale], |tensor| tensor.tables.each_ref().map(Some));
        let fp8 = spec.is_some_and(Format::is_fp8);
        let arguments = Arguments { w13, w2, b13, b2, w13_scale, w2_scale };
        let operands = Operands::borrow(&mut contract, &arguments, (fp8, false))?;
        let numbers = match &tensor {
            Some(tensor) => Numbers::Fp8(tensor.scaling()),
            None => Numbers::new(format, dtype, hidden_size, operands.w13.elem)?,
        };
        let layer = formats::layer(&operands, numbers.source(), &options)?;
        let call = CallOptions {
            routed_scaling_factor,
            apply_router_weight_on_input,
            no_combine,
            keep_router_weight,
            ep_size,
            first_expert: first_expert(layer.desc.experts, ep_size, ep_rank)?,
        };
        call.check()?;
        forward(contract, &layer, (x, x_scale), (topk_weights, topk_ids), call, out, workspace)
    })
}

/// The global id of a rank's first expert.
fn first_expert(experts: i64, ep_size: i64, ep_rank: i64) -> Result<i64> {
    if ep_size < 1 || !(0..ep_size).contains(&ep_rank) {
        contract!("ep_rank: expected 0 <= ep_rank < ep_size, got ep_rank {ep_rank}, ep_size {ep_size}");
    }
    // Kernels take the ids of all ranks' experts as i32.
    match experts.checked_mul(ep_size) {
        Some(all) if all <= i32::MAX as i64 => Ok(ep_rank * experts),
        _ => contract!("ep_size: {ep_size} ranks of {experts} experts each are beyond 2^31 - 1 experts"),
    }
}
