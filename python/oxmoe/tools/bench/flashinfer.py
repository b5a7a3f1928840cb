"""flashinfer's CuTe-DSL fused MoE for bf16 and f16 on Hopper, which takes routed tokens."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from oxmoe.testing import graph_time_us
from oxmoe.tools.bench.backend import Backend
from oxmoe.tools.bench.layers import Inputs, Shape, Weights, choose

Tactic = tuple[int, tuple[tuple[int, int], int], tuple[tuple[int, int], tuple[int, int], bool]]


def tactics(tokens_an_expert: float) -> list[Tactic]:
    """Returns the few tactics that win at this load, of all that flashinfer's autotuner tries. Each is compiled at
    first use."""
    small: list[Tactic] = [
        (64, ((64, 64), 1), ((64, 64), (1, 1), False)),
        (64, ((64, 128), 1), ((64, 128), (1, 1), False)),
    ]
    if tokens_an_expert <= 12:
        return small
    middle: Tactic = (128, ((128, 128), 1), ((128, 128), (1, 1), False))
    if tokens_an_expert <= 96:
        return [small[1], middle]
    return [
        middle,
        (128, ((128, 256), 8), ((128, 256), (1, 1), False)),
        (128, ((128, 256), 8), ((128, 128), (1, 2), True)),
    ]


class Sorted(NamedTuple):
    """The tables that flashinfer's moe_sort returns."""

    tile_experts: Tensor
    tile_limits: Tensor
    places: Tensor
    slots: Tensor
    padded: Tensor
    tiles: Tensor


def sort_tokens(ids: Tensor, experts: int, tile: int) -> Sorted:
    """Sorts slots by expert, and pads each expert's part to whole tiles."""
    tokens, top_k = ids.shape
    flat = ids.flatten().long()
    counts = torch.bincount(flat, minlength=experts)
    tiles = (counts + tile - 1) // tile
    starts = (tiles.cumsum(0) - tiles) * tile
    order = flat.argsort(stable=True)
    sorted_ids = flat[order]
    first = counts.cumsum(0) - counts
    rank = torch.arange(flat.numel(), device=ids.device) - first[sorted_ids]
    place = starts[sorted_ids] + rank
    most = min(flat.numel(), experts) + flat.numel() // tile + 1
    slots = torch.zeros(most * tile, dtype=torch.int32, device=ids.device)
    slots[place] = order.int()
    places = torch.empty(flat.numel(), dtype=torch.int32, device=ids.device)
    places[order] = place.int()
    used = int(tiles.sum())
    tile_experts = torch.zeros(most, dtype=torch.int32, device=ids.device)
    tile_experts[:used] = torch.repeat_interleave(torch.arange(experts, device=ids.device), tiles).int()
    ends = (starts + counts)[tile_experts.long()]
    limits = torch.minimum(ends, (torch.arange(most, device=ids.device) + 1) * tile)
    number = torch.tensor([used * tile, used], dtype=torch.int32, device=ids.device)
    return Sorted(tile_experts, limits.int(), places.view(tokens, top_k), slots, number[:1], number[1:].clone())


class FlashinferCuteDsl(Backend):
    """flashinfer's cute_dsl_fused_moe_bf16 with the best of several tactics. The time is that of GEMMs, activation and
    combine alone. Top-k and token sort are made before the clock starts, because flashinfer compiles its sort with nvcc
    at first use.

    NOTE: it has no biases and adds to its output in bf16 with atomics.
    """

    name = "flashinfer-cutedsl"
    excludes = "routing"
    VERSION: ClassVar[str] = "0.7.2.post1"

    @classmethod
    def missing(cls, device: str) -> str | None:
        if device != "cuda" or torch.cuda.get_device_capability()[0] != 9:
            return "needs a Hopper GPU"
        if find_spec("flashinfer") is None or find_spec("cutlass") is None:
            return "flashinfer-python and nvidia-cutlass-dsl are not installed"
        try:
            found = version("flashinfer-python")
        except PackageNotFoundError:
            found = "an unknown version"
        return None if found == cls.VERSION else f"is written for flashinfer {cls.VERSION}, found {found}"

    def __init__(self, shape: Shape, weights: Sequence[Weights]):
        super().__init__(shape, weights)
        from flashinfer.fused_moe.cute_dsl import sm90_fused_moe as module
        from flashinfer.fused_moe.cute_dsl.sm90_contiguous_gather_grouped_gemm_act_fusion import interleave_up_gate_sm90

        self.module = module
        self.w13 = []
        for item in weights:
            halves = item.w13
            if shape.gpt_oss:
                halves = torch.cat((halves[:, 0::2], halves[:, 1::2]), dim=1)
            self.w13.append(interleave_up_gate_sm90(halves))
        self.options: dict[str, Any] = {}
        if shape.gpt_oss:
            self.options = {f"swiglu_{name}": shape.options[name] for name in ("alpha", "beta", "limit")}
        self.sorted: dict[tuple[int, int], Sorted] = {}
        module.moe_sort = self._moe_sort
        module.moe_output_memset_inplace = Tensor.zero_

    def same_layer(self) -> bool:
        return not self.shape.gpt_oss and self.shape.limit is None and not self.shape.situ

    def _moe_sort(self, token_selected_experts: Tensor, *, tile_tokens_dim: int, **_: Any) -> Sorted:
        key = (token_selected_experts.data_ptr(), tile_tokens_dim)
        if key not in self.sorted:
            self.sorted[key] = sort_tokens(token_selected_experts, self.shape.experts, tile_tokens_dim)
        return self.sorted[key]

    def layer(self, index: int, inputs: Inputs) -> Tensor:
        raise NotImplementedError("runs by calls(), which chooses the tactic")

    def calls(self, inputs: Sequence[Inputs]) -> list[Callable[[], Tensor]]:
        self.sorted.clear()
        shape, tokens = self.shape, inputs[0].x.shape[0]
        routed = [choose(item, shape.top_k) for item in inputs]
        operands = [
            (item.x, ids.int().contiguous(), scales.contiguous(), w13, weights.w2, shape.experts, shape.top_k)
            for item, (scales, ids), w13, weights in zip(inputs, routed, self.w13, self.weights, strict=True)
        ]
        active = sum(ids.unique().numel() for _, ids in routed) / len(routed)

        def bound(tactic: Tactic) -> list[Callable[[], Tensor]]:
            run, options = self.module.cute_dsl_fused_moe_bf16, self.options
            return [functools.partial(run, *args, tactic=tactic, **options) for args in operands]

        times: dict[Tactic, float] = {}
        failure: Exception | None = None
        for tactic in tactics(tokens * shape.top_k / active):
            try:
                times[tactic] = graph_time_us(bound(tactic), replays=5, warmups=1)
            except Exception as error:  # a tactic may not fit this shape
                failure = error
        if not times:
            raise RuntimeError(f"no tactic runs: {failure}")
        best = min(times, key=lambda tactic: times[tactic])
        self.detail = str(best)
        return bound(best)
