"""flashinfer's trtllm-gen layers of bf16, of fp8 with one scale, and of MXFP4 and NVFP4 weights, served by `moe`.

Source: flashinfer/fused_moe/core.py of 0.6.18, 0.7.2 and 0.7.4, and tests/moe/trtllm_gen_fused_moe_utils.py of 0.6.18.
Rows of w13 are [up; gate] before flashinfer's shuffles.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from oxmoe._oxmoe import ExpertWeights
from oxmoe.functions import moe
from oxmoe.operands import WRONG_TYPES, check_tensor, checked_arguments, name_argument
from oxmoe.peers.flashinfer_cutlass_formats import ACTIVATIONS, SWIGLU, activation_of, name_of
from oxmoe.peers.flashinfer_trtllm_layouts import (
    BLOCK_MAJOR_K,
    MAJOR_K,
    SHUFFLED_ROWS,
    halves,
    major_k,
    unshuffled,
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
)
from oxmoe.peers.kept import Cache, number
from oxmoe.tracing import tracing

if TYPE_CHECKING:
    from torch import Tensor

cache = Cache()


def activation(activation_type: Any, given: dict[str, Tensor | None], of_sums: Tensor | None = None) -> dict[str, Any]:
    """Returns options of ExpertWeights. given: alpha, beta and limit. of_sums: factors of the experts that dequantise
    GEMM1's sums; beta and limit are then in units of these sums.

    Situ's gemm1_alpha bounds the gate, and its gemm1_beta bounds up. Each is 1 if it is not given. Both bound
    dequantised numbers.
    """
    name = activation_of(activation_type)
    function, gated, clamp, default = ACTIVATIONS[name]
    if name == "Situ":
        if given["limit"] is not None:
            raise NotImplementedError("gemm1_clamp_limit: no kernel for Situ with a limit beside its bounds")
        bounds = {"situ_beta": number(given["alpha"]), "situ_linear_beta": number(given["beta"])}
        bounds = {option: 1.0 if value is None else value for option, value in bounds.items()}
        return {"activation": function, "gated": gated, "layout": "up_gate", **bounds}
    if of_sums is not None:
        sums = {"beta": "gemm1_beta", "limit": "gemm1_clamp_limit"}
        given = {**given, **{option: _dequantised(name, given[option], of_sums) for option, name in sums.items()}}
    if name == "SwigluStep":
        unserved = [f"gemm1_{option}" for option in ("alpha", "beta") if given[option] is not None]
        if unserved:
            raise ValueError(f"{', '.join(unserved)}: SwigluStep takes gemm1_clamp_limit alone")
    numbers = {option: number(value) for option, value in given.items()}
    if numbers["limit"] is None:
        numbers["limit"] = default
    options: dict[str, Any] = {"activation": function, "gated": gated, "clamp": clamp}
    if gated:
        options["layout"] = "up_gate"
    return options | {option: value for option, value in numbers.items() if value is not None}


def _dequantised(name: str, numbers: Tensor | None, of_sums: Tensor) -> Tensor | None:
    """Returns numbers of the experts, given in units of GEMM1's sums, in units of dequantised numbers."""
    if numbers is None:
        return None
    check_tensor(name, numbers)
    if numbers.numel() != of_sums.numel():
        raise ValueError(f"{name}: expected {of_sums.numel()} numbers (local experts), got {numbers.numel()}")
    return numbers.float().reshape(-1) * of_sums


def layer(
    function: str,
    routing: dict[str, Any],
    x: Tensor,
    x_scale: Tensor | None,
    weights: ExpertWeights | None,
    make: Callable[..., ExpertWeights],
    owners: Sequence[Tensor],
    options: dict[str, Any],
    *,
    experts: tuple[int, int, int],
    refused: dict[str, bool],
    output: Tensor | None,
    workspace_buffer: Tensor | None = None,
    copies: bool = True,
    dtype: str | None = None,
    intermediate_size: int | None = None,
) -> Any:
    """Runs the layer of weights that were prepared, or that `make` makes of `owners` and `options`.

    experts: num_experts, local_expert_offset, local_num_experts. refused: name of each argument that is not served ->
    whether the caller uses it. workspace_buffer: a buffer that is large enough is the workspace. copies: `make` copies
    the owners, and its result is kept while they live. dtype: that of gemm1_weights, checked before their shape.
    intermediate_size: the caller's, which the weights must have.
    """
    if any(refused.values()):
        given = ", ".join(name for name, used in refused.items() if used)
        raise NotImplementedError(f"{function}: no kernel for {given}")
    if weights is not None and not isinstance(weights, ExpertWeights):
        raise ValueError(f"weights: expected ExpertWeights, got {type(weights).__name__}")
    routing = of_local_experts(routing, *experts)
    if weights is not None:
        check_experts("weights", weights.num_experts, experts[2])
    else:
        if tracing():
            raise NotImplementedError(f"{function}: under torch.compile prepare the weights before and pass weights=")
        check_tensor("gemm1_weights", owners[0])
        if dtype is not None:
            check_dtype("gemm1_weights", owners[0], dtype)
        check_experts("gemm1_weights", owners[0].shape[0] if owners[0].ndim else 0, experts[2])
        if copies:
            tensors = {name: value for name, value in options.items() if hasattr(value, "untyped_storage")}
            others = tuple((name, value) for name, value in options.items() if name not in tensors)
            key = (make.__name__, *tensors, *others)
            weights = cache.get(owners, tuple(tensors.values()), key, lambda: make(*owners, **options))
        else:
            weights = make(*owners, **options)
    if intermediate_size not in (None, weights.intermediate_size):
        expected = f"expected {weights.intermediate_size} (from the weights)"
        raise ValueError(f"intermediate_size: {expected}, got {intermediate_size}")
    return run(moe, x, weights, routing, x_scale=x_scale, out=output, workspace_buffer=workspace_buffer)


def three_dimensions(**weights: Tensor) -> None:
    for name, tensor in weights.items():
        check_tensor(name, tensor)
        if tensor.dim() != 3:
            raise ValueError(f"{name}: expected 3 dimensions [experts, rows, K], got shape {list(tensor.shape)}")


# ---- bf16


@checked_arguments
def prepare_trtllm_bf16_moe(
    gemm1_weights: Tensor,
    gemm2_weights: Tensor,
    *,
    use_shuffled_weight: bool = True,
    weight_layout: int = BLOCK_MAJOR_K,
    activation_type: Any = SWIGLU,
    gemm1_alpha: Tensor | None = None,
    gemm1_beta: Tensor | None = None,
    gemm1_clamp_limit: Tensor | None = None,
) -> ExpertWeights:
    """ExpertWeights of what `trtllm_bf16_moe` takes: made once, at load.

    gemm1 bf16 [El, 2I, H], rows [up; gate] ([El, I, H] of activations without a gate), and gemm2 [El, H, I]; with
    weight_layout BlockMajorK (2) [El, H / 64, 2I, 64] and [El, I / 64, H, 64]. gemm1_alpha, gemm1_beta and
    gemm1_clamp_limit fp32 [El] are ExpertWeights' alpha, beta and limit; of Situ (10) the first two are situ_beta and
    situ_linear_beta, by default 1 as in flashinfer, and a limit is refused. use_shuffled_weight: rows of w13
    alternate (reorder_rows_for_gated_act_gemm), then the rows of both went through shuffle_matrix_a with
    epilogue_tile_m 128. Shuffled or blocked weights are copied.
    """
    w13, w2 = gemm1_weights, gemm2_weights
    if int(weight_layout) not in (MAJOR_K, BLOCK_MAJOR_K):
        raise NotImplementedError(
            f"weight_layout: no kernel for {int(weight_layout)}; served are MajorK (0) and BlockMajorK (2)"
        )
    options = activation(activation_type, {"alpha": gemm1_alpha, "beta": gemm1_beta, "limit": gemm1_clamp_limit})
    w13, w2 = (major_k(part, int(weight_layout)) for part in (w13, w2))
    three_dimensions(gemm1_weights=w13, gemm2_weights=w2)
    if use_shuffled_weight:
        w13, w2 = (unshuffled(part, SHUFFLED_ROWS) for part in (w13, w2))
        if options["gated"]:
            w13 = halves(w13)
    return ExpertWeights.bf16(w13, w2, **options)


def trtllm_bf16_moe(
    routing_logits: Tensor,
    routing_bias: Tensor | None,
    hidden_states: Tensor,
    gemm1_weights: Tensor,
    gemm2_weights: Tensor,
    num_experts: int,
    top_k: int,
    n_group: int | None,
    topk_group: int | None,
    intermediate_size: int,
    local_expert_offset: int,
    local_num_experts: int,
    routed_scaling_factor: float | None = None,
    routing_method_type: Any = 0,
    use_shuffled_weight: bool = True,
    weight_layout: int = BLOCK_MAJOR_K,
    do_finalize: bool = True,
    enable_pdl: bool | None = None,
    tune_max_num_tokens: int = 8192,
    activation_type: Any = SWIGLU,
    norm_topk_prob: bool = True,
    routing_replay_out: Tensor | None = None,
    gemm1_alpha: Tensor | None = None,
    gemm1_beta: Tensor | None = None,
    gemm1_clamp_limit: Tensor | None = None,
    output: Tensor | None = None,
    workspace_buffer: Tensor | None = None,
    *,
    weights: ExpertWeights | None = None,
) -> Tensor | list[Tensor]:
    """flashinfer's call: bf16 [T, H].

    routing_logits [T, num_experts] are routed as `trtllm_fp8_block_scale_moe` does it. Weights are those of
    `prepare_trtllm_bf16_moe`: they are made plain at the first call, and the copy is kept while the tensors live
    (`oxmoe.peers.flashinfer_trtllm_formats.cache`). weights: what that function made; the two tensors and what belongs
    to them are not looked at then. Under torch.compile it is needed. activation_type: Swiglu (3), Situ (10), or an
    ActivationType by name. SwigluStep takes gemm1_clamp_limit alone, by default 7. Experts local_expert_offset to
    local_expert_offset + local_num_experts are held here. workspace_buffer: uint8 or int8, 256-byte aligned; if it has
    `trtllm_fused_moe_workspace_size` bytes or more, it is the workspace, and otherwise the call allocates its own.
    enable_pdl and tune_max_num_tokens have no meaning here.
    """
    try:
        routing = by_method(
            routing_logits, routing_bias, routing_replay_out, top_k, n_group, topk_group, routed_scaling_factor,
            routing_method_type, norm_topk_prob,
        )  # fmt: skip
        return _bf16(
            "trtllm_bf16_moe", finalized(routing, do_finalize), hidden_states, gemm1_weights, gemm2_weights,
            (num_experts, local_expert_offset, local_num_experts), use_shuffled_weight, weight_layout, activation_type,
            (gemm1_alpha, gemm1_beta, gemm1_clamp_limit), {}, output, workspace_buffer, weights, intermediate_size,
        )  # fmt: skip
    except WRONG_TYPES as error:
        name_argument(error, trtllm_bf16_moe, locals())
        raise


def trtllm_bf16_routed_moe(
    topk_ids: Tensor | tuple[Tensor, Tensor],
    hidden_states: Tensor,
    gemm1_weights: Tensor,
    gemm2_weights: Tensor,
    num_experts: int,
    top_k: int,
    n_group: int | None,
    topk_group: int | None,
    intermediate_size: int,
    local_expert_offset: int,
    local_num_experts: int,
    routed_scaling_factor: float | None = None,
    routing_method_type: Any = 0,
    use_shuffled_weight: bool = True,
    weight_layout: int = BLOCK_MAJOR_K,
    do_finalize: bool = True,
    enable_pdl: bool | None = None,
    gemm1_lora_delta: Tensor | None = None,
    tune_max_num_tokens: int = 8192,
    activation_type: Any = SWIGLU,
    routing_replay_out: Tensor | None = None,
    gemm1_alpha: Tensor | None = None,
    gemm1_beta: Tensor | None = None,
    gemm1_clamp_limit: Tensor | None = None,
    output: Tensor | None = None,
    workspace_buffer: Tensor | None = None,
    *,
    weights: ExpertWeights | None = None,
) -> Tensor | list[Tensor]:
    """flashinfer's call with experts that were chosen before: bf16 [T, H].

    topk_ids is int32 [T, top_k] as `oxmoe.pack_topk` makes it, or a pair of ids and weights; the weights count as they
    are. The rest is as for `trtllm_bf16_moe`.
    """
    try:
        refused = {
            "gemm1_lora_delta": gemm1_lora_delta is not None,
            "routing_replay_out": routing_replay_out is not None,
        }
        routing = finalized(by_ids(topk_ids, top_k), do_finalize, chosen=False)
        return _bf16(
            "trtllm_bf16_routed_moe", routing, hidden_states, gemm1_weights, gemm2_weights,
            (num_experts, local_expert_offset, local_num_experts), use_shuffled_weight, weight_layout, activation_type,
            (gemm1_alpha, gemm1_beta, gemm1_clamp_limit), refused, output, workspace_buffer, weights, intermediate_size,
        )  # fmt: skip
    except WRONG_TYPES as error:
        name_argument(error, trtllm_bf16_routed_moe, locals())
        raise


def _bf16(
    function: str,
    routing: dict[str, Any],
    hidden_states: Tensor,
    gemm1_weights: Tensor,
    gemm2_weights: Tensor,
    experts: tuple[int, int, int],
    use_shuffled_weight: bool,
    weight_layout: int,
    activation_type: Any,
    numbers: tuple[Tensor | None, Tensor | None, Tensor | None],
    refused: dict[str, bool],
    output: Tensor | None,
    workspace_buffer: Tensor | None,
    weights: ExpertWeights | None,
    intermediate_size: int,
) -> Any:
    options = dict(zip(("gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit"), numbers, strict=True))
    form: dict[str, Any] = {"use_shuffled_weight": bool(use_shuffled_weight), "weight_layout": int(weight_layout)}
    form["activation_type"] = activation_of(activation_type)
    return layer(
        function, routing, hidden_states, None, weights, prepare_trtllm_bf16_moe, (gemm1_weights, gemm2_weights),
        {**form, **options}, experts=experts, refused=refused, output=output, workspace_buffer=workspace_buffer,
        copies=form["use_shuffled_weight"] or form["weight_layout"] == BLOCK_MAJOR_K, dtype="bfloat16",
        intermediate_size=intermediate_size,
    )  # fmt: skip


def by_method(
    routing_logits: Tensor,
    routing_bias: Tensor | None,
    routing_replay_out: Tensor | None,
    top_k: int,
    n_group: int | None,
    topk_group: int | None,
    routed_scaling_factor: float | None,
    routing_method_type: Any,
    norm_topk_prob: bool,
    shared: int = 0,
) -> dict[str, Any]:
    options = routing_options(
        routing_method_type,
        top_k=top_k,
        routing_bias=routing_bias,
        n_group=n_group,
        topk_group=topk_group,
        routed_scaling_factor=routed_scaling_factor,
        norm_topk_prob=norm_topk_prob,
    )
    return by_logits(routing_logits, routing_replay_out, options, shared)


# ---- fp8 with one scale


@checked_arguments
def prepare_trtllm_fp8_per_tensor_scale_moe(
    gemm1_weights: Tensor,
    output1_scales_scalar: Tensor,
    output1_scales_gate_scalar: Tensor,
    gemm2_weights: Tensor,
    output2_scales_scalar: Tensor,
    *,
    activation_type: Any = SWIGLU,
    gemm1_clamp_limit: Tensor | None = None,
) -> ExpertWeights:
    """ExpertWeights of what `trtllm_fp8_per_tensor_scale_moe` takes: made once, at load.

    gemm1 float8_e4m3fn [El, 2I, H] ([El, I, H] without a gate) and gemm2 [El, H, I], shuffled as flashinfer demands:
    rows of a gated w13 alternate, then shuffle_matrix_a with epilogue_tile_m 128. The scales are fp32 [El]:
    output1_scales_gate_scalar dequantises GEMM1's sums; output1_scales_scalar is that times the number that quantises
    its output (without a gate: that number alone); output2_scales_scalar dequantises GEMM2's sums. Where experts
    quantise with different numbers, all of them quantise with the smallest. gemm1_clamp_limit: fp32 [El], in units of
    GEMM1's sums before output1_scales_gate_scalar.
    """
    three_dimensions(gemm1_weights=gemm1_weights, gemm2_weights=gemm2_weights)
    of_sums, experts = output1_scales_gate_scalar.float().reshape(-1), gemm1_weights.shape[0]
    scales = {
        "output1_scales_scalar": output1_scales_scalar.float().reshape(-1),
        "output1_scales_gate_scalar": of_sums,
        "output2_scales_scalar": output2_scales_scalar.float().reshape(-1),
    }
    for name, scale in scales.items():
        if scale.numel() != experts:
            raise ValueError(f"{name}: expected {experts} numbers (local experts), got {scale.numel()}")
    name = activation_of(activation_type)
    if name == "Situ":
        raise NotImplementedError(
            "activation_type: no kernel for 'Situ' with fp8 weights of one scale; these have no bounds"
        )
    options = activation(activation_type, {"alpha": None, "beta": None, "limit": gemm1_clamp_limit}, of_sums)
    w13, w2 = (unshuffled(part, SHUFFLED_ROWS) for part in (gemm1_weights, gemm2_weights))
    quantises = scales["output1_scales_scalar"]
    if options["gated"]:
        w13, quantises = halves(w13), quantises / of_sums
    return ExpertWeights.fp8_tensor(
        w13,
        w2,
        of_sums.clone(),
        scales["output2_scales_scalar"] * quantises,
        a13_scale=of_sums.new_ones(1),
        a2_scale=quantises.reciprocal().amax().reshape(1),
        **options,
    )


def trtllm_fp8_per_tensor_scale_moe(
    routing_logits: Tensor,
    routing_bias: Tensor | None,
    hidden_states: Tensor,
    gemm1_weights: Tensor,
    output1_scales_scalar: Tensor,
    output1_scales_gate_scalar: Tensor,
    gemm2_weights: Tensor,
    output2_scales_scalar: Tensor,
    num_experts: int,
    top_k: int,
    n_group: int | None,
    topk_group: int | None,
    intermediate_size: int,
    local_expert_offset: int,
    local_num_experts: int,
    routed_scaling_factor: float | None,
    use_routing_scales_on_input: bool,
    routing_method_type: Any = 0,
    do_finalize: bool = True,
    enable_pdl: bool | None = None,
    tune_max_num_tokens: int = 8192,
    activation_type: Any = SWIGLU,
    norm_topk_prob: bool = True,
    routing_replay_out: Tensor | None = None,
    output: Tensor | None = None,
    gemm1_clamp_limit: Tensor | None = None,
    workspace_buffer: Tensor | None = None,
    *,
    weights: ExpertWeights | None = None,
) -> Tensor | list[Tensor]:
    """flashinfer's call: bf16 [T, H] of hidden_states float8_e4m3fn [T, H].

    use_routing_scales_on_input: weights of experts multiply GEMM1's sums instead of the outputs. Weights and scales
    are those of `prepare_trtllm_fp8_per_tensor_scale_moe`; the rest is as for `trtllm_bf16_moe`.
    """
    try:
        routing = by_method(
            routing_logits, routing_bias, routing_replay_out, top_k, n_group, topk_group, routed_scaling_factor,
            routing_method_type, norm_topk_prob,
        )  # fmt: skip
        return _per_tensor(
            "trtllm_fp8_per_tensor_scale_moe", finalized(routing, do_finalize), hidden_states, gemm1_weights,
            output1_scales_scalar, output1_scales_gate_scalar, gemm2_weights, output2_scales_scalar,
            (num_experts, local_expert_offset, local_num_experts), use_routing_scales_on_input, {}, activation_type,
            gemm1_clamp_limit, output, workspace_buffer, weights, intermediate_size,
        )  # fmt: skip
    except WRONG_TYPES as error:
        name_argument(error, trtllm_fp8_per_tensor_scale_moe, locals())
        raise


def trtllm_fp8_per_tensor_scale_routed_moe(
    topk_ids: Tensor | tuple[Tensor, Tensor],
    routing_bias: Tensor | None,
    hidden_states: Tensor,
    gemm1_weights: Tensor,
    output1_scales_scalar: Tensor,
    output1_scales_gate_scalar: Tensor,
    gemm2_weights: Tensor,
    output2_scales_scalar: Tensor,
    num_experts: int,
    top_k: int,
    n_group: int | None,
    topk_group: int | None,
    intermediate_size: int,
    local_expert_offset: int,
    local_num_experts: int,
    routed_scaling_factor: float | None,
    use_routing_scales_on_input: bool,
    routing_method_type: Any = 0,
    do_finalize: bool = True,
    enable_pdl: bool | None = None,
    tune_max_num_tokens: int = 8192,
    activation_type: Any = SWIGLU,
    routing_replay_out: Tensor | None = None,
    output: Tensor | None = None,
    gemm1_clamp_limit: Tensor | None = None,
    workspace_buffer: Tensor | None = None,
    *,
    weights: ExpertWeights | None = None,
) -> Tensor | list[Tensor]:
    """flashinfer's call with experts that were chosen before: bf16 [T, H].

    topk_ids is int32 [T, top_k] as `oxmoe.pack_topk` makes it, or a pair of ids and weights; the weights count as they
    are. The rest is as for `trtllm_fp8_per_tensor_scale_moe`.
    """
    try:
        refused = {"routing_replay_out": routing_replay_out is not None}
        routing = finalized(by_ids(topk_ids, top_k), do_finalize, chosen=False)
        return _per_tensor(
            "trtllm_fp8_per_tensor_scale_routed_moe", routing, hidden_states, gemm1_weights,
            output1_scales_scalar, output1_scales_gate_scalar, gemm2_weights, output2_scales_scalar,
            (num_experts, local_expert_offset, local_num_experts), use_routing_scales_on_input,
            refused, activation_type, gemm1_clamp_limit, output, workspace_buffer, weights, intermediate_size,
        )  # fmt: skip
    except WRONG_TYPES as error:
        name_argument(error, trtllm_fp8_per_tensor_scale_routed_moe, locals())
        raise


def _per_tensor(
    function: str,
    routing: dict[str, Any],
    hidden_states: Tensor,
    gemm1_weights: Tensor,
    output1_scales_scalar: Tensor,
    output1_scales_gate_scalar: Tensor,
    gemm2_weights: Tensor,
    output2_scales_scalar: Tensor,
    experts: tuple[int, int, int],
    use_routing_scales_on_input: bool,
    refused: dict[str, bool],
    activation_type: Any,
    gemm1_clamp_limit: Tensor | None,
    output: Tensor | None,
    workspace_buffer: Tensor | None,
    weights: ExpertWeights | None,
    intermediate_size: int,
) -> Any:
    import torch

    check_tensor("hidden_states", hidden_states, "T", "H")
    if name_of(hidden_states.dtype) != "float8_e4m3fn":
        raise NotImplementedError(
            f"{function}: no kernel for hidden_states of {name_of(hidden_states.dtype)}; served is float8_e4m3fn"
        )
    owners = (gemm1_weights, output1_scales_scalar, output1_scales_gate_scalar, gemm2_weights, output2_scales_scalar)
    options = {"activation_type": activation_of(activation_type), "gemm1_clamp_limit": gemm1_clamp_limit}
    routing = {**routing, "apply_router_weight_on_input": bool(use_routing_scales_on_input)}
    # The scale of x is a part of output1_scales_gate_scalar.
    one = torch.ones(1, dtype=torch.float32, device=hidden_states.device)
    return layer(
        function, routing, hidden_states, one, weights, prepare_trtllm_fp8_per_tensor_scale_moe, owners, options,
        experts=experts, refused=refused, output=output, workspace_buffer=workspace_buffer, dtype="float8_e4m3fn",
        intermediate_size=intermediate_size,
    )  # fmt: skip
