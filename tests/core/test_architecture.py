"""Arrows run one way: no module imports one of a higher room, and no modules import each other in a circle."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

Arrows = dict[str, set[str]]
Rooms = tuple[tuple[str, ...], ...]

FACE = "oxmoe"
# The rooms, the lowest first. A module belongs to the room that has the longest prefix of its name. It may import
# modules of its own room and of lower ones.
PYTHON_ROOMS: Rooms = (
    ("oxmoe._oxmoe",),
    (
        *("oxmoe.tracing", "oxmoe.deprecation", "oxmoe.operands", "oxmoe.hopper", "oxmoe.reference", "oxmoe.testing"),
        "oxmoe.wording",
    ),
    ("oxmoe.profiling",),
    ("oxmoe.weights", "oxmoe.ops", "oxmoe.ops_rows"),
    ("oxmoe.functions",),
    ("oxmoe.rows", "oxmoe.quantize", "oxmoe.dense"),
    ("oxmoe.formats",),
    ("oxmoe.peers",),
    ("oxmoe.allreduce",),
    ("oxmoe.int4", "oxmoe.nvfp4"),
    (FACE,),
    ("oxmoe.sglang",),
    ("oxmoe.tools",),
    ("oxmoe.__main__",),
)
RUST_ROOMS: Rooms = (
    ("error", "float_mode", "platform"),
    ("dlpack", "fork", "parallel", "params", "python", "sizes", "workspace"),
    ("device", "tensor", "tma"),
    ("variants",),
    ("kernel",),
    ("counters", "stats"),
    # Rows of formats, their numbers, and conversions on slices, with the parts of the CPU backend that they are written
    # in.
    ("quant", "cpu::narrow", "cpu::element", "cpu::instructions"),
    ("desc",),
    ("cpu",),
    # The calls of quant, which choose between the loops of `cpu` and kernels.
    (
        *("quant::ops", "quant::fp8_ops", "quant::layout_ops", "quant::mxfp8_ops", "quant::nvfp4_ops"),
        *("quant::packed_ops", "quant::row_ops"),
    ),
    ("moe", "dense", "allreduce"),
    ("lib",),
)
# Arrows that run backward today. The list may only shrink.
PYTHON_EXCEPTIONS = {
    ("oxmoe", "oxmoe.sglang"),  # for type checkers; it is loaded when it is first used
}
RUST_EXCEPTIONS: set[tuple[str, str]] = set()


def python_sources() -> dict[str, str]:
    """Returns module name and text of every file of the package."""
    folder, sources = ROOT / "python", {"oxmoe._oxmoe": ""}
    for path in folder.rglob("*.py"):
        parts = path.relative_to(folder).with_suffix("").parts
        sources[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text()
    return sources


def python_imports(text: str, module: str) -> Iterator[str]:
    """Yields dotted names that a module imports, also inside functions, for type checkers and with
    import_module("...")."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module} imports relatively"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from (name.value for name in node.args[:1] if isinstance(name, ast.Constant))


def rust_sources() -> dict[str, str]:
    """Returns module path and text of every file of the crate, without comments and tests."""
    folder, sources = ROOT / "src", {}
    for path in folder.rglob("*.rs"):
        parts = path.relative_to(folder).with_suffix("").parts
        if "tests" not in parts:
            text = re.sub(r"//.*", "", path.read_text()).partition("#[cfg(test)]\nmod tests {")[0]
            sources["::".join(parts[:-1] if parts[-1] == "mod" else parts)] = text
    return sources


def leaves(tree: str) -> Iterator[str]:
    """Yields the paths of a `use` tree: a::b and a::c::d for a::{b, c::d}."""
    head, brace, rest = tree.partition("{")
    if not brace:
        yield tree.partition(" as ")[0].strip()
        return
    part, depth = "", 0
    for letter in rest[: rest.rindex("}")] + ",":
        if letter == "," and depth == 0:
            yield from (head.strip() + leaf for leaf in leaves(part) if part.strip())
            part = ""
        else:
            depth += (letter == "{") - (letter == "}")
            part += letter


def rust_imports(text: str, module: str) -> Iterator[str]:
    """Yields paths from the crate's root that a module names: with crate::, super::, or bare for its own children."""
    parent = module.rpartition("::")[0]
    for start, tree in re.findall(r"\b(crate|super)::((?:\w+::)*(?:\w+|\{[^;]*\}(?=;)))", text):
        above = f"{parent}::" if start == "super" and parent else ""
        yield from (above + leaf for leaf in leaves(tree))
    for tree in re.findall(r"\buse ((?:\w+::)+(?:\w+|\{[^;]*\}(?=;)))", text):
        yield from (f"{module}::{leaf}" for leaf in leaves(tree))


def longest(path: str, names: Mapping[str, object] | set[str], between: str) -> str | None:
    """Returns the longest of these names that the path begins with."""
    parts = path.split(between)
    prefixes = (between.join(parts[:end]) for end in range(len(parts), 0, -1))
    return next((prefix for prefix in prefixes if prefix in names), None)


def arrows(sources: Mapping[str, str], imports: Callable[[str, str], Iterator[str]], between: str) -> Arrows:
    """Returns module -> the modules that it imports."""
    found = {
        module: {longest(name, sources, between) for name in imports(text, module)} for module, text in sources.items()
    }
    return {module: {name for name in names if name and name != module} for module, names in found.items()}


def backward(graph: Arrows, rooms: Rooms, between: str) -> set[tuple[str, str]]:
    """Returns the arrows to a higher room."""
    height = {name: number for number, room in enumerate(rooms) for name in room}
    room_of = {module: longest(module, height, between) for module in graph}
    # The package's own name is a prefix of every module's, and is the room of its __init__.py alone.
    homeless = sorted(module for module, room in room_of.items() if room is None or room == FACE != module)
    assert not homeless, f"say in the table of rooms where these belong: {homeless}"
    return {
        (module, target)
        for module, targets in graph.items()
        for target in targets
        if height[room_of[target]] > height[room_of[module]]
    }


def circle(graph: Arrows) -> list[str]:
    """Returns modules each of which imports the next, and the last the first; an empty list if there are none."""
    done: set[str] = set()

    def walk(module: str, path: list[str]) -> list[str]:
        if module in path:
            return path[path.index(module) :]
        if module not in done:
            for target in sorted(graph[module]):
                if found := walk(target, [*path, module]):
                    return found
            done.add(module)
        return []

    return next((found for module in sorted(graph) if (found := walk(module, []))), [])


PYTHON = arrows(python_sources(), python_imports, ".")
RUST = arrows(rust_sources(), rust_imports, "::")


@pytest.mark.parametrize(
    "graph, rooms, exceptions, between",
    [(PYTHON, PYTHON_ROOMS, PYTHON_EXCEPTIONS, "."), (RUST, RUST_ROOMS, RUST_EXCEPTIONS, "::")],
    ids=["python", "rust"],
)
def test_no_module_imports_a_higher_room(
    graph: Arrows, rooms: Rooms, exceptions: set[tuple[str, str]], between: str
) -> None:
    assert len(graph) > 50 and sum(map(len, graph.values())) > 150
    found = backward(graph, rooms, between)
    shown = [f"{module} -> {target}" for module, target in sorted(found - exceptions)]
    assert not shown, f"a lower room imports a higher one: {shown}"
    gone = [f"{module} -> {target}" for module, target in sorted(exceptions - found)]
    assert not gone, f"these exceptions can go, their arrows are no more: {gone}"


@pytest.mark.parametrize(
    "names, rooms, between",
    [(PYTHON, PYTHON_ROOMS, "."), (RUST, RUST_ROOMS, "::")],
    ids=["python", "rust"],
)
def test_rooms_name_modules_that_exist(names: Arrows, rooms: Rooms, between: str) -> None:
    listed = {name for room in rooms for name in room}
    assert listed - {longest(module, listed, between) for module in names} == set()


@pytest.mark.parametrize(
    "graph, exceptions", [(PYTHON, PYTHON_EXCEPTIONS), (RUST, RUST_EXCEPTIONS)], ids=["python", "rust"]
)
def test_no_circle(graph: Arrows, exceptions: set[tuple[str, str]]) -> None:
    """In Rust a module and its own children, which it may show as its own, count as one."""

    def related(module: str, target: str) -> bool:
        return target.startswith(f"{module}::") or module.startswith(f"{target}::")

    counted = {
        module: {target for target in targets if (module, target) not in exceptions and not related(module, target)}
        for module, targets in graph.items()
    }
    assert circle(counted) == []


def test_every_test_has_a_room() -> None:
    assert not sorted((ROOT / "tests").glob("test_*.py"))
    names = [path.name for path in (ROOT / "tests").glob("*/test_*.py")]
    assert len(names) == len(set(names)) > 100


def test_tests_import_helpers_and_their_own_room() -> None:
    places = {path.stem: path.parent.name for path in (ROOT / "tests").glob("*/*.py")}
    for path in (ROOT / "tests").glob("*/*.py"):
        names = {name.partition(".")[0] for name in python_imports(path.read_text(), path.stem)} & set(places)
        elsewhere = sorted(name for name in names if places[name] not in ("support", path.parent.name))
        assert not elsewhere, f"{path} imports {elsewhere} of other rooms: what they share goes into tests/support/"


def test_the_folder_of_rooms_is_not_on_the_path() -> None:
    """On the path, `sglang` would be a package for code that asks whether SGLang is installed."""
    assert str(ROOT / "tests") not in sys.path


def test_files_that_a_packed_format_takes() -> None:
    """int4 is named in the code of eight files, those that CONTRIBUTING lists. The public functions that convert other
    projects' int4, the peers and SGLang's plugin are not counted."""
    names = re.compile(r"\bInt4|\bint4(?=::|;| \{)|\"int4|\bdef int4\b")
    folders = [(ROOT / "src", "*.rs"), (ROOT / "csrc", "*.cuh"), (ROOT / "python" / "oxmoe" / "formats", "*.py")]
    paths = [*(path for folder, files in folders for path in folder.rglob(files)), ROOT / "python/oxmoe/_oxmoe.pyi"]
    # CUDA has a type of the same name.
    texts = {path: re.sub(r"//.*|\bu?int4 [*a-z]|<const int4", "", path.read_text()) for path in paths}
    named = {path.relative_to(ROOT).as_posix() for path, text in texts.items() if names.search(text)}
    page = (ROOT / "CONTRIBUTING.md").read_text()
    table = page.partition("### A weight format\n")[2].partition("\nThe dequantisation of int4")[0]
    listed = {
        name for row in re.findall(r"^\| (.*?) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+/.*?)`", row)
    }
    assert named == listed
    assert len(named) == 8 and f"take {len(named)} files" in table


def test_imports_are_found_where_they_hide() -> None:
    text = """
from oxmoe import _oxmoe, quantize
if TYPE_CHECKING:
    from oxmoe.testing import same_bits

def late():
    from oxmoe.peers import sglang
    import oxmoe.rows
    importlib.import_module("oxmoe.nvfp4")
"""
    graph = arrows({**python_sources(), "oxmoe.functions": text}, python_imports, ".")
    names = ("_oxmoe", "quantize", "testing", "peers.sglang", "rows", "nvfp4")
    assert graph["oxmoe.functions"] == {f"oxmoe.{name}" for name in names}
    back = backward(graph, PYTHON_ROOMS, ".") - PYTHON_EXCEPTIONS
    assert back == {("oxmoe.functions", f"oxmoe.{name}") for name in ("quantize", "peers.sglang", "rows", "nvfp4")}
    assert "oxmoe.functions" in circle(graph)


def test_a_module_without_a_room_is_named() -> None:
    with pytest.raises(AssertionError, match=r"oxmoe\.new"):
        backward({**PYTHON, "oxmoe.new": set()}, PYTHON_ROOMS, ".")


def test_paths_are_found_in_rust() -> None:
    text = """
use crate::error::{Error, Result};
use crate::{
    moe::plan::{self, Experts as All},
    params,
};
fn f() -> crate::tensor::Owned { super::fork::check() }
"""
    graph = arrows({**rust_sources(), "kernel": text}, rust_imports, "::")
    assert graph["kernel"] == {"error", "moe::plan", "params", "tensor", "fork"}
    assert ("kernel", "moe::plan") in backward(graph, RUST_ROOMS, "::")
    # `tensor.rs` names its file of tests above its imports.
    assert "error" in RUST["tensor"]


def test_a_circle_is_named() -> None:
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"d", "b"}, "d": set()}) == ["b", "c"]
    assert circle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []
