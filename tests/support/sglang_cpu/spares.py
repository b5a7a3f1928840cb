"""`spares.py COUNT sglang.launch_server ...` runs a server whose processes share the imports of other projects.

A server starts a scheduler for each rank and a detokenizer by multiprocessing's "spawn". Each of them imports torch and
all that SGLang takes from other projects, which is most of a start. `forked.start` begins this program with all of that
imported. Before it imports SGLang, it forks COUNT spare processes that wait. A process that the server spawns is then
one of them: a child of the server as before, with the same command, the same descriptors under the same numbers, and
the environment that the server has at that time. The server starts more processes than that in the usual way.
"""

from __future__ import annotations

import fcntl
import json
import multiprocessing.util
import os
import re
import runpy
import socket
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

_SPAWNED = re.compile(r"from multiprocessing\.spawn import spawn_main; spawn_main\(.*\)")


class Spare:
    """A process that waits for the command of a process that the server spawns."""

    def __init__(self, pid: int, connection: socket.socket) -> None:
        self.pid, self._connection = pid, connection

    def begin(self, arguments: Sequence[Any], descriptors: Sequence[int]) -> int:
        command = [os.fsdecode(argument) for argument in arguments]
        given = {"command": command, "descriptors": list(descriptors), "env": dict(os.environ), "cwd": os.getcwd()}
        with self._connection as connection:
            socket.send_fds(connection, [b"."], list(descriptors))
            connection.sendall(json.dumps(given).encode())
        return self.pid


def _waiting(connection: socket.socket) -> dict[str, Any]:
    """Waits for a command in a spare process. The process ends if the server ends before."""
    head, files, *_ = socket.recv_fds(connection, 1, 16)
    if not head:
        os._exit(0)
    data = b""
    while part := connection.recv(1 << 16):
        data += part
    connection.close()
    given: dict[str, Any] = json.loads(data)
    # No number is overwritten that is still to be copied.
    least = max(given["descriptors"], default=0) + 1
    high = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, least) for file in files]
    for file, number in zip(high, given["descriptors"], strict=True):
        os.dup2(file, number)
    for file in {*files, *high} - set(given["descriptors"]):
        os.close(file)
    return given


def _spawned(given: dict[str, Any]) -> None:
    """Becomes the process that was to be spawned."""
    os.environ.clear()
    os.environ.update(given["env"])
    os.chdir(given["cwd"])
    _, *options, code, argument = given["command"]
    assert options[-1] == "-c", options
    sys.argv = ["-c", argument]
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    exec(compile(code, "<string>", "exec"), main.__dict__)


def _take_over(spares: list[Spare]) -> None:
    """Has multiprocessing take spare processes as long as there are any."""
    spawn: Callable[..., int] = multiprocessing.util.spawnv_passfds

    def spawnv_passfds(path: Any, arguments: Sequence[Any], descriptors: Sequence[int]) -> int:
        if not spares or not any(_SPAWNED.fullmatch(os.fsdecode(argument)) for argument in arguments):
            return spawn(path, arguments, descriptors)
        return spares.pop().begin(arguments, descriptors)

    multiprocessing.util.spawnv_passfds = spawnv_passfds


def main() -> None:
    count, module, *arguments = sys.argv[1:]
    # This file's folder comes first on the path of a script, and has no part in a server's.
    sys.path[:1] = [os.getcwd()]
    spares: list[Spare] = []
    for _ in range(int(count)):
        ours, theirs = socket.socketpair()
        sys.stdout.flush()
        if (child := os.fork()) == 0:
            ours.close()
            for spare in spares:
                spare._connection.close()
            return _spawned(_waiting(theirs))
        theirs.close()
        spares.append(Spare(child, ours))
    _take_over(spares)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
