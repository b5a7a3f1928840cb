"""Runs layers and all-reduces under load, beside others, and with faults: `python benches/reliability.py SCENARIO...`.

Each scenario runs in a process of its own with a limit of seconds, and prints one JSON row. Its "outcome" is right,
wrong (values whose bits differ), failed, "out of time", or skipped with the reason. The exit status is 1 if one is
neither right nor skipped.

- soak: random calls of random layers in every format, each compared with the first result of the same input; memory
  is constant.
- workspaces: workspaces of MoE calls that live beside each other.
- updates: graphs of layers whose weights change between replays.
- oom: device memory ends in the middle of a capture.
- processes: two processes share a GPU.
- mps: two clients of MPS share a GPU, one with a quarter of it.
- allreduce: random all-reduce calls of two ranks, or of `--ranks`.
- replays: replays of graphs with layers and all-reduces of these ranks.
- cycles: all-reduce workspaces that are made and destroyed.
- killed: a rank is killed before each step of the all-reduce's protocol.

`--json FILE --run NAME` appends the rows that were not skipped. `--table FILE` prints them as docs/reliability.md has
them.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import sys
import time
from pathlib import Path
from typing import Any

# NVLink multicast stays off, whatever a library would choose.
os.environ |= {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}

import torch
from load import killed, layers, ranks, sharing
from load.common import Failed, Row, Skipped, inner

from oxmoe.tools.bench import machine
from oxmoe.tools.command import Parser, UsageError, a_name, real, require_writable, whole

SCENARIOS = {**layers.SCENARIOS, **sharing.SCENARIOS, **ranks.SCENARIOS, **killed.SCENARIOS}
# A scenario's options besides the device, and its limit in seconds: (on a GPU, on a CPU).
DEFAULTS: dict[str, tuple[Row, Row]] = {
    "soak": ({"seconds": 60.0, "shapes": 3, "batches": 8}, {"seconds": 60.0, "shapes": 2, "batches": 4}),
    "workspaces": ({"count": 10_000}, {"count": 10_000}),
    "updates": ({"replays": 10_000}, {"replays": 10_000}),
    "oom": ({"rounds": 20}, {"rounds": 20}),
    "processes": ({"seconds": 10.0}, {"seconds": 10.0}),
    "mps": ({"seconds": 10.0}, {"seconds": 10.0}),
    "allreduce": ({"calls": 1_000_000, "ranks": 2}, {"calls": 5_000, "ranks": 2}),
    "replays": ({"replays": 100_000, "ranks": 2}, {"replays": 100_000, "ranks": 2}),
    "cycles": ({"count": 500, "ranks": 2}, {"count": 200, "ranks": 2}),
    "killed": ({"beside": 6, "victims": [0, 1], "ranks": 2}, {"beside": 1, "victims": [0, 1], "ranks": 2}),
}
LIMITED = ("processes", "mps", "allreduce", "replays", "cycles")  # scenarios whose own processes have a limit, too
RIGHT = ("right", "skipped")


def environment(device: str) -> Row:
    found = machine.environment(device, "benches/reliability.py")
    if device == "cuda":
        found["gpus"] = torch.cuda.device_count()
    return found


def inside(scenario: str, options: Row) -> int:
    """Runs a scenario in this process. The row is the last line of its output."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    started = time.monotonic()
    row: Row = {}
    try:
        found = SCENARIOS[scenario](**options)
        row = {"outcome": "wrong" if found["wrong"] else "right", **found}
    except Skipped as reason:
        row = {"outcome": "skipped", "reason": str(reason)}
    except Failed as reason:
        row = {"outcome": "failed", "reason": str(reason)}
    row["took_s"] = round(time.monotonic() - started, 1)
    row["environment"] = environment(options["device"])
    print(json.dumps(row), flush=True)
    return 0


def options_of(scenario: str, args: argparse.Namespace) -> Row:
    """Returns the scenario's options: the defaults of the device, replaced by those that the user gave."""
    options = dict(DEFAULTS[scenario][args.device == "cpu"])
    given = {
        name: getattr(args, name) for name in ("seconds", "calls", "replays", "count", "rounds", "beside", "ranks")
    }
    options |= {name: value for name, value in given.items() if value is not None and name in options}
    if scenario != "cycles":
        options["seed"] = args.seed
    if scenario in LIMITED:
        options["limit_s"] = args.limit
    return {"device": args.device, **options}


def measured(scenario: str, args: argparse.Namespace) -> Row:
    options = options_of(scenario, args)
    row = inner(scenario, options, args.limit, apart=True)
    told = {name: value for name, value in options.items() if name not in ("device", "limit_s") and name not in row}
    # A process that was ended has not said where it ran.
    found = row.pop("environment", None) or environment(args.device)
    command = shlex.join(["python", "benches/reliability.py", *machine.without_paths(sys.argv[1:])])
    named = {} if args.run is None else {"run": args.run}
    return {**named, "scenario": scenario, "device": args.device, **row, **told, **found, "command": command}


# The table of the page


def _counted(row: Row) -> str:
    """Returns what a row has counted, in words."""
    words = [
        (f"{row[name]:,} {word}")
        for name, word in (
            ("calls", "calls"),
            ("replays", "replays"),
            ("rounds", "rounds"),
            ("workspaces", "workspaces"),
            ("kills", "kills"),
            ("ranks", "ranks"),
            ("processes", "processes"),
            ("formats", "formats"),
            ("inputs", "inputs"),
        )
        if name in row
    ]
    return ", ".join(words)


def _kept(row: Row) -> str:
    """Returns the growth of the host's and the device's memory after the warm-up."""
    if "memory_before" not in row:
        return ""
    before, after = row["memory_before"], row["memory_after"]
    grown = [f"{(after['resident'] - before['resident']) / 2**20:+.1f} MiB host"]
    if "allocated" in before:
        grown.append(f"{after['allocated'] - before['allocated']:+d} bytes device")
    return ", ".join(grown)


COLUMNS = ("scenario", "where", "counted", "wrong values", "memory after the warm-up", "seconds", "commit, date")


def table(rows: list[Row]) -> str:
    lines = ["| " + " | ".join(COLUMNS) + " |", "|---" * len(COLUMNS) + "|"]
    for row in rows:
        where = row.get("gpu") or f"CPU ({row.get('cpu')})"
        wrong = str(row["wrong"]) if row["outcome"] in ("right", "wrong") else f"{row['outcome']}: {row['reason']}"
        commit = f"{str(row.get('commit'))[:7]}, {str(row.get('date'))[:10]}"
        cells = (row["scenario"], where, _counted(row), wrong, _kept(row), str(row.get("took_s", "")), commit)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def endings(rows: list[Row]) -> str:
    """Returns a table of how the other ranks ended when one was killed, from the rows that have killed some."""
    lines = ["| where | another rank's end | before which step a rank was killed |", "|---|---|---|"]
    for row in rows:
        for end, steps in row.get("ended", {}).items():
            where = row.get("gpu") or f"CPU ({row.get('cpu')})"
            where += f", {row['ranks']} ranks" if row.get("ranks", 2) > 2 else ""
            lines.append(f"| {where} | {end} | {'; '.join(steps)} |")
    return "\n".join(lines)


def read_rows(files: list[str]) -> list[Row]:
    """Returns the rows of these files; for each scenario, device, card and number of ranks only the last one."""
    latest: dict[tuple[Any, ...], Row] = {}
    for file in files:
        for line in Path(file).read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            latest.pop(key := (row["scenario"], row["device"], row.get("gpu"), row.get("ranks", 2)), None)
            latest[key] = row
    return list(latest.values())


def parser() -> Parser:
    form = argparse.RawTextHelpFormatter
    made = Parser(prog="python benches/reliability.py", description=__doc__, formatter_class=form)
    made.add_argument("scenarios", nargs="*", metavar="SCENARIO", help=f"{', '.join(SCENARIOS)}, or all")
    made.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda if torch sees a GPU")
    limit: dict[str, Any] = {"type": real(1, 1e6), "default": 300.0, "metavar": "SECONDS"}
    made.add_argument("--limit", **limit, help="of each scenario (default 300)")
    made.add_argument("--seconds", type=real(0, 1e6), help="of soak, processes and mps")
    for name, of in (
        ("calls", "allreduce"),
        ("replays", "replays and updates"),
        ("count", "workspaces and cycles"),
        ("rounds", "oom"),
        ("beside", "killed: groups of ranks at a time"),
    ):
        made.add_argument(f"--{name}", type=whole(1, 1 << 40), help=f"of {of}")
    made.add_argument("--ranks", type=whole(2, 8), help="of allreduce, replays, cycles and killed (default 2)")
    made.add_argument("--seed", type=whole(0, 2**31 - 1), help="of everything random (default: a new one)")
    made.add_argument("--json", metavar="FILE", help="append the rows to this file")
    made.add_argument("--run", type=a_name, metavar="NAME", help="name of the rows of --json")
    made.add_argument("--table", nargs="+", metavar="FILE", help="print the recorded rows as the tables of the page")
    made.add_argument("--inner", nargs=2, help=argparse.SUPPRESS)
    return made


def main(arguments: list[str] | None = None) -> int:
    args = parser().parse_args(arguments)
    if args.inner:
        return inside(args.inner[0], json.loads(args.inner[1]))
    if args.table:
        rows = read_rows(args.table)
        print(table(rows), endings(rows), sep="\n\n")
        return 0
    chosen = list(SCENARIOS) if args.scenarios == ["all"] else args.scenarios
    unknown = [name for name in chosen if name not in SCENARIOS]
    if unknown or not chosen:
        raise UsageError(f"expected scenarios of {', '.join(SCENARIOS)}, or all; got {', '.join(unknown) or 'none'}")
    if args.json and not args.run:
        raise UsageError("--json needs --run NAME")
    require_writable("--json", args.json)
    if args.device is None:
        # NVML answers this, so that this process has no context on the GPU.
        args.device = "cuda" if torch.cuda.device_count() else "cpu"
    if args.seed is None:
        args.seed = int.from_bytes(os.urandom(3), "little")
    status = 0
    for scenario in chosen:
        row = measured(scenario, args)
        print(json.dumps(row), flush=True)
        if args.json and row["outcome"] != "skipped":
            with open(args.json, "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        status |= row["outcome"] not in RIGHT
    return int(status)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UsageError as error:
        print(f"python benches/reliability.py: {error}", file=sys.stderr)
        sys.exit(2)
