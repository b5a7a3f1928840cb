"""A scenario of benches/reliability.py: a rank is killed before each step of the all-reduce's host protocol.

The steps are the calls of the functions that exchange something with a peer, or that use the shared memory. A run
without a kill lists them. Each of the other runs kills one rank right before one of these steps. The other ranks must
end in time, and what they were given without an error must be right.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

import oxmoe
from load.common import Failed, Row
from load.layers import need_gpu
from load.ranks import Group, Rank
from oxmoe import _oxmoe
from oxmoe.allreduce import exchange, mailbox

# Seconds until a wait ends. On GPUs it is longer, because contexts of other pairs come and go meanwhile, which holds
# kernels up.
DEADLINE_S = {"cuda": 4.0, "cpu": 2.0}
# Seconds that a rank may take beyond its longest wait: contexts of the GPU are slow to come and to go.
PATIENCE_S = 60.0
LATE_S = 0.3


class Steps:
    """Lists the steps of this process, and kills it right before one of them."""

    def __init__(self, fatal: str | None) -> None:
        self.names: list[str] = []
        self.phase = ""
        self._fatal = fatal
        self._counts: dict[str, int] = {}

    def enter(self, phase: str) -> None:
        self.phase, self._counts = phase, {}

    def step(self, name: str, *, once: bool = False) -> None:
        count = self._counts[name] = self._counts.get(name, 0) + 1
        if once and count > 1:
            return
        step = f"{self.phase}: {name}" + (f" {count}" if count > 1 else "")
        self.names.append(step)
        if step == self._fatal:
            os.kill(os.getpid(), signal.SIGKILL)

    def watch(self, owner: Any, method: str, name: str, *, once: bool = False) -> None:
        original = getattr(owner, method)

        @functools.wraps(original)
        def watched(*args: Any, **named: Any) -> Any:
            self.step(name, once=once)
            return original(*args, **named)

        setattr(owner, method, watched)


class _Memory:
    """Stands for an AllReduceMemory, whose methods cannot be replaced."""

    def __init__(self, steps: Steps, memory: Any) -> None:
        self._steps, self._memory = steps, memory

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._memory, name)
        if name not in ("descriptor", "open", "launch", "synchronize", "close"):
            return found

        def call(*args: Any, **named: Any) -> Any:
            self._steps.step(f"memory.{name}")
            return found(*args, **named)

        return call


def _watch_all(steps: Steps) -> None:
    for method in ("post", "headers", "agree", "reserve", "messages", "drain", "close"):
        steps.watch(exchange.GroupLink, method, method)
    steps.watch(mailbox.Mailbox, "__init__", "a mailbox is made")
    steps.watch(mailbox.Mailbox, "swap", "descriptors are swapped")
    # A delivery takes one step or several, depending on how often its socket blocks, so only the first one counts.
    steps.watch(mailbox._Delivery, "step", "a descriptor is sent", once=True)
    steps.watch(mailbox.Mailbox, "close", "the mailbox is closed")
    make = _oxmoe.AllReduceMemory

    def made(*args: Any, **named: Any) -> _Memory:
        steps.step("memory is made")
        return _Memory(steps, make(*args, **named))

    _oxmoe.AllReduceMemory = made  # type: ignore[misc, assignment]


def _life(me: Rank, victim: int, fatal: str | None) -> Row:
    """Runs a workspace from its making to its end, with calls and (on GPUs) replays."""
    mine = me.rank == victim
    steps = Steps(fatal if mine else None)
    _watch_all(steps)
    x = torch.ones(8, 2880, dtype=torch.bfloat16, device=me.device)
    wrong, results, started = 0, 0, time.monotonic()
    space: Any = None

    def take(out: torch.Tensor, factor: int = 1) -> None:
        nonlocal wrong, results
        me.wait()
        space.check()
        results += 1
        wrong += int((out != factor * me.world).sum())

    def call() -> torch.Tensor:
        return oxmoe.allreduce_fusion(x, space, 0, output=torch.full_like(x, torch.nan))

    ended = "without an error"
    try:
        steps.enter("making")
        space = me.workspace(8, 2880, torch.bfloat16, deadline=DEADLINE_S[me.device])
        steps.enter("call 0")
        take(call())
        # The victim comes late: when it is killed, the other rank's kernel waits for it.
        steps.enter("call 1, the peer waits")
        if mine:
            time.sleep(LATE_S)
        take(call())
        # The other rank comes late: the victim's own kernel waits.
        steps.enter("call 2, this rank waits")
        if not mine:
            time.sleep(LATE_S)
        out = call()
        if me.device == "cuda" and mine:
            time.sleep(LATE_S / 3)
            steps.step("its kernel runs")
        take(out)
        if me.device == "cuda":
            steps.enter("replays")
            out, graph = torch.empty_like(x), torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                oxmoe.allreduce_fusion(x, space, 0, output=out)
            for number in range(40):
                if number in (0, 20):
                    steps.step("a graph is replayed")
                graph.replay()
            take(out)
        steps.enter("end")
        space.destroy()
    except (TimeoutError, RuntimeError, ValueError) as error:
        ended = f"{type(error).__name__} in {steps.phase}"
        if space is not None:
            # A failed workspace is released, too; a second call does nothing.
            try:
                space.destroy()
            except (TimeoutError, RuntimeError) as again:
                ended += f", {type(again).__name__} at its release"
    seconds = time.monotonic() - started
    return {"names": steps.names, "ended": ended, "wrong": wrong, "results": results, "seconds": seconds}


def _one(device: str, victim: int, fatal: str | None, ranks: int = 2) -> list[Row]:
    """Returns the rows of the ranks that were not killed."""
    group, end = Group(_life, ranks, device, victim, fatal), time.monotonic() + PATIENCE_S
    try:
        rows = []
        for rank in range(ranks):
            if fatal is not None and rank == victim:
                group.processes[rank].join(max(end - time.monotonic(), 0.0))
                if group.processes[rank].exitcode != -signal.SIGKILL:
                    raise Failed(
                        f"{fatal}: rank {rank} was to be killed, and ended with {group.processes[rank].exitcode}"
                    )
            else:
                rows.append(group.result(rank, end))
        return rows
    finally:
        group.close()


def killed(device: str, beside: int, victims: list[int], seed: int = 0, ranks: int = 2) -> Row:
    """Kills ranks before each step. beside: this many groups of ranks run at a time. victims: the ranks that are killed
    in turn."""
    if device == "cuda":
        need_gpu(device, ranks)
    whole = _one(device, 0, None, ranks)
    print("a run without a kill is over", file=sys.stderr, flush=True)
    if [row["ended"] for row in whole] != ["without an error"] * ranks or any(row["wrong"] for row in whole):
        raise Failed(f"without a kill: {whole}")
    plan = []
    for victim in victims:
        names = _one(device, victim, None, ranks)[victim]["names"]
        plan += [(victim, name) for name in names]

    begun: list[tuple[int, str]] = []
    over: list[tuple[int, str]] = []

    def run(case: tuple[int, str]) -> list[Row]:
        begun.append(case)
        rows = _one(device, *case, ranks)
        over.append(case)
        # A run that is out of time reports its last line.
        running = ", ".join(f"rank {victim} before {name}" for victim, name in set(begun) - set(over))
        print(f"{len(over)} of {len(plan)} kills are over; running: {running or 'none'}", file=sys.stderr, flush=True)
        return rows

    with ThreadPoolExecutor(beside) as pool:
        survivors = list(pool.map(run, plan))
    ended: dict[str, dict[str, int]] = {}
    silent = []
    for (victim, name), rows in zip(plan, survivors, strict=True):
        for row in rows:
            found = ended.setdefault(row["ended"], {})
            found[name] = found.get(name, 0) + 1
        # Before the end of the last call no rank is done: each other rank's error must say that a peer is gone.
        if not name.startswith("end") and any(row["ended"] == "without an error" for row in rows):
            silent.append(f"rank {victim} before {name}")
    if silent:
        raise Failed(f"another rank had no error where these were killed: {', '.join(silent)}")
    every = [row for rows in survivors for row in rows]
    return {
        "wrong": sum(row["wrong"] for row in every),
        "kills": len(plan),
        "steps": len({name for _, name in plan}),
        "results": sum(row["results"] for row in every),
        "slowest_s": round(max(row["seconds"] for row in every), 2),
        "ended": {how: list(steps) for how, steps in ended.items()},
    }


SCENARIOS: dict[str, Callable[..., Row]] = {"killed": killed}
