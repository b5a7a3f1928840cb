"""The public functions: the extension's builtins, or with torch the wrappers of `oxmoe.ops`, which torch can trace."""

from __future__ import annotations

from oxmoe.tracing import HAS_TORCH

if HAS_TORCH:
    from oxmoe.ops import moe, routing_tables, sort_by_expert, topk
else:
    from oxmoe._oxmoe import moe, routing_tables, sort_by_expert, topk

__all__ = ["moe", "routing_tables", "sort_by_expert", "topk"]
