"""Python processes of their own for tests, which begin with other projects' packages imported.

A test that needs a new process spends most of its time importing torch, or what SGLang imports. A process does that
once for all tests of a pytest process, and `run` and `start` have it fork each new process. Nothing of oxmoe and
nothing of SGLang is imported before the fork, and that process starts no thread, so the new one imports them as any
program does.

The end of a process is that of any program, too, but those packages are left as they are: to take them apart would take
longer than what most processes do. Objects of modules that are imported after the fork go, as do static objects of
libraries that are loaded after it. A library's functions of the attribute `destructor` do not run.

Other projects' packages are those that this process's PYTHONPATH finds. What a process reads when it starts is that of
the first one: options of Python, variables that are read by the dynamic loader or by Python's start (LD_LIBRARY_PATH,
PYTHONIOENCODING and others of Python's but PYTHONPATH). A test of those starts a process by `subprocess`.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import types
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

TORCH = ("torch", "numpy")
# SGLang's modules import these of other projects. The release decides which of them there are.
SGLANG = (
    *TORCH,
    *("torch.distributed.tensor", "torch._dynamo", "torch._inductor.compile_fx", "torchvision", "transformers"),
    *("transformers.modeling_utils", "transformers.models.llama", "pydantic", "fastapi", "uvicorn", "openai", "sympy"),
    *("triton", "psutil", "requests", "zmq", "orjson", "msgspec", "PIL.Image", "scipy", "aiohttp"),
)


def run(
    *arguments: str | Path,
    env: dict[str, str] | None = None,
    packages: tuple[str, ...] = TORCH,
    timeout: float = 300,
    cwd: str | Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Runs `python arguments...`, whose first is "-c", "-m" or a file, and returns its status and output.

    env: the whole environment of the process (default: this one's)
    packages: what is imported before it begins
    timeout: seconds, after which the process is killed and `subprocess.TimeoutExpired` is raised
    """
    command = list(map(str, arguments))
    given = dict(os.environ if env is None else env)
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        status = _parent(packages).fork(command, given, str(cwd or Path.cwd()), out, errors, timeout)
        texts = []
        for file in (out, errors):
            file.seek(0)
            texts.append(file.read().decode(errors="surrogateescape"))
    return subprocess.CompletedProcess([sys.executable, *command], status, *texts)


class Started:
    """A process that `start` began, in a session of its own; its methods and fields are those of `subprocess.Popen`."""

    def __init__(self, pid: int, end: socket.socket) -> None:
        self.pid, self._end = pid, end
        self.returncode: int | None = None

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self._end.settimeout(timeout)
            try:
                self.returncode = _number(_exactly(self._end, 8))
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0) from None
            self._end.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def start(
    *arguments: str | Path,
    env: dict[str, str],
    output: IO[str],
    cwd: str | Path,
    packages: tuple[str, ...],
    before: dict[str, str],
) -> Started:
    """Starts `python arguments...`, whose first is a file, and does not wait for it. It has no input.

    env: the whole environment of the process
    output: where its output and its errors go
    packages: what is imported before it begins
    before: variables that differ from this process's while packages are imported, such as PYTHONPATH
    """
    parent = _parent(packages, tuple(sorted(before.items())))
    return parent.start(list(map(str, arguments)), env, str(cwd), output)


class _Parent:
    """The process that the others are forked from."""

    def __init__(self, packages: tuple[str, ...], before: tuple[tuple[str, str], ...]) -> None:
        self.socket, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, __file__, str(theirs.fileno()), *packages]
            self.process = subprocess.Popen(
                command,
                env={**os.environ, **dict(before)},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        atexit.register(self.end)

    def end(self) -> None:
        self.socket.close()
        self.process.wait(10)

    def _send(self, request: dict[str, Any], files: list[int]) -> None:
        text = json.dumps(request).encode()
        self.socket.settimeout(None)
        socket.send_fds(self.socket, [_bytes(len(text))], files)
        self.socket.sendall(text)

    def start(self, command: list[str], env: dict[str, str], cwd: str, output: IO[str]) -> Started:
        ours, theirs = socket.socketpair()
        with theirs:
            self._send(
                {"command": command, "env": env, "cwd": cwd, "waited": False},
                [output.fileno(), output.fileno(), theirs.fileno()],
            )
        return Started(_number(_exactly(ours, 8)), ours)

    def fork(
        self, command: list[str], env: dict[str, str], cwd: str, out: IO[bytes], errors: IO[bytes], timeout: float
    ) -> int:
        self._send({"command": command, "env": env, "cwd": cwd, "waited": True}, [out.fileno(), errors.fileno()])
        child = _number(_exactly(self.socket, 8))
        self.socket.settimeout(timeout)
        try:
            return _number(_exactly(self.socket, 8))
        except TimeoutError:
            os.kill(child, signal.SIGKILL)
            self.socket.settimeout(None)
            _exactly(self.socket, 8)
            raise subprocess.TimeoutExpired(command, timeout) from None


@functools.cache
def _parent(packages: tuple[str, ...], before: tuple[tuple[str, str], ...] = ()) -> _Parent:
    return _Parent(packages, before)


def _bytes(number: int) -> bytes:
    return number.to_bytes(8, "little", signed=True)


def _number(data: bytes) -> int:
    return int.from_bytes(data, "little", signed=True)


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = connection.recv(count - len(data))
        if not part:
            raise EOFError("the process that others are forked from has ended")
        data += part
    return data


# In the process that the others are forked from


def _next_child(connection: socket.socket) -> dict[str, Any]:
    """Forks a process for each request. Returns in each child, with what it is to run."""
    while True:
        head, files, *_ = socket.recv_fds(connection, 8, 3)
        if not head:
            os._exit(0)
        head += _exactly(connection, 8 - len(head)) if len(head) < 8 else b""
        request: dict[str, Any] = json.loads(_exactly(connection, _number(head)))
        sys.stdout.flush()
        if request["waited"]:
            if (child := os.fork()) == 0:
                connection.close()
                return _with_output(request, files)
            _report(child, connection)
        elif (between := os.fork()) == 0:
            # A process of its own waits for the new one's end, and nobody waits for that process.
            connection.close()
            if os.fork():
                os._exit(0)
            os.setsid()
            end = socket.socket(fileno=files.pop())
            if (child := os.fork()) == 0:
                end.close()
                os.setsid()
                return _with_output(request, files)
            _report(child, end)
            os._exit(0)
        else:
            os.waitpid(between, 0)
        for file in files:
            os.close(file)


def _with_output(request: dict[str, Any], files: list[int]) -> dict[str, Any]:
    for number, file in enumerate(files, 1):
        os.dup2(file, number)
        os.close(file)
    return request


def _report(child: int, connection: socket.socket) -> None:
    """Sends a child's number, and after its end its status."""
    connection.sendall(_bytes(child))
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    connection.sendall(_bytes(status))


def _folders(environment: Mapping[str, str]) -> list[str]:
    return [folder for folder in environment.get("PYTHONPATH", "").split(os.pathsep) if folder]


def _run(request: dict[str, Any]) -> None:
    """Runs a command as `python` does."""
    # The first folder is this file's, which Python puts there for a script. Those of PYTHONPATH are behind it.
    others = [folder for folder in sys.path[1:] if folder not in _folders(os.environ)]
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    kind, *rest = request["command"]
    first = str(Path(kind).parent) if kind not in ("-c", "-m") else request["cwd"]
    sys.path[:] = [first, *_folders(os.environ), *others]
    sys.path_importer_cache.clear()
    if kind == "-c":
        main = types.ModuleType("__main__")
        sys.modules["__main__"] = main
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    elif kind == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = request["command"]
        runpy.run_path(kind, run_name="__main__")


def _leave_at_the_end(modules: dict[str, types.ModuleType]) -> None:
    """Removes modules from `sys.modules`, whose modules Python empties when it ends. They are never freed."""
    for name, module in modules.items():
        if sys.modules.get(name) is module:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(module))
            del sys.modules[name]


def _leave_libraries_at_the_end() -> None:
    """Ends the process behind the static objects of libraries that are loaded from here on, before those of others."""
    libc = ctypes.CDLL(None)
    # The C library runs these from the last to the first. `_exit` gets the status, and `fflush` a null pointer, which
    # means every file.
    libc.on_exit(libc._exit, None)
    libc.__cxa_atexit(libc.fflush, None, None)


def _main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    modules: dict[str, types.ModuleType] = {}
    # Python calls the first of such functions last.
    atexit.register(_leave_at_the_end, modules)
    ours = set(sys.modules)
    for package in sys.argv[2:]:
        try:
            importlib.import_module(package)
        except ImportError:
            continue
    modules.update((name, sys.modules[name]) for name in sys.modules.keys() - ours)
    # No collection visits what is there now: a visit writes to its page, which a child would then have to copy.
    gc.collect()
    gc.freeze()
    request = _next_child(connection)
    _leave_libraries_at_the_end()
    _run(request)


if __name__ == "__main__":
    _main()
