"""Deprecated names work and warn once, and go when their version is reached."""

from __future__ import annotations

import importlib
import inspect
import io
import pydoc
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

import forked
import oxmoe
from oxmoe import deprecation

# Modules under whose import paths the API reference shows names.
PUBLIC = ("oxmoe", "oxmoe.int4", "oxmoe.nvfp4", "oxmoe.quantize", "oxmoe.reference", "oxmoe.sglang", "oxmoe.testing")
HERE = str(Path(__file__))


@pytest.fixture
def deprecated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """oxmoe.old_moe stands for oxmoe.moe, and oxmoe.quantize.old_rows for oxmoe.quantize.rows_e4m3."""
    monkeypatch.setattr(deprecation, "DEPRECATED", {})
    monkeypatch.setattr(deprecation, "_warned", set())
    deprecation.add("oxmoe.old_moe", "oxmoe.moe", since="0.2.0", removal="0.4.0")
    deprecation.add("oxmoe.quantize.old_rows", "oxmoe.quantize.rows_e4m3", since="0.2.0", removal="0.4.0")
    yield


@pytest.mark.usefixtures("deprecated")
def test_the_first_use_warns_at_its_line() -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(3):
            assert oxmoe.old_moe is oxmoe.moe  # type: ignore[attr-defined,unused-ignore]
    (warning,) = seen
    assert warning.category is DeprecationWarning and warning.filename == HERE
    message = "oxmoe.old_moe is deprecated since oxmoe 0.2.0, and oxmoe 0.4.0 removes it; use oxmoe.moe"
    assert str(warning.message) == message
    with open(HERE, encoding="utf-8") as file:
        assert "oxmoe.old_moe is oxmoe.moe  # type" in file.readlines()[warning.lineno - 1]


@pytest.mark.usefixtures("deprecated")
def test_an_import_statement_warns_at_its_line() -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        from oxmoe.quantize import old_rows  # type: ignore[attr-defined,unused-ignore]

        assert old_rows is oxmoe.quantize.rows_e4m3 and oxmoe.quantize.old_rows is old_rows
    (warning,) = seen
    assert warning.category is DeprecationWarning and warning.filename == HERE and "oxmoe.quantize." in str(warning)


@pytest.mark.usefixtures("deprecated")
def test_names_that_are_shown_stay() -> None:
    assert "old_moe" not in oxmoe.__all__ and "old_moe" not in dir(oxmoe)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shown = io.StringIO()
        pydoc.Helper(output=shown).help(oxmoe)
        everything: dict[str, object] = {}
        exec("from oxmoe import *", everything)
    assert "old_moe" not in shown.getvalue() and "old_moe" not in everything and "moe" in everything
    stub = Path(oxmoe.__file__).with_name("_oxmoe.pyi").read_text(encoding="utf-8")
    assert not any(name.rpartition(".")[2] in stub for name in deprecation.DEPRECATED)


@pytest.mark.usefixtures("deprecated")
@pytest.mark.parametrize("module", PUBLIC)
def test_other_names_are_an_attribute_error(module: str) -> None:
    """In each public module, and without a warning."""
    found = importlib.import_module(module)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(AttributeError, match=f"^module '{module}' has no attribute 'no_such_name'$"):
            _ = found.no_such_name
        assert not hasattr(found, "__wrapped__")


@pytest.mark.parametrize("module", PUBLIC)
def test_each_public_module_looks_up(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deprecation, "DEPRECATED", {})
    monkeypatch.setattr(deprecation, "_warned", set())
    deprecation.add(f"{module}.was_here", "oxmoe.moe", since="0.2.0", removal="0.4.0")
    with pytest.warns(DeprecationWarning, match=f"^{module}.was_here is deprecated"):
        assert importlib.import_module(module).was_here is oxmoe.moe


@pytest.mark.parametrize("module", [module for module in PUBLIC if module != "oxmoe"])
def test_type_checkers_still_find_mistyped_names(module: str) -> None:
    """A module with a __getattr__ has every name for them."""
    source = inspect.getsource(importlib.import_module(module))
    assert "\nif not TYPE_CHECKING:\n    __getattr__ = " in source and source.count("__getattr__ =") == 1


@pytest.mark.usefixtures("deprecated")
def test_a_name_is_deprecated_once() -> None:
    with pytest.raises(ValueError, match=r"oxmoe\.old_moe: is deprecated already, for oxmoe\.moe"):
        deprecation.add("oxmoe.old_moe", "oxmoe.topk", since="0.3.0", removal="0.5.0")


def test_a_script_sees_the_warning() -> None:
    """Python shows a DeprecationWarning only if it is of the script's own line."""
    lines = [
        "import oxmoe, oxmoe.deprecation",
        "oxmoe.deprecation.add('oxmoe.old', 'oxmoe.moe', since='0.2.0', removal='0.4.0')",
        "oxmoe.old",
        "oxmoe.old",
    ]
    done = forked.run("-c", "\n".join(lines))
    assert done.returncode == 0 and done.stderr.count("DeprecationWarning: oxmoe.old is deprecated") == 1


# The table itself


def version(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")))


def overdue(table: dict[str, deprecation.Deprecated], now: str) -> list[str]:
    """Names whose removal this version has reached."""
    return [old for old, entry in table.items() if version(entry.removal) <= version(now)]


def hasty(table: dict[str, deprecation.Deprecated]) -> list[str]:
    """Names that docs/policy.md lets stay longer, or whose version is no minor or major one."""

    def breaks(since: tuple[int, ...], removal: tuple[int, ...]) -> bool:
        later = removal[0] > since[0] if since[0] else removal[0] > 0 or removal[1] >= since[1] + 2
        return not later or since[2] != 0 or removal[2] != 0

    return [old for old, entry in table.items() if breaks(version(entry.since), version(entry.removal))]


def test_no_name_stays_beyond_its_version() -> None:
    assert overdue(deprecation.DEPRECATED, oxmoe.__version__) == [], "remove these names, and list them under Removed"
    assert hasty(deprecation.DEPRECATED) == []


def test_replacements_exist_and_old_names_do_not() -> None:
    for old, entry in deprecation.DEPRECATED.items():
        owner, _, name = entry.replacement.rpartition(".")
        assert hasattr(importlib.import_module(owner), name), entry.replacement
        module, _, name = old.rpartition(".")
        assert module in PUBLIC and name not in vars(importlib.import_module(module)), old


@pytest.mark.usefixtures("deprecated")
def test_what_the_rules_find() -> None:
    table = dict(deprecation.DEPRECATED)
    assert overdue(table, "0.3.9") == [] and overdue(table, "0.4.0") == list(table) == overdue(table, "1.0.0")
    entries = {
        "two minors": ("0.2.0", "0.4.0", False),
        "one minor": ("0.2.0", "0.3.0", True),
        "a patch": ("0.2.1", "0.4.0", True),
        "until 1.0": ("0.9.0", "1.0.0", False),
        "within a major": ("1.2.0", "1.9.0", True),
        "the next major": ("1.2.0", "2.0.0", False),
    }
    for name, (since, removal, wrong) in entries.items():
        assert hasty({name: deprecation.Deprecated("oxmoe.moe", since, removal)}) == ([name] if wrong else []), name
