"""Whether processes that were killed are gone.

Nobody waits for the child of a process that was killed. The system ends it a moment after the signal, later where it is
busy, and may keep it as a zombie.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import psutil

LIMIT_S = 60.0


def runs(pid: int) -> bool:
    """Whether a process runs; one that nobody has waited for does not."""
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def session_runs(session: int) -> bool:
    """Whether a process of a session runs."""
    for pid in psutil.pids():
        try:
            if os.getsid(pid) == session and runs(pid):
                return True
        except ProcessLookupError:
            continue
    return False


def ended(pid: int) -> bool:
    """Whether a process ends, which it may do a moment after its signal."""
    return _ends(lambda: runs(pid))


def session_ended(session: int) -> bool:
    """Whether all processes of a session end, which they may do a moment after their signal."""
    return _ends(lambda: session_runs(session))


def _ends(runs: Callable[[], bool]) -> bool:
    until = time.monotonic() + LIMIT_S
    while runs():
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True
