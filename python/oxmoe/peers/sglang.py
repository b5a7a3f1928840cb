"""SGLang's `fused_experts`: the call of releases 0.5.12.post1 and 0.5.23, which `moe` runs."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import MISSING, fields, is_dataclass
from typing import TYPE_CHECKING, Any

from oxmoe import _oxmoe
from oxmoe.operands import WRONG_TYPES, check_tensor, name_argument
from oxmoe.peers.topk_forms import as_float32
from oxmoe.tracing import tracing
from oxmoe.weights import SERVED

if TYPE_CHECKING:
    from torch import Tensor

# torch's names of compute types, and the names that ExpertWeights has for them.
_DTYPES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}
_ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu2", "situ")

# Fields of SGLang's MoeRunnerConfig whose meaning is known: those that are read, and those that describe the layer.
_CONFIG_FIELDS = frozenset(
    """activation is_gated apply_router_weight_on_input inplace no_combine no_combine_keep_router_weight
    routed_scaling_factor gemm1_alpha gemm1_beta gemm1_clamp_limit swiglu_limit gate_up_interleaved
    num_experts num_local_experts hidden_size intermediate_size_per_partition layer_id top_k num_fused_shared_experts
    params_dtype routing_method_type runner_backend layer moe_tp_size moe_tp_rank moe_ep_size moe_ep_rank""".split()
)


@functools.cache
def _unknown_fields(kind: type) -> tuple[tuple[str, Any], ...]:
    """Returns the names and defaults of the fields of a configuration that oxmoe does not know."""
    unknown = [field for field in fields(kind) if field.name not in _CONFIG_FIELDS] if is_dataclass(kind) else []
    return tuple(
        (field.name, field.default_factory() if field.default_factory is not MISSING else field.default)
        for field in unknown
    )


def check_config(config: Any) -> None:
    """Raises NotImplementedError if a MoeRunnerConfig sets a field that oxmoe does not know, because the field may
    change what a layer computes."""
    for name, default in _unknown_fields(type(config)):  # type: ignore[arg-type]
        value = getattr(config, name)
        unset = value is default or (default is MISSING and (value is None or value is False))
        # NOTE: tensors are not compared, because their comparison has no single truth value.
        if not unset and not (isinstance(value, int | float | str | tuple) and value == default):
            raise NotImplementedError(
                f"moe_runner_config: oxmoe does not know the field {name}, which is {value!r} here (by default "
                f"{'required' if default is MISSING else repr(default)})"
            )


def _is_e4m3(weights: Tensor) -> bool:
    return str(weights.dtype).endswith("float8_e4m3fn")


def expert_options(
    *,
    activation: str = "silu",
    is_gated: bool = True,
    gemm1_alpha: float | None = None,
    gemm1_beta: float | None = None,
    gemm1_limit: float | None = None,
    swiglu_limit: float | None = None,
    gate_up_interleaved: bool = True,
    fuse_swiglu_interleaved: bool = False,
) -> dict[str, Any]:
    """Converts SGLang's activation fields to options of ExpertWeights, in SGLang's order of precedence.

    gemm1_alpha selects GPT-OSS's form; only there does gate_up_interleaved describe the rows. Otherwise gemm1_limit
    bounds the gate after its SiLU. Otherwise swiglu_limit (DeepSeek-V4) bounds it before the SiLU. Of "situ" (Kimi-K3)
    gemm1_alpha and gemm1_limit are the two bounds, and rows are halves. Without them b is 4 and up is not bounded.
    """
    if activation not in _ACTIVATIONS:
        served = ", ".join(f'"{name}"' for name in _ACTIVATIONS)
        raise NotImplementedError(f'activation: no kernel for "{activation}"; served are {served}')
    options: dict[str, Any] = {"activation": activation, "gated": is_gated, "layout": "gate_up"}
    if activation == "situ":
        if swiglu_limit is not None or gemm1_beta is not None or fuse_swiglu_interleaved:
            raise ValueError('activation: "situ" takes no gemm1_beta, swiglu_limit and fuse_swiglu_interleaved')
        return options | {"situ_beta": gemm1_alpha, "situ_linear_beta": gemm1_limit}
    modified = any(value is not None for value in (gemm1_alpha, gemm1_limit, swiglu_limit))
    if modified and not (activation == "silu" and is_gated):
        kind = "gated" if is_gated else "not gated"
        raise ValueError(
            f'activation: gemm1_alpha, gemm1_limit and swiglu_limit need gated "silu", got "{activation}", {kind}'
        )
    if fuse_swiglu_interleaved:
        if modified or activation != "silu" or not is_gated:
            raise ValueError(
                "fuse_swiglu_interleaved: needs plain gated silu, without gemm1_alpha, gemm1_limit and swiglu_limit"
            )
        options["layout"] = "interleaved"
    elif gemm1_alpha is not None:
        options.update(alpha=gemm1_alpha, beta=1.0 if gemm1_beta is None else gemm1_beta, limit=gemm1_limit)
        options["layout"] = "interleaved" if gate_up_interleaved else "gate_up"
    elif gemm1_limit is not None:
        options.update(limit=gemm1_limit, clamp="after")
    elif swiglu_limit is not None:
        options.update(limit=swiglu_limit, clamp="before")
    return options


def run(
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    b1: Tensor | None = None,
    b2: Tensor | None = None,
    *,
    apply_router_weight_on_input: bool = False,
    no_combine: bool = False,
    no_combine_keep_router_weight: bool = False,
    routed_scaling_factor: float | None = None,
    w1_scale: Tensor | None = None,
    w2_scale: Tensor | None = None,
    a1_scale: Tensor | None = None,
    a2_scale: Tensor | None = None,
    per_tensor: bool = False,
    per_token: bool = True,
    out: Tensor | None = None,
    **activation: Any,
) -> Tensor:
    """Runs the layer with SGLang's configuration as single arguments. It is the kernel of
    `torch.ops.oxmoe.fused_experts`."""
    blocks: dict[str, Any] = {}
    if w1_scale is not None or w2_scale is not None:
        blocks = {"w13_scale": w1_scale, "w2_scale": w2_scale, "format": "fp8_block"}
        if per_tensor:
            dynamic = per_token and a1_scale is None and a2_scale is None
            blocks.update(format="fp8_tensor-token" if dynamic else "fp8_tensor", a13_scale=a1_scale, a2_scale=a2_scale)
        elif not _is_e4m3(w1):
            name = str(hidden_states.dtype).rpartition(".")[2]
            blocks.update(format="mxfp4", dtype=_DTYPES.get(name, name))
    return _oxmoe.moe_tensors(
        hidden_states,
        w1,
        w2,
        topk_weights,
        topk_ids,
        b13=b1,
        b2=b2,
        **expert_options(**activation),
        **blocks,
        # SGLang applies the scale in its combine, so it applies none without a combine.
        routed_scaling_factor=1.0 if routed_scaling_factor is None or no_combine else routed_scaling_factor,
        apply_router_weight_on_input=apply_router_weight_on_input,
        no_combine=no_combine,
        keep_router_weight=no_combine_keep_router_weight,
        out=out,
    )


def fused_experts(
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_output: Any,
    moe_runner_config: Any,
    b1: Tensor | None = None,
    b2: Tensor | None = None,
    use_fp8_w8a8: bool = False,
    use_int8_w8a8: bool = False,
    use_int8_w8a16: bool = False,
    use_int4_w4a16: bool = False,
    per_channel_quant: bool = False,
    w1_scale: Tensor | None = None,
    w2_scale: Tensor | None = None,
    w1_zp: Tensor | None = None,
    w2_zp: Tensor | None = None,
    a1_scale: Tensor | None = None,
    a2_scale: Tensor | None = None,
    block_shape: list[int] | None = None,
    a1_q: Tensor | None = None,
    fuse_swiglu_interleaved: bool = False,
) -> Tensor:
    """hidden_states [T, H], w1 [E, 2I, H] (or [E, I, H] when not gated), w2 [E, H, I]; topk_output has topk_weights
    [T, k] of any float dtype, which are made fp32, and topk_ids [T, k] of these weights' experts, -1 for none.

    w1 and w2 of uint8 with w1_scale and w2_scale and no use_ flag are MXFP4 codes and their scales, shaped as
    ExpertWeights.mxfp4 has them, on CPU. On CUDA they would be packed at every call: make ExpertWeights.mxfp4 of them
    once, for oxmoe.moe.

    use_fp8_w8a8 with block_shape [128, 128]: w1 and w2 of float8_e4m3fn, w1_scale and w2_scale as
    ExpertWeights.fp8_block has them; hidden_states of bfloat16 are quantised by token and 128 columns. Without a
    block_shape w1_scale and w2_scale are one number an expert, and activations are quantised with a1_scale and a2_scale
    or, where those are None, with one scale for each token, as ExpertWeights.fp8_tensor has it by default; SGLang has
    one for a call there, unless per_channel_quant. With or without per_channel_quant w1_scale [E, 2I, 1] and w2_scale
    [E, H, 1] are one number for each row of weights.

    moe_runner_config.inplace (SGLang's default) writes into hidden_states and returns it; no_combine returns [T, k, H].
    """
    try:
        check_tensor("w1", w1)
        mxfp4 = str(w1.dtype).endswith("int8")
        blocks = use_fp8_w8a8 and block_shape is not None
        if use_fp8_w8a8:
            if blocks and list(block_shape or ()) != [128, 128]:
                raise NotImplementedError(f"block_shape: no kernel for {block_shape}; served is [128, 128]")
            if not _is_e4m3(w1):
                raise ValueError(
                    f"w1: expected dtype float8_e4m3fn with use_fp8_w8a8, got {str(w1.dtype).rpartition('.')[2]}"
                )
            if w1_scale is None or w2_scale is None:
                raise ValueError("w1_scale and w2_scale: both are needed with use_fp8_w8a8")
        unserved = {
            "use_int8_w8a8": use_int8_w8a8,
            "use_int8_w8a16": use_int8_w8a16,
            "use_int4_w4a16": use_int4_w4a16,
            "per_channel_quant": per_channel_quant and (blocks or not use_fp8_w8a8),
            "w1_scale": w1_scale is not None and not mxfp4 and not use_fp8_w8a8,
            "w2_scale": w2_scale is not None and not mxfp4 and not use_fp8_w8a8,
            "w1_zp": w1_zp is not None,
            "w2_zp": w2_zp is not None,
            "a1_scale": a1_scale is not None and (blocks or not use_fp8_w8a8),
            "a2_scale": a2_scale is not None and (blocks or not use_fp8_w8a8),
            "block_shape": block_shape is not None and not blocks,
            "a1_q": a1_q is not None,
        }
        if any(unserved.values()):
            given = ", ".join(name for name, used in unserved.items() if used)
            raise NotImplementedError(f"fused_experts: no kernel for {given}; {SERVED}")

        config = moe_runner_config
        check_config(config)
        # A field that a release lacks gets the value that the release behaves by.
        inplace = getattr(config, "inplace", True)
        no_combine = getattr(config, "no_combine", False)
        if inplace and no_combine:
            raise ValueError("moe_runner_config: inplace and no_combine exclude each other (the result is [T, k, H])")
        if fuse_swiglu_interleaved and (b1 is not None or getattr(config, "apply_router_weight_on_input", False)):
            raise ValueError("fuse_swiglu_interleaved: excludes b1 and apply_router_weight_on_input")
        options: dict[str, Any] = {
            "activation": getattr(config, "activation", "silu"),
            "is_gated": getattr(config, "is_gated", True),
            "apply_router_weight_on_input": getattr(config, "apply_router_weight_on_input", False),
            "no_combine": no_combine,
            "no_combine_keep_router_weight": getattr(config, "no_combine_keep_router_weight", False),
            "routed_scaling_factor": getattr(config, "routed_scaling_factor", None),
            "gemm1_alpha": getattr(config, "gemm1_alpha", None),
            "gemm1_beta": getattr(config, "gemm1_beta", None),
            "gemm1_limit": getattr(config, "gemm1_clamp_limit", None),
            "swiglu_limit": getattr(config, "swiglu_limit", None),
            "gate_up_interleaved": getattr(config, "gate_up_interleaved", True),
            "fuse_swiglu_interleaved": fuse_swiglu_interleaved,
            "w1_scale": w1_scale,
            "w2_scale": w2_scale,
            "a1_scale": a1_scale,
            "a2_scale": a2_scale,
            "per_tensor": use_fp8_w8a8 and not blocks,
        }
        if not isinstance(topk_output, Sequence) or len(topk_output) < 2:
            kind = type(topk_output).__name__
            raise ValueError(f"topk_output: expected a tuple (topk_weights, topk_ids, ...), got {kind}")
        # NOTE: SGLang 0.5.23 may pass a 4-tuple; the first two fields are the same in every form.
        operands = (hidden_states, w1, w2, as_float32(topk_output[0]), topk_output[1], b1, b2)
        if not tracing():
            return run(*operands, **options, out=hidden_states if inplace else None)

        import torch

        operator = torch.ops.oxmoe.fused_experts
        if not inplace:
            return operator.default(*operands, **options)
        operator.out(*operands, **options, out=hidden_states)
        return hidden_states
    except WRONG_TYPES as error:
        name_argument(error, fused_experts, locals())
        raise
