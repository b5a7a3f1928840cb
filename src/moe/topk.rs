//! Routing as operations of its own: `topk`, `sort_by_expert`, `routing_tables`.

use super::plan;
use super::plan::routing::{block_histogram_bytes, ragged, select_alone, Logits};
use super::{ids, routing, MAX_TOP_K};
use crate::contract;
use crate::cpu;
use crate::device::gpu;
use crate::error::{guard, Error, Result};
use crate::kernel::Stream;
use crate::params::{Dtype, GroupScore, RaggedParams, RouteParams, Scoring, SelectParams};
use crate::sizes::int;
use crate::stats;
use crate::tensor::{Borrowed, Contract, Dim, Elem, Place};
use pyo3::prelude::*;

/// The Python arguments that choose experts from logits.
pub struct Selection<'a> {
    /// Experts a token, shared experts included.
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
pub struct Operands<'py> {
    logits: Borrowed<'py>,
    correction_bias: Option<Borrowed<'py>>,
    num_token_non_padded: Option<Borrowed<'py>>,
}

impl<'py> Operands<'py> {
    pub fn borrow(
        contract: &mut Contract<'_>,
        logits: &Bound<'py, PyAny>,
        correction_bias: Option<&Bound<'py, PyAny>>,
        num_token_non_padded: Option<&Bound<'py, PyAny>>,
    ) -> Result<Operands<'py>> {
        let mut optional = |name, t: Option<&Bound<'py, PyAny>>| t.map(|t| contract.input(name, t)).transpose();
        Ok(Operands {
            correction_bias: optional("correction_bias", correction_bias)?,
            num_token_non_padded: optional("num_token_non_padded", num_token_non_padded)?,
            logits: contract.input("router_logits", logits)?,
        })
    }
}

pub(super) const MAX_EXPERTS: i64 = 1024;
/// Most experts of `routing_tables`: csrc/moe/ragged.cuh has room for these in shared memory.
const MAX_TABLE_EXPERTS: i64 = 512;
const MAX_GROUPS: i64 = 32;
/// Most tokens: kernels add a part of the tokens to their number in 32 bits.
const MAX_TOKENS: i64 = 1 << 30;
const SCORINGS: &str = "\"softmax\", \"sigmoid\", \"sqrtsoftplus\", \"softmax_topk\" or \"identity\"";

/// An error for a number of groups into which these experts cannot be divided. 0 stands for no groups.
pub fn require_groups(groups: i64, experts: i64) -> Result<()> {
    if groups != 0 && (!(1..=MAX_GROUPS).contains(&groups) || experts % groups != 0) {
        contract!("num_expert_group: expected 0 or a divisor of {experts} experts up to {MAX_GROUPS}, got {groups}");
    }
    Ok(())
}

impl Selection<'_> {
    /// The description of the logits, from which the routing plan is made.
    pub fn logits(&self, select: &SelectParams) -> Logits {
        Logits {
            experts: select.experts as u32,
            groups: self.num_expert_group.max(1) as u32,
            plain: select.correction_bias.is_null() && select.group_score == GroupScore::None && !select.order_by_id,
        }
    }

    /// Checks the operands, and makes the parameters. Their ids and weights are still null.
    pub fn params(&self, operands: &Operands<'_>, contract: &mut Contract<'_>) -> Result<SelectParams> {
        let Operands { logits, correction_bias, num_token_non_padded } = operands;
        contract.check(
            "router_logits",
            logits,
            &[Dim::Named("tokens"), Dim::Named("experts")],
            &[Elem::F32, Elem::Bf16, Elem::F16],
        )?;
        let (tokens, experts) = (logits.shape()[0], logits.shape()[1]);
        if let Some(bias) = correction_bias {
            contract.check("correction_bias", bias, &[Dim::Named("experts")], &[Elem::F32])?;
        }
        if let Some(n) = num_token_non_padded {
            let dims: &[Dim] = if n.shape().is_empty() { &[] } else { &[Dim::Is("one", 1)] };
            contract.check("num_token_non_padded", n, dims, &[Elem::I32])?;
        }
        let routed = self.routed(tokens, experts)?;
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
        let group_score = self.grouping(experts, routed, correction_bias.is_some())?;
        Ok(SelectParams {
            logits: logits.data,
            logits_dtype: logits.elem.dtype().unwrap_or(Dtype::F32),
            tokens: int("router_logits: dimension 0 \"tokens\"", tokens)?,
            experts: int("router_logits: dimension 1 \"experts\"", experts)?,
            top_k: int("top_k", self.top_k)?,
            correction_bias: correction_bias.as_ref().map_or(std::ptr::null(), |b| b.data.cast::<f32>().cast_const()),
            scoring,
            renormalize: self.renormalize,
            scale: self.scale,
            group_score,
            groups: int("num_expert_group", self.num_expert_group)?,
            topk_group: int("topk_group", self.topk_group)?,
            shared_experts: int("num_fused_shared_experts", self.num_fused_shared_experts)?,
            shared_weight: self.shared_weight,
            order_by_id,
            num_token_non_padded: num_token_non_padded
                .as_ref()
                .map_or(std::ptr::null(), |n| n.data.cast::<i32>().cast_const()),
            ids: std::ptr::null_mut(),
            weights: std::ptr::null_mut(),
        })
    }

    /// Routed experts a token, or an error for a shape that kernels do not take.
    fn routed(&self, tokens: i64, experts: i64) -> Result<i64> {
        if tokens > MAX_TOKENS {
            return Err(Error::Unsupported(format!("router_logits: {tokens} tokens; supported: up to {MAX_TOKENS}")));
        }
        if !(1..=MAX_EXPERTS).contains(&experts) {
            return Err(Error::Unsupported(format!("router_logits: {experts} experts; supported: 1 to {MAX_EXPERTS}")));
        }
        if self.top_k > MAX_TOP_K {
            return Err(Error::Unsupported(format!("top_k: {}; supported: 1 to {MAX_TOP_K}", self.top_k)));
        }
        let routed = self.top_k.saturating_sub(self.num_fused_shared_experts);
        if self.num_fused_shared_experts == 0 && !(1..=experts).contains(&routed) {
            contract!("top_k: expected 1 to {experts} (the experts of router_logits), got {routed}");
        }
        if self.num_fused_shared_experts < 0 || routed < 1 || routed > experts {
            contract!(
                "top_k: expected 1 to {experts} (router_logits) routed experts, got {} of which {} shared",
                self.top_k,
                self.num_fused_shared_experts
            );
        }
        Ok(routed)
    }

    /// How groups are scored. Every option of groups is checked, and those that need groups are refused without them.
    fn grouping(&self, experts: i64, routed: i64, biased: bool) -> Result<GroupScore> {
        let group_score = match self.group_score {
            None if biased => GroupScore::Top2,
            None | Some("max") => GroupScore::Max,
            Some("top2") => GroupScore::Top2,
            Some(other) => contract!("group_score: expected \"max\" or \"top2\", got {other:?}"),
        };
        let groups = self.num_expert_group;
        if groups == 0 {
            if self.topk_group != 0 {
                contract!("topk_group: expected 0 without num_expert_group, got {}", self.topk_group);
            }
            if let Some(given) = self.group_score {
                contract!("group_score: needs num_expert_group, got {given:?} without it");
            }
            return Ok(GroupScore::None);
        }
        require_groups(groups, experts)?;
        if !(1..=groups).contains(&self.topk_group) {
            contract!("topk_group: expected 1 to {groups} (num_expert_group), got {}", self.topk_group);
        }
        let size = experts / groups;
        if routed > size * self.topk_group {
            contract!("top_k: {routed} experts do not fit in {} groups of {size}", self.topk_group);
        }
        if groups == 1 {
            return Ok(GroupScore::None);
        }
        if group_score == GroupScore::Top2 && size < 2 {
            contract!("num_expert_group: group_score \"top2\" needs groups of 2 experts or more, got {groups} groups of {experts} experts");
        }
        Ok(group_score)
    }
}

/// (factor of the routed weights, weight of a shared expert). `factor` is checked even if the call does not use it.
fn scaling(factor: f32, on_output: bool) -> Result<(f32, f32)> {
    if !(factor.is_finite() && factor > 0.0 && (1.0 / factor).is_finite()) {
        contract!("routed_scaling_factor: expected a finite number above 0 whose inverse is finite, got {factor:?}");
    }
    Ok(if on_output { (factor, 1.0) } else { (1.0, 1.0 / factor) })
}

/// Whether a layer may route inside its launch.
pub fn routes_inside(select: &SelectParams, weights_on_input: bool) -> bool {
    // Softmax over all experts needs a sum whose order depends on the kernel.
    let by_chosen = select.scoring != Scoring::Softmax || select.renormalize;
    by_chosen && !weights_on_input && select.shared_experts == 0
}

/// An output tensor: the caller's tensor, which is checked, or a new one.
fn output<'py>(
    operand: &'static str,
    given: Option<&Bound<'py, PyAny>>,
    like: &Borrowed<'py>,
    shape: &[(&'static str, i64)],
    elem: Elem,
    contract: &mut Contract<'_>,
) -> Result<Borrowed<'py>> {
    let borrowed = match given {
        Some(object) => contract.output(operand, object)?,
        None => {
            let sizes: Vec<i64> = shape.iter().map(|s| s.1).collect();
            contract.new_output(operand, like, &sizes, elem)?
        }
    };
    let dims: Vec<Dim> = shape.iter().map(|&(name, size)| Dim::Is(name, size)).collect();
    contract.check(operand, &borrowed, &dims, &[elem])?;
    Ok(borrowed)
}

#[doc = crate::help!("topk")]
#[pyfunction(crate = "crate::python")]
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
        let (scale, shared_weight) = scaling(routed_scaling_factor, apply_routed_scaling_factor_on_output)?;
        let selection = Selection {
            top_k,
            scoring_func,
            renormalize,
            num_expert_group,
            topk_group,
            group_score,
            num_fused_shared_experts,
            scale,
            shared_weight,
            order,
        };
        let mut contract = Contract::new();
        let operands = Operands::borrow(&mut contract, router_logits, correction_bias, num_token_non_padded)?;
        let mut select = selection.params(&operands, &mut contract)?;
        let logits = &operands.logits;
        let shape = [("tokens", logits.shape()[0]), ("top_k", top_k)];
        let weights = output("topk_weights", topk_weights, logits, &shape, Elem::F32, &mut contract)?;
        let ids = output("topk_ids", topk_ids, logits, &shape, Elem::I32, &mut contract)?;
        let checked = contract.finish()?;
        if select.tokens > 0 {
            (select.weights, select.ids) = (weights.data.cast(), ids.data.cast());
            match logits.place {
                Place::Cpu => {
                    // SAFETY: shapes were checked against the parameters above.
                    checked.on_cpu(py, || unsafe { cpu::select(&select) })?;
                }
                Place::Cuda(ordinal) => {
                    let gpu = gpu(ordinal)?;
                    let stream = Stream::new(gpu, logits.current_stream(py)?, &checked)?;
                    let Some(launch) = select_alone(select.tokens as u32, selection.logits(&select)) else {
                        return Err(Error::Unsupported(format!(
                            "topk of {} experts in {num_expert_group} groups on a GPU",
                            select.experts
                        )));
                    };
                    stream.launch("topk", &launch, (&select, &routing::NO_SORT))?;
                }
            }
        }
        stats::count(stats::Call::TopK, select.tokens.into());
        Ok((weights.into_object(), ids.into_object()))
    })
}

/// The tables of a stable sort of the slots by expert.
struct Sorted<'py> {
    histogram: Borrowed<'py>,
    offsets: Borrowed<'py>,
    place_of_slot: Borrowed<'py>,
    slot_of_place: Borrowed<'py>,
}

/// Checks the ids and sorts their slots, on the ids' device. With no tokens it only zeroes the tables that it returns. `first_expert`: if
/// it is given, ids of other experts than the sorted ones are allowed.
fn sort<'py>(
    ids: &Borrowed<'py>,
    num_experts: i64,
    most_experts: i64,
    first_expert: Option<i64>,
    contract: &mut Contract<'_>,
) -> Result<Sorted<'py>> {
    let py = ids.object().py();
    contract.check("topk_ids", ids, &[Dim::Named("tokens"), Dim::Named("top_k")], &[Elem::I32, Elem::I64])?;
    let (tokens, top_k) = (ids.shape()[0], ids.shape()[1]);
    let all_experts = first_expert.map_or(num_experts, |_| i64::MAX);
    let first_expert = first_expert.unwrap_or(0);
    if !(1..=most_experts).contains(&num_experts) || !(0..=i32::MAX as i64 - MAX_EXPERTS).contains(&first_expert) {
        contract!(
            "num_experts: expected 1 to {most_experts} and first_expert >= 0, got {num_experts} and {first_expert}"
        );
    }
    if !(1..=MAX_TOP_K).contains(&top_k) || tokens * top_k > i32::MAX as i64 / 2 {
        contract!("topk_ids: expected 1 to {MAX_TOP_K} columns and fewer than 2^30 slots, got shape {:?}", ids.shape());
    }
    ids::check(py, contract, ids, all_experts)?;
    let mut table = |operand, size| output(operand, None, ids, &[("length", size)], Elem::I32, contract);
    let sorted = Sorted {
        histogram: table("histogram", num_experts)?,
        offsets: table("offsets", num_experts + 1)?,
        place_of_slot: table("place_of_slot", tokens * top_k)?,
        slot_of_place: table("slot_of_place", tokens * top_k)?,
    };
    // The schedule has one tile an expert and lies in scratch memory, because no caller reads it.
    let tile_tokens = 1 << 30;
    let max_tiles = plan::max_tiles(tokens * top_k, num_experts, tile_tokens);
    let tiles = table("tiles", max_tiles as i64 * 4)?;
    let count = table("tile_count", 1)?;
    let blocks = block_histogram_bytes(tokens as u32, num_experts as u32, top_k as u32) as i64 / 4;
    let block_histogram = table("block_histogram", blocks)?;
    let route = RouteParams {
        ids: ids.data,
        ids_are_i64: ids.elem == Elem::I64,
        tokens: int("topk_ids: dimension 0 \"tokens\"", tokens)?,
        top_k: int("topk_ids: dimension 1 \"top_k\"", top_k)?,
        experts: int("num_experts", num_experts)?,
        first_expert: int("first_expert", first_expert)?,
        tile_tokens,
        tile_step: 16,
        max_tiles,
        histogram: sorted.histogram.data.cast(),
        offsets: sorted.offsets.data.cast(),
        place_of_slot: sorted.place_of_slot.data.cast(),
        slot_of_place: sorted.slot_of_place.data.cast(),
        tiles: tiles.data.cast(),
        tile_count: count.data.cast(),
        counters: std::ptr::null_mut(),
        counter_count: 0,
        block_histogram: block_histogram.data.cast(),
    };
    let checked = contract.finish()?;
    match ids.place {
        Place::Cuda(ordinal) if tokens > 0 => {
            let gpu = gpu(ordinal)?;
            let plan = plan::routing(tokens, top_k, num_experts, None, &gpu.device)?;
            let stream = Stream::new(gpu, ids.current_stream(py)?, &checked)?;
            routing::launch(&stream, "sort_by_expert", &plan, &route)?;
        }
        Place::Cuda(_) => {
            sorted.histogram.object().call_method0("zero_")?;
            sorted.offsets.object().call_method0("zero_")?;
        }
        Place::Cpu => {
            // SAFETY: all tables were made above with the sizes that the parameters state.
            checked.on_cpu(py, || unsafe { cpu::route(&route) })?;
        }
    }
    Ok(sorted)
}

type Tensors4<'py> = (Bound<'py, PyAny>, Bound<'py, PyAny>, Bound<'py, PyAny>, Bound<'py, PyAny>);

#[doc = crate::help!("sort_by_expert")]
#[pyfunction(crate = "crate::python")]
#[pyo3(signature = (topk_ids, num_experts, *, first_expert=None))]
pub fn sort_by_expert<'py>(
    topk_ids: &Bound<'py, PyAny>,
    num_experts: i64,
    first_expert: Option<i64>,
) -> PyResult<Tensors4<'py>> {
    guard(|| {
        let mut contract = Contract::new();
        let ids = contract.input("topk_ids", topk_ids)?;
        let Sorted { histogram, offsets, place_of_slot, slot_of_place } =
            sort(&ids, num_experts, MAX_EXPERTS, first_expert, &mut contract)?;
        let [histogram, offsets, place_of_slot, slot_of_place] =
            [histogram, offsets, place_of_slot, slot_of_place].map(Borrowed::into_object);
        Ok((histogram, offsets, place_of_slot, slot_of_place))
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

#[doc = crate::help!("routing_tables")]
#[pyfunction(crate = "crate::python")]
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
        let mut contract = Contract::new();
        let (ids, weights) = (contract.input("topk_ids", topk_ids)?, contract.input("topk_weights", topk_weights)?);
        contract.check("topk_weights", &weights, &[Dim::Named("tokens"), Dim::Named("top_k")], &[Elem::F32])?;
        let sorted = sort(&ids, num_experts, MAX_TABLE_EXPERTS, None, &mut contract)?;
        let slots = ids.numel();
        let max_blocks =
            if slots <= num_experts { slots } else { num_experts - 1 - (num_experts - slots - 1).div_euclid(16) };
        let gate = output("gate_scal", None, &ids, &[("slots", slots)], gate_elem, &mut contract)?;
        let offsets_shape = [("sizes", 4), ("experts", num_experts + 1)];
        let offsets = output("block_offs_data", None, &ids, &offsets_shape, Elem::I32, &mut contract)?;
        let schedule_shape = [("sizes", 4), ("blocks", max_blocks)];
        let schedule = output("block_schedule_data", None, &ids, &schedule_shape, Elem::I32, &mut contract)?;
        let params = RaggedParams {
            histogram: sorted.histogram.data.cast(),
            slot_of_place: sorted.slot_of_place.data.cast(),
            slot_weights: weights.data.cast(),
            gate: gate.data,
            gate_dtype: gate_elem.dtype().unwrap_or(Dtype::F32),
            experts: int("num_experts", num_experts)?,
            slots: int("topk_ids: slots", slots)?,
            block_offsets: offsets.data.cast(),
            block_schedule: schedule.data.cast(),
            max_blocks: int("block_schedule_data: dimension 1 \"blocks\"", max_blocks)?,
        };
        let checked = contract.finish()?;
        match ids.place {
            Place::Cuda(ordinal) => {
                let stream = Stream::new(gpu(ordinal)?, ids.current_stream(py)?, &checked)?;
                stream.launch("routing_tables", &ragged(slots as u32), &params)?;
            }
            Place::Cpu => {
                // SAFETY: all tables were made above with the sizes that the parameters state.
                checked.on_cpu(py, || unsafe { cpu::ragged(&params) })?;
            }
        }
        let Sorted { histogram, offsets: slice_offsets, place_of_slot, slot_of_place } = sorted;
        let [gate, histogram, slice_offsets, slot_of_place, place_of_slot, offsets, schedule] =
            [gate, histogram, slice_offsets, slot_of_place, place_of_slot, offsets, schedule]
                .map(Borrowed::into_object);
        Ok((gate, histogram, slice_offsets, slot_of_place, place_of_slot, offsets, schedule))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn selection(top_k: i64, shared: i64) -> Selection<'static> {
        Selection {
            top_k,
            scoring_func: "softmax",
            renormalize: true,
            num_expert_group: 0,
            topk_group: 0,
            group_score: None,
            num_fused_shared_experts: shared,
            scale: 1.0,
            shared_weight: 1.0,
            order: "weight",
        }
    }

    fn text<T: std::fmt::Debug>(result: Result<T>) -> String {
        result.unwrap_err().to_string()
    }

    #[test]
    fn sizes_that_would_wrap_are_refused() {
        assert_eq!(selection(2, 0).routed(MAX_TOKENS, 8).unwrap(), 2);
        for tokens in [MAX_TOKENS + 1, 1 << 31, 1 << 32, i64::MAX] {
            assert!(text(selection(2, 0).routed(tokens, 8)).starts_with(&format!("router_logits: {tokens} tokens")));
        }
        for experts in [0, 1025, (1 << 32) + 8] {
            assert!(text(selection(2, 0).routed(1, experts)).contains(&format!("{experts} experts")));
        }
        for top_k in [33, (1 << 32) + 2, i64::MAX] {
            assert!(text(selection(top_k, 0).routed(1, 8)).starts_with(&format!("top_k: {top_k}")));
        }
        for (top_k, shared) in [(0, 0), (i64::MIN, 1), (2, i64::MIN), (2, -1), (2, 2), (2, (1 << 32) + 1)] {
            assert!(text(selection(top_k, shared).routed(1, 8)).starts_with("top_k: expected"), "{top_k} {shared}");
        }
    }

    #[test]
    fn options_of_groups_are_always_checked() {
        let check = |groups, kept, score, biased| {
            let selection =
                Selection { num_expert_group: groups, topk_group: kept, group_score: score, ..selection(2, 0) };
            selection.grouping(16, 2, biased)
        };
        assert_eq!(check(0, 0, None, true).unwrap(), GroupScore::None);
        assert_eq!(check(1, 1, Some("top2"), false).unwrap(), GroupScore::None);
        assert_eq!(check(4, 2, None, true).unwrap(), GroupScore::Top2);
        assert_eq!(check(4, 2, None, false).unwrap(), GroupScore::Max);
        for (groups, kept, score, message) in [
            (0, 0, Some("mean"), "group_score: expected"),
            (0, 0, Some("max"), "group_score: needs num_expert_group"),
            (0, 1, None, "topk_group: expected 0 without num_expert_group, got 1"),
            (1, 0, None, "topk_group: expected 1 to 1"),
            (1, 2, None, "topk_group: expected 1 to 1"),
            (-4, 1, None, "num_expert_group: expected 0 or a divisor of 16 experts up to 32, got -4"),
            (i64::MIN, 1, None, "num_expert_group: "),
            (5, 1, None, "num_expert_group: "),
            (4, (1 << 32) + 1, None, "topk_group: expected 1 to 4"),
            (16, 1, None, "top_k: 2 experts do not fit"),
            (16, 2, Some("top2"), "num_expert_group: group_score \"top2\" needs groups of 2"),
        ] {
            assert!(text(check(groups, kept, score, false)).starts_with(message), "{groups} {kept} {score:?}");
        }
    }

    #[test]
    fn a_scaling_factor_has_an_inverse() {
        assert_eq!(scaling(2.5, true).unwrap(), (2.5, 1.0));
        assert_eq!(scaling(2.5, false).unwrap(), (1.0, 0.4));
        for factor in [0.0, -0.0, -1.0, f32::NAN, f32::INFINITY, 1e-45] {
            for on_output in [true, false] {
                assert!(text(scaling(factor, on_output)).starts_with("routed_scaling_factor: expected"), "{factor}");
            }
        }
    }

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
