"""OXMOE_PROFILE puts a range around each eager call; without it the functions are the extension's own."""

from __future__ import annotations

import inspect
import os
import subprocess
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

import forked
from oxmoe import ExpertWeights, _oxmoe, profiling

E, K, H, WIDTH = 4, 2, 32, 24

PRELUDE = """
import torch, oxmoe
from oxmoe import _oxmoe, profiling
weights = oxmoe.ExpertWeights.bf16(torch.zeros((4, 48, 32)).bfloat16(), torch.zeros((4, 32, 24)).bfloat16())
x, logits = torch.zeros((3, 32)).bfloat16(), torch.zeros((3, 4))
"""


def run(program: str, setting: str | None, *, good: bool = True) -> subprocess.CompletedProcess[str]:
    """Runs a program after PRELUDE in a process of its own, since importing oxmoe puts the ranges there."""
    environment = {name: value for name, value in os.environ.items() if name != profiling.SETTING}
    environment |= {profiling.SETTING: setting} if setting is not None else {}
    done = forked.run("-c", PRELUDE + program, env=environment)
    assert (done.returncode == 0) is good, done.stderr
    return done


@pytest.fixture
def setting(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    profiling.ranges.cache_clear()
    yield monkeypatch
    monkeypatch.undo()
    profiling.ranges.cache_clear()


@pytest.fixture
def pushed(setting: pytest.MonkeyPatch) -> list[str]:
    """Returns texts of ranges that torch.cuda.nvtx has pushed, and "-" for each range that it has popped."""
    log: list[str] = []
    setting.setattr(torch.cuda.nvtx, "range_push", log.append)
    setting.setattr(torch.cuda.nvtx, "range_pop", lambda: log.append("-"))
    setting.setenv(profiling.SETTING, "nvtx")
    profiling.ranges()
    log.clear()
    return log


def names(recorded: Any) -> list[str]:
    return [event.name for event in recorded.events() if event.name.startswith("oxmoe")]


# Places of ranges


def test_functions_without_the_setting_are_the_extensions_own() -> None:
    """Without the setting a call costs nothing more."""
    program = """
import inspect
assert all(inspect.isbuiltin(getattr(_oxmoe, name)) for name in ("moe", "topk", "moe_tensors", "quantize_mxfp4"))
assert type(vars(_oxmoe.AllReduceMemory)["launch"]).__name__ == "method_descriptor"
"""
    for value in (None, "", "  "):
        run(program, value)


def test_every_function_of_the_extension_has_ranges() -> None:
    """A name that a module of the package has taken has ranges too, whatever the order of imports."""
    program = """
import importlib, inspect, pkgutil, sys
bare = [name for name, value in vars(_oxmoe).items() if inspect.isbuiltin(value)]
assert sorted(bare) == sorted(profiling.WITHOUT), bare
assert inspect.isfunction(_oxmoe.AllReduceMemory.launch)
for module in pkgutil.walk_packages(oxmoe.__path__, "oxmoe."):
    if not module.name.startswith(("oxmoe.sglang.", "oxmoe.__main__")):
        importlib.import_module(module.name)
taken = [
    f"{module}.{name}"
    for module, loaded in sys.modules.items() if module.startswith("oxmoe")
    for name, value in vars(loaded).items()
    if inspect.isbuiltin(value) and value.__module__ == "oxmoe._oxmoe" and value.__name__ not in profiling.WITHOUT
]
assert not taken, taken
assert inspect.signature(oxmoe.topk) == inspect.signature(_oxmoe.topk.__wrapped__) and oxmoe.topk.__doc__
"""
    run(program, "torch")


def test_functions_without_ranges_are_there() -> None:
    assert all(inspect.isbuiltin(getattr(_oxmoe, name)) for name in profiling.WITHOUT)


def test_torch_profiler_sees_calls_of_every_kind() -> None:
    program = """
from torch.profiler import ProfilerActivity, profile
ids = torch.zeros((3, 2), dtype=torch.int32)
counts = torch.zeros(4, dtype=torch.int32)
with profile(activities=[ProfilerActivity.CPU]) as recorded:
    oxmoe.moe(x, weights, router_logits=logits, top_k=2)
    oxmoe.moe(x, weights, torch.ones((3, 2)), ids)
    oxmoe.cutlass_fused_moe(x, ids, torch.ones((3, 2)), weights.w13, weights.w2, torch.bfloat16, [])
    oxmoe.moe_masked(torch.zeros((4, 6, 32)).bfloat16(), weights, counts)
    oxmoe.moe_contiguous(x, weights, counts)
    oxmoe.topk(logits, top_k=2)
    oxmoe.quantize.mxfp4(torch.zeros((6, 64)))
    torch.ops.oxmoe.topk(logits, 2)
print(*[event.name for event in recorded.events() if event.name.startswith("oxmoe.")], sep="\\n")
"""
    assert run(program, "torch").stdout.splitlines() == [
        *["oxmoe.moe bf16 M=3 E=4 k=2"] * 3,
        "oxmoe.moe_masked bf16 m=6 E=4",
        "oxmoe.moe_contiguous bf16 M=3 E=4",
        "oxmoe.topk router_logits=3x4 k=2",
        "oxmoe.quantize_mxfp4 x=6x64",
        "oxmoe.topk router_logits=3x4 k=2",
    ]


def test_compiled_programs_are_as_without_ranges() -> None:
    """Tracing records operators and no ranges. A compiled program's operators have ranges when they run."""
    program = """
from torch.fx.experimental.proxy_tensor import make_fx
from torch.profiler import ProfilerActivity, profile

def layer(x, logits):
    return oxmoe.moe(x, weights, router_logits=logits, top_k=2)

targets = [str(node.target) for node in make_fx(layer)(x, logits).graph.nodes if node.op == "call_function"]
assert "oxmoe.moe.default" in targets and not any("profiler" in target for target in targets), targets
compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
compiled(x, logits)
with profile(activities=[ProfilerActivity.CPU]) as recorded:
    assert torch.equal(compiled(x, logits), layer(x, logits))
found = [event.name for event in recorded.events() if event.name.startswith("oxmoe.")]
assert found == ["oxmoe.moe bf16 M=3 E=4 k=2"] * 2, found
"""
    run(program, "torch")


# Ranges end


def test_ranges_nest_and_end_with_an_error(setting: pytest.MonkeyPatch) -> None:
    setting.setenv(profiling.SETTING, "torch")
    topk = profiling.with_ranges("topk", _oxmoe.topk)
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        with record_function("oxmoe of the caller"):
            topk(torch.zeros((3, E)), K)
        with pytest.raises(ValueError, match="top_k"):
            topk(torch.zeros((3, E)), 9)
        topk(torch.zeros((5, E)), K)
    assert names(recorded) == [
        *("oxmoe of the caller", "oxmoe.topk router_logits=3x4 k=2", "oxmoe.topk router_logits=3x4 k=9"),
        "oxmoe.topk router_logits=5x4 k=2",
    ]
    parents = [event.cpu_parent and event.cpu_parent.name for event in recorded.events() if "oxmoe.t" in event.name]
    assert parents == ["oxmoe of the caller", None, None]


def test_nvtx_pushes_and_pops(pushed: list[str]) -> None:
    topk = profiling.with_ranges("topk", _oxmoe.topk)
    topk(torch.zeros((3, E)), K)
    with pytest.raises(ValueError, match="top_k"):
        topk(torch.zeros((3, E)), 9)
    with pytest.raises(TypeError, match="argument"):
        topk(torch.zeros((3, E)), K, K, K)
    with pytest.raises(TypeError, match="nothing"):
        topk(torch.zeros((3, E)), K, nothing=1)
    outer = profiling.with_ranges("outer", lambda x: topk(x, K))
    outer(torch.zeros((5, E)))
    assert pushed == [
        *("oxmoe.topk router_logits=3x4 k=2", "-", "oxmoe.topk router_logits=3x4 k=9", "-"),
        *("oxmoe.topk", "-") * 2,
        *("oxmoe.outer x=5x4", "oxmoe.topk router_logits=5x4 k=2", "-", "-"),
    ]


def test_both_profilers(setting: pytest.MonkeyPatch, pushed: list[str]) -> None:
    profiling.ranges.cache_clear()
    setting.setenv(profiling.SETTING, "torch, nvtx")
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        profiling.with_ranges("topk", _oxmoe.topk)(torch.zeros((3, E)), K)
    expected = "oxmoe.topk router_logits=3x4 k=2"
    assert names(recorded) == [expected] and pushed[-2:] == [expected, "-"]


def test_traced_calls_have_no_range(pushed: list[str]) -> None:
    """A dispatch mode would record the range as a part of the program."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    call = profiling.with_ranges("anything", lambda: "called")
    with FakeTensorMode():
        assert call() == "called"
    assert pushed == []
    assert call() == "called" and pushed == ["oxmoe.anything", "-"]


# Names of ranges


def test_labels_of_layers() -> None:
    weights = ExpertWeights.bf16(torch.zeros((E, 2 * WIDTH, H)).bfloat16(), torch.zeros((E, H, WIDTH)).bfloat16())
    x, ids = torch.zeros((64, H)), torch.zeros((64, 8))
    of_tensors = {"x": x, "w13": torch.zeros((E, 2, 2)), "topk_ids": ids}
    for function, given, expected in (
        ("moe", {"x": x, "weights": weights, "topk_ids": ids}, "oxmoe.moe bf16 M=64 E=4 k=8"),
        ("moe", {"x": x, "weights": weights, "top_k": 3}, "oxmoe.moe bf16 M=64 E=4 k=3"),
        ("moe_tensors", of_tensors, "oxmoe.moe f32 M=64 E=4 k=8"),
        ("moe_tensors", {**of_tensors, "format": "fp8_block"}, "oxmoe.moe fp8_block M=64 E=4 k=8"),
        ("moe_masked", {"x": torch.zeros((E, 6, H)), "weights": weights}, "oxmoe.moe_masked bf16 m=6 E=4"),
    ):
        assert profiling.label(function, given) == expected


def test_labels_of_allreduces() -> None:
    operands = SimpleNamespace(input=torch.zeros((7, H)))
    for function in ("launch", "allreduce_finish"):
        assert profiling.label(function, {"operands": operands}) == "oxmoe.allreduce_fusion input=7x32"


@pytest.mark.parametrize("given", [{"x": 3, "weights": None}, {"operands": None}, {"x": torch.zeros(()), "w13": 1}])
def test_wrong_arguments_are_left_to_the_function(given: dict[str, Any]) -> None:
    assert profiling.label("moe", given) == "oxmoe.moe"


# Wrong settings


def test_an_unknown_word_is_an_error_of_the_first_call() -> None:
    program = "oxmoe.topk(logits, 2)"
    error = run(program, "nvtx,Torch", good=False).stderr.splitlines()[-1]
    assert error == "ValueError: OXMOE_PROFILE: unknown 'Torch'; choices: nvtx, torch or nvtx,torch"


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("torch", "OXMOE_PROFILE=nvtx: ranges are made by torch, which is not installed"),
        ("nvtx", "OXMOE_PROFILE: nvtx: NVTX functions not installed"),
    ],
)
def test_what_is_missing_is_named(broken: str, message: str, setting: pytest.MonkeyPatch) -> None:
    def push(text: str) -> None:
        raise RuntimeError("NVTX functions not installed. Are you sure you have a CUDA build?")

    if broken == "torch":
        setting.setattr(profiling, "HAS_TORCH", False)
    setting.setattr(torch.cuda.nvtx, "range_push", push)
    setting.setenv(profiling.SETTING, "nvtx")
    with pytest.raises(RuntimeError, match=message):
        profiling.with_ranges("topk", _oxmoe.topk)(torch.zeros((3, E)), K)
