"""How ranks hand each other their memory while strangers connect: who is taken for a rank, and who is not."""

from __future__ import annotations

import array
import contextlib
import json
import os
import re
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import oxmoe
from oxmoe.allreduce.memory import share
from peer_rank import Memory
from ranks import raised

NOBODY = 65534
CLOSER = "oxmoe all-reduce closer"
STRANGER = Path(__file__).parents[1] / "support" / "stranger.py"
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
    after = set(os.listdir("/proc/self/fd"))
    assert len(after) <= len(before), [
        os.readlink(f"/proc/self/fd/{fd}") for fd in after - before if os.path.exists(fd)
    ]


@contextlib.contextmanager
def stranger(uid: int, mode: str, seconds: float = 0) -> Iterator[str]:
    """Starts a stranger, and yields its first line."""
    command = [sys.executable, str(STRANGER), str(uid), mode, "a stranger's", str(seconds)]
    # The stranger has a group of its own, because a flood has two processes.
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            assert line, "the stranger could not run"
            yield line
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_ranks_alone(size: int) -> None:
    assert meet(size) == right(size)


def test_a_program_that_a_rank_starts_gets_no_descriptor() -> None:
    inherited: list[int] = []

    class Watched(Memory):
        def open(self, descriptors: list[int]) -> None:
            super().open(descriptors)
            inherited.extend(self.inherited)

    assert meet(2, kind=Watched) == right(2) and inherited == []


@users
def test_a_stranger_is_not_taken_for_a_rank(uid: int) -> None:
    tried = []

    def between(_: list[str]) -> None:
        with stranger(uid, "claim") as line:
            tried.append(int(line))

    assert meet(2, between) == right(2)
    assert tried[0] >= 2, "the stranger reached nobody"


@users
@pytest.mark.parametrize("mode", ["flood", "silent"])
def test_a_flood_of_strangers(uid: int, mode: str) -> None:
    with contextlib.ExitStack() as strangers:
        between = lambda _: strangers.enter_context(stranger(uid, mode, 60)) and time.sleep(0.5)  # noqa: E731
        started = time.monotonic()
        assert meet(4, between, seconds=40) == right(4)
    assert time.monotonic() - started < 30


@users
def test_a_flood_ends_with_the_deadline(uid: int) -> None:
    """A rank never comes, while strangers do."""
    with contextlib.ExitStack() as strangers:

        def exchange(error: Exception | None, text: str) -> list[str]:
            if error is not None:
                raise error
            strangers.enter_context(stranger(uid, "flood", 60))
            # Rank 1's mailbox exists, and nobody looks after it.
            return [text, absent.card.text()]

        from oxmoe.allreduce.mailbox import Mailbox

        absent = Mailbox()
        started = time.monotonic()
        kind, text = raised(lambda: share(lambda: Memory("rank 0"), exchange, 0, time.monotonic() + 4))
        took = time.monotonic() - started
        absent.close()
    assert kind == "TimeoutError" and "rank 0 waited for the memory of ranks [1]" in text, (kind, text)
    assert "connections were passed over, the last of process" in text and f"of user {uid}: " in text, text
    assert took < 10


@users
@pytest.mark.parametrize("comes", [True, False], ids=["rank", "no rank"])
def test_sockets_whose_close_waits(uid: int, comes: bool) -> None:
    """A stranger's descriptors, each of which takes 20 seconds to close, do not hold up a start or its deadline."""
    with contextlib.ExitStack() as strangers:

        class Late(Memory):
            def descriptor(self) -> int:
                # A rank that does not come.
                if not comes and self.text == "rank 1":
                    raise OSError("no descriptor")
                return super().descriptor()

        started = time.monotonic()
        between = lambda _: strangers.enter_context(stranger(uid, "linger", 20))  # noqa: E731
        results = meet(2, between, seconds=5, kind=Late)
        took = time.monotonic() - started
    assert took < 10
    if comes:
        assert results == right(2)
    else:
        assert any(isinstance(result, TimeoutError) for result in results), results
    # The sockets' peer is gone, so they are closed now.
    end = time.monotonic() + 10
    while time.monotonic() < end and any(thread.name == CLOSER for thread in threading.enumerate()):
        time.sleep(0.05)


# Connections of a process that has a rank's own credentials: this one.


def secret_of(text: str) -> bytes:
    return bytes.fromhex(text.split()[2])


def send(text: str, data: bytes, descriptors: int) -> socket.socket:
    """Sends a message to the mailbox of a card. Returns the stranger's end of the connection."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(f"\0oxmoe-{text.split()[1]}")
    memory = os.memfd_create("stranger")
    os.write(memory, b"a stranger's")
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [memory] * descriptors))
    try:
        connection.sendmsg([data], [rights] if descriptors else [])
    finally:
        os.close(memory)
    return connection


def answer(connection: socket.socket) -> bytes:
    """What a mailbox said. A connection that was closed with its message unread is reset."""
    with connection:
        try:
            return connection.recv(16)
        except ConnectionResetError:
            return b""


def message(secret: bytes, rank: int) -> bytes:
    return struct.pack("<32sI", secret, rank)


@pytest.mark.parametrize(
    "wrong",
    [
        "secret",
        "last bit of the secret",
        "its own secret",
        "short",
        "long",
        "empty",
        "very long",
        "no descriptor",
        "two descriptors",
        "200 descriptors",
        "rank itself",
        "rank beyond",
        "rank -1",
    ],
)
def test_messages_that_do_not_fit(wrong: str) -> None:
    held = []

    def between(texts: list[str]) -> None:
        secret = secret_of(texts[0])
        data, count = message(secret, 1), 1
        if wrong == "secret":
            data = message(b"\0" * 32, 1)
        elif wrong == "last bit of the secret":
            data = message(secret[:-1] + bytes([secret[-1] ^ 1]), 1)
        elif wrong == "its own secret":
            data = message(secret_of(texts[1]), 1)
        elif wrong in ("short", "long", "empty", "very long"):
            data = {"short": data[:-1], "long": data + b"\0", "empty": b"", "very long": data * 2000}[wrong]
        elif wrong.endswith(("descriptor", "descriptors")):
            count = {"no": 0, "two": 2, "200": 200}[wrong.split()[0]]
        else:
            data = message(secret, {"itself": 0, "beyond": 2, "-1": 2**32 - 1}[wrong.split()[1]])
        held.append(send(texts[0], data, count))

    assert meet(2, between) == right(2)
    # It was closed and nothing was said.
    assert answer(held[0]) == b""


def test_a_rank_comes_once() -> None:
    held: list[socket.socket] = []

    def between(texts: list[str]) -> None:
        # The message has the right secret, so the first one counts: only the group can have sent it.
        for _ in range(3):
            held.append(send(texts[0], message(secret_of(texts[0]), 1), 1))

    results = meet(3, between, seconds=4)
    answers = [answer(connection) for connection in held]
    assert sorted(answers) == [b"", b"", b"\1"], answers
    # The rank itself was not taken again: it waits to its end, and all ranks hear of it.
    assert all(isinstance(result, Exception) for result in results)
    assert any(isinstance(result, TimeoutError) and "to take its own" in str(result) for result in results)


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


# Other namespaces


@as_root
@pytest.mark.parametrize("spaces", [["--pid"], ["--user"], ["--pid", "--user"]], ids=" ".join)
def test_a_rank_in_another_namespace(spaces: list[str]) -> None:
    unshare = ["unshare", *spaces, "--fork"]
    if shutil.which("unshare") is None or subprocess.run([*unshare, "true"], capture_output=True).returncode:
        pytest.skip(f"namespaces cannot be made here ({' '.join(unshare)})")
    command = [
        *unshare,
        sys.executable,
        "-c",
        "import sys; sys.modules['torch'] = None; import peer_rank; peer_rank.over_pipes()",
    ]
    paths = [str(STRANGER.parent), str(Path(oxmoe.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True, env=environment) as process:
        assert process.stdin is not None and process.stdout is not None
        output, send = process.stdout, process.stdin

        def exchange(error: Exception | None, text: str) -> list[str]:
            theirs = json.loads(output.readline())
            send.write(json.dumps([[None if error is None else repr(error), text], theirs]) + "\n")
            send.flush()
            assert error is None and theirs[0] is None, (error, theirs)
            return [text, theirs[1]]

        memory = Memory("rank 0")
        share(lambda: memory, exchange, 0, time.monotonic() + 20)
        seen, pid = json.loads(output.readline())
        assert memory.seen == ["", "rank 1"] and seen == ["rank 0", ""]
        assert pid == 1 or "--pid" not in spaces
        memory.close()


# Cards


@pytest.mark.parametrize("change", ["", "x", "shorter", "longer", "uppercase", "newline", "version", "no pid"])
def test_cards_that_are_none(change: str) -> None:
    def exchange(error: Exception | None, text: str) -> list[str]:
        if error is not None:
            raise error
        fields = text.split(" ")
        other = {
            "": "",
            "x": "x",
            "shorter": text[:40],
            "longer": text + " 1",
            "uppercase": " ".join([*fields[:2], "AB" * 32, *fields[3:]]),
            "newline": text + "\n",
            "version": text.replace("mailbox-1", "mailbox-2"),
            "no pid": " ".join([*fields[:4], "0", *fields[5:]]),
        }[change]
        return [text, other]

    kind, text = raised(lambda: share(lambda: Memory("rank 0"), exchange, 0, time.monotonic() + 10))
    assert kind == "RuntimeError" and text.startswith("rank 1 told the group of no mailbox"), (kind, text)
    # No error contains text that may be a secret.
    assert not re.search("[0-9a-fA-F]{32}", text)


def test_answers_in_another_order() -> None:
    group = Group(2)

    def one(rank: int) -> tuple[str, str]:
        exchange = group.exchange(rank)
        swapped = lambda error, text: exchange(error, text)[::-1]  # noqa: E731
        return raised(lambda: share(lambda: Memory(f"rank {rank}"), swapped, rank, time.monotonic() + 10))

    with ThreadPoolExecutor(2) as pool:
        for rank, (kind, text) in enumerate(pool.map(one, range(2))):
            assert kind == "RuntimeError" and text.startswith(f"rank {rank}: the group gave another rank's"), text


def test_secrets_are_in_no_text() -> None:
    from oxmoe.allreduce.mailbox import Card

    card = Card.new()
    assert Card.parse(0, card.text()) == card and len(card.text()) <= 200
    assert card.secret.hex() not in repr(card) and card.secret.hex() not in card.address
    assert Card.new().secret != card.secret and Card.new().name != card.name


def test_whose_credentials_fit() -> None:
    from oxmoe.allreduce.mailbox import Card, Credentials

    here = Card("", b"", uid=1000, pid=10, user_namespace=7, pid_namespace=8)

    def fits(uid: int, pid: int, user_namespace: int = 7, pid_namespace: int = 8) -> bool:
        rank = Card("", b"", uid=1000, pid=20, user_namespace=user_namespace, pid_namespace=pid_namespace)
        return rank.fits(Credentials(uid, pid), here)

    assert fits(1000, 20)
    assert not fits(1001, 20) and not fits(NOBODY, 20) and not fits(0, 20)
    assert not fits(1000, 21) and not fits(1000, 0) and not fits(1000, 10)
    # A rank in another container has another pid here, or none. Its user still counts.
    assert fits(1000, 4711, pid_namespace=9) and fits(1000, 0, pid_namespace=9) and fits(1000, 0, pid_namespace=0)
    assert not fits(1001, 4711, pid_namespace=9)
    # A rank in another namespace of users is told by its pid.
    assert fits(NOBODY, 20, user_namespace=9) and not fits(NOBODY, 21, user_namespace=9)


def test_a_mailbox_that_another_process_holds() -> None:
    """Nothing is sent to a process that listens at a rank's name and is not that rank."""
    from oxmoe.allreduce.mailbox import Card

    program = (
        "import os, socket, sys, time; s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); "
        "s.bind(chr(0) + sys.argv[1]); s.listen(); print('up', flush=True); s.settimeout(20); c, _ = s.accept(); "
        "print('got', len(c.recv(100)), flush=True)"
    )
    card = Card.new()
    command = [sys.executable, "-c", program, card.address[1:]]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "up\n"

        def exchange(error: Exception | None, text: str) -> list[str]:
            if error is not None:
                raise error
            return [text, card.text()]

        kind, text = raised(lambda: share(lambda: Memory("rank 0"), exchange, 0, time.monotonic() + 10))
        assert process.stdout.readline() == "got 0\n"
    assert kind == "RuntimeError" and text.startswith("the mailbox of rank 1 is held by process"), (kind, text)
