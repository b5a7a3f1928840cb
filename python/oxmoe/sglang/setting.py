"""Reads OXMOE_SGLANG, which says what oxmoe takes over in SGLang. Imports nothing of SGLang."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

from oxmoe.sglang import capabilities

SETTING = "OXMOE_SGLANG"


@dataclass(frozen=True)
class Requested:
    """One swap of the setting, with the parts of it that the setting names."""

    name: str
    parts: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name}={'+'.join(self.parts)}" if self.parts else self.name


def text() -> str:
    """Returns the setting as it stands in the environment."""
    return os.environ.get(SETTING, "").strip()


def read(version: str) -> tuple[Requested, ...]:
    """Returns the swaps that the setting asks for, in order. There are none if it is empty, the default.

    A ValueError says what is wrong with the setting, and what this SGLang version can have. A RuntimeError says why
    a release is not served: it is too old, or a newer one that lacks what the swaps need.
    """
    items = [item.strip() for item in text().split(",") if item.strip()]
    if not items:
        return ()
    try:
        old = capabilities.is_old(version)
    except ValueError as error:
        raise RuntimeError(f"{SETTING}={text()}: {error}. Install one of them, or unset {SETTING}") from error
    if old:
        raise RuntimeError(
            f"{SETTING}={text()}: SGLang {version} is not served; served are {capabilities.RANGE}. Install one of "
            f"them, or unset {SETTING}"
        )
    known = capabilities.swaps()
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
    if capabilities.is_new(version):
        _refuse_changed(version, requested.values())
    return tuple(requested.values())


def _refuse_changed(version: str, requested: Iterable[Requested]) -> None:
    """Raises RuntimeError for a newer release that lacks what the swaps need."""
    lacking = capabilities.missing(tuple(name for swap in requested for name in (swap.name, *swap.parts)))
    if lacking:
        raise RuntimeError(
            f"{SETTING}={text()}: SGLang {version} is newer than {capabilities.LAST}, the newest that oxmoe is tested "
            f"with, and has not what oxmoe takes over there: {'; '.join(lacking)}. Install a newer oxmoe or SGLang "
            f"{capabilities.RANGE}, or unset {SETTING}"
        )


def _choices(version: str) -> str:
    choices = [f"{name}[={'+'.join(parts)}]" if parts else name for name, parts in capabilities.swaps().items()]
    return f"SGLang {version} can have: {', '.join(choices)}"
