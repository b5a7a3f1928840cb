"""Keeps ExpertWeights that were made from other kernels' weight tensors, for as long as those tensors live."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

# _Made is ExpertWeights, or a class of objects that hold them.
_Made = TypeVar("_Made")


def number(value: Tensor | float | None) -> Tensor | float | None:
    """Returns the number that all experts share, which kernels read faster, or the tensor if they share none."""
    if value is None or isinstance(value, int | float) or value.numel() == 0:
        return value
    numbers = value.tolist()
    return numbers[0] if value.dim() == 1 and all(other == numbers[0] for other in numbers) else value


class _Entry(NamedTuple):
    versions: tuple[int | None, ...]
    # While a weak reference to a storage exists, no other storage gets its address.
    storages: list[Any]
    owners: list[Any]
    weights: Any


class Cache:
    """Finds ExpertWeights by the tensors that they were made of.

    A tensor is known by its storage, address, shape, strides, dtype and torch's version counter. The reference to
    the storage is weak, so the cache keeps no weights of the caller alive. Other views of the same memory find their
    entry. Writing to a tensor, or a new tensor at its address, makes new ExpertWeights. Entries whose weights were
    freed are dropped when the next entry is made. NOTE: writes through `tensor.data` do not count versions; after
    them, call `clear`.
    """

    def __init__(self) -> None:
        self._entries: dict[Hashable, _Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def clear(self) -> None:
        self._entries.clear()

    def get(
        self,
        owners: Sequence[Tensor],
        others: Sequence[Tensor | None],
        options: tuple[Hashable, ...],
        make: Callable[[], _Made],
    ) -> _Made:
        """Returns what `make` made of these tensors and options. owners: weights and scales, of which the result
        holds copies."""
        tensors = [*owners, *others]
        identity: list[Hashable] = []
        versions: list[int | None] = []
        for tensor in tensors:
            if tensor is None:
                identity.append(None)
                versions.append(None)
                continue
            if tensor.is_inference():
                raise ValueError(
                    "weights: tensors made in inference mode count no versions, so a change of them would go unseen; "
                    "prepare the weights once and pass weights="
                )
            storage = tensor.untyped_storage()._cdata
            identity.append((storage, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device))
            versions.append(tensor._version)
        key = (*identity, *options)
        entry = self._entries.get(key)
        if entry is not None and entry.versions == tuple(versions):
            kept: _Made = entry.weights
            return kept
        return self._make(key, tuple(versions), owners, others, make)

    def _make(
        self,
        key: Hashable,
        versions: tuple[int | None, ...],
        owners: Sequence[Tensor],
        others: Sequence[Tensor | None],
        make: Callable[[], _Made],
    ) -> _Made:
        import torch
        from torch.multiprocessing.reductions import StorageWeakRef

        if owners[0].is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "weights: made at the first call with them, which a CUDA graph cannot capture; call once before, or "
                "prepare the weights and pass weights="
            )
        # Another thread may add an entry meanwhile, so a copy is looked through.
        entries = self._entries.copy()
        gone = [old for old, entry in entries.items() if any(owner.expired() for owner in entry.owners)]
        for old in [*gone, key]:
            self._entries.pop(old, None)

        def weak(tensors: Sequence[Tensor | None]) -> list[Any]:
            return [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors if tensor is not None]

        made = make()
        self._entries[key] = _Entry(versions, weak(others), weak(owners), made)
        return made
