"""`help()` shows what the stub of the extension module says, and names nothing that does not exist."""

from __future__ import annotations

import ast
import importlib
import inspect
import pydoc
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import oxmoe
from oxmoe import _oxmoe

STUB = Path(__file__).parents[2] / "python" / "oxmoe" / "_oxmoe.pyi"


def documented(node: ast.Module | ast.ClassDef, prefix: str = "") -> Iterator[tuple[str, str | None]]:
    """Yields (name, docstring) of every public function, class, method and property of the stub."""
    for item in node.body:
        if isinstance(item, (ast.FunctionDef, ast.ClassDef)) and not item.name.startswith("_"):
            yield prefix + item.name, ast.get_docstring(item)
            if isinstance(item, ast.ClassDef):
                yield from documented(item, f"{item.name}.")


def public(owner: Any, prefix: str = "") -> Iterator[str]:
    """Yields the names of the module that `documented` would yield of the stub."""
    for name, value in vars(owner).items():
        if not name.startswith("_"):
            yield prefix + name
            if inspect.isclass(value):
                yield from public(value, f"{name}.")


TREE = ast.parse(STUB.read_text(encoding="utf-8"))
DOCUMENTED = dict(documented(TREE))


def test_stub_and_module_have_the_same_names() -> None:
    assert set(public(_oxmoe)) == set(DOCUMENTED)


def test_docstring_of_the_module() -> None:
    assert _oxmoe.__doc__ == ast.get_docstring(TREE)


@pytest.mark.parametrize("name", sorted(DOCUMENTED))
def test_docstring(name: str) -> None:
    found: Any = _oxmoe
    for part in name.split("."):
        found = inspect.getattr_static(found, part)
    found = found.__func__ if isinstance(found, staticmethod) else found
    assert DOCUMENTED[name], f"{STUB.name} says nothing of {name}"
    assert found.__doc__ == DOCUMENTED[name]


def test_a_stub_without_comments_of_its_own() -> None:
    """A parameter is described in the docstring, which help() shows. help() would not show a comment in the stub."""
    assert not [line for line in STUB.read_text(encoding="utf-8").splitlines() if re.search(r"(^|\s)# ", line)]


@pytest.mark.parametrize("name", sorted(DOCUMENTED))
def test_names_in_docstrings_exist(name: str) -> None:
    for path in re.findall(r"oxmoe(?:\.[A-Za-z_]\w*)+", DOCUMENTED[name] or ""):
        module, *rest = path.split(".")
        found: Any = importlib.import_module(module)
        for part in rest:
            if not hasattr(found, part):
                found = importlib.import_module(f"{found.__name__}.{part}")
            else:
                found = getattr(found, part)


def test_help_names_no_private_function() -> None:
    assert "nvfp4_experts" not in pydoc.render_doc(oxmoe.ExpertWeights)
    with pytest.raises(TypeError, match=r"nvfp4\(\) missing 4 required positional arguments") as raised:
        oxmoe.ExpertWeights.nvfp4(1, 2)  # type: ignore[call-arg]
    assert "nvfp4_experts" not in str(raised.value)
