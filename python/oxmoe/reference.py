"""What every operation computes, in plain torch: fp32 sums and the rounding points of the kernels, slow and obvious.

Used by the tests on CPU and on GPU. Loops run over experts or slots; nothing here is tuned.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK_SIZES = (16, 32, 64, 128)


# Experts


def split_rows(rows: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """(gate, up) of `[..., 2I]` values that lie as w13's rows do."""
    if layout == "interleaved":
        return rows[..., 0::2], rows[..., 1::2]
    first, second = rows.chunk(2, dim=-1)
    if layout == "gate_up":
        return first, second
    if layout == "up_gate":
        return second, first
    raise ValueError(f"layout: unknown {layout!r}")


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
) -> Tensor:
    """GEMM1's epilogue on fp32 sums `[..., 2I]` (or `[..., I]` when not gated), not rounded."""
    gated = activation != "relu2" if gated is None else gated
    gate, up = split_rows(sums, layout) if gated else (sums, None)
    bound = math.inf if limit is None else limit
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
    """rows [M, K] times weights [N, K] transposed, in fp32."""
    if activation_dtype is not None:
        codes, scales = rows_e4m3(rows)
        # NOTE: e4m3 numbers are exact in bf16.
        return _product(codes.to(rows.dtype), weights, fp32_sums, None) * scales[:, None]
    if fp32_sums or not rows.is_cuda or rows.dtype == torch.float32:
        return rows.float() @ weights.float().T
    # cuBLAS has other kernels, with other sums, for a few rows.
    padded = torch.cat([rows, rows.new_zeros(max(0, 8 - len(rows)), rows.shape[1])])
    return torch.mm(padded, weights.T, out_dtype=torch.float32)[: len(rows)]


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
) -> Tensor:
    """`oxmoe.moe` on experts as plain tensors. Rounds to x's dtype after the activation, after GEMM2 and at the end.

    w13 and w2 of e4m3 have block scales w13_scale and w2_scale (ExpertWeights.fp8_block): x and the activation's result
    are quantised before they are multiplied.

    alpha, beta and limit may be tensors `[E]`, one number for each expert.

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

    rows = x.new_zeros((x.shape[0], slots, hidden))
    for expert in range(experts):
        token, slot = torch.nonzero(local_ids == expert, as_tuple=True)
        if token.numel() == 0:
            continue
        if w13_scale is None:
            sums = _product(x[token], w13[expert], fp32_sums, activation_dtype)
        else:
            sums = fp8_product(x[token], w13[expert], w13_scale[expert])
        if b13 is not None:
            sums = sums + b13[expert].float()
        if apply_router_weight_on_input:
            sums = sums * topk_weights[token, slot, None].float()
        swiglu: dict[str, Any] = {
            name: value[expert].item() if isinstance(value, Tensor) else value
            for name, value in (("alpha", alpha), ("beta", beta), ("limit", limit))
        }
        act = activate(sums, layout=layout, activation=activation, gated=gated, clamp=clamp, **swiglu).to(x.dtype)
        if w2_scale is None:
            sums = _product(act, w2[expert], fp32_sums, activation_dtype)
        else:
            sums = fp8_product(act, w2[expert], w2_scale[expert])
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
        return (routed_scaling_factor * terms).to(x.dtype)
    total = torch.zeros_like(terms[:, 0]) if slots else x.new_zeros((x.shape[0], hidden), dtype=torch.float32)
    for slot_index in range(slots):
        total = total + terms[:, slot_index]
    return (routed_scaling_factor * total).to(x.dtype)


# Formats

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def mxfp4_weights(codes: Tensor, scales: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Weights `[..., K]` of uint8 codes `[..., K / 2]` (even column: low nibble) and E8M0 bytes `[..., K / 32]`."""
    bytes_, exponents = codes.view(torch.uint8).int(), scales.view(torch.uint8).int()
    values = torch.tensor(_E2M1, device=codes.device)[torch.stack([bytes_ & 15, bytes_ >> 4], dim=-1)].flatten(-2)
    # NOTE: fp64 holds every product: what is rounded is rounded once.
    factors = torch.where(exponents == 255, math.nan, torch.exp2((exponents - 127).double()))
    most = torch.finfo(dtype).max
    return (values.double() * factors.repeat_interleave(32, dim=-1)).clamp(-most, most).to(dtype)


def mxfp4_window(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and E8M0 bytes of one matrix as kernels of e4m3 activations have them.

    Bytes more than 11 below the largest (255 aside, and at least 7) are brought up to that, and the numbers of their
    blocks rounded to e2m1 times the new scale, ties to even.
    """
    bytes_, exponents = codes.view(torch.uint8).int(), scales.view(torch.uint8).int()
    largest = torch.where(exponents == 255, 0, exponents).max().clamp(min=7)
    least = (largest - 11).clamp(min=0)
    raised = torch.maximum(exponents, least)
    pairs = torch.stack([bytes_ & 15, bytes_ >> 4], dim=-1)
    magnitudes = torch.tensor(_E2M1[:8], dtype=torch.float64, device=codes.device)
    numbers = magnitudes[pairs & 7] * torch.exp2((exponents - raised).double()).repeat_interleave(16, -1)[..., None]
    # The lower code is even where the border is 0.25, 1.25, 2.5 or 5, and takes it.
    rounded = sum((numbers > border).int() for border in (0.25, 1.25, 2.5, 5.0)) + sum(
        (numbers >= border).int() for border in (0.75, 1.75, 3.5)
    )
    pairs = pairs & 8 | rounded
    return (pairs[..., 0] | pairs[..., 1] << 4).to(torch.uint8), raised.to(torch.uint8)


def rows_e4m3(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., K] in e4m3 with one scale a row: (codes float8_e4m3fn [..., K], scales fp32 [...])."""
    # A tensor: a number's reciprocal would be multiplied with on CUDA.
    scales = x.abs().amax(-1).float() / torch.tensor(448.0, device=x.device)
    scales = torch.where(scales < torch.finfo(torch.float32).tiny, 1.0, scales)
    codes = (x.float() * (1.0 / scales)[..., None]).clamp(-448.0, 448.0)
    return codes.to(torch.float8_e4m3fn), scales


def fp8_groups(x: Tensor, group: int = 128, eps: float = 1e-10, powers: bool = False) -> tuple[Tensor, Tensor]:
    """(e4m3 codes [..., K], fp32 scales [..., K / group]): amax / 448, or the next power of two; NaN counts for none"""
    groups = x.float().unflatten(-1, (-1, group))
    amax = groups.abs().nan_to_num(nan=0.0, posinf=math.inf).amax(-1).clamp(min=eps)
    scales = amax / torch.tensor(448.0, device=x.device)
    if powers:
        mantissa, exponent = torch.frexp(scales)
        scales = torch.ldexp(torch.ones_like(scales), exponent - (mantissa == 0.5).int())
    codes = (groups * (1.0 / scales)[..., None]).clamp(-448.0, 448.0).flatten(-2)
    return codes.to(torch.float8_e4m3fn), scales


def fp8_product(rows: Tensor, weights: Tensor, scales: Tensor) -> Tensor:
    """rows [M, K], quantised, times e4m3 weights [N, K] transposed with scales [N / 128, K / 128]: the fp32 products of
    every 128 columns are added in fp32, times both scales."""
    codes, row_scales = fp8_groups(rows)
    total = torch.zeros((rows.shape[0], weights.shape[0]), device=rows.device)
    for block in range(weights.shape[1] // 128):
        columns = slice(128 * block, 128 * block + 128)
        product = codes[:, columns].float() @ weights[:, columns].float().T
        total += product * (row_scales[:, block, None] * scales[:, block].repeat_interleave(128))
    return total


# Top-k


def scores(router_logits: Tensor, scoring_func: str) -> Tensor:
    """fp32 score of every expert; for softmax_topk the logit, which becomes a weight only once the choice is made."""
    logits = router_logits.float()
    if scoring_func == "softmax":
        return torch.softmax(logits, dim=-1)
    if scoring_func == "sigmoid":
        return torch.sigmoid(logits)
    if scoring_func == "sqrtsoftplus":
        return F.softplus(logits).sqrt()
    if scoring_func in ("softmax_topk", "identity"):
        return logits
    raise ValueError(f"scoring_func: unknown {scoring_func!r}")


def best(values: Tensor, count: int) -> Tensor:
    """Column numbers of the largest values, best first, ties to the lower number."""
    return torch.sort(values, dim=-1, descending=True, stable=True).indices[:, :count]


def choice_values(
    router_logits: Tensor,
    *,
    scoring_func: str = "softmax",
    correction_bias: Tensor | None = None,
    num_expert_group: int = 0,
    topk_group: int = 0,
    group_score: str | None = None,
) -> Tensor:
    """What the choice orders by: the logit, or score + bias with experts of losing groups at -inf."""
    if correction_bias is None and num_expert_group == 0:
        return router_logits.float()
    choice = scores(router_logits, scoring_func)
    if correction_bias is not None:
        choice = choice + correction_bias.float()
    if num_expert_group == 0:
        return choice
    group_score = group_score or ("max" if correction_bias is None else "top2")
    tokens, experts = choice.shape
    grouped = choice.view(tokens, num_expert_group, experts // num_expert_group)
    of_group = grouped.amax(-1) if group_score == "max" else grouped.topk(2, dim=-1).values.sum(-1)
    keep = torch.zeros_like(of_group, dtype=torch.bool).scatter_(1, best(of_group, topk_group), True)
    return torch.where(keep[..., None], grouped, -math.inf).reshape(tokens, experts)


def topk(
    router_logits: Tensor,
    top_k: int,
    *,
    scoring_func: str = "softmax",
    renormalize: bool = True,
    correction_bias: Tensor | None = None,
    num_expert_group: int = 0,
    topk_group: int = 0,
    group_score: str | None = None,
    num_fused_shared_experts: int = 0,
    routed_scaling_factor: float = 1.0,
    apply_routed_scaling_factor_on_output: bool = False,
    num_token_non_padded: Tensor | int | None = None,
    order: str = "weight",
) -> tuple[Tensor, Tensor]:
    """`oxmoe.topk`: (weights fp32, ids int32), best first or by id, ties to the lower id, shared experts last."""
    tokens, experts = router_logits.shape
    choice = choice_values(
        router_logits,
        scoring_func=scoring_func,
        correction_bias=correction_bias,
        num_expert_group=num_expert_group,
        topk_group=topk_group,
        group_score=group_score,
    )
    ids = best(choice, top_k - num_fused_shared_experts)
    weights = scores(router_logits, scoring_func).gather(1, ids)
    if scoring_func == "softmax_topk":
        weights = torch.softmax(weights, dim=-1)
    if renormalize:
        may_vanish = scoring_func not in ("softmax", "softmax_topk")
        weights = weights / (weights.sum(-1, keepdim=True) + (1e-20 if may_vanish else 0.0))
    if order == "id":
        ids, by_id = ids.sort(dim=1)
        weights = weights.gather(1, by_id)
    if num_fused_shared_experts:
        shared = torch.arange(experts, experts + num_fused_shared_experts, device=ids.device).expand(tokens, -1)
        shared_weights = torch.full(shared.shape, 1.0 / routed_scaling_factor, device=ids.device)
        ids, weights = torch.cat([ids, shared], dim=1), torch.cat([weights, shared_weights], dim=1)
    if apply_routed_scaling_factor_on_output:
        weights = weights * routed_scaling_factor
    if num_token_non_padded is not None:
        padded = torch.arange(tokens, device=ids.device)[:, None] >= num_token_non_padded
        ids, weights = ids.masked_fill(padded, -1), weights.masked_fill(padded, 0.0)
    return weights, ids.int()


# Sort and schedule


def sort_by_expert(
    topk_ids: Tensor, num_experts: int, *, first_expert: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`oxmoe.sort_by_expert`: (histogram, offsets, place_of_slot, slot_of_place), int32, stable in the slot number."""
    ids = topk_ids.reshape(-1).long() - first_expert
    local = (ids >= 0) & (ids < num_experts)
    histogram = torch.bincount(ids[local], minlength=num_experts)
    offsets = F.pad(histogram.cumsum(0), (1, 0))
    placed = int(offsets[-1])
    slots = torch.argsort(torch.where(local, ids, num_experts), stable=True)[:placed]
    slot_of_place = torch.full_like(ids, -1)
    slot_of_place[:placed] = slots
    place_of_slot = torch.full_like(ids, -1)
    place_of_slot[slots] = torch.arange(placed, device=ids.device)
    return histogram.int(), offsets.int(), place_of_slot.int(), slot_of_place.int()


def max_blocks(num_experts: int, num_rows: int) -> int:
    """Length of a schedule that holds any split of num_rows rows over num_experts experts in blocks of 16."""
    if num_rows <= num_experts:
        return num_rows
    return num_experts - 1 - ((num_experts - num_rows - 1) // min(BLOCK_SIZES))


def block_tables(histogram: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """(block_offs_data [4, E + 1], block_schedule_data [4, max_blocks]); block << 16 | expert, -1 after the last."""
    experts = histogram.numel()
    offsets = torch.zeros((len(BLOCK_SIZES), experts + 1), dtype=torch.int32)
    schedule = torch.full((len(BLOCK_SIZES), max_blocks(experts, num_rows)), -1, dtype=torch.int32)
    counts = histogram.tolist()
    for row, size in enumerate(BLOCK_SIZES):
        entries = [block << 16 | expert for expert, count in enumerate(counts) for block in range(-(-count // size))]
        schedule[row, : len(entries)] = torch.tensor(entries, dtype=torch.int32)
        blocks = torch.tensor([-(-count // size) for count in counts])
        offsets[row, 1:] = blocks.cumsum(0)
    return offsets.to(histogram.device), schedule.to(histogram.device)


def routing_tables(
    logits: Tensor,
    n_expts_act: int,
    *,
    sm_first: bool = False,
    expt_indx: Tensor | None = None,
    simulated_ep: int = 1,
    n_rows: Tensor | int | None = None,
) -> tuple[Tensor, ...]:
    """The seven tables of triton_kernels' routing, in the order of `_oxmoe.routing_tables`."""
    rows, experts = logits.shape
    values = torch.softmax(logits, dim=-1) if sm_first else logits
    # NOTE: triton_kernels orders a row's chosen experts by id.
    ids = best(values.float(), n_expts_act).sort(dim=1).values if expt_indx is None else expt_indx.long()
    gates = values.float().gather(1, ids)
    if not sm_first:
        gates = torch.softmax(gates, dim=-1)
    if n_rows is not None:
        padded = torch.arange(rows, device=ids.device)[:, None] >= n_rows
        ids = ids.masked_fill(padded, -1)

    # NOTE: simulated_ep keeps the first experts // simulated_ep experts; what a row keeps moves to its front.
    experts //= simulated_ep
    gone = (ids < 0) | (ids >= experts)
    order = torch.argsort(gone.int(), dim=1, stable=True)
    ids = ids.masked_fill(gone, -1).gather(1, order)
    gates = gates.gather(1, order)

    histogram, offsets, place_of_slot, slot_of_place = sort_by_expert(ids, experts)
    gate_scal = torch.zeros_like(slot_of_place, dtype=logits.dtype)
    placed = slot_of_place >= 0
    gate_scal[placed] = gates.reshape(-1)[slot_of_place[placed].long()].to(logits.dtype)
    return gate_scal, histogram, offsets, slot_of_place, place_of_slot, *block_tables(histogram, ids.numel())
