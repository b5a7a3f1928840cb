"""torch.ops.oxmoe.*, continued: rows in expert order, and quantisers of fp8 and NVFP4. Eager calls go past the
operators, as in `oxmoe.ops`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from oxmoe import _oxmoe
from oxmoe.ops import (
    BLOCK_OPTION_NAMES,
    EXPERT_OPTION_NAMES,
    EXPERT_OPTIONS,
    HELD,
    bare,
    define,
    dispatching,
    expert_handle,
    expert_tensors,
    fake_nothing,
    fake_rows,
    held,
    into_out,
)
from oxmoe.weights import expert_weights

_ROWS = f"{EXPERT_OPTIONS}, Tensor? x_scale=None, Tensor? a13_scale=None, Tensor? a2_scale=None, int? expected_m=None"
_MASKED = "Tensor x, Tensor w13, Tensor w2, Tensor masked_m, Tensor? b13=None, Tensor? b2=None"
_CONTIGUOUS = "Tensor x, Tensor w13, Tensor w2, Tensor counts, Tensor? b13=None, Tensor? b2=None"
_INTO = "Tensor(a!) out, Tensor(b!)? workspace=None"


# Rows in expert order


def _on_rows(builtin: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Returns the kernel of an operator whose experts are plain tensors."""

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


def _fake_rows(x: Tensor, *operands: Any, **options: Any) -> Tensor:
    return fake_rows(x)


def _define_rows(name: str, operands: str, options: str, builtin: Callable[..., Tensor]) -> None:
    kernel = _on_rows(builtin)
    define(name, f"({operands}, *, {options}) -> Tensor", kernel, _fake_rows)
    define(f"{name}.out", f"({operands}, *, {options}, {_INTO}) -> ()", into_out(kernel), fake_nothing)


def _fake_held(x: Tensor, experts: int, hidden: int, dtype: torch.dtype, *operands: Any, **options: Any) -> Tensor:
    return x.new_empty((*x.shape[:-1], hidden), dtype=dtype)


def _define_held(name: str, counts: str, options: str, builtin: Callable[..., Tensor]) -> None:
    operands, kernel = f"{HELD}, Tensor {counts}", held(builtin)
    define(name, f"({operands}, *, {options}) -> Tensor", kernel, _fake_held)
    define(f"{name}.out", f"({operands}, *, {options}, {_INTO}) -> ()", into_out(kernel), fake_nothing)


_define_rows("moe_masked", _MASKED, _ROWS, _oxmoe.moe_masked)
_define_rows("moe_contiguous", _CONTIGUOUS, f"{_ROWS}, int alignment=1", _oxmoe.moe_contiguous)


_HELD_ROWS = "Tensor? x_scale=None, int? expected_m=None"
_define_held("moe_masked_held", "masked_m", _HELD_ROWS, _oxmoe.moe_masked)
_define_held("moe_contiguous_held", "counts", f"{_HELD_ROWS}, int alignment=1", _oxmoe.moe_contiguous)


def _traced_rows(plain: Any, by_handle: Any) -> Callable[..., Tensor]:
    def call(
        x: Tensor,
        weights: _oxmoe.ExpertWeights,
        counts: Tensor,
        *,
        out: Tensor | None = None,
        workspace: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        handle = expert_handle(weights)
        packet, fake = (plain, _fake_rows) if handle is None else (by_handle, _fake_held)
        operands: tuple[Any, ...]
        if handle is None:
            w13, w2, b13, b2, of_experts = expert_tensors(weights)
            operands = (x, w13, w2, counts, b13, b2)
            options.update(of_experts)
        else:
            operands = (x, *handle, counts)
        if out is None and workspace is None:
            result: Tensor = packet.default(*operands, **options)
            return result
        out = fake(*operands) if out is None else out
        packet.out(*operands, **options, out=out, workspace=workspace)
        return out

    return call


moe_masked = dispatching(_oxmoe.moe_masked, _traced_rows(torch.ops.oxmoe.moe_masked, torch.ops.oxmoe.moe_masked_held))
moe_contiguous = dispatching(
    _oxmoe.moe_contiguous, _traced_rows(torch.ops.oxmoe.moe_contiguous, torch.ops.oxmoe.moe_contiguous_held)
)


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
