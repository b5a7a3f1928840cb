"""Objects whose DLPack capsules, or exchange tables, say what is not so. Run as a program it hands each to oxmoe.

`python dlpack_liar.py USE ROUTE [LIE...]` prints JSON lines: a lie's name before the call, and behind it the outcome.
So a crash shows as a name with nothing behind it. `USES` says for what, and `ROUTES` how, an object is handed over.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

import oxmoe

# The ABI (dlpack.h)


class Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    ]


Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
Destructor = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)


class Managed(ctypes.Structure):
    _fields_ = [("tensor", Tensor), ("manager", ctypes.c_void_p), ("deleter", Deleter)]


class Versioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager", ctypes.c_void_p),
        ("deleter", Deleter),
        ("flags", ctypes.c_uint64),
        ("tensor", Tensor),
    ]


class Table(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("previous", ctypes.c_void_p),
        ("allocate", ctypes.c_void_p),
        ("managed_from_object", ctypes.c_void_p),
        ("managed_to_object", ctypes.c_void_p),
        ("tensor_from_object", ctypes.c_void_p),
        ("current_stream", ctypes.c_void_p),
    ]


api = ctypes.pythonapi
api.PyCapsule_New.restype = ctypes.py_object
api.PyCapsule_New.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
api.PyCapsule_IsValid.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
api.PyCapsule_GetPointer.restype = ctypes.c_void_p
api.PyCapsule_GetPointer.argtypes = [ctypes.c_void_p, ctypes.c_char_p]

# Objects that C memory points to; a capsule outlives the call that made it.
KEPT: list[Any] = []
MADE: list[int] = []
DELETED: list[int] = []


# Claims


@dataclass(frozen=True)
class Claim:
    """The claim of a capsule about memory that has `shape` and is aligned to 64 bytes. None: the truth."""

    shape: tuple[int, ...]
    dtype: tuple[int, int, int] = (2, 32, 1)
    ndim: int | None = None
    strides: tuple[int, ...] | None = None
    device: tuple[int, int] = (1, 0)
    no_data: bool = False
    no_shape: bool = False
    shift: int = 0  # of the data's address
    shape_shift: int = 0  # of the shape's address
    odd: bool = False  # whether the struct in the capsule lies at an odd address
    byte_offset: int = 0
    flags: int = 0
    version: tuple[int, int] = (1, 1)
    name: bytes | None = field(default=b"")
    other: Callable[[], Any] | None = None  # replaces a capsule as the result of __dlpack__


def numbers(values: tuple[int, ...], shift: int = 0) -> int:
    memory = ctypes.create_string_buffer(8 * len(values) + 16)
    KEPT.append(memory)
    at = -(-ctypes.addressof(memory) // 8) * 8 + shift
    ctypes.memmove(at, (ctypes.c_int64 * len(values))(*values), 8 * len(values))
    return at


def tensor(claim: Claim) -> Tensor:
    memory = ctypes.create_string_buffer(1 << 16)
    KEPT.append(memory)
    at = -(-ctypes.addressof(memory) // 64) * 64
    code, bits, lanes = claim.dtype
    return Tensor(
        data=None if claim.no_data else at + claim.shift,
        device_type=claim.device[0],
        device_id=claim.device[1],
        ndim=len(claim.shape) if claim.ndim is None else claim.ndim,
        code=code,
        bits=bits,
        lanes=lanes,
        shape=None if claim.no_shape else numbers(claim.shape, claim.shape_shift),
        strides=None if claim.strides is None else numbers(claim.strides),
        byte_offset=claim.byte_offset,
    )


def managed(claim: Claim, versioned: bool) -> Managed | Versioned:
    deleter = Deleter(DELETED.append)
    if versioned:
        major, minor = claim.version
        result: Any = Versioned(major, minor, None, deleter, claim.flags, tensor(claim))
    else:
        result = Managed(tensor(claim), None, deleter)
    KEPT.extend([deleter, result])
    MADE.append(ctypes.addressof(result))
    return result


def capsule(claim: Claim, versioned: bool) -> Any:
    """Returns a capsule as producers make it: a consumer renames it and takes it over; otherwise its own destructor
    calls the deleter."""
    struct = managed(claim, versioned)
    right = b"dltensor_versioned" if versioned else b"dltensor"
    name = claim.name if claim.name != b"" else right

    def destroy(address: int) -> None:
        if api.PyCapsule_IsValid(address, right):
            struct.deleter(api.PyCapsule_GetPointer(address, right))

    destructor = Destructor(destroy)
    KEPT.extend([destructor, name])
    if claim.odd:
        # The copy is nobody's to free: its deleter has been called.
        struct.deleter(ctypes.addressof(struct))
        return api.PyCapsule_New(moved(struct, ctypes.sizeof(struct)), name, None)
    return api.PyCapsule_New(ctypes.addressof(struct), name, ctypes.cast(destructor, ctypes.c_void_p))


def moved(struct: Any, size: int) -> int:
    """The address of a copy at an odd address."""
    memory = ctypes.create_string_buffer(size + 32)
    KEPT.append(memory)
    at = -(-ctypes.addressof(memory) // 16) * 16 + 1
    ctypes.memmove(at, ctypes.addressof(struct), size)
    return at


class Liar:
    """An array of another package, with `__dlpack__`."""

    def __init__(self, claim: Claim, versioned: bool) -> None:
        self.claim, self.versioned = claim, versioned

    def __dlpack__(self, **_: Any) -> Any:
        return capsule(self.claim, self.versioned) if self.claim.other is None else self.claim.other()

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.claim.device


def table_type(claim: Claim, **changes: Any) -> type:
    """A type that publishes DLPack's exchange table, as torch's does, with functions that say what `claim` says."""

    @ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(Tensor))
    def from_object(_: int, out: Any) -> int:
        out[0] = tensor(claim)
        return 0

    @ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p))
    def managed_from_object(_: int, out: Any) -> int:
        out[0] = ctypes.addressof(managed(claim, True))
        return 0

    def address(function: Any) -> int | None:
        return ctypes.cast(function, ctypes.c_void_p).value

    functions = {
        "tensor_from_object": address(from_object),
        "managed_from_object": address(managed_from_object),
        "major": 1,
        "minor": 3,
    }
    table = Table(**functions | changes)
    KEPT.extend([from_object, managed_from_object, table])
    name = b"dlpack_exchange_api"
    published = api.PyCapsule_New(ctypes.addressof(table), name, None)
    names = {"__dlpack_c_exchange_api__": published, "requires_grad": False, "is_neg": lambda self: False}
    made = type("TableLiar", (Liar,), names)
    KEPT.append(made)
    return made


class Described(Liar):
    """An array that no capsule says anything of, and that its array interface describes as one that is not written."""

    def __dlpack__(self, **_: Any) -> Any:
        raise BufferError("read-only")

    @property
    def __array_interface__(self) -> dict[str, Any]:
        says = tensor(self.claim)
        strides = None if self.claim.strides is None else tuple(4 * stride for stride in self.claim.strides)
        return {
            "data": (says.data, True),
            "shape": self.claim.shape,
            "strides": strides,
            "typestr": "<f4",
            "version": 3,
        }


ROUTES: dict[str, Callable[[Claim], Any]] = {
    "capsule": lambda claim: Liar(claim, False),
    "versioned": lambda claim: Liar(claim, True),
    "table": lambda claim: table_type(claim)(claim, True),
}


# Uses: (name of the operand, shape, call)


def read(liar: Any) -> None:
    oxmoe.topk(liar, 2)


def written(liar: Any) -> None:
    w13, w2 = np.ones((2, 16, 16), np.float32), np.ones((2, 16, 8), np.float32)
    gates, ids = np.ones((4, 2), np.float32), np.zeros((4, 2), np.int32)
    oxmoe.moe(np.ones((4, 16), np.float32), oxmoe.ExpertWeights.f32(w13, w2), gates, ids, out=liar)


def kept(liar: Any) -> None:
    weights = oxmoe.ExpertWeights.f32(liar, np.ones((2, 16, 8), np.float32))
    gates, ids = np.ones((4, 2), np.float32), np.zeros((4, 2), np.int32)
    oxmoe.moe(np.ones((4, 16), np.float32), weights, gates, ids)


USES: dict[str, tuple[str, tuple[int, ...], Callable[[Any], None]]] = {
    "read": ("router_logits", (4, 16), read),
    "written": ("out", (4, 16), written),
    "kept": ("w13", (2, 16, 16), kept),
}


# The lies: name -> claim of a shape. HONEST ones are to be taken.


def raises() -> Any:
    raise OSError("no capsule today")


def sizes(shape: tuple[int, ...], first: int, last: int) -> tuple[int, ...]:
    return (first, *shape[1:-1], last)


Maker = Callable[[tuple[int, ...]], Claim]
HONEST: dict[str, Maker] = {
    "plain": Claim,
    "read-only": lambda s: Claim(s, flags=1),
    "a shape at an odd address": lambda s: Claim(s, shape_shift=1),
    "a struct at an odd address": lambda s: Claim(s, odd=True),
    "strides given": lambda s: Claim(s, strides=(*(s[-1] * n for n in ([s[1]] if len(s) == 3 else [])), s[-1], 1)),
    "byte offset": lambda s: Claim(s, byte_offset=64),
    "a later minor version": lambda s: Claim(s, version=(1, 99)),
    "page-locked memory": lambda s: Claim(s, device=(3, 0)),
    "an unknown flag": lambda s: Claim(s, flags=1 << 40),
}
LIES: dict[str, Maker] = {
    "ndim -1": lambda s: Claim(s, ndim=-1),
    "ndim -2^31": lambda s: Claim(s, ndim=-(2**31)),
    "ndim 0": lambda s: Claim(s, ndim=0),
    "ndim 7": lambda s: Claim((*s, 1, 1, 1, 1, 1)[:7], ndim=7),
    "ndim 2^31 - 1": lambda s: Claim(s, ndim=2**31 - 1),
    "a negative size": lambda s: Claim((-s[0], *s[1:])),
    "two negative sizes": lambda s: Claim(sizes(s, -s[0], -s[-1])),
    "size -2^63": lambda s: Claim((-(2**63), *s[1:])),
    "all sizes -1": lambda s: Claim((-1,) * len(s)),
    "product is 2^66": lambda s: Claim((2**62, *s[1:])),
    "product is 2^64": lambda s: Claim(sizes(s, 2**32, 2**32)),
    "product is just over 2^63": lambda s: Claim(sizes(s, 3037000500, 3037000500)),
    "product is 2^62, bytes are 2^64": lambda s: Claim(sizes(s, 2**60, 4)),
    "product of the others overflows beside a 0": lambda s: Claim((0, 2**62, 2**62)[: len(s)]),
    "more bytes than addresses": lambda s: Claim((2**57, *s[1:])),
    "no shape": lambda s: Claim(s, no_shape=True),
    "no data": lambda s: Claim(s, no_data=True),
    "no data but an offset": lambda s: Claim(s, no_data=True, byte_offset=64),
    "byte offset wraps": lambda s: Claim(s, byte_offset=2**64 - 64),
    "byte offset wraps to 0": lambda s: Claim(s, shift=64, byte_offset=2**64 - 1),
    "device type 0": lambda s: Claim(s, device=(0, 0)),
    "device type -1": lambda s: Claim(s, device=(-1, 0)),
    "device type 4 (OpenCL)": lambda s: Claim(s, device=(4, 0)),
    "device type 99": lambda s: Claim(s, device=(99, 0)),
    "device cuda:0": lambda s: Claim(s, device=(2, 0)),
    "device cuda:-1": lambda s: Claim(s, device=(2, -1)),
    "device cuda:2^31 - 1": lambda s: Claim(s, device=(2, 2**31 - 1)),
    "device cuda managed": lambda s: Claim(s, device=(13, 0)),
    "data at an odd address": lambda s: Claim(s, shift=1),
    "data at half an element": lambda s: Claim(s, byte_offset=2),
    "strides 0": lambda s: Claim(s, strides=(0,) * len(s)),
    "a negative stride": lambda s: Claim(s, strides=(*(256,) * (len(s) - 2), -s[-1], 1)),
    "stride 2^62": lambda s: Claim(s, strides=(2**62, *(s[-1],) * (len(s) - 2), 1)),
    "stride -2^63": lambda s: Claim(s, strides=(-(2**63), *(s[-1],) * (len(s) - 2), 1)),
    "no lanes": lambda s: Claim(s, dtype=(2, 32, 0)),
    "two lanes of 16 bits": lambda s: Claim(s, dtype=(2, 16, 2)),
    "32 lanes of one bit": lambda s: Claim(s, dtype=(2, 1, 32)),
    "lanes wrap to 32 bits": lambda s: Claim(s, dtype=(2, 32, 2049)),
    "float of 0 bits": lambda s: Claim(s, dtype=(2, 0, 1)),
    "float4": lambda s: Claim(s, dtype=(17, 4, 1)),
    "int4": lambda s: Claim(s, dtype=(0, 4, 1)),
    "type code 255": lambda s: Claim(s, dtype=(255, 32, 1)),
    "a pointer": lambda s: Claim(s, dtype=(3, 64, 1)),
}
# Lies of a capsule's own form, not of its contents.
CAPSULES: dict[str, Maker] = {
    "a consumed capsule": lambda s: Claim(s, name=b"used_dltensor"),
    "a consumed capsule with a version": lambda s: Claim(s, name=b"used_dltensor_versioned"),
    "a capsule of another name": lambda s: Claim(s, name=b"arrow_schema"),
    "a capsule without a name": lambda s: Claim(s, name=None),
    "None": lambda s: Claim(s, other=lambda: None),
    "a number": lambda s: Claim(s, other=lambda: 7),
    "an exception": lambda s: Claim(s, other=raises),
}
VERSIONED: dict[str, Maker] = {
    "version 2": lambda s: Claim(s, version=(2, 0)),
    "version 0": lambda s: Claim(s, version=(0, 8)),
    "version 2^32 - 1": lambda s: Claim(s, version=(2**32 - 1, 0)),
}
# fp8's and fp4's types with bits and lanes that only multiply to a byte, as the weights of fp8_block.
BYTES: dict[str, tuple[int, int, int]] = {
    "e4m3 of two lanes of 4 bits": (10, 4, 2),
    "e4m3 of eight lanes of one bit": (10, 1, 8),
    "e4m3 without lanes": (10, 8, 0),
    "uint8 of two lanes of 4 bits": (1, 4, 2),
    "e4m3 of two lanes": (10, 8, 2),
}


def lies(route: str) -> dict[str, Maker]:
    extra = {"capsule": CAPSULES, "versioned": CAPSULES | VERSIONED, "table": {}}
    return LIES | extra[route]


def fp8(name: str, route: str) -> None:
    claim = Claim((1, 256, 128), dtype=BYTES[name])
    scales = np.ones((1, 2, 1), np.float32), np.ones((1, 1, 1), np.float32)
    w2 = ROUTES["versioned"](replace(claim, shape=(1, 128, 128), dtype=(10, 8, 1)))
    oxmoe.ExpertWeights.fp8_block(ROUTES[route](claim), w2, *scales)


def broken_table(name: str) -> None:
    """Hands over, as router_logits, an object whose type has a table that is not what the type says."""
    claim = Claim((4, 16))

    @ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(Tensor))
    def fails(_: int, out: Any) -> int:
        return -1

    @ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(Tensor))
    def writes_nothing(_: int, out: Any) -> int:
        return 0

    KEPT.extend([fails, writes_nothing])
    if name in CIRCLES:
        made = table_type(claim, major=2)
        table = next(kept for kept in reversed(KEPT) if isinstance(kept, Table))
        table.previous = ctypes.addressof(table)
    elif name == "a table at an odd address":
        made = table_type(claim)
        table = next(kept for kept in reversed(KEPT) if isinstance(kept, Table))
        at = moved(table, ctypes.sizeof(table))
        made.__dlpack_c_exchange_api__ = api.PyCapsule_New(at, b"dlpack_exchange_api", None)  # type: ignore[attr-defined]
    elif name == "a function that writes nothing":
        made = table_type(claim, tensor_from_object=ctypes.cast(writes_nothing, ctypes.c_void_p).value)
    elif name == "no functions":
        made = table_type(claim, tensor_from_object=None, managed_from_object=None)
    elif name == "a function that fails without an error":
        made = table_type(
            claim,
            tensor_from_object=ctypes.cast(fails, ctypes.c_void_p).value,
            managed_from_object=ctypes.cast(fails, ctypes.c_void_p).value,
        )
    else:
        made = table_type(claim)
        wrong = {"no capsule": 7, "None": None, "another capsule": capsule(claim, True)}
        made.__dlpack_c_exchange_api__ = wrong[name]  # type: ignore[attr-defined]
    oxmoe.topk(made(claim, True), 2)


def interface(name: str) -> None:
    """Array interfaces with another number of strides than sizes, as router_logits."""
    oxmoe.topk(Described(Claim((4, 16), strides=INTERFACES[name]), True), 2)


INTERFACES: dict[str, tuple[int, ...] | None] = {
    "no stride": (),
    "one stride": (16,),
    "three strides": (16, 1, 1),
    "many strides": (1,) * 100,
}
CIRCLES = ["a table behind itself"]
TABLES = [*CIRCLES, "a table at an odd address", "a function that writes nothing"]
TABLES += ["no functions", "a function that fails without an error", "no capsule", "None", "another capsule"]


def calls(use: str, route: str) -> dict[str, Callable[[], None]]:
    if use == "fp8":
        return {name: (lambda name=name: fp8(name, route)) for name in BYTES}  # type: ignore[misc]
    if use == "tables":
        return {name: (lambda name=name: broken_table(name)) for name in TABLES}  # type: ignore[misc]
    if use == "interfaces":
        return {name: (lambda name=name: interface(name)) for name in INTERFACES}  # type: ignore[misc]
    _, shape, call = USES[use]
    return {
        name: (lambda make=make: call(ROUTES[route](make(shape))))  # type: ignore[misc]
        for name, make in (HONEST | lies(route)).items()
    }


def main(use: str, route: str, only: list[str]) -> None:
    for name, call in calls(use, route).items():
        if only and name not in only:
            continue
        print(json.dumps([name]), flush=True)
        MADE.clear()
        DELETED.clear()
        kind, text = "nothing", ""
        try:
            call()
        except BaseException as error:
            kind, text = type(error).__name__, str(error)
            error.__traceback__ = None
            del error
        print(json.dumps([name, kind, text, len(MADE) - len(DELETED)]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
    # Capsules that are still kept have destructors of an interpreter that is ending.
    os._exit(0)
