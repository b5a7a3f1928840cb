"""SECURITY.md's promises about the sources hold: every environment variable is listed, and no data become code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = sorted((ROOT / "python").rglob("*.py"))
CODE_FROM_DATA = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "yaml"}


def trees() -> Iterator[tuple[Path, ast.Module]]:
    for path in PACKAGE:
        yield path, ast.parse(path.read_text())


def read_in_python(tree: ast.Module) -> Iterator[str]:
    """Yields names that os.environ or os.getenv is asked for; a constant of the module counts as its value."""
    constants = {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        name: ast.expr | None = None
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("os.environ.get", "os.getenv"):
            name = node.args[0]
        elif isinstance(node, ast.Subscript) and ast.unparse(node.value) == "os.environ":
            name = node.slice
        if name is not None:
            yield str(name.value if isinstance(name, ast.Constant) else constants[ast.unparse(name)])


def test_environment_variables_are_listed() -> None:
    found = {name for _, tree in trees() for name in read_in_python(tree)}
    for path in (ROOT / "build.rs", *(ROOT / "src").rglob("*.rs")):
        text = path.read_text()
        found |= set(re.findall(r"""env::var(?:_os)?\(\s*"(\w+)""", text))
    assert {"OXMOE_SGLANG", "OXMOE_PORTABLE", "OXMOE_KERNEL_CACHE"} <= found
    listed = set(re.findall(r"`([A-Z][A-Z0-9_]+)`", (ROOT / "SECURITY.md").read_text()))
    assert found <= listed, f"SECURITY.md does not list {sorted(found - listed)}"


def test_no_data_become_code() -> None:
    for path, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [alias.name for alias in node.names]
                modules = [getattr(node, "module", None) or "", *names]
                assert not CODE_FROM_DATA & {name.split(".")[0] for name in modules}, (path, ast.unparse(node))
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in ("eval", "exec", "compile", "torch.load", "np.load", "os.system"), (path, called)
                # torch.distributed's functions on objects send pickles.
                assert not re.search(r"(gather|broadcast|scatter|send|recv)_object(_list)?$", called), (path, called)


def test_texts_of_errors_may_be_empty() -> None:
    """The first line of a text without lines is an IndexError in the place of an error."""
    for path in (*PACKAGE, *(ROOT / "benches").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Call | ast.Attribute):
                text = ast.unparse(node)
                assert not re.search(r"str\(.*\.splitlines\(\)\[|\.args\[", text), (path, text)


def test_tools_load_no_pickles() -> None:
    for path in (*(ROOT / "benches").rglob("*.py"), *(ROOT / "tests" / "support").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("torch.load", "np.load", "numpy.load"):
                given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                assert given.get("weights_only") == "True" or ast.unparse(node.func) != "torch.load", path
                assert "allow_pickle" not in given, path


WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def test_actions_are_named_by_commits() -> None:
    """A tag or a branch can be moved to other code; a commit's full hash cannot. Its version stands behind it."""
    lines = [(path.name, line.strip()) for path in WORKFLOWS for line in path.read_text().splitlines()]
    used = [(name, line.removeprefix("- ")) for name, line in lines if re.match(r"(- )?uses:", line)]
    assert len(used) > 20
    # Every `uses` stands on a line of its own, where this test sees it.
    assert len(used) == sum(len(re.findall(r"\buses\b\s*:", line)) for _, line in lines)
    wrong = [
        (name, line)
        for name, line in used
        if not re.fullmatch(r"uses: (\./[\w./-]+|[\w.-]+(/[\w.-]+)+@[0-9a-f]{40}  # v\d+\.\d+\.\d+)", line)
    ]
    assert not wrong
    # One action has one commit in all workflows, and one version.
    pinned = {line.partition("@")[0]: line for _, line in used if "@" in line}
    assert all(pinned[line.partition("@")[0]] == line for _, line in used if "@" in line)


def test_no_checkout_keeps_the_token() -> None:
    for path in WORKFLOWS:
        text = path.read_text()
        checkouts = re.findall(r"uses: actions/checkout@.*\n\s*with: (.*)", text)
        assert len(checkouts) == text.count("actions/checkout@")
        assert all("persist-credentials: false" in given for given in checkouts), path.name
