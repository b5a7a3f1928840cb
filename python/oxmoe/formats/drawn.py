"""Makes experts of random numbers, for benches and tests.

Each format that has its own file here says how they are drawn, what numbers they are, and which `ExpertWeights` they
make.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from oxmoe import formats
from oxmoe._oxmoe import ExpertWeights


class Experts(ABC):
    """One matrix [E, R, K] of every expert, as a checkpoint has it. An index gives the bf16 numbers of one expert."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int, int]: ...

    @abstractmethod
    def __getitem__(self, expert: int) -> Tensor: ...

    @abstractmethod
    def weights(self, w2: Any, **options: Any) -> ExpertWeights:
        """Returns the layer whose w13 this is. `options` are those that every constructor of `ExpertWeights` has."""


@dataclass(frozen=True)
class Format:
    """A format of experts with bf16 activations."""

    bits: float  # bits of a weight, with its share of a scale
    draw: Callable[
        [int, int, int, str], Experts
    ]  # arguments: experts, rows, columns, device; a product with rows of size one has size one
    packed_bits: float | None = None  # bits of a weight in the packed form of GPUs, if it has more than the checkpoint


@functools.cache
def own_formats() -> dict[str, Format]:
    """Returns the formats by name. A file of `oxmoe.formats` lists its formats in DRAWN."""
    names = sorted(module.name for module in pkgutil.iter_modules(formats.__path__))
    modules = [importlib.import_module(f"oxmoe.formats.{name}") for name in names]
    return {name: own for module in modules for name, own in getattr(module, "DRAWN", {}).items()}
