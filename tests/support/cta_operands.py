"""Operands of GEMMs that run as whole CTAs on the host: NaN wherever nobody may read or write."""

from __future__ import annotations

import ctypes
import math

import torch
from torch import Tensor

from fake_cuda.harness import STRUCTS

IDENTITY, SWIGLU, GEGLU, RELU2, EXPERT_SWIGLU, SITU = 0, 1, 2, 4, 8, 9
NAMES = {SWIGLU: "silu", GEGLU: "gelu", RELU2: "relu2", EXPERT_SWIGLU: "silu", SITU: "situ"}
# SiTU's bounds, which sums of these tests reach. Kernels have them in the place of alpha and beta.
BOUNDS = {"situ_beta": 1.5, "situ_linear_beta": 2.0}
DTYPES = {torch.float32: 0, torch.bfloat16: 2}
GAP = 5  # places before each tile and behind the last that belong to no tile
POISON = 0xFF  # NaN in every dtype here


def seed_of(rng: torch.Generator) -> int:
    return int(torch.randint(1 << 32, (), generator=rng))


def poisoned(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.full((*shape[:-1], shape[-1] * dtype.itemsize), POISON, dtype=torch.uint8).view(dtype)


def poison_idle(experts: set[int], *of_experts: Tensor | None) -> None:
    """Poisons the tensors of all experts but `experts`."""
    for tensor in filter(lambda t: t is not None, of_experts):
        tensor.view(torch.uint8)[list(set(range(len(tensor))) - experts)] = POISON


def is_poison_but(written: Tensor, tensor: Tensor) -> bool:
    others = tensor.view(torch.uint8).clone()
    others[written] = POISON
    return bool((others == POISON).all())


def activation(kind: int, *, alpha: float = 1.0, beta: float = 0.0, limit: float = math.inf) -> ctypes.Structure:
    if kind == SITU:
        alpha, beta = BOUNDS.values()
    limits = {"gate_limit": limit, "silu_limit": math.inf, "up_limit": limit}
    return STRUCTS["Activation"](kind=kind, alpha=alpha, beta=beta, **limits)


class Placed:
    """Tiles of (expert, tokens) with gaps between them, unless an expert's are to lie `together`."""

    def __init__(self, tiles: list[tuple[int, int]], *, together: bool) -> None:
        self.tiles, self.of_tiles, place = [], [], GAP
        for expert, count in tiles:
            if together and self.tiles and self.tiles[-1][0] == expert:
                place -= GAP
            self.tiles.append([expert, place, count, 0])
            self.of_tiles.append(torch.arange(place, place + count))
            place += count + GAP
        self.places, self.inside = place, torch.cat(self.of_tiles)
        # Behind the last tile stands one that no kernel may look at.
        self.table = torch.tensor([*self.tiles, [tiles[-1][0], 0, tiles[0][1], 0]], dtype=torch.int32)

    def rows(self, experts: int) -> Tensor:
        """Returns the rows of each expert."""
        return torch.tensor([sum(count for of, _, count, _ in self.tiles if of == e) for e in range(experts)])
