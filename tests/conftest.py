"""Marks, devices and seeds. Without a GPU no `gpu` tests run. A run draws a new seed, printed above tests and below
failures."""

from __future__ import annotations

import fcntl
import os
import tempfile
import traceback
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import oxmoe._oxmoe as extension
from fake_cuda.harness import build, cuda_headers

_SEED = "OXMOE_TEST_SEED"
_GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=None, help="seed of all random inputs (default: a new one)")
    parser.addoption("--allreduce-calls", type=int, default=2000, help="random all-reduces in a row between GPUs")


def pytest_configure(config: pytest.Config) -> None:
    # NOTE: the seed is in the environment, so that the processes of pytest-xdist draw from the same one.
    if config.option.seed is None:
        config.option.seed = int(os.environ.get(_SEED) or int.from_bytes(os.urandom(4), "little"))
    os.environ[_SEED] = str(config.option.seed)
    # Processes beside each other share the cores: if each used all of them, references on the CPU would take many times
    # as long.
    if (workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))) > 1:
        threads = max(1, (os.cpu_count() or 1) // workers)
        torch.set_num_threads(threads)
        os.environ.setdefault("RAYON_NUM_THREADS", str(threads))


def pytest_report_header(config: pytest.Config) -> str:
    gpu = torch.cuda.get_device_name() if _GPUS else "none"
    return f"oxmoe: --seed={config.option.seed}, GPU: {gpu}, torch {torch.__version__}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if terminalreporter.stats.get("failed") or terminalreporter.stats.get("error"):
        terminalreporter.write_line(f"oxmoe: --seed={config.option.seed}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") and _GPUS < 1:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
        if item.get_closest_marker("multi_gpu") and _GPUS < 2:
            item.add_marker(pytest.mark.skip(reason="needs two CUDA GPUs"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[Any]:
    """Adds the end of the log of each server that the test asked for to a failure."""
    report = yield
    if report.failed:
        for name, value in getattr(item, "funcargs", {}).items():
            for server in value if isinstance(value, tuple) else (value,):
                if callable(tail := getattr(server, "tail", None)):
                    report.sections.append((f"log of {name}", tail()))
    return report


def _seed_of_test(test: pytest.Item) -> int:
    return zlib.crc32(f"{test.config.option.seed} {test.nodeid}".encode())


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> torch.Generator:
    """Returns a CPU generator seeded by run and test name: one test alone draws what it drew in the suite."""
    return torch.Generator().manual_seed(_seed_of_test(request.node))


@pytest.fixture(autouse=True)
def _default_generator(request: pytest.FixtureRequest) -> None:
    seed = _seed_of_test(request.node)
    torch.default_generator.manual_seed(seed)
    # Without a GPU, torch.manual_seed notes the call's stack for each kind of device, which takes a millisecond.
    if _GPUS:
        torch.cuda.manual_seed_all(seed)


@pytest.fixture(autouse=True)
def _no_captures_without_caching(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skips captures if torch caches no memory: a sanitizer then sees single tensors, but torch captures no
    allocation."""
    if _GPUS and os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING") == "1":
        reason = "PYTORCH_NO_CUDA_MEMORY_CACHING=1: torch captures no graph that allocates"
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda *_, **__: pytest.skip(reason))


@pytest.fixture(autouse=True)
def _share_the_gpu() -> Iterator[None]:
    """Gives back what torch keeps of a large test: test processes beside each other share one GPU's memory."""
    yield
    if _GPUS and torch.cuda.memory_reserved() > 1 << 30:
        torch.cuda.empty_cache()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[Any]:
    """Runs a test a second time, while no other process runs one, if the GPU's memory did not do for all of them."""
    if not (_GPUS and item.get_closest_marker("gpu") and "PYTEST_XDIST_TESTRUNUID" in os.environ):
        return (yield)
    name = f"oxmoe-tests-{os.environ['PYTEST_XDIST_TESTRUNUID']}.lock"
    with open(Path(tempfile.gettempdir(), name), "w") as turn:
        fcntl.flock(turn, fcntl.LOCK_SH)
        try:
            return (yield)
        except torch.OutOfMemoryError as error:
            # The frames of the traceback hold the test's tensors.
            traceback.clear_frames(error.__traceback__)
        fcntl.flock(turn, fcntl.LOCK_EX)
        torch.cuda.empty_cache()
        torch.manual_seed(_seed_of_test(item))
        if isinstance(generator := getattr(item, "funcargs", {}).get("rng"), torch.Generator):
            generator.manual_seed(_seed_of_test(item))
        item.runtest()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(
    params=[
        pytest.param(("cpu", torch.float32), id="cpu-f32"),
        pytest.param(("cpu", torch.bfloat16), id="cpu-bf16"),
        pytest.param(("cpu", torch.float16), id="cpu-f16"),
        pytest.param(("cuda", torch.bfloat16), id="cuda-bf16", marks=pytest.mark.gpu),
        pytest.param(("cuda", torch.float16), id="cuda-f16", marks=pytest.mark.gpu),
    ]
)
def place(request: pytest.FixtureRequest) -> tuple[str, torch.dtype]:
    """Returns (device, dtype), for every pair that has a kernel."""
    return request.param


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds the stand-in for libcuda, and returns its folder."""
    if cuda_headers() is None:
        pytest.skip("no cuda.h: neither in the nvidia Python packages nor under CUDA_HOME")
    folder = tmp_path_factory.mktemp("driver")
    build(folder)
    return folder


@pytest.fixture(scope="session")
def kernels_for_hopper() -> None:
    if "90a" not in extension.device_info()["archs"]:
        pytest.skip("this wheel has no kernels for 90a")
