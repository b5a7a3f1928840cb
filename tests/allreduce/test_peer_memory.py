"""How ranks hand each other their memory while strangers connect: who is taken for a rank, and who is not."""

from __future__ import annotations

import array
import contextlib
import hmac
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
from typing import IO, Any

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
        with stranger(uid, "claim") as (line, _):
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
            "version": text.replace("mailbox-2", "mailbox-1"),
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

    here = Card("", b"", uid=1000, pid=10, user_namespace=7, pid_namespace=8, network_namespace=9)

    def fits(uid: int, pid: int, user_namespace: int = 7, pid_namespace: int = 8) -> bool:
        rank = Card("", b"", 1000, 20, user_namespace, pid_namespace, network_namespace=9)
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


@pytest.mark.parametrize("reply", ["nothing", "random", "echo", "short", "sockets"])
def test_a_stranger_that_listens_in_place_of_a_rank(reply: str) -> None:
    """A rank died, and a process whose credentials cannot be compared took its name. It gets neither the secret nor a
    descriptor."""
    from oxmoe.allreduce.mailbox import Card

    mine = Card.new()
    # The rank was in other namespaces of users and pids.
    card = Card(mine.name, mine.secret, mine.uid, mine.pid, 1, 1, mine.network_namespace)
    with stranger(os.geteuid(), f"listen {reply}", 20, card.address[1:]) as (line, output):
        assert line == "begun\n"
        exchange = lambda error, text: said(error, [text, card.text()])  # noqa: E731
        started = time.monotonic()
        kind, text = raised(lambda: share(lambda: Memory("rank 0"), exchange, 0, started + 3))
        took = time.monotonic() - started
        messages = json.loads(output.readline())
    assert took < 8
    if reply == "nothing":
        assert kind == "TimeoutError" and "for ranks [1] to take its own" in text, (kind, text)
    else:
        assert kind == "RuntimeError" and text.startswith("the mailbox of rank 1 is held by process"), (kind, text)
        assert text.endswith("does not know the secret of that rank; nothing was handed over"), text
    assert [descriptors for _, descriptors in messages] == [0], messages
    data = bytes.fromhex(messages[0][0])
    assert len(data) == 68 and card.secret not in data and card.secret.hex() not in text


def said(error: Exception | None, texts: list[str]) -> list[str]:
    if error is not None:
        raise error
    return texts


def test_ranks_in_other_network_namespaces() -> None:
    """Their names are not the same names: a stranger who is in both could pass a rank's messages on to the other."""
    from oxmoe.allreduce.mailbox import Card

    mine = Card.new()
    card = Card(mine.name, mine.secret, mine.uid, mine.pid, 1, 1, mine.network_namespace + 1)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(card.address)
        listener.listen()
        exchange = lambda error, text: said(error, [text, card.text()])  # noqa: E731
        kind, text = raised(lambda: share(lambda: Memory("rank 0"), exchange, 0, time.monotonic() + 5))
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()
    assert kind == "RuntimeError" and text.startswith("rank 1 cannot be reached over a Unix socket"), (kind, text)
