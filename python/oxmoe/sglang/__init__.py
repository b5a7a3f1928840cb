"""SGLang's plugin: takes over what OXMOE_SGLANG names through SGLang's own registration points, and patches nothing.

SGLang calls `plugin` in each of its processes (entry point group `sglang.srt.plugins`) and `platform.activate` while it
is imported (`sglang.srt.platforms`). An adapter does the rest: `cores`, or `fused_functions` where SGLang takes no MoE
runner under a name of others.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import multiprocessing
from dataclasses import dataclass

from oxmoe.hopper import untried
from oxmoe.sglang import capabilities, setting
from oxmoe.sglang.dispatch import Dispatch, dispatch_dtype
from oxmoe.sglang.setting import SETTING

__all__ = [
    "SETTING",
    "Dispatch",
    "Swap",
    "active",
    "adapter_name",
    "dispatch_dtype",
    "install",
    "plugin",
    "requested",
    "sglang_version",
]

logger = logging.getLogger(__name__)


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


def requested() -> tuple[setting.Requested, ...]:
    """What OXMOE_SGLANG asks of the installed SGLang; none (the default) means off. Raises as `setting.read`."""
    return setting.read(sglang_version())


def sglang_version() -> str:
    """Version of the installed SGLang without a local label: "0.5.23" of "0.5.23+cu130"."""
    return importlib.metadata.version("sglang").partition("+")[0]


def adapter_name() -> str:
    """The module for the installed SGLang. Its SWAPS maps a swap's part to the function that registers it and says what
    is taken over, and for which formats."""
    return "oxmoe.sglang.cores" if capabilities.has_cores() else "oxmoe.sglang.fused_functions"


def install() -> None:
    """Registers what OXMOE_SGLANG asks for. Does nothing when it is empty, and nothing twice.

    Raises where something that is asked for cannot be had: ValueError or RuntimeError for the setting (`setting.read`),
    RuntimeError where SGLang has no free place for it. What was registered before stays.
    """
    if not setting.text():
        return
    version = sglang_version()
    swaps = setting.read(version)
    names = [f"{swap.name}={part}" for swap in swaps for part in swap.parts] + [
        swap.name for swap in swaps if not swap.parts
    ]
    missing = [name for name in names if name not in _active]
    if not missing:
        return
    adapter = importlib.import_module(adapter_name())
    for name in missing:
        try:
            effect = adapter.SWAPS[name]()
        except Exception as error:
            raise RuntimeError(f"{SETTING}={setting.text()}: {name} in SGLang {version}: {error}") from error
        _active[name] = Swap(name, version, effect)
    if capabilities.is_new(version) and multiprocessing.parent_process() is None:
        logger.warning(
            "oxmoe: SGLang %s is newer than %s, the newest that oxmoe is tested with; all that it takes over is there",
            version,
            capabilities.LAST,
        )
    layers = importlib.import_module("oxmoe.sglang.layers")
    layers.watch(swaps, adapter, _model)


def _model() -> None:
    """When a process begins to build a model: by then it has its GPU, which is not for this plugin to choose."""
    if (remark := untried_gpu()) is not None:
        logger.warning("oxmoe: %s", remark)


def untried_gpu() -> str | None:
    """A remark on this process's GPU where oxmoe's kernels have not run on one like it. Initialises nothing."""
    import torch

    if not torch.cuda.is_initialized():
        return None
    major, minor = torch.cuda.get_device_capability()
    remark = untried(f"sm_{major}{minor}")
    return f"{torch.cuda.get_device_name()}: {remark}" if remark else None


def plugin() -> None:
    """The entry point: `install`, but a failure ends the process.

    SGLang logs a plugin's exception and goes on without it, so that a server would run on other kernels than it was
    told to.
    """
    try:
        install()
    except Exception as error:
        logger.error("oxmoe: %s", error)
        raise SystemExit(f"oxmoe: {error}") from error
