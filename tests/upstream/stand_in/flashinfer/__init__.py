"""A stand-in for flashinfer in flashinfer's own tests: names that oxmoe has are oxmoe's, and every other name skips its
test.

Every submodule has every name, so that a test file imports whatever path its release has. `served.py` is the list of
oxmoe's names; a call of any other name ends the test as skipped, with that name.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any

import pytest


class Missing:
    """A name that oxmoe does not have. Tests may import it, pass it on and put it into lists, but not call it."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        pytest.skip(f"not served: {self.__name__}")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing(f"{self.__name__}.{name}")

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[Any, ...]:
        return ()

    def __or__(self, other: Any) -> Any:
        return other

    __ror__ = __or__

    def __int__(self) -> int:
        return 0

    def __iter__(self) -> Any:
        return iter(())

    def __repr__(self) -> str:
        return f"flashinfer's {self.__name__}"


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        served = sys.modules["flashinfer_served"]
        return served.NAMES[name] if name in served.NAMES else Missing(name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        if not name.startswith("flashinfer."):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = _Module(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


__version__ = "0.7.4"
sys.meta_path.insert(0, _Finder())
sys.modules[__name__].__class__ = _Module
importlib.import_module("flashinfer_served")
