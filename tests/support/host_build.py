"""C and C++ that tests compile for the host, each program once: libraries are kept by the content that made them.

The folder is `target/host-kernels`, or OXMOE_HOST_KERNELS. Test processes beside each other wait for one that compiles.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
KEPT = Path(os.environ.get("OXMOE_HOST_KERNELS") or ROOT / "target" / "host-kernels")


class DoesNotCompile(Exception):
    """The compiler's message."""


@functools.cache
def _version(compiler: str) -> bytes:
    return subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout


def _run(command: Sequence[str | Path]) -> bytes:
    done = subprocess.run(command, capture_output=True)
    if done.returncode:
        raise DoesNotCompile(done.stderr.decode(errors="replace"))
    return done.stdout


def compiled(compiler: str, flags: Sequence[str], source: Path) -> Path:
    """Returns the shared library of `source`. flags may name source's folder, where generated headers are.

    The key is what the preprocessor leaves of the program, with the compiler and its flags: any header that changes
    makes another library.
    """
    folder = str(source.parent)
    command = [compiler, *flags, "-shared", "-fPIC"]
    text = _run([*command, "-E", "-P", source]).replace(folder.encode(), b".")
    told = " ".join(command).replace(folder, ".").encode()
    key = hashlib.sha256(b"\0".join((_version(compiler), told, text))).hexdigest()[:32]
    KEPT.mkdir(parents=True, exist_ok=True)
    library = KEPT / f"{key}.so"
    with (KEPT / f"{key}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            partial = KEPT / f"{key}.{os.getpid()}.partial"
            try:
                _run([*command, "-o", partial, source])
                partial.replace(library)
            finally:
                partial.unlink(missing_ok=True)
    return library


def cxx() -> str | None:
    return shutil.which("c++") or shutil.which("g++")
