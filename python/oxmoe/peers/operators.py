"""Defines torch.ops.oxmoe.* for other projects' calls, each with a fake kernel. While torch traces, the calls go
through these operators by name, so no call imports this module. `import oxmoe` imports it if torch is installed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from oxmoe.ops import define, fake_nothing, fake_rows, into_out
from oxmoe.peers import flashinfer_cutedsl_masked, flashinfer_trtllm, sglang

# SGLang's fused_experts, its configuration taken apart

_FUSED_OPERANDS = (
    "Tensor hidden_states, Tensor w1, Tensor w2, Tensor topk_weights, Tensor topk_ids, Tensor? b1=None, Tensor? b2=None"
)
_FUSED_OPTIONS = (
    'str activation="silu", bool is_gated=True, bool apply_router_weight_on_input=False, bool no_combine=False, '
    "bool no_combine_keep_router_weight=False, float? routed_scaling_factor=None, float? gemm1_alpha=None, "
    "float? gemm1_beta=None, float? gemm1_limit=None, float? swiglu_limit=None, bool gate_up_interleaved=True, "
    "bool fuse_swiglu_interleaved=False, Tensor? w1_scale=None, Tensor? w2_scale=None, Tensor? a1_scale=None, "
    "Tensor? a2_scale=None, bool per_tensor=False, bool per_token=True"
)


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
    return fake_rows(hidden_states, topk_ids.shape[1], no_combine)


define("fused_experts", f"({_FUSED_OPERANDS}, *, {_FUSED_OPTIONS}) -> Tensor", sglang.run, _fake_fused)
define(
    "fused_experts.out",
    f"({_FUSED_OPERANDS}, *, {_FUSED_OPTIONS}, Tensor(a!) out) -> ()",
    into_out(sglang.run),
    fake_nothing,
)


# flashinfer's calls, whose experts are made of their tensors at the first call and kept


_LAYER = (
    "Tensor x, Tensor? x_scale, Tensor w13, Tensor w13_scale, Tensor w2, Tensor w2_scale, *, "
    "int quantization, bool shuffled, int weight_layout, Tensor? alpha=None, Tensor? beta=None, Tensor? limit=None, "
    'Tensor? b13=None, Tensor? b2=None, str activation="Swiglu", Tensor? topk_weights=None, Tensor? topk_ids=None, '
    "Tensor? router_logits=None, "
    'int top_k=0, str scoring_func="softmax", bool renormalize=True, Tensor? correction_bias=None, '
    "int num_expert_group=0, int topk_group=0, float routed_scaling_factor=1.0, int ep_size=1, int ep_rank=0"
)
_ROUTING_OF_LOGITS = (
    *("router_logits", "top_k", "scoring_func", "renormalize", "correction_bias"),
    *("num_expert_group", "topk_group"),
)


def _trtllm_fp8(x: Tensor, *operands: Any, **options: Any) -> Tensor:
    if options.get("topk_ids") is not None:
        options = {name: value for name, value in options.items() if name not in _ROUTING_OF_LOGITS}
    return flashinfer_trtllm.layer(x, *operands, **options)


def _fake_trtllm_fp8(x: Tensor, *operands: Any, **options: Any) -> Tensor:
    return fake_rows(x)


define("trtllm_fp8_layer", f"({_LAYER}) -> Tensor", _trtllm_fp8, _fake_trtllm_fp8)
define("trtllm_fp8_layer.out", f"({_LAYER}, Tensor(a!) out) -> ()", into_out(_trtllm_fp8), fake_nothing)


def _cutedsl(x: Tensor, scales: Tensor | None, *operands: Any, **options: Any) -> Tensor:
    return flashinfer_cutedsl_masked.flashinfer_cutedsl_moe_masked((x, scales), *operands, **options)


def _fake_cutedsl(x: Tensor, scales: Tensor | None, *operands: Any, activation: str = "silu") -> Tensor:
    experts, rows, columns = x.shape if scales is None else (x.shape[2], x.shape[0], 2 * x.shape[1])
    return x.new_empty((experts, rows, columns), dtype=torch.bfloat16)


define(
    "flashinfer_cutedsl_moe_masked",
    "(Tensor x, Tensor? scales, Tensor? input_global_scale, Tensor w1, Tensor w1_blockscale, Tensor w1_alpha, "
    "Tensor w2, Tensor a2_global_scale, Tensor w2_blockscale, Tensor w2_alpha, Tensor masked_m, *, "
    'str activation="silu") -> Tensor',
    _cutedsl,
    _fake_cutedsl,
)
