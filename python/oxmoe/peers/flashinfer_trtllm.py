"""flashinfer's `trtllm_fp8_block_scale_moe` and its pre-routed form, of 0.6.11 to 0.7.4, served by `moe`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from oxmoe import _oxmoe
from oxmoe._oxmoe import ExpertWeights
from oxmoe.functions import dequantize_mxfp8, moe
from oxmoe.operands import WRONG_TYPES, check_tensor, checked_arguments, name_argument
from oxmoe.peers.flashinfer_cutlass_formats import ACTIVATIONS, SWIGLU, activation_name, activation_of
from oxmoe.peers.flashinfer_trtllm_layouts import (
    BLOCK_MAJOR_K,
    DEEPSEEK_ROWS,
    MAJOR_K,
    SHUFFLED_ROWS,
    major_k,
    plain_biases,
    plain_mxfp8,
    unshuffled,
    valid_sizes,
    without_padding,
)
from oxmoe.peers.flashinfer_trtllm_routing import (
    by_ids,
    by_logits,
    check_dtype,
    check_experts,
    finalized,
    of_local_experts,
    routing_options,
    run,
    shared_experts,
)
from oxmoe.peers.kept import Cache, number
from oxmoe.tracing import tracing

if TYPE_CHECKING:
    from torch import Tensor

# flashinfer's enumerations, as far as both versions number them alike.
DEEPSEEK_FP8, MXFP8 = 1, 2  # Fp8QuantizationType
# Activations that flashinfer has for MxFp8, of those that are served.
_OF_MXFP8 = ("Swiglu", "SwigluStep", "Geglu", "Relu2")
_SERVED = "Swiglu (3) and with MxFp8 Geglu (4), Relu2 (6) and, as a member of the enumeration, SwigluStep"
_GEMMS = "gemm1_weights", "gemm1_weights_scale", "gemm2_weights", "gemm2_weights_scale"
cache = Cache()


@checked_arguments
def prepare_trtllm_fp8_block_scale_moe(
    gemm1_weights: Tensor,
    gemm1_weights_scale: Tensor,
    gemm2_weights: Tensor,
    gemm2_weights_scale: Tensor,
    *,
    use_shuffled_weight: bool = False,
    weight_layout: int = MAJOR_K,
    gemm1_alpha: Tensor | None = None,
    gemm1_beta: Tensor | None = None,
    gemm1_clamp_limit: Tensor | None = None,
    fp8_quantization_type: int = DEEPSEEK_FP8,
    gemm1_bias: Tensor | None = None,
    gemm2_bias: Tensor | None = None,
    activation_type: Any = SWIGLU,
    valid_hidden_size: int | None = None,
    valid_intermediate_size: int | None = None,
) -> ExpertWeights:
    """ExpertWeights of what `trtllm_fp8_block_scale_moe` takes: made once, at load.

    gemm1 float8_e4m3fn [El, 2I, H], rows [up; gate], and gemm2 [El, H, I], or with weight_layout BlockMajorK (2)
    [El, H / 128, 2I, 128] and [El, I / 128, H, 128], with use_shuffled_weight their rows shuffled; biases [El, 2I] and
    [El, H] in the same order. activation_type: Swiglu (3), and with MxFp8 Geglu (4), flashinfer's SwigluStep, and
    Relu2 (6), which has gemm1 [El, I, H]. Shuffled or blocked weights are copied.

    DeepSeekFp8: scales fp32 [El, 2I / 128, H / 128] and [El, H / 128, I / 128], never shuffled; a shuffle is
    shuffle_matrix_a with epilogue_tile_m 64. MxFp8: scales uint8 (E8M0) [El, 2I, H / 32] and [El, H, I / 32]; with
    use_shuffled_weight, which flashinfer demands there, rows of w13 alternate (reorder_rows_for_gated_act_gemm), then
    shuffle_matrix_a with 128, and scales go through the same and block_scale_interleave. On CUDA MxFp8 weights are
    packed: a copy. valid_hidden_size and valid_intermediate_size: of MxFp8 weights that `pad_trtllm_moe_weights` has
    padded, whose padding is dropped.
    """
    (w13, w13_scale), (w2, w2_scale) = (gemm1_weights, gemm1_weights_scale), (gemm2_weights, gemm2_weights_scale)
    b13, b2 = gemm1_bias, gemm2_bias
    layout, mxfp8 = int(weight_layout), int(fp8_quantization_type) == MXFP8
    options = _activation(activation_type, mxfp8, gemm1_alpha, gemm1_beta, gemm1_clamp_limit)
    if layout not in (MAJOR_K, BLOCK_MAJOR_K):
        raise NotImplementedError(f"weight_layout: no kernel for {layout}; served are MajorK (0) and BlockMajorK (2)")
    if use_shuffled_weight and mxfp8:
        w13, w13_scale = plain_mxfp8(w13, w13_scale, gated=options["gated"], weight_layout=layout)
        w2, w2_scale = plain_mxfp8(w2, w2_scale, gated=False, weight_layout=layout)
    elif use_shuffled_weight:
        w13, w2 = (unshuffled(major_k(w, layout), DEEPSEEK_ROWS) for w in (w13, w2))
    elif layout == BLOCK_MAJOR_K:
        w13, w2 = (major_k(w, layout) for w in (w13, w2))
    if use_shuffled_weight or layout == BLOCK_MAJOR_K:
        of_shuffle = (SHUFFLED_ROWS if mxfp8 else DEEPSEEK_ROWS) if use_shuffled_weight else None
        b13 = plain_biases(b13, of_shuffle, gated=mxfp8 and options["gated"])
        b2 = plain_biases(b2, of_shuffle)
        if not (use_shuffled_weight and mxfp8):
            w13_scale, w2_scale = w13_scale.clone(), w2_scale.clone()
    if not mxfp8:
        given = {"valid_hidden_size": valid_hidden_size, "valid_intermediate_size": valid_intermediate_size}
        if names := [name for name, size in given.items() if size is not None]:
            raise NotImplementedError(f"{', '.join(names)}: no kernel for padded weights with DeepSeekFp8")
    else:
        sizes = valid_sizes(valid_hidden_size, valid_intermediate_size, w13.shape[-1], w2.shape[-1])
        (w13, w13_scale, b13), (w2, w2_scale, b2) = without_padding(
            (w13, w13_scale, b13), (w2, w2_scale, b2), (1, 32, 1), sizes, gated=options["gated"]
        )
    make = ExpertWeights.mxfp8 if mxfp8 else ExpertWeights.fp8_block
    return make(w13, w2, w13_scale, w2_scale, b13=b13, b2=b2, **options)


def _known(activation_type: Any, *, mxfp8: bool) -> bool:
    """Whether experts of this quantisation have the activation: a name, a number, or a member of flashinfer's
    ActivationType."""
    return activation_name(activation_type) in (_OF_MXFP8 if mxfp8 else _OF_MXFP8[:1])


def _activation(
    activation_type: Any,
    mxfp8: bool,
    alpha: Tensor | None,
    beta: Tensor | None,
    limit: Tensor | None,
    read: Callable[[Any], Any] = number,
) -> dict[str, Any]:
    """Returns options of ExpertWeights. read: what is made of the tensors of numbers."""
    if not _known(activation_type, mxfp8=mxfp8):
        raise NotImplementedError(f"activation_type: no kernel for {activation_type!r}; served are {_SERVED}")
    name = activation_of(activation_type)
    function, gated, clamp, default = ACTIVATIONS[name]
    numbers = {"gemm1_alpha": alpha, "gemm1_beta": beta, "gemm1_clamp_limit": limit}
    taken = {"Swiglu": tuple(numbers), "SwigluStep": ("gemm1_clamp_limit",)}.get(name, ())
    others = [number for number, value in numbers.items() if value is not None and number not in taken]
    if others:
        raise ValueError(f"{', '.join(others)}: {name} takes {', '.join(taken) or 'no such numbers'}")
    given = {"alpha": read(alpha), "beta": read(beta), "limit": default if limit is None else read(limit)}
    options: dict[str, Any] = {"activation": function, "gated": gated, "clamp": clamp}
    if gated:
        options["layout"] = "up_gate"
    return options | {option: value for option, value in given.items() if value is not None}


def _refuse(function: str, unserved: dict[str, bool]) -> None:
    if any(unserved.values()):
        given = ", ".join(name for name, used in unserved.items() if used)
        raise NotImplementedError(
            f"{function}: no kernel for {given}; served: fp8_quantization_type DeepSeekFp8 and MxFp8, activation_type "
            f"{_SERVED}"
        )


def _check_mxfp8_scale(scale: Tensor, tokens: int, hidden: int) -> None:
    if scale.element_size() != 1 or scale.numel() * 32 != tokens * hidden:
        raise ValueError(
            f"hidden_states_scale: expected uint8 of shape [{tokens}, {hidden // 32}], got "
            f"{str(scale.dtype).rpartition('.')[2]} {list(scale.shape)}"
        )


def _tokens(
    hidden_states: Tensor, scale: Tensor | None, weights: ExpertWeights, quantization: int
) -> tuple[Tensor, Tensor | None]:
    """Returns x and x_scale in the form that `moe` takes."""
    tokens, hidden = hidden_states.shape
    expected = "mxfp8" if quantization == MXFP8 else "fp8_block"
    if weights.format != expected:
        raise ValueError(f"weights: expected {expected} experts (fp8_quantization_type), got {weights.format}")
    if scale is None:
        return hidden_states, None
    check_tensor("hidden_states_scale", scale)
    if quantization == MXFP8:
        _check_mxfp8_scale(scale, tokens, hidden)
        import torch

        # The conversion is exact: these numbers do not change when they are rounded to MXFP8 once more.
        flat = scale.reshape(-1).view(torch.uint8)
        return dequantize_mxfp8(hidden_states, flat, torch.bfloat16, layout="linear"), None
    if scale.dim() != 2 or scale.shape[1] != tokens:
        raise ValueError(f"hidden_states_scale: expected shape [hidden / 128, {tokens}], got {list(scale.shape)}")
    return hidden_states, scale.t()


def _run(
    function: str,
    routing: dict[str, Any],
    hidden_states: Tensor,
    hidden_states_scale: Tensor | None,
    gemms: tuple[Tensor, Tensor, Tensor, Tensor],
    num_experts: int,
    intermediate_size: int,
    local_expert_offset: int,
    local_num_experts: int,
    *,
    use_shuffled_weight: bool,
    weight_layout: int,
    fp8_quantization_type: int,
    activation_type: Any,
    output: Tensor | None,
    activation: tuple[Tensor | None, Tensor | None, Tensor | None],
    biases: tuple[Tensor | None, Tensor | None] = (None, None),
    padded: tuple[int | None, int | None] = (None, None),
    unserved: dict[str, bool],
    workspace_buffer: Tensor | None,
    weights: ExpertWeights | None,
) -> Any:
    """Runs the layer. `routing` has the options of `moe` that route its tokens."""
    check_tensor("hidden_states", hidden_states, "T", "H")
    check_dtype("hidden_states", hidden_states, "float8_e4m3fn", "bfloat16")
    if weights is not None and not isinstance(weights, ExpertWeights):
        raise ValueError(f"weights: expected ExpertWeights, got {type(weights).__name__}")
    quantization = int(fp8_quantization_type)
    sizes = valid_sizes(*padded, hidden_states.shape[1], intermediate_size)
    _refuse(
        function,
        {
            f"fp8_quantization_type {quantization}": quantization not in (DEEPSEEK_FP8, MXFP8),
            f"activation_type {activation_type!r}": not _known(activation_type, mxfp8=quantization == MXFP8),
            "valid_hidden_size, valid_intermediate_size with DeepSeekFp8": sizes is not None and quantization != MXFP8,
            **unserved,
        },
    )
    routing = of_local_experts(routing, num_experts, local_expert_offset, local_num_experts)
    if sizes is not None:
        if hidden_states_scale is not None:
            _check_mxfp8_scale(hidden_states_scale, *hidden_states.shape)
            blocks = hidden_states_scale.reshape(hidden_states.shape[0], hidden_states.shape[1] // 32)
            hidden_states_scale = blocks[:, : -(-sizes[0] // 32)].contiguous()
        hidden_states = hidden_states[:, : sizes[0]].contiguous()
    if weights is not None:
        check_experts("weights", weights.num_experts, local_num_experts)
        x, x_scale = _tokens(hidden_states, hidden_states_scale, weights, quantization)
        return run(moe, x, weights, routing, x_scale=x_scale, out=output, workspace_buffer=workspace_buffer)
    for name, gemm in zip(_GEMMS, gemms, strict=True):
        check_tensor(name, gemm)
    for at in (0, 2):
        check_dtype(_GEMMS[at], gemms[at], "float8_e4m3fn")
    if gemms[0].ndim:
        check_experts("gemm1_weights", gemms[0].shape[0], local_num_experts)
    of_experts: dict[str, Any] = dict(zip(("alpha", "beta", "limit", "b13", "b2"), (*activation, *biases), strict=True))
    form: dict[str, Any] = {"quantization": quantization, "shuffled": use_shuffled_weight}
    form |= {"weight_layout": int(weight_layout), "activation": activation_of(activation_type)}
    operands = hidden_states, hidden_states_scale, *gemms
    if tracing():
        if sizes is not None or "unfinalized" in routing:
            raise NotImplementedError(
                f"{function}: under torch.compile do_finalize=False and sizes of padded weights need weights="
            )
        return _traced_layer(*operands, **form, **of_experts, **routing, out=output)
    options = {**form, **of_experts, **routing}
    return layer(*operands, **options, sizes=sizes, out=output, workspace_buffer=workspace_buffer)


def layer(
    x: Tensor,
    x_scale: Tensor | None,
    w13: Tensor,
    w13_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    *,
    quantization: int,
    shuffled: bool,
    weight_layout: int,
    alpha: Tensor | None = None,
    beta: Tensor | None = None,
    limit: Tensor | None = None,
    b13: Tensor | None = None,
    b2: Tensor | None = None,
    activation: str = "Swiglu",
    sizes: tuple[int, int] | None = None,
    out: Tensor | None = None,
    workspace_buffer: Tensor | None = None,
    **routing: Any,
) -> Any:
    """Runs the layer on flashinfer's tensors, past the operators. `routing` has options of `moe`, and sizes those of
    weights without their padding."""
    gemms = w13, w13_scale, w2, w2_scale
    form = quantization, shuffled, weight_layout, activation
    weights = _weights(gemms, *form, (alpha, beta, limit), (b13, b2), sizes)
    x, x_scale = _tokens(x, x_scale, weights, quantization)
    return run(_oxmoe.moe, x, weights, routing, x_scale=x_scale, out=out, workspace_buffer=workspace_buffer)


def _traced_layer(*operands: Any, out: Tensor | None = None, **options: Any) -> Tensor:
    import torch

    packet = torch.ops.oxmoe.trtllm_fp8_layer
    if out is None:
        result: Tensor = packet.default(*operands, **options)
        return result
    packet.out(*operands, **options, out=out)
    return out


def _weights(
    gemms: tuple[Tensor, Tensor, Tensor, Tensor],
    quantization: int,
    shuffled: bool,
    layout: int,
    activation: str,
    numbers: tuple[Tensor | None, Tensor | None, Tensor | None],
    biases: tuple[Tensor | None, Tensor | None],
    sizes: tuple[int, int] | None,
) -> ExpertWeights:
    plain = not shuffled and layout == MAJOR_K and sizes is None
    if plain and (quantization != MXFP8 or not gemms[0].is_cuda):
        # These weights are described at every call: a cache would keep the caller's weights alive.
        of_experts = _activation(activation, quantization == MXFP8, *numbers, read=lambda tensor: tensor)
        w13, w13_scale, w2, w2_scale = gemms
        make = ExpertWeights.mxfp8 if quantization == MXFP8 else ExpertWeights.fp8_block
        return make(w13, w2, w13_scale, w2_scale, b13=biases[0], b2=biases[1], **of_experts)
    names = "gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit", "gemm1_bias", "gemm2_bias"
    others = *numbers, *biases
    options: dict[str, Any] = dict(zip(names, others, strict=True))
    form: dict[str, Any] = {"use_shuffled_weight": shuffled, "weight_layout": layout}
    form |= {"fp8_quantization_type": quantization, "activation_type": activation}
    if sizes is not None:
        form |= {"valid_hidden_size": sizes[0], "valid_intermediate_size": sizes[1]}
    return cache.get(
        gemms, others, tuple(form.values()), lambda: prepare_trtllm_fp8_block_scale_moe(*gemms, **form | options)
    )


def trtllm_fp8_block_scale_moe(
    routing_logits: Tensor,
    routing_bias: Tensor | None,
    hidden_states: Tensor,
    hidden_states_scale: Tensor | None,
    gemm1_weights: Tensor,
    gemm1_weights_scale: Tensor,
    gemm2_weights: Tensor,
    gemm2_weights_scale: Tensor,
    num_experts: int,
    top_k: int,
    n_group: int | None,
    topk_group: int | None,
    intermediate_size: int,
    local_expert_offset: int,
    local_num_experts: int,
    routed_scaling_factor: float | None,
    routing_method_type: Any = 0,
    use_shuffled_weight: bool = False,
    weight_layout: int = MAJOR_K,
    do_finalize: bool = True,
    enable_pdl: bool | None = None,
    tune_max_num_tokens: int = 8192,
    fp8_quantization_type: int = DEEPSEEK_FP8,
    *,
    num_fused_shared_experts: int | None = None,
    activation_type: Any = SWIGLU,
    norm_topk_prob: bool = True,
    routing_replay_out: Tensor | None = None,
    gemm1_alpha: Tensor | None = None,
    gemm1_beta: Tensor | None = None,
    gemm1_clamp_limit: Tensor | None = None,
    output: Tensor | None = None,
    valid_hidden_size: int | None = None,
    valid_intermediate_size: int | None = None,
    gemm1_bias: Tensor | None = None,
    gemm2_bias: Tensor | None = None,
    workspace_buffer: Tensor | None = None,
    weights: ExpertWeights | None = None,
) -> Tensor | list[Tensor]:
    """flashinfer's call: bf16 [T, H]. What follows fp8_quantization_type is by keyword: 0.7 put a parameter there.

    routing_logits fp32, bf16 or f16 [T, num_experts], routed as `routing_options` says; weights are not rounded to
    bf16, as flashinfer's are. fp8_quantization_type: DeepSeekFp8 (1) or MxFp8 (2). hidden_states float8_e4m3fn [T, H]
    with hidden_states_scale fp32 [H / 128, T], or of MxFp8 uint8 [T, H / 32], or bf16 without. Weights, scales and
    biases as in `prepare_trtllm_fp8_block_scale_moe`; shuffled or blocked ones are undone and MxFp8 ones on CUDA packed
    at the first call and kept while they live (`oxmoe.peers.flashinfer_trtllm.cache`): a second copy. weights: what
    that function made (then the four tensors and what belongs to them are not looked at), which also spares describing
    them at every call. gemm1_alpha, gemm1_beta, gemm1_clamp_limit: fp32 [El], as ExpertWeights' alpha, beta and limit.
    activation_type: Swiglu (3), and with MxFp8 Geglu (4), Relu2 (6) and the member SwigluStep of flashinfer's
    ActivationType. SwigluStep takes gemm1_clamp_limit alone, by default 7; Geglu and Relu2 take none of the three.

    Experts local_expert_offset to local_expert_offset + local_num_experts are held here; the output is their part of
    the sum. num_fused_shared_experts: as in `trtllm_fp4_block_scale_moe`. routing_replay_out int16 [>= T, top_k] gets
    the chosen ids, best first. workspace_buffer: uint8 or int8, 256-byte aligned; if it has
    `trtllm_fused_moe_workspace_size` bytes or more, it is the workspace, and otherwise the call allocates its own. It
    is not looked at under torch.compile without weights. enable_pdl and tune_max_num_tokens have no meaning here.
    """
    try:
        routing = routing_options(
            routing_method_type,
            top_k=top_k,
            routing_bias=routing_bias,
            n_group=n_group,
            topk_group=topk_group,
            routed_scaling_factor=routed_scaling_factor,
            norm_topk_prob=norm_topk_prob,
        )
        shared, experts = shared_experts(
            num_fused_shared_experts, (num_experts, local_expert_offset, local_num_experts), routing_method_type
        )
        routing = finalized(by_logits(routing_logits, routing_replay_out, routing, shared), do_finalize)
        return _run(
            "trtllm_fp8_block_scale_moe",
            routing,
            hidden_states,
            hidden_states_scale,
            (gemm1_weights, gemm1_weights_scale, gemm2_weights, gemm2_weights_scale),
            experts[0],
            intermediate_size,
            experts[1],
            experts[2],
            use_shuffled_weight=use_shuffled_weight,
            weight_layout=weight_layout,
            fp8_quantization_type=fp8_quantization_type,
            activation_type=activation_type,
            output=output,
            activation=(gemm1_alpha, gemm1_beta, gemm1_clamp_limit),
            biases=(gemm1_bias, gemm2_bias),
            padded=(valid_hidden_size, valid_intermediate_size),
            unserved={},
            workspace_buffer=workspace_buffer,
            weights=weights,
        )
    except WRONG_TYPES as error:
        name_argument(error, trtllm_fp8_block_scale_moe, locals())
        raise


def trtllm_fp8_block_scale_routed_moe(
    topk_ids: Tensor | tuple[Tensor, Tensor],
    routing_bias: Tensor | None,
    hidden_states: Tensor,
    hidden_states_scale: Tensor | None,
    gemm1_weights: Tensor,
    gemm1_weights_scale: Tensor,
    gemm2_weights: Tensor,
    gemm2_weights_scale: Tensor,
    num_experts: int,
    top_k: int,
    n_group: int | None,
    topk_group: int | None,
    intermediate_size: int,
    local_expert_offset: int,
    local_num_experts: int,
    routed_scaling_factor: float | None,
    routing_method_type: Any = 0,
    use_shuffled_weight: bool = False,
    weight_layout: int = MAJOR_K,
    do_finalize: bool = True,
    enable_pdl: bool | None = None,
    *,
    gemm1_lora_delta: Tensor | None = None,
    output: Tensor | None = None,
    tune_max_num_tokens: int = 8192,
    fp8_quantization_type: int = DEEPSEEK_FP8,
    activation_type: Any = SWIGLU,
    gemm1_alpha: Tensor | None = None,
    gemm1_beta: Tensor | None = None,
    gemm1_clamp_limit: Tensor | None = None,
    valid_hidden_size: int | None = None,
    valid_intermediate_size: int | None = None,
    workspace_buffer: Tensor | None = None,
    weights: ExpertWeights | None = None,
) -> Tensor | list[Tensor]:
    """flashinfer's call with experts that were chosen before: bf16 [T, H]. What follows enable_pdl is by keyword.

    topk_ids int32 [T, top_k] as `oxmoe.pack_topk` makes it, or a pair: ids int32 and weights bf16 or fp32 [T, top_k];
    global ids, -1 for none. The weights count as they are: routing_bias, n_group, topk_group, routed_scaling_factor and
    routing_method_type have no meaning. The rest is as for `trtllm_fp8_block_scale_moe`.
    """
    try:
        return _run(
            "trtllm_fp8_block_scale_routed_moe",
            finalized(by_ids(topk_ids, top_k), do_finalize, chosen=False),
            hidden_states,
            hidden_states_scale,
            (gemm1_weights, gemm1_weights_scale, gemm2_weights, gemm2_weights_scale),
            num_experts,
            intermediate_size,
            local_expert_offset,
            local_num_experts,
            use_shuffled_weight=use_shuffled_weight,
            weight_layout=weight_layout,
            fp8_quantization_type=fp8_quantization_type,
            activation_type=activation_type,
            output=output,
            activation=(gemm1_alpha, gemm1_beta, gemm1_clamp_limit),
            padded=(valid_hidden_size, valid_intermediate_size),
            unserved={"gemm1_lora_delta": gemm1_lora_delta is not None},
            workspace_buffer=workspace_buffer,
            weights=weights,
        )
    except WRONG_TYPES as error:
        name_argument(error, trtllm_fp8_block_scale_routed_moe, locals())
        raise
