"""Times one MoE layer, router logits to combined output, ours and every peer in one process in turn.

On a GPU: median of replays of one CUDA graph that runs several layers with different weights, so none finds its weights
in L2. On CPU: median wall clock. Ours is checked against oxmoe.reference in each cell before it is timed.
"""

from __future__ import annotations

import argparse
import datetime
import shlex
import sys
from importlib.util import find_spec
from typing import Any

import oxmoe
import torch
from oxmoe.bench import layers, overhead, report
from oxmoe.bench.peers import PEERS, Backend, Oxmoe

FORMATS = {"bf16": torch.bfloat16, "f16": torch.float16}
GPU_SHAPES, GPU_TOKENS = ("qwen3-30b-a3b", "mixtral-8x7b-tp2"), (1, 4, 16, 64, 256, 1024, 4096, 16384)
CPU_SHAPES, CPU_TOKENS = ("granite-1b-a400m",), (1, 64)


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _numbers(text: str) -> list[int]:
    return [int(number) for number in _names(text)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shapes", type=_names, help=f"comma-separated, of: {', '.join(layers.SHAPES)}")
    parser.add_argument("--tokens", type=_numbers, help="comma-separated token counts")
    parser.add_argument("--format", type=_names, default=["bf16"], help=f"comma-separated, of: {', '.join(FORMATS)}")
    parser.add_argument("--peers", type=_names, help=f"comma-separated, of: {', '.join(PEERS)}, none; default: all")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    parser.add_argument("--layers", type=int, default=3, help="layers in one CUDA graph, each with its own weights")
    parser.add_argument("--overhead", action="store_true", help="time the Python call alone, and nothing else")
    parser.add_argument("--json", metavar="FILE", help="append one JSON object a line for each measurement")
    parser.add_argument("--plot", metavar="FILE", help="time over tokens for each shape (needs matplotlib)")


def _known(kind: str, names: list[str], known: Any) -> list[str]:
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SystemExit(f"bench: unknown {kind} {', '.join(unknown)}; known: {', '.join(known)}")
    return names


def _progress(text: str) -> None:
    """The line under the table, overwritten; nothing where output is not a terminal."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def _start(name: str, shape: layers.Shape, weights: list[layers.Weights]) -> Backend | str:
    """The peer with these weights, or why it does not start."""
    try:
        return PEERS[name](shape, weights)
    except Exception as error:  # a peer is foreign code: whatever it raises is a reason to go on without it
        return f"does not start: {type(error).__name__}: {error}"


def _environment(device: str) -> dict[str, Any]:
    return {
        "gpu": torch.cuda.get_device_name() if device == "cuda" else None,
        "cpu": oxmoe.device_info()["cpu"],
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "oxmoe": oxmoe.__version__,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", "oxmoe", *sys.argv[1:]]),
    }


def _bench_shape(
    name: str, format_name: str, tokens: list[int], peers: list[str], count: int, device: str, output: report.Report
) -> bool:
    """All cells of one shape; False if ours was wrong in one."""
    shape = layers.SHAPES[name]
    _progress(f"{name} {format_name}: making weights")
    weights = layers.make_weights(shape, FORMATS[format_name], device, count)
    ours, others, right = Oxmoe(shape, weights), {}, True
    for peer in peers:
        started = _start(peer, shape, weights)
        if isinstance(started, str):
            output.skip(peer, started)
        else:
            others[peer] = started
    for number in tokens:
        inputs = layers.make_inputs(shape, number, FORMATS[format_name], device, count)
        cell = report.Cell("moe", name, format_name, number, layers.floor_us(shape, inputs, device))
        _progress(f"{name} {format_name} M={number}: checking")
        wrong = layers.error(shape, weights[0], inputs[0], ours.calls(inputs)[0]())
        if wrong is not None:
            right = False
            output.wrong(cell, wrong)
            continue
        for backend in (ours, *others.values()):
            _progress(f"{name} {format_name} M={number}: {backend.name}")
            try:
                cell.times[backend.name] = layers.time_us(backend.calls(inputs), device)
            except Exception as error:
                if backend is ours:
                    raise
                output.skip(f"{backend.name} at M={number}", f"failed: {type(error).__name__}: {error}")
        _progress("")
        output.add(cell)
    return right


def run(args: argparse.Namespace) -> int:
    if args.plot and find_spec("matplotlib") is None:
        raise SystemExit("bench: --plot needs matplotlib (pip install oxmoe[bench])")
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    environment = _environment(device)
    if args.overhead:
        rows = overhead.measure(device)
        report.print_overhead(rows)
        report.append_json(args.json, [{**row, **environment} for row in rows])
        return 0
    shapes = _known("shape", args.shapes or list(GPU_SHAPES if device == "cuda" else CPU_SHAPES), layers.SHAPES)
    tokens = args.tokens or list(GPU_TOKENS if device == "cuda" else CPU_TOKENS)
    formats = _known("format", args.format, FORMATS)
    peers = [] if args.peers == ["none"] else _known("peer", args.peers or list(PEERS), PEERS)
    if device == "cpu":
        args.layers = 1

    reasons = {peer: PEERS[peer].missing(device) for peer in peers}
    peers = [peer for peer in peers if reasons[peer] is None]
    output = report.Report(peers, environment, args.json)
    for peer, reason in reasons.items():
        if reason is not None:
            output.skip(peer, reason)
    right = True
    for format_name in formats:
        for name in shapes:
            right &= _bench_shape(name, format_name, tokens, peers, args.layers, device, output)
            if device == "cuda":
                torch.cuda.empty_cache()
    if args.plot:
        report.plot(output.cells, args.plot)
    return 0 if right else 1
