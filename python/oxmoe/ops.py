"""torch.ops.oxmoe.*: oxmoe's functions as torch operators with fake kernels, and the public functions on top.

An operator costs over a microsecond more than the builtin, so eager calls go straight to the extension; while torch
compiles, exports, traces or fakes, they go through the operator, which such modes can see. Operators take the experts
as plain tensors. Packed experts, and those of formats that `moe_tensors` does not take, are no plain tensors: their
operators take a handle (`ExpertWeights.handle`). Such operators have names that end in `_held`, and a program with
them is this process's own.
`oxmoe.ops_rows` and `oxmoe.peers.operators` define the rest.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from oxmoe import _oxmoe
from oxmoe.tracing import tracing
from oxmoe.weights import expert_weights

_Function = TypeVar("_Function", bound=Callable[..., Any])

EXPERT_OPTION_NAMES = (
    *("layout", "activation", "gated", "alpha", "beta", "limit", "clamp"),
    *("situ_beta", "situ_linear_beta"),
)
# Option of ExpertWeights -> the operators' option of the same meaning that takes a tensor with a number for each
# expert. Operators have no union types, so they need two options.
_EXPERT_TENSOR_NAMES = {name: f"expert_{name}" for name in ("alpha", "beta", "limit", "situ_beta", "situ_linear_beta")}
# Formats whose experts, if they are not packed, go to operators as plain tensors, as `moe_tensors` takes them.
PLAIN_FORMATS = (
    *("bf16", "f16", "f32", "mxfp4", "mxfp4-a8", "mxfp8"),
    *("fp8_block", "fp8_tensor", "fp8_tensor-token", "fp8_tensor-static"),
)
# Options of formats with scales; other formats take none of them. The last two are options of MXFP4 and MXFP8.
BLOCK_OPTION_NAMES = ("w13_scale", "w2_scale", "a13_scale", "a2_scale", "format", "dtype", "hidden_size")
_DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
_PACKED_ONLY = "supported on CUDA: oxmoe.moe with an ExpertWeights of the format, which packs them once"
# Options of router logits, with their defaults.
_LOGITS_OPTIONS: dict[str, Any] = {
    "router_logits": None,
    "top_k": 0,
    "scoring_func": "softmax",
    "renormalize": True,
    "correction_bias": None,
    "num_expert_group": 0,
    "topk_group": 0,
    "num_token_non_padded": None,
}
EXPERT_OPTIONS = (
    'str layout="gate_up", str activation="silu", bool? gated=None, float alpha=1.0, float beta=0.0, '
    'float? limit=None, str clamp="before", Tensor? w13_scale=None, Tensor? w2_scale=None, str? format=None, '
    "str? dtype=None, int? hidden_size=None, Tensor? expert_alpha=None, Tensor? expert_beta=None, "
    "Tensor? expert_limit=None, float? situ_beta=None, float? situ_linear_beta=None, "
    "Tensor? expert_situ_beta=None, Tensor? expert_situ_linear_beta=None"
)
_MOE_OPERANDS = (
    "Tensor x, Tensor w13, Tensor w2, Tensor? topk_weights=None, Tensor? topk_ids=None, "
    "Tensor? b13=None, Tensor? b2=None"
)
_CALL_OPTIONS = (
    'Tensor? router_logits=None, int top_k=0, str scoring_func="softmax", bool renormalize=True, '
    "Tensor? correction_bias=None, int num_expert_group=0, int topk_group=0, Tensor? num_token_non_padded=None, "
    "float routed_scaling_factor=1.0, bool apply_router_weight_on_input=False, bool no_combine=False, "
    "bool keep_router_weight=False, int ep_size=1, int ep_rank=0, Tensor? x_scale=None"
)
_MOE_OPTIONS = f"{EXPERT_OPTIONS}, {_CALL_OPTIONS}, Tensor? a13_scale=None, Tensor? a2_scale=None"
# Operands of an operator that takes experts by their handle, with the sizes and dtype that its fake kernel needs.
HELD = "Tensor x, SymInt experts, SymInt hidden, ScalarType dtype"
_HELD_OPERANDS = f"{HELD}, Tensor? topk_weights=None, Tensor? topk_ids=None"
_TOPK_OPTIONS = (
    'str scoring_func="softmax", bool renormalize=True, Tensor? correction_bias=None, int num_expert_group=0, '
    "int topk_group=0, str? group_score=None, int num_fused_shared_experts=0, float routed_scaling_factor=1.0, "
    'bool apply_routed_scaling_factor_on_output=False, Tensor? num_token_non_padded=None, str order="weight"'
)
_DENSE_OPERANDS = (
    "Tensor a, Tensor b, Tensor a_descale, Tensor b_descale, *, ScalarType? out_dtype=None, "
    "bool use_8x4_sf_layout=False"
)

SCHEMAS = {
    "moe": f"({_MOE_OPERANDS}, *, {_MOE_OPTIONS}) -> Tensor",
    "moe.out": f"({_MOE_OPERANDS}, *, {_MOE_OPTIONS}, Tensor(a!) out, Tensor(b!)? workspace=None) -> ()",
    "moe_held": f"({_HELD_OPERANDS}, *, {_CALL_OPTIONS}) -> Tensor",
    "moe_held.out": f"({_HELD_OPERANDS}, *, {_CALL_OPTIONS}, Tensor(a!) out, Tensor(b!)? workspace=None) -> ()",
    "topk": f"(Tensor router_logits, int top_k, *, {_TOPK_OPTIONS}) -> (Tensor, Tensor)",
    "topk.out": (
        f"(Tensor router_logits, int top_k, *, {_TOPK_OPTIONS}, Tensor(a!) topk_weights, Tensor(b!) topk_ids) -> ()"
    ),
    "sort_by_expert": (
        "(Tensor topk_ids, int num_experts, *, int? first_expert=None) -> (Tensor, Tensor, Tensor, Tensor)"
    ),
    "routing_tables": (
        '(Tensor topk_weights, Tensor topk_ids, int num_experts, *, str gate_dtype="float32") '
        "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
    ),
    "quantize_mxfp8": '(Tensor x, *, str layout="128x4", int alignment=32) -> (Tensor, Tensor)',
    "dequantize_mxfp8": ('(Tensor codes, Tensor scales, ScalarType? dtype=None, *, str layout="128x4") -> Tensor'),
    "mm_mxfp8": f"({_DENSE_OPERANDS}) -> Tensor",
    "mm_mxfp8.out": f"({_DENSE_OPERANDS}, Tensor(a!) out) -> ()",
}


# Kernels: the functions that the dispatcher calls on CPU and CUDA tensors.


def bare(w13: Tensor, options: dict[str, Any]) -> None:
    """Renames options that hold a number for each expert to their names in ExpertWeights; refuses packed formats on
    CUDA."""
    _name_tensors(options)
    _refuse_packed_formats(w13, options)


def _name_tensors(options: dict[str, Any]) -> None:
    for name, of_experts in _EXPERT_TENSOR_NAMES.items():
        tensor = options.pop(of_experts, None)
        if tensor is not None:
            options[name] = tensor


def _refuse_packed_formats(w13: Tensor, options: dict[str, Any]) -> None:
    if str(options.get("format")).startswith("mxfp") and w13.is_cuda:
        raise NotImplementedError(f"{options['format']} experts on {w13.device} as bare tensors; {_PACKED_ONLY}")


def _is_given(value: Any, default: Any) -> bool:
    return value is not None if default is None else value != default


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
    _name_tensors(options)
    # The call that takes options of router logits refuses them beside ids.
    of_logits = any(_is_given(options.get(name, default), default) for name, default in _LOGITS_OPTIONS.items())
    if topk_weights is not None and topk_ids is not None and not of_logits:
        options = {name: value for name, value in options.items() if name not in _LOGITS_OPTIONS}
        return _oxmoe.moe_tensors(x, w13, w2, topk_weights, topk_ids, b13=b13, b2=b2, **options)
    _refuse_packed_formats(w13, options)
    names = EXPERT_OPTION_NAMES + BLOCK_OPTION_NAMES
    of_experts = {name: options.pop(name) for name in names if options.get(name) is not None}
    weights = expert_weights(w13, w2, b13=b13, b2=b2, **of_experts)
    return _oxmoe.moe(x, weights, topk_weights, topk_ids, **options)


def held(builtin: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Returns the kernel of an operator whose experts are a handle."""

    def call(x: Tensor, experts: int, hidden: int, dtype: torch.dtype, *operands: Any, **options: Any) -> Tensor:
        return builtin(x, _oxmoe.experts_of(experts), *operands, **options)

    return call


def into_out(kernel: Callable[..., Any]) -> Callable[..., None]:
    """Returns the kernel of an out variant, which returns nothing."""

    def call(*operands: Any, **options: Any) -> None:
        kernel(*operands, **options)

    return call


_KERNELS: dict[str, Callable[..., Any]] = {
    "moe": _moe,
    "moe.out": into_out(_moe),
    "moe_held": held(_oxmoe.moe),
    "moe_held.out": into_out(held(_oxmoe.moe)),
    "topk": _oxmoe.topk,
    "topk.out": into_out(_oxmoe.topk),
    "sort_by_expert": _oxmoe.sort_by_expert,
    "routing_tables": _oxmoe.routing_tables,
    "quantize_mxfp8": _oxmoe.quantize_mxfp8,
    "dequantize_mxfp8": _oxmoe.dequantize_mxfp8,
    "mm_mxfp8": _oxmoe.mm_mxfp8,
    "mm_mxfp8.out": into_out(_oxmoe.mm_mxfp8),
}


# Fake kernels, which make shapes and dtypes alone.


def fake_rows(x: Tensor, slots: int = 1, no_combine: bool = False) -> Tensor:
    """Returns an empty layer result: a row for each token, or with no_combine a row for each slot."""
    # Results of quantised tokens are bf16.
    dtype = torch.bfloat16 if x.dtype == torch.float8_e4m3fn else x.dtype
    return x.new_empty((x.shape[0], slots, x.shape[1]) if no_combine else x.shape, dtype=dtype)


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
    return fake_rows(x, top_k if topk_ids is None else topk_ids.shape[1], no_combine)


def _fake_moe_held(
    x: Tensor,
    experts: int,
    hidden: int,
    dtype: torch.dtype,
    topk_weights: Tensor | None = None,
    topk_ids: Tensor | None = None,
    *,
    top_k: int = 0,
    no_combine: bool = False,
    **options: Any,
) -> Tensor:
    slots = top_k if topk_ids is None else topk_ids.shape[1]
    return x.new_empty((x.shape[0], slots, hidden) if no_combine else (x.shape[0], hidden), dtype=dtype)


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


def _fake_quantize_mxfp8(x: Tensor, *, layout: str = "128x4", alignment: int = 32) -> tuple[Tensor, Tensor]:
    columns = (x.shape[-1] + alignment - 1) // alignment * alignment
    rows, blocks = math.prod(x.shape[:-1]), columns // 32
    if layout != "linear":
        of_tile = 128 if layout == "128x4" else 8
        rows, blocks = (rows + of_tile - 1) // of_tile * of_tile, (blocks + 3) // 4 * 4
    codes = x.new_empty((*x.shape[:-1], columns), dtype=torch.float8_e4m3fn)
    return codes, x.new_empty((rows * blocks,), dtype=torch.uint8)


def _fake_dequantize_mxfp8(
    codes: Tensor, scales: Tensor, dtype: torch.dtype | None = None, *, layout: str = "128x4"
) -> Tensor:
    return codes.new_empty(codes.shape, dtype=dtype or torch.float32)


def _fake_mm_mxfp8(
    a: Tensor, b: Tensor, a_descale: Tensor, b_descale: Tensor, *, out_dtype: torch.dtype | None = None, **options: Any
) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype or torch.bfloat16)


def fake_nothing(*operands: Any, **options: Any) -> None:
    return None


_FAKES: dict[str, Callable[..., Any]] = {
    "moe": _fake_moe,
    "moe_held": _fake_moe_held,
    "topk": _fake_topk,
    "sort_by_expert": _fake_sort,
    "routing_tables": _fake_routing_tables,
    "quantize_mxfp8": _fake_quantize_mxfp8,
    "dequantize_mxfp8": _fake_dequantize_mxfp8,
    "mm_mxfp8": _fake_mm_mxfp8,
}

_library = torch.library.Library("oxmoe", "DEF")


def _without_grad(name: str, schema: str, fake: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the fake kernel, which refuses operands that require grad as eager calls do. Only a tracer calls it, so
    a compiled program pays nothing."""
    names = [argument.name for argument in torch._C.parse_schema(f"oxmoe::{name.replace('.', '_')}{schema}").arguments]

    def checked(*operands: Any, **options: Any) -> Any:
        if torch.is_grad_enabled():
            for operand, value in [*zip(names, operands, strict=False), *options.items()]:
                if isinstance(value, Tensor) and value.requires_grad:
                    raise ValueError(
                        f"{operand}: requires grad; oxmoe has no backward: pass {operand}.detach() or call under "
                        "torch.no_grad()"
                    )
        return fake(*operands, **options)

    return checked


def define(name: str, schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Defines the operator oxmoe::name on CPU and CUDA."""
    _library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order))
    for key in ("CPU", "CUDA"):
        _library.impl(name, kernel, key)
    torch.library.register_fake(f"oxmoe::{name}", _without_grad(name, schema, fake), lib=_library)


for _name, _schema in SCHEMAS.items():
    define(_name, _schema, _KERNELS[_name], _FAKES.get(_name, fake_nothing))


# Public functions


def dispatching(builtin: _Function, traced: Callable[..., Any]) -> _Function:
    @functools.wraps(builtin)
    def call(*operands: Any, **options: Any) -> Any:
        return traced(*operands, **options) if tracing() else builtin(*operands, **options)

    return call  # type: ignore[return-value]


def expert_handle(weights: _oxmoe.ExpertWeights) -> tuple[int, int, torch.dtype] | None:
    """Returns (handle, hidden, dtype), the form in which operators take packed experts; None if experts are plain
    tensors."""
    if weights.w13 is not None and weights.w2 is not None and weights.format in PLAIN_FORMATS:
        return None
    return weights.handle, weights.hidden_size, _DTYPES[weights.dtype]


def expert_tensors(
    weights: _oxmoe.ExpertWeights,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, dict[str, Any]]:
    """Returns (w13, w2, b13, b2, options), the form in which operators take experts that are plain tensors."""
    assert weights.w13 is not None and weights.w2 is not None
    options: dict[str, Any] = {}
    for name in EXPERT_OPTION_NAMES:
        value = getattr(weights, name)
        options[_EXPERT_TENSOR_NAMES[name] if isinstance(value, Tensor) else name] = value
    if weights.w13_scale is not None:
        names = BLOCK_OPTION_NAMES if weights.format.startswith("mxfp") else BLOCK_OPTION_NAMES[:-2]
        options.update({name: getattr(weights, name) for name in names})
    return weights.w13, weights.w2, weights.b13, weights.b2, options


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
    handle = expert_handle(weights)
    packet, fake = (torch.ops.oxmoe.moe, _fake_moe) if handle is None else (torch.ops.oxmoe.moe_held, _fake_moe_held)
    operands: tuple[Any, ...]
    if handle is None:
        w13, w2, b13, b2, of_experts = expert_tensors(weights)
        operands = (x, w13, w2, topk_weights, topk_ids, b13, b2)
        options.update(of_experts)
    else:
        operands = (x, *handle, topk_weights, topk_ids)
    if out is None and workspace is None:
        return packet.default(*operands, **options)
    if out is None:
        out = fake(*operands, **options)
    packet.out(*operands, **options, out=out, workspace=workspace)
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


def _traced_sort(
    topk_ids: Tensor, num_experts: int, *, first_expert: int | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return torch.ops.oxmoe.sort_by_expert.default(topk_ids, num_experts, first_expert=first_expert)


def _traced_routing_tables(
    topk_weights: Tensor, topk_ids: Tensor, num_experts: int, *, gate_dtype: str = "float32"
) -> tuple[Tensor, ...]:
    return torch.ops.oxmoe.routing_tables.default(topk_weights, topk_ids, num_experts, gate_dtype=gate_dtype)


def _traced_quantize_mxfp8(x: Tensor, *, layout: str = "128x4", alignment: int = 32) -> tuple[Tensor, Tensor]:
    return torch.ops.oxmoe.quantize_mxfp8.default(x, layout=layout, alignment=alignment)


def _dtype(dtype: Any) -> torch.dtype | None:
    return getattr(torch, dtype) if isinstance(dtype, str) else dtype


def _traced_dequantize_mxfp8(codes: Tensor, scales: Tensor, dtype: Any = None, *, layout: str = "128x4") -> Tensor:
    return torch.ops.oxmoe.dequantize_mxfp8.default(codes, scales, _dtype(dtype), layout=layout)


def _traced_mm_mxfp8(
    a: Tensor,
    b: Tensor,
    a_descale: Tensor,
    b_descale: Tensor,
    *,
    out: Tensor | None = None,
    out_dtype: Any = None,
    use_8x4_sf_layout: bool = False,
) -> Tensor:
    options: dict[str, Any] = {"out_dtype": _dtype(out_dtype), "use_8x4_sf_layout": use_8x4_sf_layout}
    if out is None:
        return torch.ops.oxmoe.mm_mxfp8.default(a, b, a_descale, b_descale, **options)
    torch.ops.oxmoe.mm_mxfp8.out(a, b, a_descale, b_descale, **options, out=out)
    return out


moe = dispatching(_oxmoe.moe, _traced_moe)
topk = dispatching(_oxmoe.topk, _traced_topk)
sort_by_expert = dispatching(_oxmoe.sort_by_expert, _traced_sort)
routing_tables = dispatching(_oxmoe.routing_tables, _traced_routing_tables)
quantize_mxfp8 = dispatching(_oxmoe.quantize_mxfp8, _traced_quantize_mxfp8)
dequantize_mxfp8 = dispatching(_oxmoe.dequantize_mxfp8, _traced_dequantize_mxfp8)
matmul_mxfp8 = dispatching(_oxmoe.mm_mxfp8, _traced_mm_mxfp8)
