"""What experts compute: the GEMMs, the activation between them and the sum over a token's slots, in fp32.

Numbers are rounded where the kernels round them.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from oxmoe.reference.numbers import (
    e4m3_numbers,
    fp8_rows,
    mxfp8_rows,
    mxfp8_weights,
    nvfp4,
    nvfp4_numbers,
    rows_e4m3,
)
from oxmoe.reference.routing import topk


def split_rows(rows: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """Splits `[..., 2I]` values that lie as w13's rows do into (gate, up)."""
    if layout == "interleaved":
        return rows[..., 0::2], rows[..., 1::2]
    first, second = rows.chunk(2, dim=-1)
    if layout == "gate_up":
        return first, second
    if layout == "up_gate":
        return second, first
    raise ValueError(f"layout: unknown {layout!r}")


def _number(value: float) -> float:
    """Returns an integer as a float, because torch takes no integers of more than 64 bits."""
    return float(value) if isinstance(value, int) else value


def activate(
    sums: Tensor,
    *,
    layout: str = "gate_up",
    activation: str = "silu",
    gated: bool | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    limit: float | None = None,
    clamp: str = "before",
    situ_beta: float | None = None,
    situ_linear_beta: float | None = None,
) -> Tensor:
    """GEMM1's epilogue on fp32 sums `[..., 2I]` (or `[..., I]` when not gated), not rounded.

    "situ" (SiTU) is b tanh(g / b) sigmoid(g) * lb tanh(u / lb), as in SGLang's SituAndMul and the SituAdaptor of
    flashinfer's CUTLASS kernels; without a situ_linear_beta u itself is the second factor.
    """
    gated = activation != "relu2" if gated is None else gated
    gate, up = split_rows(sums, layout) if gated else (sums, None)
    bound = math.inf if limit is None else _number(limit)
    alpha, beta = _number(alpha), _number(beta)
    if activation == "situ":
        if up is None:
            raise ValueError("activation: situ has gate and up rows")
        b = 4.0 if situ_beta is None else _number(situ_beta)
        if situ_linear_beta is not None:
            lb = _number(situ_linear_beta)
            up = lb * torch.tanh(up / lb)
        return b * torch.tanh(gate / b) * torch.sigmoid(gate) * up
    if activation == "silu":
        if clamp == "before":
            gate = gate.clamp(max=bound)
        gate = gate * torch.sigmoid(alpha * gate)
        if clamp == "after":
            gate = gate.clamp(max=bound)
    elif activation in ("gelu", "gelu_tanh"):
        gate = F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none")
    elif activation == "relu2":
        gate = F.relu(gate).square()
    else:
        raise ValueError(f"activation: unknown {activation!r}")
    if up is None:
        return gate
    return gate * (up.clamp(-bound, bound) + beta)


def _product(rows: Tensor, weights: Tensor, fp32_sums: bool, activation_dtype: torch.dtype | None) -> Tensor:
    """Returns rows [M, K] times weights [N, K] transposed, in fp32."""
    if activation_dtype is not None:
        codes, scales = rows_e4m3(rows)
        # NOTE: e4m3 numbers are exact in bf16.
        return _product(codes.to(rows.dtype), weights, fp32_sums, None) * scales[:, None]
    if fp32_sums or not rows.is_cuda or rows.dtype not in (torch.bfloat16, torch.float16):
        return rows.float() @ weights.float().T
    # cuBLAS has other kernels, with other sums, for fewer than 8 rows.
    padded = torch.cat([rows, rows.new_zeros(max(0, 8 - len(rows)), rows.shape[1])])
    return torch.mm(padded, weights.T, out_dtype=torch.float32)[: len(rows)]


def _scaled_product(
    rows: Tensor,
    weights: Tensor,
    scales: Tensor,
    fp32_sums: bool,
    quantised: tuple[Tensor, Tensor] | None,
    index: Tensor | slice,
) -> Tensor:
    """Multiplies rows with e4m3 weights. fp8_block weights have fp32 scales and multiply the rows `index` of
    `quantised`; MXFP8 weights have E8M0 scales and multiply `rows`."""
    if quantised is not None:
        codes, scale = quantised
        # NOTE: torch 2.9 takes single rows of bytes on CPUs, but not of e4m3.
        taken = codes.view(torch.uint8)[index].view(codes.dtype)
        return fp8_product((taken, scale[index]), weights, scales)
    return _product(mxfp8_rows(rows), mxfp8_weights(weights, scales, rows.dtype), fp32_sums, None)


def fp8_product(rows: tuple[Tensor, Tensor], weights: Tensor, scales: Tensor) -> Tensor:
    """Multiplies e4m3 rows [M, K] with scales [M, K / 128] by e4m3 weights [N, K] transposed with scales [N / 128, K
    / 128]. The fp32 products of every 128 columns are multiplied by both scales and added in fp32. Scales [N] or [N,
    1], one for each row of weights, multiply the sums; N and K are then any sizes."""
    codes, row_scales = rows
    if scales.shape[0] == weights.shape[0] and scales.numel() == weights.shape[0]:
        ones = scales.new_ones((-(-weights.shape[0] // 128), -(-weights.shape[1] // 128)))
        return fp8_product(rows, weights, ones) * scales.flatten()
    total = torch.zeros((codes.shape[0], weights.shape[0]), dtype=torch.float32, device=codes.device)
    codes, weights = e4m3_numbers(codes), e4m3_numbers(weights)
    for block in range(scales.shape[1]):
        columns = slice(128 * block, 128 * block + 128)
        product = codes[:, columns] @ weights[:, columns].T
        of_rows = scales[:, block].repeat_interleave(128)[: weights.shape[0]]
        total += product * (row_scales[:, block, None] * of_rows)
    return total


def moe(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    topk_weights: Tensor | None = None,
    topk_ids: Tensor | None = None,
    *,
    b13: Tensor | None = None,
    b2: Tensor | None = None,
    layout: str = "gate_up",
    activation: str = "silu",
    gated: bool | None = None,
    alpha: float | Tensor = 1.0,
    beta: float | Tensor = 0.0,
    limit: float | Tensor | None = None,
    clamp: str = "before",
    situ_beta: float | Tensor | None = None,
    situ_linear_beta: float | Tensor | None = None,
    router_logits: Tensor | None = None,
    top_k: int = 0,
    scoring_func: str = "softmax",
    renormalize: bool = True,
    correction_bias: Tensor | None = None,
    num_expert_group: int = 0,
    topk_group: int = 0,
    num_token_non_padded: Tensor | int | None = None,
    routed_scaling_factor: float = 1.0,
    apply_router_weight_on_input: bool = False,
    no_combine: bool = False,
    keep_router_weight: bool = False,
    ep_size: int = 1,
    ep_rank: int = 0,
    fp32_sums: bool = False,
    w13_scale: Tensor | None = None,
    w2_scale: Tensor | None = None,
    activation_dtype: torch.dtype | None = None,
    activation_scales: str | tuple[Tensor, Tensor] | None = None,
    acts: list[Tensor] | None = None,
) -> Tensor:
    """`oxmoe.moe` on experts as plain tensors. Rounds to x's dtype after the activation, after GEMM2 and at the end.

    w13 and w2 of e4m3 have block scales w13_scale and w2_scale, fp32 (ExpertWeights.fp8_block) or E8M0 (mxfp8): x and
    the activation's result are quantised before they are multiplied, with fp32 scales for each 128 columns of a row;
    activation_scales "tensor" or "token": with one for all of them or one for each row; or with these two. fp32 scales
    may be [E, N] or [E, N, 1], one for each row of an expert's weights (fp8_tensor).

    alpha, beta, limit, situ_beta and situ_linear_beta may be tensors `[E]`, one number for each expert. acts gets each
    expert's activated rows.

    Products are exact and sums fp32, of 16-bit numbers on CUDA as cuBLAS' tensor cores have them: they truncate as they
    add, which at K = 7168 moves every thirteenth result of a layer in f16. `fp32_sums`: rounded to nearest there, too.
    activation_dtype torch.float8_e4m3fn: rows of x, and rows that the activation gave and rounded, are quantised.
    """
    if router_logits is not None:
        topk_weights, topk_ids = topk(
            router_logits,
            top_k,
            scoring_func=scoring_func,
            renormalize=renormalize,
            correction_bias=correction_bias,
            num_expert_group=num_expert_group,
            topk_group=topk_group,
            num_token_non_padded=num_token_non_padded,
        )
    assert topk_weights is not None and topk_ids is not None
    slots = topk_ids.shape[1]
    experts, hidden = w2.shape[:2]
    local_ids = topk_ids.long() - ep_rank * experts if ep_size > 1 else topk_ids.long()

    acts = [] if acts is None else acts
    chosen = [torch.nonzero(local_ids == expert, as_tuple=True) for expert in range(experts)]
    given = activation_scales if isinstance(activation_scales, tuple) else (None, None)
    dynamic = activation_scales if isinstance(activation_scales, str) else None
    fp8 = w13_scale is not None and w13_scale.dtype == torch.float32
    quantised = fp8_rows(x, given[0], dynamic) if fp8 else None
    for expert, (token, slot) in enumerate(chosen):
        if not token.numel():
            # Few tokens leave most experts without a row: the weights of these are not converted.
            sums = x.new_empty((0, w13.shape[1]), dtype=torch.float32)
        elif w13_scale is None:
            sums = _product(x[token], w13[expert], fp32_sums, activation_dtype)
        else:
            sums = _scaled_product(x[token], w13[expert], w13_scale[expert], fp32_sums, quantised, token)
        if b13 is not None:
            sums = sums + b13[expert].float()
        if apply_router_weight_on_input:
            sums = sums * topk_weights[token, slot, None].float()
        of_layer = {"alpha": alpha, "beta": beta, "limit": limit}
        of_layer |= {"situ_beta": situ_beta, "situ_linear_beta": situ_linear_beta}
        numbers: dict[str, Any] = {
            name: value[expert].item() if isinstance(value, Tensor) else value for name, value in of_layer.items()
        }
        act = activate(sums, layout=layout, activation=activation, gated=gated, clamp=clamp, **numbers)
        acts.append(act.to(x.dtype))

    quantised = fp8_rows(torch.cat(acts), given[1], dynamic) if fp8 else None
    rows = x.new_zeros((x.shape[0], slots, hidden))
    first = 0
    for expert, (token, slot) in enumerate(chosen):
        if token.numel() == 0:
            continue
        places = slice(first, first + token.numel())
        first = places.stop
        if w2_scale is None:
            sums = _product(acts[expert], w2[expert], fp32_sums, activation_dtype)
        else:
            sums = _scaled_product(acts[expert], w2[expert], w2_scale[expert], fp32_sums, quantised, places)
        if b2 is not None:
            sums = sums + b2[expert].float()
        rows[token, slot] = sums.to(x.dtype)

    present = ((local_ids >= 0) & (local_ids < experts))[..., None]
    weighted = not apply_router_weight_on_input and (not no_combine or keep_router_weight)
    factors = (
        topk_weights.float()[..., None] if weighted else torch.ones_like(topk_weights, dtype=torch.float32)[..., None]
    )
    # NOTE: a skipped slot contributes nothing whatever its weight is, NaN included.
    terms = torch.where(present, factors * rows.float(), 0.0)
    if no_combine:
        return (float(routed_scaling_factor) * terms).to(x.dtype)
    total = torch.zeros_like(terms[:, 0]) if slots else x.new_zeros((x.shape[0], hidden), dtype=torch.float32)
    for slot_index in range(slots):
        total = total + terms[:, slot_index]
    return (float(routed_scaling_factor) * total).to(x.dtype)


def nvfp4_expert(
    rows: Tensor,
    w13: Tensor,
    w2: Tensor,
    factors: tuple[Tensor, Tensor],
    roundings: tuple[float, float] | None = None,
    *,
    b13: Tensor | None = None,
    b2: Tensor | None = None,
    **activation: Any,
) -> Tensor:
    """Computes one expert of ExpertWeights.nvfp4 on rows [M, H]. w13 and w2 are fp32 numbers (nvfp4_numbers). factors
    multiply the sums. roundings multiply rows before they are rounded to NVFP4."""

    def product(rows: Tensor, weights: Tensor, stage: int, bias: Tensor | None) -> Tensor:
        numbers = rows.float()
        if roundings is not None:
            codes, scales = nvfp4(rows, roundings[stage])
            numbers = nvfp4_numbers(codes[..., 0::2] | codes[..., 1::2] << 4, scales)
        sums = (numbers @ weights.T) * factors[stage]
        return sums if bias is None else sums + bias.float()

    hidden = activate(product(rows, w13, 0, b13), **activation).to(rows.dtype)
    return product(hidden, w2, 1, b2).to(rows.dtype)
