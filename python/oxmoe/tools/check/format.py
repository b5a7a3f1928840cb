"""The format of a layer's experts, as a checkpoint's config describes it."""

from __future__ import annotations

from dataclasses import dataclass

from oxmoe.sglang.int4_schemes import Scheme


@dataclass(frozen=True)
class Format:
    """The format of a layer's experts."""

    name: str  # as `formats` has it
    label: str  # in words
    planned: str  # as `oxmoe.explain` takes it
    bits: float  # of a weight with its scales
    stored: frozenset[str]  # dtypes of its weights in safetensors
    scheme: Scheme | None = None  # of int4

    def __str__(self) -> str:
        return self.label
