"""OXMOE_SGLANG: what of SGLang oxmoe takes over. Imports nothing of SGLang."""

from __future__ import annotations

import os
from dataclasses import dataclass

SETTING = "OXMOE_SGLANG"

# What each SGLang version can have: a swap, and its parts ("moe=part+part"; the swap alone means all of them).
SWAPS: dict[str, dict[str, tuple[str, ...]]] = {
    "0.5.12.post1": {"moe": ("oxmoe", "triton_kernel", "deep_gemm"), "allreduce": ()},
    "0.5.23": {"moe": ("oxmoe", "triton_kernel", "deep_gemm", "flashinfer_mxfp4"), "allreduce": ()},
}


@dataclass(frozen=True)
class Requested:
    """One swap of the setting, with the parts that are wanted of it."""

    name: str
    parts: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name}={'+'.join(self.parts)}" if self.parts else self.name


def text() -> str:
    """The setting as it stands in the environment."""
    return os.environ.get(SETTING, "").strip()


def read(version: str) -> tuple[Requested, ...]:
    """The swaps that the setting asks for, in order; none where it is empty (the default).

    ValueError says what is wrong with a setting and what this SGLang version can have; RuntimeError, which versions
    are served, where this one is not.
    """
    items = [item.strip() for item in text().split(",") if item.strip()]
    if not items:
        return ()
    if version not in SWAPS:
        raise RuntimeError(
            f"{SETTING}={text()}: SGLang {version} is not served; served are {' and '.join(SWAPS)}. Install one of "
            f"them, or unset {SETTING}"
        )
    known = SWAPS[version]
    requested: dict[str, Requested] = {}
    for item in items:
        name, equals, listed = (part.strip() for part in item.partition("="))
        if name not in known:
            raise ValueError(f"{SETTING}: unknown {name!r}; {_choices(version)}")
        if name in requested:
            raise ValueError(f"{SETTING}: {name} is there twice; {_choices(version)}")
        parts = tuple(dict.fromkeys(part.strip() for part in listed.split("+"))) if equals else known[name]
        wrong = [part for part in parts if part not in known[name]]
        if wrong:
            raise ValueError(f"{SETTING}: {name} has no part {', '.join(map(repr, wrong))}; {_choices(version)}")
        requested[name] = Requested(name, parts)
    return tuple(requested.values())


def _choices(version: str) -> str:
    choices = [f"{name}[={'+'.join(parts)}]" if parts else name for name, parts in SWAPS[version].items()]
    return f"SGLang {version} can have: {', '.join(choices)}"
