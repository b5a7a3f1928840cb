"""Checks of operands that torch handles before the extension sees them, in the extension's words."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from oxmoe.tracing import tracing

if TYPE_CHECKING:
    from torch import Tensor

# Errors of Python that an argument of a wrong type leads to.
WRONG_TYPES = (TypeError, AttributeError, OverflowError)
_Call = TypeVar("_Call", bound=Callable[..., Any])
# A type in an annotation -> whether a value may stand for it. Other types are not checked.
_TYPES: dict[str, Callable[[Any], bool]] = {
    "Tensor": lambda value: hasattr(value, "__dlpack__"),
    "int": lambda value: hasattr(value, "__index__"),
    "float": lambda value: hasattr(value, "__float__") or hasattr(value, "__index__"),
    "str": lambda value: isinstance(value, str),
    "tuple": lambda value: isinstance(value, tuple | list),
    "ExpertWeights": lambda value: type(value).__name__ == "ExpertWeights",
    "None": lambda value: value is None,
}
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


def as_bytes(name: str, tensor: Tensor) -> Tensor:
    """Returns a packed operand, which may have any dtype, as uint8. Raises ValueError if its last dimension has no
    neighbouring bytes."""
    import torch

    try:
        return tensor.view(torch.uint8)
    except RuntimeError as error:
        dtype = str(tensor.dtype).rpartition(".")[2]
        raise ValueError(
            f"{name}: expected a last dimension that is contiguous, got {dtype}, shape {tuple(tensor.shape)}, strides "
            f"{tensor.stride()}"
        ) from error


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


def name_argument(error: Exception, function: Callable[..., Any], values: dict[str, Any]) -> None:
    """Raises a TypeError that names the first of a function's arguments whose type is not that of its annotation.

    A function calls this with its `locals()` in a handler of WRONG_TYPES, and raises the error again if this returns.
    So right calls pay nothing for it.
    """
    wrong = _wrong_argument(function, values)
    if wrong is not None:
        raise TypeError(wrong) from error


def named_arguments(function: _Call) -> _Call:
    """Decorates a call at load, which then raises what `name_argument` says.

    A call of every step has the handler in its body: a decorator would cost it time.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except WRONG_TYPES as error:
            try:
                given = inspect.signature(function).bind(*args, **kwargs).arguments
            except TypeError:
                given = {}  # An argument is missing or unknown, and Python's own words name it.
            name_argument(error, function, given)
            raise

    return call  # type: ignore[return-value]


def checked_arguments(function: _Call) -> _Call:
    """Decorates a call that prepares weights at load: as `named_arguments`, and every tensor is dense and in memory."""

    def call(*args: Any, **kwargs: Any) -> Any:
        names = inspect.signature(function).parameters
        for name, value in (*zip(names, args, strict=False), *kwargs.items()):
            if hasattr(value, "untyped_storage"):
                check_tensor(name, value)
                if value.is_meta or (hasattr(value, "fake_mode") and not tracing()):
                    raise ValueError(f"{name}: expected a tensor in memory, got {type(value).__name__} on meta")
        return function(*args, **kwargs)

    return named_arguments(functools.wraps(function)(call))  # type: ignore[return-value]


def check_outputs(device: Any, **outputs: Any) -> None:
    """Raises ValueError if torch could not write the outputs one after the other, so that none or all are written."""
    import torch

    if tracing():
        return
    ends: dict[str, tuple[int, int]] = {}
    for name, tensor in outputs.items():
        if hasattr(tensor, "fake_mode"):
            raise ValueError(f"{name}: is a fake tensor, which has no memory")
        if tensor.device != device:
            raise ValueError(f"{name}: expected device {device}, got {tensor.device}")
        if tensor.is_inference() and not torch.is_inference_mode_enabled():
            raise ValueError(f"{name}: was made in inference mode, and torch writes to it only there")
        check_no_grad(name, tensor)
        sizes = sorted(zip(tensor.stride(), tensor.shape, strict=True))
        reach = 0
        for stride, size in sizes:
            if size > 1 and stride <= reach:
                raise ValueError(f"{name}: its elements overlap in memory, strides {tuple(tensor.stride())}")
            reach += (size - 1) * stride
        start = tensor.data_ptr()
        end = start + (reach + 1) * tensor.itemsize if tensor.numel() else start
        for other, (low, high) in ends.items():
            if start < high and low < end:
                raise ValueError(f"{name}: shares memory with {other}")
        ends[name] = (start, end)


def _wrong_argument(function: Callable[..., Any], values: dict[str, Any]) -> str | None:
    """Returns what is wrong with the first argument whose type is not that of its annotation. None if there is none."""
    given = {name: values[name] for name in inspect.signature(function).parameters if name in values}
    # Some operands may be arrays of other projects. An array is only to blame if nothing else is.
    for of_tensor in (_TYPES["Tensor"], lambda value: hasattr(value, "untyped_storage")):
        may_be = {**_TYPES, "Tensor": of_tensor}
        for name, value in given.items():
            annotation = str(function.__annotations__.get(name, "Any"))
            types = re.sub(r"\[.*\]", "", annotation).split(" | ")
            if all(kind in may_be and not may_be[kind](value) for kind in types):
                return f"{name}: expected {annotation}, got {type(value).__name__}"
    return None
