"""Comments are sentences that a reader understands who lands in the middle: each has its subject."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = next(folder for folder in Path(__file__).parents if (folder / "Cargo.toml").is_file())
MARKS = {".rs": "//[/!]?", ".cuh": "//", ".cu": "//", ".c": "//", ".py": "(?:#|//)", ".pyi": "#", ".sh": "#"}
SOURCES = [ROOT / "build.rs"] + [
    path
    for folder in ("benches", "csrc", "python", "src", "tests")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in MARKS and path != Path(__file__)
]
# A sentence that begins so has its subject in another line, or none.
HEADLESS = ("Of", "The same", "As", "Those", "Its", "Their", "What", "Else", "Likewise", "Ditto")


def headless(text: str, suffix: str) -> list[str]:
    """Returns the first lines of comments that begin without a subject."""
    mark = MARKS[suffix]
    begins = re.compile(rf"\s*{mark} (?:{'|'.join(HEADLESS)})\b")
    comment = re.compile(rf"\s*{mark}( |$)")
    lines = text.splitlines()
    return [
        f"{number}: {line.strip()}"
        for number, (before, line) in enumerate(zip(["", *lines], lines, strict=False), 1)
        if begins.match(line) and not comment.match(before)
    ]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_comments_begin_with_their_subject(path: Path) -> None:
    assert not headless(path.read_text(encoding="utf-8"), path.suffix)


def test_a_comment_without_a_subject_is_found() -> None:
    code = (
        "let a = 1;\n/// Of every expert.\nfn f() {\n    // The tables are copied.\n    // As many as there are.\n}\n"
    )
    assert headless(code, ".rs") == ["2: /// Of every expert."]
    assert headless("x = 1\n# What it reads.\ny = 2  # Of x\n", ".py") == ["2: # What it reads."]
