"""`forked.run` starts and ends a process as Python does, whatever was imported before the fork."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import forked

PROGRAMS = {
    "a status": "raise SystemExit(3)",
    "words": "raise SystemExit('words')",
    "an exception": "import sys; sys.tracebacklimit = 0; 1 / 0",
    "a signal": "import os; os.abort()",
    "functions of atexit": "import atexit; atexit.register(print, 'at exit')",
    "a thread": "import threading; threading.Timer(0.1, print, ['waited for']).start()",
    "an object of a module": "class A:\n    def __del__(self): print('gone')\na = A()",
    "a cycle": "class A:\n    def __del__(self): print('gone')\na = A(); a.self = a",
    "files of C": "import ctypes; ctypes.CDLL(None).printf(b'not flushed')",
    "arguments": "import sys; print(sys.argv, __name__)",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_status_and_output_are_those_of_python(name: str) -> None:
    python = subprocess.run([sys.executable, "-c", PROGRAMS[name], "x"], capture_output=True, text=True, timeout=60)
    done = forked.run("-c", PROGRAMS[name], "x", timeout=60)
    assert (done.returncode, done.stdout) == (python.returncode, python.stdout)
    assert done.stderr.splitlines()[-1:] == python.stderr.splitlines()[-1:]


def test_a_library_that_is_loaded_after_the_fork_ends_its_objects(tmp_path: Path) -> None:
    """C++ has the C library call the destructors of static objects as this library's function is called."""
    source, library = tmp_path / "end.c", tmp_path / "end.so"
    lines = [
        'static void end(void) { puts("end"); }',
        "__attribute__((constructor)) static void start(void) { atexit(end); }",
    ]
    source.write_text("\n".join(["#include <stdio.h>", "#include <stdlib.h>", *lines, ""]))
    subprocess.run([os.environ.get("CC", "cc"), "-shared", "-fPIC", "-o", library, source], check=True)
    done = forked.run("-c", f"import ctypes; ctypes.CDLL({str(library)!r})", timeout=60)
    assert (done.returncode, done.stdout) == (0, "end\n"), done.stderr


def test_packages_are_there_before_the_fork() -> None:
    done = forked.run("-c", "import sys; print('torch' in sys.modules, 'oxmoe' in sys.modules)")
    assert done.stdout == "True False\n", done.stderr


def started(folder: Path, program: str, *arguments: str) -> tuple[forked.Started, Path]:
    (folder / "program.py").write_text(program)
    path = folder / "output"
    with path.open("w") as output:
        process = forked.start(
            folder / "program.py",
            *arguments,
            env={**os.environ, "GIVEN": "variable"},
            output=output,
            cwd=folder,
            packages=("numpy",),
            before={"BEFORE": "import"},
        )
    return process, path


def test_processes_run_beside_each_other(tmp_path: Path) -> None:
    """Each runs in a session of its own, and its status is there once it has ended."""
    program = (
        "import os, signal, sys, time\n"
        "print(sys.argv[1:], os.environ['GIVEN'], os.environ.get('BEFORE'), os.getcwd(), 'numpy' in sys.modules)\n"
        "print(os.getsid(0) == os.getpid(), sys.stdin.read(), file=sys.stderr, flush=True)\n"
        "time.sleep(60 if sys.argv[1] == 'long' else 0)\n"
        "raise SystemExit(7)\n"
    )
    folders = [tmp_path / name for name in ("long", "short")]
    for folder in folders:
        folder.mkdir()
    (long, _), (short, output) = (started(folder, program, folder.name) for folder in folders)
    assert short.wait(60) == 7 == short.poll() == short.returncode
    # A line of errors is there when it is written, and one of the output when the process ends.
    assert sorted(output.read_text().splitlines()) == sorted(
        [f"['short'] variable None {folders[1]} True", "True "],
    )
    short.send_signal(signal.SIGTERM)  # nobody gets it
    assert long.poll() is None and long.returncode is None
    with pytest.raises(subprocess.TimeoutExpired):
        long.wait(0.01)
    assert os.getsid(long.pid) == long.pid != os.getsid(0)
    long.send_signal(signal.SIGTERM)
    assert long.wait(60) == -signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(long.pid, 0)
