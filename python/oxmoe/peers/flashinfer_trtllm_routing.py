"""Routing of flashinfer's trtllm-gen calls: its methods, given experts, and the experts of a rank, for `moe`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from oxmoe._oxmoe import ExpertWeights
from oxmoe.functions import topk
from oxmoe.operands import WRONG_TYPES, check_outputs, check_tensor, name_argument
from oxmoe.peers.expert_ranks import by_rank, check_part
from oxmoe.peers.flashinfer_cutlass_formats import name_of
from oxmoe.peers.packed_topk import unpack_topk
from oxmoe.peers.workspace_buffer import if_it_fits, with_workspace

if TYPE_CHECKING:
    from torch import Tensor

# NOTE: 9 is TopKSigmoid in 0.7 and Unspecified, which it refuses, in 0.6.11.
_METHODS = (
    "Default",
    "Renormalize",
    "DeepSeekV3",
    "Llama4",
    "RenormalizeNaive",
    "TopK",
    "SigmoidRenorm",
    "MiniMax2",
    "Sigmoid",
    "TopKSigmoid",
)


# The function under a name that no parameter of flashinfer's has.
_choose = topk
# Options of `run` that do not choose experts.
_AFTER_ROUTING = ("routed_scaling_factor", "apply_router_weight_on_input", "unfinalized")


def routing_options(
    routing_method_type: Any,
    *,
    top_k: int,
    routing_bias: Tensor | None = None,
    n_group: int | None = None,
    topk_group: int | None = None,
    routed_scaling_factor: float | None = None,
    norm_topk_prob: bool = True,
) -> dict[str, Any]:
    """Converts flashinfer's RoutingMethodType and its arguments to options of `oxmoe.moe` with router_logits.

    Default: softmax, top-k. Renormalize, RenormalizeNaive: softmax of the chosen logits. DeepSeekV3: sigmoid, top-k of
    score + bias in the best groups, renormalised, times routed_scaling_factor. MiniMax2: the same without groups.
    Llama4: the best one, its sigmoid. TopK: the logits themselves. SigmoidRenorm: sigmoid, top-k, with norm_topk_prob
    renormalised. Sigmoid, TopKSigmoid: sigmoid, top-k. routing_bias, groups and factor count where they are named.
    """
    name = getattr(routing_method_type, "name", None)
    if name is None and isinstance(routing_method_type, int) and 0 <= routing_method_type < len(_METHODS):
        name = _METHODS[routing_method_type]
    if name == "Default":
        return {"top_k": top_k, "scoring_func": "softmax", "renormalize": False}
    if name in ("Renormalize", "RenormalizeNaive"):
        return {"top_k": top_k, "scoring_func": "softmax_topk", "renormalize": False}
    if name == "TopK":
        return {"top_k": top_k, "scoring_func": "identity", "renormalize": False}
    options: dict[str, Any] = {"top_k": top_k, "scoring_func": "sigmoid", "renormalize": False}
    if name in ("Sigmoid", "TopKSigmoid"):
        return options
    if name == "SigmoidRenorm":
        return {**options, "renormalize": norm_topk_prob}
    if name == "Llama4":
        if top_k != 1:
            raise ValueError(f"top_k: routing method Llama4 has 1, got {top_k}")
        return options
    if name not in ("DeepSeekV3", "MiniMax2"):
        raise NotImplementedError(
            f"routing_method_type: no kernel for {routing_method_type!r}; served are {', '.join(_METHODS)}"
        )
    options["renormalize"] = True
    if routed_scaling_factor is not None:
        options["routed_scaling_factor"] = routed_scaling_factor
    if routing_bias is not None:
        options["correction_bias"] = routing_bias.float()
    if name == "DeepSeekV3" and (n_group or 0) > 1:
        options.update(num_expert_group=n_group, topk_group=topk_group or 0)
    return options


def shared_experts(
    num_fused_shared_experts: int | None, experts: tuple[int, int, int], routing_method_type: Any
) -> tuple[int, tuple[int, int, int]]:
    """Returns how many shared experts lie behind the routed ones, and the experts with them. experts: num_experts,
    local_expert_offset, local_num_experts."""
    shared, (routed, offset, local) = int(num_fused_shared_experts or 0), experts
    if shared <= 0:
        return 0, experts
    if (offset, local) != (0, routed):
        raise ValueError(
            f"num_fused_shared_experts: expected all {routed} experts here (local_expert_offset 0, local_num_experts "
            f"{routed}), got local_expert_offset {offset}, local_num_experts {local}"
        )
    if getattr(routing_method_type, "name", routing_method_type) not in ("DeepSeekV3", _METHODS.index("DeepSeekV3")):
        raise ValueError(
            f"num_fused_shared_experts: expected routing_method_type DeepSeekV3 (2), got {routing_method_type!r}"
        )
    return shared, (routed + shared, 0, routed + shared)


def by_logits(
    routing_logits: Tensor, routing_replay_out: Tensor | None, routing: dict[str, Any], shared: int = 0
) -> dict[str, Any]:
    """Returns options of `moe` that route these logits as `routing` says; routing_replay_out gets the chosen ids.
    shared: each token also has so many experts behind the routed ones, with weight 1."""
    if shared:
        options = {"routed_scaling_factor": 1.0, **routing}
        top_k = options.pop("top_k")
        weights, all_ids = topk(
            routing_logits,
            top_k + shared,
            num_fused_shared_experts=shared,
            apply_routed_scaling_factor_on_output=True,
            **options,
        )
        if routing_replay_out is not None:
            _record(routing_replay_out, all_ids[:, :top_k])
        return {"topk_weights": weights, "topk_ids": all_ids}
    if routing_replay_out is None:
        return {**routing, "router_logits": routing_logits}
    scale = {name: routing.pop(name) for name in ("routed_scaling_factor",) if name in routing}
    chosen, ids = topk(routing_logits, routing.pop("top_k"), **routing)
    _record(routing_replay_out, ids)
    return {"topk_weights": chosen, "topk_ids": ids, **scale}


def _record(routing_replay_out: Tensor, ids: Tensor) -> None:
    _check_record(routing_replay_out, ids.shape)
    routing_replay_out[: ids.shape[0]].copy_(ids)


def _check_record(routing_replay_out: Tensor, ids: Sequence[int]) -> None:
    """Checks where ids of this shape are written."""
    check_tensor("routing_replay_out", routing_replay_out, "T", "top_k")
    if routing_replay_out.shape[0] < ids[0] or routing_replay_out.shape[1] != ids[1]:
        raise ValueError(
            f"routing_replay_out: expected [{ids[0]} or more, {ids[1]}], got shape {tuple(routing_replay_out.shape)}"
        )


def by_ids(topk_ids: Tensor | tuple[Tensor, Tensor], top_k: int) -> dict[str, Any]:
    """Returns options of `moe` for experts that were chosen before: packed as `oxmoe.pack_topk` does, or (ids,
    weights)."""
    if isinstance(topk_ids, (tuple, list)):
        if len(topk_ids) != 2:
            raise ValueError(f"topk_ids: expected ids and weights, got {len(topk_ids)} tensors")
        ids, chosen = topk_ids
        check_tensor("topk_ids[0]", ids)
        check_tensor("topk_ids[1]", chosen)
        chosen = chosen.float()
    else:
        check_tensor("topk_ids", topk_ids)
        chosen, ids = unpack_topk(topk_ids)
    if ids.dim() != 2 or ids.shape[1] != top_k:
        raise ValueError(f"topk_ids: expected shape [tokens, {top_k}] (top_k), got {list(ids.shape)}")
    return {"topk_weights": chosen, "topk_ids": ids}


def finalized(routing: dict[str, Any], do_finalize: bool, *, chosen: bool = True) -> dict[str, Any]:
    """Returns the options of `run`, which leaves the sum over a token's experts to the caller without do_finalize.
    chosen: the call chooses the experts itself."""
    return routing if do_finalize else {**routing, "unfinalized": "bfloat16" if chosen else "float32"}


def run(
    call: Callable[..., Tensor],
    x: Tensor,
    weights: ExpertWeights,
    routing: dict[str, Any],
    *,
    x_scale: Tensor | None,
    out: Tensor | None,
    workspace_buffer: Tensor | None,
) -> Any:
    """Runs a layer by `moe`. Without do_finalize (`finalized`) the result is flashinfer's list.

    These are the rows of the experts [T top_k, H], the experts' weights [T, top_k], and the row of each choice,
    int32 [T top_k], -1 of an expert that is not held here. Weights that logits chose are bf16, as flashinfer's are,
    and others fp32."""
    workspace = if_it_fits(workspace_buffer, x, weights, chosen_per_token(routing))
    if "unfinalized" not in routing:
        return with_workspace(call, x, weights, workspace=workspace, **routing, x_scale=x_scale, out=out)
    import torch

    if out is not None:
        raise ValueError("output: not with do_finalize=False, which has no finalized output")
    options = dict(routing)
    if options.pop("apply_router_weight_on_input", False):
        raise NotImplementedError("use_routing_scales_on_input: no kernel for it with do_finalize=False")
    dtype, factor = options.pop("unfinalized"), options.pop("routed_scaling_factor", 1.0)
    ranks = {name: options.pop(name) for name in ("ep_size", "ep_rank")}
    if "router_logits" in options:
        given, ids = topk(options.pop("router_logits"), options.pop("top_k"), **options)
    else:
        given, ids = options["topk_weights"], options["topk_ids"]
    rows = with_workspace(call, x, weights, given, ids, workspace=workspace, no_combine=True, **ranks, x_scale=x_scale)
    first = ranks["ep_rank"] * weights.num_experts
    held = ((ids >= first) & (ids < first + weights.num_experts)).flatten()
    places = torch.arange(held.numel(), dtype=torch.int32, device=ids.device)
    return [rows.flatten(0, 1), (given * factor).to(getattr(torch, dtype)), places.where(held, -1)]


def chosen_per_token(routing: dict[str, Any]) -> int:
    """Returns how many experts these options of `moe` choose for a token."""
    ids = routing.get("topk_ids")
    return int(routing["top_k"] if ids is None else ids.shape[1])


def of_local_experts(
    routing: dict[str, Any], num_experts: int, local_expert_offset: int, local_num_experts: int
) -> dict[str, Any]:
    """Returns options of `moe` that also say which of all experts are held here. Where ranks are no equal parts of the
    experts, logits choose in a launch of their own."""
    check_part(num_experts, local_expert_offset, local_num_experts, "local_num_experts")
    if num_experts % local_num_experts == 0 and local_expert_offset % local_num_experts == 0:
        return routing | {
            "ep_size": num_experts // local_num_experts,
            "ep_rank": local_expert_offset // local_num_experts,
        }
    if "router_logits" in routing:
        kept = {name: routing[name] for name in _AFTER_ROUTING if name in routing}
        options = {name: value for name, value in routing.items() if name not in kept}
        chosen, ids = topk(options.pop("router_logits"), options.pop("top_k"), **options)
        routing = {"topk_weights": chosen, "topk_ids": ids, **kept}
    ids, ranks = by_rank(routing["topk_ids"], num_experts, local_expert_offset, local_num_experts)
    return {**routing, "topk_ids": ids, "ep_size": 1, "ep_rank": 0, **ranks}


def check_dtype(operand: str, tensor: Tensor, *expected: str) -> None:
    """Raises ValueError for another dtype. It comes before checks of shapes: flashinfer, too, names it first."""
    if (got := name_of(tensor.dtype)) not in expected:
        raise ValueError(f"{operand}: expected dtype {' or '.join(expected)}, got {got}")


def check_experts(operand: str, held: int, expected: int) -> None:
    if held != expected:
        raise ValueError(f"{operand}: expected {expected} experts (local_num_experts), got {held}")


def fused_topk_deepseek(
    scores: Tensor,
    bias: Tensor,
    n_group: int,
    topk_group: int,
    topk: int,
    routed_scaling_factor: float,
    topk_values: Tensor,
    topk_indices: Tensor,
    launch_with_pdl: bool = True,
    routing_replay_out: Tensor | None = None,
    *,
    backend: str = "default",
) -> None:
    """flashinfer's call: the routing of DeepSeek-V3, written to topk_values [T, topk] and topk_indices int32 [T, topk].

    scores: router logits fp32, bf16 or f16 [T, E]. Chosen are the largest sigmoid(scores) + bias in the topk_group best
    of n_group groups; the values are their sigmoids over their sum, times routed_scaling_factor, in fp32 and then in
    the dtype of topk_values, which is that of scores. bias [E]: of any float dtype. routing_replay_out int16
    [>= T, topk] gets the ids, too. It takes what `oxmoe.topk` takes; launch_with_pdl has no meaning, and backend "cake"
    is refused.
    """
    try:
        if backend != "default":
            raise NotImplementedError(f'backend: no kernel for {backend!r}; served is "default"')
        for name, tensor in (("scores", scores), ("topk_values", topk_values), ("topk_indices", topk_indices)):
            check_tensor(name, tensor, "T", "E" if name == "scores" else "topk")
        check_tensor("bias", bias)
        check_dtype("topk_values", topk_values, name_of(scores.dtype))
        check_dtype("topk_indices", topk_indices, "int32")
        shape = scores.shape[0], topk
        for name, tensor in (("topk_values", topk_values), ("topk_indices", topk_indices)):
            if tuple(tensor.shape) != shape:
                raise ValueError(f"{name}: expected shape {list(shape)}, got {list(tensor.shape)}")
        outputs = {"topk_values": topk_values, "topk_indices": topk_indices}
        if routing_replay_out is not None:
            _check_record(routing_replay_out, shape)
            outputs["routing_replay_out"] = routing_replay_out
        check_outputs(scores.device, **outputs)
        groups: dict[str, Any] = {"num_expert_group": n_group, "topk_group": topk_group} if n_group > 1 else {}
        values, ids = _choose(
            scores,
            topk,
            scoring_func="sigmoid",
            correction_bias=bias.float(),
            routed_scaling_factor=routed_scaling_factor,
            apply_routed_scaling_factor_on_output=True,
            **groups,
        )
        if routing_replay_out is not None:
            _record(routing_replay_out, ids)
        topk_values.copy_(values)
        topk_indices.copy_(ids)
    except WRONG_TYPES as error:
        name_argument(error, fused_topk_deepseek, locals())
        raise
