"""Watch a weight loader: which memory each given tensor ends in.

Loaders fuse, split and shard tensors, each in its own way; all end in ``parameter.copy_(a part of a tensor)``, or in
``parameter[a part] = a part of a tensor``. While one runs, those copies are noted: which elements of which tensor went
to which memory. Tensors that are joined with ``torch.cat`` before they are copied are followed; tensors that are cast,
moved or computed with are not.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef


@dataclass(frozen=True, slots=True)
class Origin:
    """Elements of a tensor that was given to a loader: offset + Σ index · stride, counted row by row."""

    name: str
    offset: int
    strides: tuple[int, ...]
    row_length: int  # of the tensor: elements of its last dimension


@dataclass(frozen=True, slots=True)
class Copied:
    """Elements of a tensor and the memory they were copied to. It keeps no memory alive: a quantization replaces what
    was loaded, to have room.
    """

    origin: Origin
    storage: StorageWeakRef
    dtype: torch.dtype
    layout: tuple[int, tuple[int, ...], tuple[int, ...]]  # of the memory in its storage: offset, shape, strides

    def memory(self, live: Mapping[int, UntypedStorage]) -> Tensor | None:
        """The memory as it is now; None if it is in none of the ``live`` storages, which are named by ``_cdata``."""
        storage = live.get(self.storage.cdata)
        if storage is None or storage.nbytes() < self._end():
            return None
        return torch.empty(0, dtype=self.dtype, device=storage.device).set_(storage, *self.layout)

    def _end(self) -> int:
        """Bytes that a storage with this memory has at least."""
        first, shape, strides = self.layout
        last = first + sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))
        return (last + 1) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class _Given:
    """A tensor that a loader has, as addresses."""

    name: str
    first: int
    end: int
    row_length: int
    storage: StorageWeakRef  # nothing else is called like it while this exists


@dataclass(frozen=True, slots=True)
class _Joined:
    """Result of ``torch.cat`` over parts of tensors."""

    result: weakref.ref[Tensor]
    dimension: int
    parts: tuple[tuple[int, Origin], ...]  # length along the dimension, and what it is


class LoaderWatch:
    """Notes where tensors go. ``copies``: made by each tensor's latest load."""

    def __init__(self) -> None:
        self.copies: dict[str, list[Copied]] = {}
        self._given: defaultdict[int, list[_Given]] = defaultdict(list)  # by storage
        self._joined: dict[int, _Joined] = {}  # by address

    def load(self, load: Callable[..., Any], weights: Iterable[tuple[str, Tensor]], *args: Any, **kwargs: Any) -> Any:
        """``load(weights, ...)``, watched."""
        try:
            with (
                _after(Tensor, "copy_", self._copied),
                _after(Tensor, "__setitem__", self._assigned),
                _after(torch, "cat", self._concatenated),
            ):
                return load(self._announced(weights), *args, **kwargs)
        finally:
            self._given.clear()
            self._joined.clear()

    def _announced(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            self.copies[name] = []
            if tensor.is_contiguous() and tensor.numel():
                first, storage = tensor.data_ptr(), tensor.untyped_storage()
                row_length = tensor.shape[-1] if tensor.ndim else 1
                given = _Given(name, first, first + tensor.nbytes, row_length, StorageWeakRef(storage))
                self._given[storage._cdata].append(given)
            yield name, tensor

    def _origin(self, source: Tensor) -> Origin | None:
        for given in reversed(self._given.get(source.untyped_storage()._cdata, ())):
            if given.first <= source.data_ptr() < given.end:
                offset = (source.data_ptr() - given.first) // source.itemsize
                return Origin(given.name, offset, source.stride(), given.row_length)
        return None

    def _copied(self, _: Tensor, memory: Tensor, source: Tensor, *args: Any, **kwargs: Any) -> None:
        if source.shape != memory.shape:
            return
        joined = self._joined.get(source.data_ptr())
        if joined is not None and (whole := joined.result()) is not None and whole.shape == source.shape:
            start = 0
            for length, origin in joined.parts:
                self._note(memory.narrow(joined.dimension, start, length), origin)
                start += length
        elif (found := self._origin(source)) is not None:
            self._note(memory, found)

    def _assigned(self, _: None, whole: Tensor, index: Any, source: Any) -> None:
        if not isinstance(source, Tensor):
            return
        memory = whole[index]
        if memory.untyped_storage()._cdata == whole.untyped_storage()._cdata:  # not chosen by a mask or by numbers
            self._copied(memory, memory, source)

    def _note(self, memory: Tensor, origin: Origin) -> None:
        layout = memory.storage_offset(), tuple(memory.shape), memory.stride()
        storage = StorageWeakRef(memory.untyped_storage())
        self.copies[origin.name].append(Copied(origin, storage, memory.dtype, layout))

    def _concatenated(self, result: Tensor, tensors: Iterable[Tensor], dim: int = 0, **_: Any) -> None:
        parts = [(tensor.shape[dim], self._origin(tensor)) for tensor in tensors if tensor.ndim]
        known = tuple((length, origin) for length, origin in parts if origin is not None)
        if known and len(known) == len(parts):
            self._joined[result.data_ptr()] = _Joined(weakref.ref(result), dim, known)


@contextmanager
def _after(owner: Any, name: str, note: Callable[..., None]) -> Iterator[None]:
    """Call ``note(result, *arguments)`` after every call of this function."""
    function = getattr(owner, name)

    def noting(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        note(result, *args, **kwargs)
        return result

    setattr(owner, name, noting)
    try:
        yield
    finally:
        setattr(owner, name, function)
