#!/usr/bin/env python3
"""Prints the notes of one release: its version's section of CHANGELOG.md, and what was checked before it was published.

Usage: release_notes.py VERSION [--gpu-run URL] [--repository URL]

The exit status is 1, with one line that says why, if Cargo.toml has another version, or if the changelog has no section
of this version, has it twice, has no date in its heading, or says nothing in it.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

GPU_RUN = "The x86_64 wheel of this release passed the GPU tests before it was published: [the run]({url})."
NO_GPU_RUN = "The wheels of this release have not run on a GPU: no GPU runner was configured for the repository."
FILES = (
    "`sha256sum --check --ignore-missing SHA256SUMS` compares downloaded files with their checksums. "
    "`gh attestation verify FILE --repo OWNER/NAME` says by which workflow and from which commit a file was built."
)


class NoNotes(Exception):
    """The reason why there are no notes."""


def section(changelog: str, version: str) -> str:
    """The text below the heading `## VERSION (DATE)`, up to the next heading of a version."""
    headings = list(re.finditer(r"^## (.+)$", changelog, flags=re.M))
    found = [place for place, heading in enumerate(headings) if heading[1].split()[0] == version]
    if len(found) != 1:
        versions = ", ".join(heading[1].split()[0] for heading in headings) or "none"
        raise NoNotes(
            f"CHANGELOG.md: expected one section of version {version}, got {len(found)} (its versions: {versions})"
        )
    heading = headings[found[0]]
    if not re.fullmatch(re.escape(version) + r" \(\d{4}-\d\d-\d\d\)", heading[1]):
        raise NoNotes(f"CHANGELOG.md: expected the heading '## {version} (YYYY-MM-DD)', got '{heading[0]}'")
    end = headings[found[0] + 1].start() if found[0] + 1 < len(headings) else len(changelog)
    text = changelog[heading.end() : end].strip()
    # Headings of kinds of changes alone say nothing.
    if not [line for line in text.splitlines() if line.strip() and not line.startswith("#")]:
        raise NoNotes(f"CHANGELOG.md: the section of version {version} is empty")
    return text


def cargo_version(manifest: str) -> str:
    package = re.search(r"^\[package\]$(.*?)(?=^\[|\Z)", manifest, flags=re.M | re.S)
    version = package and re.search(r'^version = "([^"]+)"$', package[1], flags=re.M)
    if not version:
        raise NoNotes("Cargo.toml: no version of the package")
    return version[1]


def with_whole_links(text: str, root: str) -> str:
    """Links to files of the repository, as addresses: a release's page is in no folder."""
    return re.sub(r"\]\((?![a-z]+:|#)", f"]({root}/", text)


def notes(version: str, gpu_run: str | None, repository: str | None, root: Path = ROOT) -> str:
    stated = cargo_version((root / "Cargo.toml").read_text(encoding="utf-8"))
    if stated != version:
        raise NoNotes(f"Cargo.toml: expected version {version}, got {stated}")
    text = section((root / "CHANGELOG.md").read_text(encoding="utf-8"), version)
    if repository:
        text = with_whole_links(text, f"{repository}/blob/v{version}")
    ran = GPU_RUN.format(url=gpu_run) if gpu_run else NO_GPU_RUN
    return f"{text}\n\n### This release's files\n\n{ran}\n\n{FILES}\n"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("version", help="without the v of the tag")
    parser.add_argument("--gpu-run", metavar="URL", help="the workflow run in which the wheel passed the GPU tests")
    parser.add_argument("--repository", metavar="URL", help="links of the changelog become addresses in it")
    args = parser.parse_args(arguments)
    try:
        print(notes(args.version, args.gpu_run or None, args.repository), end="")
    except NoNotes as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
