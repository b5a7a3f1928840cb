"""`forked.run` starts and ends a process as Python does, whatever was imported before the fork."""

from __future__ import annotations

import os
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
