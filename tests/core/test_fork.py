"""Calls in children of fork(), in which the parent's threads are gone and CUDA does not work."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import oxmoe._oxmoe as extension
from fake_cuda.harness import execute

LIMIT = 120  # seconds; a child that waits for threads of its parent would wait for ever

# `alarm`: a child that hangs ends by a signal, and so do its parent and this test's process, in that order.
PREPARED = """
import os, signal, sys
import torch
import oxmoe
from oxmoe.quantize import mxfp4

torch.set_num_threads(1)  # torch's own threads do not survive a fork either
generator = torch.Generator().manual_seed(1)
w13 = torch.randn(4, 256, 128, generator=generator) / 8
w2 = torch.randn(4, 128, 128, generator=generator) / 8
weights = oxmoe.ExpertWeights.f32(w13, w2)
x = torch.randn(64, 128, generator=generator)
logits = torch.randn(64, 4, generator=generator)

def results():
    topk_weights, topk_ids = oxmoe.topk(logits, 2)
    return [oxmoe.moe(x, weights, topk_weights, topk_ids), topk_weights, topk_ids, *mxfp4(w13)]

def same(first, second):
    return all(a.numpy().tobytes() == b.numpy().tobytes() for a, b in zip(first, second, strict=True))

expected = results()
"""
GENERATIONS = """
def child(depth):
    signal.alarm(20 * depth)
    ok = same(results(), expected)
    if ok and depth > 1:
        ok = in_child(depth - 1)
    os._exit(0 if ok else 3)

def in_child(depth):
    number = os.fork()
    if number == 0:
        child(depth)
    return os.waitpid(number, 0)[1] == 0

assert in_child(3)
assert in_child(1)
assert same(results(), expected)
"""
WORKERS = """
class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        return results()[0]

signal.alarm(60)
loaded = list(torch.utils.data.DataLoader(Rows(), batch_size=None, num_workers=2, multiprocessing_context="fork"))
assert len(loaded) == 8 and all(same([row], expected[:1]) for row in loaded)
"""
THREADS = """
import threading

routing = oxmoe.topk(logits, 2)
workspaces = [torch.empty(oxmoe.workspace_bytes(weights, 64, 2), dtype=torch.uint8) for _ in range(2)]

def in_workspace(i):
    return oxmoe.moe(x, weights, *routing, workspace=workspaces[i])

def repeat(i):
    while not done:
        results()
        in_workspace(i)

# A child has memory of its own, so no call of the parent disturbs it.
done = False
busy = [threading.Thread(target=repeat, args=(i,)) for i in range(2)]
for thread in busy:
    thread.start()
signal.alarm(60)
for _ in range(10):
    number = os.fork()
    if number == 0:
        signal.alarm(20)
        os._exit(0 if same([*results(), in_workspace(0), in_workspace(1)], expected + expected[:1] * 2) else 3)
    assert os.waitpid(number, 0)[1] == 0
done = True
for thread in busy:
    thread.join()
"""


def python(code: str, **environment: str) -> str:
    """Runs code in a new process with two or more threads, and returns its output."""
    settings = os.environ | {"RAYON_NUM_THREADS": "2", "OMP_NUM_THREADS": "1"} | environment
    settings["PYTHONPATH"] = os.pathsep.join(
        [str(Path(extension.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    )
    done = subprocess.run([sys.executable, "-c", code], env=settings, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, (done.returncode, done.stderr)
    return done.stdout


@pytest.mark.parametrize("code", [GENERATIONS, WORKERS, THREADS], ids=["generations", "data-loader", "busy-threads"])
def test_a_child_computes_the_same_bits(code: str) -> None:
    python(PREPARED + code)


def test_a_child_before_the_first_call() -> None:
    python(
        PREPARED.replace("expected = results()", "") + "expected = None\nif os.fork() == 0:\n    signal.alarm(20)\n"
        "    results()\n    os._exit(0)\nassert os.wait()[1] == 0\nresults()\n"
    )


@pytest.mark.parametrize("count", ["1", "3"])
def test_a_child_has_the_threads_that_its_parent_has(count: str) -> None:
    code = """
threads = oxmoe._oxmoe.device_info()["threads"]
number = os.fork()
if number == 0:
    os._exit(oxmoe._oxmoe.device_info()["threads"])
print(threads, os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]))
"""
    assert python("import os\nimport oxmoe" + code, RAYON_NUM_THREADS=count).split() == [count, count]


@pytest.mark.parametrize("used_by", ["oxmoe", "torch"])
def test_cuda_in_a_child_is_an_error_at_once(driver: Path, tmp_path: Path, used_by: str) -> None:
    """The error comes if oxmoe had opened the GPU, and also if only the driver knows that the parent had used it."""
    settings = {} if used_by == "oxmoe" else {"fail": "cuInit:1:3"}
    text = execute(driver, tmp_path, "cuda_after_fork", {"opens": used_by == "oxmoe"}, **settings)
    assert text.startswith("RuntimeError: " + ("cuda:0" if used_by == "oxmoe" else "cuInit"))
    assert "made by fork() after its parent had used CUDA" in text and '"spawn" or "forkserver"' in text


def test_a_driver_that_cannot_start_is_not_called_a_fork(driver: Path, tmp_path: Path) -> None:
    text = execute(driver, tmp_path, "failed_start", {}, fail="cuInit:1:3")
    assert text.startswith("RuntimeError: cuInit") and "fork" not in text
