"""Blocks of SGLang's models that run their experts without a MoE layer are refused while the model is built."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import nn

from oxmoe.sglang import layers, setting, sources

pytest.importorskip("sglang")

from sglang_server import ADAPTER, VERSION, installed, server

MODELS = sources.folder() / "srt" / "models"
# SGLang's functions that run experts.
FUNCTIONS = {"fused_moe", "fused_experts", "fused_experts_impl", "inplace_fused_experts", "outplace_fused_experts"}
FUNCTIONS |= {"moe_tp_forward", "fused_marlin_moe"}
# Classes that call such a function, although the MoE layers of their models run on oxmoe.
OTHERS = {
    ("beam", "BeamMoE"): "behind SGLang's own Triton runner alone",
    ("dots3_common.dots_omni_vision", "MoESwiGLUFFN"): "a tower of images",
    ("dots3_common.dots_omni_vision", "MoESwiGLUFFNFP8"): "a tower of images",
}
THERE = {place: name for place, name in layers.BLOCKS.items() if (MODELS / f"{place.replace('.', '/')}.py").exists()}


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


def classes(file: Path) -> Iterator[str]:
    tree = ast.parse(file.read_text(encoding="utf-8-sig"))
    yield from (node.name for node in tree.body if isinstance(node, ast.ClassDef) and runs_experts(node))


def test_the_blocks_of_this_release_are_known() -> None:
    """A block that this test finds in a new release belongs to `layers.BLOCKS`."""
    files = {file: ".".join(file.relative_to(MODELS).with_suffix("").parts) for file in MODELS.rglob("*.py")}
    found = {(place, name) for file, place in files.items() for name in classes(file)}
    assert found - OTHERS.keys() == set(THERE.items())


@pytest.mark.parametrize("place", THERE)
def test_a_block_is_refused(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    installed()
    monkeypatch.setenv(setting.SETTING, "moe")
    layers.watch(setting.read(VERSION), ADAPTER, lambda: None)
    try:
        with server():
            kind = getattr(importlib.import_module(f"sglang.srt.models.{place}"), THERE[place])
            block = kind.__new__(kind)
            nn.Module.__init__(block)
            why = "builds Mixtral without MoE layers" if place == "mixtral_quant" else f"{place}.{THERE[place]} calls"
            with pytest.raises(RuntimeError, match=f"SGLang('s)? {why}.*; .* without moe"):
                nn.ModuleList([block])
    finally:
        layers.unwatch()
