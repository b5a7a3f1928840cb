"""Blocks of SGLang's models that run their experts without a MoE layer are refused while the model is built."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import nn

from oxmoe.sglang import calls, layers, setting, sources

pytest.importorskip("sglang")

from sglang_server import ADAPTER, NEW, VERSION, FusedMoE, installed, server

SRT = sources.folder() / "srt"
MODELS = SRT / "models"
# SGLang's functions that run experts.
FUNCTIONS = {"fused_moe", "fused_experts", "fused_experts_impl", "inplace_fused_experts", "outplace_fused_experts"}
FUNCTIONS |= {"moe_tp_forward", "fused_marlin_moe"}
# Classes that call such a function, although the MoE layers of their models run on oxmoe.
OTHERS = {
    ("models.beam", "BeamMoE"): "behind SGLang's own Triton runner alone",
    ("models.dots3_common.dots_omni_vision", "MoESwiGLUFFN"): "a tower of images",
    ("models.dots3_common.dots_omni_vision", "MoESwiGLUFFNFP8"): "a tower of images",
}
THERE = {place: name for place, name in layers.BLOCKS.items() if (SRT / f"{place.replace('.', '/')}.py").exists()}


def runs_experts(owner: ast.ClassDef) -> bool:
    """Whether the class names a function that runs experts, or holds its experts in a list."""
    names = [node for node in ast.walk(owner) if isinstance(node, ast.Name)]
    own = {node.id for node in names if isinstance(node.ctx, ast.Store)}
    if (FUNCTIONS - own) & {node.id for node in names}:
        return True
    for node in ast.walk(owner):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            made = getattr(node.value.func, "attr", getattr(node.value.func, "id", ""))
            named = any(isinstance(target, ast.Attribute) and target.attr == "experts" for target in node.targets)
            if named and made == "ModuleList":
                return True
    return False


def has_own_configuration(owner: ast.ClassDef) -> bool:
    """Whether the class is a module that makes a MoeRunnerConfig, as MoE layers do."""
    names = {node.id for node in ast.walk(owner) if isinstance(node, ast.Name)}
    return "MoeRunnerConfig" in names and any("Module" in ast.unparse(base) for base in owner.bases)


def of_file(file: Path) -> Iterator[ast.ClassDef]:
    tree = ast.parse(file.read_text(encoding="utf-8-sig"))
    yield from (node for node in tree.body if isinstance(node, ast.ClassDef))


def place_of(file: Path) -> str:
    return ".".join(file.relative_to(SRT).with_suffix("").parts)


def test_the_blocks_of_this_release_are_known() -> None:
    """A block that this test finds in a new release belongs to `layers.BLOCKS`."""
    found = {
        (place_of(file), owner.name) for file in MODELS.rglob("*.py") for owner in of_file(file) if runs_experts(owner)
    }
    # Models have such classes among SGLang's layers, too.
    for file in (SRT / "layers").rglob("*.py"):
        found |= {(place_of(file), owner.name) for owner in of_file(file) if has_own_configuration(owner)}
    found.discard(("layers.moe.fused_moe_triton.layer", "FusedMoE"))
    assert found - OTHERS.keys() == set(THERE.items())


def test_the_blocks_that_scale_are_known() -> None:
    """A block that this test finds in a new release belongs to `calls.SCALING`."""
    found = set()
    for file in MODELS.rglob("*.py"):
        for owner in of_file(file):
            for node in ast.walk(owner):
                if not isinstance(node, ast.If) or "_is_cuda" not in ast.unparse(node.test):
                    continue
                products = [
                    line for line in node.body if isinstance(line, ast.AugAssign) and isinstance(line.op, ast.Mult)
                ]
                if any(getattr(line.value, "attr", "") == "routed_scaling_factor" for line in products):
                    found.add((file.stem, owner.name))
    assert found and found <= set(calls.SCALING.items())


@pytest.mark.parametrize("place", THERE)
def test_a_block_is_refused(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    installed()
    monkeypatch.setenv(setting.SETTING, "moe")
    layers.watch(setting.read(VERSION), ADAPTER, lambda: None)
    try:
        with server():
            kind = getattr(importlib.import_module(f"sglang.srt.{place}"), THERE[place])
            block = kind.__new__(kind)
            nn.Module.__init__(block)
            _, _, short = place.partition(".")
            why = "builds Mixtral without MoE layers" if short == "mixtral_quant" else f"{short}.{THERE[place]} calls"
            with pytest.raises(RuntimeError, match=f"SGLang('s)? {why}.*; .* without moe"):
                nn.ModuleList([block])
    finally:
        layers.unwatch()


def test_beam_is_told_what_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bf16 experts are a MoE layer, with a method of the model's."""
    try:
        from sglang.srt.models.beam import BeamUnquantizedFusedMoEMethod
    except ImportError:
        pytest.skip("this SGLang has no Beam")
    installed()
    monkeypatch.setenv(setting.SETTING, "moe")
    layers.watch(setting.read(VERSION), ADAPTER, lambda: None)
    try:
        with server():
            module = FusedMoE(4, 128, 128, 0, 2, quant_method=BeamUnquantizedFusedMoEMethod())
            with pytest.raises(
                RuntimeError, match=r"SGLang chose its own kernels for it; .*Beam.*; serve it without moe"
            ):
                nn.ModuleList([module])
    finally:
        layers.unwatch()


@pytest.mark.skipif(NEW, reason="in this SGLang oxmoe has no fused functions")
def test_a_variable_that_leaves_out_fused_functions_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    installed()
    monkeypatch.setenv(setting.SETTING, "moe")
    monkeypatch.setenv("SGLANG_CI_DISABLE_MOE_FUSED_FUNC", "1")
    layers.watch(setting.read(VERSION), ADAPTER, lambda: None)
    try:
        with server("deep_gemm"):
            module = FusedMoE(4, 128, 128, 0, 2)
            with pytest.raises(RuntimeError, match=r"SGLANG_CI_DISABLE_MOE_FUSED_FUNC=1 leaves out .*; unset it"):
                nn.ModuleList([module])
    finally:
        layers.unwatch()
