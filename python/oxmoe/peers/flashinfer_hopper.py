"""flashinfer's layers that exist for Hopper only: `mono_moe` (fp8 blocks, few tokens) and `cute_dsl_fused_moe_bf16`.

Source: flashinfer/fused_moe/monomoe.py and cute_dsl/sm90_fused_moe.py of 0.7.2 and 0.7.4.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from oxmoe import _oxmoe
from oxmoe._oxmoe import ExpertWeights
from oxmoe.functions import moe, topk
from oxmoe.operands import WRONG_TYPES, check_tensor, name_argument
from oxmoe.peers.expert_ranks import by_rank, check_part
from oxmoe.peers.flashinfer_cutlass_formats import FP32_MAX, SWIGLU, activation_of, situ_options
from oxmoe.peers.kept import Cache

if TYPE_CHECKING:
    from torch import Tensor

_UP_GATE_ROWS = 32  # rows of up that lie before as many rows of gate
_ACTIVATIONS: dict[str, tuple[str, bool]] = {
    "Swiglu": ("silu", True),
    "GegluTanh": ("gelu_tanh", True),
    "Relu2": ("relu2", False),
}
# w1_weight of `cute_dsl_fused_moe_bf16` -> the copy with its rows in order.
cache = Cache()


def has_monomoe() -> bool:
    """Whether `mono_moe` can be called. This is always True."""
    return True


def get_scratchpad_size_bytes() -> int:
    """Returns 0, the size of the scratchpad that `mono_moe` takes and does not use."""
    return 0


def alloc_scratchpad(device: Any) -> Tensor:
    """Returns an empty uint8 tensor as the scratchpad for `mono_moe`, which does not use it."""
    import torch

    return torch.zeros(get_scratchpad_size_bytes(), dtype=torch.uint8, device=device)


def mono_moe(
    activations_in: Tensor,
    router_logits: Tensor,
    expert_weights_up: Tensor | None,
    expert_scales_up: Tensor | None,
    expert_weights_down: Tensor | None,
    expert_scales_down: Tensor | None,
    top_k: int,
    scoring_func: str = "softmax",
    renormalize: bool = True,
    out: Tensor | None = None,
    scratchpad: Tensor | None = None,
    interleave_up: bool = True,
    *,
    weights: ExpertWeights | None = None,
) -> Tensor:
    """flashinfer's call (0.7.2 and 0.7.4). It runs the layer on activations_in bf16 [M, K] from router_logits [M, E],
    with fp8 experts.

    expert_weights_up is float8_e4m3fn [E, 2N, K] with rows [gate; up], and expert_weights_down is [E, K, N]. Scales
    are fp32, for blocks of 128 x 128. The call takes every E, N, K and M that `moe` takes; flashinfer has E 256, N
    512, K 2048 and up to 8 tokens. The result has the same bits in every run. The weights are described at each
    call. weights: `ExpertWeights.fp8_block` of them, made once, in their place; with it a call of few tokens is one
    launch.

    scratchpad has no meaning here. interleave_up=False, which says that rows lie as flashinfer's kernel reads them,
    is a NotImplementedError. Pass the plain rows.
    """
    try:
        if not interleave_up:
            raise NotImplementedError(
                "interleave_up: no kernel for rows that interleave_for_tma_wgmma_up has moved; pass the plain "
                "expert_weights_up"
            )
        if scoring_func not in ("softmax", "sigmoid"):
            raise ValueError(f"scoring_func: expected 'softmax' or 'sigmoid', got {scoring_func!r}")
        routing: dict[str, Any] = {"top_k": top_k, "scoring_func": scoring_func, "renormalize": renormalize}
        if weights is not None:
            return moe(activations_in, weights, router_logits=router_logits, out=out, **routing)
        blocks = {
            "expert_weights_up": expert_weights_up,
            "expert_scales_up": expert_scales_up,
            "expert_weights_down": expert_weights_down,
            "expert_scales_down": expert_scales_down,
        }
        for name, tensor in blocks.items():
            if tensor is None:
                raise ValueError(f"{name}: needed where weights is None")
            check_tensor(name, tensor)
        assert expert_weights_up is not None and expert_weights_down is not None
        gates, ids = topk(router_logits, **routing)
        scales = {"w13_scale": expert_scales_up, "w2_scale": expert_scales_down}
        return _oxmoe.moe_tensors(
            activations_in, expert_weights_up, expert_weights_down, gates, ids, format="fp8_block", out=out, **scales
        )
    except WRONG_TYPES as error:
        name_argument(error, mono_moe, locals())
        raise


def cute_dsl_fused_moe_bf16(
    x: Tensor,
    token_selected_experts: Tensor,
    token_final_scales: Tensor,
    w1_weight: Tensor,
    w2_weight: Tensor,
    num_experts: int,
    top_k: int,
    num_local_experts: int | None = None,
    local_expert_offset: int = 0,
    use_fused_finalize: bool = True,
    moe_output: Tensor | None = None,
    enable_pdl: bool = True,
    activation_type: Any = SWIGLU,
    swiglu_alpha: float = 1.0,
    swiglu_beta: float = 0.0,
    swiglu_limit: float = FP32_MAX,
    situ_beta: float | None = None,
    situ_linear_beta: float | None = None,
    *,
    intermediate_buffer: Tensor | None = None,
    tactic: Any = None,
) -> Tensor:
    """flashinfer's call (0.7.2 and 0.7.4). It runs the layer on x bf16 or f16 [T, H] with given global ids int32
    [T, top_k] and fp32 gates.

    w1_weight is [El, 2I, H], with 32 rows of up and the 32 rows of gate that belong to them in turn
    (interleave_up_gate_sm90); with Relu2 it is [El, I, H]. w2_weight is [El, H, I]. The first call with w1_weight
    puts its rows in order and keeps that second copy while w1_weight lives (`oxmoe.peers.flashinfer_hopper.cache`).
    A first call cannot be captured in a CUDA graph. This rank holds the experts local_expert_offset to
    local_expert_offset + num_local_experts.

    The call is deterministic whatever use_fused_finalize says. enable_pdl, intermediate_buffer and tactic have no
    meaning. situ_beta selects SiTU, with activation_type Swiglu as in flashinfer; situ_linear_beta bounds up, which is
    not bounded without it. Other activations than Swiglu, GegluTanh and Relu2 are a NotImplementedError.
    """
    try:
        name = activation_of(activation_type)
        if name not in _ACTIVATIONS:
            raise NotImplementedError(f"activation_type: no kernel for {name!r}; served are {', '.join(_ACTIVATIONS)}")
        activation, gated = _ACTIVATIONS[name]
        check_tensor("x", x)
        check_tensor("w1_weight", w1_weight, "experts", "rows", "K")
        check_tensor("w2_weight", w2_weight, "experts", "rows", "K")
        check_tensor("token_selected_experts", token_selected_experts, "T", "top_k")
        local = num_experts if num_local_experts is None else num_local_experts
        check_part(num_experts, local_expert_offset, local, "num_local_experts")
        if w1_weight.shape[0] != local:
            raise ValueError(f'w1_weight: dimension 0 "experts": expected {local}, got {w1_weight.shape[0]}')
        if token_selected_experts.shape[-1] != top_k:
            raise ValueError(
                f'token_selected_experts: dimension 1 "top_k": expected {top_k}, got {token_selected_experts.shape[-1]}'
            )
        options: dict[str, Any] = {"activation": activation, "gated": gated}
        situ = situ_options(name, situ_beta, situ_linear_beta, (swiglu_alpha, swiglu_beta, swiglu_limit))
        if situ:
            options |= {"layout": "up_gate", **situ}
        elif gated:
            options |= {"layout": "up_gate", "alpha": swiglu_alpha, "beta": swiglu_beta}
            if swiglu_limit < FP32_MAX:
                options["limit"] = swiglu_limit
        w13: Any = cache.get((w1_weight,), (), ("up_gate",), lambda: _in_order(w1_weight)) if gated else w1_weight
        ids, ranks = by_rank(token_selected_experts, num_experts, local_expert_offset, local)
        operands = (x, w13, w2_weight, token_final_scales, ids)
        return _oxmoe.moe_tensors(*operands, out=moe_output, **options | ranks)
    except WRONG_TYPES as error:
        name_argument(error, cute_dsl_fused_moe_bf16, locals())
        raise


class CuteDslBf16MoEWrapper:
    """flashinfer's class (0.7.2 and 0.7.4): `cute_dsl_fused_moe_bf16` with its numbers kept. enable_pdl and
    use_fused_finalize have no meaning."""

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        intermediate_size: int,
        num_local_experts: int | None = None,
        local_expert_offset: int = 0,
        output_dtype: Any = None,
        enable_pdl: bool = True,
        use_fused_finalize: bool = True,
        activation_type: Any = SWIGLU,
        swiglu_alpha: float = 1.0,
        swiglu_beta: float = 0.0,
        swiglu_limit: float = FP32_MAX,
        situ_beta: float | None = None,
        situ_linear_beta: float | None = None,
    ) -> None:
        """output_dtype: bf16 (the default) or f16, also of x and the weights."""
        import torch

        local = num_experts if num_local_experts is None else num_local_experts
        check_part(num_experts, local_expert_offset, local, "num_local_experts")
        name = activation_of(activation_type)
        if name not in _ACTIVATIONS:
            raise NotImplementedError(f"activation_type: no kernel for {name!r}; served are {', '.join(_ACTIVATIONS)}")
        situ_options(name, situ_beta, situ_linear_beta, (swiglu_alpha, swiglu_beta, swiglu_limit))
        self.num_experts, self.top_k = num_experts, top_k
        self.hidden_size, self.intermediate_size = hidden_size, intermediate_size
        self.num_local_experts, self.local_expert_offset = local, local_expert_offset
        self.output_dtype = torch.bfloat16 if output_dtype is None else output_dtype
        self.enable_pdl, self.use_fused_finalize = enable_pdl, use_fused_finalize
        self.activation_type = activation_type
        self.swiglu_alpha, self.swiglu_beta, self.swiglu_limit = swiglu_alpha, swiglu_beta, swiglu_limit
        self.situ_beta, self.situ_linear_beta = situ_beta, situ_linear_beta

    def run(
        self,
        x: Tensor,
        token_selected_experts: Tensor,
        token_final_scales: Tensor,
        w1_weight: Tensor,
        w2_weight: Tensor,
        tactic: Any = None,
        moe_output: Tensor | None = None,
        intermediate_buffer: Tensor | None = None,
    ) -> Tensor:
        """flashinfer's method. w1_weight and w2_weight are as in `cute_dsl_fused_moe_bf16`, and must have the sizes of
        this object."""
        check_tensor("x", x, "T", "hidden")
        if x.dtype != self.output_dtype:
            raise ValueError(f"x: expected dtype {self.output_dtype} (output_dtype), got {x.dtype}")
        rows = self.intermediate_size * (2 if _ACTIVATIONS[activation_of(self.activation_type)][1] else 1)
        shapes = {
            "w1_weight": (w1_weight, (self.num_local_experts, rows, self.hidden_size)),
            "w2_weight": (w2_weight, (self.num_local_experts, self.hidden_size, self.intermediate_size)),
        }
        for name, (weights, shape) in shapes.items():
            check_tensor(name, weights)
            if tuple(weights.shape) != shape:
                raise ValueError(f"{name}: expected shape {shape}, got {tuple(weights.shape)}")
        return cute_dsl_fused_moe_bf16(
            x,
            token_selected_experts,
            token_final_scales,
            w1_weight,
            w2_weight,
            num_experts=self.num_experts,
            top_k=self.top_k,
            num_local_experts=self.num_local_experts,
            local_expert_offset=self.local_expert_offset,
            moe_output=moe_output,
            activation_type=self.activation_type,
            swiglu_alpha=self.swiglu_alpha,
            swiglu_beta=self.swiglu_beta,
            swiglu_limit=self.swiglu_limit,
            situ_beta=self.situ_beta,
            situ_linear_beta=self.situ_linear_beta,
            intermediate_buffer=intermediate_buffer,
            tactic=tactic,
        )


def _in_order(w1_weight: Tensor) -> Any:
    """Converts rows in turn to [up; gate]."""
    from oxmoe.formats.nvfp4 import deinterleave_w13_halves

    return deinterleave_w13_halves(w1_weight, _UP_GATE_ROWS)
