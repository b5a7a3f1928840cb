"""Checks of operands that torch handles before the extension sees them, in the extension's words."""

from __future__ import annotations

from typing import Any

from oxmoe.tracing import tracing

_QUANTIZERS = ("auto", "cuda", "cute-dsl")


def check_no_grad(name: str, tensor: Any) -> None:
    """Raises ValueError if the result of a call would lack this operand's gradient."""
    import torch

    if tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{name}: requires grad; oxmoe has no backward: pass {name}.detach() or call under torch.no_grad()"
        )


def check_tensor(name: str, value: Any, *dimensions: str) -> None:
    """Raises ValueError unless value is a dense torch tensor in memory. If dimensions are given, it must have them."""
    import torch

    if not isinstance(value, torch.Tensor):
        raise ValueError(f"{name}: expected a torch tensor, got {type(value).__name__}")
    if value.layout != torch.strided:
        raise ValueError(f"{name}: expected a dense tensor, got layout {str(value.layout).rpartition('.')[2]}")
    if dimensions and value.ndim != len(dimensions):
        raise ValueError(f"{name}: expected [{', '.join(dimensions)}], got shape {tuple(value.shape)}")
    # Traced code has no memory, so its reach is not checked.
    if value.numel() and not tracing() and type(value) in (torch.Tensor, torch.nn.Parameter) and not value.is_meta:
        reach = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
        held, end = value.untyped_storage().nbytes(), (value.storage_offset() + reach + 1) * value.itemsize
        if held < end:
            raise ValueError(f"{name}: its storage has {held} bytes, which do not hold it")


def check_quantizer(backend: str, batch_invariant: bool) -> None:
    """Checks the arguments of flashinfer's quantisers that choose among its kernels."""
    if backend not in _QUANTIZERS:
        raise ValueError(f"backend: expected 'auto', 'cuda' or 'cute-dsl', got {backend!r}")
    if batch_invariant and backend != "auto":
        raise ValueError(f"batch_invariant: expected backend 'auto' with it, got {backend!r}")


def check_counts(counts: dict[str, int]) -> None:
    """Raises ValueError unless each count is 1 or more."""
    for name, count in counts.items():
        if count <= 0:
            raise ValueError(f"{name}: expected 1 or more, got {count}")
