"""griffe extension of the API reference: arguments in docstrings become lists, and a module hides no function.

The project's docstrings describe an argument in a line `name: what it is`. Markdown would run such lines together, and
would read the brackets of shapes, as in [E / 4][4], as links.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_ARGUMENT = re.compile(r"(\w+)((?:, | to )\w+)*: ")
_CODE = re.compile(r"(`[^`]*`)")


def as_markdown(text: str, arguments: set[str]) -> str:
    """The docstring with one list item for each line that describes an argument; other lines stay as they are."""
    first, *rest = text.splitlines()
    lines = [first]
    in_list = False
    for line in rest:
        found = _ARGUMENT.match(line)
        begins = found is not None and found[1] in arguments
        if begins and not in_list:
            lines.append("")
        in_list = begins or (in_list and line.startswith("    "))
        if begins:
            names, colon, what = line.partition(": ")
            line = f"- **{names}**{colon}{what}"
        lines.append(line)
    return "\n".join(lines)


def without_links(text: str) -> str:
    """The text with its brackets escaped, but for those in code."""
    parts = _CODE.split(text)
    return "".join(part if part.startswith("`") else part.replace("[", r"\[") for part in parts)


class Docstrings(griffe.Extension):
    """Changes what griffe has read of the package `oxmoe`."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = without_links(obj.docstring.value)

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        if func.docstring is not None:
            names = {parameter.name for parameter in func.parameters}
            func.docstring.value = as_markdown(func.docstring.value, names)

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """`oxmoe.routing` is the function that users call, not the module of this name that it is imported from."""
        for name, path in pkg.imports.items():
            module = pkg.members.get(name)
            if isinstance(module, griffe.Module) and path == f"{module.path}.{name}":
                pkg.members[name] = griffe.Alias(name, target=module.members[name], parent=pkg)
