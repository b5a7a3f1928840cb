"""Times one MoE layer from router logits to combined output. One process times oxmoe and every peer in turn.

On a GPU each backend has one CUDA graph, which runs several layers with different weights, so none finds its
weights in L2. The graphs are replayed in rounds, backend after backend, and the median over all rounds counts. On a
CPU the median wall clock counts.
Every backend is checked against oxmoe.reference in each cell before it is timed. A row also has the shortest and the
longest time, the commit, the driver and the GPU's clocks.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

import oxmoe
from oxmoe.tools.bench import (
    against,
    allreduce,
    allreduce_peers,
    chart,
    distance,
    floors,
    layers,
    machine,
    masked,
    model,
    overhead,
    report,
)
from oxmoe.tools.bench.backend import Backend, Oxmoe
from oxmoe.tools.bench.layers import FORMATS
from oxmoe.tools.bench.peers import PEERS
from oxmoe.tools.bench.timing import Protocol, times_us
from oxmoe.tools.command import MOST_TOKENS, Listed, UsageError, a_name, known, listed, real, require_writable, whole

GPU_SHAPES = ("qwen3-30b-a3b", "mixtral-8x7b-tp2", "gpt-oss-20b")
GPU_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384)
CPU_SHAPES, CPU_TOKENS = ("granite-1b-a400m",), (1, 64)


# Flags of the protocol. A CPU run has no use for them: it has no graphs, and takes about a second by the wall clock.
PROTOCOL: dict[str, Any] = {"layers": 3, "rounds": 3, "replays": 7, "sustain": 0.0}

# Kind of run -> the flags that it reads. Any other flag is refused.
RUNS: dict[str, tuple[str, ...]] = {
    "table": ("run",),
    "allreduce": ("tokens", "peers", "json", "run"),
    "overhead": ("device", "json", "run"),
    "distance": ("shapes", "format", "tokens", "device"),
    "against": ("shapes", "format", "tokens", "device", "json", "run", "rounds", "replays"),
    "model": ("tp", "ep", "tokens", "peers", "device", "json", "run", "plot", "step_ms", *PROTOCOL),
    "layout masked": ("layout", "shapes", "format", "tokens", "fill", "peers", "device", "json", "run", *PROTOCOL),
    "layout routed": (
        *("layout", "shapes", "format", "tokens", "pattern", "peers", "device", "json", "run", "plot"),
        *PROTOCOL,
    ),
}

_names = listed(a_name)
_counts = listed(whole(1, MOST_TOKENS))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shapes", type=_names, help=f"comma-separated, of: {', '.join(layers.SHAPES)}")
    parser.add_argument("--tokens", type=_counts, nargs="+", action=Listed, help="comma-separated token counts")
    parser.add_argument(
        "--pattern",
        type=_names,
        help=f"comma-separated, of: {', '.join(layers.PATTERNS)}: given hands over ids and weights, as SGLang's layers "
        "do, hot gives half of the tokens one expert in common, one gives every slot the same expert, grouped has "
        "DeepSeek-V3's router (default: uniform, which hands over router logits)",
    )
    parser.add_argument("--format", type=_names, help=f"comma-separated, of: {', '.join(FORMATS)} (default: bf16)")
    parser.add_argument("--peers", type=_names, help=f"comma-separated, of: {', '.join(PEERS)}, none; default: all")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    parser.add_argument(
        "--layers", type=whole(1, 64), help="layers in one CUDA graph, each with its own weights (default: 3)"
    )
    parser.add_argument("--rounds", type=whole(1, 1000), help="turns that each backend gets in a cell (default: 3)")
    parser.add_argument("--replays", type=whole(1, 1000), help="timed replays in each round (default: 7)")
    parser.add_argument(
        "--sustain",
        type=real(0, 3600),
        metavar="SECONDS",
        help="replay for so long before each round: prefill then runs at the power limit, as under load (default: 0)",
    )
    parser.add_argument(
        "--layout",
        choices=("routed", "masked"),
        help="masked: moe_masked on rows in expert order, nothing else; layers: " + ", ".join(masked.LAYERS) + "; "
        "peers: " + ", ".join(masked.PEERS) + "; --tokens: of each rank; one more format: fp8_block-bf16 "
        "(default: routed)",
    )
    parser.add_argument(
        "--fill",
        type=listed(real(0, 100)),
        help=f"with --layout masked: comma-separated shares of m = {masked.FILL_ROOM}, in percent",
    )
    parser.add_argument("--table", nargs="+", metavar="FILE", help="print JSON lines as a Markdown table, and no more")
    parser.add_argument(
        "--against",
        nargs="+",
        metavar="FILE",
        help="time the cells of these result files that were measured on this kind of card, all or those of "
        f"--shapes, --format and --tokens; name each that is more than {against.LOSS:.0%}% slower than it was, and "
        "fail if one is",
    )
    parser.add_argument(
        "--distance", action="store_true", help="print how far results are from fp32 arithmetic, and time nothing"
    )
    parser.add_argument("--overhead", action="store_true", help="time the Python call alone, and nothing else")
    parser.add_argument(
        "--allreduce",
        type=whole(2, 8),
        metavar="GPUS",
        help="time allreduce_fusion between so many GPUs, and nothing else; peers: " + ", ".join(allreduce_peers.PEERS),
    )
    parser.add_argument(
        "--model",
        metavar="CONFIG",
        help="time the MoE layers of a model, a config.json or a folder with one as `python -m oxmoe check` reads it, "
        "as one rank runs them, against SGLang's layers for the format; end with what a decode step gains",
    )
    ranks = whole(1, 1024)
    parser.add_argument("--tp", "--tp-size", type=ranks, help="with --model: SGLang's --tp-size (default: 1)")
    parser.add_argument("--ep", "--ep-size", type=ranks, help="with --model: SGLang's --ep-size (default: 1)")
    parser.add_argument(
        "--step-ms",
        type=real(1e-3, 1e6),
        metavar="MS",
        help="with --model and one number of --tokens: the time of such a step, of which the gain is a share",
    )
    parser.add_argument("--json", metavar="FILE", help="append one JSON object a line for each measurement")
    parser.add_argument(
        "--run",
        type=a_name,
        metavar="NAME",
        help="with --json: write NAME into the field run of each row; with --table: print only the rows of this run",
    )
    parser.add_argument(
        "--plot",
        metavar="FILE",
        help="time over tokens for each shape (needs matplotlib; with --model FILE.svg, which needs nothing)",
    )


def _kind(args: argparse.Namespace) -> str:
    """Returns which of RUNS the arguments ask for. Raises UsageError for several, or for a flag that the run does not
    read."""
    given = [
        flag for flag, value in vars(args).items() if flag != "command" and value is not None and value is not False
    ]
    kinds = [kind for kind in RUNS if kind in given]
    if len(kinds) > 1:
        raise UsageError(f"--{kinds[0]} and --{kinds[1]} are runs of their own: give one of them")
    kind = kinds[0] if kinds else f"layout {args.layout or 'routed'}"
    unread = [f"--{flag.replace('_', '-')}" for flag in given if flag != kind and flag not in RUNS[kind]]
    if unread and not kinds and args.layout is None:
        # The user named no kind of run, so the error names the one that the flag belongs to.
        owner = next(name for name, flags in RUNS.items() if unread[0].removeprefix("--").replace("-", "_") in flags)
        raise UsageError(f"{unread[0]} belongs to --{owner}: give it, too")
    if unread:
        raise UsageError(f"--{kind} does not read {', '.join(unread)}")
    if args.run and kind != "table" and not args.json:
        raise UsageError("--run names the rows of --json: give --json, too")
    return kind


def _environment(args: argparse.Namespace, device: str) -> dict[str, Any]:
    """Returns the fields that all rows of this run have in common, the name of the run first."""
    named = {} if args.run is None else {"run": args.run}
    return {**named, **machine.environment(device)}


def _protocol(args: argparse.Namespace, device: str) -> Protocol:
    given = {flag: getattr(args, flag) for flag in PROTOCOL if getattr(args, flag) is not None}
    if device == "cuda":
        return Protocol(*(PROTOCOL | given).values())
    if given:
        raise UsageError(f"a run on the CPU does not read {', '.join(f'--{flag}' for flag in given)}")
    # A CPU has no graph to replay: one layer is timed by the wall clock for about a second.
    return Protocol(1, 1, 0, 0.0)


def _device(args: argparse.Namespace) -> str:
    here = torch.cuda.is_available()
    if args.device == "cuda" and not here:
        raise UsageError("--device cuda: torch sees no CUDA GPU here")
    return args.device or ("cuda" if here else "cpu")


def _peers(args: argparse.Namespace, choices: Any) -> list[str]:
    return [] if args.peers == ["none"] else known("peer", args.peers or list(choices), choices)


def _progress(text: str) -> None:
    """Writes the line under the table over the last one; nothing if output is not a terminal."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def _start(name: str, shape: layers.Shape, weights: list[layers.Weights], tokens: list[int]) -> Backend | str:
    """Returns the peer with these weights, or why it does not start."""
    try:
        peer = PEERS[name](shape, weights)
        peer.prepare(tokens)
        return peer
    except Exception as error:  # a peer is foreign code: whatever it raises is a reason to go on without it
        return f"does not start: {type(error).__name__}: {error}"


class _Bench:
    """One run: it holds what is the same for all of its cells."""

    def __init__(self, device: str, protocol: Protocol, output: report.Report):
        self.device, self.protocol, self.output = device, protocol, output
        self.right = True

    def shape(self, name: str, format_name: str, patterns: list[str], tokens: list[int], peers: list[str]) -> None:
        """Measures all cells of one shape."""
        self.layer(name, layers.SHAPES[name], format_name, patterns, tokens, peers)

    def layer(
        self,
        name: str,
        shape: layers.Shape,
        format_name: str,
        patterns: list[str],
        tokens: list[int],
        peers: list[str],
        router: dict[str, Any] | None = None,
    ) -> None:
        """Measures all cells of a layer that goes by this name in the table. router: see `layers.make_inputs`."""
        (dtype, weight_bits), count = FORMATS[format_name], self.protocol.layers
        _progress(f"{name} {format_name}: making weights")
        weights = layers.weights_of(format_name, shape, self.device, count)
        backends: list[Backend] = [Oxmoe(shape, weights)]
        for peer in peers:
            if format_name not in PEERS[peer].formats:
                self.output.skip(peer, f"has no {format_name} weights")
                continue
            _progress(f"{name} {format_name}: starting {peer}")
            started = _start(peer, shape, weights, tokens)
            if isinstance(started, str):
                self.output.skip(peer, started)
            else:
                backends.append(started)
        for pattern in patterns:
            for number in tokens:
                inputs = layers.make_inputs(shape, number, dtype, self.device, count, pattern, router)
                least = layers.floors_of(shape, inputs, self.device, format_name, weight_bits)
                cell = report.Cell("moe", name, format_name, pattern, number, None if least is None else least.ideal)
                cell.own_floor_us = None if least is None else least.own
                cell.layer = shape
                cell.ceilings = floors.described(floors.ceilings(self.device))
                self._cell(cell, backends, weights, inputs)

    def _cell(
        self, cell: report.Cell, backends: list[Backend], weights: list[layers.Weights], inputs: list[layers.Inputs]
    ) -> None:
        where = f"{cell.shape} {cell.format} {cell.pattern} M={cell.tokens}"
        calls: dict[str, Sequence[Callable[[], Tensor]]] = {}
        # One layer is checked. With few tokens all layers are, since a single row's share of moved elements is luck.
        checked = 1 if cell.tokens >= 8 else len(inputs)
        shape, pairs = backends[0].shape, list(zip(weights[:checked], inputs, strict=False))
        truths = {
            rounded: torch.cat([layers.expected(shape, weight, item, rounded=rounded) for weight, item in pairs])
            for rounded in {backend.rounds_activations for backend in backends}
        }
        for backend in backends:
            _progress(f"{where}: checking {backend.name}")
            try:
                calls[backend.name] = backend.calls(inputs)
                some = enumerate(calls[backend.name][:checked])
                result = torch.cat([backend.result(index, call()) for index, call in some])
            except Exception as error:
                if isinstance(backend, Oxmoe):
                    raise
                calls.pop(backend.name, None)
                self.output.skip(f"{backend.name} at {where}", f"failed: {type(error).__name__}: {error}")
                continue
            truth = truths[backend.rounds_activations]
            if isinstance(backend, Oxmoe):
                wrong = layers.error(result, truth, cell.format)
                if wrong is not None:
                    self.right = False
                    self.output.wrong(cell, wrong)
                    return
            elif backend.same_layer():
                wrong = layers.peer_error(result, truth, backend.most_error)
                if wrong is not None:
                    del calls[backend.name]
                    self.output.skip(f"{backend.name} at {where}", wrong)
        _progress(f"{where}: timing")
        cell.times, failed = times_us(calls, self.device, self.protocol, ours=Oxmoe.name)
        for name, reason in failed.items():
            self.output.skip(f"{name} at {where}", f"failed: {reason}")
        cell.details = {backend.name: backend.detail for backend in backends if backend.detail is not None}
        _progress("")
        self.output.add(cell)


def _masked(args: argparse.Namespace, device: str, protocol: Protocol) -> int:
    names = known("layer", args.shapes or list(masked.DEFAULT_LAYERS), masked.LAYERS)
    formats = known("format", args.format or ["bf16"], masked.FORMATS)
    peers = _peers(args, masked.PEERS)
    neither = args.fill is None and args.tokens is None
    fill = list(masked.DEFAULT_FILL) if neither else args.fill or []
    tokens = list(masked.DEFAULT_TOKENS) if neither else args.tokens or []
    cases = [
        *((f"{share:g} % of m", functools.partial(masked.share, percent=share)) for share in fill),
        *((f"{count} tokens a rank", functools.partial(masked.sent, tokens=count)) for count in tokens),
    ]
    of_formats = {name: FORMATS[name.removesuffix("-bf16")] for name in formats}
    require_writable("--json", args.json)
    right = masked.run(names, of_formats, cases, peers, device, protocol, _environment(args, device), args.json)
    return 0 if right else 1


def _overhead(args: argparse.Namespace, device: str) -> int:
    require_writable("--json", args.json)
    environment, rows = _environment(args, device), overhead.measure(device)
    report.print_overhead(rows)
    report.append_json(args.json, [{**row, **environment} for row in rows])
    return 0


def _allreduce(args: argparse.Namespace) -> int:
    peers = _peers(args, allreduce_peers.PEERS)
    require_writable("--json", args.json)
    environment = _environment(args, "cuda" if torch.cuda.is_available() else "cpu")
    return allreduce.run(args.allreduce, args.tokens, peers, args.json, environment)


def _formats(args: argparse.Namespace, device: str) -> list[str]:
    formats = known("format", args.format or ["bf16"], FORMATS)
    for name, served in oxmoe.device_info()["formats"].items():
        if name in formats and device not in served:
            raise UsageError(f"format {name} runs on {', '.join(served)}, not on {device}")
    return formats


def _routed(args: argparse.Namespace, device: str, protocol: Protocol) -> int:
    formats = _formats(args, device)
    shapes = known("shape", args.shapes or list(GPU_SHAPES if device == "cuda" else CPU_SHAPES), layers.SHAPES)
    tokens = args.tokens or list(GPU_TOKENS if device == "cuda" else CPU_TOKENS)
    patterns = known("pattern", args.pattern or ["uniform"], layers.PATTERNS)
    peers = _peers(args, PEERS)
    if args.plot and find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib (pip install matplotlib)")
    require_writable("--plot", args.plot)
    require_writable("--json", args.json)

    reasons = {peer: PEERS[peer].missing(device) for peer in peers}
    peers = [peer for peer in peers if reasons[peer] is None]
    output = report.Report(peers, {**vars(protocol), **_environment(args, device)}, args.json)
    floors.say(floors.ceilings(device))
    for peer, reason in reasons.items():
        if reason is not None:
            output.skip(peer, reason)
    bench = _Bench(device, protocol, output)
    for format_name in formats:
        for shape_name in shapes:
            bench.shape(shape_name, format_name, patterns, tokens, peers)
            if device == "cuda":
                torch.cuda.empty_cache()
    if args.plot:
        report.plot(output.cells, args.plot)
    return 0 if bench.right else 1


def _against(args: argparse.Namespace, device: str) -> int:
    environment = _environment(args, device)
    wanted = against.Wanted(
        known("shape", args.shapes, layers.SHAPES) if args.shapes else None,
        _formats(args, device) if args.format else None,
        args.tokens,
    )
    before = against.recorded(report.read_json(args.against, flag="--against"), environment, wanted)
    require_writable("--json", args.json)
    base = _protocol(argparse.Namespace(**{**vars(args), "layers": None, "sustain": None}), device)

    def measure(keys: Sequence[against.Key]) -> list[report.Cell]:
        """Measures these cells, each with the layers and the sustained seconds that it was recorded with."""
        cells: list[report.Cell] = []
        for (name, format_name, pattern, count, sustain), tokens in against.grouped(keys).items():
            protocol = base if device == "cpu" else replace(base, layers=count, sustain_s=sustain)
            output = report.Report([], {**vars(protocol), **environment}, args.json)
            bench = _Bench(device, protocol, output)
            bench.shape(name, format_name, [pattern], tokens, [])
            cells += output.cells
        return cells

    return against.compare(before, measure)


def _model(args: argparse.Namespace, device: str) -> int:
    protocol, tokens = _protocol(args, device), args.tokens
    if args.step_ms is not None and (tokens is None or len(set(tokens)) != 1):
        raise UsageError("--step-ms is the time of one step: give its number of requests as --tokens")
    if args.plot and not args.plot.endswith(".svg"):
        raise UsageError(f"--plot: with --model expected FILE.svg, got {args.plot}")
    tokens = sorted(set(tokens or (model.GPU_TOKENS if device == "cuda" else model.CPU_TOKENS)))
    asked = None if args.peers is None else _peers(args, PEERS)
    loaded = model.load(args.model, args.tp or 1, args.ep or 1, device)
    for kind in loaded.kinds:
        model.require_memory(kind, protocol.layers, device)
    require_writable("--plot", args.plot)
    require_writable("--json", args.json)

    of_kinds = [list(kind.peers(device)) if asked is None else asked for kind in loaded.kinds]
    peers = list(dict.fromkeys(peer for of in of_kinds for peer in of))
    reasons = {peer: PEERS[peer].missing(device) for peer in peers}
    for line in model.described(loaded, device):
        print(line)
    of_model = {"model": loaded.architecture, "tp": loaded.tp, "ep": loaded.ep}
    common = {**vars(protocol), **_environment(args, device), **of_model}
    output = report.Report([peer for peer in peers if reasons[peer] is None], common, args.json)
    floors.say(floors.ceilings(device))
    for peer, reason in reasons.items():
        if reason is not None:
            output.skip(peer, reason)
    bench, cells = _Bench(device, protocol, output), []
    for kind, names in zip(loaded.kinds, of_kinds, strict=True):
        output.environment = {**common, "model_layers": kind.count}
        runs = [peer for peer in names if reasons[peer] is None]
        calls = list(dict.fromkeys(kind.layer.share(number) for number in tokens))
        done = len(output.cells)
        bench.layer(kind.name, kind.shape, kind.format, ["uniform"], calls, runs, kind.router)
        cells.append({cell.tokens: cell for cell in output.cells[done:]})
        if device == "cuda":
            torch.cuda.empty_cache()
    for number in tokens:
        if number <= model.DECODE:
            print(model.gain(loaded, cells, number, args.step_ms))
    panels = {
        f"{kind.name}: {kind.count} layers of {kind.label}": model.lines_of(kind, of)
        for kind, of in zip(loaded.kinds, cells, strict=True)
        if of
    }
    if args.plot and panels:
        with open(args.plot, "w", encoding="utf-8") as file:
            file.write(chart.svg(panels))
    return 0 if bench.right else 1


def run(args: argparse.Namespace) -> int:
    """Runs the bench. It reports everything that can be wrong with the arguments before it measures anything."""
    kind = _kind(args)
    if kind == "table":
        print(report.markdown(report.read_json(args.table, args.run)))
        return 0
    if kind == "allreduce":
        return _allreduce(args)
    device = _device(args)
    if kind == "overhead":
        return _overhead(args, device)
    if kind == "model":
        return _model(args, device)
    if kind == "distance":
        formats = _formats(args, device)
        shapes = known("shape", args.shapes or list(GPU_SHAPES if device == "cuda" else CPU_SHAPES), layers.SHAPES)
        distance.run(shapes, formats, args.tokens or [64], device)
        return 0
    if kind == "against":
        return _against(args, device)
    run = _masked if kind == "layout masked" else _routed
    return run(args, device, _protocol(args, device))
