"""Runs `python -m oxmoe check` on configs and folders that tests write."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from check_configs import Config
from oxmoe import __main__

RELEASE = ["--sglang", "0.5.23"]


def written(path: Path, config: Any) -> str:
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    return str(path)


def check(folder: Path, capsys: pytest.CaptureFixture[str], config: Config, *arguments: str) -> dict[str, Any]:
    """Returns the answer as JSON; exit status and text agree with it."""
    path = written(folder / "config.json", config)
    given = [path, *RELEASE, *arguments]
    status = __main__.main(["check", *given, "--json"])
    report = json.loads(capsys.readouterr().out)
    assert status == (0 if report["served"] else 1)
    assert __main__.main(["check", *given]) == status
    lines = capsys.readouterr().out.splitlines()
    assert ("NOT SERVED" in lines[0]) == bool(status)
    assert [line for line in lines if line.startswith("  refused: ")] == [f"  refused: {r}" for r in report["refused"]]
    return report


def moe(report: dict[str, Any]) -> list[dict[str, Any]]:
    return [kind for kind in report["kinds"] if kind["kind"] == "moe"]


def shard(path: Path, tensors: dict[str, str], header: bytes | None = None) -> None:
    """Writes a safetensors file with these dtypes and no data, which a check does not read."""
    text = (
        header
        or json.dumps(
            {"__metadata__": {"format": "pt"}}
            | {name: {"dtype": dtype, "shape": [0], "data_offsets": [0, 0]} for name, dtype in tensors.items()}
        ).encode()
    )
    path.write_bytes(struct.pack("<Q", len(text)) + text)


def in_folder(folder: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    __main__.main(["check", str(folder), *RELEASE, "--json", *arguments])
    return json.loads(capsys.readouterr().out)
