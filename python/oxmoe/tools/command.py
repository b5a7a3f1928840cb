"""Code that the commands of `python -m oxmoe` share: the types of arguments, and errors of one line."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, TypeVar

# The most tokens in a call of any command: as many as `oxmoe.explain` takes.
MOST_TOKENS = 1 << 24

# Cards by their architecture, whose name users know less well. Names are compared without case, blanks and hyphens.
CARDS = {
    "sm_80": ("A100", "A30"),
    "sm_86": ("A10", "A40", "RTX 3090"),
    "sm_87": ("Orin",),
    "sm_89": ("L4", "L40S", "RTX 4090"),
    "sm_90": ("H100", "H200", "H20", "GH200"),
    "sm_100": ("B200", "GB200"),
    "sm_103": ("B300", "GB300"),
    "sm_110": ("Thor",),
    "sm_120": ("RTX 5090", "RTX PRO 6000"),
    "sm_121": ("GB10",),
}

T = TypeVar("T")


class UsageError(Exception):
    """Arguments that a command cannot take. They end it with one line on standard error and exit status 2."""


class Parser(argparse.ArgumentParser):
    """An argument parser that reports an error in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def whole(least: int, most: int) -> Callable[[str], int]:
    """Returns the type of an argument that is a whole number in this range."""

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if not least <= number <= most:
            raise argparse.ArgumentTypeError(f"expected a whole number from {least} to {most}, got {text!r}")
        return number

    return read


def real(least: float, most: float) -> Callable[[str], float]:
    """Returns the type of an argument that is a number in this range."""

    def read(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = float("nan")
        if not least <= number <= most:
            raise argparse.ArgumentTypeError(f"expected a number from {least:g} to {most:g}, got {text!r}")
        return number

    return read


def listed(read: Callable[[str], T]) -> Callable[[str], list[T]]:
    """Returns the type of an argument that is a list with commas between."""
    return lambda text: [read(item) for item in text.split(",")]


class Listed(argparse.Action):
    """An argument of one list: `1 64`, `1,64` and `1, 64` are the same. Its type is `listed(...)`, and nargs is "+"."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        setattr(namespace, self.dest, [item for part in values for item in part])


def architecture(text: str) -> str:
    """Returns the architecture of an argument that names a card or an architecture of CARDS, or "cpu".

    The letter of a kernel's target is dropped: sm_90a is sm_90.
    """
    plain = _plain(text)
    for arch, cards in CARDS.items():
        if plain in (_plain(name) for name in (arch, f"{arch}a", f"{arch}f", *cards)):
            return arch
    if plain == "cpu":
        return plain
    known = ", ".join(f"{arch} ({', '.join(cards)})" for arch, cards in CARDS.items())
    raise argparse.ArgumentTypeError(f"expected one of {known}, got {text!r}")


def _plain(name: str) -> str:
    return name.lower().replace(" ", "").replace("-", "").replace("_", "")


def a_name(text: str) -> str:
    """Checks an argument that is a name."""
    if not text.strip():
        raise argparse.ArgumentTypeError("expected a name, got nothing")
    return text.strip()


def known(kind: str, names: Sequence[str], choices: Iterable[str]) -> list[str]:
    """Returns the names as the choices spell them. A hyphen counts as an underscore, and the reverse."""
    spelled = {choice.replace("-", "_"): choice for choice in choices}
    unknown = [name for name in names if name.replace("-", "_") not in spelled]
    if unknown:
        raise UsageError(f"unknown {kind} {', '.join(unknown)}; known: {', '.join(spelled.values())}")
    return [spelled[name.replace("-", "_")] for name in names]


def require_writable(flag: str, path: str | None) -> None:
    """Raises UsageError if this file cannot be opened for writing. Leaves no new file behind."""
    if path is None:
        return
    existed = os.path.exists(path)
    try:
        with open(path, "a"):
            pass
    except OSError as error:
        raise UsageError(f"{flag}: cannot open {path}: {error.strerror}") from error
    if not existed:
        os.remove(path)
