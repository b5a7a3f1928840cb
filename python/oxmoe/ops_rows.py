"""torch.ops.oxmoe.*, continued: rows in expert order, quantisers of fp8 and NVFP4, and flashinfer's calls that make
their experts of tensors. As in `oxmoe.ops`, eager calls go past the operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from oxmoe import _oxmoe
from oxmoe.ops import BLOCK_OPTION_NAMES, EXPERT_OPTION_NAMES, EXPERT_OPTIONS, bare, define, dispatching, expert_tensors
from oxmoe.peers.sglang import expert_weights

_ROWS = f"{EXPERT_OPTIONS}, Tensor? x_scale=None, Tensor? a13_scale=None, Tensor? a2_scale=None, int? expected_m=None"
_MASKED = "Tensor x, Tensor w13, Tensor w2, Tensor masked_m, Tensor? b13=None, Tensor? b2=None"
_CONTIGUOUS = "Tensor x, Tensor w13, Tensor w2, Tensor counts, Tensor? b13=None, Tensor? b2=None"
_INTO = "Tensor(a!) out, Tensor(b!)? workspace=None"


# Rows in expert order


def _on_rows(builtin: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The kernel: experts as plain tensors."""

    def kernel(
        x: Tensor,
        w13: Tensor,
        w2: Tensor,
        counts: Tensor,
        b13: Tensor | None = None,
        b2: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        bare(w13, options)
        names = EXPERT_OPTION_NAMES + BLOCK_OPTION_NAMES
        of_experts = {name: options.pop(name) for name in names if options.get(name) is not None}
        given = {name: value for name, value in options.items() if name not in names}
        return builtin(x, expert_weights(w13, w2, b13=b13, b2=b2, **of_experts), counts, **given)

    return kernel


def _into_out(kernel: Callable[..., Any]) -> Callable[..., None]:
    def call(*operands: Any, **options: Any) -> None:
        kernel(*operands, **options)

    return call


def _fake_rows(x: Tensor, *operands: Any, **options: Any) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.bfloat16 if x.dtype == torch.float8_e4m3fn else x.dtype)


def _fake_nothing(*operands: Any, **options: Any) -> None:
    return None


def _define_rows(name: str, operands: str, options: str, builtin: Callable[..., Tensor]) -> None:
    kernel = _on_rows(builtin)
    define(name, f"({operands}, *, {options}) -> Tensor", kernel, _fake_rows)
    define(f"{name}.out", f"({operands}, *, {options}, {_INTO}) -> ()", _into_out(kernel), _fake_nothing)


_define_rows("moe_masked", _MASKED, _ROWS, _oxmoe.moe_masked)
_define_rows("moe_contiguous", _CONTIGUOUS, f"{_ROWS}, int alignment=1", _oxmoe.moe_contiguous)


def _traced_rows(packet: Any) -> Callable[..., Tensor]:
    def call(
        x: Tensor,
        weights: _oxmoe.ExpertWeights,
        counts: Tensor,
        *,
        out: Tensor | None = None,
        workspace: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        w13, w2, b13, b2, of_experts = expert_tensors(weights)
        operands = (x, w13, w2, counts, b13, b2)
        if out is None and workspace is None:
            result: Tensor = packet.default(*operands, **of_experts, **options)
            return result
        out = _fake_rows(x) if out is None else out
        packet.out(*operands, **of_experts, **options, out=out, workspace=workspace)
        return out

    return call


moe_masked = dispatching(_oxmoe.moe_masked, _traced_rows(torch.ops.oxmoe.moe_masked))
moe_contiguous = dispatching(_oxmoe.moe_contiguous, _traced_rows(torch.ops.oxmoe.moe_contiguous))


# Quantisers


def _fake_fp8(
    x: Tensor, group: int, eps: float, *, column_major: bool = False, row_multiple: int = 1, powers: bool = False
) -> tuple[Tensor, Tensor]:
    codes = x.new_empty(x.shape, dtype=torch.float8_e4m3fn)
    groups = x.shape[-1] // group
    if not column_major:
        return codes, x.new_empty((*x.shape[:-1], groups), dtype=torch.float32)
    rows = (x.shape[0] + row_multiple - 1) // row_multiple * row_multiple
    dtype = torch.int32 if powers else torch.float32
    return codes, x.new_empty(((groups + 3) // 4 if powers else groups, rows), dtype=dtype)


def _fake_nvfp4(
    x: Tensor,
    global_scale: Tensor | None = None,
    *,
    block: int = 16,
    scale_layout: str = "128x4",
    **options: Any,
) -> tuple[Tensor, Tensor]:
    batches, rows, columns = x.shape
    blocks = columns // block
    if scale_layout != "linear":
        of_tile = 128 if scale_layout == "128x4" else 8
        rows, blocks = (rows + of_tile - 1) // of_tile * of_tile, (blocks + 3) // 4 * 4
    codes = x.new_empty((batches, x.shape[1], columns // 2), dtype=torch.uint8)
    return codes, x.new_empty((batches, rows, blocks), dtype=torch.uint8)


define(
    "quantize_fp8",
    "(Tensor x, int group, float eps, *, bool column_major=False, int row_multiple=1, bool powers=False) "
    "-> (Tensor, Tensor)",
    _oxmoe.quantize_fp8,
    _fake_fp8,
)
define(
    "quantize_nvfp4",
    '(Tensor x, Tensor? global_scale=None, *, int block=16, str scale_dtype="e4m3", str scale_layout="128x4", '
    "bool inverse=False, Tensor? masked_m=None) -> (Tensor, Tensor)",
    _oxmoe.quantize_nvfp4,
    _fake_nvfp4,
)
quantize_fp8 = dispatching(_oxmoe.quantize_fp8, torch.ops.oxmoe.quantize_fp8.default)
quantize_nvfp4 = dispatching(_oxmoe.quantize_nvfp4, torch.ops.oxmoe.quantize_nvfp4.default)


# flashinfer's calls, whose experts are made of their tensors at the first call and kept


_LAYER = (
    "Tensor x, Tensor? x_scale, Tensor w13, Tensor w13_scale, Tensor w2, Tensor w2_scale, *, "
    "int quantization, bool shuffled, int weight_layout, Tensor? alpha=None, Tensor? beta=None, Tensor? limit=None, "
    "Tensor? b13=None, Tensor? b2=None, Tensor? topk_weights=None, Tensor? topk_ids=None, Tensor? router_logits=None, "
    'int top_k=0, str scoring_func="softmax", bool renormalize=True, Tensor? correction_bias=None, '
    "int num_expert_group=0, int topk_group=0, float routed_scaling_factor=1.0, int ep_size=1, int ep_rank=0"
)
_ROUTING_OF_LOGITS = (
    *("router_logits", "top_k", "scoring_func", "renormalize", "correction_bias"),
    *("num_expert_group", "topk_group"),
)


def _trtllm_fp8(x: Tensor, *operands: Any, **options: Any) -> Tensor:
    from oxmoe.peers import flashinfer_trtllm

    if options.get("topk_ids") is not None:
        options = {name: value for name, value in options.items() if name not in _ROUTING_OF_LOGITS}
    return flashinfer_trtllm.layer(x, *operands, **options)


define("trtllm_fp8_layer", f"({_LAYER}) -> Tensor", _trtllm_fp8, _fake_rows)
define("trtllm_fp8_layer.out", f"({_LAYER}, Tensor(a!) out) -> ()", _into_out(_trtllm_fp8), _fake_nothing)


def traced_trtllm_fp8(*operands: Any, out: Tensor | None = None, **options: Any) -> Tensor:
    packet = torch.ops.oxmoe.trtllm_fp8_layer
    if out is None:
        result: Tensor = packet.default(*operands, **options)
        return result
    packet.out(*operands, **options, out=out)
    return out


def _cutedsl(x: Tensor, scales: Tensor | None, *operands: Any, activation: str = "silu") -> Tensor:
    from oxmoe import nvfp4

    return nvfp4.flashinfer_cutedsl_moe_masked((x, scales), *operands, activation=activation)


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


def traced_cutedsl(hidden_states: tuple[Tensor, Tensor | None], *operands: Any, activation: str) -> Tensor:
    result: Tensor = torch.ops.oxmoe.flashinfer_cutedsl_moe_masked.default(
        *hidden_states, *operands, activation=activation
    )
    return result
