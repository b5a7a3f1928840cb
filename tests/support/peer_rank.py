"""A rank's side of `share` without a GPU, and a whole rank in a process of its own. Imports no torch."""

from __future__ import annotations

import json
import os
import sys
import time

from oxmoe.allreduce.memory import share


class Memory:
    """Stands in for AllReduceMemory: a memfd, whose text peers read."""

    def __init__(self, text: str) -> None:
        self._descriptor = os.memfd_create("memory")
        os.write(self._descriptor, text.encode())
        self.text = text
        self.closed = False
        self.inherited: list[int] = []
        self.seen: list[str] = []

    def descriptor(self) -> int:
        return self._descriptor

    def open(self, descriptors: list[int]) -> None:
        self.inherited = [number for number in descriptors if number >= 0 and os.get_inheritable(number)]
        self.seen = ["" if number < 0 else os.pread(number, 100, 0).decode() for number in descriptors]

    def close(self) -> None:
        os.close(self._descriptor)
        self.closed = True


def over_pipes() -> None:
    """Runs rank 1 of two, whose group is its standard input and output."""

    def exchange(error: Exception | None, text: str) -> list[str]:
        print(json.dumps([None if error is None else repr(error), text]), flush=True)
        parts = json.loads(sys.stdin.readline())
        if error is not None:
            raise error
        return [text for _, text in parts]

    memory = Memory("rank 1")
    share(lambda: memory, exchange, 1, time.monotonic() + 20)
    print(json.dumps([memory.seen, os.getpid()]), flush=True)
