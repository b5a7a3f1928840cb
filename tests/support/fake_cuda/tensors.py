"""CUDA tensors without CUDA: shapes and made-up addresses, published through DLPack's C exchange table like torch's.

The module runs in a process of its own, with the stand-in driver on LD_LIBRARY_PATH and without torch.
"""

from __future__ import annotations

import ctypes
import math
import sys
import types

STREAM = 0x1234

DTYPES = {
    "float32": (2, 32),
    "float16": (2, 16),
    "bfloat16": (4, 16),
    "int32": (0, 32),
    "int64": (0, 64),
    "uint8": (1, 8),
    "float8_e4m3fn": (10, 8),
}


class _DLTensor(ctypes.Structure):
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


_TensorFromObject = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(_DLTensor))
_CurrentStream = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_int32, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p))


class _ExchangeApi(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("previous", ctypes.c_void_p),
        ("allocate", ctypes.c_void_p),
        ("managed_from_object", ctypes.c_void_p),
        ("managed_to_object", ctypes.c_void_p),
        ("tensor_from_object", _TensorFromObject),
        ("current_stream", _CurrentStream),
    ]


@_TensorFromObject
def _tensor_from_object(tensor, out):
    tensor.fill(out.contents)
    return 0


@_CurrentStream
def _current_stream(device_type, device, out):
    out[0] = STREAM
    return 0


_TABLE = _ExchangeApi(1, 3, None, None, None, None, _tensor_from_object, _current_stream)
_NAME = b"dlpack_exchange_api"
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


class Storage:
    """Memory that nothing lives at, and a record of it whose words are where torch's StorageImpl has its own."""

    def __init__(self, size, address=0x6F00_0000_0000):
        self._words = (ctypes.c_uint64 * 8)()
        self._cdata = ctypes.addressof(self._words)
        self._words[2], self._words[6] = address, size

    def __len__(self):
        return self._words[6]

    def data_ptr(self):
        return self._words[2]

    def resize_(self, size):
        self._words[2], self._words[6] = self._words[2] + 4096 if size else 0, size


class Tensor:
    """A contiguous tensor on cuda:`device` at an address that nothing lives at. Addresses never overlap."""

    __dlpack_c_exchange_api__ = _new_capsule(ctypes.addressof(_TABLE), _NAME, None)
    requires_grad = False
    is_cuda = True
    _end = 0x7F00_0000_0000

    def __init__(self, shape, dtype="bfloat16", device=0):
        bits = DTYPES[dtype][1]
        strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        self.shape, self.dtype, self.device = tuple(shape), dtype, device
        self.address = Tensor._end
        Tensor._end += -(-max(math.prod(shape) * bits // 8, 1) // 256) * 256
        self._shape, self._strides = ((ctypes.c_int64 * max(len(shape), 1))(*sizes) for sizes in (shape, strides))

    def part(self, shape):
        """Returns a tensor at the same address."""
        made = Tensor(shape, self.dtype, self.device)
        made.address = self.address
        return made

    def reshape(self, shape):
        return self.part(shape)

    def expand(self, shape):
        return self.part(shape)

    def min(self):
        """Returns the least number. The extension looks at zero points when they are given."""
        made = Tensor((), self.dtype, self.device)
        made.value = 8
        return made

    max = min

    def new_ones(self, shape):
        return Tensor(shape, self.dtype, self.device)

    def new_zeros(self, shape):
        return Tensor(shape, self.dtype, self.device)

    def view(self, shape):
        return self.part(shape)

    def narrow(self, dimension, start, length):
        return self

    def contiguous(self):
        return Tensor(self.shape, self.dtype, self.device)

    def swapaxes(self, first, second):
        made = self.part(self.shape)
        made.shape = list(made.shape)
        for sizes in (made.shape, made._shape, made._strides):
            sizes[first], sizes[second] = sizes[second], sizes[first]
        return made

    def fill(self, out):
        out.data = self.address if math.prod(self.shape) else None
        out.device_type, out.device_id, out.ndim = 2, self.device, len(self.shape)
        out.code, out.bits, out.lanes = (*DTYPES[self.dtype], 1)
        out.shape, out.strides, out.byte_offset = self._shape, self._strides, 0

    def is_neg(self):
        return False

    def untyped_storage(self):
        return Storage(math.prod(self.shape) * DTYPES[self.dtype][1] // 8, self.address)

    def zero_(self):
        return self

    def fill_(self, value):
        self.value = value
        return self

    def copy_(self, other):
        return self

    def item(self):
        return self.value


def install_torch() -> None:
    """Installs what the extension needs of torch to make a tensor: `empty` and the dtypes."""
    torch = types.ModuleType("torch")
    torch.UntypedStorage, torch.Tensor = Storage, Tensor
    torch.empty = lambda shape, dtype, device: Tensor(shape, dtype, device)
    vars(torch).update({name: name for name in DTYPES})
    sys.modules["torch"] = torch
