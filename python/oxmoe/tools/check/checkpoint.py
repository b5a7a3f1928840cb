"""Reads a model's files: config.json, hf_quant_config.json and the headers of its safetensors."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import stat
import struct
import sys
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oxmoe.wording import first_line

MOST = 1 << 24  # the largest size in a config
MOST_SECONDS = 60  # for reading and judging a model
_MOST_BYTES = 64 << 20  # most bytes of a JSON text
_MOST_LETTERS = 2000  # most letters of a printed line
# A weight of a routed expert: one of many, or all of a layer in one tensor.
_EXPERT = re.compile(
    r"\.(?P<layer>\d{1,9})\.(?:[\w.]*\.)?experts\.(?:\d+\.)?"
    r"(?:gate_proj|up_proj|down_proj|gate_up_proj|w1|w2|w3)(?P<suffix>[._](?:weight|weight_packed|blocks|qweight))?$"
)


class Unreadable(Exception):
    """Input that cannot be used. It ends the command with one line on standard error and exit status 2."""


class Refused(Exception):
    """Something that SGLang with oxmoe does not serve, or that this command does not know. It means exit status 1."""


class Fields:
    """The values of a JSON object, read by type. A value that is missing or has another type is Unreadable."""

    def __init__(self, values: dict[str, Any], where: str) -> None:
        self.values, self.where = values, where

    def get(self, *names: str) -> Any:
        """Returns the first of these fields that exists and is not null."""
        return next((self.values[name] for name in names if self.values.get(name) is not None), None)

    def whole(self, *names: str, default: int | None = None, least: int = 0) -> int:
        value = self.get(*names)
        if value is None and default is not None:
            return default
        if value is None:
            raise Unreadable(f"{self.where}: {' or '.join(names)} is missing")
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MOST:
            wanted = f"a whole number from {least} to {MOST}"
            raise Unreadable(f"{self.where}: {names[0]}: expected {wanted}, got {shown(value)}")
        return value

    def number(self, name: str, default: float | None = None) -> float | None:
        value = self.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e30:
            raise Unreadable(f"{self.where}: {name}: expected a number, got {shown(value)}")
        return float(value)

    def text(self, *names: str, default: str | None = None) -> str | None:
        value = self.get(*names)
        if value is not None and not isinstance(value, str):
            raise Unreadable(f"{self.where}: {names[0]}: expected text, got {shown(value)}")
        return default if value is None else value

    def listed(self, name: str, kind: Any) -> list[Any] | None:
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or any(isinstance(item, bool) or not isinstance(item, kind) for item in value):
            wanted = getattr(kind, "__name__", "number")
            raise Unreadable(f"{self.where}: {name}: expected a list of {wanted}, got {shown(value)}")
        return value

    def within(self, *names: str) -> Fields | None:
        """Returns an object inside this one, or None if there is none."""
        for name in names:
            value = self.values.get(name)
            if value is not None and not isinstance(value, dict):
                raise Unreadable(f"{self.where}: {name}: expected an object, got {shown(value)}")
            if value is not None:
                return Fields(value, f"{self.where}: {name}")
        return None


def shown(value: Any) -> str:
    try:
        text = repr(value)
    except RecursionError:
        text = f"{type(value).__name__} of great depth"
    return text if len(text) <= 60 else f"{text[:57]}..."


@dataclass
class Checkpoint:
    """The checkpoint that is to be judged."""

    config: Fields
    quant_file: Fields | None = None  # hf_quant_config.json
    # Layer -> dtypes of its routed experts' weights, by the headers that exist.
    dtypes: dict[int, set[str]] = field(default_factory=dict)
    headers: int = 0


def printable(text: str) -> str:
    """Returns one line in which a file's words can neither steer a terminal, nor look like other lines, nor fill a
    screen."""
    if len(text) > _MOST_LETTERS:
        text = f"{text[: _MOST_LETTERS - 3]}..."
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode("ascii") for letter in text
    )


def say(text: str) -> None:
    """Prints to standard output. Letters that its encoding does not have are escaped, as on standard error."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding))


@contextlib.contextmanager
def patterns(shown_as: str) -> Iterator[None]:
    """Compiles and applies a checkpoint's regular expressions. Refused for one that Python's module `re` does not
    take."""
    try:
        with warnings.catch_warnings():
            # They would name a line of this program.
            warnings.simplefilter("ignore")
            yield
    except (re.error, RecursionError, OverflowError) as error:
        raise Refused(f"{shown_as}: no regular expression that can be used: {first_line(error)}") from error


@contextlib.contextmanager
def limited(path: str) -> Iterator[None]:
    """Raises Unreadable after MOST_SECONDS, because a file's names and regular expressions can take for ever.

    A signal ends the work, so there is no limit outside of the main thread.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def end(*_: Any) -> None:
        raise Unreadable(f"{path}: its names and patterns took more than {MOST_SECONDS} seconds")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, MOST_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def read(path: str) -> Checkpoint:
    """Reads a config.json, or a folder with one. Raises Unreadable, which says what is wrong with which file."""
    place = Path(path)
    if not place.exists() and re.fullmatch(r"[\w.-]+/[\w.-]+", path):
        raise Unreadable(
            f"{path}: No such file or directory; if it is a model's name on a hub: this command downloads nothing, "
            "download its config.json and name that"
        )
    if not place.is_dir():
        return Checkpoint(_json(place))
    if not (place / "config.json").exists():
        raise Unreadable(f"{place / 'config.json'}: No such file or directory; name a folder that has one, or the file")
    checkpoint = Checkpoint(_json(place / "config.json"))
    if (place / "hf_quant_config.json").exists():
        checkpoint.quant_file = _json(place / "hf_quant_config.json")
    for shard in sorted(place.glob("*.safetensors")):
        checkpoint.headers += 1
        for name, dtype in _header(shard).items():
            if match := _EXPERT.search(name):
                checkpoint.dtypes.setdefault(int(match["layer"]), set()).add(dtype)
    return checkpoint


def _require_file(path: Path) -> None:
    """Refuses a pipe, which would wait for a writer, and a device, which may have no end."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise Unreadable(f"{path}: expected a regular file")


def _json(path: Path) -> Fields:
    try:
        _require_file(path)
        if path.stat().st_size > _MOST_BYTES:
            raise Unreadable(f"{path}: more than {_MOST_BYTES >> 20} MiB are no model's configuration")
        return _object(path.read_bytes(), path)
    except OSError as error:
        raise Unreadable(f"{path}: {error.strerror or error}") from error


def _object(text: bytes, path: Path) -> Fields:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"{path}: no JSON: {first_line(error)}") from error
    if not isinstance(values, dict):
        raise Unreadable(f"{path}: expected a JSON object, got {shown(values)}")
    return Fields(values, str(path))


def _header(path: Path) -> dict[str, str]:
    """Returns tensor -> dtype. It reads only the header."""
    try:
        _require_file(path)
        with open(path, "rb") as file:
            start = file.read(8)
            size = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            if not 0 < size <= min(_MOST_BYTES, os.fstat(file.fileno()).st_size - 8):
                raise Unreadable(f"{path}: no safetensors file: its header of {size} bytes is not there")
            header = _object(file.read(size), path)
    except OSError as error:
        raise Unreadable(f"{path}: {error.strerror or error}") from error
    header.values.pop("__metadata__", None)
    found = {}
    for name in header.values:
        tensor = header.within(name)
        dtype = tensor.text("dtype") if tensor is not None else None
        if dtype is None:
            raise Unreadable(f"{path}: no safetensors file: {shown(name)} has no dtype")
        found[name] = dtype
    return found
