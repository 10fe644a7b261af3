"""Host memory for one copy of the weights that a rank sends, used again for every version.

Copying is all that training waits for. On a GPU the copies run on a separate stream and overlap the export and the next
step: they are made from duplicates on the GPU, which the next step cannot change. The thread that reads the memory
waits for an event; training's stream waits only when duplicates fill a chunk.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_ALIGNMENT = 64  # bytes: a cache line, and a multiple of every dtype's size


class Slab:
    """Memory in chunks, each filled from its start. Not thread-safe; callers must serialize."""

    def __init__(self, chunk_bytes: int) -> None:
        self._chunk_bytes = chunk_bytes
        self._chunks: list[Tensor] = []
        self._current = 0  # the chunk that is being filled
        self._used = 0  # bytes of it
        self._gpu: _GpuCopies | None = None

    def clear(self) -> None:
        """Start over: copies made so far are overwritten."""
        self._current = self._used = 0
        if self._gpu is not None:
            self._gpu.drop_duplicates()

    def copy(self, tensor: Tensor) -> Tensor:
        """A contiguous copy of the same dtype and shape, valid until :meth:`clear`; complete once :meth:`copied` says
        so.
        """
        tensor = tensor.detach()
        place = self._place(tensor.nbytes, pinned=tensor.is_cuda).view(tensor.dtype).view(tensor.shape)
        if not tensor.is_cuda:
            return place.copy_(tensor)
        self._gpu = self._gpu or _GpuCopies(tensor.device)
        self._gpu.start(place, tensor)
        return place

    def copied(self) -> Callable[[], None]:
        """A function for any thread that waits until all copies made so far are complete."""
        return (lambda: None) if self._gpu is None else self._gpu.made_so_far()

    def _place(self, size: int, *, pinned: bool) -> Tensor:
        start = _ALIGNMENT * -(-self._used // _ALIGNMENT)
        while self._current < len(self._chunks) and start + size > len(self._chunks[self._current]):
            self._current, start = self._current + 1, 0
            if self._gpu is not None:
                self._gpu.drop_duplicates()
        if self._current == len(self._chunks):
            self._chunks.append(_memory(max(size, self._chunk_bytes), pinned=pinned))
        self._used = start + size
        return self._chunks[self._current][start : self._used]


class _GpuCopies:
    """Copies from a GPU to pinned memory on a separate stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._duplicates: list[Tensor] = []  # being copied: their memory must not be reused

    def start(self, place: Tensor, tensor: Tensor) -> None:
        duplicate = tensor.clone(memory_format=torch.contiguous_format)  # on training's stream, as are all but copies
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            place.copy_(duplicate, non_blocking=True)
        self._duplicates.append(duplicate)

    def drop_duplicates(self) -> None:
        """Let training's stream wait for the copies made so far; it may use the memory of their duplicates then."""
        torch.cuda.current_stream(self._device).wait_event(self._stream.record_event())
        self._duplicates.clear()

    def made_so_far(self) -> Callable[[], None]:
        """Return what waits for these copies on the host. No copy may be started meanwhile."""
        event = self._stream.record_event()

        def wait() -> None:
            event.synchronize()
            self._duplicates.clear()

        return wait


def _memory(size: int, *, pinned: bool) -> Tensor:
    """Pinned memory takes copies from a GPU in a fraction of the time."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
