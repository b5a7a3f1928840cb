"""The notes of a release: one version's section of the changelog, and nothing if something is missing."""

from __future__ import annotations

import importlib.util
import types
from pathlib import Path

import pytest

ROOT = next(folder for folder in Path(__file__).parents if (folder / "Cargo.toml").is_file())
MANIFEST = (
    '[package]\nname = "oxmoe"\nversion = "1.2.0"\n\n[dependencies]\nhalf = { version = "9.9" }\nversion = "8.8.8"\n'
)
ENTRY = "- A thing, with [a page](docs/start.md), [an address](https://example.org/x.md) and [a place](#fixed)."
CHANGELOG = f"""\
# Changelog

## 2.0.0 (unreleased)

- The next one.

## 1.2.0 (2027-01-02)

### Added

{ENTRY}

## 1.2 (2026-12-01)

- The one before.
"""


@pytest.fixture(scope="module")
def script() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("release_notes", ROOT / ".ci" / "release_notes.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def tree(tmp_path: Path, script: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes a repository of these two files, in place of this one."""
    (tmp_path / "Cargo.toml").write_text(MANIFEST)
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG)
    whole = script.notes
    monkeypatch.setattr(script, "notes", lambda *args: whole(*args, root=tmp_path))
    return tmp_path


def test_one_section(tree: Path, script: types.ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(["1.2.0"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("### Added\n\n- A thing, with [a page](docs/start.md)")
    assert "The next one" not in printed and "The one before" not in printed and "1.2 (" not in printed


def test_a_run_on_a_gpu(tree: Path, script: types.ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(["1.2.0", "--gpu-run", "https://example.org/runs/7"]) == 0
    named = capsys.readouterr().out
    assert (
        "passed the GPU tests" in named
        and "(https://example.org/runs/7)" in named
        and "have not run on a GPU" not in named
    )
    # The workflow hands over an empty word if no runner exists.
    for arguments in (["1.2.0"], ["1.2.0", "--gpu-run", ""]):
        assert script.main(arguments) == 0
        denied = capsys.readouterr().out
        assert "have not run on a GPU" in denied and "passed the GPU tests" not in denied


def test_links(tree: Path, script: types.ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(["1.2.0", "--repository", "https://example.org/o/n"]) == 0
    printed = capsys.readouterr().out
    assert "[a page](https://example.org/o/n/blob/v1.2.0/docs/start.md)" in printed
    assert "[an address](https://example.org/x.md)" in printed and "[a place](#fixed)" in printed


REFUSED = {
    "another version in Cargo.toml": ("1.3.0", CHANGELOG, "Cargo.toml: expected version 1.3.0, got 1.2.0"),
    "no section": (
        "1.2.0",
        CHANGELOG.replace("## 1.2.0 (", "## 1.2.0.post1 ("),
        "CHANGELOG.md: expected one section of version 1.2.0, got 0 (its versions: 2.0.0, 1.2.0.post1, 1.2)",
    ),
    "two sections": (
        "1.2.0",
        CHANGELOG.replace("## 1.2 (", "## 1.2.0 ("),
        "CHANGELOG.md: expected one section of version 1.2.0, got 2 (its versions: 2.0.0, 1.2.0, 1.2.0)",
    ),
    "no date": (
        "1.2.0",
        CHANGELOG.replace("2027-01-02", "unreleased"),
        "CHANGELOG.md: expected the heading '## 1.2.0 (YYYY-MM-DD)', got '## 1.2.0 (unreleased)'",
    ),
    "empty": (
        "1.2.0",
        CHANGELOG.replace(ENTRY + "\n", ""),
        "CHANGELOG.md: the section of version 1.2.0 is empty",
    ),
    "no changelog": (
        "1.2.0",
        "",
        "CHANGELOG.md: expected one section of version 1.2.0, got 0 (its versions: none)",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(tree: Path, script: types.ModuleType, capsys: pytest.CaptureFixture[str], name: str) -> None:
    version, changelog, message = REFUSED[name]
    (tree / "CHANGELOG.md").write_text(changelog)
    assert script.main([version]) == 1
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err == message + "\n"


def test_no_version_in_the_manifest(tree: Path, script: types.ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    (tree / "Cargo.toml").write_text(MANIFEST.replace('version = "1.2.0"\n', "", 1))
    assert script.main(["1.2.0"]) == 1
    assert capsys.readouterr().err == "Cargo.toml: no version of the package\n"


def test_this_repository(script: types.ModuleType) -> None:
    """The changelog has a section of Cargo.toml's version; on the day of a release only its date is missing."""
    version = script.cargo_version((ROOT / "Cargo.toml").read_text(encoding="utf-8"))
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    dated = changelog.replace(f"## {version} (unreleased)", f"## {version} (2027-01-01)")
    text = script.section(dated, version)
    assert text.startswith("### ") and f"## {version}" not in text
