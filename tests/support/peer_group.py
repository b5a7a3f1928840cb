"""Ranks in threads that hand each other their memory, and strangers that connect to them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import pytest

from oxmoe.allreduce.memory import share
from peer_rank import Memory

NOBODY = 65534
CLOSER = "oxmoe all-reduce closer"
STRANGER = Path(__file__).parent / "stranger.py"
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="another user's process: needs a suite that runs as root")
users = pytest.mark.parametrize("uid", [pytest.param(NOBODY, marks=as_root), os.geteuid()], ids=["other", "same"])


class Group:
    """An exchange between threads. A rank that failed leaves it with the knowledge of all others."""

    def __init__(self, size: int, between: Callable[[list[str]], None] = lambda texts: None) -> None:
        self.size, self.between = size, between
        self.parts: list[tuple[Exception | None, str]] = [(None, "")] * size
        self.rounds = 0
        self.barrier = threading.Barrier(size, action=self._met)

    def _met(self) -> None:
        # At this point mailboxes are open, and no rank has gone on.
        self.rounds += 1
        if self.rounds == 1:
            self.between([text for _, text in self.parts])

    def exchange(self, rank: int) -> Callable[[Exception | None, str], list[str]]:
        def call(error: Exception | None, text: str) -> list[str]:
            self.parts[rank] = (error, text)
            self.barrier.wait(60)
            parts = list(self.parts)
            self.barrier.wait(60)
            if error is not None:
                raise error
            for other, (failure, _) in enumerate(parts):
                if failure is not None:
                    raise RuntimeError(f"rank {other} failed: {failure}")
            return [part for _, part in parts]

        return call


def meet(
    size: int,
    between: Callable[[list[str]], None] = lambda texts: None,
    seconds: float = 30,
    kind: type[Memory] = Memory,
) -> list[Any]:
    """Returns for every rank what its memory has seen, or what it raised. between: runs when all names are known."""
    group = Group(size, between)

    def one(rank: int) -> Any:
        memory = kind(f"rank {rank}")
        try:
            share(lambda: memory, group.exchange(rank), rank, time.monotonic() + seconds)
        except Exception as error:
            assert memory.closed
            return error
        memory.close()
        return memory.seen

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))


def right(size: int) -> list[list[str]]:
    return [["" if rank == peer else f"rank {peer}" for peer in range(size)] for rank in range(size)]


@pytest.fixture(autouse=True)
def nothing_is_left_open() -> Iterator[None]:
    before = set(os.listdir("/proc/self/fd"))
    yield
    # A thread of its own closes what strangers sent, perhaps after the call.
    end = time.monotonic() + 10
    while len(after := set(os.listdir("/proc/self/fd"))) > len(before) and time.monotonic() < end:
        time.sleep(0.05)
    assert len(after) <= len(before), [
        os.readlink(f"/proc/self/fd/{fd}") for fd in after - before if os.path.exists(fd)
    ]


@contextlib.contextmanager
def stranger(uid: int, mode: str, seconds: float = 0, text: str = "a stranger's") -> Iterator[tuple[str, IO[str]]]:
    """Starts a stranger, and yields its first line and the rest of its output."""
    command = [sys.executable, str(STRANGER), str(uid), mode, text, str(seconds)]
    # The stranger has a group of its own, because a flood has two processes.
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            assert line, "the stranger could not run"
            yield line, process.stdout
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)


def said(error: Exception | None, texts: list[str]) -> list[str]:
    """Returns texts, or raises a rank's error as an exchange does."""
    if error is not None:
        raise error
    return texts
