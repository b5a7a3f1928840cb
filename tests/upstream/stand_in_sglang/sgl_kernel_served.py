"""pytest's plug-in for sgl-kernel's own tests: the names of `sgl_kernel` that oxmoe has are oxmoe's.

The installed sgl_kernel keeps its other names, which SGLang needs. Without it a module stands in for it, whose other
names skip their test.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import types
from typing import Any

import pytest
import torch

import oxmoe


def _into(out: tuple[torch.Tensor, torch.Tensor], made: tuple[torch.Tensor, torch.Tensor]) -> None:
    for tensor, result in zip(out, made, strict=True):
        tensor.copy_(result)


def topk_softmax(
    topk_weights: torch.Tensor, topk_ids: torch.Tensor, *others: Any, renormalize: bool = False, **options: Any
) -> None:
    """Older releases have a table of slots before the logits."""
    logits, *rest = [value for value in others if not (isinstance(value, torch.Tensor) and value.dtype == torch.int32)]
    bias = options.pop("correction_bias", None)
    if len(rest) > 1 or any(options.values()):
        pytest.skip("not served: topk_softmax with moe_softcapping")
    given = {"scoring_func": "softmax", "renormalize": rest[0] if rest else renormalize, "correction_bias": bias}
    _into((topk_weights, topk_ids), oxmoe.topk(logits, topk_ids.shape[1], **given))


def topk_sigmoid(
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    gating_output: torch.Tensor,
    renormalize: bool = False,
    correction_bias: torch.Tensor | None = None,
) -> None:
    given: Any = {"scoring_func": "sigmoid", "renormalize": renormalize, "correction_bias": correction_bias}
    _into((topk_weights, topk_ids), oxmoe.topk(gating_output, topk_ids.shape[1], **given))


def moe_fused_gate(
    input_tensor: torch.Tensor,
    bias: torch.Tensor,
    num_expert_group: int,
    topk_group: int,
    topk: int,
    num_fused_shared_experts: int = 0,
    routed_scaling_factor: float | None = None,
    apply_routed_scaling_factor_on_output: bool = False,
    **others: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    if any(value is not None for value in others.values()):
        pytest.skip(f"not served: moe_fused_gate with {', '.join(others)}")
    return oxmoe.topk(
        input_tensor,
        topk,
        scoring_func="sigmoid",
        correction_bias=bias.float(),
        num_expert_group=num_expert_group,
        topk_group=topk_group,
        num_fused_shared_experts=num_fused_shared_experts,
        routed_scaling_factor=1.0 if routed_scaling_factor is None else routed_scaling_factor,
        apply_routed_scaling_factor_on_output=apply_routed_scaling_factor_on_output,
    )


def kimi_k2_moe_fused_gate(
    input_tensor: torch.Tensor,
    bias: torch.Tensor,
    topk: int,
    renormalize: bool = True,
    routed_scaling_factor: float | None = None,
    apply_routed_scaling_factor_on_output: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    return oxmoe.topk(
        input_tensor,
        topk,
        scoring_func="sigmoid",
        renormalize=renormalize,
        correction_bias=bias.float(),
        routed_scaling_factor=1.0 if routed_scaling_factor is None else routed_scaling_factor,
        apply_routed_scaling_factor_on_output=apply_routed_scaling_factor_on_output,
    )


NAMES = {
    "topk_softmax": topk_softmax,
    "topk_sigmoid": topk_sigmoid,
    "moe_fused_gate": moe_fused_gate,
    "kimi_k2_moe_fused_gate": kimi_k2_moe_fused_gate,
}


def _missing(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return lambda *args, **options: pytest.skip(f"not served: {name}")


def _module() -> types.ModuleType:
    try:
        return importlib.import_module("sgl_kernel")
    except ImportError:
        made = types.ModuleType("sgl_kernel")
        made.__getattr__ = _missing  # type: ignore[method-assign]
        sys.modules["sgl_kernel"] = made
        return made


# SGLang's references are imported before tensors of tests move to the CPU, and before sgl_kernel is another.
with contextlib.suppress(ImportError):
    importlib.import_module("sglang.srt.layers.moe.topk")
for _name, _function in NAMES.items():
    setattr(_module(), _name, _function)
