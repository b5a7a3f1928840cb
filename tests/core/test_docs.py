"""README and docs tell the truth: links, files, names, messages, limits, and examples that run."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import types
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import oxmoe
from oxmoe import __main__
from oxmoe.sglang import capabilities

ROOT = next(folder for folder in Path(__file__).parents if (folder / "Cargo.toml").is_file())
DOCS = ROOT / "docs"
PAGES = [ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY")] + sorted(DOCS.rglob("*.md"))
SOURCES = [
    path
    for folder in ("python", "src", "benches", "tests", "csrc")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in (".py", ".pyi", ".rs", ".sh", ".cuh")
] + [ROOT / "build.rs"]
RESULTS = ROOT / "benches" / "results"
RUNS = {json.loads(line)["run"] for path in RESULTS.iterdir() for line in path.read_text("utf-8").splitlines()}
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def prose(page: Path) -> str:
    """Returns a page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)


def links(page: Path) -> list[str]:
    text = re.sub(r"`[^`\n]*`", "", prose(page))
    return [target for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target]


def anchors(page: Path) -> set[str]:
    """Returns the anchors of a page's headings, as far as GitHub and mkdocs agree on them."""
    found = set()
    for heading in re.findall(r"^#+ (.+)$", prose(page), flags=re.M):
        text = unicodedata.normalize("NFKD", heading.replace("`", "")).encode("ascii", "ignore").decode()
        words = re.sub(r"[^\w\s-]", "", text).strip().lower()
        if (built := re.sub(r"[-\s]+", "-", words)) == words.replace(" ", "-"):
            found.add(built)
    return found


@every_page
def test_links(page: Path) -> None:
    missing = []
    for target in links(page):
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        # README's badges: GitHub shows a workflow beside the folder of the branch that a page is in.
        if workflow := re.fullmatch(r"\.\./\.\./actions/workflows/(\w+\.yml)(/badge\.svg\?branch=main)?", name):
            file = ROOT / ".github" / "workflows" / workflow[1]
        if not file.is_file() or (anchor and anchor not in anchors(file)):
            missing.append(target)
    assert not missing, missing


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: str(page.relative_to(DOCS)))
def test_links_of_docs_stay_there(page: Path) -> None:
    """Links of docs stay inside docs, because the built site has no other pages."""
    outside = [target for target in links(page) if not (page.parent / target).resolve().is_relative_to(DOCS.resolve())]
    assert not outside, outside


@every_page
def test_result_files(page: Path) -> None:
    """A page names a results file by its name, and a run in it by what the rows have in their field "run"."""
    text = page.read_text(encoding="utf-8")
    missing = [name for name in re.findall(r"\b(\w[\w-]*\.jsonl)\b", text) if not (RESULTS / name).exists()]
    missing += [name for name in re.findall(r"`([a-z]\w+_\d{4}-\d\d-\d\d\w*)`", text) if name not in RUNS]
    assert not missing, missing


def test_pages_that_sources_name() -> None:
    """Comments, docstrings, errors and pages name a page by its path."""
    missing = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in [*SOURCES, *PAGES]
        for name in re.findall(r"\bdocs/[\w/]+\.md\b", path.read_text(encoding="utf-8"))
        if not (ROOT / name).is_file()
    ]
    assert not missing, missing


def place(name: str) -> Path:
    """Returns a file that pages name by its path, or by the bare name of a test's file."""
    found = [ROOT / name] if "/" in name else [*(ROOT / "tests").rglob(name), ROOT / name]
    return next((path for path in found if path.is_file()), ROOT / name)


@every_page
def test_files_that_are_named(page: Path) -> None:
    """Pages name files by paths from the repository's root, and tests by their bare names."""
    folders = r"\b((?:python/oxmoe|src|tests|benches)/[\w./-]*\.(?:py|pyi|rs|cuh|c|sh|txt))\b"
    text = page.read_text(encoding="utf-8")
    named = re.findall(folders, text) + re.findall(r"`(test_\w+\.py)`", text)
    missing = [name for name in named if not place(name).is_file()]
    assert not missing, missing


def test_every_page_is_in_the_navigation() -> None:
    listed = re.findall(r"^ +- [^:\n]+: ([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.M)
    assert sorted(listed) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


def test_nobody_is_told_to_install_from_pypi() -> None:
    """There is no such package: a stranger could publish one."""
    told = [
        str(path.relative_to(ROOT))
        for path in [*PAGES, *SOURCES]
        if re.search(r"pip3? install (-\w+ )*oxmoe", path.read_text(encoding="utf-8"))
    ]
    assert not told, told


# Requirements


def test_floors() -> None:
    """Pages that name a floor have the one that the build and SGLang's capabilities have."""
    manifest, project, workflow = (
        (ROOT / name).read_text(encoding="utf-8")
        for name in ("Cargo.toml", "pyproject.toml", ".github/workflows/build.yml")
    )
    python = re.findall(r'^requires-python = ">=([\d.]+)"$', project, re.M)
    rust = re.findall(r'^rust-version = "([\d.]+)"$', manifest, re.M)
    glibc = re.findall(r'^ +manylinux: "(2_\d+)"$', workflow, re.M)
    assert len(python) == len(rust) == len(glibc) == 1
    assert f"abi3-py{python[0].replace('.', '')}" in project
    cells = {cells[0]: cells[1] for cells in rows(DOCS / "policy.md") if len(cells) == 3}
    assert cells["Python"].startswith(f"{python[0]}. ") and f"`cp{python[0].replace('.', '')}-abi3`" in cells["Python"]
    assert cells["Rust, to build"] == rust[0]
    assert f"`manylinux_{glibc[0]}`" in cells["system"]
    assert cells["SGLang"].startswith(f"{capabilities.FIRST}; the newest that is tested is {capabilities.LAST} (")
    needed = {cells[0]: cells[1] for cells in rows(DOCS / "start.md")}
    assert needed["Python"].startswith(f"{python[0]} or newer;") and needed["to build"].startswith(
        f"Rust {rust[0]} or "
    )
    assert f"manylinux_{glibc[0]}" in needed["system"]


def test_the_floor_of_torch() -> None:
    """pyproject.toml has it. Pages name the same, and `make torch-test` of the workflow runs the tests with it."""
    floors = set(re.findall(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8")))
    assert len(floors) == 1
    floor = floors.pop()
    for page, begin in (("policy.md", f"{floor}. "), ("start.md", f"{floor} or newer. ")):
        assert {cells[0]: cells[1] for cells in rows(DOCS / page)}["torch"].startswith(begin)
    named = [name for page in PAGES for name in re.findall(r"torch (\d+\.\d+) or newer", page.read_text("utf-8"))]
    assert named and set(named) == {floor}

    workflow = (ROOT / ".github" / "workflows" / "build.yml").read_text(encoding="utf-8")
    assert re.search(r"^ +- \{ part: \w+, targets: torch-test, ", workflow, re.M) and "TORCH" not in workflow
    if make := shutil.which("make"):
        # This test itself may run in `make torch-test` with another torch.
        env = {name: value for name, value in os.environ.items() if name != "TORCH" and not name.startswith("MAKE")}
        command = [make, "--dry-run", "--always-make", "torch-test"]
        for given, used in (((), floor), (("TORCH=",), floor), (("TORCH=99.1.0",), "99.1.0")):
            done = subprocess.run([*command, *given], cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)
            assert done.returncode == 0, done.stderr
            assert re.findall(r"\btorch==(\S*)", done.stdout) == [used]


def test_the_image_is_of_the_newest_sglang() -> None:
    text = (DOCS / "start.md").read_text(encoding="utf-8")
    assert re.findall(r"lmsysorg/sglang:v([\d.]+)$", text, re.M)[0] == capabilities.LAST
    assert set(re.findall(r"lmsysorg/sglang:v([\d.]*\d)", text)) == {capabilities.LAST}
    assert f"SGLang {capabilities.FIRST} to {capabilities.LAST}" in text


# Examples


def examples(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.S | re.M)


WITH_EXAMPLES = [page for page in PAGES if examples(page)]


@pytest.mark.parametrize("page", WITH_EXAMPLES, ids=lambda page: str(page.relative_to(ROOT)))
def test_examples_run(page: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The blocks of a page run one after the other, as a reader types them, on the CPU."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    names: dict[str, Any] = {}
    for block in examples(page):
        exec(compile(block, str(page), "exec"), names)


def test_there_are_examples() -> None:
    assert DOCS / "start.md" in WITH_EXAMPLES


def commands() -> list[str]:
    """Returns arguments of `python -m oxmoe` in pages' text, except those with a placeholder for the reader's own
    value."""
    found = {
        " ".join(arguments.split())
        for page in PAGES
        for arguments in re.findall(r"`(?:\w+=\w+ )*python -m oxmoe ([^`]+)`", page.read_text(encoding="utf-8"))
    }
    return sorted(text for text in found if "..." not in text and " " in text)


@pytest.mark.parametrize("arguments", commands())
def test_commands_are_understood(arguments: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The flags of a command exist and take these values."""
    pytest.importorskip("torch")
    module = importlib.import_module(__main__.COMMANDS[arguments.split()[0]][0])
    monkeypatch.setattr(module, "run", lambda args: 0)
    assert __main__.main(arguments.split()) == 0


def test_there_are_commands() -> None:
    assert len(commands()) > 15


def test_the_example_of_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """For Qwen3-235B in fp8 the page shows what the command prints."""
    config = {
        **{"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_act": "silu"},
        **{"hidden_size": 4096, "intermediate_size": 12288, "moe_intermediate_size": 1536, "num_hidden_layers": 94},
        **{"num_experts": 128, "num_experts_per_tok": 8, "decoder_sparse_step": 1, "mlp_only_layers": []},
        **{
            "torch_dtype": "bfloat16",
            "quantization_config": {
                "quant_method": "fp8",
                "activation_scheme": "dynamic",
                "weight_block_size": [128, 128],
            },
        },
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    block = (DOCS / "check.md").read_text(encoding="utf-8").split("```\n")[1]
    shown, status = block.split("$ python -m oxmoe ")[1:], []
    for text in shown:
        command, *lines = text.replace("/models/Qwen3-235B-A22B-FP8", str(tmp_path)).splitlines()
        status.append(__main__.main([*command.split(), "--sglang", "0.5.23"]))
        printed = capsys.readouterr().out.splitlines()
        assert [line for line in lines if line.strip() != "..."] == printed[: len(lines) - 1]
    assert status == [1, 0]


# Names


def shown() -> list[str]:
    """Returns the names that the API reference shows."""
    return re.findall(r"^::: (\S+)$", (DOCS / "reference.md").read_text(encoding="utf-8"), re.M)


def test_the_reference_has_every_public_name() -> None:
    pytest.importorskip("torch")
    expected = {name for name in oxmoe.__all__ if name not in ("__version__", "quantize", "ExptData")}
    expected |= {f"quantize.{name}" for name in oxmoe.quantize.__all__}
    expected |= {f"int4.{name}" for name in oxmoe.int4.__all__}
    expected |= {f"nvfp4.{name}" for name in oxmoe.nvfp4.__all__}
    names = [name.removeprefix("oxmoe.").removeprefix("_oxmoe.") for name in shown()]
    assert len(names) == len(set(names))
    assert expected <= set(names), expected - set(names)


@pytest.mark.parametrize("path", shown())
def test_names_of_the_reference_exist(path: str) -> None:
    pytest.importorskip("torch")
    module, *rest = path.split(".")
    found: Any = importlib.import_module(module)
    for part in rest:
        found = getattr(found, part)
    assert found.__doc__


@pytest.fixture
def docstrings(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Loads the extension of the API reference. griffe is stubbed, because it only provides the base class."""
    monkeypatch.setitem(sys.modules, "griffe", types.SimpleNamespace(Extension=object))
    spec = importlib.util.spec_from_file_location("oxmoe_docstrings", DOCS / "docstrings.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_arguments_of_docstrings_become_a_list(docstrings: Any) -> None:
    text = "Adds.\n\nNote: not an argument.\nx: [T, H],\n    or none.\na, b: numbers.\n\nx: again."
    assert docstrings.as_markdown(text, {"x", "a", "b"}) == (
        "Adds.\n\nNote: not an argument.\n\n- **x**: [T, H],\n    or none.\n- **a, b**: numbers.\n\n\n- **x**: again."
    )


def test_brackets_of_docstrings_are_no_links(docstrings: Any) -> None:
    assert docstrings.without_links("[B / 4][4] of `x[0][1]`") == r"\[B / 4]\[4] of `x[0][1]`"


# Environment variables

# build.rs hands these to the compiler; nobody sets them.
OF_THE_BUILD = {"OXMOE_BUILT_FROM", "OXMOE_COMPILED_ARCHS", "OXMOE_NVCC_VERSION"}


def rows(page: Path) -> Iterator[list[str]]:
    """Yields the cells of a page's tables, without heads."""
    head = True
    for line in prose(page).splitlines():
        if not line.startswith("|"):
            head = True
        elif re.fullmatch(r"[|\s:-]+", line):
            head = False
        elif not head:
            yield [cell.strip() for cell in line.strip("|").split("|")]


@every_page
def test_tables_are_whole(page: Path) -> None:
    """A blank line ends a table, and the rows after it would be shown as text."""
    for table in re.findall(r"(?:^ *\|.*\n)+", prose(page), re.M):
        head, *others = table.splitlines()
        assert others and re.fullmatch(r"[|\s:-]+", others[0]), head
        cells = {re.sub(r"`[^`]*`|\\\|", "", line).strip().count("|") for line in (head, *others)}
        assert len(cells) == 1, f"rows of several lengths below {head}"


def test_every_environment_variable_is_listed() -> None:
    places = [*SOURCES, ROOT / "Makefile", ROOT / ".ci" / "run"]
    found = {name for path in places for name in re.findall(r"\bOXMOE_[A-Z_]+\b", path.read_text(encoding="utf-8"))}
    listed = {name for cells in rows(DOCS / "environment.md") for name in re.findall(r"`(OXMOE_[A-Z_]+)`", cells[0])}
    assert found - OF_THE_BUILD == listed


def test_environment_variables_are_read_where_the_page_says() -> None:
    checked = 0
    for cells in rows(DOCS / "environment.md"):
        if len(cells) < 4:
            continue
        names, files = re.findall(r"`([A-Z_0-9]+)`", cells[0]), re.findall(r"`([\w/]+\.\w+)`", cells[2])
        for file in files:
            text = place(file).read_text(encoding="utf-8")
            assert all(name in text for name in names), (file, names)
            checked += 1
    assert checked > 10


# Messages


def messages() -> list[str]:
    return [
        found[1]
        for cells in rows(DOCS / "troubleshooting.md")
        if (found := re.match(r"`([^`]+)`(?: \(doctor\))?$", cells[0])) is not None
    ]


def python_literals(text: str) -> str:
    """Returns the strings of a Python source one a line, without docstrings and comments. `...` stands for values."""
    found, inside = [], set()
    for node in ast.walk(ast.parse(text)):
        if id(node) in inside:
            continue
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            inside.add(id(node.value))
        elif isinstance(node, ast.JoinedStr):
            inside.update(map(id, node.values))
            found.append("".join(str(part.value) if isinstance(part, ast.Constant) else "..." for part in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
    return "\n".join(found)


# Comments and characters come first, because both may have a quote.
RUST_LITERAL = re.compile(r"""//[^\n]*|b?'(?:\\.|[^'\\])'|r\#"(.*?)"\#|"((?:\\.|[^"\\])*)\"""", re.S)


def rust_literals(text: str) -> str:
    """Returns the strings of a Rust source one a line, without comments and tests."""
    code = text.partition("#[cfg(test)]\nmod tests {")[0]
    found = (raw or re.sub(r"\\\n\s*", "", literal) for raw, literal in RUST_LITERAL.findall(code))
    return "\n".join(literal.replace('\\"', '"') for literal in found if literal)


# The strings of each file that can end up in a message. Those of tests do not count.
MESSAGES = [
    (rust_literals if path.suffix == ".rs" else python_literals)(path.read_text(encoding="utf-8"))
    for path in SOURCES
    if path.relative_to(ROOT).parts[0] in ("python", "src", "build.rs")
    and path.suffix in (".py", ".rs")
    and "tests" not in path.with_suffix("").parts
]


def parts_of(message: str) -> list[str]:
    """Returns the parts of a message between what differs from case to case."""
    parts = [part.strip(" .,") for part in re.split(r"\.\.\.|[;:] ", message)]
    return [part for part in parts if re.search(r"\w", part)]


@pytest.mark.parametrize("message", messages())
def test_messages_are_those_of_the_sources(message: str) -> None:
    """The parts of a message stand in strings of one source."""
    parts = parts_of(message)
    assert sum(map(len, parts)) >= 8, "too little to be found by"
    assert any(all(part in text for part in parts) for text in MESSAGES), parts


def test_what_counts_as_a_message() -> None:
    python = '''"""A docstring."""
name = "first"  # a comment
raise ValueError(
    f"second: {name!r} of "
    f"{name}; 'third'"
)
'''
    assert python_literals(python).splitlines() == ["first", "second: ... of ...; 'third'"]
    rust = r"""
// A "comment".
fn f(quote: char) { g('"', b'\'', "one \
      and \"two\"", r#"three"#) } /// "help"
#[cfg(test)]
mod tests { const NOT: &str = "four"; }
"""
    assert rust_literals(rust).splitlines() == ['one and "two"', "three"]
    assert parts_of("...: a; b is ..., c") == ["a", "b is", "c"]


def test_there_are_messages() -> None:
    assert len(messages()) == sum(1 for cells in rows(DOCS / "troubleshooting.md")) > 40


# Limits


@pytest.mark.parametrize(
    ("sizes", "refused"),
    [((1024, 8), (1025, 8)), ((128, 32), (128, 33))],
    ids=["experts", "top-k"],
)
def test_limits_of_routing(sizes: tuple[int, int], refused: tuple[int, int]) -> None:
    text = (DOCS / "limits.md").read_text(encoding="utf-8")
    assert "| experts with router logits | 1 to 1024 |" in text and "| top-k | 1 to 32," in text
    oxmoe.explain(*sizes, 256, 256, 1, arch="sm_90")
    with pytest.raises((ValueError, NotImplementedError), match=str(refused[1]) if refused[1] > 32 else "1025"):
        oxmoe.explain(*refused, 256, 256, 1, arch="sm_90")


def multiples() -> dict[str, tuple[int, int]]:
    """Returns format -> the multiples of hidden and intermediate size that limits.md gives."""
    found = {}
    for cells in rows(DOCS / "limits.md"):
        number = re.match(r"multiples of (\d+)", cells[1]) if len(cells) > 3 else None
        if number is not None:
            of_intermediate = re.search(r"; of (\d+) for the intermediate size$", cells[1]) or number
            names = re.findall(r"`(\w+)`", cells[0])
            both = int(number[1]), int(of_intermediate[1])
            found.update({"mxfp4-a8" if "e4m3" in cells[0] else name: both for name in names})
    return found


@pytest.mark.parametrize("arch", ["sm_90", "cpu"])
@pytest.mark.parametrize("format", sorted(multiples()))
def test_multiples(format: str, arch: str) -> None:
    of_hidden, of_intermediate = multiples()[format]
    oxmoe.explain(8, 2, 3 * of_hidden, 5 * of_intermediate, 1, format=format, arch=arch)
    wrong = (of_hidden // 2, of_intermediate, of_hidden), (of_hidden, of_intermediate // 2, of_intermediate)
    for hidden, intermediate, multiple in wrong:
        with pytest.raises((ValueError, NotImplementedError), match=f"multiples? of {multiple}"):
            oxmoe.explain(8, 2, hidden, intermediate, 1, format=format, arch=arch)


def test_there_are_multiples() -> None:
    assert set(multiples()) == {"fp8_block", "fp8_tensor", "mxfp8", "mxfp4", "mxfp4-a8", "nvfp4", "int4"}
