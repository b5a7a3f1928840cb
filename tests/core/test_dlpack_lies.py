"""DLPack capsules and exchange tables that lie: one clear error each, nothing that crashes, nothing left allocated.

`dlpack_liar.py` makes them, in a process of its own: a lie that is believed may end it.
"""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

import pytest

import forked
import oxmoe._oxmoe as extension
from dlpack_liar import BYTES, HONEST, INTERFACES, ROUTES, TABLES, USES, lies

LIAR = Path(__file__).parents[1] / "support" / "dlpack_liar.py"
# (type of the error, its text, capsules that were made and not freed)
Outcome = tuple[str, str, int]


@functools.cache
def outcomes(use: str, route: str) -> dict[str, Outcome]:
    """Returns the outcome of every lie. If a lie ends the process, a new process goes on behind it."""
    results: dict[str, Outcome] = {}
    paths = [str(Path(extension.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    # The pool has one thread: more threads would go on reading while the process ends.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "RAYON_NUM_THREADS": "1", "RUST_BACKTRACE": "0"}
    behind: list[str] = []
    while True:
        done = forked.run(LIAR, use, route, *behind, env=environment, timeout=120)
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
    special = {"fp8": list(BYTES), "tables": TABLES, "interfaces": list(INTERFACES)}
    return special[use] if use in special else [*HONEST, *lies(route)]


def check(outcome: Outcome, operand: str) -> None:
    kind, text, left = outcome
    assert kind in ("ValueError", "NotImplementedError"), (kind, text)
    # The error may name another operand first if the two are on different devices.
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
    # A capsule whose name says "taken" is freed by its taker.
    check((*outcome[:2], 0) if "capsule" in lie else outcome, USES[use][0])


@pytest.mark.parametrize("name", BYTES)
def test_types_whose_bits_only_multiply_to_a_byte(name: str) -> None:
    check(outcomes("fp8", "versioned")[name], "w13")


@pytest.mark.parametrize("name", TABLES)
def test_tables_that_are_none(name: str) -> None:
    kind, text, left = outcomes("tables", "table")[name]
    # If there is no table, the capsule of the same object may be read in its place.
    assert kind == "nothing" or (kind == "ValueError" and text.startswith("router_logits: ")), (kind, text)
    assert left == 0 or name == "another capsule"


@pytest.mark.parametrize("name", INTERFACES)
def test_array_interfaces_with_another_number_of_strides(name: str) -> None:
    check(outcomes("interfaces", "capsule")[name], "router_logits")


FIRST_CALLS = {
    # A type whose own code runs while it is looked at.
    "a type that calls oxmoe": """
class Meta(type):
    @property
    def __dlpack_c_exchange_api__(cls):
        inner.append(oxmoe.topk(np.eye(4, 16, dtype=np.float32), 2)[1].tolist())

class Array(metaclass=Meta):
    def __dlpack__(self, **_):
        return np.eye(4, 16, dtype=np.float32).__dlpack__()

outer = oxmoe.topk(Array(), 2)[1].tolist()
""",
    # A mode of torch's that sees the tensors by which the extension finds the fields of a storage.
    "a mode that calls oxmoe": """
import torch
from torch.overrides import TorchFunctionMode

class Mode(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.empty and not busy:
            busy.append(1)
            inner.append(oxmoe.topk(torch.eye(4, 16), 2)[1].tolist())
        return function(*args, **(kwargs or {}))

busy = []
with Mode():
    outer = oxmoe.topk(torch.eye(4, 16), 2)[1].tolist()
""",
}


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), MemoryError("full")], ids=repr)
def test_an_interrupt_stays_one(error: BaseException) -> None:
    """What a producer raises is a fault of the operand, unless it is none of the operand's."""

    class Producer:
        def __dlpack__(self, **options: Any) -> Any:
            raise error

    with pytest.raises(type(error)) as raised:
        extension.topk(Producer(), 2)  # type: ignore[arg-type]
    assert raised.value is error


@pytest.mark.parametrize("name", FIRST_CALLS)
def test_a_first_call_inside_the_first_call(name: str) -> None:
    """What a process finds out once is found while somebody else's code runs, which may call oxmoe, too."""
    program = "import numpy as np, oxmoe\ninner = []" + FIRST_CALLS[name] + "assert inner and outer == inner[0], inner"
    paths = [str(Path(extension.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    done = forked.run("-c", program, env=environment, timeout=60)
    assert done.returncode == 0, done.stderr
