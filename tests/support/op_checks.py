"""torch.library.opcheck, also of operators with e4m3 operands, and what fake tensors say of an operator."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from oxmoe.testing import same_bits

_SCHEMA = "test_schema"
_OTHERS = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
# The dtypes that torch's check of the schema cannot compare: torch has no kernels for the comparison of 8-bit floats.
_EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e8m0fnu)


def tensors(value: Any) -> list[Tensor]:
    """Returns the tensors of a result."""
    return [value] if isinstance(value, Tensor) else [part for part in value or () if isinstance(part, Tensor)]


def opcheck(operator: Any, operands: tuple[Any, ...], options: dict[str, Any] | None = None) -> None:
    """Runs every check of torch. If there are 8-bit floats, the check of the schema compares bits."""
    options = options or {}
    given = tensors((*operands, *options.values()))
    eight_bits = any(tensor.dtype in _EIGHT_BITS for tensor in given)
    torch.library.opcheck(operator, operands, options, test_utils=_OTHERS if eight_bits else (_SCHEMA, *_OTHERS))
    if eight_bits:
        check_schema(operator, operands, options)


def check_schema(operator: Any, operands: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Checks that an operator writes only to what its schema names, and returns memory of its own."""
    places = [(argument.name, argument.alias_info) for argument in operator._schema.arguments]
    values = {name: value for (name, _), value in zip(places, operands, strict=False)} | options
    before = {name: value.clone() for name, value in values.items() if isinstance(value, Tensor)}
    results = tensors(operator(*operands, **options))
    for name, alias in places:
        if name in before and (alias is None or not alias.is_write):
            assert same_bits(values[name], before[name]), f"{name} was written to"
    mine = {tensor.untyped_storage().data_ptr() for tensor in tensors(values.values()) if tensor.numel()}
    assert not any(result.numel() and result.untyped_storage().data_ptr() in mine for result in results)


def fakes_are_real(operator: Any, operands: tuple[Any, ...], options: dict[str, Any] | None = None) -> None:
    """Checks that a fake result has the shape, dtype, strides and device of the real one."""
    options = options or {}
    real = tensors(operator(*operands, **options))
    with FakeTensorMode() as mode:

        def fake_of(value: Any) -> Any:
            return mode.from_tensor(value) if isinstance(value, Tensor) else value

        fake = operator(*map(fake_of, operands), **{name: fake_of(value) for name, value in options.items()})
    for r, f in zip(real, tensors(fake), strict=True):
        assert (r.shape, r.dtype, r.device, r.stride()) == (f.shape, f.dtype, f.device, f.stride())
