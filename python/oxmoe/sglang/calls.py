"""Records which MoE layers of this process have run on oxmoe. It counts calls, because the objects alone would prove
less.

SGLang may hold oxmoe's method or runner for a layer and still take another path. So each layer is registered when it
is built, and `ran` is called when its tokens reach oxmoe's kernels. If a layer's forward ends without that call, it
is an error. The module imports nothing of SGLang.
"""

from __future__ import annotations

import logging
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

logger = logging.getLogger(__name__)
# A layer that ran this often has been through two passes of its model at least, even if each pass is cut in two halves.
PASSES = 3


@dataclass
class _Layer:
    module: weakref.ref[nn.Module]
    config: Any  # it is held, so that no other one gets its address
    name: str
    speaks: bool  # the other ranks of its groups have the same layers
    block: Any = None  # a weak reference to the module that it is a part of
    runs: int = 0

    def count(self) -> None:
        self.runs += 1


# Layers by the address of their MoeRunnerConfig, which is the layer's own and comes with each of its calls.
_known: dict[int, _Layer] = {}
# Layers of `_known` that have run less than PASSES times.
_watched: dict[int, _Layer] = {}
_told: set[int] = set()

# Blocks of SGLang's models that multiply the result of their experts by the routed scaling factor, unless SGLang runs
# on CUDA: module -> class. There SGLang's own kernels leave the factor to them.
SCALING = {
    "deepseek_v2": "DeepseekV2MoE",
    "glm4_moe": "Glm4MoeSparseMoeBlock",
    "glm4_moe_lite": "Glm4MoeLiteSparseMoeBlock",
}


def expect(module: Any, name: str, block: nn.Module | None = None) -> None:
    """Registers a layer that must run on oxmoe. If it does not, its first forward raises a RuntimeError.

    block: the module that it is a part of.
    """
    config = module.moe_runner_config
    first = not getattr(module, "moe_tp_rank", 0) and not getattr(module, "moe_ep_rank", 0)
    owner = None if block is None else weakref.ref(block)
    _known[id(config)] = _watched[id(config)] = _Layer(weakref.ref(module), config, name, first, owner)
    handle: Any = None

    def ended(module: nn.Module, inputs: Any, output: Any) -> None:
        # Compiled code has run nothing yet.
        if torch.compiler.is_compiling():
            return
        layer = _known.get(id(config))
        if layer is not None and not layer.runs:
            if _is_zero(output):
                return  # nothing shows that anything was computed; the layer's next forward is looked at
            raise RuntimeError(
                f"oxmoe: {name} ran without oxmoe: SGLang took a path of its own for it; use --quantization oxmoe, or "
                "change OXMOE_SGLANG (see docs/sglang.md)"
            )
        handle.remove()

    handle = module.register_forward_hook(ended)


def _is_zero(output: Any) -> bool:
    """Whether a layer's output has no number other than zero. SGLang's layers may return such an output without asking
    for experts, if none of a rank's experts was chosen.

    In the capture of a CUDA graph numbers cannot be read, and the output counts as computed.
    """
    if not isinstance(output, torch.Tensor) or (output.is_cuda and torch.cuda.is_current_stream_capturing()):
        return False
    return not bool(output.any())


def forget() -> None:
    """Forgets all layers."""
    for of_layers in (_known, _watched, _told):
        of_layers.clear()


def layer_of(config: Any) -> Any:
    """Returns SGLang's layer with this configuration, or None if it is not known."""
    layer = _known.get(id(config))
    return getattr(config, "layer", None) if layer is None else layer.module()


def _block_of(config: Any) -> nn.Module | None:
    layer = _known.get(id(config))
    return layer.block() if layer is not None and layer.block is not None else None


def model_of(config: Any) -> str:
    """Returns the module of SGLang's model with the layer of this configuration, as in "srt.models.bailing_moe". It is
    empty if the layer is in no block."""
    block = _block_of(config)
    return "" if block is None else type(block).__module__.removeprefix("sglang.")


def block_scales(config: Any) -> bool:
    """Whether the block of the layer with this configuration multiplies by the routed scaling factor without CUDA."""
    block = _block_of(config)
    return block is not None and any(
        SCALING.get(kind.__module__.rpartition(".")[2]) == kind.__name__ for kind in type(block).__mro__
    )


def choices(config: Any) -> list[Any]:
    """Returns how the block of the layer with this configuration chooses experts: the TopKConfig of each TopK."""
    block = _block_of(config)
    children = block.children() if block is not None else ()
    return [child.topk_config for child in children if type(child).__name__ == "TopK"]


def ran(config: Any) -> None:
    """Notes that tokens of the layer with this configuration went to oxmoe."""
    layer = _watched.get(id(config))
    if layer is None:
        return
    layer.count()
    if layer.runs >= PASSES:
        del _watched[id(config)]
    if layer.speaks and layer.runs in (1, PASSES):
        _tell()


def _tell() -> None:
    """Logs one line once all layers have run. It also logs one line if a layer has run several times and another one
    never."""
    layers = [layer for layer in _known.values() if layer.module() is not None]
    missing = [layer.name for layer in layers if not layer.runs]
    if len(layers) in _told or (missing and all(layer.runs < PASSES for layer in layers)):
        return
    count = f"{len(layers) - len(missing)} of {len(layers)} MoE layers ran on oxmoe"
    if not missing:
        _told.add(len(layers))
        logger.info("oxmoe: %s", count)
    elif -len(layers) not in _told:
        _told.add(-len(layers))
        logger.info("oxmoe: %s so far; not yet: %s", count, ", ".join(missing))
