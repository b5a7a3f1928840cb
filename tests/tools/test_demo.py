"""`python -m oxmoe demo` on a small layer: with torch, with numpy alone, and when a value is wrong."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from oxmoe import __main__
from oxmoe.tools import demo


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"EXPERTS": 8, "TOP_K": 2, "HIDDEN": 64, "INTERMEDIATE": 32}.items():
        monkeypatch.setattr(demo, name, value)
    monkeypatch.setattr(demo, "best_of", lambda call: 1.0)


def rows(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines() if re.match(r" +\d+ +[\d.]+ ", line)]


def test_with_torch(capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.main(["demo", "--tokens", "1", "9"]) == 0
    text = capsys.readouterr().out
    assert [row[0] for row in rows(text)] == ["1", "9"] and "all below the bar" in text and "9 tokens" in text


def test_with_numpy_alone(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(demo, "find_spec", lambda name: None)
    assert __main__.main(["demo", "--tokens", "5"]) == 0
    text = capsys.readouterr().out
    assert "f16" in text and "on CPU" in text and [row[0] for row in rows(text)] == ["5"]


@pytest.mark.parametrize("wrong", [0, 3, 6])
def test_a_wrong_row_is_reported(
    wrong: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first, the fourth and the seventh of nine tokens are checked, and not only the first."""
    right = demo.moe

    def call(*operands: Any, **options: Any) -> Any:
        result = right(*operands, **options)
        result[wrong] = 0.0
        return result

    monkeypatch.setattr(demo, "moe", call)
    assert __main__.main(["demo", "--tokens", "9"]) == 1
    assert "1 WRONG" in capsys.readouterr().out


def test_a_result_of_nan_is_wrong(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    right = demo.moe
    monkeypatch.setattr(demo, "moe", lambda *operands, **options: right(*operands, **options).fill_(math.nan))
    assert __main__.main(["demo", "--tokens", "2"]) == 1
    assert "1 WRONG" in capsys.readouterr().out


def test_wrong_values_are_reported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    right = demo.reference
    monkeypatch.setattr(demo, "reference", lambda *operands: 1.1 * right(*operands))
    assert __main__.main(["demo", "--tokens", "2", "3"]) == 1
    assert "2 WRONG" in capsys.readouterr().out
