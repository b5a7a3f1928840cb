"""Lets ranks of one host hand each other file descriptors, and keeps everybody else out: sockets, proofs, credentials.

Every rank listens at a random abstract name. Everybody on the host can read such names in /proc/net/unix and
connect. So a connection counts for nothing until three things hold. The credentials that the kernel reports for its
process are those that the group told of a rank. The process proves that it knows the secret of the mailbox, which
only the group knows. That rank has not come before. Any other connection is closed, with all descriptors that it
brought, and the wait goes on to its deadline.

The secret itself is never sent over a socket. Three messages prove that both sides know it (HMAC-SHA256):

1. The sender's rank, a number that the sender draws, and the sender's proof for both.
2. A number that the mailbox's owner draws, and the owner's proof for both numbers.
3. The sender's proof for both numbers, with the descriptor.

So who listens at the name of a rank that died learns no secret and gets no descriptor. A first message can be sent
again by who has seen it, but a third one cannot, because its owner draws a new number for each connection.

Closing what a stranger sent can take for ever: the last close of a TCP socket with SO_LINGER waits for that socket's
peer, and a file of FUSE waits for its server. So a message is read where it lies, and is taken with its descriptors
only after its proof is right. A thread without a deadline closes what is not taken.
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

_VERSION = "oxmoe-mailbox-2"
_NUMBER_BYTES = 32
# The sender's first message: its rank, its number, its proof.
_HELLO = struct.Struct("<I32s32s")
# The owner's answer: its number, its proof.
_ANSWER = struct.Struct("<32s32s")
# The sender's second message is a proof alone. Exactly one descriptor comes with it.
_PARCEL_BYTES = 32
_TAKEN = b"\1"
_CREDENTIALS = struct.Struct("iII")
_CARD = re.compile(
    _VERSION + r" ([0-9a-f]{32}) ([0-9a-f]{64}) (0|[1-9][0-9]{0,9}) ([1-9][0-9]{0,9})"
    r" ([0-9]{1,19}) ([0-9]{1,19}) ([0-9]{1,19})"
)
_BACKLOG = 4096
# Connections that one step accepts. It is bounded, because between two steps this rank tries to reach its own peers.
_BATCH = 64
# Connections with the right credentials that have not sent their first message. One more closes the oldest; its rank
# connects again.
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
    network_namespace: int

    @staticmethod
    def new() -> Card:
        namespaces = [_namespace(kind) for kind in ("user", "pid", "net")]
        return Card(secrets.token_hex(16), secrets.token_bytes(32), os.geteuid(), os.getpid(), *namespaces)

    def text(self) -> str:
        return (
            f"{_VERSION} {self.name} {self.secret.hex()} {self.uid} {self.pid} "
            f"{self.user_namespace} {self.pid_namespace} {self.network_namespace}"
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
        uid, pid, user_namespace, pid_namespace, network_namespace = map(int, numbers)
        return Card(name, bytes.fromhex(secret), uid, pid, user_namespace, pid_namespace, network_namespace)

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

    def apart(self, here: Card) -> bool:
        """Whether this rank's names are not those of `here`, because the two are in different network namespaces. A
        stranger in both could take the name of each rank and pass the messages on."""
        return 0 not in (self.network_namespace, here.network_namespace) and (
            self.network_namespace != here.network_namespace
        )

    def proof(self, message: str, sender: int, *numbers: bytes) -> bytes:
        """Returns a proof that its maker knows this card's secret. It holds for one message of one sender."""
        fixed = f"{_VERSION} {message} {sender} ".encode()
        return hmac.digest(self.secret, fixed + b"".join(numbers), "sha256")


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

    def __init__(self, peer: int, card: Card, rank: int, descriptor: int, closer: _Closer) -> None:
        self.peer, self._card, self._rank, self._descriptor = peer, card, rank, descriptor
        self._closer = closer
        self._connection: socket.socket | None = None
        self._number = b""
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
            if not self._number:
                number = secrets.token_bytes(_NUMBER_BYTES)
                hello = _HELLO.pack(self._rank, number, self._card.proof("hello", self._rank, number))
                self._connection.send(hello, socket.MSG_NOSIGNAL)
                self._number = number
            if not self._sent:
                parcel = self._checked(self._connection.recv(_ANSWER.size + 1, socket.MSG_PEEK))
                # The answer is of a rank, so it has no descriptors.
                self._connection.recv(_ANSWER.size)
                rights = array.array("i", [self._descriptor])
                ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)]
                self._connection.sendmsg([parcel], ancillary, socket.MSG_NOSIGNAL)
                self._sent = True
            self.done = self._connection.recv(1) == _TAKEN
        except BlockingIOError:
            # The peer has no room for one more connection, or has not answered yet.
            return
        except (ConnectionResetError, BrokenPipeError):
            pass
        self.close()
        self._again = time.monotonic() + _RETRY

    def _checked(self, answer: bytes) -> bytes:
        """Returns the proof that goes with the descriptor, after the mailbox's owner has proved that it is in the
        group."""
        if not answer:
            raise ConnectionResetError("the mailbox closed the connection")
        if len(answer) == _ANSWER.size:
            number, proof = _ANSWER.unpack(answer)
            if hmac.compare_digest(proof, self._card.proof("answer", self._rank, self._number, number)):
                return self._card.proof("parcel", self._rank, self._number, number)
        assert self._connection is not None
        raise RuntimeError(
            f"the mailbox of rank {self.peer} is held by {Credentials.of(self._connection)}, which does not know the "
            "secret of that rank; nothing was handed over"
        )

    def _connect(self, here: Card) -> socket.socket:
        if self._card.apart(here):
            raise RuntimeError(self._unreachable())
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
            raise RuntimeError(self._unreachable()) from failure
        except BaseException:
            self._closer.add(connection)
            raise
        return connection

    def _unreachable(self) -> str:
        return (
            f"rank {self.peer} cannot be reached over a Unix socket: ranks must share a host and its network namespace"
        )

    def close(self) -> None:
        if self._connection is not None:
            self._closer.add(self._connection)
        self._connection, self._number, self._sent = None, b"", False


@dataclass(frozen=True)
class _Known:
    """A connection whose first message was a rank's. `parcel` is the proof that must come with its descriptor."""

    connection: socket.socket
    seen: Credentials
    sender: int
    parcel: bytes = field(repr=False)


class Mailbox:
    """A listening socket in which the peers of this host put file descriptors."""

    def __init__(self) -> None:
        self.card = Card.new()
        # Number and last fault of strangers, for the error of a wait that ends.
        self.strangers = 0
        self.last_stranger = ""
        self._silent: deque[tuple[socket.socket, Credentials]] = deque()
        self._known: list[_Known] = []
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
            _Delivery(peer, card, rank, descriptor, self._closer) for peer, card in enumerate(cards) if peer != rank
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
        callers = [silent for silent, _ in self._silent] + [known.connection for known in self._known]
        for number in (listener, *(caller.fileno() for caller in callers), *numbers):
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
            self._greet(connection, seen, expected)
        for known in list(self._known):
            self._take(known, expected, taken)

    def _greet(self, connection: socket.socket, seen: Credentials, expected: dict[int, Card]) -> None:
        """Reads a first message. If it is a rank's, this rank proves in turn that it is the mailbox's owner."""
        data = _peek(connection, _HELLO.size)
        if data is None:
            return
        self._silent.remove((connection, seen))
        fault, sender, theirs = self._judge(data, seen, expected)
        if not fault:
            # The proof is right, so a rank sent the message.
            descriptors, whole = _receive(connection, _HELLO.size)
            if descriptors or not whole:
                fault = "descriptors with the first message"
            for descriptor in descriptors:
                os.close(descriptor)
        if fault:
            self._pass_over(connection, seen, fault)
            return
        ours = secrets.token_bytes(_NUMBER_BYTES)
        try:
            answer = _ANSWER.pack(ours, self.card.proof("answer", sender, theirs, ours))
            connection.send(answer, socket.MSG_NOSIGNAL)
        except OSError:
            self._pass_over(connection, seen, "no wait for the answer")
            return
        self._known.append(_Known(connection, seen, sender, self.card.proof("parcel", sender, theirs, ours)))

    def _judge(self, data: bytes, seen: Credentials, expected: dict[int, Card]) -> tuple[str, int, bytes]:
        """Returns (what is wrong with a first message, or ""; the sender's rank; its number)."""
        if len(data) != _HELLO.size:
            return "a message of the wrong size", 0, b""
        sender, number, proof = _HELLO.unpack(data)
        if not hmac.compare_digest(proof, self.card.proof("hello", sender, number)):
            return "a wrong proof", 0, b""
        if sender not in expected or not expected[sender].fits(seen, self.card):
            return f"a rank ({sender}) that it is not, or that has come before", 0, b""
        return "", sender, number

    def _take(self, known: _Known, expected: dict[int, Card], taken: dict[int, int]) -> None:
        """Takes the descriptor of a rank that has proved who it is."""
        data = _peek(known.connection, _PARCEL_BYTES)
        if data is None:
            return
        self._known.remove(known)
        descriptors: list[int] = []
        fault = ""
        if not hmac.compare_digest(data, known.parcel):
            fault = "a wrong proof with the descriptor" if data else "no descriptor"
        elif known.sender not in expected:
            fault = f"a rank ({known.sender}) that has come before"
        else:
            descriptors, whole = _receive(known.connection, _PARCEL_BYTES)
            if len(descriptors) != 1 or not whole:
                fault = f"{len(descriptors)} descriptors in place of one"
        if fault:
            for descriptor in descriptors:
                os.close(descriptor)
            self._pass_over(known.connection, known.seen, fault)
            return
        taken[known.sender] = descriptors[0]
        del expected[known.sender]
        try:
            known.connection.send(_TAKEN, socket.MSG_NOSIGNAL)
        except OSError:
            # The sender is gone; its descriptor is good.
            pass
        self._closer.add(known.connection)

    def _pass_over(self, connection: socket.socket, seen: Credentials, why: str) -> None:
        self._closer.add(connection)
        self.strangers += 1
        self.last_stranger = f"{seen}: {why}"

    def close(self) -> None:
        # Connections that were not accepted are closed with the listener.
        callers = [silent for silent, _ in self._silent] + [known.connection for known in self._known]
        for connection in (self._listener, *callers):
            self._closer.add(connection)
        self._silent.clear()
        self._known.clear()
        self._closer.finish(_CLOSING)


def _peek(connection: socket.socket, size: int) -> bytes | None:
    """Returns a message and leaves it and its descriptors where they are. It has one byte more than `size` if the
    message is longer, b"" if the other side is gone, None if nothing has arrived."""
    try:
        return connection.recv(size + 1, socket.MSG_PEEK)
    except BlockingIOError:
        return None
    except ConnectionResetError:
        return b""


def _receive(connection: socket.socket, size: int) -> tuple[list[int], bool]:
    """Takes a message. Returns (its descriptors, whether they are all). They now belong to this process."""
    items = array.array("i")
    room = socket.CMSG_SPACE(_DESCRIPTOR_ROOM * items.itemsize)
    _, ancillary, flags, _ = connection.recvmsg(size, room, socket.MSG_CMSG_CLOEXEC)
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            items.frombytes(content[: len(content) - len(content) % items.itemsize])
    return list(items), not flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC)
