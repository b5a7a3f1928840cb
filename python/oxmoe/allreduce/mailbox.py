"""Lets ranks of one host hand each other file descriptors, and keeps everybody else out: sockets, a secret,
credentials.

Every rank listens at a random abstract name. Everybody on the host can read such names in /proc/net/unix and
connect. So a connection counts for nothing until three things hold. The credentials that the kernel reports for its
process are those that the group told of a rank. Its message has the secret that only the group knows. That rank has
not come before. Any other connection is closed, with all descriptors that it brought, and the wait goes on to its
deadline.

Closing what a stranger sent can take for ever: the last close of a TCP socket with SO_LINGER waits for that socket's
peer, and a file of FUSE waits for its server. So a message's data is looked at before its descriptors are taken, and
a thread without a deadline closes what is not taken.
"""

from __future__ import annotations

import array
import hmac
import os
import re
import secrets
import select
import socket
import struct
import threading
import time
from collections import deque
from dataclasses import dataclass, field

# A message to a mailbox: the secret of the mailbox's owner, and the sender's rank. Exactly one descriptor comes with
# it.
_MESSAGE = struct.Struct("<32sI")
_TAKEN = b"\1"
_CREDENTIALS = struct.Struct("iII")
_CARD = re.compile(
    r"oxmoe-mailbox-1 ([0-9a-f]{32}) ([0-9a-f]{64}) (0|[1-9][0-9]{0,9}) ([1-9][0-9]{0,9}) ([0-9]{1,19}) ([0-9]{1,19})"
)
_BACKLOG = 4096
# Connections that one step accepts. It is bounded, because between two steps this rank tries to reach its own peers.
_BATCH = 64
# Connections with the right credentials that have sent nothing yet. One more closes the oldest; its rank connects
# again.
_SILENT = 64
# Descriptors that a message has room for. A right message has one, so further ones are noticed and closed.
_DESCRIPTOR_ROOM = 8
# Sockets that wait to be closed. With as many, a mailbox accepts no more, so that descriptors do not run out.
_UNCLOSED = 256
# Seconds that the end of a mailbox waits for closes, which take no time unless somebody makes them.
_CLOSING = 0.5
_RETRY = 0.002


@dataclass(frozen=True)
class Credentials:
    """The credentials of a process, as this process sees them."""

    uid: int
    pid: int

    @staticmethod
    def of(connection: socket.socket) -> Credentials:
        """Returns the credentials of the process that connected, or, at the other end, of the one that listens. The
        kernel noted them, so nobody can choose them."""
        data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, uid, _ = _CREDENTIALS.unpack(data)
        return Credentials(uid, pid)

    def __str__(self) -> str:
        return f"process {self.pid} of user {self.uid}"


def _namespace(kind: str) -> int:
    """Returns the number of this process's namespace, or 0 if it is unknown."""
    try:
        return os.stat(f"/proc/self/ns/{kind}").st_ino
    except OSError:
        return 0


@dataclass(frozen=True)
class Card:
    """The text that ranks send each other through their group: where a rank's mailbox is, and how to recognise the
    rank."""

    name: str
    secret: bytes = field(repr=False)
    uid: int
    pid: int
    user_namespace: int
    pid_namespace: int

    @staticmethod
    def new() -> Card:
        secret = secrets.token_bytes(32)
        return Card(secrets.token_hex(16), secret, os.geteuid(), os.getpid(), _namespace("user"), _namespace("pid"))

    def text(self) -> str:
        return (
            f"oxmoe-mailbox-1 {self.name} {self.secret.hex()} {self.uid} {self.pid} "
            f"{self.user_namespace} {self.pid_namespace}"
        )

    @staticmethod
    def parse(rank: int, text: str) -> Card:
        match = _CARD.fullmatch(text)
        if match is None:
            # The text may have a secret in it.
            raise RuntimeError(
                f"rank {rank} told the group of no mailbox: expected a card of oxmoe's, got {len(text)} other "
                "characters; do all ranks run the same version of oxmoe?"
            )
        name, secret, *numbers = match.groups()
        uid, pid, user_namespace, pid_namespace = map(int, numbers)
        return Card(name, bytes.fromhex(secret), uid, pid, user_namespace, pid_namespace)

    @property
    def address(self) -> str:
        return f"\0oxmoe-{self.name}"

    def fits(self, seen: Credentials, here: Card) -> bool:
        """Whether the process that `here` sees can be this rank.

        A number from another namespace appears translated, or as the number that stands for all without a
        translation (pid 0, uid 65534). It says nothing about the number that the rank told the group, so it is not
        compared. The secret then decides.
        """
        same_users = 0 != self.user_namespace == here.user_namespace
        same_pids = 0 != self.pid_namespace == here.pid_namespace
        return (not same_users or seen.uid == self.uid) and (not same_pids or seen.pid == self.pid)


def _new_socket() -> socket.socket:
    result = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    result.setblocking(False)
    return result


class _Closer:
    """Closes sockets in a thread of its own, one after the other. A close waits as long as a stranger wants it to."""

    def __init__(self) -> None:
        self._waiting: deque[socket.socket] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def add(self, connection: socket.socket) -> None:
        with self._changed:
            self._waiting.append(connection)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, daemon=True, name="oxmoe all-reduce closer")
                self._thread.start()

    @property
    def full(self) -> bool:
        return len(self._waiting) >= _UNCLOSED

    def finish(self, seconds: float) -> None:
        """Waits for what was added, but not for longer than this."""
        with self._changed:
            self._changed.wait_for(lambda: self._thread is None, seconds)

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._waiting:
                    self._thread = None
                    self._changed.notify_all()
                    return
                connection = self._waiting.popleft()
            connection.close()
            del connection


class _Delivery:
    """This rank's descriptor on its way to one peer. The peer confirms when it has taken it."""

    def __init__(self, peer: int, card: Card, message: bytes, descriptor: int, closer: _Closer) -> None:
        self.peer, self._card, self._message, self._descriptor = peer, card, message, descriptor
        self._closer = closer
        self._connection: socket.socket | None = None
        self._sent = self.done = False
        self._again = 0.0

    def fileno(self) -> int | None:
        return None if self._connection is None else self._connection.fileno()

    def step(self, here: Card) -> None:
        """Sends as much as possible without waiting. What a peer did not take is sent again."""
        if self.done or time.monotonic() < self._again:
            return
        try:
            if self._connection is None:
                self._connection = self._connect(here)
            if not self._sent:
                rights = array.array("i", [self._descriptor])
                ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)]
                self._connection.sendmsg([self._message], ancillary, socket.MSG_NOSIGNAL)
                self._sent = True
            self.done = self._connection.recv(1) == _TAKEN
        except BlockingIOError:
            # The peer has no room for one more connection, or has not answered yet.
            return
        except (ConnectionResetError, BrokenPipeError):
            pass
        self.close()
        self._again = time.monotonic() + _RETRY

    def _connect(self, here: Card) -> socket.socket:
        connection = _new_socket()
        try:
            connection.connect(self._card.address)
            owner = Credentials.of(connection)
            if not self._card.fits(owner, here):
                raise RuntimeError(
                    f"the mailbox of rank {self.peer} is held by {owner}, which is not that rank: expected "
                    f"process {self._card.pid} of user {self._card.uid}"
                )
        except ConnectionRefusedError as failure:
            self._closer.add(connection)
            raise RuntimeError(
                f"rank {self.peer} cannot be reached over a Unix socket: ranks must share a host and its network "
                "namespace"
            ) from failure
        except BaseException:
            self._closer.add(connection)
            raise
        return connection

    def close(self) -> None:
        if self._connection is not None:
            self._closer.add(self._connection)
        self._connection, self._sent = None, False


class Mailbox:
    """A listening socket in which the peers of this host put file descriptors."""

    def __init__(self) -> None:
        self.card = Card.new()
        # Number and last fault of strangers, for the error of a wait that ends.
        self.strangers = 0
        self.last_stranger = ""
        self._silent: deque[tuple[socket.socket, Credentials]] = deque()
        self._closer = _Closer()
        self._listener = _new_socket()
        try:
            self._listener.bind(self.card.address)
            self._listener.listen(_BACKLOG)
        except BaseException:
            self._listener.close()
            raise

    def swap(self, cards: list[Card], rank: int, descriptor: int, taken: dict[int, int], end: float) -> None:
        """Hands `descriptor` to every peer and adds theirs to `taken`, by rank. TimeoutError at `end`."""
        deliveries = [
            _Delivery(peer, card, _MESSAGE.pack(card.secret, rank), descriptor, self._closer)
            for peer, card in enumerate(cards)
            if peer != rank
        ]
        expected = {peer: card for peer, card in enumerate(cards) if peer != rank and peer not in taken}
        try:
            while True:
                for delivery in deliveries:
                    delivery.step(self.card)
                self._listen(expected, taken)
                under_way = [delivery for delivery in deliveries if not delivery.done]
                if not expected and not under_way:
                    return
                left = end - time.monotonic()
                if left <= 0:
                    raise TimeoutError(self._late(rank, sorted(expected), [delivery.peer for delivery in under_way]))
                self._wait(under_way, left)
        finally:
            for delivery in deliveries:
                delivery.close()

    def _wait(self, under_way: list[_Delivery], left: float) -> None:
        poll = select.poll()
        numbers = [delivery.fileno() for delivery in under_way]
        listener = None if self._closer.full else self._listener.fileno()
        for number in (listener, *(silent.fileno() for silent, _ in self._silent), *numbers):
            if number is not None:
                poll.register(number, select.POLLIN)
        poll.poll(min(left, _RETRY if None in numbers else 0.1) * 1000)

    def _late(self, rank: int, missing: list[int], undelivered: list[int]) -> str:
        waits = [f"for the memory of ranks {missing}"] if missing else []
        waits += [f"for ranks {undelivered} to take its own"] if undelivered else []
        text = f"all-reduce workspace: rank {rank} waited {' and '.join(waits)}"
        if self.strangers:
            text += f"; {self.strangers} connections were passed over, the last of {self.last_stranger}"
        return text

    def _listen(self, expected: dict[int, Card], taken: dict[int, int]) -> None:
        """Takes what has arrived, without waiting."""
        for _ in range(_BATCH):
            if self._closer.full:
                break
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                break
            connection.setblocking(False)
            seen = Credentials.of(connection)
            if not any(card.fits(seen, self.card) for card in expected.values()):
                self._pass_over(connection, seen, "no rank that is waited for")
                continue
            if len(self._silent) == _SILENT:
                self._pass_over(*self._silent.popleft(), "no message")
            self._silent.append((connection, seen))
        for connection, seen in list(self._silent):
            self._read(connection, seen, expected, taken)

    def _read(
        self, connection: socket.socket, seen: Credentials, expected: dict[int, Card], taken: dict[int, int]
    ) -> None:
        try:
            # Without its descriptors, which stay where they are.
            data = connection.recv(_MESSAGE.size + 1, socket.MSG_PEEK)
        except BlockingIOError:
            return
        except ConnectionResetError:
            data = b""
        self._silent.remove((connection, seen))
        fault, sender = self._judge(data, seen, expected)
        descriptors: list[int] = []
        if not fault:
            # The secret is right, so a rank sent them.
            descriptors, whole = _receive(connection)
            if len(descriptors) != 1 or not whole:
                fault = f"{len(descriptors)} descriptors in place of one"
        if fault:
            for descriptor in descriptors:
                os.close(descriptor)
            self._pass_over(connection, seen, fault)
            return
        taken[sender] = descriptors[0]
        del expected[sender]
        try:
            connection.send(_TAKEN, socket.MSG_NOSIGNAL)
        except OSError:
            # The sender is gone; its descriptor is good.
            pass
        self._closer.add(connection)

    def _judge(self, data: bytes, seen: Credentials, expected: dict[int, Card]) -> tuple[str, int]:
        """Returns (what is wrong with a message, or ""; the sender's rank)."""
        if len(data) != _MESSAGE.size:
            return "a message of the wrong size", 0
        secret, sender = _MESSAGE.unpack(data)
        if not hmac.compare_digest(secret, self.card.secret):
            return "a wrong secret", 0
        if sender not in expected or not expected[sender].fits(seen, self.card):
            return f"a rank ({sender}) that it is not, or that has come before", 0
        return "", sender

    def _pass_over(self, connection: socket.socket, seen: Credentials, why: str) -> None:
        self._closer.add(connection)
        self.strangers += 1
        self.last_stranger = f"{seen}: {why}"

    def close(self) -> None:
        # Connections that were not accepted are closed with the listener.
        for connection in (self._listener, *(silent for silent, _ in self._silent)):
            self._closer.add(connection)
        self._silent.clear()
        self._closer.finish(_CLOSING)


def _receive(connection: socket.socket) -> tuple[list[int], bool]:
    """Takes a message. Returns (its descriptors, whether they are all). They now belong to this process."""
    items = array.array("i")
    room = socket.CMSG_SPACE(_DESCRIPTOR_ROOM * items.itemsize)
    _, ancillary, flags, _ = connection.recvmsg(_MESSAGE.size, room, socket.MSG_CMSG_CLOEXEC)
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            items.frombytes(content[: len(content) - len(content) % items.itemsize])
    return list(items), not flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC)
