"""Random calls of the public API on CPU tensors, most of them nearly right: each result is right, or one clear error.

    python tests/support/fuzz_api.py [--seed N] [--calls N] [--seconds S] [--jobs N]    a run, which prints failures
    python tests/support/fuzz_api.py --seed N --call I                                  one call of it, told in full

A call is drawn from the seed and its number alone. It succeeds when its result is that of `oxmoe.reference`, or when it
raises ValueError, TypeError, NotImplementedError or MemoryError; when it raises, nothing may have been written, and
what is no output may never be. Calls run in processes of their own, so that one that ends its process is found.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import forked
import fuzz_calls
import fuzz_numbers
import fuzz_public
from fuzz_dlpack import Foreign, Lying
from fuzz_mutations import Subclass, mutate, to_numpy

ERRORS = (ValueError, TypeError, NotImplementedError, MemoryError)
# Other errors that are accepted. torch has no memory for a result. A number is no 64-bit one, in the words of Python's
# own functions. Functions that are written in torch get fake tensors, or tensors as options.
NAMED = re.compile(
    r"RuntimeError: .*(not enough memory|can't allocate memory|bad_alloc)"
    r"|Boolean value of Tensor|cannot be called on meta tensors|its data is not allocated yet"
    r"|DataDependentOutputException|Please convert all Tensors to FakeTensors"
)
# Errors that functions written in torch raise for numpy's arrays.
TORCH_ALONE = re.compile(
    r"expected a torch tensor|numpy does not have|got ndarray$|is a numpy array .* is a torch tensor"
)
DRAWS = [
    *([fuzz_calls.draw_moe] * 8 + [fuzz_calls.draw_fused] * 2 + [fuzz_calls.draw_rows] * 5),
    *([fuzz_public.draw_public] * 8),
    *([fuzz_calls.draw_topk] * 3 + [fuzz_calls.draw_sort] + [fuzz_calls.draw_routing] * 2),
    *(
        getattr(fuzz_numbers, name)
        for name in sorted(vars(fuzz_numbers))
        if name.startswith("draw_") and "matrix" not in name
    ),
]
# Packages that a process of calls begins with. The first fake tensor would import the compiler.
PACKAGES = (*forked.TORCH, "torch._dynamo")
# Bytes of a call's address space beyond what the process has when it starts, and a call's seconds.
ROOM, LONGEST = 3 << 30, 30


def draw(seed: int, number: int) -> fuzz_calls.Call:
    """Draws call `number` of a run: one in four is right, most have one mutation."""
    rng = random.Random(f"{seed} {number}")
    generator = torch.Generator().manual_seed(rng.getrandbits(60))
    call = rng.choice(DRAWS)(rng, generator)
    if rng.random() < 0.25:
        to_numpy(call)
    for _ in range(rng.choice((0, 1, 1, 1, 1, 2, 2, 3))):
        mutate(call, rng)
    return call


def told(value: Any) -> str:
    """Returns a description of an operand in a line."""
    if isinstance(value, (Foreign, Lying)):
        return f"{type(value).__name__}({told(value.array)})"
    if isinstance(value, Tensor):
        where = "" if value.device.type == "cpu" else f" on {value.device}"
        strides = "" if value.layout != torch.strided or value.is_contiguous() else f", strides {value.stride()}"
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}{strides}{where}"
    if isinstance(value, np.ndarray):
        return f"numpy {value.dtype}{list(value.shape)}, strides {value.strides}"
    return "made of experts.*" if value is ... else repr(value)[:60]


def describe(call: fuzz_calls.Call) -> str:
    operands = ", ".join(f"{name}={told(value)}" for name, value in call.operands.items())
    return f"{call.name} [{'; '.join(call.mutations) or 'as it should be'}] with {operands}"


# Memory


def memory_of(value: Any) -> tuple[int, int] | None:
    """Returns (address, bytes) of all the memory that an operand is a part of."""
    if isinstance(value, (Foreign, Lying)):
        value = value.array
    if isinstance(value, np.ndarray):
        low, high = np.lib.array_utils.byte_bounds(value)
        return (low, high - low) if not value.dtype.hasobject else None
    if type(value) not in (Tensor, torch.nn.Parameter, Subclass) or value.device.type != "cpu":
        return None
    if value.layout != torch.strided:
        return None
    storage = value.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def extent_of(value: Any) -> tuple[int, int]:
    """Returns (first byte, byte after the last) of the elements themselves."""
    if isinstance(value, (Foreign, Lying)):
        value = value.array
    if isinstance(value, np.ndarray):
        return np.lib.array_utils.byte_bounds(value)
    last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    return value.data_ptr(), value.data_ptr() + ((last + 1) * value.element_size() if value.numel() else 0)


@dataclass
class Snapshot:
    """The contents of operands, to be compared after a call."""

    memory: dict[str, tuple[int, bytes]]

    @classmethod
    def of(cls, operands: dict[str, Any]) -> Snapshot:
        places = {name: memory_of(value) for name, value in operands.items()}
        found = {name: place for name, place in places.items() if place is not None and place[1] and place[0]}
        return cls({name: (at, ctypes.string_at(at, size)) for name, (at, size) in found.items()})

    def changed(self, allowed: list[tuple[int, int]]) -> list[str]:
        """Returns operands whose memory has changed outside of these ranges."""
        names = []
        for name, (start, before) in self.memory.items():
            after = ctypes.string_at(start, len(before))
            if before == after:
                continue
            sides = [bytearray(before), bytearray(after)]
            for low, high in allowed:
                low, high = (min(max(bound - start, 0), len(before)) for bound in (low, high))
                for side in sides:
                    side[low:high] = bytes(high - low)
            if sides[0] != sides[1]:
                names.append(name)
        return names


class Unreadable:
    """Takes the place of an operand that cannot be cloned: whatever the check does with it raises."""


def cloned(value: Any) -> Any:
    """Returns an operand's numbers as they are, in a tensor of its own."""
    if isinstance(value, (Foreign, Lying)):
        value = value.seen if isinstance(value, Lying) else value.array
    if isinstance(value, np.ndarray):
        try:
            return torch.from_numpy(np.array(value, dtype=value.dtype.newbyteorder("="), order="C"))
        except TypeError:
            return Unreadable()
    if not isinstance(value, Tensor):
        return value
    if value.numel() == 0 and value.layout == torch.strided:
        return torch.zeros(value.shape, dtype=value.dtype)
    place = memory_of(value)
    if place is None or (value.numel() and extent_of(value)[1] > sum(place)):
        return Unreadable()
    value = value.detach().as_subclass(Tensor)
    return value.clone(memory_format=torch.contiguous_format).resolve_neg()


# Judging


def judge(call: fuzz_calls.Call) -> tuple[str, str | None]:
    """Makes the call. Returns (how it ended, what is wrong with what it did, or None)."""
    before = {name: cloned(value) for name, value in call.operands.items()}
    snapshot = Snapshot.of(call.operands)
    result, error = None, None
    try:
        result = call.run(dict(call.operands))
    except ERRORS as caught:
        error = caught
    except Exception as caught:
        if not NAMED.search(f"{type(caught).__name__}: {caught}"):
            where = traceback.extract_tb(caught.__traceback__)[-1]
            raised = type(caught).__name__
            return raised, f"raised {raised} at {Path(where.filename).name}:{where.lineno}: {caught}"
        error = caught
    return type(error).__name__ if error else "result", wrong_with(call, before, snapshot, result, error)


def wrong_with(
    call: fuzz_calls.Call, before: dict[str, Any], snapshot: Snapshot, result: Any, error: BaseException | None
) -> str | None:
    if call.between is None:
        values = [call.operands.get(name) for name in call.outputs] if error is None else []
        written = [extent_of(value) for value in values if memory_of(value) is not None]
        if changed := snapshot.changed(written):
            return f"changed {', '.join(changed)}" + (f" and raised {error!r}" if error else "")
    if error is not None:
        if not call.mutations or (call.mutations == ["numpy"] and not TORCH_ALONE.search(str(error))):
            return f"a right call raised {error!r}"
        return f"raised {type(error).__name__} without words" if not str(error).strip() else None
    try:
        call.check(before, result)
    except AssertionError as caught:
        if "too wide for this reference" in str(caught):  # scaled to next to nothing: there is nothing to judge
            return None
        return f"wrong result, or taken though it should be refused: {caught}"
    except Exception as caught:
        where = traceback.extract_tb(caught.__traceback__)[-1]
        return f"was taken, but the reference raises {type(caught).__name__} ({Path(where.filename).name}): {caught}"
    return None


# Processes


def work(seed: int, first: int, count: int, path: str) -> None:
    """Makes calls first ... first + count - 1. Writes a line to the file before each call and for each failure."""
    report = os.open(path, os.O_WRONLY | os.O_APPEND)
    torch.set_num_threads(1)
    faulthandler.enable()
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + ROOM,) * 2)

    def tell(*line: Any) -> None:
        os.write(report, (json.dumps(line) + "\n").encode())

    for number in range(first, first + count):
        tell("call", number)
        faulthandler.dump_traceback_later(LONGEST, exit=True)
        call = draw(seed, number)
        ended, wrong = judge(call)
        tell("ended", f"{call.name.partition(' ')[0]}: {'result' if ended == 'result' else 'error'}")
        if wrong:
            tell("failure", number, wrong, describe(call))
    faulthandler.cancel_dump_traceback_later()


@dataclass
class Run:
    """The findings of a run."""

    calls: int = 0
    failures: list[str] = field(default_factory=list)
    # Calls of each function, and how they ended.
    outcomes: Counter[str] = field(default_factory=Counter)
    # Whether failures are printed as they come.
    aloud: bool = False

    def add(self, failure: str) -> None:
        self.failures.append(failure)
        if self.aloud:
            print(failure, end="\n\n", flush=True)


def _again(seed: int, number: int) -> str:
    return f"    again: python tests/support/fuzz_api.py --seed {seed} --call {number}"


def _batch(seed: int, first: int, count: int, run: Run, until: float) -> int:
    """Runs one process. Returns the number of the call to go on with."""
    environment = {**os.environ, "RAYON_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    status, text = 0, ""
    with tempfile.NamedTemporaryFile("r") as report:
        command = [__file__, "--seed", str(seed), "--work", str(first), str(count), "--report", report.name]
        try:
            left = max(1.0, until - time.monotonic())
            done = forked.run(*command, env=environment, packages=PACKAGES, timeout=left)
            status, text, late = done.returncode, done.stdout + done.stderr, False
        except subprocess.TimeoutExpired:
            late = True
        lines = [json.loads(line) for line in report if line.endswith("\n")]
    last = first - 1
    for kind, *line in lines:
        if kind == "call":
            last = line[0]
        elif kind == "failure":
            number, wrong, described = line
            run.add(f"call {number} of seed {seed}: {wrong}\n    {described}\n{_again(seed, number)}")
        else:
            run.outcomes[line[0]] += 1
    run.calls += last - first + 1
    if late:
        return first + count
    if status != 0:
        ended = f"signal {signal.Signals(-status).name}" if status < 0 else status
        described = describe(draw(seed, last)) if last >= first else ""
        tail = "\n".join("      " + line for line in text.strip().splitlines()[-25:])
        again = _again(seed, last)
        run.add(f"call {last} of seed {seed}: ended the process ({ended})\n    {described}\n{again}\n{tail}")
    return last + 1 if status != 0 else first + count


def fuzz(
    seed: int,
    calls: int,
    seconds: float,
    *,
    first: int = 0,
    batch: int = 5000,
    most_failures: int = 20,
    aloud: bool = False,
) -> Run:
    """Makes `calls` calls from number `first` on, one process after the other, for at most `seconds`."""
    run, until, number = Run(aloud=aloud), time.monotonic() + seconds, first
    while number < first + calls and time.monotonic() < until and len(run.failures) < most_failures:
        number = _batch(seed, number, min(batch, first + calls - number), run, until)
    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "little"))
    parser.add_argument("--calls", type=int, default=20000)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--first", type=int, default=0, help="number of the first call")
    parser.add_argument("--failures", type=int, default=20, help="how many end the run")
    parser.add_argument("--call", type=int, help="this one alone")
    parser.add_argument("--work", type=int, nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--report", help=argparse.SUPPRESS)
    given = parser.parse_args()
    # Half a surrogate pair is one of the strings that calls get.
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    if given.work:
        return work(given.seed, *given.work, given.report)
    if given.call is not None:
        call = draw(given.seed, given.call)
        faulthandler.enable()
        print(describe(call), flush=True)
        ended, wrong = judge(call)
        print(f"{ended}: {wrong or 'nothing is wrong'}")
        raise SystemExit(wrong is not None)
    options = {"first": given.first, "most_failures": given.failures, "aloud": True, "batch": 2000}
    run = fuzz(given.seed, given.calls, given.seconds, **options)
    print(f"seed {given.seed}: {run.calls} calls, {len(run.failures)} failures; {dict(run.outcomes)}")
    raise SystemExit(bool(run.failures))


if __name__ == "__main__":
    main()
