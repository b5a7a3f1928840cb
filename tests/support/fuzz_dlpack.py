"""Objects with `__dlpack__` of another package: honest ones, and capsules with fields that no importer may believe."""

from __future__ import annotations

import ctypes
import random
from typing import Any

import numpy as np


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Managed(ctypes.Structure):
    _fields_ = [("tensor", _Tensor), ("manager", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class _ManagedVersioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    ]


_CODES = {"i": 0, "u": 1, "f": 2, "b": 6, "c": 5}
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


class Foreign:
    """A host array of another package than numpy and torch."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


class Lying:
    """An array of another package with one field changed. Memory that the fields name is this array's, so a reader that
    believes a right size reads right numbers; sizes only lie if they cannot be true."""

    def __init__(self, array: np.ndarray, rng: random.Random) -> None:
        self.array, self.keep = np.ascontiguousarray(array), []
        self.lie = rng.choice(sorted(LIES))
        self.versioned = rng.random() < 0.5

    @property
    def seen(self) -> np.ndarray:
        """Returns what a reader that believes the fields finds. For bytes every address is aligned: that lie is a
        truth."""
        array = self.array
        if self.lie != "unaligned" or array.itemsize > 1 or array.ndim == 0:
            return array
        shape = (max(array.shape[0] - 1, 0), *array.shape[1:])
        return np.ndarray(shape, array.dtype, array, offset=1) if array.size else array[:0].reshape(shape)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)

    def __dlpack__(self, **options: Any) -> Any:
        managed = _ManagedVersioned(major=1) if self.versioned else _Managed()
        tensor, array = managed.tensor, self.array
        shape = (ctypes.c_int64 * max(array.ndim, 1))(*array.shape)
        tensor.data = array.ctypes.data
        tensor.device_type, tensor.ndim = 1, array.ndim
        tensor.code, tensor.bits, tensor.lanes = _CODES[array.dtype.kind], 8 * array.dtype.itemsize, 1
        tensor.shape = ctypes.cast(shape, ctypes.POINTER(ctypes.c_int64))
        name = b"dltensor_versioned" if self.versioned else b"dltensor"
        name = LIES[self.lie](managed, tensor, shape) or name
        self.keep += [managed, shape, name]
        return _new_capsule(ctypes.addressof(managed), name, None)


def _negative(managed: Any, tensor: Any, shape: Any) -> None:
    shape[0] = -1 - abs(shape[0])


def _huge(managed: Any, tensor: Any, shape: Any) -> None:
    shape[0] = 2**62


def _no_data(managed: Any, tensor: Any, shape: Any) -> None:
    tensor.data = None
    shape[0] = max(shape[0], 1)


def _no_shape(managed: Any, tensor: Any, shape: Any) -> None:
    tensor.shape = None
    tensor.ndim = max(tensor.ndim, 1)


def _negative_dimensions(managed: Any, tensor: Any, shape: Any) -> None:
    tensor.ndim = -1


def _many_dimensions(managed: Any, tensor: Any, shape: Any) -> None:
    tensor.ndim = 2**31 - 1


def _lanes(managed: Any, tensor: Any, shape: Any) -> None:
    tensor.lanes = 4


def _no_lanes(managed: Any, tensor: Any, shape: Any) -> None:
    tensor.lanes = 0


def _no_bits(managed: Any, tensor: Any, shape: Any) -> None:
    tensor.bits = 0


def _code(managed: Any, tensor: Any, shape: Any) -> None:
    tensor.code = 200


def _device(managed: Any, tensor: Any, shape: Any) -> None:
    tensor.device_type = 77


def _other_version(managed: Any, tensor: Any, shape: Any) -> bytes | None:
    if isinstance(managed, _ManagedVersioned):
        managed.major = 9
        return None
    return b"used_dltensor"


def _used(managed: Any, tensor: Any, shape: Any) -> bytes:
    return b"used_dltensor"


def _unaligned(managed: Any, tensor: Any, shape: Any) -> None:
    # The read stays within the array: it ends before the array does.
    tensor.data += 1
    if tensor.ndim:
        shape[0] = max(shape[0] - 1, 0)


LIES = {
    "shape -n": _negative,
    "shape 2^62": _huge,
    "no data": _no_data,
    "no shape": _no_shape,
    "ndim -1": _negative_dimensions,
    "ndim 2^31 - 1": _many_dimensions,
    "4 lanes": _lanes,
    "0 lanes": _no_lanes,
    "0 bits": _no_bits,
    "type code 200": _code,
    "device type 77": _device,
    "version 9": _other_version,
    "used": _used,
    "unaligned": _unaligned,
}
