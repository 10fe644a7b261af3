"""In the server's process: what a model holds of each tensor that its loader was given, as digests.

SGLang fuses, splits and shards tensors, each model in its own way, so what it holds has other names and shapes than
what was sent. Its loaders end in ``parameter.copy_(part of the tensor)``. While one runs, those copies are noted: which
elements of which tensor went to which memory. A digest is then taken of that memory, whatever has happened to it since,
with each element's place in the tensor as it was sent (``tensor_digest``).

For the unquantized models of SGLang 0.5.23, through its own hooks. A tensor that a loader casts, moves or combines
with others before it copies, or copies in another thread, is not noted: it counts as not held. So do parameters that
are replaced after loading.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import torch
from torch import Tensor, UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef

from miles_async.engines.names import HELD_WEIGHTS_ACTION
from miles_async.tensor_digest import BLOCK, MULTIPLIERS, to_text
from miles_async.types import HeldPart

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PART = 64 * BLOCK  # elements at a time: 8 bytes each for their place and their product


@dataclass(frozen=True, slots=True)
class _Noted:
    """Some elements of a tensor, and the memory they were copied to. It keeps no memory alive: a quantization replaces
    what was loaded, to have room.
    """

    storage: StorageWeakRef
    dtype: torch.dtype
    layout: tuple[int, tuple[int, ...], tuple[int, ...]]  # of the memory in its storage: offset, shape, strides
    offset: int  # place of the first element
    strides: tuple[int, ...]  # from place to place, by dimension of the memory

    def held(self, live: Mapping[int, UntypedStorage]) -> HeldPart | None:
        """What the memory holds now; None if it is in none of the ``live`` storages, which are named by ``_cdata``."""
        storage = live.get(self.storage.cdata)
        if storage is None or storage.nbytes() < self._end():
            return None
        memory = torch.empty(0, dtype=self.dtype, device=storage.device).set_(storage, *self.layout)
        return HeldPart(
            offset=self.offset,
            shape=tuple(memory.shape),
            strides=self.strides,
            dtype=str(memory.dtype).removeprefix("torch."),
            digest=region_digest(memory, self.offset, self.strides),
        )

    def _end(self) -> int:
        """Bytes that a storage with this memory has at least."""
        first, shape, strides = self.layout
        last = first + sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))
        return (last + 1) * self.dtype.itemsize


class HeldWeights:
    """What one model holds."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._noted: dict[str, list[_Noted]] = {}
        self._name = ""
        self._tensor: Tensor | None = None  # that the loader has at the moment
        model.load_weights = partial(self._load, model.load_weights)  # type: ignore[assignment,arg-type]

    def digests(self) -> dict[str, str]:
        """Name of each tensor that was ever loaded → JSON list of HeldPart."""
        storages = [memory.untyped_storage() for memory in _memory_of(self._model)]
        live = {storage._cdata: storage for storage in storages}
        held = {name: [part.held(live) for part in parts] for name, parts in self._noted.items()}
        encoder = msgspec.json.Encoder()
        return {
            name: encoder.encode([part for part in parts if part is not None]).decode() for name, parts in held.items()
        }

    def _load(self, load: Callable[..., Any], weights: Iterable[tuple[str, Tensor]], *args: Any, **kwargs: Any) -> Any:
        with _after_copies(self._note):
            result = load(self._announced(weights), *args, **kwargs)
        self._tensor = None
        return result

    def _announced(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            self._name, self._tensor = name, tensor
            self._noted[name] = []
            yield name, tensor

    def _note(self, memory: Tensor, source: Tensor) -> None:
        whole = self._tensor
        if whole is None or not whole.is_contiguous() or source.dtype != whole.dtype or source.shape != memory.shape:
            return
        offset = source.data_ptr() - whole.data_ptr()
        if source.device == whole.device and 0 <= offset < max(whole.nbytes, 1):
            storage = StorageWeakRef(memory.untyped_storage())
            layout = memory.storage_offset(), tuple(memory.shape), memory.stride()
            noted = _Noted(storage, memory.dtype, layout, offset // whole.itemsize, source.stride())
            self._noted[self._name].append(noted)


def register() -> None:
    """Adds the action HELD_WEIGHTS_ACTION to the weights checker of every model that is made from now on."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.model_loader.loader._initialize_model", _follow, HookType.AFTER)
    HookRegistry.register("sglang.srt.utils.weight_checker.WeightChecker.handle", _answer, HookType.AROUND)


def region_digest(memory: Tensor, offset: int, strides: tuple[int, ...]) -> str:
    """``memory``'s share of the digest of a tensor, of which it holds the elements at offset + Σ index · stride."""
    if memory.ndim == 0:
        memory, strides = memory.reshape(1), (1,)
    table = torch.from_numpy(MULTIPLIERS).to(memory.device)
    rows = max(1, _PART // max(1, memory[:1].numel()))
    total = torch.zeros((), dtype=torch.int64, device=memory.device)
    for first in range(0, len(memory), rows):
        values = memory[first : first + rows].contiguous().view(_INTEGERS[memory.itemsize])
        places = torch.full((), offset + first * strides[0], dtype=torch.int64, device=memory.device)
        for dimension, (length, stride) in enumerate(zip(values.shape, strides, strict=True)):
            along = torch.arange(length, device=memory.device) * stride
            places = places + along.reshape(-1, *[1] * (values.ndim - 1 - dimension))
        total += (values * table[places % BLOCK] * (2 * (places // BLOCK) + 1)).sum()
    return to_text(int(total))


def _follow(model: Any, *args: Any, **kwargs: Any) -> None:
    model.held_weights = HeldWeights(model)


def _answer(handle: Callable[..., Any], checker: Any, action: str, *args: Any, role: str, **kwargs: Any) -> Any:
    if action != HELD_WEIGHTS_ACTION:
        return handle(checker, action, *args, role=role, **kwargs)
    return {
        "checksums": checker._get_model().held_weights.digests(),
        "per_gpu_checksum": "",  # SGLang fills it in
        "parallelism_info": checker._parallelism_info(role=role).model_dump(),
    }


def _memory_of(model: torch.nn.Module) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()


@contextmanager
def _after_copies(note: Callable[[Tensor, Tensor], None]) -> Iterator[None]:
    """Call ``note(destination, source)`` after every ``destination.copy_(source)``."""
    copy = Tensor.copy_

    def noting(destination: Tensor, source: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        result = copy(destination, source, *args, **kwargs)
        note(destination, source)
        return result

    Tensor.copy_ = noting  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        Tensor.copy_ = copy  # type: ignore[method-assign]
