"""What calls under the stand-in driver left behind."""

from __future__ import annotations

import json
import os

_read = 0


def records() -> list[dict]:
    """What the driver was asked since the last time."""
    global _read
    if not os.path.exists(os.environ.get("FAKE_LOG", "")):
        return []
    with open(os.environ["FAKE_LOG"]) as log:
        log.seek(_read)
        lines = log.read()
        _read = log.tell()
    return [json.loads(line) for line in lines.splitlines()]


def attempt(function, *arguments, **options) -> str | None:
    """ "RuntimeError: text" of what the call raised."""
    try:
        function(*arguments, **options)
    except BaseException as error:  # a panic is a BaseException
        return f"{type(error).__name__}: {error}"
    return None
