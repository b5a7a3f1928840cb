"""Times the MoE layers of one model as a rank of SGLang runs them, and says what a decode step would gain.

`python -m oxmoe check` decides what the layers are; here they only become shapes of the bench.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from oxmoe.sglang import capabilities
from oxmoe.tools.bench.layers import FORMATS
from oxmoe.tools.bench.report import Cell
from oxmoe.tools.check.checkpoint import Unreadable, limited, printable, read
from oxmoe.tools.check.command import installed
from oxmoe.tools.check.layers import HOPPER, RankLayer, Server, judge, routing
from oxmoe.tools.command import UsageError
from oxmoe.tools.shapes import GPT_OSS, ModelShape, Shape

OURS = "oxmoe"
# A step of more tokens is not called a decode step.
DECODE = 256
GPU_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, DECODE, 1024, 4096)
CPU_TOKENS = (1, 8, 64)
# Format -> SGLang's layers for it on Hopper, by the bench's names. SGLang has none for MXFP8 there.
SGLANG: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("bf16", "f16", "fp8_block", "fp8_tensor-token", "fp8_tensor-static"), ("sglang-triton",)),
    "mxfp4": ("marlin",),
    "nvfp4": ("marlin",),
    "int4": ("marlin", "sglang-triton"),
    "int4-zeros": ("sglang-triton",),
    "mxfp8": (),
}
# SGLang has no layers for CPUs without an extension of Intel's, so plain torch stands for them.
ON_CPU = ("torch-loop",)
_DEFAULTS = {"activation": "silu", "gated": True, "layout": "gate_up", "clamp": "before"}


@dataclass(frozen=True)
class Kind:
    """MoE layers of one format and activation."""

    name: str  # its name in the table
    count: int  # such layers in the model
    label: str  # the format in words
    layer: RankLayer
    shape: Shape
    router: dict[str, Any]

    @property
    def format(self) -> str:
        return self.layer.format

    def peers(self, device: str) -> tuple[str, ...]:
        """Returns the names of SGLang's layers for this kind."""
        if device == "cpu":
            return ON_CPU
        own = ("triton_kernels",) if self.format == "mxfp4" and self.shape.gpt_oss else ()
        return own + SGLANG[self.format]


@dataclass
class Model:
    architecture: str
    tp: int
    ep: int
    kinds: list[Kind]
    notes: list[str] = field(default_factory=list)

    @property
    def count(self) -> int:
        return sum(kind.count for kind in self.kinds)


def _shape(layer: RankLayer, architecture: str) -> Shape:
    if not layer.options["gated"]:
        raise UsageError(f"--model: {architecture} has experts without gates, and the bench draws gated ones alone")
    sizes = (layer.experts, layer.top_k, layer.hidden, layer.intermediate)
    options = {name: value for name, value in layer.options.items() if value != _DEFAULTS.get(name)}
    options = {name: value for name, value in options.items() if value is not None}
    if layer.biases and options == GPT_OSS:
        return Shape(*sizes, gpt_oss=True)
    if layer.biases:
        return ModelShape(*sizes, gpt_oss=True, more=tuple(options.items()))
    if set(options) <= {"limit"}:
        return Shape(*sizes, limit=options.get("limit"))
    return ModelShape(*sizes, more=tuple(options.items()))


def gpu_of(device: str) -> str:
    """Returns the architecture by which the model is judged: this GPU's, or Hopper's for a run on the CPU."""
    if device == "cpu":
        return HOPPER
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}"


def load(path: str, tp: int, ep: int, device: str) -> Model:
    """Reads the MoE layers of a config.json or of a model's folder. Raises UsageError in the words of `python -m oxmoe
    check`."""
    try:
        with limited(path):
            checkpoint = read(path)
            report = judge(checkpoint, Server(installed() or capabilities.LAST, tp, ep, gpu_of(device)), [1])
            router = routing(checkpoint)
    except Unreadable as error:
        raise UsageError(printable(f"--model: {error}")) from error
    if not report.served:
        reasons = "; ".join(report.refused)
        raise UsageError(printable(f"--model: {report.architecture or path} is not served: {reasons}"))
    short = report.architecture.removesuffix("ForCausalLM").removesuffix("ForConditionalGeneration")
    name = short + (f"-tp{tp}" if tp > 1 else "") + (f"-ep{ep}" if ep > 1 else "")
    kinds = []
    for kind in report.kinds:
        if kind.kind == "moe":
            layer = kind.rank_layer
            assert layer is not None
            # A rank with a part of the experts gets a part of the router's choice, so it has no groups of its own.
            own = {} if ep > 1 else router
            kinds.append(Kind(name, kind.count, kind.format, layer, _shape(layer, report.architecture), own))
    found = Model(report.architecture, tp, ep, kinds)
    if ep > 1:
        found.notes.append(f"--ep {ep}: a call has the mean share of a rank, and plain top-k among its experts")
    if any(kind.kind == "shared" for kind in report.kinds):
        found.notes.append("shared experts are not timed: SGLang's linear layers run them, unless it fuses them")
    if any(kind.kind == "draft" for kind in report.kinds):
        found.notes.append("draft (MTP) layers are not counted")
    return found


def described(model: Model, device: str) -> list[str]:
    """Returns the lines above the table."""
    ranks = f"--tp {model.tp}" + (f" --ep {model.ep}" if model.ep > 1 else "")
    lines = [f"{model.architecture}, {ranks}: {model.count} MoE layers a rank"]
    for kind in model.kinds:
        shape, scoring = kind.shape, "sigmoid, groups and a bias" if kind.router else "softmax"
        sizes = f"{shape.experts} experts, top-{shape.top_k}, {shape.hidden} x {shape.intermediate}"
        lines.append(f"{kind.count} of {kind.label}: timed as {kind.format}, {sizes}, {scoring}")
    lines += [f"note: {note}" for note in model.notes]
    if device == "cpu":
        lines.append(
            "note: on this CPU a layer is timed alone by the wall clock, against plain torch. It says nothing of a GPU."
        )
    return lines


def require_memory(kind: Kind, count: int, device: str) -> None:
    """Raises UsageError if `count` layers of this kind do not fit into free memory, with as much again for a peer."""
    shape = kind.shape
    numbers = 3 * shape.experts * shape.hidden * shape.intermediate
    needed = round(2 * count * numbers * FORMATS[kind.format][1] / 8)
    if device == "cuda":
        free = torch.cuda.mem_get_info()[0]
    else:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > free:
        layers = f"{count} layer{'s' * (count > 1)}, ours and a peer's, need"
        raise UsageError(
            f"--model: {layers} {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free: give a larger --tp or --ep"
        )


# The gain of a step


def _best(cell: Cell) -> tuple[str, float] | None:
    others = {name: us for name, us in cell.times.items() if name != OURS}
    return min(others.items(), key=lambda item: item[1]) if others else None


def gain(model: Model, cells: Sequence[Mapping[int, Cell]], tokens: int, step_ms: float | None) -> str:
    """Says what a decode step of this many requests gains. cells: the cells of each kind, by the tokens of a call."""
    step = f"a decode step of {tokens} request{'s' * (tokens > 1)} runs {model.count} MoE layers"
    found = [of.get(kind.layer.share(tokens)) for kind, of in zip(model.kinds, cells, strict=True)]
    timed = [cell for cell in found if cell is not None]
    if len(timed) < len(found):
        return f"{step}: not all were timed"
    whole = sum(kind.count * cell.times[OURS] for kind, cell in zip(model.kinds, timed, strict=True))
    best = [_best(cell) for cell in timed]
    compared = [pair for pair in best if pair is not None]
    if len(compared) < len(best):
        return f"{step}: they take {whole:.1f} us on oxmoe, and no peer ran to compare them with"
    saved, terms = 0.0, []
    for kind, cell, (_, us) in zip(model.kinds, timed, compared, strict=True):
        saved += kind.count * (us - cell.times[OURS])
        terms.append(f"{kind.count} x ({us:.1f} - {cell.times[OURS]:.1f})")
    peers = " and ".join(dict.fromkeys(name for name, _ in compared))
    if not {name for name, _ in compared}.isdisjoint(ON_CPU):
        peers += ", which is not what SGLang runs"
    what = f"saves {saved:.1f} us a step" if saved >= 0 else f"takes {-saved:.1f} us a step more"
    share = "" if step_ms is None else f", {abs(saved) / (10 * step_ms):.1f} % of {step_ms:g} ms"
    return f"{step}: oxmoe {what}{share} ({' + '.join(terms)} us, against {peers})"


def lines_of(kind: Kind, cells: Mapping[int, Cell]) -> dict[str, list[tuple[int, float]]]:
    """Returns the lines of a kind's chart by name, the floor last."""
    found: dict[str, list[tuple[int, float]]] = {}
    for tokens, cell in cells.items():
        for name, us in cell.times.items():
            found.setdefault(name, []).append((tokens, float(us)))
    floor = [(tokens, cell.floor_us) for tokens, cell in cells.items() if cell.floor_us]
    return {**found, "floor": floor} if floor else found
