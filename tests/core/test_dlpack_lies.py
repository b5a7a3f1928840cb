"""DLPack capsules and exchange tables that lie: one clear error each, nothing that crashes, nothing left allocated.

`dlpack_liar.py` makes them, in a process of its own: a lie that is believed may end it.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import oxmoe._oxmoe as extension
from dlpack_liar import BYTES, HONEST, ROUTES, TABLES, USES, lies

LIAR = Path(__file__).parents[1] / "support" / "dlpack_liar.py"
# (type of the error, its text, capsules that were made and not freed)
Outcome = tuple[str, str, int]


@functools.cache
def outcomes(use: str, route: str) -> dict[str, Outcome]:
    """What came of every lie; a new process goes on behind one that ended the process."""
    results: dict[str, Outcome] = {}
    paths = [str(Path(extension.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    # One thread: a pool's threads would go on reading where the process is ending.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "RAYON_NUM_THREADS": "1", "RUST_BACKTRACE": "0"}
    behind: list[str] = []
    while True:
        command = [sys.executable, str(LIAR), use, route, *behind]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        results |= {line[0]: tuple(line[1:]) for line in lines if len(line) > 1}
        if done.returncode == 0:
            return results
        assert lines and len(lines[-1]) == 1, done.stderr
        crashed = lines[-1][0]
        results[crashed] = ("crash", f"exit status {done.returncode}: {done.stderr.strip()[:200]}", 0)
        names = list(everything(use, route))
        behind = names[names.index(crashed) + 1 :]
        if not behind:
            return results


def everything(use: str, route: str) -> list[str]:
    special = {"fp8": list(BYTES), "tables": TABLES}
    return special[use] if use in special else [*HONEST, *lies(route)]


def check(outcome: Outcome, operand: str) -> None:
    kind, text, left = outcome
    assert kind in ("ValueError", "NotImplementedError"), (kind, text)
    # Another operand may come first where the two are on different devices.
    named = text.startswith(f"{operand}: ") or f"but {operand} is on" in text
    assert named and "\n" not in text and "internal error" not in text, text
    assert left == 0, f"{left} tensors were never given back"


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("use", USES)
def test_what_is_true_is_taken(use: str, route: str) -> None:
    for name in HONEST:
        kind, text, left = outcomes(use, route)[name]
        if name == "read-only" and use == "written" and route == "versioned":
            assert kind == "ValueError" and text.startswith("out: ") and "read-only" in text, (name, kind, text)
        else:
            assert kind == "nothing", (name, kind, text)
        assert left == 0, name


@pytest.mark.parametrize(
    ("use", "route", "lie"), [(use, route, lie) for use in USES for route in ROUTES for lie in lies(route)]
)
def test_lies(use: str, route: str, lie: str) -> None:
    outcome = outcomes(use, route)[lie]
    # A capsule of a name that says "taken" is freed by whom it was taken by.
    check((*outcome[:2], 0) if "capsule" in lie else outcome, USES[use][0])


@pytest.mark.parametrize("name", BYTES)
def test_types_whose_bits_only_multiply_to_a_byte(name: str) -> None:
    check(outcomes("fp8", "versioned")[name], "w13")


@pytest.mark.parametrize("name", TABLES)
def test_tables_that_are_none(name: str) -> None:
    kind, text, left = outcomes("tables", "table")[name]
    # Where there is no table the capsule of the same object may be read in its place.
    assert kind == "nothing" or (kind == "ValueError" and text.startswith("router_logits: ")), (kind, text)
    assert left == 0 or name == "another capsule"
