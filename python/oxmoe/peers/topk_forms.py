"""Converts SGLang's forms of a top-k result to arguments of `moe`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


_FLOATS = ("torch.bfloat16", "torch.float16", "torch.float64")


def as_float32(topk_weights: Any) -> Any:
    """Converts top-k weights of another float dtype to fp32. SGLang's models and custom routing functions leave them
    in the router's dtype (Llama-4, PhiMoE). Anything else is returned unchanged, for `moe` to check."""
    return topk_weights.float() if str(getattr(topk_weights, "dtype", None)) in _FLOATS else topk_weights


def routing_arguments(topk_output: Any) -> dict[str, Any]:
    """Returns the arguments for a top-k result. A StandardTopKOutput has weights and ids. For a
    TritonKernelTopKOutput (0.5.12 or 0.5.23) they are made from its tables. For a BypassedTopKOutput they are the
    router logits and how to choose.

    If `moe` cannot make the choice itself (a custom function, fused shared experts, scaled weights, expert
    placement), the output's own to_standard() makes it.
    """
    config = getattr(topk_output, "topk_config", None)
    data: Any = getattr(topk_output, "routing_data", None)
    metadata: Any = getattr(topk_output, "a_ragged_metadata", None)
    if data is not None or metadata is not None:
        scatter = topk_output.scatter_indx
        if data is not None:
            tables = data.expt_hist, scatter.dst_indx, data.gate_scal, data.n_expts_act
        else:
            tables = metadata.slice_sizes, scatter, topk_output.gate_scal, topk_output.n_expts_act
        weights, ids = slots_of(*tables)
        return {"topk_weights": weights, "topk_ids": ids}
    if config is None:
        if not hasattr(topk_output, "topk_weights") or not hasattr(topk_output, "topk_ids"):
            raise ValueError(f"topk_output: expected a top-k result of SGLang's, got {type(topk_output).__name__}")
        return {"topk_weights": as_float32(topk_output.topk_weights), "topk_ids": topk_output.topk_ids}
    shared = getattr(getattr(config, "shared_experts", None), "num_shared_topk_slots", 0)
    special = (
        getattr(config, "custom_routing_function", None) is not None,
        getattr(config, "num_fused_shared_experts", 0) or shared,
        getattr(config, "apply_routed_scaling_factor_on_output", False),
        getattr(config, "sqrtsoftplus_log1p", False),
        getattr(topk_output, "expert_location_dispatch_info", None) is not None,
    )
    if any(special):
        return routing_arguments(topk_output.to_standard())
    logits = getattr(topk_output, "raw_router_logits", None)
    arguments: dict[str, Any] = {
        "router_logits": topk_output.router_logits if logits is None else logits,
        "top_k": config.top_k,
        "scoring_func": getattr(config, "scoring_func", "softmax"),
        "renormalize": getattr(config, "renormalize", True),
    }
    bias, valid = getattr(config, "correction_bias", None), getattr(topk_output, "num_token_non_padded", None)
    if bias is not None:
        arguments["correction_bias"] = bias.float()
    if valid is not None:
        arguments["num_token_non_padded"] = valid.reshape(()).int()
    if getattr(config, "use_grouped_topk", False):
        arguments.update(num_expert_group=config.num_expert_group, topk_group=config.topk_group)
        if bias is not None:
            arguments["scoring_func"] = "sigmoid"  # the configuration does not decide this: SGLang has no other
    return arguments


def slots_of(histogram: Tensor, slot_of_place: Tensor, gates: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Converts triton_kernels' tables back to (topk_weights fp32 [T, k], topk_ids int32 [T, k]). The tables have the
    rows of each expert [E], and the slot and weight of each place in expert order [T k]. A slot of -1 stands for
    none."""
    import torch

    slots = slot_of_place.numel()
    places = torch.arange(slots, device=slot_of_place.device)
    experts = torch.searchsorted(histogram.cumsum(0), places, right=True).int()
    # Places without a slot write to an element behind the end.
    index = torch.where(slot_of_place < 0, slots, slot_of_place).long()
    ids = experts.new_full((slots + 1,), -1).index_copy_(0, index, experts)
    weights = torch.zeros(slots + 1, dtype=torch.float32, device=gates.device).index_copy_(0, index, gates.float())
    return weights[:slots].view(-1, top_k), ids[:slots].view(-1, top_k)
