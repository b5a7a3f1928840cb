"""The command: its arguments, and the answer as text or JSON."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import shlex
import sys

from oxmoe.sglang import capabilities
from oxmoe.tools.check.checkpoint import Unreadable, limited, printable, read, say
from oxmoe.tools.check.layers import HOPPER, Kind, Report, Server, judge
from oxmoe.tools.command import MOST_TOKENS, Listed, architecture, listed, whole

_NEWEST = capabilities.LAST
_KINDS = {"dense": "dense layers", "moe": "MoE layers", "shared": "shared experts", "draft": "draft (MTP) layers"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Exit status: 0, SGLang with oxmoe serves the model; 1, it does not, or that is not known; 2, the input cannot "
        "be read. Reads no weights, and needs neither SGLang nor torch, a GPU or a network."
    )
    parser.add_argument(
        "path",
        metavar="CONFIG_OR_FOLDER",
        help="a config.json, or a model's folder, whose hf_quant_config.json and safetensors headers are read, too",
    )
    parser.add_argument("--sglang", help=f"release of SGLang (default: the installed one, else {_NEWEST})")
    parser.add_argument("--tp", "--tp-size", type=whole(1, 1024), default=1, help="SGLang's --tp-size (default: 1)")
    parser.add_argument("--ep", "--ep-size", type=whole(1, 1024), default=1, help="SGLang's --ep-size (default: 1)")
    parser.add_argument(
        "--gpu",
        type=_gpu,
        default=HOPPER,
        help=f"a card or an architecture, as B200 or sm_100 (default: {HOPPER}, H100)",
    )
    parser.add_argument(
        "--tokens",
        type=listed(whole(1, MOST_TOKENS)),
        nargs="+",
        action=Listed,
        default=[1, 64, 4096],
        help="of a call, for the times (default: 1 64 4096)",
    )
    parser.add_argument("--json", action="store_true", help="the answer as a JSON object")


def _gpu(text: str) -> str:
    arch = architecture(text)
    if arch == "cpu":
        raise argparse.ArgumentTypeError("expected a GPU, got 'cpu'")
    return arch


def run(args: argparse.Namespace) -> int:
    server = Server((args.sglang or installed()).removeprefix("v"), args.tp, args.ep, args.gpu)
    try:
        with limited(args.path):
            report = judge(read(args.path), server, args.tokens)
    except Unreadable as error:
        print(printable(f"python -m oxmoe check: {error}"), file=sys.stderr)
        return 2
    say(json.dumps(report.json(), indent=2) if args.json else text(report, args.path))
    return 0 if report.served else 1


def installed() -> str:
    try:
        return importlib.metadata.version("sglang").partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return _NEWEST


def text(report: Report, path: str) -> str:
    name = report.architecture if len(report.architecture) <= 200 else f"{report.architecture[:197]}..."
    lines = [f"{name or 'model'}: {'served' if report.served else 'NOT SERVED'} by {report.server}"]
    lines += [f"  refused: {reason}" for reason in report.refused]
    if report.served:
        model = shlex.quote(path) if os.path.isdir(path) else "MODEL"
        command = ["OXMOE_SGLANG=moe sglang serve --model-path", model]
        lines.append(f"  start: {' '.join([*command, *report.flags])}")
    lines += [f"  note: {note}" for note in report.notes]
    for kind in report.kinds:
        lines += _kind(kind)
    return "\n".join(map(printable, lines))


def _kind(kind: Kind) -> list[str]:
    what = {True: f"{kind.taken_by}", False: "NOT SERVED", None: "not oxmoe's"}[kind.served]
    parts = [kind.format, *(f"{name} {size}" for name, size in kind.sizes.items())]
    lines = [f"{_KINDS[kind.kind]}: {kind.count}{_numbers(kind.layers)}: {what}"]
    if any(parts):
        lines.append("  " + ", ".join(part for part in parts if part))
    if kind.bytes_per_rank:
        lines.append(f"  memory of the experts: {kind.bytes_per_rank / 2**30:.2f} GiB a rank")
    if kind.times:
        times = ", ".join(f"{row['tokens']:g}: {row['us']:.1f}" for row in kind.times)
        lines.append(f"  floor of a layer on a rank, us, by tokens (roofline; with --ep a mean share): {times}")
    lines += [f"  note: {note}" for note in kind.notes]
    return lines


def _numbers(layers: list[int]) -> str:
    """Formats numbers as ranges."""
    ranges: list[list[int]] = []
    for layer in layers:
        if ranges and layer == ranges[-1][1] + 1:
            ranges[-1][1] = layer
        else:
            ranges.append([layer, layer])
    shown = [str(first) if first == last else f"{first}-{last}" for first, last in ranges]
    return f" ({', '.join(shown if len(shown) < 9 else [*shown[:8], '...'])})" if layers else ""
