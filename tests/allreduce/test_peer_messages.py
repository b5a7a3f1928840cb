"""How a rank's mailbox treats messages of a process that has the credentials of a rank: this one."""

from __future__ import annotations

import array
import contextlib
import hmac
import os
import socket
import struct
import threading
import time
from collections.abc import Callable

import pytest

from oxmoe.allreduce.memory import share
from peer_group import (
    meet,
    nothing_is_left_open,  # noqa: F401 - a fixture that every test here uses
    right,
    said,
)
from peer_rank import Memory
from ranks import raised

# The protocol is written here a second time, so that a change of one side's form or proofs is seen.


def secret_of(text: str) -> bytes:
    return bytes.fromhex(text.split()[2])


def proof(secret: bytes, message: str, rank: int, *numbers: bytes) -> bytes:
    return hmac.digest(secret, f"oxmoe-mailbox-2 {message} {rank} ".encode() + b"".join(numbers), "sha256")


OURS = bytes(range(32))


def hello(secret: bytes, rank: int) -> bytes:
    return struct.pack("<I", rank) + OURS + proof(secret, "hello", rank, OURS)


def reach(text: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(f"\0oxmoe-{text.split()[1]}")
    return connection


def send(connection: socket.socket, data: bytes, descriptors: int = 0) -> None:
    memory = os.memfd_create("stranger")
    os.write(memory, b"a stranger's")
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [memory] * descriptors))
    try:
        connection.sendmsg([data], [rights] if descriptors else [])
    finally:
        os.close(memory)


def answer(connection: socket.socket) -> bytes:
    """What a mailbox said. A connection that was closed with its message unread is reset."""
    with connection:
        try:
            return connection.recv(16)
        except ConnectionResetError:
            return b""


@pytest.mark.parametrize(
    "wrong",
    [
        "secret",
        "last bit of the proof",
        "own secret",
        "proof of a parcel",
        "proof of another rank",
        "proof of another number",
        "short",
        "long",
        "empty",
        "very long",
        "1 descriptors",
        "200 descriptors",
        "rank itself",
        "rank beyond",
        "rank -1",
    ],
)
def test_first_messages_that_do_not_fit(wrong: str) -> None:
    held = []

    def between(texts: list[str]) -> None:
        secret = secret_of(texts[0])
        data, count = hello(secret, 1), 0
        if wrong == "secret":
            data = hello(b"\0" * 32, 1)
        elif wrong == "last bit of the proof":
            data = data[:-1] + bytes([data[-1] ^ 1])
        elif wrong == "own secret":
            data = hello(secret_of(texts[1]), 1)
        elif wrong == "proof of a parcel":
            data = data[:36] + proof(secret, "parcel", 1, OURS)
        elif wrong == "proof of another rank":
            data = data[:36] + proof(secret, "hello", 2, OURS)
        elif wrong == "proof of another number":
            data = data[:36] + proof(secret, "hello", 1, b"\0" * 32)
        elif wrong in ("short", "long", "empty", "very long"):
            data = {"short": data[:-1], "long": data + b"\0", "empty": b"", "very long": data * 1000}[wrong]
        elif wrong.endswith("descriptors"):
            count = int(wrong.split()[0])
        else:
            data = hello(secret, {"itself": 0, "beyond": 2, "-1": 2**32 - 1}[wrong.split()[1]])
        held.append(reach(texts[0]))
        send(held[0], data, count)

    assert meet(2, between) == right(2)
    # It was closed and nothing was said.
    assert answer(held[0]) == b""


class Guests:
    """Connections to rank 0's mailbox that know its secret. Each sends the first message, and `parcel` once the rank
    has answered."""

    def __init__(self, parcels: list[Callable[[bytes, bytes], tuple[bytes, int]]]) -> None:
        self.parcels = parcels
        self.answers: list[bytes] = []
        self.thread: threading.Thread | None = None

    def come(self, texts: list[str]) -> None:
        secret = secret_of(texts[0])
        connections = [reach(texts[0]) for _ in self.parcels]
        for connection in connections:
            connection.settimeout(20)
            send(connection, hello(secret, 1))

        def rest() -> None:
            seen = [connection.recv(100) for connection in connections]
            for connection, number, parcel in zip(connections, seen, self.parcels, strict=True):
                assert number[32:] == proof(secret, "answer", 1, OURS, number[:32])
                with contextlib.suppress(BrokenPipeError):
                    send(connection, *parcel(secret, number[:32]))
            self.answers += [answer(connection) for connection in connections]
            assert len(set(seen)) == len(seen)

        self.thread = threading.Thread(target=rest)
        self.thread.start()

    def gone(self) -> list[bytes]:
        assert self.thread is not None
        self.thread.join(30)
        return self.answers


def fitting(secret: bytes, number: bytes) -> tuple[bytes, int]:
    return proof(secret, "parcel", 1, OURS, number), 1


@pytest.mark.parametrize(
    "wrong",
    ["the first message again", "another number", "the answer's", "short", "long", "no descriptor", "two", "200"],
)
def test_second_messages_that_do_not_fit(wrong: str) -> None:
    """A recorded first message is answered, but it is worth nothing without the proof for the owner's new number."""

    def parcel(secret: bytes, number: bytes) -> tuple[bytes, int]:
        data, _ = fitting(secret, number)
        return {
            "the first message again": (hello(secret, 1), 1),
            "another number": (proof(secret, "parcel", 1, OURS, b"\0" * 32), 1),
            "the answer's": (proof(secret, "answer", 1, OURS, number), 1),
            "short": (data[:-1], 1),
            "long": (data + b"\0", 1),
            "no descriptor": (data, 0),
            "two": (data, 2),
            "200": (data, 200),
        }[wrong]

    class Slow(Memory):
        def descriptor(self) -> int:
            # The guest's messages come first.
            if self.text == "rank 1":
                guests.gone()
            return super().descriptor()

    guests = Guests([parcel])
    assert meet(2, guests.come, kind=Slow) == right(2)
    assert guests.gone() == [b""]


def test_a_rank_comes_once() -> None:
    # The messages have the right proofs, so the first one counts: only the group can have sent it.
    guests = Guests([fitting] * 3)

    class Slow(Memory):
        def descriptor(self) -> int:
            if self.text != "rank 0":
                guests.gone()
            return super().descriptor()

    results = meet(3, guests.come, seconds=4, kind=Slow)
    answers = guests.gone()
    assert sorted(answers) == [b"", b"", b"\1"], answers
    # The rank itself was not taken again: it waits to its end, and all ranks hear of it.
    assert all(isinstance(result, Exception) for result in results)
    assert any(isinstance(result, TimeoutError) and "to take its own" in str(result) for result in results)


def test_no_message_has_the_secret() -> None:
    """What ranks say to each other, as a listener in place of rank 1 hears it. It knows the secret here."""
    from oxmoe.allreduce.mailbox import Card

    card, heard = Card.new(), []
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(card.address)
        listener.listen()
        listener.settimeout(20)

        def owner() -> None:
            guest, _ = listener.accept()
            with guest:
                first = guest.recv(200)
                theirs = first[4:36]
                guest.send(OURS + proof(card.secret, "answer", 0, theirs, OURS))
                second, descriptors, _, _ = socket.recv_fds(guest, 200, 8)
                heard.extend((first, second, len(descriptors)))
                assert second == proof(card.secret, "parcel", 0, theirs, OURS)
                for descriptor in descriptors:
                    os.close(descriptor)

        thread = threading.Thread(target=owner)
        thread.start()
        exchange = lambda error, text: said(error, [text, card.text()])  # noqa: E731
        raised(lambda: share(lambda: Memory("rank 0"), exchange, 0, time.monotonic() + 2))
        thread.join(20)
    first, second, descriptors = heard
    assert first == struct.pack("<I", 0) + first[4:36] + proof(card.secret, "hello", 0, first[4:36])
    assert card.secret not in first + second and descriptors == 1


def test_connections_that_say_nothing() -> None:
    """The connections have a rank's own credentials, and there are more of them than a mailbox keeps."""
    held = []

    def between(texts: list[str]) -> None:
        for _ in range(300):
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            connection.connect(f"\0oxmoe-{texts[0].split()[1]}")
            held.append(connection)

    assert meet(4, between) == right(4)
    for connection in held:
        assert connection.recv(16) == b""
        connection.close()
