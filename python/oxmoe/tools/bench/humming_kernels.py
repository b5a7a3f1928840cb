"""Triton kernels around Humming's GEMMs, in place of sgl_kernel's moe_align_block_size and of SGLang's weighted sum.

Triton is imported here, so only a peer that runs imports this module. Kernels annotate nothing but tl.constexpr: Triton
takes any other annotation as a global variable of the kernel, and refuses it.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _align(
    slot_of_place,
    offsets,
    sorted_ids,
    expert_ids,
    padded,
    slots,
    experts,
    BLOCK: tl.constexpr,
    BLOCK2: tl.constexpr,
    EXPERTS2: tl.constexpr,
) -> None:
    """Runs one program for each possible block of rows of one expert. Places behind an expert's last slot get
    `slots`."""
    block = tl.program_id(0)
    expert = tl.arange(0, EXPERTS2)
    real = expert < experts
    first = tl.load(offsets + expert, mask=real, other=0)
    last = tl.load(offsets + expert + 1, mask=real, other=0)
    blocks = (last - first + BLOCK - 1) // BLOCK
    ends = tl.cumsum(blocks, 0)
    total = tl.sum(blocks, 0)
    if block == 0:
        tl.store(padded, total * BLOCK)
    if block < total:
        mine = tl.sum((ends <= block).to(tl.int32), 0)
        here = expert == mine
        row = tl.sum(tl.where(here, first, 0), 0) + (block - tl.sum(tl.where(here, ends - blocks, 0), 0)) * BLOCK
        end = tl.sum(tl.where(here, last, 0), 0)
        lane = tl.arange(0, BLOCK2)
        inside = (lane < BLOCK) & (row + lane < end)
        slot = tl.load(slot_of_place + row + lane, mask=inside, other=0)
        tl.store(sorted_ids + block * BLOCK + lane, tl.where(inside, slot, slots), mask=lane < BLOCK)
        tl.store(expert_ids + block, mine)


@triton.jit
def _sum(
    rows, weights, places, out, TOP_K: tl.constexpr, SIZE: tl.constexpr, PLACED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Runs one program for some columns of a token. Slot s lies in row places[s] if PLACED, otherwise in row s."""
    token = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for slot in tl.static_range(TOP_K):
        row = token * TOP_K + slot
        weight = tl.load(weights + row)
        if PLACED:
            row = tl.load(places + row).to(tl.int64)
        total += weight * tl.load(rows + row * SIZE + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * SIZE + columns, total.to(out.dtype.element_ty), mask=inside)


def aligned(slot_of_place: Tensor, offsets: Tensor, experts: int, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (sorted_ids, expert_ids, num_tokens_padded) of slots in expert order, as moe_align_block_size returns
    them."""
    slots = slot_of_place.numel()
    blocks = min(slots, (slots + experts * (block - 1)) // block)
    new = functools.partial(torch.empty, dtype=torch.int32, device=slot_of_place.device)
    sorted_ids, expert_ids, padded = new(blocks * block), new(blocks), new(1)
    sizes = {"BLOCK": block, "BLOCK2": triton.next_power_of_2(block), "EXPERTS2": triton.next_power_of_2(experts)}
    _align[(blocks,)](slot_of_place, offsets, sorted_ids, expert_ids, padded, slots, experts, **sizes, num_warps=4)
    return sorted_ids, expert_ids, padded


def weighted_sum(rows: Tensor, weights: Tensor, places: Tensor | None, out: Tensor) -> Tensor:
    """Multiplies the rows of each token's slots by the slots' weights [T, k], and adds them in fp32."""
    tokens, top_k = weights.shape
    size, block = rows.shape[-1], 1024
    grid = (triton.cdiv(size, block), tokens)
    _sum[grid](rows, weights, weights if places is None else places, out, top_k, size, places is not None, block)
    return out
