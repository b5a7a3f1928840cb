"""torch.ops.oxmoe.*: every function as a torch operator with a fake kernel, and the public functions on top.

An operator costs over a microsecond more than the builtin, so eager calls go straight to the extension; while torch
compiles, exports, traces or fakes, they go through the operator, which such modes can see. Operators take the experts
as plain tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from oxmoe import _oxmoe
from oxmoe.fused_experts import expert_weights, run
from oxmoe.tracing import tracing

_Function = TypeVar("_Function", bound=Callable[..., Any])

_EXPERT_OPTION_NAMES = ("layout", "activation", "gated", "alpha", "beta", "limit", "clamp")
# What the options of the same name are where each expert has its own: operators have no union types.
_EXPERT_TENSOR_NAMES = {"alpha": "expert_alpha", "beta": "expert_beta", "limit": "expert_limit"}
# Of formats with block scales; the others take none of them.
_BLOCK_OPTION_NAMES = ("w13_scale", "w2_scale", "format", "dtype", "hidden_size")
_PACKED_ONLY = "supported on CUDA: oxmoe.moe with an ExpertWeights.mxfp4, which packs them once"
_LOGITS_OPTION_NAMES = frozenset(
    ("router_logits", "top_k", "scoring_func", "renormalize", "correction_bias", "num_expert_group", "topk_group")
) | {"num_token_non_padded"}
_EXPERT_OPTIONS = (
    'str layout="gate_up", str activation="silu", bool? gated=None, float alpha=1.0, float beta=0.0, '
    'float? limit=None, str clamp="before", Tensor? w13_scale=None, Tensor? w2_scale=None, str? format=None, '
    "str? dtype=None, int? hidden_size=None, Tensor? expert_alpha=None, Tensor? expert_beta=None, "
    "Tensor? expert_limit=None"
)
_MOE_OPERANDS = (
    "Tensor x, Tensor w13, Tensor w2, Tensor? topk_weights=None, Tensor? topk_ids=None, "
    "Tensor? b13=None, Tensor? b2=None"
)
_MOE_OPTIONS = (
    f"{_EXPERT_OPTIONS}, Tensor? router_logits=None, int top_k=0, "
    'str scoring_func="softmax", bool renormalize=True, Tensor? correction_bias=None, int num_expert_group=0, '
    "int topk_group=0, Tensor? num_token_non_padded=None, float routed_scaling_factor=1.0, "
    "bool apply_router_weight_on_input=False, bool no_combine=False, bool keep_router_weight=False, "
    "int ep_size=1, int ep_rank=0"
)
_FUSED_OPERANDS = (
    "Tensor hidden_states, Tensor w1, Tensor w2, Tensor topk_weights, Tensor topk_ids, Tensor? b1=None, Tensor? b2=None"
)
_FUSED_OPTIONS = (
    'str activation="silu", bool is_gated=True, bool apply_router_weight_on_input=False, bool no_combine=False, '
    "bool no_combine_keep_router_weight=False, float? routed_scaling_factor=None, float? gemm1_alpha=None, "
    "float? gemm1_beta=None, float? gemm1_limit=None, float? swiglu_limit=None, bool gate_up_interleaved=True, "
    "bool fuse_swiglu_interleaved=False, Tensor? w1_scale=None, Tensor? w2_scale=None"
)
_TOPK_OPTIONS = (
    'str scoring_func="softmax", bool renormalize=True, Tensor? correction_bias=None, int num_expert_group=0, '
    "int topk_group=0, str? group_score=None, int num_fused_shared_experts=0, float routed_scaling_factor=1.0, "
    'bool apply_routed_scaling_factor_on_output=False, Tensor? num_token_non_padded=None, str order="weight"'
)

SCHEMAS = {
    "moe": f"({_MOE_OPERANDS}, *, {_MOE_OPTIONS}) -> Tensor",
    "moe.out": f"({_MOE_OPERANDS}, *, {_MOE_OPTIONS}, Tensor(a!) out, Tensor(b!)? workspace=None) -> ()",
    "fused_experts": f"({_FUSED_OPERANDS}, *, {_FUSED_OPTIONS}) -> Tensor",
    "fused_experts.out": f"({_FUSED_OPERANDS}, *, {_FUSED_OPTIONS}, Tensor(a!) out) -> ()",
    "topk": f"(Tensor router_logits, int top_k, *, {_TOPK_OPTIONS}) -> (Tensor, Tensor)",
    "topk.out": (
        f"(Tensor router_logits, int top_k, *, {_TOPK_OPTIONS}, Tensor(a!) topk_weights, Tensor(b!) topk_ids) -> ()"
    ),
    "sort_by_expert": "(Tensor topk_ids, int num_experts, *, int first_expert=0) -> (Tensor, Tensor, Tensor, Tensor)",
    "routing_tables": (
        '(Tensor topk_weights, Tensor topk_ids, int num_experts, *, str gate_dtype="float32") '
        "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
    ),
}


# Kernels: what the dispatcher calls on CPU and CUDA tensors.


def _moe(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    topk_weights: Tensor | None = None,
    topk_ids: Tensor | None = None,
    b13: Tensor | None = None,
    b2: Tensor | None = None,
    **options: Any,
) -> Tensor:
    for name, of_experts in _EXPERT_TENSOR_NAMES.items():
        tensor = options.pop(of_experts, None)
        if tensor is not None:
            options[name] = tensor
    if topk_weights is not None and topk_ids is not None:
        options = {name: value for name, value in options.items() if name not in _LOGITS_OPTION_NAMES}
        return _oxmoe.moe_tensors(x, w13, w2, topk_weights, topk_ids, b13=b13, b2=b2, **options)
    if str(options.get("format")).startswith("mxfp4") and w13.is_cuda:
        raise NotImplementedError(f"mxfp4 experts on {w13.device} as bare tensors; {_PACKED_ONLY}")
    names = _EXPERT_OPTION_NAMES + _BLOCK_OPTION_NAMES
    of_experts = {name: options.pop(name) for name in names if options.get(name) is not None}
    weights = expert_weights(w13, w2, b13=b13, b2=b2, **of_experts)
    return _oxmoe.moe(x, weights, topk_weights, topk_ids, **options)


def _into_out(kernel: Callable[..., Any]) -> Callable[..., None]:
    """The kernel of an out variant, which returns nothing."""

    def call(*operands: Any, **options: Any) -> None:
        kernel(*operands, **options)

    return call


_KERNELS: dict[str, Callable[..., Any]] = {
    "moe": _moe,
    "moe.out": _into_out(_moe),
    "fused_experts": run,
    "fused_experts.out": _into_out(run),
    "topk": _oxmoe.topk,
    "topk.out": _into_out(_oxmoe.topk),
    "sort_by_expert": _oxmoe.sort_by_expert,
    "routing_tables": _oxmoe.routing_tables,
}


# Fakes: shapes and dtypes alone.


def _fake_rows(x: Tensor, slots: int, no_combine: bool) -> Tensor:
    return x.new_empty((x.shape[0], slots, x.shape[1]) if no_combine else x.shape)


def _fake_moe(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    topk_weights: Tensor | None = None,
    topk_ids: Tensor | None = None,
    b13: Tensor | None = None,
    b2: Tensor | None = None,
    *,
    top_k: int = 0,
    no_combine: bool = False,
    **options: Any,
) -> Tensor:
    return _fake_rows(x, top_k if topk_ids is None else topk_ids.shape[1], no_combine)


def _fake_fused(
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    b1: Tensor | None = None,
    b2: Tensor | None = None,
    *,
    no_combine: bool = False,
    **options: Any,
) -> Tensor:
    return _fake_rows(hidden_states, topk_ids.shape[1], no_combine)


def _fake_topk(router_logits: Tensor, top_k: int, **options: Any) -> tuple[Tensor, Tensor]:
    shape = (router_logits.shape[0], top_k)
    return router_logits.new_empty(shape, dtype=torch.float32), router_logits.new_empty(shape, dtype=torch.int32)


def _fake_sort(topk_ids: Tensor, num_experts: int, **options: Any) -> tuple[Tensor, ...]:
    slots = topk_ids.numel()
    return tuple(
        topk_ids.new_empty((size,), dtype=torch.int32) for size in (num_experts, num_experts + 1, slots, slots)
    )


def _fake_routing_tables(
    topk_weights: Tensor, topk_ids: Tensor, num_experts: int, *, gate_dtype: str = "float32"
) -> tuple[Tensor, ...]:
    slots = topk_ids.numel()
    blocks = slots if slots <= num_experts else num_experts - 1 - ((num_experts - slots - 1) // 16)
    shapes = ((num_experts,), (num_experts + 1,), (slots,), (slots,), (4, num_experts + 1), (4, blocks))
    gates = topk_weights.new_empty((slots,), dtype=getattr(torch, gate_dtype))
    return gates, *(topk_ids.new_empty(shape, dtype=torch.int32) for shape in shapes)


def _fake_nothing(*operands: Any, **options: Any) -> None:
    return None


_FAKES: dict[str, Callable[..., Any]] = {
    "moe": _fake_moe,
    "fused_experts": _fake_fused,
    "topk": _fake_topk,
    "sort_by_expert": _fake_sort,
    "routing_tables": _fake_routing_tables,
}

_library = torch.library.Library("oxmoe", "DEF")
for _name, _schema in SCHEMAS.items():
    _library.define(_name + _schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order))
    for _key in ("CPU", "CUDA"):
        _library.impl(_name, _KERNELS[_name], _key)
    torch.library.register_fake(f"oxmoe::{_name}", _FAKES.get(_name, _fake_nothing), lib=_library)


# Public functions

fused_experts = torch.ops.oxmoe.fused_experts


def _dispatching(builtin: _Function, traced: Callable[..., Any]) -> _Function:
    @functools.wraps(builtin)
    def call(*operands: Any, **options: Any) -> Any:
        return traced(*operands, **options) if tracing() else builtin(*operands, **options)

    return call  # type: ignore[return-value]


def _traced_moe(
    x: Tensor,
    weights: _oxmoe.ExpertWeights,
    topk_weights: Tensor | None = None,
    topk_ids: Tensor | None = None,
    *,
    out: Tensor | None = None,
    workspace: Tensor | None = None,
    **options: Any,
) -> Tensor:
    if weights.w13 is None:
        raise NotImplementedError(f"packed mxfp4 experts in traced code; {_PACKED_ONLY} and is not traced")
    operands = (x, weights.w13, weights.w2, topk_weights, topk_ids, weights.b13, weights.b2)
    for name in _EXPERT_OPTION_NAMES:
        value = getattr(weights, name)
        options[_EXPERT_TENSOR_NAMES[name] if isinstance(value, Tensor) else name] = value
    if weights.w13_scale is not None:
        options.update({name: getattr(weights, name) for name in _BLOCK_OPTION_NAMES})
    if out is None and workspace is None:
        return torch.ops.oxmoe.moe.default(*operands, **options)
    if out is None:
        slots = options.get("top_k", 0) if topk_ids is None else topk_ids.shape[1]
        out = _fake_rows(x, slots, options.get("no_combine", False))
    torch.ops.oxmoe.moe.out(*operands, **options, out=out, workspace=workspace)
    return out


def _traced_topk(
    router_logits: Tensor,
    top_k: int,
    *,
    topk_weights: Tensor | None = None,
    topk_ids: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    if topk_weights is None and topk_ids is None:
        return torch.ops.oxmoe.topk.default(router_logits, top_k, **options)
    weights, ids = _fake_topk(router_logits, top_k)
    weights, ids = weights if topk_weights is None else topk_weights, ids if topk_ids is None else topk_ids
    torch.ops.oxmoe.topk.out(router_logits, top_k, **options, topk_weights=weights, topk_ids=ids)
    return weights, ids


def _traced_sort(topk_ids: Tensor, num_experts: int, *, first_expert: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return torch.ops.oxmoe.sort_by_expert.default(topk_ids, num_experts, first_expert=first_expert)


def _traced_routing_tables(
    topk_weights: Tensor, topk_ids: Tensor, num_experts: int, *, gate_dtype: str = "float32"
) -> tuple[Tensor, ...]:
    return torch.ops.oxmoe.routing_tables.default(topk_weights, topk_ids, num_experts, gate_dtype=gate_dtype)


moe = _dispatching(_oxmoe.moe, _traced_moe)
topk = _dispatching(_oxmoe.topk, _traced_topk)
sort_by_expert = _dispatching(_oxmoe.sort_by_expert, _traced_sort)
routing_tables = _dispatching(_oxmoe.routing_tables, _traced_routing_tables)
