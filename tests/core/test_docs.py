"""What README and docs point at is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
SOURCES = [path for folder in ("python", "src", "benches") for path in (ROOT / folder).rglob("*") if path.is_file()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    targets = [target for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target]
    missing = [target for target in targets if not (page.parent / target.split("#")[0]).exists()]
    assert not missing, missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_result_files(page: Path) -> None:
    names = re.findall(r"\bh\d00_\w+(?:-\d\d)+\w*\.jsonl", page.read_text(encoding="utf-8"))
    missing = [name for name in names if not (ROOT / "benches" / "results" / name).exists()]
    assert not missing, missing


def test_nobody_is_told_to_install_from_pypi() -> None:
    """There is no such package: a stranger could publish one."""
    told = [
        str(path.relative_to(ROOT))
        for path in [*PAGES, *(path for path in SOURCES if path.suffix in (".py", ".rs", ".sh"))]
        if re.search(r"pip3? install (-\w+ )*oxmoe", path.read_text(encoding="utf-8"))
    ]
    assert not told, told
