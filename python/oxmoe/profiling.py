"""Puts a range around each eager call, for profilers, if OXMOE_PROFILE names one.

Every eager call runs a function of the extension, so the ranges are there: importing this module replaces these
functions by ones with ranges. `oxmoe` imports it before any module that takes a function of the extension, and a new
function gets a range without a line here. If the variable is empty, nothing is replaced and calls cost what they did.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from oxmoe import _oxmoe
from oxmoe.tracing import HAS_TORCH, tracing

SETTING = "OXMOE_PROFILE"
CHOICES = ("nvtx", "torch")

# Functions of the extension that neither launch nor compute anything.
WITHOUT = frozenset(
    (
        *("allreduce_bytes", "allreduce_message", "allreduce_shape", "allreduce_unsupported", "device_info"),
        *("experts_of", "explain", "masked_workspace_bytes", "shape_workspace_bytes", "stats", "workspace_bytes"),
    )
)
# Function -> the name of its range, if it is not the function's own.
_NAMES = {"moe_tensors": "moe", "allreduce_finish": "allreduce_fusion", "launch": "allreduce_fusion"}
_SHORT = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}

Range = Callable[[str], AbstractContextManager[Any]]


@functools.cache
def ranges() -> tuple[Range, ...]:
    """Returns what opens a range in each profiler that OXMOE_PROFILE names. Raises ValueError for an unknown name,
    and RuntimeError if torch is missing or was built without NVTX."""
    text = os.environ.get(SETTING, "")
    named = tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    unknown = [word for word in named if word not in CHOICES]
    if unknown:
        raise ValueError(f"{SETTING}: unknown {', '.join(map(repr, unknown))}; choices: nvtx, torch or nvtx,torch")
    if named and not HAS_TORCH:
        raise RuntimeError(f"{SETTING}={text}: ranges are made by torch, which is not installed")
    return tuple(_RANGES[word]() for word in named)


def _nvtx() -> Range:
    import torch

    try:
        torch.cuda.nvtx.range_push("oxmoe")
        torch.cuda.nvtx.range_pop()
    except RuntimeError as error:
        raise RuntimeError(f"{SETTING}: nvtx: {error}") from error
    opened: Range = torch.cuda.nvtx.range
    return opened


def _torch() -> Range:
    import torch

    return torch.profiler.record_function


_RANGES: dict[str, Callable[[], Range]] = {"nvtx": _nvtx, "torch": _torch}


def _shape(value: Any) -> str:
    return "x".join(str(size) for size in value.shape)


def _layer(given: Mapping[str, Any]) -> list[str]:
    """Returns the format and the sizes of a call of a layer."""
    x, weights, ids = given["x"], given.get("weights"), given.get("topk_ids")
    if weights is None:
        w13 = given["w13"]
        dtype = str(w13.dtype).rpartition(".")[2]
        form, experts = given.get("format") or _SHORT.get(dtype, dtype), w13.shape[0]
    else:
        form, experts = weights.format, weights.num_experts
    # moe_masked has room for m rows of each expert.
    rows = f"M={x.shape[0]}" if len(x.shape) == 2 else f"m={x.shape[1]}"
    top_k = given.get("top_k") if ids is None else ids.shape[1]
    return [form, rows, f"E={experts}", *([f"k={top_k}"] if top_k else [])]


def _operands(given: Mapping[str, Any]) -> list[str]:
    """Returns the shapes of tensors, and k."""
    shapes = [f"{name}={_shape(value)}" for name, value in given.items() if getattr(value, "shape", ())]
    return [*shapes, f"k={given['top_k']}"] if "top_k" in given else shapes


def label(function: str, given: Mapping[str, Any]) -> str:
    """Returns the name of a call's range: "oxmoe.moe bf16 M=64 E=128 k=8". given: its arguments by name.

    It has no sizes if the arguments are not what the function takes, which the function itself refuses.
    """
    name = f"oxmoe.{_NAMES.get(function, function)}"
    try:
        if "operands" in given:
            given = {"input": given["operands"].input}
        layer = "x" in given and ("weights" in given or "w13" in given)
        return " ".join([name, *(_layer(given) if layer else _operands(given))])
    except (AttributeError, IndexError, KeyError, TypeError):
        return name


def with_ranges(function: str, builtin: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function with a range around each call that torch does not trace. Traced calls have operators."""
    signature = inspect.signature(builtin)

    @functools.wraps(builtin)
    def call(*operands: Any, **options: Any) -> Any:
        if tracing():
            return builtin(*operands, **options)
        opened = ranges()
        try:
            text = label(function, signature.bind(*operands, **options).arguments)
        except TypeError:
            text = label(function, {})
        with ExitStack() as open_ranges:
            for enter in opened:
                open_ranges.enter_context(enter(text))
            return builtin(*operands, **options)

    return call


def _install() -> None:
    for name, value in list(vars(_oxmoe).items()):
        if inspect.isbuiltin(value) and name not in WITHOUT:
            setattr(_oxmoe, name, with_ranges(name, value))
    # The all-reduce of GPUs is the only launch that is a method.
    memory: Any = _oxmoe.AllReduceMemory
    memory.launch = with_ranges("launch", memory.launch)


if os.environ.get(SETTING, "").strip():
    _install()
