"""Reads from the sources of SGLang's models under which name a class builds its layers, without building it.

A model hands each part a `prefix`, which it makes of its own. So the name follows from the calls in the constructors.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Made = dict[str, str | None]  # variable of a function -> its text or the name of its class, as far as they are known


_Class = tuple[str, ast.ClassDef]  # module, class


@dataclass(frozen=True)
class _Function:
    owner: _Class
    node: ast.FunctionDef
    of: _Class  # the class of `self`


class Models:
    """The classes in a folder of SGLang's models."""

    def __init__(self, folder: Path) -> None:
        self.classes: dict[str, list[tuple[str, ast.ClassDef]]] = {}
        self.entries: dict[str, str] = {}  # architecture -> module
        for path in sorted(folder.glob("*.py")):
            for node in ast.parse(path.read_text(encoding="utf-8-sig")).body:
                if isinstance(node, ast.ClassDef):
                    self.classes.setdefault(node.name, []).append((path.stem, node))
                elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "EntryClass":
                    listed = node.value.elts if isinstance(node.value, ast.List | ast.Tuple) else [node.value]
                    self.entries.update(dict.fromkeys(map(ast.unparse, listed), path.stem))

    def roots(self, architecture: str) -> set[str]:
        """Returns what comes before ".layers" in the names of an architecture's layers."""
        of = self._class(architecture, self.entries[architecture])
        found = self._function(of, "__init__", of)
        return set() if found is None else set(self._layers(found, {"prefix": ""}, 0))

    def _class(self, name: str, module: str) -> _Class:
        found = self.classes[name]
        return next((one for one in found if one[0] == module), found[0])

    def _bases(self, owner: _Class) -> Iterator[_Class]:
        names = (ast.unparse(base).partition("[")[0] for base in owner[1].bases)
        return (self._class(name, owner[0]) for name in names if name in self.classes)

    def _function(self, owner: _Class, name: str, of: _Class) -> _Function | None:
        """Returns a method of a class or of the first of its bases that has it."""
        own = (node for node in owner[1].body if isinstance(node, ast.FunctionDef) and node.name == name)
        if (node := next(own, None)) is not None:
            return _Function(owner, node, of)
        return self._of_bases(owner, name, of)

    def _of_bases(self, owner: _Class, name: str, of: _Class) -> _Function | None:
        found = (self._function(base, name, of) for base in self._bases(owner))
        return next((one for one in found if one is not None), None)

    def _layers(self, function: _Function, given: Made, depth: int) -> Iterator[str]:
        made = {**self._defaults(function.node), **given}
        nodes = list(_inside(function.node))
        for node in nodes:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and _is_prefix(node.targets[0]):
                made[node.targets[0].id] = _text(node.value, made)
        for call in (node for node in nodes if isinstance(node, ast.Call)):
            own = next((_text(word.value, made) for word in call.keywords if word.arg == "prefix"), None)
            root, layers, _ = f"{own}.".partition("layers.")
            if own is not None and layers:
                yield root.removesuffix(".")
            elif depth < 8 and (callee := self._callee(call, function, made)) is not None:
                yield from self._layers(callee, self._bound(call, callee.node, made), depth + 1)

    def _callee(self, call: ast.Call, function: _Function, made: Made) -> _Function | None:
        named = ast.unparse(call.func)
        if named == "super().__init__":
            return self._of_bases(function.owner, "__init__", function.of)
        if any(word in named.lower() for word in ("vision", "audio")):
            return None
        if named.startswith("self.") and named.count(".") == 1:
            return self._function(function.of, named[5:], function.of)
        named = made.get(named) or named
        if named not in self.classes:
            return None
        of = self._class(named, function.owner[0])
        return self._function(of, "__init__", of)

    def _bound(self, call: ast.Call, callee: ast.FunctionDef, made: Made) -> Made:
        """Returns the arguments of a call that are texts or classes."""
        names = [argument.arg for argument in callee.args.args][1:]
        given = [*zip(names, call.args, strict=False), *((word.arg or "", word.value) for word in call.keywords)]
        return {name: known for name, value in given if (known := self._known(value, made)) is not None}

    def _defaults(self, function: ast.FunctionDef) -> Made:
        arguments = function.args
        pairs = [*zip(reversed(arguments.args), reversed(arguments.defaults), strict=False)]
        pairs += [(one, value) for one, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if value]
        return {argument.arg: self._known(value, {}) for argument, value in pairs}

    def _known(self, value: ast.expr, made: Made) -> str | None:
        if isinstance(value, ast.Name) and value.id in self.classes:
            return value.id
        return _text(value, made)


def _inside(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """Yields the nodes of a function, but not those of functions inside it, which have prefixes of their own."""
    left: list[ast.AST] = list(function.body)
    while left:
        node = left.pop(0)
        yield node
        if not isinstance(node, ast.FunctionDef | ast.Lambda):
            left += ast.iter_child_nodes(node)


def _is_prefix(name: ast.Name) -> bool:
    return name.id.endswith("prefix")


def _text(value: Any, made: Made) -> str | None:
    """Returns the text of an expression, or None if it does not follow from texts that are known."""
    match value:
        case ast.Constant(value=str(text)):
            return text
        case ast.Name(id=name):
            return made.get(name)
        case ast.IfExp(orelse=other):
            # The conditions ask for quantizations that oxmoe does not serve.
            return _text(other, made)
        case ast.JoinedStr(values=parts):
            texts = [_text(part.value if isinstance(part, ast.FormattedValue) else part, made) for part in parts]
            known = [text if text is not None else "?" for text in texts]
            return None if texts[0] is None else "".join(known)
        case ast.Call(func=ast.Name(id="add_prefix"), args=[name, prefix]):
            return _joined(_text(prefix, made), _text(name, made))
        case ast.Call(func=ast.Name(id="maybe_prefix"), args=[prefix, name]):
            return _joined(_text(prefix, made), _text(name, made))
    return None


def _joined(prefix: str | None, name: str | None) -> str | None:
    if prefix is None or name is None:
        return None
    return f"{prefix}.{name}" if prefix else name
