"""docs/flashinfer.md has a row for every public name of flashinfer 0.7.2, and the names of oxmoe that it gives
exist."""

from __future__ import annotations

import ast
import fnmatch
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

import oxmoe

PAGE = (Path(__file__).parents[2] / "docs" / "flashinfer.md").read_text()
MODULES = ("fused_moe", "gemm", "comm", "quantization")


def patterns(column: int) -> list[str]:
    rows = [line.split(" | ") for line in PAGE.splitlines() if line.startswith("| `")]
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row[column])]


def public_names(module: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
    return {name for name in names if not name.startswith("_")}


@pytest.mark.parametrize("module", MODULES)
def test_every_name_has_a_row(module: str) -> None:
    spec = find_spec("flashinfer")
    if spec is None or spec.origin is None:
        pytest.skip("flashinfer with its sources is not installed")
    missing = sorted(
        name
        for name in public_names(Path(spec.origin).parent / module / "__init__.py")
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns(0))
    )
    assert not missing


def test_our_calls_have_a_row() -> None:
    """The page names every public call that oxmoe took over from flashinfer, or that prepares its weights."""
    modules = ("oxmoe.peers.flashinfer_", "oxmoe.allreduce.", "oxmoe.dense")
    ours = {name for name in oxmoe.__all__ if getattr(getattr(oxmoe, name), "__module__", "").startswith(modules)}
    assert {"cutlass_fused_moe", "allreduce_fusion", "mm_mxfp8", "TRTLLMAllReduceFusionWorkspace"} <= ours
    # These are SGLang's calls, which docs/api.md has.
    ours -= {"fused_experts_flashinfer_mxfp4", "mxfp8_linear"}
    named = set(re.findall(r"[A-Za-z_0-9]+", " ".join((*patterns(0), *patterns(1)))))
    assert sorted(ours - named) == []


def test_our_names_exist() -> None:
    ours = [name for name in patterns(1) if name.startswith("oxmoe.")]
    assert len(ours) > 10
    for name in ours:
        value: object = oxmoe
        for part in name.removeprefix("oxmoe.").split("."):
            value = getattr(value, part)
