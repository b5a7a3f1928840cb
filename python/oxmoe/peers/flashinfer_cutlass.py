"""flashinfer's `cutlass_fused_moe` in Hopper's formats, and SGLang's call of it with MXFP4 weights. `moe` runs both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from oxmoe import _oxmoe
from oxmoe._oxmoe import ExpertWeights
from oxmoe.functions import moe
from oxmoe.operands import WRONG_TYPES, check_counts, check_tensor, checked_arguments, name_argument, named_arguments
from oxmoe.peers import flashinfer_cutlass_formats as formats
from oxmoe.peers import flashinfer_cutlass_int4 as int4
from oxmoe.peers.flashinfer_cutlass_formats import AS_THEY_LIE, SERVED, SWIGLU, Activations, activation_of, name_of
from oxmoe.peers.flashinfer_cutlass_int4 import InputScaledExperts
from oxmoe.peers.kept import Cache
from oxmoe.peers.topk_forms import routing_arguments
from oxmoe.peers.workspace_buffer import with_workspace, workspace_of

if TYPE_CHECKING:
    from torch import Tensor

_OF_DTYPES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}
cache = Cache()


def _name(dtype: Any) -> Any:
    """Converts torch.bfloat16 to "bf16", the name that ExpertWeights uses."""
    return _OF_DTYPES.get(name_of(dtype), name_of(dtype))


@checked_arguments
def prepare_cutlass_fused_moe(
    fc1_expert_weights: Tensor,
    fc2_expert_weights: Tensor,
    quant_scales: Sequence[Tensor] | None,
    fc1_expert_biases: Tensor | None = None,
    fc2_expert_biases: Tensor | None = None,
    swiglu_alpha: Tensor | None = None,
    swiglu_beta: Tensor | None = None,
    swiglu_limit: Tensor | None = None,
    *,
    tp_rank: int = 0,
    activation_type: Any = SWIGLU,
    situ_beta: Tensor | float | None = None,
    situ_linear_beta: Tensor | float | None = None,
    hidden_size: int | None = None,
    dtype: Literal["bf16", "f16", "f32"] = "bf16",
    use_deepseek_fp8_block_scale: bool = False,
    use_w4_group_scaling: bool | None = None,
    use_mxfp8_act_scaling: bool = False,
    use_packed_weights: bool = False,
) -> ExpertWeights | InputScaledExperts:
    """Makes ExpertWeights from what `cutlass_fused_moe` takes, once, at load.

    Rows of fc1 are [up; gate]. With an activation without a gate they are one block of I rows. These are the
    formats, by dtype, flags and quant_scales:

    bf16, f16, fp32: fc1 [El, 2I, H] and fc2 [El, H, I]; no quant_scales.
    fp8 with one scale: float8_e4m3fn; fp32 [El] fc1's scale times the input's, the number that GEMM1's output is
        multiplied by, [El] fc2's scale over that number, and the input's scale.
    use_deepseek_fp8_block_scale: float8_e4m3fn; fp32 [El, 2I / 128, H / 128] and [El, H / 128, I / 128].
    use_mxfp8_act_scaling: float8_e4m3fn; fc1's E8M0 scales, swizzled (128x4) and padded, a tensor that is not read,
        fc2's scales, a tensor that is not read.
    use_w4_group_scaling (the default for bytes with two scales): MXFP4, uint8 [El, 2I, H / 2] and [El, H, I / 2],
        interleaved by flashinfer's interleave_moe_weights_for_sm90_mixed_gemm; their interleaved E8M0 scales, viewed
        as int32 or uint8. The scales' dimensions tell flashinfer 0.6.11 from 0.7.
    use_packed_weights (then use_w4_group_scaling is the default): int4, uint8 [El, 2I, H / 2] and [El, H, I / 2] in
        two's complement, interleaved as "int4" by the same function; their bf16 scales of 128 columns, interleaved
        (`oxmoe.int4.from_sm90` has the layouts of 0.6.11 and 0.7); activation scales [H] and [I]; two empty tensors
        (zero points, which flashinfer's kernel does not read, are refused); alphas fp32 [El] of fc1 and fc2. Empty
        activation scales and alphas stand for ones.
    NVFP4: uint8 (or viewed as int64) [El, 2I, H / 2] and [El, H, I / 2]; fc1's activation scale, swizzled block scales
        and dequantisation scale (one number or [El]), and the same of fc2.

    Biases are [El, 2I] and [El, H]; fc2's counts on tp_rank 0 only, as in flashinfer. swiglu_* are fp32 [El]; if all
    experts share a number, it becomes one number, which is faster. SwigluStep without a limit has flashinfer's
    limit, 7.0. Situ has situ_beta and situ_linear_beta, fp32 [El] or one number, by default flashinfer's 4.0 and 25.0;
    ExpertWeights.bf16 has the formula. hidden_size: the columns of the input, if MXFP4 or MXFP8 weights are padded
    beyond them. dtype: the dtype of the input for MXFP4 and NVFP4 weights.

    16-bit and fp8 weights are used as they lie. For other formats the result holds copies, made on their device.
    Combinations that are not served are a NotImplementedError.

    int4: flashinfer rounds the inputs of both GEMMs to e4m3 after the activation scales. oxmoe leaves them in the dtype
    of the input (W4A16), which is nearer to exact arithmetic. Alphas and activation scales become factors of the
    weights' scales, which are then rounded to the dtype; factors of 1 change no bits. Scales of fc1's input that differ
    within 128 columns cannot become factors. Then the result is an `InputScaledExperts`, for `cutlass_fused_moe` alone,
    which multiplies the input at each call. fc2's scales that differ so multiply fc1's rows of up instead. That is
    served for gated SiLU and GELU without swiglu_limit and swiglu_beta, and for Relu2.
    """
    check_tensor("fc1_expert_weights", fc1_expert_weights)
    check_tensor("fc2_expert_weights", fc2_expert_weights)
    _check_scales(quant_scales)
    scales = list(quant_scales or ())
    if use_w4_group_scaling is None:
        packed = name_of(fc1_expert_weights.dtype) in formats.PACKED
        use_w4_group_scaling = packed and (len(scales) < 3 or use_packed_weights)
    if not hasattr(tp_rank, "__index__") or tp_rank < 0:
        raise ValueError(f"tp_rank: expected 0 or more, got {tp_rank!r}")
    format = formats.format_of(
        fc1_expert_weights,
        scales,
        use_deepseek_fp8_block_scale=use_deepseek_fp8_block_scale,
        use_w4_group_scaling=use_w4_group_scaling,
        use_mxfp8_act_scaling=use_mxfp8_act_scaling,
        use_packed_weights=use_packed_weights,
    )
    given = (fc1_expert_biases, fc2_expert_biases, swiglu_alpha, swiglu_beta, swiglu_limit, situ_beta, situ_linear_beta)
    options = Activations(activation_of(activation_type), *given).options(tp_rank, once=True)
    weights = (fc1_expert_weights, fc2_expert_weights, scales)
    if format == "int4":
        return int4.prepared(*weights, options, dtype=dtype)
    if format not in AS_THEY_LIE:
        return formats.prepared(format, *weights, options, dtype=dtype, hidden_size=hidden_size)
    arguments = formats.described(format, *weights, options)
    constructor = getattr(ExpertWeights, arguments.pop("format", format))
    result: ExpertWeights = constructor(**arguments)
    return result


def cutlass_fused_moe(
    input: Tensor,
    token_selected_experts: Tensor,
    token_final_scales: Tensor,
    fc1_expert_weights: Tensor | None,
    fc2_expert_weights: Tensor | None,
    output_dtype: Any,
    quant_scales: Sequence[Tensor] | None,
    fc1_expert_biases: Tensor | None = None,
    fc2_expert_biases: Tensor | None = None,
    input_sf: Tensor | None = None,
    swiglu_alpha: Tensor | None = None,
    swiglu_beta: Tensor | None = None,
    swiglu_limit: Tensor | None = None,
    tp_size: int = 1,
    tp_rank: int = 0,
    ep_size: int = 1,
    ep_rank: int = 0,
    cluster_size: int = 1,
    cluster_rank: int = 0,
    output: Tensor | None = None,
    enable_alltoall: bool = False,
    use_deepseek_fp8_block_scale: bool = False,
    use_w4_group_scaling: bool = False,
    use_mxfp8_act_scaling: bool = False,
    min_latency_mode: bool = False,
    use_packed_weights: bool = False,
    tune_max_num_tokens: int = 8192,
    enable_pdl: bool | None = None,
    activation_type: Any = SWIGLU,
    swizzled_input_sf: bool = True,
    *,
    use_wfp4afp8_humming: bool = False,
    use_fused_finalize: bool | None = None,
    profile_ids: Sequence[int] | None = None,
    workspace_buffer: Tensor | None = None,
    clamped_relu2_limit: Tensor | None = None,
    situ_beta: Tensor | None = None,
    situ_linear_beta: Tensor | None = None,
    backend: str = "cutlass",
    nvfp4_4over6: Any = None,
    weights: ExpertWeights | InputScaledExperts | None = None,
) -> list[Tensor]:
    """flashinfer's call (0.6.11, 0.7.2 and 0.7.4, by keyword). Returns [output].

    input [T, H] of output_dtype, or float8_e4m3fn of fp8 weights with one scale, or with input_sf (swizzled, or with
    swizzled_input_sf=False row by row) NVFP4 codes of NVFP4 weights; token_selected_experts int32 or int64 [T, k],
    global ids of which those of ep_rank count; token_final_scales fp32 [T, k]; formats, scales, biases and activations
    as in `prepare_cutlass_fused_moe`. fp8 and MXFP8 weights and, on CUDA, packed ones have bf16 output alone. The
    output is this rank's part of the sum, written to `output` [T, H] where given. Without tokens nothing is looked at.
    An input narrower than MXFP4 or MXFP8 weights is that of weights padded with zeros, and so is the output. int4
    weights are W4A16 here: the inputs of both GEMMs are not rounded to e4m3, as flashinfer's are.

    weights: what prepare_cutlass_fused_moe made, in place of fc1 and fc2, scales, biases, swiglu_* and situ_* (fp8
    input still needs quant_scales). Without it 16-bit and fp8 weights are described at each call; of the others
    ExpertWeights are made at the first call with these tensors and kept while they live
    (`oxmoe.peers.flashinfer_cutlass.cache`): a second copy of the weights, and at each call the time to find it.
    workspace_buffer: uint8 or int8 [cutlass_fused_moe_workspace_size(...)], 256-byte aligned; WorkspaceError for
    others.

    The call is deterministic whatever use_fused_finalize says. tune_max_num_tokens, enable_pdl and profile_ids have
    no meaning.
    """
    try:
        unserved = {
            "cluster_size": cluster_size != 1,
            "enable_alltoall": enable_alltoall,
            "min_latency_mode": min_latency_mode,
            "use_wfp4afp8_humming": use_wfp4afp8_humming,
            "clamped_relu2_limit": clamped_relu2_limit is not None,
            "nvfp4_4over6": nvfp4_4over6 is not None,
            f"backend={backend!r}": backend != "cutlass",
        }
        if any(unserved.values()):
            given = ", ".join(name for name, used in unserved.items() if used)
            raise NotImplementedError(f"cutlass_fused_moe: no kernel for {given}; served are {SERVED}")
        if not 0 <= tp_rank < tp_size:
            raise ValueError(f"tp_rank: expected 0 <= tp_rank < tp_size, got tp_rank {tp_rank}, tp_size {tp_size}")
        check_tensor("input", input)
        if input.ndim != 2:
            raise ValueError(f"input: expected [T, H], got shape {tuple(input.shape)}")
        _check_scales(quant_scales)
        if input.shape[0] == 0:
            columns = input.shape[1] * (2 if name_of(input.dtype) == "uint8" else 1)
            return [input.new_empty((0, columns), dtype=output_dtype) if output is None else output]
        if weights is None:
            for name, matrix in (
                ("fc1_expert_weights", fc1_expert_weights),
                ("fc2_expert_weights", fc2_expert_weights),
            ):
                if matrix is not None:
                    check_tensor(name, matrix)
            unscaled = fc1_expert_weights is not None and name_of(fc1_expert_weights.dtype) in _OF_DTYPES
            if fc1_expert_weights is None or fc2_expert_weights is None or (quant_scales is None and not unscaled):
                raise ValueError(
                    "fc1_expert_weights, fc2_expert_weights and quant_scales: needed where weights is None"
                )
            format = formats.format_of(
                fc1_expert_weights,
                quant_scales,
                use_deepseek_fp8_block_scale=use_deepseek_fp8_block_scale,
                use_w4_group_scaling=use_w4_group_scaling,
                use_mxfp8_act_scaling=use_mxfp8_act_scaling,
                use_packed_weights=use_packed_weights,
            )
        elif isinstance(weights, InputScaledExperts):
            format = "int4"
        elif isinstance(weights, ExpertWeights):
            format = weights.format.partition("-")[0]
        else:
            raise ValueError(
                f"weights: expected what prepare_cutlass_fused_moe returns, or None, got {type(weights).__name__}"
            )
        activation = activation_of(activation_type)
        _check_aligned("input", input)
        x, x_scale = formats.quantised_input(format, input, input_sf, quant_scales, swizzled=swizzled_input_sf)
        made = name_of(input.dtype) if x_scale is None else "bfloat16"
        if name_of(output_dtype) != made:
            raise NotImplementedError(
                f"output_dtype: no kernel for {name_of(output_dtype)} of {name_of(input.dtype)} input; expected {made}"
            )
        workspace = None if workspace_buffer is None else workspace_of(workspace_buffer, input)
        options: dict[str, Any] = {"ep_size": ep_size, "ep_rank": ep_rank, "x_scale": x_scale, "out": output}
        options["workspace"] = workspace
        of_tokens = token_final_scales, token_selected_experts
        if weights is None:
            assert fc1_expert_weights is not None and fc2_expert_weights is not None
            biases = fc1_expert_biases, fc2_expert_biases
            others = (*biases, swiglu_alpha, swiglu_beta, swiglu_limit, situ_beta, situ_linear_beta)
            blocks = fc1_expert_weights, fc2_expert_weights, list(quant_scales or ())
            if format in AS_THEY_LIE:
                of_weights = Activations(activation, *others).options(tp_rank, once=False)
                described = formats.described(format, *blocks, of_weights)
                fc1, fc2 = described.pop("w13"), described.pop("w2")
                return [with_workspace(_oxmoe.moe_tensors, x, fc1, fc2, *of_tokens, **described, **options)]
            weights = _kept(input, format, blocks, others, tp_rank, activation, output_dtype)
        if isinstance(weights, InputScaledExperts):
            x, weights = weights.scaled(x), weights.weights
        return [with_workspace(moe, x, weights, *of_tokens, **options)]
    except WRONG_TYPES as error:
        name_argument(error, cutlass_fused_moe, locals())
        raise


def _check_scales(quant_scales: Any) -> None:
    """Checks that these are several tensors, not a tensor of several numbers."""
    if quant_scales is None:
        return
    if not isinstance(quant_scales, Sequence):
        kind = type(quant_scales).__name__
        raise ValueError(f"quant_scales: expected a list of tensors or None, got {kind}")
    for index, scale in enumerate(quant_scales):
        check_tensor(f"quant_scales[{index}]", scale)


def _check_aligned(name: str, tensor: Tensor) -> None:
    """Checks alignment, because the GPU's kernels read 16 bytes at a time. flashinfer's callers know this error as
    "16B-aligned"."""
    if tensor.is_cuda and tensor.data_ptr() % 16:
        raise ValueError(
            f"{name}: must be 16B-aligned (start at a multiple of 16 bytes), got address {tensor.data_ptr():#x}; pass "
            f"{name}.clone()"
        )


def _kept(
    input: Tensor,
    format: str,
    blocks: tuple[Tensor, Tensor, Sequence[Tensor]],
    others: tuple[Tensor | None, ...],
    tp_rank: int,
    activation: str,
    output_dtype: Any,
) -> ExpertWeights | InputScaledExperts:
    """Returns the cache's experts for an input like this. others: biases, swiglu_* and situ_*."""
    fc1, fc2, scales = blocks
    columns = {"mxfp4": 2, "mxfp8": 1}.get(format, 0) * fc1.shape[-1] * fc1.element_size()
    hidden_size = input.shape[1] if input.shape[1] < columns else None
    dtype = _name(output_dtype)

    def make() -> ExpertWeights | InputScaledExperts:
        options = Activations(activation, *others).options(tp_rank, once=True)
        if format == "int4":
            return int4.prepared(fc1, fc2, scales, options, dtype=dtype)
        return formats.prepared(format, fc1, fc2, scales, options, dtype=dtype, hidden_size=hidden_size)

    return cache.get((fc1, fc2, *scales), others, (format, min(tp_rank, 1), activation, hidden_size, dtype), make)


@named_arguments
def cutlass_fused_moe_workspace_size(
    max_num_tokens: int,
    hidden_size: int,
    intermediate_size: int,
    num_experts_total: int,
    top_k: int,
    *,
    x_dtype: Any,
    weight_dtype: Any,
    output_dtype: Any = None,
    activation_type: Any = SWIGLU,
    tp_size: int = 1,
    tp_rank: int = 0,
    ep_size: int = 1,
    ep_rank: int = 0,
    min_latency_mode: bool = False,
    use_deepseek_fp8_block_scale: bool = False,
    use_w4_group_scaling: bool = False,
    use_mxfp8_act_scaling: bool = False,
    use_fused_finalize: bool | None = None,
    use_packed_weights: bool = False,
    use_wfp4afp8_humming: bool = False,
    device: Any = None,
    backend: str = "cutlass",
) -> int:
    """Bytes of the workspace_buffer that `cutlass_fused_moe` needs for up to max_num_tokens tokens: exact, never
    decreasing in them, the same on every GPU. device: "cpu" for a CPU, where NVFP4 experts need less.

    hidden_size and intermediate_size: of this rank's weights, unpacked; num_experts_total: of all ep_size ranks.
    """
    sizes = {
        "max_num_tokens": max_num_tokens,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_experts_total": num_experts_total,
        "top_k": top_k,
        "tp_size": tp_size,
        "ep_size": ep_size,
    }
    check_counts(sizes)
    for kind, rank, size in (("tp", tp_rank, tp_size), ("ep", ep_rank, ep_size)):
        if not 0 <= rank < size:
            raise ValueError(f"{kind}_rank: expected 0 to {size - 1}, got {rank}")
    if num_experts_total % ep_size:
        raise ValueError(
            f"num_experts_total: expected a number divisible by ep_size {ep_size}, got {num_experts_total}"
        )
    unserved = {
        "min_latency_mode": min_latency_mode,
        "use_packed_weights without use_w4_group_scaling": use_packed_weights and not use_w4_group_scaling,
        "use_wfp4afp8_humming": use_wfp4afp8_humming,
        f"backend {backend!r}": backend != "cutlass",
    }
    if any(unserved.values()):
        given = ", ".join(name for name, used in unserved.items() if used)
        raise NotImplementedError(f"cutlass_fused_moe_workspace_size: no kernel for {given}; served are {SERVED}")
    dtype, of_nvfp4 = name_of(weight_dtype), "nvfp4" if str(device).startswith("cpu") else "nvfp4-a4"
    if dtype == "float8_e4m3fn":
        format = (
            "mxfp8" if use_mxfp8_act_scaling else "fp8_block" if use_deepseek_fp8_block_scale else "fp8_tensor-static"
        )
    elif dtype in _OF_DTYPES:
        format = _OF_DTYPES[dtype]
    elif dtype in formats.PACKED:
        format = "int4" if use_packed_weights else "mxfp4" if use_w4_group_scaling else of_nvfp4
    else:
        known = ", ".join((*_OF_DTYPES, "float8_e4m3fn", *formats.PACKED))
        raise NotImplementedError(f"weight_dtype: no kernel for {dtype}; served are {known}")
    _, gated, _, _ = formats.ACTIVATIONS[activation_of(activation_type)]
    return _oxmoe.shape_workspace_bytes(
        num_experts_total // ep_size, top_k, hidden_size, intermediate_size, max_num_tokens, format=format, gated=gated
    )


def fused_experts_flashinfer_mxfp4(
    hidden_states: Tensor,
    topk_output: Any,
    quant_info: Any,
    runner_config: Any,
    *,
    weights: ExpertWeights | None = None,
    output: Tensor | None = None,
) -> Tensor:
    """Computes what SGLang 0.5.23 computes with a FlashInferCutlassMxfp4MoeQuantInfo on Hopper (W4A16). Returns [T,
    H].

    hidden_states [T, H]; topk_output standard (global ids) or bypassed (then routed here); H may be below
    quant_info.padded_hidden, without copies of input and output. runner_config gives moe_tp_* and moe_ep_*. Returns
    hidden_states itself where T is 0, and else this rank's part of the sum. weights: as in `cutlass_fused_moe`, which
    see; then quant_info gives nothing.
    """
    try:
        check_tensor("hidden_states", hidden_states, "T", "H")
        if hidden_states.shape[0] == 0:
            return hidden_states
        names = ("moe_tp_size", "moe_tp_rank", "moe_ep_size", "moe_ep_rank")
        tp_size, tp_rank, ep_size, ep_rank = (
            getattr(runner_config, name, 1 if name.endswith("size") else 0) for name in names
        )
        if not 0 <= tp_rank < tp_size:
            raise ValueError(f"runner_config: expected 0 <= moe_tp_rank < moe_tp_size, got {tp_rank} and {tp_size}")
        if weights is None:
            if not hasattr(quant_info, "w13_weight"):
                raise ValueError(
                    f"quant_info: expected SGLang's FlashInferCutlassMxfp4MoeQuantInfo, got {type(quant_info).__name__}"
                )
            others = ("mxfp4_weight_global_scale", "w13_humming_residual_scale", "w2_humming_residual_scale")
            unserved = [name for name in others if getattr(quant_info, name, None) is not None]
            if unserved:
                raise NotImplementedError(
                    f"quant_info: no kernel for {', '.join(unserved)}; served are MXFP4 weights with 16-bit input"
                )
            info, step = quant_info, getattr(quant_info, "use_swiglu_step", False)
            kept = _kept(
                hidden_states,
                "mxfp4",
                (info.w13_weight, info.w2_weight, (info.w13_weight_scale, info.w2_weight_scale)),
                (info.w13_bias, info.w2_bias, info.swiglu_alpha, info.swiglu_beta, info.swiglu_limit),
                tp_rank,
                "SwigluStep" if step else "Swiglu",
                hidden_states.dtype,
            )
            assert isinstance(kept, ExpertWeights)
            weights = kept
        arguments = routing_arguments(topk_output)
        return moe(hidden_states, weights, **arguments, ep_size=ep_size, ep_rank=ep_rank, out=output)
    except WRONG_TYPES as error:
        name_argument(error, fused_experts_flashinfer_mxfp4, locals())
        raise
