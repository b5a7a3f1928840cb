"""Calls on a GPU with ids that the stand-in driver can read."""

from __future__ import annotations

import ctypes

from recording import attempt, records
from tensors import Tensor

import oxmoe._oxmoe as oxmoe


def _ids(rows: list[list[int]], dtype: str):
    """Returns (a tensor whose address is that of these numbers, the object that keeps them)."""
    tensor = Tensor((len(rows), len(rows[0])), dtype)
    kind = ctypes.c_int64 if dtype == "int64" else ctypes.c_int32
    kept = (kind * (len(rows) * len(rows[0])))(*(number for row in rows for number in row))
    tensor.address = ctypes.addressof(kept)
    return tensor, kept


def ids_on_a_gpu(rows, dtype, experts, first_expert=None):
    """Returns what sort_by_expert raises, and what it asked of the driver about the ids."""
    ids, _kept = _ids(rows, dtype)
    records()
    error = attempt(oxmoe.sort_by_expert, ids, experts, first_expert=first_expert)
    reads = ("cuStreamIsCapturing", "cuMemcpyDtoHAsync", "cuStreamSynchronize")
    return {"error": error, "reads": [each["call"] for each in records() if each["call"] in reads]}
