"""The folder of compiled host programs: each program is compiled once, and again when any part of it changes."""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path

import pytest

import host_build


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    found = host_build.cxx()
    if found is None:
        pytest.skip("no C++ compiler")
    monkeypatch.setattr(host_build, "KEPT", tmp_path / "kept")
    return found


def program(folder: Path, number: int) -> Path:
    """Returns a source whose answer stands in a header beside it."""
    folder.mkdir()
    (folder / "number.h").write_text(f"#define NUMBER {number}\n")
    source = folder / "program.cpp"
    source.write_text('#include "number.h"\nextern "C" int answer() { return NUMBER; }\n')
    return source


def answer(library: Path) -> int:
    return ctypes.CDLL(str(library)).answer()


def test_equal_programs_are_compiled_once(compiler: str, tmp_path: Path) -> None:
    """Equal programs of other folders count, too. Another flag, header or source makes another program."""
    first, same, other = (program(tmp_path / name, number) for name, number in (("a", 3), ("b", 3), ("c", 4)))
    library = host_build.compiled(compiler, ["-O1", f"-I{first.parent}"], first)
    made = library.stat().st_mtime_ns
    assert host_build.compiled(compiler, ["-O1", f"-I{same.parent}"], same) == library
    assert library.stat().st_mtime_ns == made and answer(library) == 3
    changed = host_build.compiled(compiler, ["-O1", f"-I{other.parent}"], other)
    assert changed != library and answer(changed) == 4
    assert host_build.compiled(compiler, ["-O0", f"-I{first.parent}"], first) not in (library, changed)
    assert not list(host_build.KEPT.glob("*.partial"))


def test_processes_beside_each_other_wait(compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, runs, made = program(tmp_path / "a", 5), [], []
    run = host_build._run
    monkeypatch.setattr(host_build, "_run", lambda command: (runs.append(command), run(command))[1])
    threads = [
        threading.Thread(target=lambda: made.append(host_build.compiled(compiler, [], source))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(made)) == 1 and len(made) == 4
    assert sum("-E" not in command for command in runs) == 1


def test_what_does_not_compile_is_not_kept(compiler: str, tmp_path: Path) -> None:
    source = program(tmp_path / "a", 1)
    source.write_text('extern "C" int answer() { return missing; }\n')
    for _ in range(2):
        with pytest.raises(host_build.DoesNotCompile, match="missing"):
            host_build.compiled(compiler, [], source)
    assert not list(host_build.KEPT.glob("*.so")) and not list(host_build.KEPT.glob("*.partial"))
