"""Records what SGLang has written of a layer's parameters since oxmoe's ExpertWeights were made of them.

SGLang's models write a parameter through its `weight_loader`, which a quantization method sets when it creates the
parameter. SGLang does not count the tensors, so a part that a checkpoint lacks would stay what the memory held
(`Writes.missing`).

A layer's ExpertWeights may hold more than the parameters' own memory: packed weights, or tables of
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

from oxmoe.sglang import server

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


def _location(layer: Any) -> Any:
    """Returns where SGLang's load balancer has put this layer's experts, or None if they lie in order."""
    module = sys.modules.get("sglang.srt.eplb.expert_location")
    placed = module is not None and getattr(layer, "uses_expert_location", True)
    return module.get_global_expert_location_metadata() if module is not None and placed else None


def local_experts(layer: Any, expert: int) -> list[int]:
    """Returns the rows of this rank's parameters that SGLang's loader writes for an expert of the checkpoint."""
    location = _location(layer)
    if location is None:
        physical = [expert]
    elif layer._has_fused_shared and expert >= location.num_logical_experts:
        physical = [layer._num_global_routed + expert - location.num_logical_experts]
    else:
        physical = location.logical_to_all_physical(layer.layer_id, expert)
    local = (layer._map_global_expert_id_to_local_expert_id(number) for number in physical)
    return [number for number in local if 0 <= number < layer.num_local_experts]


def experts_of_checkpoint(layer: Any) -> dict[int, int]:
    """Returns which expert of the checkpoint each row of this rank's parameters is.

    A row that no expert of the checkpoint fills is left out. A draft's layers have such rows for the redundant experts
    of the server, which only the target's layers use.
    """
    location, redundant = _location(layer), server.redundant_experts()
    if location is not None:
        experts = location.num_logical_experts + layer.num_fused_shared_experts
    else:
        experts = layer._num_global_routed - redundant
        experts += 0 if redundant else layer.num_fused_shared_experts
    return {row: expert for expert in range(experts) for row in local_experts(layer, expert)}


def _is_gated(layer: Any) -> bool:
    """Whether w13 has gate rows and up rows, which a checkpoint stores separately."""
    return bool(getattr(getattr(layer, "moe_runner_config", None), "is_gated", True))


def name_of(layer: torch.nn.Module, parameter: Any) -> str:
    """Returns the name of a layer's own parameter, or "" for another one."""
    # `named_parameters` takes several times as long, and this runs for each tensor of a checkpoint.
    return next((name for name, own in layer._parameters.items() if own is parameter), "")


class Writes:
    """What the loader of a layer's parameters was given: each expert's part, or a whole parameter at once.

    Loaders may run in several threads, so each note is one operation on a set.
    """

    def __init__(self) -> None:
        self._experts: dict[tuple[str, Any], set[int]] = {}
        self._whole: set[str] = set()

    def __bool__(self) -> bool:
        return bool(self._experts or self._whole)

    def add(self, name: str, shard: Any, expert: int | None) -> None:
        """Notes a tensor. expert: the checkpoint's number; None means all experts of this rank."""
        if expert is None:
            self._whole.add(name)
        else:
            self._experts.setdefault((name, shard), set()).add(expert)

    def clear(self) -> None:
        self._experts.clear()
        self._whole.clear()

    def names(self, layer: Any) -> set[str]:
        """Returns the parameters of which any part on this rank was written."""
        return self._whole | {name for name, _ in self._rows(layer)}

    def _rows(self, layer: Any) -> dict[tuple[str, Any], set[int]]:
        """Returns by parameter and part the rows that were written. The ones without any are left out."""
        given = {expert for experts in self._experts.values() for expert in experts}
        local = {expert: local_experts(layer, expert) for expert in given}
        found = {key: {row for expert in own for row in local[expert]} for key, own in self._experts.items()}
        return {key: rows for key, rows in found.items() if rows}

    def missing(self, layer: Any, names: set[str]) -> dict[str, dict[str, list[int]]]:
        """Returns those of the given parameters that were not written whole. Each has its missing parts ("w1", "w2",
        "w3") with the rows that lack them."""
        wanted, rows = experts_of_checkpoint(layer).keys(), self._rows(layer)
        found: dict[str, dict[str, list[int]]] = {}
        for name in sorted(names - self._whole):
            given = {part: rows.get((name, part), set()) for part in ("w1", "w2", "w3")}
            if not _is_gated(layer):
                given["w1"] |= given["w3"]  # both are all of w13
            lacking = {part: sorted(wanted - given[part]) for part in parts_of(layer, name)}
            if any(lacking.values()):
                found[name] = {part: own for part, own in lacking.items() if own}
        return found

    def counted(self, layer: Any, lacking: dict[str, list[int]], name: str) -> tuple[int, int]:
        """Returns of a parameter in `missing` (parts that were written, parts in all)."""
        parts = len(experts_of_checkpoint(layer)) * len(parts_of(layer, name))
        return parts - sum(map(len, lacking.values())), parts


def parts_of(layer: Any, name: str) -> tuple[str, ...]:
    """Returns the parts of an expert that SGLang's loader writes into a parameter one by one."""
    if not name.startswith("w13"):
        return ("w2",)
    return ("w1", "w3") if _is_gated(layer) else ("w1",)


class Updates:
    """The writes to the parameters of one layer. The first load counts as announced."""

    def __init__(self) -> None:
        self.announced = True
        self.writes = Writes()
        self._lock = threading.Lock()

    def announce(self) -> None:
        """Notes that `process_weights_after_loading` will follow the writes that come now."""
        self.announced = True
        self.writes.clear()

    def finish(self, *, derived: bool) -> None:
        """Notes that ExpertWeights are made. derived: they hold more than the parameters' memory, so later writes
        must be announced."""
        self.announced = not derived
        self.writes.clear()

    def loader(self, layer: torch.nn.Module, load: Callable[..., Any], what: str) -> Callable[..., Any]:
        """Wraps `load`, SGLang's weight_loader of this layer's parameters, and checks what it is about to write.
        `inspect.unwrap` gives `load` back."""

        @functools.wraps(load)
        def weight_loader(param: Any, loaded_weight: Any, *arguments: Any, **named: Any) -> Any:
            self._check(layer, what)
            return load(param, loaded_weight, *arguments, **named)

        return weight_loader

    def _check(self, layer: Any, what: str) -> None:
        with self._lock:
            if self.announced:
                return
            if not post_processing_follows():
                raise RuntimeError(
                    f"oxmoe: layer {getattr(layer, 'layer_id', '?')}: {what} experts were prepared at load, and "
                    "this weight update does not prepare them again, so nothing of this layer was written. Use "
                    "update_weights_from_disk or _from_ipc, or where this SGLang has them begin_weight_update "
                    "before and end_weight_update after the update; experts of bf16, f16, and fp8 with 128 x 128 "
                    "blocks take every update"
                )
            self.announced = True
            self.writes.clear()
