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
from typing import TYPE_CHECKING

from oxmoe import deprecation, profiling
from oxmoe.hopper import untried
from oxmoe.sglang import capabilities, server, setting
from oxmoe.sglang.dispatch import Dispatch, dispatch_dtype
from oxmoe.sglang.setting import SETTING

if not TYPE_CHECKING:
    __getattr__ = deprecation.lookup(__name__)

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
    """One thing that oxmoe has taken over in this process."""

    name: str
    sglang_version: str
    effect: str


_active: dict[str, Swap] = {}


def active() -> tuple[Swap, ...]:
    """Returns what oxmoe has taken over in this process."""
    return tuple(_active.values())


def requested() -> tuple[setting.Requested, ...]:
    """Returns what OXMOE_SGLANG asks of the installed SGLang. An empty result, the default, means off. Raises what
    `setting.read` raises."""
    return setting.read(sglang_version())


def sglang_version() -> str:
    """Returns the version of the installed SGLang without its local label: "0.5.23" for "0.5.23+cu130"."""
    return importlib.metadata.version("sglang").partition("+")[0]


def adapter_name() -> str:
    """Returns the name of the adapter module for the installed SGLang. Its SWAPS maps a part of a swap to the
    function that registers it. That function returns what is taken over, and for which formats."""
    return "oxmoe.sglang.cores" if capabilities.has_cores() else "oxmoe.sglang.fused_functions"


def install() -> None:
    """Registers what OXMOE_SGLANG asks for. It does nothing if the variable is empty, and registers nothing twice.

    Raises an error if a part that the variable asks for is not available: ValueError or RuntimeError for the setting
    (`setting.read`), RuntimeError if SGLang has no free place for it. What was registered before stays. An unknown
    word in OXMOE_PROFILE is an error here, too, and not first in the middle of a model.
    """
    if not setting.text():
        return
    profiling.ranges()
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
    """Runs when a process begins to build a model. By then the process has its GPU, which this plugin must not
    choose, and its rank."""
    if server.exports_metrics():
        importlib.import_module("oxmoe.sglang.metrics").start()
    if (remark := untried_gpu()) is not None:
        logger.warning("oxmoe: %s", remark)


def untried_gpu() -> str | None:
    """Returns a remark for the log if oxmoe's kernels have not run on a GPU like this process's. Initialises
    nothing."""
    import torch

    if not torch.cuda.is_initialized():
        return None
    major, minor = torch.cuda.get_device_capability()
    remark = untried(f"sm_{major}{minor}")
    return f"{torch.cuda.get_device_name()}: {remark}" if remark else None


def plugin() -> None:
    """The entry point. It calls `install`, and a failure ends the process.

    SGLang itself would log a plugin's exception and go on without the plugin. The server would then run on other
    kernels than the user asked for.
    """
    try:
        install()
    except Exception as error:
        logger.error("oxmoe: %s", error)
        raise SystemExit(f"oxmoe: {error}") from error
