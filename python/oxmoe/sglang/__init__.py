"""SGLang's plugin: takes over what OXMOE_SGLANG names through SGLang's own registration points, and patches nothing.

SGLang calls `install` in each of its processes (entry point group `sglang.srt.plugins`); one module per SGLang version
does the rest.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import os
from dataclasses import dataclass

logger = logging.getLogger(__name__)

SETTING = "OXMOE_SGLANG"

# SGLang version -> its module, whose SWAPS maps a name to the function that registers and says what it took over.
ADAPTERS = {"0.5.23": "oxmoe.sglang.v0_5_23"}


@dataclass(frozen=True)
class Swap:
    """One thing taken over in this process."""

    name: str
    sglang_version: str
    effect: str


_active: dict[str, Swap] = {}


def active() -> tuple[Swap, ...]:
    """What is taken over in this process."""
    return tuple(_active.values())


def requested() -> list[str]:
    """The names in OXMOE_SGLANG, in order; empty (the default) means off."""
    names = os.environ.get(SETTING, "").split(",")
    return [name for name in dict.fromkeys(name.strip() for name in names) if name]


def sglang_version() -> str:
    """Version of the installed SGLang without a local label: "0.5.23" of "0.5.23+cu130"."""
    return importlib.metadata.version("sglang").partition("+")[0]


def install() -> None:
    """Registers what OXMOE_SGLANG asks for. Does nothing when it is empty, and nothing twice."""
    missing = [name for name in requested() if name not in _active]
    if not missing:
        return
    version = sglang_version()
    if version not in ADAPTERS:
        raise RuntimeError(
            f"{SETTING}={','.join(missing)}: SGLang {version} is not supported; supported: {', '.join(ADAPTERS)}"
        )
    swaps = importlib.import_module(ADAPTERS[version]).SWAPS
    unknown = [name for name in missing if name not in swaps]
    if unknown:
        raise ValueError(f"{SETTING}: unknown {', '.join(unknown)}; SGLang {version} can have: {', '.join(swaps)}")
    for name in missing:
        swap = Swap(name, version, swaps[name]())
        _active[name] = swap
        logger.info("oxmoe: %s in SGLang %s: %s", swap.name, swap.sglang_version, swap.effect)
