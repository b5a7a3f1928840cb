"""Mutations by `fuzz_api.py` of the operands of a right call: most results are nearly valid."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from fuzz_calls import E4M3, Call
from fuzz_dlpack import Foreign, Lying

DTYPES = (
    *(torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8, torch.int8, torch.int16, torch.int32),
    *(torch.int64, torch.bool, E4M3, torch.float8_e5m2, torch.complex64, torch.float8_e8m0fnu),
)
INTEGERS = (0, 1, -1, 2, 3, 31, 2**15, 2**16, 2**31 - 1, 2**31, 2**32, 2**32 + 1, 2**40, 2**61, 2**62, 2**63 - 1)
INTEGERS += (2**63, -(2**31), -(2**63), 2**64, 2**100)
FLOATS = (math.nan, math.inf, -math.inf, 0.0, -0.0, -1.0, 1e-40, 1e38, 1e39, 1e300, 5e-324)
STRINGS = ("", "x", "bf16", "silu", "gate_up", "max", "\x00", "\ud800", "x" * 5000)
# Values that are no operand at all.
THINGS: tuple[Callable[[], Any], ...] = (
    *(lambda: None, lambda: 3, lambda: 2.5, lambda: "tensor", lambda: b"bytes", object, lambda: [1.0], dict),
    *(lambda: (1, 2), lambda: torch.float32, lambda: torch.Size((1,)), lambda: np.float32(1), lambda: Tensor),
    *(lambda: torch.zeros((2, 2)).to_sparse(), lambda: np.array(["a"]), lambda: np.array([object()]), lambda: 1j),
)


class Subclass(Tensor):
    """A tensor of a class that published nothing of its own."""


# Tensors: (tensor, rng) -> its replacement, or None if that cannot be made.


def _dtype(t: Tensor, rng: random.Random) -> Any:
    dtype = rng.choice(DTYPES)
    return t.to(dtype)


def _view_dtype(t: Tensor, rng: random.Random) -> Any:
    same = [dtype for dtype in DTYPES if dtype.itemsize == t.dtype.itemsize and dtype != t.dtype]
    return t.view(rng.choice(same)) if same else None


def _shorter(t: Tensor, rng: random.Random) -> Any:
    dim = rng.randrange(t.ndim)
    return t.narrow(dim, 0, t.shape[dim] - 1).contiguous()


def _shorter_view(t: Tensor, rng: random.Random) -> Any:
    dim = rng.randrange(t.ndim)
    return t.narrow(dim, 1, t.shape[dim] - 1)


def _longer(t: Tensor, rng: random.Random) -> Any:
    dim = rng.randrange(t.ndim)
    return torch.cat([t, t.narrow(dim, 0, 1)], dim)


def _twice(t: Tensor, rng: random.Random) -> Any:
    dim = rng.randrange(t.ndim)
    return torch.cat([t, t], dim)


def _empty(t: Tensor, rng: random.Random) -> Any:
    return t.narrow(rng.randrange(t.ndim), 0, 0)


def _one(t: Tensor, rng: random.Random) -> Any:
    return t.narrow(rng.randrange(t.ndim), 0, 1).contiguous()


def _unsqueezed(t: Tensor, rng: random.Random) -> Any:
    for _ in range(rng.choice((1, 1, 2, 9, 60))):
        t = t.unsqueeze(rng.randrange(t.ndim + 1))
    return t


def _flat(t: Tensor, rng: random.Random) -> Any:
    return t.flatten()


def _scalar(t: Tensor, rng: random.Random) -> Any:
    return t.flatten()[0]


def _permuted(t: Tensor, rng: random.Random) -> Any:
    order = list(range(t.ndim))
    rng.shuffle(order)
    return t.permute(order).contiguous()


def _transposed(t: Tensor, rng: random.Random) -> Any:
    """Returns equal numbers in another order of memory."""
    a, b = rng.sample(range(t.ndim), 2)
    return t.transpose(a, b).contiguous().transpose(a, b)


def _expanded(t: Tensor, rng: random.Random) -> Any:
    dim = rng.randrange(t.ndim)
    return t.narrow(dim, 0, 1).expand(t.shape)


def _sliced(t: Tensor, rng: random.Random) -> Any:
    """Returns equal numbers in rows of a wider tensor."""
    return torch.cat([t, t], -1)[..., : t.shape[-1]]


def _stepped(t: Tensor, rng: random.Random) -> Any:
    return torch.stack([t, t], -1)[..., 0]


def _shifted(t: Tensor, rng: random.Random) -> Any:
    """Returns equal numbers at an address some elements later."""
    room = torch.empty(t.numel() + 9, dtype=t.dtype)
    view = room[rng.randint(1, 9) :][: t.numel()].view(t.shape)
    view.copy_(t)
    return view


def _unaligned(t: Tensor, rng: random.Random) -> Any:
    if t.element_size() == 1 or t.numel() == 0:
        return None
    memory = bytearray(t.nbytes + 16)
    view = torch.frombuffer(memory, dtype=t.dtype, count=t.numel(), offset=rng.choice((1, 2, 3)))
    return view.view(t.shape).copy_(t)


def _meta(t: Tensor, rng: random.Random) -> Any:
    return t.to("meta")


def _fake(t: Tensor, rng: random.Random) -> Any:
    if t.numel() == 0:
        return None  # it is an output like any other
    with FakeTensorMode() as mode:
        return mode.from_tensor(t)


def _grad(t: Tensor, rng: random.Random) -> Any:
    return t.clone().requires_grad_() if t.is_floating_point() else None


def _parameter(t: Tensor, rng: random.Random) -> Any:
    return torch.nn.Parameter(t, requires_grad=False)


def _subclass(t: Tensor, rng: random.Random) -> Any:
    return t.as_subclass(Subclass)


def _negated(t: Tensor, rng: random.Random) -> Any:
    return torch._neg_view(t) if t.is_floating_point() and t.itemsize > 1 else None


def _inference(t: Tensor, rng: random.Random) -> Any:
    with torch.inference_mode():
        return t.clone()


def _numpy(t: Tensor, rng: random.Random) -> Any:
    return t.numpy() if t.dtype in (torch.float32, torch.uint8, torch.int32, torch.int64) else None


def _freed(t: Tensor, rng: random.Random) -> Any:
    # An option's number may be a tensor, which Python's float() has torch read. Functions that are written in torch may
    # read subclasses in the same way. Their storages are not freed.
    if t.ndim == 0 or type(t) not in (Tensor, torch.nn.Parameter):
        return None
    t = t.clone()
    t.untyped_storage().resize_(rng.choice((0, 0, t.nbytes // 2)))
    return t


def _numbers(t: Tensor, rng: random.Random) -> Any:
    """Replaces one number by one that is not finite, or beyond what such operands have."""
    t = t.clone()
    flat = t.view(-1)
    at = rng.randrange(flat.numel())
    if t.is_floating_point() and t.itemsize > 1:
        flat[at] = rng.choice((math.nan, math.inf, -math.inf, 0.0, -0.0, 1e15, 1e-30))
    elif t.dtype in (torch.int32, torch.int64):
        flat[at] = rng.choice((-1, -2, 2**31 - 1, -(2**31), 1000, 7))
    else:
        t.view(torch.uint8).view(-1)[at] = rng.choice((0, 1, 127, 128, 140, 255))
    return t


TENSORS = {
    function.__name__[1:]: function
    for function in (
        *(_dtype, _dtype, _view_dtype, _shorter, _shorter_view, _longer, _twice, _empty, _one, _unsqueezed, _flat),
        *(_scalar, _permuted, _transposed, _expanded, _sliced, _stepped, _shifted, _unaligned, _meta, _fake, _grad),
        *(_parameter, _subclass, _negated, _inference, _numpy, _freed, _numbers),
    )
}


# Arrays, for calls whose operands are numpy's.


def _reversed(a: np.ndarray, rng: random.Random) -> Any:
    return a[::-1]


def _fortran(a: np.ndarray, rng: random.Random) -> Any:
    return np.asfortranarray(a)


def _swapped(a: np.ndarray, rng: random.Random) -> Any:
    return a.astype(a.dtype.newbyteorder(">"))


def _read_only(a: np.ndarray, rng: random.Random) -> Any:
    a = a.copy()
    a.flags.writeable = False
    return a


def _unaligned_array(a: np.ndarray, rng: random.Random) -> Any:
    memory = bytearray(a.nbytes + 16)
    view = np.frombuffer(memory, dtype=a.dtype, count=a.size, offset=1).reshape(a.shape)
    view[...] = a
    return view


def _torch(a: np.ndarray, rng: random.Random) -> Any:
    return torch.from_numpy(a)


def _foreign(a: np.ndarray, rng: random.Random) -> Any:
    return Foreign(a)


def _float64(a: np.ndarray, rng: random.Random) -> Any:
    return a.astype(rng.choice((np.float64, np.int8, np.bool_, np.complex64)))


def _masked(a: np.ndarray, rng: random.Random) -> Any:
    return np.ma.masked_array(a)


ARRAYS = {
    function.__name__[1:]: function
    for function in (
        *(_reversed, _fortran, _swapped, _read_only, _unaligned_array, _torch, _foreign, _float64, _masked),
    )
}


def has_memory(value: Any) -> bool:
    """Whether torch's own functions may read and write the tensor: it is neither fake nor has a storage that was
    freed."""
    if not isinstance(value, Tensor) or isinstance(value, FakeTensor) or value.layout != torch.strided:
        return False
    reach = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    end = (value.storage_offset() + reach + 1) * value.itemsize if value.numel() else 0
    return not value.is_meta and value.untyped_storage().nbytes() >= end


# Calls


def _scalar_of(value: Any, rng: random.Random) -> Any:
    """Returns another number, string or thing for a plain value."""
    if rng.random() < 0.1:
        return rng.choice(THINGS)()
    if isinstance(value, bool):
        return rng.choice((None, 0, 1, 2, not value, "True"))
    if isinstance(value, int):
        near = [value - 1, value + 1, 2 * value, float(value), str(value)]
        if abs(value) < 2**62:
            near += [np.int64(value), torch.tensor(value)]
        return rng.choice((*INTEGERS, *near, True, 1.5))
    if isinstance(value, float):
        return rng.choice((*FLOATS, int(value) if math.isfinite(value) else 0, np.float32(value), torch.tensor(value)))
    if isinstance(value, str):
        return rng.choice((*STRINGS, value.upper(), value + " ", value.encode(errors="replace")))
    return rng.choice(THINGS)()


def _overlap(call: Call, rng: random.Random) -> str | None:
    """Moves an operand that is written over another one's memory."""
    operands = call.operands
    written = [name for name in call.outputs if has_memory(operands.get(name))]
    others = [name for name, value in operands.items() if has_memory(value) and value.nbytes]
    if not written or not others:
        return None
    name, other = rng.choice(written), rng.choice(others)
    out, read = operands[name], operands[other]
    if other == name or not out.nbytes or not out.is_contiguous() or not read.is_contiguous():
        return None
    room = torch.zeros(out.nbytes + read.nbytes + 1024, dtype=torch.uint8)
    start = -room.data_ptr() % 256
    shift = rng.choice(
        (0, 256 * rng.randint(0, max(read.nbytes - 1, 0) // 256), max(read.nbytes // 256, 1) * 256 - 256)
    )
    for key, tensor, at in (
        (name, out, start + min(shift, max(read.nbytes - 1, 0) // 256 * 256)),
        (other, read, start),
    ):
        view = room[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        operands[key] = view.copy_(tensor)
    return f"{name} lies over {other}"


def _shared(call: Call, rng: random.Random) -> str | None:
    """Makes two operands one tensor."""
    operands = call.operands
    tensors = [name for name, value in operands.items() if isinstance(value, Tensor)]
    if len(tensors) < 2:
        return None
    name, other = rng.sample(tensors, 2)
    operands[name] = operands[other]
    return f"{name} is {other}"


def _moved(call: Call, rng: random.Random) -> str | None:
    """Moves weights, or frees their memory, after ExpertWeights were made of them."""
    names = [name for name, value in call.operands.items() if "." in name and has_memory(value)]
    if not names or call.operands.get("weights") is not ...:
        return None
    name = rng.choice(names)
    tensor, kind = call.operands[name], rng.choice(("data", "resize_", "set_", "share_memory_"))
    if not tensor.nbytes:
        return None

    def between() -> None:
        if kind == "data":
            tensor.data = tensor.data.clone()
        elif kind == "resize_":
            tensor.untyped_storage().resize_(0)
        elif kind == "set_":
            # PyTorch refuses `set_` on inference tensors outside of inference mode.
            with torch.inference_mode(tensor.is_inference()):
                tensor.set_(torch.zeros_like(tensor))
        else:
            tensor.share_memory_()

    call.between = between
    return f"{name}: {kind} after ExpertWeights were made"


def _unknown(call: Call, rng: random.Random) -> str:
    name = rng.choice(("unknown", "experts.unknown", "out", "workspace", "x_scale", "top_k", "renormalize"))
    if name in call.operands or ("." in name and "weights" not in call.operands):
        name = "unknown"
    call.operands[name] = rng.choice((None, 1, torch.zeros(3), "x"))
    return f"{name} is given"


def _missing(call: Call, rng: random.Random) -> str:
    name = rng.choice(sorted(call.operands))
    del call.operands[name]
    return f"{name} is missing"


def _thing(call: Call, rng: random.Random) -> str:
    name = rng.choice(sorted(call.operands))
    call.operands[name] = rng.choice(THINGS)()
    return f"{name} is {call.operands[name]!r}"


WHOLE = {"overlap": _overlap, "shared": _shared, "moved": _moved, "unknown": _unknown, "missing": _missing}
WHOLE |= {"thing": _thing}


def _of_operand(call: Call, rng: random.Random) -> str | None:
    name = rng.choice(sorted(call.operands))
    value = call.operands[name]
    if isinstance(value, np.ndarray) and rng.random() < 0.2:
        call.operands[name] = made = Lying(value, rng)
        return f"{name}: lying ({made.lie})"
    if isinstance(value, Tensor) and not has_memory(value):
        return None
    if isinstance(value, (Tensor, np.ndarray)):
        kinds = TENSORS if isinstance(value, Tensor) else ARRAYS
        kind = rng.choice(sorted(kinds))
        try:
            made = kinds[kind](value, rng)
        except (RuntimeError, ValueError, IndexError, TypeError, NotImplementedError, BufferError):
            return None  # torch or numpy cannot make it of such a tensor
        if made is None:
            return None
        call.operands[name] = made
        return f"{name}: {kind}"
    call.operands[name] = _scalar_of(value, rng)
    return f"{name} is {str(call.operands[name])[:40]!r}"


def mutate(call: Call, rng: random.Random) -> None:
    """Mutates the call in one way, and describes it in `call.mutations`."""
    for _ in range(20 if call.operands else 0):
        if rng.random() < 0.15:
            kind = rng.choice(sorted(WHOLE))
            done = WHOLE[kind](call, rng)
        else:
            done = _of_operand(call, rng)
        if done is not None:
            call.mutations.append(done)
            return


def to_numpy(call: Call) -> bool:
    """Converts the call's tensors to arrays of numpy. Returns False if it has dtypes that numpy lacks."""
    served = (torch.float32, torch.float16, torch.uint8, torch.int32, torch.int64)
    tensors = {name: value for name, value in call.operands.items() if isinstance(value, Tensor)}
    if any(tensor.dtype not in served for tensor in tensors.values()):
        return False
    same = {id(tensor): tensor.numpy() for tensor in tensors.values()}
    call.operands.update({name: same[id(tensor)] for name, tensor in tensors.items()})
    call.mutations.append("numpy")
    return True
