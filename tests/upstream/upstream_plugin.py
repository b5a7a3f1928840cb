"""pytest's plug-in for another project's tests: which are expected to be skipped, and on which device they run."""

from __future__ import annotations

import fnmatch
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

try:
    import flashinfer_served as served
except ModuleNotFoundError:  # the tests of another project
    served = None

HERE = Path(__file__).parent
# Tests of calls that flashinfer has for Blackwell, and oxmoe for every device: they are told that they run on
# Blackwell.
ON_EVERY_DEVICE = (
    *("tests/utils/*", "tests/quantization/*", "tests/moe/test_dpsk_fused_moe_fp8.py*"),
    *("tests/moe/test_trtllm_gen_routed_fused_moe.py*", "tests/moe/test_trtllm_gen_fused_moe*"),
    *("tests/moe/test_cute_dsl_fused_moe.py*", "tests/moe/test_trtllm_cutlass_fused_moe.py::test_moe_nvfp4*"),
    "tests/moe/test_trtllm_cutlass_fused_moe.py::test_moe_mxfp8_mxfp8*",
    "tests/gemm/test_unified_gemm_fuzz.py*",
)


def expected_skips() -> list[tuple[str, str]]:
    """Returns (pattern of test ids, reason) of every line of skips.txt."""
    lines = (line.strip() for line in (HERE / "skips.txt").read_text().splitlines())
    pairs = (line.partition(" | ") for line in lines if line and not line.startswith("#"))
    return [(pattern.strip(), reason.strip()) for pattern, _, reason in pairs]


def matches(pattern: str, name: str) -> bool:
    """Whether the name matches: `*` stands for any text, every other character for itself."""
    return fnmatch.fnmatchcase(name, re.sub(r"([\[\]?])", r"[\1]", pattern))


def stable_topk(
    input: torch.Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> torch.return_types.topk:
    """torch.topk, where the first of equal numbers comes first. On CPUs torch takes any of them, and references of
    routing choose other experts then."""
    values, indices = torch.sort(input, dim=dim, descending=largest, stable=True)
    return torch.return_types.topk((values.narrow(dim, 0, k).contiguous(), indices.narrow(dim, 0, k).contiguous()))


class OnCpu(torch.overrides.TorchFunctionMode):
    """Makes tensors on the CPU that a test asks for on a GPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function in (torch.topk, torch.Tensor.topk) and "out" not in kwargs:
            return stable_topk(*args, **kwargs)
        if function is torch.Tensor.cuda:
            return args[0]
        if "device" in kwargs and "cuda" in str(kwargs["device"]):
            kwargs["device"] = "cpu"
        if function is torch.Tensor.to:
            args = tuple("cpu" if "cuda" in str(arg) and isinstance(arg, str | torch.device) else arg for arg in args)
        return function(*args, **kwargs)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--on-cpu", action="store_true", help="run what needs no GPU of its own on the CPU")
    parser.addoption("--results", help="file that gets a line for each test: outcome, id, reason")


def pytest_configure(config: pytest.Config) -> None:
    # Workers of pytest-xdist send their reports to the process that has no workerinput.
    if (path := config.getoption("--results")) and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Results(path))
    if not config.getoption("--on-cpu"):
        return
    config.stash[_MODE] = mode = OnCpu()
    mode.__enter__()
    for name in _WITHOUT_EFFECT:
        setattr(torch.cuda, name, _nothing)
    torch.set_default_device = _nothing
    # Compiled references would look for the GPU that there is not.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    if (dynamo := sys.modules.get("torch._dynamo.config")) is not None:
        dynamo.disable = True  # type: ignore[attr-defined]
    torch.Generator = _Generator  # type: ignore[misc]
    torch.cuda.is_available = lambda: True
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    torch.cuda.device_count = lambda: 1
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_properties = lambda device=None: _Properties()  # type: ignore[assignment,return-value]


class _Generator(torch.Generator):
    def __new__(cls, device: Any = None) -> Any:
        return super().__new__(cls, "cpu")


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


_WITHOUT_EFFECT = (
    *("synchronize", "empty_cache", "manual_seed_all", "manual_seed", "set_device", "reset_peak_memory_stats"),
    *("memory_allocated", "max_memory_allocated"),
)
_MODE = pytest.StashKey[OnCpu]()


class _Properties:
    name, total_memory, multi_processor_count, major, minor = "CPU", 64 << 30, 132, 9, 0


def pytest_unconfigure(config: pytest.Config) -> None:
    if (mode := config.stash.get(_MODE, None)) is not None:
        mode.__exit__(None, None, None)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    skips = expected_skips()
    for item in items:
        for pattern, reason in skips:
            if matches(pattern, item.nodeid):
                item.add_marker(pytest.mark.skip(reason=f"expected: {reason}"))
                break


def _tell(name: str) -> None:
    if served is None:
        return
    anywhere = any(matches(pattern, name) for pattern in ON_EVERY_DEVICE)
    served.capability = (10, 0) if anywhere else torch.cuda.get_device_capability()


class _Told:
    """A device's properties, with the capability that a file is told as it is imported."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self.major, self.minor = served.capability

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)


_properties: list[Any] = []


def pytest_collectstart(collector: pytest.Collector) -> None:
    # A test file may ask for the capability as it is imported.
    if served is None or not isinstance(collector, pytest.Module):
        return
    _tell(collector.nodeid)
    if not _properties:
        _properties.append(torch.cuda.get_device_properties)
    real = _properties[0]
    torch.cuda.get_device_properties = lambda device=None: _Told(real(device))  # type: ignore[assignment,return-value]


def pytest_collection_finish(session: pytest.Session) -> None:
    if _properties:
        torch.cuda.get_device_properties = _properties.pop()


def pytest_runtest_setup(item: pytest.Item) -> None:
    _tell(item.nodeid)


class Results:
    """Writes a line for each test as it ends: outcome, id and reason, with tabs between them."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)

    def _write(self, kind: str, name: str, reason: str = "") -> None:
        with self._path.open("a") as lines:
            lines.write(f"{kind}\t{name}\t{' '.join(reason.split())[:300]}\n")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write("error", report.nodeid, str(report.longrepr)[-300:])
        elif report.skipped:
            self._write(*skip(report))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped:
            self._write(*skip(report))
        elif report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            self._write("failed" if report.when == "call" else "error", report.nodeid, getattr(crash, "message", ""))
        elif report.when == "call":
            self._write("passed", report.nodeid)


def skip(report: pytest.CollectReport | pytest.TestReport) -> tuple[str, str, str]:
    """Returns outcome, id and reason of a test that was skipped."""
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    reason = reason.removeprefix("Skipped: ")
    named = reason.startswith(("expected: ", "not served: "))
    return (reason.split(":")[0] if named else "its own skips"), report.nodeid, reason
