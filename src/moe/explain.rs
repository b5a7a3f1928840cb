//! The functions that tell of a layer without running it: the size of its workspace, and its plan.

use super::call::require_countable;
use super::plan::{self, routing::Logits, CallDesc, Routed, Source, Workspace};
use super::topk::{require_groups, MAX_EXPERTS};
use super::weights::ExpertWeights;
use super::MAX_TOP_K;
use crate::contract;
use crate::desc::LayerDesc;
use crate::device::{gpu, Arch, Device};
use crate::error::{guard, Error, Result};
use crate::quant;
use pyo3::prelude::*;

/// A routed call whose ids are given.
fn of_tokens(tokens: i64, top_k: i64) -> Source {
    Source::Routed(Routed { tokens, top_k, logits: None, routes_inside: false })
}

#[doc = crate::help!("workspace_bytes")]
#[pyfunction(crate = "crate::python")]
pub fn workspace_bytes(weights: &Bound<'_, ExpertWeights>, num_tokens: i64, top_k: i64) -> PyResult<usize> {
    guard(|| {
        if num_tokens < 0 {
            contract!("num_tokens: expected 0 or more, got {num_tokens}");
        }
        if !(1..=MAX_TOP_K).contains(&top_k) {
            contract!("top_k: expected 1 to {MAX_TOP_K}, got {top_k}");
        }
        let layer = weights.get().desc();
        require_countable("num_tokens", layer, of_tokens(num_tokens, top_k))?;
        Ok(Workspace::of_slots(layer, num_tokens, top_k).bytes)
    })
}

#[doc = crate::help!("shape_workspace_bytes")]
#[pyfunction(crate = "crate::python")]
#[pyo3(signature = (num_experts, top_k, hidden_size, intermediate_size, num_tokens, *, format="bf16", gated=true))]
pub fn shape_workspace_bytes(
    num_experts: i64,
    top_k: i64,
    hidden_size: i64,
    intermediate_size: i64,
    num_tokens: i64,
    format: &str,
    gated: bool,
) -> PyResult<usize> {
    guard(|| {
        let layer = described((num_experts, top_k, hidden_size, intermediate_size), num_tokens, format, gated)?;
        require_countable("num_tokens", &layer, of_tokens(num_tokens, top_k))?;
        Ok(Workspace::of_slots(&layer, num_tokens, top_k).bytes)
    })
}

/// The layer of these sizes, or an error for sizes that no layer has.
fn described(
    (num_experts, top_k, hidden_size, intermediate_size): (i64, i64, i64, i64),
    num_tokens: i64,
    format: &str,
    gated: bool,
) -> Result<LayerDesc> {
    let spec = quant::by_name(format).ok_or_else(|| quant::unknown(format))?;
    let sizes = [
        ("num_experts", num_experts, 4096),
        ("top_k", top_k, MAX_TOP_K),
        ("hidden_size", hidden_size, 1 << 24),
        ("intermediate_size", intermediate_size, 1 << 24),
    ];
    for (name, got, most) in sizes {
        if !(1..=most).contains(&got) {
            contract!("{name}: expected 1 to {most}, got {got}");
        }
    }
    let multiples =
        [("hidden_size", hidden_size, spec.block), ("intermediate_size", intermediate_size, spec.inner_block)];
    for (name, got, multiple) in multiples {
        if got % multiple != 0 {
            contract!("{name}: expected a multiple of {multiple} for format {format:?}, got {got}");
        }
    }
    if !(0..=1 << 24).contains(&num_tokens) {
        contract!("num_tokens: expected 0 to 2^24, got {num_tokens}");
    }
    Ok(LayerDesc {
        experts: num_experts,
        hidden: hidden_size,
        intermediate: intermediate_size,
        gated,
        dtype: spec.compute,
        format: spec.format,
    })
}

#[doc = crate::help!("explain")]
#[pyfunction(crate = "crate::python")]
#[allow(clippy::too_many_arguments)] // keyword arguments of Python
#[pyo3(signature = (num_experts, top_k, hidden_size, intermediate_size, num_tokens, *, format="bf16", gated=true, arch=None, routing=None, num_expert_group=0,
    correction_bias=false))]
pub fn explain(
    num_experts: i64,
    top_k: i64,
    hidden_size: i64,
    intermediate_size: i64,
    num_tokens: i64,
    format: &str,
    gated: bool,
    arch: Option<&str>,
    routing: Option<&str>,
    num_expert_group: i64,
    correction_bias: bool,
) -> PyResult<String> {
    guard(|| {
        let layer = described((num_experts, top_k, hidden_size, intermediate_size), num_tokens, format, gated)?;
        if top_k > num_experts {
            contract!("top_k: expected 1 to {num_experts}, got {top_k}");
        }
        require_groups(num_expert_group, num_experts)?;
        if routing == Some("ids") && (num_expert_group != 0 || correction_bias) {
            let option = if correction_bias { "correction_bias" } else { "num_expert_group" };
            contract!(
                "{option}: a call with given ids has no router; expected routing \"logits\" or None, got \"ids\""
            );
        }
        if routing != Some("ids") && num_experts > MAX_EXPERTS {
            return Err(Error::Unsupported(format!(
                "num_experts: {num_experts} with router logits; supported: 1 to {MAX_EXPERTS}; routing \"ids\" shows a call with given ids"
            )));
        }
        let call = |logits| {
            CallDesc::new(layer, Source::Routed(Routed { tokens: num_tokens, top_k, logits, routes_inside: true }))
        };
        let groups = num_expert_group.max(1) as u32;
        let plain = groups == 1 && !correction_bias;
        let of_logits = call(Some(Logits { experts: num_experts as u32, groups, plain }));
        let device = match arch {
            Some("cpu") => None,
            Some(name) => match Arch::parse(name) {
                Some(arch) => Some(Device::typical(arch)),
                None => contract!("arch: expected \"cpu\" or one of {}, got {name:?}", Arch::known()),
            },
            None => gpu(0).ok().map(|g| g.device.clone()),
        };
        match routing {
            None => plan::explain_both(&of_logits, &call(None), device.as_ref()),
            Some("logits") => plan::explain(&of_logits, device.as_ref()),
            Some("ids") => plan::explain(&call(None), device.as_ref()),
            Some(other) => contract!("routing: expected \"logits\", \"ids\" or None for both, got {other:?}"),
        }
    })
}
