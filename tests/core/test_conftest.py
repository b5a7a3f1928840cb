"""What the tests' own conftest.py decides."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest


def test_a_folder_named_gpu_is_no_mark(request: pytest.FixtureRequest) -> None:
    """pytest's keywords of a test hold the names of its folders, too."""
    conftest = request.config.pluginmanager.get_plugin(str(Path(__file__).parents[1] / "conftest.py"))
    assert conftest is not None
    marked: list[str] = []
    item = SimpleNamespace(keywords={"gpu", "multi_gpu"}, get_closest_marker=lambda _: None, add_marker=marked.append)
    conftest.pytest_collection_modifyitems([item])
    assert not marked
