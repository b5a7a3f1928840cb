"""OXMOE_SGLANG in the real SGLang package: what it registers, what it leaves alone, and its errors if it cannot
register."""

from __future__ import annotations

import argparse
import ast
import inspect
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import forked
import oxmoe.sglang
from oxmoe import profiling
from oxmoe.sglang import capabilities, layers, setting, sources

pytest.importorskip("sglang")

from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.quantization import get_quantization_config
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.plugins import load_plugins_by_group
from sglang.srt.server_args import ServerArgs

from sglang_server import (
    ADAPTER,
    NEW,
    SHAPE,
    VERSION,
    attributes,
    fused_moe,
    installed,
    only_cores,
    operands,
    server,
)

MOE = capabilities.swaps()["moe"]
SOURCES = Path(oxmoe.sglang.__file__).parent

# Every registry of SGLang whose contents `install` may change, by the last part of its name. Modules that import a
# registry show it, too.
REGISTRIES = (
    {
        "_CUSTOM_RUNNER_CORE_FACTORIES",
        "_REGISTERED_MOE_RUNNER_BACKEND_NAMES",
        "QUANTIZATION_METHODS",
        "MOE_RUNNER_BACKEND_CHOICES",
        "QUANTIZATION_CHOICES",
    }
    if NEW
    else {
        "_fused_funcs",
        "QUANTIZATION_METHODS",
        "QUANTIZATION_CHOICES",
        *({"SPECULATIVE_DRAFT_MODEL_QUANTIZATION_CHOICES"} & sources.names("srt.server_args")),
    }
)


@pytest.fixture(scope="module")
def changes() -> dict[str, set[str]]:
    return installed()


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes this process one in which nothing was installed."""
    monkeypatch.setattr(oxmoe.sglang, "_active", {})


def process(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a process of its own that imports SGLang as a server does."""
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", **environment}
    return forked.run("-c", code, env=env, packages=forked.SGLANG)


# Registries, and nothing else


def test_only_registries_are_touched(changes: dict[str, set[str]]) -> None:
    assert changes["added"] == set()
    assert changes["replaced"] == set()
    filled = {name.rpartition(".")[2] for name in changes["filled"]}
    # Choices reach the parser's annotations through other modules' names of the same list.
    assert {name for name in filled if name.isupper() or name.startswith("_")} == REGISTRIES


def assigned(tree: ast.AST) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            yield from node.targets
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            yield node.target
        elif isinstance(node, ast.Delete):
            yield from node.targets


# Attributes of oxmoe's own functions, and the memory of parameters that a method of oxmoe's made.
OURS = {"fused_experts.oxmoe", "prototype.__signature__", "parameter.data"}


@pytest.mark.parametrize("path", sorted(SOURCES.glob("*.py")), ids=lambda path: path.name)
def test_sources_assign_to_nothing_of_sglang(path: Path) -> None:
    """Sources set attributes on self and on oxmoe's own function alone; they have no setattr, delattr, HookRegistry or
    mock."""
    tree = ast.parse(path.read_text())
    for target in assigned(tree):
        if isinstance(target, ast.Attribute):
            assert ast.unparse(target).startswith("self.") or ast.unparse(target) in OURS
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    names |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    names |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert not names & {"setattr", "delattr", "HookRegistry", "register_oot_forward", "__dict__", "patch", "vars"}


@pytest.mark.parametrize(
    "module",
    [
        "setting",
        "sources",
        "capabilities",
        "experts",
        "collective",
        "platform",
        "layers",
        "server",
        "eplb",
        "calls",
        "symmetric",
        "updates",
        "__init__",
    ],
)
def test_what_runs_before_sglang_imports_none_of_it(module: str) -> None:
    for node in ast.parse((SOURCES / f"{module}.py").read_text()).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            assert "sglang.srt" not in ast.unparse(node)


def test_swaps_are_reported(changes: dict[str, set[str]]) -> None:
    swaps = oxmoe.sglang.active()
    assert [(swap.name, swap.sglang_version) for swap in swaps] == [(f"moe={part}", VERSION) for part in MOE]
    assert all(part in swap.effect for part, swap in zip(MOE, swaps, strict=True))


def test_second_install_changes_nothing(changes: dict[str, set[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(setting.SETTING, "moe")
    before = attributes()
    oxmoe.sglang.install()
    assert attributes() == before


@pytest.mark.parametrize("part", MOE)
def test_a_taken_place_is_an_error(
    changes: dict[str, set[str]], fresh: None, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(setting.SETTING, f"moe={part}")
    with pytest.raises(RuntimeError, match=rf"OXMOE_SGLANG=moe={part}: moe={part} in SGLang .* already"):
        oxmoe.sglang.install()
    assert oxmoe.sglang.active() == ()


def test_a_start_says_nothing_of_what_could_be(
    changes: dict[str, set[str]], fresh: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The log names what is used with a model's first MoE layer (tests/sglang/test_sglang_calls.py)."""
    monkeypatch.setenv(setting.SETTING, "moe=oxmoe")
    monkeypatch.setattr(ADAPTER, "SWAPS", {"moe=oxmoe": lambda: "what"})
    with caplog.at_level(logging.INFO, logger="oxmoe.sglang"):
        oxmoe.sglang.install()
        torch.nn.ModuleList([LinearBase(8, 8), LinearBase(8, 8)])
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("capability", "initialized", "words"),
    [((9, 0), True, None), ((10, 0), False, None), ((10, 0), True, "sm_100"), ((12, 1), True, "sm_121")],
)
def test_the_log_says_where_kernels_have_not_run(
    capability: tuple[int, int],
    initialized: bool,
    words: str | None,
    changes: dict[str, set[str]],
    fresh: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The log says so with a model's first layer: the process has its GPU by then, or runs without one."""
    monkeypatch.setenv(setting.SETTING, "moe=oxmoe")
    monkeypatch.setattr(ADAPTER, "SWAPS", {"moe=oxmoe": lambda: "what"})
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialized)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A GPU")
    with caplog.at_level(logging.INFO, logger="oxmoe.sglang"):
        oxmoe.sglang.install()
        taken_over = len(caplog.messages)
        torch.nn.ModuleList([LinearBase(8, 8), LinearBase(8, 8)])
    remark = f"oxmoe: A GPU: oxmoe's kernels are compiled for {words} and have not run there: Hopper (sm_90) alone"
    said = caplog.messages[taken_over:]
    assert len(said) == (words is not None) and all(message.startswith(remark) for message in said)


# The setting


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        (" , ", []),
        ("moe", [("moe", MOE)]),
        ("allreduce, moe", [("allreduce", ()), ("moe", MOE)]),
        ("moe=deep_gemm+oxmoe,allreduce", [("moe", ("deep_gemm", "oxmoe")), ("allreduce", ())]),
        ("moe = oxmoe + oxmoe", [("moe", ("oxmoe",))]),
    ],
)
def test_setting(text: str, expected: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(setting.SETTING, text)
    assert [(swap.name, swap.parts) for swap in setting.read(VERSION)] == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("moe,attention", r"unknown 'attention'; SGLang \S+ can have: moe\[=oxmoe\+.*\], allreduce"),
        ("moe=triton", r"moe has no part 'triton'; SGLang"),
        ("moe=", r"moe has no part ''"),
        ("allreduce=nccl", r"allreduce has no part 'nccl'"),
        ("moe=oxmoe,moe", r"moe is there twice"),
    ],
)
def test_bad_settings(fresh: None, text: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(setting.SETTING, text)
    with pytest.raises(ValueError, match=message):
        oxmoe.sglang.install()
    assert oxmoe.sglang.active() == ()


def test_unknown_version(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(setting.SETTING, "moe")
    monkeypatch.setattr(oxmoe.sglang, "sglang_version", lambda: "0.4.99")
    with pytest.raises(RuntimeError, match=r"SGLang 0\.4\.99 is not served; served are 0\.5\.12\.post1 to 0\.5\.23"):
        oxmoe.sglang.install()


def test_off_by_default() -> None:
    code = "import sys, oxmoe.sglang as s; s.plugin(); assert not s.active(); assert 'sglang.srt' not in sys.modules"
    assert process(code, OXMOE_SGLANG="").returncode == 0


def test_removed_setting_leaves_sglang_as_it_is() -> None:
    code = (
        "from sglang.srt.plugins import load_plugins; load_plugins(); import torch;"
        "from sglang.srt.layers.quantization import QUANTIZATION_METHODS as q; assert 'oxmoe' not in q;"
        "from torch.nn.modules import module as m; assert not m._global_module_registration_hooks"
    )
    result = process(code, OXMOE_SGLANG="")
    assert result.returncode == 0, result.stderr


def test_entry_points() -> None:
    assert load_plugins_by_group("sglang.srt.plugins")["oxmoe"][0] is oxmoe.sglang.plugin
    assert load_plugins_by_group("sglang.srt.platforms")["oxmoe"][0] is oxmoe.sglang.platform.activate


@pytest.mark.parametrize("text", ["moe", "moe=nothing"])
def test_a_server_starts_with_the_swaps_or_not_at_all(text: str) -> None:
    """SGLang's own load_plugins goes on after a plugin's exception; oxmoe's plugin ends the process with one line."""
    code = (
        "from sglang.srt.plugins import load_plugins; load_plugins(); import oxmoe.sglang as s;"
        "from sglang.srt.platforms import current_platform as p; assert not p.is_out_of_tree();"
        "print([swap.name for swap in s.active()])"
    )
    result = process(code, OXMOE_SGLANG=text)
    if text == "moe":
        assert result.stdout.strip().endswith(str([f"moe={part}" for part in MOE])), result.stderr
    else:
        assert result.returncode == 1
        assert result.stderr.strip().endswith("OXMOE_SGLANG: moe has no part 'nothing'; " + setting._choices(VERSION))


def test_command_line(changes: dict[str, set[str]]) -> None:
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    arguments = ["--model-path", "m", "--quantization", "oxmoe"] + ["--moe-runner-backend", "oxmoe"] * NEW
    args = parser.parse_args(arguments)
    assert args.quantization == "oxmoe"
    assert args.moe_runner_backend == ("oxmoe" if NEW else "auto")


def test_an_unknown_profiler_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    profiling.ranges.cache_clear()
    monkeypatch.setenv(setting.SETTING, "moe")
    monkeypatch.setenv(profiling.SETTING, "nvt")
    with pytest.raises(SystemExit, match="oxmoe: OXMOE_PROFILE: unknown 'nvt'"):
        oxmoe.sglang.plugin()


def test_other_layers_stay(changes: dict[str, set[str]]) -> None:
    config = get_quantization_config("oxmoe")()
    assert type(config.get_quant_method(LinearBase(8, 8), "")) is UnquantizedLinearMethod
    assert config.get_quant_method(torch.nn.Identity(), "") is None


@pytest.mark.parametrize("name", sorted(oxmoe.__all__))
def test_public_callables_have_signatures(name: str) -> None:
    """SGLang probes callables with inspect.signature, and an error of it ends SGLang's import."""
    value = getattr(oxmoe, name)
    if callable(value) and not isinstance(value, type):
        inspect.signature(value)


# Layers that do not run on oxmoe


@pytest.fixture
def watched(changes: dict[str, set[str]], monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv(setting.SETTING, "moe")
    layers.watch(setting.read(VERSION), ADAPTER, lambda: None)
    with server():
        yield None
    layers.unwatch()


def test_our_layer_becomes_part_of_a_model(watched: None, rng: torch.Generator) -> None:
    torch.nn.ModuleList([fused_moe(operands(SHAPE, 1, "cpu", rng)[0])])


@pytest.mark.parametrize("backend", ["triton_kernel", "deep_gemm"])
def test_layers_of_sglangs_own_runners_become_part_of_a_model(
    watched: None, backend: str, rng: torch.Generator
) -> None:
    with server(backend):
        torch.nn.ModuleList([fused_moe(operands(SHAPE, 1, "cpu", rng)[0], quantized=False)])


def test_a_layer_on_other_kernels_stops_the_load(watched: None, rng: torch.Generator) -> None:
    module = fused_moe(operands(SHAPE, 1, "cpu", rng)[0], quantized=False)
    message = (
        r"layer 0 \(FusedMoE, UnquantizedFusedMoEMethod, .*triton\) does not run on oxmoe: .* --quantization oxmoe"
    )
    with pytest.raises(RuntimeError, match=message):
        torch.nn.ModuleList([module])


@only_cores
def test_a_fused_function_before_our_core_stops_the_load(watched: None, rng: torch.Generator) -> None:
    with server("deep_gemm"):
        module = fused_moe(operands(SHAPE, 1, "cpu", rng)[0], quantized=False)
    runner = module.quant_method.runner
    stub = SimpleNamespace(runner_core=runner.runner_core, fused_func=fused_moe, runner_backend=runner.runner_backend)
    module.quant_method.runner = stub
    with pytest.raises(RuntimeError, match=r"fused_moe goes before oxmoe's core"):
        torch.nn.ModuleList([module])


def test_a_format_without_kernels_stops_the_load(watched: None, rng: torch.Generator) -> None:
    module = fused_moe(operands(SHAPE, 1, "cpu", rng)[0])
    module.quant_method = torch.nn.Identity()
    with pytest.raises(RuntimeError, match="oxmoe has no kernels for its format; serve this model without moe"):
        torch.nn.ModuleList([module])


def test_lora_stops_the_load(watched: None, monkeypatch: pytest.MonkeyPatch) -> None:
    class FusedMoEWithLoRA(torch.nn.Module):
        pass

    monkeypatch.setitem(sys.modules, "sglang.srt.lora.layers", SimpleNamespace(FusedMoEWithLoRA=FusedMoEWithLoRA))
    with pytest.raises(RuntimeError, match="LoRA on MoE layers is not served"):
        torch.nn.ModuleList([FusedMoEWithLoRA()])


@pytest.mark.parametrize(
    ("asked", "flashinfer", "message"),
    [(False, True, "fusion, which is off; start with --"), (True, False, "can import flashinfer; install")],
)
def test_allreduce_without_its_fusion_stops_the_load(
    asked: bool, flashinfer: bool, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sglang.srt.utils

    adapter = SimpleNamespace(allreduce_fusion=lambda: asked, FUSION_FLAG=ADAPTER.FUSION_FLAG)
    monkeypatch.setattr(sglang.srt.utils, "is_flashinfer_available", lambda: flashinfer)
    layers.watch((setting.Requested("allreduce", ()),), adapter, lambda: None)  # type: ignore[arg-type]
    try:
        with pytest.raises(RuntimeError, match=message):
            torch.nn.ModuleList([LinearBase(8, 8)])
    finally:
        layers.unwatch()


@pytest.mark.parametrize(("asked", "said"), [(None, "one rank has nothing to reduce"), (True, "runs on oxmoe")])
def test_allreduce_alone_is_one_line(
    asked: bool | None, said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import sglang.srt.utils

    adapter = SimpleNamespace(allreduce_fusion=lambda: asked, FUSION_FLAG=ADAPTER.FUSION_FLAG)
    monkeypatch.setattr(sglang.srt.utils, "is_flashinfer_available", lambda: True)
    layers.watch((setting.Requested("allreduce", ()),), adapter, lambda: None)  # type: ignore[arg-type]
    try:
        with caplog.at_level(logging.INFO, logger="oxmoe.sglang"):
            torch.nn.ModuleList([LinearBase(8, 8), LinearBase(8, 8)])
    finally:
        layers.unwatch()
    (line,) = caplog.messages
    assert line.startswith("oxmoe ") and said in line


def test_servers_fusion_setting() -> None:
    with server():
        assert ADAPTER.allreduce_fusion() is None, "one rank has nothing to reduce"
