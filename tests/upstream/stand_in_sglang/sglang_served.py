"""pytest's plug-in for SGLang's registered tests of its layers (test/registered): functions and operators of SGLang's
that oxmoe has are oxmoe's.

The names are put in place before a test file imports them. Arguments that oxmoe refuses by name skip their test, with
its words. SGLang's own operators for CPUs (`torch.ops.sgl_kernel.*_cpu`) are not in its wheel for GPUs.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest
import sgl_kernel_served
import torch
from torch import Tensor

import oxmoe
import oxmoe.int4
from oxmoe.peers import sglang as peer

# SGLang's fused_experts_cpu names its formats by numbers (CPUQuantMethod).
UNQUANT, INT8, FP8_W8A16, INT4, MXFP4 = range(5)
GPT_OSS = {"layout": "interleaved", "beta": 1.0}


def refused(function: Callable[..., Any]) -> Callable[..., Any]:
    """Skips a test whose call oxmoe refuses, because it has no kernel for the arguments."""

    @wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        try:
            return function(*args, **options)
        except NotImplementedError as error:
            pytest.skip(f"not served: {error}")

    return call


@refused
def fused_moe(
    hidden_states: Tensor, w1: Tensor, w2: Tensor, topk_output: Any, moe_runner_config: Any = None, **options: Any
) -> Tensor:
    """Computes the layer without writing into the tokens, which SGLang's tests read again."""
    from sglang.srt.layers.moe import MoeRunnerConfig

    config = moe_runner_config or MoeRunnerConfig(inplace=False)
    for name, size in (("hidden size", w1.shape[2]), ("intermediate size", w2.shape[2])):
        if size % 8:
            raise NotImplementedError(f"{name} {size} is no multiple of 8")
    if options.get("use_fp8_w8a8") and hidden_states.dtype == torch.float16:
        raise NotImplementedError("fp8 weights with tokens of float16")
    return peer.fused_experts(hidden_states.clone(), w1, w2, topk_output, config, **options)


def _topk(scoring_func: str) -> Callable[..., tuple[Tensor, Tensor]]:
    def call(
        hidden_states: Tensor,
        gating_output: Tensor,
        topk: int,
        renormalize: bool,
        correction_bias: Tensor | None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor]:
        bias = None if correction_bias is None else correction_bias.float()
        chosen = {"scoring_func": scoring_func, "renormalize": renormalize, "correction_bias": bias}
        return oxmoe.topk(gating_output, topk, **{**chosen, **options})  # type: ignore[arg-type]

    return call


def biased_topk(
    hidden_states: Tensor, gating_output: Tensor, correction_bias: Tensor, topk: int, renormalize: bool, **options: Any
) -> tuple[Tensor, Tensor]:
    return _topk("sigmoid")(hidden_states, gating_output, topk, renormalize, correction_bias, **options)


def _grouped(scoring_func: str, biased: bool) -> Callable[..., tuple[Tensor, Tensor]]:
    def call(hidden_states: Tensor, gating_output: Tensor, *others: Any, **named: Any) -> tuple[Tensor, Tensor]:
        names = ["correction_bias"] * biased
        names += ["topk", "renormalize", "num_expert_group", "topk_group", "num_fused_shared_experts"]
        names += ["routed_scaling_factor", "num_token_non_padded"]
        given = {**dict(zip(names, others, strict=False)), **named}
        if given.pop("num_token_non_padded", None) is not None:
            pytest.skip("not served: num_token_non_padded without logical ids")
        factor = given.pop("routed_scaling_factor", None)
        if factor is not None:
            given |= {"routed_scaling_factor": factor, "apply_routed_scaling_factor_on_output": True}
        if biased:
            given["correction_bias"] = given["correction_bias"].float()
        k = given.pop("topk")
        return oxmoe.topk(gating_output, k, **{"scoring_func": scoring_func, **given})  # type: ignore[arg-type]

    return call


def fused_topk_torch_native(
    hidden_states: Tensor,
    gating_output: Tensor,
    topk: int,
    renormalize: bool,
    correction_bias: Tensor | None = None,
    scoring_func: str = "softmax",
) -> tuple[Tensor, Tensor]:
    return _topk(scoring_func)(hidden_states, gating_output, topk, renormalize, correction_bias)


@refused
def fused_experts_cpu(
    hidden_states: Tensor,
    w1: Any,
    w2: Any,
    topk_weights: Tensor,
    topk_ids: Tensor,
    inplace: bool,
    method: int,
    w1_scale: Tensor | None,
    w2_scale: Tensor | None,
    w1_zp: Tensor | None,
    w2_zp: Tensor | None,
    block_size: list[int] | None,
    w1_bias: Tensor | None,
    w2_bias: Tensor | None,
    alpha: float | None,
    limit: float | None,
    is_vnni: bool,
    activation: str | None = None,
) -> Tensor:
    options: dict[str, Any] = {"b13": w1_bias, "b2": w2_bias, "activation": activation or "silu"}
    if alpha is not None:
        options |= {**GPT_OSS, "alpha": alpha, "limit": limit}
    if method == UNQUANT:
        experts = oxmoe.ExpertWeights.bf16(w1, w2, **options)
    elif method == MXFP4:
        experts = oxmoe.ExpertWeights.mxfp4(w1, w2, w1_scale, w2_scale, **options)
    elif method == INT4:
        first, second = (oxmoe.int4.from_awq(*tensors) for tensors in ((w1, w1_scale, w1_zp), (w2, w2_scale, w2_zp)))
        zeros = {"w13_zeros": first.zeros, "w2_zeros": second.zeros}
        experts = oxmoe.ExpertWeights.int4(first.codes, second.codes, first.scales, second.scales, **zeros, **options)
    elif method == FP8_W8A16:
        raise NotImplementedError("fp8 weights with tokens of 16 bits (oxmoe rounds tokens of fp8 layers to e4m3)")
    else:
        raise NotImplementedError("int8 weights")
    return oxmoe.moe(hidden_states, experts, topk_weights=topk_weights.float(), topk_ids=topk_ids)


def _same(*tensors: Tensor) -> Any:
    """Leaves a layout of AMX's tiles out: oxmoe's CPU kernels read weights as checkpoints have them."""
    return tensors[0] if len(tensors) == 1 else tensors


OPERATORS = {
    "topk_softmax_cpu": _topk("softmax"),
    "topk_sigmoid_cpu": _topk("sigmoid"),
    "grouped_topk_cpu": _grouped("softmax", biased=False),
    "biased_grouped_topk_cpu": _grouped("sigmoid", biased=True),
    "fused_experts_cpu": fused_experts_cpu,
    "convert_weight_packed": _same,
    "convert_scale_packed": _same,
    "convert_weight_packed_scale_zp": lambda weight, zeros, scales, method: (weight, zeros, scales),
}
# Functions of modules by the test file that compares them with arithmetic of its own. Other files have them as their
# references, and keep SGLang's.
FUNCTIONS: dict[str, dict[tuple[str, str], Callable[..., Any]]] = {
    "test_fused_moe.py": {("sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe", "fused_moe"): fused_moe},
    "test_topk_renormalize_degenerate.py": {
        ("sglang.srt.layers.moe.topk", "biased_topk_impl"): biased_topk,
        ("sglang.srt.layers.moe.topk", "kimi_k2_biased_topk_impl"): biased_topk,
        ("sglang.srt.layers.moe.topk", "biased_grouped_topk_impl"): _grouped("sigmoid", biased=True),
        ("sglang.srt.layers.moe.topk", "fused_topk_torch_native"): fused_topk_torch_native,
        ("sglang.srt.layers.moe.topk", "grouped_topk_gpu"): _grouped("softmax", biased=False),
    },
}


# SGLang's helpers of tests import this package. Tests of layers do not use it.
if importlib.util.find_spec("datasets") is None:
    sys.modules["datasets"] = types.ModuleType("datasets")
    sys.modules["datasets"].__getattr__ = sgl_kernel_served._missing  # type: ignore[method-assign]
# SGLang is imported before tensors of tests move to the CPU.
for _place in {place for of_file in FUNCTIONS.values() for place, _ in of_file}:
    importlib.import_module(_place)
# Without a GPU SGLang's module leaves these kernels out, also of tests that run on the CPU.
for _name in ("topk_softmax", "topk_sigmoid"):
    setattr(importlib.import_module("sglang.srt.layers.moe.topk"), _name, sgl_kernel_served.NAMES[_name])
for _name, _function in OPERATORS.items():
    setattr(torch.ops.sgl_kernel, _name, _function)


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makemodule(module_path: Any) -> None:
    for (place, name), function in FUNCTIONS.get(module_path.name, {}).items():
        setattr(importlib.import_module(place), name, function)
