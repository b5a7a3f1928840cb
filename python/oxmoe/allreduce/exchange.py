"""Exchanges bytes between ranks on CPUs: through a torch process group, peer by peer, or through a function of the
caller."""

from __future__ import annotations

import ctypes
import itertools
import math
import operator
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from oxmoe.wording import first_line


class PeerLost(Exception):
    """A wait that failed. It says which peer was missing (None if that is unknown) and why."""

    def __init__(self, peer: int | None, why: str) -> None:
        super().__init__(why)
        self.peer = peer


class Link(Protocol):
    """A group of ranks. Times are `time.monotonic()`; every method that waits raises PeerLost when `end` has passed."""

    size: int
    rank: int

    def post(self, header: bytes) -> None:
        """Starts to send this rank's header."""

    def headers(self, end: float, size: int, stale: Callable[[bytes], bool]) -> list[bytes]:
        """Returns all ranks' headers in rank order. Stale headers, of calls that this rank has refused, are skipped."""

    def refuse(self, header: bytes, end: float) -> None:
        """Sends a header that tells the peers that this rank takes no further part in the call."""

    def messages(self, mine: Any, size: int, end: float) -> list[Any]:
        """Returns all ranks' messages of `size` bytes in rank order."""

    def agree(self, end: float) -> None:
        """Runs once, after the first headers. It makes later traffic distinct from that of other links of the same
        ranks."""

    def reserve(self, size: int) -> None:
        """Allocates for messages of up to `size` bytes."""

    def drain(self, end: float) -> None:
        """Waits until everything that was sent has been taken."""

    def close(self) -> None:
        """Drops buffers."""


def whole(name: str, value: Any) -> int:
    """Returns the integer that an argument is. An integer of numpy or torch becomes Python's."""
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: expected int, got {type(value).__name__}") from None


def link_of(group: Any, exchange: Any, comm_backend: Any, world_size: int | None, rank: int | None) -> Link:
    """Returns the link of the ranks that these arguments of create_allreduce_fusion_workspace name."""
    if group is not None and exchange is not None:
        raise ValueError("exchange: group was given too; pass one of them")
    if exchange is None and group is None and comm_backend is not None:
        exchange = getattr(comm_backend, "allgather", None)
        if not callable(exchange):
            raise ValueError(
                "comm_backend: expected an object with allgather(bytes), got " + type(comm_backend).__name__
            )
        if world_size is None and callable(getattr(comm_backend, "Get_size", None)):
            world_size = comm_backend.Get_size()
        if rank is None and callable(getattr(comm_backend, "Get_rank", None)):
            rank = comm_backend.Get_rank()
    if group is None and exchange is None:
        group = _world(world_size, rank)
    if group is not None:
        return group_link(group)
    if world_size is None or rank is None:
        raise ValueError("world_size: is needed with rank where no group is given; there is no default group")
    world_size, rank = whole("world_size", world_size), whole("rank", rank)
    if world_size < 1:
        raise ValueError(f"world_size: expected 1 or more, got {world_size}")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank: expected 0 to {world_size - 1}, got {rank}")
    if exchange is None:
        if world_size != 1:
            raise ValueError(
                "group: expected a torch ProcessGroup, or exchange; the default group is torch's WORLD where this "
                f"process is rank {rank} of its {world_size}"
            )
        exchange = _alone
    return FunctionLink(exchange, world_size, rank)


def _world(world_size: int | None, rank: int | None) -> Any:
    """Returns torch's WORLD, if it has world_size ranks and this process is `rank`."""
    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    if (
        world_size in (None, 1)
        or distributed is None
        or not (distributed.is_available() and distributed.is_initialized())
    ):
        return None
    same = (world_size, rank) == (distributed.get_world_size(), distributed.get_rank())
    return distributed.group.WORLD if same else None


def _alone(data: bytes) -> list[bytes]:
    return [data]


def group_link(group: Any) -> Link:
    """Returns the link of a torch ProcessGroup. It uses the group's CPU backend, or else the store at which its
    ranks met."""
    import torch
    from torch.distributed import ProcessGroup, distributed_c10d

    if not isinstance(group, ProcessGroup):
        raise ValueError(f"group: expected a torch ProcessGroup that this process is in, got {group!r}")
    try:
        group._get_backend(torch.device("cpu"))
    except RuntimeError as error:
        of = getattr(distributed_c10d, "_get_process_group_store", None)
        if of is None:
            raise ValueError("group: has no backend for CPU tensors; pass one made with backend gloo") from error
        return StoreLink(of(group), group.size(), group.rank())
    return GroupLink(group)


class StoreExchange:
    """An all-gather of bytes through a torch Store, which every group has, whatever its backend.

    Several exchanges on one store are numbered, so that none reads another's keys. Ranks make them in the same
    order.
    """

    def __init__(self, store: Any, size: int, rank: int) -> None:
        self._store, self._size, self._rank = store, size, rank
        self._number = int(store.add(f"oxmoe/links/{rank}", 1))
        self._round = 0

    def __call__(self, data: bytes, end: float) -> list[bytes]:
        self._round += 1
        keys = [f"oxmoe/{self._number}/{self._round}/{rank}" for rank in range(self._size)]
        self._store.set(keys[self._rank], data)
        gathered = []
        for rank, key in enumerate(keys):
            self._wait(key, rank, end)
            gathered.append(bytes(self._store.get(key)))
        # Everybody is in this round, so everybody has read the one before.
        if self._round > 1:
            self._store.delete_key(f"oxmoe/{self._number}/{self._round - 1}/{self._rank}")
        return gathered

    def _wait(self, key: str, rank: int, end: float) -> None:
        """Waits for a peer's key. A store serves one call of a process at a time, and its own waits last as long as
        its timeout. So the key is asked for again and again, and whoever shares the store can use it meanwhile."""
        pause = 0.0001
        while not self._store.check([key]):
            if time.monotonic() >= end:
                raise PeerLost(rank, "the deadline has passed")
            time.sleep(pause)
            pause = min(2 * pause, 0.01)


class GroupLink:
    """Sends and receives of a ProcessGroup, so that a wait knows its peer, and nobody but the group is involved."""

    def __init__(self, group: Any) -> None:
        import torch

        self.size, self.rank = group.size(), group.rank()
        self._torch = torch
        self._group = group
        self._tag = 0x6F78
        self._sent: list[tuple[int, Any, Any]] = []
        self._mine = b""
        self._buffers: Any = None

    def _peers(self) -> list[int]:
        """Returns all other ranks. Each rank starts at a different one."""
        return [(self.rank + hop) % self.size for hop in range(1, self.size)]

    def _send(self, peer: int, tensor: Any) -> None:
        try:
            # The tensor must live until it has been taken.
            self._sent.append((peer, self._group.send([tensor], peer, self._tag), tensor))
        except RuntimeError as error:
            raise self._lost(peer, error) from error

    def _receive(self, peer: int, tensor: Any) -> Any:
        try:
            return self._group.recv([tensor], peer, self._tag)
        except RuntimeError as error:
            raise self._lost(peer, error) from error

    def _wait(self, peer: int, work: Any, end: float) -> None:
        from datetime import timedelta

        try:
            # The time is rounded up, because gloo counts whole milliseconds: a wait that runs out has reached `end`.
            # 0 would mean for ever.
            left = max(math.ceil((end - time.monotonic()) * 1000), 0)
            work.wait(timedelta(milliseconds=left + 1))
        except RuntimeError as error:
            if time.monotonic() >= end:
                raise PeerLost(peer, "the deadline has passed") from error
            raise self._lost(peer, error) from error

    @staticmethod
    def _lost(peer: int, error: Exception) -> PeerLost:
        return PeerLost(peer, f"the connection is lost ({first_line(error)})")

    def post(self, header: bytes) -> None:
        self._mine = header
        tensor = self._torch.frombuffer(bytearray(header), dtype=self._torch.uint8)
        for peer in self._peers():
            self._send(peer, tensor)

    def headers(self, end: float, size: int, stale: Callable[[bytes], bool]) -> list[bytes]:
        results = {self.rank: self._mine}
        pending = {peer: self._torch.empty(size, dtype=self._torch.uint8, device="cpu") for peer in self._peers()}
        works = {peer: self._receive(peer, tensor) for peer, tensor in pending.items()}
        for peer, tensor in pending.items():
            self._wait(peer, works[peer], end)
            while stale(bytes(tensor.tolist())):
                self._wait(peer, self._receive(peer, tensor), end)
            results[peer] = bytes(tensor.tolist())
        return [results[rank] for rank in range(self.size)]

    def refuse(self, header: bytes, end: float) -> None:
        self.post(header)

    def messages(self, mine: Any, size: int, end: float) -> list[Any]:
        torch = self._torch
        tensor = mine if isinstance(mine, torch.Tensor) else torch.from_numpy(mine)
        data = tensor.detach().view(-1).view(torch.uint8)
        received = {peer: self._buffers[i, :size] for i, peer in enumerate(self._peers())}
        works = {peer: self._receive(peer, buffer) for peer, buffer in received.items()}
        for peer in received:
            self._send(peer, data)
        for peer, work in works.items():
            self._wait(peer, work, end)
        return [
            mine if rank == self.rank else received[rank].view(tensor.dtype).view(tensor.shape)
            for rank in range(self.size)
        ]

    def agree(self, end: float) -> None:
        tensor = self._torch.frombuffer(bytearray(os.urandom(4)), dtype=self._torch.uint8)
        if self.rank == 0:
            for peer in self._peers():
                self._send(peer, tensor)
        else:
            self._wait(0, self._receive(0, tensor), end)
        self.drain(end)
        # This tag differs from the tags of creation and, in all likelihood, from everybody else's.
        self._tag = 0x10000 + int.from_bytes(bytes(tensor.tolist()), "little") % 0x3FFF0000

    def reserve(self, size: int) -> None:
        self._buffers = self._torch.empty((self.size - 1, size), dtype=self._torch.uint8, device="cpu")

    def drain(self, end: float) -> None:
        sent, self._sent = self._sent, []
        for peer, work, _ in sent:
            self._wait(peer, work, end)

    def close(self) -> None:
        self._sent.clear()
        self._buffers = None


class FunctionLink:
    """An all-gather function of the caller. It is trusted to return; it runs in a thread, so that a wait for it can
    end at a deadline."""

    _what = "exchange function"
    # Seconds beyond the deadline in which the function may say itself who is missing.
    _grace = 0.0

    def __init__(self, exchange: Callable[[bytes], Sequence[bytes]], size: int, rank: int) -> None:
        if not callable(exchange):
            raise ValueError(f"exchange: expected a function of bytes, got {type(exchange).__name__}")
        self.size, self.rank = size, rank
        self._exchange = exchange
        self._mine = b""

    def _ask(self, data: bytes, end: float) -> Sequence[bytes]:
        return self._exchange(data)

    def _gather(self, data: bytes, end: float) -> list[bytes]:
        results: list[Any] = []
        cuda: Any = getattr(sys.modules.get("torch"), "cuda", None)
        # A thread begins with GPU 0 as its current one, which a function of NCCL's would take.
        current = cuda.current_device() if cuda is not None and cuda.is_initialized() else None

        def call() -> None:
            try:
                if current is not None and threading.current_thread() is not caller:
                    cuda.set_device(current)
                # It takes one item more than needed: the result may have no end, and too many items must be noticed.
                results.append(list(itertools.islice(self._ask(data, end), self.size + 1)))
            except BaseException as error:
                results.append(error)

        caller = threading.current_thread()
        if self.size == 1:
            call()
        else:
            thread = threading.Thread(target=call, daemon=True, name="oxmoe all-reduce exchange")
            thread.start()
            thread.join(max(end - time.monotonic(), 0) + self._grace)
        if not results:
            raise PeerLost(None, f"the deadline has passed in the {self._what}")
        if isinstance(results[0], PeerLost):
            raise results[0]
        if isinstance(results[0], Exception):
            raise PeerLost(None, f"the {self._what} raised {results[0]!r}") from results[0]
        if isinstance(results[0], BaseException):
            raise results[0]
        return self._checked(results[0], data)

    def _checked(self, parts: list[Any], data: bytes) -> list[bytes]:
        """Returns every rank's bytes after checks. What the function returned is not converted, because bytes(5)
        would be five zeros."""
        if len(parts) != self.size:
            many = f"{len(parts)}" if len(parts) < self.size else f"more than {self.size}"
            raise PeerLost(None, f"the exchange function returned {many} items for {self.size} ranks")
        for rank, part in enumerate(parts):
            if not isinstance(part, (bytes, bytearray, memoryview)):
                raise PeerLost(
                    None, f"the exchange function returned {type(part).__name__} in place of rank {rank}'s bytes"
                )
        gathered = [bytes(part) for part in parts]
        lengths = [len(part) for part in gathered]
        if lengths != [len(data)] * self.size:
            raise PeerLost(None, f"the exchange function returned {lengths} bytes for {self.size} ranks of {len(data)}")
        if gathered[self.rank] != data:
            raise PeerLost(
                None, f"the exchange function returned something else in place of rank {self.rank}'s own bytes"
            )
        return gathered

    def post(self, header: bytes) -> None:
        self._mine = header

    def headers(self, end: float, size: int, stale: Callable[[bytes], bool]) -> list[bytes]:
        return self._gather(self._mine, end)

    def refuse(self, header: bytes, end: float) -> None:
        # An all-gather needs every rank every time.
        self._gather(header, end)

    def messages(self, mine: Any, size: int, end: float) -> list[Any]:
        data = mine.tobytes() if hasattr(mine, "tobytes") else ctypes.string_at(mine.data_ptr(), size)
        gathered: list[Any] = list(self._gather(data, end))
        gathered[self.rank] = mine
        return gathered

    def agree(self, end: float) -> None:
        pass

    def reserve(self, size: int) -> None:
        pass

    def drain(self, end: float) -> None:
        pass

    def close(self) -> None:
        pass


class StoreLink(FunctionLink):
    """The store at which a group's ranks met."""

    _what = "group's store"
    _grace = 1.0

    def __init__(self, store: Any, size: int, rank: int) -> None:
        exchange = StoreExchange(store, size, rank)
        super().__init__(exchange, size, rank)  # type: ignore[arg-type]
        self._ask = exchange  # type: ignore[method-assign]
