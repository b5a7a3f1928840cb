"""A server with --enable-metrics exports the counts of `oxmoe.stats`."""

from __future__ import annotations

import importlib
import os
from pathlib import Path

import pytest

import forked

pytest.importorskip("sglang")
pytest.importorskip("prometheus_client")

import oxmoe.sglang

PROGRAM = """
import os, time, torch, oxmoe
from prometheus_client import CollectorRegistry, multiprocess
from oxmoe.sglang import metrics

registry = CollectorRegistry()
multiprocess.MultiProcessCollector(registry)

def value(kind, **labels):
    return registry.get_sample_value(f"oxmoe_{kind}_total", {**labels, "rank": "0"})

logits = torch.zeros((3, 4))
oxmoe.topk(logits, 2)
"""


def run(program: str, folder: Path) -> None:
    """Runs a program in a process of its own: prometheus_client looks for the folder when it is imported."""
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(folder)}
    done = forked.run("-c", PROGRAM + program, env=environment, packages=forked.SGLANG)
    assert done.returncode == 0, done.stderr


def test_counts_are_added_once(tmp_path: Path) -> None:
    program = """
exporter = metrics.Exporter(0)
for _ in range(2):
    exporter.add()
    assert value("calls", function="topk") == 1 and value("rows", function="topk") == 3
oxmoe.topk(logits, 2)
exporter.add()
assert value("calls", function="topk") == 2 and value("rows", function="topk") == 6
assert value("calls", function="moe") == 0
oxmoe.stats(reset=True)
oxmoe.topk(logits, 2)
exporter.add()
assert value("calls", function="topk") == 3 and value("rows", function="topk") == 9
"""
    run(program, tmp_path)


def test_launches_have_their_kernel(tmp_path: Path) -> None:
    program = """
metrics.oxmoe = type("Stats", (), {"stats": staticmethod(lambda: {"calls": {}, "launches": {"combine": 7}})})
metrics.Exporter(0).add()
assert value("launches", kernel="combine") == 7
"""
    run(program, tmp_path)


def test_a_thread_adds_counts_and_starts_once(tmp_path: Path) -> None:
    program = """
import threading
metrics.PERIOD = 0.01
metrics.start()
metrics.start()
assert value("calls", function="topk") == 1
assert [thread.daemon for thread in threading.enumerate() if thread.name == "oxmoe metrics"] == [True]
oxmoe.topk(logits, 2)
until = time.monotonic() + 30
while value("calls", function="topk") != 2:
    assert time.monotonic() < until
    time.sleep(0.01)
"""
    run(program, tmp_path)


@pytest.mark.parametrize("asked", [True, False])
def test_the_thread_starts_with_the_model_where_metrics_are_on(asked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[bool] = []
    monkeypatch.setattr(importlib.import_module("oxmoe.sglang.metrics"), "start", lambda: started.append(True))
    monkeypatch.setattr("oxmoe.sglang.server.exports_metrics", lambda: asked)
    oxmoe.sglang._model()
    assert started == [True] * asked


def test_without_a_server_nothing_is_exported() -> None:
    program = "from oxmoe.sglang import server; assert server.exports_metrics() is False"
    done = forked.run("-c", program, packages=forked.SGLANG)
    assert done.returncode == 0, done.stderr
