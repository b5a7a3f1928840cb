"""How ranks hand each other their memory while strangers connect: who is taken for a rank, and who is not."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import oxmoe
from oxmoe.allreduce.memory import share
from peer_group import (
    CLOSER,
    NOBODY,
    STRANGER,
    Group,
    as_root,
    meet,
    nothing_is_left_open,  # noqa: F401 - a fixture that every test here uses
    right,
    said,
    stranger,
    users,
)
from peer_rank import Memory
from ranks import raised


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
