"""Deprecated public names: they work, and warn at their first use in a process (docs/policy.md).

A name is deprecated by a line in `DEPRECATED`, and goes with this line. Its module asks `lookup` for each name that it
does not have, so `__all__`, `dir`, `help` and the stub do not name it. In the modules of oxmoe this is hidden from type
checkers, which still find mistyped names.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Deprecated:
    """What became of a public name. Names are import paths, such as "oxmoe.moe"; versions are "MAJOR.MINOR.PATCH"."""

    replacement: str
    since: str
    removal: str


DEPRECATED: dict[str, Deprecated] = {}
_warned: set[str] = set()


def add(old: str, replacement: str, *, since: str, removal: str) -> None:
    """Deprecates a name. Raises ValueError if the table has it already."""
    if old in DEPRECATED:
        raise ValueError(f"{old}: is deprecated already, for {DEPRECATED[old].replacement}")
    DEPRECATED[old] = Deprecated(replacement, since, removal)


def lookup(module: str, later: Callable[[str], Any] | None = None) -> Callable[[str], Any]:
    """Returns the `__getattr__` of a public module. It finds deprecated names, and raises AttributeError for others.
    later: returns what a module has only when it is used, or None."""

    def __getattr__(name: str) -> Any:
        if later is not None and (found := later(name)) is not None:
            return found
        old = f"{module}.{name}"
        entry = DEPRECATED.get(old)
        if entry is None:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        if old not in _warned:
            _warned.add(old)
            message = (
                f"{old} is deprecated since oxmoe {entry.since}, and oxmoe {entry.removal} removes it; use "
                f"{entry.replacement}"
            )
            # At the line that names it: `import` statements in between are not counted.
            warnings.warn(message, DeprecationWarning, stacklevel=2)
        owner, _, name = entry.replacement.rpartition(".")
        return getattr(importlib.import_module(owner), name)

    return __getattr__
