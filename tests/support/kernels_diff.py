"""Compares the machine code of every kernel between two builds, without a GPU.

    python tests/support/kernels_diff.py BASE [NEW] [--kernels PATTERN] [--all]

BASE and NEW are folders of fatbins (or of cubins), or git revisions, whose kernels are built through the kernel cache.
NEW is the working tree by default. The exit code is 0 if all kernels are equal, 1 if one differs or is missing, 2 if
the comparison is not possible.

Two kernels are equal if they have the same bytes of code, constants and attributes, the same relocations and the same
resources. Line tables, paths and the order of symbols in a file do not count.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
TARGET = ROOT / "target" / "kernels-diff"

# Types and flags of ELF sections.
RELA, NOBITS, REL, ALLOCATED = 4, 8, 9, 2
# Sections of line tables, and of a second form of the same code that depends on the other kernels of its file.
NOT_COMPARED = (".debug", ".nv_debug", ".rel.debug", ".rela.debug", ".nv.merc.", ".nv.capmerc.")
# Attributes of .nv.info: (format, attribute) of one word that names a symbol, or of several.
SIZED, PARAMETER_BANK, EXTERNS = 4, 0x0A, 0x0F
FRAME_SIZE, REGISTERS = 0x11, 0x2F
# The lowest 12 bits of an instruction's 16 bytes.
LOAD_LOCAL, STORE_LOCAL = 0x983, 0x387


class CannotCompare(Exception):
    """Says why there is no answer."""


@dataclass
class Kernel:
    """The parts of a kernel that a GPU gets. `parts`: bytes by the kind of section."""

    parts: dict[str, bytes] = field(default_factory=dict)
    registers: int = 0
    stack: int = 0
    shared: int = 0

    def local(self, opcode: int) -> int:
        code = self.parts.get(".text", b"")
        return sum(struct.unpack_from("<H", code, at)[0] & 0xFFF == opcode for at in range(0, len(code) - 15, 16))

    def resources(self) -> dict[str, int]:
        """Returns the resources. Spills are among the loads and stores of local memory."""
        return {
            "registers": self.registers,
            "stack": self.stack,
            "shared": self.shared,
            "local loads": self.local(LOAD_LOCAL),
            "local stores": self.local(STORE_LOCAL),
        }


@dataclass
class Section:
    name: str
    kind: int
    flags: int
    size: int
    link: int
    info: int
    data: bytes


class Cubin:
    """An ELF file of one architecture."""

    def __init__(self, data: bytes, name: str) -> None:
        if data[:6] != b"\x7fELF\x02\x01":
            raise CannotCompare(f"{name} is no 64-bit ELF file")
        (table,) = struct.unpack_from("<Q", data, 40)
        size, count, names = struct.unpack_from("<HHH", data, 58)
        rows = [struct.unpack_from("<IIQQQQII", data, table + i * size) for i in range(count)]

        def text(strings: tuple[int, ...], at: int) -> str:
            begin = strings[4] + at
            return data[begin : data.index(b"\0", begin)].decode()

        self.sections = [
            Section(
                text(rows[names], name),
                kind,
                flags,
                length,
                link,
                info,
                b"" if kind == NOBITS else data[at : at + length],
            )
            for name, kind, flags, _, at, length, link, info in rows
        ]
        self.symbols: list[str] = []
        for section, row in zip(self.sections, rows, strict=True):
            if section.name == ".symtab":
                for name, _, _, index, _, _ in struct.iter_unpack("<IBBHQQ", section.data):
                    # The symbol of a section has no name of its own.
                    own = text(rows[row[6]], name)
                    self.symbols.append(own or (self.sections[index].name if index < count else ""))

    def kernels(self) -> dict[str, Kernel]:
        """Returns kernels by symbol. Allocated sections that belong to no kernel stand under their own name."""
        found = {s.name.removeprefix(".text."): Kernel() for s in self.sections if s.name.startswith(".text.")}
        for section in self.sections:
            if section.name.startswith(NOT_COMPARED):
                continue
            kind, _, symbol = section.name.rpartition(".")
            if section.name == ".nv.info":
                self._read_resources(section.data, found)
            elif symbol in found:
                self._add(found[symbol], kind, section)
            elif section.flags & ALLOCATED and section.size and not section.name.startswith(".nv.shared.reserved"):
                found.setdefault(section.name, Kernel()).parts[section.name] = section.data or bytes(section.size)
        return found

    def _add(self, kernel: Kernel, kind: str, section: Section) -> None:
        if kind == ".text":
            kernel.parts[kind] = section.data
            # Newer architectures have the number of registers in .nv.info alone.
            kernel.registers = kernel.registers or section.info >> 24
        elif kind == ".nv.shared":
            kernel.shared = section.size
            kernel.parts[kind] = str(section.size).encode()
        elif kind == ".nv.info":
            kernel.parts[kind] = b"".join(self._attributes(section.data))
        elif section.kind in (REL, RELA):
            if section.data:
                kernel.parts[kind] = b"\n".join(sorted(self._relocations(section)))
        else:
            kernel.parts[kind] = section.data

    def _relocations(self, section: Section) -> Iterator[bytes]:
        layout = "<QQq" if section.kind == RELA else "<QQ"
        for offset, info, *addend in struct.iter_unpack(layout, section.data):
            yield f"{offset:#x} {info & 0xFFFFFFFF} {self.symbols[info >> 32]} {addend}".encode()

    def _attributes(self, data: bytes) -> Iterator[bytes]:
        """Yields attributes with names in the place of symbols' numbers."""
        for layout, attribute, value, payload in attributes(data):
            if attribute in (PARAMETER_BANK, EXTERNS) and layout == SIZED:
                numbers = 1 if attribute == PARAMETER_BANK else len(payload) // 4
                names = [self.symbols[number] for (number,) in struct.iter_unpack("<I", payload[: 4 * numbers])]
                payload = " ".join(names).encode() + payload[4 * numbers :]
            yield struct.pack("<BBHI", layout, attribute, value, len(payload)) + payload

    def _read_resources(self, data: bytes, kernels: dict[str, Kernel]) -> None:
        """Reads attributes that belong to one symbol each: its number and a value."""
        for layout, attribute, _, payload in attributes(data):
            if layout != SIZED or len(payload) != 8:
                continue
            number, value = struct.unpack("<II", payload)
            kernel = kernels.get(self.symbols[number])
            if kernel is None:
                continue
            kernel.parts[f"attribute {attribute:#x}"] = struct.pack("<I", value)
            if attribute == FRAME_SIZE:
                kernel.stack = value
            if attribute == REGISTERS:
                kernel.registers = value


def attributes(data: bytes) -> Iterator[tuple[int, int, int, bytes]]:
    """Yields (format, attribute, value, payload) of a section .nv.info."""
    at = 0
    while at < len(data):
        layout, attribute, value = struct.unpack_from("<BBH", data, at)
        at += 4
        length = value if layout == SIZED else 0
        yield layout, attribute, 0 if length else value, data[at : at + length]
        at += length


def cuobjdump() -> str:
    """Returns cuobjdump's path: on PATH, in a CUDA toolkit, or in one of Python's packages."""
    folders = [Path(home) / "bin" for name in ("CUDA_HOME", "CUDA_PATH") if (home := os.environ.get(name))]
    for entry in sys.path:
        folders += sorted(Path(entry or ".").glob("nvidia/cu1*/bin"), reverse=True)
        folders.append(Path(entry or ".") / "triton" / "backends" / "nvidia" / "bin")
    path = os.pathsep.join([os.environ.get("PATH", ""), *map(str, folders)])
    found = shutil.which("cuobjdump", path=path)
    if found is None:
        raise CannotCompare(
            "cuobjdump, which takes fatbins apart, is not installed: it is on neither PATH nor in CUDA_HOME. "
            "A CUDA toolkit has it, and `pip install nvidia-cuda-cuobjdump`."
        )
    return found


def cubins(file: Path) -> Iterator[tuple[str, bytes]]:
    """Yields (architecture, ELF file) of a fatbin or a cubin; a cubin's name says its architecture, as cuobjdump names
    it."""
    with tempfile.TemporaryDirectory() as folder:
        files = [file]
        if file.suffix != ".cubin":
            done = subprocess.run(
                [cuobjdump(), "-xelf", "all", file.resolve()], cwd=folder, capture_output=True, text=True
            )
            files = sorted(Path(folder).glob("*.cubin"))
            if done.returncode or not files:
                raise CannotCompare(f"cuobjdump finds no machine code in {file}: {done.stderr.strip()}")
        for path in files:
            arch = re.search(r"sm_\d+", path.name)
            if arch is None:
                raise CannotCompare(f"{path.name} names no architecture")
            yield arch[0], path.read_bytes()


def read(files: Sequence[Path]) -> dict[tuple[str, str], Kernel]:
    """Returns all kernels, by architecture and symbol."""
    kernels: dict[tuple[str, str], Kernel] = {}
    places: dict[tuple[str, str], Path] = {}
    for file in files:
        for arch, data in cubins(file):
            for symbol, kernel in Cubin(data, file.name).kernels().items():
                # A section without a kernel belongs to this file.
                key = arch, f"{file.stem}:{symbol}" if symbol.startswith(".") else symbol
                if key in kernels:
                    raise CannotCompare(f"{symbol} ({arch}) is both in {places[key].name} and in {file.name}")
                kernels[key], places[key] = kernel, file
    return kernels


def build(source: Path) -> list[Path]:
    """Returns the fatbins of a source tree, from the kernel cache or by nvcc."""
    # NOTE: the build hashes headers in the order of their paths: sources go before the target folder, as in a checkout.
    defaults = {"OXMOE_KERNEL_CACHE": str(ROOT / "target" / "kernels"), "PYO3_PYTHON": sys.executable}
    # NOTE: in one target folder cargo takes another tree's build script and outputs for this tree's, if no source is
    # newer. The working tree has a folder of its own; revisions share one, and each is made newer.
    target = "tree" if source == ROOT else "target"
    if source != ROOT:
        (source / "build.rs").touch()
    env = {**defaults, **os.environ, "CARGO_TARGET_DIR": str(TARGET / target)}
    command = ["cargo", "check", "--lib", "--features", "pyo3/abi3-py310", "--message-format=json"]
    done = subprocess.run(command, cwd=source, env=env, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise CannotCompare(f"the kernels in {source} cannot be built")
    for line in done.stdout.splitlines():
        message = json.loads(line)
        if message["reason"] == "build-script-executed" and (Path(message["out_dir"]) / "images.rs").exists():
            images = (Path(message["out_dir"]) / "images.rs").read_text()
            return [Path(name) for name in re.findall(r'include_bytes!\("(.+?)"\)', images)]
    raise CannotCompare(f"the build of {source} names no kernels")


def files_of(side: str | None) -> list[Path]:
    """Returns the fatbins of a folder, a git revision or (None) the working tree."""
    if side is None:
        return build(ROOT)
    if Path(side).is_dir():
        files = sorted(path for kind in ("*.fatbin", "*.cubin") for path in Path(side).glob(kind))
        if not files:
            raise CannotCompare(f"the folder {side} has no fatbins")
        return files
    named = subprocess.run(
        ["git", "rev-parse", "--verify", "--quiet", f"{side}^{{commit}}"], cwd=ROOT, capture_output=True, text=True
    )
    if named.returncode:
        raise CannotCompare(f"{side} is neither a folder nor a git revision")
    commit = named.stdout.strip()
    source = TARGET / f"source-{commit[:12]}"
    if not source.exists():
        partial = TARGET / f"source-{commit[:12]}.{os.getpid()}.partial"
        partial.mkdir(parents=True)
        archive = subprocess.run(["git", "archive", commit], cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout
        subprocess.run(["tar", "-x"], input=archive, cwd=partial, check=True)
        partial.rename(source)
    return build(source)


def differences(base: Kernel, new: Kernel) -> str:
    """Returns what differs, with the resources of both; an empty text if nothing differs."""
    kinds = [kind for kind in sorted({*base.parts, *new.parts}) if base.parts.get(kind) != new.parts.get(kind)]
    if not kinds and base.registers == new.registers:
        return ""
    before, after = base.resources(), new.resources()
    numbers = [
        f"{name} {before[name]}" + (f" -> {after[name]}" if after[name] != before[name] else "") for name in before
    ]
    code = [kernel.parts.get(".text", b"") for kernel in (base, new)]
    changed = sum(code[0][at : at + 16] != code[1][at : at + 16] for at in range(0, max(map(len, code)), 16))
    lengths = " and ".join(str(len(text) // 16) for text in code)
    return f"{', '.join(kinds)}; {changed} instructions of {lengths}; {', '.join(numbers)}"


def compare(
    base: dict[tuple[str, str], Kernel], new: dict[tuple[str, str], Kernel], everything: bool
) -> tuple[list[str], bool]:
    """Returns the report's lines, and whether all kernels are equal."""
    lines, counts = [], {}
    for key in sorted({*base, *new}):
        arch, symbol = key
        count = counts.setdefault(arch, dict.fromkeys(("equal", "different", "only in base", "only in new"), 0))
        detail = ""
        if key not in new or key not in base:
            kind = "only in base" if key in base else "only in new"
        else:
            detail = differences(base[key], new[key])
            kind = "different" if detail else "equal"
        count[kind] += 1
        if kind != "equal" or everything:
            lines.append(f"{arch} {symbol}: {kind}" + (f" ({detail})" if detail else ""))
    for arch, count in counts.items():
        lines.append(f"{arch}: " + ", ".join(f"{number} {kind}" for kind, number in count.items()))
    return lines, all(count["equal"] == sum(count.values()) for count in counts.values())


def main(arguments: Sequence[str] | None = None) -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", help="folder or git revision")
    parser.add_argument("new", nargs="?", help="folder or git revision; the working tree by default")
    parser.add_argument("--kernels", default="*", metavar="PATTERN", help="only symbols like quantize_*")
    parser.add_argument("--all", action="store_true", help="equal kernels are listed, too")
    options = parser.parse_args(arguments)
    try:
        sides = [
            {key: kernel for key, kernel in read(files_of(side)).items() if fnmatch.fnmatch(key[1], options.kernels)}
            for side in (options.base, options.new)
        ]
        if not any(sides):
            raise CannotCompare(f"no kernel is named {options.kernels}")
        lines, equal = compare(*sides, options.all)
    except CannotCompare as error:
        print(f"kernels_diff: {error}", file=sys.stderr)
        return 2
    print("\n".join(lines))
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
