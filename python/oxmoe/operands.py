"""Checks of operands that torch handles before the extension sees them, in the extension's words."""

from __future__ import annotations

from typing import Any


def check_tensor(name: str, value: Any, *dimensions: str) -> None:
    """ValueError unless value is a dense torch tensor, and has these dimensions where any are named."""
    import torch

    if not isinstance(value, torch.Tensor):
        raise ValueError(f"{name}: expected a torch tensor, got {type(value).__name__}")
    if value.layout != torch.strided:
        raise ValueError(f"{name}: expected a dense tensor, got layout {str(value.layout).rpartition('.')[2]}")
    if dimensions and value.ndim != len(dimensions):
        raise ValueError(f"{name}: expected [{', '.join(dimensions)}], got shape {tuple(value.shape)}")
