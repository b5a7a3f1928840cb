"""Records which parameters of a layer SGLang has written since oxmoe's ExpertWeights were made of them.

SGLang's models write a parameter through its `weight_loader`, which a quantization method sets when it creates the
parameter. A layer's ExpertWeights may hold more than the parameters' own memory: packed weights, or tables of
scales. Such a layer must make them again after a write. CUDA graphs run no Python that could notice that this was
left out. So a write is refused before it happens, unless `process_weights_after_loading` follows it. The module
imports nothing of SGLang.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch

# Functions of SGLang that call `process_weights_after_loading` of every layer at their end.
POST_PROCESS = ("load_weights_and_postprocess", "update_weights_from_ipc")


def post_processing_follows() -> bool:
    """Whether a thread of this process is inside a function of SGLang that processes weights after it has loaded
    them.

    Every thread counts, because some models write experts from a pool of threads. Older releases have no other sign
    of it.
    """
    return any(_post_processes(frame) for last in _threads() for frame in _frames(last))


def _post_processes(frame: FrameType) -> bool:
    return frame.f_code.co_name in POST_PROCESS and str(frame.f_globals.get("__name__")).startswith("sglang.")


def _threads() -> list[FrameType]:
    return list(sys._current_frames().values())


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def local_experts(layer: Any, expert: int) -> list[int]:
    """Returns the rows of this rank's parameters that SGLang's loader writes for an expert of the checkpoint."""
    module = sys.modules.get("sglang.srt.eplb.expert_location")
    placed = module is not None and getattr(layer, "uses_expert_location", True)
    location = module.get_global_expert_location_metadata() if module is not None and placed else None
    if location is None:
        physical = [expert]
    elif layer._has_fused_shared and expert >= location.num_logical_experts:
        physical = [layer._num_global_routed + expert - location.num_logical_experts]
    else:
        physical = location.logical_to_all_physical(layer.layer_id, expert)
    local = (layer._map_global_expert_id_to_local_expert_id(number) for number in physical)
    return [number for number in local if 0 <= number < layer.num_local_experts]


def _is_gated(layer: Any) -> bool:
    """Whether w13 has gate rows and up rows, which a checkpoint stores separately."""
    return bool(getattr(getattr(layer, "moe_runner_config", None), "is_gated", True))


class Updates:
    """The writes to the parameters of one layer. The first load counts as announced."""

    def __init__(self) -> None:
        self.announced = True
        self._written: dict[str, set[tuple[Any, Any]]] = {}
        self._whole: set[str] = set()
        self._lock = threading.Lock()

    def announce(self) -> None:
        """Notes that `process_weights_after_loading` will follow the writes that come now."""
        self.announced = True
        self._forget()

    def finish(self, *, derived: bool) -> None:
        """Notes that ExpertWeights are made. derived: they hold more than the parameters' memory, so later writes
        must be announced."""
        self.announced = not derived
        self._forget()

    def _forget(self) -> None:
        self._written.clear()
        self._whole.clear()

    def loader(self, layer: torch.nn.Module, load: Callable[..., Any], what: str) -> Callable[..., Any]:
        """Wraps `load`, SGLang's weight_loader of this layer's parameters, and checks what it is about to write.
        `inspect.unwrap` gives `load` back."""

        @functools.wraps(load)
        def weight_loader(param: Any, loaded_weight: Any, *arguments: Any, **named: Any) -> Any:
            given = dict(zip(("weight_name", "shard_id", "expert_id"), arguments, strict=False)) | named
            self._write(layer, param, given.get("shard_id"), given.get("expert_id"), what)
            return load(param, loaded_weight, *arguments, **named)

        return weight_loader

    def _write(self, layer: Any, parameter: Any, shard: Any, expert: int | None, what: str) -> None:
        with self._lock:
            if not self.announced:
                if not post_processing_follows():
                    raise RuntimeError(
                        f"oxmoe: layer {getattr(layer, 'layer_id', '?')}: {what} experts were prepared at load, and "
                        "this weight update does not prepare them again, so nothing of this layer was written. Use "
                        "update_weights_from_disk or _from_ipc, or where this SGLang has them begin_weight_update "
                        "before and end_weight_update after the update; experts of bf16, f16, and fp8 with 128 x 128 "
                        "blocks take every update"
                    )
                self.announced = True
                self._forget()
            name = next((name for name, own in layer.named_parameters(recurse=False) if own is parameter), "?")
            if expert is None:
                self._whole.add(name)
                return
            for local in local_experts(layer, expert):
                self._written.setdefault(name, set()).add((local, shard))

    def written(self) -> set[str]:
        """Returns the parameters of which any part was written."""
        return self._whole | self._written.keys()

    def missing(self, layer: torch.nn.Module, names: set[str]) -> dict[str, tuple[int, int]]:
        """Returns those of the given parameters that were not written whole, each with (parts that were written,
        parts in all)."""
        found = {}
        for name in sorted(names - self._whole):
            parts = getattr(layer, name).shape[0] * (2 if name.startswith("w13") and _is_gated(layer) else 1)
            written = len(self._written.get(name, ()))
            if written < parts:
                found[name] = (written, parts)
        return found
