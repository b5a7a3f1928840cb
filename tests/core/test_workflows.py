"""What would fail in a workflow on GitHub alone: names of files, targets, jobs and artifacts, and rules of GitHub's."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".github" / "workflows"
FILES = sorted(path.name for path in FOLDER.glob("*.yml"))
every_file = pytest.mark.parametrize("file", FILES)


def workflow(file: str) -> dict[Any, Any]:
    """Returns the contents of a workflow. YAML reads its key `on` as True."""
    yaml = pytest.importorskip("yaml", reason="PyYAML comes with SGLang's packages")
    return yaml.safe_load((FOLDER / file).read_text(encoding="utf-8"))


def jobs(file: str) -> Iterator[tuple[str, dict[str, Any], list[dict[str, Any]]]]:
    """Yields the name, the text and the steps of each job."""
    for name, job in workflow(file)["jobs"].items():
        yield name, job, job.get("steps", [])


def rows(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the values of a job's matrix, a dictionary for each run. A list that another job makes is one run."""
    matrix = dict(job.get("strategy", {}).get("matrix", {}))
    found: list[dict[str, Any]] = [{}] if set(matrix) - {"include"} else []
    for name, values in matrix.items():
        if name != "include":
            found = [
                {**row, name: value} for row in found for value in ([values] if isinstance(values, str) else values)
            ]
    return [*found, *matrix.get("include", [])] or [{}]


def filled(text: str, row: dict[str, Any]) -> str:
    """Puts the values of the matrix into a text."""
    return re.sub(r"\$\{\{ matrix\.(\w+) \}\}", lambda found: str(row.get(found[1], "")), text)


def commands(file: str) -> Iterator[str]:
    """Yields each line of the scripts, for each run of the matrix."""
    for _, job, steps in jobs(file):
        for step in steps:
            for row in rows(job):
                yield from filled(step.get("run", ""), row).replace("\\\n", " ").splitlines()


def texts(node: Any) -> Iterator[str]:
    """Yields all strings below a node."""
    if isinstance(node, dict):
        for value in node.values():
            yield from texts(value)
    elif isinstance(node, list):
        for value in node:
            yield from texts(value)
    elif isinstance(node, str):
        yield node


def expressions(node: Any) -> Iterator[str]:
    """Yields the expressions below a node. A condition is one without its braces, too."""
    for text in texts(node):
        yield from re.findall(r"\$\{\{(.*?)\}\}", text, re.S)
    conditions = [node, *node.get("steps", [])] if isinstance(node, dict) else []
    yield from (str(part["if"]) for part in conditions if "if" in part)


def test_the_workflows_are_these() -> None:
    """The other tests would pass without a workflow, too."""
    assert FILES == ["build.yml", "gpu.yml", "lint.yml", "release.yml", "sglang.yml"]
    assert sum(len(list(jobs(file))) for file in FILES) >= 18


@every_file
def test_targets_of_make_exist(file: str) -> None:
    targets = set(
        re.findall(r"^([a-z][\w-]*(?: [\w-]+)*):(?!=)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    )
    known = {name for names in targets for name in names.split()}
    asked = [
        word
        for line in commands(file)
        for found in re.findall(r"(?:\bmake|\.ci/run) ([^|;&>]*)", line.partition("#")[0])
        for word in re.sub(r"-C \S+", "", found).split()
        if "=" not in word and not word.startswith(('"', "$"))
    ]
    assert not set(asked) - known
    assert asked or file == "release.yml"


@every_file
def test_files_exist(file: str) -> None:
    """hashFiles of a pattern that matches nothing is an empty text, and setup-python fails without a file to hash."""
    patterns = [
        pattern
        for text in texts(workflow(file))
        for call in re.findall(r"hashFiles\((.*?)\)", text)
        for pattern in re.findall(r"'([^']+)'", call)
    ]
    for _, _, steps in jobs(file):
        patterns += [step["with"]["cache-dependency-path"] for step in steps if "cache" in step.get("with", {})]
    patterns += [
        name for line in commands(file) for name in re.findall(r"(?<![\w/.*])((?:tests|docs|\.ci)/[\w./*-]+)", line)
    ]
    assert not [pattern for pattern in patterns if not list(ROOT.glob(pattern))]


@every_file
def test_names_in_expressions_exist(file: str) -> None:
    """GitHub takes a name that does not exist for an empty text, without an error."""
    text = workflow(file)
    names = set(text["jobs"])
    inputs = set(((text[True] or {}).get("workflow_call") or {}).get("inputs", {}))
    for name, job, steps in jobs(file):
        needs = job.get("needs", [])
        needs = [needs] if isinstance(needs, str) else needs
        assert set(needs) <= names, name
        ids = {step["id"] for step in steps if "id" in step}
        values = {key for row in rows(job) for key in row}
        for expression in expressions(job):
            used = re.findall(r"(?<![\w.'])(needs|matrix|inputs|steps)\.(\w[\w-]*)(?:\.outputs\.(\w+))?", expression)
            for context, key, output in used:
                there = {"needs": set(needs), "matrix": values, "inputs": inputs, "steps": ids}[context]
                assert key in there, (name, expression)
                assert context != "needs" or not output or output in text["jobs"][key]["outputs"], (name, expression)


def test_artifacts_that_are_downloaded_are_uploaded() -> None:
    made: list[str] = []
    wanted: list[str] = []
    for file in FILES:
        for _, job, steps in jobs(file):
            for step in steps:
                for row in rows(job):
                    name = filled(step.get("with", {}).get("name", ""), row)
                    if "/upload-artifact@" in step.get("uses", ""):
                        made.append(name)
                    elif "/download-artifact@" in step.get("uses", "") and name != "${{ inputs.wheel }}":
                        wanted.append(name)
            wanted += [job["with"]["wheel"]] if "with" in job else []
    # Without a name, all artifacts are downloaded.
    assert set(wanted) - {""} <= set(made) and "wheel-x86_64" in wanted
    # An artifact's name is taken once in a run. `release` runs build.yml, and nothing else that makes artifacts.
    assert len(made) == len(set(made))


@every_file
def test_artifacts_are_not_hidden(file: str) -> None:
    """upload-artifact finds no file whose name, or whose folder's name, begins with a dot."""
    for name, _, steps in jobs(file):
        for step in steps:
            if "/upload-artifact@" in step.get("uses", ""):
                given = step["with"]
                assert not [part for part in Path(given["path"]).parts if part.startswith(".")], name
                assert given["if-no-files-found"] == "error", name


@every_file
def test_files_that_one_step_makes_are_those_of_the_next(file: str) -> None:
    """A job whose maturin writes into a folder uploads from this folder."""
    for name, _, steps in jobs(file):
        made = [re.findall(r"--out (\S+)", step.get("with", {}).get("args", "")) for step in steps]
        taken = [step["with"]["path"] for step in steps if "/upload-artifact@" in step.get("uses", "")]
        for folder in (folder for found in made for folder in found):
            assert [Path(path).parts[0] for path in taken] == [folder], name


@every_file
def test_a_failure_inside_of_a_pipe_is_one_of_the_step(file: str) -> None:
    """GitHub's shell has `pipefail` only if a workflow names bash as its shell."""
    shell = workflow(file).get("defaults", {}).get("run", {}).get("shell")
    piped = [line for line in commands(file) if re.search(r"(?<!\|)\|(?!\|)", re.sub(r"'[^']*'|\"[^\"]*\"", "", line))]
    assert shell == "bash" or not piped


@every_file
def test_pip_has_a_python_of_its_own(file: str) -> None:
    """pip refuses to install packages into Ubuntu's Python. maturin-action does so outside of a container."""
    for name, job, steps in jobs(file):
        python = False
        for step in steps:
            used = step.get("uses", "")
            python |= "/setup-python@" in used or "self-hosted" in job["runs-on"]
            own = "/maturin-action@" in used and "manylinux" not in step["with"]
            lines = step.get("run", "")
            installs = re.search(r"(?<![\w/.])python3? -m pip|\bmake (?!lint|docs)|\.ci/run|make -C", lines)
            assert python or not (own or installs), (name, used or lines)


def test_called_workflows_get_what_they_ask_for() -> None:
    """A called workflow fails to start if it asks for more permissions than the job that calls it has."""
    levels = ["none", "read", "write"]
    called = 0
    for file in FILES:
        text = workflow(file)
        for name, job, _ in jobs(file):
            if not (path := job.get("uses")):
                continue
            target = workflow(Path(path).name)
            call = target[True]["workflow_call"] or {}
            inputs = call.get("inputs", {})
            given = job.get("with", {})
            assert set(given) <= set(inputs), name
            assert {key for key, value in inputs.items() if value.get("required")} <= set(given), name
            granted = job.get("permissions", text["permissions"])
            for asking in [target, *target["jobs"].values()]:
                for scope, level in asking.get("permissions", {}).items():
                    assert levels.index(level) <= levels.index(granted.get(scope, "none")), (name, scope)
            called += 1
    assert called == 2


def test_lints_have_one_rust() -> None:
    """A new Rust has new lints, which would fail on a commit that changed nothing."""
    versions = set()
    for file in FILES:
        for name, job, steps in jobs(file):
            scripts = " ".join(filled(step.get("run", ""), row) for step in steps for row in rows(job))
            if re.search(r"make lint|\.ci/run (test|lint)\b", scripts):
                assert 'rustup toolchain install "$RUSTUP_TOOLCHAIN"' in scripts and "clippy,rustfmt" in scripts, name
                versions.add(job["env"]["RUSTUP_TOOLCHAIN"])
    assert len(versions) == 1 and re.fullmatch(r"1\.\d+\.\d+", versions.pop())


def test_wheels_are_tested_on_the_oldest_and_the_newest_python() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    served = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', project)
    tested = {row["python"] for name, job, _ in jobs("build.yml") for row in rows(job) if name == "test"}
    assert {served[0], served[-1]} <= tested <= set(served)


# SGLang's packages are not found, as if they were not installed.
WITHOUT_SGLANG = r"""
import importlib.metadata, re, sys
from pathlib import Path
import pytest

def named(file):
    lines = Path("tests", file).read_text(encoding="utf-8").splitlines()
    return {plain(re.match(r"[\w.-]+", line)[0]) for line in lines if re.match(r"[\w.-]+[=>]", line)}

def plain(name):
    return re.sub(r"[-_.]+", "-", name).lower()

left_out = named("requirements-sglang.txt") - named("requirements-pytest.txt")
owners = importlib.metadata.packages_distributions()
hidden = {name for name, of in owners.items() if set(map(plain, of)) <= left_out}

class Finder:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in hidden else self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = map(Finder, sys.meta_path)
assert "sglang" not in sys.modules
sys.exit(pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", *sys.argv[1:]]))
"""


def test_every_file_can_be_collected_without_sglang() -> None:
    """The jobs that test wheels install tests/requirements.txt alone, and run pytest on all files."""
    command = [sys.executable, "-c", WITHOUT_SGLANG, "tests/sglang"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    # 5 is pytest's status if there is no test.
    assert done.returncode in (0, 5), done.stdout[-4000:] + done.stderr[-2000:]
    assert "could not import 'sglang'" in done.stdout
