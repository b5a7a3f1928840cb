"""Stands for sgl_kernel, from which SGLang 0.5.12.post1 imports names on every machine. All names exist; none can be
called."""

from __future__ import annotations

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__version__ = "99.0.0"
__path__: list[str] = []


class Missing:
    """Stands for any name of sgl_kernel."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, name: str) -> Missing:
        return _name(name, f"{self.name}.{name}")

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        raise NotImplementedError(f"{self.name} is not there on a CPU")


def _name(name: str, full: str) -> Missing:
    if name.startswith("__"):
        raise AttributeError(name)
    return Missing(full)


def __getattr__(name: str) -> Missing:
    return _name(name, f"{__name__}.{name}")


class Submodules(MetaPathFinder, Loader):
    """Finds every module of the package, with every name in it."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.startswith(f"{__name__}.") else None

    def exec_module(self, module: ModuleType) -> None:
        own = module.__name__
        vars(module)["__getattr__"] = lambda name: _name(name, f"{own}.{name}")


sys.meta_path.append(Submodules())
