"""The arguments of this process's server. Imports nothing of SGLang before it is asked."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any


def read(of_context: Callable[[Any], Any], of_arguments: Callable[[Any], Any]) -> Any:
    """One argument, of SGLang's runtime context or in older releases of its global arguments; None without a server."""
    try:
        return of_context(importlib.import_module("sglang.srt.runtime_context"))
    except (AttributeError, ImportError, LookupError, RuntimeError, ValueError):
        pass  # there is none before 0.5.17
    try:
        return of_arguments(importlib.import_module("sglang.srt.server_args").get_global_server_args())
    except (AttributeError, RuntimeError, ValueError):
        return None


def balances_experts() -> bool:
    """Whether it has --enable-eplb."""
    return bool(read(lambda context: context.get_exec().moe.enable_eplb, lambda arguments: arguments.enable_eplb))


def compiles() -> bool:
    """Whether it has --enable-torch-compile."""
    return bool(
        read(
            lambda context: context.get_exec().graph.enable_torch_compile,
            lambda arguments: arguments.enable_torch_compile,
        )
    )


def speculates() -> bool:
    """Whether it has --speculative-algorithm."""
    algorithm = read(
        lambda context: context.get_spec().speculative_algorithm, lambda arguments: arguments.speculative_algorithm
    )
    return algorithm is not None
