"""Code that the scenarios of benches/reliability.py share: processes with a limit of time, memory, wrong values."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

SCRIPT = Path(__file__).resolve().parents[1] / "reliability.py"
# Seconds that a process has after its time is over, to end its children, such as the daemon of MPS.
GRACE_S = 15.0

Row = dict[str, Any]


class Skipped(Exception):
    """Says that the scenario cannot run here; the text says why."""


class Failed(Exception):
    """Says that the scenario ran, and that something other than a value was wrong; the text says what."""


# Processes


def inner(
    scenario: str, options: Row, limit_s: float, env: dict[str, str] | None = None, *, apart: bool = False
) -> Row:
    """Runs a scenario in a process of its own, and returns its row. It never takes much longer than limit_s.

    apart: the process leads a group of processes, so that all of its children end with it.
    """
    command = [sys.executable, str(SCRIPT), "--inner", scenario, json.dumps(options)]
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
            env={**os.environ, **(env or {})},
            start_new_session=apart,
        )
        try:
            output, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            _end(process, apart)
            last = f"; its last line: {lines[-1]}" if (lines := _lines(said)) else ""
            return {"outcome": "out of time", "reason": f"still ran after {limit_s:g} s{last}"}
        except BaseException:
            _end(process, apart)
            raise
        finally:
            if apart:
                # This ends every child that the scenario has left behind.
                _signal(process, signal.SIGKILL, apart)
        lines = _lines(said)
    try:
        row = json.loads(output.splitlines()[-1])
    except (IndexError, ValueError):
        row = {}
    if not isinstance(row, dict) or "outcome" not in row:
        # Some errors of torch end with advice, so the line that names the error stands before the last one.
        named = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Interrupt|Exit)\b", line)]
        last = (named or lines or ["nothing on standard error"])[-1]
        return {"outcome": "failed", "reason": f"the process ended with status {process.returncode}: {last}"}
    return row


def _lines(said: IO[str]) -> list[str]:
    """Returns the lines of standard error that are not blank."""
    said.seek(0)
    return [line.strip() for line in said.read().splitlines() if line.strip()]


def _signal(process: subprocess.Popen[str], number: int, apart: bool) -> None:
    try:
        if apart:
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
    except ProcessLookupError:
        pass


def _end(process: subprocess.Popen[str], apart: bool) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.communicate(timeout=GRACE_S)
    except subprocess.TimeoutExpired:
        _signal(process, signal.SIGKILL, apart)
        process.communicate()


# Bits


def raw(tensor: Tensor) -> Tensor:
    """Returns the tensor's memory as integers, so that a comparison tells -0 from 0 and one NaN from another."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    return tensor.contiguous().view(-1).view(kinds[tensor.element_size()])


class Wrong:
    """Counts values whose bits differ. On a GPU it counts on the device, and waits for it only when it is read."""

    def __init__(self, device: str, most: int) -> None:
        """most: the largest number of values in a comparison."""
        self._count = torch.zeros((), dtype=torch.int64, device=device)
        self._differs = torch.empty(most, dtype=torch.bool, device=device)

    def compare(self, result: Tensor, expected: Tensor) -> None:
        a, b = raw(result), raw(expected)
        differs = self._differs[: a.numel()]
        torch.ne(a, b, out=differs)
        self._count += differs.count_nonzero()

    def read(self) -> int:
        return int(self._count)


def checksum(tensors: Iterable[Tensor]) -> int:
    """Returns one number for the bits of all tensors, in order."""
    total = 0
    for tensor in tensors:
        total = zlib.crc32(raw(tensor).cpu().numpy().tobytes(), total)
    return total


# Memory


def resident() -> int:
    """Returns the bytes of this process in the host's memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Memory:
    """Notices memory that a process keeps. Call `begin` after the warm-up, then `look` now and then.

    On a GPU torch's allocated bytes, and the device's used bytes without those that torch reserves, stay equal to the
    byte. The host's memory may grow by host_slack, because allocators keep what is freed. Descriptors and threads stay
    equal.
    """

    def __init__(self, device: str, host_slack: int, *, alone: bool = True) -> None:
        """alone: no other process uses the GPU meanwhile."""
        self._device, self._alone, self._slack = device, alone, host_slack
        self._before: Row = {}
        self._most_resident = 0

    def now(self) -> Row:
        found: Row = {
            "resident": resident(),
            "descriptors": len(os.listdir("/proc/self/fd")),
            "threads": len(os.listdir("/proc/self/task")),
        }
        if self._device == "cuda":
            torch.cuda.synchronize()
            free, total = torch.cuda.mem_get_info()
            reserved = torch.cuda.memory_reserved()
            found |= {"allocated": torch.cuda.memory_allocated(), "reserved": reserved}
            found |= {"used_beside_torch": total - free - reserved}
        return found

    def begin(self) -> None:
        self._before = self.now()
        self._most_resident = self._before["resident"]

    def look(self) -> None:
        """Raises Failed if the process keeps anything."""
        now, before = self.now(), self._before
        self._most_resident = max(self._most_resident, now["resident"])
        exact = ["descriptors", "threads"]
        if self._device == "cuda":
            exact += ["allocated", *(["used_beside_torch"] if self._alone else [])]
        for name in exact:
            if now[name] != before[name]:
                raise Failed(f"{name}: {before[name]} after the warm-up, {now[name]} now")
        if now["resident"] > before["resident"] + self._slack:
            raise Failed(f"resident: {before['resident']} bytes after the warm-up, {now['resident']} now")

    def fields(self) -> Row:
        """Returns the fields of the row: memory before and after."""
        return {"memory_before": self._before, "memory_after": self.now(), "resident_most": self._most_resident}
