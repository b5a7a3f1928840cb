"""Runs tokens on oxmoe's experts as SGLang's DeepEP-like dispatchers hand them over."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from oxmoe import ExpertWeights, moe, moe_masked
from oxmoe.peers.topk_forms import as_float32
from oxmoe.sglang.dispatch import MASKED, STANDARD, TOKENS, dispatch_dtype, modes

A2A_BACKENDS = ("none", "deepep", "mooncake", "nixl", "pplx")
_DISPATCHERS = "sglang.srt.layers.moe.token_dispatcher"
_COMBINE_INPUTS = {
    STANDARD: ("standard", "StandardCombineInput"),
    TOKENS: ("deepep", "DeepEPNormalCombineInput"),
    MASKED: ("deepep", "DeepEPLLCombineInput"),
}
_BF16 = (
    "send them as bf16 (--deepep-dispatcher-output-dtype bf16; in a release without that flag "
    "SGLANG_DEEPEP_BF16_DISPATCH=1, in normal mode with --moe-runner-backend deep_gemm; nixl: "
    "SGLANG_NIXL_EP_BF16_DISPATCH=1)"
)


def layout(dispatch_output: Any) -> str:
    """Returns the layout of the tokens. Raises NotImplementedError for one that is not served."""
    name = type(dispatch_output).__name__
    known = getattr(getattr(dispatch_output, "format", None), "value", STANDARD)
    if known in (TOKENS, MASKED):
        return str(known)
    if known != STANDARD or not hasattr(dispatch_output, "topk_output"):
        raise NotImplementedError(
            f"oxmoe: no kernel for tokens in {name}; served are --moe-a2a-backend {', '.join(A2A_BACKENDS)}"
        )
    if getattr(dispatch_output, "hidden_states_scale", None) is not None:
        raise NotImplementedError(f"oxmoe: no kernel for quantised tokens ({name} with hidden_states_scale)")
    return STANDARD


def combine_input(dispatch_output: Any, hidden_states: Tensor) -> Any:
    """Returns what SGLang's dispatcher combines: the results, and behind an all-to-all also the tokens' top-k ids
    and weights."""
    form = layout(dispatch_output)
    module, name = _COMBINE_INPUTS[form]
    kind = getattr(importlib.import_module(f"{_DISPATCHERS}.{module}"), name)
    if form == STANDARD:
        return kind(hidden_states=hidden_states)
    return kind(
        hidden_states=hidden_states, topk_ids=dispatch_output.topk_ids, topk_weights=dispatch_output.topk_weights
    )


def check_tokens(x: Tensor, scale: Tensor | None, weights: ExpertWeights) -> None:
    """Raises a ValueError that names both dtypes if tokens came in another dtype than the experts take."""
    if scale is None:
        if x.dtype != torch.bfloat16 or weights.dtype != "bf16":
            raise ValueError(
                f"oxmoe: tokens came as {x.dtype} without scales to {weights.format} experts that compute in "
                f"{weights.dtype}; an all-to-all carries bf16, for experts of --dtype bfloat16"
            )
        return
    if x.dtype == torch.float8_e4m3fn and weights.format != "fp8_block":
        raise ValueError(
            f"oxmoe: tokens came as fp8 (scales {scale.dtype} {list(scale.shape)}), but {weights.format} experts take "
            f"bf16: {_BF16}"
        )
    if x.dtype != torch.float8_e4m3fn and not weights.format.startswith("nvfp4"):
        raise ValueError(
            f"oxmoe: tokens came as {x.dtype} with scales {scale.dtype} {list(scale.shape)}, but {weights.format} "
            f"experts take {'fp8 or ' if weights.format == 'fp8_block' else ''}bf16"
        )


def run(dispatch_output: Any, form: str, weights: ExpertWeights, config: Any) -> Tensor:
    """Returns this rank's results for the tokens of a dispatcher. In normal mode they are [T, H], weighted and
    summed over its experts. In low-latency mode they are [El, m, H], which the dispatcher weights and sums; rows
    beyond masked_m are undefined.

    In both modes SGLang's models multiply by the routed scaling factor themselves, after the combine.
    """
    if config.no_combine or config.apply_router_weight_on_input:
        given = "no_combine" if config.no_combine else "apply_router_weight_on_input"
        raise NotImplementedError(f"oxmoe: {given} is not served behind an all-to-all")
    x, scale = dispatch_output.hidden_states, dispatch_output.hidden_states_scale
    check_tokens(x, scale, weights)
    if form == MASKED:
        masked_m, expected_m = dispatch_output.masked_m, dispatch_output.expected_m
        return moe_masked(x, weights, masked_m, x_scale=scale, expected_m=expected_m)
    return moe(x, weights, as_float32(dispatch_output.topk_weights), dispatch_output.topk_ids, x_scale=scale)


def dispatched(weights_format: str, version: str) -> str | None:
    """Returns the dtype in which the server's all-to-all must bring tokens to such experts, or None without an
    all-to-all. Raises what `dispatch_dtype` raises."""
    a2a_backend = importlib.import_module("sglang.srt.layers.moe.utils").get_moe_a2a_backend().value
    if a2a_backend == "none":
        return None
    # "oxmoe" takes one dtype in every mode.
    (dtype,) = {
        dispatch_dtype(a2a_backend, weights=weights_format, mode=mode, version=version).dtype
        for mode in modes(a2a_backend)
    }
    return dtype


def tell_dispatcher(layer: Any, weights_format: str, version: str) -> None:
    """Sets a layer's dispatcher to the dtype that its experts take, as SGLang's own methods do after loading."""
    dtype = dispatched(weights_format, version)
    if dtype is None:
        return
    # Newer releases read the first key, and older ones the second.
    layer.dispatcher.set_quant_config({"dispatcher_output_dtype": dtype, "bf16_dispatch": dtype == "bf16"})


def refuse_overlap() -> None:
    """Raises NotImplementedError if SGLang's combine would wait for signals of the down projection, because none
    would come."""
    batch_overlap = importlib.import_module("sglang.srt.batch_overlap.single_batch_overlap")
    if batch_overlap.SboFlags.enable_combine_down_gemm_two_stream_overlap():
        raise NotImplementedError(
            "oxmoe: --enable-single-batch-overlap with this --moe-runner-backend makes the combine wait for signals of "
            "the down projection (down_signals), which oxmoe's GEMM does not write; start without it"
        )
