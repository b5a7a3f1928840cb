//! Routing as operations of its own: `topk`, `sort_by_expert`, `routing_tables`.

use super::plan;
use super::plan::routing::{block_histogram_bytes, ragged, select_alone, Logits};
use super::{routing, MAX_TOP_K};
use crate::contract;
use crate::cpu;
use crate::device::gpu;
use crate::error::{guard, Error, Result};
use crate::kernel::{Args, Stream};
use crate::params::{Dtype, GroupScore, RaggedParams, RouteParams, Scoring, SelectParams};
use crate::tensor::{self, Contract, Dim, Elem, Place, TensorRef};
use pyo3::prelude::*;

/// The Python arguments that choose experts from logits.
pub struct Selection<'a> {
    /// Shared experts included.
    pub top_k: i64,
    pub scoring_func: &'a str,
    pub renormalize: bool,
    pub num_expert_group: i64,
    pub topk_group: i64,
    pub group_score: Option<&'a str>,
    pub num_fused_shared_experts: i64,
    pub scale: f32,
    pub shared_weight: f32,
    pub order: &'a str,
}

/// The tensors of a selection.
pub struct Operands {
    logits: TensorRef,
    correction_bias: Option<TensorRef>,
    num_token_non_padded: Option<TensorRef>,
}

impl Operands {
    pub fn borrow(
        logits: &Bound<'_, PyAny>,
        correction_bias: Option<&Bound<'_, PyAny>>,
        num_token_non_padded: Option<&Bound<'_, PyAny>>,
    ) -> Result<Operands> {
        Ok(Operands {
            logits: TensorRef::borrow("router_logits", logits)?,
            correction_bias: correction_bias.map(|t| TensorRef::borrow("correction_bias", t)).transpose()?,
            num_token_non_padded: num_token_non_padded
                .map(|t| TensorRef::borrow("num_token_non_padded", t))
                .transpose()?,
        })
    }
}

const MAX_EXPERTS: i64 = 512;
const SCORINGS: &str = "\"softmax\", \"sigmoid\", \"sqrtsoftplus\", \"softmax_topk\" or \"identity\"";

impl Selection<'_> {
    /// As the routing plan sees it.
    pub fn logits(&self, select: &SelectParams) -> Logits {
        Logits {
            experts: select.experts as u32,
            groups: self.num_expert_group.max(1) as u32,
            plain: select.correction_bias.is_null() && select.group_score == GroupScore::None && !select.order_by_id,
        }
    }

    /// Checks the operands; ids and weights of the result are still null.
    pub fn params(&self, operands: &Operands, contract: &mut Contract) -> Result<SelectParams> {
        let Operands { logits, correction_bias, num_token_non_padded } = operands;
        contract.check(
            "router_logits",
            logits,
            &[Dim::Named("tokens"), Dim::Named("experts")],
            &[Elem::F32, Elem::Bf16, Elem::F16],
        )?;
        let experts = logits.shape()[1];
        if let Some(bias) = correction_bias {
            contract.check("correction_bias", bias, &[Dim::Named("experts")], &[Elem::F32])?;
        }
        if let Some(n) = num_token_non_padded {
            let dims: &[Dim] = if n.shape().is_empty() { &[] } else { &[Dim::Is("one", 1)] };
            contract.check("num_token_non_padded", n, dims, &[Elem::I32])?;
        }
        if !(1..=MAX_EXPERTS).contains(&experts) {
            return Err(Error::Unsupported(format!("router_logits: {experts} experts; supported: 1 to {MAX_EXPERTS}")));
        }
        if self.top_k > MAX_TOP_K {
            return Err(Error::Unsupported(format!("top_k: {}; supported: 1 to {MAX_TOP_K}", self.top_k)));
        }
        let routed = self.top_k - self.num_fused_shared_experts;
        if self.num_fused_shared_experts < 0 || routed < 1 || routed > experts {
            contract!(
                "top_k: expected 1 to {experts} (router_logits) routed experts, got {} of which {} shared",
                self.top_k,
                self.num_fused_shared_experts
            );
        }
        let scoring = match self.scoring_func {
            "softmax" => Scoring::Softmax,
            "sigmoid" => Scoring::Sigmoid,
            "sqrtsoftplus" => Scoring::SqrtSoftplus,
            "softmax_topk" => Scoring::SoftmaxTopk,
            "identity" => Scoring::Identity,
            other => contract!("scoring_func: expected {SCORINGS}, got {other:?}"),
        };
        let order_by_id = match self.order {
            "weight" => false,
            "id" => true,
            other => contract!("order: expected \"weight\" or \"id\", got {other:?}"),
        };
        let groups = self.num_expert_group;
        let group_score = if groups <= 1 {
            GroupScore::None
        } else {
            if experts % groups != 0 || groups > 32 {
                contract!("num_expert_group: expected a divisor of {experts} experts up to 32, got {groups}");
            }
            if self.topk_group < 1 || self.topk_group > groups {
                contract!("topk_group: expected 1 to {groups} (num_expert_group), got {}", self.topk_group);
            }
            if routed > experts / groups * self.topk_group {
                contract!("top_k: {routed} experts do not fit in {} groups of {}", self.topk_group, experts / groups);
            }
            match self.group_score.unwrap_or(if correction_bias.is_some() { "top2" } else { "max" }) {
                "max" => GroupScore::Max,
                "top2" if experts / groups < 2 => {
                    contract!("num_expert_group: group_score \"top2\" needs groups of 2 experts or more, got {groups} groups of {experts} experts")
                }
                "top2" => GroupScore::Top2,
                other => contract!("group_score: expected \"max\" or \"top2\", got {other:?}"),
            }
        };
        Ok(SelectParams {
            logits: logits.data,
            logits_dtype: logits.elem.dtype().unwrap_or(Dtype::F32),
            tokens: logits.shape()[0] as i32,
            experts: experts as i32,
            top_k: self.top_k as i32,
            correction_bias: correction_bias.as_ref().map_or(std::ptr::null(), |b| b.data.cast::<f32>().cast_const()),
            scoring,
            renormalize: self.renormalize,
            scale: self.scale,
            group_score,
            groups: groups as i32,
            topk_group: self.topk_group as i32,
            shared_experts: self.num_fused_shared_experts as i32,
            shared_weight: self.shared_weight,
            order_by_id,
            num_token_non_padded: num_token_non_padded
                .as_ref()
                .map_or(std::ptr::null(), |n| n.data.cast::<i32>().cast_const()),
            ids: std::ptr::null_mut(),
            weights: std::ptr::null_mut(),
        })
    }
}

/// Whether a layer may route inside its launch.
pub fn routes_inside(select: &SelectParams, weights_on_input: bool) -> bool {
    // Softmax over all experts is a sum whose order depends on the kernel.
    let by_chosen = select.scoring != Scoring::Softmax || select.renormalize;
    by_chosen && !weights_on_input && select.shared_experts == 0
}

struct Shared<T>(T);
// SAFETY: parameter structs hold addresses of tensors that the caller keeps alive while the CPU backend runs without the GIL.
unsafe impl<T> Send for Shared<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Shared<T> {}

/// An output tensor: the caller's, checked, or a new one.
fn output<'py>(
    operand: &'static str,
    given: Option<&Bound<'py, PyAny>>,
    like: (&Bound<'py, PyAny>, &TensorRef),
    shape: &[(&'static str, i64)],
    elem: Elem,
    contract: &mut Contract,
) -> Result<(Bound<'py, PyAny>, TensorRef)> {
    let object = match given {
        Some(object) => object.clone(),
        None => {
            let sizes: Vec<i64> = shape.iter().map(|s| s.1).collect();
            tensor::empty(like.0, like.1, &sizes, elem)?
        }
    };
    let borrowed = TensorRef::borrow(operand, &object)?;
    let dims: Vec<Dim> = shape.iter().map(|&(name, size)| Dim::Is(name, size)).collect();
    contract.check(operand, &borrowed, &dims, &[elem])?;
    Ok((object, borrowed))
}

/// Top-k experts of each token: (topk_weights fp32 [T, k], topk_ids int32 [T, k]), best first (order="id": by id), ties to the lower id.
///
/// router_logits fp32, bf16 or f16 [T, E], E <= 512; top_k <= 32 includes num_fused_shared_experts, which take the last columns with
/// ids E, E + 1, ... Semantics of SGLang's select_experts; see docs/architecture.md, "Top-k".
#[pyfunction]
#[allow(clippy::too_many_arguments)] // keyword arguments of Python
#[pyo3(signature = (router_logits, top_k, *, scoring_func="softmax", renormalize=true, correction_bias=None, num_expert_group=0, topk_group=0,
    group_score=None, num_fused_shared_experts=0, routed_scaling_factor=1.0, apply_routed_scaling_factor_on_output=false,
    num_token_non_padded=None, order="weight", topk_weights=None, topk_ids=None))]
pub fn topk<'py>(
    router_logits: &Bound<'py, PyAny>,
    top_k: i64,
    scoring_func: &str,
    renormalize: bool,
    correction_bias: Option<&Bound<'py, PyAny>>,
    num_expert_group: i64,
    topk_group: i64,
    group_score: Option<&str>,
    num_fused_shared_experts: i64,
    routed_scaling_factor: f32,
    apply_routed_scaling_factor_on_output: bool,
    num_token_non_padded: Option<&Bound<'py, PyAny>>,
    order: &str,
    topk_weights: Option<&Bound<'py, PyAny>>,
    topk_ids: Option<&Bound<'py, PyAny>>,
) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyAny>)> {
    let py = router_logits.py();
    guard(|| {
        let selection = Selection {
            top_k,
            scoring_func,
            renormalize,
            num_expert_group,
            topk_group,
            group_score,
            num_fused_shared_experts,
            scale: if apply_routed_scaling_factor_on_output { routed_scaling_factor } else { 1.0 },
            shared_weight: if apply_routed_scaling_factor_on_output { 1.0 } else { 1.0 / routed_scaling_factor },
            order,
        };
        let operands = Operands::borrow(router_logits, correction_bias, num_token_non_padded)?;
        let mut contract = Contract::new();
        let mut select = selection.params(&operands, &mut contract)?;
        let logits = &operands.logits;
        let shape = [("tokens", logits.shape()[0]), ("top_k", top_k)];
        let like = (router_logits, logits);
        let (weights_object, weights) = output("topk_weights", topk_weights, like, &shape, Elem::F32, &mut contract)?;
        let (ids_object, ids) = output("topk_ids", topk_ids, like, &shape, Elem::I32, &mut contract)?;
        if select.tokens > 0 {
            (select.weights, select.ids) = (weights.data.cast(), ids.data.cast());
            match logits.place {
                Place::Cpu => {
                    let select = Shared(select);
                    py.detach(|| {
                        let Shared(select) = &select;
                        // SAFETY: shapes were checked against the parameters above.
                        unsafe { cpu::select(select) }
                    });
                }
                Place::Cuda(ordinal) => {
                    let gpu = gpu(ordinal)?;
                    let stream = Stream::new(gpu, logits.current_stream(py)?)?;
                    let Some(launch) = select_alone(select.tokens as u32, selection.logits(&select)) else {
                        return Err(Error::Unsupported(format!(
                            "topk of {} experts in {num_expert_group} groups on a GPU",
                            select.experts
                        )));
                    };
                    stream.launch("topk", &launch, Args::Select(&select, &routing::NO_SORT))?;
                }
            }
        }
        Ok((weights_object, ids_object))
    })
}

/// The tables of a stable sort of the slots by expert.
struct Sorted<'py> {
    histogram: (Bound<'py, PyAny>, TensorRef),
    offsets: (Bound<'py, PyAny>, TensorRef),
    place_of_slot: (Bound<'py, PyAny>, TensorRef),
    slot_of_place: (Bound<'py, PyAny>, TensorRef),
}

/// Checks and sorts. Runs on the ids' device; with no token it only zeroes what it returns.
fn sort<'py>(
    topk_ids: &Bound<'py, PyAny>,
    ids: &TensorRef,
    num_experts: i64,
    first_expert: i64,
    contract: &mut Contract,
) -> Result<Sorted<'py>> {
    let py = topk_ids.py();
    contract.check("topk_ids", ids, &[Dim::Named("tokens"), Dim::Named("top_k")], &[Elem::I32, Elem::I64])?;
    let (tokens, top_k) = (ids.shape()[0], ids.shape()[1]);
    if !(1..=MAX_EXPERTS).contains(&num_experts) || !(0..=i32::MAX as i64 - MAX_EXPERTS).contains(&first_expert) {
        contract!(
            "num_experts: expected 1 to {MAX_EXPERTS} and first_expert >= 0, got {num_experts} and {first_expert}"
        );
    }
    if !(1..=MAX_TOP_K).contains(&top_k) || tokens * top_k > i32::MAX as i64 / 2 {
        contract!("topk_ids: expected 1 to {MAX_TOP_K} columns and at most 2^30 slots, got shape {:?}", ids.shape());
    }
    let like = (topk_ids, ids);
    let mut int = |operand, size| output(operand, None, like, &[("length", size)], Elem::I32, contract);
    let sorted = Sorted {
        histogram: int("histogram", num_experts)?,
        offsets: int("offsets", num_experts + 1)?,
        place_of_slot: int("place_of_slot", tokens * top_k)?,
        slot_of_place: int("slot_of_place", tokens * top_k)?,
    };
    // One tile an expert, in scratch memory: the schedule itself is not asked for.
    let tile_tokens = 1 << 30;
    let max_tiles = plan::max_tiles(tokens * top_k, num_experts, tile_tokens);
    let (_tiles_object, tiles) = int("tiles", max_tiles as i64 * 4)?;
    let (_count_object, count) = int("tile_count", 1)?;
    let blocks = block_histogram_bytes(tokens as u32, num_experts as u32, top_k as u32) as i64 / 4;
    let (_blocks_object, block_histogram) = int("block_histogram", blocks)?;
    let route = RouteParams {
        ids: ids.data,
        ids_are_i64: ids.elem == Elem::I64,
        tokens: tokens as i32,
        top_k: top_k as i32,
        experts: num_experts as i32,
        first_expert: first_expert as i32,
        tile_tokens,
        tile_step: 16,
        max_tiles,
        histogram: sorted.histogram.1.data.cast(),
        offsets: sorted.offsets.1.data.cast(),
        place_of_slot: sorted.place_of_slot.1.data.cast(),
        slot_of_place: sorted.slot_of_place.1.data.cast(),
        tiles: tiles.data.cast(),
        tile_count: count.data.cast(),
        counters: std::ptr::null_mut(),
        counter_count: 0,
        block_histogram: block_histogram.data.cast(),
    };
    match ids.place {
        Place::Cuda(ordinal) if tokens > 0 => {
            let gpu = gpu(ordinal)?;
            let plan = plan::routing(tokens, top_k, num_experts, None, &gpu.device)?;
            let stream = Stream::new(gpu, ids.current_stream(py)?)?;
            routing::launch(&stream, "sort_by_expert", &plan, None, &route)?;
        }
        Place::Cuda(_) => {
            sorted.histogram.0.call_method0("zero_")?;
            sorted.offsets.0.call_method0("zero_")?;
        }
        Place::Cpu => {
            let route = Shared(route);
            py.detach(|| {
                let Shared(route) = &route;
                // SAFETY: all tables were made above with the sizes that the parameters state.
                unsafe { cpu::route(route) }
            });
        }
    }
    Ok(sorted)
}

type Tensors4<'py> = (Bound<'py, PyAny>, Bound<'py, PyAny>, Bound<'py, PyAny>, Bound<'py, PyAny>);

/// Stable sort of the T k slots by expert: (histogram int32 [E], offsets int32 [E + 1], place_of_slot int32 [T k], slot_of_place int32
/// [T k]); -1 where there is none. Ids outside [first_expert, first_expert + num_experts) are skipped.
#[pyfunction]
#[pyo3(signature = (topk_ids, num_experts, *, first_expert=0))]
pub fn sort_by_expert<'py>(
    topk_ids: &Bound<'py, PyAny>,
    num_experts: i64,
    first_expert: i64,
) -> PyResult<Tensors4<'py>> {
    guard(|| {
        let ids = TensorRef::borrow("topk_ids", topk_ids)?;
        let sorted = sort(topk_ids, &ids, num_experts, first_expert, &mut Contract::new())?;
        Ok((sorted.histogram.0, sorted.offsets.0, sorted.place_of_slot.0, sorted.slot_of_place.0))
    })
}

type Tensors7<'py> = (
    Bound<'py, PyAny>,
    Bound<'py, PyAny>,
    Bound<'py, PyAny>,
    Bound<'py, PyAny>,
    Bound<'py, PyAny>,
    Bound<'py, PyAny>,
    Bound<'py, PyAny>,
);

/// triton_kernels' tables of a routed batch: (gate_scal [T k] of dtype gate_dtype, expt_hist int32 [E], slice_offs int32 [E + 1],
/// combine_indx int32 [T k], dispatch_indx int32 [T k], block_offs_data int32 [4, E + 1], block_schedule_data int32 [4, N]).
///
/// combine_indx: place -> slot, grouped by expert, stable in the slot; dispatch_indx: slot -> place; -1 where there is none. gate_scal:
/// weight of each place's slot, 0 where there is none. Row i of the block tables is for blocks of 16 << i rows.
/// N = T k if T k <= E, else E - 1 - floor((E - T k - 1) / 16).
#[pyfunction]
#[pyo3(signature = (topk_weights, topk_ids, num_experts, *, gate_dtype="float32"))]
pub fn routing_tables<'py>(
    topk_weights: &Bound<'py, PyAny>,
    topk_ids: &Bound<'py, PyAny>,
    num_experts: i64,
    gate_dtype: &str,
) -> PyResult<Tensors7<'py>> {
    let py = topk_ids.py();
    guard(|| {
        let gate_elem = match gate_dtype {
            "float32" => Elem::F32,
            "float16" => Elem::F16,
            "bfloat16" => Elem::Bf16,
            other => contract!("gate_dtype: expected \"float32\", \"float16\" or \"bfloat16\", got {other:?}"),
        };
        let (ids, weights) =
            (TensorRef::borrow("topk_ids", topk_ids)?, TensorRef::borrow("topk_weights", topk_weights)?);
        let mut contract = Contract::new();
        contract.check("topk_weights", &weights, &[Dim::Named("tokens"), Dim::Named("top_k")], &[Elem::F32])?;
        let sorted = sort(topk_ids, &ids, num_experts, 0, &mut contract)?;
        let slots = ids.numel();
        let max_blocks =
            if slots <= num_experts { slots } else { num_experts - 1 - (num_experts - slots - 1).div_euclid(16) };
        let like = (topk_ids, &ids);
        let gate = output("gate_scal", None, like, &[("slots", slots)], gate_elem, &mut contract)?;
        let offsets_shape = [("sizes", 4), ("experts", num_experts + 1)];
        let offsets = output("block_offs_data", None, like, &offsets_shape, Elem::I32, &mut contract)?;
        let schedule_shape = [("sizes", 4), ("blocks", max_blocks)];
        let schedule = output("block_schedule_data", None, like, &schedule_shape, Elem::I32, &mut contract)?;
        let params = RaggedParams {
            histogram: sorted.histogram.1.data.cast(),
            slot_of_place: sorted.slot_of_place.1.data.cast(),
            slot_weights: weights.data.cast(),
            gate: gate.1.data,
            gate_dtype: gate_elem.dtype().unwrap_or(Dtype::F32),
            experts: num_experts as i32,
            slots: slots as i32,
            block_offsets: offsets.1.data.cast(),
            block_schedule: schedule.1.data.cast(),
            max_blocks: max_blocks as i32,
        };
        match ids.place {
            Place::Cuda(ordinal) => {
                let stream = Stream::new(gpu(ordinal)?, ids.current_stream(py)?)?;
                stream.launch("routing_tables", &ragged(slots as u32), Args::Ragged(&params))?;
            }
            Place::Cpu => {
                let params = Shared(params);
                py.detach(|| {
                    let Shared(params) = &params;
                    // SAFETY: all tables were made above with the sizes that the parameters state.
                    unsafe { cpu::ragged(params) }
                });
            }
        }
        let Sorted { histogram, offsets: slice_offsets, place_of_slot, slot_of_place } = sorted;
        Ok((gate.0, histogram.0, slice_offsets.0, slot_of_place.0, place_of_slot.0, offsets.0, schedule.0))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_that_route_inside() {
        let null = std::ptr::null_mut();
        let select = SelectParams {
            logits: null,
            logits_dtype: Dtype::F32,
            tokens: 1,
            experts: 8,
            top_k: 2,
            correction_bias: std::ptr::null(),
            scoring: Scoring::Sigmoid,
            renormalize: false,
            scale: 1.0,
            group_score: GroupScore::Max,
            groups: 0,
            topk_group: 0,
            shared_experts: 0,
            shared_weight: 1.0,
            order_by_id: false,
            num_token_non_padded: std::ptr::null(),
            ids: null.cast(),
            weights: null.cast(),
        };
        assert!(routes_inside(&select, false));
        // GEMM1 of such a launch does not multiply its rows by their weights.
        assert!(!routes_inside(&select, true));
        assert!(!routes_inside(&SelectParams { shared_experts: 1, ..select }, false));
        let softmax = SelectParams { scoring: Scoring::Softmax, ..select };
        assert!(!routes_inside(&softmax, false));
        assert!(routes_inside(&SelectParams { renormalize: true, ..softmax }, false));
        assert!(!routes_inside(&SelectParams { renormalize: true, ..softmax }, true));
    }
}
