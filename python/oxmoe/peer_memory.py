"""GPU memory that every rank of a group maps: file descriptors travel between processes over Unix sockets."""

from __future__ import annotations

import array
import os
import secrets
import socket
import time
from collections.abc import Callable
from typing import Any

# Exchanges one line of text with the group; raises where some rank has failed, which it learns from `error`.
Round = Callable[[Exception | None, str], list[str]]


class Mailbox:
    """A datagram socket under a random abstract name, in which the peers of this host put file descriptors."""

    def __init__(self) -> None:
        self.name = secrets.token_hex(16)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self._address(self.name))

    @staticmethod
    def _address(name: str) -> str:
        return f"\0oxmoe-{name}"

    def send(self, name: str, rank: int, descriptor: int, end: float) -> None:
        self._socket.settimeout(max(end - time.monotonic(), 0.001))
        rights = array.array("i", [descriptor])
        self._socket.sendmsg([bytes([rank])], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)], 0, self._address(name))

    def receive(self, end: float) -> tuple[int, int]:
        """(rank, descriptor), whichever comes next."""
        self._socket.settimeout(max(end - time.monotonic(), 0.001))
        data, descriptors, _, _ = socket.recv_fds(self._socket, 1, 1)
        if len(data) != 1 or len(descriptors) != 1:
            raise RuntimeError("a peer sent no file descriptor")
        return data[0], descriptors[0]

    def close(self) -> None:
        self._socket.close()


def share(make: Callable[[], Any], exchange: Round, rank: int, end: float) -> Any:
    """This rank's memory (`make` allocates it), with every peer's mapped into this process. Collective.

    When it returns every rank has emptied its own memory and mapped all others'. Raises on all ranks where one fails.
    """
    memory = box = None
    descriptors: dict[int, int] = {}
    try:
        error: Exception | None = None
        try:
            memory, box = make(), Mailbox()
        except Exception as failure:
            error = failure
        # A name is known to peers only once its mailbox is there.
        names = exchange(error, "" if box is None else box.name)
        assert memory is not None and box is not None
        try:
            for peer in (peer for peer in range(len(names)) if peer != rank):
                try:
                    box.send(names[peer], rank, memory.descriptor(), end)
                except ConnectionRefusedError as failure:
                    raise RuntimeError(
                        f"rank {peer} cannot be reached over a Unix socket: ranks must share a host and its network "
                        "namespace"
                    ) from failure
            while len(descriptors) < len(names) - 1:
                sender, descriptor = box.receive(end)
                descriptors[sender] = descriptor
            memory.open([descriptors.get(peer, -1) for peer in range(len(names))])
        except TimeoutError:
            missing = [peer for peer in range(len(names)) if peer != rank and peer not in descriptors]
            error = TimeoutError(f"all-reduce workspace: rank {rank} waited for the memory of ranks {missing}")
        except Exception as failure:
            error = failure
        exchange(error, "")
    except BaseException:
        if memory is not None:
            memory.close()
        raise
    finally:
        for descriptor in descriptors.values():
            os.close(descriptor)
        if box is not None:
            box.close()
    return memory
