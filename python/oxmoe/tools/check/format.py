"""The format of a layer's experts, as a checkpoint's config describes it."""

from __future__ import annotations

from dataclasses import dataclass

from oxmoe.sglang.int4_schemes import Scheme


@dataclass(frozen=True)
class Format:
    """The format of a layer's experts."""

    name: str  # its name in `formats`
    label: str  # the format in words
    planned: str  # its name in `oxmoe.explain`
    bits: float  # bits of a weight with its scales
    stored: frozenset[str]  # dtypes of its weights in safetensors
    scheme: Scheme | None = None  # how int4 weights are stored

    def __str__(self) -> str:
        return self.label
