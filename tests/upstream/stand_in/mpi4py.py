"""A stand-in for mpi4py in flashinfer's tests of several ranks: COMM_WORLD by torch.distributed's store.

Ranks come from RANK and WORLD_SIZE, which tests/upstream/run.py sets; without them there is one rank.
"""

from __future__ import annotations

import os
import pickle
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist


class _World:
    def __init__(self) -> None:
        self._rank, self._size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        self._round = 0
        self._made: dist.TCPStore | None = None

    def _store(self) -> dist.TCPStore:
        if self._made is None:
            # The port is the one after that at which the tests' own process groups meet.
            host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]) + 1
            self._made = dist.TCPStore(host, port, self._size, self._rank == 0, timedelta(seconds=120))
        return self._made

    def Get_rank(self) -> int:
        return self._rank

    def Get_size(self) -> int:
        return self._size

    def allgather(self, data: Any) -> list[Any]:
        if self._size == 1:
            return [data]
        self._round += 1
        store, prefix = self._store(), f"mpi/{self._round}"
        store.set(f"{prefix}/{self._rank}", pickle.dumps(data))
        return [pickle.loads(store.get(f"{prefix}/{rank}")) for rank in range(self._size)]

    def bcast(self, data: Any, root: int = 0) -> Any:
        return self.allgather(data if self._rank == root else None)[root]

    def barrier(self) -> None:
        self.allgather(None)

    Barrier = barrier


MPI = SimpleNamespace(COMM_WORLD=_World())
