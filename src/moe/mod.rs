//! The MoE layer: contract → plan → launches, top to bottom.

mod call;
pub mod explain;
mod formats;
mod gemms;
mod given_scales;
pub mod grouped_gemm;
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
mod rounding;
mod rounds;
mod routed;
pub mod routing;
mod run;
mod scale_bytes;
mod scratch;
mod tokens;
pub mod topk;
mod weight_maps;
pub mod weights;

use crate::contract;
use crate::cpu;
use crate::device::gpu;
use crate::error::{guard, Error, Result};
use crate::kernel::Stream;
use crate::params::{CombineParams, RouteParams, ScheduleParams, SelectParams};
use crate::quant::{self, Format};
use crate::stats;
use crate::tensor::{Contract, Dim, Elem, Place, View};
pub use formats::add_constructors;
use formats::{fp8_tensor, mxfp4, nvfp4};
use gemms::Gemms;
use layer::Layer;
use numbers::Numbers;
use operands::{Arguments, Operands};
use options::Options;
use per_expert::{Given, Scalar};
use plan::{Experts, MoeDesc, MoePlan, MoeWorkspace};
use pyo3::prelude::*;
use routing::Tiling;
use scratch::Scratch;
use tokens::{elem, GivenScales, Tokens};
use topk::Selection;
use weights::ExpertWeights;

/// Options of one call that are not tensors.
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

/// The parameter structs of the stages; device and CPU run the same ones.
struct Stages {
    select: Option<SelectParams>,
    route: RouteParams,
    down_schedule: Option<ScheduleParams>,
    gemms: Gemms,
    combine: CombineParams,
}

const NAMES: gemms::Names = gemms::Names {
    x: "moe: quantisation of x",
    up: "moe: GEMM1",
    hidden: "moe: quantisation of GEMM1's output",
    down: "moe: GEMM2",
    both: "moe: GEMM1 and GEMM2",
};

impl Stages {
    fn new(
        layer: &Layer,
        desc: &MoeDesc,
        options: &CallOptions,
        routing: &Routing<'_>,
        (x, x_scales, out): (*const u8, Option<GivenScales>, *mut u8),
        (ws, base): (&MoeWorkspace, *mut u8),
        tiling: Tiling,
    ) -> Stages {
        let Tiling { tile_tokens, max_tiles, counter_count, in_one_launch, .. } = tiling;
        let (tokens, top_k) = (desc.tokens as i32, desc.top_k as i32);
        let select = match routing {
            Routing::Logits(s) => Some(SelectParams { ids: ws.ids.at(base), weights: ws.weights.at(base), ..*s }),
            Routing::Given { .. } => None,
        };
        let (ids, ids_are_i64, weights) = match routing {
            Routing::Given { weights, ids } => {
                (ids.data.cast_const(), ids.elem == Elem::I64, weights.data.cast::<f32>().cast_const())
            }
            Routing::Logits(_) => (ws.ids.at::<u8>(base).cast_const(), false, ws.weights.at::<f32>(base).cast_const()),
        };
        let route = RouteParams {
            ids,
            ids_are_i64,
            tokens,
            top_k,
            experts: layer.desc.experts as i32,
            first_expert: options.first_expert as i32,
            tile_tokens,
            tile_step: plan::tile_step(desc, tile_tokens),
            max_tiles,
            histogram: ws.histogram.at(base),
            offsets: ws.offsets.at(base),
            place_of_slot: ws.place_of_slot.at(base),
            slot_of_place: ws.slot_of_place.at(base),
            tiles: ws.tiles.at(base),
            tile_count: ws.tile_count.at(base),
            counters: ws.counters.at(base),
            counter_count,
            block_histogram: ws.block_histogram.at(base),
        };
        let [mut up, mut down] = grouped_gemm::params(
            layer,
            &grouped_gemm::Rows {
                x,
                slot_of_place: route.slot_of_place,
                row_divisor: top_k,
                slot_weights: if options.apply_router_weight_on_input { weights } else { std::ptr::null() },
                tiles: route.tiles,
                tile_count: route.tile_count,
                counters: route.counters,
                hidden: ws.hidden.at(base),
                out: ws.rows.at(base),
            },
        );
        let down_schedule = tiling.down_tile_tokens.map(|tile| routing::down_schedule(desc, &route, (ws, base), tile));
        if let Some(own) = &down_schedule {
            (down.tiles, down.tile_count) = (own.tiles, own.tile_count);
        }
        let weighted = !options.apply_router_weight_on_input && (!options.no_combine || options.keep_router_weight);
        let combine = CombineParams {
            y: down.out,
            place_of_slot: route.place_of_slot,
            weights: if weighted { weights } else { std::ptr::null() },
            out,
            tokens,
            top_k,
            hidden: layer.desc.hidden as i32,
            scale: options.routed_scaling_factor,
            keep_slots: options.no_combine,
            columns: plan::combine_columns(desc.tokens, layer.desc.hidden) as i32,
        };
        let (rounding, fp8) =
            formats::round_slots(layer, desc, (ws, base), (&route, in_one_launch), x_scales, (&mut up, &mut down));
        Stages { select, route, down_schedule, gemms: Gemms { up, down, rounding, fp8 }, combine }
    }

    fn run_cuda(&self, stream: &Stream<'_>, plan: &MoePlan, layer: &Layer, workspace: *mut u8) -> Result<()> {
        routed::require(stream, &plan.experts)?;
        let Gemms { up, down, fp8, .. } = self.gemms;
        if let (Experts::Routed(launch), Some(select)) = (&plan.experts, self.select) {
            let (up, down) = fp8.map_or((up, down), |fp8| fp8.in_one_launch(&up, &down));
            let stages = (up, down, self.combine);
            return routed::launch(stream, launch, layer, &select, &self.route, stages, workspace);
        }
        routing::launch(stream, "moe: routing", &plan.routing, self.select.as_ref(), &self.route)?;
        if let (Some((launch, _)), Some(schedule)) = (&plan.down_schedule, &self.down_schedule) {
            stream.launch("moe: schedule of GEMM2", launch, schedule)?;
        }
        match &plan.experts {
            Experts::Gemms(plan) => self.gemms.run_cuda(stream, &NAMES, plan, layer, self.route.counters)?,
            Experts::Fused(launch) => {
                routed::launch_given(stream, launch, layer, &self.route, (up, down, self.combine), plan.max_tiles)?;
            }
            Experts::Routed(_) => return Err(Error::Unsupported("moe: routing inside without router logits".into())),
        }
        match &plan.combine {
            Some(launch) => stream.launch("moe: combine", launch, &self.combine),
            None => Ok(()),
        }
    }

    fn run_cpu(&self, layer: &Layer) {
        // SAFETY: every pointer is into a tensor that the contract checked or into the workspace, whose ranges come from the plan.
        unsafe {
            if let Some(select) = &self.select {
                cpu::select(select);
            }
            cpu::route(&self.route);
            self.gemms.run_cpu(layer);
            cpu::combine(&self.combine, layer.desc.dtype);
        }
    }
}

const MAX_TOP_K: i64 = 32;

/// The layer on borrowed tensors.
struct Call<'a, 'py> {
    layer: &'a Layer,
    tokens: Tokens<'py>,
    routing: Routing<'a>,
    desc: MoeDesc,
    options: CallOptions,
    out: Option<&'a Bound<'py, PyAny>>,
    workspace: Option<&'a Bound<'py, PyAny>>,
}

impl<'py> Call<'_, 'py> {
    /// Contract of out and workspace, then the launches. Returns out.
    fn run(self, mut contract: Contract<'_>) -> Result<Bound<'py, PyAny>> {
        let (x, layer, desc) = (&self.tokens.x, self.layer, &self.desc);
        let py = x.object().py();
        call::require_countable("x", &layer.desc, plan::CallDesc::from(desc).source)?;
        let out_elem = elem(layer.desc.dtype);
        let out = match self.out {
            // GEMM1 has read x before anything is written to out.
            Some(object) => contract.output_over("out", object, &["x"])?,
            None => {
                let three = [desc.tokens, desc.top_k, layer.desc.hidden];
                let two = [desc.tokens, layer.desc.hidden];
                contract.new_output("out", x, if self.options.no_combine { &three } else { &two }, out_elem)?
            }
        };
        let out_dims: &[Dim] = if self.options.no_combine {
            &[Dim::Named("tokens"), Dim::Is("top_k", desc.top_k), Dim::Named("hidden")]
        } else {
            &[Dim::Named("tokens"), Dim::Named("hidden")]
        };
        contract.check("out", &out, out_dims, &[out_elem])?;
        if x.place != Place::Cpu && layer.desc.hidden % 8 == 0 {
            for (name, t) in [("x", x), ("out", &out)] {
                if !(t.data as usize).is_multiple_of(16) {
                    contract!(
                        "{name}: must start at a multiple of 16 bytes, got address {:p}; pass {name}.clone()",
                        t.data
                    );
                }
            }
        }
        if desc.tokens == 0 && self.workspace.is_none() {
            contract.finish()?;
            return Ok(out.into_object());
        }
        let ws = plan::workspace(&layer.desc, desc.tokens, desc.top_k);
        let scratch = Scratch::new(x, self.workspace, &mut contract, ws.bytes)?;
        let checked = contract.finish()?;
        if desc.tokens == 0 {
            return Ok(out.into_object());
        }
        let stages = |tiling| {
            let data = (x.data.cast_const(), self.tokens.scale, out.data);
            Stages::new(layer, desc, &self.options, &self.routing, data, (&ws, scratch.base), tiling)
        };
        match x.place {
            Place::Cpu => {
                let explained = || plan::explain(&desc.into(), None).unwrap_or_else(|e| e.to_string());
                stats::log_plan(|| format!("{desc:?} on the CPU"), explained);
                let stages = stages(Tiling::on_cpu(desc));
                checked.on_cpu(py, || stages.run_cpu(layer));
            }
            Place::Cuda(ordinal) => {
                let gpu = gpu(ordinal)?;
                let stream = Stream::new(gpu, x.current_stream(py)?, &checked)?;
                routed::whole_or_part(&stream, |device| {
                    let plan = MoePlan::new(desc, device)?;
                    let explained = || plan::explain(&desc.into(), Some(device)).unwrap_or_else(|e| e.to_string());
                    stats::log_plan(|| format!("{desc:?} on {ordinal}, {}", device.whole), explained);
                    stages(Tiling::of(&plan)).run_cuda(&stream, &plan, layer, scratch.base)
                })?;
            }
        }
        stats::count(stats::Call::Moe, desc.tokens);
        Ok(out.into_object())
    }
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
            let plain_x = tokens_of_x.scale.is_none();
            let desc = MoeDesc { layer: layer.desc, tokens, top_k, logits, routes_inside, plain_x };
            let routing = Routing::Logits(select);
            return Call { layer, tokens: tokens_of_x, routing, desc, options, out, workspace }.run(contract);
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
    let desc = MoeDesc {
        layer: layer.desc,
        tokens: tokens.x.shape()[0],
        top_k,
        logits: None,
        routes_inside: false,
        plain_x: tokens.scale.is_none(),
    };
    let routing = Routing::Given { weights: &weights, ids: &ids };
    Call { layer, tokens, routing, desc, options, out, workspace }.run(contract)
}

#[doc = crate::help!("moe_tensors")]
#[pyfunction(crate = "crate::python")]
#[allow(clippy::too_many_arguments)] // keyword arguments of Python
#[pyo3(signature = (x, w13, w2, topk_weights, topk_ids, *, b13=None, b2=None, layout="gate_up", activation="silu", gated=None,
    alpha=Scalar::Layer(1.0), beta=Scalar::Layer(0.0), limit=None, clamp="before", w13_scale=None, w2_scale=None, format=None, dtype=None,
    hidden_size=None, routed_scaling_factor=1.0, apply_router_weight_on_input=false, no_combine=false,
    keep_router_weight=false, ep_size=1, ep_rank=0, x_scale=None, a13_scale=None, a2_scale=None, out=None, workspace=None),
    text_signature = "(x, w13, w2, topk_weights, topk_ids, *, b13=None, b2=None, layout=\"gate_up\", activation=\"silu\", gated=None, alpha=1.0, \
beta=0.0, limit=None, clamp=\"before\", w13_scale=None, w2_scale=None, format=None, dtype=None, hidden_size=None, routed_scaling_factor=1.0, \
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
    let given = Given { alpha, beta, limit };
    guard(|| {
        let mut contract = Contract::new();
        let options = Options { layout, activation, gated, swiglu: given.borrow(&mut contract)?, clamp };
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
    // Kernels take ids of all ranks as i32.
    match experts.checked_mul(ep_size) {
        Some(all) if all <= i32::MAX as i64 => Ok(ep_rank * experts),
        _ => contract!("ep_size: {ep_size} ranks of {experts} experts each are beyond 2^31 - 1 experts"),
    }
}
