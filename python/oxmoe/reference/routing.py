"""What routing does: experts for every token, slots in the order of experts, and blocks of rows."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK_SIZES = (16, 32, 64, 128)


def scores(router_logits: Tensor, scoring_func: str) -> Tensor:
    """Returns the fp32 score of every expert; for softmax_topk the logit, which becomes a weight only once the choice
    is made."""
    # Scores are computed in fp64: the vector and the scalar code of torch's float functions give equal logits other
    # scores.
    logits = router_logits.double()
    if scoring_func == "softmax":
        return torch.softmax(logits, dim=-1).float()
    if scoring_func == "sigmoid":
        return torch.sigmoid(logits).float()
    if scoring_func == "sqrtsoftplus":
        return F.softplus(logits).sqrt().float()
    if scoring_func in ("softmax_topk", "identity"):
        return router_logits.float()
    raise ValueError(f"scoring_func: unknown {scoring_func!r}")


def best(values: Tensor, count: int, among: Tensor | None = None) -> Tensor:
    """Returns column numbers of the largest values, best first, ties to the lower number; NaN is the largest. `among`
    is a mask: columns outside of it come after all others."""
    order = torch.sort(values, dim=-1, descending=True, stable=True).indices
    if among is not None:
        last = (~among).gather(-1, order).to(torch.uint8)
        order = order.gather(-1, torch.sort(last, dim=-1, stable=True).indices)
    return order[:, :count]


def choice_values(
    router_logits: Tensor,
    *,
    scoring_func: str = "softmax",
    correction_bias: Tensor | None = None,
    num_expert_group: int = 0,
    topk_group: int = 0,
    group_score: str | None = None,
) -> Tensor:
    """Returns the values that order the choice: the logits, or score + bias with experts of losing groups at -inf."""
    choice, kept = _choice(router_logits, scoring_func, correction_bias, (num_expert_group, topk_group, group_score))
    return choice if kept is None else torch.where(kept, choice, -math.inf)


def _choice(
    router_logits: Tensor, scoring_func: str, correction_bias: Tensor | None, groups: tuple[int, int, str | None]
) -> tuple[Tensor, Tensor | None]:
    """Returns (the values that order the choice, a mask of the experts that may be chosen; None: all)."""
    count, kept, group_score = groups
    grouped = kept < count
    if correction_bias is None and not grouped:
        return router_logits.float(), None
    choice = scores(router_logits, scoring_func)
    if correction_bias is not None:
        choice = choice + correction_bias.float()
    if not grouped:
        return choice, None
    group_score = group_score or ("max" if correction_bias is None else "top2")
    tokens, experts = choice.shape
    of_group = torch.sort(choice.view(tokens, count, experts // count), dim=-1, descending=True).values
    of_group = of_group[..., 0] if group_score == "max" else of_group[..., 0] + of_group[..., 1]
    keep = torch.zeros_like(of_group, dtype=torch.bool).scatter_(1, best(of_group, kept), True)
    return choice, keep.repeat_interleave(experts // count, dim=1)


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
    groups = (num_expert_group, topk_group, group_score)
    choice, kept = _choice(router_logits, scoring_func, correction_bias, groups)
    ids = best(choice, top_k - num_fused_shared_experts, kept)
    if scoring_func == "softmax_topk":
        weights = torch.softmax(router_logits.float().gather(1, ids), dim=-1)
    else:
        weights = scores(router_logits, scoring_func).gather(1, ids)
        if renormalize:
            # A softmax over all experts that is renormalised equals a softmax over the chosen ones, whose sum cannot
            # vanish.
            over_chosen = scoring_func == "softmax" and correction_bias is None and kept is None
            weights = weights / (weights.sum(-1, keepdim=True) + (0.0 if over_chosen else 1e-20))
    if order == "id":
        ids, by_id = ids.sort(dim=1)
        weights = weights.gather(1, by_id)
    if num_fused_shared_experts:
        shared = torch.arange(experts, experts + num_fused_shared_experts, device=ids.device).expand(tokens, -1)
        shared_weights = torch.full(shared.shape, 1.0 / routed_scaling_factor, dtype=torch.float32, device=ids.device)
        ids, weights = torch.cat([ids, shared], dim=1), torch.cat([weights, shared_weights], dim=1)
    if apply_routed_scaling_factor_on_output:
        weights = weights * float(routed_scaling_factor)
    if num_token_non_padded is not None:
        padded = torch.arange(tokens, device=ids.device)[:, None] >= num_token_non_padded
        ids, weights = ids.masked_fill(padded, -1), weights.masked_fill(padded, 0.0)
    return weights, ids.int()


def sort_by_expert(
    topk_ids: Tensor, num_experts: int, *, first_expert: int | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`oxmoe.sort_by_expert`: (histogram, offsets, place_of_slot, slot_of_place), int32, stable in the slot number."""
    ids = topk_ids.reshape(-1).long() - (first_expert or 0)
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
    """Returns the length of a schedule that holds any split of num_rows rows over num_experts experts in blocks of
    16."""
    if num_rows <= num_experts:
        return num_rows
    return num_experts - 1 - ((num_experts - num_rows - 1) // min(BLOCK_SIZES))


def block_tables(histogram: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Returns (block_offs_data [4, E + 1], block_schedule_data [4, max_blocks]). An entry of the schedule is block <<
    16 | expert; -1 fills the rest."""
    experts = histogram.numel()
    offsets = torch.zeros((len(BLOCK_SIZES), experts + 1), dtype=torch.int32, device="cpu")
    schedule = torch.full((len(BLOCK_SIZES), max_blocks(experts, num_rows)), -1, dtype=torch.int32, device="cpu")
    counts = histogram.tolist()
    for row, size in enumerate(BLOCK_SIZES):
        entries = [block << 16 | expert for expert, count in enumerate(counts) for block in range(-(-count // size))]
        schedule[row, : len(entries)] = torch.tensor(entries, dtype=torch.int32, device="cpu")
        blocks = torch.tensor([-(-count // size) for count in counts], device="cpu")
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
    """Returns the seven tables of triton_kernels' routing, in the order of `_oxmoe.routing_tables`."""
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

    # NOTE: simulated_ep keeps the first experts // simulated_ep experts; the ids that a row keeps move to its front.
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
