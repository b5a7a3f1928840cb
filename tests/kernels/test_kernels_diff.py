"""kernels_diff.py on small ELF files made here, and on stand-ins for cuobjdump and cargo."""

from __future__ import annotations

import json
import os
import struct
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

import kernels_diff

CODE = b"".join(struct.pack("<QQ", 0x7918 + 0x10000 * i, i) for i in range(8))
SPILL = struct.pack("<QQ", 0xFF00387, 0)
NOTES = 0x70000000
PROGBITS, SYMTAB, STRTAB, RELA, NOBITS = 1, 2, 3, 4, 8


@dataclass(frozen=True)
class Made:
    """A kernel of a cubin."""

    name: str
    code: bytes = CODE
    constants: bytes = b"constants"
    registers: int = 32
    shared: int = 1024
    stack: int = 0
    calls: str = "vprintf"


def cubin(kernels: Sequence[Made], lines: bytes = b"lines") -> bytes:
    """Returns an ELF file with these kernels in this order, as nvcc lays one out."""
    names = [""] + [name for made in kernels for name in (made.name, made.calls)]
    number = {name: i for i, name in enumerate(names)}
    strings = bytearray(b"\0")

    def text(name: str) -> int:
        strings.extend(name.encode() + b"\0")
        return len(strings) - len(name) - 1

    info = b"".join(
        struct.pack("<BBHII", 4, attribute, 8, number[made.name], value)
        for made in kernels
        for attribute, value in ((0x2F, made.registers), (0x11, made.stack))
    )
    # (name, type, flags, info, link, bytes, size) of each section.
    sections: list[tuple[str, int, int, int, int, bytes, int]] = [
        (".debug_line", PROGBITS, 0, 0, 0, lines, len(lines)),
        (".nv.info", NOTES, 0, 0, 3, info, len(info)),
    ]
    for made in kernels:
        bank = struct.pack("<BBHIHH", 4, 0x0A, 8, number[made.name], 0x210, 8) + struct.pack("<BBH", 3, 0x1B, 255)
        call = struct.pack("<QQq", 64, number[made.calls] << 32 | 1, 0)
        sections += [
            (f".nv.info.{made.name}", NOTES, 0, 0, 3, bank, len(bank)),
            (f".rela.text.{made.name}", RELA, 0, 0, 3, call, len(call)),
            (f".text.{made.name}", PROGBITS, 6, made.registers << 24 | number[made.name], 3, made.code, len(made.code)),
            (f".nv.constant0.{made.name}", PROGBITS, 2, 0, 0, made.constants, len(made.constants)),
            (f".nv.shared.{made.name}", NOBITS, 3, 0, 0, b"", made.shared),
        ]
    symbols = b"".join(struct.pack("<IBBHQQ", text(name), 0x12, 0, 0, 0, 0) for name in names)
    sections = [
        ("", 0, 0, 0, 0, b"", 0),
        (".strtab", STRTAB, 0, 0, 0, b"", 0),
        (".symtab", SYMTAB, 0, 0, 1, symbols, len(symbols)),
        *sections,
    ]
    offsets = [text(name) for name, *_ in sections]
    sections[1] = (".strtab", STRTAB, 0, 0, 0, bytes(strings), len(strings))
    body, rows = bytearray(64), b""
    for offset, (_, kind, flags, extra, link, data, size) in zip(offsets, sections, strict=True):
        rows += struct.pack("<IIQQQQIIQQ", offset, kind, flags, 0, len(body), size, link, extra, 0, 0)
        body += data
    head = b"\x7fELF\x02\x01\x01".ljust(16, b"\0") + struct.pack(
        "<HHIQQQIHHHHHH", 2, 190, 1, 0, 0, len(body), 0, 64, 0, 0, 64, len(sections), 1
    )
    return head + bytes(body[64:]) + rows


ROUND, SORT = Made("round_rows"), Made("sort", code=CODE[::-1], registers=64)


def folder(path: Path, *files: bytes, suffix: str = "sm_90.cubin") -> str:
    path.mkdir()
    for i, data in enumerate(files):
        (path / f"unit{i}.{suffix}").write_bytes(data)
    return str(path)


def compared(
    capsys: pytest.CaptureFixture[str], base: str | Path, new: str | Path, *more: str
) -> tuple[int, list[str], str]:
    code = kernels_diff.main([str(base), str(new), *more])
    said = capsys.readouterr()
    return code, said.out.splitlines(), said.err


def test_equal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Line numbers, files and the order of symbols do not count."""
    base = folder(tmp_path / "base", cubin([ROUND, SORT]))
    new = folder(tmp_path / "new", cubin([SORT], lines=b"other lines"), cubin([Made("unasked"), ROUND]))
    code, lines, _ = compared(capsys, base, new, "--kernels", "[rs]*")
    assert (code, lines) == (0, ["sm_90: 2 equal, 0 different, 0 only in base, 0 only in new"])
    code, lines, _ = compared(capsys, base, new, "--kernels", "[rs]*", "--all")
    assert code == 0 and lines[:2] == ["sm_90 round_rows: equal", "sm_90 sort: equal"]


def test_one_instruction(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = bytearray(CODE)
    code[48:64] = SPILL
    changed = replace(ROUND, code=bytes(code), registers=40, stack=8)
    base = folder(tmp_path / "base", cubin([ROUND, SORT]))
    new = folder(tmp_path / "new", cubin([changed, SORT]))
    status, lines, _ = compared(capsys, base, new)
    assert status == 1
    assert lines[0].startswith("sm_90 round_rows: different (.text, attribute 0x11, attribute 0x2f; ")
    assert "1 instructions of 8 and 8; registers 32 -> 40, stack 0 -> 8, shared 1024" in lines[0]
    assert "local loads 0, local stores 0 -> 1" in lines[0]
    assert lines[1:] == ["sm_90: 1 equal, 1 different, 0 only in base, 0 only in new"]


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"code": CODE + CODE[:16]}, ".text"),
        ({"constants": b"Constants"}, ".nv.constant0"),
        ({"shared": 1025}, ".nv.shared"),
        ({"calls": "other"}, ".rela.text"),
        ({"registers": 33}, "attribute 0x2f"),
    ],
)
def test_what_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, object], kind: str) -> None:
    base = folder(tmp_path / "base", cubin([ROUND, SORT]))
    new = folder(tmp_path / "new", cubin([replace(ROUND, **change), SORT]))  # type: ignore[arg-type]
    status, lines, _ = compared(capsys, base, new)
    assert status == 1 and lines[0].startswith(f"sm_90 round_rows: different ({kind};")


@pytest.mark.parametrize("turned", [False, True])
def test_missing_symbol(tmp_path: Path, capsys: pytest.CaptureFixture[str], turned: bool) -> None:
    both, one = folder(tmp_path / "both", cubin([ROUND, SORT])), folder(tmp_path / "one", cubin([SORT]))
    status, lines, _ = compared(capsys, *((one, both) if turned else (both, one)))
    assert status == 1
    assert lines[0] == f"sm_90 round_rows: only in {'new' if turned else 'base'}"


def test_missing_architecture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = folder(tmp_path / "base", cubin([SORT]))
    new = folder(tmp_path / "new", cubin([SORT]))
    (tmp_path / "base" / "unit0.sm_80.cubin").write_bytes(cubin([SORT]))
    status, lines, _ = compared(capsys, base, new)
    assert status == 1 and "sm_80 sort: only in base" in lines


def stand_in(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_fatbins(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A fatbin goes through cuobjdump, whose versions name one architecture sm_90 or sm_90a."""
    stand_in(tmp_path / "bin" / "cuobjdump", 'test "$1 $2" = "-xelf all" && cp "$3" unit.sm_90a.cubin')
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    base = folder(tmp_path / "base", cubin([ROUND]), suffix="fatbin")
    new = folder(tmp_path / "new", cubin([ROUND]))
    assert compared(capsys, base, new)[0] == 0


def test_no_cuobjdump(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sys.path", [])
    base = folder(tmp_path / "base", cubin([ROUND]), suffix="fatbin")
    status, lines, error = compared(capsys, base, base)
    assert (status, lines) == (2, []) and "cuobjdump, which takes fatbins apart, is not installed" in error


def test_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    base = folder(tmp_path / "base", cubin([ROUND]))
    twice = folder(tmp_path / "twice", cubin([ROUND]), cubin([ROUND]))
    broken = folder(tmp_path / "broken", b"no machine code")
    stand_in(tmp_path / "bin" / "cuobjdump", "echo nothing there >&2; exit 1")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    fatbin = folder(tmp_path / "fatbin", b"", suffix="fatbin")
    for other, words in (
        (twice, "round_rows (sm_90) is both in unit0.sm_90.cubin and in unit1.sm_90.cubin"),
        (broken, "is no 64-bit ELF file"),
        (folder(tmp_path / "empty"), "has no fatbins"),
        (fatbin, "nothing there"),
        (str(tmp_path / "nowhere"), "is neither a folder nor a git revision"),
    ):
        status, lines, error = compared(capsys, base, other)
        assert (status, lines) == (2, []) and words in error
    assert "no kernel is named x*" in compared(capsys, base, base, "--kernels", "x*")[2]


def test_revisions(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides are built, each from its own sources, and only the files that a build names are read."""
    root = tmp_path / "root"
    root.mkdir()
    monkeypatch.setattr(kernels_diff, "ROOT", root)
    monkeypatch.setattr(kernels_diff, "TARGET", root / "target" / "kernels-diff")

    def git(*arguments: str) -> None:
        person = ["-c", "user.name=nobody", "-c", "user.email=nobody@localhost"]
        subprocess.run(["git", *person, *arguments], cwd=root, check=True, capture_output=True)

    # The sources are the cubin itself. A build leaves it beside an older one of another name.
    message = json.dumps({"reason": "build-script-executed", "out_dir": "OUT"})
    stand_in(
        tmp_path / "bin" / "cargo",
        f"""out=$CARGO_TARGET_DIR; mkdir -p $out
# This does what cargo does: a build stays until a source is newer.
if [ -e $out/images.rs ] && [ ! build.rs -nt $out/images.rs ] && [ ! source -nt $out/images.rs ]; then
  echo '{message}' | sed "s|OUT|$out|"; exit
fi
cp source $out/unit.sm_90.cubin; cp source $out/older.sm_90.cubin
echo "static IMAGE_0: &Image<[u8]> = &Image(*include_bytes!(\\"$out/unit.sm_90.cubin\\"));" > $out/images.rs
echo '{message}' | sed "s|OUT|$out|" """,
    )
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    git("init")
    (root / "source").write_bytes(cubin([ROUND]))
    (root / "build.rs").touch()
    git("add", "source", "build.rs")
    git("commit", "-m", "first")
    assert kernels_diff.main(["HEAD"]) == 0
    (root / "source").write_bytes(cubin([replace(ROUND, code=CODE[16:])]))
    assert kernels_diff.main(["HEAD"]) == 1
    git("commit", "-a", "-m", "second")
    assert kernels_diff.main(["HEAD"]) == 0
    capsys.readouterr()
    status, lines, _ = compared(capsys, "HEAD~1", "HEAD")
    assert status == 1 and "round_rows: different" in lines[0]
    stand_in(tmp_path / "bin" / "cargo", "exit 1")
    assert "cannot be built" in compared(capsys, "HEAD~1", "HEAD")[2]
