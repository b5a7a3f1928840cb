"""benches/reliability.py on a CPU: rows that are right, wrong, kept, hung or skipped, and their words."""

from __future__ import annotations

import importlib
import json
import mmap
import os
import signal
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import oxmoe
import processes

ROOT = next(folder for folder in Path(__file__).parents if (folder / "Cargo.toml").is_file())
BENCHES = str(ROOT / "benches")


def load(*names: str) -> Iterator[Any]:
    """Loads modules of benches/, which does not stay on the path: it has a folder named sglang."""
    sys.path.insert(0, BENCHES)
    try:
        yield from [importlib.import_module(name) for name in names]
    finally:
        sys.path.remove(BENCHES)


reliability, common, killed, layers = load("reliability", "load.common", "load.killed", "load.layers")
CASES = {"device": "cpu", "seed": 1, "shapes": 1, "batches": 2, "formats": ["bf16", "int4", "fp8_tensor-token"]}


@pytest.fixture(autouse=True)
def _sigterm() -> Iterator[None]:
    """Restores the handler, which `inside` replaces, as it has a process of its own."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def inside(capsys: pytest.CaptureFixture[str], scenario: str, options: dict[str, Any]) -> dict[str, Any]:
    assert reliability.inside(scenario, options) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_a_soak(capsys: pytest.CaptureFixture[str]) -> None:
    row = inside(capsys, "soak", {**CASES, "seconds": 2.0})
    assert row["outcome"] == "right" and row["wrong"] == 0, row
    assert row["calls"] > row["calls_watched"] > 0 and row["inputs"] == 2 * row["formats"] == 2 * row["layers"] == 6
    assert set(row["memory_before"]) == {"resident", "descriptors", "threads"} == set(row["memory_after"])
    assert row["environment"]["commit"] == oxmoe.device_info()["commit"]
    again = inside(capsys, "soak", {**CASES, "seconds": 0.0})
    assert again["bits"] == row["bits"] and again["calls_watched"] == 0


def test_a_flipped_bit_is_wrong(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    real, calls = oxmoe.moe, 0

    def flips(x: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        result = real(x, *args, **named)
        if calls == 20:
            common.raw(result)[3] ^= 1
        return result

    monkeypatch.setattr(oxmoe, "moe", flips)
    row = inside(capsys, "soak", {**CASES, "seconds": 0.0})
    assert row["outcome"] == "wrong" and row["wrong"] == 1


def test_a_wrong_first_result_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    real = oxmoe.moe
    monkeypatch.setattr(oxmoe, "moe", lambda *args, **named: real(*args, **named) * 2)
    row = inside(capsys, "soak", {**CASES, "seconds": 0.0})
    assert row["outcome"] == "failed" and row["reason"].startswith("bf16, Shape(")


def test_memory_that_is_kept() -> None:
    memory = common.Memory("cpu", 8 << 20)
    memory.begin()
    memory.look()
    kept = mmap.mmap(-1, 64 << 20)
    kept.write(b"1" * len(kept))
    with pytest.raises(common.Failed, match=r"^resident: \d+ bytes after the warm-up, \d+ now"):
        memory.look()
    kept.close()
    with open(os.devnull), pytest.raises(common.Failed, match=r"^descriptors: (\d+) after the warm-up, \d+ now"):
        memory.look()


def test_device_memory_is_watched_to_the_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    of = {"allocated": 1000, "reserved": 4096, "free": 10_000}
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (of["free"], 20_000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: of["reserved"])
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: of["allocated"])
    memory = common.Memory("cuda", 1 << 30)
    memory.begin()
    assert memory.now()["used_beside_torch"] == 20_000 - 10_000 - 4096
    # Memory that torch reserves anew is not kept by another owner.
    of |= {"reserved": 4196, "free": 9900}
    memory.look()
    of["allocated"] += 1
    with pytest.raises(common.Failed, match=r"^allocated: 1000 after the warm-up, 1001 now"):
        memory.look()
    of |= {"allocated": 1000, "free": 9899}
    with pytest.raises(common.Failed, match=r"^used_beside_torch: 5904 after the warm-up, 5905 now"):
        memory.look()
    common.Memory("cuda", 1 << 30, alone=False).now()


def test_bits_are_told_apart() -> None:
    wrong = common.Wrong("cpu", 8)
    wrong.compare(torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0]))
    nan = torch.tensor([torch.nan])
    wrong.compare(nan, nan.clone())
    assert wrong.read() == 1
    assert common.checksum([torch.tensor([0.0])]) != common.checksum([torch.tensor([-0.0])])


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Makes a stand-in for the process of a scenario."""
    path = tmp_path / "scenario.py"
    monkeypatch.setattr(common, "SCRIPT", path)
    yield path


def test_a_process_that_hangs_is_ended_with_its_children(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(common, "GRACE_S", 1.0)
    pid = tmp_path / "pid"
    script.write_text(
        textwrap.dedent(f"""
        import pathlib, signal, subprocess, sys, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        pathlib.Path({str(pid)!r}).write_text(str(child.pid))
        print("2 of 3 are over", file=sys.stderr, flush=True)
        time.sleep(600)
        """)
    )
    started = time.monotonic()
    row = common.inner("soak", {}, 5.0, apart=True)
    assert row == {"outcome": "out of time", "reason": "still ran after 5 s; its last line: 2 of 3 are over"}
    assert time.monotonic() - started < 60
    assert processes.ended(int(pid.read_text()))


@pytest.mark.parametrize("body", ["raise SystemExit('the kernel fell over')", "print('no row')", "print('[1]')"])
def test_a_process_without_a_row_has_failed(script: Path, body: str) -> None:
    script.write_text(body)
    row = common.inner("soak", {}, 60.0)
    assert row["outcome"] == "failed" and row["reason"].startswith("the process ended with status ")
    assert ("the kernel fell over" in row["reason"]) == ("kernel" in body)


@pytest.mark.parametrize(
    ("row", "status", "kept"),
    [
        ({"outcome": "right", "wrong": 0, "calls": 5}, 0, True),
        ({"outcome": "wrong", "wrong": 2, "calls": 5}, 1, True),
        ({"outcome": "failed", "reason": "memory"}, 1, True),
        ({"outcome": "out of time", "reason": "still ran"}, 1, True),
        ({"outcome": "skipped", "reason": "no MPS"}, 0, False),
    ],
)
def test_rows_and_status(
    row: dict[str, Any],
    status: int,
    kept: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = []

    def inner(scenario: str, options: dict[str, Any], limit_s: float, **named: Any) -> dict[str, Any]:
        asked.append((scenario, options, limit_s))
        return dict(row)

    monkeypatch.setattr(reliability, "inner", inner)
    file = tmp_path / "rows.jsonl"
    given = ["soak", "--device", "cpu", "--seconds", "7", "--seed", "3", "--limit", "20"]
    assert reliability.main([*given, "--json", str(file), "--run", "a_run"]) == status
    printed = json.loads(capsys.readouterr().out)
    assert asked == [("soak", {"device": "cpu", "seconds": 7.0, "shapes": 2, "batches": 4, "seed": 3}, 20.0)]
    assert {"run": "a_run", "scenario": "soak", "device": "cpu", "seed": 3, **row}.items() <= printed.items()
    assert printed["commit"] == oxmoe.device_info()["commit"] and "cpu" in printed
    assert file.exists() == kept and (not kept or json.loads(file.read_text()) == printed)


def test_scenarios_of_gpus_are_skipped_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    options = {"device": "cpu", "seed": 1}
    for scenario, own in (("oom", {"rounds": 9}), ("updates", {"replays": 9}), ("mps", {"seconds": 1.0, "limit_s": 9})):
        row = inside(capsys, scenario, {**options, **own})
        assert row["outcome"] == "skipped" and row["reason"] == "needs 1 CUDA GPU, found a CPU"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["soaking"], "expected scenarios of soak, workspaces"),
        ([], "or all; got none"),
        (["soak", "--json", "rows.jsonl"], "--json needs --run NAME"),
    ],
)
def test_arguments(arguments: list[str], words: str) -> None:
    with pytest.raises(reliability.UsageError, match=words):
        reliability.main(arguments)


def test_workspaces(capsys: pytest.CaptureFixture[str]) -> None:
    row = inside(capsys, "workspaces", {"device": "cpu", "count": 20, "seed": 1})
    assert (row["outcome"], row["calls"], row["workspaces"]) == ("right", 180, 60), row


def test_ranks() -> None:
    row = common.inner("allreduce", {"device": "cpu", "calls": 120, "seed": 1, "limit_s": 100}, 110, apart=True)
    assert (row["outcome"], row["wrong"], row.get("ranks")) == ("right", 0, 2), row
    row = common.inner("cycles", {"device": "cpu", "count": 4, "limit_s": 100, "ranks": 4}, 110, apart=True)
    assert (row["outcome"], row["wrong"], row.get("workspaces"), row.get("ranks")) == ("right", 0, 4, 4), row


def test_a_killed_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [BENCHES, *sys.path])
    (row,) = killed._one("cpu", 1, "call 1, the peer waits: post")
    assert row["ended"] == "TimeoutError in call 1, the peer waits" and (row["wrong"], row["results"]) == (0, 1)
    with pytest.raises(common.Failed, match="rank 0 was to be killed, and ended with 0"):
        killed._one("cpu", 0, "a step that there is not")
    rows = killed._one("cpu", 2, "call 1, the peer waits: post", 4)
    assert [row["ended"] for row in rows] == ["TimeoutError in call 1, the peer waits"] * 3


def test_every_format_is_drawn() -> None:
    assert set(layers.served("cpu")) == set(layers.FORMATS)
    assert set(reliability.DEFAULTS) == set(reliability.SCENARIOS)


def test_the_page_has_the_recorded_rows() -> None:
    page = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    files = sorted((ROOT / "benches" / "results").glob("*reliability*.jsonl"))
    rows = reliability.read_rows([str(file) for file in files])
    assert rows and all(file.name in page for file in files)
    assert reliability.table(rows) in page and reliability.endings(rows) in page
    unheard = set(reliability.SCENARIOS) - {row["scenario"] for row in rows}
    assert all(f"`{name}`" in page for name in unheard)


def test_tables() -> None:
    where = {"device": "cuda", "gpu": "NVIDIA H200", "commit": "94c7303885", "date": "2026-11-27T08:00:00+00:00"}
    memory = {"resident": 1 << 20, "allocated": 512}
    first = {**where, "scenario": "soak", "outcome": "right", "wrong": 0, "calls": 12345, "took_s": 61.0, "formats": 13}
    first |= {"memory_before": memory, "memory_after": {"resident": 3 << 20, "allocated": 512}}
    second = {**where, "scenario": "killed", "outcome": "failed", "reason": "rank 1 hangs", "took_s": 5}
    third = {**where, "device": "cpu", "gpu": None, "cpu": "avx2", "scenario": "killed", "outcome": "wrong", "wrong": 3}
    third |= {"kills": 2, "ended": {"TimeoutError in call 0": ["making: post", "call 0: post"]}}
    fourth = {**third, "ranks": 4, "ended": {"RuntimeError in end": ["end: post"]}}
    lines = reliability.table([first, second, third, fourth]).splitlines()
    shown = ["soak", "NVIDIA H200", "12,345 calls, 13 formats", "0", "+2.0 MiB host, +0 bytes device", "61.0"]
    assert lines[2] == f"| {' | '.join(shown)} | 94c7303, 2026-11-27 |"
    assert "| failed: rank 1 hangs |" in lines[3] and "| CPU (avx2) | 2 kills | 3 |" in lines[4]
    assert "| 2 kills, 4 ranks |" in lines[5]
    ends = reliability.endings([first, second, third, fourth]).splitlines()[2:]
    assert ends == [
        "| CPU (avx2) | TimeoutError in call 0 | making: post; call 0: post |",
        "| CPU (avx2), 4 ranks | RuntimeError in end | end: post |",
    ]


def test_the_last_row_of_a_scenario_counts(tmp_path: Path) -> None:
    rows = [{"scenario": "soak", "device": "cpu", "gpu": None, "calls": calls} for calls in (1, 2)]
    rows.append({"scenario": "soak", "device": "cuda", "gpu": "NVIDIA H200", "calls": 3})
    rows.append({"scenario": "soak", "device": "cpu", "gpu": None, "calls": 4, "ranks": 4})
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [row["calls"] for row in reliability.read_rows([str(file)])] == [2, 3, 4]
