"""DeepGEMM's grouped fp8 GEMMs alone, on rows in expert order: its contiguous layout in the routed layer's table, and
the functions that both of its layouts need.

Everything around the GEMMs is not timed. Rows are sorted, padded and quantised before, scales lie as the GEMMs read
them, and GEMM2's input is made of GEMM1's output before the clock runs. The layer's result is put together afterwards,
to be checked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from oxmoe import quantize
from oxmoe.tools.bench.backend import Backend
from oxmoe.tools.bench.layers import Inputs, Shape, Weights, activated, choose

GROUP = 128
# The bar of the error's relative norm. DeepGEMM's callers round GEMM1's sums to bf16 before they quantise, which moves
# numbers to their neighbour in e4m3. In small layers, which have few rows, that is up to 2.8e-2.
MOST_ERROR = 4e-2


def missing(device: str) -> str | None:
    if device != "cuda":
        return "needs a GPU"
    if find_spec("deep_gemm") is None:
        return "deep_gemm is not installed (PyPI: sgl-deep-gemm)"
    if torch.cuda.get_device_capability()[0] < 9:
        return "its kernels begin with sm_90"
    return None


def gemm(*names: str) -> Callable[..., Any]:
    """Returns the function of deep_gemm that has one of these names, which differ between its releases."""
    import deep_gemm

    for name in names:
        found: Callable[..., Any] | None = getattr(deep_gemm, name, None)
        if found is not None:
            return found
    raise RuntimeError(f"deep_gemm has none of {', '.join(names)}")


def column_major(scales: Tensor) -> Tensor:
    """Lays out fp32 scales [..., rows, groups] as DeepGEMM's Hopper kernels read them, so that DeepGEMM moves none
    itself: rows lie next to each other, padded to 16 bytes."""
    rows, groups = scales.shape[-2:]
    room = scales.new_empty((*scales.shape[:-2], groups, -(-rows // 4) * 4))
    laid_out = room.transpose(-2, -1)[..., :rows, :]
    return laid_out.copy_(scales)


def quantised(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Quantises bf16 [..., rows, columns] to e4m3 codes and a scale for each 128 columns, as DeepGEMM takes them."""
    codes, scales = quantize.per_token_group_quant_fp8(rows.flatten(0, -2), GROUP)
    return codes.view(rows.shape), column_major(scales.view(*rows.shape[:-1], -1))


def place_rows(ids: Tensor, experts: int, alignment: int) -> tuple[Tensor, int]:
    """Returns (place of each slot in order of tokens, rows in all), if the rows of each expert begin at a multiple of
    alignment."""
    flat = ids.flatten().long()
    counts = torch.bincount(flat, minlength=experts)
    padded = (counts + alignment - 1) // alignment * alignment
    order = flat.argsort(stable=True)
    # The distance of a row from the first row of its expert.
    inside = torch.arange(len(flat), device=ids.device) - (counts.cumsum(0) - counts)[flat[order]]
    place = torch.empty_like(order)
    place[order] = (padded.cumsum(0) - padded)[flat[order]] + inside
    return place, int(padded.sum())


class DeepGemm(Backend):
    """Two calls of m_grouped_fp8_gemm_nt_contiguous."""

    name = "deep-gemm"
    formats = ("fp8_block",)
    most_error = MOST_ERROR
    excludes = "routing, quantisation, activation, combine"

    @classmethod
    def missing(cls, device: str) -> str | None:
        return missing(device)

    def __init__(self, shape: Shape, weights: Sequence[Weights]):
        super().__init__(shape, weights)
        self.gemm = gemm("m_grouped_fp8_gemm_nt_contiguous")
        self.alignment = int(gemm("get_mk_alignment_for_contiguous_layout")())
        self.slots: list[tuple[Tensor, Tensor]] = []

    def layer(self, index: int, inputs: Inputs) -> Tensor:
        return self.prepared(index, inputs)[0]()

    def prepared(self, index: int, inputs: Inputs) -> tuple[Callable[[], Tensor], tuple[Tensor, Tensor]]:
        """Returns (the two GEMMs, (place of each slot, its weight [T, k])). Rows without a slot are 0 and have expert
        -1."""
        weights, x = self.weights[index], inputs.x
        topk_weights, ids = choose(inputs, self.shape.top_k)
        place, rows = place_rows(ids, self.shape.experts, self.alignment)
        spread = x.new_zeros((rows, x.shape[1]))
        spread[place] = x.repeat_interleave(ids.shape[1], 0)
        experts = torch.full((rows,), -1, dtype=torch.int32, device=x.device)
        experts[place] = ids.flatten().to(torch.int32)
        tokens = quantised(spread)
        w13, w2 = ((w.codes, w.scales) for w in (weights.w13, weights.w2))
        sums, out = x.new_zeros((rows, w13[0].shape[1])), x.new_empty((rows, x.shape[1]))
        self.gemm(tokens, w13, sums, experts)
        hidden = quantised(activated(sums.float(), self.shape).to(x.dtype))

        def call() -> Tensor:
            self.gemm(tokens, w13, sums, experts)
            self.gemm(hidden, w2, out, experts)
            return out

        return call, (place, topk_weights)

    def calls(self, inputs: Sequence[Inputs]) -> list[Callable[[], Tensor]]:
        made = [self.prepared(index, item) for index, item in enumerate(inputs)]
        self.slots = [slots for _, slots in made]
        return [call for call, _ in made]

    def result(self, index: int, output: Tensor) -> Tensor:
        place, topk_weights = self.slots[index]
        rows = output[place].view(*topk_weights.shape, -1).float()
        return (rows * topk_weights[..., None]).sum(1).to(output.dtype)
