"""Reads from their sources what modules of the installed SGLang define.

It imports nothing, for two reasons. The all-reduce operators must be defined while SGLang itself is being imported.
And a question must not load a module that registers kernels of its own.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Iterator
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef


@functools.cache
def folder() -> Path:
    """Returns the folder of the package sglang. Raises ModuleNotFoundError if there is none."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("sglang is not installed")
    return Path(next(iter(spec.submodule_search_locations)))


@functools.cache
def _statements(module: str) -> tuple[ast.stmt, ...] | None:
    """Returns the statements of a module, named as in "srt.layers.moe.utils". It is None if there is no such module."""
    path = folder().joinpath(*module.split("."))
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if file.exists():
            return tuple(_flat(ast.parse(file.read_text(encoding="utf-8")).body))
    return None


def _flat(statements: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yields statements, and those inside `if`, `try` and `with`, which run at the same level."""
    for statement in statements:
        yield statement
        for part in ("body", "orelse", "finalbody"):
            if isinstance(statement, ast.If | ast.Try | ast.With):
                yield from _flat(getattr(statement, part, []))
        if isinstance(statement, ast.Try):
            for handler in statement.handlers:
                yield from _flat(handler.body)


def _bound(statement: ast.stmt) -> Iterator[str]:
    if isinstance(statement, Function | ast.ClassDef):
        yield statement.name
    elif isinstance(statement, ast.Import | ast.ImportFrom):
        yield from (alias.asname or alias.name for alias in statement.names)
    elif isinstance(statement, ast.Assign):
        yield from (target.id for target in statement.targets if isinstance(target, ast.Name))
    elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        yield statement.target.id


@functools.cache
def names(module: str) -> frozenset[str]:
    """Returns what a module defines or imports. It is empty if there is no such module."""
    return frozenset(name for statement in _statements(module) or () for name in _bound(statement))


def _class(module: str, name: str) -> ast.ClassDef | None:
    found = (node for node in _statements(module) or () if isinstance(node, ast.ClassDef) and node.name == name)
    return next(found, None)


@functools.cache
def members(module: str, name: str) -> frozenset[str]:
    """Returns the methods, fields and constants in a class's own body, and the attributes that its methods set."""
    owner = _class(module, name)
    if owner is None:
        return frozenset()
    own = {bound for statement in _flat(owner.body) for bound in _bound(statement)}
    targets = (node for node in ast.walk(owner) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store))
    return frozenset(own | {node.attr for node in targets if getattr(node.value, "id", "") == "self"})


@functools.cache
def function(module: str, name: str) -> Function | None:
    """Returns a function of a module."""
    found = (node for node in _statements(module) or () if isinstance(node, Function) and node.name == name)
    return next(found, None)


@functools.cache
def assigned(module: str, method: str, attribute: str) -> tuple[ast.expr, ...]:
    """Returns what methods of this name, in all classes of a module, assign to an attribute of their object."""
    owners = [statement for statement in _statements(module) or () if isinstance(statement, ast.ClassDef)]
    methods = [part for owner in owners for part in owner.body if isinstance(part, Function) and part.name == method]
    assignments = [node for part in methods for node in ast.walk(part) if isinstance(node, ast.Assign)]
    return tuple(
        node.value for node in assignments for target in node.targets if getattr(target, "attr", "") == attribute
    )


@functools.cache
def mentions(module: str, text: str) -> bool:
    """Whether the code of a module has an identifier, attribute or string with exactly this text."""
    for statement in _statements(module) or ():
        for node in ast.walk(statement):
            if text in (getattr(node, field, None) for field in ("id", "attr", "arg", "name", "value")):
                return True
    return False


@functools.cache
def constants(module: str, name: str) -> frozenset[str]:
    """Returns the texts that a class has as constants, which are the values of an enum."""
    owner = _class(module, name)
    values = (statement.value for statement in owner.body if isinstance(statement, ast.Assign)) if owner else ()
    return frozenset(value.value for value in values if isinstance(value, ast.Constant) and type(value.value) is str)


def fields_of_classes(package: str) -> Iterator[frozenset[str]]:
    """Returns the members of every class in a package's modules. It is empty if there is no such package."""
    for file in sorted(folder().joinpath(*package.split(".")).glob("*.py")):
        module = f"{package}.{file.stem}"
        for node in _statements(module) or ():
            if isinstance(node, ast.ClassDef):
                yield members(module, node.name)
