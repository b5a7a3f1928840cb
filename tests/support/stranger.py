"""A process of another user that has found the mailboxes' names: `python stranger.py UID MODE TEXT [SECONDS]`.

MODE: "claim" sends a descriptor as rank 1, in the form of every protocol that mailboxes have had; "flood" does so again
and again for SECONDS, from two processes; "silent" connects as often as it can, says nothing and stays for SECONDS;
"linger" sends TCP sockets whose last close waits for SECONDS. "listen ANSWER" listens at the name TEXT for SECONDS in
place of a rank, answers whoever connects, and prints at the end what it got: JSON of [bytes as hex, descriptors], one
for each message. ANSWER: "nothing", "random", "echo" (its guest's own message), "short" or "sockets" (random, with TCP
sockets whose last close waits for 20 seconds).
Prints a line once it has begun. TEXT is what the memory behind its descriptors holds.
"""

from __future__ import annotations

import array
import json
import os
import secrets
import socket
import struct
import sys
import threading
import time


def mailboxes() -> list[tuple[int, str]]:
    """Returns (type of socket, address) of every mailbox on the host."""
    found = {}  # Connections to a mailbox have its name, too.
    with open("/proc/net/unix") as table:
        for line in table:
            fields = line.split()
            if fields[-1].startswith("@oxmoe-"):
                found["\0" + fields[-1][1:]] = int(fields[4], 16)
    return [(kind, address) for address, kind in found.items()]


def claim(kind: int, address: str, descriptor: int) -> bool:
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))]
    if kind == socket.SOCK_DGRAM:
        forms = [b"\1"]
    else:
        forms = [
            struct.pack("<32sI", secrets.token_bytes(32), 1),
            struct.pack("<I32s32s", 1, secrets.token_bytes(32), secrets.token_bytes(32)),
        ]
    reached = True
    for data in forms:
        with socket.socket(socket.AF_UNIX, kind) as connection:
            connection.settimeout(0.05)
            try:
                connection.connect(address)
                connection.sendmsg([data], rights)
            except OSError:
                reached = False
    return reached


def lingering(seconds: float) -> tuple[socket.socket, socket.socket]:
    """A TCP socket with data that its peer does not take, and that peer."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        ours = socket.socket()
        ours.connect(server.getsockname())
        theirs, _ = server.accept()
    ours.setblocking(False)
    try:
        while True:
            ours.send(b"x" * 65536)
    except BlockingIOError:
        pass
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, int(seconds)))
    return ours, theirs


def listen(name: str, answer: str, seconds: float) -> None:
    """Listens in place of a rank. The first guest that goes away, or the end of the time, ends it."""
    got: list[tuple[str, int]] = []
    end = time.monotonic() + seconds
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind("\0" + name)
        listener.listen()
        print("begun", flush=True)
        listener.settimeout(seconds)
        guest, _ = listener.accept()
    kept = []
    with guest:
        try:
            while (left := end - time.monotonic()) > 0:
                guest.settimeout(left)
                data, descriptors, _, _ = socket.recv_fds(guest, 4096, 16)
                if not data:
                    break
                got.append((data.hex(), len(descriptors)))
                if answer == "nothing":
                    continue
                reply = {"echo": data[4:], "short": secrets.token_bytes(63)}.get(answer, secrets.token_bytes(64))
                handed: list[int] = []
                if answer == "sockets":
                    ours, theirs = lingering(20)
                    handed.append(ours.detach())
                    kept.append(theirs)
                socket.send_fds(guest, [reply], handed)
                for descriptor in handed:
                    os.close(descriptor)
        except OSError:
            # The guest has gone, or nothing came in time.
            pass
    print(json.dumps(got), flush=True)


def main(uid: int, mode: str, text: str, seconds: float) -> None:
    if uid != os.getuid():
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
    if mode.startswith("listen "):
        listen(text, mode.split()[1], seconds)
        return
    memory = os.memfd_create("stranger")
    os.write(memory, text.encode())
    targets = mailboxes()
    assert targets, "no mailbox stands in /proc/net/unix"
    end = time.monotonic() + seconds
    if mode == "claim":
        print(sum(claim(kind, address, memory) for kind, address in targets), flush=True)
        return
    if mode == "linger":
        kept = []
        for kind, address in targets * 3:
            ours, theirs = lingering(seconds)
            claim(kind, address, ours.fileno())
            # The mailbox has the last reference now. If it took nothing, this close waits, so it has a thread.
            threading.Thread(target=ours.close, daemon=True).start()
            kept.append(theirs)
        print("begun", flush=True)
        time.sleep(seconds)
        return
    if mode == "flood":
        os.fork()
    print("begun", flush=True)
    held: list[socket.socket] = []
    while time.monotonic() < end:
        for kind, address in targets:
            if mode == "flood":
                claim(kind, address, memory)
            elif len(held) < 900:
                connection = socket.socket(socket.AF_UNIX, kind)
                connection.setblocking(False)
                held.append(connection)
                try:
                    connection.connect(address)
                except OSError:
                    pass
            else:
                time.sleep(0.01)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3], float(sys.argv[4]) if len(sys.argv) > 4 else 0)
