"""Texts of errors that others have raised."""

from __future__ import annotations


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message that is not blank, or else the name of its type."""
    lines = (line.strip() for line in str(error).splitlines())
    return next(filter(None, lines), type(error).__name__)
